"""Decoder families compared with their classes of `transformers`: logits and gradients of tiny models in fp32."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from titan_launch.config.sections.model import ModelConfig
from titan_launch.models.architectures import resolve_args
from titan_launch.models.build import SPECS, take_inventory
from titan_launch.models.decoder.families import FAMILIES
from titan_launch.models.init import load_weights
from titan_launch.models.weights.folder import find_weights

TOKENS = 24
SHAPE = {"dim": 32, "n_layers": 3, "n_heads": 4, "n_kv_heads": 2, "hidden_dim": 48, "vocab_size": 40}


@dataclass(frozen=True)
class Twin:
    """A class of `transformers` with the arguments that the family's own table does not give."""

    model_class: str
    config: Mapping[str, Any]
    """Keys of its configuration, beside the sizes."""

    args: Mapping[str, Any]
    """Arguments of ours, beside those of the family's flavor `debug`."""


SCALING = {"factor": 8.0, "original_max_position": 16}
UNBALANCED = {"balance_loss": 0.0}  # transformers adds its auxiliary loss only on request
LINEAR = {"kind": "linear", "factor": 8.0}
WINDOWS = ["sliding_attention", "sliding_attention", "full_attention"]
GEMMA = {"head_dim": 16, "sliding_window": 8, "full_attention_every": 3, "query_scale": 20.0**-0.5}
GEMMA_CONFIG = {"head_dim": 16, "sliding_window": 8, "layer_types": WINDOWS, "query_pre_attn_scalar": 20}


def rope(theta: float, **scaling: Any) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": theta, **scaling}


