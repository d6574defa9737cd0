"""Construction of a job's loss."""

from __future__ import annotations

import logging
from functools import partial

from torch import nn

from titan_launch.config.job import JobConfig
from titan_launch.config.sections.loss import KTOConfig
from titan_launch.loss.cross_entropy import CrossEntropy
from titan_launch.loss.distillation import DistillationLoss
from titan_launch.loss.interface import Loss
from titan_launch.loss.kto import KTOLoss
from titan_launch.loss.model_loss import ModelLoss
from titan_launch.loss.outputs import logits_check
from titan_launch.loss.preferences import PreferenceLoss
from titan_launch.loss.second_model import Base, FrozenModel
from titan_launch.loss.user_function import FunctionLoss, import_loss
from titan_launch.models.architectures import labels_taken
from titan_launch.models.blocks import PassThrough
from titan_launch.parallel.compile import compile_loss
from titan_launch.plan.module_selection import describe_loss
from titan_launch.plan.types import ModelPlan
from titan_launch.precision.policy import torch_dtype

_log = logging.getLogger(__name__)


def losses_of_next_tokens(config: JobConfig) -> tuple[str, ...]:
    """Return the tags of those reported losses that are the cross-entropy of the next tokens, such as `train/loss`.
    Their exponentials are perplexities. Empty for other losses."""
    if config.data.unit != "tokens" or config.model.loss is not None or labels_taken(config.model) is not None:
        return ()
    in_training = config.loss.name == "cross_entropy" and config.loss.label_smoothing == 0
    in_validation = config.loss.name in ("cross_entropy", "distillation")
    return ("train/loss",) * in_training + ("validation/loss", "validation/ema_loss") * in_validation


def build_loss(
    model: nn.Module,
    plan: ModelPlan,
    config: JobConfig,
    num_classes: int,
    has_values: bool = True,
    frozen: FrozenModel | None = None,
) -> Loss:
    """Return the loss of a job: the loss that the model computes (`model.loss`), or the loss that `loss.name` names.

    `num_classes`: number of classes of the data. `has_values`: False if the forward is traced with FakeTensors, whose
    values cannot be checked. `frozen`: the teacher or reference model. None if the loss has none, or if the reference
    is the trained model with its adapters disabled. If `plan` has a loss head, this function changes the forward of
    the head in place (`CrossEntropy.compute_in`). Raises ConfigError if the function that `loss.name` names cannot be
    imported or called (`import_loss`), and if training changes running statistics of the base model (`Base`).
    """
    if config.model.loss is not None:
        return ModelLoss(config.model.loss, config.data.unit, has_values)
    description = describe_loss(config, plan)
    if description is not None:
        _log.info("loss: %s", description)
    outputs = 1 if config.loss.name == "reward" else labels_taken(config.model) or num_classes
    check, compiled = logits_check(config.data.unit, outputs), partial(compile_loss, config=config.compile)
    function, kind, distillation = import_loss(config.loss), config.loss.kind, config.loss.distillation
    if function is not None:
        return FunctionLoss(config.loss.name, check, compiled, function, has_values)
    base = partial(Base, model, ("loss", config.loss.name, "reference"))
    if kind.reads_pairs:
        reference = (frozen or base()) if kind.second_model is not None else None
        return PreferenceLoss(check, compiled, config.loss, reference)
    if isinstance(config.loss.settings, KTOConfig):
        return KTOLoss(check, compiled, config.loss.settings, model, frozen or base())
    if distillation is not None:
        assert frozen is not None, "distillation requires a teacher"
        return DistillationLoss(check, compiled, distillation, frozen)
    loss = CrossEntropy(config.loss, check, compiled)
    if plan.loss_head is not None:
        head = model.get_submodule(plan.loss_head)
        dtypes = [torch_dtype(dtype) for dtype in plan.logits_dtypes]
        if not isinstance(head, PassThrough):  # in a pipeline, only the last stage has the head
            loss.compute_in(head, dtypes)
    return loss
