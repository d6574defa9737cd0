"""The classes of `transformers` that this package's models compute. No torch.

`FAMILIES` has a row for each class. A row lists every key of the class's `config.json` that changes the computation.
A value that is not supported is an error that names the key.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from titan_launch.config.huggingface.features import (
    EXPERTS_OF_DEEPSEEK,
    EXPERTS_OF_GPT_OSS,
    EXPERTS_OF_MIXTRAL,
    EXPERTS_OF_QWEN3_MOE,
    FEED_FORWARD_BIAS,
    HEADS_OF_GPT2,
    KEY_VALUE_HEADS,
    LATENT_ATTENTION,
    POSITIONS_OF_GPT2,
    QUERY_SCALE,
    ROPES_OF_GEMMA3,
    WIDTH_OF_GPT2,
    WINDOWS_OF_GEMMA2,
    WINDOWS_OF_GEMMA3,
    WINDOWS_OF_GPT_OSS,
    WINDOWS_OF_QWEN,
    WINDOWS_OF_QWEN3_MOE,
    YARN_OF_GPT_OSS,
    Feature,
    activation,
    attention_bias,
    head_dim,
    rope,
    same,
)


@dataclass(frozen=True)
class Family:
    """A class of `transformers`, and the model of this package that computes the same."""

    name: str
    """Name of the model in `[model]`."""

    model_class: str
    """Name of the class in `transformers`."""

    features: tuple[Feature, ...]
    fixed: Mapping[str, Any]
    """Arguments that the class does not let its `config.json` choose."""

    neutral: Mapping[str, Any]
    """Keys with the only value that is supported, which is also their default."""


_SIZES_OF_EXPERTS = (
    same("hidden_size", "dim"),
    same("num_hidden_layers", "n_layers"),
    same("num_attention_heads", "n_heads"),
    KEY_VALUE_HEADS,
    same("vocab_size", "vocab_size"),
)
_SIZES = (*_SIZES_OF_EXPERTS, same("intermediate_size", "hidden_dim"), same("rms_norm_eps", "norm_eps", 1e-6))
_UNTIED, _TIED = (same("tie_word_embeddings", "tie_embeddings", tied) for tied in (False, True))
_SILU = activation("hidden_act", "silu")
_ROPE, _ATTENTION_BIAS = rope(), attention_bias()
_GEMMA = (
    *_SIZES,
    head_dim(256),
    activation("hidden_activation", "gelu_pytorch_tanh"),
    _ATTENTION_BIAS,
    QUERY_SCALE,
    _TIED,
)
_FIXED_OF_GEMMA = {"gated": True, "norm_unit_offset": True, "post_norms": True, "scale_embeddings": True}

FAMILIES: dict[str, Family] = {
    "llama": Family(
        "llama3",
        "LlamaForCausalLM",
        (*_SIZES, head_dim(None), _SILU, _ROPE, _UNTIED, _ATTENTION_BIAS, FEED_FORWARD_BIAS),
        fixed={},
        neutral={"pretraining_tp": 1},
    ),
    "qwen2": Family(
        "qwen2",
        "Qwen2ForCausalLM",
        (*_SIZES, head_dim(None), _SILU, _ROPE, _UNTIED, WINDOWS_OF_QWEN),
        fixed={"qkv_bias": True},
        neutral={},
    ),
    "qwen3": Family(
        "qwen3",
        "Qwen3ForCausalLM",
        (*_SIZES, head_dim(128), _SILU, _ROPE, _UNTIED, _ATTENTION_BIAS, WINDOWS_OF_QWEN),
        fixed={"qk_norm": True},
        neutral={},
    ),
    "qwen3_moe": Family(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        (*_SIZES, head_dim(None), _SILU, _ROPE, _UNTIED, _ATTENTION_BIAS, WINDOWS_OF_QWEN3_MOE, EXPERTS_OF_QWEN3_MOE),
        fixed={"qk_norm": True},
        neutral={"decoder_sparse_step": 1},
    ),
    "mistral": Family(
        "mistral",
        "MistralForCausalLM",
        (*_SIZES, head_dim(None), _SILU, _ROPE, _UNTIED, same("sliding_window", "sliding_window", 4096)),
        fixed={},
        neutral={"layer_types": None},
    ),
    "mixtral": Family(
        "mixtral",
        "MixtralForCausalLM",
        (
            *_SIZES_OF_EXPERTS,
            same("rms_norm_eps", "norm_eps", 1e-5),
            head_dim(None),
            _SILU,
            rope(1e6),
            _UNTIED,
            same("sliding_window", "sliding_window", None),
            EXPERTS_OF_MIXTRAL,
        ),
        fixed={},
        neutral={"router_jitter_noise": 0.0},
    ),
    "gemma2": Family(
        "gemma2",
        "Gemma2ForCausalLM",
        (
            *_GEMMA,
            _ROPE,
            WINDOWS_OF_GEMMA2,
            same("attn_logit_softcapping", "attention_soft_cap", 50.0),
            same("final_logit_softcapping", "logits_soft_cap", 30.0),
        ),
        fixed=_FIXED_OF_GEMMA,
        neutral={"use_bidirectional_attention": None},
    ),
    "gemma3_text": Family(
        "gemma3",
        "Gemma3ForCausalLM",
        (
            *_GEMMA,
            ROPES_OF_GEMMA3,
            WINDOWS_OF_GEMMA3,
            same("attn_logit_softcapping", "attention_soft_cap", None),
            same("final_logit_softcapping", "logits_soft_cap", None),
        ),
        fixed={**_FIXED_OF_GEMMA, "qk_norm": True},
        neutral={"use_bidirectional_attention": False},
    ),
    "gpt2": Family(
        "gpt2",
        "GPT2LMHeadModel",
        (
            same("n_embd", "dim"),
            same("n_layer", "n_layers"),
            HEADS_OF_GPT2,
            WIDTH_OF_GPT2,
            same("vocab_size", "vocab_size"),
            POSITIONS_OF_GPT2,
            same("layer_norm_epsilon", "norm_eps", 1e-5),
            activation("activation_function", "gelu_new"),
            _TIED,
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
            "add_cross_attention": False,
        },
    ),
    "gpt_oss": Family(
        "gpt_oss",
        "GptOssForCausalLM",
        (
            *_SIZES_OF_EXPERTS,
            same("rms_norm_eps", "norm_eps", 1e-5),
            head_dim(64),
            rope(150_000.0, YARN_OF_GPT_OSS),
            _UNTIED,
            attention_bias(True),
            WINDOWS_OF_GPT_OSS,
            EXPERTS_OF_GPT_OSS,
        ),
        fixed={"attention_sinks": True},
        neutral={"swiglu_alpha": 1.702},
    ),
    "phi3": Family(
        "phi3",
        "Phi3ForCausalLM",
        (
            *(feature for feature in _SIZES if feature.keys != ("rms_norm_eps",)),
            same("rms_norm_eps", "norm_eps", 1e-5),
            head_dim(None),
            _SILU,
            _ROPE,
            _UNTIED,
            same("sliding_window", "sliding_window", None),
        ),
        fixed={},
        neutral={},
    ),
    "deepseek_v3": Family(
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        (*_SIZES, _SILU, _ROPE, _UNTIED, LATENT_ATTENTION, EXPERTS_OF_DEEPSEEK),
        fixed={},
        neutral={
            "attention_bias": False,
            "rope_interleave": True,
            "moe_layer_freq": 1,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "pretraining_tp": 1,
        },
    ),
}
"""The classes of `transformers` that this package's models compute, by their `model_type`."""

