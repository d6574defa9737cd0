"""The mode that `auto` chooses, and the error if no mode fits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.plan.report.test_modes import (
    ARGS,
    PEAK,
    UNSHARDED,
    auto,
    choice_label,
    compared,
    make_job,
)
from tests.trace.traces import model_inventory
from titan_launch.config.job import JobConfig
from titan_launch.core.errors import ConfigError
from titan_launch.plan.advice import advise
from titan_launch.plan.auto_mode import Resolution, largest_batch, recommend, remedies, resolve
from titan_launch.plan.hardware import GIB, hardware_of
from titan_launch.plan.job import configured_choice, with_local_batch_size, with_values
from titan_launch.plan.layout import Layout, plan_layout
from titan_launch.plan.module_selection import checkpointed_modules
from titan_launch.plan.report.modes import ModeComparison, Verdict
from titan_launch.plan.report.table import format_assumptions, format_comparison
from titan_launch.plan.types import Inventory
from titan_launch.plan.units.order import plan_resharding
from titan_launch.train.resolve_job import _least_memory


def resolved(config: JobConfig) -> Resolution:
    return resolve(*compared(config, records=True))


@pytest.mark.parametrize(
    ("memory", "expected"),
    [(12, f"deferred{UNSHARDED}"), (10, f"immediate{UNSHARDED}"), (9.5, f"immediate{UNSHARDED}"), (8, "immediate")],
)
def test_auto_takes_the_least_traffic_of_the_choices_that_fit(memory: float, expected: str) -> None:
    """Unsharded parameters save more here than deferring: 7 of a block's 8 all-gathers in bfloat16 (3 of 4 in the last
    block) against 3 of 4 reduce-scatters in float32."""
    resolution = resolved(make_job(**auto(memory_gib=memory)))
    choice = configured_choice(resolution.config)
    assert (choice.accumulation.label, choice.activation_checkpoint.mode) == (expected, "none")
    assert f"fit into {memory:g} GiB with the margin" in resolution.reason


def test_auto_chooses_only_among_modes_that_the_job_allows() -> None:
    resharded = {"mode": "auto", "keep_params_unsharded": False}
    sections = {**auto(memory_gib=12), "gradient_accumulation": resharded, "activation_checkpoint": {"mode": "full"}}
    assert configured_choice(resolved(make_job(**sections)).config).label == choice_label("deferred", "full")


def test_a_tight_choice_is_never_taken() -> None:
    """Deferred with unsharded parameters needs 11 GiB active below a limit of 12, but 13.2 GiB reserved."""
    resolution = resolved(make_job(**auto(memory_gib=12, fragmentation=0.2)))
    assert resolution.row.choice.accumulation.label == f"immediate{UNSHARDED}"


def test_auto_activation_checkpointing_looks_for_the_shortest_step_first() -> None:
    both = {"activation_checkpoint": {"mode": "auto"}, "gradient_accumulation": {"mode": "auto"}}
    roomy = resolved(make_job(**both, **PEAK, planner={"memory_gib": 8.5, "intra_node_gb_per_s": 100}))
    assert roomy.row.choice.label == choice_label("immediate", "none")
    assert "the shortest predicted step (~" in roomy.reason
    slow_links = resolved(make_job(**both, **PEAK, planner={"memory_gib": 8.5, "intra_node_gb_per_s": 1e-5}))
    assert slow_links.row.choice.label == choice_label(f"deferred{UNSHARDED}", "selective (per operation)")
    fixed = {"activation_checkpoint": {"mode": "auto"}, "gradient_accumulation": {"mode": "deferred"}}
    deferred = resolved(make_job(**fixed, planner={"memory_gib": 8}))
    assert deferred.row.choice.label == choice_label("deferred", "selective (per operation)")


def test_ties_in_step_time_are_reported() -> None:
    sections = {**auto(memory_gib=12, intra_node_gb_per_s=100), **PEAK}
    assert resolved(make_job(**sections)).reason.endswith(
        "; 3 other choices may be as fast, because the predicted step times overlap"
    )


def test_if_nothing_fits_the_error_has_the_table_and_remedies() -> None:
    comparison, hardware = compared(make_job(**auto(memory_gib=1.5)), records=True)
    with pytest.raises(ConfigError) as caught:
        resolve(comparison, hardware)
    text = str(caught.value)
    assert "gradient_accumulation.mode: none of 4 choices of modes fits into 1.5 GiB (planner.memory_gib), " in text
    assert "margin 0.075 GiB" in text
    assert f"the smallest ({choice_label('immediate', 'none')}) needs about 7 GiB" in text
    assert "more ranks to shard over" in text and "local_batch_size" not in text, "the microbatch has one sample"
    assert text.count("does not fit") == 12
    with pytest.raises(ConfigError, match=r"mode: the only choice of modes does not fit into 1\.5 GiB"):
        resolve(replace(comparison, rows=comparison.rows[:1]), hardware)


def test_a_job_that_fits_only_with_other_activation_checkpointing_names_it() -> None:
    with pytest.raises(
        ConfigError, match=r"these choices fit, .*: .* checkpointing selective \(per operation\); .* checkpointing full"
    ):
        resolved(make_job(**auto(memory_gib=4.5)))


def test_the_error_names_tight_choices() -> None:
    with pytest.raises(
        ConfigError, match=r"are tight .*, but you can set them in the job: gradient accumulation immediate, .* none;"
    ):
        resolved(make_job(**auto(memory_gib=7.5, fragmentation=0.2)))


def test_auto_without_a_memory_limit_is_an_error() -> None:
    sections = {**auto(), "job": {"device": "cuda"}}
    with pytest.raises(ConfigError, match=r"set planner\.device or planner\.memory_gib"):
        resolved(make_job(**sections))
    comparison, hardware = compared(make_job(job={"device": "cuda"}, planner={}))
    assert {row.verdict for row in comparison.rows} == {None} and recommend(comparison, hardware) is None
    assert "verdict" not in format_comparison(comparison)
    assert "--memory-gib" in format_assumptions(hardware, False, "replay", make_job())


def test_a_job_without_possible_modes_is_an_error() -> None:
    """The units of the rules leave no module of a block to compile."""
    leaves = ["layers.*.attention.wo", "layers.*.feed_forward.w2"]
    config = make_job(
        activation_checkpoint={"mode": "auto"},
        compile={"enable": True},
        precision={"placement": "own_unit", "rules": [{"match": leaves, "param_dtype": "float32"}]},
        training={"seq_len": 16, "local_batch_size": "auto", "global_batch_size": 8},
    )
    wanted = r"activation_checkpoint\.mode: no choice of modes is possible: .* none is not compared because the job is"
    hardware = hardware_of(config, 2)
    with pytest.raises(ConfigError, match=wanted):
        largest_batch(config, 2, hardware, lambda job, layout: compared(job, only_own=True)[0])
    one = with_local_batch_size(config, 1)
    with pytest.raises(ConfigError, match=wanted):
        _least_memory(one, plan_layout(one.parallelism, one.training, 2), model_inventory(one))


def test_a_job_without_auto_gets_a_recommendation() -> None:
    comparison, hardware = compared(make_job(planner={"memory_gib": 12}), records=True)
    resolution = resolve(comparison, hardware)
    assert configured_choice(resolution.config).label == choice_label("immediate", "none")
    best = recommend(comparison, hardware)
    assert best is not None and best.row.choice.label == choice_label(f"deferred{UNSHARDED}", "none")
    assert (
        best.reason.startswith(f"{best.row.choice.label}, because it has ")
        and "among the 12 of 12 choices" in best.reason
    )


def test_auto_never_uses_the_margin_for_a_shorter_step() -> None:
    """`deferred` with unsharded parameters has the shortest step, and 11 of 11.5 GiB; the default margin is 5 %."""
    sections = {**PEAK, "gradient_accumulation": {"mode": "auto"}, "activation_checkpoint": {"mode": "auto"}}
    limit = {"memory_gib": 11.5, "intra_node_gb_per_s": 1e-5}
    greedy = resolved(make_job(**sections, planner={**limit, "margin_gib": 0}))
    careful = resolved(make_job(**sections, planner=limit))
    assert greedy.row.footprint.peak_bytes == 11 * GIB > (11.5 - 0.575) * GIB >= careful.row.footprint.peak_bytes
    assert greedy.row.time.interval is not None and careful.row.time.interval is not None
    assert greedy.row.time.interval[0] <= careful.row.time.interval[0]


def test_an_unresolved_auto_mode_cannot_be_planned() -> None:
    config = make_job(gradient_accumulation={"mode": "auto"}, activation_checkpoint={"mode": "auto"})
    with pytest.raises(ValueError, match="resolve the mode first"):
        configured_choice(config)
    with pytest.raises(ValueError, match="resolve `auto` first"):
        plan_resharding(config.parallelism, config.gradient_accumulation)
    with pytest.raises(ValueError, match="resolve `auto` first"):
        checkpointed_modules(Inventory((), ("layers.0",)), config.activation_checkpoint)


def test_auto_weighs_traffic_between_nodes() -> None:
    resolution = resolved(make_job(**auto(memory_gib=12, gpus_per_node=1)))
    assert (
        resolution.row.link_traffic.within == 0 and resolution.row.choice.accumulation.label == f"deferred{UNSHARDED}"
    )


AUTO_BATCH = {"seq_len": 16, "local_batch_size": "auto", "global_batch_size": 8}


def test_a_deferring_job_may_fit_only_with_a_single_microbatch() -> None:
    config = make_job(gradient_accumulation={"mode": "deferred"}, training=AUTO_BATCH)

    def predict(job: JobConfig, layout: Layout) -> ModeComparison:
        comparison, _ = compared(job, only_own=True)
        verdict: Verdict = "fits" if layout.num_microbatches == 1 else "does not fit"
        return replace(comparison, rows=tuple(replace(row, verdict=verdict) for row in comparison.rows))

    assert largest_batch(config, 2, hardware_of(config, 2), predict) == 4
    with pytest.raises(ConfigError, match="not a multiple of 3 = 1 sample x 3 data-parallel ranks"):
        largest_batch(config, 3, hardware_of(config, 3), predict)


@pytest.mark.parametrize(
    ("sections", "keys"),
    [
        ({}, 'try activation_checkpoint.mode = "auto", a smaller training.seq_len, a larger loss.chunks, more ranks'),
        ({"activation_checkpoint": {"mode": "auto"}}, "try a smaller training.seq_len, a larger loss.chunks, more ran"),
        (
            {"data": {"kind": "images", "path": "images"}, "model": {"name": "resnet"}},
            'try activation_checkpoint.mode = "auto", more ranks',
        ),
    ],
)
def test_remedies_suit_the_job(sections: dict[str, Any], keys: str) -> None:
    config = make_job(training=AUTO_BATCH, **sections)
    comparison, _ = compared(make_job(planner={"memory_gib": 1}), only_own=True)
    with pytest.raises(ConfigError) as caught:
        largest_batch(config, 2, hardware_of(config, 2), lambda job, layout: comparison)
    assert keys in str(caught.value)
    (text,) = remedies(replace(comparison, config=config), comparison.rows)
    assert ("seq_len" in text) == ("loss.chunks" in text) == ("seq_len" in keys)


def test_advice_combines_the_strongest_changes_that_the_job_allows() -> None:
    """Tensor parallelism refuses state in int8."""
    config = make_job(parallelism={"tensor_parallel_degree": 2}, model={"args": {**ARGS, "vocab_size": 300}})

    def predict(job: JobConfig, layout: Layout) -> float:
        return 10 - 3 * (job.optimizer.state_dtype == "bfloat16") - 3 * (job.activation_checkpoint.mode == "full")

    layout = plan_layout(config.parallelism, config.training, 2)
    chunked = with_values(config, {("loss", "chunks"): 2})
    for job, cost in (
        (config, "backward computes the output layer a second time"),
        (chunked, "more and smaller matrix"),
    ):
        (advice,) = advise(job, layout, 5, lambda job, _: 4.0 if job.loss.chunks == 16 else 10.0)
        assert advice.lines == ("loss.chunks = 16",) and advice.cost.startswith(cost)

    first, *_ = advise(config, layout, 5, predict)
    assert first.fits and first.lines == ('activation_checkpoint.mode = "full"', 'optimizer.state_dtype = "bfloat16"')

    tried = set()

    def predict_state(job: JobConfig, layout: Layout) -> float:
        tried.add((job.activation_checkpoint.mode, job.optimizer.state_dtype))
        return 10 - 3 * (job.optimizer.state_dtype == "bfloat16")

    advise(config, layout, 5, predict_state)
    assert ("full", "bfloat16") in tried and ("selective", "bfloat16") not in tried  # weaker, and `full` saves nothing
