"""The losses besides the cross-entropy: a function of the user, preference optimization, and distillation.

Each returns sums over its items, as `Loss` does, so that the gradient of a step is exact for unequal microbatches and
ranks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan_launch.config.sections.data import IGNORED_TARGET
from titan_launch.config.sections.loss import DistillationConfig, DPOConfig, LossConfig
from titan_launch.core.errors import ConfigError, KeyPath, config_error
from titan_launch.core.import_string import import_factory, user_traceback
from titan_launch.loss.cross_entropy import LogitsCheck, Loss, count_valid
from titan_launch.models.lora import adapters_disabled
from titan_launch.train.forward import in_evaluation_mode, logits_of

_NAME = ("loss", "name")

Compile = Callable[[Callable[..., Any]], Callable[..., Any]]
"""A function that compiles a function of tensors, or returns it unchanged."""


class Outputs(Protocol):
    """The second model of a loss, which is not trained."""

    key: KeyPath
    """Key of the job that names the model."""

    @property
    def module(self) -> nn.Module | None:
        """The wrapped module; None for a part of the trained model."""

    def __call__(self, inputs: Tensor, targets: Tensor, documents: Tensor | None, /) -> Tensor:
        """Return the logits of a microbatch, without a graph. Collective."""


class Base:
    """The outputs of the trained model without its adapters."""

    key: KeyPath = ("loss", "dpo", "reference")
    module = None

    def __init__(self, model: nn.Module):
        self._model = model

    @torch.no_grad()
    def __call__(self, inputs: Tensor, targets: Tensor, documents: Tensor | None) -> Tensor:
        """Return the logits of a microbatch, in evaluation mode."""
        with adapters_disabled(self._model), in_evaluation_mode(self._model):
            return logits_of(self._model, inputs, targets, documents)


def other_loss(
    config: LossConfig,
    model: nn.Module,
    check: LogitsCheck,
    compiled: Compile,
    frozen: Outputs | None,
    has_values: bool,
) -> Loss:
    """Return the loss that `loss.name` names, if it is not the cross-entropy. `model`: the trained model. Raises
    ConfigError as `import_loss`."""
    function = import_loss(config)
    if function is not None:
        return FunctionLoss(config, check, compiled, function, has_values)
    if config.name == "dpo":
        assert config.dpo is not None, "config.rules demands this table"
        return DPOLoss(config, check, compiled, config.dpo, frozen or Base(model))
    assert config.distillation is not None and frozen is not None, "config.rules demands this table"
    return DistillationLoss(config, check, compiled, config.distillation, frozen)


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
    """A function of the user: function(logits, targets) returns the sum of the loss over its items, a scalar.

    `logits`: fp32 (*targets.shape, classes). `targets`: int64, with -100 at ignored positions. The items are the valid
    targets, unless the function has an attribute `count`: a function of the targets of a microbatch that returns the
    number of its items.
    """

    num_sums = 1

    def __init__(
        self,
        config: LossConfig,
        check: LogitsCheck,
        compiled: Compile,
        function: Callable[[Tensor, Tensor], Tensor],
        has_values: bool = True,
    ):
        """`has_values`: False for a trace, whose tensors have no values to check."""
        super().__init__(config, check)
        self._name = config.name
        self._function, self._compiled = function, compiled(function)
        self._count: Callable[[Tensor], Any] = getattr(function, "count", count_valid)
        self._checks_sum = has_values

    def counts(self, targets: Tensor, documents: Tensor | None) -> Tensor:
        """Return the number of items, by the function's `count`, and of valid targets."""
        count = torch.as_tensor(self._count(targets), device=targets.device)
        if count.numel() != 1 or count.is_floating_point():
            raise self._error(f"has a count that returns {_described(count)} instead of a whole number")
        return torch.stack([count.reshape(()).long(), count_valid(targets)])

    def sums(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the sum of the loss. Without gradients, also the number of targets with the largest logit, so that
        validation reports an accuracy.

        Raises ConfigError if the function fails, returns no scalar, or a scalar without a gradient. In the first step
        also if it returns a mean instead of a sum.
        """
        self._check(outputs.shape, targets)
        logits = outputs.float()
        value = self._value(self._compiled, logits, targets)
        if not torch.is_grad_enabled():
            return torch.stack([value, (logits.argmax(-1) == targets).sum()])
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
        """Raise ConfigError if the loss of a microbatch is not the sum of the losses of its samples. The host waits for
        the device, once."""
        self._checks_sum = False
        first, rest = (self._value(self._function, logits[part], targets[part]) for part in (slice(1), slice(1, None)))
        if not (first + rest - value).abs() <= 1e-3 * (first.abs() + rest.abs()):
            values = f"{value:.6g} for a microbatch, but {first:.6g} for its first sample and {rest:.6g} for the others"
            raise self._error(f"returns {values}; return a sum over samples, not a mean: the launcher divides it")

    def _error(self, reason: str) -> ConfigError:
        return config_error(_NAME, reason, self._name)


def _described(value: Any) -> str:
    return f"a tensor of the shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


class DistillationLoss(Loss):
    """The KL divergence from a teacher's probabilities, and the cross-entropy (Hinton et al., arXiv:1503.02531).

    Validation computes the cross-entropy alone, without the teacher.
    """

    num_sums = 3

    def __init__(
        self,
        config: LossConfig,
        check: LogitsCheck,
        compiled: Compile,
        settings: DistillationConfig,
        teacher: Outputs,
    ):
        super().__init__(config, check)
        self.tags = ("distillation/kl_divergence", "distillation/cross_entropy")
        self.frozen = teacher.module
        self._settings, self._teacher = settings, teacher
        self._compute = compiled(distillation_sums)
        self._logits: Tensor | None = None

    def prepare(self, inputs: Tensor, targets: Tensor, documents: Tensor | None) -> None:
        """Compute the logits of the teacher, in training only."""
        if torch.is_grad_enabled():
            self._logits = self._teacher(inputs, targets, documents)

    def sums(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the sums of the loss, of the KL divergence and of the cross-entropy; without gradients as `Loss`."""
        if not torch.is_grad_enabled():
            return super().sums(outputs, targets)
        self._check(outputs.shape, targets)
        of_teacher, self._logits = self._logits, None
        assert of_teacher is not None, "prepare comes first"
        if of_teacher.shape != outputs.shape:
            reason = (
                f"has {of_teacher.shape[-1]} classes, but the trained model has {outputs.shape[-1]}; name a teacher "
                "with the same vocabulary"
            )
            raise config_error(self._teacher.key, reason, self._settings.teacher)
        flat = (tensor.flatten(0, -2) for tensor in (outputs, of_teacher))
        sums: Tensor = self._compute(*flat, targets.flatten(), self._settings.temperature, self._settings.weight)
        return sums


def distillation_sums(logits: Tensor, teacher: Tensor, targets: Tensor, temperature: float, weight: float) -> Tensor:
    """Return three sums over the valid targets, fp32: the loss, the KL divergence at `temperature`, the cross-entropy.

    `logits`, `teacher`: (n, classes). `targets`: (n). The loss is `weight` x `temperature`^2 x KL divergence +
    (1 - `weight`) x cross-entropy: the factor keeps the gradients of both terms alike at every temperature.
    """
    logits, teacher = logits.float(), teacher.float()
    cross_entropy = F.cross_entropy(logits, targets, ignore_index=IGNORED_TARGET, reduction="sum")
    log_probs, of_teacher = ((each / temperature).log_softmax(-1) for each in (logits, teacher))
    divergence = F.kl_div(log_probs, of_teacher, reduction="none", log_target=True).sum(-1)
    divergence = divergence.where(targets != IGNORED_TARGET, 0).sum()
    loss = weight * temperature**2 * divergence + (1 - weight) * cross_entropy
    return torch.stack([loss, divergence.detach(), cross_entropy.detach()])


class DPOLoss(Loss):
    """Direct preference optimization (Rafailov et al., arXiv:2305.18290). The items are pairs of answers.

    Documents 2k and 2k + 1 of a sample are the chosen and the rejected answer of a pair, each with its prompt. Only the
    answers have valid targets.
    """

    num_sums = 5
    accuracy_of_items = True

    def __init__(
        self, config: LossConfig, check: LogitsCheck, compiled: Compile, settings: DPOConfig, reference: Outputs
    ):
        super().__init__(config, check)
        self.tags = ("dpo/reward_chosen", "dpo/reward_rejected", "dpo/accuracy", "dpo/reward_margin")
        self.frozen = reference.module
        self._settings, self._reference = settings, reference
        self._log_probs = compiled(answer_log_probs)
        self._prepared: tuple[Tensor, Tensor] | None = None

    def counts(self, targets: Tensor, documents: Tensor | None) -> Tensor:
        """Return the number of pairs and of valid targets."""
        assert documents is not None, "config.rules demands data of pairs"
        return torch.stack([are_pairs(targets, documents).sum(), count_valid(targets)])

    def prepare(self, inputs: Tensor, targets: Tensor, documents: Tensor | None) -> None:
        """Compute the log-probabilities of the answers in the reference model."""
        assert documents is not None, "config.rules demands data of pairs"
        with torch.no_grad():
            reference = self._log_probs(self._reference(inputs, targets, documents), targets, documents)
        self._prepared = documents, reference

    def sums(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the sums over pairs of the loss, of the rewards of chosen and rejected answers, of the pairs with a
        higher reward of the chosen answer, and of the margins. Without gradients: the sums of the loss without label
        smoothing, and of these pairs."""
        self._check(outputs.shape, targets)
        assert self._prepared is not None, "prepare comes first"
        (documents, reference), self._prepared = self._prepared, None
        ratios = self._log_probs(outputs, targets, documents) - reference
        validates = not torch.is_grad_enabled()
        smoothing = 0.0 if validates else self._settings.label_smoothing
        sums = dpo_sums(ratios, are_pairs(targets, documents), self._settings.beta, smoothing)
        return sums[[0, 3]] if validates else sums


def dpo_sums(log_ratios: Tensor, is_pair: Tensor, beta: float, label_smoothing: float) -> Tensor:
    """Return five sums over pairs: the loss, the rewards of the chosen and of the rejected answers, the number of pairs
    with a higher reward of the chosen answer, and the margins. Only the first takes a gradient.

    `log_ratios`: fp32 (..., 2), the log-probability of the chosen and of the rejected answer in the trained model minus
    that in the reference model. `is_pair`: False for entries that do not count (...).
    """
    rewards = beta * log_ratios
    chosen, rejected = rewards.unbind(-1)
    margin = chosen - rejected
    losses = -(1 - label_smoothing) * F.logsigmoid(margin) - label_smoothing * F.logsigmoid(-margin)
    metrics = [value.detach() for value in (chosen, rejected, (margin > 0).float(), margin)]
    return torch.stack([value.where(is_pair, 0).sum() for value in (losses, *metrics)])


def answer_log_probs(logits: Tensor, targets: Tensor, documents: Tensor) -> Tensor:
    """Return the sum of the log-probabilities of the valid targets of each document: fp32 (batch, pairs, 2).

    `logits`: (batch, tokens, classes). `targets`, `documents`: (batch, tokens). `pairs` is the largest possible number
    of pairs; the sums of missing documents are 0.
    """
    losses = F.cross_entropy(
        logits.float().flatten(0, 1), targets.flatten(), ignore_index=IGNORED_TARGET, reduction="none"
    )
    return _by_document(-losses.view_as(targets), documents)


def are_pairs(targets: Tensor, documents: Tensor) -> Tensor:
    """Return True for each pair of documents that both have a valid target: bool (batch, pairs)."""
    return (_by_document((targets != IGNORED_TARGET).float(), documents) > 0).all(-1)


def _by_document(values: Tensor, documents: Tensor) -> Tensor:
    """Return the sums of values (batch, tokens) by document: (batch, pairs, 2)."""
    batch, tokens = values.shape
    sums = values.new_zeros(batch, 2 * (tokens // 2 + 1))  # numbers of documents go up to the number of tokens
    return sums.scatter_add(1, documents.long(), values).unflatten(1, (-1, 2))
