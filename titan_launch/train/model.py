"""Construction of a model for a run, a trial, a trace or a dry run: build on the meta device, inspect, wrap,
allocate the shards, build the optimizer."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from titan_launch.config.axes import CONTEXT
from titan_launch.config.job import JobConfig
from titan_launch.config.rules.data import keys_of_packed_documents
from titan_launch.core.errors import ConfigError, config_error, listed
from titan_launch.distributed.collectives import on_all_ranks
from titan_launch.distributed.mesh import Mesh
from titan_launch.distributed.process_group import Ranks
from titan_launch.loss.second_model import FrozenModel, build_frozen_model, errors_on
from titan_launch.models.build import BuiltModel, build_model, take_inventory, values_of_width
from titan_launch.models.documents import check_documents
from titan_launch.models.factory import HostBuild
from titan_launch.models.host_values import HostValues, attributes_digest, describe_tensors, digest_of
from titan_launch.models.init import allocate, initialize
from titan_launch.models.parallel_plans import check_divisions
from titan_launch.optim.registry import build_optimizer
from titan_launch.optim.replica_shards import ReplicaShards
from titan_launch.parallel.apply import parallelize
from titan_launch.parallel.batchnorm import check_batch_norms
from titan_launch.parallel.context_parallel import divide_buffers, ring_attention, sequence_part
from titan_launch.parallel.pipeline import divide, pipeline_of
from titan_launch.plan.freezing import Freezing
from titan_launch.plan.hardware import GIB, format_bytes, free_memory_gib
from titan_launch.plan.job import plan_job, plan_untrained
from titan_launch.plan.mup import width_scales
from titan_launch.plan.replica_shards import gradients_leave_early
from titan_launch.plan.types import Inventory, ModelPlan
from titan_launch.train.forward import check_embeddings, check_signature, find_output_layer

_log = logging.getLogger(__name__)


def build_job_model(config: JobConfig, host: HostBuild | None = None) -> BuiltModel:
    """Build the model of a job on the meta device, and freeze parameters as `[training]` says. `host`: see
    `build_model`. `requires_grad` is False only for parameters that are never trained. Raises ConfigError as
    `build_model` does, and for globs of `[training]` that match no parameter."""
    built = build_model(config.model, config.training.seq_len, host, config.lora)
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in built.module.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    freezing = Freezing(config.training, bool(config.lora.targets))
    steps = {parameter: freezing.trained_from(own, parameter.requires_grad) for parameter, own in names.items()}
    freezing.check({name: steps[parameter] for parameter, own in names.items() for name in own})
    for parameter, step in steps.items():
        parameter.requires_grad_(step is not None)
    if (base_width := config.mup.base_width) is not None:
        built = replace(built, initializer=values_of_width(config.model, base_width, width_scales(config)))
    return built


def build_on_all_ranks(config: JobConfig, ranks: Ranks) -> BuiltModel:
    """Build a job's model on each rank; collective. A user's own factory may give the model initial values.

    One rank of each host calls the factory on the CPU and keeps the values. The other ranks call the factory on the
    meta device. If the factory fails on the meta device, or makes a different module there, the other ranks also call
    it on the CPU. They do so one after another, and drop the values.

    Raises ConfigError, on all ranks alike, as `build_model` does, and if a factory makes different modules on two
    ranks.
    """
    if config.model.is_of_package:
        return build_job_model(config)
    owner, free = ranks.first_on_host, _free_bytes()
    is_owner, compares_values = ranks.rank == owner, ranks.on_host < ranks.world_size
    built: BuiltModel

    def build(on_meta: bool) -> _Identity:
        nonlocal built
        built = build_job_model(config, HostBuild(config.training.seed, _free_bytes(), on_meta))
        if isinstance(built.initializer, HostValues) and not is_owner:
            built = replace(built, initializer=built.initializer.owned_by(owner))
        tensors, values = _described(built, is_owner and compares_values)
        digests = digest_of(tensors), attributes_digest(built.module)
        return _Identity(owner, digests, digest_of(values) if values else "")

    def build_first() -> _Identity:
        if is_owner:
            return build(on_meta=False)
        with suppress(ConfigError):
            return build(on_meta=True)
        return _Identity(owner)

    def keep() -> _Identity:
        return made[ranks.rank]

    made = on_all_ranks(build_first)
    queues: dict[int, list[int]] = {}  # for each host: its ranks that must call the factory on the CPU
    for rank, identity in enumerate(made):
        if identity.digests != made[identity.owner].digests:
            queues.setdefault(identity.owner, []).append(rank)
    if queues:
        message = (
            "initial values: on the meta device, %s fails or builds a different module than on the CPU; so ranks also "
            "call it on the CPU, one after another on each host (number of ranks: %d)"
        )
        _log.info(message, config.model.name, sum(map(len, queues.values())))
    for turn in zip_longest(*queues.values()):
        made = on_all_ranks(partial(build, on_meta=False) if ranks.rank in turn else keep)
    if any(identity.differs_from(made[0]) for identity in made):
        raise _different_modules(config, on_all_ranks(lambda: _described(built, is_owner)))
    values = built.initializer
    if not isinstance(values, HostValues) or not is_owner:
        return built
    message = "initial values: from %s with seed %d, %s on one rank of each host; free host memory: %s"
    if config.model.weights is None:
        _log.info(message, config.model.name, config.training.seed, *map(format_bytes, (values.num_bytes, free)))
    receivers = tuple(rank for rank, identity in enumerate(made) if identity.owner == owner != rank)
    return replace(built, initializer=replace(values, receivers=receivers))


def _free_bytes() -> int:
    return int(free_memory_gib() * GIB)


@dataclass(frozen=True)
class _Identity:
    """Digests of the module that a factory made on one rank."""

    owner: int
    """The rank of the same host that keeps the initial values."""

    digests: tuple[str, str] | None = None
    """Digests of the names, dtypes and shapes of the tensors, and of the other attributes; None without a module."""

    values: str = ""
    """Digest of the values; empty on ranks that do not compare them."""

    def differs_from(self, first: _Identity) -> bool:
        """Return True if this rank and rank 0 would train different models. Attributes that are not tensors are not
        compared. `first`: the digests of rank 0."""
        assert self.digests is not None and first.digests is not None
        return self.digests[0] != first.digests[0] or (self.values or first.values) != first.values


_Described = tuple[dict[str, str], dict[str, str]]
"""Two dicts by full name: a description of each tensor of a module, and a digest of its values."""


def _described(built: BuiltModel, with_values: bool) -> _Described:
    values = built.initializer.digests() if with_values and isinstance(built.initializer, HostValues) else {}
    return describe_tensors(built.module), values


def _different_modules(config: JobConfig, described: list[_Described]) -> ConfigError:
    """Return the error for the first rank whose tensors differ from those of rank 0."""
    first, first_values = described[0]
    rank, (other, values) = next(
        (rank, (tensors, values))
        for rank, (tensors, values) in enumerate(described)
        if list(tensors.items()) != list(first.items()) or (values or first_values) != first_values
    )
    differing = [name for name in {**first, **other} if first.get(name) != other.get(name)]
    only = "draw random numbers only from torch, random and numpy, whose seeds are equal on all ranks"
    if differing:
        name = differing[0]
        instead = f"{name} is {other.get(name, 'missing')} instead of {first.get(name, 'missing')}"
        reason = (
            f"the factory makes other tensors on rank {rank} than on rank 0 ({listed(differing)}): {instead}; {only}"
        )
    elif other and list(other) != list(first):
        reason = (
            f"the factory registers its tensors in another order on rank {rank} than on rank 0; iterate over lists, "
            "not over sets"
        )
    else:
        differing = [name for name in first_values if first_values[name] != values[name]]
        reason = (
            f"the factory makes other values on rank {rank} than on rank 0, in {listed(differing)}; fill every tensor "
            f"(torch.empty does not), and {only}"
        )
    return config_error(("model", "name"), reason, config.model.name)


def inspect_model(config: JobConfig, built: BuiltModel) -> Inventory:
    """Return the table of a model's modules. Raises ConfigError for a forward with the wrong arguments. Also raises
    ConfigError if the model does not support the job's packed documents, BatchNorm statistics, tensor parallelism or
    context parallelism."""
    check_signature(built.module, config.data.unit, config.model.loss is not None)
    for key, value in keys_of_packed_documents(config):
        check_documents(built.module, config.training.seq_len, key, value)
    check_batch_norms(built.module, config.batchnorm)
    check_divisions(built, config)
    output_layer = built.head[-1] if built.head else None
    if output_layer is None and config.loss.chunks > 1 and config.data.unit == "tokens":
        output_layer = find_output_layer(built.module, config.training.seq_len)
    inventory = take_inventory(built.module, built.blocks, built.head, built.embeddings, built.pipeline_order)
    return replace(inventory, output_layer=output_layer, blocks_origin=built.blocks_origin)


def plan_precision(config: JobConfig, built: BuiltModel) -> ModelPlan:
    """Return the plan of a model on the meta device: its FSDP2 units and their dtypes. Raises ConfigError as
    `inspect_model` and `plan_job` do."""
    return plan_job(config, inspect_model(config, built))


@dataclass(frozen=True)
class AssembledModel:
    """A model that is wrapped for this rank, with its plan and its mesh."""

    built: BuiltModel
    """The model, whose module was wrapped in place."""

    plan: ModelPlan
    """The plan of the whole model. The modules of this rank are wrapped as the plan says."""

    mesh: Mesh
    frozen: FrozenModel | None = None
    """The teacher or reference model of the loss (its second model), also wrapped; None if the loss has none."""

    @property
    def module(self) -> nn.Module:
        """The wrapped model; with pipeline parallelism, only this rank's stages."""
        return self.built.module


