"""The command `train`, and its dry runs: one step as one rank of N, on fake tensors and without a GPU."""

from __future__ import annotations

import os
from argparse import ArgumentTypeError, Namespace
from typing import NoReturn

from titan_launch.commands.parser import Parser, at_least, check_weights, load, load_to_train
from titan_launch.core.errors import UserError
from titan_launch.core.patches import without_garbage_collection
from titan_launch.core.process import run_and_exit
from titan_launch.launch.options import LAST_PORT
from titan_launch.train.health.coordination import StopRequest

MOST_FAKE_RANKS = 16384
"""Largest world size of a dry run. For more ranks, the DeviceMesh would take minutes to list all groups of ranks."""


def add_arguments(parser: Parser) -> None:
    parser.add_job("python -m titan_launch --config configs/llama_bn.toml --training.steps=20")
    add_output(parser)
    add_dry_run(parser)


def add_output(parser: Parser) -> None:
    """Add the options that choose what a run prints."""
    group = parser.add_argument_group("output", "the log files always have everything")
    text = "print no reports and no progress bar, and only warnings and errors"
    group.add_argument("--quiet", action="store_true", help=text)
    text = f"lowest level of the messages to print: {', '.join(LOG_LEVELS)} (default: info; with --quiet: warning)"
    group.add_argument("--log-level", choices=LOG_LEVELS, metavar="LEVEL", help=text)


LOG_LEVELS = ("debug", "info", "warning", "error")
"""Levels of `--log-level`. At level `debug`, a run also prints the table of FSDP2 units."""


def add_dry_run(parser: Parser) -> None:
    group = parser.add_argument_group("dry run")
    text = (
        "build the model and run one training step as one rank of N, on the CPU and without values; print what the "
        f"rank holds, and write nothing (at most {MOST_FAKE_RANKS} ranks)"
    )
    group.add_argument("--fake-world-size", type=at_least(1), metavar="N", help=text)
    group.add_argument("--fake-rank", type=at_least(0), metavar="R", help="rank of the dry run (default: 0)")


def run(arguments: Namespace) -> NoReturn:
    """Train, or make a dry run, and end the process."""
    if is_dry_run(arguments):
        dry_run(arguments)
    stop = StopRequest()
    with stop.listening():  # before torch is imported, so that no signal during the import is lost
        loaded = load_to_train(arguments, torchrun_world_size())
        if os.environ.get("RANK", "0") == "0":
            check_weights(loaded)

        def import_and_train() -> None:
            with without_garbage_collection():
                from titan_launch.train.main import train

            level = arguments.log_level or ("warning" if arguments.quiet else "info")
            train(loaded.config, loaded.provenance, stop, level.upper(), arguments.quiet)

        run_and_exit(import_and_train, loaded.provenance.describe)


def is_dry_run(arguments: Namespace) -> bool:
    """Return True if the command line has an option of a dry run."""
    return (arguments.fake_world_size, arguments.fake_rank) != (None, None)


def dry_run(arguments: Namespace) -> NoReturn:
    """Check the options of a dry run, make the dry run, and end the process."""
    world_size, rank = arguments.fake_world_size, arguments.fake_rank or 0
    if world_size is None:
        raise UserError("error: --fake-rank is for a dry run; add --fake-world-size")
    if world_size > MOST_FAKE_RANKS:
        raise UserError(f"error: --fake-world-size: must be at most {MOST_FAKE_RANKS} ranks, not {world_size}")
    if rank >= world_size:
        raise UserError(f"error: --fake-rank: must be a whole number from 0 to {world_size - 1}, not {rank}")
    loaded = load(arguments, world_size)

    def import_and_print() -> None:
        from titan_launch.commands.plan import print_dry_run

        print_dry_run(loaded.config, world_size, rank)

    run_and_exit(import_and_print, loaded.provenance.describe)


_VARIABLES = {"WORLD_SIZE": 1, "RANK": 0, "LOCAL_WORLD_SIZE": 1, "LOCAL_RANK": 0, "MASTER_PORT": 1}
"""The environment variables of torchrun whose values are numbers, and the smallest valid value of each."""


def torchrun_world_size() -> int:
    """Return the number of ranks from torchrun's environment variables; 1 without torchrun. Raises UserError if a
    variable is wrong or missing."""
    given = {}
    for name, minimum in _VARIABLES.items():
        try:
            given[name] = at_least(minimum)(os.environ.get(name, str(minimum)))
        except ArgumentTypeError as error:
            raise UserError(f"error: environment variable {name}: {error}") from None
    world_size = given["WORLD_SIZE"]
    for name, total in (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE")):
        if given[name] >= given[total] and total in os.environ:
            reason = f"must be less than {total} ({given[total]}), not {given[name]}"
            raise UserError(f"error: environment variable {name}: {reason}")
    if given["MASTER_PORT"] > LAST_PORT:
        reason = f"must be a port from 1 to {LAST_PORT}, not {given['MASTER_PORT']}"
        raise UserError(f"error: environment variable MASTER_PORT: {reason}")
    needed = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if world_size > 1 or "RANK" in os.environ else ()
    if missing := [name for name in needed if not os.environ.get(name)]:
        reason = "torchrun sets it for each rank; start the run with titan-launch launch, or with torchrun"
        raise UserError(f"error: environment variable {missing[0]}: is missing; {reason}")
    return world_size
