"""Facts about a model folder, or about the data at a path. `titan-launch init` writes them into a job file."""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from titan_launch.config import paths
from titan_launch.config.sections.data import JsonlData, LinesData, ParquetData, misread_as_text
from titan_launch.config.sections.model import HUGGINGFACE
from titan_launch.config.sections.tokenizer import TEMPLATE_FILE, TOKENIZER_FILE, TokenizerConfig, read_settings
from titan_launch.core.errors import ConfigError, UserError, listed, toml_string
from titan_launch.core.files import is_name_inside, open_regular, read_regular
from titan_launch.core.terminal import counted, one_line, short_name
from titan_launch.models.huggingface.config_json import longest_sequence, read_folder_config, read_json, refuse_adapter
from titan_launch.models.huggingface.files import CONFIG_FILE, WeightsError
from titan_launch.models.huggingface.image_processor import read_image_keys
from titan_launch.recipes.writing import Row

_FEW_RECORDS = 200
"""Number of records below which no validation split is made, because the split could be empty. For text files, which
have no records, the limit is 20 files: a tenth of this number."""

_SHORT_SIDE = 224
"""Height and width in pixels of the images for which most published classifiers are made."""


@dataclass(frozen=True)
class ModelFolder:
    """A folder with the `config.json` of Hugging Face, or a folder that `titan-launch import` wrote."""

    path: str
    name: str
    """Value of `model.name`."""

    flavor: str
    args: Mapping[str, Any]
    config: Mapping[str, Any]
    longest: int | None
    """Length of the longest sequence that the model is made for; None if `config.json` names none."""

    has_tokenizer: bool
    has_chat_template: bool
    image_keys: Mapping[str, Any]
    """Keys of `[data]` by which images are prepared for the model; empty if the folder does not decide them."""


def look_at_model(path: str) -> ModelFolder:
    """Return the facts about a model folder. Raises UserError for a folder with an adapter, and if `config.json` is
    missing or is not of a model that a job can use."""
    folder = Path(path)
    try:
        refuse_adapter(folder)
        config = read_json(folder / CONFIG_FILE)
        try:
            known = read_folder_config(folder)
            name, flavor, args = known.name, known.flavor, known.args
        except WeightsError:
            if "architectures" not in config:
                raise
            name, flavor, args = HUGGINGFACE, "", {}
        image_keys = read_image_keys(folder)
    except WeightsError as error:
        raise UserError(f"error: --model {path}: {error}") from None
    settings: dict[str, Any] = {}
    with suppress(ConfigError):
        settings = read_settings(folder, ("tokenizer", "path"), path)
    has_template = (folder / TEMPLATE_FILE).is_file() or "chat_template" in settings
    has_tokenizer = (folder / TOKENIZER_FILE).is_file()
    longest = longest_sequence(config)
    return ModelFolder(path, name, flavor, args, config, longest, has_tokenizer, has_template, image_keys)


@dataclass(frozen=True)
class DataFolder:
    """The facts about the data at a path, from which the tables `[data]` and `[validation.data]` are written."""

    path: str
    kind: str
    """Value of `data.kind`."""

    description: str
    """Description of the data for a comment or message, such as `text in JSON lines`."""

    rows: tuple[Row, ...] = ()
    """Keys of `[data]` and of `[validation.data]` besides `kind`, `path` and `split`."""

    training_rows: tuple[Row, ...] = ()
    """Keys of `[data]` only."""

    validation: str | None = None
    """Path of separate validation data; None if there is none. In that case, `is_split` tells whether a split of `path`
    is used."""

    is_split: bool = True
    """True if a split of `path` is held out for validation."""

    facts: Mapping[str, int] = field(default_factory=dict)
    """For images: `channels`, `size` in pixels, and `classes`. An unknown fact is missing."""

    reason: str = ""
    """Reason for `kind`, such as `the first lines have "messages"`; "" if `description` says it."""

    num_bytes: int | None = None
    """Bytes of text that is not compressed; None for all other data."""

    num_images: int | None = None
    """Number of images in class folders; None for all other data."""


class UnknownDataError(Exception):
    """Error for data that is missing, that cannot be read, or whose kind is not clear. The message continues a line
    that begins with the path."""


def look_at_data(path: str, kinds: Sequence[str] = ()) -> DataFolder:
    """Return the facts about the data at a path, from the names and the content of its files.

    `kinds`: the preferred kinds, the best kind first. If the first lines suit several kinds, the kind that is first in
    `kinds` is used. Raises UnknownDataError if the data is missing, cannot be read, or has no clear kind.
    """
    try:
        return _facts_about(path, kinds)
    except paths.LinkError as error:
        raise UnknownDataError(f"{error}, or name the target") from None
    except (OSError, RecursionError) as error:
        reason = "has folders that are nested too deeply"
        if isinstance(error, OSError):
            reason = f"{one_line(str(error.filename or path))} cannot be read: {error.strerror or error}"
        raise UnknownDataError(f"{reason}; name other files") from None


