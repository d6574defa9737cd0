"""Files of Hugging Face folders: their names, helpers for their JSON values, and their errors, without torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

CONFIG_FILE, ADAPTER_CONFIG_FILE = "config.json", "adapter_config.json"
GENERATION_FILE = "generation_config.json"

Config = Mapping[str, Any]
"""The table in a `config.json`."""


class WeightsError(Exception):
    """A folder of weights that cannot be used. The message is a clause with the reason and the remedy."""


def unsupported(key: str, value: Any, reason: str) -> WeightsError:
    """Return the error for a value of `config.json` that is not supported."""
    return WeightsError(f"{CONFIG_FILE} has {key} = {as_text(value)}, which is not supported ({reason})")


def as_text(value: Any) -> str:
    """Return a value of `config.json` as JSON. A text of more than 80 characters is cut to 80."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 80 else f"{text[:77]}..."


def is_equal(value: Any, other: Any) -> bool:
    """Return True if `value`, from a JSON file, equals the expected value `other`. True does not equal 1. The value 1
    equals an expected 1.0, but the value 1.0 does not equal an expected 1."""
    return value == other and (type(value) is type(other) or (type(value), type(other)) == (int, float))
