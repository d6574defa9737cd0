"""`[parallelism]`, `[activation_checkpoint]` and `[compile]`: transformations of the model."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from titan_launch.config.sections.base import Array, Section

Degree = Annotated[int, Field(ge=1)]


def _positive_or_rest(degree: int) -> int:
    if degree == -1 or degree >= 1:
        return degree
    raise ValueError("must be at least 1, or -1 for all remaining ranks")


class ParallelismConfig(Section):
    """Degrees of data, tensor, context and pipeline parallelism. Their product is the number of ranks."""

    data_parallel_replicate_degree: Degree = 1
    """Number of replicas of the model. If it is above 1, parameters are sharded only within a replica (HSDP)."""

    data_parallel_shard_degree: Annotated[int, AfterValidator(_positive_or_rest)] = -1
    """Number of ranks that the parameters of a replica are sharded over (FSDP2). -1: all remaining ranks."""

    fsdp_reshard_after_forward: Literal["default", "always", "never"] = "default"
    """Resharding of parameters after forward, and a second all-gather for backward. `default`: reshard all blocks but
    the last; backward needs the last block and the head first. With one shard nothing is resharded: an all-gather would
    only copy. `always`: also reshard the last block and the head. `never`: keep all parameters unsharded until
    backward."""

    tensor_parallel_degree: Degree = 1
    """Number of ranks that share the matrices of every layer (tensor parallelism). Each rank computes a part of the
    attention heads and of the feed-forward width, for the same samples. These ranks have consecutive numbers, and
    should be on one node."""

    sequence_parallel: bool = True
    """With tensor parallelism: each rank holds only a part of the sequence between the divided matrices (norms,
    residual stream). The activations there shrink by the degree. `false`: each rank holds the whole sequence."""

    loss_parallel: bool = True
    """With tensor parallelism: the logits stay sharded by class, and the loss is computed on the shards. `false`: each
    rank gathers the logits."""

    context_parallel_degree: Degree = 1
    """Number of ranks that share every sequence (context parallelism, ring attention). Each rank holds a part of its
    tokens. Parameters are also sharded over these ranks."""

    context_parallel_load_balance: bool = True
    """With context parallelism: each rank gets one part from the front and one from the back of the sequence. Causal
    attention is then equal work on all ranks."""

    context_parallel_rotate_method: Literal["allgather", "alltoall"] = "allgather"
    """With context parallelism: exchange of keys and values. `allgather`: all at once, before attention. `alltoall`:
    those of one rank at a time, while attention over those of another rank is computed; less memory."""

    pipeline_parallel_degree: Degree = 1
    """Number of ranks that share the layers (pipeline parallelism). Each rank holds some of the layers, and
    microbatches pass from rank to rank."""

    pipeline_parallel_schedule: Literal[
        "1F1B", "GPipe", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble"
    ] = "1F1B"
    """With pipeline parallelism: the order of forwards and backwards of the microbatches on each rank
    (torch.distributed.pipelining)."""

    pipeline_parallel_stages_per_rank: Degree | None = None
    """With pipeline parallelism: number of pipeline stages per rank. Default: 1 for `1F1B` and `GPipe`, which support
    only 1; 2 for the other schedules."""

    pipeline_parallel_split_points: Array[str] = ()
    """With pipeline parallelism: the first module of each stage from the second stage on, in order, such as
    `["layers.3", "layers.6"]`. Default: the stages are divided between layers, so that their numbers of matrix elements
    are as equal as possible."""


class ActivationCheckpointConfig(Section):
    """Activation checkpointing: backward computes activations of the blocks a second time, so that forward need not
    save them. It takes less memory and more time. Without compilation, losses, gradients and running statistics stay
    the same, bit for bit."""

    mode: Literal["none", "full", "selective", "memory_budget", "auto"] = "none"
    """The activations that are saved for backward. `none`: all of them; no activation checkpointing. `full`: only the
    inputs of each block; costs one more forward per step. `selective`: see `selective_ac_option`. `memory_budget`: the
    compiler chooses what it saves, within `memory_budget`. `auto`: the mode with the shortest predicted step whose
    predicted memory fits, out of `none`, `selective` (`"op"`) and `full`; see `gradient_accumulation.mode`."""

    selective_ac_option: Literal["op"] | Annotated[int, Field(ge=1)] = "op"
    """For `mode = "selective"`. `"op"`: each block saves its inputs and the results of costly operations (attention,
    convolutions, every second matrix product); backward repeats the cheap operations. A number k: activation
    checkpointing of every k-th block; all other blocks save everything."""

    modules: Array[str] = ()
    """Globs of the modules with activation checkpointing, such as `["layers.*.feed_forward"]`. If a matching module is
    inside another one, only the outer one counts. Default: the blocks."""

    memory_budget: Annotated[float, Field(gt=0, le=1)] = 0.5
    """For `mode = "memory_budget"`: fraction of the activations of a compiled graph that the graph may save for
    backward. 1 saves all; near 0, only the graph's inputs are saved. Backward repeats the cheapest operations that meet
    the budget."""


Component = Literal["model", "loss"]


class CompileConfig(Section):
    """Compilation of the model's blocks and of the loss by torch.compile, into fewer and larger kernels. The first step
    takes longer. Sums may be rounded differently."""

    enable: bool = False
    """Compile the components in `components`. Each block is one graph; equal blocks share it. If a block contains FSDP2
    units of precision rules, whose hooks cannot be part of a graph, the largest modules without such units are compiled
    instead. A graph break is an error."""

    backend: Literal["inductor", "aot_eager", "eager"] = "inductor"
    """Compiler backend. `inductor`: Triton kernels on GPUs, C++ on CPUs (needs a C++ compiler). The other two are
    for debugging: `aot_eager` runs the operations of the graph one by one, `eager` runs the traced operations of the
    model."""

    components: Array[Component] = ("model",)
    """Components to compile: `model` (its blocks), `loss`. The compiled loss makes no fp32 copies of the logits.
    With `loss.chunks`, the loss of each chunk is compiled; the products of the output layer are not."""

    cache_folder: str | None = None
    """Folder in which inductor stores compiled kernels and looks for them. If the folder outlasts the job and all hosts
    share it, later starts skip most of the compilation. Unset: the folder of `TORCHINDUCTOR_CACHE_DIR`, or else a
    folder for temporary files of the host."""
