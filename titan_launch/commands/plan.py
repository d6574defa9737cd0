"""The command `plan`, and dry runs: what a job would do on so many ranks, found without a GPU.

Where the analytic engine knows the model, torch is not imported: the answer is there in a fraction of a second.
"""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal, NoReturn, get_args

from titan_launch.commands.checked_job import load
from titan_launch.commands.parser import Parser, at_least
from titan_launch.config.job import JobConfig
from titan_launch.config.sections.run import PlannerConfig
from titan_launch.core.errors import UserError
from titan_launch.core.process import run_and_exit
from titan_launch.core.torch_release import planned_release
from titan_launch.plan.auto_mode import AS_GIVEN, Resolution, resolve, suggest
from titan_launch.plan.communication import Traffic
from titan_launch.plan.hardware import Hardware, hardware_of
from titan_launch.plan.job import Choice, is_auto, plan_job, with_whole_parameters
from titan_launch.plan.layout import Layout, plan_layout
from titan_launch.plan.report.comparison import Comparison, Engine, compare
from titan_launch.plan.report.plot import check_plot, plot_comparison
from titan_launch.plan.report.table import (
    describe_comparison,
    format_assumptions,
    format_categories,
    format_comparison,
    honesty,
)
from titan_launch.plan.report.unit_table import KeyLocator, describe_units, format_batches, format_kernels, format_plan
from titan_launch.plan.step_time import ModelFlops, flops_of_model
from titan_launch.plan.types import Inventory, ModelPlan

EngineName = Literal["analytic", "trace"]

_DEFAULTS = PlannerConfig()
_BANDWIDTH = "GB/s that a device sends {}, in one direction (default: that of --device)"

KEY_OPTIONS = (
    ("--device", "planner.device", "NAME", "device to plan for, such as h100-80gb (default: none)"),
    ("--memory-gib", "planner.memory_gib", "GIB", "GiB of memory per device (default: that of --device)"),
    ("--intra-bandwidth", "planner.intra_node_gb_per_s", "GB/S", _BANDWIDTH.format("to devices of its host")),
    ("--inter-bandwidth", "planner.inter_node_gb_per_s", "GB/S", _BANDWIDTH.format("to devices of other hosts")),
    ("--gpus-per-node", "planner.gpus_per_node", "N", f"devices per host (default: {_DEFAULTS.gpus_per_node})"),
    ("--mfu", "planner.mfu", "X", f"fraction of the peak FLOP/s that a step reaches (default: {_DEFAULTS.mfu})"),
)
"""Options that set a key of the job: each with the key, its metavar and its help."""


def add_arguments(parser: Parser) -> None:
    """Add the options of `plan`."""
    parser.add_job("titan-launch plan --config configs/llama3_8b.toml --world-size 8 --device h100-80gb")
    parser.add_argument("--world-size", type=at_least(1), default=1, metavar="N", help="ranks (default: 1)")
    text = "analytic replays the schedule of a known model without torch; trace runs a step of any model without values"
    parser.add_argument(
        "--engine", choices=get_args(EngineName), help=f"{text} (default: analytic if it knows the model, else trace)"
    )
    text = "rows to compare: all, or own: those that the job asks for or leaves open by auto (default: all)"
    parser.add_argument("--rows", choices=("all", "own"), default="all", help=text)
    parser.add_argument("--verbose", action="store_true", help="also print each row's memory by category")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.add_argument("--plot", metavar="FILE", help="also write a picture: .png, .pdf or .svg (needs matplotlib)")
    parser.add_key_options("hardware", KEY_OPTIONS)


def run(arguments: Namespace) -> NoReturn:
    """Print the plan of the job, and end the process."""
    options = PlanOptions(
        engine=arguments.engine,
        only_own=arguments.rows == "own",
        as_json=arguments.json,
        verbose=arguments.verbose,
        plot=arguments.plot,
    )
    if options.plot is not None:
        check_plot(options.plot)
    loaded, world_size = load(arguments, arguments.world_size), arguments.world_size
    run_and_exit(
        lambda: print_plan(loaded.config, world_size, loaded.provenance.place, options), loaded.provenance.describe
    )


