"""The command line. A bad job file is answered before torch is imported."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from titan_launch import __version__
from titan_launch.config.job import JobConfig
from titan_launch.config.loading.load import LoadedJob, load_job
from titan_launch.core.errors import ConfigError, Problem, UserError, did_you_mean
from titan_launch.core.import_string import refuse_imports_from, without_garbage_collection
from titan_launch.core.process import BAD_INPUT, OK, announce_once, run_and_leave

if TYPE_CHECKING:
    from titan_launch.train.health.coordination import StopRequest

USAGE = """\
usage: titan-launch --version
       titan-launch [train] --config JOB.toml [--fake-world-size N [--fake-rank R]] [--section.key=value ...]
       titan-launch check   --config JOB.toml [--world-size N] [--section.key=value ...]
       titan-launch plan    --config JOB.toml [--world-size N] [plan options] [--section.key=value ...]
       titan-launch launch  --config JOB.toml [--nproc-per-node N] [torchrun options] [--section.key=value ...]

  train   train in this process: as one rank of the group that torchrun describes, or alone (the default command);
          with --fake-world-size instead build what rank R (0) of N ranks would: mesh, units, optimizer and a step, on
          the CPU and without values; say what the rank holds, and write nothing (launch takes it too)
  check   parse the job file and check it, without torch or a GPU; with --world-size also how ranks and batch divide.
          Where the run's folder is on this host, also check that the run may start in it. What needs the model (a
          factory of your own, a rule that matches nothing) is left to `plan`, and to a run
  plan    show what a run would do, without a GPU or memory: what every module is stored, computed and reduced in, and
          for every mode of accumulation and recomputation the memory it takes, whether that fits, what it communicates
          and how long a step takes; and which mode "auto" stands for
  launch  check the job file, then run torchrun with one process per GPU (2 where there is no GPU). It takes torchrun's
          options for --nnodes, the rendezvous, --max-restarts and logs; --shutdown-timeout SECONDS: how long ranks may
          take to save and end after a signal (600)

plan options: --device NAME, --memory-gib, --intra-bandwidth, --inter-bandwidth (GB/s for each GPU, one direction),
  --gpus-per-node, --mfu: what to assume of the machines, as the keys of [planner] do; --json; --verbose: memory by what
  it is held for; --plot FILE.png; --engine analytic|trace: replay the schedule of a known model without torch (the
  default where possible), or trace any model; --rows all|own: every mode, or those that the job asks for or leaves open

