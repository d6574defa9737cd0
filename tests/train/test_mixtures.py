"""Runs on mixtures of sources: order, metrics, validation of each source, and changed weights."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.distributed import run_ranks
from tests.tensors import assert_equal
from tests.train.jobs import read_metrics, run_job, tiny_job
from titan_launch.core.errors import UserError
from titan_launch.data.order import MixtureOrder, SampleOrder


def source(name: str, weight: Any = 1.0, **keys: Any) -> dict[str, Any]:
    return {"kind": "synthetic", "name": name, "vocab_size": 61, "num_samples": 10, "weight": weight, **keys}


def mixture(*sources: dict[str, Any]) -> dict[str, Any]:
    return {"kind": "mixture", "sources": list(sources)}


def mixed_job(folder: Path, data: dict[str, Any], steps: int = 6, **sections: Any) -> dict[str, Any]:
    schedule = {"kind": "constant", "warmup_steps": 1}
    job = tiny_job(folder, training={"steps": steps, "local_batch_size": 2}, lr_scheduler=schedule, **sections)
    return {**job, "data": data}


A, B = source("a", [[0, 3], [3, 0]]), source("b", noise=0.5, seed=1)
HELD_OUT = [source("easy", seed=7, num_samples=5), source("noisy", noise=0.9, seed=8, num_samples=9)]


def validation(data: dict[str, Any]) -> dict[str, Any]:
    return {"freq": 3, "local_batch_size": 2, "max_samples": 7, "data": data}


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    """Return the reports and the parameters of a run on two ranks."""
    folder = tmp_path_factory.mktemp("mixed")
    config = mixed_job(folder, mixture(A, B), validation=validation(mixture(*HELD_OUT)))
    state = run_ranks(run_job, 2, config)[0]
    return read_metrics(folder), state


def test_a_mixture_does_not_depend_on_ranks_and_workers(
    tmp_path: Path, mixed: tuple[list[dict[str, float]], dict[str, Tensor]]
) -> None:
    data = mixture(A, B) | {"num_workers": 1}
    alone = run_ranks(run_job, 1, mixed_job(tmp_path, data))[0]
    for name, tensor in mixed[1].items():
        torch.testing.assert_close(alone[name], tensor, rtol=1e-5, atol=1e-6)


def test_a_run_reports_the_share_and_the_epoch_of_each_source(
    mixed: tuple[list[dict[str, float]], dict[str, Tensor]],
) -> None:
    orders = {name: SampleOrder(10, 0, True) for name in "ab"}
    order = MixtureOrder(orders, [(0, [Fraction(3), Fraction(1)]), (12, [Fraction(0), Fraction(1)])], 0)
    for step, report in enumerate(mixed[0], start=1):
        counts = order.consumed(4 * step)
        assert [report[f"data/share/{name}"] for name in "ab"] == [count / (4 * step) for count in counts]
        assert [report[f"data/epoch/{name}"] for name in "ab"] == [count / 10 for count in counts]
        assert report["train/epoch"] == 4 * step / 20


def test_validation_reports_each_source_and_the_mean_of_all_targets(
    tmp_path: Path, mixed: tuple[list[dict[str, float]], dict[str, Tensor]]
) -> None:
    reports = [report for report in mixed[0] if "validation/loss" in report]
    assert len(reports) == 2
    for metric in ("loss", "accuracy"):
        easy, noisy = (reports[-1][f"validation/{metric}/{name}"] for name in ("easy", "noisy"))
        assert reports[-1][f"validation/{metric}"] == pytest.approx((5 * easy + 7 * noisy) / 12)
    config = mixed_job(tmp_path, mixture(A, B), validation=validation(HELD_OUT[1]))
    del config["validation"]["data"]["name"], config["validation"]["data"]["weight"]
    run_ranks(run_job, 1, config)
    alone = read_metrics(tmp_path)[-1]
    assert alone["validation/loss"] == pytest.approx(reports[-1]["validation/loss/noisy"], rel=1e-5)
    assert "validation/loss/noisy" not in alone


def test_a_mixture_of_one_source_trains_as_the_source_alone(tmp_path: Path) -> None:
    keys = {"kind": "synthetic", "vocab_size": 61, "num_samples": 10}
    alone = run_ranks(run_job, 1, mixed_job(tmp_path / "alone", keys))[0]
    assert_equal(run_ranks(run_job, 1, mixed_job(tmp_path / "mixed", mixture(keys)))[0], alone)


def test_each_sample_without_documents_is_one_document_beside_packed_documents(tmp_path: Path) -> None:
    """The validation has no documents, and is the same."""
    (tmp_path / "text").mkdir()
    (tmp_path / "text/a.txt").write_text("some text " * 20)
    text = {"kind": "text", "path": str(tmp_path / "text")}
    packed = {**text, "packing": "documents", "weight": 0.0}

    def trained(data: dict[str, Any], name: str) -> tuple[dict[str, Tensor], float]:
        config = mixed_job(tmp_path / name, data, steps=3, validation=validation(text))
        config["model"]["args"]["vocab_size"] = 257
        state = run_ranks(run_job, 1, config)[0]
        return state, read_metrics(tmp_path / name)[-1]["validation/loss"]

    synthetic = {"kind": "synthetic", "vocab_size": 61, "num_samples": 10}
    torch.testing.assert_close(trained(mixture(synthetic, packed), "mixed"), trained(synthetic, "alone"))


def refusal(config: dict[str, Any]) -> str:
    with pytest.raises(UserError) as caught:
        run_job(config)
    return str(caught.value)


def resumed(folder: Path) -> tuple[str, str, str]:
    """Resume a run of four steps with several changes of its weights, on this rank. Return the refusals of the first
    three."""

    def job(*sources: dict[str, Any], accept: bool = True) -> dict[str, Any]:
        checkpoint = {"enable": True, "interval": 2, "accept_changes": accept}
        return mixed_job(folder, mixture(*sources), steps=8, checkpoint=checkpoint)

    run_job(mixed_job(folder, mixture(source("a", 3), source("b")), steps=4, checkpoint={"enable": True}))
    refused = (
        refusal(job(source("a", [[0, 3], [4, 1]]), source("b"), accept=False)),
        refusal(job(source("a", 1), source("b"))),
        refusal(job(source("a", 3))),
    )
    run_job(job(source("a", [[0, 3], [4, 0]]), source("b"), source("c", [[0, 0], [4, 3]])))
    return refused


def test_weights_of_later_steps_may_change_but_not_those_of_past_steps(tmp_path: Path) -> None:
    ((unaccepted, changed, removed),) = run_ranks(resumed, 1, tmp_path)
    assert "data.sources.0.weight was 3.0, is [[0.0, 3.0], [4.0, 1.0]]" in unaccepted
    assert "checkpoint.accept_changes" in unaccepted
    begin = "data.sources: the order of the data has changed: of the first 16 samples, this job takes "
    rest = (
        "keep the weights of past steps, and change only the weights of later steps (weight = [[0, 3], [1000, 1]]), or "
        "start anew with --checkpoint.load=none"
    )
    before, after = read_metrics(tmp_path)[3], read_metrics(tmp_path)[-1]
    consumed = [round(16 * before[f"data/share/{name}"]) for name in "ab"]
    listed = "from its sources, but the run took"
    assert changed.startswith(begin) and f"{listed} {consumed[0]} + {consumed[1]}; {rest}" in changed
    assert removed.startswith(f"{begin}16 {listed} {consumed[0]}; {rest}")
    counts = [round(32 * after[f"data/share/{name}"]) for name in "abc"]
    assert counts[0] == consumed[0] and sum(counts[1:]) == 32 - consumed[0] and counts[2] > counts[1] - consumed[1]
