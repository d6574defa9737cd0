"""Objects in a helper process that limits the CPU time and, on Linux, the memory of each call.

Some files from other people are programs: templates, and the rules of tokenizers. A program can run without end, take
all memory, or crash the process that runs it. If this happens in the helper process, only the call fails.

The helper measures its own CPU time and memory, so the limits do not depend on the load of the host. The helper imports
only what its objects need.
"""

from __future__ import annotations

import atexit
import itertools
import os
import pickle
import signal
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from titan_launch.core.files import MIB
from titan_launch.core.signals import ignore_stop_signals, signal_name, stop_with_parent
from titan_launch.core.terminal import one_line

SECONDS = 2.0
"""Seconds of CPU time that a call may take in addition to the time for its input (see _REGAINED_SECONDS)."""

SECONDS_PER_BYTE = 10 / MIB
"""Default of `Limits.seconds_per_byte`. Slow tokenizers take a tenth of this time."""

MEMORY = 512 * MIB
"""Bytes that a call may allocate in addition to `Limits.memory_per_byte` for each byte of its input."""

_REGAINED_SECONDS = 0.1
"""Seconds that each call adds to the spare time of its object. The spare time is the CPU time that the calls of an
object may take in addition to the time for their input. The spare time begins with SECONDS, and never exceeds SECONDS.
Without this rule, a file could make each of a million calls take 2 s."""

_REQUEST, _ANSWER = struct.Struct("<QdQQ"), struct.Struct("<Qd")
"""Headers of requests and answers. The header of a request contains the length of the request in bytes, and three
limits: CPU seconds, allocated bytes, and bytes of the answer. The header of an answer contains the length of the answer
in bytes, and the CPU seconds that the call took."""

_LONGEST_MESSAGE = 300
"""Number of characters after which the message of an object's error is cut."""


class CallError(Exception):
    """Error for a call that failed or was stopped. The message is the object's own message, or a clause that can follow
    the name of the object's file: `needs more than 2 s of CPU time (input: 12 bytes)`."""

    def __init__(self, reason: str, is_stopped: bool):
        """`is_stopped`: False if the object itself raised an error."""
        super().__init__(reason)
        self.is_stopped = is_stopped


class Limits(NamedTuple):
    """Limits of a call that grow with its input."""

    memory_per_byte: int
    """Bytes that the call may allocate for each byte of input, in addition to MEMORY."""

    answer: int = MIB
    """Largest size in bytes of the pickled result (the answer) for an empty input."""

    answer_per_byte: int = 0
    """Number of bytes that are added to the limit `answer` for each byte of input."""

    seconds_per_byte: float = SECONDS_PER_BYTE
    """Seconds of CPU time that the call may take for each byte of input."""


MAKING = Limits(memory_per_byte=16, seconds_per_byte=1 / MIB)
"""Limits of the call that creates an object. The package `tokenizers` needs 10 bytes of memory and 0.1 microseconds for
each byte of a file."""


class LimitedObject:
    """An object that lives in the helper process of this process. The first call creates the object there.

    One helper serves all such objects. If the helper ends, the next call starts another helper and creates the object
    again. A forked process has a helper of its own.
    """

    def __init__(self, limits: Limits, factory: Callable[..., Any], *arguments: Any):
        """`limits`: limits of each call. `factory`: a function or class that creates the object from `arguments`. The
        factory must be at the top level of a module that imports little, because the helper imports that module."""
        self.limits = limits
        self.number = next(_NUMBERS)
        self.recipe = factory, arguments
        self.spare_seconds = SECONDS
        weakref.finalize(self, _forget, self.number).atexit = False

    def call(self, method: str, *arguments: Any, seconds: float = 0.0) -> Any:
        """Return the result of a method. Raises CallError, and errors of this package that the method raises.

        `seconds`: CPU time in seconds that this call may take in addition to its other limits.
        """
        return _helper.call(self, method, arguments, seconds)

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("a LimitedObject cannot be pickled; create it again in the other process")


