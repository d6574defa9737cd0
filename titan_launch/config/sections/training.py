"""`[training]`, `[gradient_accumulation]`, `[optimizer]` and `[lr_scheduler]`: the optimizer step."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from titan_launch.config.optimizers import ALGORITHMS
from titan_launch.config.sections.base import Array, FloatDtype, OneOf, Section


class TrainingConfig(Section):
    """Batch, length, clipping and seed of the run."""

    seq_len: Annotated[int, Field(ge=1)] = 256
    """Tokens in a sequence. Not used with images."""

    local_batch_size: Annotated[int, Field(ge=1)] = 4
    """Samples (sequences, or images) in a microbatch on each data-parallel rank."""

    global_batch_size: Annotated[int, Field(ge=1)] | None = None
    """Samples in an optimizer step, over all ranks and microbatches. The number of microbatches follows:
    `global_batch_size / (local_batch_size * data-parallel ranks)`, which must be whole. Default: one microbatch."""

    steps: Annotated[int, Field(ge=1)] = 100
    """Optimizer steps in the whole run, those before a resume included."""

    max_norm: Annotated[float, Field(ge=0)] = 1.0
    """Clip the gradient of all parameters together to this norm. 0: do not clip, only report the norm."""

    loss_chunks: Annotated[int, Field(ge=1)] = 1
    """Parts in which the loss goes through a microbatch's targets, one after the other. The fp32 copies of the logits
    (12 bytes per token and class) then exist for one part at a time, for one more softmax in backward; the gradient
    stays the same, bit for bit."""

    enable_cpu_offload: bool = False
    """Keep sharded parameters, their gradients and the optimizer's state in host memory, and update there: a unit's
    parameters come to the GPU when they are gathered. For models that do not fit otherwise: a step takes longer."""

    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Seed of the initial parameters and of the order of the data."""

    gc_freq: Annotated[int, Field(ge=1)] = 50
    """Python's garbage collector runs every this many steps, on all ranks together, and at no other time: a rank that
    collects alone holds up all the others."""


class GradientAccumulationConfig(Section):
    """When the gradients of a step's microbatches are communicated. The number of microbatches follows from
    `training.global_batch_size`; the loss and its gradient are the same in every mode."""

    mode: Literal["immediate", "deferred", "deferred_all_reduce", "auto"] = "immediate"
    """`immediate`: reduce-scatter after every microbatch; only sharded gradients are held. `deferred`: only after the
    last; least traffic, but every rank holds the full gradients (4 bytes per parameter, however many ranks there are).
    `deferred_all_reduce` (HSDP only): reduce-scatter within the replica after every microbatch, all-reduce between the
    replicas after the last; sharded gradients are held. `auto`: of these, the one that communicates least among those
    whose predicted memory fits (`plan` shows which and why); a run records what was chosen, and keeps it on resume."""

    keep_params_unsharded: bool | None = None
    """Gather the parameters once a step instead of twice a microbatch, and hold them whole (`param_dtype`) until the
    last backward, like ZeRO-2. Default: no; with `mode = "auto"`, if that fits."""


AlgorithmName = Annotated[str, OneOf(ALGORITHMS)]


class ParamGroup(Section):
    """Other settings for the parameters that `match` finds."""

    match: str
    """Glob over parameter paths: `*` stays within one segment, `**` crosses dots, as in `layers.*.attention.**`."""

    lr_factor: Annotated[float, Field(ge=0)] = 1.0
    """The learning rate of these parameters is the scheduled one times this."""

    weight_decay: Annotated[float, Field(ge=0)] | None = None
    """Weight decay of these parameters. Unset: as without this group."""

    algorithm: AlgorithmName | None = None
    """The algorithm that updates these parameters. Unset: as without this group."""


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


