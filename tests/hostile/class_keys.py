"""Build every class of `transformers` that a job may name, with a file's name in each key that could load a file.

Run as a process of its own, because an audit hook stays: `python -m tests.hostile.class_keys FILE`. It prints the
files, programs and hosts that were touched, by class, and the number of cases as the last line.
"""

from __future__ import annotations

import os
import re
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
)

from tests.hostile.runner import STARTS
from titan_launch.core.errors import UserError
from titan_launch.models.huggingface.module import build

_NAMES = re.compile("name|path|file|dir|model|backbone|pretrained|kernel|class|checkpoint|url|repo|impl|tokenizer|timm")
"""Keys that may be names of something to load."""

_FURTHER = (
    *("_name_or_path", "name_or_path", "checkpoint_path", "pretrained", "pretrained_cfg", "base_model_name_or_path"),
    *("tokenizer_class", "processor_class"),
)
"""Keys that any `config.json` may have."""


def classes() -> Iterator[tuple[str, str]]:
    """Yield the types of all models, and the names of their classes."""
    tables = (MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES)
    for kind in sorted({*tables[0], *tables[1]}):
        for table in tables:
            found = table.get(kind, ())
            yield from ((kind, name) for name in ([found] if isinstance(found, str) else found))


def cases(kind: str, file: str) -> Iterator[dict[str, Any]]:
    """Yield the arguments of a small model, with the name of a file in some keys."""
    table = CONFIG_MAPPING[kind]().to_dict()
    for key, value in table.items():
        if type(value) is int and key.endswith(("layers", "n_layer")):
            table[key] = 2
    keys = [key for key, value in table.items() if isinstance(value, str | None) and _NAMES.search(key)]
    for change in (_FURTHER, *([key] for key in keys if key != "model_type")):
        args = {key: value for key, value in table.items() if value is not None}
        yield args | dict.fromkeys(change, file)


def main(file: str) -> None:
    """Build all cases."""
    warnings.simplefilter("ignore")
    touched: list[str] = []

    def note(event: str, arguments: tuple[Any, ...]) -> None:
        is_start = event in STARTS and "ninja" not in str(arguments[0])  # PyTorch, for the kernels of RWKV
        if is_start or (event in ("open", "import") and os.path.basename(file) in str(arguments[0])):
            touched.append(f"{event} {arguments!r:.200}")

    sys.addaudithook(note)
    count = 0
    for kind, name in classes():
        try:
            arguments = list(cases(kind, file))
        except Exception:  # a class without default sizes
            continue
        for args in arguments:
            touched.clear()
            count += 1
            try:
                with torch.device("meta"):
                    build(8, **args, architectures=[name])
            except UserError:
                pass
            except Exception as error:
                touched.append(repr(error))
            for event in touched:
                print(name, event)
    print(count)


if __name__ == "__main__":
    main(sys.argv[1])