REFUSED = {
    "quantization_config": "quantized weights are not supported; name the folder of the original weights, or convert "
    "MXFP4 weights (GPT-OSS) with from_pretrained(..., quantization_config=Mxfp4Config(dequantize=True)) and "
    "save_pretrained of transformers, or FP8 weights (DeepSeek-V3) with inference/fp8_cast_bf16.py of "
    "deepseek-ai/DeepSeek-V3, and remove this key",
    "compression_config": "compressed weights are not supported; name the folder of the original weights",
}
DROPOUT = ("attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop")
WITHOUT_EFFECT = {
    *("architectures", "model_type", "transformers_version", "torch_dtype", "dtype", "_name_or_path", "auto_map"),
    *("initializer_range", "use_cache", "cache_implementation", "max_position_embeddings", "n_ctx", "max_length"),
    *("original_max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id"),
    *("return_dict", "output_attentions", "output_hidden_states", "task_specific_params", "hidden_act"),
    *("id2label", "label2id", "num_labels", "problem_type", "chunk_size_feed_forward", "is_encoder_decoder"),
    *("output_router_logits", "router_aux_loss_coef", "initial_context_length"),
    *("aux_loss_alpha", "seq_aux", "ep_size"),
    *("summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj"),
}
"""Keys that change neither the logits nor the training of a language model. (The auxiliary losses of experts are
arguments of the job.)"""