def _facts_about(path: str, kinds: Sequence[str]) -> DataFolder:
    if path == paths.PYTHON_STDLIB:
        num_bytes = sum(file.stat().st_size for _, file in paths.expand_paths(path))
        return DataFolder(path, "text", "text files: the standard library of Python", num_bytes=num_bytes)
    if path == paths.SKLEARN_DIGITS:
        rows = (Row("validation_percent", 20), Row("mean", 0.305, "mean pixel value of all digits"), Row("std", 0.376))
        facts = {"channels": 1, "size": 8, "classes": 10}
        return DataFolder(path, "images", "1,797 digits of 8x8 pixels", rows, facts=facts)
    folder = Path(path)
    for look in (_tokens, _dataset, _images) if folder.is_dir() else (_npz,):
        if found := look(folder):
            return found
    try:
        files = [file for _, file in paths.expand_paths(path)]
    except FileNotFoundError:
        raise UnknownDataError("no such file or folder, or no files in it; correct the path") from None
    return _by_suffix(path, files, kinds)


def _tokens(folder: Path) -> DataFolder | None:
    from titan_launch.data.token_files import HEADER

    about = "token files of `titan-launch prepare`"
    if (folder / HEADER).is_file():
        return DataFolder(str(folder), "tokens", about, is_split=False)
    train, validation = folder / "train", folder / "validation"
    if (train / HEADER).is_file():
        held_out = str(validation) if (validation / HEADER).is_file() else None
        return DataFolder(str(train), "tokens", about, validation=held_out, is_split=False)
    return None


def _dataset(folder: Path) -> DataFolder | None:
    """Return the facts about a data set that `save_to_disk` of `datasets` wrote; None for any other folder."""
    named: Any = []
    with suppress(WeightsError):
        named = read_json(folder / "dataset_dict.json").get("splits")
    splits = [name for name in named if isinstance(name, str)] if isinstance(named, list) else []
    split = "train" if "train" in splits else next(iter(splits), "")
    try:
        if split and not is_name_inside(split):
            return None
        features = read_json(folder / split / "dataset_info.json").get("features")
    except WeightsError:
        return None
    if not isinstance(features, dict):
        return None
    texts = [name for name, kind in features.items() if isinstance(kind, dict) and kind.get("dtype") == "string"]
    rows = (_column(texts, list(features)), *([Row("hf_split", split)] if split else []))
    return DataFolder(str(folder), "huggingface", "a data set of the package `datasets`", rows)


def _images(folder: Path) -> DataFolder | None:
    """Return the facts about a folder of WebDataset shards, or of class folders whose first files are mostly images.
    Return None for any other folder."""
    if next(folder.glob("*.tar"), None):
        return _image_files(str(folder / "*.tar"), "WebDataset shards")
    classes = paths.class_folders(str(folder))
    files = [file for name in classes for file in itertools.islice((folder / name).rglob("*.*"), 10)]
    images = [file for file in files if file.name.lower().endswith(paths.IMAGE_SUFFIXES)]
    if 2 * len(images) <= len(files):
        return None
    names = (file for name in classes for _, _, inside in os.walk(folder / name) for file in inside)
    number = sum(name.lower().endswith(paths.IMAGE_SUFFIXES) for name in names)
    found = _image_files(str(folder), f"images of {len(classes)} classes", _size_of(images[0]))
    return replace(found, facts={**found.facts, "classes": len(classes)}, num_images=number)


def _npz(file: Path) -> DataFolder | None:
    """Return the facts about an `.npz` file with arrays of images; None for any other file."""
    if file.suffix != ".npz":
        return None
    from titan_launch.data.images.arrays import open_npz

    try:
        images = open_npz(str(file), ("data", "path"))
    except ConfigError as error:
        raise UnknownDataError(error.problems[0].reason) from None
    number, channels, height, size = images.shape
    classes = int(images.labels.max()) + 1
    about = f"{number:,} images of {height}x{size} pixels"
    rows = (Row("mean", 0.5, "replace with the mean of your pixels"), Row("std", 0.5))
    return DataFolder(str(file), "images", about, rows, facts={"channels": channels, "size": size, "classes": classes})


def _size_of(image: Path) -> int:
    """Return the shorter side of an image in pixels; 224 if Pillow is not installed or refuses the file."""
    from titan_launch.data.images.pillow import MOST_BYTES, PixelFormatError, opened_image

    try:
        with opened_image(read_regular(image, MOST_BYTES)) as opened:
            return int(min(opened.size))
    except (ImportError, OSError, PixelFormatError):
        return _SHORT_SIDE


