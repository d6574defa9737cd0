"""The examples of docs/how_to/bring_a_model.md: modules of PyTorch and `transformers` train without changes, from the
values that they initialise themselves."""

from __future__ import annotations

import gc
import itertools
import json
import re
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli
import torch
import torch.nn.functional as F

from tests.distributed import run_ranks
from tests.sampling import chosen, rest_is_slow
from tests.train.jobs import read_metrics, run_job, this_rank
from titan_launch.config.job import JobConfig
from titan_launch.core.import_string import import_factory
from titan_launch.models.build import build_model
from titan_launch.models.host_values import HostValues
from titan_launch.plan.layout import plan_layout
from titan_launch.plan.report.unit_table import summary_of_job
from titan_launch.train.build import build_run
from titan_launch.train.model import plan_precision
from titan_launch.train.run_folder.records import AUDIT_FILE

SEED, VOCABULARY, TOKENS, STEPS = 3, 64, 16, 4


PAGE = Path(__file__).parents[2] / "docs" / "how_to" / "bring_a_model.md"
EXAMPLES = re.findall(r"^```python\n(.*?)^```\s+```toml\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
"""The examples of the page: the source of a factory, and its job."""

JOBS = {tomli.loads(job)["model"]["name"].partition(":")[2]: tomli.loads(job) for _, job in EXAMPLES}
"""The jobs by the name of the factory."""

TEXT, IMAGE = {"dim": 32, "layers": 2, "vocab_size": VOCABULARY}, {"classes": 3}
TINY: dict[str, dict[str, Any]] = {
    "Encoder": TEXT,
    "cnn": {**IMAGE, "side": 6},
    "Stages": {**IMAGE, "width": 8},
    "llama": TEXT,
    "gpt2": {**TEXT, "dropout": 0.0},
    "vit": {**IMAGE, "dim": 16, "layers": 2, "side": 6},
    "resnet": {**IMAGE, "width": 8},
}
"""Arguments of the factories that make tiny models."""

BLOCKS = {
    "Encoder": "2 of layers.* (TransformerEncoderLayer), the entries of nn.ModuleList",
    "cnn": "none; the model is one FSDP2 unit, except modules with precision rules; name blocks in model.blocks",
    "Stages": "4 of layer1.*, layer2.* (BasicBlock), the repeated modules in nn.Sequential",
    "llama": "2 of model.layers.* (LlamaDecoderLayer), the entries of nn.ModuleList",
    "gpt2": "2 of transformer.h.* (GPT2Block), the entries of nn.ModuleList",
    "vit": "2 of vit.layers.* (ViTLayer), the entries of nn.ModuleList",
    "resnet": "2 of resnet.encoder.stages.* (ResNetStage), the entries of nn.ModuleList",
}
"""The line `blocks` in the header of a run."""


@pytest.fixture(scope="module", autouse=True)
def my_models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Write the factories of the page into one module, as a reader does, and make it importable."""
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("models")
    (folder / "my_models.py").write_text("\n\n".join(source for source, _ in EXAMPLES))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield folder


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Write three classes of images, each a pattern with noise."""
    generator = np.random.default_rng(0)
    labels, patterns = generator.integers(0, 3, 90), generator.normal(size=(3, 6, 6))
    path = tmp_path_factory.mktemp("images") / "patterns.npz"
    np.savez(path, images=patterns[labels] + 0.3 * generator.normal(size=(90, 6, 6)), labels=labels)
    return str(path)


def example_job(folder: Path, name: str, dtype: str, images: str) -> dict[str, Any]:
    """Return the job of an example with tiny data and sizes: one microbatch of eight samples on each of two ranks."""
    job = JOBS[name]
    text: dict[str, Any] = {"kind": "synthetic", "vocab_size": VOCABULARY, "num_samples": 40}
    picture: dict[str, Any] = {"kind": "images", "path": images, "validation_percent": 30, "mean": 0.0, "std": 1.0}
    is_picture = job.get("data", {}).get("kind") == "images"
    data = {**picture, "split": "train"} if is_picture else text
    held_out = {**picture, "split": "validation"} if is_picture else {**text, "num_samples": 8, "seed": 1}
    return {
        "job": {"name": "tiny", "dump_folder": str(folder), "device": "cpu"},
        "model": {**job["model"], "args": TINY[name]},
        "data": data,
        "training": {"seq_len": TOKENS, "global_batch_size": 8, "steps": STEPS, "seed": SEED, "max_norm": 1.0},
        "precision": {**job.get("precision", {}), "param_dtype": dtype},
        "batchnorm": job.get("batchnorm", {}),
        # The gradient of a bias before BatchNorm is only rounding error, which AdamW's division would amplify.
        "optimizer": {"lr": 1e-2, "eps": 1e-4},
        "metrics": {"log_freq": 1, "enable_tensorboard": False},
        "validation": {"freq": STEPS, "local_batch_size": 4, "data": held_out},
    }


def train_all(folder: Path, models: Path, images: str, names: set[str]) -> dict[str, float]:
    """Train examples on the ranks of the test: in float32, and on two ranks then in bfloat16. Return the first
    losses in plain PyTorch if there is one rank."""
    sys.path.insert(0, str(models))
    import_factory("my_models:Encoder")
    gc.freeze()  # a garbage collection would visit all objects of `transformers`
    ranks = this_rank().world_size
    plain = plain_first_losses(folder / "plain", images, names) if ranks == 1 else {}
    for dtype, name in itertools.product(("float32", "bfloat16")[:ranks], sorted(names)):
        job = example_job(folder / str(ranks) / dtype / name, name, dtype, images)
        job["training"]["local_batch_size"] = 8 // ranks
        run_job(job)
    return plain


def first_loss_in_plain_pytorch(job: dict[str, Any]) -> float:
    """Return the loss of the factory's module under the job's seed, on the job's first batch."""
    with ExitStack() as stack:
        run = build_run(JobConfig.model_validate(job), this_rank(), stack)
        inputs, targets, _ = next(run.batches.train)
        gc.collect()
        assert not any(isinstance(thing, HostValues) for thing in gc.get_objects())  # their memory is freed
    torch.manual_seed(SEED)
    outputs = import_factory(job["model"]["name"])(**job["model"]["args"])(inputs)
    logits = getattr(outputs, "logits", outputs)
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten()).item()


