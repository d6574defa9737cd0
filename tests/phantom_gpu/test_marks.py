"""A run without values says so in every line, metric and folder, and nothing else takes it for a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.distributed import run_command
from tests.phantom_gpu.conftest import REPO, Phantom
from titan_launch.core.phantom import FILE, MARK, TAG_PREFIX

JOB = ("--config=configs/llama_debug.toml", "--checkpoint.enable=true", "--metrics.log_freq=1")


def real(folder: Path, *arguments: str) -> str:
    """Run a command without a GPU that must refuse. Return its error."""
    status, printed, reported = run_command(arguments, REPO)
    assert status == 2, printed + reported
    return reported


@pytest.mark.phantom
def test_a_run_without_values_is_marked_and_refused(phantom: Phantom, tmp_path: Path) -> None:
    options = [*JOB, f"--job.dump_folder={tmp_path}"]
    phantom.train(2, tmp_path, *JOB, "--training.steps=2")
    run = tmp_path / "llama_debug"
    for log in run.rglob("rank-*.log"):
        assert all(MARK in line for line in log.read_text().splitlines()), log
    for line in (run / "metrics.jsonl").read_text().splitlines():
        assert all(tag.startswith(TAG_PREFIX) for tag in json.loads(line) if tag not in ("step", "time")), line
    assert "no values" in (run / FILE).read_text()
    refused = real(tmp_path, "train", *options, "--training.steps=4", "--job.device=cpu")
    assert "holds a run on a phantom GPU, and this run is on real devices" in refused
    assert "phantom GPU" in real(tmp_path, "report", str(run))
    assert "phantom GPU" in real(tmp_path, "compare", str(run), str(run))
    exported = real(tmp_path, "export", str(run), "--out", str(tmp_path / "out"))
    assert "phantom GPU, and its values have no meaning" in exported
    status, listed, _ = run_command(["runs", str(tmp_path)], REPO)
    assert status == 0 and "phantom GPU" in listed
    # The device of another phantom may resume it: that is a branch for CUDA too.
    output = phantom.train(2, tmp_path, *JOB, "--training.steps=4").stdout
    assert "phantom: resumed from" in output, output
    ended = phantom.run("-m", "titan_launch", "export", str(run), "--out", str(tmp_path / "out"))
    assert ended.returncode == 2 and "no values to export" in ended.stderr


@pytest.mark.phantom
def test_a_phantom_does_not_write_into_a_run_with_values(phantom: Phantom, tmp_path: Path) -> None:
    options = [*JOB, f"--job.dump_folder={tmp_path}", "--training.steps=1", "--job.device=cpu"]
    assert run_command(options, REPO)[0] == 0
    ended = phantom.run("-m", "titan_launch", *options[:-1], "--training.steps=2")
    assert ended.returncode == 2 and "holds a run on real devices, and this run is on a phantom GPU" in ended.stderr


@pytest.mark.phantom
@pytest.mark.slow
def test_a_collective_that_never_ends_is_named(phantom: Phantom, tmp_path: Path) -> None:
    options = [*JOB, "--training.steps=100", "--comm.timeout_seconds=5", f"--job.dump_folder={tmp_path}"]
    command = ["-m", "titan_launch", "launch", "--nproc-per-node=2", *options]
    ended = phantom.run(*command, PHANTOM_HANG="1:300", PHANTOM_PATIENCE="1")
    assert ended.returncode not in (0, 2), ended.stdout
    errors = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, ended.stderr
    assert "is deprecated" not in ended.stderr, ended.stderr
    assert "comm.timeout_seconds" in ended.stderr and "nccl" in ended.stderr, ended.stderr


@pytest.mark.phantom
def test_a_process_without_the_replaced_operators_is_refused(phantom: Phantom, tmp_path: Path) -> None:
    options = ["--config=configs/llama_debug.toml", f"--job.dump_folder={tmp_path}", "--training.steps=1"]
    ended = phantom.run("-m", "titan_launch", *options, PYTHONPATH=str(REPO))
    assert ended.returncode == 1 and "the phantom GPU is not complete" in ended.stderr, ended.stderr
