"""ViT: published sizes, formulas, initial values, parity with `transformers`, and training divided over ranks."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.distributed import run_ranks
from tests.tensors import assert_equal
from tests.train.jobs import read_metrics, run_job, tiny_job
from titan_launch.config.sections.training import OptimizerConfig
from titan_launch.models.build import SPECS
from titan_launch.models.init import initialize
from titan_launch.models.vit.args import FLAVORS, ViTArgs
from titan_launch.models.vit.module import ViT, initial_values
from titan_launch.optim.groups import group_parameters

TINY: dict[str, Any] = {
    "image_size": 6,
    "patch_size": 2,
    "dim": 16,
    "n_layers": 2,
    "n_heads": 4,
    "hidden_dim": 24,
    "in_channels": 1,
    "num_classes": 4,
}
POOLS = ("class_token", "mean")


def tiny_args(**overrides: Any) -> ViTArgs:
    return ViTArgs.model_validate({**TINY, **overrides})


def random_model(args: ViTArgs) -> ViT:
    """Return a model whose every tensor matters to the logits."""
    model = ViT(args)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3, generator=generator)
    return model


def on_meta(args: ViTArgs) -> nn.Module:
    with torch.device("meta"):
        return SPECS["vit"].build(args, 1)


def test_published_sizes() -> None:
    """The sizes are those of timm's models, such as `vit_base_patch16_224`."""
    sizes = {}
    for flavor, row in FLAVORS.items():
        args = ViTArgs.model_validate(row)
        sizes[flavor] = sum(p.numel() for p in on_meta(args).parameters())
    del sizes["debug"]
    assert sizes == {
        "Ti/16": 5_717_416,
        "S/16": 22_050_664,
        "B/16": 86_567_656,
        "L/16": 304_326_632,
        "H/14": 632_045_800,
    }


NAMES = {
    "embeddings.class_token": "vit.embeddings.cls_token",
    "embeddings.positions.weight": "vit.embeddings.position_embeddings",
    "embeddings.projection": "vit.embeddings.patch_embeddings.projection",
    "layers": "vit.layers",
    "attention_norm": "layernorm_before",
    "ffn_norm": "layernorm_after",
    "attention.wq": "attention.q_proj",
    "attention.wk": "attention.k_proj",
    "attention.wv": "attention.v_proj",
    "attention.wo": "attention.o_proj",
    "feed_forward.w1": "mlp.fc1",
    "feed_forward.w2": "mlp.fc2",
    "output": "classifier",
}
"""Parts of names, and those of `transformers`. The first `norm` is `vit.layernorm`."""


def name_in_transformers(name: str) -> str:
    if name.startswith("norm."):
        return f"vit.layer{name}"
    for ours, theirs in NAMES.items():
        name = name.replace(ours, theirs)
    return name


def test_logits_and_gradients_are_those_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    args = tiny_args()
    config = transformers.ViTConfig(
        hidden_size=args.dim,
        num_hidden_layers=args.n_layers,
        num_attention_heads=args.n_heads,
        intermediate_size=args.hidden_dim,
        image_size=args.image_size,
        patch_size=args.patch_size,
        num_channels=args.in_channels,
        num_labels=args.num_classes,
        layer_norm_eps=args.norm_eps,
    )
    ours, theirs = random_model(args), transformers.ViTForImageClassification(config).eval()
    theirs.load_state_dict(
        {
            (other := name_in_transformers(name)): tensor.view_as(theirs.get_parameter(other))
            for name, tensor in ours.state_dict().items()
        }
    )
    images, targets = torch.randn(5, 1, 6, 6), torch.randint(0, 4, (5,))
    logits, expected = ours(images), theirs(images).logits
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    for output in (logits, expected):
        F.cross_entropy(output, targets).backward()
    gradients = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        other = gradients[name_in_transformers(name)].grad.view_as(parameter)
        torch.testing.assert_close(parameter.grad, other, rtol=1e-4, atol=1e-5, msg=name)


