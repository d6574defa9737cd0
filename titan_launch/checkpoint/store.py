"""Copies of a run's checkpoints in an object store. Only rank 0 reads and writes them."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from titan_launch.checkpoint.manifest import (
    MANIFEST_FILE,
    DamagedCheckpointError,
    check,
    checkpoint_name,
    complete_steps,
    read_manifest,
    step_of,
)
from titan_launch.checkpoint.retention import TEMPORARY, Retention, set_aside, validation_losses
from titan_launch.config.sections.checkpoint import CheckpointConfig
from titan_launch.core.errors import ConfigError, KeyPath, RunError, config_error, format_key
from titan_launch.core.files import read_regular, remove, sync
from titan_launch.core.json_files import MOST_BYTES
from titan_launch.core.object_store import ObjectStore, StoreError, in_parallel

_log = logging.getLogger(__name__)

_KEY: KeyPath = ("checkpoint", "store")


class CheckpointStore:
    """The copies of a run's checkpoints, in `STORE/NAME/step-N/`, and the thread that writes and deletes them.

    A copy is complete if it has its manifest, which is the last object to be written and the first to be deleted. A
    checkpoint is copied once, unless its copy was damaged.
    """

    def __init__(self, config: CheckpointConfig, name: str, folder: Path, record: Path):
        """Connect to the store, and test the right to write, read and delete. Raises ConfigError or RunError (`_error`)
        if this fails. `name`: name of the run. `folder`: folder of the run's checkpoints. `record`: the run's
        `config.json`, which is copied too."""
        assert config.store is not None
        self.url = f"{config.store.rstrip('/')}/{name}"
        self._value, self._folder, self._record = config.store, folder, record
        self._retention = Retention(config.keep_latest, config.keep_every, config.keep_best)
        self._waiting = Retention(min(config.keep_latest, 1), config.keep_every, config.keep_best)
        self._losses: dict[int, float | None] = {}
        self._damaged: set[int] = set()  # steps of damaged checkpoints in the run folder
        self.step_in_copy: int | None = None
        """Step of the checkpoint that the thread copies now, or will copy next; None if there is no such checkpoint."""
        self._failure = ""
        self._executor, self._last = ThreadPoolExecutor(1, "checkpoint-store"), Future[None]()
        self._last.set_result(None)
        try:
            self._objects = ObjectStore(self.url)
            self._test_rights()
        except StoreError as error:
            raise self._error(str(error), error) from None
        self.known = set(self.steps())
        """Steps that have a copy: found in the store at the start, or copied by this process."""

    def steps(self) -> list[int]:
        """List the steps that have a copy with a manifest. Raises ConfigError or RunError (`_error`)."""
        try:
            return [step for step, names in self._names().items() if MANIFEST_FILE in names]
        except StoreError as error:
            raise self._error(f"the copies cannot be listed: {error}", error) from None

    def fetch(self, step: int) -> str | None:
        """Download the copy of a step into the run folder. Return None, or a clause that describes the damage of the
        copy.

        A damaged checkpoint of this step in the run folder is renamed. If the run folder has no `config.json`, the copy
        of this file is downloaded too. Raises ConfigError or RunError (`_error`) if the store fails, and OSError if the
        local disk fails.
        """
        name = checkpoint_name(step)
        temporary, final = self._folder / f"{name}{TEMPORARY}", self._folder / name
        self._folder.mkdir(exist_ok=True)
        remove(temporary)
        temporary.mkdir()
        try:
            self._objects.get(f"{name}/{MANIFEST_FILE}", temporary / MANIFEST_FILE)
            manifest = read_manifest(temporary)
            if manifest.step != step:
                raise DamagedCheckpointError(f"{MANIFEST_FILE} is of step {manifest.step}, not of step {step}")
            in_parallel(lambda file: self._objects.get(f"{name}/{file}", temporary / file), manifest.files)
            check(temporary)
            if not self._record.exists() and self._record.name in self._objects.listing():
                partial = self._record.with_name(f"{self._record.name}{TEMPORARY}")
                self._objects.get(self._record.name, partial)
                partial.replace(self._record)
        except (OSError, StoreError, DamagedCheckpointError) as error:
            remove(temporary)
            if isinstance(error, OSError):  # the disk is full, for example
                raise
            if isinstance(error, StoreError) and not error.is_missing:
                raise self._error(f"{name} cannot be downloaded: {error}", error) from None
            self.known.discard(step)
            return "an object of the copy is missing" if isinstance(error, StoreError) else str(error)
        for path in temporary.iterdir():
            sync(path)
        if final.exists():
            set_aside(final)
        temporary.rename(final)
        sync(self._folder)
        _log.info("downloaded %s from %s", final, self.url)
        return None

    def begin(self) -> None:
        """Begin to copy the checkpoints that `_next` selects, in a thread. If the thread still copies an older
        checkpoint, the newest checkpoint is copied next."""
        if self._last.done():
            with suppress(OSError):  # the thread reports the error
                self.step_in_copy = self._next()  # set before a later save can delete this checkpoint
        self._last = self._executor.submit(self._copy_waiting)

    def forget_after(self, step: int) -> None:
        """Let the thread delete the copies of all steps after `step`, because the run returns to `step`."""
        self._last = self._executor.submit(self._forget_after, step)

    def finish(self) -> str:
        """Copy all checkpoints that `_next` selects, and wait until they are copied. Return "" on success, else a
        message."""
        self.begin()
        self._last.result()
        return self._failure

    def close(self, seconds: float | None) -> None:
        """Wait until no checkpoint is being copied, for at most `seconds`. None waits without a limit."""
        wait([self._last], seconds)
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _forget_after(self, step: int) -> None:
        self.known = {known for known in self.known if known <= step}
        self._damaged = {damaged for damaged in self._damaged if damaged <= step}
        try:
            for later, files in self._names().items():
                if later > step:
                    self._delete(checkpoint_name(later), files)
        except Exception as error:
            reason = f"copies after step {step} in {self.url} could not be deleted: {error}"
            risk = "a run that resumes from the store may load one of these copies"
            _log.warning("%s; %s; delete the folders step-N with N > %d there before the next save", reason, risk, step)

    def _copy_waiting(self) -> None:
        self._failure, step = "", None
        try:
            while (step := self._next()) is not None:
                start, self.step_in_copy = time.perf_counter(), step
                try:
                    size = self._copy(step)
                except DamagedCheckpointError as error:
                    if step == max(complete_steps(self._folder), default=step):
                        raise
                    _log.warning("%s is damaged, and is not copied: %s", checkpoint_name(step), error)
                    self._damaged.add(step)
                    continue
                self.step_in_copy = None
                seconds = time.perf_counter() - start
                _log.info("copied %s to %s (%.1f MB in %.2f s)", checkpoint_name(step), self.url, size / 1e6, seconds)
                try:
                    self._delete_expendable(step)
                except (StoreError, OSError) as error:
                    _log.warning("old checkpoints in %s could not be deleted: %s", self.url, error)
        except Exception as error:  # of any class, because training must go on
            # If the checkpoint has been deleted in the meantime, the error is not a failure.
            if step is None or step in complete_steps(self._folder):
                name = "the checkpoints" if step is None else checkpoint_name(step)
                self._failure = f"{name} could not be copied to {self.url}: {error}"
                _log.warning("%s; the next save tries again", self._failure)
        finally:
            self.step_in_copy = None

    def _next(self) -> int | None:
        """Return the next step to copy: the newest step, then older steps that `keep_every` or `keep_best` keeps (all
        older steps if `keep_latest` is 0), newest first. Steps that have a copy, or are damaged, are skipped. Return
        None if no step is left."""
        losses = validation_losses(self._folder)
        omitted = {*self.known, *self._damaged, *self._waiting.expendable(losses)}
        return max((step for step in losses if step not in omitted), default=None)

    def _copy(self, step: int) -> int:
        """Copy a checkpoint, and return its size in bytes. Raises StoreError, DamagedCheckpointError and OSError."""
        name = checkpoint_name(step)
        source = self._folder / name
        content = read_regular(source / MANIFEST_FILE, MOST_BYTES)
        manifest = check(source)  # the disk may have damaged the files since they were saved
        self._objects.delete(f"{name}/{MANIFEST_FILE}")  # a damaged copy may have a manifest
        in_parallel(lambda file: self._objects.put(source / file, f"{name}/{file}"), manifest.files)
        if self._record.exists():
            self._objects.put(self._record, self._record.name)
        found = self._objects.listing(name)
        for file, record in manifest.files.items():
            if file not in found or found[file].size != record.bytes:
                raise StoreError(f"the store does not list {name}/{file} with {record.bytes:,} bytes")
        if read_regular(source / MANIFEST_FILE, MOST_BYTES) != content:
            raise DamagedCheckpointError("the checkpoint was replaced while it was copied")
        self._objects.put(source / MANIFEST_FILE, f"{name}/{MANIFEST_FILE}")
        self.known.add(step)
        self._losses[step] = manifest.validation_loss
        return sum(record.bytes for record in manifest.files.values())

    def _delete_expendable(self, newest: int) -> None:
        """Delete the copies that the settings of `[checkpoint]` do not keep, and objects that interrupted copies and
        deletions have left. A copy whose manifest cannot be read stays, and so does the copy of the step `newest`.
        Raises StoreError."""
        names = self._names()
        losses = {}
        for step in names:
            with suppress(DamagedCheckpointError):
                if MANIFEST_FILE in names[step]:
                    losses[step] = self._loss(step)
        left = [step for step in names if MANIFEST_FILE not in names[step]]
        for step in {*self._retention.expendable(losses), *left} - {newest}:
            self._delete(checkpoint_name(step), names[step])

    def _delete(self, name: str, files: Sequence[str]) -> None:
        self._objects.delete(f"{name}/{MANIFEST_FILE}")
        in_parallel(lambda file: self._objects.delete(f"{name}/{file}"), files)

    def _names(self) -> dict[int, list[str]]:
        """Return the names of the objects of each step."""
        names: dict[int, list[str]] = {}
        for name in self._objects.listing():
            folder, _, file = name.partition("/")
            if (step := step_of(folder)) is not None:
                names.setdefault(step, []).append(file)
        return names

    def _loss(self, step: int) -> float | None:
        """Return the validation loss of a copy. Raises DamagedCheckpointError and StoreError."""
        if step not in self._losses:
            with TemporaryDirectory() as folder:
                self._objects.get(f"{checkpoint_name(step)}/{MANIFEST_FILE}", Path(folder, MANIFEST_FILE))
                self._losses[step] = read_manifest(Path(folder)).validation_loss
        return self._losses[step]

    def _test_rights(self) -> None:
        """Write, read and delete an object. Raises StoreError."""
        with TemporaryDirectory() as folder:
            path, name = Path(folder, "rights"), f"rights-{os.getpid()}"
            path.write_text("a test of the rights")
            actions: dict[str, Callable[[], None]] = {
                "written": lambda: self._objects.put(path, name),
                "read": lambda: self._objects.get(name, path),
                "deleted": lambda: self._objects.delete(name),
            }
            for verb, action in actions.items():
                try:
                    action()
                except StoreError as error:
                    raise StoreError(f"an object cannot be {verb}: {error}") from None

    def _error(self, reason: str, error: StoreError) -> ConfigError | RunError:
        """Return the error for a StoreError: a ConfigError if the same request would fail again, otherwise a RunError.
        After a RunError, `launch` may start the ranks again."""
        if error.is_final:
            return config_error(_KEY, reason, self._value)
        return RunError(f"{format_key(_KEY)} = {self._value}: {reason}")
