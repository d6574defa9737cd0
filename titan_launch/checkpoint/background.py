"""Who writes a checkpoint: the training thread, a thread beside it, or a process beside it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch
import torch.distributed as dist
from torch import Tensor

from titan_launch.checkpoint.snapshot import Arena, State, in_memory, lay_out
from titan_launch.checkpoint.writer import WriteRequest, Written
from titan_launch.checkpoint.writer_process import COLLECTIVE_TIMEOUT, WriteOrder, WriterProcess, load_writer
from titan_launch.config.sections.checkpoint import AsyncMode
from titan_launch.distributed.collectives import on_all_ranks


class Background(ABC):
    """Writes one state at a time."""

    def __init__(self) -> None:
        self._is_broken = False

    def write(self, request: WriteRequest, state: State) -> Future[Written]:
        """Begin to write; the caller may change the tensors of `state` as soon as this returns. Collective, and only
        when what was begun before is done. The future ends alike on all ranks.

        Raises OSError where the copy finds no room.
        """
        if any(on_all_ranks(lambda: self._is_broken or self._has_died())):
            self.close()
            self._start()
            self._is_broken = False
        future = self._begin(request, state)
        future.add_done_callback(self._look_at)
        return future

    def get_ready(self, make_state: Callable[[], State]) -> None:
        """Prepare the first save, so that training does not wait for that then; collective.

        `make_state` returns a state as large as those that will be written. Raises OSError where a copy of the state
        finds no room.
        """
        load_writer()  # which takes a second

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
        return InProcess(device)
    return InThread(device) if mode == "thread" else Inline()


class Inline(Background):
    """The training thread itself: no copy is made, and training waits. The first save makes the process group."""

    def __init__(self) -> None:
        super().__init__()
        self._start()

    def _start(self) -> None:
        self._group: dist.ProcessGroup | None = None

    def _begin(self, request: WriteRequest, state: State) -> Future[Written]:
        self._group = self._group or _own_group()
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
        self._arena = Arena(device)
        self._start()

    def _start(self) -> None:
        self._group = _own_group()
        self._executor = ThreadPoolExecutor(1, "checkpoint")

    def get_ready(self, make_state: Callable[[], State]) -> None:
        """Import the writer, and reserve the memory of the copy."""
        super().get_ready(make_state)
        _reserve(make_state(), self._arena)

    def _begin(self, request: WriteRequest, state: State) -> Future[Written]:
        copy = in_memory(_copied(state, self._arena), self._arena.memory)
        return self._executor.submit(_write, request, copy, self._group)

    def close(self) -> None:
        """The thread ends with the process at the latest."""
        self._executor.shutdown(wait=False, cancel_futures=True)
        self._arena.release()


class InProcess(Background):
    """A process for each rank, which writes a copy that it shares the memory of. The processes have a group among
    themselves, so that nothing of a save runs in the training process but the copy.

    It starts at once, beside the start of training, and is gone when this process is, however that ends.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._arena = Arena(device, is_shared=True)
        self._start()

    def _start(self) -> None:
        self._sent: Tensor | None = None
        self._executor = ThreadPoolExecutor(1, "checkpoint")  # its thread only waits for the process
        self._writer = WriterProcess()

    def get_ready(self, make_state: Callable[[], State]) -> None:
        """Reserve the memory of the copy. The writer process imports the writer itself."""
        _reserve(make_state(), self._arena)

    def _has_died(self) -> bool:
        return not self._writer.process.is_alive()

    def _begin(self, request: WriteRequest, state: State) -> Future[Written]:
        slots = _copied(state, self._arena)
        memory = None if self._arena.memory is self._sent else self._arena.memory
        self._sent = self._arena.memory
        return self._executor.submit(self._writer.write, WriteOrder(request, slots, memory))

    def close(self) -> None:
        """The process is killed: it holds nothing but what is being written."""
        self._executor.shutdown(wait=False, cancel_futures=True)
        self._writer.kill()
        self._arena.release()


def _write(request: WriteRequest, state: State, group: dist.ProcessGroup) -> Written:
    return load_writer()(request, state, group)


def _copied(state: State, arena: Arena) -> State:
    """The slots of a copy of the state in the arena. Collective: where one rank finds no room, all raise OSError."""
    slots = _reserve(state, arena)
    arena.fill(state, slots)
    return slots


def _reserve(state: State, arena: Arena) -> State:
    """Reserve memory for a copy of the state, and return its slots. Collective: if one rank finds no room, all raise
    OSError."""
    slots, size = lay_out(state)
    on_all_ranks(lambda: arena.reserve(size))
    return slots


def _own_group() -> dist.ProcessGroup:
    """A group for the collectives of a save: in training's they would mix with those of training, which goes on."""
    return dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT, group_desc="checkpoint")