def _image_files(path: str, description: str, size: int = _SHORT_SIDE) -> DataFolder:
    """Return the facts about images in files, which a job resizes and crops. `size`: shorter side of an image in
    pixels."""
    side = min(size, _SHORT_SIDE)
    resize = 256 if side == _SHORT_SIDE else side
    imagenet = (Row("mean", [0.485, 0.456, 0.406], "of ImageNet"), Row("std", [0.229, 0.224, 0.225]))
    rows = (Row("resize", resize, "shorter side in pixels"), Row("crop", side), *imagenet, Row("num_workers", 4))
    augment = Row("augment", ["resized_crop", "flip"])
    return DataFolder(path, "images", description, rows, (augment,), facts={"channels": 3, "size": side})


_ENDS = {
    "parquet": ParquetData.suffixes,
    "jsonl": LinesData.suffixes,
    "tokens": (".bin",),
    "images": (".tar",),
    "text": (".txt",),
}
"""Suffixes of the file names of each kind of data. Files with any other suffix count as text, too."""


def _by_suffix(path: str, files: list[Path], kinds: Sequence[str]) -> DataFolder:
    """Return the facts about files. The data has the kind whose files (see `_ENDS`) have the most bytes.

    Raises UnknownDataError if the kind is JSON lines or Parquet, and other files have a suffix of another kind, such as
    `.txt`. Files with a suffix that is not in `_ENDS` are no error. Also raises UnknownDataError if the kind is text,
    and some files have the suffix of a format of records (`misread_as_text`).
    """
    sizes: Counter[str] = Counter()
    data: set[str] = set()
    for file in files:
        name = paths.uncompressed(file.name)
        kind = next((kind for kind, ends in _ENDS.items() if name.endswith(ends)), None)
        sizes[kind or "text"] += file.stat().st_size
        data |= {kind} if kind is not None else set()
    ((kind, size),) = sizes.most_common(1)
    names = list(map(str, files))
    if kind == "text" and (misread := misread_as_text(path, names)):
        raise UnknownDataError(misread)
    if kind in ("jsonl", "parquet") and data - {kind}:
        remedy = f"name the files of one suffix by a glob such as {paths.glob_of_sort(path, _ENDS[kind][0])}"
        mixed = "to use several suffixes, write a table [[data.sources]] for each"
        suffixes = paths.describe_ends(paths.count_ends(names))
        raise UnknownDataError(f"has files of several suffixes ({suffixes}); {remedy}; {mixed}")
    num_bytes = None if any(file.suffix in paths.COMPRESSED for file in files) else size
    match kind:
        case "parquet":
            return _parquet(path, next(file for file in files if ".parquet" in file.suffixes))
        case "jsonl":
            return replace(_lines(path, kinds), num_bytes=num_bytes)
        case "tokens":
            pattern = str(Path(path, "*.bin")) if Path(path).is_dir() else path
            return DataFolder(pattern, "tokens", "tokens of another program", is_split=False)
        case "images":
            return _image_files(path, "WebDataset shards")
    is_split = len(files) >= _FEW_RECORDS / 10
    about, reason = counted(len(files), "text file"), "the files have no records"
    return DataFolder(path, "text", about, is_split=is_split, reason=reason, num_bytes=num_bytes)


def _parquet(path: str, file: Path) -> DataFolder:
    try:
        from pyarrow import parquet
    except ImportError:
        column = Row("column", "text", "name of the column with the text")
        return DataFolder(path, "parquet", "Parquet files", (column,))
    try:
        with open_regular(file) as stream:
            metadata = parquet.read_metadata(stream)
        schema = metadata.schema.to_arrow_schema()
    except Exception as error:  # pyarrow raises many types for damaged files
        reason = f"{one_line(str(file))} is not a valid Parquet file ({one_line(str(error)):.200})"
        raise UnknownDataError(f"{reason}; copy or write it again") from None
    texts = [name for name, kind in zip(schema.names, schema.types, strict=True) if "string" in str(kind)]
    rows = (_column(texts, schema.names),)
    return DataFolder(path, "parquet", "Parquet files", rows=rows, is_split=metadata.num_rows >= _FEW_RECORDS)


_KINDS_OF_LINES = {
    "chat": "chats in JSON lines",
    "preferences": "pairs of answers in JSON lines",
    "unpaired_preferences": "answers with a label in JSON lines",
    "jsonl": "text in JSON lines",
}


