"""The command `prepare`: it writes text as token files, and can also train the tokenizer."""

from __future__ import annotations

import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from titan_launch.commands.parser import OVERRIDES, Parser, at_least
from titan_launch.config.loading.load import load_job
from titan_launch.config.loading.merge import parse_overrides
from titan_launch.config.loading.provenance import toml_value
from titan_launch.config.rules.data import CORPUS_RULES
from titan_launch.config.sections.data import DATA_KINDS, CorpusData
from titan_launch.config.sections.tokenizer import BYTES_VOCABULARY, TokenizerConfig
from titan_launch.core.errors import RunError, Stopped, UserError, config_error
from titan_launch.core.process import INTERRUPTED, run_and_exit, usable_cores
from titan_launch.core.terminal import CLEAR_LINE, counted, one_line, say, say_escaped
from titan_launch.recipes.facts import DataFolder, UnknownDataError, look_at_data
from titan_launch.recipes.writing import Row

if TYPE_CHECKING:
    from titan_launch.config.job import JobConfig
    from titan_launch.data.corpora.interface import Corpus, Part
    from titan_launch.data.token_files import Header

_SPLITS = ("train", "validation")

_TOKENIZER = "tokenizer"
"""Folder of the trained tokenizer in OUT."""

_REPORT_S = 10.0
"""Seconds between the lines of progress if standard error is not a terminal."""


def add_arguments(parser: Parser) -> None:
    parser.usage = (
        f"{parser.prog} PATH... --out OUT [--tokenizer TOKENIZER] [options] [--data.key=value ...]\n"
        f"       {parser.prog} --config JOB.toml --out OUT [options] [--section.key=value ...]\n"
        f"       {parser.prog} --verify --out OUT"
    )
    parser.epilog = (
        f"{OVERRIDES}\n\nexamples:\n"
        f"  {parser.prog} corpus/ --out tokens --train-tokenizer 8192 --validation-percent 5\n"
        f"  {parser.prog} --config job.toml --out tokens"
    )
    parser.add_argument("paths", nargs="*", metavar="PATH", help="file, folder or glob of text; sets data.path")
    parser.add_argument("--config", metavar="JOB.toml", help="job whose [data] and [tokenizer] are used")
    parser.add_argument("--out", required=True, metavar="OUT", help="folder to write (required)")
    text = "tokenizer.json, or its folder; sets tokenizer.path (default: bytes)"
    parser.add_argument("--tokenizer", metavar="TOKENIZER", help=text)
    text = "first train a byte-level BPE tokenizer of SIZE tokens on the text, and write it to OUT/tokenizer"
    parser.add_argument("--train-tokenizer", type=at_least(BYTES_VOCABULARY), metavar="SIZE", help=text)
    text = "write OUT/validation with N %% of the documents, and OUT/train with the others (default: OUT has all)"
    parser.add_argument("--validation-percent", type=at_least(1, most=99), metavar="N", help=text)
    text = "number of processes, which does not change the result (default: the number of CPU cores)"
    parser.add_argument("--workers", type=at_least(1), metavar="N", help=text)
    text = "read all token files of OUT at the end, and compare them with their digests"
    parser.add_argument("--verify", action="store_true", help=text)


def run(arguments: Namespace) -> NoReturn:
    """Write the text of a job or of paths as token files, or only verify a folder. End the process."""
    only_verifies = arguments.verify and not (arguments.paths or arguments.config or arguments.overrides)
    loaded = load_job(arguments.config, [] if only_verifies else _overrides(arguments), rules=CORPUS_RULES)
    if only_verifies:
        run_and_exit(lambda: _verify(Path(arguments.out)), loaded.provenance.describe)
    run_and_exit(lambda: _prepare(arguments, loaded.config), loaded.provenance.describe)


def _overrides(arguments: Namespace) -> list[str]:
    """Return the overrides of the job that the arguments describe. Raises UserError for missing or contradictory
    arguments."""
    given = list(arguments.overrides)
    if not (arguments.paths or arguments.config or given):
        raise UserError("error: give the PATHs of the text, or a job with --config (see titan-launch prepare --help)")
    if arguments.paths and arguments.config:
        raise UserError(
            "error: PATH and --config cannot be used together; to replace the text of a job, set --data.path=..."
        )
    if arguments.train_tokenizer and (arguments.config or arguments.tokenizer):
        other = "--config" if arguments.config else "--tokenizer"
        example = "titan-launch prepare corpus/ --out tokens --train-tokenizer 8192"
        raise UserError(f"error: --train-tokenizer cannot be used with {other}; give the text as PATH: {example}")
    for override in parse_overrides(given):
        key, names = override.key[:2], override.value if isinstance(override.value, dict) else ()
        if arguments.train_tokenizer and key[0] == "tokenizer":
            raise UserError(f"error: {override.text} has no effect with --train-tokenizer; remove one of them")
        if arguments.paths and (key == ("data", "path") or (key == ("data",) and "path" in names)):
            other = "PATH"
        elif arguments.tokenizer and key in (("tokenizer",), ("tokenizer", "kind"), ("tokenizer", "path")):
            other = "--tokenizer"
        else:
            continue
        raise UserError(f"error: {override.text} cannot be used with {other}, which sets this key; remove one of them")
    if arguments.paths:
        given = [*_chosen(arguments.paths, given), *given, _override("path", arguments.paths)]
    if arguments.tokenizer:
        given += ["--tokenizer.kind=huggingface", f"--tokenizer.path={toml_value(arguments.tokenizer)}"]
    return given


