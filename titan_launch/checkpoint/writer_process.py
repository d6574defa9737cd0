"""The processes that write checkpoints beside training, one for each rank, with a group among themselves."""

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
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import Tensor

from titan_launch.checkpoint.snapshot import State, in_memory
from titan_launch.checkpoint.writer import WriteRequest, Written
from titan_launch.core.patches import environment
from titan_launch.core.signals import ignore_stop_signals, stop_with_parent
from titan_launch.distributed.collectives import on_rank_0
from titan_launch.distributed.torch_private import set_timeout

COLLECTIVE_TIMEOUT = timedelta(hours=1)
"""Of a collective of a save: ranks wait in it for the one that writes the most, or to the slowest disk."""

_PATIENCE = 2 * COLLECTIVE_TIMEOUT
"""How long a whole save may take."""

_TIMEOUT_OF_JOINING = timedelta(minutes=5)
"""How long writer processes wait for each other to start."""

_NICENESS = 10


@dataclass(frozen=True)
class WriteOrder:
    """What a writer process is told."""

    request: WriteRequest
    slots: State
    memory: Tensor | None
    """The arena, where it is another than last time."""


class WriterProcess:
    """This rank's, which is begun with the object; collective."""

    def __init__(self) -> None:
        host, port, self._store = _meeting_point()
        place = WriterAddress(dist.get_rank(), dist.get_world_size(), host, port, os.getpid())
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, place), name="checkpoint writer", daemon=True)
        with environment(CUDA_VISIBLE_DEVICES=""):  # each writer could open a context of 0.5 GB, all of them on GPU 0
            self.process.start()
        theirs.close()  # so that reading ends when the process does

    def write(self, order: WriteOrder) -> Written:
        """Have it write, and wait for that. Raises OSError where a disk is full or the like, RuntimeError for anything
        else, the death of the process among it."""
        try:
            self._connection.send(order)
            if not self._connection.poll(_PATIENCE.total_seconds()):
                self.process.kill()  # stopped, or in a file system that does not answer
            answer = self._connection.recv()
        except (EOFError, OSError):
            self.process.join(5)
            code = self.process.exitcode
            raise RuntimeError(f"the process that writes checkpoints has died (exit code {code})") from None
        if isinstance(answer, Written):
            return answer
        raise answer.error()

    def kill(self) -> None:
        """End it, whatever it does."""
        self.process.kill()
        self.process.join()


def load_writer() -> Callable[[WriteRequest, State, dist.ProcessGroup | None], Written]:
    """What writes a checkpoint. It needs DCP, which takes a second to import: no run waits for it at its start."""
    from titan_launch.checkpoint.writer import write_checkpoint

    return write_checkpoint


@dataclass(frozen=True)
class WriterAddress:
    """A writer process among the others."""

    rank: int
    world_size: int
    host: str
    port: int
    parent: int
    """The training process."""


@dataclass(frozen=True)
class _Failure:
    """What a writer process answers instead of `Written`."""

    is_os_error: bool
    text: str

    def error(self) -> Exception:
        return OSError(self.text) if self.is_os_error else RuntimeError(self.text)


def _meeting_point() -> tuple[str, int, dist.Store | None]:
    """Host and port of a store for the writer processes, which the main rank keeps; collective."""
    store: dist.TCPStore | None = None
    if dist.get_rank() == 0 and dist.get_world_size() > 1:
        store = dist.TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False, timeout=COLLECTIVE_TIMEOUT)
    host, port = on_rank_0(lambda: (_own_address(), 0 if store is None else store.port))
    return host, port, store


def _own_address() -> str:
    """The address of this host that the others reach: that from which it reaches the host of torchrun's store, which
    need not be that of the main rank. Without torchrun all ranks are on this one."""
    master = os.environ.get("MASTER_ADDR", "localhost")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)  # sends nothing
            own = str(probe.getsockname()[0])
    except OSError:
        return master
    return master if own in ("127.0.0.1", "::1") else own


def serve(connection: Connection, place: WriterAddress) -> None:
    """The main function of a writer process: join the others, then write what it is told, until this rank is gone."""
    _end_with(place.parent)
    ignore_stop_signals()  # which waits for this process
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    os.nice(_NICENESS)  # training comes first where there are not cores for both
    write = load_writer()
    with suppress(EOFError, BrokenPipeError):
        memory = torch.empty(0, dtype=torch.uint8)
        while True:
            order = connection.recv()
            memory = memory if order.memory is None else order.memory
            try:
                if not dist.is_initialized():
                    _join(place)
                connection.send(write(order.request, in_memory(order.slots, memory), None))
            except OSError as error:
                connection.send(_Failure(True, str(error)))
            except Exception as error:
                text = str(error) if isinstance(error, RuntimeError) else traceback.format_exc()
                connection.send(_Failure(False, text))
    os._exit(0)  # see titan_launch.core.process.exit_process


def _join(place: WriterAddress) -> None:
    if place.world_size == 1:
        store: dist.Store = dist.HashStore()
    else:
        store = dist.TCPStore(place.host, place.port, is_master=False, timeout=_TIMEOUT_OF_JOINING)
    timeout = _TIMEOUT_OF_JOINING
    dist.init_process_group("gloo", store=store, rank=place.rank, world_size=place.world_size, timeout=timeout)
    assert dist.group.WORLD is not None
    set_timeout(dist.group.WORLD, COLLECTIVE_TIMEOUT)


def _end_with(parent: int) -> None:
    """Have the operating system kill this process when the training process dies: a checkpoint that is still being
    written could otherwise become visible to a run that has already resumed from the one before."""
    stop_with_parent(signal.SIGKILL)
    if os.getppid() != parent:  # it died before
        os._exit(1)
