"""Functions that run an action and share its result or error with all ranks, and further collectives."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from titan_launch.core.errors import ConfigError, RunError, UserError
from titan_launch.core.torch_release import is_tested_release

Value = TypeVar("Value")

# Torch 2.13 renamed both functions, and the old names log a warning since then.
all_gather_single: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def on_rank_0(action: Callable[[], Value], group: dist.ProcessGroup | None = None) -> Value:
    """Run `action` on rank 0 of a process group and return its result on all ranks. Collective over `group`; None is
    the default group.

    If `action` raises an error on rank 0, all ranks raise that error. UserError, ConfigError and RunError keep their
    text, and an OSError keeps its number, text and file name. All other errors become a RuntimeError that names the
    original type.
    """
    outcome = [_run(action) if dist.get_rank(group) == 0 else None]
    dist.broadcast_object_list(outcome, src=dist.get_global_rank(group, 0) if group else 0, group=group)
    assert outcome[0] is not None
    return outcome[0].value_or_raise()


def on_rank_0_slowly(action: Callable[[], Value]) -> Value:
    """Run `action` on rank 0 as `on_rank_0` does, even if the action takes longer than the timeout of collectives. The
    action runs in a thread, and all ranks take part in a short collective every half second. Collective."""
    executor = ThreadPoolExecutor(1)
    try:
        started = [executor.submit(_run, action)] if dist.get_rank() == 0 else []
        while not on_rank_0(lambda: not wait(started, _SECONDS_BETWEEN_SIGNS).not_done):
            pass
        return on_rank_0(lambda: started[0].result().value_or_raise())
    finally:  # does not wait for `action`, because an error of another rank must be raised now
        executor.shutdown(wait=False, cancel_futures=True)


_SECONDS_BETWEEN_SIGNS = 0.5
"""Seconds between the short collectives of `on_rank_0_slowly`."""


def on_all_ranks(action: Callable[[], Value], group: dist.ProcessGroup | None = None) -> list[Value]:
    """Run `action` on all ranks and return the list of results, by rank, on all ranks. Collective over `group`.

    If `action` raises errors on several ranks, all ranks raise the error of the lowest of these ranks. Errors are
    converted as in `on_rank_0`.
    """
    outcomes: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(outcomes, _run(action), group=group)
    for outcome in outcomes:
        outcome.value_or_raise()
    return [outcome.value for outcome in outcomes]


def all_reduced(x: Tensor, group_name: str) -> Tensor:
    """Return the sum of `x` over the ranks of a process group, without a gradient. Collective.

    The collective is functional: selective activation checkpointing saves its result, and torch.compile can trace it.
    """
    return torch.ops._c10d_functional.wait_tensor(torch.ops._c10d_functional.all_reduce(x, "sum", group_name))


def warn(log: logging.Logger, message: str, *args: object) -> None:
    """Log a message at level WARNING on rank 0, and at level INFO on the other ranks. All ranks call this function."""
    log.log(logging.WARNING if dist.get_rank() == 0 else logging.INFO, message, *args)


@dataclass(frozen=True)
class _Outcome:
    """The result or the error of an action, in a form that can be pickled and sent to other ranks."""

    value: Any = None
    error: type[Exception] | None = None
    args: tuple[Any, ...] = ()
    """Arguments of the error."""

    def value_or_raise(self) -> Any:
        if self.error is None:
            return self.value
        raise self.error(*self.args)


def _run(action: Callable[[], Any]) -> _Outcome:
    try:
        return _Outcome(action())
    except ConfigError as error:
        return _Outcome(error=ConfigError, args=(error.problems,))
    except (UserError, RunError) as error:
        return _Outcome(error=type(error), args=(str(error),))
    except OSError as error:
        is_numbered = error.errno is not None
        return _Outcome(
            error=OSError, args=(error.errno, error.strerror, error.filename) if is_numbered else (str(error),)
        )
    except Exception as error:  # also sent to the other ranks, which wait for this one
        return _Outcome(error=RuntimeError, args=(f"{type(error).__name__}: {error}",))


@cache
def replace_gloo_all_gather() -> torch.library.Library | None:
    """Until the process ends, replace PyTorch's functional all-gather of CPU tensors, which corrupts memory on gloo.

    A gloo process group has two worker threads. After each collective, a worker stores the collective's name in a
    `std::string` of the group without a lock (`pgStatus_->lastCompletedWorkName` in `ProcessGroupGloo::runLoop`). If
    both workers do so at the same time, one buffer is freed twice. Only names of more than 15 characters have a buffer
    on the heap: `_ALLREDUCE_SPARSE`, and `ALLGATHER_COALESCED`, which the functional all-gather uses. The replacement
    uses `ALLGATHER`. DTensor and synchronized BatchNorm call this all-gather for host tensors, in GPU runs too.

    PyTorch 2.11 to 2.15 have this race (docs/verification/reliability.md); no upstream issue was found. On newer
    releases this function replaces nothing and returns None, because the operators used here are private. Only the CPU
    kernel changes: autograd, tracing, torch.compile and dispatch modes see the same operator. Repeated calls do
    nothing. A test compares the replacement with PyTorch's kernel (tests/distributed/test_collectives.py).
    """
    if not is_tested_release():
        return None
    library = torch.library.Library("_c10d_functional", "IMPL")
    library.impl("all_gather_into_tensor", _all_gather, "CPU")
    return library  # `cache` keeps the library alive: its destruction would remove the kernel


def _all_gather(x: Tensor, ranks: int, group_name: str) -> Tensor:
    """Start an all-gather of `x` [n, ...] and return the result [ranks * n, ...]. The result is complete after
    `wait_tensor`."""
    values = torch.view_as_real(x) if x.is_complex() else x  # gloo has no complex dtypes
    gathered = values.new_empty((ranks * values.shape[0], *values.shape[1:]))
    torch.ops._c10d_functional.all_gather_into_tensor_out.default(values, ranks, group_name, out=gathered)
    return torch.view_as_complex(gathered) if x.is_complex() else gathered
