"""The planner as a process of its own, for models that must be traced: a trace needs a process group of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from titan_launch.config.job import JobConfig
from titan_launch.config.loading.load import dump_job
from titan_launch.core.errors import RunError, UserError, config_error
from titan_launch.core.process import BAD_INPUT, rank_folder
from titan_launch.core.signals import AGENT_PID
from titan_launch.plan.hardware import Hardware
from titan_launch.train.forward import FORWARD

_OF_THIS_RUN = ("TORCHELASTIC_", "GROUP_", "ROLE_", "MASTER_", "RANK", "LOCAL_", "WORLD_SIZE")
"""Beginnings of the environment variables with which torchrun tells a rank who it is."""


class Tracing:
    """`plan --engine trace` on a job, beside the run: it has no GPU, one thread, and a lower priority."""

    def __init__(self, config: JobConfig, world_size: int, hardware: Hardware, stack: ExitStack):
        """Start it. It is ended, and its files are removed, when `stack` is closed."""
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="titan-launch-plan-", dir=rank_folder())))
        self._job = folder / "job.json"
        self._job.write_text(dump_job(_with_hardware(config, hardware)))
        self._output = stack.enter_context((folder / "plan.json").open("w+"))
        self._errors = stack.enter_context((folder / "errors.txt").open("w+"))
        options = [f"--world-size={world_size}", "--engine=trace", "--rows=own", "--json"]
        self._process = subprocess.Popen(
            ["nice", "-n", "5", sys.executable, "-m", "titan_launch", "plan", f"--config={self._job}", *options],
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=self._errors,
            env=_environment(),
            start_new_session=True,  # a signal to the run's process group is for the run to answer
        )
        stack.callback(self._end)

    @property
    def is_running(self) -> bool:
        """Whether there is no result yet."""
        return self._process.poll() is None

    def result(self) -> dict[str, Any]:
        """The plan, as `plan --json` prints it; waits for it.

        Raises UserError for what the user can fix, ConfigError for a forward of the wrong kind, and RunError where the
        trace failed.
        """
        status = self._process.wait()
        if status == 0:
            self._output.seek(0)
            return _last_object(self._output.read())
        self._errors.seek(0)
        said = self._errors.read().strip() or f"it was ended with status {status}"
        if status == BAD_INPUT:  # the message is complete
            said = said.removeprefix("error: ").replace(f"{self._job}: ", "")  # no file of the user's
            key, _, reason = said.partition(": ")
            if reason.startswith(FORWARD):
                raise config_error(tuple(key.split(".")), reason)
            raise UserError(said)
        raise RunError(f"the model could not be traced:\n{said}")

    def _end(self) -> None:
        self._process.kill()
        self._process.wait()


def _last_object(text: str) -> dict[str, Any]:
    """What `plan --json` printed, behind whatever the user's own modules print when they are imported."""
    lines = text.splitlines()
    start = max(index for index, line in enumerate(lines) if line == "{")
    plan: dict[str, Any] = json.loads("\n".join(lines[start:]))
    return plan


def _with_hardware(config: JobConfig, hardware: Hardware) -> JobConfig:
    """The job, told in full what this run has found out about its devices."""
    planner = config.planner.model_copy(
        update={
            "device": None,
            "memory_gib": hardware.memory_gib,
            "intra_node_gb_per_s": hardware.intra_node_gb_per_s,
            "inter_node_gb_per_s": hardware.inter_node_gb_per_s,
            "overhead_gib": hardware.overhead_gib,
            "fragmentation": hardware.fragmentation,
            "margin_gib": hardware.margin_gib,
        }
    )
    return config.model_copy(
        update={
            "job": config.job.model_copy(update={"device": hardware.kernels}),
            "metrics": config.metrics.model_copy(update={"peak_tflops_per_device": hardware.peak_tflops}),
            "planner": planner,
        }
    )


def _environment() -> dict[str, str]:
    """Return this process's environment without the variables of a rank. The planner ends when this process does."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(_OF_THIS_RUN)}
    return {**own, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", AGENT_PID: str(os.getpid())}
