"""Kahneman-Tversky optimization (KTO), a loss of single answers that are desirable or undesirable.

The loss of an answer compares its log-ratio (see `KTOLoss`) with a baseline, the mean log-ratio of mismatched answers.
A sample has several chats. In its mismatched chats, each prompt is followed by the answer to the previous prompt. So
these chats have as many tokens as the sample, and do not depend on the division of a batch into ranks and microbatches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titan_launch.config.sections.data import IGNORED_TARGET
from titan_launch.config.sections.loss import KTOConfig
from titan_launch.core.errors import config_error
from titan_launch.data.sources import Batch
from titan_launch.loss.interface import Compile, Loss, count_valid
from titan_launch.loss.outputs import LogitsCheck, logits_of
from titan_launch.loss.preferences import num_documents, total_log_prob
from titan_launch.loss.second_model import Base, FrozenModel
from titan_launch.parallel.fsdp import in_evaluation_mode


class Answers(NamedTuple):
    """The answers in a microbatch. Tensors of shape (batch, documents) have an entry for each possible document number
    (`num_documents`)."""

    documents: Tensor
    """Document number of each token, int32 (batch, tokens)."""

    targets: Tensor
    """The targets, int64 (batch, tokens), with -100 in place of the answers' labels (see `labels`)."""

    exist: Tensor
    """True for documents with an answer and a label, bool (batch, documents)."""

    labels: Tensor
    """The labels, int64 (batch, documents): 1 for a desirable answer, and 0 for an undesirable one."""

    first: Tensor
    """Position in the sample of the answer's first target, int64 (batch, documents)."""


def answers_in(targets: Tensor, documents: Tensor | None) -> Answers:
    """Return the answers of a microbatch. The last valid target of a document is its label. The other valid targets are
    its answer. `targets`, `documents`: (batch, tokens)."""
    assert documents is not None, "config.rules requires data with labels"
    places = torch.arange(targets.shape[1], device=targets.device).expand_as(targets)
    last = _extreme(places, targets != IGNORED_TARGET, documents, "amax")
    labels = targets.gather(1, last)
    without = targets.masked_fill(places == last.gather(1, documents.long()), IGNORED_TARGET)
    first = _extreme(places, without != IGNORED_TARGET, documents, "amin")
    return Answers(documents, without, first < last, labels, first)


def _extreme(places: Tensor, is_taken: Tensor, documents: Tensor, kind: str) -> Tensor:
    """Return the first position (`kind` = "amin") or the last position ("amax") of each document where `is_taken` is
    True: int64 (batch, documents). Without such a position, "amin" gives the last position of the sample, and "amax"
    gives 0."""
    other = places.shape[1] - 1 if kind == "amin" else 0
    found = places.new_full((len(places), num_documents(places.shape[1])), other)
    return found.scatter_reduce(1, documents.long(), places.where(is_taken, other), kind)


def mismatched(inputs: Tensor, answers: Answers) -> Batch:
    """Return the mismatched chats of a microbatch. Each prompt gets the answer of the previous chat. The first prompt
    of a sample gets the answer of its last chat. Documents without an answer, such as padding, keep their tokens.

    A mismatched chat has the document number of its prompt. Only the tokens of its answer are valid targets; labels are
    not. `inputs`: (batch, tokens). No shape depends on a value, so the host never waits for the device.
    """
    batch, tokens = inputs.shape
    documents = answers.documents.long()
    places = torch.arange(tokens, device=inputs.device).expand_as(inputs)
    exist, slots = answers.exist, num_documents(tokens)
    own = torch.arange(slots, device=inputs.device).expand(batch, slots)
    length = places.new_zeros(batch, slots).scatter_add(1, documents, torch.ones_like(places))
    start = length.cumsum(1) - length  # the documents of a sample are in the order of their numbers
    of_prompt = (answers.first + 1 - start).where(exist, length)
    of_answer = length - of_prompt

    # For each chat: `giver` is the chat whose answer it gets, and `taker` is the chat that gets its answer.
    count = exist.sum(1, keepdim=True)
    rank = exist.cumsum(1) - 1  # index of each chat among the chats with an answer
    by_rank = own.new_zeros(batch, slots + 1).scatter(1, rank.where(exist, slots), own)
    giver = by_rank.gather(1, (rank - 1) % count.clamp(min=1)).where(exist, own)
    taker = torch.zeros_like(own).scatter(1, giver, own)

    new_length = of_prompt + of_answer.gather(1, giver)
    new_start = new_length.cumsum(1) - new_length
    offset = places - start.gather(1, documents)
    in_prompt = offset < of_prompt.gather(1, documents)
    owner = documents.where(in_prompt, taker.gather(1, documents))
    longer = of_prompt.gather(1, owner) - of_prompt.gather(1, documents)  # 0 in prompts
    place = new_start.gather(1, owner) + offset + longer

    def moved(values: Tensor) -> Tensor:
        return torch.zeros_like(values).scatter(1, place, values)

    is_target = torch.zeros_like(in_prompt)
    is_target[:, 1:] = (answers.targets[:, :-1] != IGNORED_TARGET) & (documents[:, 1:] == documents[:, :-1])
    new_inputs, new_documents, is_target = moved(inputs), moved(owner), moved(is_target)
    targets = torch.full_like(inputs, IGNORED_TARGET)
    follows = is_target[:, 1:] & (new_documents[:, 1:] == new_documents[:, :-1])
    targets[:, :-1] = new_inputs[:, 1:].where(follows, IGNORED_TARGET)
    return Batch(new_inputs, targets, new_documents.int())


