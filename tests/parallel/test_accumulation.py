"""Collectives of each gradient accumulation mode, counted on a real wrapped model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.distributed import join_fake_group, run_ranks
from tests.sampling import rest_is_slow
from tests.tensors import cross_entropy_sum
from tests.trace.traces import planned
from tests.train.jobs import TINY_ARGS, sharded_model
from titan_launch.config.job import JobConfig
from titan_launch.core.torch_release import CAN_SHARE_UNITS, MIXES_DTYPES_IN_UNIT
from titan_launch.distributed.mesh import build_mesh
from titan_launch.models.build import build_model
from titan_launch.parallel.fsdp import Accumulation
from titan_launch.plan.communication import (
    Collectives,
    Traffic,
    collectives_of_microbatch,
    collectives_of_step,
)
from titan_launch.plan.layout import plan_layout
from titan_launch.train.model import plan_precision, shard_model

LAYERS, MICROBATCHES = TINY_ARGS["n_layers"], 4
UNITS = LAYERS + 2  # blocks, [norm, output], embedding; nothing is left for the root


class CollectiveCounter(TorchDispatchMode):
    """A dispatch mode that counts c10d operators and the bytes of their larger buffer. (CommDebugMode cannot follow a
    module with several parents, such as `rope`.)"""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            buffers = [leaf.nbytes for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            self.calls.append((func.__name__, max(buffers, default=0)))
        return func(*args, **(kwargs or {}))

    @property
    def counted(self) -> Traffic:
        """Return the counted collectives, by kind."""
        kinds = ("allgather", "reduce_scatter", "allreduce")
        sizes = [[size for name, size in self.calls if kind in name] for kind in kinds]
        return Traffic(Collectives(*map(len, sizes)), *map(sum, sizes))


def make_job(mode: str = "immediate", **sections: dict[str, Any]) -> JobConfig:
    job: dict[str, dict[str, Any]] = {
        "model": {"args": TINY_ARGS},
        "training": {"seq_len": 16, "local_batch_size": 1},
        "gradient_accumulation": {"mode": mode},
    }
    for name, values in sections.items():
        job[name] = {**job.get(name, {}), **values}
    return JobConfig.model_validate(job)


NORMS_IN_FP32 = {"rules": [{"type": "RMSNorm", "param_dtype": "float32"}]}


def count(config: JobConfig, microbatches: int) -> Traffic:
    """Return the collectives of one step on this rank."""
    model = sharded_model(config, 16)
    strategy = Accumulation(config.gradient_accumulation)
    tokens = torch.randint(0, 61, (1, 16))
    with CollectiveCounter() as counter:
        for index in range(microbatches):
            strategy.begin_microbatch(model, is_last=index == microbatches - 1)
            cross_entropy_sum(model(tokens), tokens).backward()
    return counter.counted


def compared(config: JobConfig, ranks: int, microbatches: int = 4) -> Traffic:
    """Return the planned collectives of one step, which are those that are counted on all ranks."""
    layout = replace(plan_layout(config.parallelism, config.training, ranks), num_microbatches=microbatches)
    _, expected = planned(config, layout, "cpu")
    plan = plan_precision(config, build_model(config.model, 16))
    assert expected.collectives == collectives_of_step(plan.units, layout, config.gradient_accumulation)
    assert run_ranks(count, ranks, config, microbatches) == [expected] * ranks
    return expected


N = MICROBATCHES
# Blocks are gathered for forward and for backward; the last block, the head and the embedding once a microbatch.
GATHERS = N * (2 * (LAYERS - 1) + 3)


@pytest.mark.parametrize(
    ("mode", "unsharded", "expected"),
    rest_is_slow(
        [
            ("immediate", True, Collectives(UNITS, N * UNITS, N * UNITS)),
            ("immediate", False, Collectives(GATHERS, N * UNITS, N * UNITS)),
            ("deferred", True, Collectives(UNITS, UNITS, UNITS)),
            ("deferred_all_reduce", False, Collectives(GATHERS, N * UNITS, UNITS)),
            ("deferred", False, Collectives(GATHERS, UNITS, UNITS)),
        ],
        3,
    ),
)
def test_counted_collectives_of_a_step_on_hsdp_are_the_planned_ones(
    mode: str, unsharded: bool, expected: Collectives
) -> None:
    job = make_job(
        mode,
        gradient_accumulation={"keep_params_unsharded": unsharded},
        parallelism={"data_parallel_replicate_degree": 2},
    )
    assert compared(job, 4).collectives == expected


def test_communicated_bytes_are_those_of_padded_parameters_in_the_dtypes_of_units() -> None:
    """61 rows of 32 on 2 ranks are padded to 62. bf16 is gathered and fp32 reduced."""
    expected = compared(make_job("deferred"), 2, 1)
    per_layer = 32 * (32 + 16 + 16 + 32) + 3 * 32 * 48 + 2 * 32
    embedding, head = 62 * 32, 62 * 32 + 32
    assert expected.all_gather_bytes == 2 * (embedding + (2 * LAYERS - 1) * per_layer + head)
    assert expected.reduce_scatter_bytes == 4 * (embedding + LAYERS * per_layer + head)


LAYOUTS = [
    ("deferred", 1, 1, {}),
    ("deferred", 2, 1, {}),
    ("deferred", 2, 2, {}),
    ("immediate", 2, 2, {}),
    ("deferred_all_reduce", 4, 2, {"precision": {"reduce_dtype": "float32", "param_dtype": "float32"}}),
    ("immediate", 3, 1, {"precision": {"reduce_dtype": "bfloat16", **NORMS_IN_FP32}}),
    ("immediate", 2, 1, {"model": {"args": {**TINY_ARGS, "tie_embeddings": True}}}),
    ("deferred", 2, 1, {"precision": {}, "model": {"args": {**TINY_ARGS, "norm": "batchnorm"}}}),
    ("deferred", 2, 1, {"parallelism": {"fsdp_reshard_after_forward": "always"}}),
    ("immediate", 2, 1, {"parallelism": {"fsdp_reshard_after_forward": "never"}}),
    ("immediate", 2, 1, {"precision": {"rules": [{"type": "RMSNorm", "reshard_after_forward": True}]}}),
]


@pytest.mark.parametrize(("mode", "ranks", "replicate", "sections"), rest_is_slow(LAYOUTS, 4))
def test_counted_collectives_and_their_bytes_are_the_planned_ones(
    mode: str, ranks: int, replicate: int, sections: dict[str, dict[str, Any]]
) -> None:
    parallelism = {**sections.get("parallelism", {}), "data_parallel_replicate_degree": replicate}
    job = make_job(mode, **{"precision": NORMS_IN_FP32, **sections, "parallelism": parallelism})
    compared(job, ranks, 3)


def count_among_7_ranks(config: JobConfig) -> Traffic:
    """Count the traffic of 7 fake ranks."""
    join_fake_group(7)
    return count(config, 2)


def test_frozen_parameters_are_gathered_and_not_reduced() -> None:
    data = {"kind": "synthetic", "vocab_size": 61}
    config = make_job(model={"name": f"{__name__}:HalfFrozen", "args": {}}, data=data)
    layout = replace(plan_layout(config.parallelism, config.training, 7), num_microbatches=2)
    _, expected = planned(config, layout, "cpu")
    assert run_ranks(count_among_7_ranks, 1, config) == [expected]
    assert expected.reduce_scatter_bytes < 2 * expected.all_gather_bytes  # fp32 of the trained part, bf16 of all


def test_an_fp32_rule_for_all_norms_costs_two_collectives_a_microbatch_or_none() -> None:
    gathers, scatters = (N, N) if CAN_SHARE_UNITS else (N * (4 * LAYERS - 1), N * (2 * LAYERS + 1))
    plain = compared(make_job(), 2)
    ruled = compared(make_job(precision={**NORMS_IN_FP32, "placement": "own_unit"}), 2)
    assert ruled.collectives == plain.collectives + Collectives(gathers, scatters)
    if MIXES_DTYPES_IN_UNIT:
        inside = compared(make_job(precision={**NORMS_IN_FP32, "placement": "in_place"}), 2)
        assert inside.collectives == plain.collectives
        assert inside.reduce_scatter_bytes == ruled.reduce_scatter_bytes > 0


class DeepBlock(nn.Module):
    """A minimal block with two norms."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.mix = nn.RMSNorm(8), nn.Linear(8, 8)
        self.norm2, self.widen = nn.RMSNorm(8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(self.norm1(x))
        return x + self.widen(self.norm2(x))


class Deep(nn.Module):
    """A model with 32 blocks and 65 norms, whose head the launcher does not know."""

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


class HalfFrozen(nn.Module):
    """A model with blocks that have a frozen matrix and a trained norm, and one block that is completely frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(61, 8)
        self.layers = nn.ModuleList(DeepBlock() for _ in range(3))
        self.output = nn.Linear(8, 61)
        for block in self.layers:
            block.mix.requires_grad_(False)
        self.layers[0].requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.output(x)


def count_among_64_ranks(name: str, precision: dict[str, Any]) -> tuple[Collectives, Collectives]:
    """Return the collectives of a microbatch on rank 0 of 64, counted and planned.

    The fake backend communicates nothing.
    """
    join_fake_group(64)
    config = JobConfig.model_validate({"model": {"name": name}, "training": {"seq_len": 16}, "precision": precision})
    built = build_model(config.model, 16)
    layout = plan_layout(config.parallelism, config.training, 64)
    plan = plan_precision(config, built)
    model = shard_model(config, built, plan, build_mesh(layout, "cpu")).to_empty(device="cpu")
    with CollectiveCounter() as counter:
        model(torch.zeros(1, 4, dtype=torch.int64)).sum().backward()
    return counter.counted.collectives, collectives_of_microbatch(plan.units, layout)


@pytest.mark.skipif(not CAN_SHARE_UNITS, reason="before torch 2.13 every norm has a unit of its own")
def test_an_fp32_rule_for_65_norms_takes_99_collectives_instead_of_97_or_none_more() -> None:
    norms = {"rules": [{"type": "RMSNorm", "param_dtype": "float32"}]}
    cases = [({}, Collectives(64, 33)), ({**norms, "placement": "own_unit"}, Collectives(65, 34))]
    if MIXES_DTYPES_IN_UNIT:
        cases.append((norms, Collectives(64, 33)))
    for precision, expected in cases:
        counted, planned = run_ranks(count_among_64_ranks, 1, f"{__name__}:Deep", precision)[0]
        assert counted == planned == expected