class SGDConfig(Section):
    """Stochastic gradient descent with momentum, as in `torch.optim.SGD`."""

    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Factor by which the momentum decays in each step, before the gradient is added. 0: no momentum, and no state."""

    nesterov: bool = False
    """Whether the update looks one step ahead (Nesterov's momentum)."""


class OptimizerConfig(Section):
    """The optimizer. Norms, biases and embeddings have no weight decay unless a parameter group says otherwise."""

    name: AlgorithmName = "AdamW"
    """The algorithm. `AdamW` (decoupled weight decay, arXiv:1711.05101) and `SGD` are for all parameters. `Muon` is for
    the matrices within the model, with AdamW for everything else: embeddings, the output layer, norms, biases,
    convolutions."""

    lr: Annotated[float, Field(gt=0)] = 3e-4
    """Peak learning rate, which `[lr_scheduler]` scales. The default suits AdamW; image recipes with SGD use about
    0.1."""

    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Decay of AdamW's first moment."""

    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """Decay of AdamW's second moment."""

    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Added to the denominator of AdamW's update."""

    weight_decay: Annotated[float, Field(ge=0)] | None = None
    """Weight decay of everything but norms, biases and embeddings. AdamW and Muon decouple it from the gradient; unset,
    they use 0.1. SGD adds `weight_decay` times the parameter to the gradient (L2 regularization, as `torch.optim.SGD`);
    unset, it uses 0. A parameter group whose algorithm decays in the other way than `name` does not take this value,
    but its algorithm's default."""

    implementation: Literal["fused", "foreach", "for-loop"] = "fused"
    """PyTorch's implementation of AdamW and SGD. `fused` is the fastest on CPU and CUDA. The others make the host wait
    for the device before every update, to know whether the step is skipped. (With `state_dtype`, `rounding` or
    `master_weights` an implementation of this package is used, which does not wait.)"""

    state_dtype: FloatDtype | None = None
    """Dtype of the optimizer's moments (SGD: of the momentum). Unset: the dtype that each parameter is stored in."""

    rounding: Literal["nearest", "stochastic"] = "nearest"
    """How updated parameters and moments that are stored in bfloat16 are rounded to it. `stochastic` rounds up or down
    with the probabilities that make the mean right, so that updates too small for bfloat16 are not lost."""

    master_weights: bool = False
    """Whether the optimizer keeps parameters that are stored in bfloat16 in float32 too, sharded like them. Updates go
    to these, and the stored ones are rounded copies."""

    muon: MuonConfig = Field(default_factory=MuonConfig)
    """The settings of Muon."""

    sgd: SGDConfig = Field(default_factory=SGDConfig)
    """The settings of SGD."""

    param_groups: Array[ParamGroup] = ()
    """Other settings for some parameters; the first that matches a parameter wins. One that matches nothing is an
    error."""


class _Schedule(Section):
    """The keys that every schedule has."""

    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps over which the learning rate rises linearly to its peak. If warm-up and decay take more than
    `training.steps`, warm-up is clipped to `training.steps` and the decay to the steps after warm-up. A log line says
    so."""


class _Decaying(_Schedule):
    """The keys of the schedules that decay."""

    min_lr_factor: Annotated[float, Field(ge=0, le=1)] = 0.0
    """The learning rate after the last step, as a fraction of the peak."""


class WarmupStableDecay(_Decaying):
    """Warm-up, a plateau, and a decay at the end."""

    kind: Literal["warmup_stable_decay"] = "warmup_stable_decay"
    """Shape of the schedule."""

    decay_ratio: Annotated[float, Field(ge=0, le=1)] = 0.2
    """Fraction of `training.steps` at the end over which the rate falls. 0: it stays at its peak."""

    decay_type: Literal["linear", "sqrt", "cosine"] = "linear"
    """Shape of the fall. `sqrt` is the 1 - sqrt(t) of arXiv:2405.18392."""


class Cosine(_Decaying):
    """Warm-up, then half a cosine down to the end."""

    kind: Literal["cosine"]
    """Shape of the schedule."""


class Linear(_Decaying):
    """Warm-up, then a straight line down to the end."""

    kind: Literal["linear"]
    """Shape of the schedule."""


class Constant(_Schedule):
    """Warm-up, then the peak until the last step."""

    kind: Literal["constant"]
    """Shape of the schedule."""


SchedulerConfig = Annotated[WarmupStableDecay | Cosine | Linear | Constant, Field(discriminator="kind")]
