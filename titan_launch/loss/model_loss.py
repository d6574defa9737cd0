"""The loss that a model computes itself (`model.loss`)."""

from __future__ import annotations

import inspect
import math
from typing import Any, Literal

import torch
from torch import Tensor, nn

from titan_launch.config.sections.data import IGNORED_TARGET, SampleUnit
from titan_launch.config.sections.loss import LossConfig
from titan_launch.loss.cross_entropy import CrossEntropy
from titan_launch.loss.interface import Loss, count_correct, count_valid
from titan_launch.loss.outputs import INPUTS, are_logits, entry, find_logits, forward_error


def model_loss_contract(unit: SampleUnit) -> str:
    """Return the argument `contract` of `forward_error`, for a forward that returns its loss."""
    return (
        f"; with model.loss, forward(inputs, labels=targets) gets {INPUTS[unit]} and must return its loss, a scalar: "
        'alone, first in a tuple, or as the attribute or entry "loss"'
    )


class ModelLoss(Loss):
    """The loss that a model computes itself, converted to the sum over the valid targets of a microbatch."""

    contract = staticmethod(model_loss_contract)

    def __init__(self, reduction: Literal["mean", "sum"], unit: SampleUnit, has_values: bool = True):
        """`reduction`: value of `model.loss`. `has_values`: see `build_loss`."""
        super().__init__()
        self._reduction = reduction
        self._checks_shift = has_values and unit == "tokens"
        self._unit = unit
        self._cross_entropy = CrossEntropy(LossConfig(chunks=8))

    def arguments(self, model: nn.Module, targets: Tensor) -> dict[str, Tensor]:
        """Return the targets as `labels`. Also return them as `shift_labels` if the forward has an argument of this
        name, or if it has `**kwargs` and the model has a `loss_function`."""
        parameters = inspect.signature(model.forward).parameters
        takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
        # The language models of `transformers` shift `labels` by one token, but use `shift_labels` unchanged. Most of
        # them take `shift_labels` in **kwargs, which their forward passes on to their `loss_function`.
        if "shift_labels" in parameters or (takes_any and hasattr(model, "loss_function")):
            return {"labels": targets, "shift_labels": targets}
        return {"labels": targets}

    def select(self, outputs: Any, targets: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the loss in a model's outputs as an fp32 scalar, and the logits. The logits are None if the outputs
        have none. Raise ConfigError if the loss is missing, or is not a tensor with one element."""
        loss = entry(outputs, "loss")
        if loss is None:
            loss = outputs[0] if isinstance(outputs, (tuple, list)) and outputs else outputs
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            shape = f" of the shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else ""
            reason = f"returns a {type(loss).__name__}{shape} instead of a loss"
            raise forward_error(reason, self.contract(self._unit))
        return loss.float().reshape(()), find_logits(outputs, targets)

    def sums(self, outputs: tuple[Tensor, Tensor | None], targets: Tensor) -> Tensor:
        """Return two sums over the valid targets, in fp32. `outputs`: loss and logits.

        The first sum is the loss; if the model returns a mean, it is multiplied by the number of valid targets. The
        second sum is 0 with gradients enabled. With gradients disabled, it is the number of correct predictions, or
        NaN if there are no logits. Raises ConfigError if the model shifts the targets by one token.
        """
        loss, logits = outputs
        if logits is not None and not are_logits(logits, targets):
            logits = None
        if self._checks_shift:
            self._check_shift(loss.detach(), logits, targets)
        if self._reduction == "mean":
            num_valid = count_valid(targets)
            loss = (loss * num_valid).where(num_valid > 0, 0)  # a mean over no targets is NaN
        second = torch.zeros_like(loss)
        if not torch.is_grad_enabled():
            second = torch.full_like(loss, math.nan) if logits is None else count_correct(logits, targets)
        return torch.stack([loss, second])

    @torch.no_grad()
    def _check_shift(self, loss: Tensor, logits: Tensor | None, targets: Tensor) -> None:
        """Raise ConfigError if the model shifts the targets by one token. The targets that it gets are already shifted.

        The check compares the loss with two cross-entropies: for the targets, and for the targets shifted once more. If
        both are equal, the next forward checks again. Usually, they differ in the first step. The host waits for the
        device. Without logits there is no check.
        """
        if logits is None:
            self._checks_shift = False
            return
        ignored = torch.full_like(targets[:, :1], IGNORED_TARGET)
        expected, shifted = (
            self._cross_entropy.sums(logits, wanted)[0] / (count_valid(wanted) if self._reduction == "mean" else 1)
            for wanted in (targets, torch.cat([targets[:, 1:], ignored], 1))
        )
        if not (expected - shifted).abs() > 1e-3 * shifted.abs():
            return
        self._checks_shift = False
        if (loss - shifted).abs() < 1e-4 * shifted.abs():
            reason = (
                "shifts the labels by one token, but the targets are shifted already; remove model.loss, so that the "
                "launcher computes the loss from the model's logits, or compare the logits at position i with "
                "labels[:, i] in the model"
            )
            raise forward_error(reason)
