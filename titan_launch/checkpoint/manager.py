"""The manager of a run's checkpoints: it begins saves, and reports their results."""

from __future__ import annotations

import logging
import time
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from pathlib import Path

import torch

from titan_launch import __version__
from titan_launch.checkpoint.background import build_background
from titan_launch.checkpoint.loading import EVERYTHING, load_state, newest_valid, partly_loaded
from titan_launch.checkpoint.manifest import Manifest, Origin, checkpoint_name, complete_steps
from titan_launch.checkpoint.retention import Retention, WriteRequest, Written
from titan_launch.checkpoint.snapshot import shards_of
from titan_launch.checkpoint.state import Progress, TrainingState
from titan_launch.checkpoint.store import CheckpointStore
from titan_launch.config.sections.checkpoint import CheckpointConfig
from titan_launch.core.errors import RunError
from titan_launch.core.phantom import VERSION_KEY, is_phantom
from titan_launch.distributed.collectives import on_rank_0_slowly, warn

_log = logging.getLogger(__name__)

_SECONDS_AFTER_AN_ERROR = 60
"""Longest time that `close` waits for a save in flight, and for copies, after an error of the run."""


class CheckpointManager:
    """The object that saves and loads the checkpoints of a run, in `step-N` folders.

    A folder `step-N` is complete as soon as it exists, and is never written again. At most one save is in flight. After
    a failed save a warning is logged, older checkpoints stay, and training continues. If the last save of the run
    fails, `finish` raises RunError.
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
        """Create the manager, and the writer for `checkpoint.async_mode`. Without `checkpoint.enable`, use the writer
        of `async_mode = "disabled"`. Collective. `folder`: folder of all checkpoints. `progress`: the part `progress`
        of `state`."""
        self._folder = folder
        self._state = state
        self._progress = progress
        self._origin = origin
        self._retention = Retention(config.keep_latest, config.keep_every, config.keep_best)
        self._partly_loaded = partly_loaded(folder, config)
        self._has_store = config.store is not None
        self._store: CheckpointStore | None = None
        self._background = build_background(config.async_mode if config.enable else "disabled", device)
        self._pending: Future[Written] | None = None
        self._pending_step = 0
        self._pending_stall_s = 0.0
        self._failure = ""
        self._has_saved = False
        self._stall_s = 0.0
        self._failed_saves = 0

    def copy_to(self, store: CheckpointStore | None) -> None:
        """From now on, copy checkpoints to `store` in the background, as the key `checkpoint.store` describes. Begin
        with the present checkpoints. `store`: None on other ranks than rank 0, and without copies."""
        self._store = store
        if store is not None:
            store.begin()

    def get_ready(self) -> None:
        """Import the writer and reserve its memory, so that this work does not delay the first save. Collective. If a
        rank has too little memory, log a warning.

        Call this method after the first step, because the optimizer state is complete then.
        """
        try:
            self._background.get_ready(lambda: shards_of(self._state.state_dict()))
        except OSError as error:  # all ranks have the same error
            warn(
                _log,
                "could not allocate host memory for checkpoints: %s. Training continues. Each save tries again; if "
                "the memory still does not suffice, that checkpoint is not saved",
                error,
            )

    def save(self, validation_loss: float | None = None) -> None:
        """Begin a checkpoint of the last finished step. Collective. `validation_loss`: validation loss of that step, or
        None if the run did not validate after that step.

        First wait until the previous save has ended. When this method returns, training may change the state.
        """
        start = time.perf_counter()
        self._finish_pending()
        versions = {"torch": torch.__version__, "titan_launch": __version__}
        manifest = Manifest(
            step=self._progress.step,
            validation_loss=validation_loss,
            base=None if self._state.base is None else self._state.base.record,
            versions=versions | ({VERSION_KEY: "1"} if is_phantom() else {}),
            files={},
            **vars(self._origin),
        )
        request = WriteRequest(
            self._folder,
            manifest,
            self._retention,
            creates_folder=not self._has_saved,
            step_in_copy=None if self._store is None else self._store.step_in_copy,
        )
        self._pending_step = self._progress.step
        try:
            self._pending = self._background.write(request, shards_of(self._state.state_dict()))
        except OSError as error:  # no memory for the copy; all ranks have the same error
            self._note_failure(error)
        self._pending_stall_s = time.perf_counter() - start
        self._stall_s += self._pending_stall_s
        self.poll()

    def poll(self) -> bool:
        """Log the result of a save that has ended. Return True if a save is in flight on this rank. Does not wait."""
        if self._pending is not None and self._pending.done():
            self._finish_pending()
        return self._pending is not None

    def finish(self, copies: bool = True) -> None:
        """Wait for the save in flight. With `copies`, also wait until the checkpoints are in `checkpoint.store`. This
        second wait is collective. Raises RunError if the last save or a copy has failed."""
        start = time.perf_counter()
        self._finish_pending()
        self._stall_s += time.perf_counter() - start
        if self._failure:
            steps = complete_steps(self._folder)
            newest = (
                f"the newest checkpoint is {checkpoint_name(max(steps))}" if steps else "there is no checkpoint yet"
            )
            raise RunError(f"{self._failure}; {newest}")
        start = time.perf_counter()
        waits = self._has_store and copies
        failure = on_rank_0_slowly(lambda: self._store.finish() if self._store else "") if waits else ""
        self._stall_s += time.perf_counter() - start
        if failure:
            raise RunError(f"{failure}; the checkpoint is in {self._folder}")

    def take_measurements(self) -> dict[str, float]:
        """Return two metrics by tag: the seconds for which training has waited for saves since the last call, and the
        number of failed saves of this process."""
        stall, self._stall_s = self._stall_s, 0.0
        return {"time/checkpoint_stall_s": stall, "checkpoint/failed_saves": self._failed_saves}

    def return_to_last(self) -> Path | None:
        """Load the whole state of this run's newest valid checkpoint. Collective. Waits for the save in flight.

        Return the checkpoint's folder, or None if there is no checkpoint. The checkpoint of `checkpoint.load` does not
        count if `exclude_from_loading` excludes parts of it: the run did not begin with its whole state. Newer damaged
        checkpoints are renamed. Raises UserError if all checkpoints are damaged, and the errors of `load_state`.
        """
        self._finish_pending()
        checkpoint = newest_valid(self._folder, set_damaged_aside=True)
        if checkpoint is None or checkpoint == self._partly_loaded:
            return None
        load_state(checkpoint, self._state, EVERYTHING)
        if self._store is not None:
            self._store.forget_after(self._progress.step)
        return checkpoint

    def close(self, *, after_error: bool = False) -> None:
        """Wait for the save in flight and for copies in flight, then end the writer. A failure is only logged.
        `after_error`: True waits at most a minute for the save, and at most a minute for the copies."""
        if self._pending is not None:
            try:
                self._pending.exception(_SECONDS_AFTER_AN_ERROR if after_error else None)
            except FutureTimeoutError:
                warn(
                    _log,
                    "%s was not saved: the save was still running %d s after the run ended with an error",
                    checkpoint_name(self._pending_step),
                    _SECONDS_AFTER_AN_ERROR,
                )
            else:
                self._finish_pending()
        if self._store is not None:
            self._store.close(_SECONDS_AFTER_AN_ERROR if after_error else None)
        self._background.close()

    def _finish_pending(self) -> None:
        """Wait for the save in flight, and log its result."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        error = pending.exception()
        if isinstance(error, Exception):
            self._note_failure(error)
            return
        written = pending.result()
        self._failure, self._has_saved = "", True
        path = self._folder / checkpoint_name(written.step)
        size, stall = written.bytes / 1e6, self._pending_stall_s
        _log.info("saved %s (%.1f MB in %.2f s; training waited %.2f s)", path, size, written.seconds, stall)
        if written.deleted:
            _log.info("deleted old checkpoints: %s", ", ".join(map(checkpoint_name, written.deleted)))
        if written.warning:
            warn(_log, "%s: %s", path, written.warning)
        if self._store is not None:
            self._store.begin()

    def _note_failure(self, error: Exception) -> None:
        self._failed_saves += 1
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        self._failure = f"step {self._pending_step} could not be saved to {self._folder}: {reason}"
        warn(_log, "%s; training continues without this checkpoint", self._failure)
