"""Classes of `transformers` train from their `config.json` like plain PyTorch, at every parallelism."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tests.distributed import run_ranks
from tests.models.huggingface_folders import CONFIGS, NORMS, VOCABULARY
from tests.train.jobs import read_metrics, run_job, run_job_until, this_rank
from titan_launch.config.job import JobConfig
from titan_launch.core.patches import replaced
from titan_launch.models import huggingface
from titan_launch.train import build
from titan_launch.train.build import build_run
from titan_launch.train.run_folder.records import AUDIT_FILE

SEED, TOKENS, STEPS, RATE, EPS = 3, 16, 4, 1e-2, 1e-3
IMAGES = ("vit", "resnet")
TENSOR_PARALLEL = {"tensor_parallel_degree": 2, "sequence_parallel": False}

Batch = tuple[Tensor, Tensor]


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Write three classes of images, each a pattern with noise."""
    generator = np.random.default_rng(0)
    labels, patterns = generator.integers(0, 3, 40), generator.normal(size=(3, 6, 6))
    path = tmp_path_factory.mktemp("images") / "patterns.npz"
    np.savez(path, images=patterns[labels] + 0.3 * generator.normal(size=(40, 6, 6)), labels=labels)
    return str(path)


def make_job(folder: Path, name: str, images: str, dtype: str = "float32", **sections: Any) -> dict[str, Any]:
    """Return a job with eight samples a step, at a constant learning rate, with BatchNorm over all of them."""
    text: dict[str, Any] = {"kind": "synthetic", "vocab_size": VOCABULARY, "num_samples": 40}
    rules = [{"type": NORMS[name], "param_dtype": "float32"}] if name in NORMS else []
    return {
        "job": {"name": "tiny", "dump_folder": str(folder), "device": "cpu"},
        "model": {"name": "huggingface", "args": CONFIGS[name]},
        "data": {"kind": "images", "path": images, "mean": 0.0, "std": 1.0} if name in IMAGES else text,
        "training": {"seq_len": TOKENS, "global_batch_size": 8, "steps": STEPS, "seed": SEED, "max_norm": 1.0},
        "precision": {"param_dtype": dtype, "rules": rules},
        "batchnorm": {"statistics": "synchronized"} if name == "resnet" else {},
        "optimizer": {"lr": RATE, "eps": EPS, "weight_decay": 0.0},
        "lr_scheduler": {"kind": "constant"},
        "metrics": {"log_freq": 1, "enable_tensorboard": False},
        "checkpoint": {"save_last": False},
        **sections,
    }


def train(job: dict[str, Any]) -> list[float]:
    """Train a job on two ranks, and return the losses of its steps."""
    ranks = 1 if job.get("parallelism") else dist.get_world_size()
    job["training"] = {**job["training"], "local_batch_size": 8 // ranks}
    run_job(job)
    folder = Path(job["job"]["dump_folder"])
    dist.barrier()
    return [report["train/loss"] for report in read_metrics(folder)]


def global_batches(job: dict[str, Any]) -> list[Batch]:
    """Return the batches of a job, each of all ranks."""
    job = {**job, "training": {**job["training"], "local_batch_size": 8 // dist.get_world_size()}}
    batches = []
    with ExitStack() as stack:
        run = build_run(JobConfig.model_validate(job), this_rank(), stack)
        for _ in range(STEPS):
            everybody: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(everybody, next(run.train_batches))
            batches.append((torch.cat([inputs for inputs, _ in everybody]), torch.cat([t for _, t in everybody])))
    return batches


def train_in_plain_pytorch(name: str, batches: list[Batch]) -> list[float]:
    torch.manual_seed(SEED)
    model = huggingface.build(TOKENS, **CONFIGS[name])
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), eps=EPS, weight_decay=0.0)
    losses = []
    for inputs, targets in batches:
        loss = F.cross_entropy(model(inputs).logits.flatten(0, -2), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def train_everything(folder: Path, images: str) -> dict[str, dict[str, list[float]]]:
    """Return the losses of every model, trained in several ways on the ranks of the test."""
    pytest.importorskip("transformers")
    losses: dict[str, dict[str, list[float]]] = {}
    with replaced(build, "MemoryCheck", lambda *_: None):  # another process would trace the memory
        for name in CONFIGS:
            job = make_job(folder / "batches" / name, name, images)
            losses[name] = {
                "plain": train_in_plain_pytorch(name, global_batches(job)),
                "FSDP": train(make_job(folder / "fp32" / name, name, images)),
                "bf16": train(make_job(folder / "bf16" / name, name, images, "bfloat16")),
            }
        for name in ("llama", "qwen2"):
            job = make_job(folder / "tp" / name, name, images, parallelism=TENSOR_PARALLEL)
            losses[name]["TP"] = train(job)
        job = make_job(folder / "resumed", "qwen2", images, activation_checkpoint={"mode": "full"})
        job["training"]["local_batch_size"] = 4
        job["checkpoint"] = {"enable": True, "interval": 2}
        run_job_until(job, 2)
        losses["qwen2"]["resumed"] = train(job)
    return losses


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, images: str) -> tuple[Path, dict[str, dict[str, list[float]]]]:
    folder = tmp_path_factory.mktemp("runs")
    return folder, run_ranks(train_everything, 2, folder, images)[0]


@pytest.mark.parametrize("name", CONFIGS)
def test_every_division_trains_like_plain_pytorch(
    name: str, trained: tuple[Path, dict[str, dict[str, list[float]]]]
) -> None:
    ways = dict(trained[1][name])
    plain, bf16 = ways.pop("plain"), ways.pop("bf16")
    for way, losses in ways.items():
        assert losses == pytest.approx(plain, rel=1e-5), way
    assert bf16 == pytest.approx(plain, rel=2e-2)
    assert bf16[-1] < bf16[0]
    audit = json.loads((trained[0] / "bf16" / name / "tiny" / AUDIT_FILE).read_text())
    assert audit["differences"] == []
    norms = [module for module in audit["modules"] if "Norm" in module["class"]]
    assert norms and all(norm["dtypes"]["parameters"]["observed"] == ["float32"] for norm in norms)
