"""The writer processes of `async_mode = "process"`: one for each rank, with a process group of their own."""

from __future__ import annotations

import logging
import os
import signal
import socket
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import Tensor

from titan_launch.checkpoint.retention import WriteRequest, Written
from titan_launch.checkpoint.snapshot import State, in_memory
from titan_launch.core.patches import environment
from titan_launch.core.signals import ignore_stop_signals, signals_blocked, stop_with_parent
from titan_launch.distributed.collectives import on_rank_0
from titan_launch.distributed.torch_private import set_timeout

COLLECTIVE_TIMEOUT = timedelta(hours=1)
"""Timeout of a save's collectives. In them, all ranks wait until the slowest rank has written its files."""

_PATIENCE = 2 * COLLECTIVE_TIMEOUT
"""Longest time for a save. If a save takes longer, the writer process is killed."""

_TIMEOUT_OF_JOINING = timedelta(minutes=5)
"""Timeout for creating the process group of the writer processes."""


@dataclass(frozen=True)
class WriteOrder:
    """A request to a writer process, sent through a pipe."""

    request: WriteRequest
    slots: State
    memory: Tensor | None
    """Shared memory with the tensors, at the positions in `slots`. None: the same memory as in the previous order."""


class WriterProcess:
    """The writer process of this rank. Creating this object is collective, and starts the process."""

    def __init__(self) -> None:
        host, port, self._store = _meeting_point()
        address = WriterAddress(dist.get_rank(), dist.get_world_size(), host, port, os.getpid())
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, address), name="checkpoint writer", daemon=True)
        # CUDA_VISIBLE_DEVICES="" keeps a writer from opening a CUDA context of 0.5 GB. `signals_blocked` keeps a stop
        # signal from killing a writer that has not yet called `ignore_stop_signals`. Starting the resource tracker
        # unblocks SIGINT and SIGTERM, so it is started here, and not by `process.start`.
        resource_tracker.ensure_running()
        with environment(CUDA_VISIBLE_DEVICES=""), signals_blocked():
            self.process.start()
        theirs.close()  # so that recv raises EOFError when the process ends

    def write(self, order: WriteOrder) -> Written:
        """Send an order, and wait for the result. Raises OSError for errors of the file system, such as a full disk.
        Raises RuntimeError for other errors, and if the process has died or takes longer than _PATIENCE."""
        try:
            self._connection.send(order)
            if not self._connection.poll(_PATIENCE.total_seconds()):
                self.process.kill()  # the process does not run, or its file system does not answer
                limit = f"{_PATIENCE / timedelta(hours=1):g} h"
                raise RuntimeError(
                    f"the process that writes checkpoints was killed, because a save took longer than {limit}"
                )
            answer = self._connection.recv()
        except (EOFError, OSError) as error:
            self.process.join(5)
            how = f"cannot be reached ({error})" if str(error) else "did not answer"
            if (code := self.process.exitcode) is not None:
                how = f"died (exit code {code})"
            raise RuntimeError(f"the process that writes checkpoints {how}") from None
        if isinstance(answer, Written):
            return answer
        raise answer

    def kill(self) -> None:
        """Kill the process, also during a save."""
        self.process.kill()
        self.process.join()


def load_writer() -> Callable[[WriteRequest, State, dist.ProcessGroup | None], Written]:
    """Import and return `write_checkpoint`."""
    from titan_launch.checkpoint.writer import write_checkpoint  # imports DCP, which would delay the start of a run

    return write_checkpoint


@dataclass(frozen=True)
class WriterAddress:
    """Rank of a writer process, and the address of the store that the writer processes share. With one rank there is no
    store, and the port is 0."""

    rank: int
    world_size: int
    host: str
    port: int
    parent: int
    """Process id of the training process."""


def _meeting_point() -> tuple[str, int, dist.Store | None]:
    """Create a store on rank 0 through which the writer processes find each other. Return its host and port, and on
    rank 0 also the store. With one rank there is no store, and the port is 0. Collective."""
    store: dist.TCPStore | None = None
    if dist.get_rank() == 0 and dist.get_world_size() > 1:
        store = dist.TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False, timeout=COLLECTIVE_TIMEOUT)
    host, port = on_rank_0(lambda: (_own_address(), 0 if store is None else store.port))
    return host, port, store


def _own_address() -> str:
    """Return an address under which other hosts can reach this host: the address from which this host sends packets to
    MASTER_ADDR, the host of torchrun's store. Return MASTER_ADDR itself if that address is a loopback address or cannot
    be found, and `localhost` without torchrun."""
    master = os.environ.get("MASTER_ADDR", "localhost")
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)  # sends nothing
            own = str(probe.getsockname()[0])
    except OSError:
        return master
    return master if own in ("127.0.0.1", "::1") else own


def serve(connection: Connection, address: WriterAddress) -> None:
    """Run a writer process: join the other writers at the first order, then execute orders until the run ends."""
    # The system kills this process when the training process dies. Otherwise a checkpoint could become visible after
    # the run has resumed from an older one.
    stop_with_parent(signal.SIGKILL)
    if os.getppid() != address.parent:  # the training process has died already
        os._exit(1)
    ignore_stop_signals()  # after a stop signal, the training process waits for this process
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    os.nice(10)  # if cores are scarce, training has priority
    write = load_writer()
    with suppress(EOFError, BrokenPipeError):
        memory = torch.empty(0, dtype=torch.uint8)
        while True:
            order = connection.recv()
            memory = memory if order.memory is None else order.memory
            try:
                if not dist.is_initialized():
                    _join(address)
                connection.send(write(order.request, in_memory(order.slots, memory), None))
            except OSError as error:
                connection.send(OSError(str(error)))
            except Exception as error:
                text = str(error) if isinstance(error, RuntimeError) else traceback.format_exc()
                connection.send(RuntimeError(text))
    os._exit(0)  # see titan_launch.core.process.exit_process


def _join(address: WriterAddress) -> None:
    rank, world_size, timeout = address.rank, address.world_size, _TIMEOUT_OF_JOINING
    if world_size == 1:
        store: dist.Store = dist.HashStore()
    else:
        store = dist.TCPStore(address.host, address.port, is_master=False, timeout=timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
    assert dist.group.WORLD is not None
    set_timeout(dist.group.WORLD, COLLECTIVE_TIMEOUT)
