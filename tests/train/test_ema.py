"""The moving average of the weights: its values, checkpoints, skipped steps and validation."""

from __future__ import annotations

import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.distributed import run_ranks
from tests.sampling import rest_is_slow, sampled
from tests.tensors import assert_equal, full_state, full_tensor
from tests.train.health.test_skipped_steps import poison
from tests.train.jobs import read_metrics, run_and_interrupt, run_job, run_job_until, this_rank, tiny_job
from tests.train.run_folder.test_resume import logged
from titan_launch.checkpoint.index import read_weights
from titan_launch.checkpoint.manifest import read_manifest
from titan_launch.config.job import JobConfig
from titan_launch.config.rules.training import average_is_updated_in_the_run
from titan_launch.core.errors import UserError
from titan_launch.inference.export import ExportOptions, export
from titan_launch.models.build import build_model
from titan_launch.models.huggingface.files import WeightsError
from titan_launch.optim.ema import update_weight
from titan_launch.train.build import build_run
from titan_launch.train.loop import fit, train_one_step, validation_scalars
from titan_launch.train.run import Run
from titan_launch.train.step import validate

State = dict[str, Tensor]
EMA = {"decay": 0.9}


def ema_job(folder: Path, **sections: Any) -> dict[str, Any]:
    """Return a job of four steps with an average, a checkpoint after step 2 and one after step 4."""
    job = {
        "ema": EMA,
        "training": {"steps": 4},
        "checkpoint": {"enable": True, "interval": 2},
        "lr_scheduler": {"kind": "warmup_stable_decay", "decay_ratio": 0.0},
        **sections,
    }
    return tiny_job(folder, **job)


def average_of(run: Run) -> State:
    ema = run.observers.ema
    assert ema is not None
    return {name: full_tensor(tensor) for name, tensor in ema.state_dict().items()}


def saved_average(folder: Path, step: int = 4) -> State:
    return dict(read_weights(folder / f"tiny/checkpoints/step-{step}", ema=True))


def record(jobs: list[dict[str, Any]]) -> list[list[tuple[State, State]]]:
    """Train jobs. Return the source of the average and the average, at the start and after every step."""
    return [_record(job) for job in jobs]


def _record(job: dict[str, Any]) -> list[tuple[State, State]]:
    with ExitStack() as stack:
        run = build_run(JobConfig.model_validate(job), this_rank(), stack)
        seen = [(full_state(run.model), average_of(run))]
        while run.progress.step < 4:
            train_one_step(run)
            masters = {
                name: full_tensor(run.optimizer.state[parameter]["master"])
                for name, parameter in run.model.named_parameters()
                if "master" in run.optimizer.state[parameter]
            }
            seen.append((masters or full_state(run.model), average_of(run)))
        return seen


# The weight of the parameters after each of four steps.
WEIGHTS: dict[str, tuple[dict[str, Any], list[float]]] = {
    "warm-up": ({"decay": 0.25, "warmup": True}, [0.9, 9 / 11, 0.75, 0.75]),
    "start": ({"decay": 0.9, "start_step": 3, "every_steps": 2}, [0, 1, 0, 0.1]),
    "masters": (EMA, [0.1] * 4),
}
BF16 = {
    "precision": {"param_dtype": "bfloat16", "storage_dtype": "bfloat16"},
    "optimizer": {"master_weights": True, "lr": 1e-2},
}


@pytest.mark.parametrize(("start", "every"), [(3, 2), (5, 3), (0, 4), (7, 8)])
def test_a_job_is_refused_if_no_step_updates_its_average(start: int, every: int) -> None:
    ema = {"decay": 0.9, "start_step": start, "every_steps": every}
    for steps in range(1, 10):
        config = JobConfig.model_validate(ema_job(Path(), ema=ema, training={"steps": steps}))
        has_update = any(0 < update_weight(config.ema, step) < 1 for step in range(1, steps + 1))
        assert (not list(average_is_updated_in_the_run(config))) == has_update


def test_the_average_is_that_of_a_plain_loop(tmp_path: Path) -> None:
    jobs = [
        ema_job(tmp_path / name, ema=ema, **(BF16 if name == "masters" else {})) for name, (ema, _) in WEIGHTS.items()
    ]
    for (name, (_, weights)), steps in zip(WEIGHTS.items(), run_ranks(record, 1, jobs)[0], strict=True):
        expected = {key: tensor.float() for key, tensor in steps[0][0].items() if "rope" not in key}
        for weight, (source, average) in zip([1.0, *weights], steps, strict=True):
            expected = {key: tensor + weight * (source[key].float() - tensor) for key, tensor in expected.items()}
            assert average.keys() == expected.keys()
            for key, tensor in average.items():
                assert tensor.dtype == torch.float32
                torch.testing.assert_close(tensor, expected[key], rtol=1e-6, atol=1e-7, msg=f"{name}: {key}")