class _Helper:
    """This process's connection to its helper process."""

    def __init__(self) -> None:
        self.forgotten: list[int] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._made: set[int] = set()
        self._lock = threading.Lock()

    def call(self, target: LimitedObject, method: str, arguments: tuple[Any, ...], seconds: float) -> Any:
        with self._lock:
            if self._process is not None and self._process.poll() is not None:
                self._end()
            if target.number not in self._made:
                kind, value, _ = self._exchange(target.number, *target.recipe, SECONDS, MAKING)
                _result(kind, value)
                self._made.add(target.number)
            spare = min(SECONDS, target.spare_seconds + _REGAINED_SECONDS)
            target.spare_seconds = 0.0
            kind, value, left = self._exchange(target.number, method, arguments, spare + seconds, target.limits)
            if kind != "stopped":
                target.spare_seconds = min(spare, left)
            return _result(kind, value)

    def close(self) -> None:
        """End the helper process."""
        with self._lock:
            self._end()

    def abandon(self) -> None:
        """Close the pipes to the helper process without ending the helper. Call this in a forked process."""
        if self._process is not None:
            self._process.returncode = 0  # the helper is not a child of the forked process, which cannot wait for it
            _close_pipes(self._process)

    def _exchange(
        self, number: int, action: Any, arguments: tuple[Any, ...], seconds: float, limits: Limits
    ) -> tuple[str, Any, float]:
        """Send a request. Return the kind and the value of the answer (see `_result`), and the CPU time in seconds that
        the call has left. If the helper ended, this time is 0. `action`: the name of a method of the object with the id
        `number`, or the function that creates this object."""
        forgotten = list(self.forgotten)
        request = pickle.dumps((forgotten, number, action, arguments), pickle.HIGHEST_PROTOCOL)
        del self.forgotten[: len(forgotten)]  # not before: if `pickle.dumps` fails, the next request has the list
        self._made -= set(forgotten)
        size = len(request)
        seconds += size * limits.seconds_per_byte
        memory = MEMORY + size * limits.memory_per_byte
        header = _REQUEST.pack(size, seconds, memory, limits.answer + size * limits.answer_per_byte)
        spent = seconds
        process = self._process or self._start()
        assert process.stdin is not None and process.stdout is not None
        try:
            _write(process.stdin.fileno(), header + request)
            length, spent = _ANSWER.unpack(_read(process.stdout.fileno(), _ANSWER.size))
            kind, value = pickle.loads(_read(process.stdout.fileno(), length))
        except (EOFError, BrokenPipeError):
            kind, value = "stopped", _reason(self._end(is_ending=True), seconds, memory)
        except BaseException:  # such as KeyboardInterrupt: the next call must not read the answer to this one
            self._end()
            raise
        if kind == "stopped":
            value = f"{value} (input: {size:,} bytes)"
        return kind, value, seconds - spent

    def _start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "titan_launch.core.limited_process"]
        if threading.current_thread() is threading.main_thread():  # else the end of this thread would end the helper
            command.append(_STOP_WITH_PARENT)
        self._process = subprocess.Popen(
            command,
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "RUST_BACKTRACE": "0"},
            cwd=Path(__file__).parents[2],  # with -m, Python imports from the working directory
        )
        return self._process

    def _end(self, is_ending: bool = False) -> int:
        """End the helper process. Return its exit status; 0 if there is no helper. `is_ending`: True if the helper ends
        by itself, so that its exit status tells the reason."""
        process, self._process = self._process, None
        self._made = set()
        if process is None:
            return 0
        if is_ending:
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=10)
        process.kill()
        _close_pipes(process)
        return process.wait()


def _result(kind: str, value: Any) -> Any:
    """Return the value of an answer whose kind is "value". Raise `value` for "error", an error of this package. Raise
    CallError for "failed" and "stopped", with the reason `value`."""
    if kind == "error":
        raise value
    if kind != "value":
        raise CallError(value, is_stopped=kind == "stopped")
    return value


_STOP_WITH_PARENT = "--stop-with-parent"

_NUMBERS = itertools.count()

_helper = _Helper()


def _forget(number: int) -> None:
    """Make the helper drop an object when it receives the next request."""
    _helper.forgotten.append(number)


def _after_fork() -> None:
    global _helper
    _helper.abandon()
    _helper = _Helper()


os.register_at_fork(after_in_child=_after_fork)
atexit.register(lambda: _helper.close())


