"""Formats of images, and the reasons why images do not fit a model. This module does not import torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from titan_launch.core.terminal import counted


@dataclass(frozen=True)
class ImageFormat:
    """Shape and number of classes of the images in a data source, or of the images that a model takes."""

    channels: int
    height: int | None
    """Height in pixels; None if the model takes any size."""
    width: int | None
    num_classes: int
    """Number of classes. Labels are from 0 to `num_classes` - 1."""

    arguments: tuple[str, str, str] = ("in_channels", "image_size", "num_classes")
    """Names of the model arguments that set channels, size and number of classes."""


DIGITS = ImageFormat(channels=1, height=8, width=8, num_classes=10)
"""Format of `sklearn-digits`."""


def misfits(held: ImageFormat, taken: ImageFormat) -> Iterator[str]:
    """Yield the reasons, with remedies, why images of format `held` do not fit a model for images of format `taken`."""
    channels_argument, size_argument, classes_argument = taken.arguments
    if held.width is not None and held.width <= 4 < held.channels == held.height:
        shape = f"(N, {held.channels}, {held.height}, {held.width})"
        yield f"holds images of shape {shape}, probably with channels last; save images.transpose(0, 3, 1, 2)"
        return
    if held.channels != taken.channels:
        reason = f"holds images with {counted(held.channels, 'channel')}, but the model takes {taken.channels}"
        yield f"{reason}; set model.args.{channels_argument} = {held.channels}"
    pixels = f"{held.height} x {held.width} pixels"
    if taken.height is None:
        pass
    elif held.height != held.width:
        yield f"holds images of {pixels}, but the model takes square images; set resize and crop to {taken.height}"
    elif held.height != taken.height:
        reason = f"holds images of {pixels}, but the model takes {taken.height} x {taken.width}"
        yield f"{reason}; set model.args.{size_argument} = {held.height}, or set resize and crop to {taken.height}"
    if held.num_classes > taken.num_classes:
        reason = f"holds labels up to {held.num_classes - 1}, but the model has {taken.num_classes} classes"
        yield f"{reason}; set model.args.{classes_argument} to {held.num_classes} or more"


def resized_size(height: int, width: int, resize: int) -> tuple[int, int]:
    """Return height and width of an image after its shorter side was scaled to `resize` pixels."""
    shorter = min(height, width)
    return resize * height // shorter, resize * width // shorter
