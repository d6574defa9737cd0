"""The layout of a run: the grid of ranks, and the division of the batch over the ranks. This module does not import
torch."""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm, prod

from titan_launch.config.axes import CONTEXT, EXPERT, GRID, MODEL_AXES, PIPELINE, SHARD, Axis
from titan_launch.config.job import JobConfig
from titan_launch.config.rules.parallelism import misfit_of_expert_ranks, misfit_of_microbatches
from titan_launch.config.sections.parallelism import ParallelismConfig
from titan_launch.config.sections.training import TrainingConfig
from titan_launch.core.errors import KeyPath, config_error, nearest_multiples
from titan_launch.core.terminal import counted
from titan_launch.plan.types import Unit

_DEGREES: tuple[KeyPath, ...] = tuple(axis.key for axis in GRID)


@dataclass(frozen=True)
class Layout:
    """The grid of ranks, and the division of the batch over the ranks.

    The axes of the grid are (pipeline, replicate, shard, context, tensor). The tensor axis is innermost, because tensor
    parallelism communicates most, and consecutive ranks are on the same node. A step has `global_batch_size` samples:
    `num_microbatches` microbatches of `local_batch_size` samples on every data-parallel rank. Ranks that differ only
    along the pipeline, context or tensor axis work on the same samples.
    """

    replicate: int
    """Number of replicas of the model. If it exceeds 1, the run uses HSDP."""

    shard: int
    """Number of data-parallel ranks over which the parameters of one replica are sharded."""

    local_batch_size: int
    """Samples in a microbatch of one data-parallel rank."""

    num_microbatches: int
    """Microbatches per optimizer step on every rank."""

    context: int = 1
    """Number of ranks over which every sequence is divided. FSDP2 shards parameters over these ranks too."""

    tensor: int = 1
    """Number of ranks over which every matrix is divided."""

    pipeline: int = 1
    """Number of ranks over which the layers are divided."""

    expert: int = 1
    """Number of ranks over which the experts of every layer are divided. Expert parallelism has no axis of its own. It
    divides the ranks of the shard and context axes: shard x context = expert shards x expert, the expert ranks
    innermost."""

    shards_optimizer: bool = False
    """True if the optimizer is sharded over the replicas (`parallelism.shard_optimizer_over_replicas`)."""

    def degree(self, axis: Axis) -> int:
        """Return the number of ranks along an axis."""
        degree: int = getattr(self, axis.name)
        return degree

    def stride(self, axis: Axis) -> int:
        """Return the difference between the rank numbers of two neighbours along an axis."""
        inner = GRID[GRID.index(axis if axis.is_factor else CONTEXT) + 1 :]
        return prod(map(self.degree, inner))

    @property
    def fsdp_replicas(self) -> int:
        """Number of replicas between which FSDP2 all-reduces gradients: 1 if the optimizer is sharded over the
        replicas, because FSDP2 then gets only the ranks of one replica."""
        return 1 if self.shards_optimizer else self.replicate

    @property
    def optimizer_replicas(self) -> int:
        """Number of replicas over which the optimizer is sharded; 1 if it is sharded only within replicas."""
        return self.replicate if self.shards_optimizer else 1

    @property
    def optimizer_shards(self) -> int:
        """Number of ranks over which the optimizer state of a parameter is sharded."""
        return self.parameter_shards * self.optimizer_replicas

    @property
    def data_parallel(self) -> int:
        """Number of data-parallel ranks, which read different samples."""
        return self.replicate * self.shard

    @property
    def parameter_shards(self) -> int:
        """Number of ranks over which FSDP2 shards a parameter. (For divided experts, see `shards_of`.)"""
        return prod(self.degree(axis) for axis in GRID if axis.is_within_shards)

    def shards_of(self, unit: Unit) -> int:
        """Return the number of ranks over which FSDP2 shards the parameters of a unit. A unit of experts that expert
        parallelism has divided has fewer shards than other units."""
        return self.parameter_shards // unit.expert_parallel

    def is_ignored(self, unit: Unit, offloads: bool) -> bool:
        """Return True if FSDP2 ignores the parameters of a unit. Modules then compute with the stored parameters.
        `offloads`: True with CPU offload.

        With one shard, FSDP2 ignores the frozen parameters that are stored in their compute dtype, because FSDP2 would
        hold an unsharded copy beside them. With several shards or CPU offload, FSDP2 ignores no parameters.
        """
        is_stored_as_computed = unit.storage_dtype == unit.compute_dtype
        return self.parameter_shards == 1 and not unit.is_trained and is_stored_as_computed and not offloads

    @property
    def model_parallel(self) -> int:
        """Number of ranks that work on the same samples."""
        return prod(self.degree(axis) for axis in MODEL_AXES if axis.is_factor)

    @property
    def token_copies(self) -> int:
        """Number of ranks of a pipeline stage that work on the same tokens, and so compute the same loss."""
        return self.tensor

    @property
    def token_ranks(self) -> int:
        """Number of ranks of a pipeline stage with different tokens."""
        return self.ranks_per_stage // self.token_copies

    @property
    def world_size(self) -> int:
        """Number of all ranks."""
        return self.data_parallel * self.model_parallel

    @property
    def ranks_per_stage(self) -> int:
        """Number of ranks with the same pipeline index. Their rank numbers are consecutive."""
        return self.stride(PIPELINE)

    @property
    def samples_per_rank(self) -> int:
        """Samples per optimizer step on every data-parallel rank."""
        return self.local_batch_size * self.num_microbatches

    def tokens_on_rank(self, seq_len: int) -> int:
        """Return the number of tokens of a sequence of `seq_len` tokens that a rank has."""
        return seq_len // self.context

    @property
    def global_batch_size(self) -> int:
        """Samples per optimizer step, over all ranks."""
        return self.samples_per_rank * self.data_parallel

    def data_rank(self, rank: int) -> int:
        """Return the data-parallel index of a rank. Ranks with the same index read the same samples."""
        return rank // self.stride(SHARD) % self.data_parallel

    def pipeline_rank(self, rank: int) -> int:
        """Return the index of a rank along the pipeline axis."""
        return rank // self.ranks_per_stage


