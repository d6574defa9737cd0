"""Rules across sections for training data and validation data."""

from __future__ import annotations

import os
from collections.abc import Iterator

from titan_launch.config.architectures import images_taken, known_args, unit_taken, vocabulary_taken
from titan_launch.config.job import JobConfig
from titan_launch.config.rules.model import args_problem
from titan_launch.config.sections.data import (
    DATA_KINDS,
    DIGITS,
    SKLEARN_DIGITS,
    DataSource,
    ImageData,
    SampleUnit,
    SyntheticData,
    TextData,
    TokensData,
    misfits,
    names_a_file,
)
from titan_launch.config.sections.tokenizer import TOKENIZER_FILE, special_token, vocabulary_size
from titan_launch.core.errors import ConfigError, KeyPath, Problem, format_key

_Split = TextData | ImageData
_NAME: KeyPath = ("model", "name")


def data_suits_the_model(config: JobConfig) -> Iterator[Problem]:
    """Report a problem for each data table whose unit (tokens or images) is not the unit that the model takes."""
    unit = unit_taken(config.model)
    for source, data in _sources(config):
        if unit is not None and data.unit != unit:
            reason = f"the model {config.model.name} takes {unit}, not {data.unit}; set {_kinds_of(unit)}"
            yield Problem((*source, "kind"), reason, data.kind, also=(_NAME,))


def validation_has_the_unit_of_training(config: JobConfig) -> Iterator[Problem]:
    """Report a problem if validation data and training data have different units (tokens, images). This rule is only
    for a factory; for the package's models, `data_suits_the_model` checks both."""
    held_out, unit = config.validation.data, config.data.unit
    if unit_taken(config.model) is None and held_out is not None and held_out.unit != unit:
        reason = f"consists of {held_out.unit}, but the training data consists of {unit}; set {_kinds_of(unit)}"
        yield Problem(("validation", "data", "kind"), reason, held_out.kind, also=(_NAME, ("data", "kind")))


def tokenizer_is_usable(config: JobConfig) -> Iterator[Problem]:
    """Report a problem if keys of the tokenizer contradict each other, or if its file cannot be used."""
    tokenizer = config.tokenizer
    if tokenizer.kind == "bytes":
        for name, value in tokenizer.changed("path", "end_of_document", "begin_of_document"):
            reason = 'is only for tokenizer.kind = "huggingface"; set it, or remove this key'
            yield Problem(("tokenizer", name), reason, value, also=(("tokenizer", "kind"),))
    elif tokenizer.path is None:
        reason = f"needs tokenizer.path, a {TOKENIZER_FILE} or a folder that contains one"
        yield Problem(("tokenizer", "kind"), reason, tokenizer.kind)
    else:
        try:
            special_token(tokenizer)
        except ConfigError as error:
            yield from error.problems


def vocabulary_is_large_enough(config: JobConfig) -> Iterator[Problem]:
    """Report a problem if the model's vocabulary is smaller than the vocabulary of its data."""
    vocab_size = vocabulary_taken(config.model)
    if any(tokenizer_is_usable(config)):
        return
    for source, data in _sources(config):
        if data.unit != "tokens":
            continue
        size, owner, key = _vocabulary(config, source, data)
        if vocab_size is not None and vocab_size < size:
            reason = (
                f"the model's vocab_size ({vocab_size}) must be at least {size}, the vocabulary size of {owner}; "
                "set model.args.vocab_size to that number or more"
            )
            yield args_problem(config, ("vocab_size",), reason, also=(key, (*source, "kind")))


def text_files_exist(config: JobConfig) -> Iterator[Problem]:
    """Report a problem for each entry of a `path` to texts that matches no file."""
    for source, data in _sources(config):
        if isinstance(data, TextData):
            entries = [data.path] if isinstance(data.path, str) else data.path
            for index, entry in enumerate(entries):
                key = (*source, "path") if isinstance(data.path, str) else (*source, "path", index)
                if not names_a_file(entry):
                    yield Problem(key, _why_no_file(entry), entry, also=((*source, "kind"),))


def token_files_exist(config: JobConfig) -> Iterator[Problem]:
    """Report a problem for each `path` to token files that names no folder or file, and for a `dtype` of a folder."""
    for source, data in _sources(config):
        if not isinstance(data, TokensData):
            continue
        also = ((*source, "kind"),)
        if os.path.isdir(data.path):
            if data.dtype is not None:
                reason = "is only for flat files, but path is a folder; remove this key"
                yield Problem((*source, "dtype"), reason, data.dtype, also=(*also, (*source, "path")))
        elif not (names_a_file(data.path) or os.path.isfile(f"{data.path}.bin")):
            reason = "must be a folder that titan-launch prepare wrote, or files of another program, and must exist"
            yield Problem((*source, "path"), reason, data.path, also=also)


def image_files_exist(config: JobConfig) -> Iterator[Problem]:
    """Report a problem for each `path` to images that is not a file."""
    for source, data in _sources(config):
        if isinstance(data, ImageData) and data.path != SKLEARN_DIGITS and not os.path.isfile(data.path):
            reason = f'must be an existing file, relative to the working directory, or "{SKLEARN_DIGITS}"'
            yield Problem((*source, "path"), reason, data.path, also=((*source, "kind"),))


