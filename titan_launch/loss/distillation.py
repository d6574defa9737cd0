"""Distillation: training with the probabilities of a teacher, a second model that is not trained."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_launch.config.sections.data import IGNORED_TARGET
from titan_launch.config.sections.loss import DistillationConfig
from titan_launch.core.errors import config_error
from titan_launch.loss.cross_entropy import CrossEntropy
from titan_launch.loss.interface import Compile
from titan_launch.loss.outputs import LogitsCheck
from titan_launch.loss.second_model import FrozenModel


class DistillationLoss(CrossEntropy):
    """A weighted sum of the KL divergence from a teacher's probabilities and the cross-entropy (Hinton et al.,
    arXiv:1503.02531).

    Validation computes the cross-entropy alone, without the teacher.
    """

    num_sums = 3
    tags = ("distillation/kl_divergence", "distillation/cross_entropy")

    def __init__(self, check: LogitsCheck, compiled: Compile, settings: DistillationConfig, teacher: FrozenModel):
        super().__init__(check=check)
        self.frozen = teacher.module
        self._settings, self._teacher = settings, teacher
        self._compute = compiled(distillation_sums)
        self._logits: Tensor | None = None

    def prepare(self, inputs: Tensor, targets: Tensor, documents: Tensor | None) -> None:
        """In training, compute the teacher's logits and store them for `sums`. Collective."""
        if torch.is_grad_enabled():
            self._logits = self._teacher(inputs, targets, documents)

    def sums(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the three sums of `distillation_sums`. With gradients disabled, return the two sums of
        `CrossEntropy.sums`. Raises ConfigError if the logits do not fit the targets, or if the teacher has a different
        number of classes."""
        if not torch.is_grad_enabled():
            return super().sums(outputs, targets)
        self._check(outputs.shape, targets)
        of_teacher, self._logits = self._logits, None
        assert of_teacher is not None, "call prepare before sums"
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

    `logits`, `teacher`: (n, classes). `targets`: (n). The loss is the sum of `weight` x `temperature`^2 x KL divergence
    and (1 - `weight`) x cross-entropy. The factor `temperature`^2 keeps the gradients of both terms at the same scale
    at every temperature.
    """
    logits, teacher = logits.float(), teacher.float()
    cross_entropy = F.cross_entropy(logits, targets, ignore_index=IGNORED_TARGET, reduction="sum")
    log_probs, of_teacher = ((each / temperature).log_softmax(-1) for each in (logits, teacher))
    divergence = F.kl_div(log_probs, of_teacher, reduction="none", log_target=True).sum(-1)
    divergence = divergence.where(targets != IGNORED_TARGET, 0).sum()
    loss = weight * temperature**2 * divergence + (1 - weight) * cross_entropy
    return torch.stack([loss, divergence.detach(), cross_entropy.detach()])