def plan_layout(parallelism: ParallelismConfig, training: TrainingConfig, world_size: int) -> Layout:
    """Return the layout of `world_size` ranks. If `training.local_batch_size` is still `auto`, a microbatch has one
    sample (`plan.auto_mode` chooses the size later). Without `training.global_batch_size`, a step has one microbatch.

    Raises ConfigError if the degrees do not match `world_size` or each other, or if the global batch cannot be divided
    evenly. Also raises ConfigError if the pipeline schedule does not support the number of microbatches.
    """
    shard = _shard_degree(parallelism, world_size)
    ranks = parallelism.data_parallel_replicate_degree * shard
    local_batch_size = 1 if training.local_batch_size == "auto" else training.local_batch_size
    per_round = local_batch_size * ranks
    batch = training.global_batch_size if training.global_batch_size is not None else per_round
    if batch % per_round:
        size = "1 sample" if training.local_batch_size == "auto" else f"training.local_batch_size ({local_batch_size})"
        raise config_error(
            ("training", "global_batch_size"),
            f"not a multiple of {per_round} = {size} x {counted(ranks, 'data-parallel rank')}; nearest: "
            f"{nearest_multiples(batch, per_round)}",
            batch,
            also=(("training", "local_batch_size"), *_DEGREES),
        )
    expert = parallelism.degree(EXPERT)
    misfit = misfit_of_expert_ranks(expert, shard, parallelism.degree(CONTEXT))
    if misfit is not None:
        raise config_error(EXPERT.key, misfit, expert, also=_DEGREES)
    misfit = misfit_of_microbatches(parallelism, batch // per_round, per_round)
    if misfit is not None:
        raise config_error(("training", "global_batch_size"), misfit, batch, also=_DEGREES)
    return Layout(
        replicate=parallelism.data_parallel_replicate_degree,
        shard=shard,
        local_batch_size=local_batch_size,
        num_microbatches=batch // per_round,
        **{axis.name: parallelism.degree(axis) for axis in MODEL_AXES},
        shards_optimizer=parallelism.shard_optimizer_over_replicas,
    )


def smallest_world_size(parallelism: ParallelismConfig) -> int:
    """Return the smallest number of ranks on which the configured degrees are possible."""
    given = parallelism.data_parallel_shard_degree
    shard = smallest_shard_degree(parallelism) if given == -1 else given
    return shard * prod(parallelism.degree(axis) for axis in GRID if axis is not SHARD)


def smallest_shard_degree(parallelism: ParallelismConfig) -> int:
    """Return the smallest `data_parallel_shard_degree` for which expert parallelism divides the shard x context ranks
    evenly."""
    context = parallelism.degree(CONTEXT)
    return lcm(context, parallelism.degree(EXPERT)) // context


def _shard_degree(parallelism: ParallelismConfig, world_size: int) -> int:
    """Return the number of data-parallel ranks of one replica: the configured degree, or for -1 all remaining ranks.
    Raises ConfigError if the degrees do not match `world_size`."""
    others = {axis: parallelism.degree(axis) for axis in GRID if axis is not SHARD}
    product, shard = prod(others.values()), parallelism.data_parallel_shard_degree
    if shard != -1 and shard * product == world_size:
        return shard
    if shard != -1:
        above_one = " and ".join(f"{axis.key[1]} ({degree})" for axis, degree in others.items() if degree > 1)
        otherwise = "" if world_size % product else ", or set -1 to use all remaining ranks"
        raise config_error(
            SHARD.key,
            f"with {above_one or 'all other degrees at 1'} makes {counted(shard * product, 'rank')}, but this run "
            f"has {world_size}; start {counted(shard * product, 'rank')}{otherwise}",
            shard,
            also=tuple(axis.key for axis in others),
        )
    if world_size % product:
        largest = max(others, key=lambda axis: others[axis])
        raise config_error(
            largest.key,
            f"{_does_not_divide(others)} the number of ranks of this run, {world_size}; choose degrees whose "
            "product divides this number",
            others[largest],
            also=_DEGREES,
        )
    return world_size // product


def _does_not_divide(degrees: dict[Axis, int]) -> str:
    """Return the first words of an error: the product of the degrees does not divide the number of ranks."""
    above_one = [degree for degree in degrees.values() if degree > 1]
    if len(above_one) == 1:
        return "does not divide"
    return f"with the other degrees makes {' x '.join(map(str, above_one))} = {prod(above_one)}, which does not divide"


def with_global_batch_size(config: JobConfig, layout: Layout) -> JobConfig:
    """Return the job with `training.global_batch_size` set to the batch size of `layout`. If the key stayed unset, a
    resume with another number of ranks would change the batch size, and so the experiment."""
    training = config.training.model_copy(update={"global_batch_size": layout.global_batch_size})
    return config.model_copy(update={"training": training})
