"""What each accumulation mode communicates, counted on a real wrapped model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.distributed import run_ranks
from tests.train.jobs import TINY_ARGS, sharded_model
from titan_launch.accumulation.strategies import build_strategy
from titan_launch.config.job import JobConfig
from titan_launch.loss import cross_entropy_sum
from titan_launch.parallel.fsdp import CAN_SHARE_UNITS

LAYERS, MICROBATCHES = TINY_ARGS["n_layers"], 4
UNITS = LAYERS + 2  # blocks, [norm, output], root


class CollectiveCounter(TorchDispatchMode):
    """Counts c10d operators by name. (CommDebugMode cannot follow a module that has several parents, like `rope`.)"""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


def count(mode: str, keep: bool, replicate: int, rules: bool = False) -> tuple[int, int, int]:
    """All-gathers, reduce-scatters and all-reduces of one step."""
    config = JobConfig.model_validate(
        {
            "model": {"args": TINY_ARGS},
            "training": {"seq_len": 16, "local_batch_size": 1},
            "precision": {"rules": [{"type": "RMSNorm", "param_dtype": "float32"}] if rules else []},
            "parallelism": {"data_parallel_replicate_degree": replicate},
            "gradient_accumulation": {"mode": mode, "keep_params_unsharded": keep},
        }
    )
    model = sharded_model(config, 16)
    strategy = build_strategy(config.gradient_accumulation)
    tokens = torch.randint(0, 61, (1, 16))
    with CollectiveCounter() as counter:
        for index in range(MICROBATCHES):
            strategy.begin_microbatch(model, is_last=index == MICROBATCHES - 1)
            cross_entropy_sum(model(tokens), tokens).backward()
    gathers, scatters, reduces = (
        sum(part in name for name in counter.names) for part in ("allgather", "reduce_scatter", "allreduce")
    )
    return gathers, scatters, reduces


N = MICROBATCHES
# Blocks are gathered for forward and for backward, the head and the root once a microbatch.
GATHERS = N * (2 * LAYERS + 2)


@pytest.mark.parametrize(
    ("mode", "keep", "expected"),
    [
        ("immediate", False, (GATHERS, N * UNITS, N * UNITS)),
        ("deferred", False, (GATHERS, UNITS, UNITS)),
        ("deferred_all_reduce", False, (GATHERS, N * UNITS, UNITS)),
        ("immediate", True, (UNITS, N * UNITS, N * UNITS)),
        ("deferred", True, (UNITS, UNITS, UNITS)),
    ],
)
def test_collectives_of_a_step_on_hsdp(mode: str, keep: bool, expected: tuple[int, int, int]) -> None:
    assert run_ranks(count, 4, mode, keep, 2) == [expected] * 4


def test_an_fp32_rule_for_all_norms_costs_three_collectives_a_microbatch() -> None:
    units = 1 if CAN_SHARE_UNITS else 2 * LAYERS + 1
    plain = run_ranks(count, 2, "immediate", False, 1)[0]
    ruled = run_ranks(count, 2, "immediate", False, 1, True)[0]
    assert tuple(b - a for a, b in zip(plain, ruled, strict=True)) == (2 * N * units, N * units, 0)
