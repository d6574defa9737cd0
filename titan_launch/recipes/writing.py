"""Job files as text: tables of keys, values and comments."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titan_launch.config.loading.load import load_job
from titan_launch.config.loading.provenance import toml_value
from titan_launch.config.sections.run import is_file_name
from titan_launch.core.errors import UserError, format_key
from titan_launch.core.files import check_place
from titan_launch.core.terminal import one_line, say

_COLUMN = 39
"""Column at which comments begin, if the keys and values before them are shorter."""


@dataclass(frozen=True)
class Row:
    """A key of a table, with its value and the comment at the end of its line."""

    key: str
    value: Any
    comment: str = ""


@dataclass(frozen=True)
class Table:
    """A table of a job file. A table without rows is not written."""

    header: str
    """Dotted path: `validation.data`."""

    rows: Sequence[Row]


def job_text(comments: Iterable[str], tables: Iterable[Table]) -> str:
    """Return a job file: comment lines, then the tables."""
    head = "".join(f"# {one_line(line)}".rstrip() + "\n" for line in comments)
    return head + "".join(f"\n[{table.header}]\n{_rows(table.rows)}" for table in tables if table.rows)


def _rows(rows: Sequence[Row]) -> str:
    lines = [(f"{format_key((row.key,))} = {toml_value(row.value)}", row.comment) for row in rows]
    return "".join(
        f"{line:{_COLUMN - 1}} # {one_line(comment)}\n" if comment else f"{line}\n" for line, comment in lines
    )


def job_name(text: str) -> str:
    """Return a text if it can be the name of a job, else `job`."""
    return text if is_file_name(text) else "job"


def check_new(file: str, command: str) -> None:
    """Raise UserError for a job file that exists, does not end in `.toml`, or cannot be written (`check_place`)."""
    if not file.endswith(".toml"):
        raise UserError(f"error: {file}: the name of a job file must end in .toml")
    if Path(file).exists():
        reason = f"{command} never overwrites a file; name another file, or move this one"
        raise UserError(f"error: {file} exists, and {reason}")
    check_place(Path(file))


def write_new(file: str, text: str) -> None:
    """Write a new file. Raises UserError if the file exists or cannot be written; no part of the file stays."""
    try:
        with open(file, "x", encoding="utf-8") as opened, ExitStack() as if_it_fails:
            if_it_fails.callback(Path(file).unlink)
            opened.write(text)
            opened.flush()
            if_it_fails.pop_all()
    except OSError as error:
        raise UserError(f"error: {file} cannot be written: {error.strerror}; name another file") from None


def print_open_problems(file: str) -> None:
    """Print the keys of a new job file that the check refuses, such as keys with placeholders or with paths that do not
    exist. Print nothing if the check refuses no key."""
    try:
        load_job(file)
    except UserError as error:
        problems = str(error).removeprefix("error: ").splitlines()
        lines = [f"  {one_line(line.strip())}" for line in problems if ".toml:" in line]
        say("\n".join(["to do before the first run:", *lines]))
