"""`prepare` decides the kind of its files as `init` does, and records are never read as raw text by mistake."""

from __future__ import annotations

import gzip
import json
import re
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tomli

from tests.distributed import run_command
from titan_launch.cli import main
from titan_launch.commands.prepare import _chosen, _overrides
from titan_launch.config.sections.data import JsonlData, TextData
from titan_launch.core.errors import ConfigError, UserError
from titan_launch.core.files import CACHE_VARIABLE
from titan_launch.data.corpora.text_files import TextCorpus
from titan_launch.data.sources import build_source
from titan_launch.data.token_files import read_header
from titan_launch.data.tokenizers import ByteTokenizer

CHAT = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}
PAIR = {"prompt": "Hi", "chosen": "Hello", "rejected": "No"}
TEXT = {"id": "1", "text": "a"}
LINES: dict[str, list[dict[str, Any]]] = {
    "chats.jsonl": [CHAT, {**CHAT, "text": "a"}],
    "answers.ndjson": [{"instruction": "Hi", "output": "Hello"}],
    "pairs.jsonl": [PAIR],
    "text.jsonl": [TEXT, TEXT],
    "other.jsonl": [{"title": "t", "body": "a longer text"}],
    "nested.jsonl": [{"meta": {"text": "a"}}],
    "lines.json": [TEXT],
    "text_and_pair.jsonl": [{**PAIR, "text": "a"}],
    "text_and_chat.jsonl": [{**CHAT, "text": "a"}] * 2,
}


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write a file of each sort into the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    for name, records in LINES.items():
        Path(name).write_text("".join(json.dumps(record) + "\n" for record in records))
    Path("text.jsonl.gz").write_bytes(gzip.compress(Path("text.jsonl").read_bytes()))
    Path("array.json").write_text(json.dumps([TEXT], indent=1))
    Path("empty.jsonl").write_text("")
    Path("a.txt").write_text("text")
    for folder, names in {"mixed": ("text.jsonl", "a.txt"), "only": ("chats.jsonl",), "texts": ("a.txt",)}.items():
        Path(folder, "inner").mkdir(parents=True)
        for name in names:
            Path(folder, "inner", name).write_bytes(Path(name).read_bytes())
    Path("only/README.md").write_text("About.")
    Path("code").mkdir()
    Path("code/main.py").write_text("print()\n" * 9)
    Path("code/package.json").write_text("{}")


MESSAGES = 'data.kind = "chat": the first lines have "messages"'


