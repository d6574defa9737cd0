"""The command `data`: a description of a job's data and its first samples, without a process group or a GPU."""

from __future__ import annotations

import io
import json
import os
import sys
from argparse import Namespace
from collections.abc import Iterator
from typing import Any, NoReturn

from titan_launch.commands.parser import Parser, at_least, load
from titan_launch.core.process import run_and_exit
from titan_launch.core.terminal import counted, one_line, printable, say_data, say_escaped
from titan_launch.plan.layout import plan_layout, smallest_world_size

_WIDTH = 24
"""Width of the column of names, in characters."""

_BAR = 40
"""Length of the longest bar of a histogram, in characters."""

_MAX_ROWS = 20
"""Largest number of rows of a histogram in text. JSON has all rows."""

_SHARES = ("share", "padding", "ignored_targets")

_LABELS = {
    "bytes_per_token": "bytes per token",
    "documents_cut": "documents cut",
    "ignored_targets": "ignored targets",
    "not_read": "files not read",
    "share": "share of the samples",
    "validated_samples": "validated samples",
    "document_lengths": "tokens per document",
}


def add_arguments(parser: Parser) -> None:
    parser.add_job("titan-launch data --config configs/llama_debug.toml --samples 2")
    text = "number of ranks, for a job without training.global_batch_size (default: product of the parallelism degrees)"
    parser.add_argument("--world-size", type=at_least(1), metavar="N", help=text)
    text = "samples to show, in the order of the run (default: 1)"
    parser.add_argument("--samples", type=at_least(0), default=1, metavar="N", help=text)
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def run(arguments: Namespace) -> NoReturn:
    """Print a description of the data of the job and its first samples, and end the process."""
    loaded = load(arguments, arguments.world_size)
    config = loaded.config
    world_size = arguments.world_size or smallest_world_size(config.parallelism)

    def print_data() -> None:
        from titan_launch.train.describe_data import describe_data

        report = describe_data(config, plan_layout(config.parallelism, config.training, world_size), arguments.samples)
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")  # so that every terminal can show text of any language
        if arguments.json:
            say_data(json.dumps(report, indent=2))
        else:
            say_escaped("\n".join(_lines(report, _marks())))

    run_and_exit(print_data, loaded.provenance.describe)


def _marks() -> tuple[str, str]:
    """Return the strings to print before and after tokens that are not targets: escapes for faint text on a terminal,
    else brackets. With the environment variable `NO_COLOR`, always brackets."""
    is_coloured = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    return ("\x1b[2m", "\x1b[0m") if is_coloured else ("[-", "-]")


def _lines(report: dict[str, Any], marks: tuple[str, str]) -> Iterator[str]:
    consumed = report["steps"] * report["global_batch_size"]
    ranks = counted(report["world_size"], "rank")
    batch = f"{counted(report['steps'], 'step')} of {counted(report['global_batch_size'], 'sample')} ({ranks})"
    yield _row("job", report["job"])
    length = "" if report["seq_len"] is None else f" of {counted(report['seq_len'], 'token')}"
    epochs = "" if report["epochs"] is None else f", {report['epochs']:g} epoch{'s' * (report['epochs'] != 1)}"
    yield _row("training", f"{batch}: {counted(consumed, 'sample')}{length}{epochs}")
    if tokenizer := report.get("tokenizer"):
        path = "" if tokenizer["path"] is None else f" {tokenizer['path']}"
        yield _row("tokenizer", f"{tokenizer['kind']}{path}, {tokenizer['vocab_size']:,} tokens")
    for warning in report["warnings"]:
        yield _row("warning", warning)
    for source in report["sources"]:
        yield ""
        yield from _source_lines(source)
    for sample in report["samples"]:
        yield ""
        yield from _sample_lines(sample, marks)


def _source_lines(source: dict[str, Any]) -> Iterator[str]:
    rest = dict(source)
    yield one_line(f"{rest.pop('section')} {rest.pop('name')}".rstrip())
    for name, value in rest.items():
        label = _LABELS.get(name, name)
        if name == "document_lengths":
            numbers = ("min", "mean", "p50", "p90", "p99", "max")
            yield _row(label, ", ".join(f"{number} {_number(value[number])}" for number in numbers), 2)
            yield from _histogram(value["histogram"])
        elif name == "skipped" and isinstance(value, dict):
            yield _row(label, "; ".join(f"{count:,}: {reason}" for reason, count in value.items()), 2)
        elif isinstance(value, dict):
            yield _row(label, f"{len(value):,}", 2)
            yield from _histogram(value)
        elif name in _SHARES:
            yield _row(label, f"{value:.2%}", 2)
        else:
            yield _row(label, _number(value), 2)


def _sample_lines(sample: dict[str, Any], marks: tuple[str, str]) -> Iterator[str]:
    if "index" in sample:
        source = f" of {one_line(sample['source'])}" if sample["source"] else ""
        yield f"sample {sample['position']} of the run: sample {sample['index']:,}{source}"
    else:
        yield f"sample {sample['position']} of data-parallel rank {sample['data_parallel_rank']}"
    if "class" in sample:
        yield f"  class {one_line(str(sample['class']))}, shape {' x '.join(map(str, sample['shape']))}"
    for document in sample.get("documents", ()):
        yield f"--- document of {counted(document['tokens'], 'token')}"
        before, after = marks
        passages = ((printable(passage["text"]), passage["counts"]) for passage in document["text"])
        yield "".join(text if counts else f"{before}{text}{after}" for text, counts in passages)
    if sample.get("padding"):
        yield f"--- padding of {counted(sample['padding'], 'token')}"


def _row(name: str, value: str, indent: int = 0) -> str:
    return f"{' ' * indent}{name:{_WIDTH - indent}}{one_line(value)}"


def _histogram(counts: dict[str, int]) -> Iterator[str]:
    shown = dict(list(counts.items())[:_MAX_ROWS])
    largest = max(shown.values(), default=1)
    numbers = max(len(f"{count:,}") for count in shown.values())
    labels = max(map(len, map(one_line, shown)))
    for label, count in zip(map(one_line, shown), shown.values(), strict=True):
        bar = "#" * max(count > 0, round(_BAR * count / largest))
        yield f"    {label:>{labels}}  {count:{numbers},}  {bar}".rstrip()
    if len(counts) > _MAX_ROWS:
        yield f"    and {len(counts) - _MAX_ROWS:,} more"


def _number(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.2f}"
    return f"{value:,}" if isinstance(value, int) else ", ".join(value) if isinstance(value, tuple) else str(value)
