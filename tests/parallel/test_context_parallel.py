"""Context parallelism trains and validates like one process. Models that do not support it are refused."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor.experimental._context_parallel._load_balancer import _HeadTailLoadBalancer

from tests.distributed import run_ranks
from tests.parallel.divided_model import MAX_TOKENS, Model
from tests.parallel.test_tensor_parallel import OWN, VALIDATION, assert_close, llama, train_one
from tests.train.jobs import this_rank, tiny_job
from titan_launch.config.job import JobConfig
from titan_launch.core.errors import ConfigError
from titan_launch.distributed.ring_attention_on_cpu import ring_attention_on_cpu
from titan_launch.models.build import BuiltModel
from titan_launch.models.initializers import call_reset_parameters
from titan_launch.models.parallel_plans import check_divisions
from titan_launch.parallel.context_parallel import SequencePart
from titan_launch.train.build import build_run

TWO = {"context_parallel_degree": 2}
IN_ORDER = {**TWO, "context_parallel_load_balance": False, "context_parallel_rotate_method": "alltoall"}

JOBS: dict[str, dict[str, Any]] = {
    "BatchNorm": llama(args={"norm": "batchnorm"}, batchnorm={"statistics": "synchronized"}, validation=VALIDATION),
    "own": {"model": {"name": OWN}, "validation": VALIDATION},
}

TABLES = ("rope.table", "positions")


def train(jobs: list[dict[str, Any]], folder: Path) -> list[dict[str, Tensor]]:
    """Train jobs for 2 steps, one after the other, on the ranks of the test."""
    with ring_attention_on_cpu():
        results = [train_one(job, folder / str(index)) for index, job in enumerate(jobs)]
    # Each rank has a part of the position tables. The other comparisons verify it.
    return [{name: t for name, t in result.items() if name not in TABLES} for result in results]


def test_context_parallelism_trains_like_one_process(tmp_path: Path) -> None:
    cases = [("BatchNorm", TWO), ("own", TWO), ("own", IN_ORDER)]
    alone = dict(zip(JOBS, run_ranks(train, 1, list(JOBS.values()), tmp_path / "1")[0], strict=True))
    by_rank = run_ranks(train, 2, [{**JOBS[name], "parallelism": p} for name, p in cases], tmp_path / "2")
    for index, (name, _) in enumerate(cases):
        for trained in (results[index] for results in by_rank):
            assert_close(name, trained, alone[name], 1e-5)


@pytest.mark.parametrize("ranks", [2, 4])
def test_sequence_parts_are_those_of_pytorchs_load_balancer(ranks: int) -> None:
    tokens = torch.arange(24)
    balanced = [SequencePart(rank, ranks, True).of(tokens) for rank in range(ranks)]
    order = _HeadTailLoadBalancer(24, ranks, "cpu")._generate_indices()[0]
    assert torch.equal(torch.cat(balanced), order)
    in_order = [SequencePart(rank, ranks, False).of(tokens.view(1, 24), axis=1) for rank in range(ranks)]
    assert torch.equal(torch.cat(in_order, 1)[0], tokens)


def check(model: nn.Module, axes: dict[str, int] | None, **batchnorm: Any) -> None:
    training = {"seq_len": MAX_TOKENS, "steps": 1}
    config = JobConfig.model_validate({"parallelism": TWO, "training": training, "batchnorm": batchnorm})
    check_divisions(BuiltModel(model, (), (), call_reset_parameters, context_parallel=axes), config)


def refusal(model: nn.Module, axes: dict[str, int] | None) -> str:
    with pytest.raises(ConfigError) as caught:
        check(model, axes)
    return str(caught.value)


def test_models_that_cannot_be_divided_are_refused() -> None:
    model = Model()
    check(model, {"positions": 0})
    assert "has no attribute context_parallel" in refusal(model, None)
    assert 'context_parallel["position"] matches no buffer of the model; did you mean "positions"?' in refusal(
        model, {"position": 0}
    )
    assert "too small for 32 tokens along axis 1" in refusal(model, {"positions": 1})
    model.register_buffer("positions", torch.zeros(MAX_TOKENS, 1))
    assert "register it with persistent=False" in refusal(model, {"positions": 0})
    normed = Model("TokenBatchNorm")
    assert "the BatchNorm norm would cover only a part of every sequence" in refusal(normed, {"positions": 0})
    check(normed, {"positions": 0}, statistics="synchronized")


def build_on_cpu(folder: Path) -> str:
    job = tiny_job(folder, **llama(parallelism=TWO))
    with ExitStack() as stack, pytest.raises(ConfigError) as caught:
        build_run(JobConfig.model_validate(job), this_rank(), stack)
    return str(caught.value)


def test_context_parallelism_on_a_cpu_is_refused(tmp_path: Path) -> None:
    for printed in run_ranks(build_on_cpu, 2, tmp_path):
        assert "PyTorch's ring attention has no kernels for the CPU" in printed
