"""Live bytes of real tensors, by category."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import UntypedStorage
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from tests.distributed import run_ranks
from tests.train.jobs import sharded_model, tiny_job
from titan_launch.config.job import JobConfig
from titan_launch.data.sources import Batch
from titan_launch.loss.cross_entropy import CrossEntropy
from titan_launch.metrics.memory import track
from titan_launch.optim.registry import build_optimizer
from titan_launch.plan.memory.ledger import Category, Ledger, StepPoint
from titan_launch.train.step import forward_backward

HERE = StepPoint(0, "forward", "")


def a_ledger() -> Ledger:
    ledger = Ledger()
    ledger.enter(HERE)
    return ledger


def test_a_storage_is_counted_once_until_its_last_reference_is_dropped() -> None:
    ledger = a_ledger()
    with track(torch.nn.Linear(2, 2, bias=False), ledger):
        assert ledger.total == 16
        a = torch.zeros(100)
        view = a[10:20]
        assert ledger.live[Category.ACTIVATIONS] == 400
        del a
        assert ledger.live[Category.ACTIVATIONS] == 400
        del view
        assert ledger.live[Category.ACTIVATIONS] == 0
        b = torch.zeros(10)
        b.untyped_storage().resize_(0)
        assert ledger.live[Category.ACTIVATIONS] == 0
        b.untyped_storage().resize_(80)
        assert ledger.live[Category.ACTIVATIONS] == 80
    del b
    assert ledger.footprint().peak_bytes == 416


def test_tensors_are_assigned_to_categories() -> None:
    ledger = a_ledger()
    tokens = torch.zeros(8, dtype=torch.int64)
    with track(torch.nn.Linear(2, 2, bias=False), ledger) as memory:
        memory.hold([tokens, None], Category.INPUTS)
        x = torch.zeros(4, 2, requires_grad=True)
        loss = (x * x).sum()
        loss.backward()
        assert ledger.live[Category.INPUTS] == 64
        assert ledger.live[Category.BACKWARD] == x.nbytes


def train(mode: str) -> list[dict[str, int]]:
    """Return the categories of this rank after forward and backward, after the update, and at the peaks, for two
    steps."""
    job = tiny_job(Path("unused"), gradient_accumulation={"mode": mode}, precision={"param_dtype": "bfloat16"})
    config = JobConfig.model_validate(job)
    model = sharded_model(config, config.training.seq_len)
    optimizer = build_optimizer(model, config.optimizer)
    tokens, valid = torch.zeros(1, 16, dtype=torch.int64), torch.ones((), dtype=torch.int64)
    seen = []
    for _ in range(2):
        ledger = a_ledger()
        with track(model, ledger, optimizer):
            forward_backward(model, Batch(tokens, tokens), torch.device("cpu"), lambda: valid, CrossEntropy())
            seen.append(named(ledger))
            optimizer.step()
            seen.append(named(ledger))
            optimizer.zero_grad()
    return seen


def named(ledger: Ledger) -> dict[str, int]:
    return {category.name: held for category, held in zip(Category, ledger.live, strict=True) if held > 600}


def test_after_a_step_only_lasting_tensors_are_alive() -> None:
    first, _, second, last = run_ranks(train, 2, "immediate")[0]
    held = first["PARAMETERS"]
    assert first == {"PARAMETERS": held, "GRADIENTS": held}
    assert second == last == {"PARAMETERS": held, "GRADIENTS": held, "OPTIMIZER": pytest.approx(2 * held, rel=0.01)}


def test_patched_functions_are_restored() -> None:
    before = (UntypedStorage.resize_, FSDPParamGroup.unshard, _fsdp_param_group.foreach_reduce)
    with pytest.raises(ZeroDivisionError), track(torch.nn.Linear(2, 2), a_ledger()):
        assert UntypedStorage.resize_ is not before[0]
        raise ZeroDivisionError
    assert (UntypedStorage.resize_, FSDPParamGroup.unshard, _fsdp_param_group.foreach_reduce) == before
