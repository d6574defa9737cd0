"""Ranks of a training job that kill themselves at a given point of the run."""

from __future__ import annotations

import multiprocessing.process
import os
import signal
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from titan_launch.checkpoint import writer, writer_process

INSTANT = "instant"
KILL_POINTS = {
    INSTANT: "at a random instant",
    "step": "in the forward pass of a step",
    "write": "halfway through a write of tensor data",
    "create": "before a file is created",
    "mkdir": "before a folder is created",
    "rename": "before a file or folder is renamed",
    "link": "before a link is made",
    "delete": "before a file or folder is deleted",
}
"""Points at which a process may kill itself, with their descriptions."""

KILLED = "killed"
"""The last note of a process that kills itself."""

_EVENTS = {
    "os.rename": "rename",
    "os.symlink": "link",
    "os.mkdir": "mkdir",
    "os.remove": "delete",
    "os.rmdir": "delete",
    "shutil.rmtree": "delete",
}
"""Kill points by audit event of Python. Python raises the event before the operation."""


@dataclass(frozen=True)
class Fault:
    """The process to kill, and the point at which it dies."""

    point: str
    rank: int
    number: int = 0
    """Number of the visit to the point at which the process dies, counted from 1."""

    seconds: float = 0.0
    """Seconds from the start of the process to the kill; used for a random instant only."""

    in_writer: bool = False
    """True if the writer process of the rank dies, not the rank itself."""

    spares_rank: bool = False
    """True if the writer process dies alone. Otherwise it kills its rank too."""


class DropoutModel(nn.Module):
    """A model with dropout. Its losses differ if the random generator of any rank is not restored."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(257, 32)
        self.hidden = nn.Sequential(nn.Linear(32, 64), nn.Dropout(0.2), nn.GELU(), nn.Linear(64, 32))
        self.output = nn.Linear(32, 257, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens (batch, sequence) to logits (batch, sequence, 257)."""
        logits: Tensor = self.output(self.hidden(self.embedding(tokens)))
        return logits


@dataclass(frozen=True)
class Trap:
    """A monitor of one process. It notes every point that the process reaches, and kills the process at its fault.

    A writer process receives the monitor as its main function.
    """

    fault: Fault | None
    folder: str
    """The run's folder. Operations on files outside of the folder are ignored."""

    notes: str
    """File of the notes. It outlives the process."""

    def __call__(self, *arguments: Any) -> None:
        """Run a writer process. A writer process that replaces a killed one is not killed."""
        notes = Path(self.notes)
        is_replacement = notes.exists() and KILLED in notes.read_text().split()
        (replace(self, fault=None) if is_replacement else self).arm()
        _serve(*arguments)

    def arm(self) -> None:
        """Start to monitor this process."""
        armed = _Armed(self)
        sys.addaudithook(armed.audit)
        streams: Any = writer._RecordedStream
        streams.write = armed.with_half_writes(streams.write)
        layers: Any = nn.Dropout
        layers.forward = armed.with_kills(layers.forward)
        if self.fault is not None and self.fault.point == INSTANT:
            timer = threading.Timer(self.fault.seconds, armed.kill)
            timer.daemon = True
            timer.start()


_serve = writer_process.serve


