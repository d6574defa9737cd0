"""Runs with optimizers other than AdamW in float32 resume bitwise, also with another division of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed import run_ranks
from tests.sampling import sampled
from tests.train.jobs import run_job, run_job_until, tiny_job
from titan_launch.core.errors import UserError

STORED_IN_BF16 = {"param_dtype": "float32", "storage_dtype": "bfloat16"}
JOBS: dict[str, dict[str, Any]] = {
    "muon": {"optimizer": {"name": "Muon", "param_groups": [{"match": "output.weight", "algorithm": "SGD"}]}},
    "sgd": {"optimizer": {"name": "SGD", "weight_decay": 1e-4, "sgd": {"nesterov": True}}},
    "stochastic": {"optimizer": {"name": "Muon", "rounding": "stochastic"}, "precision": STORED_IN_BF16},
    "masters": {"optimizer": {"master_weights": True, "state_dtype": "float32"}, "precision": STORED_IN_BF16},
}
REPLICATED = {"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 1}


def _job(folder: Path, name: str, case: str, **sections: Any) -> dict[str, Any]:
    checkpoint = {"enable": True, "interval": 1, "load": "latest", "accept_changes": True}
    sections = {"training": {"steps": 2}, **JOBS[case], **sections}
    return tiny_job(folder, job={"name": name}, checkpoint=checkpoint, **sections)


def _train(folder: Path, cases: Sequence[str]) -> None:
    for case in cases:
        whole = run_job(_job(folder, f"{case}-whole", case))
        run_job_until(_job(folder, f"{case}-resumed", case), 1)
        resumed = run_job(_job(folder, f"{case}-resumed", case))
        for name, tensor in whole.items():
            assert torch.equal(tensor, resumed[name]), (case, name)
    run_job_until(_job(folder, "moved", "muon"), 1)
    moved = run_job(_job(folder, "moved", "muon", parallelism=REPLICATED))
    alone = run_job(_job(folder, "alone", "muon"))
    for name, tensor in alone.items():
        torch.testing.assert_close(moved[name], tensor, rtol=0, atol=2e-4, msg=name)  # sums in another order, in bf16
    with pytest.raises(UserError, match=r"another optimizer: for .*, the checkpoint has momentum_buffer, step, and"):
        run_job(_job(folder, "alone", "masters", training={"steps": 3}))


@sampled("cases", ("masters", "stochastic", "sgd"), 3)
def test_runs_with_every_optimizer_resume_bitwise(cases: tuple[str, ...], tmp_path: Path) -> None:
    run_ranks(_train, 2, tmp_path, cases)
