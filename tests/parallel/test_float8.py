"""Emulated float8 training. The tests of torchao verify the 8-bit products of a GPU."""

from __future__ import annotations

import copy
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.distributed import run_ranks
from tests.tensors import assert_equal, full_state, full_tensor
from tests.train.jobs import read_metrics, run_job, this_rank, tiny_job
from titan_launch.config.job import JobConfig
from titan_launch.config.sections.model import LoRAConfig
from titan_launch.config.sections.precision import Float8Config
from titan_launch.core.errors import ConfigError
from titan_launch.models.build import take_inventory
from titan_launch.models.lora import add_adapters
from titan_launch.parallel.float8 import convert_to_float8
from titan_launch.plan.types import ModelPlan
from titan_launch.train.build import build_run
from titan_launch.train.loop import fit

EMULATED = {"enable": True, "emulate": True}


def losses(folder: Path, num_ranks: int, **sections: dict[str, Any]) -> list[float]:
    job = tiny_job(folder, precision={"param_dtype": "bfloat16"}, training={"steps": 2}, **sections)
    run_ranks(run_job, num_ranks, job)
    return [report["train/loss"] for report in read_metrics(folder)]


def test_two_ranks_train_near_bf16_and_activation_checkpointing_changes_nothing(tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    exact = losses(tmp_path / "bf16", 2)
    rounded = losses(tmp_path / "float8", 2, float8=EMULATED)
    assert rounded != exact
    assert rounded == pytest.approx(exact, rel=1e-3)
    again = {"mode": "selective", "selective_ac_option": "op"}
    assert losses(tmp_path / "again", 2, float8=EMULATED, activation_checkpoint=again) == rounded


def trained(job: dict[str, Any]) -> tuple[dict[str, Tensor], list[tuple[Tensor, Tensor]]]:
    """Train a job. The whole parameters, and of each wrapped weight its largest number with the scale on it."""
    with ExitStack() as stack:
        run = build_run(JobConfig.model_validate(job), this_rank(), stack)
        fit(run)
        parts: list[tuple[Tensor, Any]] = [(p, cast(DTensor, p)._local_tensor) for p in run.model.parameters()]
        wrapped = [(p, part) for p, part in parts if hasattr(part, "fsdp_pre_all_gather")]
        scales = [(full_tensor(p).abs().max(), part._precomputed_scale) for p, part in wrapped]
        return full_state(run.model), scales


def check_weights_gathered_in_8_bits(folder: Path) -> None:
    float8 = {**EMULATED, "recipe": "tensorwise"}
    checkpoint = {"enable": True, "interval": 2}
    held_out = {"kind": "synthetic", "vocab_size": 61, "num_samples": 2, "seed": 1}
    others = {"ema": {"decay": 0.9}, "validation": {"freq": 4, "data": held_out}}

    def job(name: str, all_gather: bool, **sections: dict[str, Any]) -> dict[str, Any]:
        sections = {"float8": {**float8, "all_gather": all_gather}, "checkpoint": checkpoint, **others, **sections}
        return tiny_job(folder, job={"name": name}, precision={"param_dtype": "bfloat16"}, **sections)

    def losses(name: str) -> list[float]:
        return [report["train/loss"] for report in read_metrics(folder, name)]

    trained(job("plain", False))
    state, scales = trained(job("gathered", True))
    assert losses("gathered") != losses("plain")  # the 8-bit numbers are rounded from float32, not from bfloat16
    assert losses("gathered") == pytest.approx(losses("plain"), rel=1e-3)
    of_average = [read_metrics(folder, name)[-1]["validation/ema_loss"] for name in ("plain", "gathered")]
    assert of_average[0] == pytest.approx(of_average[1], rel=1e-3)
    assert len(scales) == 14
    for largest, scale in scales:
        assert scale == pytest.approx(torch.finfo(torch.float8_e4m3fn).max / largest)

    files = [path for path in (folder / "gathered/checkpoints").rglob("*") if path.is_file()]
    assert files and not [path for path in files if b"torchao" in path.read_bytes()]

    for source, all_gather in (("gathered", True), ("gathered", False), ("plain", True)):
        name = f"{source}_{all_gather}"
        from_source = {"enable": True, "load": str(folder / source / "checkpoints/step-2")}
        again, _ = trained(job(name, all_gather, checkpoint=from_source))
        assert losses(name) == pytest.approx(losses("plain")[2:], rel=1e-3)
        if source == "gathered" and all_gather:
            assert_equal(again, state)

    muon: dict[str, Any] = {
        "optimizer": {"name": "Muon", "rounding": "stochastic"},
        "checkpoint": {},
        "training": {"steps": 2},
    }
    for all_gather in (False, True):
        trained(job(f"muon_{all_gather}", all_gather, **muon))
    assert losses("muon_True") == pytest.approx(losses("muon_False"), rel=1e-3)


def test_float8_all_gather_trains_like_bf16_all_gather_and_saves_the_storage_dtype(tmp_path: Path) -> None:
    """After a step, and a validation of the moving average, each weight has the scale of the full weight. Runs with and
    without 8-bit all-gathers resume from each other's checkpoints. The same run resumes bit for bit."""
    pytest.importorskip("torchao")
    run_ranks(check_weights_gathered_in_8_bits, 2, tmp_path)


def test_without_torchao_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    model = nn.Sequential(nn.Linear(16, 16))
    plan = ModelPlan(take_inventory(model, ()), (), {}, float8=("0",))
    with pytest.raises(ConfigError, match=r"pip install 'titan-launch\[float8\]'; or set float8.enable = false"):
        convert_to_float8(model, plan, Float8Config(enable=True))


def test_a_converted_layer_keeps_its_adapter() -> None:
    pytest.importorskip("torchao")
    x, model = torch.randn(16, 32, dtype=torch.bfloat16), nn.Sequential(nn.Linear(32, 16, dtype=torch.bfloat16))
    plan = ModelPlan(take_inventory(model, ()), (), {}, float8=("0",))
    exact, adapted = model(x), copy.deepcopy(model)
    add_adapters(adapted, LoRAConfig(targets=("0",), rank=4), device=torch.device("cpu"))
    for module in (model, adapted):
        convert_to_float8(module, plan, Float8Config(enable=True, emulate=True))
    adapted.bfloat16()
    assert torch.equal(adapted(x), model(x)) and not torch.equal(adapted(x), exact)
    adapter = adapted.get_submodule("0.lora")
    nn.init.ones_(adapter.get_parameter("b"))
    assert torch.equal(adapted(x), model(x) + adapter(x))
