"""Profiles of steps: Chrome traces, tables of the top operations, and snapshots of GPU memory."""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from titan_launch.config.sections.run import ProfilingConfig
from titan_launch.distributed.process_group import Ranks
from titan_launch.distributed.torch_private import record_memory_history, write_memory_snapshot
from titan_launch.metrics.timeline import Timeline

_log = logging.getLogger(__name__)

FOLDER = "profiling"
"""Folder of the profiles in the run folder."""

SIGNAL = getattr(signal, "SIGRTMIN", None)
"""Signal with which a rank profiles its next step. Other systems than Linux have none."""

_ROWS = 30


class StepProfiler:
    """The profiles of one rank (`[profiling]`)."""

    def __init__(self, config: ProfilingConfig, run_folder: Path, ranks: Ranks, timeline: Timeline, stack: ExitStack):
        """Record allocations from now on if the job asks for it, and listen to the signal until `stack` is closed."""
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
        with suppress(ValueError):  # not in the main thread of a test
            if SIGNAL is not None:
                before = signal.signal(SIGNAL, self._on_signal)
                stack.callback(signal.signal, SIGNAL, before)

    def _on_signal(self, *_: object) -> None:
        self._was_signalled = True

    @contextmanager
    def watching(self, step: int) -> Iterator[None]:
        """Profile a step if it is in the job's window, or if the signal has come."""
        first, config = self._config.start_step, self._config
        is_planned = first is not None and first <= step < first + config.num_steps and self._is_chosen
        if not (is_planned or self._was_signalled):
            yield
            return
        self._step = step
        if self._profile is None:
            activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._device == "cuda" else [])]
            self._profile = profile(activities=activities, record_shapes=True)
            self._profile.start()
            self._timeline.is_profiled = True
        try:
            with record_function(f"step {step}"):
                yield
        except BaseException:
            self._end()
            raise
        if self._was_signalled or first is None or step == first + config.num_steps - 1:
            self._was_signalled = False
            self._write(self._end())

    @property
    def _is_chosen(self) -> bool:
        return self._ranks.rank in self._config.ranks

    @property
    def _device(self) -> str:
        return self._ranks.device.type

    def _end(self) -> profile:
        ended, self._profile = self._profile, None
        assert ended is not None
        if self._device == "cuda":
            torch.cuda.synchronize(self._ranks.device)
        ended.stop()
        self._timeline.is_profiled = False
        return ended

    def _write(self, ended: profile) -> None:
        """Write the trace and the table. A full disk does not end the run."""
        trace = self._file(".json.gz")
        try:
            self._folder.mkdir(exist_ok=True)
            ended.export_chrome_trace(str(trace))
            order = f"self_{self._device}_time_total"
            self._file(".txt").write_text(ended.key_averages().table(sort_by=order, row_limit=_ROWS))
            if self._takes_snapshots:
                write_memory_snapshot(str(self._file(".pickle")))
        except OSError as error:
            _log.warning("profile of step %d: not written: %s", self._step, error)
            return
        _log.info("profile of step %d: %s", self._step, trace)

    def _file(self, suffix: str) -> Path:
        return self._folder / f"step-{self._step}_rank-{self._ranks.rank}{suffix}"

    @contextmanager
    def snapshot_on_failure(self) -> Iterator[None]:
        """Write a snapshot of GPU memory if the block runs out of memory and the job records allocations."""
        try:
            yield
        except torch.OutOfMemoryError:
            if self._takes_snapshots:
                with suppress(OSError):
                    self._folder.mkdir(exist_ok=True)
                    write_memory_snapshot(str(self._folder / f"out-of-memory_rank-{self._ranks.rank}.pickle"))
            raise
