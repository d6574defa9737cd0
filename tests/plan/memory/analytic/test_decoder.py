"""The table of a decoder's modules that is made without PyTorch, compared with the built model."""

from __future__ import annotations

from typing import Any

import pytest

from titan_launch.config.architectures import ARCHITECTURES, resolve_args
from titan_launch.config.architectures.decoder import DecoderArgs
from titan_launch.config.sections.model import ModelConfig
from titan_launch.models.build import build_model, take_inventory
from titan_launch.plan.memory.analytic.decoder import decoder_inventory

FAMILIES = [name for name, architecture in ARCHITECTURES.items() if architecture.args is DecoderArgs]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("norm", ["layernorm", "batchnorm"])
def test_the_table_of_modules_equals_the_built_model(family: str, norm: str) -> None:
    """With the norms of the family, then with another kind."""
    for flavor in ARCHITECTURES[family].flavors:
        _check(family, flavor, {"n_layers": 3})
    _check(family, "debug", {"norm": norm, "norm_unit_offset": False, "qk_norm": norm == "layernorm"})


def test_table_of_a_whole_model_with_tied_embeddings() -> None:
    _check("llama3", "debug", {"tie_embeddings": True})


DEEPSEEK = {"score": "sigmoid", "selection_bias_rate": 0.001, "shared_hidden_dim": 64, "first_dense_layers": 1}
GPT_OSS = {"router_bias": True, "expert_bias": True, "gate_limit": 7.0}


@pytest.mark.parametrize("experts", [DEEPSEEK, GPT_OSS], ids=["DeepSeek", "GPT-OSS"])
def test_table_of_a_mixture_of_experts(experts: dict[str, Any]) -> None:
    _check("qwen3_moe", "debug", {"experts": {"num_experts": 4, "top_k": 2, "hidden_dim": 16, **experts}})


def _check(family: str, flavor: str, overrides: dict[str, Any]) -> None:
    config = ModelConfig(name=family, flavor=flavor, args=overrides)
    built = build_model(config, seq_len=24)
    args = resolve_args(family, flavor, overrides)
    assert isinstance(args, DecoderArgs)
    expected = take_inventory(built.module, built.blocks, built.head, built.embeddings, output_layer="output")
    found = decoder_inventory(args, seq_len=24)
    assert found.modules == expected.modules
    assert (found.blocks, found.head, found.embeddings) == (expected.blocks, expected.head, expected.embeddings)