def plain_first_losses(folder: Path, images: str, names: set[str]) -> dict[str, float]:
    losses = {}
    for name in names:
        job = example_job(folder / name, name, "float32", images)
        job["training"]["local_batch_size"] = 8
        losses[name] = first_loss_in_plain_pytorch(job)
    return losses


@pytest.fixture(scope="module")
def trained(
    tmp_path_factory: pytest.TempPathFactory, my_models: Path, images: str, request: pytest.FixtureRequest
) -> tuple[Path, dict[str, float]]:
    """Return the folder of the runs by ranks, dtype and example, and the first losses in plain PyTorch."""
    folder, names = tmp_path_factory.mktemp("runs"), chosen(request, "name")
    plain, _ = (run_ranks(train_all, ranks, folder, my_models, images, names, timeout=200)[0] for ranks in (1, 2))
    return folder, plain


@pytest.mark.parametrize("name", rest_is_slow(list(JOBS), len(JOBS)))
def test_stock_models_train_alike_on_one_rank_two_ranks_and_in_plain_pytorch(
    name: str, trained: tuple[Path, dict[str, float]]
) -> None:
    folder, plain = trained
    one, two = (read_metrics(folder / ranks / "float32" / name) for ranks in ("1", "2"))
    assert one[0]["train/loss"] == pytest.approx(plain[name], rel=1e-6)
    assert len(one) == STEPS
    for tag in ("train/loss", "train/grad_norm", "validation/loss"):
        of_one, of_two = ([report[tag] for report in reports if tag in report] for reports in (one, two))
        assert of_one and of_one == pytest.approx(of_two, rel=1e-5), tag


@pytest.mark.parametrize("name", rest_is_slow(list(JOBS), len(JOBS)))
def test_stock_models_in_bf16_with_fp32_norms_have_the_planned_dtypes(
    name: str, trained: tuple[Path, dict[str, float]]
) -> None:
    folder = trained[0] / "2" / "bfloat16"
    audit = json.loads((folder / name / "tiny" / AUDIT_FILE).read_text())
    assert audit["differences"] == []
    norms = [module for module in audit["modules"] if "Norm" in module["class"]]
    assert norms and all(norm["dtypes"]["parameters"]["observed"] == ["float32"] for norm in norms)
    losses = [report["train/loss"] for report in read_metrics(folder / name)]
    assert losses[-1] < losses[0], losses


@pytest.mark.parametrize("example", JOBS)
def test_the_header_names_the_blocks(example: str, tmp_path: Path, images: str) -> None:
    config = JobConfig.model_validate(example_job(tmp_path, example, "bfloat16", images))
    plan = plan_precision(config, build_model(config.model, TOKENS))
    lines = dict(summary_of_job(config, plan, plan_layout(config.parallelism, config.training, 1)))
    assert lines["blocks"] == BLOCKS[example]
