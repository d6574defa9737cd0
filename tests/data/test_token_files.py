"""The format of docs/reference/token_files.md, and token files that are damaged or of other programs."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from titan_launch.config.sections.data import TokensData
from titan_launch.core.errors import ConfigError
from titan_launch.data.sources import build_source
from titan_launch.data.sources.tokens import TokenSource
from titan_launch.data.token_files import (
    Encoded,
    Header,
    TokenFilesError,
    verify_token_files,
    write_header,
    write_shard,
)
from titan_launch.data.tokenizers import ByteTokenizer

PAGE = Path(__file__).parents[2] / "docs/reference/token_files.md"
DOCUMENTS = [b"first", b"", b"the second shard", b"ends", b"here"]


def write(folder: Path, shards: tuple[int, ...] = (2, 3), has_targets: bool = False, **keys: Any) -> Path:
    """Write documents of bytes. `shards`: number of documents of each shard."""
    folder.mkdir()
    tokens = [Encoded(np.array([*document, 256], np.uint16)) for document in DOCUMENTS]
    if has_targets:
        tokens = [Encoded(t.tokens, np.arange(len(t.tokens)) % 2 == 1) for t in tokens]
    written, first = [], 0
    for index, number in enumerate(shards):
        written.append(write_shard(folder, f"{index:05}", tokens[first : first + number], "uint16", has_targets))
        first += number
    write_header(folder, Header("uint16", 257, "bytes", has_targets, tuple(written), **keys))
    return folder


def open_tokens(path: Path | str, seq_len: int = 4, **keys: Any) -> TokenSource:
    config = TokensData(kind="tokens", path=str(path), **keys)
    source = build_source(config, ByteTokenizer(), seq_len)
    assert isinstance(source, TokenSource)
    return source


def refusal(path: Path | str, **keys: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        open_tokens(path, **keys)
    return str(caught.value)


def inputs(source: TokenSource) -> list[int]:
    return [token for index in range(len(source)) for token in source[index][0].tolist()]


STREAM = [token for document in DOCUMENTS for token in (*document, 256)]


def test_the_code_of_the_page_reads_token_files_with_numpy_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "tokens", has_targets=True)
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), flags=re.DOTALL | re.MULTILINE)
    assert set(re.findall(r"^(?:import|from) (\w+)", code, flags=re.MULTILINE)) == {"json", "pathlib", "numpy"}
    names: dict[str, Any] = {}
    exec(code, names)
    assert [bytes(map(int, tokens[:-1])) for tokens, _ in names["documents"]] == DOCUMENTS
    assert all((targets == np.arange(len(tokens)) % 2).all() for tokens, targets in names["documents"])


def test_samples_cross_shards(tmp_path: Path) -> None:
    source = open_tokens(write(tmp_path / "tokens", (1, 0, 2, 2)))
    assert inputs(source) == STREAM[: len(source) * 4] and len(source) == (len(STREAM) - 1) // 4
    masked = open_tokens(write(tmp_path / "masked", has_targets=True), seq_len=5)
    assert masked[0][1].tolist() == [ord("i"), -100, ord("s"), -100, 256]


def edit(**changes: Any) -> Callable[[Path], None]:
    """Return a function that changes keys of the header."""

    def apply(folder: Path) -> None:
        header = json.loads((folder / "tokens.json").read_text())
        (folder / "tokens.json").write_text(json.dumps({**header, **changes}))

    return apply


def shard(**changes: Any) -> Callable[[Path], None]:
    entry = {"name": "00000", "num_tokens": 7, "num_documents": 2, "digest": ""}
    return edit(shards=[{**entry, **changes}])


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda folder: (folder / "tokens.json").unlink(), "has no tokens.json; write the folder with titan-launch"),
        (lambda folder: (folder / "tokens.json").write_text("[1]"), "that titan-launch prepare did not write"),
        (lambda folder: (folder / "tokens.json").write_bytes(b"\xff\xfe"), "that titan-launch prepare did not write"),
        (edit(version=2), "has version 2 of the format, but this release reads version 1"),
        (edit(extra=1), "that titan-launch prepare did not write"),
        (edit(dtype="float32"), "that titan-launch prepare did not write"),
        (edit(vocab_size=10**6), "that titan-launch prepare did not write"),
        (edit(tokenizer="0123"), "was prepared with another tokenizer (digest 0123; that of [tokenizer] is bytes)"),
        (shard(name="../secret"), "that titan-launch prepare did not write"),
        (shard(name="/etc/passwd"), "that titan-launch prepare did not write"),
        (shard(num_tokens=-1), "that titan-launch prepare did not write"),
        (shard(num_tokens=10**15), "00000.tokens has 14 bytes, but the header says 2,000,000,000,000,000"),
        (shard(num_documents=1), "00000.ends has 16 bytes, but the header says 8"),
        (shard(num_documents=2.0), "that titan-launch prepare did not write"),
        (lambda folder: (folder / "00001.tokens").write_bytes(b"123"), "is damaged: 00001.tokens has 3 bytes"),
        (lambda folder: (folder / "00001.ends").unlink(), "is damaged: 00001.ends: No such file or directory"),
        (lambda folder: np.array([7, 6]).tofile(folder / "00000.ends"), "00000.ends does not end at 7"),
    ],
)
def test_files_that_cannot_be_used_are_refused(tmp_path: Path, damage: Any, reason: str) -> None:
    damage(write(tmp_path / "tokens"))
    message = refusal(tmp_path / "tokens")
    assert message.startswith("data.path: ") and reason in message and "\n" not in message


def test_verification_finds_changes_of_equal_size(tmp_path: Path) -> None:
    folder = write(tmp_path / "tokens")
    assert verify_token_files(folder).num_documents == len(DOCUMENTS)
    content = (folder / "00001.tokens").read_bytes()
    (folder / "00001.tokens").write_bytes(content[::-1])
    with pytest.raises(TokenFilesError, match="the content of shard 00001 has another digest"):
        verify_token_files(folder)
    (folder / "00001.tokens").write_bytes(content)
    header = json.loads((folder / "tokens.json").read_text())
    for shard_of_header in header["shards"]:
        del shard_of_header["largest"]
    edit(vocab_size=256, shards=header["shards"])(folder)
    with pytest.raises(TokenFilesError, match=r"has the token id 256 in 00000\.tokens, but the vocabulary has 256"):
        verify_token_files(folder)


def write_megatron(
    prefix: Path, dtype: str = "uint16", code: int = 8, documents: tuple[int, ...] = (0, 1, 2, 5)
) -> None:
    """Write DOCUMENTS as sequences, in the format of the class `IndexedDataset` of Megatron-LM."""
    lengths = np.array([len(document) + 1 for document in DOCUMENTS], "<i4")
    starts = (np.cumsum(lengths) - lengths).astype("<i8") * np.dtype(dtype).itemsize
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(lengths), len(documents))
    borders = np.array(documents, "<i8")
    prefix.with_suffix(".idx").write_bytes(header + lengths.tobytes() + starts.tobytes() + borders.tobytes())
    np.array(STREAM, dtype).tofile(prefix.with_suffix(".bin"))


def write_llmc(path: Path, magic: int, version: int, dtype: str, num_tokens: int = len(STREAM)) -> None:
    """Write the format of `write_datafile` in dev/data/data_common.py of llm.c."""
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, num_tokens
    path.write_bytes(header.tobytes() + np.array(STREAM, dtype).tobytes())


def test_files_of_other_programs_have_the_same_samples(tmp_path: Path) -> None:
    write_megatron(tmp_path / "small")
    write_megatron(tmp_path / "large", "int32", 4)
    write_llmc(tmp_path / "gpt2.bin", 20240520, 1, "uint16")
    write_llmc(tmp_path / "llama3.bin", 20240801, 7, "uint32")
    for name in ("flat_00.bin", "flat_01.bin"):
        np.array(STREAM, np.uint16).tofile(tmp_path / name)
    for path in ("small", "small.bin", "large", "gpt2.bin", "llama3.bin"):
        source = open_tokens(tmp_path / path)
        assert inputs(source) == STREAM[: len(source) * 4] and len(source) == 8, path
    shards = open_tokens(tmp_path / "flat_*.bin", dtype="uint16")
    assert inputs(shards) == (STREAM * 2)[: len(shards) * 4] and len(shards) == 16
    assert shards.describe() == "10 documents, 68 tokens, 16 samples of 4"
    # The index of Megatron-LM joins the last three sequences into one document.
    assert open_tokens(tmp_path / "small").describe() == "3 documents, 34 tokens, 8 samples of 4"
    before = open_tokens(tmp_path / "small").fingerprint(0)
    assert before.tokenizer == "bytes" and before.changed_to(open_tokens(tmp_path / "small").fingerprint(0)) == ""


@pytest.mark.parametrize(
    ("path", "keys", "reason"),
    [
        ("flat.bin", {}, 'data.dtype: must be "uint16" or "uint32": flat.bin has no header that says so'),
        ("flat.bin", {"dtype": "uint32"}, "has the token id 16,777,332 in flat.bin, but the vocabulary"),
        ("odd.bin", {"dtype": "uint16"}, "the size of odd.bin is not a multiple of uint16"),
        ("empty.bin", {"dtype": "uint16"}, "is empty: empty.bin has no tokens"),
        ("large.bin", {"dtype": "uint16"}, "has the token id 50,256 in large.bin, but the vocabulary has 257 tokens"),
        ("negative", {}, "has the token id 4,294,967,295 in negative.bin, but the vocabulary"),
        ("llmc.bin", {}, "is damaged: llmc.bin has 34 tokens, but its header says 99"),
        ("small.bin", {"dtype": "uint32"}, "data.dtype: the header of small.bin says uint16"),
        ("floats", {}, "floats.idx says that the data are not token ids"),
        ("other", {}, "other.idx is not an index of Megatron-LM in version 1"),
        ("short", {}, "short.idx has another size than its header says"),
        ("mixed", {}, "mixed.idx has documents that do not divide its 5 sequences in order"),
        ("nowhere*", {}, "names no file"),
    ],
)
def test_bad_files_of_other_programs_are_refused(tmp_path: Path, path: str, keys: Any, reason: str) -> None:
    np.array(STREAM, np.uint16).tofile(tmp_path / "flat.bin")
    np.array([50256, 1, 2, 3, 4, 5], np.uint16).tofile(tmp_path / "large.bin")
    (tmp_path / "odd.bin").write_bytes(b"123")
    (tmp_path / "empty.bin").write_bytes(b"")
    write_llmc(tmp_path / "llmc.bin", 20240520, 1, "uint16", num_tokens=99)
    for name, code in (("small", 8), ("floats", 7), ("other", 8), ("short", 8)):
        write_megatron(tmp_path / name, code=code)
    write_megatron(tmp_path / "mixed", documents=(0, 4, 3, 5))
    write_megatron(tmp_path / "negative", "int32", 4)
    np.full(len(STREAM), -1, np.int32).tofile(tmp_path / "negative.bin")
    (tmp_path / "other.idx").write_bytes(b"TNTIDX\x00\x00" + bytes(40))
    with (tmp_path / "short.idx").open("r+b") as file:
        file.truncate(60)
    assert reason in refusal(tmp_path / path, **keys)
