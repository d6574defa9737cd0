"""`[precision]`, `[batchnorm]`, `[float8]` and `[kernels]`: dtypes, statistics and kernels of modules."""

from __future__ import annotations

from typing import Literal

from titan_launch.config.sections.base import Array, FloatDtype, Section


class PrecisionRule(Section):
    """An exception to `[precision]` for the modules it matches: by `type`, by `match`, or by both together."""

    type: str | None = None
    """Class name; base classes count, and leading underscores do not, so `BatchNorm` finds every `_BatchNorm`.
    With dots, the full name of one class: `my_package.norms.MyNorm`."""

    match: str | Array[str] | None = None
    """Glob over module paths, or several: `*` stays within one segment, `**` crosses dots, as in
    `layers.*.attention_norm`."""

    storage_dtype: FloatDtype | None = None
    """The parameters are kept in it, sharded, with their gradients and the optimizer's state. Unset:
    `precision.storage_dtype`."""

    param_dtype: FloatDtype | None = None
    """The parameters are all-gathered in it, and floating inputs are cast to it. Unset: the parameters keep their
    storage dtype and the inputs are not cast, which is not the same as `float32`."""

    reduce_dtype: FloatDtype | None = None
    """Gradients are reduced in it. Unset: `precision.reduce_dtype`."""

    output_dtype: FloatDtype | None = None
    """Floating outputs are cast to it. Unset: what the consumer computes in, which is the `param_dtype` around the
    module; the outputs of the model itself (its head) stay as they are."""

    cast_forward_inputs: bool = True
    """Whether floating inputs are cast to `param_dtype`."""

    buffer_dtype: FloatDtype | None = None
    """Floating buffers of the module and of everything in it are stored in it. Unset: `precision.buffer_dtype`.
    BatchNorm's running statistics follow only a rule that matches the BatchNorm itself."""

    reshard_after_forward: bool | None = None
    """Whether the parameters are freed after forward and gathered again for backward. Unset: as for its block
    within a block; a unit that reaches over several blocks, or into the head, keeps them, since backward needs them
    first."""

    unit_per: Literal["model", "block", "module"] = "model"
    """How many FSDP2 units the matched modules become: one for the model (the fewest collectives), one for each block,
    or one for each module. `model` is for modules that run in every forward of the whole model; where some are called
    outside of it, or only now and then, give them smaller units. (A unit larger than the largest block is divided by
    blocks in any case, if it exceeds a million parameters; before torch 2.13 every module has its own.)"""


class PrecisionConfig(Section):
    """What every module is stored in, computed in and reduced in."""

    storage_dtype: FloatDtype = "float32"
    """Sharded parameters, their gradients, and the optimizer's state."""

    param_dtype: FloatDtype = "bfloat16"
    """All-gathered parameters and, with them, the computation."""

    reduce_dtype: FloatDtype = "float32"
    """Gradients are reduced in it over the ranks, and accumulated in it where the reduction is deferred."""

    buffer_dtype: FloatDtype | None = None
    """Floating buffers are stored in it, but for BatchNorm's running statistics. Unset: as the model made them (FSDP2
    casts no buffers)."""

    rules: Array[PrecisionRule] = ()
    """Exceptions, for modules found by class or by path; the first that matches a module wins. A rule that matches
    nothing is an error."""


class BatchNormConfig(Section):
    """What the statistics of BatchNorm layers are taken over. Without effect on a model that has none."""

    statistics: Literal["local", "synchronized"] = "local"
    """`local`: each rank normalizes its microbatch by that microbatch's own mean and variance. `synchronized`: by those
    of all data-parallel ranks' microbatches together, so that N ranks train as one with N times the batch; one small
    all-gather per layer in forward, and one all-reduce in backward."""

    momentum_per: Literal["microbatch", "step"] = "microbatch"
    """What a layer's `momentum`, the weight of new statistics in the running ones, is meant for. `step`: the
    microbatches of a step together have that weight, however many there are."""


class Float8Config(Section):
    """The products of linear layers, forward and backward, in 8-bit floating point, on factors scaled as they come, by
    torchao (`pip install torchao`). Parameters stay as they are, and are gathered in `precision.param_dtype`, or with
    `all_gather` in 8 bits. For GPUs with such units: NVIDIA from compute capability 8.9 (H100, H200, B200, L40S)."""

    enable: bool = False
    """Convert. Worth it with `compile.enable` only: without it every scaling is a kernel of its own."""

    recipe: Literal["rowwise", "rowwise_with_gw_hp", "tensorwise"] = "rowwise"
    """A scale for each row, which is the most exact; the same with the gradients of the weights in bfloat16; or one for
    each tensor, which is the fastest."""

    modules: Array[str] = ()
    """Globs of the modules whose linear layers are converted, those inside included. Default: those of all blocks that
    no rule computes in another dtype than bfloat16. Not the head, which is the most sensitive."""

    all_gather: bool = False
    """Gather converted weights in 8 bits instead of `precision.param_dtype`: each rank rounds its shards before. For
    `tensorwise` only: the scale of a weight is that of its shards on all ranks, found once after each step."""

    emulate: bool = False
    """Round to 8 bits, and multiply in the computation's dtype: for trying out numerics where there are no such
    units."""


AttentionBackend = Literal["cudnn", "flash", "efficient", "math"]


class KernelsConfig(Section):
    """Which kernels compute attention and matrix products, and how exactly. The defaults are exact where a precision
    rule says float32."""

    attention: Literal["auto", AttentionBackend] = "auto"
    """Kernel of `F.scaled_dot_product_attention`. `auto` on a GPU: the first usable of `cudnn`, `flash`, `efficient`
    and `math` (before Hopper, `flash` comes first); the log names the kernel, with the reasons against those before it.
    `auto` on a CPU: PyTorch's choice, or this launcher's blocked kernel for causal attention in short sequences, if it
    is faster. Another value: that kernel of PyTorch, or an error. `math` stores all scores."""

    float32_precision: Literal["ieee", "tf32"] = "ieee"
    """Matrix products and convolutions of float32 tensors on a GPU. `tf32`: their factors are rounded to 10 bits of
    mantissa, on matrix units that are several times faster; sums stay float32. What a rule computes in float32 is then
    no more exact than that. (PyTorch itself takes `tf32` for convolutions only.)"""

    bf16_reduced_precision_reduction: bool = True
    """Whether cuBLAS may add up the parts of a divided bfloat16 product in bfloat16, which is PyTorch's default and
    faster. The sums within a part are float32 in any case."""