def test_the_mean_of_the_tokens_is_pooled() -> None:
    model, images = random_model(tiny_args(pool="mean")), torch.randn(2, 1, 6, 6)
    x = model.embeddings(images)
    assert x.shape == (2, 9, 16) and "embeddings.class_token" not in model.state_dict()
    for layer in model.layers:
        x = layer(x)
    torch.testing.assert_close(model(images), model.output(model.norm(x).mean(1)))


def test_initial_values() -> None:
    args = tiny_args(dim=64, hidden_dim=256, in_channels=3)
    model = ViT(args)
    initialize(model, initial_values(args), 0, torch.device("cpu"))
    state = model.state_dict()
    for name, tensor in state.items():
        if name.endswith("bias") or name in ("embeddings.class_token", "output.weight"):
            expected = torch.zeros_like(tensor)
        elif "norm" in name:
            expected = torch.ones_like(tensor)
        else:
            std = {"positions.weight": 0.02, "projection.weight": 12**-0.5}.get(name.partition(".")[2])
            std = std or (2 / sum(tensor.shape)) ** 0.5
            assert tensor.std().item() == pytest.approx(std, rel=0.1), name
            continue
        assert torch.equal(tensor, expected), name
    groups = group_parameters(model, OptimizerConfig())
    decayed = {name for group in groups if group.settings.weight_decay for name in group.parameters}
    weights = {name for name in state if name.endswith("weight")}
    assert decayed == {name for name in weights if not name.endswith(("norm.weight", "positions.weight"))}
    # Each token of noise has about the variance of its pixels.
    assert model.embeddings(torch.randn(64, 3, 6, 6))[:, 1:].std().item() == pytest.approx(1.0, rel=0.1)


def image_job(folder: Path, ranks: str, **sections: Any) -> dict[str, Any]:
    """Return a job with eight images per step, of random pixels."""
    path = folder / "images.npz"
    if not path.exists():
        generator = np.random.default_rng(0)
        np.savez(path, images=generator.normal(size=(40, 6, 6)), labels=generator.integers(0, 4, 40))
    job = tiny_job(
        folder / ranks,
        training={"local_batch_size": 2, "global_batch_size": 8, "steps": 2},
        # If a gradient is almost 0, the sign of its rounding error decides the sign of Adam's update.
        optimizer={"eps": 1e-5},
        **sections,
    )
    return {**job, "model": {"name": "vit", "args": TINY}, "data": {"kind": "images", "path": str(path)}}


DIVISIONS: dict[str, dict[str, Any]] = {
    "FSDP, deferred, full activation checkpointing": {
        "gradient_accumulation": {"mode": "deferred"},
        "activation_checkpoint": {"mode": "full"},
    },
    "TP": {"parallelism": {"tensor_parallel_degree": 2, "sequence_parallel": False}},
    "PP": {"parallelism": {"pipeline_parallel_degree": 2}},
}


def train_all(jobs: list[dict[str, Any]]) -> list[dict[str, Tensor]]:
    return [run_job(job) for job in jobs]


def test_every_division_equals_one_process(tmp_path: Path) -> None:
    jobs = [image_job(tmp_path, str(index), **sections) for index, sections in enumerate(DIVISIONS.values())]
    ((alone,),) = run_ranks(train_all, 1, [image_job(tmp_path, "alone")])
    divided = run_ranks(train_all, 2, jobs)
    expected = read_metrics(tmp_path / "alone")
    assert expected[0]["train/loss"] == pytest.approx(math.log(4))  # the first logits are 0
    for index, name in enumerate(DIVISIONS):
        for one, other in zip(expected, read_metrics(tmp_path / str(index)), strict=True):
            for tag in ("train/loss", "train/grad_norm"):
                assert other[tag] == pytest.approx(one[tag], rel=1e-5), (name, tag)
        if name != "PP":  # a stage has its own parameters only
            for key, tensor in divided[0][index].items():
                torch.testing.assert_close(tensor, alone[key], rtol=1e-3, atol=1e-5, msg=f"{name}: {key}")
    assert_equal(divided[0][0], divided[1][0])
