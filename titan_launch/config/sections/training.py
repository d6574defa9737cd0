"""`[training]`, `[gradient_accumulation]`, `[optimizer]`, `[lr_scheduler]`, `[ema]`: the optimizer step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from titan_launch.config.optimizers import ALGORITHMS
from titan_launch.config.sections.section import Array, FloatDtype, OneOf, Section
from titan_launch.core.errors import KeyPath


class Unfreeze(Section):
    """Parameters that are frozen in the first steps of a run."""

    match: str
    """Glob for parameter names, as in `layers.*.attention.**`."""

    after_step: Annotated[int, Field(ge=1)]
    """Number of steps at the start of a run in which these parameters are frozen. All later steps train these
    parameters. Their modules have separate FSDP2 units. Memory is planned as if the parameters were trained from the
    start. Their optimizer state is created in the first step that trains them."""


class TrainingConfig(Section):
    """Batch size, sequence length, number of steps or epochs, frozen parameters, gradient clipping and seed."""

    seq_len: Annotated[int, Field(ge=1)] = 256
    """Tokens per sequence. Not used with images."""

    local_batch_size: Annotated[int, Field(ge=1)] | Literal["auto"] = 4
    """Samples (sequences or images) per microbatch on each data-parallel rank. `auto`: the largest number with which
    the predicted memory fits, and which divides the samples per step of a rank. Other keys with the value `auto`, such
    as `activation_checkpoint.mode`, are chosen together with this number. `auto` requires `global_batch_size`, so that
    the number does not change the training. A run logs the number. Before training, the run tries three steps in a
    separate process (not with expert parallelism). If these steps run out of memory, the run tries the next smaller
    number."""

    global_batch_size: Annotated[int, Field(ge=1)] | None = None
    """Samples per optimizer step, over all ranks and microbatches. The number of microbatches per step is
    `global_batch_size / (local_batch_size * data-parallel ranks)`, which must be a whole number. Default: one
    microbatch."""

    steps: Annotated[int, Field(ge=1)] | None = None
    """Optimizer steps of the whole run, including the steps before a resume. Default: 100, unless `epochs` is set."""

    epochs: Annotated[float, Field(gt=0, le=1e9)] | None = None
    """Epochs of the whole run, in place of `steps`: passes over the training data, such as 3 or 0.5. When a run has
    opened its data, it computes `steps` as `epochs` x samples / `global_batch_size`, rounded up. With a mixture, an
    epoch has as many samples as all sources together. A stream has no epochs. A job file sets either `steps` or
    `epochs`. If a later file or an override sets the other key, the later key replaces the earlier one. The
    `config.json` of a run has both keys; its `steps` is the computed number."""

    max_norm: Annotated[float, Field(ge=0)] = 1.0
    """Maximum gradient norm over all parameters. A larger gradient is scaled down to this norm. 0 disables clipping;
    the norm is still reported."""

    trainable: Array[str] | None = None
    """Globs of the parameters to train, such as `output.*` or `layers.3[01].**`: `*` matches within one segment of a
    parameter's name, `**` crosses dots. All other parameters are frozen: they have no gradients, no optimizer state and
    no reduce-scatter. Default: all parameters, except those that the model itself freezes (`requires_grad = False`).
    With `[lora]`, the adapters are always trained; by default, no other parameter is trained."""

    frozen: Array[str] = ()
    """Globs of the parameters to freeze. All other parameters are trained, except those that the model itself freezes.
    Set `frozen` or `trainable`, not both. `precision.frozen_storage_dtype` can store frozen parameters in a smaller
    dtype. `batchnorm.of_frozen` decides whether frozen BatchNorms update their running statistics."""

    unfreeze: Array[Unfreeze] = ()
    """Parameters that are frozen for a number of steps and trained afterwards. For these parameters, `trainable` and
    `frozen` have no effect. If several entries match a parameter, the smallest `after_step` applies."""

    enable_cpu_offload: bool = False
    """Keep sharded parameters, their gradients and the optimizer state in host memory, and update the parameters there.
    The all-gather copies the parameters of a unit to the GPU. Use this key for a model that does not fit into GPU
    memory otherwise. Steps take longer."""

    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Seed of the initial parameters and of the data order."""

    gc_freq: Annotated[int, Field(ge=1)] = 50
    """Steps between runs of Python's garbage collector. All ranks collect garbage at the same step, and at no other
    time: a rank that collects alone delays all other ranks."""

    @model_validator(mode="before")
    @classmethod
    def _with_default_length(cls, values: Any) -> Any:
        is_open = isinstance(values, Mapping) and values.get("steps") is None and values.get("epochs") is None
        return {**values, "steps": 100} if is_open else values

    @property
    def total_steps(self) -> int:
        """The number of steps of the run. In a job with `epochs`, the number is known only after the data was
        opened."""
        assert self.steps is not None, "the number of steps is unknown before the data is opened"
        return self.steps

    @property
    def length_key(self) -> KeyPath:
        """The key that sets the length of the run."""
        return ("training", "steps" if self.epochs is None else "epochs")


