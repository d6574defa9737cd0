"""The manifest of a checkpoint: its step, its run, and the size and checksum of every file."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter

from titan_launch.core import phantom
from titan_launch.core.files import chunks_of, read_regular, replace_text
from titan_launch.core.fingerprint import Fingerprint
from titan_launch.core.json_files import MOST_BYTES, JsonError, parse_as
from titan_launch.core.terminal import one_line

MANIFEST_FILE = "manifest.json"
"""Name of the manifest's file. The file is written last: a checkpoint without a manifest is not complete."""

_STEP = re.compile(r"step-(0|[1-9][0-9]{0,14})")


class DamagedCheckpointError(Exception):
    """Error for a checkpoint that cannot be used. The message is a clause with the reason."""


@dataclass(frozen=True)
class FileRecord:
    """Size and checksum of a written file."""

    bytes: Annotated[int, Field(ge=0, lt=2**62)]
    crc32: str
    """Eight hexadecimal digits. The checksum detects damage, not forgery: see docs/explanation/security.md."""


@dataclass(frozen=True)
class BaseRecord:
    """Facts about the folder of `model.weights`. The run began with the values in this folder."""

    folder: str
    """Absolute path of the folder when the checkpoint was saved."""

    fingerprint: Fingerprint
    """Sizes and digests of the folder's files. The seed, which selects samples of a data set, is always 0 here."""

    omitted: int
    """Number of parameters that the checkpoint omits, because they are never trained and the folder has their
    values."""

    omitted_bytes: int
    """Bytes that the omitted parameters have in the folder."""


@dataclass(frozen=True)
class Origin:
    """Facts about the run that saved a checkpoint."""

    world_size: int
    config_digest: str
    """SHA-256 of the run's resolved configuration."""

    gradient_accumulation: Mapping[str, Any]
    """Section `[gradient_accumulation]` of the resolved job, with the planner's choices in place of `auto`."""

    activation_checkpoint: Mapping[str, Any]
    """Section `[activation_checkpoint]` of the resolved job, with the planner's choices in place of `auto`."""

    data: Mapping[str, Fingerprint]
    """Sizes and digests of the files that the run reads, by section: `data` (for a mixture `data.sources.0` and so on),
    `validation.data`, and the key of the loss that names a teacher or reference model."""

    command: str
    """Command line that started the run."""

    commit: str | None
    """Commit of the git checkout in which the run started; it ends in `-dirty` if files had changed. None without a
    checkout."""


@dataclass(frozen=True)
class Manifest(Origin):
    """Facts about a checkpoint and about the run that saved it."""

    step: int
    base: BaseRecord | None
    """The folder of `model.weights`. None if `model.weights` is not set, or if the folder cannot be read."""

    versions: Mapping[str, str]
    """Versions of torch and of the launcher, and `phantom.VERSION_KEY` if the run had a phantom GPU."""

    validation_loss: float | None
    """Validation loss of this step. None if the run did not validate after this step."""

    files: Mapping[str, FileRecord]
    """All files of the folder except the manifest."""


@dataclass(frozen=True)
class _ManifestFile:
    manifest: Manifest
    crc32: str


_MANIFEST = TypeAdapter(_ManifestFile)


def checkpoint_name(step: int) -> str:
    """Return the name of a step's folder."""
    return f"step-{step}"


def step_of(name: str) -> int | None:
    """Return the step of a folder `step-N`; None for any other name."""
    found = _STEP.fullmatch(name)
    return int(found[1]) if found else None


def checkpoint_steps(folder: Path) -> list[int]:
    """Return the steps that have a `step-N` folder, damaged or not, newest first; an empty list if `folder` does not
    exist."""
    found = (step_of(entry.name) for entry in folder.glob("step-*"))
    return sorted((step for step in found if step is not None), reverse=True)


def complete_steps(folder: Path) -> list[int]:
    """Return the steps whose folder has a manifest, newest first."""
    return [step for step in checkpoint_steps(folder) if (folder / checkpoint_name(step) / MANIFEST_FILE).exists()]


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest into a checkpoint's folder, and sync the file and the folder."""
    file = _ManifestFile(manifest, _checksum(manifest))
    text = json.dumps(asdict(file), indent=1, sort_keys=True)
    replace_text(folder / MANIFEST_FILE, text + "\n")


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of a checkpoint's folder. Raises DamagedCheckpointError for a missing or invalid manifest.

    A manifest is also invalid if it names a file outside of the folder, or if its step is not the step in the folder's
    name. In a process without a phantom GPU (a simulated GPU that runs no kernels), the manifest of a run with a
    phantom GPU is invalid, too.
    """
    try:
        content = read_regular(folder / MANIFEST_FILE, MOST_BYTES)
        file = parse_as(_MANIFEST, content, allows_nan=True)  # the validation loss may be NaN
    except FileNotFoundError:
        raise DamagedCheckpointError(f"{MANIFEST_FILE} is missing") from None
    except OSError as error:
        raise DamagedCheckpointError(f"{MANIFEST_FILE} cannot be read: {error.strerror}") from None
    except JsonError:
        raise DamagedCheckpointError(f"{MANIFEST_FILE} is damaged") from None
    if _checksum(file.manifest) != file.crc32:
        raise DamagedCheckpointError(f"{MANIFEST_FILE} does not match its checksum")
    for name in (folder.name, folder.resolve().name):  # `latest` is a link to a step's folder
        if step_of(name) not in (None, file.manifest.step):
            raise DamagedCheckpointError(
                f"{MANIFEST_FILE} is of step {file.manifest.step}, but the folder has the name of another step"
            )
    if phantom.VERSION_KEY in file.manifest.versions and not phantom.is_phantom():
        raise DamagedCheckpointError("it was saved by a run with a phantom GPU, and its values have no meaning")
    for name in file.manifest.files:
        if Path(name).name != name:
            raise DamagedCheckpointError(f"{MANIFEST_FILE} names a file outside of the checkpoint: {one_line(name)}")
    return file.manifest


def check(folder: Path, share: slice = slice(None)) -> Manifest:
    """Check the sizes of all files of a checkpoint, and the checksums of the files in `share`. Return the manifest.
    `share`: slice of the sorted file names; by default all files. Raises DamagedCheckpointError if a check fails, and
    OSError if the size of a file cannot be read."""
    manifest = read_manifest(folder)
    for name, record in manifest.files.items():
        path = folder / name
        if not path.is_file():
            raise DamagedCheckpointError(f"{one_line(name)} is missing")
        size = path.stat().st_size
        if size != record.bytes:
            raise DamagedCheckpointError(f"{name} has {size:,} bytes instead of {record.bytes:,}")
    for name in sorted(manifest.files)[share]:
        try:
            found = record_of(folder / name)
        except OSError as error:
            raise DamagedCheckpointError(f"{name} cannot be read: {error.strerror}") from None
        if found != manifest.files[name]:
            raise DamagedCheckpointError(f"{name} does not match its checksum")
    return manifest


def record_of(path: Path) -> FileRecord:
    """Read a file and return its size and checksum."""
    size, checksum = 0, 0
    for chunk in chunks_of(path):
        size += len(chunk)
        checksum = zlib.crc32(chunk, checksum)
    return FileRecord(size, f"{checksum:08x}")


def _checksum(manifest: Manifest) -> str:
    content = json.dumps(asdict(manifest), indent=1, sort_keys=True).encode()
    return f"{zlib.crc32(content):08x}"
