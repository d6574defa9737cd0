"""The table of a Llama's modules that is made without PyTorch, compared with the built model."""

from __future__ import annotations

from typing import Any

import pytest

from titan_launch.config.architectures import llama3, resolve_args
from titan_launch.config.architectures.llama3 import Llama3Args
from titan_launch.config.sections.model import ModelConfig
from titan_launch.models.build import build_model, take_inventory
from titan_launch.plan.memory.analytic.llama3 import llama3_inventory


@pytest.mark.parametrize("flavor", [name for name in llama3.FLAVORS if name != "405B"])
@pytest.mark.parametrize("norm", ["rmsnorm", "layernorm", "batchnorm"])
def test_the_table_of_modules_equals_the_built_model(flavor: str, norm: str) -> None:
    _check({"n_layers": 3, "norm": norm}, flavor)


def test_table_of_a_whole_model_with_tied_embeddings() -> None:
    _check({"tie_embeddings": True}, "debug")


def _check(overrides: dict[str, Any], flavor: str) -> None:
    config = ModelConfig(name="llama3", flavor=flavor, args=overrides)
    built = build_model(config, seq_len=24)
    args = resolve_args("llama3", flavor, overrides)
    assert isinstance(args, Llama3Args)
    expected = take_inventory(built.module, built.blocks, built.head, built.embeddings)
    found = llama3_inventory(args, seq_len=24)
    assert found.modules == expected.modules
    assert (found.blocks, found.head, found.embeddings) == (expected.blocks, expected.head, expected.embeddings)
