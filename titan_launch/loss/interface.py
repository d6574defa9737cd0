"""The interface of a loss: the methods that a step calls, and the sums that they return.

The items of a loss are the terms of its sum: the valid targets, pairs of answers, or answers. A loss returns sums over
the items of a microbatch, and never divides. The step divides these sums by the number of items in all its microbatches
on all ranks (`means_of_step`). That number is known before the first backward. So the gradient equals the gradient of
one large batch, even if microbatches or ranks have different numbers of items.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from titan_launch.config.sections.data import IGNORED_TARGET
from titan_launch.data.sources import Batch
from titan_launch.loss.outputs import LogitsCheck, logits_contract, select_logits

Compile = Callable[[Callable[..., Any]], Callable[..., Any]]
"""A function that takes a function of tensors, and returns it compiled or unchanged."""

Z_LOSS = "train/z_loss"
"""Name of the metric of the z-loss. The z-loss is part of the loss that is trained, but not of the metric
`train/loss`."""


class Loss:
    """The loss of a job. A training step calls its methods in this order (`train.forward.run_model` has the `with`
    block):

    loss.prepare_step(microbatches, device)
    for each microbatch:
        loss.prepare(inputs, targets, documents)
        with loss.given(targets):
            outputs = loss.select(model(inputs, **loss.arguments(model, targets)), targets)
        sums = loss.sums(outputs, targets)

    The items are the valid targets, unless a subclass overrides `counts`.
    """

    num_sums = 2
    """Number of sums that `sums` returns with gradients enabled."""

    accuracy_of_items = False
    """True if the accuracy in validation is the fraction of items that are correct. False: the fraction of valid
    targets that are predicted correctly."""

    tags: tuple[str, ...] = ()
    """Names of the metrics that report the second and later sums, with gradients enabled. Sums without a tag are not
    reported."""

    prepares_steps = False
    """True if the class overrides `prepare_step`."""

    frozen: nn.Module | None = None
    """The teacher or reference model, which is never trained but wrapped like the trained model. None if there is none,
    or if the reference model is the trained model without its adapters (`loss.second_model.Base`)."""

    def __init__(self, check: LogitsCheck = lambda shape, targets: None):
        self._check = check

    def counts(self, targets: Tensor, documents: Tensor | None) -> Tensor:
        """Return the number of items of a microbatch, by which the sums are divided, and the number of valid targets:
        int64 (2), on the device of the targets. `documents`: as in `data.sources.interface.Batch`."""
        return count_valid(targets).expand(2)

    def prepare_step(self, microbatches: Sequence[Batch], device: torch.device) -> None:
        """Before the first forward of a step, compute values that depend on all microbatches together. `microbatches`:
        the microbatches of this rank, on the host. Not called in validation, in traces and in pipelines. Collective."""

    def prepare(self, inputs: Tensor, targets: Tensor, documents: Tensor | None) -> None:
        """Before the model's forward, compute further values for `sums`, such as a teacher's logits. Collective."""

    @contextmanager
    def given(self, targets: Tensor) -> Iterator[None]:
        """During the block, provide the targets of the model's next forward to the model's output layer."""
        yield

    def arguments(self, model: nn.Module, targets: Tensor) -> dict[str, Tensor]:
        """Return the keyword arguments that the loss adds to a call of the model's forward."""
        return {}

    def select(self, outputs: Any, targets: Tensor) -> Any:
        """Return the part of a model's outputs that `sums` reads: the logits. Raise ConfigError if there are no logits.

        The other outputs, such as a cache of keys and values, are freed before the loss is computed.
        """
        return select_logits(outputs, targets)

    def sums(self, outputs: Any, targets: Tensor) -> Tensor:
        """Return the sums over the items of a microbatch, in fp32. `outputs`: as `select` returns them.

        With gradients enabled, there are `num_sums` sums. Backward runs through the first one only; `tags` names the
        others. With gradients disabled, there are two sums: the loss that validation reports, and the number of correct
        targets or items (see `accuracy_of_items`).
        """
        raise NotImplementedError

    contract = staticmethod(logits_contract)
    """Function that returns the end of an error message about a forward: the arguments that it gets, and what it must
    return."""


def means_of_step(sums: Tensor, num_items: Tensor) -> Tensor:
    """Return a microbatch's part of the step's means: its sums divided by `num_items`, the number of items in the whole
    step on all ranks. If `num_items` is 0, return the sums undivided."""
    return sums / num_items.clamp(min=1)


def count_valid(targets: Tensor) -> Tensor:
    """Return the number of valid (not ignored) targets: an int64 scalar on their device."""
    return (targets != IGNORED_TARGET).sum()


def count_correct(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the number of correct predictions: targets whose class has the largest logit. Of equal logits, the first
    counts as the largest."""
    return (logits.argmax(-1) == targets).sum()
