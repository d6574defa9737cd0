"""`[precision]` and `[[precision.rules]]`: what every module is stored in, computed in and reduced in."""

from __future__ import annotations

from titan_launch.config.base import Array, FloatDtype, Section


class PrecisionRule(Section):
    """An exception to `[precision]` for the modules it matches: by `type`, by `match`, or by both together."""

    type: str | None = None
    """Class name; base classes count, and leading underscores do not, so `BatchNorm` finds every `_BatchNorm`.
    With dots, the full name of one class: `my_package.norms.MyNorm`."""

    match: str | None = None
    """Glob over module paths: `*` stays within one segment, `**` crosses dots, as in `layers.*.attention_norm`."""

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
    """Floating buffers of the module and of everything in it are stored in it. Unset: as the model made them (FSDP2
    casts no buffers)."""

    reshard_after_forward: bool | None = None
    """Whether the parameters are freed after forward and gathered again for backward. Unset: as for the blocks."""


class PrecisionConfig(Section):
    """What every module is stored in, computed in and reduced in."""

    storage_dtype: FloatDtype = "float32"
    """Sharded parameters, their gradients, and the optimizer's state."""

    param_dtype: FloatDtype = "bfloat16"
    """All-gathered parameters and, with them, the computation."""

    reduce_dtype: FloatDtype = "float32"
    """Gradients are reduced in it over the ranks, and accumulated in it where the reduction is deferred."""

    rules: Array[PrecisionRule] = ()
    """Exceptions, for modules found by class or by path; the first that matches a module wins. A rule that matches
    nothing is an error."""
