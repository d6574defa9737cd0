"""`[parallelism]`, `[activation_checkpoint]` and `[compile]`: transformations of the model."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from titan_launch.config.sections.base import Array, Section

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


class ActivationCheckpointConfig(Section):
    """Activations of the model's blocks that are computed again in backward instead of kept: less memory for more time.
    Losses, gradients and running statistics stay the same, bit for bit, where nothing is compiled."""

    mode: Literal["none", "full", "selective", "memory_budget", "auto"] = "none"
    """`none`: everything that backward needs is kept. `full`: of each block only its inputs are kept; one forward more
    per step. `selective`: as `selective_ac_option` says. `memory_budget`: the compiler chooses what is kept, within
    `memory_budget`. `auto`: of `none`, `selective` (`"op"`) and `full`, the one with the shortest predicted step among
    those whose predicted memory fits; see `gradient_accumulation.mode`."""

    selective_ac_option: Literal["op"] | Annotated[int, Field(ge=1)] = "op"
    """For `mode = "selective"`. `"op"`: of each block the results of costly operations (attention, convolutions, every
    second matrix product) are kept too, and the cheap ones are computed again. A number k: every k-th block is computed
    again, the others are kept."""

    modules: Array[str] = ()
    """Globs of the modules that are computed again in place of the blocks, such as `["layers.*.feed_forward"]`; of
    modules within others that match, the outer ones. Default: the blocks."""

    memory_budget: Annotated[float, Field(gt=0, le=1)] = 0.5
    """For `mode = "memory_budget"`: the share that may be kept of what a compiled graph would keep for backward: 1 is
    all of it, near 0 nothing but the graph's inputs. The cheapest operations that bring it there are computed again."""


Component = Literal["model", "loss"]


class CompileConfig(Section):
    """The model's blocks, and the loss, compiled by torch.compile: fewer and larger kernels. The first step takes
    longer, and sums may round otherwise."""

    enable: bool = False
    """Compile. Each block becomes one graph, that equal blocks share; where units of precision rules lie inside of it,
    whose hooks cannot be in a graph, the largest modules around these do. What would break a graph is an error."""

    backend: Literal["inductor", "aot_eager", "eager"] = "inductor"
    """What makes code of a graph. `inductor`: Triton kernels on GPUs, C++ on CPUs (needs a compiler). For finding
    faults: `aot_eager` runs the graph's operations one by one, `eager` those of the model as they were traced."""

    components: Array[Component] = ("model",)
    """What is compiled: `model` (its blocks), `loss`. The compiled loss makes no fp32 copies of the logits, as
    `training.loss_chunks` does without it."""

    cache_folder: str | None = None
    """Where inductor keeps the kernels that it makes, and looks for them: a folder that outlasts the job, on storage
    that all hosts share, saves later starts most of the compilation. Unset: the compiler's own, which is in the host's
    temporary files unless `TORCHINDUCTOR_CACHE_DIR` says otherwise."""
