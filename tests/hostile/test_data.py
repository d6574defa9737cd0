"""Hostile text, records and token files: each ends `data`, `prepare` and `init` with one sentence."""

from __future__ import annotations

import gzip
import io
import json
import os
import random
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.hostile.mutations import damaged
from tests.hostile.runner import Runner
from tests.sampling import rest_is_slow
from titan_launch.config.sections.data import JsonlData, ParquetData, TextData, TokensData
from titan_launch.core.errors import ConfigError
from titan_launch.data.corpora import text_files
from titan_launch.data.corpora.jsonl import JsonlCorpus
from titan_launch.data.corpora.parquet import ParquetCorpus
from titan_launch.data.corpora.text_files import TextCorpus
from titan_launch.data.foreign_tokens import open_foreign_tokens
from titan_launch.data.token_files import Encoded, Header, TokenFilesError, open_token_files, read_header, write_shard
from titan_launch.data.token_files import write_header as write_tokens_json
from titan_launch.data.tokenizers import ByteTokenizer

JOB = """
[job]
name = "hostile"
device = "cpu"
dump_folder = "out"
[model]
name = "llama3"
flavor = "debug"
[data]
kind = "{kind}"
path = "{path}"
[training]
seq_len = 16
local_batch_size = 1
steps = 1
"""

MIB = 1 << 20


def gzipped(chunk: bytes, times: int, end: bytes = b"") -> bytes:
    """Return a gzip file of a repeated chunk."""
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    return b"".join(packer.compress(chunk) for _ in range(times)) + packer.compress(end) + packer.flush()


def record(text: str) -> bytes:
    return json.dumps({"text": text}).encode() + b"\n"


BAD_FILES: dict[str, tuple[str, str, Callable[[], bytes], str]] = {
    # name: kind, name of the file, content, sentence
    "bomb of text": ("text", "a.gz", lambda: gzipped(bytes(MIB), 270), "after decompression it exceeds"),
    "gzip cut": ("text", "a.gz", lambda: gzip.compress(b"a" * 9999)[:-9], "it is damaged"),
    "gzip of zeros": ("text", "a.gz", lambda: bytes(100), "it is damaged"),
    "zstd of zeros": ("text", "a.zst", lambda: b"\x28\xb5\x2f\xfd" + bytes(100), "it is damaged"),
    "zstd of a window": ("text", "a.zst", lambda: b"\x28\xb5\x2f\xfd\x00\xff" + bytes(100), "it is damaged"),
    "binary": ("text", "a.txt", lambda: b"\x00\xff" * 99, "skipped"),
    "bomb of one line": ("jsonl", "a.jsonl.gz", lambda: gzipped(b"a" * MIB, 1000), "longer than 32 MiB"),
    "bomb of blank lines": ("jsonl", "a.jsonl.gz", lambda: gzipped(b" " * 65535 + b"\n", 6500), "after decompression"),
    "bomb of empty lines": ("jsonl", "a.jsonl.gz", lambda: gzipped(b"\n" * MIB, 9), "; store it uncompressed"),
    "long line": ("jsonl", "a.jsonl", lambda: b"a" * (33 * MIB), "longer than 32 MiB, the limit of a line"),
    "line of arrays": ("jsonl", "a.jsonl", lambda: b"[" * 5_000_000, "is not valid JSON"),
    "line of values": (
        "jsonl",
        "a.jsonl",
        lambda: b"[" + b"[]," * 9_000_000 + b"1]",
        "it has more than 2,000,000 arrays",
    ),
    "digits": ("jsonl", "a.jsonl", lambda: b'{"text": ' + b"9" * 5000 + b"}", "is not valid JSON (a number of more"),
    "two keys": ("jsonl", "a.jsonl", lambda: b'{"text": "a", "text": "b"}', "occurs twice"),
    "surrogate": ("jsonl", "a.jsonl", lambda: b'{"text": "\\ud800"}', "is not valid Unicode"),
    "key of lines": ("jsonl", "a.jsonl", lambda: b'{"\\nerror: a\\u001b[2J": 1}', r"its keys: \nerror: a\x1b[2J"),
    "long key": ("jsonl", "a.jsonl", lambda: b'{"' + b"k" * MIB + b'": 1}', "its keys: kkk"),
    "bytes": ("jsonl", "a.jsonl", lambda: b"\xff\xfe\n", "is not UTF-8 text"),
    "zeros": ("jsonl", "a.jsonl", lambda: bytes(5000), "is not valid JSON"),
    "chat of numbers": ("chat", "a.jsonl", lambda: b'{"messages": [{"role": 1, "content": 2}]}', "without the role"),
    "chat of null": ("chat", "a.jsonl", lambda: b'{"messages": null}', "is not a chat (its keys are messages: null"),
    "no Parquet": ("parquet", "a.parquet", lambda: b"PAR1" + bytes(100) + b"PAR1", "is not a valid Parquet file"),
    "Parquet of a long footer": (
        "parquet",
        "a.parquet",
        lambda: b"PAR1" + bytes(100) + b"\xff\xff\xff\x7fPAR1",
        "is not a valid Parquet file",
    ),
    "Parquet of one large value": ("parquet", "a.parquet", lambda: large_value(40), "has a dictionary of 41,"),
    "Parquet of a repeated value": ("parquet", "a.parquet", lambda: large_value(1, 400), "after decompression"),
    "Parquet of empty values": ("parquet", "a.parquet", lambda: large_value(0, 300_000), "use_dictionary=False"),
}


