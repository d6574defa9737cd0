"""Functions that find a valid checkpoint and load a run's state from it."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from titan_launch.checkpoint.index import Index, check_step, ended_early, read_index, read_into
from titan_launch.checkpoint.manifest import (
    DamagedCheckpointError,
    check,
    checkpoint_name,
    checkpoint_steps,
    read_manifest,
)
from titan_launch.checkpoint.retention import best_steps, set_all_aside, validation_losses
from titan_launch.checkpoint.snapshot import map_leaves
from titan_launch.checkpoint.state import SizedPart, TrainingState, Values, rank_key
from titan_launch.checkpoint.store import CheckpointStore
from titan_launch.config.sections.checkpoint import CheckpointConfig
from titan_launch.core.errors import KeyPath, UserError, config_error, leaves, listed
from titan_launch.core.globs import matches
from titan_launch.core.terminal import counted
from titan_launch.distributed.collectives import on_all_ranks, on_rank_0, on_rank_0_slowly, warn
from titan_launch.distributed.dtensor import Shard, local_tensor, own_box

_log = logging.getLogger(__name__)


START_AGAIN = 'set checkpoint.load = "none" to start at step 0; the earlier run is then moved aside'
"""Remedy if all checkpoints of a run are damaged."""


def newest_valid(
    folder: Path, *, set_damaged_aside: bool, remedy: str = START_AGAIN, store: CheckpointStore | None = None
) -> Path | None:
    """Return the newest undamaged checkpoint of a folder; None if neither the folder nor `store` has a checkpoint.

    Collective: every rank reads a share of the files. Damaged checkpoints are logged. With `set_damaged_aside`, damaged
    checkpoints are renamed if an older undamaged checkpoint is found, and the link `latest` leads to it. Raises
    UserError if all checkpoints are damaged. `remedy`: last clause of the message of this error.

    `store`: on rank 0, the copies of the checkpoints in an object store; None without copies, and on other ranks. If
    the folder has no undamaged checkpoint of a step, the copy of the step is downloaded.
    """
    local, stored = on_rank_0(lambda: (checkpoint_steps(folder), set[int]() if store is None else store.known))

    def fetch(step: int) -> tuple[str, str | None]:
        assert store is not None
        return f"{store.url}/{checkpoint_name(step)}", store.fetch(step)

    damaged: list[Path] = []
    for step in sorted({*local, *stored}, reverse=True):
        candidate = folder / checkpoint_name(step)
        reasons = {str(candidate): damage(candidate)} if step in local else {}
        if step in stored and None not in reasons.values():
            reasons |= [on_rank_0_slowly(partial(fetch, step))]
        for place, reason in reasons.items():
            if reason is not None:
                warn(_log, "%s is damaged, so it is not loaded: %s", place, reason)
        if None in reasons.values():
            if set_damaged_aside:
                on_rank_0(partial(set_all_aside, folder, damaged, step))
            return candidate
        damaged.append(candidate)
    if damaged:
        names = ", ".join(path.name for path in damaged)
        raise UserError(f"all checkpoints in {folder} are damaged ({names}); {remedy}")
    return None


def damage(checkpoint: Path) -> str | None:
    """Return a clause that describes the damage of a checkpoint; None if the checkpoint is valid. Collective: every
    rank reads a share of the files. Raises UserError if rank 0 has the checkpoint, and another rank does not see its
    folder."""

    def look() -> str | None:
        try:
            if not checkpoint.is_dir():
                return _NO_FOLDER
            manifest = check(checkpoint, share=slice(dist.get_rank(), None, dist.get_world_size()))
            if dist.get_rank() == 0:
                check_step(checkpoint, manifest.step)
        except DamagedCheckpointError as error:
            return str(error)
        except (OSError, ValueError) as error:  # invalid file names, files that disappear
            return f"it cannot be read: {error}"
        return None

    reasons = on_all_ranks(look)
    if reasons[0] is None and _NO_FOLDER in reasons:
        rank = reasons.index(_NO_FOLDER)
        remedy = f"put {checkpoint.parent} on a shared file system (for checkpoints of this run: set job.dump_folder)"
        raise UserError(f"rank {rank} does not see {checkpoint}, but rank 0 does; {remedy}")
    return next(filter(None, reasons), None)


_NO_FOLDER = "its folder is missing"


def _first_reason(find: Callable[[], str | None]) -> str | None:
    """Return the first reason that `find` returns on any rank, on all ranks; None if it returns None everywhere.
    Collective."""
    return next((reason for reason in on_all_ranks(find) if reason is not None), None)


def result_step(folder: Path, newest: int) -> int:
    """Return the step of the checkpoint that is the result of a run.

    The result is the newest checkpoint. If early stopping ended the run, the result is the checkpoint with the lowest
    finite validation loss, if there is one. `folder`: folder of the run's checkpoints. `newest`: step of the newest
    checkpoint. Raises DamagedCheckpointError if the newest checkpoint has an invalid index or record.
    """
    best = best_steps(validation_losses(folder)) if ended_early(folder / checkpoint_name(newest)) else []
    return best[0] if best else newest


def find_checkpoint(path: Path, key: KeyPath) -> Path:
    """Return the checkpoint that a path in the job file names. Collective.

    If the path is a run folder or a folder of checkpoints, return its newest valid checkpoint. Otherwise return the
    path itself; if it is a link, or a link to a link, return the folder to which it leads. If all checkpoints of the
    folder are damaged, raises UserError. If the path is no folder or no valid checkpoint, raises ConfigError for `key`.
    All ranks raise the same error.
    """
    for folder in (path / "checkpoints", path):
        if on_rank_0(lambda folder=folder: bool(checkpoint_steps(folder))):  # type: ignore[misc]
            remedy = f"set {'.'.join(map(str, key))} to another run's folder or checkpoint"
            found = newest_valid(folder, set_damaged_aside=False, remedy=remedy)
            assert found is not None
            return found
    if not on_rank_0(path.is_dir):
        reason = "there is no such folder; name a checkpoint (.../step-100) or a run's folder"
        raise config_error(key, reason, str(path))
    # A run that still trains may change its link `latest` now.
    checkpoint = on_rank_0(lambda: _target(path))
    damaged = damage(checkpoint)
    if damaged is not None:
        raise config_error(key, f"cannot be loaded as a checkpoint: {damaged}; name another checkpoint", str(path))
    return checkpoint


def _target(path: Path) -> Path:
    """Follow links until the path is no link. Links among its parents are kept, because other hosts may have them with
    other targets."""
    while path.is_symlink():
        path = path.parent / os.readlink(path)
    return path


def find_result(path: Path, key: KeyPath) -> Path:
    """Return what `find_checkpoint` returns, or the best checkpoint of a run that ended early. Collective.

    The best checkpoint has the lowest validation loss. If the path names a single checkpoint, that checkpoint is
    returned. Raises the errors of `find_checkpoint`.
    """
    found = find_checkpoint(path, key)
    if found.parent not in (path, path / "checkpoints"):  # the path names a checkpoint
        return found

    def look() -> Path:
        try:
            return found.with_name(checkpoint_name(result_step(found.parent, read_manifest(found).step)))
        except DamagedCheckpointError as error:
            reason = f"{found} cannot be loaded: {error}; name another checkpoint"
            raise config_error(key, reason, str(path)) from None

    result = on_rank_0(look)
    return found if result == found else find_checkpoint(result, key)


EXCLUDED_PARTS = ("optimizer", "ema", "step", "data", "random")
"""Values of `checkpoint.exclude_from_loading` besides globs of parameters and buffers."""


@dataclass(frozen=True)
class Selection:
    """The parts of a checkpoint to load."""

    excluded: tuple[str, ...] = ()
    """Value of `checkpoint.exclude_from_loading`."""

    only_weights: bool = False
    """True loads parameters and buffers only."""

    def takes(self, part: str) -> bool:
        """Return True if `part`, one of `EXCLUDED_PARTS`, is loaded."""
        return not self.only_weights and part not in self.excluded

    @cached_property
    def globs(self) -> tuple[str, ...]:
        """The entries of `excluded` that are globs of parameters and buffers."""
        return tuple(entry for entry in self.excluded if entry not in EXCLUDED_PARTS)

    def takes_tensor(self, name: str) -> bool:
        """Return True if the parameter or buffer `name` is loaded."""
        return not any(matches(glob, name) for glob in self.globs)


EVERYTHING = Selection()


def partly_loaded(folder: Path, config: CheckpointConfig) -> Path | None:
    """Return the checkpoint of `folder` that `checkpoint.load` names by its step, if `exclude_from_loading` excludes
    parts of it; otherwise None. `folder`: folder of the run's checkpoints."""
    step = config.load
    return folder / checkpoint_name(step) if isinstance(step, int) and config.exclude_from_loading else None


