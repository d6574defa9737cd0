"""Classes of `transformers` train from their `config.json` like plain PyTorch, at every parallelism."""

from __future__ import annotations

import gc
import json
import logging
from contextlib import ExitStack
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn

from tests.distributed import run_ranks
from tests.models.huggingface_folders import CONFIGS, NORMS, VOCABULARY, needs_transformers
from tests.sampling import chosen, rest_is_slow
from tests.tensors import assert_equal, full_state
from tests.train.jobs import read_metrics, run_job, run_job_until, this_rank
from titan_launch.config.job import JobConfig
from titan_launch.data.sources import Batch
from titan_launch.inference.export import ExportOptions, export
from titan_launch.models.build import recorded_model
from titan_launch.models.huggingface import module as huggingface
from titan_launch.train.build import build_run
from titan_launch.train.run_folder.records import AUDIT_FILE

SEED, TOKENS, STEPS, RATE, EPS = 3, 16, 3, 1e-2, 1e-3
IMAGES = ("vit", "resnet")
WITH_WEIGHTS = ("vit", "qwen2", "resnet")
TENSOR_PARALLEL = {"tensor_parallel_degree": 2, "sequence_parallel": False}

pytestmark = needs_transformers

Trained = tuple[Path, dict[str, dict[str, list[float]]]]
"""The folder of all runs, and their losses by model and way."""


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


