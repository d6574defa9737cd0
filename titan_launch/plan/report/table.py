"""The comparison of modes, as text and as data. This module does not import torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from titan_launch.config.axes import MODEL_AXES, Axis
from titan_launch.config.job import JobConfig
from titan_launch.core.terminal import aligned
from titan_launch.core.torch_release import planned_release
from titan_launch.plan.hardware import DEFAULT_MFU, GIB, Hardware
from titan_launch.plan.report.modes import ModeComparison, PlanRow


@dataclass(frozen=True)
class _Column:
    """A column of the comparison. Columns without any value are omitted."""

    title: str
    meaning: str
    """Text of the legend."""

    cell: Callable[[PlanRow], str]
    is_detail: bool = False
    """True if only the verbose table has the column."""


def _exchange_column(axis: Axis) -> _Column:
    def cell(row: PlanRow) -> str:
        exchange = row.traffic.along(axis)
        return _calls(exchange.calls, exchange.sent_bytes)

    meaning = f"calls per step for {axis.name} parallelism, and GiB that one rank sends in them"
    return _Column(f"{axis.name} parallel (GiB)", meaning, cell, is_detail=True)


def _collective_column(name: str) -> _Column:
    field = name.replace("-", "_")

    def cell(row: PlanRow) -> str:
        calls, num_bytes = getattr(row.traffic.collectives, f"{field}s"), getattr(row.traffic, f"{field}_bytes")
        return _calls(calls, num_bytes)

    return _Column(f"{name}s (GiB)", "calls per step, and the size of their buffers", cell, is_detail=True)


_COLUMNS = (
    _Column(
        "activation checkpointing",
        "modules that run forward again in backward instead of saving activations (activation_checkpoint.mode)",
        lambda row: row.choice.activation_checkpoint.label,
    ),
    _Column(
        "gradient accumulation",
        "when gradients are reduced (gradient_accumulation.mode); with unsharded parameters: keep_params_unsharded",
        lambda row: row.choice.accumulation.label,
    ),
    _Column(
        "active GiB",
        "peak memory of the tensors of one rank in a step; a lower bound",
        lambda row: format_gib(row.footprint.peak_bytes),
    ),
    _Column(
        "reserved GiB",
        "estimated memory that the process of one rank takes from the device",
        lambda row: f"~{format_gib(row.reserved_bytes)}",
    ),
    _Column(
        "host GiB",
        "peak memory of the tensors that one rank keeps in host memory (CPU offload, activation offloading)",
        lambda row: format_gib(row.footprint.host_bytes) if row.footprint.host_bytes else "",
    ),
    _Column(
        "verdict",
        "fits: reserved memory leaves the margin free; does not fit: active memory and overhead exceed the limit; "
        "tight: neither, so run a few steps to find out",
        lambda row: row.verdict or "",
    ),
    _Column("peak at", "point of the step with the peak memory", lambda row: str(row.footprint.peak_point), True),
    _Column(
        "pipeline rank",
        "pipeline rank that the row describes: the one with the highest peak memory",
        lambda row: "" if row.footprint.pipeline_rank is None else str(row.footprint.pipeline_rank),
    ),
    *map(_collective_column, ("all-gather", "reduce-scatter", "all-reduce")),
    *(_exchange_column(axis) for axis in MODEL_AXES if axis.delays_computation),
    _Column(
        "expert parallel across nodes (GiB)",
        "GiB of expert parallelism that one rank sends to other nodes per step",
        lambda row: f"~{format_gib(row.link_traffic.experts_across)}" if row.link_traffic.experts_across else "",
        True,
    ),
    *(_exchange_column(axis) for axis in MODEL_AXES if not axis.delays_computation),
    _Column(
        "GiB sent in node",
        "link traffic: GiB that one rank sends to ranks on its node per step",
        lambda row: f"~{format_gib(row.link_traffic.within)}" if row.link_traffic.within else "",
    ),
    _Column(
        "GiB sent across nodes",
        "link traffic: GiB that one rank sends to other nodes per step",
        lambda row: f"~{format_gib(row.link_traffic.across)}" if row.link_traffic.across else "",
    ),
    _Column(
        "compute s",
        "seconds of computation per step, with the bubble",
        lambda row: _seconds(row.time.compute),
        True,
    ),
    _Column(
        "bubble s",
        "part of compute s in which a rank waits for other pipeline stages",
        lambda row: _seconds(row.time.bubble or None),
        True,
    ),
    _Column(
        "communication s",
        "seconds of communication per step",
        lambda row: _seconds(row.time.communication) if row.link_traffic.total else "",
        True,
    ),
    _Column(
        "step s",
        "shortest and longest time of a step: all communication overlaps with computation, or none",
        lambda row: "" if row.time.interval is None else "~{:.3g} .. {:.3g}".format(*row.time.interval),
    ),
    _Column(
        "expected s",
        "time of a step if computation and collectives run in the order in which FSDP2 starts them",
        lambda row: "" if row.time.replayed is None else _seconds(row.time.replayed.total),
    ),
)


def _shown(rows: Sequence[PlanRow], verbose: bool) -> list[_Column]:
    return [column for column in _COLUMNS if (verbose or not column.is_detail) and any(map(column.cell, rows))]


def format_comparison(comparison: ModeComparison, verbose: bool = False, best: PlanRow | None = None) -> str:
    """Return an aligned table with one line per choice, with the marks of `marks_of`, and the notes below the table.
    `verbose`: True for the detailed columns, too."""
    rows = comparison.rows
    columns = [[column.title, *map(column.cell, rows)] for column in _shown(rows, verbose)]
    marks = ["  ", *(marks_of(row, best) for row in rows)]
    return "\n".join([*aligned(list(zip(marks, *columns, strict=True))), *comparison.notes])


def format_legend(comparison: ModeComparison, verbose: bool = False, best: str | None = None) -> str:
    """Return the meaning of the marks and of every column in the table. `best`: the meaning of the mark `*`; None if
    this mark is not used."""
    lines = [*meaning_of_marks(best), *((column.title, column.meaning) for column in _shown(comparison.rows, verbose))]
    return "\n".join(aligned([(f"{name}:", meaning) for name, meaning in lines]))


def marks_of(row: PlanRow, best: PlanRow | None) -> str:
    """Return two characters: `>` for a choice that the job sets or `auto` may take, and `*` for `best`."""
    return " >"[row.is_own] + " *"[row is best]


def meaning_of_marks(best: str | None) -> list[tuple[str, str]]:
    """Return the marks with their meanings. `best`: the meaning of the mark `*`; None if this mark is not used."""
    return [(">", "set by the job, or open to `auto`"), *([("*", best)] if best else [])]


def format_gib(num_bytes: float) -> str:
    """Return bytes in GiB without the unit: `1234.5`, `68.83`, or below 1 GiB `0.0621`."""
    gib = num_bytes / GIB
    return f"{gib:.1f}" if gib >= 1000 else f"{gib:.2f}" if gib >= 1 else f"{gib:.3g}"


def _calls(count: int, num_bytes: int) -> str:
    return f"{count} ({format_gib(num_bytes)})" if count else ""


def _seconds(seconds: float | None) -> str:
    return "" if seconds is None else f"~{seconds:.3g}"


def format_categories(comparison: ModeComparison) -> str:
    """Return the active memory in GiB of each choice at its peak, by category, and the peak of each phase."""
    lines = []
    for row in comparison.rows:
        held = ", ".join(f"{format_gib(size)} {category.label}" for category, size in row.footprint.by_category.items())
        phases = ", ".join(f"{phase} {format_gib(size)}" for phase, size in row.footprint.by_phase().items())
        lines.append(f"{row.choice.label}: {held}")
        lines.append(f"  peak at: {row.footprint.peak_point}; peaks by phase: {phases}")
    return "\n".join(lines)


def format_assumptions(
    hardware: Hardware, has_flops: bool, engine: str, config: JobConfig, expert_load: str | None = None
) -> str:
    """Return the assumptions of all predictions, their accuracy, and the predictions that are missing. `has_flops`:
    True if the FLOPs of the model are known. `engine`: name of the memory engine, such as `replay`. `expert_load`:
    result of `plan.experts.describe_load`."""
    needed = "sum of the CUDA streams' peaks" if hardware.kernels == "cuda" else "active memory"
    computation = "unknown peak"
    if hardware.speeds is not None and engine == "replay":
        computation = f"each operation by its FLOPs and bytes; {hardware.speeds.source}"
    elif hardware.peak_tflops:
        computation = f"{hardware.peak_tflops:g} TFLOP/s peak x {hardware.mfu or DEFAULT_MFU:g} (mfu)"
    lines = [
        ("device", hardware.device or ("cpu" if hardware.kernels == "cpu" else "none")),
        ("memory limit", format_limit(hardware) if hardware.memory_gib else "none"),
        (
            "reserved memory",
            f"{needed} x {1 + hardware.fragmentation:g} (fragmentation) + {hardware.overhead_gib:g} GiB (overhead)",
        ),
        ("computation", computation),
        ("links", _links(hardware)),
        *([("expert load", expert_load)] if expert_load else []),
        ("memory engine", f"{engine}, {hardware.kernels} kernels of torch {planned_release()}"),
        *accuracy(config, has_flops),
        *(("unknown", text) for text in _unknowns(hardware, has_flops)),
    ]
    return "\n".join(["assumptions", *(f"  {line}" for line in aligned([(f"{name}:", text) for name, text in lines]))])


def format_limit(hardware: Hardware) -> str:
    """Return the memory limit with its source and margin: `79.1 GiB (h100-80gb), margin 3.96 GiB`."""
    return f"{hardware.memory_gib:.4g} GiB ({hardware.memory_source}), margin {hardware.margin_gib:.3g} GiB"


def _links(hardware: Hardware) -> str:
    links = {"within a node": hardware.intra_node_gb_per_s, "across nodes": hardware.inter_node_gb_per_s}
    speeds = [f"{speed:g} GB/s {where}" for where, speed in links.items() if speed]
    return f"{', '.join(speeds) or 'no bandwidths'}, {hardware.gpus_per_node} GPUs per node"


def _unknowns(hardware: Hardware, has_flops: bool) -> list[str]:
    """Return the missing predictions, each with its cause or with the key that enables it."""
    found = []
    if hardware.memory_gib is None:
        found.append("no verdicts: set a limit with --device (or planner.device) or --memory-gib (planner.memory_gib)")
    if hardware.peak_tflops is None and hardware.speeds is None:
        found.append("no compute seconds: set --device, or metrics.peak_tflops_per_device")
    elif not has_flops and hardware.speeds is None:
        found.append(
            "no compute seconds: the model does not run on the meta device, so its FLOPs cannot be counted; give it a "
            "method flops_per_sample(seq_len) that returns them"
        )
    return found


def accuracy(config: JobConfig, has_flops: bool) -> list[tuple[str, str]]:
    """Return pairs (word, text). The word is `exact`, `predicted`, `estimated` or `ignored`; the text names the numbers
    or features that the word describes."""
    ignored = [name for name in ("compile", "float8") if getattr(config, name).enable]
    replaced = f"active memory of the job without {' and '.join(ignored)}; --measure measures the job itself"
    lines = [
        ("exact", f"collectives and the bytes of their buffers{', FLOPs' if has_flops else ''}"),
        ("predicted", replaced if ignored else "active memory, a lower bound"),
        ("estimated", "every number with ~: reserved memory, link traffic and seconds"),
    ]
    if config.compile.enable:
        lines.append(("ignored", "torch.compile: memory and seconds are those of the job without it"))
        if config.activation_checkpoint.mode == "memory_budget":
            budget = "memory_budget: its row shows no FLOPs, and the memory of mode none, which is an upper bound"
            lines.append(("ignored", budget))
    if config.training.enable_cpu_offload:
        lines.append(("ignored", "CPU offload: seconds do not count its copies, nor the update on the host"))
    if config.optimizer.name == "Muon":
        lines.append(("ignored", "Muon: seconds do not count its matrix products"))
    if config.activation_checkpoint.offload:
        lines.append(("ignored", "activation offloading: seconds do not count its copies"))
    if config.float8.enable:
        gathered = "all-gathers are smaller than shown" if config.float8.all_gather else "traffic is the same"
        lines.append(("ignored", f"float8: memory and seconds are those of bfloat16; {gathered}"))
    return lines


def describe_comparison(comparison: ModeComparison, chosen: PlanRow | None) -> list[dict[str, Any]]:
    """Return the rows for JSON, with sizes in bytes."""
    return [_describe(row, row is chosen) for row in comparison.rows]


def _describe(row: PlanRow, is_chosen: bool) -> dict[str, Any]:
    return {
        "gradient_accumulation": row.choice.accumulation.model_dump(),
        "activation_checkpoint": row.choice.activation_checkpoint.model_dump(),
        "is_own": row.is_own,
        "is_chosen": is_chosen,
        "active_bytes": row.footprint.peak_bytes,
        "host_bytes": row.footprint.host_bytes,
        "reserved_bytes_estimated": round(row.reserved_bytes),
        "verdict": row.verdict,
        "peak": dict(row.footprint.peak_point._asdict(), text=str(row.footprint.peak_point)),
        "pipeline_rank": row.footprint.pipeline_rank,
        "active_bytes_by_category": {category.label: size for category, size in row.footprint.by_category.items()},
        "active_bytes_by_phase": row.footprint.by_phase(),
        "traffic_per_step": asdict(row.traffic),
        "link_traffic_bytes_per_rank": {
            "within_node": round(row.link_traffic.within),
            "across_nodes": round(row.link_traffic.across),
            "experts_within_node": round(row.link_traffic.experts_within),
            "experts_across_nodes": round(row.link_traffic.experts_across),
        },
        "flops_per_rank": row.flops_per_rank,
        "compute_seconds_estimated": row.time.compute,
        "bubble_seconds_estimated": row.time.bubble,
        "communication_seconds_estimated": row.time.communication,
        "step_seconds_estimated": row.time.interval,
        "step_seconds_expected": row.time.expected,
    }
