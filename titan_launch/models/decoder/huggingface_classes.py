"""The classes of `transformers` that this package's models implement. This module does not import torch.

`FAMILIES` has an entry for each class. The entry lists every key of the class's `config.json` that changes the
computation. If a value is not supported, an error names the key.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from titan_launch.models.decoder.huggingface_features import (
    EXPERTS_OF_DEEPSEEK,
    EXPERTS_OF_GPT_OSS,
    EXPERTS_OF_MIXTRAL,
    EXPERTS_OF_QWEN3_MOE,
    HEADS_OF_GPT2,
    KEY_VALUE_HEADS,
    LATENT_ATTENTION,
    OPTIONAL_KEY_VALUE_HEADS,
    QUERY_SCALE,
    ROPES_OF_GEMMA3,
    WIDTH_OF_GPT2,
    WINDOWS_OF_QWEN,
    WINDOWS_OF_QWEN3_MOE,
    Feature,
    activation,
    head_dim,
    rope,
    same,
    windows_by_pattern,
)


@dataclass(frozen=True)
class Family:
    """A class of `transformers`, and the model of this package that implements it."""

    name: str
    """Name of the model in `[model]`."""

    model_class: str
    """Name of the class in `transformers`."""

    features: tuple[Feature, ...]
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Arguments that are the same for every `config.json` of the class."""

    neutral: Mapping[str, Any] = field(default_factory=dict)
    """Keys, in addition to those of `NEUTRAL`, with the only supported value of each. This value is also the class's
    default."""

    unused: Mapping[str, str] = field(default_factory=dict)
    """Keys, in addition to those of `WITHOUT_EFFECT`, that have no effect in this package, each with the reason."""

    aliases: Mapping[str, str] = field(default_factory=dict)
    """The key that each alias stands for, by alias, as in the class's `attribute_map`."""

    pad_token: int | None = None
    """The class's default of `pad_token_id`."""

    classifier: str = ""
    """Name of the class in `transformers` for classifiers and reward models; "" if `class_of` can derive the name."""

    pads: bool = True
    """True if the class gives the embedding's row of `pad_token_id` no gradient."""

    def class_of(self, num_labels: int | None) -> str:
        """Return the name of the class in `transformers`. `num_labels`: None for a language model."""
        if num_labels is None:
            return self.model_class
        return self.classifier or re.sub("ForCausalLM|LMHeadModel", "ForSequenceClassification", self.model_class)

    @property
    def known_keys(self) -> frozenset[str]:
        """All keys of `config.json` that are known for this class: in its own table, or in the tables for all
        classes."""
        of_features = (key for feature in self.features for key in feature.keys)
        tables = (self.neutral, self.unused, self.aliases, NEUTRAL, WITHOUT_EFFECT, REFUSED)
        return frozenset((*of_features, *(key for table in tables for key in table)))


_SIZES_WITHOUT_HEADS = (
    same("hidden_size", "dim"),
    same("num_hidden_layers", "n_layers"),
    same("num_attention_heads", "n_heads"),
    same("vocab_size", "vocab_size"),
)
_WIDTH, _EPS_6, _EPS_5 = (
    same("intermediate_size", "hidden_dim"),
    same("rms_norm_eps", "norm_eps", 1e-6),
    same("rms_norm_eps", "norm_eps", 1e-5),
)
_SIZES_OF_EXPERTS = (*_SIZES_WITHOUT_HEADS, KEY_VALUE_HEADS)
_SIZES = (*_SIZES_OF_EXPERTS, _WIDTH, _EPS_6)
_SIZES_OF_LLAMA = (*_SIZES_WITHOUT_HEADS, OPTIONAL_KEY_VALUE_HEADS, _WIDTH)
_UNTIED, _TIED = (same("tie_word_embeddings", "tie_embeddings", tied) for tied in (False, True))
_SILU = activation("hidden_act", "silu")
_ROPE, _BIASES = rope(), ("qkv_bias", "attention_output_bias")
_ATTENTION_BIAS = same("attention_bias", _BIASES, False)
_GEMMA = (
    *_SIZES,
    head_dim(256, must_divide=True),
    activation("hidden_activation", "gelu_pytorch_tanh"),
    _ATTENTION_BIAS,
    QUERY_SCALE,
    _TIED,
)
_FIXED_OF_GEMMA = {"gated": True, "norm_unit_offset": True, "post_norms": True, "scale_embeddings": True}
_AUXILIARY = dict.fromkeys(
    ("router_aux_loss_coef", "output_router_logits", "aux_loss_alpha", "seq_aux"),
    "auxiliary losses of experts are arguments of the job",
)
_EXPERTS = {"num_experts": "num_local_experts"}
_YARN_OF_GPT_OSS = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False}
_UNUSED_BY_GEMMA = {
    "hidden_act": "the class reads hidden_activation",
    "sliding_window_size": "the class reads sliding_window",
}

