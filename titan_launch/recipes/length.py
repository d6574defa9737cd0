"""The length of a recipe's run, from the number of samples that the data has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from titan_launch.config.sections.data import DATA_KINDS
from titan_launch.core.terminal import counted
from titan_launch.data.epochs import known_samples, steps_of
from titan_launch.recipes.facts import DataFolder
from titan_launch.recipes.writing import Row

_BYTES_PER_TOKEN = 4
"""Approximate bytes of text per token of a published tokenizer."""


@dataclass(frozen=True)
class Samples:
    """The training samples of an epoch."""

    number: int
    is_exact: bool
    """False for an estimate from the sizes of files, or from the share of the validation split."""


def count_samples(data: DataFolder, keys: Mapping[str, Any], seq_len: int, has_tokenizer: bool) -> Samples | None:
    """Return the number of training samples of an epoch; None if it is unknown before the data is read.

    `keys`: the keys of `[data]`. `has_tokenizer`: False if each byte is a token."""
    known = known_samples(DATA_KINDS[data.kind].model_validate(keys), seq_len)
    if known is not None:
        return Samples(known, is_exact=True)
    share = 1 - keys.get("validation_percent", 5) / 100 if data.is_split else 1.0
    if data.num_images is not None:
        number = data.num_images * share
    elif data.num_bytes is not None:
        number = data.num_bytes * share / (_BYTES_PER_TOKEN if has_tokenizer else 1) / seq_len
    else:
        return None
    return Samples(max(1, round(number)), is_exact=data.num_images is not None and not data.is_split)


@dataclass(frozen=True)
class Length:
    """The length of a run."""

    row: Row
    """The key `epochs` or `steps` of `[training]`."""

    steps: int
    """Approximate number of steps, from which warm-up and intervals follow."""


def length_of(epochs: int, steps: int, prefers_steps: bool, samples: Samples | None, batch: int) -> Length:
    """Return the length of a run with `batch` samples per step.

    `steps`: usual number of steps of the recipe. `prefers_steps`: True to write the key `steps` instead of `epochs`,
    unless the steps would be `epochs` epochs or more."""
    name, value = ("steps", steps) if prefers_steps else ("epochs", epochs)
    if samples is None:
        other = "epochs" if prefers_steps else "steps"
        return Length(Row(name, value, f"`titan-launch data` shows how many {other} these are"), steps)
    needed = steps_of(epochs, samples.number, batch)
    about, note = ("", "") if samples.is_exact else ("about ", "; `titan-launch data` counts them")
    size = f"{counted(samples.number, 'sample')}{note}"
    if prefers_steps and steps < needed:
        return Length(Row(name, value, f"{about}{steps * batch / samples.number:.2g} epochs of {size}"), steps)
    comment = f"{about}{counted(needed, 'step')}; an epoch has {about}{size}"
    return Length(Row("epochs", epochs, comment), needed)
