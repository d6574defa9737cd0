"""Kernels of this package in PyTorch's table of kernels for the CPU."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

Kernel = Callable[..., Any]
"""A kernel: it gets the dispatch keys of a call, then the arguments of the operation."""


class Replacement:
    """A group of operations whose kernels are replaced while at least one context of `active` is open. PyTorch allows
    only one registration of a kernel at a time, so all contexts of a group share it."""

    def __init__(self, kernels: Callable[[], Mapping[torch._ops.OpOverload, Kernel]]):
        """`kernels`: function that returns the new kernel of each operation. The function is called when a context is
        opened and no other is open, so it can look up the kernels that are replaced (`torch.library.get_kernel`)."""
        self._kernels = kernels
        self._library: torch.library.Library | None = None
        self._num_open = 0

    @contextmanager
    def active(self) -> Iterator[None]:
        """Replace the kernels until the `with` block ends. If a new kernel calls PyTorch's own kernel, the latter runs
        with Python's GIL held."""
        if self._library is None:
            kernels, library = self._kernels(), torch.library.Library("aten", "IMPL")
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "(?s).*Overriding a previously registered kernel")
                for operation, kernel in kernels.items():  # override: another group may have replaced the same kernel
                    library.impl(operation, kernel, "CPU", with_keyset=True, allow_override=True)
            self._library = library
        self._num_open += 1
        try:
            yield
        finally:
            self._num_open -= 1
            if self._num_open == 0:
                self._library._destroy()
                self._library = None
