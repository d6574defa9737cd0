"""`[parallelism]`, `[activation_checkpoint]` and `[compile]`: transformations of the model."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from titan_launch.config.axes import Axis
from titan_launch.config.sections.section import Array, Section

Degree = Annotated[int, Field(ge=1)]


def _positive_or_rest(degree: int) -> int:
    if degree == -1 or degree >= 1:
        return degree
    raise ValueError("must be at least 1, or -1 for all remaining ranks")


ONE_STAGE_SCHEDULES = ("1F1B", "GPipe")
"""Schedules that support exactly one stage per rank."""

SPLIT_BACKWARD_SCHEDULES = ("InterleavedZeroBubble", "ZBVZeroBubble")
"""Schedules that split backward: a rank first computes the gradients of activations. The rank computes the gradients of
weights later, while it would otherwise wait."""


class ParallelismConfig(Section):
    """Degrees of data, tensor, context and pipeline parallelism. Their product is the number of ranks. The degree of
    expert parallelism is not a factor of the product."""

    data_parallel_replicate_degree: Degree = 1
    """Number of replicas of the model. With more than one replica, parameters are sharded only within a replica
    (HSDP)."""

    shard_optimizer_over_replicas: bool = False
    """Shard the optimizer over the replicas, too: its state, its update and the moving average of the weights. Once per
    step, the gradients are reduce-scattered over the replicas, each replica updates its part of the parameters, and the
    replicas all-gather the result. The traffic equals the traffic of the all-reduce between replicas with
    `gradient_accumulation.mode = "deferred_all_reduce"`. With `data_parallel_shard_degree = 1` this is ZeRO-1."""

    data_parallel_shard_degree: Annotated[int, AfterValidator(_positive_or_rest)] = -1
    """Number of ranks that the parameters of a replica are sharded over (FSDP2). -1: all remaining ranks."""

    fsdp_reshard_after_forward: Literal["default", "always", "never"] = "default"
    """Reshard parameters after forward, and all-gather them again for backward. `default`: reshard all blocks but the
    last, because backward needs the last block and the head first. If one rank holds all shards, `default` reshards
    nothing, because an all-gather would only copy. (Exceptions: jobs with CPU offload, or with a `mode = "auto"`.)
    `always`: also reshard the last block and the head. `never`: keep all parameters unsharded until backward."""

    tensor_parallel_degree: Degree = 1
    """Number of ranks over which the matrices of every layer are sharded (tensor parallelism). Each rank computes a
    part of the attention heads and of the feed-forward width, for the same samples. These ranks have consecutive
    numbers, and should be on one node."""

    sequence_parallel: bool = True
    """With tensor parallelism: shard the sequence in norms and in the residual stream, between the sharded matrices.
    Each rank's activations there are smaller by the factor `tensor_parallel_degree`. `false`: each rank holds the whole
    sequence."""

    loss_parallel: bool = True
    """With tensor parallelism: keep the logits sharded by class, and compute the loss on the shards. `false`: each rank
    gathers the logits."""

    context_parallel_degree: Degree = 1
    """Number of ranks that share every sequence (context parallelism, ring attention). Each rank holds a part of the
    tokens of every sequence. Parameters are also sharded over these ranks."""

    context_parallel_load_balance: bool = True
    """With context parallelism: give each rank one part from the front of the sequence, and one part from the back.
    Causal attention then takes equally long on all ranks."""

    context_parallel_rotate_method: Literal["allgather", "alltoall"] = "allgather"
    """With context parallelism: collective that exchanges keys and values. `allgather`: one all-gather before
    attention. `alltoall`: several all-to-alls pass the keys and values from rank to rank. During each all-to-all, a
    rank computes the attention over the keys and values that it already has. `alltoall` takes less memory."""

    expert_parallel_degree: Degree = 1
    """Number of ranks that share the experts of every layer (expert parallelism). Each rank holds whole experts, and
    receives the tokens that choose these experts. The degree must divide `data_parallel_shard_degree` x
    `context_parallel_degree`. FSDP2 shards each expert over (product / degree) ranks. Example: with a product of 8 and
    a degree of 4, ranks 0 to 3 share the experts, ranks 4 to 7 do the same, and FSDP2 shards each expert over 2
    ranks."""

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
    `["layers.3", "layers.6"]`. Default: the model is divided between layers, so that the numbers of matrix elements of
    the stages are as equal as possible."""

    def degree(self, axis: Axis) -> int:
        """Return the degree of an axis; -1 for `data_parallel_shard_degree = -1`."""
        degree: int = getattr(self, axis.key[1])
        return degree

    @property
    def splits_backward(self) -> bool:
        """True if the job has a pipeline, and its schedule splits backward."""
        return self.pipeline_parallel_degree > 1 and self.pipeline_parallel_schedule in SPLIT_BACKWARD_SCHEDULES

    @property
    def stages_per_rank(self) -> int:
        """Number of pipeline stages per rank."""
        if self.pipeline_parallel_stages_per_rank is not None:
            return self.pipeline_parallel_stages_per_rank
        return 1 if self.pipeline_parallel_schedule in ONE_STAGE_SCHEDULES else 2

    @property
    def num_stages(self) -> int:
        """Number of pipeline stages of the whole model."""
        return self.pipeline_parallel_degree * self.stages_per_rank


