"""`plan` shows what a run carries out and records."""

from __future__ import annotations

import json
import re
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import tomli
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from tests.distributed import run_command, run_ranks
from tests.train.jobs import run_job, sharded_model, tiny_job
from titan_launch.cli import parse_arguments
from titan_launch.commands import plan
from titan_launch.commands.plan import print_plan
from titan_launch.config.job import JobConfig
from titan_launch.core.errors import ConfigError, UserError
from titan_launch.core.files import CACHE_VARIABLE
from titan_launch.plan.hardware import GIB


def plan_options(*options: str) -> Namespace:
    """Return the arguments of `plan` with these options. (The tests give the job itself.)"""
    return parse_arguments(["plan", "--config", "job.toml", *options])


JSON, TEXT = plan_options("--json"), plan_options()
OWN = ("--rows", "own")
OWN_JSON, OWN_TEXT, OWN_VERBOSE = plan_options(*OWN, "--json"), plan_options(*OWN), plan_options(*OWN, "--verbose")
"""Options without rows of other modes, which would have to be recorded."""

RULES: list[dict[str, Any]] = [
    {"type": "RMSNorm", "param_dtype": "float32", "storage_dtype": "float32"},
    {"match": "layers.1.attention.w*", "param_dtype": "float32", "unit_per": "module"},
]


def test_a_run_records_the_units_that_plan_shows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = tiny_job(tmp_path, precision={"param_dtype": "bfloat16", "rules": RULES}, training={"steps": 1})
    run_ranks(run_job, 2, job)
    recorded = json.loads((tmp_path / "tiny" / "units.json").read_text())
    print_plan(JobConfig.model_validate(job), 2, lambda key: f"precision.rules.{key[-1]}", OWN_JSON)
    assert json.loads(capsys.readouterr().out)["units"] == recorded
    assert {unit["location"] for unit in recorded} == {None, "precision.rules.0", "precision.rules.1"}


def wrapped_modules(job: dict[str, Any]) -> set[str]:
    model = sharded_model(JobConfig.model_validate(job), 16)
    wrapped = {module for module in model.modules() if isinstance(module, FSDPModule)}
    return {path for path, module in model.named_modules() if module in wrapped}


def test_the_planned_modules_are_those_that_are_wrapped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = tiny_job(tmp_path, precision={"param_dtype": "bfloat16", "rules": RULES})
    print_plan(JobConfig.model_validate(job), 1, str, OWN_JSON)
    units = json.loads(capsys.readouterr().out)["units"]
    assert run_ranks(wrapped_modules, 1, job) == [
        {path for unit in units if unit["placement"] != "in place" for path in unit["modules"]}
    ]


