"""`[loss]`: the training loss, and the table of the losses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, NamedTuple

from pydantic import Field

from titan_launch.config.sections.section import FloatDtype, Section
from titan_launch.core.errors import KeyPath

PAIRS, RATED = "preferences", "unpaired_preferences"
ANSWERS = {PAIRS: "pairs of answers", RATED: "answers with a label"}
"""The values of `data.kind` that only some losses read, with a noun for each."""

BASE = "base"
"""Value of the key `reference` of a loss for the trained model without its adapters."""


class ReferenceConfig(Section):
    """The keys of the losses that have a reference model."""

    reference: str
    """The reference model, which is not trained. With `[lora]`, `base` is the trained model without its adapters, which
    needs no additional memory for parameters. Any other value is a folder in the formats of `model.weights` with a
    model of this package, usually the same folder as `model.weights`. The parameters of a reference model in a folder
    are sharded like the parameters of the trained model."""

    dtype: FloatDtype | None = None
    """Dtype of a reference model in a folder: of its parameters and of its computation. Default:
    `precision.param_dtype`. The rules in `[precision]` apply to the reference model only if it has the same arguments
    as the trained model."""

    beta: Annotated[float, Field(gt=0)] = 0.1
    """Strength of the reference model. With a small value, the trained model may move further from the reference
    model."""


class DPOConfig(ReferenceConfig):
    """Direct preference optimization (DPO, arXiv:2305.18290): the model learns to prefer one answer to another. With
    `label_smoothing = 0`, the loss of a pair is -log sigmoid(`beta` x (log-ratio of the chosen answer - log-ratio of
    the rejected answer)). A log-ratio is the log-probability of an answer in the trained model minus that in the
    reference model."""

    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Assumed probability that the two answers of a pair are swapped by mistake (conservative DPO). Validation ignores
    this key."""


class IPOConfig(ReferenceConfig):
    """Identity preference optimization (IPO, arXiv:2310.12036): unlike the loss of DPO, this loss has its minimum at a
    finite distance from the reference model. The loss of a pair is (log-ratio of the chosen answer - log-ratio of the
    rejected answer - 1 / (2 x `beta`))². The paper calls `beta` τ. A log-ratio is the mean over the tokens of an
    answer, as in TRL."""


class KTOConfig(ReferenceConfig):
    """Kahneman-Tversky optimization (KTO, arXiv:2402.01306): the model learns from single answers that are desirable or
    undesirable. The loss of a desirable answer is `desirable_weight` x sigmoid(baseline - reward). The loss of an
    undesirable answer is `undesirable_weight` x sigmoid(reward - baseline). The reward is `beta` x log-ratio, where the
    log-ratio is defined as for `dpo`. The baseline is the mean reward of mismatched answers in the step, but at least
    0; in validation, it is 0. A mismatched answer follows the prompt of a different chat in its sample. Each step runs
    both models once more for the mismatched answers."""

    desirable_weight: Annotated[float, Field(gt=0)] = 1.0
    """Weight of the desirable answers, called λ_D in the paper. Recommendation of the paper: `desirable_weight` x the
    number of desirable answers should be 1 to 1.5 times `undesirable_weight` x the number of undesirable answers."""

    undesirable_weight: Annotated[float, Field(gt=0)] = 1.0
    """Weight of the undesirable answers, called λ_U in the paper."""


class SimPOConfig(Section):
    """Simple preference optimization (SimPO, arXiv:2405.14734), without a reference model. The loss of a pair is -log
    sigmoid(`beta` x (log-probability of the chosen answer - log-probability of the rejected answer) - `gamma`). A
    log-probability is the mean over the tokens of an answer."""

    beta: Annotated[float, Field(gt=0)] = 2.0
    """Number by which the log-probabilities are multiplied."""

    gamma: Annotated[float, Field(ge=0)] = 1.0
    """Margin by which the reward of the chosen answer should exceed the reward of the rejected answer. The reward of an
    answer is `beta` x log-probability."""


class ORPOConfig(Section):
    """Odds-ratio preference optimization (ORPO, arXiv:2403.07691), without a reference model: fine-tuning and
    preferences in one run. The loss of a pair is c + `weight` x -log sigmoid(log-odds of the chosen answer - log-odds
    of the rejected answer). Here, c is the mean cross-entropy of the chosen answer's tokens. The log-odds of an answer
    with the probability p are ln(p / (1 - p)), where ln p is the mean log-probability of its tokens."""

    weight: Annotated[float, Field(gt=0)] = 0.1
    """Weight of the preference, called λ in the paper."""


