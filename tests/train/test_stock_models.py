"""Stock modules of PyTorch and `transformers` train without changes, from the values that they initialise
themselves."""

from __future__ import annotations

import gc
import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.distributed import run_ranks
from tests.train.jobs import read_metrics, run_job, this_rank
from titan_launch.config.job import JobConfig
from titan_launch.core.import_string import import_factory
from titan_launch.models.factory import HostValues
from titan_launch.train.build import build_run
from titan_launch.train.run_folder.records import AUDIT_FILE

SEED, VOCABULARY, TOKENS, STEPS = 3, 64, 16, 4


class Encoder(nn.Module):
    """Layers of PyTorch, BatchNorm over the features, and values initialised in common ways. The head is zero, so the
    first loss is ln 64."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, num_layers=2)
        self.norm = nn.BatchNorm1d(32)
        self.output = nn.Linear(32, VOCABULARY)
        self.apply(self._init_weights)
        nn.init.zeros_(self.output.weight)
        nn.init.zeros_(self.output.bias)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.encoder(self.embedding(tokens))
        return self.output(self.norm(x.transpose(1, 2)).transpose(1, 2))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * 3 * 3, 3),
    )


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, num_key_value_heads=2, **shape))


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    no_dropout = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, **no_dropout))


def resnet() -> nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification

    shape = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"}
    return ResNetForImageClassification(ResNetConfig(num_channels=1, num_labels=3, **shape))


NORM = {"Encoder": "LayerNorm", "llama": "LlamaRMSNorm", "gpt2": "LayerNorm"}
"""The norms that a rule computes in fp32. BatchNorm needs no rule."""

IMAGES = ("cnn", "resnet")


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Write three classes of images, each a pattern with noise."""
    generator = np.random.default_rng(0)
    labels, patterns = generator.integers(0, 3, 90), generator.normal(size=(3, 6, 6))
    path = tmp_path_factory.mktemp("images") / "patterns.npz"
    np.savez(path, images=patterns[labels] + 0.3 * generator.normal(size=(90, 6, 6)), labels=labels)
    return str(path)


def stock_job(folder: Path, name: str, dtype: str, images: str) -> dict[str, Any]:
    """Return a job with one microbatch of eight samples on each of two ranks, and BatchNorm over all of them."""
    text: dict[str, Any] = {"kind": "synthetic", "vocab_size": VOCABULARY, "num_samples": 40}
    picture: dict[str, Any] = {"kind": "images", "path": images, "validation_percent": 30, "mean": 0.0, "std": 1.0}
    data = {**picture, "split": "train"} if name in IMAGES else text
    held_out = {**picture, "split": "validation"} if name in IMAGES else {**text, "num_samples": 8, "seed": 1}
    rules = [{"type": NORM[name], "param_dtype": "float32"}] if name in NORM else []
    return {
        "job": {"name": "tiny", "dump_folder": str(folder), "device": "cpu"},
        "model": {"name": f"{__name__}:{name}"},
        "data": data,
        "training": {"seq_len": TOKENS, "global_batch_size": 8, "steps": STEPS, "seed": SEED, "max_norm": 1.0},
        "precision": {"param_dtype": dtype, "rules": rules},
        "batchnorm": {} if name in ("llama", "gpt2") else {"statistics": "synchronized"},
        # The gradient of a bias before BatchNorm is only rounding error, which AdamW's division would amplify.
        "optimizer": {"lr": 1e-2, "eps": 1e-4},
        "metrics": {"log_freq": 1, "enable_tensorboard": False},
        "validation": {"freq": STEPS, "local_batch_size": 4, "data": held_out},
    }


def train_all(folder: Path, dtype: str, images: str, world_size: int) -> None:
    torch.set_num_threads(1)
    for name in (*NORM, *IMAGES):
        job = stock_job(folder / name, name, dtype, images)
        job["training"]["local_batch_size"] = 8 // world_size
        run_job(job)


def first_loss_in_plain_pytorch(job: dict[str, Any]) -> float:
    """Return the loss of the factory's module under the job's seed, on the job's first batch."""
    with ExitStack() as stack:
        run = build_run(JobConfig.model_validate(job), this_rank(), stack)
        inputs, targets = next(run.train_batches)
        gc.collect()
        assert not any(isinstance(thing, HostValues) for thing in gc.get_objects())  # their memory is freed
    torch.manual_seed(SEED)
    outputs = import_factory(job["model"]["name"])()(inputs)
    logits = getattr(outputs, "logits", outputs)
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten()).item()


def plain_first_losses(folder: Path, images: str) -> dict[str, float]:
    losses = {}
    for name in (*NORM, *IMAGES):
        job = stock_job(folder / name, name, "float32", images)
        job["training"]["local_batch_size"] = 8
        losses[name] = first_loss_in_plain_pytorch(job)
    return losses


def test_stock_models_train_alike_on_one_rank_two_ranks_and_in_plain_pytorch(tmp_path: Path, images: str) -> None:
    for world_size in (1, 2):
        run_ranks(train_all, world_size, tmp_path / str(world_size), "float32", images, world_size)
    plain = run_ranks(plain_first_losses, 1, tmp_path / "plain", images)[0]
    assert plain["Encoder"] == pytest.approx(np.log(VOCABULARY), abs=1e-6)
    for name in (*NORM, *IMAGES):
        one, two = (read_metrics(tmp_path / world_size / name) for world_size in ("1", "2"))
        assert one[0]["train/loss"] == pytest.approx(plain[name], rel=1e-6), name
        assert len(one) == STEPS
        for tag in ("train/loss", "train/grad_norm", "validation/loss"):
            of_one, of_two = ([report[tag] for report in reports if tag in report] for reports in (one, two))
            assert of_one and of_one == pytest.approx(of_two, rel=1e-5), (name, tag)


def test_stock_models_in_bf16_with_fp32_norms_have_the_planned_dtypes(tmp_path: Path, images: str) -> None:
    run_ranks(train_all, 2, tmp_path, "bfloat16", images, 2)
    for name in (*NORM, *IMAGES):
        audit = json.loads((tmp_path / name / "tiny" / AUDIT_FILE).read_text())
        assert audit["differences"] == [], name
        norms = [module for module in audit["modules"] if "Norm" in module["class"]]
        assert norms and all(norm["dtypes"]["parameters"]["observed"] == ["float32"] for norm in norms), name
        losses = [report["train/loss"] for report in read_metrics(tmp_path / name)]
        assert losses[-1] < losses[0], (name, losses)
