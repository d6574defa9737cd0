"""Metrics as TensorBoard event files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from titan_launch.metrics.sinks.base import Sink
from titan_launch.metrics.tags import dashboard_layout


class TensorBoardSink(Sink):
    """Scalars, texts and the layout of the "Custom Scalars" dashboard, below one folder.

    A resumed run continues the folder of the run before, and one that goes back to a checkpoint its own: TensorBoard
    drops the steps that are computed again.
    """

    def __init__(self, log_dir: Path, resume_step: int = 0):
        """`resume_step`: the step of the checkpoint that the run goes on from; 0 for a fresh start."""
        is_new = not any(log_dir.glob("events.out.tfevents.*"))
        self._log_dir = log_dir
        self._writer = SummaryWriter(log_dir, purge_step=resume_step + 1 if resume_step else None)
        self._resume_step = resume_step
        if is_new:
            self._writer.add_custom_scalars(_custom_scalars())
            self._writer.flush()

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """One event per tag, on disk when this returns: a run that is killed loses nothing."""
        for tag, value in scalars.items():
            self._writer.add_scalar(tag, value, step)
        self._writer.flush()

    def text(self, tag: str, text: str) -> None:
        """Shown under "Text", once for every time that the run was started."""
        self._writer.add_text(tag, text, self._resume_step)
        self._writer.flush()

    def rewind(self, step: int) -> None:
        """Go on in another file of the folder, which tells TensorBoard to drop later steps."""
        self._writer.close()
        self._writer = SummaryWriter(self._log_dir, purge_step=step + 1)
        self._resume_step = step

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()


def _custom_scalars() -> dict[str, dict[str, list[object]]]:
    """The dashboard in the form that SummaryWriter takes. Tags are regular expressions that match from the start."""
    return {
        group: {title: ["Multiline", [f"{tag}$" for tag in tags]] for title, tags in charts.items()}
        for group, charts in dashboard_layout().items()
    }
