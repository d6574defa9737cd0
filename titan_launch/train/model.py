"""A run's model, from the meta device to this rank's shards of its initial values."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping

from torch import nn

from titan_launch.config.job import JobConfig
from titan_launch.core.errors import ConfigError, config_error, listed
from titan_launch.data.context_shard import SequencePart
from titan_launch.data.sources import SampleSource
from titan_launch.distributed.collectives import on_all_ranks
from titan_launch.distributed.mesh import Mesh
from titan_launch.distributed.process_group import Ranks
from titan_launch.models.build import BuiltModel, build_model
from titan_launch.models.factory import HostBuild, HostValues
from titan_launch.models.init import allocate, initialize
from titan_launch.parallel.apply import parallelize
from titan_launch.parallel.context_parallel import divide_buffers
from titan_launch.parallel.pipeline import divide, pipeline_of
from titan_launch.parallel.tensor_parallel import token_shards
from titan_launch.plan.hardware import GIB, free_memory_gib
from titan_launch.plan.layout import Layout
from titan_launch.plan.types import ModelPlan

_log = logging.getLogger(__name__)


def build_on_all_ranks(config: JobConfig, ranks: Ranks) -> BuiltModel:
    """Build a job's model on each rank, with the initial values of a factory of the user's own; collective.

    Raises ConfigError, on all ranks alike, as `build_model` does, and where a factory gives ranks different values.
    """
    if ":" not in config.model.name:
        return build_model(config.model, config.training.seq_len)
    free_bytes = on_all_ranks(lambda: int(free_memory_gib() * GIB))[ranks.rank]  # before any rank takes its part
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
    """`22.4 GiB`, and below 1 GiB `22.4 MiB`."""
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB else f"{num_bytes / GIB * 1024:.1f} MiB"


def _host_digests(built: BuiltModel) -> dict[str, str]:
    """Digests of the values that a factory made, by full name; nothing for a model that is filled later."""
    return built.initializer.digests() if isinstance(built.initializer, HostValues) else {}


def _digest(digests: Mapping[str, str]) -> str:
    return hashlib.blake2b(json.dumps(digests).encode(), digest_size=16).hexdigest()


def _different_values(config: JobConfig, digests: list[dict[str, str]]) -> ConfigError:
    """The error for the first rank whose tensors are not those of rank 0."""
    first = list(digests[0].items())
    rank, other = next((rank, other) for rank, other in enumerate(digests) if list(other.items()) != first)
    differing = [name for name in {**digests[0], **other} if digests[0].get(name) != other.get(name)]
    if not differing:
        reason = (
            f"registers its tensors in another order on rank {rank} than on rank 0; iterate over lists, not over sets"
        )
        return config_error(("model", "name"), reason, config.model.name)
    reason = (
        f"makes other values on rank {rank} than on rank 0, in {listed(differing)}; fill every tensor (torch.empty "
        "does not), and use no more than the arguments and the generators of torch, random and numpy, which are seeded "
        "alike"
    )
    return config_error(("model", "name"), reason, config.model.name)


def shard_model(config: JobConfig, built: BuiltModel, plan: ModelPlan, mesh: Mesh) -> nn.Module:
    """Wrap a model on the meta device as planned, of a pipeline this rank's stages; nothing is allocated."""
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
            recomputation=config.activation_checkpoint,
            compilation=config.compile,
            float8=config.float8,
            offloads=config.training.enable_cpu_offload,
        )

    if plan.stages:
        divide(built.module, plan, mesh, token_shards(config.parallelism), wrap)
    else:
        wrap(built.module, plan)
    return built.module


def check_stages(model: nn.Module, source: SampleSource, layout: Layout) -> None:
    """Raise ConfigError for a model whose pipeline stages do not run one after another; nothing is allocated."""
    pipeline = pipeline_of(model)
    if pipeline is not None:
        sample, _ = source[0]
        pipeline.boundaries.of(sample.to("meta").expand(layout.local_batch_size, *sample.shape))


def fill_model(config: JobConfig, built: BuiltModel, model: nn.Module, part: SequencePart | None, ranks: Ranks) -> None:
    """Allocate this rank's shards and give them their initial values. `part`: the tokens that the rank has."""
    allocate(model, ranks.device, config.training.enable_cpu_offload)
    initialize(model, built.initializer, config.training.seed, ranks.device)
    if part is not None:
        divide_buffers(model, built.context_parallel or {}, part, config.training.seq_len)