def test_the_text_shows_layout_and_microbatches(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = tiny_job(tmp_path, parallelism={"data_parallel_replicate_degree": 2}, training={"global_batch_size": 16})
    print_plan(JobConfig.model_validate(job), 4, str, OWN_TEXT)
    text = capsys.readouterr().out
    assert text.startswith("Fits: about ")
    assert "4 = 2 replicas x 2 shards" in text and "16 samples = 4 ranks x 1 sample x 4 microbatches" in text
    assert "FSDP2 units" not in text
    print_plan(JobConfig.model_validate(job), 4, str, OWN_VERBOSE)
    text = capsys.readouterr().out
    assert re.search(r"^collectives: \d+ all-gathers .* all-reduces per step of 4 microbatches$", text, flags=re.M)


def test_the_largest_batch_that_fits_is_planned(tmp_path: Path) -> None:
    (tmp_path / "job.json").write_text(json.dumps(tiny_job(tmp_path)))
    command = ["plan", "--config=job.json", "--world-size=2", "--memory-gib=1", *OWN, "--json", "--max-batch"]
    status, printed, reported = run_command(command, tmp_path)
    assert status == 0, reported
    assert json.loads(printed)["layout"]["local_batch_size"] == 2  # of 4 samples on two ranks


def test_kernels_and_float8_that_differ_from_the_default_have_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = tiny_job(tmp_path, precision={"param_dtype": "bfloat16"}, job={"device": "auto"})
    print_plan(JobConfig.model_validate(job), 1, str, OWN_TEXT)
    assert not any(line.startswith(("kernels:", "float8:")) for line in capsys.readouterr().out.splitlines())
    job["kernels"] = {"attention": "cudnn", "float32_precision": "tf32", "bf16_reduced_precision_reduction": False}
    job["float8"] = {"enable": True, "recipe": "tensorwise", "all_gather": True, "modules": ["layers.*.attention.w?"]}
    print_plan(JobConfig.model_validate(job), 1, str, OWN_TEXT)
    wanted = 'attention = "cudnn", float32_precision = "tf32", bf16_reduced_precision_reduction = false'
    layers = ", ".join(f"2 x layers.*.attention.{name}" for name in ("wq", "wk", "wv", "wo"))
    lines = [line.partition(":") for line in capsys.readouterr().out.splitlines()]
    values = {name: value.strip() for name, _, value in lines}
    assert values["float8"] == f"tensorwise, all-gathers in 8 bits: {layers}" and values["kernels"] == wanted


def plan_of_experts(
    capsys: pytest.CaptureFixture[str], degree: int, n_layers: int = 48, **planner: Any
) -> dict[str, Any]:
    """Return the plan of Qwen3-MoE 30B-A3B on 16 GPUs, on two nodes."""
    job: dict[str, Any] = {
        "model": {"name": "qwen3_moe", "flavor": "30B-A3B", "args": {"n_layers": n_layers}},
        "data": {"kind": "synthetic", "vocab_size": 61},
        "training": {"seq_len": 4096, "local_batch_size": 1, "global_batch_size": 32},
        "parallelism": {"expert_parallel_degree": degree},
        "planner": {"device": "h100-80gb", **planner},
    }
    print_plan(JobConfig.model_validate(job), 16, str, OWN_JSON)
    plan: dict[str, Any] = json.loads(capsys.readouterr().out)
    return plan


def test_the_plan_of_a_mixture(capsys: pytest.CaptureFixture[str]) -> None:
    """The published numbers are 30.5 and 3.3 billion parameters. 2 microbatches have 48 layers with 5 all-to-alls, in
    which each rank has 4,096 x 8 rows of 2,048 bf16 numbers, and keeps a sixteenth."""
    plan = plan_of_experts(capsys, 16)
    assert (plan["parameters"], plan["active_parameters"]) == (30_532_122_624, 3_353_032_704)
    assert plan["engine"] == "replay" and "the busiest rank receives 32,768 rows" in plan["expert_load"]
    (row,) = plan["rows"]
    rows, counts = 4 * 32768 * 2048 * 2, 128 * 8
    sent = 2 * 48 * (rows + counts) * 15 // 16
    assert row["traffic_per_step"]["expert"] == {"calls": 2 * 48 * 5, "sent_bytes": sent}
    links = row["link_traffic_bytes_per_rank"]
    assert (links["experts_within_node"], links["experts_across_nodes"]) == (sent * 7 // 15, sent * 8 // 15)
    assert links["across_nodes"] > links["experts_across_nodes"]
    (alone,) = plan_of_experts(capsys, 1)["rows"]
    assert alone["traffic_per_step"]["expert"]["calls"] == 0 and alone["active_bytes"] > row["active_bytes"]


def test_a_stated_load_of_experts_changes_memory_traffic_and_time(capsys: pytest.CaptureFixture[str]) -> None:
    (uniform,) = plan_of_experts(capsys, 4, 2)["rows"]
    plan = plan_of_experts(capsys, 4, 2, expert_load=2.0)
    (unequal,) = plan["rows"]
    assert plan["expert_load"].startswith("2 x the mean") and "receives 65,536 rows" in plan["expert_load"]
    for name in ("active_bytes", "compute_seconds_estimated"):
        assert unequal[name] > uniform[name]
    sent = [row["link_traffic_bytes_per_rank"]["experts_within_node"] for row in (uniform, unequal)]
    assert sent[1] / sent[0] == pytest.approx(1.5, rel=1e-4)  # results and gradients of tokens, of four all-to-alls
    assert unequal["flops_per_rank"] == uniform["flops_per_rank"]
    limited = plan_of_experts(capsys, 4, 2, expert_load=100.0)
    assert limited["expert_load"].startswith("4 x the mean (planner.expert_load = 100, limited to 4 ranks): ")
    (all_on_one,) = limited["rows"]
    assert all_on_one == plan_of_experts(capsys, 4, 2, expert_load=4.0)["rows"][0]


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
        ({"optimizer": {"param_groups": [{"match": "nothing.*"}]}}, "param_groups.0.match: matches no trainable param"),
        (
            {"optimizer": {"param_groups": [{"match": "nothing.*"}]}, "training": {"local_batch_size": "auto"}},
            "matches no trainable param",
        ),
    ):
        job = {**tiny_job(tmp_path, **sections), "model": model}
        with pytest.raises(ConfigError, match=key):
            print_plan(JobConfig.model_validate(job), 1, str, TEXT)


def test_synchronized_statistics_have_their_own_collectives(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    batchnorm = {"statistics": "synchronized"}
    job = tiny_job(tmp_path, model={"args": {"norm": "batchnorm"}}, batchnorm=batchnorm)
    print_plan(JobConfig.model_validate(job), 4, str, OWN_VERBOSE)
    assert "synchronized BatchNorm adds 5 all-gathers + 5 all-reduces per microbatch" in capsys.readouterr().out
    print_plan(JobConfig.model_validate(job), 1, str, OWN_VERBOSE)
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
        print_plan(JobConfig.model_validate(job), 4, str, OWN_JSON)
        table = json.loads(capsys.readouterr().out)
        calls[twice] = table["collectives_per_step"]
    # The second run of the layers all-gathers the first layer in forward and in backward. The last layer is unsharded
    # after forward, so the second run all-gathers it only in backward.
    assert calls[True]["all_gathers"] == calls[False]["all_gathers"] + 2 + 1


TENSOR: dict[str, Any] = {"parallelism": {"tensor_parallel_degree": 2}, "model": {"args": {"vocab_size": 64}}}


def test_a_long_plan_names_the_shorter_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(plan, "_LONG", 0.0)
    for options in (TEXT, OWN_TEXT):
        print_plan(JobConfig.model_validate(tiny_job(tmp_path)), 2, str, options)
        assert ("--rows own is faster: it plans only the modes that the job sets" in capsys.readouterr().err) is (
            options is TEXT
        )


def test_a_plan_says_what_it_records(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    config = JobConfig.model_validate(tiny_job(tmp_path, **TENSOR))
    print_plan(config, 4, str, OWN_VERBOSE)
    shown = capsys.readouterr()
    assert shown.err == "recording a microbatch with activation checkpointing none\n"
    assert "  tensor parallel (GiB)" in shown.out and "  pipeline parallel (GiB)" not in shown.out
    assert re.search(r"memory engine: +replay,", shown.out)


def test_the_recommended_keys_are_toml_that_makes_the_job_the_recommended_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = tiny_job(tmp_path, training={"global_batch_size": 8}, planner={"memory_gib": 1.0})
    print_plan(JobConfig.model_validate(job), 2, str, TEXT)
    _, keys, *_ = capsys.readouterr().out.split("\n\n")
    tables = tomli.loads(keys)
    assert tables == {"gradient_accumulation": {"mode": "deferred", "keep_params_unsharded": True}}
    print_plan(JobConfig.model_validate({**job, **tables}), 2, str, TEXT)
    assert "Recommended (the modes of the job): gradient accumulation deferred with" in capsys.readouterr().out


def test_a_job_that_does_not_fit_gets_changes_with_which_it_fits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def plan(options: Namespace = JSON, **sections: Any) -> dict[str, Any]:
        job = JobConfig.model_validate(tiny_job(tmp_path, **sections))
        print_plan(job, 2, str, options)
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    sizes = {"seq_len": 64, "local_batch_size": 8, "global_batch_size": 16}
    planner = {"memory_gib": 1.0, "margin_gib": 0.0, "overhead_gib": 0.0}
    rows = plan(training=sizes, planner=planner)["rows"]
    planner["memory_gib"] = 0.8 * min(row["reserved_bytes_estimated"] for row in rows) / GIB
    refused = plan(training=sizes, planner=planner)
    fitting = [advice for advice in refused["advice"] if advice["fits"]]
    assert refused["recommended"] is None and fitting
    for advice in fitting:
        tables: dict[str, Any] = {"training": sizes, "planner": planner}
        for section, keys in tomli.loads("\n".join(advice["lines"])).items():
            tables[section] = {**tables.get(section, {}), **keys}
        (row,) = [row for row in plan(OWN_JSON, **tables)["rows"] if row["is_chosen"]]
        assert row["verdict"] == "fits", advice


@pytest.mark.slow
def test_the_number_of_ranks_that_suffices_is_planned_with_the_jobs_own_resharding(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The job reshards its parameters after forward only on several ranks."""

    def plan(ranks: int, memory_gib: float, options: Namespace) -> dict[str, Any]:
        sections: dict[str, Any] = {
            "model": {"args": {"n_layers": 4, "dim": 128, "hidden_dim": 512}},
            "planner": {"memory_gib": memory_gib, "margin_gib": 0.0, "overhead_gib": 0.0},
            "precision": {"rules": RULES[:1], "placement": "own_unit"},
            "compile": {"enable": True},
        }
        job = tiny_job(tmp_path, **sections)
        print_plan(JobConfig.model_validate(job), ranks, str, options)
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    (row,) = plan(2, 1.0, OWN_JSON)["rows"]
    refused = plan(1, 1.001 * row["reserved_bytes_estimated"] / GIB, plan_options(*OWN, "--json", "--advise"))
    assert refused["sufficient_ranks"] == 2
    almost = 0.99 * refused["rows"][0]["reserved_bytes_estimated"]
    advice = plan(1, almost / GIB, plan_options(*OWN, "--json", "--advise"))["advice"]
    assert advice and all(change["fits"] for change in advice)
    # A compiled part of a block cannot be checkpointed per operation.
    assert 'activation_checkpoint.mode = "selective"' not in [line for change in advice for line in change["lines"]]


def test_a_measurement_that_needs_more_host_memory_than_is_free_is_refused() -> None:
    job: dict[str, Any] = {
        "model": {"name": "llama3", "flavor": "405B"},
        "data": {"kind": "synthetic", "vocab_size": 61},
        "training": {"enable_cpu_offload": True},
        "activation_checkpoint": {"offload": True},
        "planner": {"device": "h100-80gb"},
    }
    keys = r"training\.enable_cpu_offload = true and activation_checkpoint\.offload = true"
    wanted = rf"--measure: needs about 6\d{{3}}\.\d GiB of host memory, .* for {keys}; .* GiB are free; plan without"
    with pytest.raises(UserError, match=wanted):
        print_plan(JobConfig.model_validate(job), 1, str, plan_options(*OWN, "--measure"))


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
    print_plan(JobConfig.model_validate(job), 4, str, OWN_JSON)
    planned = json.loads(capsys.readouterr().out)
    assert planned["resolved"]["gradient_accumulation"]["mode"] == "deferred"
    row = next(row for row in planned["rows"] if row["is_chosen"])
    assert row["pipeline_rank"] == 1 and row["traffic_per_step"]["pipeline"]["calls"] == 2
    whole = tiny_job(tmp_path, gradient_accumulation=sections["gradient_accumulation"], planner=sections["planner"])
    print_plan(JobConfig.model_validate(whole), 4, str, OWN_JSON)
    alone = json.loads(capsys.readouterr().out)
    assert row["flops_per_rank"] == alone["rows"][0]["flops_per_rank"]
