"""Rules across sections for training data and validation data."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator
from operator import itemgetter
from typing import TypeVar

from titan_launch.config.job import JobConfig
from titan_launch.config.paths import first_names, names_a_file
from titan_launch.config.rules.model import args_problem
from titan_launch.config.sections.data import (
    DATA_KINDS,
    CorpusData,
    DataSource,
    FactoryData,
    FilesData,
    HuggingFaceData,
    ImageData,
    MixtureData,
    MixtureEntry,
    SampleUnit,
    SyntheticData,
    TextData,
    TokensData,
    misread_as_text,
    separates_documents,
    stream_problems,
)
from titan_launch.config.sections.tokenizer import TOKENIZER_FILE, special_token, vocabulary_size
from titan_launch.core.errors import UNSET, ConfigError, KeyPath, Problem, format_key
from titan_launch.models.architectures import known_args, unit_taken, vocabulary_taken

_SMALLEST_SHARE = 1 << 16
"""Reciprocal of the smallest share: a weight that is not 0 must be at least 1/65,536 of the sum of all weights. The
order of a mixture needs a table with at least (sum of all weights / smallest weight) positions."""

Kind = TypeVar("Kind", bound=DataSource)
_Split = CorpusData | ImageData
_NAME: KeyPath = ("model", "name")


def data_suits_the_model(config: JobConfig) -> Iterator[Problem]:
    """Report a problem for each data table whose unit (tokens or images) is not the unit that the model takes."""
    unit = unit_taken(config.model)
    for source, data in sources_of(config):
        if unit is not None and data.unit != unit:
            remedy = f'set samples = "{unit}"' if isinstance(data, FactoryData) else f"set {_kinds_of(unit)}"
            reason = f"the model {config.model.name} takes {unit}, not {data.unit}; {remedy}"
            yield Problem((*source, "kind"), reason, data.kind, also=(_NAME,))


def all_data_has_one_unit(config: JobConfig) -> Iterator[Problem]:
    """Report a problem for each data table whose unit (tokens or images) differs from that of the first table. This
    rule is for models whose unit is unknown, such as models of a factory. For other models, `data_suits_the_model`
    checks all tables."""
    if unit_taken(config.model) is not None:
        return
    (first, train), *others = list(sources_of(config)) or [(("data",), config.data)]
    for source, data in others:
        if data.unit != train.unit:
            what = "the training data" if source[0] == "validation" else format_key(first)
            reason = f"has samples of {data.unit}, but {what} has samples of {train.unit}; set {_kinds_of(train.unit)}"
            yield Problem((*source, "kind"), reason, data.kind, also=(_NAME, (*first, "kind")))


def mixtures_are_complete(config: JobConfig) -> Iterator[Problem]:
    """Report a problem for a mixture without sources. Also report a problem for each source whose name cannot be part
    of a metric, or is the name of an earlier source."""
    for key, data in _tables(config):
        if not isinstance(data, MixtureData):
            continue
        if not data.sources:
            yield Problem(
                (*key, "sources"), f"must have a table [[{format_key((*key, 'sources'))}]] for each source", []
            )
        owners: dict[str, KeyPath] = {}
        for index, source in enumerate(data.sources):
            place, name = (*key, "sources", index), source.effective_name()
            if re.fullmatch(r"[\w.-]+", name, re.ASCII) is None:
                yield Problem((*place, "name"), "must consist of letters, digits, ., _ and -", name)
            elif name in owners:
                reason = f'its name is "{name}", which is also the name of {format_key(owners[name])}; set another name'
                yield Problem((*place, "name") if source.name else place, reason, source.name or UNSET)
            owners.setdefault(name, place)


def mixture_weights_are_usable(config: JobConfig) -> Iterator[Problem]:
    """Report a problem for each weight of a mixture that has no effect, is not valid, or is too small. Also report a
    problem if all weights are 0 at the same step."""
    for key, data in _tables(config):
        if not isinstance(data, MixtureData):
            continue
        weights = [(*key, "sources", index, "weight") for index in range(len(data.sources))]
        problems = [
            Problem(place, reason, source.weight)
            for place, source in zip(weights, data.sources, strict=True)
            if (reason := _why_no_weight(source, is_training=key == ("data",))) is not None
        ]
        yield from problems
        for step, shares in [] if problems else data.stages():
            total = sum(shares)
            too_small = [index for index, share in enumerate(shares) if 0 < share * _SMALLEST_SHARE < total]
            limit = f"1/{_SMALLEST_SHARE} of the sum of all weights"
            reason = f"the weight from step {step} on is less than {limit}; set the weight to 0 or to a larger number"
            if shares and not total:
                too_small, reason = [0], f"all sources have the weight 0 from step {step} on; set a larger weight"
            for index in too_small:
                yield Problem(weights[index], reason, data.sources[index].weight, also=tuple(weights))


def tokenizer_is_usable(config: JobConfig) -> Iterator[Problem]:
    """Report a problem if keys of `[tokenizer]` contradict each other, if `tokenizer.path` is missing, or if the file
    at this path cannot be used."""
    tokenizer = config.tokenizer
    if tokenizer.kind == "bytes":
        for name, value in tokenizer.changed("path", "end_of_document", "begin_of_document"):
            reason = 'is only for tokenizer.kind = "huggingface"; set that kind, or remove this key'
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
    """Report a problem if the model's vocabulary is smaller than the largest vocabulary of the data."""
    vocab_size = vocabulary_taken(config.model)
    if vocab_size is None or any(tokenizer_is_usable(config)):
        return
    texts = ((source, data) for source, data in sources_of(config) if data.unit == "tokens")
    needed = [(*_vocabulary(config, source, data), (*source, "kind")) for source, data in texts]
    if needed and vocab_size < max(size for size, *_ in needed):
        size, owner, key, kind = max(needed, key=itemgetter(0))
        reason = (
            f"the model's vocab_size ({vocab_size}) must be at least {size}, the vocabulary size of {owner}; "
            "set model.args.vocab_size to that number or more"
        )
        yield args_problem(config, ("vocab_size",), reason, also=(key, kind))


