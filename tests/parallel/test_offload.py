"""CPU offload of parameters, gradients and optimizer: bitwise equal results, and checkpoints that load with and without
it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.distributed import run_ranks
from tests.tensors import assert_equal
from tests.train.jobs import run_job, run_job_until, tiny_job
from titan_launch.models.init import allocate

OFFLOAD = {"enable_cpu_offload": True, "steps": 2}
BATCHNORM: dict[str, Any] = {
    "model": {"args": {"norm": "batchnorm"}},
    "precision": {"param_dtype": "bfloat16"},
    "optimizer": {"name": "SGD", "lr": 0.1, "weight_decay": 1e-4},
    "gradient_accumulation": {"mode": "deferred", "keep_params_unsharded": True},
}
CHECKPOINTS = {"enable": True, "interval": 1, "async_mode": "thread"}


def offloaded_and_not(folder: Path) -> None:
    for index, sections in enumerate(({"checkpoint": CHECKPOINTS}, BATCHNORM)):
        kept = run_job(tiny_job(folder, **sections, training={"steps": 2}, job={"name": f"kept{index}"}))
        offloaded = tiny_job(folder, **sections, training=OFFLOAD, job={"name": f"offloaded{index}"})
        if not index:
            run_job_until(offloaded, 1)  # the run below resumes
        assert_equal(run_job(offloaded), kept)


def test_offloading_changes_no_bit(tmp_path: Path) -> None:
    run_ranks(offloaded_and_not, 2, tmp_path)


def test_parameters_go_to_the_host_and_buffers_to_the_device() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    allocate(model, torch.device("meta"), parameters_on_host=True)
    assert {p.device.type for p in model.parameters()} == {"cpu"}
    assert {b.device.type for b in model.buffers()} == {"meta"}
