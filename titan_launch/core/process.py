"""Functions that end a process (one message for all ranks, flushed output, exit status) or share work between forks."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn, TextIO, TypeVar

from titan_launch.core.errors import ConfigError, Problem, RunError, Stopped, UserError
from titan_launch.core.signals import stop_with_parent
from titan_launch.core.terminal import CLEAR_LINE, as_message, printable, say_escaped, shortened

T = TypeVar("T")
R = TypeVar("R")

OK, FAILED, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130

EXITED_DIRECTLY = "Python code called os._exit, or native code called exit"
"""Reason that messages give for the end of a rank that printed no error and did not call `exit_immediately`."""

PRINTS_HIDDEN = "TITAN_LAUNCH_PRINTS_HIDDEN"
"""Environment variable of ranks whose agent calls `print_hidden_announcement`."""

_RUNNING = "running"
"""Name of a file that exists in `rank_folder()` while the rank runs. The file contains the path of multiprocessing's
temporary folder."""


def usable_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


_MOST_PROCESSES = 4
"""Largest number of processes that share work. Each fork takes some milliseconds, and the memory of one item's work."""

_MOST_ITEMS = 16_384
"""Largest number of items that processes share at a time. A pipe holds 64 KiB: 4 bytes for each item."""


def in_forks(function: Callable[[T], R], items: Sequence[T], takes_part: bool = True) -> list[R]:
    """Return the results of `function` for all items, in the order of `items`.

    On Linux, up to four processes (at most one per core) share the items. This process takes the first item. Its forks
    pickle their results. On other systems, this process computes all items.

    A fork ends at its first error. This process then computes the items that the forks have not finished, and raises
    the function's errors. `takes_part`: False lets this process only wait for the forks, unless a fork fails.
    Threads that the function starts are then in the forks only, so this process can fork again.
    """
    if len(items) > _MOST_ITEMS:
        first, rest = items[:_MOST_ITEMS], items[_MOST_ITEMS:]
        return in_forks(function, first, takes_part) + in_forks(function, rest, takes_part)
    count = min(usable_cores(), len(items), _MOST_PROCESSES)
    is_alone = count < 2 if takes_part else usable_cores() < 2 or not items
    if is_alone or sys.platform != "linux":  # elsewhere, a fork may not be safe
        return list(map(function, items))
    import pickle  # most processes do not need it

    waiting, end = os.pipe()  # holds the numbers of the items that no process has taken
    os.write(end, b"".join((index + 1).to_bytes(4, "little") for index in range(takes_part, len(items))))
    os.close(end)

    def taken() -> Iterator[tuple[int, R]]:
        while number := int.from_bytes(os.read(waiting, 4), "little"):  # 0 if the pipe is empty
            yield number - 1, function(items[number - 1])

    def help_parent(pipe: int) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the parent, and thereby this process
        stop_with_parent(signal.SIGKILL)
        results: dict[int, R] = {}
        with suppress(Exception):
            results.update(taken())
        with open(pipe, "wb") as file:
            pickle.dump(results, file)

    forks: dict[int, int] = {}
    """The pipe from which the results of each fork are read, by process id of the fork."""
    try:
        for _ in range(count - takes_part):
            ours, theirs = os.pipe()
            if (process := os.fork()) == 0:
                try:
                    help_parent(theirs)
                finally:
                    os._exit(OK)  # a fork must never continue with the code of its parent
            os.close(theirs)
            forks[process] = ours
        found = dict[int, R]()
        if takes_part:
            found[0] = function(items[0])
            found |= taken()
        for pipe in forks.values():
            with suppress(EOFError, pickle.UnpicklingError), open(pipe, "rb", closefd=False) as file:
                found |= pickle.load(file)  # raises an error if the fork was killed: its pickle is then incomplete
    finally:
        os.close(waiting)
        for process, pipe in forks.items():
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
            os.close(pipe)
    return [found[index] if index in found else function(item) for index, item in enumerate(items)]


