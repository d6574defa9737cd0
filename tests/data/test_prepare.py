"""Preparation of token files, by function calls and by the command."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.distributed import run_command
from tests.train.jobs import TINY_JOB_FILE
from titan_launch.config.sections.data import JsonlData, TextData
from titan_launch.config.sections.tokenizer import TokenizerConfig
from titan_launch.core.errors import ConfigError, UserError
from titan_launch.core.files import CACHE_VARIABLE
from titan_launch.data import prepare as preparation
from titan_launch.data.corpora.jsonl import JsonlCorpus
from titan_launch.data.corpora.text_files import TextCorpus
from titan_launch.data.prepare import UNFINISHED, cached_token_files, file_digests, make_folder, prepare
from titan_launch.data.token_files import HEADER, Encoded, open_token_files, verify_token_files
from titan_launch.data.tokenizers import ByteTokenizer, build_tokenizer, train_tokenizer

PART_BYTES = "titan_launch.data.corpora.interface.Corpus.part_bytes"


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder of 12 documents in 4 parts."""
    monkeypatch.setattr(PART_BYTES, 250)
    folder = tmp_path / "text"
    folder.mkdir()
    for number in range(12):
        (folder / f"{number:02}.txt").write_text(f"document {number} says hello to documents and tokens\n" * 2)
    (folder / "05.bin").write_bytes(b"\xff\0")
    return folder


def corpus(text: Path, tokenizer: Any = None, **keys: Any) -> TextCorpus:
    return TextCorpus(TextData(path=str(text), **keys), tokenizer or ByteTokenizer(), ("data",), seq_len=8)


def content(folder: Path) -> dict[str, bytes]:
    """Return the content of all files, except for the list that the cache makes of them."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "files.json"}


def test_the_number_of_processes_does_not_change_the_files(text: Path, tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    train_tokenizer((path.read_text() for path in text.glob("*.txt")), 280, tmp_path / "bpe")
    tokenizer = build_tokenizer(TokenizerConfig(kind="huggingface", path=str(tmp_path / "bpe")))
    finished: list[bool] = []
    header = prepare(corpus(text, tokenizer), tmp_path / "one")
    assert prepare(corpus(text, tokenizer), tmp_path / "two", 2, lambda part, is_new: finished.append(is_new)) == header
    assert content(tmp_path / "one") == content(tmp_path / "two")
    assert len(finished) == len(header.shards) == 4 and header.num_documents == 12
    assert header.skipped == {"not UTF-8 text": 1} and header.first_skipped == "05.bin"
    stream = open_token_files(tmp_path / "two", verify_token_files(tmp_path / "two"))
    ends = stream.document_ends()
    documents = [stream.read(start, stop) for start, stop in zip([0, *ends[:-1]], ends, strict=True)]
    assert [tokenizer.decode(tokens) for tokens in documents] == [p.read_text() for p in sorted(text.glob("*.txt"))]


def interrupted(text: Path, folder: Path, after: int = 2) -> None:
    """Interrupt a preparation after some parts."""
    finished: list[Any] = []

    def report(part: Any, is_new: bool) -> None:
        finished.append(part)
        if len(finished) == after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(corpus(text), folder, report=report)


def test_an_interrupted_preparation_continues(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "tokens"
    interrupted(text, folder)
    with monkeypatch.context() as patch, pytest.raises(UserError, match=r"different text, .* code or packages"):
        patch.setattr(preparation, "_CODE", [])
        prepare(corpus(text), folder)
    assert not (folder / HEADER).exists()
    before = {path.name: path.stat().st_mtime_ns for path in folder.glob("*.tokens")}
    assert len(before) == 2
    header = prepare(corpus(text), folder)
    after = {path.name: path.stat().st_mtime_ns for path in folder.glob("*.tokens")}
    assert len(after) == 4 and before.items() < after.items()
    (tmp_path / "at once").mkdir()
    (tmp_path / "at once" / UNFINISHED).touch()  # as after a kill before the file got its content
    prepare(corpus(text), tmp_path / "at once")
    assert content(folder) == content(tmp_path / "at once")
    assert prepare(corpus(text), folder) == header, "a complete folder is kept"
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    make_folder(folder)  # nothing will be written
    with pytest.raises(UserError, match="new cannot be written by this user; name another folder"):
        make_folder(tmp_path / "new")


class HalfTargets(JsonlCorpus):
    """Lines of which every second token counts as a target."""

    has_targets = True

    def encode(self, contents: Sequence[Any]) -> list[Encoded]:
        return [Encoded(each.tokens, np.arange(len(each.tokens)) % 2 == 1) for each in super().encode(contents)]


def test_the_checksum_of_a_file_is_that_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The section "Checksum of a file" of docs/reference/token_files.md."""
    monkeypatch.setattr(PART_BYTES, 100)
    texts = [f"line {number}" for number in range(12)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    config = JsonlData(kind="jsonl", path=str(tmp_path / "a.jsonl"))
    header = prepare(HalfTargets(config, ByteTokenizer(), ("data",), seq_len=8), tmp_path / "tokens")
    documents = iter([*text.encode(), ByteTokenizer.end_of_document] for text in texts)
    results = b""
    for shard in header.shards:
        checksum = 0
        for _ in range(shard.num_documents):
            tokens = next(documents)
            checksum = zlib.crc32(np.array(tokens, "<u2").tobytes(), checksum)
            checksum = zlib.crc32(bytes(index % 2 for index in range(len(tokens))), checksum)
        results += checksum.to_bytes(4, "little")
    assert len(header.shards) == 3
    assert header.files == (("a.jsonl", (tmp_path / "a.jsonl").stat().st_size, f"{zlib.crc32(results):08x}"),)


def rewrite(file: Path, old: str, new: str) -> None:
    """Change a text, but neither its size nor its time."""
    times = file.stat()
    content = file.read_text()
    assert old in content and len(old) == len(new)
    file.write_text(content.replace(old, new))
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))