@dataclass(frozen=True)
class AccumulationMode:
    """The collectives that a mode runs after every microbatch. All other collectives of gradients run once, after the
    last microbatch."""

    reduce_scatters_each: bool
    """Reduce-scatter after every microbatch. False: every rank sums unsharded gradients until the last microbatch."""

    all_reduces_each: bool
    """All-reduce between the replicas (HSDP) after every microbatch."""

    @property
    def defers(self) -> bool:
        """True if at least one collective runs only once per step, on gradients that are summed over the microbatches
        in the reduce dtype."""
        return not (self.reduce_scatters_each and self.all_reduces_each)

    @property
    def needs_all_reduces(self) -> bool:
        """True if the mode defers only the all-reduce between replicas, and therefore needs replicas (HSDP)."""
        return self.reduce_scatters_each and not self.all_reduces_each


ACCUMULATION_MODES: Mapping[str, AccumulationMode] = {
    "immediate": AccumulationMode(reduce_scatters_each=True, all_reduces_each=True),
    "deferred_all_reduce": AccumulationMode(reduce_scatters_each=True, all_reduces_each=False),
    "deferred": AccumulationMode(reduce_scatters_each=False, all_reduces_each=False),
}
"""The modes by name, the most traffic first. Gradient accumulation, rules, `auto`, predicted traffic and the replay of
a step read this table. To add a mode, add a row, and describe it in the docstring of `GradientAccumulationConfig.mode`
and in docs/how_to/gradient_accumulation.md. Tests compare both texts with the table."""


class GradientAccumulationConfig(Section):
    """Communication of gradients in a step of several microbatches. `training.global_batch_size` sets the number of
    microbatches. The loss and its gradient are the same in every mode."""

    mode: Annotated[str, OneOf({**ACCUMULATION_MODES, "auto": None})] = "immediate"
    """The gradient accumulation mode. `immediate`: reduce-scatter after every microbatch; a rank holds only sharded
    gradients. `deferred`: reduce-scatter after the last microbatch; the least traffic, but each rank holds all
    gradients of its pipeline stage and tensor-parallel part (4 bytes per parameter). `deferred_all_reduce` (HSDP only):
    reduce-scatter within the replica after every microbatch, all-reduce between the replicas after the last; a rank
    holds only sharded gradients. `auto`: of the modes whose predicted memory fits, the one with the least traffic. If
    `activation_checkpoint.mode` is also `auto`, the combination with the shortest expected step. `plan` shows the
    chosen mode and the reason. A run records the chosen mode, and keeps it on resume."""

    keep_params_unsharded: bool | None = None
    """All-gather the parameters once per step instead of up to twice per microbatch, and keep them unsharded (in
    `param_dtype`) until the last backward, like ZeRO-2. Default: false; with `mode = "auto"`, true if the memory
    suffices. `loss.name = "kto"` does not support true, nor does a loss with `reference = "base"`."""

    @property
    def row(self) -> AccumulationMode:
        """The entry of the mode in `ACCUMULATION_MODES`. Raises ValueError for `auto`, which `plan.auto_mode` must
        resolve first."""
        if self.mode == "auto":
            raise ValueError("gradient_accumulation.mode is still `auto`: resolve `auto` first (plan.auto_mode)")
        return ACCUMULATION_MODES[self.mode]

    @property
    def label(self) -> str:
        """The mode in words: `deferred`, `deferred with unsharded parameters`."""
        return f"{self.mode}{' with unsharded parameters' if self.keep_params_unsharded else ''}"


AlgorithmName = Annotated[str, OneOf(ALGORITHMS)]


class ParamGroup(Section):
    """Settings for the parameters that match `match`."""

    match: str
    """Glob for parameter paths: `*` matches within one segment, `**` crosses dots, as in `layers.*.attention.**`."""

    lr_factor: Annotated[float, Field(ge=0)] = 1.0
    """Number by which the scheduled learning rate is multiplied for these parameters."""

    weight_decay: Annotated[float, Field(ge=0)] | None = None
    """Weight decay of these parameters. Unset: the weight decay that they have without this group."""

    algorithm: AlgorithmName | None = None
    """Algorithm that updates these parameters. Unset: the algorithm that they have without this group."""