def _close_pipes(process: subprocess.Popen[bytes]) -> None:
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


def _reason(status: int, seconds: float, memory: int) -> str:
    """Return a clause that says why the helper has ended during a call. `status`: exit status of the helper."""
    if status == -signal.SIGPROF:
        return f"needs more than {seconds:.3g} s of CPU time"
    if status == -signal.SIGKILL:
        return "was killed (SIGKILL), probably because the host had no memory left"
    name = signal_name(-status) if status < 0 else f"exit status {status}"
    return f"crashed its process ({name}), possibly because it {_too_much(memory)}"


def _too_much(memory: int) -> str:
    return f"needs more than {memory / MIB:,.0f} MiB of memory"


def _write(descriptor: int, content: bytes) -> None:
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def _read(descriptor: int, length: int) -> bytes:
    """Read `length` bytes. Raises EOFError if the pipe is closed before."""
    pieces = []
    while length:
        piece = os.read(descriptor, min(length, MIB))
        if not piece:
            raise EOFError
        pieces.append(piece)
        length -= len(piece)
    return b"".join(pieces)


class _Memory:
    """The limit of the memory that this process may allocate. Only Linux has this limit."""

    def __init__(self) -> None:
        if sys.platform == "linux":
            import resource

            self._resource = resource
            self._hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
            self._state = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
            self._page = os.sysconf("SC_PAGE_SIZE")

    def limit(self, further: int | None) -> None:
        """Let this process allocate `further` more bytes. None removes the limit."""
        if sys.platform != "linux":
            return
        soft = self._hard
        if further is not None:
            present = int(os.pread(self._state, 256, 0).split()[5]) * self._page  # RLIMIT_DATA counts these pages
            soft = present + further if self._hard < 0 else min(present + further, self._hard)
        self._resource.setrlimit(self._resource.RLIMIT_DATA, (soft, self._hard))


def _serve(reading: int, writing: int) -> None:
    objects: dict[int, Any] = {}
    memory = _Memory()
    while True:
        length, seconds, further, longest = _REQUEST.unpack(_read(reading, _REQUEST.size))
        request = _read(reading, length)
        memory.limit(further)
        start = time.process_time()
        signal.setitimer(signal.ITIMER_PROF, seconds)  # after this CPU time, SIGPROF ends this process
        answer = _answer(objects, request, longest, further)
        del request
        signal.setitimer(signal.ITIMER_PROF, 0)
        memory.limit(None)
        _write(writing, _ANSWER.pack(len(answer), time.process_time() - start) + answer)


def _answer(objects: dict[int, Any], request: bytes, longest: int, further: int) -> bytes:
    try:
        forgotten, number, method, arguments = pickle.loads(request)
        for other in forgotten:
            objects.pop(other, None)
        value = None
        if callable(method):
            objects[number] = method(*arguments)
        else:
            value = getattr(objects[number], method)(*arguments)
        content = pickle.dumps(("value", value), pickle.HIGHEST_PROTOCOL)
        if len(content) <= longest:
            return content
        kind, found = "stopped", f"has a result of more than {longest / MIB:,.0f} MiB"
    except MemoryError:
        kind, found = "stopped", _too_much(further)
    except Exception as error:
        if type(error).__module__.startswith("titan_launch."):
            return pickle.dumps(("error", error.with_traceback(None)))
        kind, found = "failed", _message(error)
    except BaseException as error:  # PanicException of Rust
        kind, found = "stopped", f"crashes the library that runs it: {_message(error)}"
    return pickle.dumps((kind, found))


def _message(error: BaseException) -> str:
    name = "" if type(error) is Exception else f"{type(error).__name__}: "
    try:
        return one_line(f"{name}{str(error)[:_LONGEST_MESSAGE]}")
    except Exception:  # `str(error)` can fail
        return name


def _main() -> None:
    ignore_stop_signals()
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGPROF])
    if _STOP_WITH_PARENT in sys.argv:
        stop_with_parent(signal.SIGKILL)
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    reading, writing = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1):
        os.dup2(nothing, standard)
    with suppress(EOFError, BrokenPipeError):
        _serve(reading, writing)
    os._exit(0)


if __name__ == "__main__":
    _main()
