"""Which checkpoints are kept, and the links that point to them."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from titan_launch.checkpoint.manifest import DamagedCheckpointError, checkpoint_name, checkpoint_steps, read_manifest
from titan_launch.files import free_name

LATEST, BEST = "latest", "best"
"""Links to the newest checkpoint, and to the one with the lowest validation loss."""

TEMPORARY = ".tmp"
"""The end of the name of a folder that is being written or deleted."""


@dataclass(frozen=True)
class Retention:
    """What is kept besides the newest; see `[checkpoint]`."""

    latest: int
    every: int
    best: int

    def expendable(self, losses: Mapping[int, float | None]) -> list[int]:
        """The steps that may go, of those that are there with their validation losses. The newest never may."""
        steps = sorted(losses, reverse=True)
        if not self.latest:
            return []
        kept = {*steps[: self.latest], *best_steps(losses)[: self.best]}
        kept |= {step for step in steps if self.every and step % self.every == 0}
        return [step for step in steps if step not in kept]


def best_steps(losses: Mapping[int, float | None]) -> list[int]:
    """The steps that have a validation loss (which is a number), the lowest first; the older one of equals."""
    known = [(loss, step) for step, loss in losses.items() if loss is not None and loss == loss]
    return [step for _, step in sorted(known)]


def tidy(folder: Path, newest: int, retention: Retention) -> list[int]:
    """Point the links to what they name, then delete what is expendable; returns the deleted steps.

    `newest`: the step that was just saved. A folder whose manifest cannot be read is left alone.
    """
    losses = _losses(folder)
    point(folder, LATEST, newest)
    if not retention.best:
        (folder / BEST).unlink(missing_ok=True)  # it would keep nothing from being deleted
    elif best := best_steps(losses):
        point(folder, BEST, best[0])
    gone = [step for step in retention.expendable(losses) if step != newest]
    for step in gone:
        delete(folder / checkpoint_name(step))
    return gone


def point(folder: Path, link: str, step: int) -> None:
    """Make a link point to a step's folder; there is no moment without it."""
    temporary = folder / f"{link}{TEMPORARY}"
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(checkpoint_name(step), target_is_directory=True)
    temporary.replace(folder / link)


def delete(checkpoint: Path) -> None:
    """Delete a checkpoint. It loses its final name first: what has that name is complete at any moment."""
    doomed = checkpoint.with_name(f"{checkpoint.name}.deleted{TEMPORARY}")
    shutil.rmtree(doomed, ignore_errors=True)
    checkpoint.rename(doomed)
    shutil.rmtree(doomed)


def clean(folder: Path) -> None:
    """Remove what a save or a deletion that was killed has left: nothing can be loaded from it."""
    for entry in folder.glob(f"*{TEMPORARY}"):
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink(missing_ok=True)


def set_aside(checkpoint: Path) -> Path:
    """Give a damaged checkpoint another name, so that it is neither loaded nor written over; returns the new one."""
    aside = free_name(checkpoint.with_name(f"{checkpoint.name}.damaged-{{}}"))
    checkpoint.rename(aside)
    return aside


def _losses(folder: Path) -> dict[int, float | None]:
    losses: dict[int, float | None] = {}
    for step in checkpoint_steps(folder):
        try:
            losses[step] = read_manifest(folder / checkpoint_name(step)).validation_loss
        except DamagedCheckpointError:
            continue
    return losses