class MuonConfig(Section):
    """Muon (K. Jordan, 2024). The update of a matrix is its momentum, which Newton-Schulz iterations make nearly
    orthogonal."""

    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """Decay of the momentum. The momentum is a running mean of the gradient."""

    nesterov: bool = True
    """Use Nesterov momentum: `(1 - momentum)` times the gradient plus `momentum` times the new momentum is made nearly
    orthogonal, instead of the new momentum."""

    ns_steps: Annotated[int, Field(ge=1, lt=100)] = 5
    """Number of Newton-Schulz iterations. After 5 iterations, the singular values of an update are between about 0.7
    and 1.2."""

    adjust_lr_fn: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    """Number by which the learning rate is multiplied for a matrix of A rows and B columns. `match_rms_adamw`: 0.2
    sqrt(max(A, B)); updates are then as large as AdamW's, so that AdamW's learning rate and weight decay fit
    (arXiv:2502.16982). `original`: sqrt(max(1, A / B)), the author's factor, which needs a learning rate of about
    0.02."""

    lr_factor: Annotated[float, Field(gt=0)] = 1.0
    """Number by which the learning rate of Muon's parameters is multiplied, in addition to the `lr_factor` of their
    group."""


class SGDConfig(Section):
    """Stochastic gradient descent with momentum, as in `torch.optim.SGD`."""

    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Decay of the momentum per step, before the gradient is added. 0 disables momentum; SGD then has no state."""

    nesterov: bool = False
    """Use Nesterov momentum: the update is the gradient plus `momentum` times the new momentum."""


class OptimizerConfig(Section):
    """The optimizer. Embeddings, norms, biases and other vectors have a weight decay only if a parameter group sets
    one."""

    name: AlgorithmName = "AdamW"
    """The algorithm. `AdamW` (decoupled weight decay, arXiv:1711.05101) and `SGD` update all parameters. `Muon` updates
    the matrices within the model; AdamW then updates all other parameters: embeddings, the output layer, norms, biases
    and convolutions."""

    lr: Annotated[float, Field(gt=0)] = 3e-4
    """Peak learning rate. `[lr_scheduler]` scales it. The default suits AdamW; SGD for image models usually needs about
    0.1."""

    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Decay of AdamW's first moment."""

    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """Decay of AdamW's second moment."""

    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Number added to the denominator of AdamW's update."""

    weight_decay: Annotated[float, Field(ge=0)] | None = None
    """Weight decay of all parameters except for embeddings, norms, biases and other vectors. AdamW and Muon decouple
    weight decay from the gradient; their default is 0.1. SGD adds `weight_decay` times the parameter to the gradient
    (L2 regularization, as `torch.optim.SGD`); its default is 0. A parameter group whose algorithm has the other kind of
    weight decay, such as SGD in a job with AdamW, uses the default of that algorithm instead."""

    implementation: Literal["fused", "foreach", "for-loop"] = "fused"
    """PyTorch's implementation of AdamW and SGD. `fused` is the fastest on CPU and CUDA. With `foreach` and `for-loop`,
    the host waits for the device before every update, to find out whether the step is skipped. (With `state_dtype`,
    `rounding` or `master_weights`, this package's own implementation is used, and the host does not wait.)"""

    state_dtype: FloatDtype | Literal["int8"] | None = None
    """Dtype of the optimizer's moments (SGD: of the momentum). Unset: the storage dtype of each parameter. `int8`: 8
    bits for each element, with a float32 scale for every 256 elements of a row (arXiv:2110.02861); the moments of
    vectors stay in float32."""

    rounding: Literal["nearest", "stochastic"] = "nearest"
    """Rounding of updated parameters and moments that are stored in bfloat16. `stochastic` rounds up or down at random,
    so that the expected value is exact. So updates that are too small for bfloat16 are not lost on average."""

    master_weights: bool = False
    """Keep a sharded float32 copy of parameters that are stored in bfloat16. The optimizer updates the copy, and then
    rounds it to bfloat16 and stores the result in the parameters."""

    muon: MuonConfig = Field(default_factory=MuonConfig)
    """Settings of Muon."""

    sgd: SGDConfig = Field(default_factory=SGDConfig)
    """Settings of SGD."""

    param_groups: Array[ParamGroup] = ()
    """Settings for some of the parameters. The first group that matches a parameter applies. A group that matches no
    parameter is an error."""

    def algorithms(self) -> set[str]:
        """Return the names of the algorithms that may update parameters of the job."""
        named = {self.name, *(group.algorithm for group in self.param_groups if group.algorithm)}
        for_others = ALGORITHMS[self.name].for_others
        return named if for_others is None else named | {for_others}


