"""Activation offloading: the tensors that a block's forward saves are kept in host memory until backward.

The unit of offloading is the storage, not the tensor: a storage is copied once, even if several operations save views
of it. Backward gets the same views (dtype, shape, strides). So offloading changes no bit of the results.

On CUDA, one side stream copies in both directions, so a copy to the device always follows the copy to the host. The
copies of a block's storages to the host start while the block computes. The device memory of these storages is freed
when the next block ends, after the compute stream has waited for the copies. In backward, the first access to a block's
storages starts the copies for the block before it. All device memory is allocated and freed in the order of the compute
stream. So the peak does not depend on timing, and `Tensor.record_stream` is not needed.
"""

from __future__ import annotations

import weakref
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from titan_launch.checkpoint.snapshot import page_locked
from titan_launch.distributed.dtensor import local_tensor
from titan_launch.distributed.torch_private import detached
from titan_launch.plan.memory.ledger import SMALLEST_OFFLOADED


def offload_activations(model: nn.Module, blocks: Sequence[str], device_type: str) -> None:
    """Let the forwards of `blocks` save their tensors for backward in host memory. Call this after activation
    checkpointing and compilation, and before FSDP2 wraps the modules.

    `blocks`: paths, in the order in which the blocks run. Parameters, buffers, tensor subclasses, and tensors whose
    storage has less than `SMALLEST_OFFLOADED` bytes stay on the device. With `device_type = "cpu"` the copies are made
    in the same memory.
    """
    offloader = _Offloader(model, CudaCopies() if device_type == "cuda" else HostCopies())
    for index, path in enumerate(blocks):
        block = model.get_submodule(path)
        block.forward = offloader.offloaded(index, block, block.forward)


class HostCopies:
    """Copies within host memory, for tests and traces. A copy is complete when the call that starts it returns."""

    device_type = "cpu"

    def begin_forward(self) -> None:
        """Prepare for a forward of the model."""

    def to_host(self, flat: Tensor) -> Tensor:
        """Return a copy of a flat tensor."""
        return flat.clone()

    def to_device(self, flat: Tensor) -> Tensor:
        """Return a copy of a flat tensor."""
        return flat.clone()

    def mark(self) -> Any:
        """Return an event that occurs after all copies so far; None if they are complete."""
        return None

    def wait(self, event: Any) -> None:
        """Let the compute stream wait for all copies that started before `event`, a result of `mark`."""


class CudaCopies(HostCopies):
    """Copies between the device and page-locked host memory, in a stream of their own.

    Every copy waits for all kernels that are queued in the compute stream when the copy starts. Among them are the
    kernels that write the source, and the kernels that last used the memory of the target. Host memory of the
    `ActivationArena` is used again only by later copies in this stream.
    """

    device_type = "cuda"

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None
        self._arena = ActivationArena(torch.device("cuda", torch.cuda.current_device()))

    def begin_forward(self) -> None:
        """Enlarge the host memory if an earlier forward needed more, and no tensor is in it now."""
        self._arena.fit()

    def to_host(self, flat: Tensor) -> Tensor:
        """Start a copy to the host, and return the copy. The source must live until the compute stream has waited for
        the copy."""
        return self._copy(self._arena.place(flat.nbytes), flat)

    def to_device(self, flat: Tensor) -> Tensor:
        """Start a copy to the device, and return the copy. The copy must live until the compute stream has waited for
        it."""
        return self._copy(torch.empty(flat.shape, dtype=flat.dtype, device="cuda"), flat)

    def _copy(self, target: Tensor, source: Tensor) -> Tensor:
        self._stream = stream = self._stream or torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            return target.copy_(source, non_blocking=True)

    def mark(self) -> Any:
        return None if self._stream is None else self._stream.record_event()

    def wait(self, event: Any) -> None:
        if event is not None:
            torch.cuda.current_stream().wait_event(event)


