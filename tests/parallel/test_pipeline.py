"""Pipeline stages, alone and under FSDP2, compared with one process."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.distributed import run_ranks
from tests.sampling import sampled
from tests.tensors import assert_equal, full_state
from tests.train.jobs import TINY_ARGS, run_job, run_job_until, step_and_report, this_rank, tiny_job
from titan_launch.config.job import JobConfig
from titan_launch.config.rules import parallelism as rules
from titan_launch.core.errors import ConfigError, RunError
from titan_launch.core.patches import replaced
from titan_launch.core.torch_release import CAN_SHARE_UNITS
from titan_launch.distributed.torch_private import parameter_groups
from titan_launch.models.blocks import cut
from titan_launch.models.build import build_model
from titan_launch.parallel.pipeline import Boundaries, parts
from titan_launch.plan.communication import collectives_of_step
from titan_launch.train.build import build_run
from titan_launch.train.loop import fit, train_one_step
from titan_launch.train.model import plan_precision
from titan_launch.train.run import Run

STEPS = 2
Trained = tuple[list[dict[str, float]], dict[str, Tensor]]
"""The scalars of every step, and the full parameters and buffers of a rank at the end."""


def job(
    folder: Path, norm: str = "rmsnorm", mode: str = "immediate", unsharded: bool = False, **parallelism: Any
) -> Any:
    """Return a job with five layers, unequal validation batches and an audit of dtypes and units.

    With BatchNorm it computes in bfloat16. A step has eight samples: four microbatches on each rank of these tests.
    """
    local = 2 if norm == "batchnorm" else 1
    held_out = {"kind": "synthetic", "vocab_size": 61, "num_samples": 8}
    return tiny_job(
        folder,
        model={"args": {**TINY_ARGS, "n_layers": 5, "norm": norm}},
        training={"global_batch_size": 8, "local_batch_size": local, "steps": 3},  # `train` omits the last one
        precision={"param_dtype": "bfloat16" if norm == "batchnorm" else "float32"},
        parallelism=parallelism,
        gradient_accumulation={"mode": mode, "keep_params_unsharded": unsharded},
        optimizer={"eps": 1e-5},
        validation={"freq": STEPS, "local_batch_size": 3, "max_samples": 8, "data": held_out},
        checkpoint={"enable": False},
        comm={"count_traffic": True},
        debug={"audit_precision": True},
    )


def train(jobs: list[Any]) -> list[Trained]:
    """Train jobs on this rank, one after the other."""
    results = []
    for each in jobs:
        with ExitStack() as stack:
            run = build_run(JobConfig.model_validate(each), this_rank(), stack)
            scalars = [step_and_report(run) for _ in range(STEPS)]
            results.append((scalars, full_state(run.model)))
            _check_traffic(run, scalars[-1])
    return results


def _check_traffic(run: Run, scalars: dict[str, float]) -> None:
    """Check that a rank's stages communicate as their unit tables say, for any order of forwards and backwards."""
    own = [part for _, part in parts(run.model, run.job.plan)]
    planned = sum(collectives_of_step(p.units, run.job.layout, run.config.gradient_accumulation).total for p in own)
    assert scalars["comm/collectives"] == planned


def compare(jobs: dict[str, Any], ranks: int, alone: Any) -> None:
    """Assert that the jobs equal one process: losses and norms to 1e-5, and every parameter and buffer on its rank."""
    ((expected, expected_state),) = run_ranks(train, 1, [alone])[0]
    by_rank = run_ranks(train, ranks, list(jobs.values()), timeout=60 + 10 * len(jobs))
    for index, name in enumerate(jobs):
        state: dict[str, Tensor] = {}
        for results in by_rank:
            scalars, own = results[index]
            state |= own
            for step, reference in zip(scalars, expected, strict=True):
                for tag in {
                    "train/loss",
                    "train/grad_norm",
                    "validation/loss",
                    "validation/accuracy",
                } & reference.keys():
                    assert step[tag] == pytest.approx(reference[tag], rel=1e-5), (name, tag)
        assert state.keys() == expected_state.keys(), name
        apart = [
            key for key, value in expected_state.items() if not torch.allclose(state[key], value, rtol=1e-5, atol=1e-6)
        ]
        assert not apart, name


