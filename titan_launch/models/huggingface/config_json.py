"""Conversion of the `config.json` of a folder of weights to a model's arguments, and back, without torch."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from titan_launch.config.sections.model import ModelConfig
from titan_launch.core import json_files
from titan_launch.core.errors import did_you_mean, format_key, leaves
from titan_launch.core.files import MIB, file_inside
from titan_launch.core.terminal import counted, short_name
from titan_launch.models.architectures import ALL_IN_ARGS, ARCHITECTURES, resolve_args, unknown_flavor, unknown_model
from titan_launch.models.args import ModelArgs
from titan_launch.models.decoder.args import DecoderArgs
from titan_launch.models.decoder.huggingface_classes import DROPOUT, FAMILIES, NEUTRAL, REFUSED, Family
from titan_launch.models.huggingface.args import class_name, label_names
from titan_launch.models.huggingface.files import (
    ADAPTER_CONFIG_FILE,
    CONFIG_FILE,
    Config,
    WeightsError,
    as_text,
    is_equal,
    unsupported,
)


@dataclass(frozen=True)
class FolderConfig:
    """The model to which the weights in a folder belong, as the folder's `config.json` describes it."""

    name: str
    """Name of the model in `[model]`."""

    flavor: str
    args: Mapping[str, Any]
    model_type: str | None
    """Key of `FAMILIES`; None for a folder in this package's own format."""

    config: Config
    """The whole `config.json`."""

    notes: tuple[str, ...] = ()
    """Sentences for the log about keys that `transformers` applies and this package ignores."""


def read_folder_config(folder: str | Path) -> FolderConfig:
    """Read the `config.json` of a Hugging Face folder, or of a folder that `import` or `export --format plain` wrote.

    Raises WeightsError if the file cannot be read, if the folder has an adapter of `peft`, or if no model of this
    package implements the model.
    """
    refuse_adapter(Path(folder))
    config = read_json(Path(folder) / CONFIG_FILE)
    if "model" in config and "model_type" not in config:
        return own_config(config)
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        known = ", ".join(FAMILIES)
        hint = did_you_mean(str(model_type), FAMILIES)
        found = f"the model_type {as_text(model_type)}, which no built-in model implements"
        reason = f"{CONFIG_FILE} has {found if 'model_type' in config else 'no model_type'}"
        raise WeightsError(f'{reason}; known: {known}{hint}; any other class trains with model.name = "huggingface"')
    args = arguments_of(config)
    family = FAMILIES[model_type]
    return FolderConfig(family.name, ALL_IN_ARGS, args, model_type, config, tuple(_notes(family, config)))


def own_config(config: Config) -> FolderConfig:
    """Return the model that a `config.json` in this package's own format names. A user's factory is not imported.
    Raises WeightsError for an unknown format, model or flavor, and for arguments that the model cannot have."""
    table: Any = config.get("model")
    try:
        table = {key: table[key] for key in ("name", "flavor", "args") if key in table}
        model = ModelConfig.model_validate({"name": None, "flavor": ALL_IN_ARGS, **table})
    except (TypeError, ValidationError):
        reason = f"{CONFIG_FILE} has neither the format of Hugging Face nor that of titan_launch"
        raise WeightsError(f"{reason}; name another folder") from None
    found = FolderConfig(model.name, model.flavor, model.args, None, config)
    if model.is_of_package:
        try:
            problems = list(resolve_args(model.name, model.flavor, model.args).problems())
        except KeyError:
            reason = f"its model.name is {as_text(model.name)}: {unknown_model(model.name)}"
            if model.name in ARCHITECTURES:
                reason = f"its model.flavor is {as_text(model.flavor)}: {unknown_flavor(model.name, model.flavor)}"
            raise WeightsError(reason) from None
        except ValidationError as error:
            first = error.errors()[0]
            reason = f"{short_name(format_key(first['loc']))} = {as_text(first['input'])}: {first['msg']}"
            raise WeightsError(f"{CONFIG_FILE} has an impossible value in model.args: {reason}") from None
        for _, reason in problems:
            raise WeightsError(f"{CONFIG_FILE} has an impossible value in model.args: {reason}")
    return found


