"""The planner in a separate process, because tracing a job needs a process group of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from titan_launch.config.job import JobConfig
from titan_launch.config.loading.load import dump_job
from titan_launch.core.errors import RunError, UserError, config_error
from titan_launch.core.process import BAD_INPUT, UNEXPECTED, rank_folder
from titan_launch.core.signals import AGENT_PID, signal_name
from titan_launch.loss.outputs import FORWARD
from titan_launch.plan.hardware import Hardware, find_device

OUT_OF_MEMORY = "out of memory"
"""The first words of the error of a trial that ran out of memory."""

_RANK_VARIABLES = ("TORCHELASTIC_", "GROUP_", "ROLE_", "MASTER_", "RANK", "LOCAL_", "WORLD_SIZE")
"""Prefixes of the environment variables that torchrun sets for a rank."""


class TraceProcess:
    """A process that runs `titan-launch plan` beside the run, with low priority. Without a trial, the process uses one
    thread and no GPU."""

    def __init__(
        self,
        config: JobConfig,
        world_size: int,
        hardware: Hardware,
        stack: ExitStack,
        trial: tuple[int, torch.device] | None = None,
        advises: bool = False,
    ):
        """Start the process. Closing `stack` ends the process and removes its files. `trial`: rank and device of a
        trial (`trace.trial`), three training steps that the process runs after the plan; None for no trial. `advises`:
        True if the plan also names changes that save memory."""
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="titan-launch-plan-", dir=rank_folder())))
        self._job = folder / "job.json"
        self._job.write_text(dump_job(with_hardware(config, hardware)))
        self._output = stack.enter_context((folder / "plan.json").open("w+"))
        self._errors = stack.enter_context((folder / "errors.txt").open("w+"))
        options = [f"--world-size={world_size}", "--rows=own", "--json"]
        options += [] if trial is None else [f"--trial={trial[0]}"]
        options += ["--advise"] if advises else []
        self._task = "the plan of the job" if trial is None else f"the trial of rank {trial[0]}"
        self._process = subprocess.Popen(
            ["nice", "-n", "5", sys.executable, "-m", "titan_launch", "plan", f"--config={self._job}", *options],
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=self._errors,
            env=_environment(None if trial is None else trial[1]),
            start_new_session=True,  # signals to the run's process group do not reach the planner
        )
        stack.callback(self._process.wait)
        stack.callback(self._process.kill)  # an ExitStack calls this one before `wait`

    @property
    def is_running(self) -> bool:
        """True until the process has ended."""
        return self._process.poll() is None

    def result(self) -> dict[str, Any]:
        """Wait for the process, and return the plan as `plan --json` prints it. Raises UserError for bad input,
        ConfigError for an error of the model's forward, and RunError if the process failed."""
        status = self._process.wait()
        if status == 0:
            self._output.seek(0)
            lines = self._output.read().splitlines()
            # Modules of the user may have printed other lines before the plan.
            start = max(index for index, line in enumerate(lines) if line == "{")
            plan: dict[str, Any] = json.loads("\n".join(lines[start:]))
            return plan
        self._errors.seek(0)
        message = _error(self._errors.read())
        if status < 0 or not message:
            message = f"{message}\n{_describe_end(status)}".lstrip()
        if status == BAD_INPUT:  # the message is complete: it needs no traceback
            message = message.replace(f"{self._job}: ", "")  # the user does not know this temporary file
            key, _, reason = message.partition(": ")
            if reason.startswith(FORWARD):
                raise config_error(tuple(key.split(".")), reason)
            raise UserError(message)
        raise RunError(f"{self._task} failed:\n{message}")

    def has_enough_memory(self) -> bool:
        """Wait for a trial. Return False if the trial ran out of memory, or was killed by SIGKILL. Raises the errors of
        `result`."""
        if self._process.wait() != 0:
            self._errors.seek(0)
            # The kernel sends SIGKILL if a container is out of memory.
            if OUT_OF_MEMORY in self._errors.read() or self._process.returncode == -signal.SIGKILL:
                return False
            self.result()
        return True


def _describe_end(status: int) -> str:
    if status >= 0:
        return f"the process ended with status {status}"
    cause = ", probably because the host had no memory left" if status == -signal.SIGKILL else ""
    return f"the process was killed by {signal_name(-status)}{cause}"


def _error(text: str) -> str:
    """Return the error message at the end of `text`, without the log lines before the message. If `text` has no
    message, or if the message belongs to a traceback, return all of `text`."""
    _, prefix, error = f"\n{text}".partition("\nerror: ")
    return (error if prefix and not error.startswith(UNEXPECTED) else text).strip()


def with_hardware(config: JobConfig, hardware: Hardware) -> JobConfig:
    """Return the job with the hardware of this run in its section `[planner]`, in `job.device` and in
    `metrics.peak_tflops_per_device`."""
    known = hardware.device if hardware.kernels == "cuda" and find_device(hardware.device or "") else None
    keys = (
        *("memory_gib", "intra_node_gb_per_s", "inter_node_gb_per_s"),
        *("overhead_gib", "fragmentation", "margin_gib"),
    )
    planner = {"device": known, **{key: getattr(hardware, key) for key in keys}}
    sections = {
        "job": config.job.model_copy(update={"device": hardware.kernels}),
        "metrics": config.metrics.model_copy(update={"peak_tflops_per_device": hardware.peak_tflops}),
        "planner": config.planner.model_copy(update=planner),
    }
    return config.model_copy(update=sections)


def _environment(device: torch.device | None) -> dict[str, str]:
    """Return the environment variables of the planner's process: those of this process, except the variables that
    torchrun sets for a rank. Only the GPU of a trial is visible. `device`: device of the trial; None for no trial."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(_RANK_VARIABLES)}
    own[AGENT_PID] = str(os.getpid())  # makes the planner end when this process ends
    if device is None:
        return {**own, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    index = device.index or 0
    return {**own, "CUDA_VISIBLE_DEVICES": (visible[index] if visible else str(index)) if device.type == "cuda" else ""}