def run_and_exit(action: Callable[[], None], describe: Callable[[Iterable[Problem]], str]) -> NoReturn:
    """Run `action`, print its error if it raises one, and end the process with the matching exit status.

    `describe`: function that returns the message for the problems of a `ConfigError`, with files and lines.
    """
    _shorten_paths_of_sockets()
    if folder := rank_folder():
        from multiprocessing.util import get_temp_dir

        with suppress(OSError):
            Path(folder, _RUNNING).write_text(get_temp_dir())
    status = FAILED
    try:
        status = _run(action, describe)
    finally:
        exit_process(status)


def _shorten_paths_of_sockets() -> None:
    """If TMPDIR is too long for the path of a Unix socket, put the temporary folder of multiprocessing, which contains
    its sockets, into /tmp."""
    import tempfile

    longest = 107 - len("/pymp-12345678/listener-12345678")  # sockaddr_un has 108 bytes, the last of them 0
    with suppress(OSError):  # also if no temporary folder can be written, which most commands do not need
        if len(os.fsencode(tempfile.gettempdir())) > longest:
            from multiprocessing.process import current_process

            current_process()._config["tempdir"] = tempfile.mkdtemp(prefix="pymp-", dir="/tmp")  # type: ignore[attr-defined]


def exit_process(status: int) -> NoReturn:
    """Flush all output, and end the process without the interpreter's shutdown.

    During the shutdown, gloo's threads may still hold Python objects. The process then aborts with SIGABRT, in up to a
    quarter of correct runs (pytorch issue 190489). Freeing all objects would also take 10 % of the time of a `check`.
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # the reader of the output has ended, such as `| head`
            stream.flush()
    exit_immediately(status)


def exit_immediately(status: int) -> NoReturn:
    """Remove the temporary folder of multiprocessing and the rank's mark (`_RUNNING`), and end the process without
    flushing. Any thread may call this function, even while another thread holds the lock of a stream."""
    with suppress(OSError, KeyError):  # os._exit skips multiprocessing's exit handler, which removes this folder
        process = sys.modules.get("multiprocessing.process")
        if process and process.parent_process() is None:  # a child shares the folder of its parent
            shutil.rmtree(process.current_process()._config["tempdir"])
    if folder := rank_folder():
        with suppress(OSError):
            os.unlink(os.path.join(folder, _RUNNING))
    os._exit(status)


def has_exited_directly(environment: Mapping[str, str]) -> bool:
    """Return True if a rank that has ended had entered `run_and_exit`, but did not call `exit_immediately` (see
    EXITED_DIRECTLY).

    `environment`: environment variables of the rank.
    """
    folder = rank_folder(environment)
    return folder is not None and os.path.exists(os.path.join(folder, _RUNNING))


def remove_folders(folder: str) -> None:
    """Remove the folder in which torchrun creates the folders of all ranks, and the temporary folders of the ranks that
    did not call `exit_immediately`."""
    for mark in Path(folder).rglob(_RUNNING):
        shutil.rmtree(mark.read_text(), ignore_errors=True)
    shutil.rmtree(folder, ignore_errors=True)


def rank_folder(environment: Mapping[str, str] = os.environ) -> str | None:
    """Return the folder that torchrun creates for this rank; None in a process that torchrun did not start.

    Each start of all ranks has its own parent folder. `launch` removes all these folders when it ends.
    """
    error_file = environment.get("TORCHELASTIC_ERROR_FILE")
    return os.path.dirname(error_file) if error_file else None


def _run(action: Callable[[], None], describe: Callable[[Iterable[Problem]], str]) -> int:
    try:
        action()
        return OK
    except ConfigError as error:
        return _announce(describe(error.problems), BAD_INPUT)
    except UserError as error:  # some messages already begin with `error: `
        return _announce(f"error: {str(error).removeprefix('error: ')}", BAD_INPUT)
    except RunError as error:
        return _announce(f"error: {error}", FAILED)
    except Stopped as end:
        return _announce(str(end), end.status)
    except BrokenPipeError:
        return _announce("error: the reader of the output closed the pipe; the run ends", FAILED)
    except KeyboardInterrupt:
        return _announce("interrupted", INTERRUPTED)
    except BaseException as error:
        if isinstance(error, OSError) and (text := wrong_path(error)):
            return _announce(text, BAD_INPUT)
        import traceback

        from titan_launch.core.import_string import raised_in_user_forward, user_traceback

        trace = user_traceback(error) if raised_in_user_forward(error) else traceback.format_exc().rstrip()
        rank = os.environ.get("RANK")
        where = f" on rank {rank}" if rank else ""
        announce_once(f"error: {UNEXPECTED}{where}; see the traceback above", trace)
        return FAILED


UNEXPECTED = "the run failed"
"""Beginning of the message for an unexpected error. Its traceback is printed above the message."""


def wrong_path(error: OSError) -> str | None:
    """Return the message for an error that the user can fix with another path, other permissions or other links. Return
    None for any other error."""
    wrong = (errno.EACCES, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.ENOTDIR, errno.EROFS)
    if error.errno not in wrong or error.filename is None:
        return None
    remedy = "name another path, or correct its permissions or links"
    return f"error: {shortened(str(error.filename), 300)}: {error.strerror}; {remedy}"


def _announce(text: str, status: int) -> int:
    announce_once(text)
    return status


def announce_once(text: str, traceback: str = "") -> None:
    """Print an error, unless another rank of this host has already printed an error.

    The later errors of other ranks are consequences of the first one. The first rank to create the file of
    `claim_announcement` prints its error. That is not always rank 0, because torchrun may stop rank 0 before rank 0
    prints. `traceback`: text that is printed above the error, without indentation. If `--local-ranks-filter` hides the
    output of this rank, `launch` prints the error (`print_hidden_announcement`). The torchrun command does not print
    this error, so another rank with visible output prints its own.
    """
    is_hidden = _is_discarded(sys.stderr)
    if is_hidden and PRINTS_HIDDEN not in os.environ:
        return
    above = f"{printable(traceback)}\n" if traceback else ""
    message = above + as_message(text)
    if claim_announcement(os.environ, message if is_hidden else ""):
        clear_line = CLEAR_LINE if sys.stderr.isatty() else ""  # a progress bar may be in this line
        say_escaped(clear_line + message, sys.stderr, flush=True)


def _is_discarded(stream: TextIO) -> bool:
    with suppress(OSError):  # a stream of a test may have no descriptor
        return os.path.samestat(os.fstat(stream.fileno()), os.stat(os.devnull))
    return False


def claim_announcement(environment: Mapping[str, str], hidden: str = "") -> bool:
    """Create the file that marks a failure as announced: the caller, or later `launch`, prints the failure. Return True
    if the caller must print it, and False if the file already exists. If torchrun did not start the caller, or if the
    file cannot be created, return True.

    `environment`: environment variables of a rank, which name the folder that torchrun has created for this start.
    `hidden`: content of the file, the text that `print_hidden_announcement` prints.
    """
    path = _announcement_mark(environment)
    if path is None:  # torchrun did not start this process, so nothing stops the other ranks: each rank prints
        return True
    try:
        with open(path, "x", encoding="utf-8") as file:
            file.write(hidden)
    except FileExistsError:
        return False
    except OSError:  # printing twice is better than not at all
        return True
    return True


def print_hidden_announcement(environment: Mapping[str, str]) -> None:
    """If a rank of this host has failed and its output is hidden, print its error. `environment`: environment variables
    of any rank of this start."""
    path = _announcement_mark(environment)
    with suppress(OSError):
        if path is not None and (text := Path(path).read_text(encoding="utf-8")):
            say_escaped(text, sys.stderr, flush=True)


def is_announced() -> bool:
    """Return True if any rank of this host, or `launch`, has printed or will print a failure. Return False in a process
    that torchrun did not start."""
    path = _announcement_mark(os.environ)
    return path is not None and os.path.exists(path)


def _announcement_mark(environment: Mapping[str, str]) -> str | None:
    folder = rank_folder(environment)
    return None if folder is None else os.path.join(os.path.dirname(folder), "announced")
