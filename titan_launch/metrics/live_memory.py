"""Live bytes of a training step by what they are held for, counted at every operation.

Works on real tensors on a CPU, and on fake ones of any size: what counts is the size of storages, from the operation
that returns them to the moment when the last reference is gone. Memory that an operation takes and gives back inside of
its kernel is not seen. While a step is tracked, autograd sums the gradients of a tensor that is used twice out of place
(as it does under any `TorchDispatchMode`), which can hold one activation more for a moment.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from titan_launch.dtensors import local_tensor
from titan_launch.plan.footprint import Category, Ledger


def is_in_backward() -> bool:
    """Whether autograd runs backward, recomputation included."""
    return torch._C._current_graph_task_id() != -1


class _Held(weakref.ref[UntypedStorage]):
    """A storage, and how it is booked."""

    __slots__ = ("category", "key", "num_bytes")

    key: int
    num_bytes: int
    category: Category


class LiveMemory(TorchDispatchMode):
    """Sees every operation, and books the storages of its results. To be entered by `metrics.tracking.track`."""

    def __init__(self, ledger: Ledger):
        super().__init__()
        self._ledger = ledger
        self._held: dict[int, _Held] = {}
        self._scope: Category | None = None
        self.offloads = Category.GRADIENTS in ledger.on_host
        """Whether shards of parameters and gradients are in the host's memory, which is not counted."""

        self.is_paused = False
        """Whether what is allocated now does not count."""

    def hold(self, tensors: Iterable[Tensor | None], category: Category) -> None:
        """From now on these are held for `category`, known or not; sharded ones by their local part."""
        book = self.within(category, self.book)
        for tensor in tensors:
            if tensor is not None:
                self._move(book(local_tensor(tensor).untyped_storage()), category)

    def book(self, storage: UntypedStorage) -> _Held:
        """Take note of a storage, or of its new size."""
        held = self._held.get(storage._cdata) or self._begin(storage)
        self._resize(held, storage.nbytes())
        return held

    def _begin(self, storage: UntypedStorage) -> _Held:
        held = _Held(storage, self._release)
        held.key, held.num_bytes, held.category = storage._cdata, 0, self._category()
        self._held[held.key] = held
        return held

    def within(self, category: Category, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, but what it allocates is held for `category`."""

        def call(*args: Any, **kwargs: Any) -> Any:
            before, self._scope = self._scope, category
            try:
                return function(*args, **kwargs)
            finally:
                self._scope = before

        return call

    def paused(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, but what it allocates does not count."""

        def call(*args: Any, **kwargs: Any) -> Any:
            before, self.is_paused = self.is_paused, True
            try:
                return function(*args, **kwargs)
            finally:
                self.is_paused = before

        return call

    def scope(self, category: Category | None) -> None:
        """What is allocated from now on is held for `category`; None: for activations and their gradients."""
        self._scope = category

    def forget(self) -> None:
        """Book nothing any more, not even what is freed."""
        self._held.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:  # it comes back as operations on local tensors
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        if not self.is_paused:
            self._see(result)
        return result

    def _see(self, result: Any) -> None:
        if isinstance(result, Tensor):
            if result.device.type != "meta":
                self.book(result.untyped_storage())
        elif isinstance(result, (tuple, list)):
            for part in result:
                self._see(part)

    def _category(self) -> Category:
        """What is allocated now, by who allocates it. Recomputation runs in backward, but with gradients enabled."""
        if self._scope is not None:
            return self._scope
        is_backward = is_in_backward() and not torch.is_grad_enabled()
        return Category.BACKWARD if is_backward else Category.ACTIVATIONS

    def _resize(self, held: _Held, num_bytes: int) -> None:
        if num_bytes > held.num_bytes:
            self._ledger.allocate(num_bytes - held.num_bytes, held.category)
        elif num_bytes < held.num_bytes:
            self._ledger.free(held.num_bytes - num_bytes, held.category)
        held.num_bytes = num_bytes

    def _move(self, held: _Held, category: Category) -> None:
        self._ledger.move(held.num_bytes, held.category, category)
        held.category = category

    def _release(self, storage: Any) -> None:
        held: _Held = storage
        if self._held.get(held.key) is held:
            del self._held[held.key]
            self._resize(held, 0)