def assemble_model(
    config: JobConfig,
    built: BuiltModel,
    plan: ModelPlan,
    mesh: Mesh,
    num_classes: int,
    meta_inputs: Callable[[], Tensor],
) -> AssembledModel:
    """Wrap a model on the meta device in place, as `plan` says. Also build and wrap the loss's second model (see
    `AssembledModel.frozen`). Collective.

    Runs, trials, traces and dry runs all assemble their models here. Nothing is allocated: see `allocate_model`.

    `num_classes`: number of classes of the data; for tokens, the vocabulary size. `meta_inputs` returns the inputs of
    one microbatch on this rank, on the meta device.

    Raises ConfigError if the pipeline stages do not run one after another on the meta device, or if the second model
    cannot be built. The first forward of the model raises ConfigError if an embedding of token ids has too few rows.
    """
    module = shard_model(config, built, plan, mesh)
    pipeline = pipeline_of(module)
    if pipeline is not None:
        pipeline.boundaries.of(meta_inputs())
    if config.data.unit == "tokens":
        check_embeddings(module, num_classes)
    frozen = build_frozen_model(config)
    if frozen is not None:
        with errors_on(frozen.key):
            second_plan = plan_untrained(frozen.config, inspect_model(frozen.config, frozen.built))
            frozen.module.requires_grad_(False).eval()
            assemble_model(frozen.config, frozen.built, second_plan, mesh, num_classes, meta_inputs)
        frozen = replace(frozen, wrapping=second_plan)
    return AssembledModel(built, plan, mesh, frozen)