def large_value(megabytes: int, times: int = 3) -> bytes:
    """Return a Parquet file of one text that many rows repeat."""
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    values = pa.DictionaryArray.from_arrays(pa.array([0] * times, pa.int32()), pa.array(["a" * (megabytes * MIB)]))
    file = io.BytesIO()
    options = {"compression": "zstd", "store_schema": False, "write_statistics": False}
    parquet.write_table(pa.table({"text": values}), file, **options)
    return file.getvalue()


def commands(kind: str) -> list[list[str]]:
    config = ["--config", "job.toml"]
    prepare = [] if kind == "tokens" else [["prepare", *config, "--out", "tokens"]]
    return [["data", *config], *prepare, ["train", *config]]


def write_job(folder: Path, kind: str, path: str) -> dict[str, str]:
    (folder / "job.toml").write_text(JOB.format(kind=kind, path=path))
    return {"TITAN_LAUNCH_CACHE": str(folder / "cache")}


QUICK = ("gzip cut", "bomb of empty lines", "two keys", "chat of numbers", "no Parquet")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK)) for name in BAD_FILES]
)
def test_bad_files_are_one_sentence(runner: Runner, tmp_path: Path, name: str) -> None:
    kind, file, make, sentence = BAD_FILES[name]
    (tmp_path / file).write_bytes(make())
    environment = write_job(tmp_path, kind, file)
    more = ["--data.template=chatml"] if kind == "chat" else []
    for command in commands(kind):
        runner.run([*command, *more], tmp_path, environment).assert_one_sentence(sentence)
    init = ["init", "pretrain", "--out", "b.toml", "--data", file]
    runner.run(init, tmp_path, environment).assert_harmless()


def test_a_compressed_document_has_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_files, "MOST_DOCUMENT", MIB)
    (tmp_path / "a.gz").write_bytes(gzipped(bytes(MIB), 3))
    corpus = TextCorpus(TextData(kind="text", path=str(tmp_path / "a.gz")), ByteTokenizer(), ("data",), 16)
    with pytest.raises(ConfigError, match="after decompression it exceeds"):
        [list(corpus.documents(part)) for part in corpus.parts()]


def test_empty_values_of_parquet_count_as_small_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_files, "MOST_RECORDS", MIB)
    path = tmp_path / "a.parquet"
    path.write_bytes(large_value(0, 9000))
    corpus = ParquetCorpus(ParquetData(kind="parquet", path=str(path)), ByteTokenizer(), ("data",), 16)
    with pytest.raises(ConfigError, match="after decompression"):
        [list(corpus.documents(part)) for part in corpus.parts()]


@pytest.mark.parametrize(
    ("kind", "named"),
    rest_is_slow(
        [
            ("text", "folder"),
            ("text", "folder/**"),
            ("tokens", "folder/*"),
            ("jsonl", "folder/*"),
            ("parquet", "folder"),
        ]
    ),
)
def test_links_that_lead_out_of_a_folder_are_refused(runner: Runner, tmp_path: Path, kind: str, named: str) -> None:
    ending = {"text": "txt", "jsonl": "jsonl", "parquet": "parquet", "tokens": "bin"}[kind]
    (tmp_path / "secret").write_bytes(record("secret"))
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / f"a.{ending}").symlink_to("../secret")
    environment = write_job(tmp_path, kind, named)
    for command in commands(kind):
        ended = runner.run(command, tmp_path, environment)
        ended.assert_one_sentence(f"folder/a.{ending} leads out of the folder")


def test_a_link_that_the_job_names_is_followed(runner: Runner, tmp_path: Path) -> None:
    (tmp_path / "real.jsonl").write_bytes(record("some text") * 9)
    (tmp_path / "link.jsonl").symlink_to("real.jsonl")
    ended = runner.run(commands("jsonl")[0], tmp_path, write_job(tmp_path, "jsonl", "link.jsonl"))
    ended.assert_harmless()
    assert ended.status == 0, ended.text