DIVISIONS: dict[str, dict[str, Any]] = {
    "PP": {"parallelism": {"pipeline_parallel_degree": 2}},
    "deferred, offloaded": {
        "gradient_accumulation": {"mode": "deferred"},
        "training": {"steps": 4, "enable_cpu_offload": True},
    },
    "replicas": {"parallelism": {"data_parallel_replicate_degree": 2}},
    "TP": {"parallelism": {"tensor_parallel_degree": 2}},
}
EVEN = {"model": {"args": {"vocab_size": 64}}, "optimizer": {"lr": 1e-2, "eps": 1e-5}}


def train_all(jobs: list[dict[str, Any]]) -> None:
    for job in jobs:
        run_job(job)


@sampled("names", list(DIVISIONS), 5)
def test_every_division_saves_the_same_average(names: tuple[str, ...], tmp_path: Path) -> None:
    run_ranks(run_job, 1, ema_job(tmp_path / "alone", **EVEN))
    run_ranks(train_all, 2, [ema_job(tmp_path / name, **EVEN, **DIVISIONS[name]) for name in names])
    expected = saved_average(tmp_path / "alone")
    for name in names:
        average = saved_average(tmp_path / name)
        assert average.keys() == expected.keys()
        for key, tensor in average.items():
            torch.testing.assert_close(tensor, expected[key], rtol=1e-4, atol=1e-5, msg=f"{name}: {key}")
    from tests.test_docs import blocks  # the ranks do not need it

    (snippet,) = [block for _, block in blocks("python") if "read_weights" in block]
    names: dict[str, Any] = {}
    exec(snippet.replace("outputs/llama", str(tmp_path / "PP/tiny")), names)
    model = names["model"]
    assert_equal(dict(model.named_parameters()), saved_average(tmp_path / "PP"))


@pytest.mark.slow
def test_a_resumed_average_is_bitwise_the_uninterrupted_one(tmp_path: Path) -> None:
    # Step 3 is lost.
    run_ranks(run_and_interrupt, 2, ema_job(tmp_path / "whole"), ema_job(tmp_path / "parts"), 3)
    shutil.copytree(tmp_path / "parts", tmp_path / "fewer", symlinks=True)
    run_ranks(run_job, 2, ema_job(tmp_path / "parts"))
    run_ranks(run_job, 1, ema_job(tmp_path / "fewer"))
    whole, parts, fewer = (saved_average(tmp_path / name) for name in ("whole", "parts", "fewer"))
    assert_equal(parts, whole)
    for key, tensor in fewer.items():
        torch.testing.assert_close(tensor, whole[key], rtol=1e-5, atol=1e-6, msg=key)


