"""Construction of a model for a run, a trace or a dry run: build on the meta device, wrap, allocate the shards."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from titan_launch.config.job import JobConfig
from titan_launch.core.errors import ConfigError, config_error, listed
from titan_launch.distributed.collectives import on_all_ranks
from titan_launch.distributed.mesh import Mesh
from titan_launch.distributed.process_group import Ranks
from titan_launch.models.build import BuiltModel, build_model
from titan_launch.models.factory import HostBuild, HostValues
from titan_launch.models.init import allocate, initialize
from titan_launch.parallel.apply import parallelize
from titan_launch.parallel.context_parallel import SequencePart, divide_buffers, ring_attention
from titan_launch.parallel.pipeline import divide, pipeline_of
from titan_launch.parallel.tensor_parallel import token_shards
from titan_launch.plan.hardware import GIB, free_memory_gib
from titan_launch.plan.types import ModelPlan
from titan_launch.train.forward import check_embeddings

_log = logging.getLogger(__name__)


def build_on_all_ranks(config: JobConfig, ranks: Ranks) -> BuiltModel:
    """Build a job's model on each rank. Collective. A user's factory may also set the initial values.

    Raises the errors of `build_model` on all ranks, and ConfigError if a factory sets different values on two ranks.
    """
    if ":" not in config.model.name:
        return build_model(config.model, config.training.seq_len)
    free_bytes = on_all_ranks(lambda: int(free_memory_gib() * GIB))[
        ranks.rank
    ]  # measured before any rank builds its model
    host = HostBuild(config.training.seed, free_bytes, ranks.on_host)
    models: list[BuiltModel] = []

    def build() -> str:
        models.append(build_model(config.model, config.training.seq_len, host))
        return _digest(_host_digests(models[0]))

    if len(set(on_all_ranks(build))) > 1:
        raise _different_values(config, on_all_ranks(lambda: _host_digests(models[0])))
    (built,) = models
    if isinstance(built.initializer, HostValues):
        size, free = _format_bytes(built.initializer.num_bytes), _format_bytes(free_bytes)
        message = "initial values: from %s with seed %d, %s on each of %d ranks of this host; free: %s"
        _log.info(message, config.model.name, host.seed, size, host.ranks, free)
    return built


def _format_bytes(num_bytes: int) -> str:
    """Return a number of bytes as text: `22.4 GiB`, or `22.4 MiB` below 1 GiB."""
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB else f"{num_bytes / GIB * 1024:.1f} MiB"


def _host_digests(built: BuiltModel) -> dict[str, str]:
    """Return digests of the values that a factory made, by full name. If the model has no values yet, return {}."""
    return built.initializer.digests() if isinstance(built.initializer, HostValues) else {}


def _digest(digests: Mapping[str, str]) -> str:
    return hashlib.blake2b(json.dumps(digests).encode(), digest_size=16).hexdigest()


def _different_values(config: JobConfig, digests: list[dict[str, str]]) -> ConfigError:
    """Return the error for the first rank whose tensors differ from those of rank 0."""
    first = list(digests[0].items())
    rank, other = next((rank, other) for rank, other in enumerate(digests) if list(other.items()) != first)
    differing = [name for name in {**digests[0], **other} if digests[0].get(name) != other.get(name)]
    if not differing:
        reason = (
            f"the factory registers its tensors in another order on rank {rank} than on rank 0; iterate over lists, "
            "not over sets"
        )
        return config_error(("model", "name"), reason, config.model.name)
    reason = (
        f"the factory makes other values on rank {rank} than on rank 0, in {listed(differing)}; fill every tensor "
        "(torch.empty does not), and draw random numbers only from torch, random and numpy, whose seeds are equal on "
        "all ranks"
    )
    return config_error(("model", "name"), reason, config.model.name)


class SampleFormat(Protocol):
    """Properties of the data that `assemble_model` needs."""

    @property
    def sequence_part(self) -> SequencePart | None:
        """This rank's part of every sequence; None without context parallelism."""

    @property
    def num_classes(self) -> int:
        """Number of classes of the data; for tokens, the vocabulary size."""

    def meta_inputs(self) -> Tensor:
        """Return the inputs of one microbatch on this rank, on the meta device."""


@dataclass(frozen=True)
class AssembledModel:
    """A model that is wrapped for this rank, with its plan and mesh."""

    built: BuiltModel
    """The model, whose module was wrapped in place."""

    plan: ModelPlan
    """The plan of the whole model, by which it was wrapped."""

    mesh: Mesh
    sequence_part: SequencePart | None
    """This rank's part of every sequence; None without context parallelism."""

    @property
    def module(self) -> nn.Module:
        """The wrapped model; with pipeline parallelism, only this rank's stages."""
        return self.built.module


def assemble_model(
    config: JobConfig, built: BuiltModel, plan: ModelPlan, mesh: Mesh, samples: SampleFormat
) -> AssembledModel:
    """Wrap a model on the meta device in place, as `plan` says, and check that it fits the data. Collective.

    A run, a trace and a dry run all assemble their models here. Nothing is allocated: see `allocate_model`.

    Raises ConfigError for a model whose pipeline stages do not run one after another. The first forward of
    the model raises ConfigError if an embedding of token ids has too few rows.
    """
    module = shard_model(config, built, plan, mesh)
    pipeline = pipeline_of(module)
    if pipeline is not None:
        pipeline.boundaries.of(samples.meta_inputs())
    if config.data.unit == "tokens":
        check_embeddings(module, samples.num_classes)
    return AssembledModel(built, plan, mesh, samples.sequence_part)


def shard_model(config: JobConfig, built: BuiltModel, plan: ModelPlan, mesh: Mesh) -> nn.Module:
    """Wrap a model on the meta device in place, as `plan` says, and return it. With pipeline parallelism, wrap only
    this rank's stages. Collective. Allocates nothing."""
    group = None
    if config.batchnorm.statistics == "synchronized":
        group = mesh.statistics_group(config.comm.init_timeout_seconds)

    def wrap(module: nn.Module, plan: ModelPlan) -> None:
        parallelize(
            module,
            plan,
            mesh,
            styles=built.tensor_parallel,
            parallelism=config.parallelism,
            batchnorm=config.batchnorm,
            statistics_group=group,
            activation_checkpoint=config.activation_checkpoint,
            compilation=config.compile,
            float8=config.float8,
            offloads=config.training.enable_cpu_offload,
        )

    if plan.stages:
        divide(built.module, plan, mesh, token_shards(config.parallelism), wrap)
    else:
        wrap(built.module, plan)
    return built.module


def allocate_model(
    model: AssembledModel,
    config: JobConfig,
    device: torch.device,
    stack: ExitStack,
    initial_values: bool = True,
    attention_device: torch.device | None = None,
) -> None:
    """Allocate this rank's shards on `device`, and fill them unless `initial_values` is False.

    With context parallelism, also reduce the buffers along the sequence to this rank's rows, and enter ring attention
    into `stack`. `attention_device`: the device whose ring attention is used, by default `device`. Raises ConfigError
    if PyTorch has no ring attention for that device.
    """
    if model.mesh.context is not None:
        stack.enter_context(ring_attention(model.mesh.context, config.parallelism, attention_device or device))
    allocate(model.module, device, config.training.enable_cpu_offload)
    if initial_values:
        initialize(model.module, model.built.initializer, config.training.seed, device)
    if model.sequence_part is not None:
        axes = model.built.context_parallel or {}
        divide_buffers(model.module, axes, model.sequence_part, config.training.seq_len)
