"""A tiny run that has learned a text, for the tests of what follows training."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed import run_ranks
from tests.models.conftest import single_process_group
from tests.train.jobs import run_job, tiny_job

__all__ = ["run", "single_process_group"]  # fixtures

TEXT = "Grüße, 世界 🌍! "
"""Text of characters of one to four bytes, which the run has learned by heart."""


def text_job(folder: Path, **sections: Any) -> dict[str, Any]:
    """Return a tiny job that trains on bytes, and saves its last step."""
    (folder / "text.txt").write_text(TEXT * 100, encoding="utf-8")
    job = tiny_job(
        folder,
        checkpoint={"enable": True, "async_mode": "disabled"},
        **{"training": {"seq_len": 48, "steps": 1, **sections.pop("training", {})}, **sections},
    )
    job["data"] = {"kind": "text", "path": str(folder / "text.txt")}
    job["model"].setdefault("name", "llama3")
    if job["model"]["name"] == "llama3":
        job["model"]["args"]["vocab_size"] = 257
    return job


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Compute with one thread: each forward is tiny, and threads would wait for each other on a busy machine."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train the run, and return its folder."""
    folder = tmp_path_factory.mktemp("trained")
    job = text_job(folder, training={"steps": 28, "global_batch_size": 8}, optimizer={"lr": 2e-2})
    run_ranks(run_job, 1, job)
    return folder / "tiny"
