"""`[optimizer]` and `[[optimizer.param_groups]]`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from titan_launch.config.base import Array, Section


class ParamGroup(Section):
    """Other settings for the parameters that `match` finds."""

    match: str
    """Glob over parameter paths: `*` stays within one segment, `**` crosses dots, as in `layers.*.attention.**`."""

    lr_factor: Annotated[float, Field(ge=0)] = 1.0
    """The learning rate of these parameters is the scheduled one times this."""

    weight_decay: Annotated[float, Field(ge=0)] | None = None
    """Weight decay of these parameters. Unset: as without this group."""


class OptimizerConfig(Section):
    """The optimizer. Norms, biases and embeddings have no weight decay unless a parameter group says otherwise."""

    name: Literal["AdamW"] = "AdamW"
    """The algorithm (decoupled weight decay, arXiv:1711.05101)."""

    lr: Annotated[float, Field(gt=0)] = 3e-4
    """Peak learning rate, which `[lr_scheduler]` scales."""

    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Decay of the first moment."""

    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """Decay of the second moment."""

    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Added to the denominator."""

    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    """Decoupled weight decay of everything but norms, biases and embeddings."""

    implementation: Literal["fused", "foreach", "for-loop"] = "fused"
    """PyTorch's implementation. `fused` is the fastest on CPU and CUDA, and the only one that needs no host
    synchronization to leave out a non-finite step."""

    param_groups: Array[ParamGroup] = ()
    """Other settings for some parameters; the first that matches a parameter wins. One that matches nothing is an
    error."""