def refuse_adapter(folder: Path) -> None:
    """Raise WeightsError for a folder with an adapter of `peft`, which `transformers` adds to the weights."""
    if os.path.lexists(folder / ADAPTER_CONFIG_FILE):
        reason = f"it has {ADAPTER_CONFIG_FILE}: an adapter of peft, which transformers adds to the weights"
        remedy = "name the folder of the base model instead (in a job, with lora.adapter = this folder)"
        raise WeightsError(f"{reason}; {remedy}, or merge the adapter into it with peft (merge_and_unload)")


_MOST_BYTES = 4 * MIB
"""Largest size of a `config.json` in bytes. A `config.json` with the names of 22,000 classes has 2 MiB."""

_REMEDIES = {name: f'; write {{"__float__": "{name}"}}, as transformers 5 does' for name in ("NaN", "Infinity")}


def read_json(path: Path, most_bytes: int = _MOST_BYTES) -> dict[str, Any]:
    """Read a JSON object from a file in a folder that somebody else may have made. Raises WeightsError if the file is
    missing, unreadable, too large or not a JSON object, or if a link leads out of the folder."""
    try:
        table = json_files.read_json(file_inside(path.parent, path.name), most_bytes)
    except FileNotFoundError:
        where = "there is no such folder" if not os.path.exists(path.parent) else f"it has no {path.name}"
        raise WeightsError(f"{where}; name a folder with {CONFIG_FILE} and *.safetensors") from None
    except OSError as error:
        raise WeightsError(f"{path.name} cannot be read: {error.strerror}") from None
    except json_files.JsonError as error:
        remedy = next((_REMEDIES[name] for name in _REMEDIES if f"{name} is not a JSON value" in str(error)), "")
        raise WeightsError(f"{path.name} is not valid JSON: {error}{remedy}") from None
    except ValueError as error:  # a path that no file can have
        raise WeightsError(f"{path.name} cannot be read: {error}") from None
    if not isinstance(table, dict):
        raise WeightsError(f"{path.name} must be a JSON object")
    return table


def longest_sequence(config: Config) -> int | None:
    """Return the length of the longest sequence that a Hugging Face `config.json` names; None if it names none."""
    found = config.get("max_position_embeddings", config.get("n_positions"))
    return found if type(found) is int and found > 0 else None


_MOST_SHOWN = 10
"""Largest number of unknown keys that an error names."""


def arguments_of(config: Config) -> dict[str, Any]:
    """Convert a Hugging Face `config.json` to `[model.args]`, without arguments that have their default value, and
    without arguments that have no effect. Raises WeightsError for keys that are not supported, and for values that the
    model cannot have."""
    family = FAMILIES[config["model_type"]]
    problems = [f"{CONFIG_FILE} has {key}: {reason}" for key, reason in REFUSED.items() if config.get(key) is not None]
    known_keys = family.known_keys
    unknown = [key for key in config if key not in known_keys]
    problems += [_unknown(family, key, config[key]) for key in unknown[:_MOST_SHOWN]]
    if len(unknown) > _MOST_SHOWN:
        problems.append(f"{CONFIG_FILE} has {counted(len(unknown) - _MOST_SHOWN, 'further unknown key')}")
    config, repeated = _without_aliases(family, config)
    problems += repeated
    for key, value in {**NEUTRAL, **family.neutral}.items():
        if not is_equal(config.get(key, value), value):
            problems.append(str(unsupported(key, config[key], f"supported: {json.dumps(value)}")))
    given: dict[str, Any] = dict(family.fixed)
    if class_name(config).endswith("ForSequenceClassification"):
        given["num_labels"] = _num_labels(config)
    keys_of: dict[str, tuple[str, ...]] = {"num_labels": ("id2label", "num_labels")}
    for feature in family.features:
        try:
            found = feature.read(config)
        except WeightsError as error:
            problems.append(str(error))
        except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError):
            values = ", ".join(f"{key} = {as_text(config[key])}" for key in feature.keys if key in config)
            problems.append(f"{CONFIG_FILE} has {values}: a value is missing or has the wrong type")
        else:
            given |= found
            keys_of |= dict.fromkeys(found, feature.keys)
    if problems:
        raise WeightsError("; ".join(dict.fromkeys(problems)))
    try:
        args = ARCHITECTURES[family.name].args.model_validate(given)
    except ValidationError as error:
        first = error.errors()[0]
        keys = _keys(config, keys_of, [str(first["loc"][0])])
        reason = f"the model's argument {format_key(first['loc'])} would be {as_text(first['input'])}: {first['msg']}"
        raise WeightsError(f"{CONFIG_FILE} has an impossible value{keys}: {reason}") from None
    token, size = _padding(family, config), config["vocab_size"]
    if token is not None and not (type(token) is int and -size <= token < size):
        raise unsupported("pad_token_id", token, f"supported: tokens of the vocabulary of {size}, and null")
    for names, reason in args.problems():
        raise WeightsError(f"{CONFIG_FILE} has an impossible value{_keys(config, keys_of, names)}: {reason}")
    without_effect = {name for name, _ in args.unused()}
    return args.model_dump(mode="json", exclude_defaults=True, exclude=without_effect)


