"""The three writers of `checkpoint.async_mode`: the training thread, another thread, or another process."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch
import torch.distributed as dist
from torch import Tensor

from titan_launch.checkpoint.retention import WriteRequest, Written
from titan_launch.checkpoint.snapshot import Arena, State, in_memory, lay_out
from titan_launch.checkpoint.writer_process import COLLECTIVE_TIMEOUT, WriteOrder, WriterProcess, load_writer
from titan_launch.config.sections.checkpoint import AsyncMode
from titan_launch.distributed.collectives import on_all_ranks


class Background(ABC):
    """A writer of checkpoints, which writes one state at a time."""

    def __init__(self) -> None:
        self._is_broken = False

    def write(self, request: WriteRequest, state: State) -> Future[Written]:
        """Begin a save, and return its future. The future has the same outcome on all ranks. Collective.

        The previous save must have ended. When this method returns, the caller may change the tensors of `state`. If
        the writer of any rank has died or is broken (see `_note_outcome`), all ranks start new writers first. Raises
        OSError on all ranks if a rank has no memory for the copy.
        """
        if any(on_all_ranks(lambda: self._is_broken or self._has_died())):
            self.close()
            self._start()
            self._is_broken = False
        future = self._begin(request, state)
        future.add_done_callback(self._note_outcome)
        return future

    def get_ready(self, make_state: Callable[[], State]) -> None:
        """Do work in advance that would delay the first save, such as imports. Collective. `make_state` returns a state
        as large as the states of later saves. Raises OSError on all ranks if a rank has no memory for the copy."""
        load_writer()  # imports torch.distributed.checkpoint (DCP)

    def _note_outcome(self, future: Future[Written]) -> None:
        """Mark the writer as broken after an error other than OSError. The next save then starts a new writer. An
        OSError, such as a full disk, does not break the writer: the next save uses it again."""
        error = None if future.cancelled() else future.exception()
        self._is_broken = error is not None and not isinstance(error, OSError)

    def _has_died(self) -> bool:
        """Return True if this rank's writer has died. In a save, the writers of other ranks would wait for the dead
        writer for up to an hour."""
        return False

    @abstractmethod
    def _start(self) -> None:
        """Set up the writer. Collective."""

    @abstractmethod
    def _begin(self, request: WriteRequest, state: State) -> Future[Written]: ...

    def close(self) -> None:  # noqa: B027
        """Stop the writer. If a save is in flight, its checkpoint may be lost."""


def build_background(mode: AsyncMode, device: torch.device) -> Background:
    """Return the writer for a value of `checkpoint.async_mode`. Collective."""
    if mode == "process":
        return InProcess(device)
    return InThread(device) if mode == "thread" else Inline()


class Inline(Background):
    """A writer that runs in the training thread, without a copy of the state. Training waits for the whole save. The
    first save creates the process group for the collectives of saves."""

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
    """A writer that writes a copy of the state in another thread."""

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
        """Free the copy. The thread ends after its current save, or with the process."""
        self._executor.shutdown(wait=False, cancel_futures=True)
        self._arena.release()


class InProcess(Background):
    """A writer that writes a copy of the state in a second process of each rank. The copy is in shared memory.

    The writer processes have their own process group, so the training process only makes the copy. Creating this object
    starts the writer process in the background. When the training process ends, the operating system kills the writer
    process.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._arena = Arena(device, is_shared=True)
        self._start()

    def _start(self) -> None:
        self._sent: Tensor | None = None
        self._executor = ThreadPoolExecutor(1, "checkpoint")  # the thread only waits for the writer process
        self._writer = WriterProcess()

    def get_ready(self, make_state: Callable[[], State]) -> None:
        """Reserve the memory of the copy. Only the writer process imports DCP."""
        _reserve(make_state(), self._arena)

    def _has_died(self) -> bool:
        return not self._writer.process.is_alive()

    def _begin(self, request: WriteRequest, state: State) -> Future[Written]:
        slots = _copied(state, self._arena)
        memory = None if self._arena.memory is self._sent else self._arena.memory
        self._sent = self._arena.memory
        return self._executor.submit(self._writer.write, WriteOrder(request, slots, memory))

    def close(self) -> None:
        """Kill the writer process and free the copy. If a save is in flight, its checkpoint is lost."""
        self._executor.shutdown(wait=False, cancel_futures=True)
        self._writer.kill()
        self._arena.release()


def _write(request: WriteRequest, state: State, group: dist.ProcessGroup) -> Written:
    return load_writer()(request, state, group)


def _copied(state: State, arena: Arena) -> State:
    """Copy the state's tensors into the host memory `arena`. Returns and raises as `_reserve` does. Collective."""
    slots = _reserve(state, arena)
    arena.fill(state, slots)
    return slots


def _reserve(state: State, arena: Arena) -> State:
    """Reserve host memory for a copy of the state. Return the state with a `Slot` (position in `arena`) in place of
    each tensor. Collective: if one rank has too little memory, all ranks raise OSError."""
    slots, size = lay_out(state)
    on_all_ranks(lambda: arena.reserve(size))
    return slots


def _own_group() -> dist.ProcessGroup:
    """Return a new process group for the collectives of saves. In the default group, these collectives would mix with
    those of training, which continues during a save."""
    return dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT, group_desc="checkpoint")
