"""`[precision]` and `[[precision.rules]]`: what every module is stored in, computed in and reduced in."""

from __future__ import annotations

from typing import Literal

from titan_launch.config.base import Array, FloatDtype, Section


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