def load_state(checkpoint: Path, state: TrainingState, selection: Selection) -> None:
    """Load the selected parts of a valid checkpoint, which any number of ranks may have written. Collective.

    Raises UserError on all ranks if the checkpoint is of another model or optimizer, or if its files are damaged.
    Raises ConfigError if a glob of `selection` matches nothing, or if the checkpoint omits parameters and
    `model.weights` does not name the folder that has them.
    """
    try:
        _load(checkpoint, state, selection)
    except (DamagedCheckpointError, OSError) as error:
        remedy = "restore the files of this checkpoint, or name another one"
        raise UserError(f"the checkpoint {checkpoint} cannot be loaded: {_reason(error)}; {remedy}") from error


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, DamagedCheckpointError) else f"{type(error).__name__}: {error}"


def _load(checkpoint: Path, state: TrainingState, selection: Selection) -> None:
    index = read_index(checkpoint)
    saved = {name: tensor.shape for name, tensor in index.items()}
    own_shapes, saved_shapes = state.shapes(), _below("model", saved)
    omitted = _omitted(checkpoint, state, [name for name in own_shapes if name not in saved_shapes], selection)
    own_shapes = {name: shape for name, shape in own_shapes.items() if name not in omitted}
    names = _check_model(checkpoint, own_shapes, saved_shapes, selection)
    updated = {key.rpartition(".")[0] for key in _below("optimizer", saved)} if selection.takes("optimizer") else set()
    updated = {name for name in updated if selection.takes_tensor(name)}
    target: dict[str, Any] = dict(state.weights.targets(names, updated))
    _check_optimizer(checkpoint, target["optimizer"], _below("optimizer", saved))
    for name, part in state.parts.items():
        if isinstance(part, SizedPart):
            target[name] = part.targets(_below(name, saved) if _takes(selection, name, "") else {})
        else:
            target[name] = _known(part.state_dict(), name, saved)
    own, stream = rank_key(), state.random_key
    has_random = selection.takes("random") and f"random.{stream}.torch" in saved
    if has_random:
        target["random"] = {stream: _known(state.random.state_dict(), f"random.{stream}", saved)}
    has_statistics = selection == EVERYTHING and _has_local_statistics(state, saved)
    if has_statistics:
        target["local_statistics"] = {own: state.local_statistics.targets()}
    _read(checkpoint, index, target)
    target = map_leaves(target, lambda leaf: leaf.local if isinstance(leaf, Shard) else leaf)
    try:
        if has_random:
            state.random.load_state_dict(target["random"][stream])  # first: if it is invalid, nothing else is loaded
        state.weights.load_state_dict({"model": target["model"], "optimizer": target["optimizer"]})
        if state.base is not None:
            state.base.read(omitted)  # before the other parts: a moving average begins with the parameters
        for name, part in state.parts.items():
            part.load_state_dict({k: value for k, value in target[name].items() if _takes(selection, name, k)})
    except ValueError as error:
        raise DamagedCheckpointError(f"it has an invalid state: {error}") from error
    if has_random:
        state.random.load_state_dict(target["random"][stream])  # again, because loading may draw random numbers
    elif selection.takes("random"):
        state.random.seed_new_stream(int(target["progress"]["step"]))
    if has_statistics:
        state.local_statistics.load_state_dict(target["local_statistics"][own])
    _log_ema(state, saved, selection)