def shard_model(config: JobConfig, built: BuiltModel, plan: ModelPlan, mesh: Mesh) -> nn.Module:
    """Wrap a model on the meta device in place, as `plan` says, and return it. With pipeline parallelism, wrap only
    this rank's stages. Collective. Allocates nothing."""
    group = None
    if config.batchnorm.statistics == "synchronized":
        group = mesh.statistics_group(config.comm.init_timeout_seconds)

    def wrap(module: nn.Module, plan: ModelPlan) -> None:
        parallelize(module, plan, mesh, config, built.tensor_parallel, group)

    if plan.stages:
        divide(built.module, plan, mesh, config.parallelism, wrap)
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
    """Allocate this rank's shards of the model and of `model.frozen` on `device`. If `initial_values` is True, fill
    them with initial values. With `training.enable_cpu_offload`, the shards of parameters are in host memory.

    With context parallelism, also cut the model's buffers that extend along the sequence to this rank's part of the
    sequence. Ring attention is used until `stack` is closed. `attention_device`: device for which ring attention is
    chosen; by default `device`. Raises ConfigError if PyTorch has no ring attention for that device.
    """
    ranks = model.mesh.along(CONTEXT)
    stack.enter_context(ring_attention(ranks, config.parallelism, attention_device or device))
    for built in (model.built, *([] if model.frozen is None else [model.frozen.built])):
        allocate(built.module, device, config.training.enable_cpu_offload)
        if initial_values:
            initialize(built.module, built.initializer, config.training.seed, device)
    part = sequence_part(model.mesh, config.parallelism)
    divide_buffers(model.module, model.built.context_parallel, part, config.training.seq_len)


def build_model_optimizer(config: JobConfig, model: AssembledModel) -> Optimizer:
    """Return the optimizer of an allocated model."""
    replicas = build_replica_shards(config, model)
    head, seed = model.built.head, config.training.seed
    return build_optimizer(model.module, config.optimizer, head, seed, replicas, width_scales(config))


def build_replica_shards(config: JobConfig, model: AssembledModel) -> ReplicaShards | None:
    """Return the object that exchanges gradients and parameters between replicas; None if the optimizer is not sharded
    over replicas."""
    if model.mesh.layout.optimizer_replicas == 1:
        return None
    return ReplicaShards(model.module, model.plan, model.mesh, gradients_leave_early(config.training))
