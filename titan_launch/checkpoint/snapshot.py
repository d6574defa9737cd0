"""A rank's part of the training state for a checkpoint: its shards of all tensors, and a copy of them on the host.

This module does not import torch.distributed.checkpoint (DCP): the import takes 0.1 s, and would delay a run's first
step. Functions that write a checkpoint, or that get or set state dicts of the model and optimizer, import DCP when they
are called.
"""

from __future__ import annotations

import hashlib
import logging
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from titan_launch.core.errors import leaves
from titan_launch.distributed.dtensor import Shard, local_tensor, own_box
from titan_launch.plan.hardware import GIB

_log = logging.getLogger(__name__)


@contextmanager
def page_locked(memory: Tensor, device: torch.device) -> Iterator[None]:
    """Page-lock host memory until the end of the block, by registering it with CUDA. Do nothing if the device is a CPU.
    `memory` may be shared memory of any size. (PyTorch's own allocator of pinned memory rounds sizes up to a power of
    two.) If CUDA cannot page-lock the memory, log a warning. Copies to the memory are then slower."""
    portable = 1  # cudaHostRegisterPortable: the memory counts as page-locked in the CUDA contexts of all devices
    is_locked = device.type == "cuda" and _succeeds(
        lambda cudart: cudart.cudaHostRegister(memory.data_ptr(), memory.nbytes, portable),
        device,
        f"{memory.nbytes / GIB:.3f} GiB of host memory cannot be page-locked, so copies to it are slower",
    )
    yield
    if is_locked:
        _succeeds(lambda cudart: cudart.cudaHostUnregister(memory.data_ptr()), device, "host memory cannot be unlocked")


def _succeeds(call: Callable[[Any], Any], device: torch.device, failure: str) -> bool:
    """Call the CUDA runtime in a new thread. Return True on success. After a CUDA error, log `failure` and return
    False. Any other error is raised.

    CUDA keeps the last error of each thread. After a CUDA error in the training thread, PyTorch would raise that error
    at the next kernel launch.
    """

    def checked() -> None:
        # By default a new thread uses GPU 0, where all ranks of a host would open a context.
        with torch.cuda.device(device):
            torch.cuda.check_error(call(torch.cuda.cudart()))

    with ThreadPoolExecutor(1) as thread:
        error = thread.submit(checked).exception()
    if isinstance(error, torch.cuda.CudaError):
        _log.warning("%s: CUDA error: %s", failure, error)
    elif error is not None:
        raise error
    return error is None


_ALIGNMENT = 64  # bytes; more than any dtype needs
_SHARED_MEMORY = Path("/dev/shm")  # exists on Linux; other systems do not limit shared memory in this way

State = dict[str, Any]
"""Nested dicts. Each leaf is a `Shard`, or a tensor that is equal on all ranks that have its key. After `lay_out`, a
`Slot` is in place of every tensor."""


def shards_of(state: Mapping[str, Any]) -> State:
    """Return a state dict with every DTensor replaced by this rank's shard. Nothing is copied."""

    def shard(leaf: Any) -> Any:
        if not isinstance(leaf, DTensor):
            return leaf
        offsets, _ = own_box(leaf.shape, leaf)
        return Shard(local_tensor(leaf), offsets, tuple(leaf.shape))

    return map_leaves(state, shard)


def total_bytes(state: State) -> int:
    """Return the bytes of all tensors of a state. For a shard, the bytes of the whole tensor are counted."""
    return sum(
        torch.Size(leaf.size).numel() * leaf.local.element_size() if isinstance(leaf, Shard) else leaf.nbytes
        for _, leaf in leaves(state)
        if isinstance(leaf, Shard | Tensor)
    )


def is_on_host(state: State) -> bool:
    """Return True if all tensors of a state are on the host."""
    parts = (leaf.local if isinstance(leaf, Shard) else leaf for _, leaf in leaves(state))
    return all(part.is_cpu for part in parts if isinstance(part, Tensor))


def hash_of_names(state: State) -> str:
    """Return a hash of the names of a state's sharded tensors. Ranks of one pipeline stage have the same hash."""
    names = (name for name, leaf in leaves(state) if isinstance(leaf, Shard))
    return hashlib.blake2b("\n".join(names).encode(), digest_size=8).hexdigest()