def files_exist(config: JobConfig) -> Iterator[Problem]:
    """Report a problem for each entry of a `path` to texts that matches no file."""
    for source, data in sources_with(config, FilesData):
        if not data.path:
            yield Problem((*source, "path"), "must name at least one file, folder or glob", data.path)
        for key, entry in entries_of(source, data):
            if not names_a_file(entry, data.suffixes):
                yield Problem(key, _why_no_file(entry, data.suffixes), entry, also=((*source, "kind"),))


def text_is_no_records(config: JobConfig) -> Iterator[Problem]:
    """Report a problem for each entry of a `path` to text that has files with records, such as JSON lines. In a
    folder, this rule checks at most 10,000 files; a run checks all files. Of a glob, only the end is checked, because a
    glob such as `FOLDER/**/*` may be meant to name files of any suffix."""
    for source, data in sources_with(config, TextData):
        for key, entry in entries_of(source, data):
            names = first_names(entry, _MOST_FILES) if os.path.isdir(entry) else [entry]
            if reason := misread_as_text(entry, names):
                yield Problem(key, reason, entry, also=((*source, "kind"),))


_MOST_FILES = 10_000
"""Largest number of files in a folder that a rule checks. The number is limited because every rank of a run checks the
rules."""


def token_files_exist(config: JobConfig) -> Iterator[Problem]:
    """Report a problem for each `path` to token files that names no folder or file, and for a `dtype` if `path` is a
    folder."""
    for source, data in sources_with(config, TokensData):
        also = ((*source, "kind"),)
        if os.path.isdir(data.path):
            if data.dtype is not None:
                reason = "is only for flat files, but path is a folder; remove this key"
                yield Problem((*source, "dtype"), reason, data.dtype, also=(*also, (*source, "path")))
        elif not (names_a_file(data.path, ("",)) or os.path.isfile(f"{data.path}.bin")):
            reason = "must be an existing folder that titan-launch prepare wrote, or existing files of another program"
            yield Problem((*source, "path"), reason, data.path, also=also)


def streams_are_only_read_in_order(config: JobConfig) -> Iterator[Problem]:
    """Report a problem for each key that a table with `streaming` does not support."""
    for key, data in sources_with(config, HuggingFaceData):
        if data.streaming:
            yield from stream_problems(data, key)
            if data.packing != "concat":
                reason = 'is not supported for a stream; set packing = "concat", or remove streaming'
                yield Problem((*key, "packing"), reason, data.packing, also=((*key, "streaming"),))