def _lines(path: str, kinds: Sequence[str]) -> DataFolder:
    """Return the facts about JSON lines: chats, pairs of answers, or text in a field. Raises UnknownDataError if one of
    the first lines is not an object, or if they suit no kind and no key of the first line has text. Also raises this
    error if the first lines suit several kinds, and none of these kinds is in `kinds`."""
    records = _records(path)
    first, number = next(records), 1
    found = _kinds_of_line(first)
    common = dict(found)
    for record in itertools.islice(records, _FEW_RECORDS - 1):
        number += 1
        common = {kind: keys for kind, keys in common.items() if kind in _kinds_of_line(record)}
    candidates = common or found  # if the lines differ, the reader of the data reports the first wrong line
    kind = next((kind for kind in kinds if kind in candidates), "")
    if not kind and len(candidates) > 1:
        seen = ", and ".join(f"{_quoted(keys)} (data.kind = {toml_string(each)})" for each, keys in candidates.items())
        choices = " or ".join(f"--data.kind={each}" for each in candidates)
        raise UnknownDataError(f"its first lines have {seen}; choose {choices}")
    kind = kind or next(iter(candidates), "jsonl")
    rows: tuple[Row, ...] = ()
    if kind == "jsonl":
        texts = sorted((key for key, value in first.items() if isinstance(value, str)), key=lambda k: -len(first[k]))
        name = _text_of(texts, "key", list(first))
        rows = (Row("field", name, "" if name == "text" else "the longest text of the first line"),)
    about = _KINDS_OF_LINES[kind]
    if left_out := paths.describe_ends(paths.files_left_out(path, LinesData.suffixes)):
        about += f"; not read: {left_out}"
    keys = candidates.get(kind)
    what = "the first lines have" if common else "the first line has"
    reason = f"{what} {_quoted(keys)}" if keys else "the first line is neither a chat nor a pair of answers"
    return DataFolder(path, kind, about, rows, is_split=number == _FEW_RECORDS, reason=reason)


def _kinds_of_line(record: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """Return the kinds of data that a line suits, each with the keys of the line that show this kind. The dict is empty
    if the line has the keys of no kind. The caller then reads the line as `jsonl`, with its text in a field that is not
    named `text`."""
    from titan_launch.data.corpora.chat import ANSWERS, chat_keys

    keys = chat_keys(record)
    found = {
        "chat": keys,
        "unpaired_preferences": (*keys, "label") if keys and isinstance(record.get("label"), bool) else (),
        "preferences": ANSWERS if all(key in record for key in ANSWERS) else (),
        "jsonl": ("text",) if isinstance(record.get("text"), str) else (),
    }
    return {kind: keys for kind, keys in found.items() if keys}


def _quoted(keys: Sequence[str]) -> str:
    return " and ".join(toml_string(short_name(key)) for key in keys)


def _records(path: str) -> Iterator[dict[str, Any]]:
    """Yield the JSON object of each line. Raises UnknownDataError if there are no lines, or if a line is not an
    object."""
    from titan_launch.data.chat_rendering import RecordError
    from titan_launch.data.corpora.interface import Part
    from titan_launch.data.corpora.jsonl import JsonlCorpus, parse_line
    from titan_launch.data.tokenizers import build_tokenizer

    corpus = JsonlCorpus(JsonlData(kind="jsonl", path=path), build_tokenizer(TokenizerConfig()), ("data",), 1)
    is_empty = True
    try:
        for file in corpus.files:
            for number, line in enumerate(corpus.lines(file, Part((file,), file.size)), start=1):
                if not line.strip():
                    continue
                is_empty = False
                try:
                    yield parse_line(line)
                except RecordError as error:
                    detail = f" ({one_line(error.detail):.200})" if error.detail else ""
                    reason = f"line {number} of {one_line(file.name)} is {error.reason}{detail}"
                    raise UnknownDataError(f"{reason}; a file has one JSON object per line") from None
    except ConfigError as error:
        raise UnknownDataError(error.problems[0].reason) from None
    if is_empty:
        raise UnknownDataError("its files have no lines; name other files")


def _column(texts: list[str], names: list[str]) -> Row:
    name = _text_of(texts, "column", names)
    return Row("column", name, "" if name == "text" else "the first column of text")


def _text_of(texts: list[str], what: str, names: list[str]) -> str:
    """Return the name of the key or column with the text: `text` if `texts` contains it, else the first of `texts`.
    Raises UnknownDataError if `texts` is empty."""
    if not texts:
        found = one_line(listed(names, most=8)) or "none"
        nested = '; a key of an inner object needs data.field, such as "meta.text"' if what == "key" else ""
        raise UnknownDataError(f"no {what} has text; the {what}s are: {found:.500}{nested}")
    return "text" if "text" in texts else texts[0]
