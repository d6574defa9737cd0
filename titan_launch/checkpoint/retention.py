"""Which checkpoints are kept, and the links that point to them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from titan_launch.checkpoint.manifest import DamagedCheckpointError, checkpoint_name, checkpoint_steps, read_manifest
from titan_launch.core.files import free_name, remove

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


def tidy(folder: Path, newest: int, retention: Retention) -> tuple[list[int], list[str]]:
    """Point the links to what they name, then delete what is expendable. Return the deleted steps, and a clause for
    everything else that was found to be wrong: one link or folder that cannot be changed does not keep the others.

    `newest`: the step that was just saved. A folder whose manifest cannot be read is left alone.
    """
    losses = _losses(folder)
    links: dict[str, int | None] = {LATEST: newest}
    if not retention.best:
        links[BEST] = None  # it would keep nothing from being deleted
    elif best := best_steps(losses):
        links[BEST] = best[0]
    gone: list[int] = []
    notes: list[str] = []
    for link, step in links.items():
        with _noted(notes, f"the link {link} could not be changed"):
            if aside := point(folder, link, step):
                notes.append(f"{link} was a folder, a copy of a checkpoint, and was renamed to {aside.name}")
    for step in retention.expendable(losses):
        name = checkpoint_name(step)
        with _noted(notes, f"{name} could not be deleted"):
            if step != newest:
                delete(folder / name)
                gone.append(step)
    return gone, notes


@contextmanager
def _noted(notes: list[str], failure: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        notes.append(f"{failure}: {error}")


def point(folder: Path, link: str, step: int | None) -> Path | None:
    """Make a link point to a step's folder, or remove it (None); a link that stays is there at any moment.

    A copy that follows links (`cp -rL`) leaves a folder in the place of the link. Such a folder is renamed first; its
    new path is returned.
    """
    path = folder / link
    aside = None
    if path.is_dir() and not path.is_symlink():
        aside = free_name(path.with_name(f"{link}.copy-{{}}"))
        path.rename(aside)
    if step is None:
        path.unlink(missing_ok=True)
    else:
        temporary = folder / f"{link}{TEMPORARY}"
        remove(temporary)
        temporary.symlink_to(checkpoint_name(step), target_is_directory=True)
        temporary.replace(path)
    return aside


def delete(checkpoint: Path) -> None:
    """Delete a checkpoint. It loses its final name first: what has that name is complete at any moment."""
    doomed = checkpoint.with_name(f"{checkpoint.name}.deleted{TEMPORARY}")
    remove(doomed)
    checkpoint.rename(doomed)
    remove(doomed)


def clean(folder: Path) -> None:
    """Remove what a save or a deletion that was killed has left: nothing can be loaded from it."""
    for entry in folder.glob(f"*{TEMPORARY}"):
        remove(entry)


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