class ActivationCheckpointConfig(Section):
    """Activation checkpointing: backward computes activations of the blocks a second time, so that forward need not
    save them. A step then takes less memory and more time. Without compilation, losses, gradients and running
    statistics stay the same, bit for bit."""

    mode: Literal["none", "full", "selective", "memory_budget", "auto"] = "none"
    """The activations that are saved for backward. `none`: all activations; no activation checkpointing. `full`: only
    the inputs of each block; costs one more forward of the blocks per microbatch. `selective`: see
    `selective_ac_option`. `memory_budget`: the compiler chooses the activations, within the key `memory_budget`.
    `auto`: of the modes `none`, `selective` (with `"op"`) and `full` whose predicted memory fits, the fastest mode; see
    `gradient_accumulation.mode`."""

    selective_ac_option: Literal["op"] | Annotated[int, Field(ge=1)] = "op"
    """For `mode = "selective"`. `"op"`: each block saves its inputs and the results of costly operations (attention,
    convolutions, collectives, grouped products of experts, every second matrix product); backward repeats the cheap
    operations. A number k: activation checkpointing of every k-th block (or every k-th of `modules`); all other blocks
    save everything."""

    modules: Array[str] = ()
    """Globs of the modules with activation checkpointing, such as `["layers.*.feed_forward"]`. If one matching module
    contains another, only the outer module counts. Default: the blocks."""

    memory_budget: Annotated[float, Field(gt=0, le=1)] = 0.5
    """For `mode = "memory_budget"`: fraction of its activations that each compiled graph may save for backward. With 1,
    all activations are saved. Near 0, only the inputs of the graph are saved. The compiler chooses the cheapest
    operations to repeat in backward."""

    offload: bool = False
    """Activation offloading: copy the tensors that each block saves for backward to pinned host memory, and copy them
    back before backward uses them. The GPU computes during the copies. This works with every `mode`. With `full`, the
    tensors are the inputs of the blocks; with `none`, all activations of the blocks. Losses and gradients stay the
    same, bit for bit."""

    @property
    def label(self) -> str:
        """The mode in words: `selective (1 of 2 blocks)`, `full (listed modules)`."""
        details = []
        if self.mode == "selective":
            option = self.selective_ac_option
            details.append("per operation" if option == "op" else f"1 of {option} blocks")
        if self.mode == "memory_budget":
            details.append(f"{self.memory_budget:g}")
        if self.modules:
            details.append("listed modules")
        if self.offload:
            details.append("offloaded")
        return f"{self.mode} ({', '.join(details)})" if details else self.mode


Component = Literal["model", "loss"]


class CompileConfig(Section):
    """Compilation of the model's blocks and of the loss by torch.compile, into fewer and larger kernels. The first step
    takes longer. Sums may be rounded differently."""

    enable: bool = False
    """Compile the components in `components`. Each block is one graph; equal blocks share one compiled graph. Two kinds
    of modules inside of a block cannot be part of a graph: experts, and FSDP2 units (which a precision rule can make).
    In a block with such a module, the largest submodules that contain no such module are compiled. A graph break is an
    error."""

    backend: Literal["inductor", "aot_eager", "eager"] = "inductor"
    """Compiler backend. `inductor`: Triton kernels on GPUs, C++ on CPUs (needs a C++ compiler). The other two backends
    are for debugging: `aot_eager` runs the operations of the graph one by one, and `eager` runs the traced operations
    of the model."""

    components: Array[Component] = ("model",)
    """Components to compile: `model` (the blocks of the model) and `loss`. The compiled loss makes no fp32 copies of
    the logits. With `loss.chunks`, the loss of each chunk is compiled, but the matrix products of the output layer are
    not."""

    cache_folder: Annotated[str, Field(min_length=1)] | None = None
    """Folder in which inductor stores compiled kernels, and from which later starts load them. The folder should be on
    a file system that all hosts share and that outlasts the job. Unset: the folder in the environment variable
    `TORCHINDUCTOR_CACHE_DIR`, or else a temporary folder of the host."""
