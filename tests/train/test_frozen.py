"""Frozen parameters: they keep their values, the others train as without freezing, in every division of the work."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.distributed import run_ranks
from tests.sampling import sampled
from tests.tensors import assert_equal, full_state, full_tensor
from tests.trace.traces import model_inventory
from tests.train.jobs import read_metrics, run_job, run_job_until, this_rank, tiny_job
from titan_launch.config.job import JobConfig
from titan_launch.core.errors import ConfigError
from titan_launch.core.torch_release import CAN_SHARE_UNITS, MIXES_DTYPES_IN_UNIT
from titan_launch.plan.job import plan_job
from titan_launch.train.build import build_run
from titan_launch.train.loop import fit, train_one_step

SGD = {"name": "SGD", "lr": 0.1}
STATE = {"optimizer": SGD, "model": {"args": {"n_layers": 3, "vocab_size": 62}}}
NORMS_AND_HEAD = {"trainable": ("layers.*.*_norm.*", "output.*")}
LATE_BLOCKS = {"frozen": ("tok_embeddings.*", "layers.0.**")}
QUERIES = {"trainable": ("layers.*.attention.w[qv].*",)}
LATER = {"match": "layers.1.**", "after_step": 1}
DIVISIONS: tuple[dict[str, Any], ...] = (
    {},
    {"gradient_accumulation": {"mode": "deferred"}, "activation_checkpoint": {"mode": "full"}},
    {"parallelism": {"tensor_parallel_degree": 2}, "activation_checkpoint": {"mode": "selective"}},
    {"parallelism": {"pipeline_parallel_degree": 2}},
)
JOBS: tuple[dict[str, Any], ...] = (NORMS_AND_HEAD, LATE_BLOCKS, QUERIES, {**LATE_BLOCKS, "unfreeze": (LATER,)})
CASES = [(index, division) for division in range(4) for index in range(4)][:-1]
"""Indices of a job and of its division. Pipelines do not support `unfreeze`."""


def frozen_job(folder: Path, name: str, training: dict[str, Any], **sections: Any) -> dict[str, Any]:
    return tiny_job(folder, **{**STATE, **sections}, training={"steps": 2, **training}, job={"name": name})


def train(job: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Train a job. Return the state before and after."""
    with ExitStack() as stack:
        run = build_run(JobConfig.model_validate(job), this_rank(), stack)
        before = full_state(run.model)
        fit(run)
        return before, full_state(run.model)


def train_everywhere(folder: Path, ranks: int, cases: Sequence[tuple[int, int]]) -> list[set[str]]:
    """Train each case: a job of `JOBS` in a division of `DIVISIONS`. Return the names of the tensors that changed."""
    changed = []
    for index, division in cases:
        name = f"{ranks}ranks-{index}-{division}"
        before, after = train(frozen_job(folder, name, JOBS[index], **DIVISIONS[division]))
        changed.append({name for name in after if not torch.equal(after[name], before[name])})
    return changed


def first_gradients(job: dict[str, Any]) -> dict[str, Tensor]:
    """Return the gradients of the first step."""
    with ExitStack() as stack:
        run = build_run(JobConfig.model_validate(job), this_rank(), stack)
        found: dict[str, Tensor] = {}

        def keep(*_: Any) -> None:
            found.update({n: full_tensor(p.grad) for n, p in run.model.named_parameters() if p.grad is not None})

        run.optimizer.register_step_pre_hook(keep)
        train_one_step(run)
        return found