class DistillationConfig(Section):
    """Distillation (arXiv:1503.02531): the model learns the probabilities that a teacher gives to all classes. The loss
    of a target is `weight` x `temperature`^2 x KL divergence + (1 - `weight`) x cross-entropy."""

    teacher: str
    """The teacher, which is not trained: a folder in the formats of `model.weights`, with a model of this package. The
    teacher must have the vocabulary of the trained model. Its parameters are sharded over the same ranks."""

    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Number by which the logits of both models are divided before the KL divergence. A higher temperature gives the
    classes with small probabilities more influence."""

    weight: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Weight of the KL divergence. With 1, targets have no influence."""

    dtype: FloatDtype | None = None
    """Dtype of the teacher's parameters and of its computation. Default: `precision.param_dtype`. The rules in
    `[precision]` apply to the teacher only if it has the same arguments as the trained model."""


class LossConfig(Section):
    """The training loss, which is summed in fp32. With `cross_entropy` and `distillation`, validation reports the
    cross-entropy without label smoothing and z-loss, so that jobs can be compared. With any other loss, and with
    `model.loss`, validation reports the training loss (`kto`: with the baseline 0; `dpo`: without label smoothing)."""

    name: str = "cross_entropy"
    """The loss. `cross_entropy`: the mean cross-entropy of all targets that are not ignored. `dpo`, `ipo`, `simpo` and
    `orpo` are losses of pairs, with data of pairs (`data.kind = "preferences"`): the model learns to prefer one answer
    to another. `kto` learns from single answers with a label (`data.kind = "unpaired_preferences"`). `reward` is a loss
    of pairs for a reward model (arXiv:2203.02155): -log sigmoid(reward of the chosen answer - reward of the rejected
    answer). It needs `model.args.num_labels = 1` and `data.train_on = "end"`. `distillation`: the KL divergence from
    the probabilities of a teacher, mixed with the cross-entropy. `package.module:function`: a function of your own,
    which is called with logits and targets and returns the sum of the loss; see docs/how_to/losses.md."""

    dpo: DPOConfig | None = None
    """Settings of `dpo`, which needs this table."""

    ipo: IPOConfig | None = None
    """Settings of `ipo`, which needs this table."""

    kto: KTOConfig | None = None
    """Settings of `kto`, which needs this table."""

    simpo: SimPOConfig | None = None
    """Settings of `simpo`. Without this table, the defaults apply."""

    orpo: ORPOConfig | None = None
    """Settings of `orpo`. Without this table, the defaults apply."""

    distillation: DistillationConfig | None = None
    """Settings of `distillation`, which needs this table."""

    chunks: Annotated[int, Field(ge=1)] = 1
    """Number of chunks of classes in which the model's output layer computes the cross-entropy. With 1, the model
    returns logits, which need memory for all tokens of a microbatch and all classes, in the compute dtype and in fp32.
    With more chunks, logits exist for one chunk at a time, in forward and in backward. The price is that backward
    computes the matrix product of the output layer a second time. Losses and gradients differ only by rounding. The
    output layer must be an `nn.Linear` without an adapter or float8, outside of checkpointed and compiled modules. The
    model must return the output of this layer unchanged. Otherwise the model still returns all logits, and only the
    fp32 copies are made for one chunk at a time; a log line reports this. For vocabularies of 100,000 and more, 8 to 32
    are good numbers."""

    z_loss: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the z-loss (PaLM, arXiv:2204.02311), which keeps logits from drifting. The z-loss is (ln Z)², where Z
    is the sum of exp(logit) over the classes. It is averaged over the targets like the cross-entropy. A usual weight is
    1e-4. `train/loss` does not contain the z-loss. `train/z_loss` reports the z-loss."""

    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Fraction of each target's probability that is distributed evenly over all classes, as in
    `torch.nn.CrossEntropyLoss`. `train/loss` is computed with label smoothing."""

    @property
    def is_of_package(self) -> bool:
        """False for a function of the user."""
        return ":" not in self.name

    @property
    def kind(self) -> LossKind:
        """The entry of the loss in `LOSSES`; `FUNCTION_LOSS` for any name that is not in this table."""
        return LOSSES.get(self.name, FUNCTION_LOSS)

    @property
    def settings(self) -> Section | None:
        """The table of the loss that the job names, or its defaults. None for a loss without a table, or if the job
        lacks a table that the loss needs."""
        if (table := self.kind.table) is None:
            return None
        own: Section | None = getattr(self, self.name)
        return table() if own is None and self.kind.second_model is None else own

    @property
    def frees_parameters(self) -> bool:
        """True if a step also runs the trained model without backward, after which FSDP2 frees the parameters.
        `keep_params_unsharded = true` is then refused, because the planner could not predict the all-gathers."""
        settings = self.settings
        return self.kind.frees_parameters or (isinstance(settings, ReferenceConfig) and settings.reference == BASE)

    def frozen_model(self) -> FrozenModelConfig | None:
        """Return the second model of the loss; None if the loss has no second model, or if the second model is the
        trained model without its adapters."""
        key, settings = self.kind.second_model, self.settings
        if key is None or not isinstance(settings, ReferenceConfig | DistillationConfig):
            return None
        folder = getattr(settings, key)
        if isinstance(settings, ReferenceConfig) and folder == BASE:
            return None
        return FrozenModelConfig(("loss", self.name, key), folder, settings.dtype)