JOB.toml is a job file, or the config.json of an earlier run. --section.key=value overrides any key of it; values are
TOML, and lists are counted from 0 (--precision.rules.0.param_dtype=float32). All keys: docs/reference/job_file.md.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. Returns the exit status: 0, 1 when a run fails, 2 for what the user can fix."""
    args = list(sys.argv[1:] if argv is None else argv)
    if not args or "--help" in args or "-h" in args:
        print(USAGE, end="")
        return OK if args else BAD_INPUT
    if args == ["--version"]:
        print(f"titan-launch {__version__}")
        return OK
    name = args.pop(0) if not args[0].startswith("-") else "train"
    commands = {"train": _train, "check": _check, "plan": _plan, "launch": _launch}
    try:
        if name not in commands:
            raise UserError(f'error: unknown command "{name}"; there are {", ".join(commands)} (see --help)')
        return commands[name](args)
    except UserError as error:
        announce_once(str(error))
        return BAD_INPUT


@dataclass(frozen=True)
class _Arguments:
    config: str
    options: dict[str, str]
    overrides: list[str]


def _train(args: list[str]) -> int:
    arguments = parse_arguments(args, FAKE_OPTIONS)
    if arguments.options:
        return _dry_run(arguments)
    from titan_launch.train.health.coordination import StopRequest

    stop = StopRequest()
    with stop.listening():  # before torch is imported, so that a signal of these seconds is not lost
        loaded = _load_to_train(arguments, _positive("WORLD_SIZE", os.environ.get("WORLD_SIZE", "1")))
        run_and_leave(lambda: _import_and_train(loaded, stop), loaded.provenance.describe)


def _import_and_train(loaded: LoadedJob, stop: StopRequest) -> None:
    with without_garbage_collection():
        from titan_launch.train.main import train

    train(loaded.config, loaded.provenance, stop)


FAKE_OPTIONS = ("fake-world-size", "fake-rank")
"""Options for a dry run."""

MOST_FAKE_RANKS = 16384
"""The mesh lists every group of ranks, which takes minutes for more."""


def _dry_run(arguments: _Arguments) -> int:
    """Start as one of many ranks that do not exist."""
    if "fake-world-size" not in arguments.options:
        raise UserError("error: --fake-rank is for a dry run; add --fake-world-size")
    world_size = _positive("--fake-world-size", arguments.options["fake-world-size"])
    if world_size > MOST_FAKE_RANKS:
        raise UserError(f"error: --fake-world-size {world_size}: at most {MOST_FAKE_RANKS} ranks can be imagined here")
    rank = arguments.options.get("fake-rank", "0")
    if not rank.isdecimal() or int(rank) >= world_size:
        raise UserError(f"error: --fake-rank {rank}: must be a whole number from 0 to {world_size - 1}")
    loaded = _load(arguments, world_size)
    run_and_leave(lambda: _import_and_build(loaded, world_size, int(rank)), loaded.provenance.describe)


def _import_and_build(loaded: LoadedJob, world_size: int, rank: int) -> None:
    from titan_launch.commands.plan import print_dry_run

    print_dry_run(loaded.config, world_size, rank)


def _check(args: list[str]) -> int:
    arguments = parse_arguments(args, options=("world-size",))
    world_size = arguments.options.get("world-size")
    _load_to_train(arguments, None if world_size is None else _positive("--world-size", world_size))
    print(f"{arguments.config}: no problems found (what only the model can tell: plan; the data: a run)")
    return OK


PLAN_ALIASES = {
    "--device": "--planner.device",
    "--memory-gib": "--planner.memory_gib",
    "--intra-bandwidth": "--planner.intra_node_gb_per_s",
    "--inter-bandwidth": "--planner.inter_node_gb_per_s",
    "--gpus-per-node": "--planner.gpus_per_node",
    "--mfu": "--planner.mfu",
}
"""Options of `plan` that stand for keys of the job."""


def _plan(args: list[str]) -> int:
    from titan_launch.commands.plan import PlanOptions, print_plan

    flags = ("--json", "--verbose")
    rest = [arg for arg in args if arg not in flags]
    arguments = parse_arguments(rest, options=("world-size", "engine", "rows", "plot"))
    world_size = _positive("--world-size", arguments.options.get("world-size", "1"))
    options = PlanOptions(
        engine=_one_of("engine", arguments.options.get("engine"), ("analytic", "trace")),
        only_own=_one_of("rows", arguments.options.get("rows"), ("all", "own")) == "own",
        as_json="--json" in args,
        verbose="--verbose" in args,
        plot=arguments.options.get("plot"),
    )
    if options.plot is not None:
        from titan_launch.plan.report.plot import check_plot

        check_plot(options.plot)
    loaded = _load(arguments, world_size, PLAN_ALIASES)
    run_and_leave(
        lambda: print_plan(loaded.config, world_size, loaded.provenance.place, options), loaded.provenance.describe
    )


def _launch(args: list[str]) -> int:
    from titan_launch.launch.options import LAUNCH_OPTIONS, plan_processes
    from titan_launch.launch.torchrun import launch

    arguments = parse_arguments(args, (*LAUNCH_OPTIONS, *FAKE_OPTIONS))
    fake = {name: arguments.options.pop(name) for name in FAKE_OPTIONS if name in arguments.options}
    processes = plan_processes(arguments.options)
    if fake:
        is_given = bool({"nnodes", "nproc-per-node"} & set(arguments.options))
        if is_given and str(processes.world_size) not in ("None", fake.get("fake-world-size")):
            reason = f"there are {processes.world_size} processes by --nnodes and --nproc-per-node"
            raise UserError(f"error: --fake-world-size {fake.get('fake-world-size')}: {reason}; drop these, or it")
        return _dry_run(replace(arguments, options=fake))
    loaded = _load_to_train(arguments, processes.world_size, is_elastic=processes.world_size is None)
    worker_args = ["--config", arguments.config, *arguments.overrides]
    return launch(processes, worker_args, final_statuses=(BAD_INPUT,), run_folder=loaded.config.job.run_folder)


def _load_to_train(arguments: _Arguments, world_size: int | None, is_elastic: bool = False) -> LoadedJob:
    """Return the job, checked, also against the earlier run in its folder where this host sees one.

    The global batch size is part of that check. Without a world size, a job that leaves it unset is not compared.
    """
    loaded = _load(arguments, world_size, is_elastic=is_elastic)
    config = loaded.config
    if not config.job.run_folder.exists():
        return loaded
    from titan_launch.plan.layout import plan_layout, with_global_batch_size
    from titan_launch.train.run_folder.folder import check_earlier_run

    if world_size is not None:
        config = with_global_batch_size(config, plan_layout(config.parallelism, config.training, world_size))
    elif config.training.global_batch_size is None:
        return loaded
    try:
        with suppress(OSError):  # a folder that cannot be read: the run says so when it opens the folder
            check_earlier_run(config.job.run_folder, config, config.checkpoint.load)
    except ConfigError as error:
        raise UserError(loaded.provenance.describe(error.problems)) from None
    return loaded


def _load(
    arguments: _Arguments,
    world_size: int | None,
    aliases: Mapping[str, str] | None = None,
    is_elastic: bool = False,
) -> LoadedJob:
    """The job, checked; with a world size also whether ranks and batch divide. `is_elastic`: the number of ranks may
    change from one start to the next."""
    from titan_launch.plan.hardware import planned_device_exists

    def elastic_rule(config: JobConfig) -> Iterator[Problem]:
        if is_elastic and config.training.global_batch_size is None:
            reason = "is missing: it would follow from the number of ranks, which may change with --nnodes min:max"
            yield Problem(("training", "global_batch_size"), reason)

    def layout_rule(config: JobConfig) -> Iterator[Problem]:
        if world_size is None:
            return
        from titan_launch.plan.layout import plan_layout

        try:
            plan_layout(config.parallelism, config.training, world_size)
        except ConfigError as error:
            yield from error.problems

    rules = (planned_device_exists, elastic_rule, layout_rule)
    loaded = load_job(arguments.config, arguments.overrides, rules, aliases)
    checkpoint = loaded.config.checkpoint
    named = [path for path in (checkpoint.load, checkpoint.initial_load_path) if os.sep in str(path)]
    refuse_imports_from(
        [loaded.config.job.run_folder, *map(Path, map(str, named))], Path(loaded.config.job.dump_folder)
    )
    return loaded


def parse_arguments(args: list[str], options: Sequence[str]) -> _Arguments:
    """Take `--config` and the named options out of the arguments; everything else overrides the job file."""
    found: dict[str, str] = {}
    overrides: list[str] = []
    rest = iter(args)
    for arg in rest:
        name, has_value, value = arg.removeprefix("--").partition("=")
        if arg.startswith("--") and name.replace("_", "-") in FAKE_OPTIONS and FAKE_OPTIONS[0] not in options:
            raise UserError(f"error: --{name} is for a dry run, by train or launch; this command takes --world-size N")
        name = name.replace("_", "-") if name.replace("_", "-") in options else name  # torchrun takes both
        if not arg.startswith("--") or name not in ("config", *options):
            overrides.append(arg)
            continue
        if not has_value:
            value = next(rest, "")
        if not value or value.startswith("--"):
            raise UserError(f"error: --{name} needs a value (see --help)")
        found[name] = value
    if "config" not in found:
        raise UserError("error: --config JOB.toml is missing (see --help)")
    return _Arguments(found.pop("config"), found, overrides)


def _positive(name: str, text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise UserError(f"error: {name} {text}: must be a whole number of at least 1")
    return int(text)


Value = TypeVar("Value", bound=str)


def _one_of(name: str, value: str | None, values: Sequence[Value]) -> Value | None:
    """A value of an option with a closed choice; None where it is not given."""
    if value is None:
        return None
    for known in values:
        if value == known:
            return known
    hint = did_you_mean(value, values)
    raise UserError(f"error: --{name} {value}: there is {' and '.join(values)}{hint}")