def gradients_with_and_without(folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    clip = {"max_norm": 0}
    return (
        first_gradients(frozen_job(folder, "frozen", {**QUERIES, **clip})),
        first_gradients(frozen_job(folder, "all", clip)),
    )


@sampled("cases", CASES, 5)
def test_frozen_parameters_keep_their_values_in_every_division(
    cases: tuple[tuple[int, int], ...], tmp_path: Path
) -> None:
    (alone,) = run_ranks(train_everywhere, 1, tmp_path, 1, [(index, 0) for index in range(4)])
    assert all(name.startswith("output.") or "_norm." in name for name in alone[0])
    assert not any(name.startswith(("tok_embeddings", "layers.0")) for name in alone[1])
    assert len(alone[2]) == 6 and all(name.endswith(("wq.weight", "wv.weight")) for name in alone[2])
    assert any(name.startswith("layers.1.") for name in alone[3])
    run_ranks(train_everywhere, 2, tmp_path, 2, cases, timeout=300)
    for index, division in cases:
        expected = _curve(tmp_path, f"1ranks-{index}-0")
        assert _curve(tmp_path, f"2ranks-{index}-{division}") == pytest.approx(expected, rel=1e-5)
    (frozen, whole) = run_ranks(gradients_with_and_without, 2, tmp_path)[0]
    assert_equal(frozen, {name: whole[name] for name in frozen})
    assert len(frozen) == 6 and len(whole) > 20


def _curve(folder: Path, name: str) -> list[float]:
    """Return losses and gradient norms."""
    return [report[tag] for report in read_metrics(folder, name) for tag in ("train/loss", "train/grad_norm")]


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "later_ranks"), [(1, 2), (2, 1)])
def test_a_checkpoint_resumes_on_another_number_of_ranks(tmp_path: Path, ranks: int, later_ranks: int) -> None:
    """On one rank frozen parameters are no DTensors, because FSDP2 ignores them. Two of them are one tensor here."""
    args = {**STATE["model"]["args"], "tie_embeddings": True}
    sections = {"model": {"args": args}, "checkpoint": {"enable": True, "interval": 2}}
    jobs = {
        name: frozen_job(tmp_path, name, {**LATE_BLOCKS, "steps": 3}, **sections) for name in ("whole", "interrupted")
    }
    whole = run_ranks(run_job, 1, jobs["whole"])[0]
    run_ranks(run_job_until, ranks, jobs["interrupted"], 2)
    resumed = run_ranks(run_job, later_ranks, jobs["interrupted"])[0]
    assert _curve(tmp_path, "interrupted") == pytest.approx(_curve(tmp_path, "whole"), rel=1e-5)
    assert resumed.keys() == whole.keys()
    for name, tensor in whole.items():
        is_frozen = name.startswith(("tok_embeddings", "output", "layers.0"))
        torch.testing.assert_close(resumed[name], tensor, rtol=0 if is_frozen else 1e-4, atol=0 if is_frozen else 1e-6)


def unfrozen_and_resumed(folder: Path, steps: Sequence[int]) -> list[dict[str, Tensor]]:
    """Return the states of a run with parameters that are unfrozen after step 1: whole, resumed after each of `steps`,
    and continued after step 1 as a run without that key."""
    adam = {"optimizer": {"lr": 1e-2}, "checkpoint": {"enable": True, "interval": 1}}
    job = {"steps": 3, "trainable": ("output.*",)}
    later = {**job, "unfreeze": ({"match": "layers.**", "after_step": 1},)}
    states = [run_job(frozen_job(folder, "whole", later, **adam))]
    for step in steps:
        resumed = frozen_job(folder, f"resumed{step}", later, **adam)
        run_job_until(resumed, step)
        states.append(run_job(resumed))
    run_job_until(frozen_job(folder, "switched", job, **adam), 1)
    adam["checkpoint"]["accept_changes"] = True
    states.append(run_job(frozen_job(folder, "switched", {**job, "trainable": ("output.*", "layers.**")}, **adam)))
    return states


@sampled("steps", (2, 1))
def test_unfreezing_resumes_bitwise_and_equals_a_change_of_the_job(steps: tuple[int, ...], tmp_path: Path) -> None:
    whole, *others = run_ranks(unfrozen_and_resumed, 2, tmp_path, steps)[0]
    for other in others:
        assert_equal(whole, other)


def batch_norms(folder: Path) -> dict[str, tuple[dict[str, Tensor], dict[str, Tensor]]]:
    sections: dict[str, Any] = {
        "model": {"args": {"norm": "batchnorm"}},
        "precision": {"param_dtype": "float32", "frozen_storage_dtype": "bfloat16"},
    }
    frozen = {"frozen": ("layers.0.attention_norm.*",)}
    return {
        kind: train(frozen_job(folder, kind, frozen, **sections, batchnorm={"of_frozen": kind}))
        for kind in ("update", "fixed")
    }