@pytest.mark.parametrize(
    ("paths", "overrides", "chosen", "printed"),
    [
        (["chats.jsonl"], [], ["chat"], MESSAGES),
        (["only"], [], ["chat"], MESSAGES),
        (["answers.ndjson"], [], ["chat"], 'data.kind = "chat": the first lines have "instruction" and "output"'),
        (
            ["pairs.jsonl"],
            [],
            ["preferences"],
            'data.kind = "preferences": the first lines have "chosen" and "rejected"',
        ),
        (["text.jsonl"], [], ["jsonl"], 'data.kind = "jsonl": the first lines have "text"'),
        (["text.jsonl.gz", "text.jsonl"], [], ["jsonl"], 'data.kind = "jsonl": the first lines have "text"'),
        (["lines.json"], [], ["jsonl"], 'data.kind = "jsonl": the first lines have "text"'),
        (["other.jsonl"], [], ["jsonl", "body"], 'data.field = "body": the longest text of the first line'),
        (["other.jsonl"], ["--data.on_error", "skip"], ["jsonl", "body"], "the longest text of the first line"),
        (["nested.jsonl"], ["--data.field=meta.text"], ["jsonl"], "only this kind has the key data.field"),
        (["a.txt", "texts"], [], ["text"], 'data.kind = "text": the files have no records'),
        (["code"], [], ["text"], 'data.kind = "text": the files have no records'),
        (["mixed/**/*.jsonl"], [], ["jsonl"], 'data.kind = "jsonl": the first lines have "text"'),
        (["text_and_pair.jsonl"], ["--data.kind=jsonl"], [], ""),
        (["anything"], ["--data.kind", "chat"], [], ""),
    ],
)
def test_the_first_lines_decide(
    paths: Sequence[str],
    overrides: Sequence[str],
    chosen: Sequence[str],
    printed: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = [override.partition("=")[2].strip('"') for override in _chosen(paths, overrides)]
    assert found == chosen and printed in capsys.readouterr().out


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        (
            ["text_and_pair.jsonl"],
            'text_and_pair.jsonl: its first lines have "chosen" and "rejected" (data.kind = "preferences"), and "text" '
            '(data.kind = "jsonl"); choose --data.kind=preferences or --data.kind=jsonl',
        ),
        (["text_and_chat.jsonl"], "choose --data.kind=chat or --data.kind=jsonl"),
        (["text.jsonl", "chats.jsonl"], 'text.jsonl has data.kind = "jsonl", but chats.jsonl has data.kind = "chat"; '),
        (["text.jsonl", "other.jsonl"], 'other.jsonl has data.kind = "jsonl", data.field = "body"; prepare each into'),
        (["text.jsonl", "a.txt"], 'but a.txt has data.kind = "text"; prepare each into a folder of its own, and mix'),
        (
            ["mixed"],
            'several suffixes (1 .jsonl, 1 .txt); name the files of one suffix by a glob such as "mixed/**/*.jsonl"',
        ),
        (["empty.jsonl"], "empty.jsonl: its files have no lines"),
        (["array.json"], "the file may be one JSON array: jq -c '.[]' FILE writes each object as a line"),
        (["nested.jsonl"], 'a key of an inner object needs data.field, such as "meta.text"'),
        (["nowhere"], "nowhere: no such file or folder, or no files in it"),
    ],
)
def test_what_is_not_clear_is_one_error(paths: Sequence[str], message: str) -> None:
    with pytest.raises(UserError) as caught:
        _chosen(paths, ["--data.template=chatml"])
    error = str(caught.value)
    assert error.startswith("error: ") and message in error and "\n" not in error


def test_tables_of_parquet_name_their_column(capsys: pytest.CaptureFixture[str]) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"id": [1], "content": ["text"]}), "a.parquet")
    assert _chosen(["a.parquet"], []) == ['--data.kind="parquet"', '--data.column="content"']
    assert 'data.column = "content": the first column of text' in capsys.readouterr().out
    with pytest.raises(UserError, match="but a\\.parquet has"):
        _chosen(["text.jsonl", "a.parquet"], [])


@pytest.mark.parametrize(
    ("options", "override", "reason"),
    [
        ({"train_tokenizer": 280}, "--tokenizer.path=p", "has no effect with --train-tokenizer; remove one of them"),
        ({"tokenizer": "t"}, "--tokenizer.kind=bytes", "cannot be used with --tokenizer, which sets this key; remove"),
        ({"tokenizer": "t"}, "--tokenizer={end_of_document='e'}", "cannot be used with --tokenizer, which sets this"),
        ({}, "--data.path.0=p", "cannot be used with PATH, which sets this key; remove one of them"),
        ({}, "--data={path='p'}", "cannot be used with PATH, which sets this key; remove one of them"),
    ],
)
def test_an_override_of_a_key_that_an_option_sets_is_refused(
    options: dict[str, Any], override: str, reason: str
) -> None:
    given = {"paths": ["text"], "config": None, "tokenizer": None, "train_tokenizer": None, **options}
    with pytest.raises(UserError, match=re.escape(f"error: {override} {reason}")):
        _overrides(Namespace(overrides=[override], **given))


def test_the_command_prepares_what_it_has_chosen(tmp_path: Path) -> None:
    pytest.importorskip("jinja2")
    status, _, reported = run_command(["prepare", "chats.jsonl", "--out=o"], tmp_path)
    assert status == 2 and 'because the tokenizer "bytes" has no chat template' in reported
    assert "set tokenizer.path (prepare: --tokenizer) to a folder with a template" in reported
    for path, kind in (("chats.jsonl", "chat"), ("pairs.jsonl", "preferences")):
        command = ["prepare", path, f"--out={kind}", "--data.template=chatml"]
        status, printed, reported = run_command(command, tmp_path)
        assert (status, reported) == (0, "") and f'data.kind = "{kind}": the first lines have' in printed
        header = read_header(tmp_path / kind)
        assert header.has_targets and header.has_pairs == (kind == "preferences")
    status, printed, _ = run_command(
        ["prepare", "only", "--out=o", "--data.kind=chat", "--data.template=chatml"], tmp_path
    )
    assert status == 0 and "o: 1 file, 0.0 MB, 1 part; not read: 1 .md\n" in printed


