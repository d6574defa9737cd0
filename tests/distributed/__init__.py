"""Run a function on several gloo ranks of this machine."""

from __future__ import annotations

import faulthandler
import gc
import io
import multiprocessing
import multiprocessing.connection
import multiprocessing.forkserver
import os
import pickle
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from titan_launch.prove.ranks import in_processes

# Ranks are forked from a server that has loaded PyTorch and all of the launcher that a run needs: they begin in 0.1 s
# instead of 4 s, and are still processes of their own, so that nothing leaks from one test to the next.
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.distributed.preloaded"])


def start_server() -> None:
    """Start the server of ranks. It keeps the environment and the working directory of this moment."""
    multiprocessing.forkserver.ensure_running()


def run_ranks(fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 120) -> list[Any]:
    """Call `fn(*args)` on every rank of a fresh gloo group and return what each rank returned, in rank order.

    `fn` is a module-level function; its arguments and result are pickled. Runs do not predict
    the memory of models that must be recorded. Raises AssertionError with the traceback of the first rank that failed,
    or that is late.
    """
    try:
        return in_processes(partial(_rank_main, fn, args), world_size, _receive, timeout)
    except TimeoutError as error:
        raise AssertionError(str(error)) from None


def run_command(
    args: Sequence[str],
    folder: Path,
    timeout: float = 120,
    typed: str = "",
    environment: Mapping[str, str] | None = None,
) -> tuple[int, str, str]:
    """Run a command of the launcher in `folder`, in a process of its own that has loaded what it needs. `typed`: its
    standard input. `environment`: variables that it has beside those of the tests. Those that Python reads when it
    starts, such as PYTHONPATH, do nothing.

    Returns the exit status, and what the command printed and reported as errors.
    """
    with tempfile.TemporaryDirectory() as temporary:
        files = Path(temporary, "stdout"), Path(temporary, "stderr")
        process = _CONTEXT.Process(target=_command_main, args=(args, folder, *files, typed, environment or {}))
        process.start()
        process.join(timeout)
        status = process.exitcode
        process.kill()
        assert status is not None, f"{args} did not end in time"
        printed, reported = (file.read_text() for file in files)
        return status, printed, reported


def join_fake_group(world_size: int) -> None:
    """Make this rank of `run_ranks(..., 1)` rank 0 of `world_size` ranks that do not exist. Nothing is communicated."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)


def _receive(pipe: multiprocessing.connection.Connection, process: Any, rank: int) -> Any:
    try:
        succeeded, result = pickle.loads(pipe.recv_bytes())
    except EOFError:
        process.join()
        died = f"rank {rank} died without a word; exit status {process.exitcode}"
        raise AssertionError(died) from None
    assert succeeded, f"rank {rank} failed:\n{result}"
    return result


def _command_main(
    args: Sequence[str], folder: Path, stdout: Path, stderr: Path, typed: str, environment: Mapping[str, str]
) -> None:
    from titan_launch.cli import main

    _exempt_objects_of_server()
    os.environ.update(environment)
    tempfile.tempdir = None  # that of TMPDIR
    sys.stdin = io.StringIO(typed)
    for stream, file in ((sys.stdout, stdout), (sys.stderr, stderr)):
        os.dup2(os.open(file, os.O_CREAT | os.O_WRONLY), stream.fileno())
    os.chdir(folder)
    status = main(args)
    sys.stdout.flush()  # `os._exit` would lose what is buffered
    os._exit(status)


def _exempt_objects_of_server() -> None:
    """Exempt the objects of the server from garbage collections, which would visit all of them and copy their pages."""
    gc.freeze()
    vars(gc)["get_freeze_count"] = lambda: 1  # a run asks whether it is 0, and counting all of them takes 35 ms


def _no_trace(*args: Any) -> None:
    """Stand in for a process that takes seconds of every run. tests/train/test_measure.py uses the real one."""
    raise OSError("tests do not trace")


def _rank_main(
    fn: Callable[..., Any], args: tuple[Any, ...], pipe: Any, rank: int, world_size: int, store: str
) -> None:
    import torch
    import torch.distributed as dist

    from titan_launch.train import measure

    vars(measure)["TraceProcess"] = _no_trace
    faulthandler.enable()
    _exempt_objects_of_server()
    torch.set_num_threads(1)
    status = 0
    try:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
        message = (True, fn(*args))
        dist.barrier()  # a rank that leaves early breaks the collectives of the others
    except BaseException:
        message, status = (False, traceback.format_exc()), 1
    # Plain pickle: torch's own reducers would send tensors as shared memory that dies with this process.
    pipe.send_bytes(pickle.dumps(message))
    os._exit(status)  # gloo's threads can abort an interpreter that shuts down in the ordinary way
