"""Fixtures of the model tests."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist

from tests.models import llama3_reference


@pytest.fixture(scope="session")
def reference() -> dict[str, Any]:
    """Return the outputs of Hugging Face's Llama (see `llama3_reference`)."""
    return json.loads(llama3_reference.DATA.read_text())


@pytest.fixture
def single_process_group() -> Iterator[None]:
    """Create a gloo group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
