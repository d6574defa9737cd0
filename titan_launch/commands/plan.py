"""The command `plan`, and dry runs: predictions of a job on any number of ranks, without a GPU.

The first plan of a model records microbatches with torch, and stores the recordings in the user's cache. Later plans of
the model use these recordings, even if the number of shards, the modes, the optimizer or paths differ. A later plan
takes a fraction of a second, and does not import torch. The modes of a job are `gradient_accumulation.mode` and
`activation_checkpoint.mode`; a choice is one mode for each of these keys.
"""

from __future__ import annotations

import json
import sys
import time
from argparse import SUPPRESS, Namespace
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, NoReturn, get_args

from titan_launch.commands.parser import Parser, at_least, check_weights, load, recordings_of, torch_needed
from titan_launch.config.job import JobConfig
from titan_launch.config.sections.parallelism import ActivationCheckpointConfig, ParallelismConfig
from titan_launch.config.sections.run import PlannerConfig
from titan_launch.core.errors import UserError
from titan_launch.core.patches import environment
from titan_launch.core.phantom import is_phantom
from titan_launch.core.process import run_and_exit
from titan_launch.core.terminal import counted, one_line, say, say_data
from titan_launch.core.torch_release import planned_release
from titan_launch.plan.advice import Advice, advise, smallest_sufficient
from titan_launch.plan.auto_mode import Resolution, check_limit, largest_batch, recommend, remedies, resolve
from titan_launch.plan.experts import active_parameters, describe_load
from titan_launch.plan.hardware import GIB, Hardware, format_memory, free_memory_gib, planned_hardware
from titan_launch.plan.job import (
    check_plan,
    configured_choice,
    is_auto,
    is_auto_batch,
    plan_job,
    plan_units,
    possible_choices,
    with_local_batch_size,
    with_unsharded_parameters,
)
from titan_launch.plan.layout import Layout, plan_layout
from titan_launch.plan.memory.ledger import HELD
from titan_launch.plan.memory.replay_engine import ReplayEngine
from titan_launch.plan.report import table, unit_table
from titan_launch.plan.report.modes import ComparedJob, ModeComparison, PlanRow, compare, estimate_reserved
from titan_launch.plan.report.plot import check_plot, plot_comparison
from titan_launch.plan.types import ModelPlan
from titan_launch.recipes import writing

EngineName = Literal["replay", "trace"]

_LONG = 10.0
"""A plan that takes more than this number of seconds prints a message that recommends `--rows own`."""

_BANDWIDTH = "GB/s that a device sends {}, in one direction (default: that of --device)"

KEY_OPTIONS = (
    ("--device", "planner.device", "NAME", "device to plan for, such as h100-80gb (default: that of the job)"),
    ("--memory-gib", "planner.memory_gib", "GIB", "GiB of memory per device (default: that of --device)"),
    ("--intra-bandwidth", "planner.intra_node_gb_per_s", "GB/S", _BANDWIDTH.format("to devices of its host")),
    ("--inter-bandwidth", "planner.inter_node_gb_per_s", "GB/S", _BANDWIDTH.format("to devices of other hosts")),
    ("--gpus-per-node", "planner.gpus_per_node", "N", f"devices per host (default: {PlannerConfig().gpus_per_node})"),
    ("--expert-load", "planner.expert_load", "X", "tokens of the busiest rank / mean tokens of a rank (default: 1)"),
    ("--speeds", "planner.speeds", "FILE", "speeds that measure-device measured (default: the data sheet of --device)"),
    ("--mfu", "planner.mfu", "X", "fraction of the peak FLOP/s that a step reaches; replaces the speeds of operations"),
)
"""Options that set a key of the job, as (option, key, metavar, help text)."""