TWINS = {
    "llama3": Twin(
        "LlamaForCausalLM",
        {
            "tie_word_embeddings": False,
            "rms_norm_eps": 1e-5,
            "rope_parameters": rope(
                500_000.0,
                rope_type="llama3",
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=16,
            ),
        },
        {"rope_scaling": SCALING},
    ),
    "qwen2": Twin(
        "Qwen2ForCausalLM", {"tie_word_embeddings": True, "rope_parameters": rope(1e6)}, {"tie_embeddings": True}
    ),
    "qwen3": Twin("Qwen3ForCausalLM", {"head_dim": 16, "rope_parameters": rope(1e6)}, {"head_dim": 16}),
    "qwen3_moe": Twin(
        "Qwen3MoeForCausalLM",
        {
            "head_dim": 16,
            "rope_parameters": rope(1e6),
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 20,
            "norm_topk_prob": True,
            "mlp_only_layers": [0],
        },
        {"head_dim": 16, "experts": {"num_experts": 6, "hidden_dim": 20, "first_dense_layers": 1, **UNBALANCED}},
    ),
    "mistral": Twin(
        "MistralForCausalLM",
        {"sliding_window": 8, "rms_norm_eps": 1e-5, "rope_parameters": rope(1e4)},
        {"sliding_window": 8},
    ),
    "mixtral": Twin(
        "MixtralForCausalLM",
        {"num_local_experts": 6, "rms_norm_eps": 1e-5, "rope_parameters": rope(1e6)},
        {"experts": {"num_experts": 6, "hidden_dim": 48, **UNBALANCED}},
    ),
    "gpt_oss": Twin(
        "GptOssForCausalLM",
        {
            "head_dim": 16,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "swiglu_limit": 1.0,
            "sliding_window": 8,
            "rope_parameters": rope(
                150_000.0, rope_type="yarn", factor=32.0, original_max_position_embeddings=16, truncate=False
            ),
        },
        {
            "head_dim": 16,
            "sliding_window": 8,
            "rope_scaling": {"original_max_position": 16},
            "experts": {"num_experts": 6, "top_k": 3, "hidden_dim": 48, "gate_limit": 1.0, **UNBALANCED},
        },
    ),
    "gemma2": Twin("Gemma2ForCausalLM", {**GEMMA_CONFIG, "rope_parameters": rope(1e4)}, GEMMA),
    "gemma3": Twin(
        "Gemma3ForCausalLM",
        {
            **GEMMA_CONFIG,
            "rope_parameters": {
                "sliding_attention": rope(1e4),
                "full_attention": rope(1e6, rope_type="linear", factor=8.0),
            },
        },
        {**GEMMA, "rope_scaling": LINEAR},
    ),
    "gpt2": Twin("GPT2LMHeadModel", {"n_positions": 32}, {"n_kv_heads": 4, "max_positions": 32}),
    "phi3": Twin(
        "Phi3ForCausalLM",
        {"sliding_window": 8, "rope_parameters": rope(1e4)},
        {"sliding_window": 8},
    ),
    "olmo2": Twin("Olmo2ForCausalLM", {"rms_norm_eps": 1e-6, "rope_parameters": rope(500_000.0)}, {}),
    "deepseek_v3": Twin(
        "DeepseekV3ForCausalLM",
        {
            **(LATENT := {"kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}),
            "q_lora_rank": 20,
            "first_k_dense_replace": 1,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 12,
            "n_shared_experts": 2,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
            "rope_parameters": rope(
                1e4,
                rope_type="yarn",
                factor=4.0,
                original_max_position_embeddings=16,
                mscale=0.7,
                mscale_all_dim=0.3,
            ),
        },
        {
            "n_kv_heads": 4,
            "latent_attention": {**LATENT, "q_lora_rank": 20},
            "rope_scaling": {
                "kind": "yarn",
                "factor": 4.0,
                "original_max_position": 16,
                "mscale": 0.7,
                "mscale_all_dim": 0.3,
            },
            "experts": {"top_k": 3, "hidden_dim": 12, "shared_hidden_dim": 24, "balance_loss": 0.0},
        },
    ),
}


def twin_of(family: str) -> nn.Module:
    """Return the class of `transformers` with random weights, large enough to bend every function."""
    transformers = pytest.importorskip("transformers")
    twin, kv_heads = TWINS[family], TWINS[family].args.get("n_kv_heads", SHAPE["n_kv_heads"])
    hidden = SHAPE["hidden_dim"]
    sizes = {
        "hidden_size": SHAPE["dim"],
        "num_hidden_layers": SHAPE["n_layers"],
        "num_attention_heads": SHAPE["n_heads"],
        **({"n_inner": hidden} if family == "gpt2" else {"intermediate_size": hidden, "num_key_value_heads": kv_heads}),
        "vocab_size": SHAPE["vocab_size"],
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
    }
    model_class = getattr(transformers, twin.model_class)
    config = model_class.config_class(**sizes, **twin.config, attn_implementation="eager")
    torch.manual_seed(0)
    model = model_class(config).eval()
    biases = (buffer for name, buffer in model.named_buffers() if name.endswith("bias"))  # of the choice of experts
    with torch.no_grad():
        for tensor in (*model.parameters(), *biases):
            tensor.add_(torch.randn_like(tensor), alpha=0.3)
    return model


def in_our_model(twin: Any, family: str, folder: Path) -> nn.Module:
    """Return our model with the parameters of a twin, read from its files as a run reads them."""
    twin.save_pretrained(folder)
    args = {**SHAPE, **TWINS[family].args}
    model = SPECS[family].build(resolve_args(family, "debug", args), TOKENS)
    config = ModelConfig(name=family, flavor="debug", args=args, weights=str(folder))
    load_weights(model, find_weights(config, take_inventory(model, ())))
    return model


@pytest.mark.parametrize("family", TWINS)
def test_logits_and_gradients_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    twin = twin_of(family)
    model = in_our_model(twin, family, tmp_path / "parameters")
    tokens = torch.randint(0, SHAPE["vocab_size"], (2, TOKENS + 1))
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    expected, actual = twin(inputs, use_cache=False).logits, model(inputs)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    for logits in (expected, actual):
        F.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.copy_(parameter.grad)
    gradients = dict(in_our_model(twin, family, tmp_path / "gradients").named_parameters())
    for name, parameter in model.named_parameters():
        largest = float(gradients[name].detach().abs().max())  # 0 but for rounding, of the biases of GPT-2's keys
        torch.testing.assert_close(parameter.grad, gradients[name].data, rtol=0, atol=1e-4 * largest + 1e-6, msg=name)


def test_every_family_has_a_twin() -> None:
    assert TWINS.keys() == FAMILIES.keys()
