from __future__ import annotations

import pytest

from titan_launch.config.activation_checkpoint import ActivationCheckpointConfig
from titan_launch.errors import ConfigError
from titan_launch.plan.recomputation import chosen_blocks


def test_blocks_within_blocks_belong_to_the_outer_ones() -> None:
    full = ActivationCheckpointConfig(mode="full")
    assert chosen_blocks(("a.0", "a.0.b", "a.1", "a.1.b"), full) == ("a.0", "a.1")
    every_third = ActivationCheckpointConfig(mode="selective", selective_ac_option=3)
    assert chosen_blocks(tuple(f"a.{i}" for i in range(7)), every_third) == ("a.2", "a.5")
    assert chosen_blocks((), ActivationCheckpointConfig()) == ()


def test_a_mode_without_a_block_to_work_on_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"activation_checkpoint.mode: works on blocks, .* model.blocks"):
        chosen_blocks((), ActivationCheckpointConfig(mode="full"))
    with pytest.raises(ConfigError, match=r"activation_checkpoint.selective_ac_option: the model has 2 blocks"):
        chosen_blocks(("a.0", "a.1"), ActivationCheckpointConfig(mode="selective", selective_ac_option=3))
