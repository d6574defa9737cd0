"""Facts about a model of the library `transformers`, from the keys of its `config.json`, without torch.

`[model.args]` of such a model has these keys. Keys that the job does not set come from the folder `model.path`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from titan_launch.config.image_format import ImageFormat
from titan_launch.config.sections.data import SampleUnit
from titan_launch.core.errors import KeyPath, did_you_mean
from titan_launch.core.packages import not_installed
from titan_launch.models.args import MOST_TOKENS


def unit_of(args: Mapping[str, Any]) -> SampleUnit:
    """Return the unit of a model's samples: "images" if the name of its class ends with `ForImageClassification`, else
    "tokens"."""
    return "images" if class_name(args).endswith("ForImageClassification") else "tokens"


def class_name(args: Mapping[str, Any]) -> str:
    """Return the name of the model's class; empty if `architectures` does not name one."""
    names = args.get("architectures")
    return names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""


def image_format(args: Mapping[str, Any]) -> ImageFormat | None:
    """Return the format of the images that a model takes; None for a model of tokens, and if the number of channels is
    unknown. The height and the width are None if `image_size` does not contain them: images may then have any size."""
    channels, size = args.get("num_channels"), args.get("image_size")
    sizes = size if isinstance(size, list) and len(size) == 2 else [size, size]
    if unit_of(args) != "images" or not isinstance(channels, int):
        return None
    height, width = (side if isinstance(side, int) else None for side in sizes)
    names, labels = args.get("id2label"), args.get("num_labels")
    if not isinstance(labels, int) or not labels:
        labels = len(names) if isinstance(names, dict) and names else 2
    return ImageFormat(channels, height, width, labels, arguments=("num_channels", "image_size", "num_labels"))


def label_names(config: Mapping[str, Any]) -> list[str]:
    """Return the names in `id2label` in the order of their numbers. The list is empty without `id2label`, and if its
    keys are not "0", "1" and so on."""
    names = config.get("id2label")
    if not isinstance(names, dict) or names.keys() != {str(number) for number in range(len(names))}:
        return []
    return [str(names[str(number)]) for number in range(len(names))]


_LOADS = "can load code or files by name, so it is not supported; remove the key"
_REFUSED = {
    **dict.fromkeys(("backbone", "backbone_kwargs", "use_pretrained_backbone", "model_args"), _LOADS),
    "quantization_config": "quantized weights cannot be trained; use the folder of the original weights",
}
"""Keys that must be unset, each with the reason. With the first four keys, a class loads a second model or calls
`timm`."""

_TIMM = ("timm_wrapper", "timm_backbone", "gemma3n", "gemma3n_vision")
"""Values of `model_type` whose models the library `timm` builds. `timm` downloads and reads files by name."""

_KERNELS = re.compile("_?(attn|experts)_implementation(_internal)?")
"""Keys that choose kernels. Their values can be names of kernels on the Hugging Face hub."""

_COUNTS = re.compile(".*(layers?|depths?|blocks|stages|labels|experts)")
"""Keys whose values are numbers of modules or of labels. A class of `transformers` makes an object for each module and
each label."""

_MOST_LAYERS, _MOST_OBJECTS = 256, 1 << 17
"""Limits of the values of `_COUNTS`: numbers of layers, and of other objects. The largest published models have about
130 layers and 22,000 classes."""


def refused(args: Mapping[str, Any]) -> Iterator[tuple[KeyPath, str, Any]]:
    """Yield (path, reason, value) for each argument that is not supported. These are arguments that could load code or
    files by name, `quantization_config`, whole numbers that are larger than in any real model, and a `model_type` that
    is not a string."""
    if not isinstance(args.get("model_type", ""), str):
        yield ("model_type",), "must be a string", args["model_type"]
    for path, value in _values((), args):
        key = next((part for part in reversed(path) if isinstance(part, str)), "")
        if key in _REFUSED and path[-1] == key and value not in (None, False, "", {}, []):
            yield path, _REFUSED[key], value
        elif key == "model_type" and value in _TIMM:
            reason = "is built by timm, which can load files by name, so it is not supported; use another class"
            yield path, reason, value
        elif _KERNELS.fullmatch(key) and "/" in str(value):
            yield path, "names kernels on the hub, which are not loaded; remove the key", value
        elif type(value) is int:
            is_layers = key.endswith(("layer", "layers", "depth", "depths", "blocks", "stages"))
            most = _MOST_LAYERS if is_layers else _MOST_OBJECTS if _COUNTS.fullmatch(key) else MOST_TOKENS
            if abs(value) > most and "theta" not in key:
                yield path, f"is larger than in any real model; write {most} or less", value


def _values(path: KeyPath, value: Any) -> Iterator[tuple[KeyPath, Any]]:
    """Yield (path, value) for each value in nested tables and lists. The inner tables and lists are also values."""
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        yield (*path, key), inner
        if isinstance(inner, dict | list):
            yield from _values((*path, key), inner)


def missing_in_transformers(args: Mapping[str, Any]) -> str | None:
    """Return the error text if the library `transformers` is not installed, or does not list the `model_type`. Return
    None if the library lists the type, or if its list has an unexpected form. The library is not imported, because its
    import takes seconds."""
    known, model_type = _model_types(), str(args["model_type"])
    if known is None:
        return not_installed("transformers")
    return unknown_model_type(args, known) if known and model_type not in known else None


def unknown_model_type(args: Mapping[str, Any], known: Iterable[str]) -> str:
    """Return the error text for a `model_type` that is not among the types `known` to the installed `transformers`."""
    release = f"transformers {version('transformers')} has no such model_type"
    if "auto_map" in args:
        return f"{release}: its class is code in the folder (auto_map), which is never run; use a class of transformers"
    return f"{release}{did_you_mean(str(args.get('model_type')), known)}"


@cache
def _model_types() -> frozenset[str] | None:
    """Return the model types that the source text of the installed `transformers` lists; None if the library is not
    installed. The result is empty if the text has an unexpected form."""
    found = find_spec("transformers")
    if found is None or found.origin is None:
        return None
    folder = Path(found.origin).parent / "models" / "auto"
    files = [folder / name for name in ("auto_mappings.py", "configuration_auto.py")]
    texts = [file.read_text(encoding="utf-8") for file in files if file.is_file()]
    return frozenset(name for text in texts for name in re.findall(r'"([^"]+)"\s*[,:]\s*"\w+Config"', text))