class _Schedule(Section):
    """The keys that all schedules have."""

    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps over which the learning rate rises linearly to its peak. If warm-up and decay together take more than
    `training.steps`, warm-up is cut to at most `training.steps`, and the decay to the steps after warm-up. A log line
    reports the cut."""


class _Decaying(_Schedule):
    """The keys of the schedules that decay."""

    min_lr_factor: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Learning rate after the last step, as a fraction of the peak."""


class WarmupStableDecay(_Decaying):
    """Warm-up, a plateau, and a decay at the end."""

    kind: Literal["warmup_stable_decay"] = "warmup_stable_decay"
    """Shape of the schedule."""

    decay_ratio: Annotated[float, Field(ge=0, le=1)] = 0.2
    """Fraction of `training.steps` at the end of the run over which the learning rate falls. 0 keeps the learning rate
    at its peak."""

    decay_type: Literal["linear", "sqrt", "cosine"] = "linear"
    """Shape of the decay. `sqrt` is 1 - sqrt(t), where t goes from 0 to 1 during the decay (arXiv:2405.18392)."""


class Cosine(_Decaying):
    """Warm-up, then a cosine decay to the last step."""

    kind: Literal["cosine"]
    """Shape of the schedule."""


class Linear(_Decaying):
    """Warm-up, then a linear decay to the last step."""

    kind: Literal["linear"]
    """Shape of the schedule."""


class Constant(_Schedule):
    """Warm-up, then the peak learning rate until the last step."""

    kind: Literal["constant"]
    """Shape of the schedule."""


SchedulerConfig = Annotated[WarmupStableDecay | Cosine | Linear | Constant, Field(discriminator="kind")]


class MupConfig(Section):
    """Maximal update parametrization (muP, arXiv:2203.03466): learning rates that are tuned on a narrow model also suit
    a wide model. muP supports AdamW, and models of the decoder families without tied embeddings. Models of different
    widths must have the same head width, and numbers of heads and a `hidden_dim` that grow with `dim`."""

    base_width: Annotated[int, Field(ge=1)] | None = None
    """Width (`dim`) of the base model, on which the keys of `[optimizer]` were tuned, and which has the family's usual
    initial values. Initial values, learning rate and weight decay of each parameter follow from `model.args.dim` /
    `base_width`; `titan-launch plan --verbose` shows them. Unset: initial values, learning rate and weight decay do not
    depend on the width."""


class EMAConfig(Section):
    """An exponential moving average of the trained parameters. The average does not change training. A model is often
    better with the average than with the last parameters.

    The average is in float32, sharded like the parameters: bfloat16 would round off the updates. BatchNorm's running
    statistics are not averaged, because they are moving averages already.
    """

    decay: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Weight of the previous average in an update, such as 0.999; the parameters have the weight `1 - decay`. The
    average then covers about the last `1 / (1 - decay)` updates. Unset: no average."""

    warmup: bool = False
    """Use the decay `(1 + n) / (10 + n)` in update number n, counted from 0, while this value is smaller than `decay`.
    The first parameters then do not dominate the average of a short run."""

    start_step: Annotated[int, Field(ge=0)] = 0
    """Up to this step, the average is a copy of the parameters. Averaging begins with the next update."""

    every_steps: Annotated[int, Field(ge=1)] = 1
    """Steps between updates of the average. A skipped step does not change the average."""

    validate_with: Literal["both", "ema", "parameters"] = "both"
    """Weights to validate. `ema`: the average, with the metrics `validation/ema_loss` and `validation/ema_accuracy`.
    `parameters`: the parameters, with `validation/loss` and `validation/accuracy`. `both`: one validation after the
    other, which takes twice the time. `checkpoint.keep_best` and `validation.patience` compare `validation/loss`, or
    `validation/ema_loss` with `validate_with = "ema"`."""

    @property
    def first_update(self) -> int:
        """The first step whose update does not copy the parameters: the first update after `start_step`."""
        return (self.start_step // self.every_steps + 1) * self.every_steps
