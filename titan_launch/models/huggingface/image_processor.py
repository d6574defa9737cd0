"""The file `preprocessor_config.json`, with whose settings `transformers` prepares images, and the keys of `[data]`
with the same meaning. This module does not import torch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from titan_launch.config.sections.data import ImageData
from titan_launch.models.huggingface.config_json import read_json

FILE = "preprocessor_config.json"

_USUAL = {"do_rescale": True, "rescale_factor": 1 / 255, "rescale_offset": False, "do_normalize": True}
"""Values with which the mean and the standard deviation in the file have the meaning of `data.mean` and `data.std`."""


def read_image_keys(folder: str | Path) -> dict[str, Any]:
    """Convert a folder's `preprocessor_config.json` to the keys `mean`, `std`, `resize` and `crop` of `[data]`. Keys
    that the file does not determine are omitted. Without the file, the dict is empty. Raises WeightsError if the file
    cannot be read."""
    if not os.path.lexists(Path(folder, FILE)):
        return {}
    table = read_json(Path(folder, FILE))
    keys: dict[str, Any] = {}
    is_usual = {**_USUAL, **table}.items() >= _USUAL.items()
    for name, key in (("mean", "image_mean"), ("std", "image_std")):
        values = table.get(key)
        if is_usual and isinstance(values, list) and values and all(type(value) in (int, float) for value in values):
            keys[name] = [float(value) for value in values]
    size, share = _side(table.get("size")), table.get("crop_pct")
    crop = _side(table.get("crop_size")) if table.get("do_center_crop") else size
    if type(share) is float and 0 < share < 1 and size is not None and size < 384:  # see `ConvNextImageProcessor`
        size = int(size / share)
    return {**keys, **({"resize": size, "crop": crop} if size and crop and table.get("do_resize", True) else {})}


def _side(size: Any) -> int | None:
    """Return the shorter side in pixels of `size`, a value in the file; None if `size` does not contain it."""
    if isinstance(size, dict):
        size = size.get("shortest_edge", size.get("height"))
    return size if type(size) is int and size > 0 else None


def image_processor(data: ImageData, channels: int) -> dict[str, Any]:
    """Return the content of `preprocessor_config.json` for the image options in `data`, without augmentation.
    `channels`: number of channels that the model takes."""
    table: dict[str, Any] = {
        "image_processor_type": "BitImageProcessor",
        "do_convert_rgb": channels == 3,
        "do_resize": data.resize is not None,
        "do_center_crop": data.crop is not None,
        "resample": 2,  # bilinear
        **_USUAL,
        "image_mean": [data.mean] * channels if isinstance(data.mean, float) else data.mean,
        "image_std": [data.std] * channels if isinstance(data.std, float) else data.std,
    }
    if data.resize is not None:
        table["size"] = {"shortest_edge": data.resize}
    if data.crop is not None:
        table["crop_size"] = {"height": data.crop, "width": data.crop}
    return table