@dataclass(frozen=True)
class PlanOptions:
    """What the command line asks of `plan`."""

    engine: EngineName | None = None
    """None: the analytic one where it knows the model, else the trace."""

    only_own: bool = False
    """Only the rows that the job asks for, or leaves open by `auto`."""

    as_json: bool = False
    verbose: bool = False
    """Memory by category for every row."""

    plot: str | None = None
    """Path of a picture."""


@dataclass(frozen=True)
class _Subject:
    """A job's model, and what predicts its memory."""

    inventory: Inventory
    flops: ModelFlops
    engine: Engine
    engine_name: EngineName
    counted: Callable[[Choice], Traffic] | None = None
    """The traffic that a trace has seen."""


@dataclass(frozen=True)
class _Planned:
    """Everything there is to show."""

    layout: Layout
    hardware: Hardware
    subject: _Subject
    comparison: Comparison
    resolution: Resolution
    plan: ModelPlan
    """The units of the job as resolved."""

    suggestion: str | None
    """What `auto` would be, where all rows are there to choose from and the job leaves nothing open."""


def print_plan(config: JobConfig, world_size: int, locate_key: KeyLocator, options: PlanOptions) -> None:
    """Show what a job would do on `world_size` ranks, as text or as JSON, and as a picture if one is wanted.

    Raises ConfigError as a run would at its start, and where `auto` finds nothing that fits.
    """
    planned = _plan(config, world_size, options)
    if options.plot is not None:
        title = f"{config.job.name}: {_model_name(config)} on {world_size} ranks"
        chosen = planned.resolution.row
        plot_comparison(planned.comparison, planned.hardware, title, options.plot, chosen)
        print(f"picture: {options.plot}", file=sys.stderr)
    if options.as_json:
        print(json.dumps(_describe(planned, locate_key), indent=2))
    else:
        print(_format(planned, locate_key, options.verbose))


def print_dry_run(config: JobConfig, world_size: int, rank: int) -> None:
    """Say what a rank of so many would build, having built it without values.

    Raises ConfigError as a run would at its start, and where `auto` finds nothing that fits.
    """
    layout, hardware = _divide(config, world_size)
    config = with_whole_parameters(config, layout)
    if is_auto(config):
        resolution = _plan(config, world_size, PlanOptions(only_own=True)).resolution
        config = resolution.config
        print(f"auto: {resolution.reason}")
    from titan_launch.trace.dry_run import dry_run

    print(dry_run(config, layout, hardware, rank))


def _divide(config: JobConfig, world_size: int) -> tuple[Layout, Hardware]:
    layout = plan_layout(config.parallelism, config.training, world_size)
    return layout, hardware_of(config, ranks_on_machine=min(world_size, config.planner.gpus_per_node))


def _plan(config: JobConfig, world_size: int, options: PlanOptions) -> _Planned:
    layout, hardware = _divide(config, world_size)
    config = with_whole_parameters(config, layout)
    subject = _subject(config, layout, hardware, options.engine)
    model = (subject.inventory, subject.flops)
    comparison = compare(config, layout, *model, hardware, subject.engine, options.only_own, subject.counted)
    resolution = resolve(comparison, hardware)
    plan = plan_job(resolution.config, subject.inventory)
    suggestion = None if options.only_own else suggest(comparison, hardware)
    return _Planned(layout, hardware, subject, comparison, resolution, plan, suggestion)


