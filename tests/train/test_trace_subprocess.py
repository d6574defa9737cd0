"""Errors of the planner's process."""

from __future__ import annotations

import signal
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from tests.train.jobs import tiny_job
from titan_launch.config.job import JobConfig
from titan_launch.core.errors import RunError
from titan_launch.plan.hardware import hardware_of
from titan_launch.train.trace_subprocess import TraceProcess, _error


@pytest.mark.parametrize(
    ("trial", "task"), [(None, "the plan of the job"), ((1, torch.device("cpu")), "the trial of rank 1")]
)
def test_the_error_of_a_killed_process_names_task_and_signal(
    tmp_path: Path, trial: tuple[int, torch.device] | None, task: str
) -> None:
    config = JobConfig.model_validate(tiny_job(tmp_path))
    with ExitStack() as stack:
        process = TraceProcess(config, 2, hardware_of(config, 2), stack, trial)
        process._process.send_signal(signal.SIGKILL)
        cause = "the process was killed by SIGKILL, probably because the host had no memory left"
        with pytest.raises(RunError, match=f"^{task} failed:\n{cause}$"):
            process.result()


def test_an_unexpected_error_keeps_its_traceback() -> None:
    recorded, expected = "recording pipeline rank 0", "error: data.path: no such file"
    assert _error(f"{recorded}\n{expected}\n") == "data.path: no such file"
    trace = "Traceback (most recent call last):\n  ...\nerror: the run failed on rank 0; see the traceback above"
    assert _error(f"{trace}\n") == trace
