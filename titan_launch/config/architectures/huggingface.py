"""Facts about a model of the library `transformers`, from the keys of its `config.json`. No torch.

`[model.args]` of such a model has these keys. The folder in `model.path` supplies those that the job does not set.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from titan_launch.config.sections.data import ImageFormat, SampleUnit
from titan_launch.core.errors import ConfigError, Problem, config_error, did_you_mean
from titan_launch.core.files import read_regular

CONFIG_FILE = "config.json"

_WITHOUT_EFFECT = ("transformers_version", "_name_or_path", "dtype", "torch_dtype")
"""Keys that do not change the model. The launcher chooses the dtypes."""

_ALWAYS_KNOWN = ("architectures", "num_labels")
"""Keys that a job may set although `config.json` does not have them."""


def read_config(folder: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a folder's `config.json` that describe the model. `given`: `[model.args]` of the job.

    Raises ConfigError for a folder without a valid `config.json`, and for keys of `given` that it does not have.
    """
    path = Path(folder, CONFIG_FILE)
    try:
        table = json.loads(read_regular(path))
    except FileNotFoundError:
        missing = f"has no {CONFIG_FILE}" if path.parent.is_dir() else "no such folder"
        reason = f"{missing}; name a folder with the {CONFIG_FILE} of a class of transformers (from the working directory)"
        raise config_error(("model", "path"), reason, folder) from None
    except (OSError, ValueError, RecursionError) as error:
        raise config_error(("model", "path"), f"its {CONFIG_FILE} cannot be read: {error}", folder) from None
    if not isinstance(table, dict):
        raise config_error(("model", "path"), f"its {CONFIG_FILE} must contain a JSON object", folder)
    unknown = [key for key in given if key not in table and key not in _ALWAYS_KNOWN]
    if unknown:
        where = f"{path} has no such key"
        raise ConfigError(
            Problem(("model", "args", key), f"{where}{did_you_mean(key, table)}", given[key], also=(("model", "path"),))
            for key in unknown
        )
    labels = ("id2label", "label2id") if "num_labels" in given else ()
    return {key: value for key, value in table.items() if key not in (*_WITHOUT_EFFECT, *labels)}


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
