"""Every gradient accumulation mode, on every mesh, equals one big batch in a plain PyTorch loop."""

from __future__ import annotations

from functools import cache
from itertools import starmap

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.distributed import run_ranks
from tests.sampling import rest_is_slow
from tests.tensors import full_state
from tests.train.jobs import TINY_ARGS, planned_and_sharded, this_mesh, this_rank
from titan_launch.config.job import JobConfig
from titan_launch.config.sections.run import DebugConfig
from titan_launch.data.sources import Batch
from titan_launch.loss.build import build_loss
from titan_launch.models.build import build_model
from titan_launch.models.init import initialize
from titan_launch.optim.registry import build_optimizer
from titan_launch.parallel.fsdp import Accumulation
from titan_launch.plan.layout import plan_layout
from titan_launch.train.health.step_guard import StepGuard
from titan_launch.train.step import MicrobatchesInTurn, TrainStep, Update

STEPS, SEQ_LEN, GLOBAL_BATCH = 2, 8, 8
MAX_NORM = 0.5


@cache
def batches() -> tuple[Tensor, Tensor]:
    """Return inputs and targets of [STEPS, GLOBAL_BATCH, SEQ_LEN]. Every sample has another number of ignored targets.
    All targets in the first microbatch of rank 0 are ignored, for any number of ranks and microbatches."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, 61, (STEPS, GLOBAL_BATCH, SEQ_LEN + 1), generator=generator)
    targets = tokens[..., 1:].clone()
    for row in targets.flatten(0, 1):
        row[: int(torch.randint(0, SEQ_LEN, (), generator=generator))] = -100
    targets[:, :2] = -100
    return tokens[..., :-1], targets


def job(
    mode: str,
    unsharded: bool,
    replicate: int,
    local_batch: int,
    param_dtype: str = "float32",
    checkpointing: str = "none",
) -> JobConfig:
    return JobConfig.model_validate(
        {
            "model": {"args": TINY_ARGS},
            "loss": {"chunks": 3},
            "training": {"seq_len": SEQ_LEN, "local_batch_size": local_batch, "global_batch_size": GLOBAL_BATCH},
            "precision": {"param_dtype": param_dtype, "rules": [{"type": "RMSNorm", "param_dtype": "float32"}]},
            "gradient_accumulation": {"mode": mode, "keep_params_unsharded": unsharded},
            "activation_checkpoint": {"mode": checkpointing},
            "parallelism": {"data_parallel_replicate_degree": replicate},
            "optimizer": {"lr": 1e-2, "eps": 1e-5},
        }
    )


Step = tuple[int, tuple[Tensor, Tensor]]
"""The number of microbatches of a step, and its full batch."""


def train_sharded(config: JobConfig, steps: list[Step] | None = None) -> tuple[dict[str, Tensor], list[float]]:
    """Train as the launcher does on this rank. Return full parameters after all steps, and the gradient norms."""
    ranks = this_rank()
    layout = plan_layout(config.parallelism, config.training, ranks.world_size)
    model, plan, _ = planned_and_sharded(config, SEQ_LEN)
    optimizer = build_optimizer(model, config.optimizer)
    for group in optimizer.param_groups:
        group["lr"] = config.optimizer.lr
    guard = StepGuard(DebugConfig(), ranks.device)
    strategy = Accumulation(config.gradient_accumulation)
    loss = build_loss(model, plan, config, 61)
    gradients, update = MicrobatchesInTurn(model, strategy, ranks.device), Update(optimizer, guard, MAX_NORM)
    step = TrainStep(model, gradients, loss, update, this_mesh(), ranks.device)
    norms = []
    for count, batch in steps or [(layout.num_microbatches, batch) for batch in zip(*batches(), strict=True)]:
        # Microbatch-major, as the loader deals them: round m goes to ranks 0, 1, ...
        rounds = [tensor.unflatten(0, (count, ranks.world_size, -1))[:, ranks.rank] for tensor in batch]
        norms.append(step(list(starmap(Batch, zip(*rounds, strict=True)))).grad_norm.item())
    return full_state(model), norms


def train_plainly(steps: list[tuple[Tensor, Tensor]] | None = None) -> tuple[dict[str, Tensor], list[float]]:
    """Train in plain PyTorch: one process, one batch per step, no FSDP. Return full parameters and gradient norms."""
    config = job("immediate", False, 1, GLOBAL_BATCH)
    built = build_model(config.model, SEQ_LEN)
    model = built.module
    model.to_empty(device="cpu")
    initialize(model, built.initializer, 0, torch.device("cpu"))
    decayed = [p for name, p in model.named_parameters() if p.ndim == 2 and "tok_embeddings" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "tok_embeddings" in name]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-5)
    norms = []
    for inputs, targets in steps or zip(*batches(), strict=True):
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), ignore_index=-100)
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optimizer.step()
        optimizer.zero_grad()
    return full_state(model), norms


def relative_error(ours: dict[str, Tensor], reference: dict[str, Tensor]) -> float:
    assert ours.keys() == reference.keys()
    errors = [(ours[k] - v).double().norm() / v.double().norm().clamp(min=1e-12) for k, v in reference.items()]
    return max(float(error) for error in errors)


@pytest.fixture(scope="module")
def reference() -> tuple[dict[str, Tensor], list[float]]:
    return train_plainly()


MESHES = [(1, 1), (2, 1), *rest_is_slow([(2, 2), (4, 2), (4, 1)], 3)]
"""(ranks, replicas): one rank, FSDP, replication alone, HSDP 2 x 2, FSDP."""


@pytest.mark.parametrize(("world_size", "replicate"), MESHES)
def test_every_accumulation_mode_equals_one_big_batch(
    world_size: int, replicate: int, reference: tuple[dict[str, Tensor], list[float]]
) -> None:
    for (mode, unsharded), states in run_ranks(train_in_all_modes, world_size, replicate)[0].items():
        parameters, norms = states
        assert relative_error(parameters, reference[0]) < 2e-6, (mode, unsharded)
        assert norms == pytest.approx(reference[1], rel=1e-5), (mode, unsharded)


def train_in_all_modes(replicate: int) -> dict[tuple[str, bool], tuple[dict[str, Tensor], list[float]]]:
    local_batch = 2 if this_rank().world_size == 1 else 1
    return {
        (mode, unsharded): train_sharded(job(mode, unsharded, replicate, local_batch))
        for mode, unsharded in all_modes(replicate)
    }


def all_modes(replicate: int) -> list[tuple[str, bool]]:
    modes = ["immediate", "deferred"] + (["deferred_all_reduce"] if replicate > 1 else [])
    is_sharded = this_rank().world_size > replicate
    return [(mode, unsharded) for mode in modes for unsharded in (False, True)[: 1 + is_sharded]]


UNEVEN = (3, 1, 2)
"""Numbers of microbatches of consecutive steps."""


@pytest.mark.parametrize(("world_size", "replicate"), rest_is_slow([(2, 1), (2, 2), (4, 2)], 3))
def test_steps_with_different_numbers_of_microbatches_equal_plain_training(world_size: int, replicate: int) -> None:
    """The mesh of shards uses full activation checkpointing, those with replicas selective."""
    expected, norms = train_plainly(uneven_batches(world_size))
    for case, (parameters, own_norms) in run_ranks(train_unevenly, world_size, replicate)[0].items():
        assert relative_error(parameters, expected) < 2e-6, case
        assert own_norms == pytest.approx(norms, rel=1e-5), case


def uneven_batches(world_size: int) -> list[tuple[Tensor, Tensor]]:
    """Return the full batches of all steps, with one sample for each rank and microbatch."""
    inputs, targets = (tensor.flatten(0, 1) for tensor in batches())
    sizes = [count * world_size for count in UNEVEN]
    chosen = [torch.arange(size) * 5 % len(inputs) for size in sizes]
    return [(inputs[index], targets[index]) for index in chosen]


def train_unevenly(replicate: int) -> dict[tuple[str, bool], tuple[dict[str, Tensor], list[float]]]:
    steps = list(zip(UNEVEN, uneven_batches(this_rank().world_size), strict=True))
    checkpointing = "full" if replicate == 1 else "selective"
    return {
        (mode, unsharded): train_sharded(job(mode, unsharded, replicate, 1, checkpointing=checkpointing), steps)
        for mode, unsharded in all_modes(replicate)
    }


def test_accumulation_modes_agree_in_bf16() -> None:
    results = run_ranks(train_in_all_modes_bf16, 2)[0]
    reference = results.pop(("immediate", False))
    for key, (parameters, norms) in results.items():
        assert relative_error(parameters, reference[0]) < 1e-4, key
        assert norms == pytest.approx(reference[1], rel=1e-4), key


def train_in_all_modes_bf16() -> dict[tuple[str, bool], tuple[dict[str, Tensor], list[float]]]:
    return {
        (mode, unsharded): train_sharded(job(mode, unsharded, 1, 1, "bfloat16"))
        for mode, unsharded in (("immediate", False), ("immediate", True), ("deferred", True))
    }
