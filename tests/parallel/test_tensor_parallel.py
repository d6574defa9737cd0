"""Tensor parallelism trains like one process in all combinations. Plans that do not fit a model are refused."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.distributed import run_ranks
from tests.parallel.divided_model import HEADS, PLAN, Model
from tests.sampling import sampled
from tests.tensors import assert_equal, full_state, full_tensor
from tests.train.jobs import TINY_ARGS, explained, step_and_report, this_rank, tiny_job
from titan_launch.config.job import JobConfig
from titan_launch.config.sections.model import ModelConfig
from titan_launch.config.sections.parallelism import ParallelismConfig
from titan_launch.core.errors import ConfigError
from titan_launch.distributed.random_state import random_stream, seed_everything
from titan_launch.models.build import BuiltModel
from titan_launch.models.initializers import call_reset_parameters
from titan_launch.models.parallel_plans import check_divisions, explain_shapes
from titan_launch.train.build import build_run
from titan_launch.train.loop import fit
from titan_launch.train.run import Run

TWO = {"tensor_parallel_degree": 2}
OWN = "tests.parallel.divided_model:Model"
FP32 = {"param_dtype": "float32"}
BF16_WITH_RULES = {
    "param_dtype": "bfloat16",
    "rules": [{"type": "RMSNorm", **FP32}, {"match": "output", **FP32}],
}

VALIDATION = {"freq": 2, "max_samples": 5, "data": {"kind": "synthetic", "vocab_size": 64, "num_samples": 7, "seed": 9}}

Trained = dict[str, Tensor]
"""Loss and gradient norm of every step, and all parameters and buffers."""


def llama(**sections: dict[str, Any]) -> dict[str, Any]:
    """Return the model section of a Llama that 2 ranks can divide. Dtypes are fp32 unless configured."""
    args = {**TINY_ARGS, "vocab_size": 64, **sections.pop("args", {})}
    return {"model": {"args": args}, **sections}


JOBS: dict[str, dict[str, Any]] = {
    "tied, chunks": llama(args={"norm": "layernorm", "tie_embeddings": True}, loss={"chunks": 3}),
    "BatchNorm": llama(args={"norm": "batchnorm"}),
    "bf16, rules": llama(precision=BF16_WITH_RULES),
    "own": {"model": {"name": OWN}, "validation": VALIDATION},
    "own, BatchNorm": {"model": {"name": OWN, "args": {"norm": "TokenBatchNorm"}}, "validation": VALIDATION},
}
"""The trained jobs, by name."""


def train(jobs: list[dict[str, Any]], folder: Path) -> list[Trained]:
    """Train jobs for 2 steps, one after the other, on the ranks of the test."""
    return [train_one(job, folder / str(index)) for index, job in enumerate(jobs)]


def train_one(job: dict[str, Any], folder: Path) -> Trained:
    training = {"global_batch_size": 8, "local_batch_size": 2, "steps": 3, **job.get("training", {})}
    sections = {"data": {"vocab_size": 64}, "optimizer": {"eps": 1e-3}, **job, "training": training}
    job = {**tiny_job(folder, **sections), "model": job["model"]}
    with ExitStack() as stack:
        run = build_run(JobConfig.model_validate(job), this_rank(), stack)
        with explained(run):
            reports = [step_and_report(run) for _ in range(2)]
        names = ("train/loss", "train/grad_norm", "validation/loss", "validation/accuracy")
        seen = {name: torch.tensor([scalars[name] for scalars in reports if name in scalars]) for name in names}
        seen = {name: values for name, values in seen.items() if len(values)}
        return {**seen, **full_state(run.model)}


CASES: list[tuple[str, dict[str, Any]]] = [
    ("tied, chunks", TWO),
    ("tied, chunks", {**TWO, "loss_parallel": False}),
    ("bf16, rules", TWO),
    ("own", TWO),
    ("own, BatchNorm", {**TWO, "sequence_parallel": False}),
    ("BatchNorm", {**TWO, "sequence_parallel": False}),
]
"""Names of jobs, and how two ranks divide them."""


@sampled("cases", CASES, 3)
def test_tensor_parallelism_trains_like_one_process(
    cases: Sequence[tuple[str, dict[str, Any]]], tmp_path: Path
) -> None:
    names = list(dict.fromkeys(name for name, _ in cases))
    alone = dict(zip(names, run_ranks(train, 1, [JOBS[name] for name in names], tmp_path / "1")[0], strict=True))
    by_rank = run_ranks(train, 2, [{**JOBS[n], "parallelism": p} for n, p in cases], tmp_path / "2")
    for index, (name, _) in enumerate(cases):
        tolerance = 2e-2 if name.startswith("bf16") else 1e-5
        for trained in (results[index] for results in by_rank):
            assert_close(name, trained, alone[name], tolerance)


def assert_close(case: str, trained: Trained, expected: Trained, tolerance: float) -> None:
    """Compare relative to the largest element or 1e-2, because the gradient of some biases is almost 0."""
    assert trained.keys() == expected.keys()
    apart = {
        name: float((trained[name] - tensor).abs().max() / tensor.abs().max().clamp(min=1e-2))
        for name, tensor in expected.items()
    }
    assert {name: value for name, value in apart.items() if not value <= tolerance} == {}, case


def drop(folder: Path) -> list[Trained]:
    """Train a model with dropout and deterministic kernels, without and with activation checkpointing."""
    job: dict[str, Any] = {"model": {"name": OWN, "args": {"dropout": 0.3}}, "parallelism": TWO}
    results = []
    for checkpointing in ({"mode": "none"}, {"mode": "full", "modules": ["attention"]}):
        seed_everything(0, deterministic=True)
        results.append(train_one({**job, "activation_checkpoint": checkpointing}, folder / checkpointing["mode"]))
    return results


@pytest.mark.slow
def test_checkpointed_dropout_drops_the_same_elements_again(tmp_path: Path) -> None:
    (plain, checkpointed), (others, _) = run_ranks(drop, 2, tmp_path)
    assert_equal(checkpointed, plain)
    assert_equal(others, plain)


def fail_for_shapes(folder: Path) -> str:
    """Return the error of a model that expects all heads on every rank."""
    with pytest.raises(ConfigError) as caught:
        train_one({"model": {"name": OWN, "args": {"heads": HEADS}}, "parallelism": TWO}, folder)
    return str(caught.value)


def test_shapes_that_do_not_fit_the_tensor_parallel_plan_are_explained(tmp_path: Path) -> None:
    for printed in run_ranks(fail_for_shapes, 2, tmp_path):
        assert (
            printed.startswith("model.name: the model fails ")
            and "divided_model.py" in printed
            and "unflatten" in printed
        )
        assert "with 1/2 of the heads and features on each rank; check that the model's attribute" in printed


@pytest.mark.parametrize(
    ("name", "degree", "error"),
    [
        (OWN, 1, RuntimeError("the sizes do not match")),
        ("llama3", 2, RuntimeError("the sizes do not match")),
        (OWN, 2, RuntimeError("out of memory")),
        (OWN, 2, KeyError("shape")),
    ],
)
def test_other_errors_are_not_explained(name: str, degree: int, error: Exception) -> None:
    parallelism = ParallelismConfig(tensor_parallel_degree=degree)
    config = JobConfig().model_copy(update={"model": ModelConfig(name=name), "parallelism": parallelism})
    assert explain_shapes(error, config) is None


def everything(run: Run) -> dict[str, Tensor]:
    """Return parameters, buffers and optimizer state, gathered from their shards."""
    found = full_state(run.model)
    for name, parameter in run.model.named_parameters():
        for key, value in run.optimizer.state.get(parameter, {}).items():
            found[f"{name}/{key}"] = full_tensor(value)
    return found


Ends = tuple[dict[str, Tensor], dict[str, Tensor]]


def go_on(*jobs: dict[str, Any]) -> list[Ends]:
    """Return the state of runs at their start, and at their end, where they save."""
    ends = []
    for job in jobs:
        with ExitStack() as stack:
            run = build_run(JobConfig.model_validate(job), this_rank(), stack)
            before = everything(run)
            fit(run)
            ends.append((before, everything(run)))
    return ends


@pytest.mark.slow
def test_checkpoints_load_with_another_tensor_parallel_degree(tmp_path: Path) -> None:
    def job(name: str, steps: int, parallelism: dict[str, Any]) -> dict[str, Any]:
        return tiny_job(
            tmp_path,
            **llama(args={"hidden_dim": 50}),  # 25 rows of w1 on each of 2 ranks: FSDP2 makes 13 and 12 of them
            job={"name": name},
            training={"steps": steps},
            data={"vocab_size": 64},
            optimizer={"eps": 1e-3},
            lr_scheduler={"kind": "warmup_stable_decay", "decay_ratio": 0.0},
            checkpoint={"enable": True, "interval": 100},
            parallelism=parallelism,
        )

    ((begun, saved),), *_ = run_ranks(go_on, 2, job("moved", 1, {}))
    by_rank = run_ranks(go_on, 4, job("moved", 2, TWO))
    for ((loaded, _),) in by_rank:
        assert_equal(loaded, saved)
    ((_, at_end),) = by_rank[0]
    ((loaded, _), (straight, uninterrupted)), *_ = run_ranks(go_on, 2, job("moved", 3, {}), job("straight", 2, {}))
    assert_equal(straight, begun)
    assert_equal(loaded, at_end)
    assert_close("moved", at_end, uninterrupted, 1e-5)


def refusal(plan: dict[str, Any] | None, norm: str = "LayerNorm", degree: int = 2, **options: Any) -> str:
    with torch.device("meta"):
        model = Model(norm, plan)
    with pytest.raises(ConfigError) as caught:
        check(model, plan, tensor_parallel_degree=degree, **options)
    return str(caught.value)


def check(model: nn.Module, plan: dict[str, Any] | None, **parallelism: Any) -> None:
    built = BuiltModel(model, (), (), call_reset_parameters, tensor_parallel=plan)
    check_divisions(built, JobConfig.model_validate({"parallelism": parallelism}))


def test_tensor_parallel_plans_that_do_not_fit_the_model_are_refused() -> None:
    check(Model(), PLAN, tensor_parallel_degree=2)
    without = {key: {k: v for k, v in PLAN.items() if k != key} for key in PLAN}
    for plan, expected in (
        (None, "the model's attribute tensor_parallel is missing or empty"),
        ({**PLAN, "output": "heads"}, 'has no module of the style "head"'),
        ({**PLAN, "output": "row"}, "'row' is not a style; did you mean \"rowwise\"?"),
        (
            {**PLAN, "outputs": "head"},
            'tensor_parallel["outputs"] matches no module of the model; did you mean "output"?',
        ),
        ({"norm": "colwise", **PLAN}, "norm is a LayerNorm"),
        (without["attention.*_norm"], "has no style for attention.q_norm (and for 1 more), but each module with"),
        (without["embedding"], "has no style for embedding, but each module with parameters needs one"),
        (
            {**PLAN, "embedding": "input"},
            'has the style "input" for embedding, but it is for modules without parameters; use another style ("sequ',
        ),
        ({**PLAN, "embedding": "sequence"}, "share the parameter weight"),
    ):
        assert expected in refusal(plan)
    assert 'no module of the style "embedding"' in refusal({**PLAN, "embedding": "sequence"})
    assert '("colwise") has 24 output features, which is not a multiple of 5' in refusal(PLAN, degree=5)
    assert "norm is a BatchNorm" in refusal(PLAN, "TokenBatchNorm")
    check(Model("TokenBatchNorm"), PLAN, tensor_parallel_degree=2, sequence_parallel=False)


def test_tensor_parallel_ranks_draw_the_same_random_numbers() -> None:
    parallelism = ParallelismConfig(tensor_parallel_degree=2, context_parallel_degree=2)
    assert [random_stream(rank, parallelism) for rank in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