def _num_labels(config: Config) -> Any:
    """Return the number of labels of a classifier: the length of `id2label`, else `num_labels`, else 2, the default of
    `transformers`. Return 0, which is refused later, if the keys of `id2label` are not "0", "1" and so on."""
    return config.get("num_labels", 2) if config.get("id2label") is None else len(label_names(config))


def _keys(config: Config, keys_of: Mapping[str, tuple[str, ...]], arguments: Iterable[str]) -> str:
    """Return the keys of `config.json` that decide `arguments`, with their values, as text for a message: ` in n_head =
    3, n_embd (absent)`. `keys_of`: the keys of each argument."""
    keys = dict.fromkeys(key for name in arguments for key in keys_of.get(name.partition(".")[0], ()))
    return f" in {', '.join(f'{key} = {as_text(config[key])}' if key in config else f'{key} (absent)' for key in keys)}"


def _unknown(family: Family, key: str, value: Any) -> str:
    hint = did_you_mean(key, family.known_keys)
    reason = f"which is not a known key of {family.model_class}{hint}; remove the key if it has no effect"
    return f"{CONFIG_FILE} has {short_name(key)} = {as_text(value)}, {reason}"


def _without_aliases(family: Family, config: Config) -> tuple[dict[str, Any], list[str]]:
    """Return a `config.json` in which aliases are replaced by the keys that they stand for, and a problem for each key
    whose value differs from the value of its alias."""
    table, problems = dict(config), []
    for alias, key in family.aliases.items():
        if alias not in table:
            continue
        value = table.pop(alias)
        if not is_equal(table.setdefault(key, value), value):
            reason = f"{alias} is another name of {key}, but {key} = {as_text(table[key])}; remove one of them"
            problems.append(str(unsupported(alias, value, reason)))
    return table, problems


def _padding(family: Family, config: Config) -> int | None:
    """Return the token whose row in the embedding gets no gradient in `transformers`; None if there is no such
    token."""
    return config.get("pad_token_id", family.pad_token) if family.pads else None