SCHEDULES = {
    "1F1B": ("immediate", False),
    "GPipe": ("deferred", False),
    "LoopedBFS": ("deferred", False),
    "Interleaved1F1B": ("immediate", True),
    "InterleavedZeroBubble": ("deferred", True),
    "ZBVZeroBubble": ("deferred", True),
}


@sampled("schedules", list(SCHEDULES)[::-1], 3)
def test_every_pipeline_schedule_trains_like_one_process(schedules: tuple[str, ...], tmp_path: Path) -> None:
    """The statistics of BatchNorm show whether anything runs twice. Sums of bfloat16 gradients show whether they are
    widened."""
    jobs = {
        schedule: job(
            tmp_path / schedule,
            "batchnorm",
            *SCHEDULES[schedule],
            pipeline_parallel_degree=2,
            pipeline_parallel_schedule=schedule,
        )
        for schedule in schedules
    }
    compare(jobs, 2, job(tmp_path / "alone", "batchnorm"))


REPLICAS = {"data_parallel_replicate_degree": 2}
SHARDED = {**REPLICAS, "shard_optimizer_over_replicas": True}
# name: schedule, accumulation mode, unsharded parameters, parallelism
DIVISIONS: dict[str, tuple[str, str, bool, dict[str, Any]]] = {
    "ZBV, sharded optimizer": ("ZBVZeroBubble", "deferred", True, SHARDED),
    "1F1B": ("1F1B", "immediate", False, {}),
    "sharded optimizer": ("Interleaved1F1B", "immediate", False, SHARDED),
    "replicas": ("Interleaved1F1B", "deferred_all_reduce", False, REPLICAS),
    "ZBV": ("ZBVZeroBubble", "deferred", True, {}),
}