def test_a_frozen_batch_norm_keeps_or_updates_its_statistics(tmp_path: Path) -> None:
    states = run_ranks(batch_norms, 2, tmp_path)[0]
    for name in ("layers.0.attention_norm.running_mean", "layers.0.attention_norm.num_batches_tracked"):
        for kind, is_kept in (("update", False), ("fixed", True)):
            before, after = states[kind]
            assert torch.equal(before[name], after[name]) == is_kept
            other = name.replace("attention_norm", "ffn_norm")
            assert not torch.equal(before[other], after[other])
    weight = "layers.0.attention_norm.weight"
    assert states["fixed"][1][weight].dtype == torch.bfloat16
    assert not torch.equal(states["fixed"][1]["output.weight"], states["update"][1]["output.weight"])


def planned(placement: str = "own_unit", **training: Any) -> list[tuple[str, bool, str]]:
    """Return what is in place, and the units."""
    precision = {"frozen_storage_dtype": "bfloat16", "placement": placement}
    job = {"model": {"args": {"n_layers": 3}}, "training": training, "precision": precision}
    config = JobConfig.model_validate(job)
    plan = plan_job(config, model_inventory(config))
    units = (*plan.in_place, *plan.units)
    return [(unit.name, unit.is_trained, unit.storage_dtype) for unit in units if unit.num_parameters]


@pytest.mark.skipif(not CAN_SHARE_UNITS, reason="before torch 2.13 every module of a rule has a unit of its own")
def test_trained_modules_of_frozen_blocks_share_a_unit_or_are_in_place() -> None:
    frozen, queries = (False, "bfloat16"), ("trained", True, "float32")
    blocks = [(f"layers.{index}", *frozen) for index in range(3)]
    assert planned(**QUERIES) == [("tok_embeddings", *frozen), queries, ("norm + output", *frozen), *blocks]
    assert ("norm", *frozen) in planned(trainable=["output.*"])
    norms: dict[str, Any] = {"unfreeze": [{"match": "layers.*.*_norm.*", "after_step": 2}]}
    assert ("trained after step 2", True, "float32") in planned(trainable=["output.*"], **norms)
    if MIXES_DTYPES_IN_UNIT:
        inside = planned("in_place", **QUERIES)
        assert inside[0] == queries and sorted(inside) == sorted(planned(**QUERIES))
        found = planned("in_place", **QUERIES, **norms)
        assert found[0] == queries and ("trained after step 2", True, "float32") in found[1:]


@pytest.mark.parametrize(
    ("training", "key", "reason"),
    [
        ({"frozen": ["ouput.*"]}, ("training", "frozen", 0), 'matches no parameter; did you mean "output.'),
        (
            {"trainable": ["q_proj"]},
            ("training", "trainable", 0),
            "matches no parameter; q_proj of transformers is layers.*.attention.wq.weight here",
        ),
        (
            {"frozen": ["model.layers.0.mlp.**"]},
            ("training", "frozen", 0),
            "matches no parameter; model.layers.0.mlp.** of transformers is layers.0.feed_forward.w1.weight, layers.0.",
        ),
        ({"trainable": ["wq"]}, ("training", "trainable", 0), 'matches no parameter; did you mean "**.wq.*"?'),
        ({"frozen": ["**"]}, ("training", "frozen"), "leaves no parameter to train in the first step"),
        ({"trainable": []}, ("training", "trainable"), "leaves no parameter to train in the first step"),
        (
            {"unfreeze": [{"match": "layers.7.**", "after_step": 1}]},
            ("training", "unfreeze", 0, "match"),
            "matches no parameter",
        ),
    ],
)
def test_globs_that_match_nothing_or_everything(training: dict[str, Any], key: tuple[Any, ...], reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        planned(**training)
    (problem,) = caught.value.problems
    assert problem.key == key and problem.reason.startswith(reason)
