"""`[data]`, `[tokenizer]`, `[validation]` and `[validation.data]`: training data and validation data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Union

from pydantic import Field, GetCoreSchemaHandler
from pydantic_core import CoreSchema

from titan_launch.config.sections.base import Array, Section


@dataclass(frozen=True)
class ImageFormat:
    """Images and their classes: what a source holds, or what a model takes."""

    channels: int
    height: int
    width: int
    num_classes: int
    """Labels are from 0 to `num_classes` - 1."""


DIGITS = ImageFormat(channels=1, height=8, width=8, num_classes=10)
"""What `sklearn-digits` holds."""


def misfits(held: ImageFormat, taken: ImageFormat) -> Iterator[str]:
    """Why a model that takes `taken` cannot learn from a source that holds `held`."""
    if held.width <= 4 < held.channels == held.height:
        shape = f"(N, {held.channels}, {held.height}, {held.width})"
        yield f"holds images {shape}, with the channels last, it seems; save images.transpose(0, 3, 1, 2)"
        return
    if held.channels != taken.channels:
        channels = f"{held.channels} channel{'s' if held.channels > 1 else ''}"
        reason = f"holds images of {channels}, and the model takes {taken.channels}"
        yield f"{reason}; set model.args.in_channels = {held.channels}"
    if held.height != held.width:
        yield f"holds images of {held.height} x {held.width} pixels, and the model takes square ones; crop or pad them"
    elif held.height != taken.height:
        pixels = f"{held.height} x {held.width} pixels"
        reason = f"holds images of {pixels}, and the model takes {taken.height} x {taken.width}"
        yield f"{reason}; set model.args.image_size = {held.height}"
    if held.num_classes > taken.num_classes:
        reason = f"holds labels up to {held.num_classes - 1}, and the model has {taken.num_classes} classes"
        yield f"{reason}; set model.args.num_classes to {held.num_classes} or more"


PYTHON_STDLIB = "python-stdlib"
SKLEARN_DIGITS = "sklearn-digits"

SampleUnit = Literal["tokens", "images"]


IGNORED_TARGET = -100
"""The target of a position that has none: padding. It counts neither in the loss nor as a token. The value is
the default of `ignore_index` in PyTorch."""


class DataSource(Section):
    """The keys that every kind of data has. A field of this type holds one of `DATA_KINDS`, by its `kind`."""

    unit: ClassVar[SampleUnit] = "tokens"
    """Unit of the samples, which the throughput counts."""

    kind: str
    """Kind of source."""

    shuffle: bool = True
    """Visit the samples of each epoch in an order drawn from `training.seed` and the epoch; otherwise in file order."""

    num_workers: Annotated[int, Field(ge=0)] = 0
    """Worker processes per rank that prepare samples. The samples and their order do not depend on it."""

    def own_vocabulary(self) -> int | None:
        """Return the number of tokens that the key `vocab_size` sets; None where the tokenizer decides."""
        return None

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Return the schema of the kind, or of the union of all kinds."""
        if cls is not DataSource:
            return handler(source)
        any_kind: Any = Union[tuple(DATA_KINDS.values())]  # noqa: UP007 - the kinds are known at run time only
        return handler.generate_schema(Annotated[any_kind, Field(discriminator="kind")])


class TextData(DataSource):
    """Text files, read into memory, tokenized, concatenated and cut to `training.seq_len`."""

    kind: Literal["text"] = "text"
    """Kind of source."""

    path: str | Array[str] = PYTHON_STDLIB
    """A file, a folder (every file below it), a glob (`**` crosses folders), or several of these, relative to the
    working directory. `python-stdlib` is the source code of the running Python's standard library: tens of MB of real
    text that is on every machine. Every file is one document. Files that are not text (valid UTF-8 without NUL bytes)
    are skipped, and the log says how many."""

    split: Literal["all", "train", "validation"] = "all"
    """Which documents to take. `validation` takes `validation_percent` of them, chosen by a hash of their paths
    (relative to the folder given), and `train` the others, so that one `path` can serve both."""

    validation_percent: Annotated[int, Field(ge=1, le=99)] = 5
    """Share of the documents that `split` sets aside for validation."""


