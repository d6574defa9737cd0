"""The command `report`: an HTML page about a run."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from titan_launch.commands.parser import Parser
from titan_launch.core.process import OK
from titan_launch.core.terminal import as_message, one_line, say
from titan_launch.report.figures import summary
from titan_launch.report.page import write_page
from titan_launch.report.recorded_run import load_run
from titan_launch.report.run_page import run_page

PAGE_FILE = "report.html"
"""Name of the page in the run folder."""


def add_arguments(parser: Parser) -> None:
    parser.usage = "titan-launch report RUN [--out FILE]"
    parser.epilog = "example:\n  titan-launch report outputs/llama_bn"
    parser.add_argument("run_folder", metavar="RUN", help="run folder; the run may still be training")
    parser.add_argument("--out", metavar="FILE", help=f"page to write (default: {PAGE_FILE} in the run folder)")


def run(arguments: Namespace) -> int:
    recorded = load_run(Path(arguments.run_folder))
    path = recorded.folder / PAGE_FILE if arguments.out is None else Path(arguments.out)
    text = run_page(recorded)
    say("\n".join(map(as_message, summary(recorded))))
    write_page(path, text)
    say(one_line(f"page: {path}"))
    return OK
