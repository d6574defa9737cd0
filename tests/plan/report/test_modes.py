"""The choices of modes that a plan compares, and the table of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from tests.trace.traces import model_inventory
from titan_launch.config.job import JobConfig
from titan_launch.config.sections.parallelism import ActivationCheckpointConfig
from titan_launch.core.errors import ConfigError
from titan_launch.plan.auto_mode import resolve
from titan_launch.plan.communication import Traffic
from titan_launch.plan.hardware import GIB, Hardware, hardware_of
from titan_launch.plan.job import Choice
from titan_launch.plan.layout import plan_layout
from titan_launch.plan.memory.ledger import Category, Footprint, Ledger, StepPoint
from titan_launch.plan.report.modes import ComparedJob, ModeComparison, compare, estimate_reserved, judge
from titan_launch.plan.report.table import describe_comparison, format_categories, format_comparison, format_legend
from titan_launch.plan.step_time import Flops
from titan_launch.trace.recorder import recorded_engine

ARGS = {"dim": 32, "n_layers": 6, "n_heads": 4, "n_kv_heads": 2, "hidden_dim": 48, "vocab_size": 61}
CHAIN = ("tok_embeddings", *(f"layers.{index}" for index in range(6)), "norm", "output")
PEAK = {"metrics": {"peak_tflops_per_device": 1e-3}}


def make_job(**sections: dict[str, Any]) -> JobConfig:
    job: dict[str, dict[str, Any]] = {
        "job": {"device": "cpu"},
        "model": {"args": ARGS},
        "training": {"seq_len": 16, "local_batch_size": 1, "global_batch_size": 8},
        "planner": {"memory_gib": 10, "intra_node_gb_per_s": 1e-3, "inter_node_gb_per_s": 1e-3},
    }
    return JobConfig.model_validate({**job, **sections})


def footprint(gib: float) -> Footprint:
    ledger = Ledger()
    ledger.enter(StepPoint(0, "backward", "layers.1"))
    ledger.allocate(int(gib * GIB), Category.ACTIVATIONS)
    return ledger.footprint()


ACCUMULATION = {"immediate": 1, "deferred_all_reduce": 1, "deferred": 3}
CHECKPOINTING = {"none": 6, "selective": 3, "full": 1}


def predict(choice: Choice) -> Footprint:
    """Return a footprint in GiB: 1 or 3 for gradients, 2 for unsharded parameters, and 6, 3 or 1 for activations."""
    unsharded = 2 if choice.accumulation.keep_params_unsharded else 0
    return footprint(
        ACCUMULATION[choice.accumulation.mode] + unsharded + CHECKPOINTING[choice.activation_checkpoint.mode]
    )


class PredictedBy:
    """An engine with given footprints and traffic."""

    def __init__(self, footprint: Callable[[Choice], Footprint], traffic: Callable[[Choice], Traffic]):
        self._footprint, self.traffic = footprint, traffic

    def __call__(self, choice: Choice) -> Footprint:
        return self._footprint(choice)

    def seconds(self, choice: Choice) -> None:
        return None


def flops_of(checkpointing: ActivationCheckpointConfig) -> Flops:
    """Return FLOPs that grow with activation checkpointing."""
    return Flops({"none": 300, "selective": 350, "full": 400}[checkpointing.mode] * 10**6)


def compared(
    config: JobConfig, ranks: int = 2, only_own: bool = False, records: bool = False
) -> tuple[ModeComparison, Hardware]:
    """Compare the modes of a job. `records`: True to record the traffic, which is 0 otherwise."""
    layout, hardware = plan_layout(config.parallelism, config.training, ranks), hardware_of(config, ranks)
    inventory = replace(model_inventory(config), pipeline_order=CHAIN)
    traffic = recorded_engine(config, layout, "cpu").traffic if records else lambda choice: Traffic()
    subject = ComparedJob(inventory, flops_of, PredictedBy(predict, traffic))
    return compare(config, layout, subject, hardware, only_own), hardware


def auto(**planner: float) -> dict[str, dict[str, Any]]:
    return {"gradient_accumulation": {"mode": "auto"}, "planner": planner}


def choice_label(accumulation: str, checkpointing: str) -> str:
    return f"gradient accumulation {accumulation}, activation checkpointing {checkpointing}"


def labels(comparison: ModeComparison) -> list[str]:
    """Return the labels of the rows without activation checkpointing."""
    rows = [row for row in comparison.rows if row.choice.activation_checkpoint.mode == "none"]
    return [row.choice.accumulation.label for row in rows]


UNSHARDED = " with unsharded parameters"
FOUR = ["immediate", "deferred", f"immediate{UNSHARDED}", f"deferred{UNSHARDED}"]


def test_every_accumulation_mode_is_compared_under_every_activation_checkpointing_mode() -> None:
    comparison, _ = compared(make_job())
    assert labels(comparison) == FOUR and len(comparison.rows) == 12
    assert [row.choice.label for row in comparison.rows if row.is_own] == [choice_label("immediate", "none")]


def test_replicas_add_rows_for_deferred_all_reduce() -> None:
    comparison, _ = compared(make_job(parallelism={"data_parallel_replicate_degree": 2}), 4)
    assert "deferred_all_reduce" in labels(comparison) and f"deferred_all_reduce{UNSHARDED}" in labels(comparison)


def test_equivalent_modes_share_a_row_under_the_name_of_the_jobs_mode() -> None:
    one_microbatch = {"seq_len": 16, "local_batch_size": 4}
    comparison, _ = compared(make_job(training=one_microbatch, gradient_accumulation={"mode": "deferred"}))
    assert labels(comparison) == ["deferred", f"immediate{UNSHARDED}"]
    assert labels(compared(make_job(training=one_microbatch))[0]) == ["immediate", f"immediate{UNSHARDED}"]
    assert labels(compared(make_job(), ranks=1)[0]) == ["immediate", f"immediate{UNSHARDED}"]  # it spares casts
    assert labels(compared(make_job(precision={"param_dtype": "float32"}), ranks=1)[0]) == ["immediate"]


def test_a_configured_activation_checkpointing_mode_has_its_row() -> None:
    own = {"mode": "selective", "selective_ac_option": 2}
    comparison, _ = compared(make_job(activation_checkpoint=own))
    assert [row.choice.label for row in comparison.rows if row.is_own] == [
        choice_label("immediate", "selective (1 of 2 blocks)")
    ]
    assert len(comparison.rows) == 16
    assert len(compared(make_job(activation_checkpoint=own), only_own=True)[0].rows) == 1


def test_modes_that_a_job_file_could_not_set_are_not_compared_and_the_reason_is_shown() -> None:
    comparison, _ = compared(make_job(precision={"reduce_dtype": "bfloat16"}))
    assert labels(comparison) == ["immediate", f"immediate{UNSHARDED}"]
    (note,) = comparison.notes
    assert note.startswith("gradient accumulation deferred is not compared: precision.reduce_dtype = bfloat16")
    assert note in format_comparison(comparison)
    freed = {"rules": [{"type": "RMSNorm", "reshard_after_forward": True}]}
    assert labels(compared(make_job(precision=freed))[0]) == ["immediate", "deferred"]


def test_modes_that_a_schedule_with_split_backward_does_not_support_are_not_compared() -> None:
    split = {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "InterleavedZeroBubble"}
    two_microbatches = {"seq_len": 16, "local_batch_size": 1, "global_batch_size": 4}
    job = make_job(parallelism=split, training=two_microbatches, **auto(memory_gib=10))
    comparison, hardware = compared(job, ranks=4)
    assert [row.choice.label for row in comparison.rows] == [
        choice_label(f"deferred{UNSHARDED}", "none"),
        choice_label(f"deferred{UNSHARDED}", "full"),
    ]
    assert any(
        "selective (per operation) is not compared: frees each saved result" in note for note in comparison.notes
    )
    coarse = make_job(parallelism=split, precision={"reduce_dtype": "bfloat16"}, **auto(memory_gib=10))
    with pytest.raises(
        ConfigError,
        match=r"no choice of modes is possible: .* immediate is not compared.*; .* deferred is not compared",
    ):
        resolve(compared(coarse, ranks=4)[0], hardware)


@pytest.mark.parametrize(
    ("planner", "last_that_fits"), [({}, 7.0), ({"margin_gib": 0}, 7.4), ({"margin_gib": 1.2}, 6.4)]
)
def test_verdicts_are_fits_tight_and_does_not_fit(planner: dict[str, float], last_that_fits: float) -> None:
    """Reserved memory of 9.4 GiB (7 active) with the default margin of a GPU (0.5 GiB here) fits in 10 GiB."""
    assumed = {"memory_gib": 10, "overhead_gib": 1, "fragmentation": 0.2, **planner}
    hardware = hardware_of(make_job(planner=assumed, job={"device": "cuda"}), 8)
    sizes = (last_that_fits, last_that_fits + 0.2, 8.9, 9.1)
    verdicts = [judge(footprint(gib), gib * 1.2 * GIB + GIB, hardware) for gib in sizes]
    assert verdicts == ["fits", "tight", "tight", "does not fit"]


def test_the_default_margin_is_a_share_of_the_limit() -> None:
    assert hardware_of(make_job(planner={"device": "h100-80gb"}), 8).margin_gib == pytest.approx(0.05 * 79.1)
    assert hardware_of(make_job(planner={"memory_gib": 0.1}), 8).margin_gib == pytest.approx(0.005)


def test_the_table_marks_the_rows_of_the_job_and_the_choice() -> None:
    config = make_job(**auto(memory_gib=12))
    comparison, hardware = compared(config, records=True)
    resolution = resolve(comparison, hardware)
    header, *lines = format_comparison(comparison, verbose=True, best=resolution.row).splitlines()
    marks = [line[:2] for line in lines]
    assert marks == ["> ", "> ", "> ", ">*", *["  "] * 8]
    assert header.split("  ")[2].strip() == "activation checkpointing"
    assert "backward of layers.1 in microbatch 1" in lines[0] and " fits " in lines[0]
    legend = format_legend(comparison, verbose=True, best="chosen")
    titles = [title for title in header.split("  ") if title.strip()]
    assert len(titles) > 8 and all(f"\n{title.strip()}: " in legend for title in titles)
    shorter = format_comparison(comparison).splitlines()[0]
    assert "peak at" in header and "peak at" not in shorter and "peak at" not in format_legend(comparison)
    assert "11.00 activations" in format_categories(comparison)


def test_json_rows_hold_modes_memory_traffic_and_times() -> None:
    comparison, _ = compared(make_job(**PEAK), records=True)
    row: Mapping[str, Any] = describe_comparison(comparison, None)[1]
    assert row["gradient_accumulation"] == {"mode": "deferred", "keep_params_unsharded": False}
    assert row["active_bytes"] == 9 * GIB == row["active_bytes_by_category"]["activations"]
    assert row["traffic_per_step"]["collectives"] == {"all_gathers": 52, "reduce_scatters": 8, "all_reduces": 0}
    low, high = row["step_seconds_estimated"]
    assert low == max(row["compute_seconds_estimated"], row["communication_seconds_estimated"]) < high
    assert sum(row["link_traffic_bytes_per_rank"].values()) > 0 and row["flops_per_rank"] > 0


def test_cuda_streams_do_not_share_reserved_memory() -> None:
    """1 GiB of activations is freed when 3 GiB are all-gathered, but the allocator reserves it for the compute
    stream."""
    ledger = Ledger()
    ledger.enter(StepPoint(0, "forward", ""))
    ledger.allocate(GIB, Category.ACTIVATIONS)
    ledger.free(GIB, Category.ACTIVATIONS)
    ledger.allocate(3 * GIB, Category.ALL_GATHER)
    gpu = hardware_of(make_job(planner={"device": "h100-80gb", "fragmentation": 0.5, "overhead_gib": 2}), 1)
    assert estimate_reserved(ledger.footprint(), gpu) == (4 * 1.5 + 2) * GIB
    assert estimate_reserved(ledger.footprint(), hardware_of(make_job(), 1)) == 3 * GIB
