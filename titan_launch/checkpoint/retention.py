"""The request to write a checkpoint, deletion of old checkpoints, and the links `latest` and `best`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from titan_launch.checkpoint.manifest import (
    DamagedCheckpointError,
    Manifest,
    checkpoint_name,
    checkpoint_steps,
    read_manifest,
)
from titan_launch.core.files import free_name, remove

LATEST, BEST = "latest", "best"
"""Names of the links to the newest checkpoint, and to the checkpoint with the lowest validation loss."""

TEMPORARY = ".tmp"
"""Suffix of the names of folders during their creation or deletion, and of a new link before it replaces the old
one."""


@dataclass(frozen=True)
class Retention:
    """The settings `keep_latest`, `keep_every` and `keep_best` of `[checkpoint]`, which decide which checkpoints are
    kept."""

    latest: int
    every: int
    best: int

    def expendable(self, losses: Mapping[int, float | None]) -> list[int]:
        """Return the steps whose checkpoints are to be deleted. The newest checkpoint is always kept. If `latest` is 0,
        all checkpoints are kept. `losses`: validation loss of every checkpoint, by step."""
        steps = sorted(losses, reverse=True)
        if not self.latest:
            return []
        kept = {*steps[: self.latest], *best_steps(losses)[: self.best]}
        kept |= {step for step in steps if self.every and step % self.every == 0}
        return [step for step in steps if step not in kept]


@dataclass(frozen=True)
class WriteRequest:
    """A request to save a checkpoint. It is equal on all ranks, except for `step_in_copy`."""

    folder: Path
    """Folder of all checkpoints of the run, on a file system that all ranks share."""

    manifest: Manifest
    """Manifest with empty `files`. The writer adds the files."""

    retention: Retention
    creates_folder: bool = True
    """True if the save creates a missing folder. False after the first successful save of this process: a missing
    folder then means that the run folder was deleted, moved or replaced, so the save fails."""

    step_in_copy: int | None = None
    """Step of the checkpoint that rank 0 is copying to `checkpoint.store` when the save begins. The save must not
    delete this checkpoint. None if there is no such checkpoint, and on the other ranks."""


@dataclass(frozen=True)
class Written:
    """The result of a save: a complete checkpoint."""

    step: int
    bytes: int
    seconds: float
    deleted: tuple[int, ...]
    """Steps of the deleted older checkpoints."""

    warning: str = ""
    """Problems that occurred after the checkpoint was complete, as clauses. Empty without problems."""


def best_steps(losses: Mapping[int, float | None]) -> list[int]:
    """Return the steps whose validation loss is finite, the lowest loss first. Of equal losses, the older step comes
    first."""
    known = [(loss, step) for step, loss in losses.items() if loss is not None and math.isfinite(loss)]
    return [step for _, step in sorted(known)]


def tidy(
    folder: Path, newest: int, retention: Retention, step_in_copy: int | None = None
) -> tuple[list[int], list[str]]:
    """Update the links, then delete the checkpoints that `retention` does not keep. Return the deleted steps and one
    clause for each problem.

    If a link or folder cannot be changed, this function continues with the other links and folders. A folder whose
    manifest cannot be read stays. The checkpoints of `newest`, the step that was just saved, and of `step_in_copy` are
    never deleted.
    """
    losses = validation_losses(folder)
    links: dict[str, int | None] = {LATEST: newest}
    if not retention.best:
        links[BEST] = None  # without `keep_best`, the best checkpoint may be deleted
    elif best := best_steps(losses):
        links[BEST] = best[0]
    gone: list[int] = []
    notes: list[str] = []
    for link, step in links.items():
        with _noted(notes, f"the link {link} could not be changed"):
            if aside := point(folder, link, step):
                notes.append(f"{link} was a folder (a copy of a checkpoint), not a link; renamed to {aside.name}")
    for step in retention.expendable(losses):
        name = checkpoint_name(step)
        with _noted(notes, f"{name} could not be deleted"):
            if step not in (newest, step_in_copy):
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
    """Point a link to a step's folder. Remove the link if `step` is None. The replacement is atomic.

    If the run folder was copied with `cp -rL`, a folder is in place of the link. Rename this folder first, and return
    its new path. Otherwise return None.
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
    """Delete a checkpoint. The folder is renamed first, so that a `step-N` folder is always complete."""
    doomed = checkpoint.with_name(f"{checkpoint.name}.deleted{TEMPORARY}")
    remove(doomed)
    checkpoint.rename(doomed)
    remove(doomed)


def clean(folder: Path) -> None:
    """Remove the temporary folders and links that interrupted saves and deletions have left. Entries that cannot be
    removed stay."""
    for entry in folder.glob(f"*{TEMPORARY}"):
        with suppress(OSError):  # NFS keeps a deleted file that a process has open; the next save tries again
            remove(entry)


def set_aside(checkpoint: Path) -> Path:
    """Rename a damaged checkpoint, so that it is neither loaded nor overwritten. Return its new path."""
    aside = free_name(checkpoint.with_name(f"{checkpoint.name}.damaged-{{}}"))
    checkpoint.rename(aside)
    return aside


def set_all_aside(folder: Path, damaged: Sequence[Path], newest: int) -> None:
    """Rename each checkpoint in `damaged` that exists; all are in `folder`. The link `latest` then leads to the
    checkpoint of `newest`, and a link `best` that leads to no checkpoint is removed. A folder in place of `latest`
    stays, and so does a link that cannot be changed."""
    for checkpoint in damaged:
        if checkpoint.exists():
            set_aside(checkpoint)
    with suppress(OSError):  # the next save tries again, and reports the error
        if (folder / LATEST).is_symlink() or not (folder / LATEST).exists():
            point(folder, LATEST, newest)
        if not (folder / BEST).exists():
            (folder / BEST).unlink(missing_ok=True)  # the next save links the best remaining checkpoint


def validation_losses(folder: Path) -> dict[int, float | None]:
    """Return the validation loss of every checkpoint with a readable manifest, by step. The loss is None if the run did
    not validate after the step."""
    losses: dict[int, float | None] = {}
    for step in checkpoint_steps(folder):
        try:
            losses[step] = read_manifest(folder / checkpoint_name(step)).validation_loss
        except DamagedCheckpointError:
            continue
    return losses
