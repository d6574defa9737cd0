"""Who writes a checkpoint: the training thread, a thread beside it, or a process beside it."""

from __future__ import annotations

import logging
import os
import signal
import socket
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import Tensor
from torch.distributed import distributed_c10d

from titan_launch.checkpoint.request import WriteRequest, Written
from titan_launch.checkpoint.snapshot import Arena, State, in_memory, lay_out
from titan_launch.collective import on_all, on_main
from titan_launch.config.checkpoint import AsyncMode
from titan_launch.signals import leave_signals_to_parent, stop_with_parent

_NICENESS = 10
_TIMEOUT_OF_JOINING = timedelta(minutes=5)
"""How long writer processes wait for each other to start."""

_TIMEOUT = timedelta(hours=1)
"""Of a collective of a save: ranks wait in it for the one that writes the most, or to the slowest disk."""

_PATIENCE = 2 * _TIMEOUT
"""How long a whole save may take in a process."""


class Background(ABC):
    """Writes one state at a time."""

    def __init__(self) -> None:
        self._is_broken = False

    def write(self, request: WriteRequest, state: State) -> Future[Written]:
        """Begin to write; the caller may change the tensors of `state` as soon as this returns. Collective, and only
        when what was begun before is done. The future ends alike on all ranks.

        Raises OSError where the copy finds no room.
        """
        if any(on_all(lambda: self._is_broken or self._has_died())):
            self.close()
            self._start()
            self._is_broken = False
        future = self._begin(request, state)
        future.add_done_callback(self._look_at)
        return future

    def get_ready(self) -> None:
        """Load what writes, which takes a second, so that the first save finds nothing missing in it."""
        load_writer()

    def _look_at(self, future: Future[Written]) -> None:
        """A full disk may have room the next time; anything else means that ranks have lost each other."""
        error = None if future.cancelled() else future.exception()
        self._is_broken = error is not None and not isinstance(error, OSError)

    def _has_died(self) -> bool:
        """Whether what writes is gone on this rank: the others' would wait for it, for up to an hour."""
        return False

    @abstractmethod
    def _start(self) -> None:
        """Set up what writes; collective."""

    @abstractmethod
    def _begin(self, request: WriteRequest, state: State) -> Future[Written]: ...

    def close(self) -> None:  # noqa: B027
        """End what runs beside training. What is being written then is lost."""


def build_background(mode: AsyncMode, device: torch.device) -> Background:
    """What `checkpoint.async_mode` names; collective."""
    if mode == "process":
        return InProcess()
    return InThread(device) if mode == "thread" else Inline()


class Inline(Background):
    """The training thread itself: no copy is made, and training waits."""

    def __init__(self) -> None:
        super().__init__()
        self._start()

    def _start(self) -> None:
        self._group = _own_group()

    def _begin(self, request: WriteRequest, state: State) -> Future[Written]:
        future: Future[Written] = Future()
        try:
            future.set_result(_write(request, state, self._group))
        except Exception as error:
            future.set_exception(error)
        return future


class InThread(Background):
    """A thread, which writes a copy."""

    def __init__(self, device: torch.device):
        super().__init__()
        self._arena = Arena(is_pinned=device.type == "cuda")
        self._start()

    def _start(self) -> None:
        self._group = _own_group()
        self._executor = ThreadPoolExecutor(1, "checkpoint")

    def _begin(self, request: WriteRequest, state: State) -> Future[Written]:
        copy = in_memory(_copied(state, self._arena), self._arena.memory)
        return self._executor.submit(_write, request, copy, self._group)

    def close(self) -> None:
        """The thread ends with the process at the latest."""
        self._executor.shutdown(wait=False, cancel_futures=True)