class KTOLoss(Loss):
    """The loss of Ethayarajh et al. (arXiv:2402.01306, section 4), summed over answers, which are the items.

    The log-ratio of an answer is its log-probability in the trained model minus its log-probability in the reference
    model. The baseline is `beta` times the mean log-ratio of the mismatched answers of all ranks and microbatches, but
    at least 0. The baseline has no gradient. Samples with a single answer have no mismatched answer. In validation the
    baseline is 0, so that the result does not depend on the batches.
    """

    num_sums = 4
    accuracy_of_items = True
    prepares_steps = True
    tags = ("preference/signed_reward", "preference/accuracy", "preference/baseline")

    def __init__(
        self,
        check: LogitsCheck,
        compiled: Compile,
        settings: KTOConfig,
        model: nn.Module,
        reference: FrozenModel | Base,
    ):
        """`model`: the trained model, which runs the mismatched chats."""
        super().__init__(check)
        self.frozen = reference.module
        self._settings, self._model, self._reference = settings, model, reference
        self._log_probs = compiled(total_log_prob)
        self._of_step: Tensor | None = None
        self._prepared: tuple[Answers, Tensor, Tensor] | None = None

    def counts(self, targets: Tensor, documents: Tensor | None) -> Tensor:
        """Return the number of answers and the number of their tokens, int64 (2). Raises ConfigError for a label other
        than 0 and 1, if the targets are on the host."""
        answers = answers_in(targets, documents)
        if targets.device.type == "cpu" and (answers.labels[answers.exist] > 1).any():
            reason = 'loss.name = "kto" needs a label, 0 or 1, as the last target of each document, but a document has '
            reason += 'another last target; set data.kind = "unpaired_preferences", or set another loss.name'
            raise config_error(("data",), reason, also=(("loss", "name"),))
        return torch.stack([answers.exist.sum(), count_valid(answers.targets)])

    def prepare_step(self, microbatches: Sequence[Batch], device: torch.device) -> None:
        """Compute the baseline of a step from the mismatched chats of all ranks. Collective."""
        sums = torch.zeros(2, device=device)
        for microbatch in microbatches:
            inputs, targets, documents = microbatch.to(device)
            sums += self._sums_of_mismatched(inputs, answers_in(targets, documents))
        dist.all_reduce(sums)
        self._of_step = _mean(sums)

    def prepare(self, inputs: Tensor, targets: Tensor, documents: Tensor | None) -> None:
        """Run the reference model, and keep its log-probabilities for `sums`. Collective.

        If `prepare_step` was not called, as in a trace, also compute the baseline, from this microbatch alone. Without
        gradients, as in validation, the baseline is 0.
        """
        answers = answers_in(targets, documents)
        baseline = self._of_step
        if not torch.is_grad_enabled():
            baseline = torch.zeros((), device=inputs.device)
        elif baseline is None:
            baseline = _mean(self._sums_of_mismatched(inputs, answers))
        with torch.no_grad():
            logits = self._reference(inputs, answers.targets, answers.documents)
            reference = self._log_probs(logits, answers.targets, answers.documents)
        self._prepared = answers, reference, baseline

    def sums(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return four sums over answers: the losses, the rewards (negated for undesirable answers), the number of
        correct answers (desirable: reward above the baseline; undesirable: below), and the baseline. With gradients
        disabled, return the first and the third sum."""
        self._check(outputs.shape, targets)
        assert self._prepared is not None, "call prepare before sums"
        (answers, reference, baseline), self._prepared = self._prepared, None
        settings = self._settings
        sign = answers.labels * 2 - 1
        rewards = settings.beta * (self._log_probs(outputs, answers.targets, answers.documents) - reference)
        baseline = (settings.beta * baseline).expand_as(rewards)
        margins = sign * (rewards - baseline)
        weights = torch.where(sign > 0, settings.desirable_weight, settings.undesirable_weight)
        losses = weights * (-margins).sigmoid()  # 1 - sigmoid(margin)
        metrics = (sign * rewards).detach(), (margins > 0).float(), baseline
        sums = torch.stack([value.where(answers.exist, 0).sum() for value in (losses, *metrics)])
        return sums if torch.is_grad_enabled() else sums[[0, 2]]

    @torch.no_grad()
    def _sums_of_mismatched(self, inputs: Tensor, answers: Answers) -> Tensor:
        """Return the sum of the log-ratios of a microbatch's mismatched answers, and their number: fp32 (2)."""
        other = mismatched(inputs, answers)
        counts = answers.exist & (answers.exist.sum(1, keepdim=True) > 1)
        reference = self._log_probs(self._reference(*other), other.targets, other.documents)
        with in_evaluation_mode(self._model):
            logits = logits_of(self._model, *other)
        ratios = self._log_probs(logits, other.targets, other.documents) - reference
        return torch.stack([ratios.where(counts, 0).sum(), counts.sum()])


def _mean(sums: Tensor) -> Tensor:
    return (sums[0] / sums[1].clamp(min=1)).clamp(min=0)
