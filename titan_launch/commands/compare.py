"""The command `compare`: a comparison of the configuration, loss, speed and memory of runs."""

from __future__ import annotations

import sys
from argparse import ArgumentTypeError, Namespace
from pathlib import Path

from titan_launch.commands.parser import Parser, number_from
from titan_launch.core.errors import UserError
from titan_launch.core.process import FAILED, OK
from titan_launch.core.terminal import one_line, say, say_data
from titan_launch.report.comparison import RunComparison
from titan_launch.report.figures import to_json
from titan_launch.report.page import write_page
from titan_launch.report.recorded_run import load_run


def add_arguments(parser: Parser) -> None:
    parser.usage = "titan-launch compare RUN RUN ... [options]"
    parser.epilog = "example:\n  titan-launch compare outputs/llama outputs/llama_fp32 --fail-if-slower 3%"
    text = "run folders; the first is the reference"
    parser.add_argument("run_folders", metavar="RUN", nargs="+", help=text)
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.add_argument("--out", metavar="FILE", help="also write the comparison as an HTML page")
    group = parser.add_argument_group("for scripts", "exit status 1 if a run exceeds a limit")
    text = "fail if the median speed of a run is more than PERCENT, such as 3%%, below that of the first run"
    group.add_argument("--fail-if-slower", type=percentage, metavar="PERCENT", help=text)
    text = "fail if, at the last step that all runs reported, a loss differs by more than X from that of the first run"
    group.add_argument("--fail-if-loss-differs", type=number_from(0), metavar="X", help=text)


def percentage(text: str) -> float:
    """Return a percentage from 0 to 100 as a number: 3 for `3%`. This is an argparse type."""
    if not text.endswith("%"):
        raise ArgumentTypeError(f'must be a percentage such as 3%, not "{text}"')
    return number_from(0, 100)(text.removesuffix("%").strip())


def run(arguments: Namespace) -> int:
    """Print the comparison, and write the page of `--out`. Return 1 if a run exceeds a limit, else 0."""
    if len(arguments.run_folders) < 2:
        raise UserError("error: compare needs at least two runs (see titan-launch compare --help)")
    comparison = RunComparison([load_run(Path(folder)) for folder in arguments.run_folders])
    exceeded: list[str] = []
    if arguments.fail_if_slower is not None:
        exceeded += comparison.slower(arguments.fail_if_slower)
    if arguments.fail_if_loss_differs is not None:
        exceeded += comparison.loss_differs(arguments.fail_if_loss_differs)
    if arguments.json:
        say_data(to_json(comparison.as_data()))
    else:
        say(comparison.as_text())
    if arguments.out is not None:
        write_page(Path(arguments.out), comparison.as_page())
        say(one_line(f"page: {arguments.out}"), file=sys.stderr)
    for sentence in exceeded:
        say(one_line(f"failed: {sentence}"), file=sys.stderr)
    return FAILED if exceeded else OK
