"""`[parallelism]`: how the ranks are divided."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from titan_launch.config.base import Array, Section

Degree = Annotated[int, Field(ge=1)]


def _positive_or_rest(degree: int) -> int:
    if degree == -1 or degree >= 1:
        return degree
    raise ValueError("must be at least 1, or -1 for the rest of the ranks")


class ParallelismConfig(Section):
    """How the ranks are divided. The degrees multiply to the number of ranks."""

    data_parallel_replicate_degree: Degree = 1
    """Replicas of the model. With more than one, parameters are sharded within a replica only (HSDP)."""

    data_parallel_shard_degree: Annotated[int, AfterValidator(_positive_or_rest)] = -1
    """Ranks that one replica's parameters are sharded over (FSDP2). -1: the rest of the ranks."""

    fsdp_reshard_after_forward: Literal["default", "always", "never"] = "default"
    """Whether gathered parameters are freed after forward and gathered again for backward. `default`: those of all
    blocks but the last, which backward needs at once, as it does the head's; none where every rank has them whole (one
    shard), since nothing is gathered there, and what is freed is copied once more. `always`: those of the last block
    and of the head too. `never`: none."""

    tensor_parallel_degree: Degree = 1
    """Ranks that share the matrices of every layer (tensor parallelism): each computes with a part of the heads and of
    the feed-forward's width, on the same samples. Neighbouring ranks, which should be on one node."""

    sequence_parallel: bool = True
    """With tensor parallelism: between its matrices (norms, residual stream) each rank holds a part of the sequence
    only, and what these store shrinks with the degree. `false`: every rank holds it whole."""

    loss_parallel: bool = True
    """With tensor parallelism: the logits stay divided by class, and the loss is computed on the parts. `false`: every
    rank gathers them."""

    context_parallel_degree: Degree = 1
    """Ranks that share every sequence (context parallelism, ring attention): each holds a part of its tokens.
    Parameters are sharded over these ranks too."""

    context_parallel_load_balance: bool = True
    """With context parallelism: give each rank one part from the front and one from the back of the sequence, so that
    causal attention is as much work on each."""

    context_parallel_rotate_method: Literal["allgather", "alltoall"] = "allgather"
    """With context parallelism: how keys and values travel. `allgather`: at once, before attention. `alltoall`: one
    rank's at a time, while attention over another's is computed; less memory."""

    pipeline_parallel_degree: Degree = 1
    """Ranks that share the layers (pipeline parallelism): each holds some of them, and microbatches pass through."""

    pipeline_parallel_schedule: Literal[
        "1F1B", "GPipe", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble"
    ] = "1F1B"
    """With pipeline parallelism: in which order a rank does forwards and backwards of the step's microbatches
    (torch.distributed.pipelining)."""

    pipeline_parallel_stages_per_rank: Degree | None = None
    """With pipeline parallelism: stages that each rank holds. Default: 1 for `1F1B` and `GPipe`, which take no other
    number, 2 for the others."""

    pipeline_parallel_split_points: Array[str] = ()
    """With pipeline parallelism: the modules that a stage begins with, from the second stage on, in order, such as
    `["layers.3", "layers.6"]`. Default: stages with as equal a number of matrix elements as whole layers allow."""
