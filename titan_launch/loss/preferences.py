"""Direct preference optimization (DPO): a loss that compares the two answers of a pair, relative to a reference
model."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_launch.config.sections.data import IGNORED_TARGET
from titan_launch.config.sections.loss import DPOConfig
from titan_launch.loss.interface import Compile, Loss, count_valid
from titan_launch.loss.outputs import LogitsCheck
from titan_launch.loss.second_model import Base, FrozenModel


class DPOLoss(Loss):
    """Direct preference optimization (Rafailov et al., arXiv:2305.18290). The items are pairs of answers.

    Documents 2k and 2k + 1 of a sample are the chosen and the rejected answer of a pair, each with its prompt. Only the
    answers have valid targets.
    """

    num_sums = 5
    accuracy_of_items = True
    tags = ("dpo/reward_chosen", "dpo/reward_rejected", "dpo/accuracy", "dpo/reward_margin")

    def __init__(self, check: LogitsCheck, compiled: Compile, settings: DPOConfig, reference: FrozenModel | Base):
        super().__init__(check)
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
        """Return the five sums over pairs of `dpo_sums`. Without gradients, return two sums: the loss without label
        smoothing, and the number of pairs whose chosen answer has the higher reward."""
        self._check(outputs.shape, targets)
        assert self._prepared is not None, "prepare comes first"
        (documents, reference), self._prepared = self._prepared, None
        ratios = self._log_probs(outputs, targets, documents) - reference
        validates = not torch.is_grad_enabled()
        smoothing = 0.0 if validates else self._settings.label_smoothing
        sums = dpo_sums(ratios, are_pairs(targets, documents), self._settings.beta, smoothing)
        return sums[[0, 3]] if validates else sums


def dpo_sums(log_ratios: Tensor, is_pair: Tensor, beta: float, label_smoothing: float) -> Tensor:
    """Return five sums over pairs: the loss, the rewards of the chosen answers, the rewards of the rejected answers,
    the number of pairs whose chosen answer has the higher reward, and the margins between both rewards. Backward runs
    through the first sum only.

    `log_ratios`: fp32 (..., 2), the log-probability of the chosen and of the rejected answer in the trained model minus
    that in the reference model. `is_pair`: bool (...), False for entries that do not count.
    """
    rewards = beta * log_ratios
    chosen, rejected = rewards.unbind(-1)
    margin = chosen - rejected
    losses = -(1 - label_smoothing) * F.logsigmoid(margin) - label_smoothing * F.logsigmoid(-margin)
    metrics = [value.detach() for value in (chosen, rejected, (margin > 0).float(), margin)]
    return torch.stack([value.where(is_pair, 0).sum() for value in (losses, *metrics)])


def answer_log_probs(logits: Tensor, targets: Tensor, documents: Tensor) -> Tensor:
    """Return the sum of the log-probabilities of the valid targets of each document: fp32 (batch, pairs, 2).

    `logits`: (batch, tokens, classes). `targets`, `documents`: (batch, tokens). `pairs` is the largest number of pairs
    that a sample may have. The sums of documents that a sample lacks are 0.
    """
    losses = F.cross_entropy(
        logits.float().flatten(0, 1), targets.flatten(), ignore_index=IGNORED_TARGET, reduction="none"
    )
    return _by_document(-losses.view_as(targets), documents)


def are_pairs(targets: Tensor, documents: Tensor) -> Tensor:
    """Return a tensor that is True for each pair whose two documents both have a valid target: bool (batch, pairs)."""
    return (_by_document((targets != IGNORED_TARGET).float(), documents) > 0).all(-1)


def _by_document(values: Tensor, documents: Tensor) -> Tensor:
    """Return the sums of values (batch, tokens) by document: (batch, pairs, 2)."""
    batch, tokens = values.shape
    sums = values.new_zeros(batch, 2 * (tokens // 2 + 1))  # numbers of documents go up to the number of tokens
    return sums.scatter_add(1, documents.long(), values).unflatten(1, (-1, 2))
