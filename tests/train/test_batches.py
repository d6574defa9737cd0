"""Runs on data that can only be read in order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed import run_ranks
from tests.tensors import assert_equal
from tests.train.jobs import run_and_interrupt, run_job, run_job_until, tiny_job
from titan_launch.config.sections.data import FactoryData
from titan_launch.core.errors import ConfigError, RunError
from titan_launch.data.loader import Workers
from titan_launch.data.sources import StreamSource, build_source
from titan_launch.data.tokenizers import ByteTokenizer
from titan_launch.plan.layout import Layout
from titan_launch.train.batches import StreamBatches


def stream_job(folder: Path, name: str = "StatefulStream", **sections: Any) -> dict[str, Any]:
    data = {"kind": f"tests.data.sources.test_factory:{name}", "shuffle": False, "args": {"number": 11}}
    schedule = {"kind": "constant", "warmup_steps": 1}
    sections = {"checkpoint": {"enable": True, "interval": 1}, "lr_scheduler": schedule, **sections}
    job = tiny_job(folder, training={"steps": 3}, model={"args": {"n_layers": 1}}, **sections)
    return {**job, "data": data, "model": {"args": {**job["model"]["args"], "vocab_size": 257}}}


def refusal(config: dict[str, Any]) -> str:
    with pytest.raises((ConfigError, RunError)) as caught:
        run_job(config)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "num_workers"), [("Stream", 1), pytest.param("StatefulStream", 0, marks=pytest.mark.slow)]
)
def test_a_run_on_a_stream_resumes_bitwise_on_as_many_ranks(name: str, num_workers: int, tmp_path: Path) -> None:
    job = stream_job(tmp_path / "whole", name)
    job["data"]["num_workers"] = num_workers
    part = {**job, "job": {**job["job"], "dump_folder": str(tmp_path / "resumed")}}
    whole = run_ranks(run_and_interrupt, 2, job, part, 2)
    for ours, theirs in zip(whole, run_ranks(run_job, 2, part), strict=True):
        assert_equal(ours, theirs)


def test_the_position_in_a_stream_fits_only_as_many_ranks_and_workers(tmp_path: Path) -> None:
    job = stream_job(tmp_path)
    run_ranks(run_job_until, 2, job, 2)
    remedy = (
        "resume with the same numbers as the checkpoint, or load a step (--checkpoint.load=1000) and begin the stream "
        "again with --checkpoint.exclude_from_loading='[\"data\"]'"
    )
    saved = "data.kind: the checkpoint has the positions of a stream on 2 data-parallel ranks with 0 workers each, and"
    assert run_ranks(refusal, 1, job) == [f"{saved} this run has 1 data-parallel rank with 0 workers each; {remedy}"]
    job["data"]["num_workers"] = 1
    present = "this run has 2 data-parallel ranks with 1 worker each"
    assert run_ranks(refusal, 2, job) == [f"{saved} {present}; {remedy}"] * 2
    job["checkpoint"] |= {"load": 2, "exclude_from_loading": ["data"]}
    run_ranks(run_job, 1, job)


def test_a_stream_goes_on_after_a_rollback() -> None:
    config = FactoryData(kind="tests.data.sources.test_factory:Stream", shuffle=False, args={"number": 9})
    source = build_source(config, ByteTokenizer(), 4)
    assert isinstance(source, StreamSource)
    layout = Layout(replicate=1, shard=1, local_batch_size=2, num_microbatches=1)
    batches = StreamBatches(source, layout, 0, None, Workers())
    firsts = [next(batches).inputs[:, 0].tolist()]
    saved = batches.state_dict()
    firsts.append(next(batches).inputs[:, 0].tolist())
    batches.load_state_dict(saved)
    firsts.append(next(batches).inputs[:, 0].tolist())
    batches.close()
    assert firsts == [[0, 1], [2, 3], [4, 5]]


def test_a_state_that_is_not_plain_data_stops_the_run(tmp_path: Path) -> None:
    (message,) = run_ranks(refusal, 1, stream_job(tmp_path, "StreamOfTensors"))
    assert message.startswith("state_dict() of the stream that data.kind names returned a value that cannot be saved")