def test_an_average_can_be_exported_and_begins_with_the_weights_of_a_job(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    run_ranks(run_job, 1, ema_job(tmp_path))
    options = ExportOptions(ema=True)
    export(tmp_path / "tiny", tmp_path / "exported", options)
    average = saved_average(tmp_path)
    first = run_ranks(record, 1, [ema_job(tmp_path / "next", model={"weights": str(tmp_path / "exported")})])[0][0][0]
    assert_equal(first[1], {name: average[name] for name in first[1]})
    shutil.rmtree(tmp_path / "tiny/checkpoints")
    with pytest.raises(WeightsError, match="it has no checkpoint"):
        export(tmp_path / "tiny", tmp_path / "none", options)


def test_an_average_can_begin_and_end_at_a_resume(tmp_path: Path) -> None:
    """The shared weight has both of its names in a checkpoint."""
    tied = {"model": {"args": {"tie_embeddings": True}}}
    without = ema_job(tmp_path, ema={}, **tied)
    run_ranks(run_job_until, 1, without, 2)
    with pytest.raises(UserError, match=r"step-2 has no moving average of the weights \(ema.decay was not set\)"):
        saved_average(tmp_path, 2)
    begun = "moving average of the weights: the checkpoint has none; the new average begins with the loaded parameters"
    assert run_ranks(logged, 1, ema_job(tmp_path, **tied), "moving average of the weights:") == [[begun]]
    states = [dict(read_weights(tmp_path / f"tiny/checkpoints/step-{step}")) for step in (2, 4)]
    average = saved_average(tmp_path)
    assert torch.equal(average["output.weight"], average["tok_embeddings.weight"])
    for key, tensor in states[0].items():
        moved = (average[key] - tensor).norm() / (states[1][key] - tensor).norm()
        assert 0 < moved < 0.3, key  # two updates with a weight of 0.1
    source = {"enable": True, "load": str(tmp_path / "tiny"), "exclude_from_loading": ["ema"]}
    anew = ema_job(tmp_path, job={"name": "anew"}, checkpoint=source, training={"steps": 5}, **tied)
    not_loaded = (
        "moving average of the weights: the average of the checkpoint is not loaded; the new average begins with the "
        "loaded parameters"
    )
    assert run_ranks(logged, 1, anew, "moving average of the weights:") == [[not_loaded]]
    without["training"]["steps"] = 5
    dropped = "the moving average of the weights in the checkpoint is dropped, because ema.decay is not set"
    assert run_ranks(logged, 1, without, "the moving average") == [[dropped]]


def averages_around_a_skipped_step(job: dict[str, Any]) -> list[State]:
    with ExitStack() as stack:
        run = build_run(JobConfig.model_validate(job), this_rank(), stack)
        poison(run, range(8, 12), {})  # step 3
        averages = []
        for _ in range(4):
            train_one_step(run)
            averages.append(average_of(run))
        return averages


@pytest.mark.parametrize("implementation", ["fused", "for-loop"])
def test_a_skipped_step_does_not_change_the_average(tmp_path: Path, implementation: str) -> None:
    job = ema_job(tmp_path, debug={"on_nonfinite": "skip"}, optimizer={"implementation": implementation})
    ((_, before, skipped, after),) = run_ranks(averages_around_a_skipped_step, 1, job)
    assert_equal(before, skipped)
    assert not any(torch.equal(after[key], tensor) for key, tensor in skipped.items())


def validated(job: dict[str, Any]) -> tuple[dict[str, float], dict[str, float], State, State]:
    """Return the metrics of a validation after training, those of a plain model with the average, and the state before
    and after the validation."""
    with ExitStack() as stack:
        config = JobConfig.model_validate(job)
        run = build_run(config, this_rank(), stack)
        fit(run)
        before = full_state(run.model) | {f"ema.{name}": tensor for name, tensor in average_of(run).items()}
        scalars = validation_scalars(run)
        after = full_state(run.model) | {f"ema.{name}": tensor for name, tensor in average_of(run).items()}
        plain: nn.Module = build_model(config.model, config.training.seq_len).module.to_empty(device="cpu")
        dtype = getattr(torch, config.precision.storage_dtype)
        for name, tensor in [*plain.named_parameters(), *plain.named_buffers()]:
            tensor.data.copy_(after[f"ema.{name}"].to(dtype) if f"ema.{name}" in after else after[name])
        assert run.batches.validation is not None
        expected = validate(plain, run.batches.validation, run.ranks.device, run.step.loss)
        return scalars, expected, before, after


SOURCE = {"kind": "synthetic", "vocab_size": 61, "num_samples": 7, "seed": 1}
HELD_OUT = {"freq": 4, "local_batch_size": 3, "data": SOURCE}
VALIDATED = ("accuracy", "loss", "perplexity")
STORED_IN_BF16 = {"param_dtype": "float32", "storage_dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("validate_with", "sections", "tags"),
    rest_is_slow(
        [
            ("both", {"model": {"args": {"norm": "batchnorm"}}}, [*VALIDATED, *(f"ema_{name}" for name in VALIDATED)]),
            ("ema", {"precision": STORED_IN_BF16}, [f"ema_{name}" for name in VALIDATED]),
        ]
    ),
)
def test_the_average_is_validated(
    tmp_path: Path, validate_with: str, sections: dict[str, Any], tags: list[str]
) -> None:
    """The parameters and the average are unchanged afterwards."""
    ema = {**EMA, "validate_with": validate_with}
    for scalars, expected, before, after in run_ranks(
        validated, 2, ema_job(tmp_path, validation=HELD_OUT, ema=ema, **sections)
    ):
        assert_equal(before, after)
        assert scalars["validation/ema_loss"] == pytest.approx(expected["validation/loss"], rel=1e-5)
        assert scalars["validation/ema_accuracy"] == pytest.approx(expected["validation/accuracy"])
        assert abs(scalars.get("validation/loss", 0.0) - scalars["validation/ema_loss"]) > 1e-3
    last = read_metrics(tmp_path)[-1]
    assert sorted(tag.partition("/")[2] for tag in last if tag.startswith("validation/")) == sorted(tags)
    best = last.get("validation/loss", last["validation/ema_loss"])
    assert read_manifest(tmp_path / "tiny/checkpoints/step-4").validation_loss == best
