"""The command `runs`: a table of the runs in a folder."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

from titan_launch.commands.parser import Parser
from titan_launch.core.errors import UserError
from titan_launch.core.process import OK
from titan_launch.core.terminal import aligned, one_line, say, say_data
from titan_launch.report.figures import to_json
from titan_launch.report.recorded_run import find_runs, load_run
from titan_launch.report.run_page import describe_run


def add_arguments(parser: Parser) -> None:
    parser.usage = "titan-launch runs [FOLDER] [--json]"
    parser.epilog = "example:\n  titan-launch runs outputs"
    text = "folder to search for runs, at most three levels deep (default: outputs)"
    parser.add_argument("folder", metavar="FOLDER", nargs="?", default="outputs", help=text)
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def run(arguments: Namespace) -> int:
    folder = Path(arguments.folder)
    if not folder.is_dir():
        raise UserError(f"error: {folder}: there is no such folder; name the folder with the runs (job.dump_folder)")
    rows = [_row(path) for path in find_runs(folder)]
    if arguments.json:
        say_data(to_json(rows))
    elif not rows:
        say(one_line(f"{folder}: no runs found"))
    else:
        head = ("run", "state", "step", "loss", "speed", "s/step")
        say("\n".join(aligned([head, *map(_cells, rows)])))
    return OK


def _row(folder: Path) -> dict[str, Any]:
    try:
        return describe_run(load_run(folder))
    except UserError as error:
        return {"folder": str(folder), "error": str(error).removeprefix(f"error: {folder}: ").removeprefix("error: ")}


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    if "error" in row:
        return (one_line(row["folder"]), one_line(row["error"]), "", "", "", "")
    loss, speed, seconds = row["loss"], row["speed"], row["seconds_per_step"]
    return (
        one_line(row["folder"]),
        row["state"],
        f"{row['step']}/{row['steps']}" + ("" if row["best_step"] is None else f", best {row['best_step']}"),
        "" if loss is None else f"{loss:.4f}",
        "" if speed is None else f"{speed:,.0f} {row['speed_unit']}",
        "" if seconds is None else f"{seconds:.3g}",
    )