@pytest.mark.parametrize("kind", rest_is_slow(["text", "jsonl", "tokens", "parquet"]))
@pytest.mark.parametrize("special", ["fifo", "zero", "folder"])
def test_special_files_do_not_hang(runner: Runner, tmp_path: Path, kind: str, special: str) -> None:
    ending = {"text": "txt", "jsonl": "jsonl", "parquet": "parquet", "tokens": "bin"}[kind]
    path = tmp_path / "folder" / f"a.{ending}"
    path.parent.mkdir()
    if special == "fifo":
        os.mkfifo(path)
        os.mkfifo(tmp_path / "folder" / "tokens.json")
    elif special == "zero":
        path.symlink_to("/dev/zero")
        (tmp_path / "folder" / "tokens.json").symlink_to("/dev/zero")
    else:
        path.mkdir()
        (tmp_path / "folder" / "tokens.json").mkdir()
    for named in ("folder", f"folder/a.{ending}"):
        environment = write_job(tmp_path, kind, named)
        ended = runner.run(commands(kind)[0], tmp_path, environment)
        ended.assert_harmless()
        assert ended.status == 2, ended.text


def write_tokens(folder: Path) -> Path:
    """Write token files of two shards."""
    folder.mkdir(exist_ok=True)
    documents = [Encoded(np.arange(40, dtype=np.uint16)), Encoded(np.arange(30, dtype=np.uint16))]
    shards = tuple(write_shard(folder, f"0000{index}", documents, "uint16", False) for index in range(2))
    files = (("a.txt", 40, "00000000"), ("b.txt", 30, "00000000"))
    tokenizer = ByteTokenizer()
    write_tokens_json(folder, Header("uint16", tokenizer.vocab_size, tokenizer.digest, False, shards, files))
    return folder


WRONG: tuple[Any, ...] = (
    *(None, True, -1, 0, 1.5, 10**30, 10**299, float("nan"), "", "../../etc/passwd", "\x1b[2J\nerror: fake"),
    *([], [[]], {}, {"a": 1}, ["a"] * 3, [1, 2, 3], [None], "x" * 5000, "\ud800", 1 << 40),
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths of all values in a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(below for key, item in items for below in places(item, (*path, key)))]


def test_wrong_values_in_a_header(tmp_path: Path) -> None:
    folder = write_tokens(tmp_path / "tokens")
    whole = (folder / "tokens.json").read_text()
    for path in places(json.loads(whole)):
        for wrong in (*WRONG, "removed"):
            content = {"": json.loads(whole)}
            inner: Any = content
            for key in ("", *path)[:-1]:
                inner = inner[key]
            last = ("", *path)[-1]
            if wrong == "removed":
                del inner[last]
            else:
                inner[last] = wrong
            (folder / "tokens.json").write_text(json.dumps(content.get("", 0)))
            try:
                header = read_header(folder)
                stream = open_token_files(folder, header)
                assert not len(stream) or len(stream.read(0, len(stream))) == len(stream)
            except TokenFilesError as error:
                assert str(error) and len(str(error)) < 1000


HEADERS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "vocabulary": (
        lambda header: header.update(vocab_size=60_000),
        "has a header with a vocabulary of 60,000 tokens, but the tokenizer has ",
    ),
    "path": (lambda header: header["shards"][0].update(name="../secret"), "that titan-launch prepare did not write"),
    "count": (lambda header: header["shards"][0].update(num_tokens=10**200), "titan-launch prepare did not write"),
    "digest": (lambda header: header.update(tokenizer="\nerror: fake"), r"another tokenizer (digest \nerror: fake;"),
    "version": (lambda header: header.update(version="\x1b[2J" * 99), "has version "),
    "skipped": (lambda header: header.update(skipped={"a": "b"}), "that titan-launch prepare did not write"),
    "targets": (lambda header: header.update(has_targets=1), "that titan-launch prepare did not write"),
}


@pytest.mark.parametrize("name", rest_is_slow(list(HEADERS), every=3))
def test_bad_headers_are_one_sentence(runner: Runner, tmp_path: Path, name: str) -> None:
    change, sentence = HEADERS[name]
    folder = write_tokens(tmp_path / "tokens")
    header = json.loads((folder / "tokens.json").read_text())
    change(header)
    (folder / "tokens.json").write_text(json.dumps(header))
    environment = write_job(tmp_path, "tokens", "tokens")
    for command in commands("tokens"):
        runner.run(command, tmp_path, environment).assert_one_sentence(sentence)


def npy(shape: str, descr: str = "<u2", length: int | None = None) -> bytes:
    text = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}".encode() + b"\n"
    return b"\x93NUMPY\x02\x00" + struct.pack("<I", length or len(text)) + text + bytes(64)


