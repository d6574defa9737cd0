"""What each accumulation mode communicates, counted on a real wrapped model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.distributed import join_fake_group, run_ranks
from tests.train.jobs import TINY_ARGS, sharded_model
from titan_launch.accumulation.strategies import build_strategy
from titan_launch.config.job import JobConfig
from titan_launch.loss import cross_entropy_sum
from titan_launch.models.build import build_model
from titan_launch.parallel.fsdp import CAN_SHARE_UNITS
from titan_launch.plan.collectives import Collectives, collectives_of_microbatch, collectives_of_step
from titan_launch.plan.layout import plan_layout
from titan_launch.train.build import shard_model
from titan_launch.train.plan import plan_precision

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

    @property
    def counted(self) -> Collectives:
        """What came by, by kind."""
        return Collectives(
            *(sum(part in name for name in self.names) for part in ("allgather", "reduce_scatter", "allreduce"))
        )


def count(mode: str, keep: bool, replicate: int, rules: bool = False) -> tuple[Collectives, Collectives]:
    """The collectives of one step, counted on the model and planned."""
    config = JobConfig.model_validate(
        {
            "model": {"args": TINY_ARGS},
            "training": {"seq_len": 16, "local_batch_size": 1},
            "precision": {"rules": [{"type": "RMSNorm", "param_dtype": "float32"}] if rules else []},
            "parallelism": {"data_parallel_replicate_degree": replicate},
            "gradient_accumulation": {"mode": mode, "keep_params_unsharded": keep},
        }
    )
    layout = replace(
        plan_layout(config.parallelism, config.training, dist.get_world_size()), num_microbatches=MICROBATCHES
    )
    planned = collectives_of_step(
        plan_precision(config, build_model(config.model, 16)).units, layout, config.gradient_accumulation
    )
    model = sharded_model(config, 16)
    strategy = build_strategy(config.gradient_accumulation)
    tokens = torch.randint(0, 61, (1, 16))
    with CollectiveCounter() as counter:
        for index in range(MICROBATCHES):
            strategy.begin_microbatch(model, is_last=index == MICROBATCHES - 1)
            cross_entropy_sum(model(tokens), tokens).backward()
    return counter.counted, planned


N = MICROBATCHES
# Blocks are gathered for forward and for backward, the head and the root once a microbatch.
GATHERS = N * (2 * LAYERS + 2)


@pytest.mark.parametrize(
    ("mode", "keep", "expected"),
    [
        ("immediate", False, Collectives(GATHERS, N * UNITS, N * UNITS)),
        ("deferred", False, Collectives(GATHERS, UNITS, UNITS)),
        ("deferred_all_reduce", False, Collectives(GATHERS, N * UNITS, UNITS)),
        ("immediate", True, Collectives(UNITS, N * UNITS, N * UNITS)),
        ("deferred", True, Collectives(UNITS, UNITS, UNITS)),
    ],
)
def test_collectives_of_a_step_on_hsdp(mode: str, keep: bool, expected: Collectives) -> None:
    assert run_ranks(count, 4, mode, keep, 2) == [(expected, expected)] * 4


@pytest.mark.parametrize(("ranks", "replicate"), [(1, 1), (2, 1), (2, 2)])
def test_collectives_with_rules_are_as_planned_for_other_layouts(ranks: int, replicate: int) -> None:
    for counted, planned in run_ranks(count, ranks, "deferred", False, replicate, True):
        assert counted == planned


def test_an_fp32_rule_for_all_norms_costs_two_collectives_a_microbatch() -> None:
    gathers, scatters = (N, N) if CAN_SHARE_UNITS else (N * (4 * LAYERS + 1), N * (2 * LAYERS + 1))
    plain, _ = run_ranks(count, 2, "immediate", False, 1)[0]
    ruled, planned = run_ranks(count, 2, "immediate", False, 1, True)[0]
    assert ruled == planned == plain + Collectives(gathers, scatters)


class DeepBlock(nn.Module):
    """A block with two norms, as small as it can be."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.mix = nn.RMSNorm(8), nn.Linear(8, 8)
        self.norm2, self.widen = nn.RMSNorm(8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(self.norm1(x))
        return x + self.widen(self.norm2(x))


class Deep(nn.Module):
    """32 blocks and 65 norms; the launcher knows nothing about its head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(61, 8)
        self.layers = nn.ModuleList(DeepBlock() for _ in range(32))
        self.norm, self.output = nn.RMSNorm(8), nn.Linear(8, 61)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))


def count_among_64_ranks(name: str, rules: list[dict[str, str]]) -> tuple[Collectives, Collectives]:
    """The collectives of a microbatch as rank 0 of 64 makes them, counted and planned.

    The fake backend communicates nothing.
    """
    join_fake_group(64)
    config = JobConfig.model_validate(
        {"model": {"name": name}, "training": {"seq_len": 16}, "precision": {"rules": rules}}
    )
    built = build_model(config.model, 16)
    layout = plan_layout(config.parallelism, config.training, 64)
    plan = plan_precision(config, built)
    model = shard_model(config, built, plan, layout, torch.device("cpu")).to_empty(device="cpu")
    with CollectiveCounter() as counter:
        model(torch.zeros(1, 4, dtype=torch.int64)).sum().backward()
    return counter.counted, collectives_of_microbatch(plan.units, layout)


@pytest.mark.skipif(not CAN_SHARE_UNITS, reason="before torch 2.13 every norm has a unit of its own")
def test_fp32_for_65_norms_in_32_blocks_takes_100_collectives_where_no_rule_takes_98() -> None:
    rule = {"type": "RMSNorm", "param_dtype": "float32"}
    for rules, expected in (([], Collectives(65, 33)), ([rule], Collectives(66, 34))):
        counted, planned = run_ranks(count_among_64_ranks, 1, f"{__name__}:Deep", rules)[0]
        assert counted == planned == expected
        assert counted.total == 98 + 2 * len(rules)