def _chosen(paths: Sequence[str], overrides: Sequence[str]) -> list[str]:
    """Return the overrides that describe the text at `paths`: `data.kind`, and further keys where the defaults do not
    suit the text. Keys that the user has set are omitted. Print the overrides with the reasons.

    If the user has set `data.kind`, return an empty list. If the user has set a key that only one kind has, return only
    the override of `data.kind` with this kind. `overrides`: the overrides of the user. Raises UserError for paths
    without text, and for paths whose texts need different overrides.
    """
    keys = [override.key for override in parse_overrides(overrides)]
    given = {key[1] for key in keys if key[0] == "data" and len(key) > 1}
    if ("data",) in keys or "kind" in given:
        return []
    kinds = {kind: data for kind, data in DATA_KINDS.items() if issubclass(data, CorpusData)}
    owners = {name: [kind for kind, data in kinds.items() if name in data.model_fields] for name in sorted(given)}
    if only := next(((name, *kind) for name, kind in owners.items() if len(kind) == 1), None):
        name, kind = only
        say(f'data.kind = "{kind}": only this kind has the key data.{name}')
        return [_override("kind", kind)]
    first, *others = (_look(path) for path in paths)
    for other in others:
        if (other.kind, other.rows) != (first.kind, first.rows):
            one, two = (
                f"{one_line(each.path)} has {', '.join(map(_described, _rows(each)))}" for each in (first, other)
            )
            remedy = "prepare each into a folder of its own, and mix the folders in tables [[data.sources]]"
            raise UserError(f"error: {one}, but {two}; {remedy}")
    rows = [row for row in _rows(first) if row.key not in given]
    for row in rows:
        say(f"{_described(row)}{one_line(row.comment and f': {row.comment}')}")
    return [_override(row.key, row.value) for row in rows]


def _rows(found: DataFolder) -> list[Row]:
    """Return rows for `data.kind`, and for the other keys that describe the text and differ from their defaults."""
    fields = DATA_KINDS[found.kind].model_fields
    kind = Row("kind", found.kind, found.reason or found.description)
    return [kind, *(row for row in found.rows if row.value != fields[row.key].default)]


def _described(row: Row) -> str:
    return one_line(f"data.{row.key} = {toml_value(row.value)}")


def _look(path: str) -> DataFolder:
    """Return the facts about the text at a path. Raises UserError if the path has no text."""
    try:
        found = look_at_data(path)
    except UnknownDataError as error:
        raise UserError(f"error: {one_line(path)}: {error}") from None
    if not issubclass(DATA_KINDS[found.kind], CorpusData):
        raise UserError(f"error: {one_line(path)}: prepare reads text, but this is {found.description}")
    return found


def _override(name: str, value: Any) -> str:
    """Return the override of a key of `[data]`. A list with one value is written as this value."""
    return f"--data.{name}={toml_value(value[0] if isinstance(value, list) and len(value) == 1 else value)}"


def _prepare(arguments: Namespace, config: JobConfig) -> None:
    from titan_launch.data.corpora import CORPORA
    from titan_launch.data.prepare import file_digests, make_folder
    from titan_launch.data.tokenizers import build_tokenizer

    data, out, percent = config.data, Path(arguments.out), arguments.validation_percent
    if not isinstance(data, CorpusData):
        kinds = " or ".join(map(toml_value, CORPORA))
        reason = f"prepare reads one source of text: set kind = {kinds}; for a mixture, prepare the PATH of each source"
        raise config_error(("data", "kind"), reason, data.kind)
    split = {"validation_percent": percent}
    datas = {name: data.model_copy(update={"split": name, **split}) for name in _SPLITS} if percent else {"": data}
    tokenizer, seq_len = config.tokenizer, config.training.seq_len
    trains = arguments.train_tokenizer is not None and not (out / _TOKENIZER).exists()
    for name in datas:
        make_folder(out / name, is_empty=trains)
    if arguments.train_tokenizer:
        first = next(iter(datas.values()))
        corpus = CORPORA[data.kind](first, build_tokenizer(tokenizer), ("data",), seq_len)
        tokenizer = _train_tokenizer(corpus, arguments)
    built, workers = build_tokenizer(tokenizer), arguments.workers or usable_cores()
    corpora = {name: CORPORA[data.kind](part, built, ("data",), seq_len) for name, part in datas.items()}
    digests = file_digests(next(iter(corpora.values())))  # both splits have the same files
    for name, corpus in corpora.items():
        _write(corpus, digests, out / name, workers, arguments.verify)


