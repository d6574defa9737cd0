"""Metrics as TensorBoard event files."""

from __future__ import annotations

import io
import os
import re
import socket
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from titan_launch.core.files import RecordFile
from titan_launch.metrics.sinks.interface import RunDescription, Sink
from titan_launch.metrics.tags import dashboard_layout


class TensorBoardSink(Sink):
    """A sink that writes scalars, texts and the layout of the "Custom Scalars" dashboard to one folder.

    A run that resumes, restarts from step 0 or rolls back adds a file to the same folder. TensorBoard drops the earlier
    values of steps that run again.
    """

    def __init__(self, log_dir: Path, resume_step: int = 0):
        """`resume_step`: step of the checkpoint that the run resumes from; 0 for a new run.

        The first call of `write` opens the event file. This is after the run's first step, because the import of
        TensorBoard takes long.
        """
        log_dir.mkdir(parents=True, exist_ok=True)  # an error is raised here, not after the first step
        self._log_dir = log_dir
        self._resume_step = resume_step
        self._texts: list[tuple[str, str]] = []
        """Texts that are not written yet, because the file is not open."""

        self._description = RunDescription({}, frozenset())
        self._opened: _EventFile | None = None

    def describe(self, description: RunDescription) -> None:
        """Store the description for the event file. The dashboard shows `later_metrics`, besides the metrics of the
        first report. `settings` become the columns of the tab "HParams". If the folder already has event files, neither
        is written again."""
        self._description = description

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Write an event with all tags. A run that is killed afterwards does not lose the event."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        shown = {**scalars, **{name: scalars[tag] for tag, name in _OVERVIEW.items() if tag in scalars}}
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in shown.items()]
        self._file(scalars).add(step, summary=Summary(value=values))

    def text(self, tag: str, text: str) -> None:
        """Show a text on TensorBoard's tab "Text". Each start of the run adds a text."""
        self._texts.append((tag, text))
        if self._opened is not None:
            self._file()

    def rewind(self, step: int) -> None:
        """Continue in a new file of the folder, which the next report opens. The file makes TensorBoard drop the
        earlier values of steps after `step`."""
        self.close()
        self._opened, self._resume_step = None, step

    def close(self, failed: bool = False) -> None:
        if self._opened is not None:
            self._opened.close()

    def _file(self, reported: Collection[str] = ()) -> _EventFile:
        """Open the event file if necessary, write all pending texts to it, and return it. `reported`: the metrics of
        the first report, which the dashboard shows."""
        from torch.utils.tensorboard.summary import custom_scalars, hparams, text

        if self._opened is None:
            summaries: list[Any] = []
            if is_new := not any(self._log_dir.glob(f"{_PREFIX}*")):
                layout = custom_scalars(_custom_scalars({*reported, *self._description.later_metrics}))
                # The first result, the summary of an "experiment", is not written: with it, TensorBoard would show the
                # keys of one run only. Without it, TensorBoard shows the keys of all runs, and first the keys with
                # different values.
                _, session_start, _ = hparams(dict(self._description.settings), {})
                summaries = [layout, session_start]
            self._opened = _EventFile(self._log_dir, None if is_new else self._resume_step + 1, summaries)
        while self._texts:
            self._opened.add(self._resume_step, summary=text(*self._texts[0]))
            del self._texts[0]
        return self._opened


_PREFIX = "events.out.tfevents."


class _EventFile:
    """An event file to which the calling thread writes.

    SummaryWriter is not used for two reasons. Its thread prints a traceback if the disk is full. It opens the file
    again for every event, which fails after the run folder is moved.
    """

    def __init__(self, log_dir: Path, purge_step: int | None, summaries: Sequence[Any]):
        """`purge_step`: TensorBoard drops the values of this step and of later steps from the earlier files of the
        folder. None: it drops no values. `summaries`: the first summaries of the file, at step 0."""
        from tensorboard.compat.proto.event_pb2 import SessionLog

        # TensorBoard reads the files in the order of their names. A clock may be behind that of an earlier host.
        times = (path.name.removeprefix(_PREFIX).partition(".")[0] for path in log_dir.glob(f"{_PREFIX}*"))
        newest = max((int(text) for text in times if text.isdecimal()), default=0)
        number = max(int(time.time()), newest + 1)
        path = log_dir / f"{_PREFIX}{number:010}.{socket.gethostname()}.{os.getpid()}.0"
        self._file = RecordFile(path, "xb")
        try:
            self.add(purge_step or 0, file_version="brain.Event:2")
            if purge_step is not None:
                self.add(purge_step, session_log=SessionLog(status=SessionLog.START))
            for summary in summaries:
                self.add(0, summary=summary)
        except OSError:  # the disk is full: the next report tries again
            self._file.close()
            path.unlink()
            raise

    def add(self, step: int, **content: Any) -> None:
        """Write an event, and hand it to the operating system."""
        from tensorboard.compat.proto.event_pb2 import Event
        from torch.utils.tensorboard import RecordWriter

        record = io.BytesIO()
        RecordWriter(record).write(Event(wall_time=time.time(), step=step, **content).SerializeToString())
        self._file.append(record.getvalue())

    def close(self) -> None:
        self._file.close()


_OVERVIEW = {
    "train/loss": "Overview/loss",
    "memory/max_active_gib": "Overview/peak memory (GiB)",
    "time/step_s": "Overview/seconds per step",
    "throughput/tokens_per_second": "Overview/tokens per second",
    "throughput/images_per_second": "Overview/images per second",
    "validation/loss": "Overview/validation loss",
}
"""Metrics that are written a second time, under names that sort before all others. The tab "HParams" sorts the metrics
by name and shows the last values of the first five only."""


def _custom_scalars(expected: Collection[str]) -> dict[str, dict[str, list[object]]]:
    """Return the dashboard in PyTorch's format, in which tags are regular expressions that match from the start."""
    return {
        group: {
            title: ["Multiline", [f"{re.sub('<.+>', '.+', tag)}$" for tag in tags]] for title, tags in charts.items()
        }
        for group, charts in dashboard_layout(expected).items()
    }
