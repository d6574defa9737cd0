"""Facts about a model of the library `transformers`, from the keys of its `config.json`. No torch.

`[model.args]` of such a model has these keys. The folder in `model.path` has those that the job does not set.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from titan_launch.config.image_format import ImageFormat
from titan_launch.config.sections.data import SampleUnit


def unit_of(args: Mapping[str, Any]) -> SampleUnit:
    """Return the unit of a model's samples, by the name of its class."""
    return "images" if class_name(args).endswith("ForImageClassification") else "tokens"


def class_name(args: Mapping[str, Any]) -> str:
    """Return the name of the model's class; empty if `architectures` does not name one."""
    names = args.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else ""


def image_format(args: Mapping[str, Any]) -> ImageFormat | None:
    """Return the format of the images that a model takes; None for a model of tokens, and if it is not known.

    Height and width are None for a class that takes images of any size.
    """
    channels, size = args.get("num_channels"), args.get("image_size")
    if unit_of(args) != "images" or not isinstance(channels, int):
        return None
    height, width = size if isinstance(size, list) and len(size) == 2 else (size, size)
    labels = args.get("num_labels") or len(args.get("id2label") or (0, 1))
    return ImageFormat(channels, height, width, labels, arguments=("num_channels", "image_size", "num_labels"))