class SyntheticData(DataSource):
    """Random token sequences with structure to learn: each token is a fixed function of the one before, or noise."""

    kind: Literal["synthetic"]
    """Kind of source."""

    num_samples: Annotated[int, Field(ge=1)] = 10_000
    """Sequences in an epoch."""

    vocab_size: Annotated[int, Field(ge=2)] = 256
    """Tokens are drawn from 0 to `vocab_size` - 1."""

    noise: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Share of the tokens that are drawn at random; the others follow from the token before."""

    seed: int = 0
    """Seed of the sequences themselves. Give the validation source another one."""

    def own_vocabulary(self) -> int:
        """Return `vocab_size`."""
        return self.vocab_size


Positive = Annotated[float, Field(gt=0)]


class ImageData(DataSource):
    """Images with a class each, read into memory."""

    unit: ClassVar[SampleUnit] = "images"

    kind: Literal["images"]
    """Kind of source."""

    path: str = SKLEARN_DIGITS
    """An `.npz` file, relative to the working directory, with `images`, (N, height, width) or (N, channels, height,
    width), uint8 or floating, and `labels`, (N) whole numbers from 0 on. `sklearn-digits` are 1,797 handwritten digits
    of 8x8 pixels that scikit-learn contains (`pip install scikit-learn`)."""

    split: Literal["all", "train", "validation"] = "all"
    """Which images to take. `validation` takes `validation_percent` of them, chosen by a hash of their indices, and
    `train` the others, so that one `path` can serve both."""

    validation_percent: Annotated[int, Field(ge=1, le=99)] = 5
    """Share of the images that `split` sets aside for validation."""

    mean: float | Array[float] = 0.5
    """Subtracted from the pixels: one number, or one for each channel. Before that, uint8 pixels become 0 to 1 (and the
    digits, too), and floating ones stay as they are."""

    std: Positive | Array[Positive] = 0.5
    """Divides the pixels after that: with the mean and the standard deviation of the data, the model sees a mean near 0
    and a variance near 1."""


DATA_KINDS: dict[str, type[DataSource]] = {
    "text": TextData,
    "synthetic": SyntheticData,
    "images": ImageData,
}
"""The sections of the kinds of data; the first is the default. `titan_launch.data.sources.SOURCES` reads the data."""


def expand_text_paths(path: str | tuple[str, ...]) -> list[tuple[str, Path]]:
    """The files that a `path` of `TextData` names, in an order that is the same on every machine.

    Returns (name, file) pairs, sorted by name within each entry; the name is relative to the folder given, so that a
    corpus keeps its split when it is moved. Raises FileNotFoundError that names the entry which matches no file.
    """
    files: dict[Path, str] = {}
    for entry in (path,) if isinstance(path, str) else path:
        found = sorted(_files_of(entry))
        if not found:
            raise FileNotFoundError(entry)
        for name, file in found:
            files.setdefault(file, name)
    return [(name, file) for file, name in files.items()]


def names_a_file(entry: str) -> bool:
    """Whether an entry of a `path` names any file. Cheap: it stops at the first file, and trusts the standard library
    to be there."""
    return entry == PYTHON_STDLIB or next(_files_of(entry), None) is not None


def _files_of(entry: str) -> Iterator[tuple[str, Path]]:
    """The files that one entry names, in no particular order."""
    if entry == PYTHON_STDLIB:
        return _python_stdlib()
    if Path(entry).is_dir():
        return _files_below(Path(entry), "*")
    if Path(entry).is_file():
        return iter([(Path(entry).name, Path(entry))])
    return _files_like(entry)


def _python_stdlib() -> Iterator[tuple[str, Path]]:
    import sysconfig  # here and not above, as `glob` below: a check of a job file rarely needs them

    files = _files_below(Path(sysconfig.get_paths()["stdlib"]), "*.py")
    return ((name, file) for name, file in files if "site-packages" not in file.parts)


def _files_below(root: Path, pattern: str) -> Iterator[tuple[str, Path]]:
    return ((file.relative_to(root).as_posix(), file) for file in root.rglob(pattern) if file.is_file())


def _files_like(pattern: str) -> Iterator[tuple[str, Path]]:
    import glob

    return ((name, Path(name)) for name in glob.iglob(pattern, recursive=True) if Path(name).is_file())


VOCABULARY_SIZES = {"bytes": 257}
"""Tokens of the tokenizers whose vocabulary is fixed."""


class TokenizerConfig(Section):
    """How text becomes tokens. Not used with images."""

    kind: Literal["bytes"] = "bytes"
    """`bytes`: every byte of the UTF-8 text is a token (0 to 255), and 256 ends a document. Nothing to download."""


class ValidationConfig(Section):
    """Loss and accuracy on data held out from training: over all ranks, every target with the same weight, in
    evaluation mode."""

    freq: Annotated[int, Field(ge=0)] = 0
    """Steps between validations. 0: never."""

    local_batch_size: Annotated[int, Field(ge=1)] = 8
    """Samples per batch on each data-parallel rank."""

    max_samples: Annotated[int, Field(ge=1)] | None = None
    """Validate on this many samples, the same ones every time. Default: all."""

    data: DataSource | None = None
    """The held-out source, with the keys of `[data]`."""