def megatron(sequences: int, documents: int, lengths: tuple[int, ...] = (32,)) -> bytes:
    head = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, sequences, documents)
    return (
        head + np.array(lengths, "<i4").tobytes() + np.array([0], "<i8").tobytes() + np.array([0, 1], "<i8").tobytes()
    )


FOREIGN: dict[str, tuple[dict[str, bytes], str]] = {
    "npy shape": ({"a.npy": npy("(10**12,)")}, "is not a valid .npy file"),
    "npy large shape": ({"a.npy": npy("(1000000000000,)")}, "is damaged"),
    "npy negative shape": ({"a.npy": npy("(-32,)")}, "is damaged"),
    "npy objects": ({"a.npy": npy("(8,)", "|O")}, "is not a valid .npy file"),
    "npy nested": ({"a.npy": npy("(" * 5000)}, "is not a valid .npy file"),
    "npy long header": ({"a.npy": npy("(32,)", length=1 << 31)}, "is not a valid .npy file"),
    "npy floats": ({"a.npy": npy("(16,)", "<f4")}, "save a one-dimensional array of little-endian integers"),
    "Megatron counts": ({"a.bin": bytes(64), "a.idx": megatron(1 << 63, 1 << 62)}, "has another size than its header"),
    "Megatron lengths": ({"a.bin": bytes(64), "a.idx": megatron(1, 2, (-32,))}, "has the length -32 for sequence 0"),
    "Megatron nothing": ({"a.bin": bytes(64), "a.idx": b""}, "is not an index of Megatron-LM"),
    "llm.c count": (
        {"a.bin": struct.pack("<iii", 20240520, 1, -5) + bytes(1024 - 12 + 64)},
        "but its header says -5",
    ),
    "zip": ({"a.bin": b"PK\x03\x04" + bytes(64)}, "is a zip or .npz file, not flat numbers"),
}


@pytest.mark.parametrize("name", rest_is_slow(list(FOREIGN), every=4))
def test_bad_tokens_of_other_programs_are_one_sentence(runner: Runner, tmp_path: Path, name: str) -> None:
    files, sentence = FOREIGN[name]
    for file, content in files.items():
        (tmp_path / file).write_bytes(content)
    environment = write_job(tmp_path, "tokens", next(iter(files)))
    for command in commands("tokens"):
        runner.run(command, tmp_path, environment).assert_one_sentence(sentence)


def test_changed_bytes_of_lines(tmp_path: Path) -> None:
    rng, path = random.Random(0), tmp_path / "a.jsonl"
    whole = b"".join(
        json.dumps({"text": f"line {n} \u00e9\n", "more": [n, {"a": None}, 1.5e3]}).encode() + b"\n" for n in range(3)
    )
    for kind in ("stop", "skip"):
        config = JsonlData(kind="jsonl", path=str(path), on_error=kind)
        for _ in range(500):
            path.write_bytes(damaged(whole, rng))
            corpus = JsonlCorpus(config, ByteTokenizer(), ("data",), 16)
            try:
                assert all(list(corpus.documents(part)) is not None for part in corpus.parts())
            except ConfigError as error:
                assert kind == "stop" and error.problems[0].reason.isprintable()


def test_changed_bytes_of_foreign_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TITAN_LAUNCH_CACHE", str(tmp_path / "cache"))
    rng = random.Random(0)
    llmc = struct.pack("<iii", 20240520, 1, 32) + bytes(1024 - 12 + 64)
    for name, whole in {"a.npy": npy("(32,)"), "b.bin": llmc, "c.idx": megatron(1, 2)}.items():
        (tmp_path / "c.bin").write_bytes(bytes(64))
        path = tmp_path / name
        config = TokensData(kind="tokens", path=str(path.with_suffix(".bin") if name == "c.idx" else path))
        for _ in range(150):
            path.write_bytes(damaged(whole, rng))
            try:
                open_foreign_tokens(config, ByteTokenizer(), ("data",))
            except ConfigError as error:
                assert error.problems[0].reason.isprintable()
            except TokenFilesError as error:
                assert str(error)


def test_changed_bytes_of_parquet(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rng, path, file = random.Random(0), tmp_path / "a.parquet", io.BytesIO()
    parquet.write_table(pa.table({"text": ["a", "b", None, "a" * 99]}), file, compression="zstd")
    whole = file.getvalue()
    for _ in range(400):
        path.write_bytes(damaged(whole, rng))
        corpus = ParquetCorpus(
            ParquetData(kind="parquet", path=str(path), on_error="skip"), ByteTokenizer(), ("data",), 16
        )
        try:
            assert all(list(corpus.documents(part)) is not None for part in corpus.parts())
        except ConfigError as error:
            assert error.problems[0].reason.isprintable()
