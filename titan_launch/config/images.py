"""Images as the models and the data of a job describe them to each other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


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
