"""A ResNet, and a user's model, on images. The trainer does not assume text."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.distributed import run_ranks
from tests.tensors import assert_equal, cross_entropy_sum
from tests.train.jobs import read_metrics, run_and_interrupt, run_job, tiny_job
from titan_launch.config.job import JobConfig
from titan_launch.data.sources import build_source
from titan_launch.data.tokenizers import ByteTokenizer
from titan_launch.models.architectures import images_taken
from titan_launch.models.build import build_model

RESNET = {
    "name": "resnet",
    "args": {"depths": [1, 1], "widths": [8, 16], "image_size": 6, "num_classes": 3},
}


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Write three classes of images, each a pattern with noise."""
    generator = np.random.default_rng(0)
    labels = generator.integers(0, 3, 90)
    patterns = generator.normal(size=(3, 6, 6))
    path = tmp_path_factory.mktemp("images") / "patterns.npz"
    np.savez(path, images=patterns[labels] + 0.7 * generator.normal(size=(90, 6, 6)), labels=labels)
    return str(path)


def image_job(
    folder: Path, images: str, model: dict[str, Any] = RESNET, steps: int = 4, **sections: Any
) -> dict[str, Any]:
    """Return a job with 23 validation samples, which fill no number of batches on any number of ranks."""
    source = {"kind": "images", "path": images, "validation_percent": 30, "mean": 0.0, "std": 1.0}
    job = tiny_job(
        folder,
        training={"local_batch_size": 8, "global_batch_size": 32, "steps": steps},
        validation={"freq": 2, "local_batch_size": 4, "data": {**source, "split": "validation"}, "max_samples": 23},
        **sections,
    )
    return {**job, "model": model, "data": {**source, "split": "train"}}


def text_job(folder: Path) -> dict[str, Any]:
    held_out = {"kind": "synthetic", "vocab_size": 61, "num_samples": 7, "seed": 1}
    return tiny_job(folder, validation={"freq": 4, "local_batch_size": 3, "data": held_out})


def evaluate(job: dict[str, Any], state: dict[str, Tensor]) -> tuple[float, float]:
    """Return mean loss and accuracy of a plain model, evaluated on one held-out sample at a time."""
    config = JobConfig.model_validate(job)
    assert config.validation.data is not None
    model = build_model(config.model, config.training.seq_len).module.to_empty(device="cpu").eval()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        tensor.data.copy_(state[name])
    taken = images_taken(config.model)
    source = build_source(config.validation.data, ByteTokenizer(), config.training.seq_len, images_taken=taken)
    loss, correct, count = 0.0, 0, 0
    for index in range(min(len(source), config.validation.max_samples or len(source))):
        inputs, targets = source[index]
        with torch.no_grad():
            logits = model(inputs[None])[0]
        loss += cross_entropy_sum(logits, targets).item()
        for row, target in zip(
            logits.reshape(-1, logits.shape[-1]).tolist(), targets.reshape(-1).tolist(), strict=True
        ):
            correct += row.index(max(row)) == target
            count += 1
    return loss / count, correct / count


@pytest.mark.parametrize("kind", ["images", "text"])
def test_validation_on_several_ranks_equals_one_process(tmp_path: Path, images: str, kind: str) -> None:
    job = image_job(tmp_path, images) if kind == "images" else text_job(tmp_path)
    state = run_ranks(run_job, 2, job)[0]
    loss, accuracy = evaluate(job, state)
    last = read_metrics(tmp_path)[-1]
    assert last["validation/accuracy"] == accuracy and 0 < accuracy < 1
    assert last["validation/loss"] == pytest.approx(loss, rel=1e-5)
    if kind == "images":
        assert last["throughput/images_per_second"] == pytest.approx(32 / last["time/step_s"])
        assert last["throughput/images_per_second_per_device"] == last["throughput/images_per_second"] / 2
        assert not any("tokens" in tag for tag in last)


