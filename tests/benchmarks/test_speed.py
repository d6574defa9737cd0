"""The speed benchmark: turns, statistics, tables, and one contestant that really runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import tomli

from benchmarks.speed import compilation, in_turns, latency, scaling, training, turns, variants
from benchmarks.speed.contestants import CONTESTANTS, Environments, launcher_sections, to_toml
from benchmarks.speed.jobs import Job
from benchmarks.speed.plots import plot_scaling, plot_worlds
from benchmarks.speed.runs import Entry, Run, interleaved, run
from benchmarks.speed.summary import fit, paired
from titan_launch.config.job import JobConfig

METRICS = {"comm/collectives": 12.0, "memory/max_active_gib": 0.5}


def made_up(entry: Entry, turn: int, step_s: float) -> Run:
    """Return a run with made-up times. Its second step is slow and does not count."""
    times = [3.0, 5.0, *(5.0 + step_s * index for index in range(1, entry.job.steps - 1))]
    stamps = (2.0,) if entry.words else tuple(times)
    return Run(entry.group, entry.contestant.name, turn, entry.job, stamps, metrics=METRICS)


def all_runs(groups: Sequence[Sequence[Entry]], rounds: int = 2) -> list[Run]:
    return [made_up(entry, turn, 0.1 * (1 + turn)) for turn, entry in interleaved(groups, rounds)]


def test_compared_programs_take_turns() -> None:
    entries = [Entry("one", CONTESTANTS[name], Job(), rounds) for name, rounds in (("bare", None), ("launcher", 2))]
    order = [(turn, entry.contestant.name) for turn, entry in interleaved([entries], 3)]
    assert order == [(0, "bare"), (0, "launcher"), (1, "launcher"), (1, "bare"), (2, "bare")]


def test_ratios_compare_runs_of_the_same_round() -> None:
    """A machine that slows down from round to round does not change the ratios."""
    bare, tool = (Entry("one", CONTESTANTS[name], Job()) for name in ("bare", "launcher"))
    baseline = [made_up(bare, turn, seconds) for turn, seconds in enumerate((0.1, 0.2, 0.4))]
    runs = [made_up(tool, turn, 1.5 * run.step_s) for turn, run in enumerate(baseline)]
    found = paired(runs, baseline, lambda run: run.step_s)
    assert found is not None and (found.median, found.least, found.most) == pytest.approx((1.5, 1.5, 1.5))
    assert paired(runs, [], lambda run: run.step_s) is None


def test_the_linear_fit_of_points_on_a_line_has_no_residual() -> None:
    line = fit([(1, 5.0), (2, 7.0), (4, 11.0)])
    assert (line.intercept, line.slope, line.residual) == pytest.approx((3, 2, 0))
    assert fit([(1, 5.0), (2, 8.0), (4, 11.0)]).residual > 0.05


def test_tables_name_what_failed_and_what_is_absent() -> None:
    groups = training.groups(None, installed=["accelerate"])
    runs = [replace(r, failure="status 1: gone") if r.contestant == "accelerate" else r for r in all_runs(groups)]
    table = training.tables([Run.load(run.dump()) for run in runs])
    assert "| **titan_launch** | 2 | 150.0 (100.0 to 200.0) | 1.000 (1.000 to 1.000) | 15,360 | 3.00" in table
    assert "failed: status 1: gone" in table and "not selected: Hugging Face Trainer, litgpt, TorchTitan" in table


def test_scaling_variants_compilation_and_latency_make_their_tables_and_plots(tmp_path: Path) -> None:
    assert "| depth | blocks |" in scaling.tables(all_runs(scaling.groups()))
    assert "| `deferred` |" in variants.accumulation_tables(all_runs(variants.accumulation_groups()))
    assert "| 2 | norms in fp32, one unit |" in variants.precision_tables(all_runs(variants.precision_groups()))
    assert "| compiled, second start | 3.00 | 100 |" in compilation.tables(all_runs(compilation.groups(), 1))
    assert "| `check`, debug Llama | 2.00 (2.00 to 2.00) |" in latency.tables(all_runs(latency.groups()))
    plot_scaling(all_runs(scaling.groups()), tmp_path / "scaling.svg")
    plot_worlds(all_runs(latency.groups()), tmp_path / "worlds.svg")
    assert all((tmp_path / name).stat().st_size > 1000 for name in ("scaling.svg", "worlds.svg"))


def test_the_job_files_of_the_launcher_are_valid(tmp_path: Path) -> None:
    groups = [*training.groups(None, []), *scaling.groups()]
    groups += [*variants.accumulation_groups(), *variants.precision_groups(), *compilation.groups()]
    for entry in (entry for group in groups for entry in group if entry.contestant.module == "titan_launch"):
        sections = {**launcher_sections(entry.job, tmp_path), **entry.contestant.options}
        job = JobConfig.model_validate(tomli.loads(to_toml(sections)))
        assert (job.model.args["dim"], job.training.steps) == (entry.job.dim, entry.job.steps)


@pytest.mark.slow
def test_a_contestant_is_timed_from_its_launch() -> None:
    """Time the bare loop. Its second step does not count and its third does."""
    job = Job(dim=64, n_layers=1, hidden_dim=64, seq_len=16, steps=3, division="whole")
    found = run(Entry("one", CONTESTANTS["bare"], job), 0, Environments())
    assert not found.failure and len(found.stamps) == 3 and len(found.steps_s) == 1
    assert 0 < found.step_s < found.first_step_s


@pytest.mark.slow
def test_two_programs_run_their_steps_in_turns() -> None:
    """Run one loop alone beside one of two ranks. Both wait for their turn, and no process is left at the end."""
    job = Job(dim=64, n_layers=1, hidden_dim=64, seq_len=16, sequences=2, steps=20, division="whole")
    entries = [
        Entry("one", CONTESTANTS["bare-whole"], job),
        Entry("one", CONTESTANTS["bare-ddp"], replace(job, ranks=2, division="replicated")),
    ]
    times = turns.measure(entries, 3, Environments())
    assert list(times) == ["bare-whole", "bare-ddp"] and all(len(own) == 3 for own in times.values())
    assert "| bare loop without FSDP2 | 3 |" in turns.table(entries, times)
    sharded = replace(job, ranks=2, division="sharded")
    assert "| 2 processes, bfloat16 | 2 |" in in_turns.table([(sharded, in_turns.measure(sharded, 2))])
