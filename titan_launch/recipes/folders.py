"""The facts about a model's folder, or about data at a path, that a recipe writes into a job file."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from titan_launch.config.architectures.huggingface import image_format
from titan_launch.config.huggingface.config_json import longest_sequence, read_folder_config, read_json, refuse_adapter
from titan_launch.config.huggingface.features import CONFIG_FILE, WeightsError
from titan_launch.config.paths import (
    COMPRESSED,
    IMAGE_SUFFIXES,
    PYTHON_STDLIB,
    SKLEARN_DIGITS,
    LinkError,
    class_folders,
    expand_paths,
)
from titan_launch.config.sections.data import JsonlData, LinesData, ParquetData
from titan_launch.config.sections.model import HUGGINGFACE
from titan_launch.config.sections.tokenizer import TOKENIZER_FILE, TokenizerConfig
from titan_launch.core.errors import ConfigError, UserError, listed
from titan_launch.core.files import open_regular, read_regular
from titan_launch.core.terminal import one_line
from titan_launch.recipes.writing import Row

_FEW_RECORDS = 200
"""Number of documents below which no validation split is made: it could be empty."""

_SHORT_SIDE = 224
"""Size of images to which the published image classifiers are made."""


@dataclass(frozen=True)
class ModelFolder:
    """A folder with the `config.json` of Hugging Face, or one that `import` wrote."""

    path: str
    name: str
    """Name of the model in `[model]`."""

    flavor: str
    args: Mapping[str, Any]
    config: Mapping[str, Any]
    longest: int | None
    """Length of the longest sequence that the model is made for; None if `config.json` names none."""

    has_tokenizer: bool
    has_chat_template: bool


def look_at_model(path: str) -> ModelFolder:
    """Return the facts about a folder. Raises UserError for a folder that no job can start from."""
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
    except WeightsError as error:
        raise UserError(f"error: --model {path}: {error}") from None
    settings: dict[str, Any] = {}
    with suppress(WeightsError):
        settings = read_json(folder / "tokenizer_config.json")
    has_template = (folder / "chat_template.jinja").is_file() or "chat_template" in settings
    has_tokenizer = (folder / TOKENIZER_FILE).is_file()
    return ModelFolder(path, name, flavor, args, config, longest_sequence(config), has_tokenizer, has_template)


@dataclass(frozen=True)
class DataFolder:
    """Data at a path."""

    path: str
    kind: str
    """The `kind` in `[data]`."""

    description: str
    """Words for the kind of data, such as `text in JSON lines`."""

    rows: tuple[Row, ...] = ()
    """Keys of `[data]` and of `[validation.data]` besides `kind`, `path` and `split`."""

    training_rows: tuple[Row, ...] = ()
    """Keys of `[data]` only."""

    validation: str | None = None
    """Path of the validation data; None if a split of the same path is used."""

    is_split: bool = True
    """Hold out a split of `path` for validation."""

    facts: Mapping[str, int] = field(default_factory=dict)
    """Of images: `channels`, `size` and `classes`."""


def look_at_data(path: str) -> DataFolder:
    """Return the facts about the data at a path, by its content. Raises UserError for a path without data."""
    try:
        return _facts_about(path)
    except LinkError as error:
        raise UserError(f"error: --data {path}: {error}, or name the target") from None
    except (OSError, RecursionError) as error:
        reason = "has folders that are nested too deeply"
        if isinstance(error, OSError):
            reason = f"{one_line(str(error.filename or path))} cannot be read: {error.strerror or error}"
        raise UserError(f"error: --data {path}: {reason}; name other files") from None


def _facts_about(path: str) -> DataFolder:
    if path == PYTHON_STDLIB:
        return DataFolder(path, "text", "text files: the standard library of Python")
    if path == SKLEARN_DIGITS:
        rows = (Row("validation_percent", 20), Row("mean", 0.305, "mean pixel value of all digits"), Row("std", 0.376))
        facts = {"channels": 1, "size": 8, "classes": 10}
        return DataFolder(path, "images", "1,797 digits of 8x8 pixels", rows, facts=facts)
    folder = Path(path)
    for look in (_tokens, _dataset, _images) if folder.is_dir() else (_npz,):
        if found := look(folder):
            return found
    try:
        files = [file for _, file in expand_paths(path)]
    except FileNotFoundError:
        raise UserError(f"error: --data {path}: no such file or folder, or no files in it") from None
    return _by_suffix(path, files)


def _tokens(folder: Path) -> DataFolder | None:
    from titan_launch.data.token_files import HEADER

    if (folder / HEADER).is_file():
        return DataFolder(str(folder), "tokens", "token files of `titan-launch prepare`", is_split=False)
    train, validation = folder / "train", folder / "validation"
    if (train / HEADER).is_file():
        held_out = str(validation) if (validation / HEADER).is_file() else None
        about = "token files of `titan-launch prepare`"
        return DataFolder(str(train), "tokens", about, validation=held_out, is_split=False)
    return None


def _dataset(folder: Path) -> DataFolder | None:
    """Return a data set that `save_to_disk` wrote."""
    named: Any = []
    with suppress(WeightsError):
        named = read_json(folder / "dataset_dict.json").get("splits")
    splits = [name for name in named if isinstance(name, str)] if isinstance(named, list) else []
    split = "train" if "train" in splits else next(iter(splits), "")
    try:
        if Path(split).name != split:
            return None  # a path, which could lead out of the folder
        features = read_json(folder / split / "dataset_info.json").get("features")
    except WeightsError:
        return None
    if not isinstance(features, dict):
        return None
    texts = [name for name, kind in features.items() if isinstance(kind, dict) and kind.get("dtype") == "string"]
    column = _text_of(str(folder), texts, "column", list(features))
    rows = (Row("column", column), *([Row("hf_split", split)] if split else []))
    return DataFolder(str(folder), "huggingface", "a data set of the package `datasets`", rows)


def _images(folder: Path) -> DataFolder | None:
    """Return a folder of class folders, if most of its first files are images, or of WebDataset shards."""
    if next(folder.glob("*.tar"), None):
        return _shards(str(folder / "*.tar"))
    classes = class_folders(str(folder))
    files = [file for name in classes for file in itertools.islice((folder / name).rglob("*.*"), 10)]
    images = [file for file in files if file.name.lower().endswith(IMAGE_SUFFIXES)]
    if 2 * len(images) <= len(files):
        return None
    size = _size_of(images[0])
    about = f"images of {len(classes)} classes"
    return DataFolder(str(folder), "images", about, *_transforms(size), facts=_facts(size, classes))


def _shards(path: str) -> DataFolder:
    return DataFolder(path, "images", "WebDataset shards", *_transforms(_SHORT_SIDE), facts=_facts(_SHORT_SIDE))


def _npz(file: Path) -> DataFolder | None:
    """Return an `.npz` file with arrays of images."""
    if file.suffix != ".npz":
        return None
    from titan_launch.data.images.arrays import open_npz

    try:
        images = open_npz(str(file), ("data", "path"))
    except ConfigError as error:
        raise UserError(f"error: --data {file}: {error.problems[0].reason}") from None
    number, channels, height, size = images.shape
    classes = int(images.labels.max()) + 1
    about = f"{number:,} images of {height}x{size} pixels"
    rows = (Row("mean", 0.5, "replace with the mean of your pixels"), Row("std", 0.5))
    return DataFolder(str(file), "images", about, rows, facts={"channels": channels, "size": size, "classes": classes})


def _facts(size: int, classes: list[str] | None = None) -> dict[str, int]:
    known = {"channels": 3, "size": min(size, _SHORT_SIDE)}
    return known if classes is None else {**known, "classes": len(classes)}


def _size_of(image: Path) -> int:
    """Return the shorter side of an image in pixels; the usual size if Pillow is not installed or refuses the file."""
    from titan_launch.data.images.pillow import MOST_BYTES, PixelFormatError, opened_image

    try:
        with opened_image(read_regular(image, MOST_BYTES)) as opened:
            return int(min(opened.size))
    except (ImportError, OSError, PixelFormatError):
        return _SHORT_SIDE


def _transforms(size: int) -> tuple[tuple[Row, ...], tuple[Row, ...]]:
    """Return the keys of all images, and those of training images only."""
    side = min(size, _SHORT_SIDE)
    resize = 256 if side == _SHORT_SIDE else side
    imagenet = (Row("mean", [0.485, 0.456, 0.406], "of ImageNet"), Row("std", [0.229, 0.224, 0.225]))
    both = (Row("resize", resize, "shorter side in pixels"), Row("crop", side), *imagenet, Row("num_workers", 4))
    return both, (Row("augment", ["resized_crop", "flip"]),)


_ENDS = {
    "parquet": ParquetData.suffixes,
    "jsonl": LinesData.suffixes,
    "tokens": (".bin",),
    "images": (".tar",),
}
"""Ends of the names of the files of each kind. Files with other names are text."""


def _by_suffix(path: str, files: list[Path]) -> DataFolder:
    """Return the facts about files: of the kind that has the most bytes."""
    sizes: Counter[str] = Counter()
    for file in files:
        name = str(file.with_suffix("")) if file.suffix in COMPRESSED else file.name
        sizes[next((kind for kind, ends in _ENDS.items() if name.endswith(ends)), "text")] += file.stat().st_size
    ((kind, _),) = sizes.most_common(1)
    match kind:
        case "parquet":
            return _parquet(path, next(file for file in files if ".parquet" in file.suffixes))
        case "jsonl":
            return _lines(path)
        case "tokens":
            return _foreign_tokens(path)
        case "images":
            return _shards(path)
    is_split = len(files) >= _FEW_RECORDS / 10
    return DataFolder(path, "text", f"{len(files):,} text file{'s' * (len(files) > 1)}", is_split=is_split)


def _foreign_tokens(path: str) -> DataFolder:
    is_folder = Path(path).is_dir()
    path = str(Path(path, "*.bin")) if is_folder else path
    return DataFolder(path, "tokens", "tokens of another program", is_split=False)


def _parquet(path: str, file: Path) -> DataFolder:
    try:
        from pyarrow import parquet
    except ImportError:
        return DataFolder(
            path, "parquet", "Parquet files", (Row("column", "text", "name of the column with the text"),)
        )
    try:
        with open_regular(file) as stream:
            metadata = parquet.read_metadata(stream)
        schema = metadata.schema.to_arrow_schema()
    except Exception as error:  # pyarrow raises many types for damaged files
        reason = f"{one_line(str(file))} is not a valid Parquet file ({one_line(str(error)):.200})"
        raise UserError(f"error: --data {path}: {reason}; copy or write it again") from None
    texts = [name for name, kind in zip(schema.names, schema.types, strict=True) if "string" in str(kind)]
    rows = (Row("column", _text_of(path, texts, "column", schema.names)),)
    return DataFolder(path, "parquet", "Parquet files", rows, is_split=metadata.num_rows >= _FEW_RECORDS)


def _lines(path: str) -> DataFolder:
    """Return the facts about JSON lines: chats, or text in a field."""
    from titan_launch.data.corpora.chat import chat_messages
    from titan_launch.data.corpora.records import RecordError

    records = _records(path)
    first = next(records)
    is_split = sum(1 for _ in itertools.islice(records, _FEW_RECORDS - 1)) == _FEW_RECORDS - 1
    if {"chosen", "rejected"} <= first.keys():
        return DataFolder(path, "preferences", "pairs of answers in JSON lines", is_split=is_split)
    with suppress(RecordError):
        chat_messages(first)
        return DataFolder(path, "chat", "chats in JSON lines", is_split=is_split)
    texts = sorted((key for key, value in first.items() if isinstance(value, str)), key=lambda key: -len(first[key]))
    rows = (Row("field", _text_of(path, texts, "key", list(first))),)
    return DataFolder(path, "jsonl", "text in JSON lines", rows, is_split=is_split)


def _records(path: str) -> Iterator[dict[str, Any]]:
    """Yield the objects of JSON lines. Raises UserError if there is none, and for a line that is none."""
    from titan_launch.data.corpora.base import Part
    from titan_launch.data.corpora.jsonl import JsonlCorpus, parse_line
    from titan_launch.data.corpora.records import RecordError
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
                    where = f"error: --data {path}: line {number} of {one_line(file.name)}"
                    reason = f"{where} is {error.reason}; a file has one JSON object per line"
                    raise UserError(reason) from None
    except ConfigError as error:
        raise UserError(f"error: --data {path}: {error.problems[0].reason}") from None
    if is_empty:
        raise UserError(f"error: --data {path}: its files have no lines")


def _text_of(path: str, texts: list[str], what: str, names: list[str]) -> str:
    """Return the name of the text: `text`, or else the first of `texts`. Raises UserError if there is none."""
    if not texts:
        found = one_line(listed(names, most=8))
        raise UserError(f"error: --data {path}: no {what} has text; there are: {found:.500}")
    return "text" if "text" in texts else texts[0]


def classes_of_model(folder: ModelFolder) -> int | None:
    """Return the number of classes of an image classifier; None for any other model."""
    taken = image_format(folder.config)
    return None if taken is None else taken.num_classes