class ActivationArena:
    """Page-locked host memory for tensors that live until backward: one contiguous buffer, as large as a step needs.
    (PyTorch's own allocator of pinned memory rounds each tensor up to a power of two, and never frees memory.)

    A place is a range of bytes that holds one tensor. The place is free again when the tensor is dropped.

    At first the arena is empty. A tensor that does not fit gets ordinary memory, whose copies are slower. `fit`
    enlarges the arena for later tensors. A free place may be used again at once, so the caller must order the copies.
    """

    def __init__(self, device: torch.device):
        """`device`: the device whose tensors are copied."""
        self._device = device
        self._gaps = [(0, _ENDLESS)]
        """Start and end of each gap (free range of bytes), in order. The last gap has no end."""
        self._dropped = deque[tuple[int, int]]()
        """Start and end of the places whose tensors have been dropped. Tensors may be dropped in any thread."""
        self._locks = ExitStack()
        weakref.finalize(self, self._locks.close).atexit = False
        self.memory = torch.empty(0, dtype=torch.uint8)
        self.needed = 0
        """Size in bytes of an arena that would have had room for all tensors so far."""

    def place(self, num_bytes: int) -> Tensor:
        """Return a new one-dimensional tensor of bytes: in the arena if it has a free place, else in ordinary
        memory."""
        self._take_back()
        size = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        index = next(index for index, (start, end) in enumerate(self._gaps) if end - start >= size)
        start, gap_end = self._gaps[index]
        end = start + size
        self._gaps[index : index + 1] = [(end, gap_end)] if end < gap_end else []
        self.needed = max(self.needed, end)
        is_inside = end <= len(self.memory)
        place = self.memory[start : start + num_bytes] if is_inside else torch.empty(num_bytes, dtype=torch.uint8)
        weakref.finalize(place, self._dropped.append, (start, end)).atexit = False
        return place

    def fit(self) -> None:
        """Replace the arena's buffer by a larger one if more memory was needed and no tensor is in use. The host then
        waits for the copies."""
        self._take_back()
        if self.needed > len(self.memory) and self._gaps == [(0, _ENDLESS)]:
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            self._locks.close()
            self.memory = torch.empty(self.needed, dtype=torch.uint8)
            self._locks.enter_context(page_locked(self.memory, self._device))

    def _take_back(self) -> None:
        """Make the places of dropped tensors free, and join neighbouring gaps."""
        while self._dropped:
            start, end = self._dropped.popleft()
            index = bisect_left(self._gaps, (start, end))
            if index and self._gaps[index - 1][1] == start:
                index -= 1
                start = self._gaps.pop(index)[0]
            if self._gaps[index][0] == end:
                end = self._gaps.pop(index)[1]
            self._gaps.insert(index, (start, end))


_ALIGNMENT = 64  # bytes
_ENDLESS = 1 << 62


class _Saved:
    """A storage that a forward saved. The object is freed when autograd drops the last reference to it."""

    __slots__ = ("__weakref__", "device", "group", "host", "is_stale", "original")

    def __init__(self, group: _Group, original: Tensor, device: Tensor, host: Tensor):
        self.group = group
        self.original: tuple[Tensor, int] | None = (detached(original), original._version)
        """An alias of the saved tensor with its version, until the copy to the host is complete. An alias, not the
        tensor itself: the tensor's graph may refer to this object, and such a cycle would never be freed."""
        self.device: Tensor | None = device
        """The bytes on the device; None while they are only on the host."""
        self.host: Tensor | None = host
        self.is_stale = False
        """True if an in-place operation changed the tensor before the copy to the host was complete."""


class _Packed(NamedTuple):
    """A saved tensor: a view of a saved storage."""

    saved: _Saved
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class _Kept(NamedTuple):
    """An alias of a saved tensor that is not offloaded. (An alias, not the tensor itself: the tensor's graph may refer
    to this object, and such a cycle would never be freed.) Autograd does not check the versions of tensors that
    `saved_tensors_hooks` return."""

    tensor: Tensor
    version: int

    @classmethod
    def of(cls, tensor: Tensor) -> _Kept:
        """Return the entry of a tensor."""
        return cls(detached(tensor), tensor._version)


class _Group:
    """The storages that one forward of a block saved."""

    def __init__(self, before: _Group | None):
        self.before = before
        """The group of the nearest earlier block that saved storages. None for the first block, and after backward has
        started to copy that group to the device."""
        self.by_storage: dict[tuple[int, int], _Saved] = {}
        """Storages by address and version, during the forward. An in-place operation begins a new version."""
        self.storages: list[weakref.ref[_Saved]] = []


