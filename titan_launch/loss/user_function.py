"""A loss that the user writes as a function: `loss.name = "package.module:function"`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from titan_launch.config.sections.loss import LossConfig
from titan_launch.core.errors import ConfigError, config_error
from titan_launch.core.import_string import import_factory, user_traceback
from titan_launch.loss.interface import Compile, Loss, count_correct, count_valid
from titan_launch.loss.outputs import LogitsCheck

_NAME = ("loss", "name")


def import_loss(config: LossConfig) -> Callable[[Tensor, Tensor], Tensor] | None:
    """Return the function that `loss.name` names; None for a loss of this package.

    Raises ConfigError if the function cannot be imported, or cannot be called with logits and targets.
    """
    if config.is_of_package:
        return None
    function = import_factory(config.name, _NAME)
    try:
        inspect.signature(function).bind(None, None)
    except TypeError as error:
        reason = f"cannot be called with two arguments, logits and targets ({error})"
        raise config_error(_NAME, reason, config.name) from None
    except ValueError:  # some callables in C have no signature
        pass
    return function


class FunctionLoss(Loss):
    """A loss that the user writes: `function(logits, targets)` returns the sum of the loss over the items, a scalar.

    `logits`: fp32 (*targets.shape, classes). `targets`: int64, with -100 at ignored positions. If the function has an
    attribute `count`, `function.count(targets)` returns the number of items in a microbatch, a whole number. Otherwise,
    the items are the valid targets.
    """

    num_sums = 1

    def __init__(
        self,
        name: str,
        check: LogitsCheck,
        compiled: Compile,
        function: Callable[[Tensor, Tensor], Tensor],
        has_values: bool = True,
    ):
        """`name`: value of `loss.name`. `has_values`: see `build_loss`."""
        super().__init__(check)
        self._name = name
        self._function, self._compiled = function, compiled(function)
        self._count: Callable[[Tensor], Any] | None = getattr(function, "count", None)
        self._checks_sum = has_values

    def counts(self, targets: Tensor, documents: Tensor | None) -> Tensor:
        """Return the number of items, from `function.count` if it exists, and the number of valid targets: int64 (2).
        Raises ConfigError if `count` fails, or does not return a whole number."""
        return torch.stack([self._num_items(targets), count_valid(targets)])

    def _num_items(self, targets: Tensor) -> Tensor:
        if self._count is None:
            return count_valid(targets)
        try:
            count = torch.as_tensor(self._count(targets), device=targets.device)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            reason = "the function's count failed, or returned no integer"
            raise self._error(f"{reason}:\n{user_traceback(error)}") from error
        if count.numel() != 1 or count.is_floating_point():
            found = f"a value of dtype {count.dtype} and shape {tuple(count.shape)}"
            raise self._error(f"the function's count returns {found}; return the number of items, a single integer")
        return count.reshape(()).long()

    def sums(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return one sum, the loss. With gradients disabled, return two sums: the loss, and the number of correct
        predictions, for the accuracy in validation.

        Raises ConfigError if the logits have the wrong shape, if the function fails, or if it returns no scalar. With
        gradients enabled, also raises ConfigError for a scalar without a gradient, and for a mean instead of a sum (see
        `_check_is_sum`).
        """
        self._check(outputs.shape, targets)
        logits = outputs.float()
        value = self._value(self._compiled, logits, targets)
        if not torch.is_grad_enabled():
            return torch.stack([value, count_correct(logits, targets)])
        if not value.requires_grad:
            raise self._error("returns a value without a gradient; compute it from the logits, without detach or item")
        if self._checks_sum and len(targets) > 1:
            self._check_is_sum(logits, targets, value)
        return value.unsqueeze(0)

    def _value(self, function: Callable[[Tensor, Tensor], Tensor], logits: Tensor, targets: Tensor) -> Tensor:
        try:
            value = function(logits, targets)
        except ConfigError:
            raise
        except Exception as error:
            raise self._error(f"failed:\n{user_traceback(error)}") from error
        if not isinstance(value, Tensor) or value.numel() != 1:
            raise self._error(f"returns {_described(value)} instead of one sum, a scalar tensor")
        return value.float().reshape(())

    @torch.no_grad()
    def _check_is_sum(self, logits: Tensor, targets: Tensor, value: Tensor) -> None:
        """Raise ConfigError if the loss of a microbatch is not the sum of the losses of its samples. Only one
        microbatch of a run is checked, because the host waits for the device. A later microbatch is checked instead if
        the losses are not finite, or if the first sample or the others have no items: a mean may then equal the sum."""
        parts = slice(1), slice(1, None)
        if not all(map(int, (self._num_items(targets[part]) for part in parts))):
            return
        first, rest = (self._value(self._function, logits[part], targets[part]) for part in parts)
        if not (first + rest + value).isfinite():
            return
        self._checks_sum = False
        if (first + rest - value).abs() > 1e-3 * (first.abs() + rest.abs()):
            values = f"{value:.6g} for a microbatch, but {first:.6g} for its first sample and {rest:.6g} for the others"
            remedy = "return a sum over samples, not a mean: the launcher divides the sum"
            raise self._error(f"returns {values}; {remedy}")

    def _error(self, reason: str) -> ConfigError:
        return config_error(_NAME, reason, self._name)


def _described(value: Any) -> str:
    return f"a tensor of the shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
