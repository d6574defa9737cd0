"""Commands in processes with limits on memory and time, which note each program that they start.

One server process imports the package, and each command runs in a fork of it, within milliseconds.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from titan_launch.core.patches import without_garbage_collection

MEMORY = 1 << 30
"""Bytes that a command may allocate beyond those of the server."""

SECONDS = 10
"""Longest CPU time of a command. On an idle machine, it is the time on the clock."""

_WAIT_SECONDS = 90
"""Longest time of a command on the clock, on a machine with other work."""

STARTS = (
    *("subprocess.Popen", "os.exec", "os.posix_spawn", "os.spawn", "os.system", "pty.spawn"),
    *("socket.connect", "urllib.Request"),
)
"""Audit events of the functions that start a program, or that reach a host."""

_COMMANDS = "chat check compare data export generate import_ init launch migrate plan prepare report runs train"
_PRELOADED = (
    *(f"titan_launch.commands.{name}" for name in _COMMANDS.split()),
    "titan_launch.cli",
    "titan_launch.config.loading.toml_positions",
    "titan_launch.train.main",
    "titan_launch.train.describe_data",
    "titan_launch.trace.step",
    "titan_launch.inference.export",
    "titan_launch.inference.conversation",
    "titan_launch.report.comparison",
    "torch._dynamo.variables",  # PyTorch imports it when it builds a model
    "PIL.Image",
    "jinja2.sandbox",
    "safetensors",
    "tokenizers",
)


@dataclass(frozen=True)
class Ended:
    """The end of a command."""

    status: int
    """Exit status; negative for a signal."""

    stdout: str
    stderr: str
    started: tuple[str, ...]
    """The programs that the command started, and the hosts that it reached, apart from its own (see `_is_own`)."""

    seconds: float
    is_late: bool
    """True if the command was killed at a limit of time."""

    @property
    def text(self) -> str:
        """All output."""
        return self.stdout + self.stderr

    def assert_one_sentence(self, sentence: str) -> None:
        """Assert that the command has ended with status 2, no traceback, and one error that contains `sentence`."""
        assert not self.is_late, f"ran for more than {SECONDS} s:\n{self.text[-2000:]}"
        assert self.status == 2, f"status {self.status}:\n{self.text[-3000:]}"
        assert sentence in self.stderr, self.stderr[-3000:]
        assert self.stderr.count("\nerror:") + self.stderr.startswith("error:") == 1, self.stderr[-3000:]
        self.assert_harmless()

    def assert_harmless(self) -> None:
        """Assert that no program was started, and that the output has no traceback and no control character."""
        assert not self.started, self.started
        assert not self.is_late, f"ran for more than {SECONDS} s:\n{self.text[-2000:]}"
        assert "Traceback (most recent call last)" not in self.text, self.text[-5000:]
        found = [character for character in self.text if not character.isprintable() and character not in "\n\t"]
        assert not found, (found, self.text[-3000:])


class Runner:
    """A server that runs commands."""

    def __init__(self, preloaded: Sequence[str] = _PRELOADED):
        """`preloaded`: modules that the server imports, as far as they are installed."""
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.hostile.runner", *preloaded],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def run(
        self,
        arguments: Sequence[str],
        folder: Path,
        environment: Mapping[str, str] | None = None,
        memory: int = MEMORY,
        typed: str = "",
    ) -> Ended:
        """Run `titan-launch` with arguments in a folder. `memory`: bytes that it may allocate. `typed`: its standard
        input."""
        request = {"arguments": list(arguments), "folder": str(folder), "environment": dict(environment or {})}
        request["typed"] = typed
        assert self._server.stdin is not None and self._server.stdout is not None
        self._server.stdin.write(json.dumps({**request, "memory": memory}) + "\n")
        self._server.stdin.flush()
        answer: dict[str, Any] = json.loads(self._server.stdout.readline())
        return Ended(**{**answer, "started": tuple(answer["started"])})

    def close(self) -> None:
        """End the server."""
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait()


def _serve(preloaded: Sequence[str]) -> None:
    with without_garbage_collection():  # a later collection would visit all objects of the server, and copy their pages
        for name in preloaded:
            with suppress(ImportError):
                __import__(name)
    for line in sys.stdin:
        print(json.dumps(_answer(json.loads(line))), flush=True)


def _answer(request: Mapping[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryFile("w+b") as out, tempfile.TemporaryFile("w+b") as err, tempfile.TemporaryFile() as events:
        start = time.monotonic()
        pid = os.fork()
        if not pid:
            _become_command(request, out, err, events)
        status, is_late = _wait(pid, start + _WAIT_SECONDS)
        seconds = time.monotonic() - start
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # processes that the command has left
        texts = []
        for file in (out, err, events):
            file.seek(0)
            texts.append(file.read().decode(errors="surrogateescape"))
        return {
            "status": os.waitstatus_to_exitcode(status),
            "stdout": texts[0],
            "stderr": texts[1],
            "started": texts[2].splitlines(),
            "seconds": seconds,
            "is_late": is_late,
        }


def _wait(pid: int, end: float) -> tuple[int, bool]:
    while True:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return status, os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU
        if time.monotonic() > end:
            os.kill(pid, signal.SIGKILL)
            return os.waitpid(pid, 0)[1], True
        time.sleep(0.003)


def _become_command(request: Mapping[str, Any], out: IO[bytes], err: IO[bytes], events: IO[bytes]) -> None:
    """Run a command in this process, and end the process."""
    os.setsid()
    os.chdir(request["folder"])
    os.environ.update(request["environment"])
    with tempfile.TemporaryFile() as typed:
        typed.write(request["typed"].encode())
        typed.seek(0)
        os.dup2(typed.fileno(), 0)
    os.dup2(out.fileno(), 1)
    os.dup2(err.fileno(), 2)
    sys.stdin = os.fdopen(0)
    limit = _virtual_bytes() + request["memory"]
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS + 5))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    def note(event: str, arguments: tuple[Any, ...]) -> None:
        if event in STARTS and not _is_own(arguments):
            os.write(events.fileno(), f"{event} {arguments!r:.300}\n".encode())

    sys.addaudithook(note)
    from titan_launch.cli import main
    from titan_launch.core.process import exit_process

    status = 1
    try:
        status = main(request["arguments"])
    except BaseException:
        import traceback

        traceback.print_exc()
    exit_process(status)


def _is_own(arguments: tuple[Any, ...]) -> bool:
    """Return True for a program that commands start for every file: this package in the same Python, and git."""
    words = [str(word) for value in arguments[:2] for word in (value if isinstance(value, list | tuple) else [value])]
    is_package = sys.executable in words and any(word.startswith("titan_launch") for word in words)
    return is_package or (words[0] == "git" and "describe" in words)


def _virtual_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def running(preloaded: Sequence[str] = _PRELOADED) -> Iterator[Runner]:
    """Start a server for the block."""
    runner = Runner(preloaded)
    try:
        yield runner
    finally:
        runner.close()


if __name__ == "__main__":
    _serve(sys.argv[1:])
