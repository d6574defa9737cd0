"""`plan` shows what a run carries out and records."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from tests.distributed import run_ranks
from tests.train.jobs import run_job, sharded_model, tiny_job
from titan_launch.commands.plan import PlanOptions, print_plan
from titan_launch.config.job import JobConfig
from titan_launch.core.errors import ConfigError, UserError
from titan_launch.parallel.fsdp import fsdp_modules

JSON, TEXT, VERBOSE = PlanOptions(as_json=True), PlanOptions(), PlanOptions(verbose=True)

RULES: list[dict[str, Any]] = [
    {"type": "RMSNorm", "param_dtype": "float32", "storage_dtype": "float32"},
    {"match": "layers.1.attention.w*", "param_dtype": "float32", "unit_per": "module"},
]


def test_a_run_records_the_units_that_plan_shows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = tiny_job(tmp_path, precision={"param_dtype": "bfloat16", "rules": RULES}, training={"steps": 1})
    run_ranks(run_job, 2, job)
    recorded = json.loads((tmp_path / "tiny" / "units.json").read_text())
    print_plan(JobConfig.model_validate(job), 2, lambda key: f"precision.rules.{key[-1]}", JSON)
    assert json.loads(capsys.readouterr().out)["units"] == recorded
    assert {unit["location"] for unit in recorded} == {None, "precision.rules.0", "precision.rules.1"}


def wrapped_modules(job: dict[str, Any]) -> set[str]:
    model = sharded_model(JobConfig.model_validate(job), 16)
    wrapped = set(fsdp_modules(model))
    return {path for path, module in model.named_modules() if module in wrapped}


def test_the_planned_modules_are_those_that_are_wrapped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = tiny_job(tmp_path, precision={"param_dtype": "bfloat16", "rules": RULES})
    print_plan(JobConfig.model_validate(job), 1, str, JSON)
    units = json.loads(capsys.readouterr().out)["units"]
    assert run_ranks(wrapped_modules, 1, job) == [{path for unit in units for path in unit["modules"]}]


def test_the_text_shows_layout_and_microbatches(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = tiny_job(tmp_path, parallelism={"data_parallel_replicate_degree": 2}, training={"global_batch_size": 16})
    print_plan(JobConfig.model_validate(job), 4, str, TEXT)
    text = capsys.readouterr().out
    assert text.startswith("Fits: about ")
    assert "4 = 2 replicas x 2 shards" in text and "16 samples = 4 ranks x 1 sample x 4 microbatches" in text
    assert "FSDP2 units" not in text
    print_plan(JobConfig.model_validate(job), 4, str, VERBOSE)
    text = capsys.readouterr().out
    assert re.search(r"^collectives: \d+ all-gathers .* all-reduces per step of 4 microbatches$", text, flags=re.M)


def test_kernels_and_float8_that_differ_from_the_default_have_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = tiny_job(tmp_path, precision={"param_dtype": "bfloat16"}, job={"device": "auto"})
    print_plan(JobConfig.model_validate(job), 1, str, TEXT)
    assert not any(line.startswith(("kernels:", "float8:")) for line in capsys.readouterr().out.splitlines())
    job["kernels"] = {"attention": "cudnn", "float32_precision": "tf32", "bf16_reduced_precision_reduction": False}
    job["float8"] = {"enable": True, "recipe": "tensorwise", "all_gather": True, "modules": ["layers.*.attention.w?"]}
    print_plan(JobConfig.model_validate(job), 1, str, TEXT)
    wanted = 'attention = "cudnn", float32_precision = "tf32", bf16_reduced_precision_reduction = false'
    layers = ", ".join(f"2 x layers.*.attention.{name}" for name in ("wq", "wk", "wv", "wo"))
    lines = [line.partition(":") for line in capsys.readouterr().out.splitlines()]
    values = {name: value.strip() for name, _, value in lines}
    assert values["float8"] == f"tensorwise, all-gathers in 8 bits: {layers}" and values["kernels"] == wanted


class Whitened(nn.BatchNorm1d):
    """A BatchNorm that replaces PyTorch's forward."""

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, channels) to the same shape."""
        return x - x.mean(0)


class WithoutBlocks(nn.Module):
    """A model without a ModuleList and with a BatchNorm that cannot be synchronized."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = Whitened(4)

    def forward(self, tokens: Tensor) -> Tensor:
        raise NotImplementedError


