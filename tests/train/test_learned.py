"""`metrics.modules` in runs."""

from __future__ import annotations

import math
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.distributed import run_ranks
from tests.sampling import sampled
from tests.tensors import full_state
from tests.train.jobs import read_metrics, run_job, this_rank, tiny_job
from titan_launch.config.job import JobConfig
from titan_launch.core.errors import ConfigError
from titan_launch.train.build import build_run
from titan_launch.train.loop import fit

MODULES = ("layers.*", "layers.*.attention", "tok_embeddings", "norm", "output")
WHOLE = ("layers.0", "layers.1", "tok_embeddings", "norm", "output")
"""Modules that together have every parameter once."""

PRECISION = {
    "param_dtype": "float32",
    "rules": tuple(
        {"match": match, "param_dtype": "float32"} for match in ("layers.*.*_norm", ("layers.*.attention", "output"))
    ),
}
DIVISIONS: tuple[dict[str, Any], ...] = (
    {"parallelism": {"tensor_parallel_degree": 2}, "activation_checkpoint": {"mode": "full"}},
    {},
    {"parallelism": {"pipeline_parallel_degree": 2}},
    {"gradient_accumulation": {"mode": "deferred"}, "training": {"enable_cpu_offload": True}},
    {"parallelism": {"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 1}},  # FSDP2 ignores `norm`
)


def measured_job(folder: Path, name: str, **sections: Any) -> dict[str, Any]:
    return tiny_job(
        folder,
        job={"name": name},
        model={"args": {"vocab_size": 62}},
        metrics={"modules": MODULES, "log_freq": 2},
        optimizer={"param_groups": [{"match": "output.*", "lr_factor": 0.5}]},  # only on the last pipeline rank
        precision=PRECISION,
        checkpoint={"enable": False},
        **{**sections, "training": {"steps": 2, "frozen": ["norm.*"], **sections.get("training", {})}},
    )


def train_divided(folder: Path, divisions: tuple[dict[str, Any], ...]) -> None:
    for index, sections in enumerate(divisions):
        run_job(measured_job(folder, f"division{index}", **sections))


def train_alone(folder: Path) -> list[dict[str, Tensor]]:
    """Train on one rank. Return the parameters before and after the first step."""
    with ExitStack() as stack:
        run = build_run(JobConfig.model_validate(measured_job(folder, "alone")), this_rank(), stack)
        states = [full_state(run.model)]
        run.optimizer.register_step_post_hook(lambda *_: states.append(full_state(run.model)))
        fit(run)
        return states[:2]


@sampled("divisions", DIVISIONS, 4)
def test_norms_of_modules_are_those_of_the_whole_tensors_in_every_division(
    divisions: tuple[dict[str, Any], ...], tmp_path: Path
) -> None:
    before, after = run_ranks(train_alone, 1, tmp_path)[0]
    alone = read_metrics(tmp_path, "alone")
    assert [report["step"] for report in alone] == [1, 2]
    for path in (*WHOLE, "layers.1.attention"):
        names = [name for name in before if name.startswith(f"{path}.")]
        norms = {
            "param_norm": torch.cat([before[name].flatten() for name in names]).norm().item(),
            "update_norm": torch.cat([(after[name] - before[name]).flatten() for name in names]).norm().item(),
        }
        norms["update_ratio"] = norms["update_norm"] / norms["param_norm"]
        for kind, norm in norms.items():
            assert alone[0][f"learned/{kind}/{path}"] == pytest.approx(norm, rel=1e-4)
    for report in alone:
        whole = math.hypot(*(report[f"learned/grad_norm/{path}"] for path in WHOLE))
        assert whole == pytest.approx(report["train/grad_norm"], rel=1e-5)
        assert report["activations/rms/norm"] == pytest.approx(1, rel=0.05)  # of an RMSNorm with weights near 1
        assert report["activations/rms/precision.rules.0"] == pytest.approx(1, rel=0.05)
        assert report["activations/underflow/output"] == report["activations/overflow/output"] == 0
    run_ranks(train_divided, 2, tmp_path, divisions, timeout=200)
    tags = [tag for tag in alone[0] if tag.startswith(("learned/", "activations/", "train/lr"))]
    assert "train/lr/param_groups.0, weight decay 0.1" in tags
    for index in range(len(divisions)):
        for report, expected in zip(read_metrics(tmp_path, f"division{index}"), alone, strict=True):
            assert [report[tag] for tag in tags] == pytest.approx([expected[tag] for tag in tags], rel=1e-3)


def overflowing(folder: Path) -> None:
    job = measured_job(folder, "tiny", debug={"on_nonfinite": "skip"}, training={"steps": 1})
    with ExitStack() as stack:
        run = build_run(JobConfig.model_validate(job), this_rank(), stack)
        with torch.no_grad():
            run.model.get_parameter("tok_embeddings.weight").fill_(1e-39)
            run.model.get_parameter("norm.weight").fill_(math.inf)
        fit(run)


def test_outputs_beyond_the_range_of_bf16_are_counted_and_a_skipped_step_updates_nothing(tmp_path: Path) -> None:
    run_ranks(overflowing, 2, tmp_path)
    (report,) = read_metrics(tmp_path)
    assert report["activations/underflow/tok_embeddings"] == 1
    assert report["activations/overflow/norm"] == 1
    assert report["learned/update_norm/output"] == 0


def unmatched(folder: Path) -> None:
    job = tiny_job(folder, metrics={"modules": ["layer.*"]})
    with ExitStack() as stack, pytest.raises(ConfigError, match="matches no module"):
        build_run(JobConfig.model_validate(job), this_rank(), stack)


def test_a_glob_without_modules_is_an_error(tmp_path: Path) -> None:
    run_ranks(unmatched, 1, tmp_path)