def train(job: dict[str, Any]) -> tuple[list[float], dict[str, Tensor]]:
    """Train a job on two ranks, and return the losses of its steps and all parameters and buffers."""
    ranks = 1 if job.get("parallelism") else dist.get_world_size()
    job["training"] = {**job["training"], "local_batch_size": 8 // ranks}
    state = run_job(job)
    dist.barrier()
    return [report["train/loss"] for report in read_metrics(Path(job["job"]["dump_folder"]))], state


def global_batches(job: dict[str, Any]) -> list[Batch]:
    """Return the batches of a job, each of all ranks."""
    job = {**job, "training": {**job["training"], "local_batch_size": 8 // dist.get_world_size()}}
    batches = []
    with ExitStack() as stack:
        run = build_run(JobConfig.model_validate(job), this_rank(), stack)
        for _ in range(STEPS):
            everybody: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(everybody, next(run.batches.train))
            batches.append(Batch(*(torch.cat([batch[part] for batch in everybody]) for part in (0, 1))))
    return batches


def train_in_plain_pytorch(model: Any, batches: list[Batch]) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), eps=EPS, weight_decay=0.0)
    losses = []
    for inputs, targets, _ in batches:
        loss = F.cross_entropy(model(inputs).logits.flatten(0, -2), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def from_seed(name: str) -> nn.Module:
    torch.manual_seed(SEED)
    return huggingface.build(TOKENS, **CONFIGS[name])


def auto_class(name: str) -> Any:
    from transformers import AutoModelForCausalLM, AutoModelForImageClassification

    return AutoModelForImageClassification if name in IMAGES else AutoModelForCausalLM


def train_with_weights(folder: Path, name: str, images: str, batches: list[Batch]) -> dict[str, list[float]]:
    """Return the losses of a model that begins with weights in bfloat16, which `save_pretrained` wrote."""
    weights = str(folder / "weights" / name)
    if dist.get_rank() == 0:
        from_seed(name).bfloat16().save_pretrained(weights)  # type: ignore[operator]
    dist.barrier()
    plain = train_in_plain_pytorch(auto_class(name).from_pretrained(weights, dtype=torch.float32).train(), batches)
    ways = {"FSDP": {}} if name in IMAGES else {"FSDP": {}, "TP": {"parallelism": TENSOR_PARALLEL}}
    losses = {"plain": plain}
    for way, sections in ways.items():
        job = make_job(folder / "with weights" / name / way, name, images, **sections)
        job["model"]["weights"] = weights
        losses[way] = train(job)[0]
    return losses


def resume(folder: Path, name: str, images: str) -> list[float]:
    """Return the losses of a run that stops after two steps and resumes. Its result loads in plain PyTorch, and its
    export in `transformers`."""
    job = make_job(folder, name, images, activation_checkpoint={"mode": "full"})
    job["training"]["local_batch_size"] = 4
    job["checkpoint"] = {"enable": True, "interval": 2}
    run_job_until(job, 2)
    losses, state = train(job)
    model = recorded_model(folder / "tiny" / "config.json")
    dcp.load({"model": model.state_dict()}, checkpoint_id=folder / "tiny/checkpoints/latest", no_dist=True)
    assert_equal(full_state(model), state)
    if dist.get_rank() == 0:
        export(folder / "tiny", folder / "exported", ExportOptions(max_shard_size="20KB"))
        assert_equal(full_state(auto_class(name).from_pretrained(folder / "exported")), state)
    return losses


def train_from_seed(folder: Path, name: str, images: str, batches: list[Batch]) -> dict[str, list[float]]:
    """Return the losses of a model that begins with the values of a seed."""
    losses = {
        "plain": train_in_plain_pytorch(from_seed(name), batches),
        "FSDP": train(make_job(folder / "fp32" / name, name, images))[0],
        "bf16": train(make_job(folder / "bf16" / name, name, images, "bfloat16"))[0],
    }
    if name in ("llama", "qwen2"):
        job = make_job(folder / "tp" / name, name, images, parallelism=TENSOR_PARALLEL)
        losses["TP"] = train(job)[0]
    if name in ("qwen2", "vit"):
        losses["resumed"] = resume(folder / "resumed" / name, name, images)
    return losses


def train_everything(folder: Path, images: str, names: set[str]) -> dict[str, dict[str, list[float]]]:
    """Return the losses of models, trained in several ways on the ranks of the test."""
    import transformers  # noqa: F401

    logged = BufferingHandler(capacity=1000)
    for name in ("torchao", "torch.utils._pytree"):  # which each rank would print
        logging.getLogger(name).addHandler(logged)
    gc.freeze()  # a garbage collection would visit all objects of the library
    losses: dict[str, dict[str, list[float]]] = {}
    for name in [name for name in CONFIGS if {name, f"{name} with weights"} & names]:
        batches = global_batches(make_job(folder / "batches" / name, name, images))
        if name in names:
            losses[name] = train_from_seed(folder, name, images, batches)
        if f"{name} with weights" in names:
            losses[f"{name} with weights"] = train_with_weights(folder, name, images, batches)
    assert not logged.buffer
    return losses


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, images: str, request: pytest.FixtureRequest) -> Trained:
    folder = tmp_path_factory.mktemp("runs")
    return folder, run_ranks(train_everything, 2, folder, images, chosen(request, "name"), timeout=200)[0]


FROM_SEED = ("qwen2", "llama", "gpt2", "vit", "resnet")
"""Models with values of the seed. Of all cases the default suite runs the first of each kind."""


@pytest.mark.parametrize("name", rest_is_slow([*FROM_SEED, *(f"{name} with weights" for name in WITH_WEIGHTS)], 5))
def test_every_division_trains_like_plain_pytorch(name: str, trained: Trained) -> None:
    ways = dict(trained[1][name])
    plain, bf16 = ways.pop("plain"), ways.pop("bf16", None)
    for way, losses in ways.items():
        assert losses == pytest.approx(plain, rel=1e-5), way
    if bf16 is None:
        return
    assert bf16 == pytest.approx(plain, rel=2e-2)
    assert bf16[-1] < bf16[0]
    audit = json.loads((trained[0] / "bf16" / name / "tiny" / AUDIT_FILE).read_text())
    assert audit["differences"] == []
    norms = [module for module in audit["modules"] if "Norm" in module["class"]]
    assert norms and all(norm["dtypes"]["parameters"]["observed"] == ["float32"] for norm in norms)
