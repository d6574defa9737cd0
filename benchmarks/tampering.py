"""Disturbances of a run other than deaths of its ranks: copied, changed or deleted files, and killed launches."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from titan_launch.checkpoint.manifest import checkpoint_name, checkpoint_steps, read_manifest, record_of, write_manifest


@dataclass(frozen=True)
class Tampering:
    """A change to the files of a run between two of its starts."""

    name: str
    change: Callable[[Path, random.Random], None]
    """Function that changes files. Its path is the folder with the run's folder, the job file and the data."""

    loses_newest: bool = False
    """True if the change may damage the newest checkpoint, so that the run resumes from the one before."""

    may_be_refused: bool = False
    """True if the next start may end with one error and status 2, until the files are restored."""


def _run(folder: Path) -> Path:
    return folder / "run"


def _checkpoints(folder: Path) -> Path:
    return _run(folder) / "checkpoints"


def _newest(folder: Path) -> Path:
    return _checkpoints(folder) / checkpoint_name(max(checkpoint_steps(_checkpoints(folder))))


def follow_links(folder: Path, _: random.Random) -> None:
    """Copy the run as `cp -rL` and object stores do: the target replaces each link."""
    shutil.copytree(_run(folder), folder / "copy", symlinks=False)
    shutil.rmtree(_run(folder))
    (folder / "copy").rename(_run(folder))


def copy_step(folder: Path, numbers: random.Random) -> None:
    """Copy a checkpoint to the name of a later step."""
    steps = checkpoint_steps(_checkpoints(folder))
    source = _checkpoints(folder) / checkpoint_name(numbers.choice(steps))
    shutil.copytree(source, _checkpoints(folder) / checkpoint_name(max(steps) + numbers.randint(1, 50)))


def change_bytes(folder: Path, numbers: random.Random) -> None:
    """Change a byte of a file of the newest checkpoint, truncate the file, or insert bytes."""
    path = numbers.choice(sorted(_newest(folder).iterdir()))
    content = bytearray(path.read_bytes())
    at = numbers.randrange(len(content))
    kind = numbers.randrange(3)
    if kind == 0:
        content[at] ^= 1 + numbers.randrange(255)
    elif kind == 1:
        del content[at:]
    else:
        content[at:at] = numbers.randbytes(numbers.randint(1, 99))
    path.write_bytes(bytes(content))


def forge(folder: Path, numbers: random.Random) -> None:
    """Change the index of the newest checkpoint, and record the matching checksum."""
    checkpoint = _newest(folder)
    index = json.loads((checkpoint / "index.json").read_text())
    tensor = numbers.choice(sorted(index["tensors"]))
    entry = index["tensors"][tensor]
    chunk = numbers.choice(entry["chunks"])
    key = numbers.choice(("length", "start", "file", "sizes", "offsets"))
    chunk[key] = numbers.choice((None, -1, 2**62, "../../../job.toml", [1], [[]], {}))
    (checkpoint / "index.json").write_text(json.dumps(index))
    manifest = read_manifest(checkpoint)
    files = {**manifest.files, "index.json": record_of(checkpoint / "index.json")}
    write_manifest(checkpoint, type(manifest)(**{**vars(manifest), "files": files}))


def put_fifo(folder: Path, _: random.Random) -> None:
    """Replace the newest manifest by a FIFO, from which a read never returns."""
    (_newest(folder) / "manifest.json").unlink()
    os.mkfifo(_newest(folder) / "manifest.json")


def nest_manifest(folder: Path, _: random.Random) -> None:
    """Replace the newest manifest by JSON that is nested too deeply for the parser."""
    (_newest(folder) / "manifest.json").write_text("[" * 100_000)


def break_record(folder: Path, numbers: random.Random) -> None:
    """Replace a record of the run by a file, folder or FIFO of the wrong kind, or by invalid JSON."""
    name = numbers.choice(("config.json", "launch.json", "metrics.jsonl", "tb", "logs"))
    path = _run(folder) / name
    kept = folder / "kept"
    kept.mkdir(exist_ok=True)
    if path.exists():
        path.rename(kept / name)
    kind = numbers.randrange(3)
    if name in ("tb", "logs"):
        path.write_text("a file in the place of a folder")
    elif kind == 0:
        path.mkdir()
    elif kind == 1:
        os.mkfifo(path)
    else:
        path.write_text(numbers.choice(("[]", "null", '{"step": "four"}', "[" * 100_000, '"text"', "{")) + "\n")


def change_data(folder: Path, numbers: random.Random) -> None:
    """Truncate the data, double them, or shuffle their characters."""
    path = folder / "data.txt"
    text = path.read_text()
    (folder / "kept").mkdir(exist_ok=True)
    (folder / "kept" / "data.txt").write_text(text)
    other = "".join(numbers.sample(text, len(text)))
    path.write_text(numbers.choice((text[: len(text) // 2], text + text, other)))


TAMPERINGS = (
    Tampering("the run's folder copied with links followed", follow_links),
    Tampering("a checkpoint copied to the name of another step", copy_step),
    Tampering("a file of the newest checkpoint changed or truncated", change_bytes, loses_newest=True),
    Tampering("the index of the newest checkpoint changed, with a matching checksum", forge, loses_newest=True),
    Tampering("the manifest of the newest checkpoint replaced by a FIFO", put_fifo, loses_newest=True),
    Tampering("the manifest replaced by too deeply nested JSON", nest_manifest, loses_newest=True),
    Tampering("a record of the run replaced by one of another kind", break_record, may_be_refused=True),
    Tampering("the training data changed", change_data, may_be_refused=True),
)


def undo(folder: Path) -> None:
    """Restore the files that `break_record` and `change_data` have replaced."""
    kept = folder / "kept"
    if (_run(folder) / "tb").is_file():  # there was no such folder before, because the job writes no events
        (_run(folder) / "tb").unlink()
    for path in kept.iterdir() if kept.exists() else ():
        place = folder / path.name if path.name == "data.txt" else _run(folder) / path.name
        if place.is_dir():
            shutil.rmtree(place)
        else:
            place.unlink(missing_ok=True)
        path.rename(place)


def vanish(folder: Path, numbers: random.Random, seconds: float) -> str:
    """Delete a run's folder, or move it away, at a random instant of the run. Return the action."""
    time.sleep(numbers.uniform(0, seconds))
    if not _run(folder).exists():
        return "nothing"
    if numbers.random() < 0.5:
        shutil.rmtree(_run(folder), ignore_errors=True)
        return "deleted"
    _run(folder).rename(folder / f"moved-{numbers.randrange(10**9)}")
    return "moved"


def kill_launch(arguments: list[str], numbers: random.Random, mark: str, environment: dict[str, str]) -> list[int]:
    """Start `launch`, and kill it at a random instant of its first 4 seconds.

    Return the processes that still exist 5 seconds later, after killing them.
    """
    command = [sys.executable, "-m", "titan_launch", "launch", "--nproc-per-node", "2", *arguments]
    environment = {**os.environ, **environment, "TITAN_LAUNCH_CAMPAIGN": mark}
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    time.sleep(numbers.uniform(0, 4))
    process.kill()
    process.wait()
    deadline = time.monotonic() + 5
    while (left := marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.05)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    return left


def marked(mark: str) -> list[int]:
    """Return the ids of running processes that have a mark in their environment, without zombies."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdecimal() and f"TITAN_LAUNCH_CAMPAIGN={mark}".encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
        except OSError:  # the process has ended
            continue
    return found
