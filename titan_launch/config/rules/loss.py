"""Rules across sections for the loss, and the job that describes the second model of a loss."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from titan_launch.config.job import JobConfig
from titan_launch.config.loading.provenance import toml_value
from titan_launch.config.rules.data import sources_of, sources_with
from titan_launch.config.rules.model import args_problem
from titan_launch.config.rules.tables import changed_keys
from titan_launch.config.sections.data import ClassificationData, FactoryData, PreferenceData, TokensData
from titan_launch.config.sections.loss import (
    ANSWERS,
    BASE,
    LOSSES,
    MODEL_LOSS,
    FrozenModelConfig,
    LossConfig,
    ReferenceConfig,
)
from titan_launch.config.sections.model import LoRAConfig, ModelConfig
from titan_launch.config.sections.parallelism import ActivationCheckpointConfig, CompileConfig
from titan_launch.config.sections.precision import BatchNormConfig, Float8Config
from titan_launch.config.sections.section import is_import_string
from titan_launch.config.sections.training import GradientAccumulationConfig
from titan_launch.core.errors import ConfigError, KeyPath, Problem, config_error, did_you_mean, format_key
from titan_launch.core.globs import matches
from titan_launch.models.architectures import (
    ARCHITECTURES,
    known_args,
    labels_taken,
    selection_bias_rate,
    unit_taken,
    vocabulary_taken,
)
from titan_launch.models.huggingface.args import label_names

_NAME: KeyPath = ("loss", "name")


def loss_exists(config: JobConfig) -> Iterator[Problem]:
    """Report a problem if `loss.name` is neither a loss of this package nor a valid import string."""
    name, known = config.loss.name, tuple(LOSSES)
    if ":" in name:
        if not is_import_string(name):
            yield Problem(_NAME, "must have the form package.module:function for a loss of your own", name)
    elif name not in known:
        names, hint = ", ".join(f'"{loss}"' for loss in known), did_you_mean(name, known)
        yield Problem(_NAME, f"unknown loss; must be {names}, or package.module:function for your own{hint}", name)


def loss_has_its_table(config: JobConfig) -> Iterator[Problem]:
    """Report a problem if the job lacks the table that its loss needs, or has the table of another loss."""
    for name, kind in ((name, kind) for name, kind in LOSSES.items() if kind.table is not None):
        has_table, table = getattr(config.loss, name) is not None, f"[loss.{name}]"
        if config.loss.name == name and kind.second_model is not None and not has_table:
            reason = f"needs the table {table} with the key {kind.second_model}"
            yield Problem(_NAME, reason, name, also=(("loss", name),))
        elif has_table and config.loss.name != name:
            reason = f'applies only to loss.name = "{name}"; remove this table, or set that name'
            yield Problem(("loss", name), reason, also=(_NAME,))


def loss_is_supported(config: JobConfig) -> Iterator[Problem]:
    """Report a problem for each used key that the loss of the job does not support (see `LossKind.unsupported`)."""
    for key, reason in config.loss.kind.unsupported.items():
        if _is_used(config, key):
            value = getattr(getattr(config, key[0]), key[1])
            yield Problem(key, reason.format(config.loss.name), value, also=(_NAME,))


def model_loss_is_supported(config: JobConfig) -> Iterator[Problem]:
    """Report a problem if `model.loss` is set for a model of this package, and for each used key that `model.loss` does
    not support."""
    loss, key = config.model.loss, ("model", "loss")
    if loss is None:
        return
    if config.model.name in ARCHITECTURES:
        reason = f"{config.model.name} returns logits and computes no loss; remove this key"
        yield Problem(key, reason, loss, also=(("model", "name"),))
    for other, reason in MODEL_LOSS.unsupported.items():
        if _is_used(config, other):
            yield Problem(key, reason.format(format_key(other)), loss, also=(other,))


def _is_used(config: JobConfig, key: tuple[str, str]) -> bool:
    """Return True if a key is set and has an effect in this job."""
    if key == ("parallelism", "loss_parallel"):
        return config.parallelism.loss_parallel and config.parallelism.tensor_parallel_degree > 1
    if key == ("compile", "components"):
        return config.compile.enable and "loss" in config.compile.components
    return any(changed_keys(config, format_key(key)))


def answers_are_for_their_losses(config: JobConfig) -> Iterator[Problem]:
    """Report a problem for each data source whose kind does not suit the loss. Only losses of pairs read pairs of
    answers, and only `kto` reads answers with a label. These losses read nothing else. (Token files and factories with
    `samples = "documents"` may also have such answers. A run checks these token files, but not the factories.)"""
    name, needed = config.loss.name, config.loss.kind.data_kind
    for source, data in sources_of(config):
        if data.kind == needed or isinstance(data, TokensData):
            continue
        if needed is not None:
            if not (isinstance(data, FactoryData) and data.samples == "documents"):
                reason = f'has no {ANSWERS[needed]}, which loss.name = "{name}" needs; set kind = "{needed}"'
                yield Problem((*source, "kind"), reason, data.kind, also=(_NAME,))
        elif data.kind in ANSWERS:
            known = [f'"{loss}"' for loss, kind in LOSSES.items() if kind.data_kind == data.kind]
            choice = "that name" if len(known) == 1 else "one of these names"
            used = f"which only loss.name = {' or '.join(known)} uses"
            reason = f'has {ANSWERS[data.kind]}, {used}, not "{name}"; set loss.name to {choice}'
            yield Problem((*source, "kind"), reason, data.kind, also=(_NAME,))


def outputs_suit_the_loss(config: JobConfig) -> Iterator[Problem]:
    """For a model of this package, report a problem if `num_labels` does not suit the loss or the data. There are four
    problems: a loss for language models with `num_labels`; a wrong number of labels; `num_labels` with data without
    labels; and targets that the loss does not read (`train_on`)."""
    args, name = known_args(config.model), config.loss.name
    if args is None or not args.supports_labels:
        return
    labels = labels_taken(config.model)
    has_labels = labels is not None
    if has_labels and name not in ("cross_entropy", "reward"):
        reason = f'is for language models, not for num_labels = {labels}; set loss.name = "cross_entropy" or "reward"'
        yield Problem(_NAME, reason, name, also=(("model", "args", "num_labels"),))
    elif name == "reward" and labels != 1:
        reason = 'num_labels must be 1 for loss.name = "reward", which reads one number for each answer'
        yield args_problem(config, ("num_labels",), reason, also=(_NAME,))
    for source, data in sources_of(config):
        also = (("model", "args", "num_labels"), _NAME)
        if isinstance(data, ClassificationData) and labels != len(data.labels):
            reason = f"num_labels must be {len(data.labels)}, the number of labels in {format_key((*source, 'labels'))}"
            yield args_problem(config, ("num_labels",), reason, also=((*source, "labels"),))
        elif isinstance(data, PreferenceData) and (data.train_on == "end") != (name == "reward"):
            needed = "end" if name == "reward" else "last"
            reason = f'has targets that loss.name = "{name}" does not read; set train_on = "{needed}"'
            yield Problem((*source, "train_on"), reason, data.train_on, also=also)
        elif (
            has_labels
            and name == "cross_entropy"
            and not isinstance(data, ClassificationData | TokensData | FactoryData)
        ):
            reason = f'has no labels, but model.args.num_labels is {labels}; set kind = "classification"'
            yield Problem((*source, "kind"), reason, data.kind, also=also)


def labels_mean_the_same(config: JobConfig) -> Iterator[Problem]:
    """Report a problem for each source whose `labels` differ from the `labels` of the first source, in names or in
    order. The same output of the model would then stand for different labels."""
    sources = list(sources_with(config, ClassificationData))
    for source, data in sources[1:]:
        first, expected = sources[0]
        if data.labels != expected.labels:
            reason = f"must be the labels of {format_key((*first, 'labels'))}, in the same order"
            yield Problem((*source, "labels"), reason, list(data.labels), also=((*first, "labels"),))


def labels_have_the_order_of_the_weights(config: JobConfig) -> Iterator[Problem]:
    """For a job that uses the output layer of `model.weights`, report a problem if the labels of the first source are
    the labels in this folder, but in another order. The outputs would then have wrong names."""
    model = config.model
    if model.weights is None or any(matches(glob, "output.weight") for glob in model.exclude_from_weights):
        return
    from titan_launch.models.huggingface.config_json import read_json
    from titan_launch.models.huggingface.files import CONFIG_FILE, WeightsError

    for source, data in itertools.islice(sources_with(config, ClassificationData), 1):
        with suppress(WeightsError):  # `weights_are_of_the_model` reports the error
            names = label_names(read_json(Path(model.weights, CONFIG_FILE)))
            if [*data.labels] != names and sorted(data.labels) == sorted(names):
                order = f"must have the order of id2label in {model.weights}/{CONFIG_FILE}, {toml_value(names)}"
                reason = f'{order}; or, for a new output layer, set model.exclude_from_weights = ["output.weight"]'
                yield Problem((*source, "labels"), reason, list(data.labels), also=(("model", "weights"),))


def base_is_frozen(config: JobConfig) -> Iterator[Problem]:
    """For a loss with `reference = "base"`, report a problem if the job has no adapters, trains parameters of the base
    model, or moves selection biases of experts. (The class `Base` checks running statistics.)"""
    settings = config.loss.settings
    if not isinstance(settings, ReferenceConfig) or settings.reference != BASE:
        return
    key: KeyPath = ("loss", config.loss.name, "reference")
    if not config.lora.targets:
        reason = (
            "is the trained model without its adapters, but the job has no adapters; set lora.targets, or name a folder"
        )
        yield Problem(key, reason, BASE, also=(("lora", "targets"),))
    for name in ("trainable", "unfreeze"):
        if getattr(config.training, name):
            why = f"is the base model, which must stay frozen, but training.{name} trains parameters of the base model"
            reason = f"{why}; remove training.{name}, or name a folder"
            yield Problem(key, reason, BASE, also=(("training", name),))
    if rate := selection_bias_rate(config.model):
        cause = f"model.args.experts.selection_bias_rate = {rate} moves selection biases of the base model"
        reason = f"is the base model, which must stay frozen, but {cause}"
        yield Problem(key, f"{reason}; set this rate to 0, or name a folder", BASE, also=(("model",),))


def second_model_fits(config: JobConfig) -> Iterator[Problem]:
    """Report a problem if the folder of the second model cannot be read. Also report a problem if the second model does
    not take the inputs of the trained model: their unit, vocabulary, or sequence length."""
    second = config.loss.frozen_model()
    if second is None:
        return
    try:
        model = frozen_job(config, second).model
    except ConfigError as error:
        yield from error.problems
        return
    if unit_taken(model) != config.data.unit:
        reason = f"holds a model ({model.name}) that takes {unit_taken(model)}, but the data has {config.data.unit}"
        yield Problem(second.key, f"{reason}; name another model", second.folder, also=(("data", "kind"),))
        return
    theirs, own = vocabulary_taken(model), vocabulary_taken(config.model)
    if None not in (theirs, own) and theirs != own:
        reason = f"has a vocabulary of {theirs} tokens, but the trained model has {own} tokens; name another model"
        yield Problem(second.key, reason, second.folder, also=(("model", "name"), ("model", "args")))
    args, seq_len = known_args(model), config.training.seq_len
    longest = None if args is None else args.longest_sequence()
    if longest is not None and seq_len > longest[1]:
        reason = (
            f"has positions for only {longest[1]} tokens; set training.seq_len (now {seq_len}) to {longest[1]} or less"
        )
        yield Problem(second.key, reason, second.folder, also=(("training", "seq_len"),))


def frozen_job(config: JobConfig, second: FrozenModelConfig) -> JobConfig:
    """Return the job that describes the second model of a loss: its folder, its dtypes, and nothing that only training
    needs. Raises ConfigError if the folder cannot be read, or does not hold a model of this package.

    The precision rules of the job apply to the second model only if it has the same arguments as the trained model.
    """
    from titan_launch.models.huggingface.config_json import differences, read_folder_config
    from titan_launch.models.huggingface.files import WeightsError

    try:
        folder = read_folder_config(second.folder)
    except WeightsError as error:
        raise config_error(second.key, str(error), second.folder) from None
    if folder.name not in ARCHITECTURES:
        reason = f"holds {folder.name}, which is not a model of this package; name a folder with such a model"
        raise config_error(second.key, reason, second.folder)
    args = known_args(config.model)
    is_same = folder.name == config.model.name and args is not None and not differences(args, folder)
    if is_same:
        model = config.model.model_copy(update={"weights": second.folder, "exclude_from_weights": ()})
    else:
        model = ModelConfig(
            name=folder.name, flavor=folder.flavor, args=dict(folder.args), weights=second.folder, loss=None
        )
    own, dtype = config.precision, second.dtype or config.precision.param_dtype
    rules = [
        rule.model_copy(update={"storage_dtype": rule.storage_dtype or rule.param_dtype or own.storage_dtype})
        for rule in own.rules
    ]
    frozen = {
        "model": model,
        "precision": own.model_copy(
            update={
                "storage_dtype": dtype,
                "frozen_storage_dtype": None,
                "param_dtype": dtype,
                "rules": tuple(rules) if is_same else (),
            }
        ),
        "training": config.training.model_copy(update={"trainable": None, "frozen": (), "unfreeze": ()}),
        "lora": LoRAConfig(),
        "batchnorm": BatchNormConfig(),
        "loss": LossConfig(),
        "activation_checkpoint": ActivationCheckpointConfig(),
        "gradient_accumulation": GradientAccumulationConfig(),
        "compile": CompileConfig(),
        "float8": Float8Config(),
    }
    return config.model_copy(update=frozen)


LOSS_RULES = (
    loss_exists,
    loss_has_its_table,
    loss_is_supported,
    model_loss_is_supported,
    answers_are_for_their_losses,
    outputs_suit_the_loss,
    labels_mean_the_same,
    labels_have_the_order_of_the_weights,
    base_is_frozen,
    second_model_fits,
)
