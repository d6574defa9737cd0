"""Activation offloading without values: the storages that blocks save for backward, on the device and on the host.

The order of allocations and frees is that of `titan_launch.parallel.activation_offload`. No torch.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

from titan_launch.plan.memory.analytic.tensors import Node, Tensor
from titan_launch.plan.memory.fsdp import Storage
from titan_launch.plan.memory.ledger import SMALLEST_OFFLOADED, Category, Ledger


class _Saved:
    """A storage that a forward saved."""

    def __init__(self, group: _Group, device: Storage, host: Storage):
        self.group = group
        self.device: Storage | None = device
        self.host: Storage | None = host


class _Group:
    """The storages that one forward of a block saved."""

    def __init__(self, before: _Group | None):
        self.before = before
        self.by_storage: dict[Storage, _Saved] = {}
        self.storages: list[weakref.ref[_Saved]] = []


class Offloader:
    """The offloaded storages of a model, of all microbatches."""

    def __init__(self, ledger: Ledger):
        self._ledger = ledger
        self._group: _Group | None = None
        self._last: tuple[int, _Group] | None = None
        self._leaving: tuple[_Group, list[_Saved]] | None = None
        self._arriving: tuple[_Group, list[Storage]] | None = None

    def run(self, index: int, compute: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Return `compute(x)`, the forward of the block at position `index`, and offload what it saves."""
        before = None if self._last is None or self._last[0] >= index else self._last[1]
        group = self._group = _Group(before if before is None or before.storages else before.before)
        output = compute(x)
        self._group = None
        self._last = (index, group)
        self._free_leaving()
        if group.by_storage:
            self._leaving = (group, list(group.by_storage.values()))
            group.by_storage.clear()
        return output

    def pack(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Return a function that returns `tensor`, which waits on the host if the forward of a block is running."""
        group, storage, numel, dtype, node = self._group, tensor.storage, tensor.numel, tensor.dtype, tensor.node
        if group is None or storage is None or storage.num_bytes < SMALLEST_OFFLOADED:
            return lambda: tensor
        if storage not in group.by_storage:
            host = Storage(self._ledger, storage.num_bytes, Category.OFFLOADED)
            group.by_storage[storage] = saved = _Saved(group, storage, host)
            group.storages.append(weakref.ref(saved))
        return self._unpack(group.by_storage[storage], numel, dtype, node)

    def _unpack(self, saved: _Saved, numel: int, dtype: str, node: Node | None) -> Callable[[], Tensor]:
        def recall() -> Tensor:
            group = saved.group
            self._free_leaving(stays=group)
            self._load(group)
            if self._arriving is not None and self._arriving[0] is group:
                self._arriving = None
            before, group.before = group.before, None
            if before is not None:
                self._load(before)
            return Tensor(saved.device, numel, dtype, node)

        return recall

    def _free_leaving(self, stays: _Group | None = None) -> None:
        if self._leaving is not None:
            group, storages = self._leaving
            self._leaving = None
            for saved in storages if group is not stays else ():
                saved.device = None

    def _load(self, group: _Group) -> None:
        absent = [saved for ref in group.storages if (saved := ref()) is not None and saved.device is None]
        if absent:
            self._arriving = None
            for saved in absent:
                assert saved.host is not None
                saved.device = Storage(self._ledger, saved.host.num_bytes, Category.ACTIVATIONS)
                saved.host = None
            self._arriving = (group, [saved.device for saved in absent if saved.device is not None])