def config_of(
    name: str,
    args: DecoderArgs,
    dtype: str,
    max_positions: int,
    original: Config | None = None,
    labels: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Return the Hugging Face `config.json` of a model of this package.

    `dtype`: dtype of the weights. `max_positions`: sequence length of training. `original`: the `config.json` from
    which training started. If it is of the same class, its keys without effect on the computation are kept, such as
    token ids. `labels`: names of the outputs of a classifier, by default the names in `original` if their number fits,
    else LABEL_0 and so on. Raises WeightsError if no class of `transformers` implements the model with these arguments.
    """
    model_type = model_type_of(name)
    family = FAMILIES[model_type]
    kept = dict(original) if original is not None and original.get("model_type") == model_type else None
    if kept is None:
        kept = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
        scaling = args.rope_scaling
        kept["max_position_embeddings"] = max_positions
        if scaling is not None and scaling.kind in ("llama3", "yarn"):
            longest = int(scaling.factor * scaling.original_max_position)
            kept["max_position_embeddings"] = max(max_positions, longest)
    kept, _ = _without_aliases(family, kept)
    for key in (*(key for feature in family.features for key in feature.keys), "dtype", "torch_dtype"):
        kept.pop(key, None)
    model_class = family.class_of(args.num_labels)
    written: dict[str, Any] = {"architectures": [model_class], "model_type": model_type, "torch_dtype": dtype}
    for feature in family.features:
        written |= feature.write(args)
    if args.num_labels is not None:
        numbers = [str(index) for index in range(args.num_labels)]
        before = kept.get("id2label")
        if labels is None:
            labels = [f"LABEL_{number}" for number in numbers]
            if isinstance(before, dict) and [*before] == numbers:
                labels = [*before.values()]
        written["id2label"] = dict(zip(numbers, labels, strict=True))
        written["label2id"] = {label: index for index, label in enumerate(labels)}
        kept = {key: value for key, value in kept.items() if key not in ("num_labels", "problem_type")}
    config = {**family.neutral, **kept, **written}  # other libraries may have other defaults than the class
    if lost := _differing(args, resolve_args(name, ALL_IN_ARGS, arguments_of(config))):
        key, own, other = lost[0]
        reason = f"{model_class} of transformers has no counterpart of model.args.{key} = {json.dumps(own)}"
        raise WeightsError(f"{reason} (the class computes with {json.dumps(other)}); --format plain writes any model")
    return config


def model_type_of(name: str) -> str:
    """Return the `model_type` of a model of this package. Raises WeightsError if `transformers` has none."""
    for model_type, family in FAMILIES.items():
        if family.name == name:
            return model_type
    known = ", ".join(family.name for family in FAMILIES.values())
    raise WeightsError(
        f"no class of transformers implements the model {name}; known: {known}; --format plain writes any model"
    )


def differences(own: ModelArgs, folder: FolderConfig) -> list[tuple[str, Any, Any]]:
    """Return (argument, value of the job, value of the folder) for each argument that differs. A larger vocabulary of
    the job is no difference, because its last rows are padding. `num_labels` is not compared."""
    theirs = resolve_args(folder.name, folder.flavor, folder.args)
    differing = _differing(own, theirs)
    return [(key, a, b) for key, a, b in differing if key != "num_labels" and not (key == "vocab_size" and a > b)]


def _differing(own: ModelArgs, other: ModelArgs) -> list[tuple[str, Any, Any]]:
    """Return (argument, value in `own`, value in `other`) for each argument that differs in two ways: as set, and in
    its effective value. (If only the effective values differ, the cause is another argument.) The result has the
    effective values of unset arguments. Arguments in tables have names such as `experts.top_k`."""
    ours, theirs = (dict(leaves(args.effective())) for args in (own, other))
    set_here, set_there = (dict(leaves(args.model_dump(mode="json"))) for args in (own, other))
    own_values, other_values = (
        {**effective, **{key: value for key, value in given.items() if value is not None}}
        for effective, given in ((ours, set_here), (theirs, set_there))
    )
    return [
        (key, own_values.get(key), other_values.get(key))
        for key in {**ours, **theirs}
        if ours.get(key) != theirs.get(key) and set_here.get(key) != set_there.get(key)
    ]


def _notes(family: Family, config: Config) -> list[str]:
    notes = []
    if dropout := [f"{key} = {config[key]}" for key in DROPOUT if config.get(key)]:
        notes.append(f"dropout is not applied: {', '.join(dropout)}")
    if (token := _padding(family, config)) is not None:
        reason = f"pad_token_id = {token}: the embedding of this token is trained like any other"
        notes.append(f"{reason}; {family.model_class} of transformers gives it no gradient from inputs")
    return notes