def test_touched_and_moved_text_continues_a_preparation(text: Path, tmp_path: Path) -> None:
    folder = tmp_path / "tokens"
    interrupted(text, folder)
    (text / "00.txt").touch()
    text.rename(tmp_path / "moved")
    header = prepare(corpus(tmp_path / "moved"), folder)
    (tmp_path / "moved/11.txt").touch()
    assert prepare(corpus(tmp_path / "moved"), folder) == header


@pytest.mark.parametrize(("module", "name"), [(fcntl, "flock"), (preparation, "refuse_weights_folder")])
def test_a_folder_that_another_process_has_just_completed_is_not_written_again(
    text: Path, tmp_path: Path, module: Any, name: str
) -> None:
    folder = tmp_path / "tokens"
    interrupted(text, folder)
    times: list[int] = []

    def complete_first(*arguments: Any) -> None:
        patch.undo()
        prepare(corpus(text), folder)
        times.extend(path.stat().st_mtime_ns for path in sorted(folder.iterdir()))
        getattr(module, name)(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, name, complete_first)
        header = prepare(corpus(text), folder)
    assert times == [path.stat().st_mtime_ns for path in sorted(folder.iterdir())]
    assert header == verify_token_files(folder)


def test_text_that_changes_while_it_is_tokenized_is_refused(text: Path, tmp_path: Path) -> None:
    def change(part: Any, is_new: bool) -> None:
        (text / "11.txt").write_text("other")

    with pytest.raises(ConfigError, match=r"cannot read .*11\.txt: it changed while it was tokenized"):
        prepare(corpus(text), tmp_path / "tokens", report=change)
    assert not (tmp_path / "tokens" / HEADER).exists()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda text, folder: (text / "00.txt").write_text("longer " * 50), "unfinished token files of different text"),
        (lambda text, folder: rewrite(text / "00.txt", "hello", "olleh"), "unfinished token files of different text"),
        (
            lambda text, folder: prepare(corpus(text), folder) and rewrite(text / "00.txt", "hello", "olleh"),
            "was prepared from different text",
        ),
        (lambda text, folder: (folder / UNFINISHED).unlink(), "has files that are not token files"),
        (
            lambda text, folder: prepare(corpus(text), folder) and (text / "00.txt").unlink(),
            "was prepared from different text",
        ),
    ],
)
def test_a_folder_of_another_corpus_is_refused(text: Path, tmp_path: Path, change: Any, reason: str) -> None:
    interrupted(text, tmp_path / "tokens")
    change(text, tmp_path / "tokens")
    with pytest.raises(UserError, match=reason):
        prepare(corpus(text), tmp_path / "tokens")


def test_errors_of_a_process_name_the_key(text: Path, tmp_path: Path) -> None:
    broken = corpus(text)
    assert len(broken.parts()) == 4
    digests = file_digests(broken)
    (text / "03.txt").unlink()
    for known in (None, digests):
        with pytest.raises(ConfigError, match=r"data\.path: cannot read .*03\.txt: No such file"):
            prepare(broken, tmp_path / "tokens", 2, digests=known)


