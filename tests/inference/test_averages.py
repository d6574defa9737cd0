"""Means of checkpoints and of runs, beside the mean of their tensors."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.distributed import run_ranks
from tests.packages import needs
from tests.tensors import assert_equal
from tests.train.jobs import run_job, tiny_job
from titan_launch.checkpoint.index import read_weights
from titan_launch.cli import main
from titan_launch.config.job import JobConfig
from titan_launch.inference.export import ExportOptions, _named, _rows
from titan_launch.models.huggingface.files import WeightsError

pytestmark = needs("safetensors", "sklearn")

LORA = {"targets": ["layers.*.attention.w*"], "rank": 4, "dropout": 0.0}


def write_runs(folder: Path) -> None:
    """Train four runs: two that differ in their seed, one with other arguments, and one of adapters."""
    jobs = [
        job_of(folder, "one", training={"seed": 1}),
        job_of(folder, "two", training={"seed": 2}),
        job_of(folder, "scaled", model={"args": {"rope_theta": 1234.0}}),
        job_of(folder, "adapters", lora=LORA, optimizer={"lr": 0.1}),
    ]
    run_ranks(run_all, 1, jobs)


def job_of(folder: Path, name: str, **sections: Any) -> dict[str, Any]:
    checkpoint = {"enable": True, "interval": 1, "keep_latest": 3, "async_mode": "disabled"}
    training = {"steps": 3, **sections.pop("training", {})}
    job = tiny_job(folder, checkpoint=checkpoint, training=training, **sections)
    return {**job, "job": {**job["job"], "name": name}}


def run_all(jobs: list[dict[str, Any]]) -> None:
    for job in jobs:
        run_job(job)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("averages")
    write_runs(folder)
    return folder


@pytest.fixture
def exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[dict[str, Tensor], str]]:
    """Return a function that runs `export --format plain`, and returns the tensors and what was printed."""

    def export(*arguments: str) -> tuple[dict[str, Tensor], str]:
        out = tmp_path / f"out{len(list(tmp_path.iterdir()))}"
        main(["export", *arguments, "--out", str(out), "--format", "plain"])
        return load_file(out / "model.safetensors"), capsys.readouterr().out

    return export


def state(run: Path, step: int) -> dict[str, Tensor]:
    return dict(read_weights(run / f"checkpoints/step-{step}"))


def mean(states: list[dict[str, Tensor]], weights: list[float]) -> dict[str, Tensor]:
    """Return the weighted mean of states in float64."""
    total = sum(weights)
    return {
        name: sum(weight / total * each[name].double() for weight, each in zip(weights, states, strict=True))  # type: ignore[misc]
        for name in states[0]
    }


def assert_close(own: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert own.keys() == expected.keys()
    for name, tensor in own.items():
        torch.testing.assert_close(tensor.double(), expected[name].double(), rtol=1e-6, atol=1e-7, msg=name)


def test_a_mean_of_checkpoints_and_of_runs_is_that_of_their_tensors(
    runs: Path, tmp_path: Path, exported: Callable[..., tuple[dict[str, Tensor], str]]
) -> None:
    one, two = runs / "one", runs / "two"
    states = [state(one, step) for step in (1, 2, 3)]
    uniform, printed = exported(str(one), "--average", "1,2,3")
    assert_close(uniform, mean(states, [1, 1, 1]))
    assert "of the mean of step-1, step-2, step-3 to " in printed
    weighted, printed = exported(str(one), "--average=1,3=2.5")
    assert_close(weighted, mean([states[0], states[2]], [1, 2.5]))
    assert "the mean of step-1, 2.5 x step-3" in printed
    soup, printed = exported(str(one), f"--soup={two}=0.5", "--soup", str(one), "--step=2")
    assert_close(soup, mean([states[1], state(two, 3), states[2]], [1, 0.5, 1]))
    assert f"0.5 x {two} (step-3)" in printed
    same, _ = exported(str(one), f"--soup={one}=0.3")
    assert_equal(same, states[2])  # equal values stay exactly equal
    link = tmp_path / "lr=0.5"
    link.symlink_to(two)
    both, _ = exported(str(one), "--average=2,3", f"--soup={link}")
    assert_close(both, mean([states[1], states[2], state(two, 3)], [1, 1, 1]))


def test_the_mean_of_adapters_is_that_of_the_merged_models(
    runs: Path, exported: Callable[..., tuple[dict[str, Tensor], str]]
) -> None:
    run = str(runs / "adapters")
    parts = [exported(run, f"--step={step}")[0] for step in (1, 3)]
    assert_close(exported(run, "--average=1,3")[0], mean(parts, [1, 1]))


def test_the_mean_of_statistics_of_batchnorm_is_noted(
    tmp_path: Path, exported: Callable[..., tuple[dict[str, Tensor], str]]
) -> None:
    job = job_of(tmp_path, "images", training={"local_batch_size": 2, "global_batch_size": 2})
    job |= {"model": {"name": "resnet"}, "data": {"kind": "images"}}
    run_ranks(run_job, 1, job)
    tensors, printed = exported(str(tmp_path / "images"), "--average", "1,3")
    states = [state(tmp_path / "images", step) for step in (1, 3)]
    counters = [name for name in tensors if name.endswith("num_batches_tracked")]
    floats = {name: tensor for name, tensor in tensors.items() if name not in counters}
    assert_close(floats, {name: tensor for name, tensor in mean(states, [1, 1]).items() if name not in counters})
    assert "note: the running statistics of " in printed
    assert " BatchNorm layers are means of the models' statistics" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--soup={runs}/scaled"],
            r"scaled \(step-3\) has other arguments: rope_theta = 1234.0; a mean needs models with the same structure",
        ),
        (["--soup={runs}/none"], "one: --soup .*none: "),
        (["--average=1,9"], "it has no checkpoint of step 9; steps: 1, 2, 3"),
        (["--average=1"], "name at least two steps, each once"),
        (["--average=1,1=2"], "name at least two steps, each once"),
        (["--average=1,2=0"], "the weight after = must be a number above 0"),
        (["--average=1,2=x"], "the weight after = must be a number above 0"),
        (["--average=1,2", "--step=1"], "--average names the steps; remove --step"),
        (["--soup={runs}/two", "--soup={runs}/scaled/../two=2"], "error: --soup names a folder twice; "),
        (["--adapter", "--max-shard-size=1MB"], "--max-shard-size has no effect with --adapter, which writes one file"),
        ([f"--max-shard-size={'9' * 5000}GB"], '99GB" is not a size; write 5GB or 500MB'),
        (["--base={runs}/none"], r"one: --base .*/none has neither config.json nor \*.safetensors; name another"),
        (["--average=1,2", "--adapter"], "a mean of adapters is not the mean of their models; remove --adapter"),
    ],
)
def test_bad_means(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    out = tmp_path / "out"
    command = ["export", str(runs / "one"), "--out", str(out), *(each.format(runs=runs) for each in arguments)]
    assert main(command) == 2 and not out.exists()
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(message, line)


@pytest.mark.parametrize(
    ("section", "named"), [("data.sources.0", "`a.txt`, "), ("validation.data", ""), ("validation", "")]
)
def test_a_model_card_names_the_sources_of_the_job(section: str, named: str) -> None:
    record = {"data": {"sources": [{"kind": "text", "path": "a.txt"}]}, "validation": {"freq": 1}}
    assert _named(cast(Any, SimpleNamespace(record=record)), section) == named


def test_an_invalid_vocabulary_of_the_original_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": "61"}')
    job = JobConfig.model_validate(job_of(tmp_path, "one"))
    with pytest.raises(WeightsError, match=f'{tmp_path}/config.json has vocab_size = "61"; write the number of rows'):
        _rows(cast(Any, SimpleNamespace(job=job, companions=tmp_path)), ExportOptions())
