"""`[precision]`, `[batchnorm]`, `[float8]` and `[kernels]`: dtypes, statistics and kernels of modules."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from titan_launch.config.sections.section import Array, FloatDtype, Section


class PrecisionRule(Section):
    """An exception to `[precision]` for the modules that match `type` and `match`; an unset key matches all modules.
    The exception also applies to modules inside of these modules, except for modules that another rule matches."""

    type: str | None = None
    """Class name of the modules. Subclasses of the class match, too. Leading underscores are ignored: `BatchNorm`
    matches every subclass of `_BatchNorm`. A name with dots is the full name of one class:
    `my_package.norms.MyNorm`."""

    match: str | Annotated[Array[str], Field(min_length=1)] | None = None
    """Glob, or array of globs, for module paths. `*` matches within one segment, `**` crosses dots, as in
    `layers.*.attention_norm`."""

    storage_dtype: FloatDtype | None = None
    """Dtype of the sharded parameters, of their gradients, and of their optimizer state. Unset:
    `precision.storage_dtype`."""

    param_dtype: FloatDtype | None = None
    """Dtype of the all-gathered parameters. Floating-point inputs of the modules are cast to this dtype. Unset: the
    parameters keep their storage dtype, and the inputs are not cast. (`float32` differs from unset, because the inputs
    are then cast.)"""

    reduce_dtype: FloatDtype | None = None
    """Dtype in which gradients are reduced over the ranks. Unset: `precision.reduce_dtype`."""

    output_dtype: FloatDtype | None = None
    """Dtype to which floating-point outputs are cast. Unset: the `param_dtype` of the surrounding module, which takes
    the outputs as inputs. If unset, the outputs of the model itself (its head) are not cast."""

    cast_forward_inputs: bool = True
    """Cast floating-point inputs to `param_dtype`."""

    buffer_dtype: FloatDtype | None = None
    """Dtype of the floating-point buffers of the module and of its submodules. Unset: `precision.buffer_dtype`. The
    running statistics of a BatchNorm get this dtype only if the rule matches the BatchNorm itself. The routers'
    selection biases and counts of tokens per expert never get this dtype."""

    reshard_after_forward: bool | None = None
    """Reshard the parameters after forward, and all-gather them again for backward. Unset: the same as for the block
    that contains the modules. If unset, a unit with modules of several blocks, or of the head, is resharded only with
    `fsdp_reshard_after_forward = "always"`, because backward needs this unit first."""

    unit_per: Literal["model", "block", "module"] = "model"
    """Number of FSDP2 units for the matched modules: one for the model (the fewest collectives), one per block, or one
    per module. With `model`, all matched modules must run inside of the model's forward. A module may run twice, or
    only in some steps. If some of these modules run outside of the model's forward, use `block` or `module`. (Even with
    `model`, a unit that is larger than the largest block and has more than a million parameters is divided into one
    unit per block. Before torch 2.13, each module is a separate unit.)"""


class PrecisionConfig(Section):
    """Dtypes in which modules store their parameters, compute, and reduce their gradients."""

    storage_dtype: FloatDtype = "float32"
    """Dtype of sharded parameters, of their gradients, and of the optimizer state. `optimizer.state_dtype` can set
    another dtype for the state."""

    frozen_storage_dtype: FloatDtype | None = None
    """Storage dtype of parameters that are never trained (see `training.frozen`). Such parameters get no updates that
    bfloat16 could round away, so `bfloat16` can halve their memory. The `storage_dtype` of a precision rule takes
    precedence. Unset: `storage_dtype`."""

    param_dtype: FloatDtype = "bfloat16"
    """Dtype of all-gathered parameters, and therefore of the computation. Exception: in a bfloat16 module, a BatchNorm
    that no rule matches uses float32 parameters, and its inputs are not cast."""

    reduce_dtype: FloatDtype = "float32"
    """Dtype in which gradients are reduced over the ranks. The deferred modes of gradient accumulation also sum the
    gradients of microbatches in this dtype."""

    buffer_dtype: FloatDtype | None = None
    """Dtype of floating-point buffers, except for the running statistics of BatchNorm, and for the selection biases and
    token counts of routers. Unset: buffers keep the dtype that the model gave them (FSDP2 casts no buffers)."""

    placement: Literal["auto", "in_place", "own_unit"] = "auto"
    """FSDP2 units of the modules that rules match, and of trained modules in frozen blocks, such as adapters.
    `in_place`: the modules stay in the units of their blocks, so a rule adds no collective. A unit then has parameters
    of several dtypes, which needs torch 2.15. `own_unit`: the modules get units of their own. `auto`: in place, except
    for rules that FSDP2 does not support in place. Such a rule sets `unit_per` or `reshard_after_forward`, or
    matches modules that differ from their block, for example in storage dtype, in reduce dtype, or in the step that
    unfreezes them. Before torch 2.15, `auto` is the same as `own_unit`."""

    rules: Array[PrecisionRule] = ()
    """Exceptions for modules, by class or by path. The first rule that matches a module applies. A rule that matches no
    module is an error."""


class BatchNormConfig(Section):
    """Batch statistics and running statistics of BatchNorm layers. Models without BatchNorm ignore this section."""

    statistics: Literal["local", "synchronized"] = "local"
    """Samples over which mean and variance are computed. `local`: the microbatch of each rank. `synchronized`: the
    microbatches of all data-parallel ranks together, so that N ranks train like one rank with N times the batch.
    `synchronized` costs one small all-gather per layer in forward, and one all-reduce in backward."""

    momentum_per: Literal["microbatch", "step"] = "microbatch"
    """Period to which the `momentum` of a BatchNorm layer applies. `momentum` is the weight of new statistics in the
    running statistics. `microbatch`: each microbatch has this weight. `step`: all microbatches of a step together have
    this weight, whatever their number."""

    of_frozen: Literal["update", "fixed"] = "update"
    """Running statistics of BatchNorm and InstanceNorm layers whose parameters are never trained (see
    `training.frozen`). `update`: the layers normalize with the statistics of the microbatch and update the running
    statistics. `fixed`: the layers normalize with their running statistics, which do not change, as in evaluation. A
    layer without parameters counts as trained."""


class Float8Config(Section):
    """Float8 matrix products of linear layers, in forward and backward, by torchao (`pip install
    'titan-launch[float8]'`). The operands of each product are scaled dynamically. Parameters keep their storage dtype,
    and are all-gathered in `precision.param_dtype`, or in 8 bits with `all_gather`. The products require GPUs with FP8
    tensor cores: NVIDIA with compute capability 8.9 or later (H100, H200, B200, L40S)."""

    enable: bool = False
    """Convert linear layers to 8 bits. Steps are faster only with `compile.enable`, because without compilation each
    scaling is a separate kernel."""

    recipe: Literal["rowwise", "rowwise_with_gw_hp", "tensorwise"] = "rowwise"
    """Granularity of the scales. `rowwise`: one scale per row; the most exact. `rowwise_with_gw_hp`: as `rowwise`, with
    the gradients of the weights in bfloat16. `tensorwise`: one scale per tensor; the fastest."""

    modules: Array[str] = ()
    """Globs of the modules whose linear layers are converted, including the layers inside of a matching module.
    Default: all linear layers of the blocks, except for layers that a precision rule computes in another dtype than
    bfloat16. The head and the routers of experts are not converted by default, since they are the most sensitive
    layers. The experts themselves cannot be converted: torchao has 8-bit products of experts only as a prototype."""

    all_gather: bool = False
    """All-gather converted weights in 8 bits instead of `precision.param_dtype`. Each rank rounds its shards before the
    all-gather. Requires `recipe = "tensorwise"`, with which all shards of a weight share a scale. All scales are
    computed once after each step."""

    emulate: bool = False
    """Round the operands to 8 bits, and multiply in the dtype of the computation. Use this to test the numerics on
    hardware without FP8 tensor cores."""


AttentionBackend = Literal["cudnn", "flash", "efficient", "math"]


class KernelsConfig(Section):
    """Kernels of attention and matrix products, and their precision. With the defaults, modules for which a precision
    rule sets float32 compute in full float32 precision."""

    attention: Literal["auto", AttentionBackend] = "auto"
    """Kernel of `F.scaled_dot_product_attention`. `auto` on a GPU: the first usable kernel in the order `cudnn`,
    `flash`, `efficient`, `math`. On GPUs other than Hopper, `flash` comes before `cudnn`. A class of `transformers` and
    a model of your own do not use `cudnn`, because they may pass masks. The log names the chosen kernel, and the reason
    why each kernel earlier in this order cannot be used. `auto` on a CPU: PyTorch's choice. For causal attention in
    short sequences, this package's blocked kernel is used if it is faster. Any other value: this kernel of PyTorch. If
    the kernel cannot be used, the run fails. `math` stores all attention scores."""

    float32_precision: Literal["ieee", "tf32"] = "ieee"
    """Precision of matrix products and convolutions of float32 tensors on a GPU. `ieee`: full float32. `tf32`: the
    operands are rounded to 10 bits of mantissa, on matrix units that are several times faster; sums stay in float32.
    `tf32` also applies to modules for which a precision rule sets float32. (PyTorch's own default is `tf32` for
    convolutions only.)"""

    bf16_reduced_precision_reduction: bool = True
    """cuBLAS may split the sum of a bfloat16 product into parts. Each part is summed in float32. True allows cuBLAS to
    add the results of the parts in bfloat16, which is faster and PyTorch's default. False: the results are added in
    float32."""
