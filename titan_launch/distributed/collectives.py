"""What all ranks of a group settle together: results and errors that are the same everywhere."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist

from titan_launch.core.errors import ConfigError, RunError, UserError

Value = TypeVar("Value")


def on_rank_0(action: Callable[[], Value], group: dist.ProcessGroup | None = None) -> Value:
    """What `action` returns on rank 0, on every rank; collective over `group` (the default group: None).

    What it raises there is raised on all ranks: UserError, ConfigError and RunError as they are, an OSError with the
    same number and text. Anything else is a defect, and is raised as a RuntimeError that names it.
    """
    outcome = [_run(action) if dist.get_rank(group) == 0 else None]
    dist.broadcast_object_list(outcome, src=dist.get_global_rank(group, 0) if group else 0, group=group)
    assert outcome[0] is not None
    return outcome[0].value_or_raise()


def on_all_ranks(action: Callable[[], Value], group: dist.ProcessGroup | None = None) -> list[Value]:
    """What `action` returns on every rank, in the order of ranks, on every rank; collective over `group`.

    What it raises on any rank is raised on all, by the same rules as `on_rank_0`; the lowest rank's, where several do.
    """
    outcomes: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(outcomes, _run(action), group=group)
    for outcome in outcomes:
        outcome.value_or_raise()
    return [outcome.value for outcome in outcomes]


def warn(log: logging.Logger, message: str, *args: object) -> None:
    """Log what all ranks know: a warning on rank 0, whose console it is, and an information on the others, for their
    own logs."""
    log.log(logging.WARNING if dist.get_rank() == 0 else logging.INFO, message, *args)


@dataclass(frozen=True)
class _Outcome:
    """What came of an action, in a form that can be sent to other ranks."""

    value: Any = None
    error: type[Exception] | None = None
    args: tuple[Any, ...] = ()
    """Of the error."""

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
    except Exception as error:  # not left to this rank alone: the others would wait for it
        return _Outcome(error=RuntimeError, args=(f"{type(error).__name__}: {error}",))
