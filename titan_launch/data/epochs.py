"""Functions that convert epochs to steps, and count the samples of an epoch if counting takes less than a second. This
module does not import torch."""

from __future__ import annotations

import math
from contextlib import suppress
from fractions import Fraction
from pathlib import Path

from titan_launch.config.paths import SKLEARN_DIGITS, images_named
from titan_launch.config.sections.data import DataSource, ImageData, SyntheticData, TokensData

MOST_EPOCHS = 20
"""If `training.steps` takes more epochs than this number, commands print a warning."""

_MOST_PACKED = 100_000
"""Largest number of documents that `known_samples` packs. Packing 100,000 documents takes a fraction of a second."""


def steps_of(epochs: float, num_samples: int, global_batch_size: int, consumed: int = 0) -> int:
    """Return the number of steps, rounded up, until a run has consumed `epochs` times `num_samples` samples.

    `consumed`: number of samples that earlier steps have consumed; these steps are not counted. Decimal fractions of
    `epochs` are exact: 0.1 is one tenth.
    """
    return math.ceil((Fraction(str(epochs)) * num_samples - consumed) / global_batch_size)


def too_many_epochs(steps: int, epochs: float, num_samples: int, source: str = "") -> str | None:
    """Return a warning if `epochs` exceeds MOST_EPOCHS; else None. `epochs`: number of epochs that `steps` steps take.
    `source`: name of the source in a mixture; "" if the data is not a mixture."""
    if epochs <= MOST_EPOCHS:
        return None
    whose, remedy = (f" of the source {source}", "fewer steps, or a smaller weight") if source else ("", "fewer steps")
    read = f"training.steps = {steps} is {epochs:.4g} epochs of the {num_samples:,} training samples{whose}"
    return f"{read}; set {remedy}, or set training.epochs if you want this many epochs"


def known_samples(data: DataSource, seq_len: int) -> int | None:
    """Return the number of samples of an epoch for token files of `prepare`, arrays of images, the digits of
    scikit-learn, and synthetic data. Return None for all other data, for data that cannot be read, and if a run would
    pack more than _MOST_PACKED documents."""
    with suppress(Exception):  # a run explains why the data cannot be read
        match data:
            case SyntheticData():
                return data.num_samples
            case TokensData():
                return _samples_of_tokens(data, seq_len)
            case ImageData():
                return _number_of_images(data)
    return None


def _samples_of_tokens(data: TokensData, seq_len: int) -> int | None:
    from titan_launch.data.packing import pack
    from titan_launch.data.token_files import open_token_files, read_header

    folder = Path(data.path)
    header = read_header(folder)
    if data.packing == "concat":
        return max(0, header.num_tokens - 1) // seq_len
    if header.num_documents > _MOST_PACKED:
        return None
    ends = open_token_files(folder, header).document_ends()
    return pack(ends, seq_len, header.has_pairs).summary.num_samples


def _number_of_images(data: ImageData) -> int | None:
    from titan_launch.data.images.arrays import index_hashes, map_npz

    if data.path == SKLEARN_DIGITS:
        number = 1797
    elif images_named(data.path) == "npz":
        number = len(map_npz(Path(data.path), ("labels",))["labels"])
    else:
        return None
    if data.split == "all":
        return number
    num_held_out = int((index_hashes(number) % 100 < data.validation_percent).sum())
    return num_held_out if data.split == "validation" else number - num_held_out