def add_arguments(parser: Parser) -> None:
    parser.add_job("titan-launch plan --config configs/llama3_8b.toml --world-size 8 --device h100-80gb")
    parser.add_argument("--world-size", type=at_least(1), default=1, metavar="N", help="ranks (default: 1)")
    text = "replay: record a microbatch, and compute the memory of a step from the recording; trace: run a whole step "
    text += "without values, which is slower (default: replay)"
    parser.add_argument("--engine", choices=get_args(EngineName), default="replay", help=text)
    text = "choices to compare; own: only the modes that the job sets or that auto may choose (default: all)"
    parser.add_argument("--rows", choices=("all", "own"), default="all", help=text)
    text = 'plan with the largest microbatch that fits, as with training.local_batch_size = "auto"'
    parser.add_argument("--max-batch", action="store_true", help=text)
    parser.add_argument(
        "--verbose",
        action="store_true",
        help="also print more columns, a table of FSDP2 units, and memory by category",
    )
    text = "also train three steps as rank R on this device, without other ranks, to see whether its memory suffices"
    parser.add_argument("--trial", type=at_least(0), metavar="R", help=text)
    text = "also measure memory: train three steps of the rank with the highest peak on a phantom GPU (needs --device)"
    parser.add_argument("--measure", action="store_true", help=text)
    text = "also name changes that save memory, even if the job fits"
    parser.add_argument("--advise", action="store_true", help=text)
    parser.add_argument("--search", action="store_true", help="find the layouts and modes with the shortest step")
    text = "with --search: keep this key as the job sets it, or at this value (may be repeated)"
    parser.add_argument("--hold", action="append", default=[], metavar="KEY[=VALUE]", help=text)
    text = "with --search: also try a half, a quarter, ... of --world-size, down to the fewest ranks that suffice"
    parser.add_argument("--max-gpus", action="store_true", help=text)
    text = "with --search: try global batches of LOW samples, 2 LOW, 4 LOW, ... up to HIGH"
    parser.add_argument("--global-batch", metavar="LOW:HIGH", help=text)
    text = "with --search: write the best job, as a file that extends the job file"
    parser.add_argument("--out", metavar="FILE", help=text)
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.add_argument("--plot", metavar="FILE", help="also write a picture: .png, .pdf or .svg (needs matplotlib)")
    hardware = parser.add_argument_group("hardware")
    for option, key, metavar, text in KEY_OPTIONS:
        hardware.add_argument(option, metavar=metavar, default=SUPPRESS, help=f"{text}; sets {key}")
        parser.key_options[option] = f"--{key}"


def run(arguments: Namespace) -> NoReturn:
    """Print the plan of the job, or with `--search` search for the fastest layouts, and end the process."""
    if arguments.search:
        _refuse_options_of_one_layout(arguments)
        from titan_launch.commands.plan_search import run_search

        run_search(arguments)
    if given := [name for name in ("hold", "max_gpus", "global_batch", "out") if getattr(arguments, name)]:
        raise UserError(f"error: --{given[0].replace('_', '-')} needs --search")
    if arguments.measure and arguments.trial is not None:
        difference = "--measure trains on a phantom GPU, --trial on this device"
        raise UserError(f"error: --measure and --trial cannot be used together; remove one ({difference})")
    if arguments.plot is not None:
        check_plot(arguments.plot)
    loaded, world_size = load(arguments, arguments.world_size), arguments.world_size
    check_weights(loaded)
    config = with_local_batch_size(loaded.config, "auto") if arguments.max_batch else loaded.config
    run_and_exit(lambda: print_plan(config, world_size, loaded.provenance.place, arguments), loaded.provenance.describe)


def _refuse_options_of_one_layout(arguments: Namespace) -> None:
    """Raise UserError for an option that cannot be used with `--search`."""
    defaults: dict[str, Any] = dict.fromkeys(("max_batch", "verbose", "measure", "advise"), False)
    defaults |= {"plot": None, "trial": None, "rows": "all", "engine": "replay"}
    if given := [name for name, default in defaults.items() if getattr(arguments, name) != default]:
        option = f"--{given[0].replace('_', '-')}"
        remedy = f"write the best job with --out, and plan that job with {option}"
        raise UserError(f"error: {option} needs one layout, and --search plans many; {remedy}")


