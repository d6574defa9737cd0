"""The command `migrate`: the conversion of a job file of TorchTitan to a job file of this launcher."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from shlex import quote

from titan_launch.commands.parser import Parser, at_least
from titan_launch.config.job import JobConfig
from titan_launch.config.loading.job_files import JobFile, read_job
from titan_launch.config.loading.provenance import toml_value
from titan_launch.config.migration import Migration, migrate
from titan_launch.core.errors import ConfigError, Problem, UserError, format_key
from titan_launch.core.process import OK
from titan_launch.core.terminal import one_line, say, shortened
from titan_launch.recipes.writing import Row, Table, check_new, job_text, print_open_problems, write_new


def add_arguments(parser: Parser) -> None:
    parser.usage = "titan-launch migrate OLD.toml [--out NEW.toml] [--world-size N]"
    parser.epilog = "example:\n  titan-launch migrate llama3_8b.toml --out job.toml --world-size 8"
    parser.add_argument("old", metavar="OLD.toml", help="job file of TorchTitan v0.2")
    text = "job file to write, which must not exist (default: OLD.migrated.toml)"
    parser.add_argument("--out", metavar="NEW.toml", help=text)
    text = "number of ranks of the job, to compute numbers of samples (default: unknown)"
    parser.add_argument("--world-size", type=at_least(1), metavar="N", help=text)


def run(arguments: Namespace) -> int:
    """Write the new job file. Print a line for each key of the old file that is not converted, or not exactly."""
    (old,) = read_job(arguments.old)[-1:]
    new = arguments.out or str(Path(arguments.old).with_suffix(".migrated.toml"))
    check_new(new, "migrate")
    if unknown := [name for name, value in old.table.items() if not isinstance(value, dict)]:
        place = old.find((unknown[0],))[1]
        raise UserError(f"error: {place}: {unknown[0]}: not a section; migrate reads job files of TorchTitan v0.2")
    try:
        migration = migrate(old.table, arguments.world_size)
    except ConfigError as error:
        (problem,) = error.problems
        shown = f"{format_key(problem.key)} = {shortened(toml_value(problem.value))}"
        raise UserError(f"error: {old.find(problem.key)[1]}: {shown}: {problem.reason}") from None
    head = [f"Converted from {arguments.old}, a job file of TorchTitan."]
    if description := old.table.get("job", {}).get("description"):
        head.append(shortened(description, 1000))
    write_new(new, job_text(head, _tables(migration)))
    say(one_line(f"wrote {new}: {len(migration.new)} keys"))
    for title, notes in (
        ("keys not converted (the run may differ)", migration.lost),
        ("keys not needed (the run is the same without them)", migration.needless),
    ):
        if notes:
            say("\n".join([f"{title}:", *(f"  {one_line(line)}" for line in _lines(old, notes))]))
    print_open_problems(new)
    say(one_line(f"next: titan-launch plan --config {quote(new)}"))
    return OK


def _lines(old: JobFile, notes: list[Problem]) -> list[str]:
    ordered = sorted(notes, key=lambda note: old.find(note.key)[0])
    return [
        f"{old.find(note.key)[1]}: {format_key(note.key)} = {shortened(toml_value(note.value))}: {note.reason}"
        for note in ordered
    ]


def _tables(migration: Migration) -> list[Table]:
    """Return the tables of the new job, in the order of the sections of `JobConfig`."""
    tables: dict[str, list[Row]] = {}
    order = list(JobConfig.model_fields)
    for key, (value, comment) in sorted(migration.new.items(), key=lambda item: order.index(str(item[0][0]))):
        tables.setdefault(format_key(key[:-1]), []).append(Row(str(key[-1]), value, comment))
    return [Table(header, rows) for header, rows in tables.items()]
