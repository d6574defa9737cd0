"""A trial has the parts of a run that take memory beside the model and the optimizer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.loss.test_losses import dpo_job, job_of, write_model
from tests.train.jobs import TINY_ARGS
from titan_launch.config.job import JobConfig
from titan_launch.loss.second_model import FrozenModel
from titan_launch.optim.ema import WeightEMA
from titan_launch.plan.layout import plan_layout
from titan_launch.trace.trial import run_trial


def ema_job(folder: Path) -> dict[str, Any]:
    """Return a job whose average is updated less often than a trial has steps."""
    return job_of(folder, {}, ema={"decay": 0.9, "every_steps": 10})


def distillation_job(folder: Path) -> dict[str, Any]:
    teacher = write_model(folder / "teacher", 3, **TINY_ARGS)
    return job_of(folder, {"name": "distillation", "distillation": {"teacher": str(teacher)}})


@pytest.mark.parametrize(
    ("build", "part", "method"),
    [(ema_job, WeightEMA, "update"), (distillation_job, FrozenModel, "__call__"), (dpo_job, FrozenModel, "__call__")],
)
def test_a_trial_uses_the_average_and_the_second_model_in_every_step(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    build: Callable[[Path], dict[str, Any]],
    part: type[WeightEMA] | type[FrozenModel],
    method: str,
) -> None:
    if build is dpo_job:
        pytest.importorskip("jinja2")
    calls, unwatched = [], getattr(part, method)

    def watched(self: Any, *args: Any) -> Any:
        calls.append(self)
        return unwatched(self, *args)

    monkeypatch.setattr(part, method, watched)
    job = build(tmp_path)
    job["training"]["local_batch_size"] = 2  # one microbatch on each of two ranks
    config = JobConfig.model_validate(job)
    assert run_trial(config, plan_layout(config.parallelism, config.training, 2), 1, torch.device("cpu")) is None
    assert len(calls) == 3 and len(set(map(id, calls))) == 1