FAMILIES: dict[str, Family] = {
    "llama": Family(
        "llama3",
        "LlamaForCausalLM",
        (
            *(*_SIZES_OF_LLAMA, _EPS_6, head_dim(may_be_null=True, must_divide=True), _SILU, _ROPE, _UNTIED),
            *(_ATTENTION_BIAS, same("mlp_bias", "feed_forward_bias", False)),
        ),
        neutral={"pretraining_tp": 1, "rope_interleaved": False},
        unused={"is_llama_config": "a mark of the SmolLM files"},
    ),
    "qwen2": Family(
        "qwen2",
        "Qwen2ForCausalLM",
        (*_SIZES, head_dim(), _SILU, _ROPE, _UNTIED, WINDOWS_OF_QWEN),
        fixed={"qkv_bias": True},
        neutral={"use_mrope": False},
    ),
    "qwen3": Family(
        "qwen3",
        "Qwen3ForCausalLM",
        (*_SIZES, head_dim(128), _SILU, _ROPE, _UNTIED, _ATTENTION_BIAS, WINDOWS_OF_QWEN),
        fixed={"qk_norm": True},
    ),
    "qwen3_moe": Family(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        (*_SIZES, head_dim(), _SILU, _ROPE, _UNTIED, _ATTENTION_BIAS, WINDOWS_OF_QWEN3_MOE, EXPERTS_OF_QWEN3_MOE),
        fixed={"qk_norm": True},
        neutral={"decoder_sparse_step": 1},
        unused=_AUXILIARY,
        aliases=_EXPERTS,
    ),
    "mistral": Family(
        "mistral",
        "MistralForCausalLM",
        (*_SIZES, head_dim(may_be_null=True), _SILU, _ROPE, _UNTIED, same("sliding_window", "sliding_window", 4096)),
    ),
    "mixtral": Family(
        "mixtral",
        "MixtralForCausalLM",
        (
            *(*_SIZES_OF_EXPERTS, _EPS_5, head_dim(may_be_null=True), _SILU, rope(1e6, yarn_needs="head_dim"), _UNTIED),
            *(same("sliding_window", "sliding_window", None), EXPERTS_OF_MIXTRAL),
        ),
        neutral={"router_jitter_noise": 0.0},
        unused=_AUXILIARY,
        aliases=_EXPERTS,
    ),
    "gemma2": Family(
        "gemma2",
        "Gemma2ForCausalLM",
        (
            *_GEMMA,
            same("final_logit_softcapping", "logits_soft_cap", 30.0),
            _ROPE,
            windows_by_pattern(2, 4096),
            same("attn_logit_softcapping", "attention_soft_cap", 50.0),
        ),
        fixed=_FIXED_OF_GEMMA,
        neutral={"use_bidirectional_attention": None},
        unused=_UNUSED_BY_GEMMA,
        pad_token=0,
    ),
    "gemma3_text": Family(
        "gemma3",
        "Gemma3ForCausalLM",
        (
            *_GEMMA,
            ROPES_OF_GEMMA3,
            windows_by_pattern(6, 4096, pattern="sliding_window_pattern"),
            same("final_logit_softcapping", "logits_soft_cap", None),
        ),
        fixed={**_FIXED_OF_GEMMA, "qk_norm": True},
        neutral={"use_bidirectional_attention": False, "attn_logit_softcapping": None},
        unused={
            **_UNUSED_BY_GEMMA,
            "_sliding_window_pattern": "the class writes it beside layer_types, and reads sliding_window_pattern",
        },
        pad_token=0,
        classifier="Gemma3TextForSequenceClassification",
    ),
    "gpt2": Family(
        "gpt2",
        "GPT2LMHeadModel",
        (
            *(same("n_embd", "dim"), same("n_layer", "n_layers"), HEADS_OF_GPT2, WIDTH_OF_GPT2),
            *(same("vocab_size", "vocab_size"), same("n_positions", "max_positions", 1024)),
            *(same("layer_norm_epsilon", "norm_eps", 1e-5), activation("activation_function", "gelu_new"), _TIED),
        ),
        fixed={
            "norm": "layernorm",
            "positions": "learned",
            "gated": False,
            "qkv_bias": True,
            "attention_output_bias": True,
            "feed_forward_bias": True,
        },
        neutral={
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
            "reorder_and_upcast_attn": False,
        },
        unused={
            **dict.fromkeys(
                ("n_ctx", "n_special", "predict_special_tokens", "output_past", "_num_labels"),
                "releases before 4.0 wrote it, and the class does not read it",
            ),
            **dict.fromkeys(
                (f"summary_{name}" for name in ("activation", "first_dropout", "proj_to_labels", "type", "use_proj")),
                "classes with another head read it",
            ),
        },
        aliases={
            "hidden_size": "n_embd",
            "max_position_embeddings": "n_positions",
            "num_attention_heads": "n_head",
            "num_hidden_layers": "n_layer",
        },
        pads=False,
    ),
    "gpt_oss": Family(
        "gpt_oss",
        "GptOssForCausalLM",
        (
            *(*_SIZES_OF_EXPERTS, _EPS_5, head_dim(64), rope(150_000.0, _YARN_OF_GPT_OSS), _UNTIED),
            *(same("attention_bias", _BIASES, True), windows_by_pattern(2, 128), EXPERTS_OF_GPT_OSS),
        ),
        fixed={"attention_sinks": True},
        neutral={"swiglu_alpha": 1.702},
        unused={
            **_AUXILIARY,
            "hidden_act": "the class has one activation",
            "initial_context_length": "rope_scaling has its own length",
            "experts_per_token": "the class reads num_experts_per_tok",
        },
        aliases=_EXPERTS,
    ),
    "phi3": Family(
        "phi3",
        "Phi3ForCausalLM",
        (
            *(*_SIZES_OF_LLAMA, _EPS_5, head_dim(), _SILU, rope(kinds=("default",)), _UNTIED),
            same("sliding_window", "sliding_window", None),
        ),
        neutral={"attention_bias": False},
        unused={"ignore_keys_at_rope_validation": "it only silences a warning of transformers"},
        pad_token=32000,
    ),
    "olmo2": Family(
        "olmo2",
        "Olmo2ForCausalLM",
        (*_SIZES_OF_LLAMA, _EPS_5, head_dim(), _SILU, _ROPE, _UNTIED, _ATTENTION_BIAS),
        fixed={"pre_norms": False, "post_norms": True, "qk_norm": True, "qk_norm_over": "all_heads"},
        pad_token=1,
    ),
    "deepseek_v3": Family(
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        (*_SIZES, _SILU, _ROPE, _UNTIED, LATENT_ATTENTION, EXPERTS_OF_DEEPSEEK),
        neutral={
            "attention_bias": False,
            "rope_interleave": True,
            "moe_layer_freq": 1,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "pretraining_tp": 1,
        },
        unused={**_AUXILIARY, "ep_size": "the job decides how experts are divided"},
        aliases={"num_local_experts": "n_routed_experts", "num_mtp_layers": "num_nextn_predict_layers"},
    ),
}
"""The classes of `transformers` that this package's models implement, by their `model_type`."""

