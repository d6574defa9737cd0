"""Preference losses, which compare the two answers of a pair. `PAIR_LOSSES` has an entry for each loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_launch.config.sections.data import IGNORED_TARGET
from titan_launch.config.sections.loss import DPOConfig, IPOConfig, LossConfig, ORPOConfig, SimPOConfig
from titan_launch.loss.interface import Compile, Loss, count_valid
from titan_launch.loss.outputs import LogitsCheck, forward_error
from titan_launch.loss.second_model import Base, FrozenModel


class PairTerms(NamedTuple):
    """The results of a loss for each pair. All tensors are fp32 (batch, pairs)."""

    losses: Tensor
    chosen: Tensor
    """Rewards of the chosen answers."""

    rejected: Tensor
    """Rewards of the rejected answers."""


def dpo(log_ratios: Tensor, settings: DPOConfig) -> PairTerms:
    """Return the terms of direct preference optimization (Rafailov et al., arXiv:2305.18290, equation 7; with label
    smoothing, equation 3 of https://ericmitchell.ai/cdpo.pdf). Without gradients, label smoothing is not used."""
    chosen, rejected = (settings.beta * log_ratios).unbind(-1)
    smoothing = settings.label_smoothing if torch.is_grad_enabled() else 0.0
    margin = chosen - rejected
    losses = -(1 - smoothing) * F.logsigmoid(margin) - smoothing * F.logsigmoid(-margin)
    return PairTerms(losses, chosen, rejected)


def ipo(log_ratios: Tensor, settings: IPOConfig) -> PairTerms:
    """Return the terms of identity preference optimization (Azar et al., arXiv:2310.12036, equation 17). In the paper,
    log-ratios are sums over tokens. Here, they are means, so that the best margin does not depend on the length of an
    answer."""
    chosen, rejected = log_ratios.unbind(-1)
    losses = (chosen - rejected - 1 / (2 * settings.beta)).square()
    return PairTerms(losses, settings.beta * chosen, settings.beta * rejected)


def simpo(log_probs: Tensor, settings: SimPOConfig) -> PairTerms:
    """Return the terms of simple preference optimization (Meng et al., arXiv:2405.14734, equation 6)."""
    chosen, rejected = (settings.beta * log_probs).unbind(-1)
    return PairTerms(-F.logsigmoid(chosen - rejected - settings.gamma), chosen, rejected)


def orpo(log_probs: Tensor, settings: ORPOConfig) -> PairTerms:
    """Return the terms of odds-ratio preference optimization (Hong et al., arXiv:2403.07691, equations 6 and 7). The
    rewards are `weight` times the log-probabilities, as in the package TRL."""
    certain = log_probs.clamp(max=-1e-6)  # the odds of an answer with the probability 1 are infinite
    log_odds = certain - (-certain.expm1()).log()
    chosen, rejected = log_odds.unbind(-1)
    losses = -log_probs[..., 0] - settings.weight * F.logsigmoid(chosen - rejected)
    return PairTerms(losses, *(settings.weight * log_probs).unbind(-1))


def reward(scores: Tensor, settings: None) -> PairTerms:
    """Return the terms of the loss of a reward model (Ouyang et al., arXiv:2203.02155, equation 1; Bradley and Terry,
    1952)."""
    chosen, rejected = scores.unbind(-1)
    return PairTerms(-F.logsigmoid(chosen - rejected), chosen, rejected)


class PairLoss(NamedTuple):
    """A loss of pairs. It is computed from one number for each answer, such as the answer's log-probability."""

    terms: Callable[[Tensor, Any], PairTerms]
    """Function of the numbers that `of_answer` returns, in pairs (`_in_pairs`), and of the settings of the loss. With a
    reference model, each number is the number of the trained model minus the number of the reference model."""

    of_answer: Callable[[Tensor, Tensor, Tensor], Tensor]
    """Function of logits, targets and documents. It returns one number for each document (an answer with its prompt):
    fp32 (batch, `num_documents`)."""


def total_log_prob(logits: Tensor, targets: Tensor, documents: Tensor) -> Tensor:
    """Return the sum of the log-probabilities of each document's valid targets: fp32 (batch, `num_documents`).

    `logits`: (batch, tokens, classes). `targets`, `documents`: (batch, tokens). Entries without a document are 0.
    """
    losses = F.cross_entropy(
        logits.float().flatten(0, 1), targets.flatten(), ignore_index=IGNORED_TARGET, reduction="none"
    )
    return _by_document(-losses.view_as(targets), documents)


def mean_log_prob(logits: Tensor, targets: Tensor, documents: Tensor) -> Tensor:
    """Return the mean of the log-probabilities of each document's valid targets. The shapes are as in
    `total_log_prob`."""
    num_targets = _by_document(_are_valid(targets), documents)
    return total_log_prob(logits, targets, documents) / num_targets.clamp(min=1)


def score(scores: Tensor, targets: Tensor, documents: Tensor) -> Tensor:
    """Return the score at the only valid target of each document: fp32 (batch, `num_documents`). `scores`: (batch,
    tokens, 1). The other arguments are as in `total_log_prob`."""
    return _by_document(scores.float().squeeze(-1) * _are_valid(targets), documents)


def are_pairs(targets: Tensor, documents: Tensor) -> Tensor:
    """Return a tensor that is True for each pair whose two documents both have a valid target: bool (batch, pairs)."""
    return (_in_pairs(_by_document(_are_valid(targets), documents)) > 0).all(-1)


def _are_valid(targets: Tensor) -> Tensor:
    return (targets != IGNORED_TARGET).float()


def _by_document(values: Tensor, documents: Tensor) -> Tensor:
    """Return the sum of `values` (batch, tokens) over the tokens of each document: (batch, `num_documents`)."""
    batch, tokens = values.shape
    return values.new_zeros(batch, num_documents(tokens)).scatter_add(1, documents.long(), values)


def num_documents(tokens: int) -> int:
    """Return the size of the axis of documents for samples of `tokens` tokens. A sample has at most `tokens` + 1
    documents: one for each token, and one for padding. The size is even, because documents form pairs."""
    return 2 * (tokens // 2 + 1)


def _in_pairs(values: Tensor) -> Tensor:
    """Reshape one value per document, (batch, `num_documents`), to (batch, pairs, 2). The last axis is (chosen,
    rejected)."""
    return values.unflatten(1, (-1, 2))


PAIR_LOSSES: Mapping[str, PairLoss] = {
    "dpo": PairLoss(dpo, total_log_prob),
    "ipo": PairLoss(ipo, mean_log_prob),
    "simpo": PairLoss(simpo, mean_log_prob),
    "orpo": PairLoss(orpo, mean_log_prob),
    "reward": PairLoss(reward, score),
}
"""The losses of pairs by `loss.name`. `config.sections.loss.LOSSES` says which losses have a second model."""


class PreferenceLoss(Loss):
    """A loss of pairs of answers. The items are the pairs.

    Documents 2k and 2k + 1 of a sample are the chosen and the rejected answer of a pair, each with its prompt. Only the
    answers have valid targets.
    """

    num_sums = 5
    accuracy_of_items = True
    tags = tuple(f"preference/{name}" for name in ("reward_chosen", "reward_rejected", "accuracy", "reward_margin"))

    def __init__(self, check: LogitsCheck, compiled: Compile, config: LossConfig, reference: FrozenModel | Base | None):
        """`reference`: None for a loss without a reference model."""
        super().__init__(check)
        self.frozen = None if reference is None else reference.module
        self._row, self._reference = PAIR_LOSSES[config.name], reference
        self._settings = config.settings
        self._of_answer = compiled(self._row.of_answer)
        self._prepared: tuple[Tensor, Tensor | None] | None = None

    def counts(self, targets: Tensor, documents: Tensor | None) -> Tensor:
        """Return the number of pairs and the number of valid targets of a microbatch, int64 (2)."""
        assert documents is not None, "config.rules requires data of pairs"
        return torch.stack([are_pairs(targets, documents).sum(), count_valid(targets)])

    def prepare(self, inputs: Tensor, targets: Tensor, documents: Tensor | None) -> None:
        """Store the documents for `sums`. If the loss has a reference model, also run this model, and store the result
        of `PairLoss.of_answer` for its logits. Collective."""
        assert documents is not None, "config.rules requires data of pairs"
        reference = None
        if self._reference is not None:
            with torch.no_grad():
                logits = self._reference(inputs, targets, documents)
                reference = self._of_answer(logits, targets, documents)
        self._prepared = documents, reference

    def sums(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return five sums over pairs: the losses, the rewards of the chosen answers, the rewards of the rejected
        answers, the number of pairs with a positive margin, and the margins. A margin is the reward of the chosen
        answer minus the reward of the rejected answer. With gradients disabled, return the first and the fourth sum."""
        self._check(outputs.shape, targets)
        if self._row.of_answer is score and outputs.shape[-1] != 1:
            found = f"returns {outputs.shape[-1]} numbers for each token"
            raise forward_error(f'{found}, but loss.name = "reward" reads one; give the model\'s last layer one output')
        assert self._prepared is not None, "call prepare before sums"
        (documents, reference), self._prepared = self._prepared, None
        numbers = self._of_answer(outputs, targets, documents)
        if reference is not None:
            numbers = numbers - reference
        terms = self._row.terms(_in_pairs(numbers), self._settings)
        margin = (terms.chosen - terms.rejected).detach()
        metrics = terms.chosen.detach(), terms.rejected.detach(), (margin > 0).float(), margin
        is_pair = are_pairs(targets, documents)
        sums = torch.stack([value.where(is_pair, 0).sum() for value in (terms.losses, *metrics)])
        return sums if torch.is_grad_enabled() else sums[[0, 3]]
