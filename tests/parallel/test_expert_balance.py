"""Mixtures of experts: a step's losses, gradients, loads and selection biases do not depend on the division of work."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.distributed import run_ranks
from tests.train.jobs import this_rank, tiny_job
from titan_launch.config.architectures.experts import ExpertArgs
from titan_launch.config.job import JobConfig
from titan_launch.models.mixture_of_experts import ContextGroup, balance_losses, choose, z_losses
from titan_launch.train.build import build_run
from titan_launch.train.loop import due_now, report, train_one_step

STEPS = 3
EXPERTS: dict[str, Any] = {
    "num_experts": 8,
    "top_k": 2,
    "hidden_dim": 24,
    "shared_hidden_dim": 16,
    "first_dense_layers": 1,
    "score": "sigmoid",
    "selection_bias_rate": 0.05,
    "balance_loss": 0.5,
    "z_loss": 0.1,
}


def moe_job(folder: Path, **sections: dict[str, Any]) -> dict[str, Any]:
    """Return a job that trains 8 experts in the second and third layer, with everything that balances them."""
    args = {"n_layers": 3, "experts": EXPERTS, **sections.pop("args", {})}
    # If a gradient is almost 0, the sign of its rounding error decides the sign of Adam's update.
    return tiny_job(folder, model={"args": args}, **{"optimizer": {"lr": 1e-2, "eps": 1e-5}, **sections})


def train(jobs: list[dict[str, Any]]) -> list[list[dict[str, float]]]:
    """Train the jobs, and return the metrics of all steps."""
    return [_train(job) for job in jobs]


def _train(job: dict[str, Any]) -> list[dict[str, float]]:
    with ExitStack() as stack:
        run = build_run(JobConfig.model_validate(job), this_rank(), stack)
        return [report(run, train_one_step(run), due_now(run)) for _ in range(STEPS)]


def divided_jobs(folder: Path, ranks: int) -> list[dict[str, Any]]:
    modes = ["immediate", "deferred"]
    return [
        moe_job(
            folder / f"{ranks}_{local}_{mode}_{checkpointing}",
            training={"global_batch_size": 4, "local_batch_size": local},
            gradient_accumulation={"mode": mode},
            activation_checkpoint={"mode": checkpointing},
        )
        for local, mode, checkpointing in [
            (4 // ranks, "immediate", "none"),
            (1, "immediate", "full"),
            *((1, mode, "selective") for mode in modes),
        ]
    ]


def test_ranks_microbatches_modes_and_checkpointing_do_not_change_a_step(tmp_path: Path) -> None:
    (alone,), both = (run_ranks(train, ranks, divided_jobs(tmp_path, ranks))[:1] for ranks in (1, 2))
    expected = alone[0]
    for measured in (*alone[1:], *both[0]):
        for step, reference in zip(measured, expected, strict=True):
            for tag in ("train/loss", "train/grad_norm"):
                assert step[tag] == pytest.approx(reference[tag], rel=1e-5), tag


def part_of_sequence(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    group = ContextGroup(dist.group.WORLD.group_name, dist.get_world_size())
    own = logits.chunk(group.size, dim=1)[dist.get_rank()].clone().requires_grad_()
    choice = choose(own, ExpertArgs(num_experts=8, top_k=2, hidden_dim=4, score="sigmoid"))
    balance, z = balance_losses(choice, group), z_losses(own, group)
    (gradient,) = torch.autograd.grad((balance + z).sum(), own)
    return balance.detach(), z.detach(), gradient


def test_losses_of_divided_sequences_add_up(tmp_path: Path) -> None:
    torch.manual_seed(0)
    logits = torch.randn(3, 12, 8)
    ((balance, z, gradient),) = run_ranks(part_of_sequence, 1, logits)
    parts = run_ranks(part_of_sequence, 2, logits)
    torch.testing.assert_close(sum(part[0] for part in parts), balance)
    torch.testing.assert_close(sum(part[1] for part in parts), z)
    torch.testing.assert_close(torch.cat([part[2] for part in parts], dim=1), gradient)
