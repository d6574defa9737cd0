"""Output and errors of a dry run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.distributed import run_command
from tests.parallel import divided_model
from tests.parallel.divided_model import PLAN
from tests.trace.traces import a_job
from titan_launch.cli import main
from titan_launch.core.errors import ConfigError
from titan_launch.plan.hardware import hardware_of
from titan_launch.trace.dry_run import dry_run

MODEL = {"args": {"vocab_size": 64, "n_layers": 4}}
ALL_AXES = {
    "pipeline_parallel_degree": 2,
    "data_parallel_replicate_degree": 2,
    "tensor_parallel_degree": 2,
}


def dry_run_output(ranks: int, rank: int = 0, **sections: Any) -> str:
    config, layout, _ = a_job(ranks, model=sections.pop("model", MODEL), **sections)
    return dry_run(config, layout, hardware_of(config, ranks), rank)


def test_a_dry_run_prints_the_coordinate_and_units_of_its_rank() -> None:
    """Rank 15 of 16 has the second pipeline stage, the second shard of its replica, and half of each matrix."""
    printed = dry_run_output(16, rank=15, parallelism=ALL_AXES, training={"global_batch_size": 24})
    assert "ranks: 16 = 2 pipeline ranks x 2 replicas x 2 shards x 2 tensor-parallel ranks" in printed
    assert "rank 15: pp 1 of 2, dp_replicate 1 of 2, dp_shard 1 of 2, tp 1 of 2" in printed
    assert "stage 1 of 2: layers.2 .. output" in printed
    block = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48
    held = (2 * block // 2 + 2 * 2 * 32 + 32 + 64 * 32 // 2) // 2  # norms are whole on every rank of the tensor axis
    assert f"on this rank: 4 FSDP2 units, {held:,} elements of parameters" in printed
    assert "nothing was trained or written" in printed


@pytest.mark.parametrize(
    ("ranks", "sections", "reason"),
    [
        (4, {"model": {"args": {"vocab_size": 61}}, "parallelism": {"tensor_parallel_degree": 2}}, "61"),
        (
            4,
            {"parallelism": {"pipeline_parallel_degree": 2, "pipeline_parallel_split_points": ["layer.2"]}},
            "pipeline_order",
        ),
        (2, {"precision": {"rules": [{"match": "layer.*", "param_dtype": "float32"}]}}, "matches no"),
        (2, {"optimizer": {"param_groups": [{"match": "head.*", "lr_factor": 2.0}]}}, "matches no trainable"),
    ],
)
def test_a_dry_run_refuses_a_job_that_a_run_refuses(ranks: int, sections: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        dry_run_output(ranks, **sections)


def test_a_plan_that_divides_connected_layers_differently_is_reported_in_one_line() -> None:
    """The error names the line of the user's code and has no frames of PyTorch, as in training."""
    swapped = {**PLAN, "attention.qkv.*": "rowwise", "attention.out": "colwise"}
    model = {"name": "tests.parallel.divided_model:Model", "flavor": "debug", "args": {}}
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ConfigError) as raised:
        patch.setattr(divided_model, "PLAN", swapped)
        dry_run_output(2, model=model, precision={"param_dtype": "float32"}, parallelism={"tensor_parallel_degree": 2})
    (problem,) = raised.value.problems
    assert "tensor_parallel has matching styles for connected layers" in problem.reason and "\n" not in problem.reason
    assert re.search(r"fails at \S+divided_model\.py:\d+ with 1/2", problem.reason)


@pytest.mark.parametrize("command", ["plan", "check"])
def test_other_commands_name_the_commands_that_have_fake_world_size(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "--config", "configs/llama_debug.toml", "--fake-world-size=8"]) == 2
    assert "unknown option --fake-world-size; it is an option of train and launch" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "printed"),
    [
        (["--fake-rank=3"], "--fake-rank is for a dry run"),
        (["--fake-world-size=4", "--fake-rank=4"], "from 0 to 3"),
        (["--fake-world-size=0"], "at least 1"),
        (["--fake-world-size=16385"], "must be at most 16384 ranks, not 16385"),
    ],
)
def test_a_rank_outside_of_the_fake_world_is_an_error(
    options: list[str], printed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--config", "configs/llama_debug.toml", *options]) == 2
    assert printed in capsys.readouterr().err


def test_a_fake_world_size_other_than_the_launched_processes_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    launch = ["launch", "--config", "configs/llama_debug.toml", "--nnodes=2", "--nproc-per-node=8"]
    assert main([*launch, "--fake-world-size=8"]) == 2
    assert "16" in capsys.readouterr().err


@pytest.mark.slow
def test_a_dry_run_of_a_shipped_config_writes_nothing(tmp_path: Path) -> None:
    job = Path("configs/parallel/pipeline.toml").resolve()
    command = [f"--config={job}", "--fake-world-size=2", "--fake-rank=1"]
    status, printed, reported = run_command(command, tmp_path)
    assert (status, reported) == (0, "")
    assert "stage 1 of 4: layers.2 .. layers.3\nstage 3 of 4: layers.5 .. output\n" in printed
    assert not list(tmp_path.iterdir())
