"""The second model of a loss: a teacher or a reference model, which is not trained and shares the ranks of the run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from titan_launch.config.job import JobConfig
from titan_launch.config.rules.loss import frozen_job
from titan_launch.config.sections.loss import FrozenModelConfig
from titan_launch.core.errors import ConfigError, KeyPath
from titan_launch.core.fingerprint import Fingerprint
from titan_launch.distributed.collectives import on_all_ranks
from titan_launch.distributed.mesh import Mesh
from titan_launch.models.build import build_model
from titan_launch.models.init import load_weights
from titan_launch.models.weights.folder import Weights, WeightsFolder, find_weights
from titan_launch.parallel.fsdp import without_backward
from titan_launch.plan.job import plan_untrained
from titan_launch.plan.types import Inventory, ModelPlan
from titan_launch.train.auto_mode import inspect_model
from titan_launch.train.forward import logits_of
from titan_launch.train.model import AssembledModel, SampleFormat, allocate_model, assemble_model


class WeightsSource:
    """A folder of weights among the files that a run reads, so that a resume notices other weights."""

    def __init__(self, folder: WeightsFolder):
        self._folder = folder

    def fingerprint(self, seed: int) -> Fingerprint:
        """Return the fingerprint of the files, which does not depend on `seed`."""
        return self._folder.fingerprint()

    def __len__(self) -> int:
        """Return the number of tensors."""
        return len(self._folder.tensors)


class FrozenModel:
    """A model that is never trained. It is in evaluation mode, and its forward records no graph."""

    def __init__(self, config: JobConfig, model: AssembledModel, key: KeyPath):
        """`config`: job of the model, as `frozen_job` returns it. `key`: key that names its folder."""
        self._config, self._model, self.key = config, model, key

    @property
    def module(self) -> nn.Module:
        """The wrapped module."""
        return self._model.module

    @property
    def plan(self) -> ModelPlan:
        """The plan by which the module was wrapped."""
        return self._model.plan

    def allocate(self, device: torch.device, stack: ExitStack, initial_values: bool = True) -> None:
        """Allocate this rank's shards, and fill the tensors that are not in the folder unless `initial_values` is
        False."""
        allocate_model(self._model, self._config, device, stack, initial_values)

    def load(self) -> WeightsSource:
        """Copy the weights of the folder into the model, and return the folder. Collective. Raises ConfigError."""
        found: list[Weights] = []

        def read() -> int:
            found.append(find_weights(self._config.model, self._model.plan.inventory))
            return load_weights(self.module, found[0])

        with _errors_on(self.key):
            on_all_ranks(read)
        return WeightsSource(found[0].folder)

    @torch.no_grad()
    def __call__(self, inputs: Tensor, targets: Tensor, documents: Tensor | None) -> Tensor:
        """Return the logits of a microbatch. Collective."""
        with without_backward(self.module):
            return logits_of(self.module, inputs, targets, documents)


def assemble_frozen_model(config: JobConfig, mesh: Mesh, samples: SampleFormat) -> FrozenModel | None:
    """Build and wrap the second model that the job's loss names, without memory; None if there is none. Collective.

    The functions that build the trained model build this one, too. Raises ConfigError.
    """
    second = config.loss.frozen_model()
    if second is None:
        return None
    own = frozen_job(config, second)
    with _errors_on(second.key):
        built = build_model(own.model, own.training.seq_len)
        plan = plan_untrained(own, inspect_model(own, built))
        built.module.requires_grad_(False).eval()
        return FrozenModel(own, assemble_model(own, built, plan, mesh, samples), second.key)


def inspect_frozen_model(config: JobConfig, second: FrozenModelConfig) -> Inventory:
    """Return the table of the modules of the second model of a job's loss. Raises ConfigError."""
    own = frozen_job(config, second)
    with _errors_on(second.key):
        return inspect_model(own, build_model(own.model, own.training.seq_len))


@contextmanager
def _errors_on(key: KeyPath) -> Iterator[None]:
    """Let errors of `[model]` name the key of the second model's folder."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(replace(p, key=key) if p.key[0] == "model" else p for p in error.problems) from error