def test_plan_refuses_settings_that_do_not_fit_the_model(tmp_path: Path) -> None:
    model = {"name": f"{__name__}:WithoutBlocks", "args": {}}
    for sections, key in (
        ({"batchnorm": {"statistics": "synchronized"}}, "batchnorm.statistics: norm is a Whitened"),
        ({"activation_checkpoint": {"mode": "full"}}, "activation_checkpoint.mode: needs blocks"),
    ):
        job = {**tiny_job(tmp_path, **sections), "model": model}
        with pytest.raises(ConfigError, match=key):
            print_plan(JobConfig.model_validate(job), 1, str, TEXT)


def test_synchronized_statistics_have_their_own_collectives(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    batchnorm = {"statistics": "synchronized"}
    job = tiny_job(tmp_path, model={"args": {"norm": "batchnorm"}}, batchnorm=batchnorm)
    print_plan(JobConfig.model_validate(job), 4, str, VERBOSE)
    assert "synchronized BatchNorm: 5 all-gathers + 5 all-reduces more per microbatch" in capsys.readouterr().out
    print_plan(JobConfig.model_validate(job), 1, str, VERBOSE)
    assert "synchronized" not in capsys.readouterr().out


def test_traffic_of_a_traced_model_is_that_counted_by_the_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Layers that run twice in a forward are all-gathered for each run. The unit table does not know the number of
    runs."""
    job = tiny_job(tmp_path, training={"global_batch_size": 4})
    calls = {}
    for twice in (False, True):
        job["model"] = {"name": "tests.trace.models:Chain", "args": {"n_layers": 2, "twice": twice}}
        print_plan(JobConfig.model_validate(job), 4, str, JSON)
        table = json.loads(capsys.readouterr().out)
        calls[twice] = table["collectives_per_step"]
        assert any("counted" in note for note in table["notes"]) == twice
    # The second run of the layers all-gathers the first layer in forward and in backward. The last layer is unsharded
    # after forward, so the second run all-gathers it only in backward.
    assert calls[True]["all_gathers"] == calls[False]["all_gathers"] + 2 + 1


TENSOR: dict[str, Any] = {"parallelism": {"tensor_parallel_degree": 2}, "model": {"args": {"vocab_size": 64}}}


def test_plan_traces_models_that_the_analytic_engine_does_not_support(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = JobConfig.model_validate(tiny_job(tmp_path, **TENSOR))
    with pytest.raises(
        UserError, match=r"does not support parallelism\.tensor_parallel_degree = 2; use --engine trace"
    ):
        print_plan(config, 4, str, PlanOptions(engine="analytic"))
    print_plan(config, 4, str, PlanOptions(only_own=True, verbose=True))
    shown = capsys.readouterr()
    assert "does not support parallelism.tensor_parallel_degree = 2; the job is traced" in shown.err
    assert "  tensor parallel (GiB)" in shown.out and "  pipeline (GiB)" not in shown.out
    assert re.search(r"memory engine: +trace,", shown.out)


def test_auto_is_resolved_for_the_pipeline_rank_with_the_highest_peak_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last rank decides, because it has the logits. Four ranks share the FLOPs, however they divide the work."""
    sections: dict[str, Any] = {
        "parallelism": {"pipeline_parallel_degree": 2},
        "gradient_accumulation": {"mode": "auto", "keep_params_unsharded": False},
        "planner": {"memory_gib": 1.0},
    }
    job = tiny_job(tmp_path, **sections)
    print_plan(JobConfig.model_validate(job), 4, str, PlanOptions(only_own=True, as_json=True))
    planned = json.loads(capsys.readouterr().out)
    assert planned["resolved"]["gradient_accumulation"]["mode"] == "deferred"
    row = next(row for row in planned["rows"] if row["is_chosen"])
    assert row["pipeline_rank"] == 1 and row["traffic_per_step"]["pipeline"]["calls"] == 2
    whole = tiny_job(tmp_path, gradient_accumulation=sections["gradient_accumulation"], planner=sections["planner"])
    print_plan(JobConfig.model_validate(whole), 4, str, PlanOptions(only_own=True, as_json=True))
    alone = json.loads(capsys.readouterr().out)
    assert row["flops_per_rank"] == alone["rows"][0]["flops_per_rank"]
