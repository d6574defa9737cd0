"""`[optimizer]` and `[[optimizer.param_groups]]`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from titan_launch.config.base import Array, FloatDtype, Section

Algorithm = Literal["AdamW", "Muon"]


class ParamGroup(Section):
    """Other settings for the parameters that `match` finds."""

    match: str
    """Glob over parameter paths: `*` stays within one segment, `**` crosses dots, as in `layers.*.attention.**`."""

    lr_factor: Annotated[float, Field(ge=0)] = 1.0
    """The learning rate of these parameters is the scheduled one times this."""

    weight_decay: Annotated[float, Field(ge=0)] | None = None
    """Weight decay of these parameters. Unset: as without this group."""

    algorithm: Algorithm | None = None
    """What updates these parameters. Unset: as without this group."""


class MuonConfig(Section):
    """Muon (K. Jordan, 2024): the momentum of a matrix, made nearly orthogonal by Newton-Schulz iterations."""

    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """Decay of the momentum, which is a running mean of the gradient."""

    nesterov: bool = True
    """Whether the update looks one step ahead (Nesterov's momentum)."""

    ns_steps: Annotated[int, Field(ge=1, lt=100)] = 5
    """Newton-Schulz iterations. After 5 the singular values of an update lie between about 0.7 and 1.2."""

    adjust_lr_fn: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    """What the learning rate of a matrix of A rows and B columns is multiplied by: 0.2 sqrt(max(A, B)), which makes
    updates as large as AdamW's, so that its learning rate and weight decay fit (arXiv:2502.16982); or
    sqrt(max(1, A / B)), the author's, which wants a learning rate of about 0.02."""

    lr_factor: Annotated[float, Field(gt=0)] = 1.0
    """The learning rate of Muon's parameters is the scheduled one times this, and times that of their group."""


class OptimizerConfig(Section):
    """The optimizer. Norms, biases and embeddings have no weight decay unless a parameter group says otherwise."""

    name: Algorithm = "AdamW"
    """The algorithm: `AdamW` (decoupled weight decay, arXiv:1711.05101) for all parameters, or `Muon` for the matrices
    within the model, and AdamW for everything else: embeddings, the output layer, norms, biases, convolutions."""

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
    """PyTorch's implementation of AdamW. `fused` is the fastest on CPU and CUDA; the others make the host wait for the
    device before every update, to know whether it is left out. (With `state_dtype`, `rounding` or `master_weights` an
    implementation of this package is used, which does not wait.)"""

    state_dtype: FloatDtype | None = None
    """The moments are kept in it. Unset: in the dtype that each parameter is stored in."""

    rounding: Literal["nearest", "stochastic"] = "nearest"
    """How updated parameters and moments that are stored in bfloat16 are rounded to it. `stochastic` rounds up or down
    with the probabilities that make the mean right, so that updates too small for bfloat16 are not lost."""

    master_weights: bool = False
    """Whether the optimizer keeps parameters that are stored in bfloat16 in float32 too, sharded like them. Updates go
    to these, and the stored ones are rounded copies."""

    muon: MuonConfig = Field(default_factory=MuonConfig)
    """The settings of Muon."""

    param_groups: Array[ParamGroup] = ()
    """Other settings for some parameters; the first that matches a parameter wins. One that matches nothing is an
    error."""
