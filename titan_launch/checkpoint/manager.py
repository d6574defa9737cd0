"""Checkpoints of a run: written by all ranks with PyTorch's Distributed Checkpoint (DCP), complete or not there."""

from __future__ import annotations

import logging
import pickle
import re
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.optim import Optimizer

from titan_launch.checkpoint.state import ModelAndOptimizer, Progress, RandomState
from titan_launch.errors import UserError

_log = logging.getLogger(__name__)
_STEP = re.compile(r"step-(\d+)")


class CheckpointManager:
    """Saves into, and resumes from, `step-N` folders.

    A save writes to `step-N.tmp` and renames when every rank is done, so a folder with its final name is complete, and
    none is ever written into twice. (A save over an old checkpoint that dies half-way would load as a mix of both.)
    """

    def __init__(self, folder: Path, model: nn.Module, optimizer: Optimizer, progress: Progress, device: torch.device):
        self._folder = folder
        self._weights = ModelAndOptimizer(model, optimizer)
        self._progress = progress
        self._random = RandomState(device)

    def save(self) -> None:
        """Write a checkpoint of the step just finished; collective."""
        final = self._folder / f"step-{self._progress.step}"
        temporary = final.with_name(final.name + ".tmp")
        _on_main(lambda: _remove_incomplete(temporary, final))
        state = {
            "weights": self._weights.state_dict(),
            "progress": self._progress.state_dict(),
            "random": {self._random.key(): self._random.capture()},
        }
        # Replicated values (buffers, the optimizer's step counts) come from rank 0. By default DCP takes each from the
        # least loaded rank, tensor by tensor.
        dcp.save(state, checkpoint_id=temporary, planner=DefaultSavePlanner(dedup_save_to_lowest_rank=True))
        _on_main(lambda: temporary.rename(final))
        _log.info("saved %s", final)

    def load_latest(self) -> bool:
        """Resume from the newest complete checkpoint, whatever the number of ranks that wrote it; collective.

        Returns False when there is none.
        """
        step = _on_main(lambda: max(complete_steps(self._folder), default=None))
        if step is None:
            return False
        folder = self._folder / f"step-{step}"
        try:
            self._load(folder)
        except (dcp.api.CheckpointException, pickle.UnpicklingError, EOFError, OSError) as error:
            raise UserError(_unreadable(folder, error)) from error
        _log.info("resumed from %s", folder)
        return True

    def _load(self, folder: Path) -> None:
        reader = dcp.FileSystemReader(folder)
        saved = reader.read_metadata().state_dict_metadata.keys()
        weights = {key.removeprefix("weights.") for key in saved if key.startswith("weights.")}
        state: dict[str, Any] = {"weights": self._weights.targets(weights), "progress": self._progress.state_dict()}
        key, random = self._random.key(), self._random.capture()
        if all(f"random.{key}.{name}" in saved for name in random):
            state["random"] = {key: random}
        dcp.load(state, storage_reader=reader, planner=DefaultLoadPlanner())
        self._weights.load_state_dict(state["weights"])
        self._progress.load_state_dict(state["progress"])
        if "random" in state:
            self._random.restore(state["random"][key])


def complete_steps(folder: Path) -> list[int]:
    """The steps of the complete checkpoints in a folder (which need not exist), in no order."""
    found = (_STEP.fullmatch(entry.name) for entry in folder.glob("step-*"))
    return [int(match[1]) for match in found if match and (folder / match[0] / ".metadata").exists()]


def _unreadable(folder: Path, error: BaseException) -> str:
    cause = next(iter(error.failures.values()))[0] if isinstance(error, dcp.api.CheckpointException) else error
    return (
        f"the checkpoint {folder} cannot be loaded: {type(cause).__name__}: {cause}\n"
        'Move it away to resume from the one before, or start anew with checkpoint.load = "none"'
    )


def _remove_incomplete(*folders: Path) -> None:
    """Delete what a save that was killed has left: nothing can be loaded from it."""
    for folder in folders:
        if not (folder / ".metadata").exists() or folder.suffix == ".tmp":
            shutil.rmtree(folder, ignore_errors=True)


def _on_main(action: Any) -> Any:
    """What `action` returns on rank 0, on every rank: only one rank looks at and changes the folder."""
    result = [action() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(result, src=0)
    return result[0]
