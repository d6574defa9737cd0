from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from titan_launch.config.sections.parallelism import ActivationCheckpointConfig
from titan_launch.core.errors import ConfigError
from titan_launch.plan.module_selection import checkpointed_modules
from titan_launch.plan.types import Inventory, ModuleInfo


def checkpointed(blocks: Sequence[str], **config: Any) -> tuple[str, ...]:
    """Return the checkpointed modules of a model with these blocks in one `list`.

    Each block has a `norm` and an `mlp` of two layers. The first two blocks share a `rope`.
    """
    modules = [ModuleInfo("", ("Model",), True), ModuleInfo("list", ("ModuleList",), False)]
    for index, block in enumerate(blocks):
        inside = ("", ".norm", ".mlp", ".mlp.0", ".mlp.1")
        modules += [ModuleInfo(f"{block}{name}", ("Layer",), True) for name in inside]
        modules += [ModuleInfo(f"{block}.rope", ("Rope",), True, same_as=f"{blocks[0]}.rope" if index else None)]
    config = {"mode": "full", **config}
    return checkpointed_modules(Inventory(tuple(modules), tuple(blocks)), ActivationCheckpointConfig(**config))


BLOCKS = tuple(f"list.{index}" for index in range(7))


def test_blocks_within_blocks_belong_to_the_outer_ones() -> None:
    assert checkpointed(("a.0", "a.0.b", "a.1", "a.1.b")) == ("a.0", "a.1")
    assert checkpointed(BLOCKS, mode="selective", selective_ac_option=3) == ("list.2", "list.5")
    assert checkpointed(BLOCKS, mode="none") == checkpointed(BLOCKS, mode="memory_budget") == ()


def test_globs_take_the_place_of_blocks() -> None:
    mlps = tuple(f"{block}.mlp" for block in BLOCKS)
    assert checkpointed(BLOCKS, modules=("list.*.mlp",)) == mlps
    assert checkpointed(BLOCKS, modules=("list.*.mlp.*", "list.*.mlp")) == mlps
    assert checkpointed(BLOCKS, modules=("**.mlp",), mode="selective", selective_ac_option=3) == mlps[2::3]
    assert checkpointed(BLOCKS, modules=("list.1.rope", "list.3")) == ("list.0.rope", "list.3")
    assert checkpointed(BLOCKS[:2], modules=("**",)) == BLOCKS[:2]


def test_a_mode_without_a_module_to_checkpoint_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"activation_checkpoint.mode: needs blocks, .* model.blocks"):
        checkpointed(())
    with pytest.raises(ConfigError, match=r"activation_checkpoint.selective_ac_option: the model has only 2 blocks"):
        checkpointed(BLOCKS[:2], mode="selective", selective_ac_option=3)
    with pytest.raises(ConfigError, match=r"modules matches only 7 modules, so none of them"):
        checkpointed(BLOCKS, modules=("list.*.norm",), mode="selective", selective_ac_option=8)
    with pytest.raises(ConfigError, match=r'modules.0: matches no module of the model; did you mean "list..\.mlp"'):
        checkpointed(BLOCKS, modules=("list.*.mlpp",))
    with pytest.raises(ConfigError, match=r'modules.1: matches only list, a container .* "list.\*"'):
        checkpointed(BLOCKS, modules=("list.*", "list"))
