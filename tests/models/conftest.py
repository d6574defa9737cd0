"""Fixtures of the model tests."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.models import llama3_reference


@pytest.fixture(scope="session")
def reference() -> dict[str, Any]:
    """What Hugging Face's Llama computes: see `llama3_reference`."""
    return json.loads(llama3_reference.DATA.read_text())