class _Armed:
    """A trap that is active in this process."""

    def __init__(self, trap: Trap):
        self._fault = trap.fault
        self._folder = trap.folder
        self._notes = os.open(trap.notes, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._seen: Counter[str] = Counter()
        self._lock = threading.Lock()

    def kill(self) -> None:
        """Kill this process. A writer process first kills its rank, unless the fault spares the rank."""
        os.write(self._notes, f"{KILLED}\n".encode())
        if self._fault is not None and self._fault.in_writer and not self._fault.spares_rank:
            os.kill(os.getppid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    def audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Note an operation on a file. Python calls this hook before the operation."""
        if event == "open":
            path, _, flags = arguments
            if flags & (os.O_WRONLY | os.O_RDWR) and self._is_in_folder(path):
                self._reach("create")
        elif event in _EVENTS and (any(map(self._is_in_folder, arguments[:2])) or _is_relative(arguments[-1])):
            self._reach(_EVENTS[event])

    def with_half_writes(self, write: Callable[..., int]) -> Callable[..., int]:
        """Return a stream's `write` that writes half of the data, then dies, if the fault is at this call."""

        def write_or_die(stream: Any, data: Any) -> int:
            if self._is_here("write"):
                write(stream, bytes(data)[: memoryview(data).nbytes // 2])
                stream.flush()
                self.kill()
            return write(stream, data)

        return write_or_die

    def with_kills(self, forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Return a module's `forward` that dies first if the fault is at this call."""

        def forward_or_die(module: nn.Module, x: Tensor) -> Tensor:
            self._reach("step")
            return forward(module, x)

        return forward_or_die

    def _reach(self, point: str) -> None:
        if self._is_here(point):
            self.kill()

    def _is_here(self, point: str) -> bool:
        """Note a visit to a point. Return True if the fault is at this visit."""
        with self._lock:
            self._seen[point] += 1
            number = self._seen[point]
        os.write(self._notes, f"{point}\n".encode())
        return self._fault is not None and (self._fault.point, self._fault.number) == (point, number)

    def _is_in_folder(self, path: Any) -> bool:
        return isinstance(path, str | os.PathLike) and os.fspath(path).startswith(self._folder)


def _is_relative(folder_descriptor: Any) -> bool:
    """Return True if a name is relative to an open folder, as the names that `shutil.rmtree` deletes are."""
    return isinstance(folder_descriptor, int) and folder_descriptor >= 0


def import_rank_modules() -> None:
    """Import the modules of a rank in the process from which the ranks are forked.

    The imports are not at the top of this module, because writer processes import this module too.
    """
    import torch._dynamo  # noqa: F401  otherwise imported when the first model is built

    import titan_launch.train.main  # noqa: F401


@dataclass(frozen=True)
class Start:
    """One start of the ranks of a job."""

    job: Path
    overrides: tuple[str, ...]
    folder: Path
    """The run's folder."""

    notes: Path
    """Folder of the processes' notes."""

    port: int
    world_size: int
    fault: Fault | None

    @property
    def temporary(self) -> Path:
        """Folder for temporary files. It is empty after a clean end."""
        return self.notes / "tmp"

    def notes_of(self, rank: int, of_writer: bool) -> Path:
        """Return the file with the notes of a rank or of its writer process."""
        return self.notes / f"{'writer' if of_writer else 'rank'}-{rank}"

    def run_rank(self, rank: int) -> None:
        """Run a rank's process: the command line of the launcher, which ends the process."""
        from titan_launch.cli import main
        from titan_launch.core.process import exit_process

        os.setpgid(0, 0)  # a process group with the writer process, so that an orphan is found
        output = os.open(self.notes / f"output-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        torch.set_num_threads(1)
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": self.world_size, "MASTER_PORT": self.port}
        os.environ.update({name: str(value) for name, value in place.items()}, MASTER_ADDR="localhost")
        self.temporary.mkdir(exist_ok=True)
        os.environ["TMPDIR"] = tempfile.tempdir = str(self.temporary)
        multiprocessing.current_process()._config.pop("tempdir", None)  # type: ignore[attr-defined]
        multiprocessing.process._parent_process = None  # type: ignore[attr-defined]  # as if torchrun had started it
        writing: Any = writer_process
        writing.serve = self._trap(rank, of_writer=True)
        self._trap(rank, of_writer=False).arm()
        exit_process(main(["--config", str(self.job), *self.overrides]))

    def _trap(self, rank: int, *, of_writer: bool) -> Trap:
        fault = self.fault if self.fault is not None and self.fault.rank == rank else None
        own = fault if fault is not None and fault.in_writer == of_writer else None
        return Trap(own, str(self.folder), str(self.notes_of(rank, of_writer)))
