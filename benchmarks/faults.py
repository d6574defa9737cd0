"""Ranks of a training job that kill themselves at a given place."""

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
PLACES = {
    INSTANT: "at a random instant",
    "step": "in the forward pass of a step",
    "write": "half-way through writing a part of the data",
    "create": "before a file is created",
    "mkdir": "before a folder is created",
    "rename": "before a file or folder is renamed",
    "link": "before a link is made",
    "delete": "before a file or folder is deleted",
}
"""Where a process may kill itself, and what that is called in words."""

KILLED = "killed"
"""What a process notes last."""

_EVENTS = {
    "os.rename": "rename",
    "os.symlink": "link",
    "os.mkdir": "mkdir",
    "os.remove": "delete",
    "os.rmdir": "delete",
    "shutil.rmtree": "delete",
}
"""Audit events of Python, which are raised before the thing is done, and the places that they are."""


@dataclass(frozen=True)
class Fault:
    """A process that is to be killed, and when."""

    place: str
    rank: int
    number: int = 0
    """At which of the times that the process comes by the place, counted from 1."""

    seconds: float = 0.0
    """For a random instant: how long after its start."""

    in_writer: bool = False
    """Whether it is the process that writes for the rank which comes by the place."""

    spares_rank: bool = False
    """Whether that process dies alone."""


class Dropping(nn.Module):
    """A model that trains to other numbers when any rank's random generator is not restored."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(257, 32)
        self.hidden = nn.Sequential(nn.Linear(32, 64), nn.Dropout(0.2), nn.GELU(), nn.Linear(64, 32))
        self.output = nn.Linear(32, 257, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (batch, sequence, 257) of tokens (batch, sequence)."""
        logits: Tensor = self.output(self.hidden(self.embedding(tokens)))
        return logits


@dataclass(frozen=True)
class Trap:
    """What watches over a process: notes every place that it comes by, and kills it where its fault says so.

    It is sent to the process that writes for a rank as what that process runs.
    """

    fault: Fault | None
    folder: str
    """The run's. Places elsewhere do not count."""

    notes: str
    """The file for what was seen, which outlives the process."""

    def __call__(self, *arguments: Any) -> None:
        """The main function of a process that writes. The one that replaces a dead one is spared."""
        notes = Path(self.notes)
        is_replacement = notes.exists() and KILLED in notes.read_text().split()
        (replace(self, fault=None) if is_replacement else self).arm()
        _serve(*arguments)

    def arm(self) -> None:
        """Watch this process from now on."""
        armed = _Armed(self)
        sys.addaudithook(armed.audit)
        streams: Any = writer._RecordedStream
        streams.write = armed.half_written(streams.write)
        layers: Any = nn.Dropout
        layers.forward = armed.in_a_step(layers.forward)
        if self.fault is not None and self.fault.place == INSTANT:
            timer = threading.Timer(self.fault.seconds, armed.kill)
            timer.daemon = True
            timer.start()


_serve = writer_process.serve


class _Armed:
    """A trap in the process that it watches."""

    def __init__(self, trap: Trap):
        self._fault = trap.fault
        self._folder = trap.folder
        self._notes = os.open(trap.notes, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._seen: Counter[str] = Counter()
        self._lock = threading.Lock()

    def kill(self) -> None:
        """End this process, and the rank that it writes for unless that is spared."""
        os.write(self._notes, f"{KILLED}\n".encode())
        if self._fault is not None and self._fault.in_writer and not self._fault.spares_rank:
            os.kill(os.getppid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    def audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Called by Python before it does anything to a file."""
        if event == "open":
            path, _, flags = arguments
            if flags & (os.O_WRONLY | os.O_RDWR) and self._is_in_folder(path):
                self._come_by("create")
        elif event in _EVENTS and (any(map(self._is_in_folder, arguments[:2])) or _is_relative(arguments[-1])):
            self._come_by(_EVENTS[event])

    def half_written(self, write: Callable[..., int]) -> Callable[..., int]:
        """`write` of a stream, which may be the last thing that the process does."""

        def write_or_die(stream: Any, data: Any) -> int:
            if self._is_here("write"):
                write(stream, bytes(data)[: memoryview(data).nbytes // 2])
                stream.flush()
                self.kill()
            return write(stream, data)

        return write_or_die

    def in_a_step(self, forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """A module's `forward`, which may be the last thing that the process does."""

        def forward_or_die(module: nn.Module, x: Tensor) -> Tensor:
            self._come_by("step")
            return forward(module, x)

        return forward_or_die

    def _come_by(self, place: str) -> None:
        if self._is_here(place):
            self.kill()

    def _is_here(self, place: str) -> bool:
        """Note a place. Returns whether it is the fault's."""
        with self._lock:
            self._seen[place] += 1
            number = self._seen[place]
        os.write(self._notes, f"{place}\n".encode())
        return self._fault is not None and (self._fault.place, self._fault.number) == (place, number)

    def _is_in_folder(self, path: Any) -> bool:
        return isinstance(path, str | os.PathLike) and os.fspath(path).startswith(self._folder)


def _is_relative(folder_descriptor: Any) -> bool:
    """Whether a name is relative to an open folder, as those that `shutil.rmtree` deletes are."""
    return isinstance(folder_descriptor, int) and folder_descriptor >= 0


def load_what_ranks_need() -> None:
    """Import it in the process that they are forked from. (Not with this module, which a process that writes loads.)"""
    import torch._dynamo  # noqa: F401  the first model that is built does

    import titan_launch.train.main  # noqa: F401


@dataclass(frozen=True)
class Start:
    """One start of the ranks of a job."""

    job: Path
    overrides: tuple[str, ...]
    folder: Path
    """The run's."""

    notes: Path
    """The folder for what the processes come by."""

    port: int
    world_size: int
    fault: Fault | None

    @property
    def temporary(self) -> Path:
        """The folder for temporary files, which a clean end leaves empty."""
        return self.notes / "tmp"

    def notes_of(self, rank: int, of_writer: bool) -> Path:
        """What a rank, or the process that writes for it, came by."""
        return self.notes / f"{'writer' if of_writer else 'rank'}-{rank}"

    def run_rank(self, rank: int) -> None:
        """The main function of a rank's process: the launcher's own command line, which ends the process."""
        from titan_launch.cli import main
        from titan_launch.core.process import exit_process

        os.setpgid(0, 0)  # with the process that writes for it, so that an orphan is found
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
