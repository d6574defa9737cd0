"""`mode = "auto"` in a run: it depends on memory, is the same on all ranks, is recorded, and stays the same on
resume."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.distributed import run_ranks
from tests.train.jobs import error_of_run, log_lines, read_metrics, record, run_job, run_job_until, tiny_job
from titan_launch.config.job import JobConfig
from titan_launch.config.loading.load import dump_job
from titan_launch.plan.hardware import GIB
from titan_launch.train import resolve_job

Modes = tuple[str, bool, str]


def job(folder: Path, memory_gib: float | None, mode: str = "auto", **sections: Any) -> dict[str, Any]:
    accumulation = {"mode": mode, **sections.pop("accumulation", {"keep_params_unsharded": False})}
    planner = {} if memory_gib is None else {"memory_gib": memory_gib, "margin_gib": 0.0}
    sections.setdefault("checkpoint", {"enable": True, "interval": 2})
    return tiny_job(
        folder,
        model={"args": {"n_layers": 1}},
        training={"global_batch_size": 8},
        gradient_accumulation=accumulation,
        planner=planner,
        **sections,
    )


def between_modes(folder: Path) -> float:
    """Return a memory limit that the deferred mode exceeds and the immediate one does not."""
    return sum(needs(folder, mode) for mode in ("immediate", "deferred")) / 2


def needs(folder: Path, mode: Any) -> float:
    return record(job(folder, None, mode), 2)[0].peak_bytes / GIB


def recorded(folder: Path) -> Modes:
    """Return the config in the run folder, in which `auto` is resolved."""
    saved = json.loads((folder / "tiny" / "config.json").read_text())
    accumulation = saved["gradient_accumulation"]
    return accumulation["mode"], accumulation["keep_params_unsharded"], saved["activation_checkpoint"]["mode"]


def label(accumulation: str) -> str:
    return f"gradient accumulation {accumulation}, activation checkpointing none"


def run_and_log(job: dict[str, Any], until: int | None = None) -> tuple[dict[str, Tensor], list[str]]:
    messages = log_lines()
    state = {} if until is not None and run_job_until(job, until) is None else run_job(job)  # type: ignore[func-returns-value]
    return state, [message for message in messages if message.startswith("auto:")]


def test_auto_chooses_deferred_accumulation_if_memory_allows_and_results_are_equal(tmp_path: Path) -> None:
    limit = between_modes(tmp_path)
    plenty = run_ranks(run_and_log, 2, job(tmp_path / "plenty", 10 * limit))
    scarce = run_ranks(run_and_log, 2, job(tmp_path / "scarce", limit))
    assert recorded(tmp_path / "plenty") == ("deferred", False, "none")
    assert recorded(tmp_path / "scarce") == ("immediate", False, "none")
    config = (tmp_path / "plenty/tiny/config.json").read_text()  # it can be run
    assert json.loads(dump_job(JobConfig.model_validate_json(config, strict=False))) == json.loads(config)
    for name, tensor in plenty[0][0].items():
        torch.testing.assert_close(scarce[0][0][name], tensor, rtol=1e-5, atol=1e-6, msg=name)
    ((printed,), (nothing,)) = ([log[1] for log in logs][:1] for logs in (plenty, scarce))
    assert printed[0] == nothing[0] == "auto: planning the job"
    assert printed[1].startswith(
        f"auto: {label('deferred')}, because it has the least link traffic among the 2 of 2 choices"
    )
    assert nothing[1].startswith(f"auto: {label('immediate')}, because it has the least link traffic among the 1 of 2")


def test_a_resumed_run_keeps_its_mode_unless_the_job_no_longer_allows_it(tmp_path: Path) -> None:
    limit = between_modes(tmp_path)
    run_ranks(run_job_until, 2, job(tmp_path, limit), 2)
    assert recorded(tmp_path) == ("immediate", False, "none")
    copy = tmp_path / "copy"
    shutil.copytree(tmp_path / "tiny", copy / "tiny", symlinks=True)
    _, printed = run_ranks(run_and_log, 2, job(tmp_path, 10 * limit))[0]
    assert recorded(tmp_path) == ("immediate", False, "none")
    assert printed == [f"auto: {label('immediate')}, because the run began with these modes"]
    assert [report["step"] for report in read_metrics(tmp_path)] == [1, 2, 3, 4]

    kept = job(copy, 10 * limit, accumulation={"keep_params_unsharded": True})
    _, printed = run_ranks(run_and_log, 2, kept, 3)[0]
    assert recorded(copy) == ("deferred", True, "none")
    assert (
        f"the run began with {label('immediate')}, which the job no longer allows "
        "(gradient_accumulation.keep_params_unsharded has changed)" in printed[0]
    )


@pytest.mark.slow
def test_auto_chooses_activation_checkpointing_too(tmp_path: Path) -> None:
    wanted = job(tmp_path, 1.0, accumulation={}, activation_checkpoint={"mode": "auto"}, checkpoint={"enable": False})
    run_ranks(run_job_until, 2, wanted, 1)
    assert recorded(tmp_path) == ("deferred", True, "none")


def error_before_planning(config: dict[str, Any]) -> str:
    """Return the error of a job that ends before the planner runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(resolve_job, "_planned")
        return error_of_run(config)


def test_settings_that_do_not_fit_the_model_are_an_error_before_planning(tmp_path: Path) -> None:
    wrong = job(tmp_path, 1.0, optimizer={"param_groups": [{"match": "nothing.*"}]})
    assert "matches no trainable parameter" in run_ranks(error_before_planning, 1, wrong)[0]


def test_if_no_mode_fits_all_ranks_fail_and_no_file_is_written(tmp_path: Path) -> None:
    messages = run_ranks(error_of_run, 2, job(tmp_path, needs(tmp_path, "immediate") / 2))
    assert messages[0] == messages[1]
    assert messages[0].startswith('gradient_accumulation.mode = "auto": none of 2 choices of modes fits into')
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("memory_gib", "expected"), [pytest.param(1.0, "deferred", marks=pytest.mark.slow), (1e-6, "none of")]
)
def test_auto_plans_a_users_model(tmp_path: Path, memory_gib: float, expected: str) -> None:
    wanted = job(tmp_path, memory_gib, checkpoint={"enable": False})
    wanted["model"] = {"name": "tests.parallel.conv_model:ConvNet"}
    messages = run_ranks(error_of_run, 2, wanted)
    if expected == "deferred":
        assert messages == ["", ""] and recorded(tmp_path)[0] == expected
    else:
        assert messages[0] == messages[1] and expected in messages[0]
        assert messages[0].startswith("gradient_accumulation.mode = ")  # the run does not keep the file of the trace
        assert list(tmp_path.iterdir()) == []