class InProcess(Background):
    """A process for each rank, which writes a copy that it shares the memory of. The processes have a group among
    themselves, so that nothing of a save runs in the training process but the copy.

    It starts at once, beside the start of training, and is gone when this process is, however that ends.
    """

    def __init__(self) -> None:
        super().__init__()
        self._arena = Arena(is_shared=True)
        self._start()

    def _start(self) -> None:
        self._sent: Tensor | None = None
        self._executor = ThreadPoolExecutor(1, "checkpoint")  # its thread only waits for the process
        host, port, self._store = _meeting_point()
        place = _Place(dist.get_rank(), dist.get_world_size(), host, port, os.getpid())
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, place), name="checkpoint writer", daemon=True)
        self._process.start()
        theirs.close()  # so that reading ends when the process does

    def get_ready(self) -> None:
        """The process does that by itself."""

    def _has_died(self) -> bool:
        return not self._process.is_alive()

    def _begin(self, request: WriteRequest, state: State) -> Future[Written]:
        slots = _copied(state, self._arena)
        memory = None if self._arena.memory is self._sent else self._arena.memory
        self._sent = self._arena.memory
        return self._executor.submit(self._ask, _Order(request, slots, memory))

    def _ask(self, order: _Order) -> Written:
        try:
            self._connection.send(order)
            if not self._connection.poll(_PATIENCE.total_seconds()):
                self._process.kill()  # stopped, or in a file system that does not answer
            answer = self._connection.recv()
        except (EOFError, OSError):
            self._process.join(5)
            code = self._process.exitcode
            raise RuntimeError(f"the process that writes checkpoints has died (exit code {code})") from None
        if isinstance(answer, Written):
            return answer
        raise answer.error()

    def close(self) -> None:
        """The process is killed: it holds nothing but what is being written."""
        self._executor.shutdown(wait=False, cancel_futures=True)
        self._process.kill()
        self._process.join()


def load_writer() -> Callable[[WriteRequest, State, dist.ProcessGroup | None], Written]:
    """What writes a checkpoint. It needs DCP, which takes a second to import: no run waits for it at its start."""
    from titan_launch.checkpoint.writer import write_checkpoint

    return write_checkpoint


def _write(request: WriteRequest, state: State, group: dist.ProcessGroup | None) -> Written:
    return load_writer()(request, state, group)


def _copied(state: State, arena: Arena) -> State:
    """The slots of a copy of the state in the arena. Collective: where one rank finds no room, all raise OSError."""
    slots, size = lay_out(state)
    on_all(lambda: arena.reserve(size))
    arena.fill(state, slots)
    return slots


def _own_group() -> dist.ProcessGroup:
    """A group for the collectives of a save: in training's they would mix with those of training, which goes on."""
    return dist.new_group(backend="gloo", timeout=_TIMEOUT, group_desc="checkpoint")


@dataclass(frozen=True)
class _Place:
    """A writer process among the others."""

    rank: int
    world_size: int
    host: str
    port: int
    parent: int
    """The training process."""


@dataclass(frozen=True)
class _Order:
    """What a writer process is told."""

    request: WriteRequest
    slots: State
    memory: Tensor | None
    """The arena, where it is another than last time."""


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
        store = dist.TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False, timeout=_TIMEOUT)
    host, port = on_main(lambda: (_own_address(), 0 if store is None else store.port))
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


def _serve(connection: Connection, place: _Place) -> None:
    """The main function of a writer process: join the others, then write what it is told, until this rank is gone."""
    _end_with(place.parent)
    leave_signals_to_parent()  # which waits for this process
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    os.nice(_NICENESS)  # training comes first where there are not cores for both
    load_writer()
    with suppress(EOFError, BrokenPipeError):
        memory = torch.empty(0, dtype=torch.uint8)
        while True:
            order = connection.recv()
            memory = memory if order.memory is None else order.memory
            try:
                if not dist.is_initialized():
                    _join(place)
                connection.send(_write(order.request, in_memory(order.slots, memory), None))
            except OSError as error:
                connection.send(_Failure(True, str(error)))
            except Exception as error:
                text = str(error) if isinstance(error, RuntimeError) else traceback.format_exc()
                connection.send(_Failure(False, text))
    os._exit(0)  # see titan_launch.process.leave


def _join(place: _Place) -> None:
    if place.world_size == 1:
        store: dist.Store = dist.HashStore()
    else:
        store = dist.TCPStore(place.host, place.port, is_master=False, timeout=_TIMEOUT_OF_JOINING)
    timeout = _TIMEOUT_OF_JOINING
    dist.init_process_group("gloo", store=store, rank=place.rank, world_size=place.world_size, timeout=timeout)
    distributed_c10d._set_pg_timeout(_TIMEOUT, distributed_c10d._get_default_group())


def _end_with(parent: int) -> None:
    """Have the operating system kill this process when the training process dies: a checkpoint that is still being
    written could otherwise become visible to a run that has already resumed from the one before."""
    stop_with_parent(signal.SIGKILL)
    if os.getppid() != parent:  # it died before
        os._exit(1)
