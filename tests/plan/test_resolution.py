"""Which mode `auto` takes, and what is said where none will do."""

from __future__ import annotations

import pytest

from tests.plan.test_comparison import PEAK, auto, compared, make_job, predict
from titan_launch.config.job import JobConfig
from titan_launch.core.errors import ConfigError
from titan_launch.plan.activation_checkpoint import checkpointed_modules
from titan_launch.plan.auto_mode import Resolution, resolve, resolve_auto, suggest
from titan_launch.plan.hardware import hardware_of
from titan_launch.plan.job import configured_choice
from titan_launch.plan.layout import plan_layout
from titan_launch.plan.memory.analytic.engine import model_inventory
from titan_launch.plan.report.table import format_assumptions, format_comparison
from titan_launch.plan.step_time import flops_of_model
from titan_launch.plan.types import Inventory
from titan_launch.plan.units.order import plan_resharding


def resolved(config: JobConfig, ranks: int = 2) -> Resolution:
    layout, inventory = plan_layout(config.parallelism, config.training, ranks), model_inventory(config)
    flops = flops_of_model(config.model, 16, inventory.blocks)
    return resolve_auto(config, layout, inventory, flops, hardware_of(config, ranks), predict)


@pytest.mark.parametrize(
    ("memory", "expected"),
    [(12, "deferred, kept"), (10, "immediate, kept"), (9.5, "immediate, kept"), (8, "immediate")],
)
def test_auto_takes_the_least_traffic_of_what_fits(memory: float, expected: str) -> None:
    """Keeping parameters saves more here than deferring: 7 of a block's 8 all-gathers in bfloat16 (3 of 4 in the last
    block) against 3 of 4 reduce-scatters in float32."""
    resolution = resolved(make_job(**auto(memory_gib=memory)))
    choice = configured_choice(resolution.config)
    assert (choice.accumulation_label, choice.recomputation.mode) == (expected, "none")
    assert f"fit into {memory:g} GiB (planner.memory_gib)" in resolution.reason


def test_auto_keeps_to_what_the_job_says() -> None:
    not_kept = {"mode": "auto", "keep_params_unsharded": False}
    sections = {**auto(memory_gib=12), "gradient_accumulation": not_kept, "activation_checkpoint": {"mode": "full"}}
    assert configured_choice(resolved(make_job(**sections)).config).label == "deferred / full"


def test_what_is_tight_is_never_chosen() -> None:
    """Deferred, kept: 11 GiB active under a limit of 12, but 13.2 reserved."""
    resolution = resolved(make_job(**auto(memory_gib=12, fragmentation=0.2)))
    assert resolution.row.choice.accumulation_label == "immediate, kept"


def test_auto_recomputation_looks_for_the_shortest_step_first() -> None:
    both = {"activation_checkpoint": {"mode": "auto"}, "gradient_accumulation": {"mode": "auto"}}
    roomy = resolved(make_job(**both, **PEAK, planner={"memory_gib": 8, "intra_node_gb_per_s": 100}))
    assert roomy.row.choice.label == "immediate / none" and "the lowest bound of a step's time" in roomy.reason
    slow_links = resolved(make_job(**both, **PEAK, planner={"memory_gib": 8, "intra_node_gb_per_s": 1e-5}))
    assert slow_links.row.choice.label == "deferred, kept / selective op"
    fixed = {"activation_checkpoint": {"mode": "auto"}, "gradient_accumulation": {"mode": "deferred"}}
    assert resolved(make_job(**fixed, planner={"memory_gib": 8})).row.choice.label == "deferred / selective op"


def test_ties_in_time_are_called_so() -> None:
    sections = {**auto(memory_gib=12, intra_node_gb_per_s=100), **PEAK}
    assert resolved(make_job(**sections)).reason.endswith("; in time a tie with the others that fit")


def test_where_nothing_fits_the_error_has_the_table_and_remedies() -> None:
    with pytest.raises(ConfigError) as caught:
        resolved(make_job(**auto(memory_gib=1.5)))
    text = str(caught.value)
    assert "gradient_accumulation.mode: none of 4 choices fits into 1.5 GiB (planner.memory_gib)" in text
    assert "immediate / none, would take 7" in text and "local_batch_size" in text
    assert text.count("does not fit") == 12


def test_what_fits_only_with_another_recomputation_is_named() -> None:
    with pytest.raises(ConfigError, match=r"what fits: immediate / selective op, immediate / full"):
        resolved(make_job(**auto(memory_gib=4)))


def test_tight_ones_are_named_too() -> None:
    with pytest.raises(ConfigError, match=r"tight ones may run, if the job asks for them: immediate / none;"):
        resolved(make_job(**auto(memory_gib=7.5, fragmentation=0.2)))


def test_without_a_limit_auto_has_nothing_to_go_by() -> None:
    sections = {**auto(), "job": {"device": "cuda"}}
    with pytest.raises(ConfigError, match=r"set planner\.device or planner\.memory_gib"):
        resolved(make_job(**sections))
    comparison, hardware = compared(make_job(job={"device": "cuda"}, planner={}))
    assert {row.verdict for row in comparison.rows} == {None} and suggest(comparison, hardware) is None
    assert "verdict" not in format_comparison(comparison, hardware)
    assert "--memory-gib" in format_assumptions(hardware, flops_of_model(make_job().model, 16, ()), "analytic")


def test_a_job_that_leaves_nothing_open_is_told_what_auto_would_be() -> None:
    comparison, hardware = compared(make_job(planner={"memory_gib": 12}))
    resolution = resolve(comparison, hardware)
    assert configured_choice(resolution.config).label == "immediate / none"
    suggestion = suggest(comparison, hardware)
    assert suggestion is not None and suggestion.startswith("deferred, kept / none: the least traffic of the 4 of 4")


def test_nothing_reads_an_undecided_mode() -> None:
    config = make_job(gradient_accumulation={"mode": "auto"}, activation_checkpoint={"mode": "auto"})
    with pytest.raises(ValueError, match="resolve it first"):
        configured_choice(config)
    with pytest.raises(ValueError, match="resolve `auto` first"):
        plan_resharding(config.parallelism, config.gradient_accumulation)
    with pytest.raises(ValueError, match="resolve `auto` first"):
        checkpointed_modules(Inventory((), ("layers.0",)), config.activation_checkpoint)


def test_traffic_between_nodes_counts_too() -> None:
    resolution = resolved(make_job(**auto(memory_gib=12, gpus_per_node=1)))
    assert resolution.row.wire.within == 0 and resolution.row.choice.accumulation_label == "deferred, kept"