def test_a_damaged_cache_is_built_again(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(PART_BYTES, 1 << 20)
    folder = cached_token_files(corpus(text))
    before = content(folder)
    (folder / "00000.tokens").write_bytes(b"")
    assert cached_token_files(corpus(text)) == folder and content(folder) == before
    (folder / HEADER).unlink()
    assert cached_token_files(corpus(text)) == folder and content(folder) == before


def tokens_of(folder: Path) -> str:
    stream = open_token_files(folder, verify_token_files(folder))
    return ByteTokenizer().decode(stream.read(0, len(stream)))


@pytest.mark.parametrize("in_place", [True, False])
def test_text_of_the_same_size_and_time_has_other_tokens(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_place: bool
) -> None:
    """Text that a program writes in place, and text that `rsync -t` copies."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    before = cached_token_files(corpus(text))
    if not in_place:
        (text / "07.txt").rename(tmp_path / "kept")
        shutil.copy2(tmp_path / "kept", text / "07.txt")
    rewrite(text / "07.txt", "document 7 says hello", "document 7 says olleh")
    after = cached_token_files(corpus(text))
    assert after != before and tokens_of(after) == tokens_of(before).replace("7 says hello", "7 says olleh")


def test_text_in_the_image_of_a_disk_has_other_tokens(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In an image such as squashfs, other text may have the same times and inode."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr("titan_launch.data.corpora.text_files.file_state", lambda path: [path.stat().st_size, 0, 0, 0])
    before = cached_token_files(corpus(text))
    rewrite(text / "07.txt", "hello", "olleh")
    after = cached_token_files(corpus(text))
    assert after != before
    monkeypatch.setattr("titan_launch.data.prepare._CODE", [text / "07.txt"])
    assert (of_code := cached_token_files(corpus(text))) != after, "other code may give other tokens"
    monkeypatch.setattr("titan_launch.data.prepare.version", lambda name: f"{name} 1")
    assert cached_token_files(corpus(text)) != of_code, "other packages may give other tokens"


def test_the_same_text_elsewhere_has_the_same_tokens(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Text on another host, or with other times, is read but not tokenized again."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    folder = cached_token_files(corpus(text))
    times = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    (text / "00.txt").touch()
    assert cached_token_files(corpus(text)) == folder
    shutil.copytree(text, tmp_path / "host 2")
    assert cached_token_files(corpus(tmp_path / "host 2")) == folder
    assert times == {path: path.stat().st_mtime_ns for path in folder.iterdir()}


def test_a_damaged_cache_of_the_right_size_is_built_again(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    folder = cached_token_files(corpus(text))
    before = content(folder)
    for name in before:
        damage(folder / name)
        assert content(folder) != before
        assert cached_token_files(corpus(text)) == folder and content(folder) == before, name


def damage(file: Path) -> None:
    """Change a byte of a file, but neither its size nor its time."""
    times = file.stat()
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))


def test_a_cache_that_cannot_be_written_is_one_error(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "file"))
    with pytest.raises(UserError, match=r"the cache of prepared data cannot be written .*Not a directory"):
        cached_token_files(corpus(text))


def test_the_command_trains_a_tokenizer_and_splits(text: Path, tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    command = ["prepare", "text", "--out=tokens", "--train-tokenizer=280", "--validation-percent=30", "--workers=1"]
    status, printed, reported = run_command([*command, "--verify"], tmp_path)
    assert (status, reported) == (0, ""), reported
    sides = [verify_token_files(tmp_path / "tokens" / side) for side in ("train", "validation")]
    assert sum(side.num_documents for side in sides) == 12 and all(side.num_documents for side in sides)
    tokenizer = build_tokenizer(TokenizerConfig(kind="huggingface", path=str(tmp_path / "tokens/tokenizer")))
    assert {side.tokenizer for side in sides} == {tokenizer.digest}
    assert "tokenizer: 280 tokens, trained in" in printed and printed.count("verified") == 2
    assert run_command(command, tmp_path)[0] == 0, "the same command again changes nothing"
    assert run_command(["prepare", "--verify", "--out", "tokens"], tmp_path)[1].count("verified") == 2
    with (tmp_path / "tokens/train/00000.tokens").open("r+b") as file:
        file.write(b"\1")
    status, _, reported = run_command(["prepare", "--verify", "--out", "tokens"], tmp_path)
    assert (status, reported) == (
        2,
        "error: tokens/train is damaged: shard 00000 has another digest than the header says; "
        "copy or prepare the files again\n",
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--out=o"], "error: give the PATHs of the text, or a job with --config"),
        (["text", "--out=o", "--config=llama_debug"], "error: PATH and --config cannot be used together"),
        (["nothing", "--out=o"], "error: nothing: no such file or folder, or no files in it"),
        (["text", "--out=o", "--train-tokenizer=9"], "--train-tokenizer: must be a whole number of at least 257"),
        (["text", "--out=o", "--validation-percent=100"], "must be a whole number from 1 to 99"),
        (["text", "--out=o", "--tokenizer=none"], "tokenizer.path"),
        (["text", "--out=text"], "error: text has files that are not token files; name another folder, or delete them"),
        (["text", "--out=text", "--train-tokenizer=280"], "error: text has files, but no tokens of the new tokenizer"),
        (["text", "--out=text/00.txt/o"], "error: text/00.txt/o cannot be written: Not a directory; name"),
        (["text", "--out=o", "--data.path=p"], "error: --data.path=p cannot be used with PATH, which sets this key; "),
        (["--out=o", "--data.kind=synthetic"], 'prepare reads one source of text: set kind = "text"'),
        (["fifo", "--out=o"], "no such file or folder"),
        (
            ["text/05.bin", "--data.kind=text", "--out=o"],
            "error: o has no tokens: all documents were skipped; name more text",
        ),
    ],
)
def test_bad_arguments_are_one_error(text: Path, tmp_path: Path, arguments: list[str], message: str) -> None:
    if "fifo" in arguments:
        os.mkfifo(tmp_path / "fifo")
    status, _, reported = run_command(["prepare", *arguments], tmp_path)
    assert status == 2 and message in reported and "Traceback" not in reported, reported


SLOW = """
import sys, time
from titan_launch.cli import main
from titan_launch.data.corpora.interface import Corpus
from titan_launch.data import prepare
Corpus.part_bytes = 250
parts = prepare._finish_parts
def slowly(*arguments):
    for part in parts(*arguments):
        yield part
        time.sleep(60)
prepare._finish_parts = slowly
main(sys.argv[1:])
"""


def test_ctrl_c_says_how_to_continue(text: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", SLOW, "prepare", "text", "--out=tokens", "--workers=1"]
    process = subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=dict(os.environ)
    )
    deadline = time.monotonic() + 60
    while not (tmp_path / "tokens/00000.json").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, reported = process.communicate(timeout=60)
    assert process.returncode == 130
    assert reported == (
        "interrupted after 1 of 4 parts; run the same command again to continue: finished parts are kept\n"
    )


def test_a_full_disk_is_one_error(text: Path, tmp_path: Path) -> None:
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (300, 300)); "
    ignore = "import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
    code = f"import sys; {limit}{ignore}from titan_launch.cli import main; main(sys.argv[1:])"
    result = subprocess.run(
        [sys.executable, "-c", code, "prepare", "text", "--out=tokens"], cwd=tmp_path, capture_output=True, text=True
    )
    assert result.returncode == 1 and result.stderr.count("\n") == 1
    assert "cannot be written: File too large; correct this, then run the same command again" in result.stderr


JOB = """
[tokenizer]
kind = "huggingface"
path = "tokens/tokenizer"

[data]
kind = "{kind}"
path = "{path}"

[training]
seq_len = 16
steps = 2

[checkpoint]
save_last = false
"""


def test_prepared_tokens_give_the_losses_of_the_text(text: Path, tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    assert run_command(["prepare", "text", "--out=tokens", "--train-tokenizer=280"], tmp_path)[0] == 0
    losses = []
    for kind, path in (("text", "text"), ("tokens", "tokens")):
        (tmp_path / "job.toml").write_text(TINY_JOB_FILE + JOB.format(kind=kind, path=path))
        status, printed, reported = run_command(
            ["train", "--config", "job.toml", "--metrics.log_freq=1", f"--job.name=on_{kind}"], tmp_path
        )
        assert status == 0, reported
        assert ("tokenizing:" in printed) == (kind == "text")
        records = (tmp_path / f"on_{kind}" / "metrics.jsonl").read_text().splitlines()
        losses.append([json.loads(line)["train/loss"] for line in records])
    assert losses[0] == losses[1] and len(losses[0]) == 2