MIXED = (
    'has 1 .jsonl beside 1 .txt, and kind = "text" would read the JSON or Parquet encoding of records as text; '
    "name the files of one "
)


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        (
            "mixed",
            f'{MIXED}suffix by a glob ("mixed/**/*.txt"), or set kind = "jsonl", "chat", '
            '"preferences", "unpaired_preferences" or "classification"; to use both',
        ),
        (
            "only/inner",
            'has 1 .jsonl, and kind = "text" would read the JSON or Parquet encoding of records as text; '
            'set kind = "jsonl", ',
        ),
        (
            "bare",
            'has 1 .jsonl beside 1 without a suffix, and kind = "text" would read the JSON or Parquet encoding of '
            'records as text; move the files with records to another folder, or set kind = "jsonl", ',
        ),
        ("text.jsonl", 'ends in .jsonl, and kind = "text" would read'),
        ("text.jsonl.gz", 'ends in .jsonl.gz, and kind = "text" would read'),
        ("*.jsonl", 'ends in .jsonl, and kind = "text" would read'),
        (
            "table.parquet",
            'ends in .parquet, and kind = "text" would read the JSON or Parquet encoding of records as text; '
            'set kind = "parquet"\n',
        ),
    ],
)
def test_records_are_not_read_as_text(
    path: str, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A job, `check` and `prepare` refuse them alike, and a run that `check` has not seen all files of."""
    Path("table.parquet").write_text("PAR1")
    Path("bare").mkdir()
    Path("bare/README").write_text("About.")
    Path("bare/text.jsonl").write_text("{}")
    Path("job.toml").write_text(f'[data]\npath = "{path}"\n')
    assert main(["check", "--config", "job.toml"]) == 2
    assert f'job.toml:2: data.path = "{path}": {reason}' in capsys.readouterr().err
    assert reason in run_command(["prepare", path, "--data.kind=text", "--out=o"], tmp_path)[2] + "\n"
    with pytest.raises(ConfigError) as caught:
        _ = TextCorpus(TextData(path=path), ByteTokenizer(), ("data",), 8).files
    assert reason.strip() in str(caught.value)


def test_a_glob_or_the_names_of_files_choose_one_sort(capsys: pytest.CaptureFixture[str]) -> None:
    for path in ('"mixed/**/*.txt"', '["a.txt", "texts"]', '"mixed/**/*"', '"code"'):
        Path("job.toml").write_text(f"[data]\npath = {path}\n")
        assert main(["check", "--config", "job.toml"]) == 0
    source = build_source(JsonlData(kind="jsonl", path="mixed"), ByteTokenizer(), 2)
    assert source.describe() == "1 file, 2 documents, 4 tokens, 1 sample of 2; not read: 1 .txt"


def test_init_reads_the_same_files(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", "pretrain", "--out", "a.toml", "--data", "mixed"]) == 2
    assert "error: --data mixed: has files of several suffixes (1 .jsonl, 1 .txt); name the" in capsys.readouterr().err
    assert main(["init", "lora", "--out", "b.toml", "--data", "text_and_chat.jsonl"]) == 0, "the recipe decides"
    assert tomli.loads(Path("b.toml").read_text())["data"]["kind"] == "chat"
    assert main(["init", "pretrain", "--out", "c.toml", "--data", "text_and_chat.jsonl"]) == 0
    assert tomli.loads(Path("c.toml").read_text())["data"]["kind"] == "jsonl"
    assert main(["init", "sft", "--out", "d.toml", "--data", "only"]) == 0
    assert 'kind = "chat"                          # chats in JSON lines; not read: 1 .md' in Path("d.toml").read_text()
