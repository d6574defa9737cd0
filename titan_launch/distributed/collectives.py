"""Actions whose result or error is the same on all ranks of a group."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist

from titan_launch.core.errors import ConfigError, RunError, UserError

Value = TypeVar("Value")


def on_rank_0(action: Callable[[], Value], group: dist.ProcessGroup | None = None) -> Value:
    """Run `action` on rank 0 and return its result on all ranks. Collective over `group`; None is the default group.

    If `action` raises an error on rank 0, all ranks raise it: UserError, ConfigError and RunError unchanged, an OSError
    with the same number and text. Any other error becomes a RuntimeError that names it.
    """
    outcome = [_run(action) if dist.get_rank(group) == 0 else None]
    dist.broadcast_object_list(outcome, src=dist.get_global_rank(group, 0) if group else 0, group=group)
    assert outcome[0] is not None
    return outcome[0].value_or_raise()


def on_all_ranks(action: Callable[[], Value], group: dist.ProcessGroup | None = None) -> list[Value]:
    """Run `action` on all ranks and return the list of results, by rank, on all ranks. Collective over `group`.

    If `action` raises errors, all ranks raise the error of the lowest such rank, as `on_rank_0` does.
    """
    outcomes: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(outcomes, _run(action), group=group)
    for outcome in outcomes:
        outcome.value_or_raise()
    return [outcome.value for outcome in outcomes]


def warn(log: logging.Logger, message: str, *args: object) -> None:
    """Log a message that all ranks have: as a warning on rank 0, and at level INFO in the log files of other ranks."""
    log.log(logging.WARNING if dist.get_rank() == 0 else logging.INFO, message, *args)


@dataclass(frozen=True)
class _Outcome:
    """The result or the error of an action, which can be sent to other ranks."""

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
    except Exception as error:  # raised on all ranks, since the other ranks wait for this one
        return _Outcome(error=RuntimeError, args=(f"{type(error).__name__}: {error}",))