class FrozenModelConfig(NamedTuple):
    """A second model, which a loss reads and the run does not train."""

    key: KeyPath
    """Key of the job whose value is the folder."""

    folder: str
    dtype: FloatDtype | None
    """Dtype of the parameters and of the computation. None: `precision.param_dtype`."""


@dataclass(frozen=True)
class LossKind:
    """The properties of a loss that rules and the data of a run depend on: its second model, its data, and the keys
    that it does not support."""

    second_model: str | None = None
    """The key that names the second model, in the table of the loss: `reference` in `[loss.dpo]`. None: the loss has no
    second model."""

    table: type[Section] | None = None
    """Class of the table with the settings of the loss, such as `[loss.dpo]`. A loss with a second model needs this
    table. For other losses, the table may be omitted. None: the loss has no settings of its own."""

    data_kind: str | None = None
    """The only `data.kind` that the loss reads, besides token files and factories, which every loss may read. None: the
    loss reads every kind whose documents are neither pairs nor answers with a label."""

    frees_parameters: bool = False
    """True for a loss that also runs the trained model without backward, whatever its reference is (see
    `LossConfig.frees_parameters`)."""

    unsupported: Mapping[tuple[str, str], str] = field(default_factory=dict)
    """The keys that cannot be used with the loss, each with the reason. In a reason, `{}` stands for the name of the
    loss; in the reasons of `MODEL_LOSS`, `{}` stands for the key."""

    @property
    def reads_pairs(self) -> bool:
        """True for a loss of pairs of answers."""
        return self.data_kind == PAIRS


_OPTION = 'applies only to the cross-entropy, but loss.name is "{}"; remove this key'
_WHOLE = 'is not supported with loss.name = "{}", which reads the logits of all classes and of whole sequences; set '
_SECOND = 'is not supported with loss.name = "{}", whose second model does not support this parallelism; set '

_OF_WHOLE_LOGITS: Mapping[tuple[str, str], str] = {
    ("loss", "chunks"): _OPTION,
    ("loss", "z_loss"): _OPTION,
    ("loss", "label_smoothing"): _OPTION,
    ("parallelism", "loss_parallel"): f"{_WHOLE}loss_parallel = false",
    ("parallelism", "context_parallel_degree"): f"{_WHOLE}context_parallel_degree = 1",
}
_OF_PAIRS: Mapping[tuple[str, str], str] = {
    **_OF_WHOLE_LOGITS,
    ("parallelism", "pipeline_parallel_degree"): (
        'is not supported with loss.name = "{}", which needs the documents of a sample, but a pipeline gives the loss '
        "only logits and targets; set pipeline_parallel_degree = 1"
    ),
}
_WITH_SECOND_MODEL: Mapping[tuple[str, str], str] = {
    **_OF_WHOLE_LOGITS,
    ("parallelism", "pipeline_parallel_degree"): f"{_SECOND}pipeline_parallel_degree = 1",
    ("parallelism", "expert_parallel_degree"): f"{_SECOND}expert_parallel_degree = 1",
}

LOSSES: Mapping[str, LossKind] = {
    "cross_entropy": LossKind(),
    "dpo": LossKind("reference", DPOConfig, PAIRS, unsupported=_WITH_SECOND_MODEL),
    "ipo": LossKind("reference", IPOConfig, PAIRS, unsupported=_WITH_SECOND_MODEL),
    "kto": LossKind("reference", KTOConfig, RATED, unsupported=_WITH_SECOND_MODEL, frees_parameters=True),
    "simpo": LossKind(table=SimPOConfig, data_kind=PAIRS, unsupported=_OF_PAIRS),
    "orpo": LossKind(table=ORPOConfig, data_kind=PAIRS, unsupported=_OF_PAIRS),
    "reward": LossKind(data_kind=PAIRS, unsupported=_OF_PAIRS),
    "distillation": LossKind("teacher", DistillationConfig, unsupported=_WITH_SECOND_MODEL),
}
"""The losses of this package by name. `loss/build.py` creates the objects that compute the losses. `config/rules` and
`LossConfig.kind` look losses up in this table. A test compares docs/how_to/losses.md with the table."""

FUNCTION_LOSS = LossKind(unsupported=_OF_WHOLE_LOGITS)
"""The properties of every loss that the user writes as a function."""

MODEL_LOSS = LossKind(
    unsupported=dict.fromkeys(
        (
            ("parallelism", "tensor_parallel_degree"),
            ("parallelism", "pipeline_parallel_degree"),
            ("parallelism", "context_parallel_degree"),
            *(("loss", name) for name in LossConfig.model_fields),
            ("compile", "components"),
        ),
        "cannot be used with {}, for which the launcher must compute the loss; remove one of the two keys",
    )
)
"""The properties of a loss that a model computes itself (`model.loss`)."""