@dataclass(frozen=True)
class _Planned:
    """All results of a plan."""

    layout: Layout
    hardware: Hardware
    engine_name: EngineName
    subject: ComparedJob
    comparison: ModeComparison
    resolution: Resolution
    plan: ModelPlan
    """The FSDP2 units of the resolved job."""

    has_chosen_batch: bool
    """True if the plan has chosen the size of the microbatch (`training.local_batch_size = "auto"`, `--max-batch`)."""

    recommendation: Resolution | None
    """The best choice of modes; the same object as `resolution` if the job has a mode `auto`. Otherwise None if no
    choice fits, if no memory limit is known, or if not all choices were compared."""

    advice: tuple[Advice, ...] = ()
    """The changes of the job that save memory at the lowest cost in step time. They are sought if all choices were
    compared and none fits, or with `--advise`. Empty if not sought or not found."""

    sufficient_ranks: int | None = None
    """If the job does not fit: a number of ranks on which the job would fit. None if not sought or not found."""

    trial: dict[str, Any] | None = None
    """Memory of a trial on a GPU or a phantom GPU. None without a trial, or after a trial on a CPU."""

    @property
    def has_flops(self) -> bool:
        """False if the FLOPs of the model are unknown."""
        rows = (row for row in self.comparison.rows if row.choice.activation_checkpoint.mode != "memory_budget")
        return all(row.flops_per_rank is not None for row in rows)


def print_plan(config: JobConfig, world_size: int, locate_key: unit_table.KeyLocator, arguments: Namespace) -> None:
    """Print the plan of a job on `world_size` ranks, as text or as JSON, and write the picture of `--plot`.

    Raises the same ConfigErrors as the start of a run, for example if none of the modes that `auto` may choose fits.
    Raises UserError for an impossible trial or measurement, and RunError if the device has too little memory for it.
    """
    trial, only_own = arguments.trial, arguments.rows == "own"
    if trial is not None and trial >= world_size:
        raise UserError(f"--trial {trial}: must be a rank below --world-size {world_size}; the first rank is 0")
    if arguments.measure:
        from titan_launch.phantom_gpu.environment import PHANTOMS

        if planned_hardware(config, world_size).device not in PHANTOMS:
            raise UserError(f"--measure needs --device, one of {', '.join(PHANTOMS)}")
    begin = time.perf_counter()
    planned = _plan(config, world_size, arguments.engine, only_own, arguments.advise)
    seconds = time.perf_counter() - begin
    if seconds > _LONG and not only_own:
        own = "--rows own is faster: it plans only the modes that the job sets or that auto may choose"
        say(f"planned in {seconds:.0f} s; {own}", file=sys.stderr)
    if trial is not None:
        planned = replace(planned, trial=_try(planned, trial))
    elif arguments.measure:
        planned = replace(planned, trial=_measure(planned))
    if arguments.plot is not None:
        title = f"{config.job.name}: {unit_table.model_name(config)} on {counted(world_size, 'rank')}"
        plot_comparison(planned.comparison, planned.hardware, title, arguments.plot, *_best(planned))
        say(one_line(f"picture: {arguments.plot}"), file=sys.stderr)
    if arguments.json:
        say_data(json.dumps(_describe(planned, locate_key), indent=2))
    else:
        say(_format(planned, locate_key, arguments.verbose))


def _try(planned: _Planned, rank: int) -> dict[str, Any] | None:
    """Train three steps as `rank` with the modes of a plan. Return a dictionary with the rank, the device, and the
    fields of `TrialMemory` in bytes; None on a CPU. Raises RunError if the memory of this device does not suffice."""
    import torch

    from titan_launch.trace.trial import run_trial

    config = planned.resolution.config
    is_on_gpu = config.job.device != "cpu" and torch.cuda.is_available()
    memory = run_trial(config, planned.layout, rank, torch.device("cuda" if is_on_gpu else "cpu"))
    device = "the CPU" if memory is None else "the phantom GPU" if is_phantom() else "the GPU"
    say(f"trial: rank {rank} has trained three steps on {device}", file=sys.stderr)
    name = torch.cuda.get_device_name() + " (a phantom)" * is_phantom() if is_on_gpu else ""
    return None if memory is None else {"rank": rank, "device": name, **asdict(memory)}