@pytest.mark.slow
def test_a_resnet_learns_in_bfloat16_with_float32_statistics(tmp_path: Path, images: str) -> None:
    steps = {"steps": 24, "local_batch_size": 8, "global_batch_size": 32}
    job = image_job(tmp_path, images, precision={"param_dtype": "bfloat16"}) | {"training": steps}
    job["validation"]["freq"] = 24
    for state in run_ranks(run_job, 2, job):
        statistics = [tensor for name, tensor in state.items() if "running" in name]
        assert statistics and {tensor.dtype for tensor in statistics} == {torch.float32}
    reports = read_metrics(tmp_path)
    assert reports[0]["train/loss"] == pytest.approx(math.log(3), abs=0.05)  # the first logits are near 0
    assert reports[-1]["train/loss"] < 0.5 and reports[-1]["validation/accuracy"] > 0.7


@pytest.mark.slow
def test_a_resumed_run_is_bitwise_the_uninterrupted_one(tmp_path: Path, images: str) -> None:
    def job(name: str) -> dict[str, Any]:
        checkpoint = {"enable": True, "interval": 2}
        return image_job(tmp_path / name, images, precision={"param_dtype": "bfloat16"}, checkpoint=checkpoint)

    whole = run_ranks(run_and_interrupt, 2, job("whole"), job("parts"), 3)  # step 3 is lost
    for a, b in zip(whole, run_ranks(run_job, 2, job("parts")), strict=True):
        assert_equal(a, b)


class Classifier(nn.Module):
    """A user's model with a patch embedding, blocks, and a head."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, 3, stride=3)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width)) for _ in range(2))
        self.head = nn.Linear(width, 3)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x.mean(1))

    def flops_per_sample(self, seq_len: int) -> int:
        return 1000


def test_a_users_model_trains_alike_on_any_number_of_ranks(tmp_path: Path, images: str) -> None:
    model = {"name": f"{__name__}:Classifier", "args": {"width": 8}}
    reports = []
    for world_size in (1, 2):
        job = image_job(tmp_path / str(world_size), images, model, steps=2)
        run_ranks(run_job, world_size, job)
        reports.append(read_metrics(tmp_path / str(world_size)))
    for tag in ("train/loss", "train/grad_norm", "validation/loss", "validation/accuracy"):
        one, two = ([report[tag] for report in of_run if tag in report] for of_run in reports)
        assert one and one == pytest.approx(two, rel=1e-5), tag


VIT = {
    "name": "vit",
    "args": {
        "dim": 16,
        "n_layers": 2,
        "n_heads": 2,
        "hidden_dim": 24,
        "patch_size": 4,
        "image_size": 8,
        "num_classes": 3,
    },
}


@pytest.fixture(scope="module")
def class_folders(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Write images of several sizes, of three classes."""
    Image = pytest.importorskip("PIL.Image")  # noqa: N806 - the name of the module
    root, generator = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    for number in range(45):
        folder = root / "abc"[number % 3]
        folder.mkdir(exist_ok=True)
        pixels = generator.integers(0, 256, (8 + number % 5, 12, 3)).astype(np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
    return str(root)


@pytest.mark.parametrize("name", ["resnet", pytest.param("vit", marks=pytest.mark.slow)])
def test_augmented_images_of_a_folder_train_alike_on_any_number_of_ranks_and_workers(
    tmp_path: Path, class_folders: str, name: str
) -> None:
    model = VIT if name == "vit" else {**RESNET, "args": {**RESNET["args"], "image_size": 8, "in_channels": 3}}
    size = {"resize": 9, "crop": 8}
    reports = []
    for world_size, num_workers in ((1, 0), (2, 1)):
        folder = tmp_path / str(world_size)
        job = image_job(folder, class_folders, model, batchnorm={"statistics": "synchronized"})
        job["data"] |= {**size, "augment": ["crop", "flip"], "padding": 1, "num_workers": num_workers}
        job["validation"]["data"] |= size
        job["training"] |= {"local_batch_size": 8 // world_size, "global_batch_size": 16, "steps": 2}
        run_ranks(run_job, world_size, job)
        reports.append(read_metrics(folder))
    for tag in ("train/loss", "train/grad_norm", "validation/loss", "validation/accuracy"):
        one, two = ([report[tag] for report in of_run if tag in report] for of_run in reports)
        assert one and one == pytest.approx(two, rel=1e-5), tag
