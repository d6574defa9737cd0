"""Page-locked memory for copies from a GPU, on a CUDA runtime that only records calls."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from enum import IntEnum
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from titan_launch.checkpoint.snapshot import Arena, in_memory, lay_out

Code = IntEnum("Code", {"success": 0, "cudaErrorMemoryAllocation": 2})


class Runtime:
    """The calls of `torch.cuda.cudart()` that page-lock memory."""

    cudaError = Code  # noqa: N815

    def __init__(self, refuses: bool = False) -> None:
        self.refuses = refuses
        self.calls: list[tuple[Any, ...]] = []

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802
        """Record a call."""
        self.calls.append(("register", address, size, flags))
        return Code.cudaErrorMemoryAllocation if self.refuses else Code.success

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        """Record a call."""
        self.calls.append(("unregister", address))
        return Code.success

    def cudaGetErrorString(self, error: Code) -> str:  # noqa: N802
        """Return the error text of CUDA."""
        return "out of memory"


class Stream:
    """A stream that counts how often the host waits for it."""

    waits = 0

    def synchronize(self) -> None:
        """Count a wait."""
        self.waits += 1


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Stream:
    stream = Stream()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    return stream


def use(monkeypatch: pytest.MonkeyPatch, runtime: Runtime) -> None:
    monkeypatch.setattr(torch.cuda, "_cudart", runtime)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())


class Copies(TorchDispatchMode):
    """A dispatch mode that records for every copy whether the host waits for it."""

    def __init__(self) -> None:
        super().__init__()
        self.non_blocking: list[bool] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            self.non_blocking.append(len(args) > 2 and args[2])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("is_shared", [False, True])
def test_a_copy_is_made_into_locked_memory_with_one_wait(
    monkeypatch: pytest.MonkeyPatch, stream: Stream, is_shared: bool
) -> None:
    use(monkeypatch, runtime := Runtime())
    state = {"a": torch.randn(3, 5), "b": {"c": torch.arange(7)}, "step": 3}
    slots, size = lay_out(state)
    arena = Arena(torch.device("cuda", 1), is_shared=is_shared)
    arena.reserve(size)
    first = arena.memory.data_ptr()
    assert runtime.calls == [("register", first, size, 1)]  # the size is exact
    with Copies() as copies:
        arena.fill(state, slots)
    assert copies.non_blocking == [True, True] and stream.waits == 1
    copy = in_memory(slots, arena.memory)
    assert torch.equal(copy["a"], state["a"]) and torch.equal(copy["b"]["c"], state["b"]["c"]) and copy["step"] == 3
    arena.reserve(size - 1)
    arena.reserve(2 * size)
    arena.release()
    assert [call[0] for call in runtime.calls] == ["register", "unregister"] * 2
    assert runtime.calls[1][1] == first


def test_memory_that_cannot_be_locked_is_used_pageable(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    use(monkeypatch, runtime := Runtime(refuses=True))
    arena = Arena(torch.device("cuda", 0))
    with caplog.at_level(logging.WARNING):
        arena.reserve(1 << 20)
    assert caplog.messages == [
        "0.001 GiB of host memory cannot be page-locked, so copies to it are slower: CUDA error: out of memory (2)"
    ]
    arena.release()
    assert [call[0] for call in runtime.calls] == ["register"]