def _measure(planned: _Planned) -> dict[str, Any]:
    """Train three steps of the rank with the highest planned peak memory, on a phantom GPU of the planned device.
    Return a dictionary as `_try` does. Raises UserError if the host has too little memory, and RunError if the memory
    of the device does not suffice."""
    from titan_launch.phantom_gpu.environment import RANK_GIB, phantom_gpus

    config, layout, hardware = planned.resolution.config, planned.layout, planned.hardware
    footprint = planned.resolution.row.footprint
    offloaded, free = footprint.host_bytes / GIB, free_memory_gib()
    if offloaded and free < offloaded + RANK_GIB:
        keys = ["training.enable_cpu_offload = true"] * config.training.enable_cpu_offload
        keys += ["activation_checkpoint.offload = true"] * config.activation_checkpoint.offload
        needed = f"{offloaded + RANK_GIB:.1f} GiB of host memory, {offloaded:.1f} GiB for {' and '.join(keys)}"
        remedy = "plan without --measure, measure a model with fewer layers, or use a machine with more memory"
        raise UserError(f"--measure: needs about {needed}; {free:.1f} GiB are free; {remedy}")
    assert hardware.device is not None
    with phantom_gpus(hardware.device, 1, hardware.memory_gib, hides_gpu=True) as variables, ExitStack() as stack:
        import torch

        from titan_launch.train.trace_subprocess import TraceProcess

        stack.enter_context(environment(**variables))
        rank = ((footprint.pipeline_rank or 0) * layout.ranks_per_stage, torch.device("cuda"))
        trial: dict[str, Any] = TraceProcess(config, layout.world_size, hardware, stack, rank).result()
        measured: dict[str, Any] = trial["trial"]
        return measured


def print_dry_run(config: JobConfig, world_size: int, rank: int) -> None:
    """Run one training step as rank `rank` of `world_size`, on fake tensors. Print a description of the rank.

    Raises the same ConfigErrors as the start of a run, for example if none of the modes that `auto` may choose fits.
    """
    config = with_batch_size(config, world_size)
    layout = plan_layout(config.parallelism, config.training, world_size)
    hardware = planned_hardware(config, world_size)
    config = with_unsharded_parameters(config, layout)
    if is_auto(config):
        resolution = _plan(config, world_size, only_own=True).resolution
        config = resolution.config
        say(f"auto: {resolution.reason}")
    from titan_launch.trace.dry_run import dry_run

    say(dry_run(config, layout, hardware, rank))


def with_batch_size(config: JobConfig, world_size: int, engine: EngineName = "replay") -> JobConfig:
    """If `training.local_batch_size` is `auto`, return the job with the largest microbatch that is planned to fit.
    Otherwise return the job unchanged. Raises the ConfigErrors of `largest_batch`."""
    if not is_auto_batch(config):
        return config
    hardware = planned_hardware(config, world_size)

    def predict(config: JobConfig, layout: Layout) -> ModeComparison:
        config = with_unsharded_parameters(config, layout)
        return compare(config, layout, _subject(config, layout, hardware, engine), hardware, only_own=True)

    return with_local_batch_size(config, largest_batch(config, world_size, hardware, predict))


def _plan(
    config: JobConfig, world_size: int, engine: EngineName = "replay", only_own: bool = False, advises: bool = False
) -> _Planned:
    """Return the plan of a job. `engine`, `only_own`, `advises`: see `--engine`, `--rows own` and `--advise`."""
    chooses_batch, hardware = is_auto_batch(config), planned_hardware(config, world_size)
    check_limit(config, hardware)  # first, because recording takes seconds
    config = with_batch_size(config, world_size, engine)
    layout = plan_layout(config.parallelism, config.training, world_size)
    parallelism, config = config.parallelism, with_unsharded_parameters(config, layout)
    subject = _subject(config, layout, hardware, engine)
    if isinstance(subject.engine, ReplayEngine):
        choices, _ = possible_choices(config, layout, subject.inventory, only_own)
        subject.engine.record_ahead(choices)
        subject.engine.predict_ahead(choices)
    comparison = compare(config, layout, subject, hardware, only_own)
    resolution = resolve(comparison, hardware)
    plan = plan_job(resolution.config, subject.inventory)
    best = resolution if is_auto(config) else None if only_own else recommend(comparison, hardware)
    planned = _Planned(layout, hardware, engine, subject, comparison, resolution, plan, chooses_batch, best)
    is_needed = resolution.row.verdict not in (None, "fits") and best is None and not only_own
    return _advised(planned, parallelism) if is_needed or advises else planned