REFUSED = {
    "quantization_config": "quantized weights are not supported; name the folder of the original weights, or convert "
    "MXFP4 weights (GPT-OSS) with from_pretrained(..., quantization_config=Mxfp4Config(dequantize=True)) and "
    "save_pretrained of transformers, or FP8 weights (DeepSeek-V3) with inference/fp8_cast_bf16.py of "
    "deepseek-ai/DeepSeek-V3, and remove this key",
    "compression_config": "compressed weights are not supported; name the folder of the original weights",
}
NEUTRAL: dict[str, Any] = {
    "is_causal": True,
    "is_decoder": False,
    "is_encoder_decoder": False,
    "add_cross_attention": False,
    "cross_attention_hidden_size": None,
    "chunk_size_feed_forward": 0,
    "pruned_heads": {},
    "tie_encoder_decoder": False,
    "tf_legacy_loss": False,
    "torchscript": False,
    "use_bfloat16": False,
}
"""Keys that the `config.json` of any class may have, with the only supported value of each. Releases of `transformers`
before 5.0 write most of these keys."""

DROPOUT = ("attention_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop")
"""Keys of dropout rates. This package applies no dropout, and a note in the log says so."""

WITHOUT_EFFECT: dict[str, str] = {
    key: reason
    for reason, keys in {
        "it records how the file was made": (
            *("architectures", "model_type", "transformers_version", "_name_or_path", "name_or_path", "_commit_hash"),
            *("finetuning_task", "unsloth_fixed", "unsloth_version", "transformers.js_config"),
        ),
        "code in the folder is never run": ("auto_map",),
        "precision.param_dtype sets the dtype": ("torch_dtype", "dtype"),
        "a note says that dropout is not applied": DROPOUT,
        "a note says that the padding token is trained": ("pad_token_id",),
        "all parameters come from the files": ("initializer_range",),
        "the job decides the length of sequences": ("max_position_embeddings",),
        "activation_checkpoint.mode of the job decides": ("gradient_checkpointing",),
        "all kernels compute the same": (
            *("attn_implementation", "_attn_implementation", "_attn_implementation_autoset", "experts_implementation"),
            "_experts_implementation",
        ),
        "it chooses the outputs that a call returns": (
            *("return_dict", "output_attentions", "output_hidden_states", "output_scores", "return_dict_in_generate"),
        ),
        "tokenizers and generation read it": (
            *("bos_token_id", "eos_token_id", "unk_token_id", "sep_token_id", "decoder_start_token_id"),
            *("tokenizer_class", "prefix", "task_specific_params", "use_cache", "cache_implementation"),
            *("max_sequence_length", "model_max_length"),
            *("max_length", "min_length", "do_sample", "temperature", "top_k", "top_p", "typical_p", "num_beams"),
            *("num_beam_groups", "num_return_sequences", "diversity_penalty", "early_stopping", "length_penalty"),
            *("repetition_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids"),
            *("forced_bos_token_id", "forced_eos_token_id", "remove_invalid_values", "suppress_tokens"),
            *("begin_suppress_tokens", "exponential_decay_length_penalty"),
        ),
        "classifiers read it": ("id2label", "label2id", "num_labels", "problem_type"),
    }.items()
    for key in keys
}
"""Keys that have no effect on any language model of this package, each with the reason."""
