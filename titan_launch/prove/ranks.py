"""Gloo ranks on this host. They are forked from a process that has imported torch, so a rank starts in 0.1 s instead of
4 s."""

from __future__ import annotations

import errno
import gc
import importlib
import multiprocessing
import multiprocessing.forkserver
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from titan_launch.core.errors import ConfigError, Problem, RunError, UserError
from titan_launch.core.import_string import raised_in_user_forward, user_traceback
from titan_launch.core.patches import environment
from titan_launch.core.signals import signal_name

_CONTEXT = multiprocessing.get_context("forkserver")
R = TypeVar("R")


def start_server() -> None:
    """Start the process that ranks are forked from. It sees no GPU, and ends with this process."""
    _CONTEXT.set_forkserver_preload(["titan_launch.prove.preloaded"])
    with environment(CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1"):
        multiprocessing.forkserver.ensure_running()


def run_ranks(function: str, world_size: int, *args: Any, timeout: float) -> list[Any]:
    """Call a function, `module:name`, on every rank of a new gloo group. Return the results in the order of ranks.

    Arguments and results are pickled. If a rank fails, its ConfigError or UserError is raised again, or RunError with
    the traceback of any other error. Also raises RunError if a rank is killed or takes longer than `timeout` seconds,
    and UserError if the host cannot start so many processes.
    """
    try:
        return in_processes(partial(_main, function, args), world_size, _received, timeout)
    except TimeoutError as error:
        raise RunError(str(error)) from None


def in_processes(
    main: Callable[[Connection, int, int, str], None],
    world_size: int,
    received: Callable[[Connection, Any, int], R],
    timeout: float,
) -> list[R]:
    """Run `main(pipe, rank, world_size, store)` in a forked process for each rank. Return the results that
    `received(pipe, process, rank)` reads from the pipes, in the order of ranks.

    `store`: a file for the rendezvous. At the end, all processes are killed. Raises the errors of `received`,
    TimeoutError if a rank takes longer than `timeout` seconds, and UserError if the host cannot start so many
    processes.
    """
    pipes, processes = list[Connection](), list[Any]()
    with tempfile.TemporaryDirectory(prefix="titan-launch-ranks-") as folder:
        try:
            for rank in range(world_size):
                pipe, process = _started(main, rank, world_size, str(Path(folder, "store")))
                pipes.append(pipe)
                processes.append(process)
            return _gather(pipes, processes, received, timeout)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _started(
    main: Callable[[Connection, int, int, str], None], rank: int, world_size: int, store: str
) -> tuple[Connection, Any]:
    """Start the process of a rank. Return its pipe and the process. All lower ranks have been started already."""
    try:
        ours, theirs = _CONTEXT.Pipe(duplex=False)
        with theirs:
            process = _CONTEXT.Process(target=main, args=(theirs, rank, world_size, store))
            process.start()
    except (OSError, EOFError) as error:  # EOFError: the fork server has ended
        reason = f"this host could start only {rank} of {world_size} processes: {error}"
        limits = (errno.EMFILE, errno.ENFILE, errno.EAGAIN)
        advice = "; raise its limits (ulimit -u, ulimit -n)" if getattr(error, "errno", 0) in limits else ""
        raise UserError(f"error: {reason}{advice}") from None
    return ours, process


class _Failure(NamedTuple):
    """The error of a rank, in a form that can be pickled."""

    text: str
    is_of_user: bool
    problems: tuple[Problem, ...] = ()

    def error(self, rank: int) -> Exception:
        if self.problems:
            return ConfigError(self.problems)
        return UserError(self.text) if self.is_of_user else RunError(f"rank {rank} failed:\n{self.text}")


def _gather(
    pipes: Sequence[Connection],
    processes: Sequence[Any],
    received: Callable[[Connection, Any, int], R],
    timeout: float,
) -> list[R]:
    results, deadline = dict[int, R](), time.monotonic() + timeout
    while len(results) < len(pipes):
        waiting = [pipe for rank, pipe in enumerate(pipes) if rank not in results]
        ready = wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            late = [str(rank) for rank in range(len(pipes)) if rank not in results]
            names = f"rank{'s' * (len(late) > 1)} {', '.join(late)}"
            raise TimeoutError(f"{names} of {len(pipes)} did not finish within {timeout:g} s")
        for rank in (rank for rank, pipe in enumerate(pipes) if pipe in ready):
            results[rank] = received(pipes[rank], processes[rank], rank)
    return [results[rank] for rank in range(len(pipes))]


def _received(pipe: Connection, process: Any, rank: int) -> Any:
    try:
        result = pickle.loads(pipe.recv_bytes())
    except EOFError:
        process.join()
        status = process.exitcode
        ending = f"was killed by {signal_name(-status)}" if status < 0 else f"ended with status {status}"
        raise RunError(f"rank {rank} {ending}; the host may have too little memory") from None
    if isinstance(result, _Failure):
        raise result.error(rank)
    return result


def _main(function: str, args: Any, pipe: Connection, rank: int, world_size: int, store: str) -> None:
    import torch
    import torch.distributed as dist

    with open(os.devnull, "w") as nothing:  # otherwise every rank would show the warnings and prints of the model
        for stream in (sys.stdout, sys.stderr):
            os.dup2(nothing.fileno(), stream.fileno())
    gc.freeze()  # otherwise a garbage collection would copy the memory pages that are shared with the parent process
    torch.set_num_threads(1)
    status = 0
    try:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
        module, _, name = function.partition(":")
        message = getattr(importlib.import_module(module), name)(*args)
        dist.barrier()  # a rank that leaves early breaks the collectives of the others
    except BaseException as error:
        problems = error.problems if isinstance(error, ConfigError) else ()
        is_of_user = isinstance(error, UserError)
        trace = user_traceback(error) if raised_in_user_forward(error) else traceback.format_exc()
        message, status = _Failure(str(error) if is_of_user else trace.rstrip(), is_of_user, problems), 1
    pipe.send_bytes(pickle.dumps(message))  # `pipe.send` would put tensors into memory that ends with this process
    os._exit(status)  # gloo's threads can abort an interpreter that shuts down in the ordinary way