def digits_suit_the_model(config: JobConfig) -> Iterator[Problem]:
    """Report a problem for each difference between the images of `sklearn-digits` and those that the model takes. (A
    run checks other images when it reads them.)"""
    taken = images_taken(config.model) if known_args(config.model) or not config.model.is_of_package else None
    for source, data in _sources(config):
        if taken is not None and isinstance(data, ImageData) and data.path == SKLEARN_DIGITS:
            for reason in misfits(DIGITS, taken):
                yield Problem((*source, "path"), reason, data.path, also=(("model",), (*source, "kind")))


def validation_has_data(config: JobConfig) -> Iterator[Problem]:
    """Report a problem if `validation.freq` is above 0 but there is no validation data."""
    if config.validation.freq and config.validation.data is None:
        reason = 'requires validation data; add [validation.data], for example with path and split = "validation"'
        yield Problem(("validation", "freq"), reason, config.validation.freq, also=(("validation", "data"),))


def validation_samples_are_held_out(config: JobConfig) -> Iterator[Problem]:
    """Report a problem if the validation split overlaps with the training data."""
    train, held_out = config.data, config.validation.data
    if not (isinstance(train, _Split) and isinstance(held_out, _Split) and config.validation.freq):
        return
    if train.kind != held_out.kind or train.path != held_out.path or held_out.split != "validation":
        return
    also = (("data",), ("validation", "freq"), ("validation", "data", "path"))
    if train.split != "train":
        what = "documents" if isinstance(held_out, TextData) else "images"
        reason = f'these {what} are also in the training data; set data.split = "train"'
        yield Problem(("validation", "data", "split"), reason, held_out.split, also=also)
    elif train.validation_percent != held_out.validation_percent:
        reason = f"must equal data.validation_percent ({train.validation_percent}), otherwise the two splits overlap"
        yield Problem(("validation", "data", "validation_percent"), reason, held_out.validation_percent, also=also)


def validation_sequences_are_new(config: JobConfig) -> Iterator[Problem]:
    """Report a problem if synthetic validation data has the same sequences as the training data."""
    train, held_out = config.data, config.validation.data
    if not (isinstance(train, SyntheticData) and isinstance(held_out, SyntheticData) and config.validation.freq):
        return
    if (train.seed, train.vocab_size, train.noise) == (held_out.seed, held_out.vocab_size, held_out.noise):
        reason = "gives the same sequences as [data]; set another seed here or in [data]"
        also = (("data",), ("validation", "data"), ("validation", "freq"))
        yield Problem(("validation", "data", "seed"), reason, held_out.seed, also=also)


def validation_images_are_normalized_as_in_training(config: JobConfig) -> Iterator[Problem]:
    """Report a problem if `mean` or `std` of the validation images differs from that of the training images."""
    train, held_out = config.data, config.validation.data
    if not (isinstance(train, ImageData) and isinstance(held_out, ImageData) and config.validation.freq):
        return
    for name, ours, theirs in (("mean", held_out.mean, train.mean), ("std", held_out.std, train.std)):
        if ours != theirs:
            value = list(theirs) if isinstance(theirs, tuple) else theirs
            reason = f"must equal data.{name} ({value}), so that training and validation normalize images equally"
            yield Problem(("validation", "data", name), reason, ours, also=(("data", name), ("data", "kind")))


CORPUS_RULES = (tokenizer_is_usable, text_files_exist)
"""The rules for the text and the tokenizer that `titan-launch prepare` reads."""

DATA_RULES = (
    data_suits_the_model,
    validation_has_the_unit_of_training,
    tokenizer_is_usable,
    vocabulary_is_large_enough,
    text_files_exist,
    token_files_exist,
    image_files_exist,
    digits_suit_the_model,
    validation_has_data,
    validation_samples_are_held_out,
    validation_sequences_are_new,
    validation_images_are_normalized_as_in_training,
)
"""The rules of this file."""


def _sources(config: JobConfig) -> Iterator[tuple[KeyPath, DataSource]]:
    """Yield (path, table) for `[data]`, and for `[validation.data]` if it exists."""
    yield ("data",), config.data
    if config.validation.data is not None:
        yield ("validation", "data"), config.validation.data


def _kinds_of(unit: SampleUnit) -> str:
    """Return a remedy that lists the kinds of data whose samples have this unit: `kind = "text" or "synthetic"`."""
    return "kind = " + " or ".join(f'"{kind}"' for kind, data in DATA_KINDS.items() if data.unit == unit)


def _why_no_file(entry: str) -> str:
    if os.path.isdir(entry):
        return "this folder contains no files; name a folder with files, or a file"
    what = "no file matches this pattern" if any(char in entry for char in "*?[") else "no such file or folder"
    return f"{what} (paths are relative to the working directory)"


def _vocabulary(config: JobConfig, source: KeyPath, data: DataSource) -> tuple[int, str, KeyPath]:
    """Return the vocabulary size of a data source, a name for messages of the table or tokenizer that sets the size,
    and the key that sets the size."""
    own = data.own_vocabulary()
    if own is not None:
        return own, f"[{format_key(source)}]", (*source, "vocab_size")
    kind = config.tokenizer.kind
    return vocabulary_size(config.tokenizer), f'the "{kind}" tokenizer', ("tokenizer", "kind")
