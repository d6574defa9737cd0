"""A run's model, from the meta device to this rank's shards of its initial values."""

from __future__ import annotations

from torch import nn

from titan_launch.config.job import JobConfig
from titan_launch.data.sequence_part import SequencePart
from titan_launch.data.sources import SampleSource
from titan_launch.models.build import BuiltModel
from titan_launch.models.init import allocate, initialize
from titan_launch.parallel.apply import parallelize
from titan_launch.parallel.context_parallel import divide_buffers
from titan_launch.parallel.distributed import Ranks
from titan_launch.parallel.mesh import Mesh
from titan_launch.parallel.pipeline import divide, pipeline_of
from titan_launch.parallel.tensor_parallel import token_shards
from titan_launch.plan.layout import Layout
from titan_launch.plan.types import ModelPlan


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
