"""The comparison of modes, as text and as data. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from titan_launch.config.job import JobConfig
from titan_launch.core.torch_release import planned_release
from titan_launch.plan.hardware import GIB, Hardware
from titan_launch.plan.job import is_auto
from titan_launch.plan.report.comparison import Comparison, Row
from titan_launch.plan.step_time import ModelFlops


def honesty(flops: ModelFlops, config: JobConfig) -> str:
    """What of a plan is exact, what is predicted, what is estimated, and what is none of these."""
    exact = "collectives, the bytes of their buffers and FLOPs" if flops.is_exact else "collectives and their buffers"
    return (
        f"{exact} are exact; active memory is a prediction, and a lower bound; what has a ~, reserved memory, wire and "
        f"seconds, is an estimate that rests on the assumptions above{_of_compiled(config)}{_of_float8(config)}"
    )


def _of_compiled(config: JobConfig) -> str:
    if not config.compile.enable:
        return ""
    of_budget = "; the row of memory_budget has the memory of none, which it is to stay below, and no FLOPs"
    return (
        "\nthe job is compiled: memory and seconds are those without that, since what a compiler fuses and keeps is "
        f"its own choice{of_budget if config.activation_checkpoint.mode == 'memory_budget' else ''}"
    )


def _of_float8(config: JobConfig) -> str:
    if not config.float8.enable:
        return ""
    gathered = "less is gathered than it says" if config.float8.all_gather else "what is communicated is the same"
    return (
        "\nfloat8 is not known to the planner: memory is that of bfloat16, without the copies in 8 bits, and seconds "
        f"rest on the peak for bfloat16; {gathered}"
    )


def format_comparison(comparison: Comparison, hardware: Hardware, chosen: Row | None = None) -> str:
    """An aligned table, one line per choice, and below it what was left out. `>` marks the job's own row, or those that
    it leaves open; `*` the chosen one."""
    rows = comparison.rows
    columns = [column for column in _columns(rows, hardware) if any(column[1:])]
    lines = list(zip(*columns, strict=True))
    marks = [" ", *("*" if row is chosen and is_auto(comparison.config) else " >"[row.is_own] for row in rows)]
    widths = [max(map(len, column)) for column in columns]
    table = [
        "  ".join([mark, *(cell.ljust(width) for cell, width in zip(line, widths, strict=True))]).rstrip()
        for mark, line in zip(marks, lines, strict=True)
    ]
    return "\n".join([*table, *comparison.notes])


def _columns(rows: Sequence[Row], hardware: Hardware) -> list[list[str]]:
    """The columns with their titles; one whose cells are all empty is left out."""
    return [
        ["recompute", *(row.choice.recomputation_label for row in rows)],
        ["accumulation", *(row.choice.accumulation_label for row in rows)],
        ["active GiB", *(format_gib(row.footprint.peak_bytes) for row in rows)],
        ["reserved GiB", *(f"~{format_gib(row.reserved_bytes)}" for row in rows)],
        ["verdict", *(row.verdict or "" for row in rows)],
        ["peak at", *(str(row.footprint.place) for row in rows)],
        ["pp rank", *(_number(row.footprint.pipeline_rank) for row in rows)],
        ["AG (GiB)", *(_calls(r.traffic.collectives.all_gathers, r.traffic.all_gather_bytes) for r in rows)],
        ["RS (GiB)", *(_calls(r.traffic.collectives.reduce_scatters, r.traffic.reduce_scatter_bytes) for r in rows)],
        ["AR (GiB)", *(_calls(r.traffic.collectives.all_reduces, r.traffic.all_reduce_bytes) for r in rows)],
        ["TP (GiB)", *(_calls(r.traffic.tensor.calls, r.traffic.tensor.sent_bytes) for r in rows)],
        ["CP (GiB)", *(_calls(r.traffic.context.calls, r.traffic.context.sent_bytes) for r in rows)],
        ["PP (GiB)", *(_calls(r.traffic.pipeline.calls, r.traffic.pipeline.sent_bytes) for r in rows)],
        ["wire GiB within", *(f"~{format_gib(row.wire.within)}" if row.wire.within else "" for row in rows)],
        ["across nodes", *(f"~{format_gib(row.wire.across)}" if row.wire.across else "" for row in rows)],
        ["compute s", *(_seconds(row.time.compute) for row in rows)],
        ["bubble s", *(_seconds(row.time.bubble or None) for row in rows)],
        ["comm s", *(_seconds(row.time.communication) if row.wire.total else "" for row in rows)],
        ["step s", *(_interval(row.time.interval) for row in rows)],
    ]


def format_gib(num_bytes: float) -> str:
    """`68.83`, and below 1 three digits: `0.0621`."""
    gib = num_bytes / GIB
    return f"{gib:.1f}" if gib >= 1000 else f"{gib:.2f}" if gib >= 1 else f"{gib:.3g}"


def _calls(count: int, num_bytes: int) -> str:
    return f"{count} ({format_gib(num_bytes)})" if count else ""


def _number(number: int | None) -> str:
    return "" if number is None else str(number)


def _seconds(seconds: float | None) -> str:
    return "" if seconds is None else f"~{seconds:.3g}"


def _interval(interval: tuple[float, float] | None) -> str:
    return "" if interval is None else f"~{interval[0]:.3g} .. {interval[1]:.3g}"


def format_categories(comparison: Comparison) -> str:
    """Active memory at the peak of each choice, by what it is held for; in GiB."""
    lines = []
    for row in comparison.rows:
        held = ", ".join(f"{format_gib(size)} {category.label}" for category, size in row.footprint.by_category.items())
        phases = ", ".join(f"{phase} {format_gib(size)}" for phase, size in row.footprint.by_phase().items())
        lines.append(f"{row.choice.recomputation_label} / {row.choice.accumulation_label}: {held}")
        lines.append(f"  at {row.footprint.place}; peaks by phase: {phases}")
    return "\n".join(lines)


def format_assumptions(hardware: Hardware, flops: ModelFlops, engine: str) -> str:
    """Every number that a prediction rests on."""
    memory = "no memory limit" if hardware.memory_gib is None else f"{hardware.memory_gib:.4g} GiB"
    source = "" if hardware.memory_gib is None else f" ({hardware.memory_source})"
    peak = f"{hardware.peak_tflops:g} TFLOP/s peak at {hardware.mfu:g} (mfu)" if hardware.peak_tflops else "no peak"
    device = hardware.device or ("cpu" if hardware.kernels == "cpu" else "no device")
    lines = [
        f"assumed: {device}; {memory}{source}; {hardware.kernels} kernels, memory by the "
        f"{engine} engine for torch {planned_release()}; "
        f"reserved = {'streams' if hardware.kernels == 'cuda' else 'active'} x {1 + hardware.fragmentation:g} + "
        f"{hardware.overhead_gib:g} GiB; {peak}; {_links(hardware)}"
    ]
    lines += _unknowns(hardware, flops)
    return "\n".join(lines)


def _links(hardware: Hardware) -> str:
    within, across = hardware.intra_node_gb_per_s, hardware.inter_node_gb_per_s
    speeds = [
        f"{speed:g} GB/s {where}" for speed, where in ((within, "within a node"), (across, "across nodes")) if speed
    ]
    return f"{', '.join(speeds) or 'no bandwidths'}, {hardware.gpus_per_node} GPUs per node"


def _unknowns(hardware: Hardware, flops: ModelFlops) -> list[str]:
    """What is not known, and what to set."""
    found = []
    if hardware.memory_gib is None:
        found.append("no verdicts: set a limit with --device (or planner.device) or --memory-gib (planner.memory_gib)")
    if hardware.peak_tflops is None:
        found.append("no compute seconds: set --device, or metrics.peak_tflops_per_device")
    elif flops.per_sample is None:
        found.append("no compute seconds: the model does not say its FLOPs (a method flops_per_sample(seq_len))")
    elif not flops.is_exact:
        found.append(
            "recomputation's FLOPs are estimates for this model: full is taken for one more forward of its blocks, "
            "a third of the FLOPs; selective op is not known"
        )
    return found


def describe_comparison(comparison: Comparison, chosen: Row | None) -> list[dict[str, Any]]:
    """The rows as plain data, for JSON; sizes in bytes."""
    return [_describe(row, row is chosen) for row in comparison.rows]


def _describe(row: Row, is_chosen: bool) -> dict[str, Any]:
    return {
        "gradient_accumulation": row.choice.accumulation.model_dump(),
        "activation_checkpoint": row.choice.recomputation.model_dump(),
        "is_own": row.is_own,
        "is_chosen": is_chosen,
        "active_bytes": row.footprint.peak_bytes,
        "reserved_bytes_estimated": round(row.reserved_bytes),
        "verdict": row.verdict,
        "peak": dict(row.footprint.place._asdict(), text=str(row.footprint.place)),
        "pipeline_rank": row.footprint.pipeline_rank,
        "active_bytes_by_category": {category.label: size for category, size in row.footprint.by_category.items()},
        "active_bytes_by_phase": row.footprint.by_phase(),
        "traffic_per_step": asdict(row.traffic),
        "wire_bytes_per_rank": {"within_node": round(row.wire.within), "across_nodes": round(row.wire.across)},
        "flops_per_rank": row.flops_per_rank,
        "compute_seconds_estimated": row.time.compute,
        "bubble_seconds_estimated": row.time.bubble,
        "communication_seconds_estimated": row.time.communication,
        "step_seconds_estimated": row.time.interval,
    }