class Arena:
    """Host memory for a copy of one state, which is reused for the next state. The memory is page-locked if the states
    are on a GPU."""

    def __init__(self, device: torch.device, *, is_shared: bool = False):
        """`device`: device of the states. `is_shared`: True for shared memory, which another process can use."""
        self._device = device
        self._is_shared = is_shared
        self._locks = ExitStack()
        self.memory = torch.empty(0, dtype=torch.uint8)
        """One-dimensional tensor of bytes. If a state needs more bytes, `reserve` replaces the tensor."""

    def reserve(self, size: int) -> None:
        """Allocate memory if the arena has fewer than `size` bytes. Raises OSError if the host has too little memory.

        The free shared memory is checked before the allocation, so that the error can name a remedy. Another rank may
        take that memory between the check and the allocation.
        """
        if self.memory.numel() >= size:
            return
        if self._is_shared and _SHARED_MEMORY.is_dir():
            free = shutil.disk_usage(_SHARED_MEMORY).free
            if free < size:
                raise OSError(
                    f"a copy of this rank's state needs {size / GIB:.3f} GiB of shared memory, and {_SHARED_MEMORY} "
                    f"has {free / GIB:.3f} GiB free; enlarge {_SHARED_MEMORY} (docker run --shm-size), or set "
                    'checkpoint.async_mode = "thread"'
                )
        self.release()
        try:
            memory = torch.empty(size, dtype=torch.uint8)
            self.memory = memory.share_memory_() if self._is_shared else memory
        except RuntimeError as error:  # PyTorch has no class of its own for this error
            reason = str(error).partition("\n")[0]
            raise OSError(
                f"there is no host memory for a copy of {size / GIB:.3f} GiB ({reason}); "
                'set checkpoint.async_mode = "disabled", which needs no copy'
            ) from error
        self._locks.enter_context(page_locked(self.memory, self._device))

    def release(self) -> None:
        """Free the memory. `reserve` allocates it again."""
        self._locks.close()
        self.memory = torch.empty(0, dtype=torch.uint8)

    def fill(self, state: State, slots: State) -> None:
        """Copy the tensors of a state into their slots. The host waits for the device once, at the end."""
        for (_, leaf), (_, slot) in zip(leaves(state), leaves(slots), strict=True):
            if isinstance(leaf, Shard):
                slot.local.view(self.memory).copy_(leaf.local, non_blocking=True)
            elif isinstance(leaf, Tensor):
                slot.view(self.memory).copy_(leaf, non_blocking=True)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()


def lay_out(state: State) -> tuple[State, int]:
    """Return the state with a `Slot` in place of every tensor, and the bytes that all aligned slots take."""
    end = 0

    def place(tensor: Tensor) -> Slot:
        nonlocal end
        slot = Slot(end, tensor.dtype, tuple(tensor.shape))
        end += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        return slot

    return _map_parts(state, Tensor, place), end


@dataclass(frozen=True)
class Slot:
    """Position in bytes (`start`), dtype and shape of a tensor in an arena."""

    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    def view(self, memory: Tensor) -> Tensor:
        """Return the tensor at this position of the arena's memory `memory`, without a copy."""
        count = torch.Size(self.shape).numel()
        if not count:
            return torch.empty(self.shape, dtype=self.dtype)
        # Not a view of `memory`: DCP would copy a view of a larger storage before writing it.
        flat = torch.frombuffer(memory.numpy(), dtype=self.dtype, count=count, offset=self.start)
        return flat.view(self.shape)


def in_memory(slots: State, memory: Tensor) -> State:
    """Return the state with each `Slot` replaced by its tensor in the arena's memory, where `fill` has copied it."""
    return _map_parts(slots, Slot, lambda slot: slot.view(memory))


def _map_parts(state: State, kind: type, change: Callable[[Any], Any]) -> State:
    """Return the state with `change` applied to every value of type `kind`, and to the content of every shard."""

    def change_leaf(leaf: Any) -> Any:
        if isinstance(leaf, Shard):
            return replace(leaf, local=change(leaf.local))
        return change(leaf) if isinstance(leaf, kind) else leaf

    return map_leaves(state, change_leaf)


def map_leaves(state: Mapping[str, Any], change: Callable[[Any], Any]) -> State:
    """Return nested dicts with `change` applied to every value that is not a dict."""
    return {
        name: map_leaves(value, change) if isinstance(value, Mapping) else change(value)
        for name, value in state.items()
    }
