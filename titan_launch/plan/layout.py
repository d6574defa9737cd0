"""How ranks and batches divide: decided once, read by everything else."""

from __future__ import annotations

from dataclasses import dataclass

from titan_launch.config.parallelism import ParallelismConfig
from titan_launch.config.training import TrainingConfig
from titan_launch.errors import config_error

_REPLICATE = ("parallelism", "data_parallel_replicate_degree")
_SHARD = ("parallelism", "data_parallel_shard_degree")


@dataclass(frozen=True)
class Layout:
    """The division of ranks and of the batch.

    The ranks form a grid (replicate, shard), the shard axis innermost, so that neighbours, which share a node, shard
    together. A step's `global_batch_size` sequences are `num_microbatches` rounds of `local_batch_size` on every rank.
    """

    replicate: int
    """Replicas of the model (HSDP when both degrees exceed 1)."""

    shard: int
    """Ranks that share one replica's parameters."""

    local_batch_size: int
    """Samples in a microbatch of one rank."""

    num_microbatches: int
    """Microbatches per optimizer step on every rank."""

    @property
    def data_parallel(self) -> int:
        """Ranks with data of their own."""
        return self.replicate * self.shard

    @property
    def world_size(self) -> int:
        """All ranks."""
        return self.data_parallel

    @property
    def samples_per_rank(self) -> int:
        """Samples per optimizer step on every rank."""
        return self.local_batch_size * self.num_microbatches

    @property
    def global_batch_size(self) -> int:
        """Samples per optimizer step, over all ranks."""
        return self.samples_per_rank * self.data_parallel


def plan_layout(parallelism: ParallelismConfig, training: TrainingConfig, world_size: int) -> Layout:
    """Divide `world_size` ranks and the global batch. Raises ConfigError where a division leaves a rest."""
    replicate, shard = _mesh_degrees(parallelism, world_size)
    ranks = replicate * shard
    per_round = training.local_batch_size * ranks
    batch = training.global_batch_size if training.global_batch_size is not None else per_round
    if batch % per_round:
        raise config_error(
            ("training", "global_batch_size"),
            f"not a multiple of {per_round} = training.local_batch_size ({training.local_batch_size}) x {ranks} "
            f"data-parallel {'rank' if ranks == 1 else 'ranks'}; nearest: {_nearest_multiples(batch, per_round)}",
            batch,
            also=(("training", "local_batch_size"), _REPLICATE, _SHARD),
        )
    return Layout(replicate, shard, training.local_batch_size, batch // per_round)


def _mesh_degrees(parallelism: ParallelismConfig, world_size: int) -> tuple[int, int]:
    replicate, shard = parallelism.data_parallel_replicate_degree, parallelism.data_parallel_shard_degree
    if shard == -1:
        if world_size % replicate:
            raise config_error(
                _REPLICATE,
                f"does not divide the number of ranks of this run, {world_size}; set a divisor of it",
                replicate,
                also=(_SHARD,),
            )
        return replicate, world_size // replicate
    if replicate * shard != world_size:
        raise config_error(
            _SHARD,
            f"times data_parallel_replicate_degree ({replicate}) makes {replicate * shard} ranks, but this run has "
            f"{world_size}; start {replicate * shard} processes, or set -1 to take the rest",
            shard,
            also=(_REPLICATE,),
        )
    return replicate, shard


def _nearest_multiples(batch: int, of: int) -> str:
    below, above = batch // of * of, (batch // of + 1) * of
    return f"{below} or {above}" if below else str(above)
