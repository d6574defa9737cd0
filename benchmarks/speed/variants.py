"""Comparison of the launcher's own settings: accumulation modes, and jobs with and without precision rules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.publishing import markdown_table
from benchmarks.speed.contestants import CONTESTANTS, LAUNCHER
from benchmarks.speed.jobs import Job
from benchmarks.speed.runs import Entry, Run
from benchmarks.speed.summary import paired, spread
from titan_launch.core.torch_release import MIXES_DTYPES_IN_UNIT

ACCUMULATION_ROUNDS = 2
PRECISION_ROUNDS = 2

_HSDP = {"data_parallel_replicate_degree": 2}
_ACCUMULATED = Job(dim=128, n_heads=4, n_kv_heads=2, hidden_dim=384, seq_len=128, sequences=4, microbatches=4, ranks=4)
_MODES: dict[str, Mapping[str, Any]] = {
    "`immediate`": {"mode": "immediate"},
    "`deferred_all_reduce`": {"mode": "deferred_all_reduce"},
    "`deferred`": {"mode": "deferred"},
    "`immediate`, unsharded parameters": {"mode": "immediate", "keep_params_unsharded": True},
    "`deferred`, unsharded parameters": {"mode": "deferred", "keep_params_unsharded": True},
}
_BF16 = {"param_dtype": "bfloat16"}
_NORMS = {"type": "RMSNorm", "param_dtype": "float32"}
_RULES: dict[str, dict[str, Any]] = {
    "no rules": {},
    "norms in fp32, in place": {"rules": [_NORMS], "placement": "in_place"},
    "norms in fp32, one unit": {"rules": [_NORMS], "placement": "own_unit"},
    "norms in fp32, a unit per block": {"rules": [{**_NORMS, "unit_per": "block"}]},
}


def accumulation_groups() -> list[list[Entry]]:
    """Return one entry for each accumulation mode, on two replicas of two shards."""
    options = {"parallelism": _HSDP, "comm": {"count_traffic": True}}
    return [
        [
            _entry("accumulation", name, replace(_ACCUMULATED, steps=6), {"gradient_accumulation": mode, **options})
            for name, mode in _MODES.items()
        ]
    ]


def precision_groups() -> list[list[Entry]]:
    """Return one entry for each set of rules, on one rank and on two ranks."""
    return [
        [
            _entry(f"{ranks} ranks", name, Job(ranks=ranks, seq_len=256), {"precision": {**_BF16, **rules}})
            for name, rules in _RULES.items()
            if MIXES_DTYPES_IN_UNIT or rules.get("placement") != "in_place"
        ]
        for ranks in (1, 2)
    ]


def _entry(group: str, name: str, job: Job, options: Mapping[str, Any]) -> Entry:
    return Entry(group, replace(CONTESTANTS[LAUNCHER], name=name, options=options), job)


def accumulation_tables(runs: Sequence[Run]) -> str:
    """Return a Markdown table of step time, collectives and peak memory by accumulation mode."""
    head = ("mode", "step, ms", "over baseline", "collectives per step", "peak memory of a rank, MiB")
    rows: list[Sequence[str]] = [head]
    first = _of(runs, "accumulation", next(iter(_MODES)))
    for name in _MODES:
        own = _of(runs, "accumulation", name)
        if own:
            ratio = paired(own, first, lambda run: run.step_s)
            metrics = own[-1].metrics
            rows.append(
                (
                    name,
                    spread(1000 * run.step_s for run in own).cell(".0f"),
                    ratio.cell(".2f") if ratio else "",
                    f"{metrics['comm/collectives']:.0f}",
                    f"{1024 * metrics['memory/max_active_gib']:.2f}",
                )
            )
    return markdown_table(rows)


def precision_tables(runs: Sequence[Run]) -> str:
    """Return a Markdown table of step time by set of rules, relative to the run without rules."""
    rows: list[Sequence[str]] = [("ranks", "rules", "step, ms", "over baseline")]
    for group in dict.fromkeys(run.group for run in runs):
        first = _of(runs, group, "no rules")
        for name in _RULES:
            own = _of(runs, group, name)
            ratio = paired(own, first, lambda run: run.step_s)
            if own:
                cells = (spread(1000 * run.step_s for run in own).cell(".1f"), ratio.cell(".3f") if ratio else "")
                rows.append((group.partition(" ")[0], name, *cells))
    return markdown_table(rows)


def _of(runs: Sequence[Run], group: str, name: str) -> list[Run]:
    return [run for run in runs if (run.group, run.contestant) == (group, name) and not run.failure]