def _read(checkpoint: Path, index: Index, target: Mapping[str, Any]) -> None:
    """Read tensors of a checkpoint into `target`: nested dicts whose leaves are DTensors, plain tensors, and `Shard`s.
    Collective: if a rank cannot read its parts, all ranks raise DamagedCheckpointError."""

    def read_parts() -> str | None:
        try:
            for name, leaf in leaves(target):
                tensor, part = index[name], leaf
                if not isinstance(leaf, Shard):
                    part = Shard(local_tensor(leaf), own_box(leaf.shape, leaf)[0], tuple(leaf.shape))
                if part.size != tensor.shape:
                    raise ValueError(f"{name} has the shape {part.size} here, but {tensor.shape} in the checkpoint")
                read_into(part.local.detach(), part.offsets, checkpoint, tensor)
        except Exception as error:
            return _reason(error)
        return None

    reason = _first_reason(read_parts)
    if reason is not None:
        raise DamagedCheckpointError(reason)


def _omitted(checkpoint: Path, state: TrainingState, missing: Collection[str], selection: Selection) -> Collection[str]:
    """Return the names of the tensors that the checkpoint omits because the weights folder in its manifest has their
    values. Tensors that `selection` excludes are not returned. Collective. `missing`: names of all tensors that the
    checkpoint lacks. Raises ConfigError if `model.weights` does not name this folder."""
    base = read_manifest(checkpoint).base
    missing = [name for name in missing if selection.takes_tensor(name)]
    if base is None or not base.omitted or not missing or state.base is None:
        return ()
    return state.base.find(checkpoint, base, missing)


def _has_local_statistics(state: TrainingState, saved: Mapping[str, Any]) -> bool:
    """Return True if the checkpoint has the BatchNorm statistics of each rank of this run, and no others. A rank whose
    pipeline stages have no BatchNorm has no statistics. Collective."""
    there = _below("local_statistics", saved)
    if not there:
        return False
    own = state.local_statistics.targets().keys()
    numbers = on_all_ranks(lambda: len(own) if own == _below(rank_key(), there).keys() else None)
    return None not in numbers and sum(filter(None, numbers)) == len(there)