def epochs_have_a_length(config: JobConfig) -> Iterator[Problem]:
    """Report a problem if `training.epochs` is set and the data is a stream, whose length is unknown."""
    epochs = config.training.epochs
    if epochs is not None and isinstance(config.data, HuggingFaceData) and config.data.streaming:
        yield Problem(("training", "epochs"), NO_EPOCHS_OF_A_STREAM, epochs, also=(("data", "streaming"),))


NO_EPOCHS_OF_A_STREAM = "the data is a stream, whose length is unknown; set training.steps instead"


def validation_samples_are_held_out(config: JobConfig) -> Iterator[Problem]:
    """Report a problem if validation reads samples of the training data: the same `path`, and no separate splits. (With
    `split = "train"`, validation may read training samples.)"""
    for (train_key, train), (key, held_out) in pairs_of(config, DataSource):
        if not (isinstance(train, _Split) and isinstance(held_out, _Split)):
            continue
        names = ("kind", "subset", "hf_split", "field", "column")
        is_same = all(getattr(train, name, None) == getattr(held_out, name, None) for name in names)
        is_same = is_same and _normal_entries(train) == _normal_entries(held_out)
        if not is_same or held_out.split == "train":
            continue
        also = (train_key, ("validation", "freq"), (*key, "path"))
        if (train.split, held_out.split) != ("train", "validation"):
            what = "documents" if isinstance(held_out, CorpusData) else "images"
            wanted = (train_key, train, "train"), (key, held_out, "validation")
            missing = [f'{format_key((*table, "split"))} = "{split}"' for table, t, split in wanted if t.split != split]
            reason = f"these {what} are also in the training data; set {' and '.join(missing)}"
            yield Problem((*key, "split"), reason, held_out.split, also=also)
        elif train.validation_percent != held_out.validation_percent:
            theirs = f"{format_key((*train_key, 'validation_percent'))} ({train.validation_percent})"
            reason = f"must equal {theirs}, otherwise the two splits overlap"
            yield Problem((*key, "validation_percent"), reason, held_out.validation_percent, also=also)


def validation_tokens_are_held_out(config: JobConfig) -> Iterator[Problem]:
    """Report a problem if validation reads the same token files as training. Token files have no splits."""
    for (train_key, train), (key, held_out) in pairs_of(config, TokensData):
        if _normal_entries(train) == _normal_entries(held_out):
            reason = "the training data has the same tokens; set the path of other token files"
            yield Problem((*key, "path"), reason, held_out.path, also=((*train_key, "path"), ("validation", "freq")))


def validation_sequences_are_new(config: JobConfig) -> Iterator[Problem]:
    """Report a problem if synthetic validation data has the same sequences as the training data."""
    for (train_key, train), (key, held_out) in pairs_of(config, SyntheticData):
        if (train.seed, train.vocab_size, train.noise) == (held_out.seed, held_out.vocab_size, held_out.noise):
            table = f"[{format_key(train_key)}]"
            reason = f"gives the same sequences as {table}; set another seed here or in {table}"
            also = (train_key, key, ("validation", "freq"))
            yield Problem((*key, "seed"), reason, held_out.seed, also=also)


CORPUS_RULES = (tokenizer_is_usable, files_exist, text_is_no_records)
"""The rules for the text and the tokenizer that `titan-launch prepare` reads."""

DATA_RULES = (
    data_suits_the_model,
    all_data_has_one_unit,
    mixtures_are_complete,
    mixture_weights_are_usable,
    tokenizer_is_usable,
    vocabulary_is_large_enough,
    files_exist,
    text_is_no_records,
    token_files_exist,
    streams_are_only_read_in_order,
    epochs_have_a_length,
    validation_samples_are_held_out,
    validation_tokens_are_held_out,
    validation_sequences_are_new,
)


def _tables(config: JobConfig) -> Iterator[tuple[KeyPath, DataSource]]:
    """Yield (key of the table, table) for `[data]`, and for `[validation.data]` if it exists."""
    yield ("data",), config.data
    if config.validation.data is not None:
        yield ("validation", "data"), config.validation.data


def sources_of(config: JobConfig) -> Iterator[tuple[KeyPath, DataSource]]:
    """Yield (key of the table, table) for the training data and the validation data. For a mixture, yield each of its
    sources."""
    for key, data in _tables(config):
        if isinstance(data, MixtureData):
            yield from (((*key, "sources", index), source) for index, source in enumerate(data.sources))
        else:
            yield key, data


def sources_with(config: JobConfig, kind: type[Kind]) -> Iterator[tuple[KeyPath, Kind]]:
    """Yield (key, table) for each table of `sources_of` that is an instance of the class `kind`."""
    yield from ((key, data) for key, data in sources_of(config) if isinstance(data, kind))


