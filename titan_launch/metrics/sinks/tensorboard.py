"""Metrics as TensorBoard event files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from titan_launch.metrics.sinks.base import Sink
from titan_launch.metrics.tags import dashboard_layout

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class TensorBoardSink(Sink):
    """Scalars, texts and the layout of the "Custom Scalars" dashboard, below one folder.

    A run that is resumed, begins again, or goes back to a checkpoint continues the folder. TensorBoard drops the steps
    that are computed again.
    """

    def __init__(self, log_dir: Path, resume_step: int = 0):
        """`resume_step`: the step of the checkpoint that the run goes on from; 0 for a fresh start.

        The event file is opened for the first scalars, after the run's first step: TensorBoard takes long to import.
        """
        log_dir.mkdir(parents=True, exist_ok=True)  # what is wrong with it is said now
        self._log_dir = log_dir
        self._resume_step = resume_step
        self._texts: list[tuple[str, str]] = []
        """Those that wait for the file."""

        self._opened: SummaryWriter | None = None

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """One event per tag, on disk when this returns: a run that is killed loses nothing."""
        writer = self._writer()
        for tag, value in scalars.items():
            writer.add_scalar(tag, value, step)
        writer.flush()

    def text(self, tag: str, text: str) -> None:
        """Shown under "Text", once for every time that the run was started."""
        self._texts.append((tag, text))
        if self._opened is not None:
            self._writer().flush()

    def rewind(self, step: int) -> None:
        """Go on in another file of the folder, which tells TensorBoard to drop later steps."""
        self.close()
        self._resume_step = step
        self._opened = _open(self._log_dir, step + 1)

    def close(self) -> None:
        """Close the event file, if it was opened: a run that fails before its first report has nothing to show."""
        if self._opened is not None:
            self._writer().close()

    def _writer(self) -> SummaryWriter:
        """The event file, with all texts in it."""
        if self._opened is None:
            is_new = not any(self._log_dir.glob("events.out.tfevents.*"))
            self._opened = _open(self._log_dir, None if is_new else self._resume_step + 1)
            if is_new:
                self._opened.add_custom_scalars(_custom_scalars())
        for tag, text in self._texts:
            self._opened.add_text(tag, text, self._resume_step)
        self._texts.clear()
        return self._opened


def _open(log_dir: Path, purge_step: int | None) -> SummaryWriter:
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(log_dir, purge_step=purge_step)


def _custom_scalars() -> dict[str, dict[str, list[object]]]:
    """The dashboard in the form that SummaryWriter takes. Tags are regular expressions that match from the start."""
    return {
        group: {title: ["Multiline", [f"{tag}$" for tag in tags]] for title, tags in charts.items()}
        for group, charts in dashboard_layout().items()
    }
