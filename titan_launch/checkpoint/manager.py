"""The checkpoints of a run: when one is written, by whom, and what became of it."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from titan_launch import __version__
from titan_launch.checkpoint.background import build_background
from titan_launch.checkpoint.loading import EVERYTHING, load_state, newest_valid
from titan_launch.checkpoint.manifest import Manifest, checkpoint_name, complete_steps
from titan_launch.checkpoint.retention import Retention
from titan_launch.checkpoint.snapshot import shards_of
from titan_launch.checkpoint.state import Progress, TrainingState
from titan_launch.checkpoint.writer import WriteRequest, Written
from titan_launch.config.sections.checkpoint import CheckpointConfig
from titan_launch.core.errors import RunError
from titan_launch.core.fingerprint import Fingerprint
from titan_launch.distributed.collectives import warn

_log = logging.getLogger(__name__)

_SECONDS_AFTER_AN_ERROR = 60
"""How long a save may still take when the run ends in an error."""


@dataclass(frozen=True)
class Origin:
    """What a manifest says of the run."""

    world_size: int
    config_digest: str
    gradient_accumulation: Mapping[str, Any]
    activation_checkpoint: Mapping[str, Any]
    data: Mapping[str, Fingerprint]


class CheckpointManager:
    """Saves into, and resumes from, `step-N` folders.

    A folder with its final name is complete, and none is ever written into twice. At most one is being written. A save
    that fails is reported, and training goes on: the checkpoint before it is still there, and the next save tries
    again. Only at the end of the run is it an error.
    """

    def __init__(
        self,
        folder: Path,
        config: CheckpointConfig,
        state: TrainingState,
        progress: Progress,
        origin: Origin,
        device: torch.device,
    ):
        """`progress` is one of the parts of `state`. Collective."""
        self._folder = folder
        self._state = state
        self._progress = progress
        self._origin = origin
        self._retention = Retention(config.keep_latest, config.keep_every, config.keep_best)
        self._background = build_background(config.async_mode if config.enable else "disabled", device)
        self._pending: Future[Written] | None = None
        self._pending_step = 0
        self._pending_stall_s = 0.0
        self._failure = ""
        self._stall_s = 0.0
        self._failed_saves = 0

    def get_ready(self) -> None:
        """Load what the first save needs, and reserve its memory, after the first step: then the state is complete, and
        the first save does not make training wait for that. Collective."""
        try:
            self._background.get_ready(lambda: shards_of(self._state.state_dict()))
        except OSError as error:  # on all ranks alike
            warn(_log, "there is no room yet for checkpoints: %s; training goes on, and every save tries again", error)

    def save(self, validation_loss: float | None = None) -> None:
        """Begin a checkpoint of the step just finished; collective. `validation_loss`: of this step, if there is one.

        Waits for the one before, and until the state may be changed again.
        """
        start = time.perf_counter()
        self._settle()
        manifest = Manifest(
            step=self._progress.step,
            validation_loss=validation_loss,
            versions={"torch": torch.__version__, "titan_launch": __version__},
            files={},
            **vars(self._origin),
        )
        request = WriteRequest(self._folder, manifest, self._retention)
        self._pending_step = self._progress.step
        try:
            self._pending = self._background.write(request, shards_of(self._state.state_dict()))
        except OSError as error:  # no room for the copy, on all ranks alike
            self._note_failure(error)
        self._pending_stall_s = time.perf_counter() - start
        self._stall_s += self._pending_stall_s
        self.poll()

    def poll(self) -> bool:
        """Report a save that has ended meanwhile. Returns whether one is in flight on this rank; costs nothing."""
        if self._pending is not None and self._pending.done():
            self._settle()
        return self._pending is not None

    def finish(self) -> None:
        """Wait for the save in flight. Raises RunError when the last save has failed."""
        start = time.perf_counter()
        self._settle()
        self._stall_s += time.perf_counter() - start
        if self._failure:
            steps = complete_steps(self._folder)
            newest = f"the run can go on from {checkpoint_name(max(steps))}" if steps else "there is no checkpoint yet"
            raise RunError(f"{self._failure}; {newest}")

    def take_measurements(self) -> dict[str, float]:
        """`time/checkpoint_stall_s` since the last call, and `checkpoint/failed_saves` of this process."""
        stall, self._stall_s = self._stall_s, 0.0
        return {"time/checkpoint_stall_s": stall, "checkpoint/failed_saves": self._failed_saves}

    def return_to_last(self) -> Path | None:
        """Go back to the newest valid checkpoint of this run; collective. Waits for the save in flight.

        Returns its folder, or None where there is none yet. Every part of the state is taken over.
        """
        self._settle()
        checkpoint = newest_valid(self._folder, set_damaged_aside=True)
        if checkpoint is not None:
            load_state(checkpoint, self._state, EVERYTHING)
        return checkpoint

    def close(self, *, after_error: bool = False) -> None:
        """End what writes in the background. After an error a save in flight has a minute to end."""
        if self._pending is not None:
            try:
                self._pending.exception(_SECONDS_AFTER_AN_ERROR if after_error else None)
            except FutureTimeoutError:
                warn(_log, "%s was given up: the run ends in an error", checkpoint_name(self._pending_step))
            else:
                self._settle()
        self._background.close()

    def _settle(self) -> None:
        """Wait for the save in flight, and say what became of it."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        error = pending.exception()
        if isinstance(error, Exception):
            self._note_failure(error)
            return
        written = pending.result()
        self._failure = ""
        path = self._folder / checkpoint_name(written.step)
        size, stall = written.bytes / 1e6, self._pending_stall_s
        _log.info("saved %s (%.1f MB in %.2f s; training stood still for %.2f s)", path, size, written.seconds, stall)
        if written.deleted:
            _log.info("deleted %s", ", ".join(map(checkpoint_name, written.deleted)))
        if written.warning:
            warn(_log, "%s: %s", path, written.warning)

    def _note_failure(self, error: Exception) -> None:
        self._failed_saves += 1
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        self._failure = f"step {self._pending_step} could not be saved to {self._folder}: {reason}"
        warn(_log, "%s; training goes on, and the next save tries again", self._failure)
