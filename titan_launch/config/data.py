"""`[data]`: what is trained on, and `[validation.data]`: what is validated on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from titan_launch.config.base import Array, Section

PYTHON_STDLIB = "python-stdlib"
SKLEARN_DIGITS = "sklearn-digits"

SampleUnit = Literal["tokens", "images"]


class _Source(Section):
    """The keys that every kind of data has."""

    unit: ClassVar[SampleUnit] = "tokens"
    """What a model is given, and what the throughput counts."""

    shuffle: bool = True
    """Visit the samples of each epoch in an order drawn from `training.seed` and the epoch; otherwise in file order."""

    num_workers: Annotated[int, Field(ge=0)] = 0
    """Worker processes per rank that prepare samples. The samples and their order do not depend on it."""


class TextData(_Source):
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


class SyntheticData(_Source):
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


Positive = Annotated[float, Field(gt=0)]


class ImageData(_Source):
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


DataConfig = Annotated[TextData | SyntheticData | ImageData, Field(discriminator="kind")]


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