def _takes(selection: Selection, part: str, key: str) -> bool:
    """Return True if the value `key` of `part`, a part of the training state, is loaded."""
    if part == "ema":
        return selection.takes("ema") and selection.takes_tensor(key)
    is_position = part in ("consumed", "stream") or (part == "progress" and key in ("samples_seen", "samples_skipped"))
    return selection.takes("data" if is_position else "step")


def _log_ema(state: TrainingState, saved: Mapping[str, Any], selection: Selection) -> None:
    """Log a line if the run begins a new moving average of the weights, or drops the average of the checkpoint."""
    is_loaded = selection.takes("ema") and bool(_below("ema", saved))
    if "ema" in state.parts and not is_loaded:
        reason = "the average of the checkpoint is not loaded" if _below("ema", saved) else "the checkpoint has none"
        _log.info("moving average of the weights: %s; the new average begins with the loaded parameters", reason)
    elif "ema" not in state.parts and is_loaded:
        warn(_log, "the moving average of the weights in the checkpoint is dropped, because ema.decay is not set")


def _below(prefix: str, saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of `saved` whose keys begin with `prefix` and a dot. The result has the rest of each key."""
    return {key[len(prefix) + 1 :]: value for key, value in saved.items() if key.startswith(f"{prefix}.")}


def _known(values: Mapping[str, Any], prefix: str, saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of `values` whose keys the checkpoint has. `prefix`: prefix of the keys in the checkpoint.
    `saved`: all keys of the checkpoint."""
    there = _below(prefix, saved)
    return {key: value for key, value in values.items() if key in there}


def _check_model(
    checkpoint: Path,
    own: Mapping[str, tuple[int, ...]],
    saved: Mapping[str, tuple[int, ...]],
    selection: Selection,
) -> set[str]:
    """Return the names of the tensors to load. Tensors that `selection` excludes are neither loaded nor compared.
    Raises UserError if the model (`own`) and the checkpoint (`saved`) have different names or shapes, and ConfigError
    if a glob matches nothing."""
    for glob in selection.globs:
        if not any(matches(glob, name) for name in (*own, *saved)):
            reason = f'"{glob}" matches no parameter or buffer; other allowed values: {", ".join(EXCLUDED_PARTS)}'
            raise config_error(("checkpoint", "exclude_from_loading"), reason, selection.excluded)
    own = {name: shape for name, shape in own.items() if selection.takes_tensor(name)}
    saved = {name: shape for name, shape in saved.items() if selection.takes_tensor(name)}
    differences = list(_differences(own, saved))
    if differences:
        text = "\n  ".join([f"the checkpoint {checkpoint} is of another model:", *differences])
        remedy = "list the tensors to exclude in checkpoint.exclude_from_loading"
        raise UserError(f"{text}\nto begin from another model's checkpoint, {remedy}")
    return set(own)


def _check_optimizer(checkpoint: Path, own: Mapping[str, Values], saved: Mapping[str, Any]) -> None:
    """Raise UserError on all ranks if the checkpoint lacks optimizer state of a parameter. Usually the saved run had
    another algorithm, or no master weights. Collective."""

    def find_missing() -> str | None:
        for name, values in sorted(own.items()):
            missing = [key for key in values if f"{name}.{key}" not in saved]
            if missing:
                kept = [key for key in _below(name, saved) if "." not in key]
                found, needed = (", ".join(sorted(keys)) or "no state" for keys in (kept, values))
                return f"for {name}, the checkpoint has {found}, and this job needs {needed}"
        return None

    reason = _first_reason(find_missing)
    if reason is not None:
        raise UserError(
            f"the checkpoint {checkpoint} is of another optimizer: {reason}; for new optimizer state, start a new "
            "run: set a new job.name, checkpoint.load to the path of this checkpoint, and "
            'checkpoint.exclude_from_loading = ["optimizer"]'
        )


def _differences(own: Mapping[str, tuple[int, ...]], saved: Mapping[str, tuple[int, ...]]) -> Iterator[str]:
    missing = [name for name in own if name not in saved]
    unexpected = [name for name in saved if name not in own]
    shapes = [f"{n} is {own[n]}, and {saved[n]} in the checkpoint" for n in own if n in saved and own[n] != saved[n]]
    for title, names in (
        ("missing in the checkpoint", missing),
        ("only in the checkpoint", unexpected),
        ("of another shape", shapes),
    ):
        if names:
            yield f"{counted(len(names), 'tensor')} {title}: {listed(names, most=8)}"