@sampled("names", list(DIVISIONS), 3)
def test_fsdp_within_pipeline_stages_trains_like_one_process(names: tuple[str, ...], tmp_path: Path) -> None:
    jobs = {}
    for name in names:
        schedule, mode, unsharded, parallelism = DIVISIONS[name]
        stages = {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": schedule}
        jobs[name] = job(tmp_path / name, "rmsnorm", mode, unsharded, **stages, **parallelism)
    compare(jobs, 4, job(tmp_path / "alone"))


def fail_in_both_stages(folder: Path) -> None:
    """Fail in the first forward of the second stage and in the second forward of the first one, so that no rank
    waits."""
    with ExitStack() as stack:
        config = JobConfig.model_validate(job(folder, pipeline_parallel_degree=2))
        run = build_run(config, this_rank(), stack)
        block = run.model.get_submodule("layers.2" if this_rank().rank == 0 else "layers.4")
        forwards = iter([None, "the model's own"] if this_rank().rank == 0 else ["the model's own"])

        def fail(*_: Any) -> None:
            text = next(forwards)
            if text:
                raise ValueError(text)

        hook = block.register_forward_hook(fail)
        with pytest.raises(ValueError, match="the model's own"):
            train_one_step(run)
        hook.remove()
        assert all(parameter.grad is None for parameter in run.model.parameters())
        assert all(group.is_sharded for group in parameter_groups(run.model))
        with pytest.raises(RunError, match="messages may be pending"):
            train_one_step(run)


def test_an_exception_of_a_stage_is_raised_unchanged(tmp_path: Path) -> None:
    run_ranks(fail_in_both_stages, 2, tmp_path)


def resume_elsewhere(folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Train with one layout of ranks, and resume twice with another one."""
    divisions: dict[str, dict[str, Any]] = {
        "stages": {"pipeline_parallel_degree": 2},
        "turns": {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "Interleaved1F1B"},
        "shards": {},
    }

    def saving(name: str, division: str) -> Any:
        sections = job(folder / name, **divisions[division])
        sections.pop("validation")
        return {**sections, "checkpoint": {"enable": True, "interval": 1, "load": "latest", "async_mode": "disabled"}}

    never = run_job(saving("never", "shards"))
    run_job_until(saving("moved", "stages"), 1)
    run_job_until(saving("moved", "shards"), 2)
    with ExitStack() as stack:
        run = build_run(JobConfig.model_validate(saving("moved", "turns")), this_rank(), stack)
        assert run.first_step == 3
        fit(run)
        return never, full_state(run.model)


def test_a_checkpoint_is_resumed_with_another_layout_of_ranks(tmp_path: Path) -> None:
    (never, first), (_, second) = run_ranks(resume_elsewhere, 2, tmp_path)
    state = first | second
    assert state.keys() == never.keys()
    for name, value in never.items():
        torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-6)


class Pooled(nn.Module):
    """A model whose forward is a sequence of modules, or nearly one."""

    pipeline_order = ("layers.*",)

    def __init__(self, kind: str = "pooled") -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers if self.kind != "backwards" else reversed(self.layers):
            x = layer(x) * 2 if self.kind == "doubled" else layer(x)
        return x.mean(1) if self.kind == "pooled" else x


def boundaries(model: str, token_shards: int = 1, args: dict[str, Any] | None = None, **sections: Any) -> Boundaries:
    config = JobConfig.model_validate(
        {
            "model": {"name": model, "args": args or {}},
            "gradient_accumulation": {"keep_params_unsharded": False},
            "parallelism": {"pipeline_parallel_degree": 2},
            **sections,
        }
    )
    built = build_model(config.model, 16)
    return Boundaries(built.module, plan_precision(config, built), token_shards)


def test_sent_activations_have_the_compute_dtypes_of_the_units() -> None:
    fp32 = {"precision": {"rules": [{"match": "layers.2", "param_dtype": "float32", "output_dtype": "float32"}]}}
    tokens = torch.zeros(3, 16, dtype=torch.int64)
    for sections, dtype in ({}, torch.bfloat16), (fp32, torch.float32):
        _, between, logits = boundaries("llama3", **sections).of(tokens)
        assert (tuple(between.shape), between.dtype) == ((3, 16, 256), dtype)
        assert logits.shape[:2] == (3, 16)


def test_receive_buffers_are_contiguous_for_divided_tokens() -> None:
    _, between, _ = boundaries("llama3", token_shards=2).of(torch.zeros(3, 16, dtype=torch.int64))
    assert tuple(between.shape) == (3, 8, 256)
    assert between.is_contiguous()  # a receive buffer must be contiguous


def test_a_model_whose_forward_is_not_a_sequence_is_refused() -> None:
    assert len(boundaries("tests.parallel.test_pipeline:pipeline_order").of(torch.zeros(2, 3, 4))) == 3
    for kind, message in {
        "pooled": "the model must return the output of layers.1, unchanged",
        "doubled": "the input of layers.1 must be the output of layers.0, unchanged",
        "backwards": "the model runs layers.1, but pipeline_order has layers.0 next",
    }.items():
        with pytest.raises(ConfigError, match=f"is not the order of its forward: {message}"):
            boundaries("tests.parallel.test_pipeline:Pooled", args={"kind": kind}).of(torch.zeros(2, 3, 4))
    with pytest.raises(ConfigError, match="stage 0 fails there: RuntimeError"):
        boundaries("tests.parallel.test_pipeline:pipeline_order").of(torch.zeros(2, 3, 5))


def pipeline_order() -> Pooled:
    return Pooled("chain")


def test_pipeline_stages_share_the_tensors_of_the_model() -> None:
    """The cut model has all modules of the rank, under their names. Each stage runs its own part of them."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    expected = [model[0].weight, model[2].weight]
    x = torch.randn(2, 4)
    alone = model(x)
    middle = model[1]
    first, last = cut(model, [("0",), ("2",)], ["1"])
    assert isinstance(first, nn.Sequential)
    assert isinstance(last, nn.Sequential)
    assert [name for name, _ in model.named_parameters()] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert [first[0].weight, last[2].weight] == expected
    assert_equal({"": last(middle(first(x)))}, {"": alone})


def test_the_backward_of_experts_is_split_from_torch_2_13_on() -> None:
    parallelism = {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "ZBVZeroBubble"}
    config = JobConfig.model_validate({"model": {"name": "qwen3_moe"}, "parallelism": parallelism})
    assert (not list(rules.split_backward_supports_experts(config))) == CAN_SHARE_UNITS
    with replaced(rules, "SPLITS_BACKWARD_OF_EXPERTS", False):
        (problem,) = rules.split_backward_supports_experts(config)
    assert problem.key == ("parallelism", "pipeline_parallel_schedule") and "needs torch 2.13" in problem.reason
