"""The command `check`: it finds problems in a job file and its run folder, without torch or a GPU."""

from __future__ import annotations

import sys
from argparse import Namespace
from functools import partial

from titan_launch.commands.parser import Parser, at_least, check_weights, load_to_train
from titan_launch.config.job import JobConfig
from titan_launch.config.rules import Rule
from titan_launch.config.rules.packages import packages_are_installed
from titan_launch.config.rules.training import profiled_ranks_exist
from titan_launch.core.process import OK
from titan_launch.core.terminal import one_line, say
from titan_launch.plan.layout import plan_layout


def add_arguments(parser: Parser) -> None:
    parser.add_job("titan-launch check --config configs/llama_bn.toml --world-size 8")
    text = "also check that the parallelism degrees and the global batch match N ranks (default: not checked)"
    parser.add_argument("--world-size", type=at_least(1), metavar="N", help=text)


def run(arguments: Namespace) -> int:
    """Check the job, and print that no problem was found. Also print a warning if the job trains for too many epochs.
    Raises UserError with all problems."""
    more_rules: list[Rule] = [packages_are_installed]
    if arguments.world_size is not None:
        more_rules.append(partial(profiled_ranks_exist, world_size=arguments.world_size))
    loaded = load_to_train(arguments, arguments.world_size, more_rules)
    check_weights(loaded)
    say(one_line(f"{arguments.config}: no problems found (`plan` also checks the model; a run also checks the data)"))
    if warning := _warning_of_epochs(loaded.config, arguments.world_size):
        say(one_line(f"warning: {warning}"), file=sys.stderr)
    return OK


def _warning_of_epochs(config: JobConfig, world_size: int | None) -> str | None:
    """Return a warning if `training.steps` is too many epochs of the data, else None.

    Also return None if `training.steps`, the global batch size or the number of samples is unknown before the data is
    read. `world_size`: number of ranks, which determines the global batch size if the job does not set this size; None
    if unknown.
    """
    from titan_launch.data.epochs import known_samples, too_many_epochs

    batch, steps = config.training.global_batch_size, config.training.steps
    if batch is None and world_size is not None:
        batch = plan_layout(config.parallelism, config.training, world_size).global_batch_size
    num_samples = known_samples(config.data, config.training.seq_len) if batch and steps else None
    if not (batch and steps and num_samples):
        return None
    return too_many_epochs(steps, steps * batch / num_samples, num_samples)
