"""Emulated: that a GPU's 8-bit products are right is torchao's to prove."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from tests.distributed import run_ranks
from tests.train.jobs import read_metrics, run_job, tiny_job
from titan_launch.config.float8 import Float8Config
from titan_launch.errors import ConfigError
from titan_launch.models.inventory import take_inventory
from titan_launch.parallel.float8 import convert_to_float8
from titan_launch.plan.types import ModelPlan

EMULATED = {"enable": True, "emulate": True}


def losses(folder: Path, num_ranks: int, **sections: dict[str, Any]) -> list[float]:
    job = tiny_job(folder, precision={"param_dtype": "bfloat16"}, training={"steps": 2}, **sections)
    run_ranks(run_job, num_ranks, job)
    return [report["train/loss"] for report in read_metrics(folder)]


def test_two_ranks_train_near_bf16_and_recomputation_changes_nothing(tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    exact = losses(tmp_path / "bf16", 2)
    rounded = losses(tmp_path / "float8", 2, float8=EMULATED)
    assert rounded != exact
    assert rounded == pytest.approx(exact, rel=1e-3)
    again = {"mode": "selective", "selective_ac_option": "op"}
    assert losses(tmp_path / "again", 2, float8=EMULATED, activation_checkpoint=again) == rounded


def test_without_torchao_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    model = nn.Sequential(nn.Linear(16, 16))
    plan = ModelPlan(take_inventory(model, ()), (), {}, float8=("0",))
    with pytest.raises(ConfigError, match=r"pip install 'titan-launch\[float8\]'"):
        convert_to_float8(model, plan, Float8Config(enable=True))
