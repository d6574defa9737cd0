"""The command `check`."""

from __future__ import annotations

from argparse import Namespace

from titan_launch.commands.parser import Parser, at_least, check_weights, load_to_train
from titan_launch.config.rules.packages import packages_are_installed
from titan_launch.core.process import OK
from titan_launch.core.terminal import one_line, say


def add_arguments(parser: Parser) -> None:
    """Add the options of `check`."""
    parser.add_job("titan-launch check --config configs/llama_bn.toml --world-size 8")
    text = "also check that the parallelism degrees and the global batch match N ranks (default: not checked)"
    parser.add_argument("--world-size", type=at_least(1), metavar="N", help=text)


def run(arguments: Namespace) -> int:
    """Check the job, and print that no problem was found. Raises UserError with all problems."""
    check_weights(load_to_train(arguments, arguments.world_size, more_rules=(packages_are_installed,)))
    say(one_line(f"{arguments.config}: no problems found (`plan` also checks the model; a run also checks the data)"))
    return OK
