"""Profiles of steps: Chrome traces, tables of the top operations, and snapshots of GPU memory."""

from __future__ import annotations

import logging
import signal
from contextlib import ExitStack, suppress
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from titan_launch.config.sections.run import ProfilingConfig
from titan_launch.core.observer import Observer, StepResult, WatchedStep
from titan_launch.distributed.process_group import Ranks
from titan_launch.distributed.torch_private import record_memory_history, write_memory_snapshot
from titan_launch.metrics.timeline import Timeline

_log = logging.getLogger(__name__)

FOLDER = "profiling"
"""Folder of the profiles in the run folder."""

SIGNAL = getattr(signal, "SIGRTMIN", None)
"""Signal that makes a rank profile its next step; None on systems other than Linux."""


class StepProfiler(Observer):
    """The profiles of one rank (`[profiling]`)."""

    def __init__(self, config: ProfilingConfig, run_folder: Path, ranks: Ranks, timeline: Timeline, stack: ExitStack):
        """With `profiling.memory` on a GPU, record allocations from now on. Listen to SIGNAL until `stack` is
        closed."""
        self._config = config
        self._folder = run_folder / FOLDER
        self._ranks = ranks
        self._timeline = timeline
        self._was_signalled = False
        self._profile: profile | None = None
        self._step = 0
        self._takes_snapshots = config.memory and ranks.device.type == "cuda"
        if self._takes_snapshots:
            record_memory_history()
        with suppress(ValueError):  # Python allows signal handlers only in the main thread; tests use others
            if SIGNAL is not None:
                before = signal.signal(SIGNAL, self._on_signal)
                stack.callback(signal.signal, SIGNAL, before)

    def _on_signal(self, *_: object) -> None:
        self._was_signalled = True

    def before_step(self, step: WatchedStep) -> None:
        """Profile the step in two cases: SIGNAL has arrived, or this rank is in `profiling.ranks` and the step is one
        of `profiling.num_steps` steps from `profiling.start_step` on."""
        first, config = self._config.start_step, self._config
        is_planned = first is not None and first <= step.number < first + config.num_steps
        is_planned &= self._ranks.rank in config.ranks
        if not (is_planned or self._was_signalled):
            self.finish()  # after a rollback to a step before the planned steps
            return
        self._step = step.number
        if self._profile is None:
            activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._ranks.device.type == "cuda" else [])]
            self._profile = profile(activities=activities, record_shapes=True)
            self._profile.start()
            self._timeline.is_profiled = True
        self._name = record_function(f"step {step.number}")
        self._name.__enter__()

    def after_step(self, step: WatchedStep, result: StepResult) -> None:
        """Write the profile after its last step."""
        if self._profile is None:
            return
        self._name.__exit__(None, None, None)
        first = self._config.start_step
        if self._was_signalled or first is None or step.number == first + self._config.num_steps - 1:
            self._was_signalled = False
            self.finish()

    def finish(self) -> None:
        """Write the profile of the steps so far, if the profiler runs. Call this method at the end of a run, too,
        because the run may end before the last planned step."""
        if self._profile is not None:
            self._write(self._end())

    def abandon_step(self, error: BaseException) -> None:
        """Stop the profiler, if it runs, without writing a profile."""
        if self._profile is not None:
            self._end()

    def _end(self) -> profile:
        ended, self._profile = self._profile, None
        assert ended is not None
        if self._ranks.device.type == "cuda":
            torch.cuda.synchronize(self._ranks.device)
        ended.stop()
        self._timeline.is_profiled = False
        return ended

    def _write(self, ended: profile) -> None:
        """Write the trace and the table, and a snapshot of GPU memory if allocations are recorded. A full disk does not
        end the run."""
        trace = self._file(".json.gz")
        try:
            self._folder.mkdir(exist_ok=True)
            ended.export_chrome_trace(str(trace))
            order = f"self_{self._ranks.device.type}_time_total"
            self._file(".txt").write_text(ended.key_averages().table(sort_by=order, row_limit=30))
            if self._takes_snapshots:
                write_memory_snapshot(str(self._file(".pickle")))
        except OSError as error:
            _log.warning("profile of step %d: not written: %s", self._step, error)
            return
        _log.info("profile of step %d: %s", self._step, trace)

    def _file(self, suffix: str) -> Path:
        return self._folder / f"step-{self._step}_rank-{self._ranks.rank}{suffix}"

    def write_snapshot_of_failure(self) -> None:
        """Write a snapshot of GPU memory after an out-of-memory error, if the job records allocations."""
        if self._takes_snapshots:
            with suppress(OSError):
                self._folder.mkdir(exist_ok=True)
                write_memory_snapshot(str(self._folder / f"out-of-memory_rank-{self._ranks.rank}.pickle"))