def _subject(config: JobConfig, layout: Layout, hardware: Hardware, wanted: EngineName | None) -> _Subject:
    from titan_launch.plan.memory.analytic.engine import analytic_engine, model_inventory, unknown_part

    unknown = unknown_part(config)
    if wanted == "analytic" and unknown is not None:
        raise UserError(f"--engine analytic: does not know {unknown}; use --engine trace")
    if wanted == "trace" or unknown is not None:
        if wanted is None:
            print(f"{unknown} is not known to the analytic engine: tracing the job", file=sys.stderr, flush=True)
        return _traced(config, layout, hardware)
    inventory = model_inventory(config)
    flops = flops_of_model(config.model, config.training.seq_len, inventory.blocks)
    return _Subject(inventory, flops, analytic_engine(config, layout, hardware.kernels), "analytic")


def _traced(config: JobConfig, layout: Layout, hardware: Hardware) -> _Subject:
    try:
        from titan_launch.models.build import build_model
        from titan_launch.trace.engine import trace_engine
        from titan_launch.train.auto_mode import inspect_model
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise UserError(f"{config.model.name} must be traced, which needs torch: pip install torch") from None

    built = build_model(config.model, config.training.seq_len)
    inventory = inspect_model(config, built)
    flops = flops_of_model(config.model, config.training.seq_len, built.blocks, built.flops_per_sample)
    engine = trace_engine(config, layout, hardware.kernels)
    return _Subject(inventory, flops, engine, "trace", engine.traffic)


def _format(planned: _Planned, locate_key: KeyLocator, verbose: bool) -> str:
    config, hardware, row = planned.resolution.config, planned.hardware, planned.resolution.row
    kernels = format_kernels(config, planned.plan)
    parts = [
        format_batches(config, planned.layout),
        "\n".join(filter(None, (format_plan(config, planned.plan, planned.layout, locate_key), kernels))),
        format_assumptions(hardware, planned.subject.flops, planned.subject.engine_name),
        format_comparison(planned.comparison, hardware, row),
    ]
    if verbose:
        parts.append(format_categories(planned.comparison))
    parts.append(f"chosen: {_chosen(planned)}")
    if planned.suggestion is not None:
        parts[-1] += f'\ngradient_accumulation.mode = "auto" would be {planned.suggestion}'
    parts.append(honesty(planned.subject.flops, config))
    return "\n\n".join(parts)


_VERDICTS = {
    "fits": "fits",
    "tight": "may fit or not: train three steps to see",
    "does not fit": "does not fit",
}


def _chosen(planned: _Planned) -> str:
    verdict = planned.resolution.row.verdict
    own = planned.resolution.row.choice.label
    if planned.resolution.reason != AS_GIVEN:
        return planned.resolution.reason
    return f"{own}, {AS_GIVEN}" + ("" if verdict is None else f"; it {_VERDICTS[verdict]}")


def _describe(planned: _Planned, locate_key: KeyLocator) -> dict[str, Any]:
    """All of it as plain data."""
    config = planned.resolution.config
    return {
        "model": _model_name(config),
        "parameters": planned.plan.inventory.num_parameters,
        "layout": asdict(planned.layout),
        "kernels": config.kernels.model_dump(),
        "float8": list(planned.plan.float8),
        "units": describe_units(planned.plan, planned.layout, locate_key),
        "collectives_per_step": asdict(planned.resolution.row.traffic.collectives),
        "engine": planned.subject.engine_name,
        "torch_release": planned_release(),
        "assumptions": asdict(planned.hardware),
        "flops_are_exact": planned.subject.flops.is_exact,
        "rows": describe_comparison(planned.comparison, planned.resolution.row),
        "left_out": list(planned.comparison.notes),
        "resolved": {
            "gradient_accumulation": config.gradient_accumulation.model_dump(),
            "activation_checkpoint": config.activation_checkpoint.model_dump(),
            "reason": planned.resolution.reason,
        },
        "auto_would_be": planned.suggestion,
        "note": honesty(planned.subject.flops, config),
    }


def _model_name(config: JobConfig) -> str:
    return config.model.name if ":" in config.model.name else f"{config.model.name} {config.model.flavor}"