def _advised(planned: _Planned, parallelism: ParallelismConfig) -> _Planned:
    """Return the plan with advice: changes that save memory. For a job that does not fit, also add the number of ranks
    that suffices.

    A change suffices if the job is then planned to fit. But a job may have run out of memory although it is planned to
    fit, or although no memory limit is known. For such a job, a change suffices if the job then reserves at most four
    fifths of its present memory.

    `parallelism`: section before `with_unsharded_parameters` has changed it, because a changed job may have a different
    number of shards.
    """
    layout, hardware, row = planned.layout, planned.hardware, planned.resolution.row
    config = planned.resolution.config.model_copy(update={"parallelism": parallelism})
    fits = row.verdict in (None, "fits")
    limit = 0.8 * row.reserved_bytes if fits else hardware.usable_bytes
    assert limit is not None, "a job with a verdict has a memory limit"

    def predict(config: JobConfig, layout: Layout) -> float:
        config = with_unsharded_parameters(config, layout)
        subject = _subject(config, layout, hardware)
        plan_job(config, subject.inventory)  # raises ConfigError for modes that cannot be compiled
        footprint = subject.engine(configured_choice(config))
        return estimate_reserved(footprint.with_workspace(hardware.workspace_bytes), hardware)

    found = tuple(advise(config, layout, limit, predict))
    ranks = None if fits else smallest_sufficient(config, layout, limit, predict)
    return replace(planned, advice=found, sufficient_ranks=ranks)


def _subject(config: JobConfig, layout: Layout, hardware: Hardware, engine: EngineName = "replay") -> ComparedJob:
    """Return the recorded model, with the engine that predicts the job's memory. Raises ConfigError as `check_plan`."""
    recordings = recordings_of(config, layout, hardware.kernels)
    if engine == "replay":
        subject = ComparedJob.replayed(config, layout, hardware, recordings)
    else:
        with torch_needed(config):
            from titan_launch.trace.trace_engine import TraceEngine

        traced = TraceEngine(config, layout, hardware.kernels)
        subject = ComparedJob(recordings.subject().inventory, recordings.flops, traced)
    check_plan(config, plan_units(config, subject.inventory, keep_params_unsharded=False), layout)
    return subject


def _format(planned: _Planned, locate_key: unit_table.KeyLocator, verbose: bool) -> str:
    config, comparison = planned.resolution.config, planned.comparison
    best, meaning = _best(planned)
    chosen = [f"Largest microbatch that fits: {planned.layout.local_batch_size}."] if planned.has_chosen_batch else []
    parts = [
        "\n".join([*chosen, _verdict(planned), *_advice(planned)]),
        table.format_comparison(comparison, verbose, best),
        table.format_legend(comparison, verbose, meaning),
        unit_table.format_lines(unit_table.summary_of_job(config, planned.plan, planned.layout)),
        table.format_assumptions(
            planned.hardware,
            planned.has_flops,
            planned.engine_name,
            config,
            describe_load(config, planned.plan, planned.layout),
        ),
    ]
    if planned.trial is not None:
        parts.insert(1, _format_trial(planned, planned.trial))
    if verbose:
        parts += [
            unit_table.format_plan(config, planned.plan, planned.layout, locate_key),
            table.format_categories(comparison),
        ]
    return "\n\n".join(parts)


def _format_trial(planned: _Planned, trial: dict[str, Any]) -> str:
    row, overhead = planned.resolution.row, planned.hardware.overhead_gib
    pairs = (
        ("active", trial["active"], row.footprint.peak_bytes),
        ("reserved", trial["reserved"], row.reserved_bytes - overhead * GIB),
    )
    found = (f"{name} {format_memory(is_)} (planned {format_memory(planned_)})" for name, is_, planned_ in pairs)
    rest = f"The overhead of the process, {overhead:.3g} GiB, is not measured."
    return f"Measured on rank {trial['rank']}, {trial['device']}: {', '.join(found)}. {rest}"


def _best(planned: _Planned) -> tuple[PlanRow | None, str | None]:
    """Return the row of the table that has the mark `*`, and the meaning of the mark. Return (None, None) if no choice
    is recommended."""
    if planned.recommendation is None:
        return None, None
    return planned.recommendation.row, "chosen by `auto`" if is_auto(planned.comparison.config) else "recommended"


