"""How a training process ends: one message for all ranks, output flushed, the right exit status."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import NoReturn

from titan_launch.config.explain import render
from titan_launch.config.provenance import Provenance
from titan_launch.errors import ConfigError, RunError, Stopped, UserError

OK, FAILED, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130


def run_and_leave(action: Callable[[], None], provenance: Provenance) -> NoReturn:
    """Run `action`, report how it ended, and end the process with its status."""
    status = FAILED
    try:
        status = _run(action, provenance)
    finally:
        leave(status)


def leave(status: int) -> NoReturn:
    """End the process at once, with everything flushed.

    In the ordinary way gloo's threads may still hold Python objects while the interpreter shuts down, which aborts up
    to a quarter of finished, correct runs (SIGABRT; pytorch issue 190489). It would also take a tenth of the time of a
    `check` to free, object by object, what the operating system frees anyway.
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # nobody reads any more: `| head`
            stream.flush()
    os._exit(status)


def _run(action: Callable[[], None], provenance: Provenance) -> int:
    try:
        action()
        return OK
    except ConfigError as error:
        return _announce(render(error.problems, provenance), BAD_INPUT)
    except UserError as error:
        return _announce(f"error: {error}", BAD_INPUT)
    except RunError as error:
        return _announce(f"error: {error}", FAILED)
    except Stopped as end:
        return _announce(str(end), end.status)
    except BrokenPipeError:
        return _announce("error: nobody reads the output any more (a closed pipe), so the run ends", FAILED)
    except KeyboardInterrupt:
        return _announce("interrupted", INTERRUPTED)
    except BaseException as error:
        import traceback

        from titan_launch.registry import is_of_users_forward, user_traceback

        trace = user_traceback(error) if is_of_users_forward(error) else traceback.format_exc().rstrip()
        rank = os.environ.get("RANK")
        where = f" on rank {rank}" if rank else ""
        return _announce(f"{trace}\nerror: the run failed{where}; see the traceback above", FAILED)


def _announce(text: str, status: int) -> int:
    announce_once(text)
    return status


def announce_once(text: str) -> None:
    """Print an error on the first rank of this host that has one; the errors of the other ranks follow from it.

    Rank 0 alone could not print: torchrun stops all ranks as soon as the first one fails. So the rank that creates the
    file of `claim_announcement` prints.
    """
    if claim_announcement(os.environ):
        over_the_bar = "\r\x1b[K" if sys.stderr.isatty() else ""  # a progress bar leaves the cursor in its line
        print(over_the_bar + text, file=sys.stderr, flush=True)


def claim_announcement(environment: Mapping[str, str]) -> bool:
    """Create the file which says that the reason of a failure is printed. Returns False if it exists already.

    `environment`: that of a rank. torchrun names a folder in it for each start of the ranks.
    """
    path = _announcement(environment)
    if path is None:  # started by hand, or by another launcher: nothing stops the other ranks, so each may print
        return True
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    except FileExistsError:
        return False
    except OSError:  # a message twice is better than none
        return True
    return True


def is_announced() -> bool:
    """Whether the reason why a rank of this host failed is printed, by that rank or by `launch`."""
    path = _announcement(os.environ)
    return path is not None and os.path.exists(path)


def _announcement(environment: Mapping[str, str]) -> str | None:
    error_file = environment.get("TORCHELASTIC_ERROR_FILE")
    return os.path.join(os.path.dirname(os.path.dirname(error_file)), "announced") if error_file else None