class _Offloader:
    """The offloading of a model's blocks, for all microbatches."""

    def __init__(self, model: nn.Module, copies: HostCopies):
        self._model = model
        self._copies = copies
        self._resident: set[int] = set()
        """Addresses of the storages of parameters and buffers."""
        self._last: tuple[int, _Group] | None = None
        """Index and group of the block that ran last."""
        self._leaving: tuple[Any, _Group, list[_Saved]] | None = None
        """An event, the group whose copies to the host may be incomplete until this event, and the group's storages."""
        self._arriving: tuple[Any, _Group, list[Tensor]] | None = None
        """An event, the group whose copies to the device may be incomplete until this event, and the copies. The copies
        live until the compute stream has waited, even if backward does not need them."""

    def offloaded(self, index: int, block: nn.Module, compute: Callable[..., Any]) -> Callable[..., Any]:
        """Return the forward `compute` of a block, with offloading. `index`: the position of the block."""

        def forward(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return compute(*args, **kwargs)
            with self._saving(index, block):
                return compute(*args, **kwargs)

        return forward

    @contextmanager
    def _saving(self, index: int, block: nn.Module) -> Iterator[None]:
        before = None if self._last is None or self._last[0] >= index else self._last[1]
        if before is None:  # another forward of the model begins
            self._copies.begin_forward()
            self._resident.clear()  # the address of a freed storage may be that of an activation later
            self._add_resident(self._model)
        group = _Group(before if before is None or before.storages else before.before)
        pack = partial(self._pack, group, block)
        token = _hooks.set((pack, self._unpack))
        try:
            with saved_tensors_hooks(pack, self._unpack):
                yield
        finally:
            _hooks.reset(token)
        self._last = (index, group)
        self._free_leaving()
        if group.by_storage:
            self._leaving = (self._copies.mark(), group, list(group.by_storage.values()))
            group.by_storage.clear()

    def _pack(self, group: _Group, block: nn.Module, tensor: Tensor) -> _Kept | _Packed:
        if tensor.device.type != self._copies.device_type or is_traceable_wrapper_subclass(tensor):
            return _Kept.of(tensor)
        storage = tensor.untyped_storage()
        num_bytes, address = storage.nbytes(), storage._cdata
        if num_bytes < SMALLEST_OFFLOADED or num_bytes % tensor.itemsize or tensor.is_conj() or tensor.is_neg():
            return _Kept.of(tensor)
        key = (address, tensor._version)
        if key not in group.by_storage:
            if address not in self._resident:
                self._add_resident(block)  # FSDP2 has all-gathered units inside of the block by now
            if address in self._resident:
                return _Kept.of(tensor)
            flat = tensor.detach().as_strided((num_bytes // tensor.itemsize,), (1,), 0).view(torch.uint8)
            group.by_storage[key] = saved = _Saved(group, tensor, flat, self._copies.to_host(flat))
            group.storages.append(weakref.ref(saved))
        return _Packed(
            group.by_storage[key], tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset())
        )

    def _unpack(self, packed: _Kept | _Packed) -> Tensor:
        if isinstance(packed, _Kept):
            _check_unchanged(packed.tensor._version == packed.version)
            return packed.tensor
        saved, dtype, size, stride, offset = packed
        group = saved.group
        self._free_leaving(stays=group)
        self._load(group)
        if self._arriving is not None and self._arriving[1] is group:
            self._wait_for_arriving()
        before, group.before = group.before, None
        if before is not None:
            self._load(before)
        _check_unchanged(not saved.is_stale)
        assert saved.device is not None
        return saved.device.view(dtype).as_strided(size, stride, offset)

    def _add_resident(self, module: nn.Module) -> None:
        tensors = chain(module.parameters(), module.buffers())
        self._resident.update(local_tensor(tensor).untyped_storage()._cdata for tensor in tensors)

    def _free_leaving(self, stays: _Group | None = None) -> None:
        """Free the device memory of the group that was copied to the host last, unless it is the group `stays`."""
        if self._leaving is not None:
            event, group, storages = self._leaving
            self._leaving = None
            self._copies.wait(event)
            for saved in storages:
                assert saved.original is not None
                original, version = saved.original
                saved.is_stale, saved.original = original._version != version, None
                if group is not stays:
                    saved.device = None

    def _load(self, group: _Group) -> None:
        """Start the copies of a group to the device. Storages that are on the device or are no longer needed are not
        copied."""
        absent = [saved for ref in group.storages if (saved := ref()) is not None and saved.device is None]
        if absent:
            self._wait_for_arriving()
            for saved in absent:
                assert saved.host is not None
                saved.device, saved.host = self._copies.to_device(saved.host), None
            self._arriving = (self._copies.mark(), group, [s.device for s in absent if s.device is not None])

    def _wait_for_arriving(self) -> None:
        if self._arriving is not None:
            self._copies.wait(self._arriving[0])
            self._arriving = None


def _check_unchanged(is_unchanged: bool) -> None:
    if not is_unchanged:
        raise RuntimeError(
            "an in-place operation changed a tensor that another operation saved for backward; use an operation "
            "that returns a new tensor"
        )


_hooks: ContextVar[tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]] | None] = ContextVar("_hooks", default=None)


def saved_for_backward(tensor: Tensor, may_be_offloaded: bool) -> Callable[[], Tensor]:
    """Return a function that returns `tensor` with its present values when backward calls it. If the forward of an
    offloaded block is running and `may_be_offloaded` is True, the tensor is offloaded like the tensors that autograd
    saves. Use this function for tensors that backward needs, but that autograd does not save.

    If an in-place operation changes the tensor before backward, the returned function raises RuntimeError, unless the
    copy in host memory was complete before the change.
    """
    hooks = _hooks.get()
    if hooks is None or not may_be_offloaded:
        return partial(_unchanged, tensor, tensor._version)
    pack, unpack = hooks
    return partial(unpack, pack(tensor))


def _unchanged(tensor: Tensor, version: int) -> Tensor:
    if tensor._version != version:
        raise RuntimeError(
            "an in-place operation changed a tensor that selective activation checkpointing saved; use an operation "
            'that returns a new tensor, or set activation_checkpoint.mode = "full"'
        )
    return tensor