def _verdict(planned: _Planned) -> str:
    """Return the first lines of the output: the verdict on memory, and the recommended modes or the remedies."""
    row, hardware, best = planned.resolution.row, planned.hardware, planned.recommendation
    needed = f"about {table.format_gib(row.reserved_bytes)}"
    if hardware.memory_gib is None:
        return (
            f"The job needs {needed} GiB per rank.\n"
            "No memory limit is known: set --device or --memory-gib to see whether the job fits."
        )
    percent = 100 * row.reserved_bytes / GIB / hardware.memory_gib
    limit, margin = f"{hardware.memory_gib:.4g}", f"{hardware.margin_gib:.3g}"
    memory = f"{needed} of {limit} GiB per rank ({percent:.0f} %; margin {margin} GiB)"
    verdict = {
        "fits": f"Fits: {memory}.",
        "tight": f"Tight: {memory}; train three steps to see whether it fits.",
        "does not fit": f"Does not fit: {memory}.",
        None: "",
    }[row.verdict]
    if best is not None and is_auto(planned.comparison.config):
        return f"{verdict}\nChosen by `auto`: {best.reason}."
    if best is not None and best.row is row:
        return f"{verdict}\nRecommended (the modes of the job): {best.reason}."
    if best is not None:
        return f"{verdict}\nRecommended: {best.reason}.\n\n{_keys(planned.resolution.config, best.config)}"
    if row.verdict == "fits":
        return verdict
    if not planned.advice:
        advice = "; ".join(remedies(planned.comparison, planned.comparison.rows))
        return f"{verdict}\n{advice[0].upper()}{advice[1:]}."
    held = sum(row.footprint.by_category.get(category, 0) for category in HELD)
    alone = f"Parameters and optimizer alone take {format_memory(held)} per rank."
    if planned.sufficient_ranks is not None:
        alone = f"{alone} {planned.sufficient_ranks} ranks suffice."
    return f"{verdict}\n{alone}"


def _advice(planned: _Planned) -> list[str]:
    """Return lines with the changes that save memory; an empty list if none were sought or found."""
    if not planned.advice:
        return []
    found = [advice for advice in planned.advice if advice.fits] or planned.advice
    row = planned.resolution.row
    aim = "save a fifth or more" if row.verdict in (None, "fits") else "suffice"
    title = f"Changes that {aim}, the cheapest first:" if found[0].fits else f"None of these changes would {aim}:"
    return ["", title, *(f"  {line}" for advice in found for line in advice.text())]


def _keys(config: JobConfig, best: JobConfig) -> str:
    """Return the keys in which the modes of `best` differ from those of `config`, as TOML to paste."""
    tables = []
    for name in ("gradient_accumulation", "activation_checkpoint"):
        own, wanted = getattr(config, name).model_dump(), getattr(best, name).model_dump(exclude_none=True)
        changed = [writing.Row(key, value) for key, value in wanted.items() if own[key] != value]
        tables.append(writing.Table(name, changed))
    return writing.job_text((), tables).strip()


def _describe(planned: _Planned, locate_key: unit_table.KeyLocator) -> dict[str, Any]:
    """Return the plan as a dictionary for JSON."""
    config, best = planned.resolution.config, planned.recommendation
    flops, speeds = planned.subject.flops_of(ActivationCheckpointConfig()), planned.hardware.speeds
    return {
        "model": unit_table.model_name(config),
        "parameters": planned.plan.inventory.num_parameters,
        "active_parameters": active_parameters(config, planned.plan),
        "flops_per_sample": None if flops is None else flops.per_sample,
        "expert_load": describe_load(config, planned.plan, planned.layout),
        "layout": asdict(planned.layout),
        "kernels": config.kernels.model_dump(),
        "float8": list(planned.plan.float8),
        "units": unit_table.describe_units(planned.plan, planned.layout, locate_key),
        "collectives_per_step": asdict(planned.resolution.row.traffic.collectives),
        "engine": planned.engine_name,
        "torch_release": planned_release(),
        "assumptions": {**asdict(replace(planned.hardware, speeds=None)), "speeds": speeds and speeds.source},
        "rows": table.describe_comparison(planned.comparison, planned.resolution.row),
        "notes": list(planned.comparison.notes),
        "resolved": {
            **_modes(config),
            "local_batch_size": planned.layout.local_batch_size,
            "reason": planned.resolution.reason,
        },
        "recommended": None if best is None else {**_modes(best.config), "reason": best.reason},
        "sufficient_ranks": planned.sufficient_ranks,
        "advice": [asdict(advice) for advice in planned.advice],
        "trial": planned.trial,
        "accuracy": table.accuracy(config, planned.has_flops),
    }


def _modes(config: JobConfig) -> dict[str, Any]:
    return {
        "gradient_accumulation": config.gradient_accumulation.model_dump(),
        "activation_checkpoint": config.activation_checkpoint.model_dump(),
    }
