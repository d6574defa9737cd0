"""The second model of a loss: a teacher or a reference model, which is not trained and shares the ranks of the run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from titan_launch.config.job import JobConfig
from titan_launch.config.rules.loss import frozen_job
from titan_launch.config.sections.loss import BASE
from titan_launch.core.errors import ConfigError, KeyPath, config_error
from titan_launch.distributed.collectives import on_all_ranks
from titan_launch.loss.outputs import logits_of
from titan_launch.models.build import BuiltModel, build_model
from titan_launch.models.init import load_weights
from titan_launch.models.lora import adapters_disabled
from titan_launch.models.weights.folder import Weights, WeightsFolder, find_weights
from titan_launch.parallel.fsdp import in_evaluation_mode, without_backward
from titan_launch.plan.types import ModelPlan


class Base:
    """The reference model of a LoRA run without a second model: the trained model with its adapters disabled."""

    module = None
    """None: there is no second module (see `Loss.frozen`)."""

    def __init__(self, model: nn.Module, key: KeyPath):
        """`key`: the key of the job file that chooses this reference. Raises ConfigError if training changes running
        statistics of the model."""
        for path, norm in model.named_modules():
            if isinstance(norm, _NormBase) and norm.training and norm.running_mean is not None:
                why = f"which must stay frozen, but training changes running statistics of {path}"
                remedy = 'set batchnorm.of_frozen = "fixed", or name a folder' if norm.affine else "name a folder"
                raise config_error(key, f"is the base model, {why}; {remedy}", BASE)
        self._model = model

    @torch.no_grad()
    def __call__(self, inputs: Tensor, targets: Tensor, documents: Tensor | None) -> Tensor:
        """Return the logits of a microbatch, in evaluation mode. Collective."""
        with adapters_disabled(self._model), in_evaluation_mode(self._model):
            return logits_of(self._model, inputs, targets, documents)


@dataclass(frozen=True)
class FrozenModel:
    """A model from a folder of weights that is never trained. `train.model.assemble_model` wraps this model like the
    trained model.

    The model is in evaluation mode, and its forward records no autograd graph.
    """

    key: KeyPath
    """Key of the job file whose value is the folder, such as `loss.distillation.teacher`."""

    config: JobConfig
    """The job that describes this model: the result of `frozen_job`."""

    built: BuiltModel
    wrapping: ModelPlan | None = None
    """The plan by which the module was wrapped; None for a module that is not wrapped."""

    @property
    def module(self) -> nn.Module:
        """The module, which `assemble_model` wraps in place."""
        return self.built.module

    @property
    def plan(self) -> ModelPlan:
        assert self.wrapping is not None, "call assemble_model before plan"
        return self.wrapping

    def load(self) -> WeightsFolder:
        """Copy the weights of the folder into the wrapped module, and return the folder. Collective. Raises ConfigError
        if the weights cannot be read or do not fit the model."""
        found: list[Weights] = []

        def read() -> int:
            found.append(find_weights(self.config.model, self.plan.inventory))
            return load_weights(self.module, found[0])

        with errors_on(self.key):
            on_all_ranks(read)
        return found[0].folder

    @torch.no_grad()
    def __call__(self, inputs: Tensor, targets: Tensor, documents: Tensor | None) -> Tensor:
        """Return the logits of a microbatch. Collective."""
        with without_backward(self.module):
            return logits_of(self.module, inputs, targets, documents)


def build_frozen_model(config: JobConfig) -> FrozenModel | None:
    """Return the second model that the job's loss names, on the meta device; None if the loss names none. Raises
    ConfigError if the model cannot be built.

    The parameters still require gradients, because the plan of this model decides dtypes as for a trained model. After
    planning, `assemble_model` sets `requires_grad` to False.
    """
    second = config.loss.frozen_model()
    if second is None:
        return None
    own = frozen_job(config, second)
    with errors_on(second.key):
        return FrozenModel(second.key, own, build_model(own.model, own.training.seq_len))


@contextmanager
def errors_on(key: KeyPath) -> Iterator[None]:
    """Replace ConfigErrors on keys of `[model]` by ConfigErrors on `key`, which names the folder of the second
    model."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(replace(p, key=key) if p.key[0] == "model" else p for p in error.problems) from error
