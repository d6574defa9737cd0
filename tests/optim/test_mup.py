"""Maximal update parametrization: the table of Tensor Programs V in initial values, optimizer groups, plan and run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.distributed import run_command, run_ranks
from tests.loss.test_losses import samples_of
from tests.tensors import full_state
from tests.train.jobs import TINY_ARGS, read_metrics, run_job, tiny_job
from tests.train.test_step import relative_error
from titan_launch.config.job import JobConfig
from titan_launch.models.decoder.families import FAMILIES
from titan_launch.models.init import allocate, initialize
from titan_launch.plan.mup import width_scales
from titan_launch.train.model import build_job_model

RATIO, BASE = 4, 16
WIDE = {**TINY_ARGS, "dim": RATIO * BASE, "hidden_dim": 96, "n_heads": 8, "n_kv_heads": 4}


def wide_job(folder: Path, **sections: Any) -> dict[str, Any]:
    """Return a job of a model that is four times as wide as its base."""
    training = {"seq_len": 16, "local_batch_size": 4, "global_batch_size": 4, "steps": 2, "seed": 7, "max_norm": 0.0}
    optimizer = {"lr": 0.02, "weight_decay": 0.1, **sections.pop("optimizer", {})}
    schedule, mup = {"kind": "constant"}, {"base_width": BASE}
    job = tiny_job(folder, training=training, optimizer=optimizer, lr_scheduler=schedule, mup=mup, **sections)
    job["model"]["args"] = WIDE
    return job


def model_of(job: dict[str, Any]) -> nn.Module:
    """Return the model of a job with its initial values."""
    built, device = build_job_model(JobConfig.model_validate(job)), torch.device("cpu")
    allocate(built.module, device)
    initialize(built.module, built.initializer, 7, device)
    return built.module


@pytest.mark.parametrize("family", FAMILIES)
def test_every_matrix_of_a_decoder_has_a_rule(family: str) -> None:
    config = JobConfig.model_validate({"model": {"name": family, "flavor": "debug"}, "mup": {"base_width": 64}})
    scales = width_scales(config)
    assert scales.ratio == 4
    for name, parameter in build_job_model(config).module.named_parameters():
        is_bias = name.rpartition(".")[2] in ("bias", "b1", "b2", "b3")
        is_matrix = parameter.ndim > 1 and not is_bias and "_a." not in name and "_b." not in name  # latent attention
        assert (scales.of(name).kind != "vector") == is_matrix, name


def test_initial_values_follow_from_the_base_width(tmp_path: Path) -> None:
    state = full_state(model_of(wide_job(tmp_path)))
    expected = {
        "tok_embeddings.weight": 1.0,
        "layers.0.attention.wq.weight": 0.02 / RATIO**0.5,
        "layers.1.feed_forward.w1.weight": 0.02 / RATIO**0.5,
        "layers.0.attention.wo.weight": 0.02 / 2**0.5 / RATIO**0.5,
        "output.weight": BASE**-0.5 / RATIO,
    }
    for name, std in expected.items():
        truncated = 1.0 if name == "tok_embeddings.weight" else 0.987  # the standard deviation of values within 3 sigma
        assert state[name].std().item() == pytest.approx(truncated * std, rel=0.06), name
    for name in ("norm.weight", "layers.0.ffn_norm.weight"):
        assert torch.equal(state[name], torch.ones(RATIO * BASE))


def test_a_run_trains_as_a_plain_loop_with_the_table(tmp_path: Path) -> None:
    """AdamW of PyTorch with a group for each kind, on one rank and on two, with FSDP2."""
    job = wide_job(tmp_path, optimizer={"param_groups": [GROUP]})
    model = model_of(job)
    groups: dict[tuple[float, float], list[Tensor]] = {}
    for name, parameter in model.named_parameters():
        groups.setdefault(by_hand(name, parameter), []).append(parameter)
    optimizer = torch.optim.AdamW(
        ({"params": parameters, "lr": lr, "weight_decay": decay} for (lr, decay), parameters in groups.items()),
        betas=(0.9, 0.95),
    )
    losses = []
    for samples in samples_of(job):
        inputs, targets = map(torch.stack, zip(*samples, strict=True))
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    expected = full_state(model)
    for ranks in (1, 2):
        job["training"]["local_batch_size"] = 4 // ranks
        job["job"]["name"] = f"ranks{ranks}"
        assert relative_error(run_ranks(run_job, ranks, job)[0], expected) < 1e-5
        rows = read_metrics(tmp_path, f"ranks{ranks}")
        assert [row["train/loss"] for row in rows] == pytest.approx(losses, rel=1e-5)


GROUP = {"match": "layers.1.attention.**", "lr_factor": 0.5, "weight_decay": 0.02}


def by_hand(name: str, parameter: Tensor) -> tuple[float, float]:
    """Return learning rate and weight decay of a parameter: table 3 of arXiv:2203.03466."""
    lr, decay = 0.02, 0.1
    if name.startswith("layers.1.attention."):
        lr, decay = 0.5 * lr, 0.02
    if parameter.ndim == 1 or name == "tok_embeddings.weight":
        return lr, 0.02 if decay == 0.02 else 0.0
    return lr / RATIO, decay * RATIO


def test_the_plan_shows_the_scales_of_each_parameter() -> None:
    command = ["plan", "--config=llama_debug", "--world-size=2", "--mup.base_width=64", "--rows=own", "--verbose"]
    status, printed, _ = run_command(command, Path())
    lines = {line.split()[0]: line.split()[1:] for line in printed.splitlines() if line.strip()}
    assert status == 0 and "muP: 4 x the base width, 64" in printed
    assert lines["layers.*.feed_forward.w2.weight"] == ["6", "hidden", "x", "0.5", "x", "0.25", "x", "4"]
    assert lines["output.weight"] == ["1", "output", "x", "0.25", "x", "0.25", "x", "4"]
    assert lines["tok_embeddings.weight"] == ["1", "input", "x", "1", "x", "1", "x", "1"]
    assert lines["norm.weight"] == ["1", "vector", "x", "1", "x", "1", "x", "1"]