def _train_tokenizer(corpus: Corpus, arguments: Namespace) -> TokenizerConfig:
    """Train a tokenizer on a corpus and write it to OUT/tokenizer, unless this folder exists. Return the configuration
    of the tokenizer."""
    from titan_launch.data.prepare import training_texts
    from titan_launch.data.tokenizers import train_tokenizer

    folder = Path(arguments.out, _TOKENIZER)
    config = TokenizerConfig(kind="huggingface", path=str(folder))
    if folder.exists():
        again = f"to train a new one, delete {arguments.out}, which also deletes its prepared tokens"
        say(f"tokenizer: {folder} has a tokenizer, which is used; {again}")
        return config
    start = time.monotonic()
    wanted = arguments.train_tokenizer
    size = train_tokenizer(training_texts(corpus), wanted, folder)
    fewer = "" if size == wanted else f" (the text is too short for a vocabulary of {wanted:,})"
    say(f"tokenizer: {size:,} tokens{fewer}, trained in {time.monotonic() - start:,.0f} s, in {folder}")
    return config


def _write(corpus: Corpus, digests: Sequence[str], folder: Path, num_workers: int, verify: bool) -> None:
    from titan_launch.data.prepare import prepare

    parts = corpus.parts()
    progress = PrepareProgress(len(parts), sum(part.num_bytes for part in parts))
    size = f"{counted(len(corpus.files), 'file')}, {progress.total_bytes / 1e6:,.1f} MB"
    left_out = corpus.left_out and f"; not read: {corpus.left_out}"
    say(f"{folder}: {size}, {counted(len(parts), 'part')}{left_out}", flush=True)
    advice = "run the same command again to continue: finished parts are kept"
    try:
        header = prepare(corpus, folder, num_workers, progress.advance, digests)
    except KeyboardInterrupt:
        raise Stopped(f"interrupted after {progress.parts:,} of {len(parts):,} parts; {advice}", INTERRUPTED) from None
    except OSError as error:
        reason = f"{error.filename or folder} cannot be written: {error.strerror}; correct this, then {advice}"
        raise RunError(reason) from None
    finally:
        progress.clear()
    say(f"{folder}: {one_line(_summary(header))}{progress.speed()}")
    if not header.num_tokens:
        cause = "all documents were skipped" if header.skipped else "no document belongs to this split"
        raise UserError(f"{folder} has no tokens: {cause}; name more text")
    if verify:
        _verify(folder)


def _summary(header: Header) -> str:
    skipped = ", ".join(f"skipped {number:,} {reason}" for reason, number in header.skipped.items())
    size = f"{counted(header.num_documents, 'document')}, {counted(header.num_tokens, 'token')} ({header.dtype})"
    return size + (f"; {skipped}, first: {header.first_skipped}" if skipped else "")


def _verify(out: Path) -> None:
    """Verify the token files of a folder, or those of its folders `train` and `validation`. Raises UserError for
    damaged or missing token files."""
    from titan_launch.data.token_files import HEADER, TokenFilesError, verify_token_files

    folders = [out] if (out / HEADER).exists() else [out / name for name in _SPLITS if (out / name / HEADER).exists()]
    for folder in folders or [out]:
        try:
            header = verify_token_files(folder)
        except TokenFilesError as error:
            raise UserError(f"{folder} {error}") from None
        documents = counted(header.num_documents, "document")
        say(f"{folder}: verified {counted(header.num_tokens, 'token')} of {documents}")


class PrepareProgress:
    """Progress of a preparation on standard error. A terminal shows one line, which is redrawn. Other outputs get a
    line every `_REPORT_S` seconds."""

    def __init__(self, total_parts: int, total_bytes: int):
        self.total_parts, self.total_bytes = total_parts, total_bytes
        self.parts, self._bytes, self._new_bytes = 0, 0, 0
        self._start = self._shown = time.monotonic()
        self._is_terminal = sys.stderr.isatty()

    def advance(self, part: Part, is_new: bool) -> None:
        """Count a finished part. `is_new`: False if an earlier call of the command has prepared the part."""
        self.parts += 1
        self._bytes += part.num_bytes
        self._new_bytes += part.num_bytes * is_new
        now = time.monotonic()
        if self._is_terminal or now - self._shown >= _REPORT_S:
            self._shown = now
            size = f"{self._bytes / 1e6:,.0f} of {self.total_bytes / 1e6:,.0f} MB{self.speed()}"
            line = f"parts: {self.parts:,} of {self.total_parts:,}, {size}"
            start, end = (CLEAR_LINE, "") if self._is_terminal else ("", "\n")
            say_escaped(start + line, sys.stderr, end, flush=True)

    def speed(self) -> str:
        """Return the throughput so far as text for the end of a line; "" if no new part has been prepared."""
        seconds = time.monotonic() - self._start
        return f", {self._new_bytes / 1e6 / seconds:,.1f} MB/s" if self._new_bytes and seconds > 0.01 else ""

    def clear(self) -> None:
        """Remove the line from a terminal."""
        if self._is_terminal:
            say_escaped(CLEAR_LINE, sys.stderr, end="", flush=True)
