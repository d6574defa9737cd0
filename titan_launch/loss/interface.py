"""The interface of a loss: what it needs of a model and a batch, and what it returns.

A loss returns sums over its items, and never divides. The step divides them by the number of its items over all
microbatches and ranks (`means_of_step`), which is known before the first backward. So the gradient is that of one large
batch, for unequal microbatches and ranks too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from titan_launch.config.sections.data import IGNORED_TARGET, SampleUnit
from titan_launch.loss.outputs import LogitsCheck, logits_contract, select_logits

Compile = Callable[[Callable[..., Any]], Callable[..., Any]]
"""A function that compiles a function of tensors, or returns it unchanged."""

Z_LOSS = "train/z_loss"
"""Metric of a sum that is part of the loss, but not of `train/loss`."""


class Loss:
    """The loss of a job. `train.forward.run_model` calls the four methods around a forward:

    loss.prepare(inputs, targets, documents)
    with loss.given(targets):
        outputs = loss.select(model(inputs, **loss.arguments(model, targets)), targets)
    sums = loss.sums(outputs, targets)

    The items of a loss are the valid targets, unless `counts` says otherwise.
    """

    num_sums = 2
    """Number of sums with gradients enabled."""

    accuracy_of_items = False
    """True if validation reports a fraction of the items as accuracy. False: a fraction of the valid targets."""

    tags: tuple[str, ...] = ()
    """Metrics of the sums after the first one, with gradients enabled. Sums without a tag are not reported."""

    frozen: nn.Module | None = None
    """A second model, which is not trained, and whose outputs the loss reads. It is wrapped like the trained model."""

    def __init__(self, check: LogitsCheck = lambda shape, targets: None):
        self._check = check

    def counts(self, targets: Tensor, documents: Tensor | None) -> Tensor:
        """Return the number of items, by which sums are divided, and of valid targets: int64 (2), on the device of the
        targets. `documents`: as in `data.sources.Batch`."""
        return count_valid(targets).expand(2)

    def prepare(self, inputs: Tensor, targets: Tensor, documents: Tensor | None) -> None:
        """Compute what the loss needs besides the outputs of the model, before the model's forward. Collective."""

    @contextmanager
    def given(self, targets: Tensor) -> Iterator[None]:
        """Provide the targets of the model's next forward to its output layer during the block."""
        yield

    def arguments(self, model: nn.Module, targets: Tensor) -> dict[str, Tensor]:
        """Return the keyword arguments of a forward that the loss needs."""
        return {}

    def select(self, outputs: Any, targets: Tensor) -> Any:
        """Return the outputs of a model that `sums` reads: the logits. Raise ConfigError if there are none.

        The others, such as a cache of keys and values, are freed before the loss is computed.
        """
        return select_logits(outputs, targets)

    def sums(self, outputs: Any, targets: Tensor) -> Tensor:
        """Return the sums over the items of a microbatch, in fp32. `outputs`: as `select` returns them.

        With gradients enabled: `num_sums` sums. Only the first takes a gradient; `tags` names the others. Without
        gradients two sums: the loss that validation reports, and the number of correct predictions.
        """
        raise NotImplementedError

    def contract(self, unit: SampleUnit) -> str:
        """Return the part of an error that says what a forward gets and must return."""
        return logits_contract(unit)


def means_of_step(sums: Tensor, num_items: Tensor) -> Tensor:
    """Return a microbatch's part of the step's loss: its sums, divided by the number of the step's items over all
    ranks."""
    return sums / num_items.clamp(min=1)


def count_valid(targets: Tensor) -> Tensor:
    """Return how many targets are not ignored: an int64 scalar on their device."""
    return (targets != IGNORED_TARGET).sum()


def count_correct(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the number of targets with the largest logit. Of equal logits, the first counts as the largest."""
    return (logits.argmax(-1) == targets).sum()