def entries_of(source: KeyPath, data: _Split | TokensData) -> Iterator[tuple[KeyPath, str]]:
    """Yield (key, entry) for each entry of the `path` of a data source."""
    if isinstance(data.path, str):
        yield (*source, "path"), data.path
    else:
        yield from (((*source, "path", index), entry) for index, entry in enumerate(data.path))


def _normal_entries(data: _Split | TokensData) -> list[str]:
    """Return the entries of a table's `path`, each in one spelling: without `.`, `..` and superfluous slashes."""
    return [os.path.normpath(entry) for _, entry in entries_of((), data)]


def pairs_of(config: JobConfig, kind: type[Kind]) -> Iterator[tuple[tuple[KeyPath, Kind], tuple[KeyPath, Kind]]]:
    """Yield ((key, table), (key, table)) for each pair of a training source and a validation source, both instances of
    the class `kind`. Yield nothing if the run does not validate."""
    if config.validation.freq:
        found = list(sources_with(config, kind))
        train, held_out = ([s for s in found if s[0][0] == table] for table in ("data", "validation"))
        yield from itertools.product(train, held_out)


def _why_no_weight(source: MixtureEntry, is_training: bool) -> str | None:
    if not is_training:
        return None if source.weight == 1 else "validation reads all samples, so a weight has no effect; remove it"
    if not isinstance(source.weight, tuple):
        return None
    if not source.weight or any(len(pair) != 2 for pair in source.weight):
        return "must be a number or an array of [step, weight] pairs"
    steps = [step for step, _ in source.weight]
    if steps[0] != 0 or any(not step.is_integer() for step in steps) or steps != sorted(set(steps)):
        return "the steps must be whole numbers that rise from 0, as in [[0, 3], [1000, 1]]"
    return None


def keys_of_packed_documents(config: JobConfig) -> Iterator[tuple[KeyPath, str]]:
    """Yield (key, value) for each data source whose samples consist of documents that do not attend to each other. The
    key causes this form of samples: `packing`, or `samples` for a factory, or `kind` if all data of this kind has such
    samples."""
    for source, data in sources_of(config):
        if separates_documents(data):
            keys = (name for name in ("packing", "samples") if name in type(data).model_fields)
            name = next(keys, "kind")
            yield (*source, name), getattr(data, name)


def beyond_causal_attention(config: JobConfig) -> Iterator[tuple[str, tuple[KeyPath, ...]]]:
    """Yield (setting, keys on which the setting depends) for each setting that plain causal attention does not support:
    at most one model argument, and the keys of `keys_of_packed_documents`."""
    args, seq_len = known_args(config.model), config.training.seq_len
    option = args.beyond_causal_attention(seq_len) if args is not None else None
    if option is not None:
        yield (
            f"model.args.{option}",
            (("model", "name"), ("model", "flavor"), ("model", "args"), ("training", "seq_len")),
        )
    for key, value in keys_of_packed_documents(config):
        yield f'{format_key(key)} = "{value}"', (key,)


def _kinds_of(unit: SampleUnit) -> str:
    """Return a remedy that lists the kinds of data with samples of this unit, such as `kind = "text" or
    "synthetic"`."""
    return "kind = " + " or ".join(f'"{kind}"' for kind, data in DATA_KINDS.items() if data.unit == unit)


def _why_no_file(entry: str, suffixes: tuple[str, ...]) -> str:
    if os.path.isdir(entry):
        ends = "" if "" in suffixes else f" that end in {' or '.join(suffixes)}"
        return f"this folder contains no files{ends}; name a folder with such files, or a file"
    what = "no file matches this pattern" if any(char in entry for char in "*?[") else "no such file or folder"
    return f"{what} (paths are relative to the working directory)"


def _vocabulary(config: JobConfig, source: KeyPath, data: DataSource) -> tuple[int, str, KeyPath]:
    """Return (size, owner, key) of the vocabulary of a data source. `owner`: noun in messages for the table or
    tokenizer that sets the size. `key`: key of the owner."""
    own = data.own_vocabulary()
    if own is not None:
        return own, f"[{format_key(source)}]", (*source, "vocab_size")
    kind = config.tokenizer.kind
    return vocabulary_size(config.tokenizer), f'the "{kind}" tokenizer', ("tokenizer", "kind")
