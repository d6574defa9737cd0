"""The format of docs/reference/token_files.md, and token files that are damaged or of other programs."""

from __future__ import annotations

import gzip
import json
import os
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from titan_launch.config.sections.data import TokensData
from titan_launch.core.errors import ConfigError, UserError
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


def put(folder: Path, token: int) -> None:
    """Write a token id into the second shard."""
    with (folder / "00001.tokens").open("r+b") as file:
        file.seek(2 * 3)
        file.write(np.array([token], "<u2").tobytes())


def forget_largest(token: int) -> Callable[[Path], None]:
    """Return a function that puts a token id into files of another program, whose header has no largest ids."""

    def apply(folder: Path) -> None:
        shards = json.loads((folder / "tokens.json").read_text())["shards"]
        edit(shards=[{key: value for key, value in of.items() if key != "largest"} for of in shards])(folder)
        put(folder, token)

    return apply


@pytest.mark.parametrize("packing", ["concat", "documents"])
@pytest.mark.parametrize("is_foreign", [False, True])
def test_an_id_outside_of_the_vocabulary_is_found_when_it_is_read(
    tmp_path: Path, packing: str, is_foreign: bool
) -> None:
    """A header that does not tell the truth, and a file that changes after it was opened."""
    if is_foreign:
        file = tmp_path / "flat.bin"
        np.array([*STREAM[:7], *STREAM], np.uint16).tofile(file)
        source = build_source(
            TokensData(kind="tokens", path=str(file), dtype="uint16", packing=packing),  # type: ignore[arg-type]
            ByteTokenizer(),
            4,
        )
        with file.open("r+b") as stream:
            stream.seek(2 * 10)
            stream.write(np.array([300], "<u2").tobytes())
        place = f"{file}: token 10 is 300"
    else:
        folder = write(tmp_path / "tokens")
        put(folder, 300)
        source = build_source(TokensData(kind="tokens", path=str(folder), packing=packing), ByteTokenizer(), 4)  # type: ignore[arg-type]
        place = f"{folder}/00001.tokens: token 3 is 300"
    with pytest.raises(UserError) as caught:
        source.read_batch(range(len(source)), None)  # type: ignore[attr-defined]
    vocabulary = "the vocabulary has 257 tokens (0 to 256)"
    assert str(caught.value) == f"{place}, but {vocabulary}; the file is damaged: copy or prepare the files again"


def test_a_packing_follows_the_ends_of_documents(tmp_path: Path) -> None:
    """Other ends of the same size have another packing, also if the header is the same."""
    folder = write(tmp_path / "tokens", (5,))
    config = TokensData(kind="tokens", path=str(folder), packing="documents")
    first = build_source(config, ByteTokenizer(), 40)[0][2].tolist()
    ends = np.fromfile(folder / "00000.ends", "<i8")
    times = (folder / "00000.ends").stat()
    (ends - [3, 0, 2, 1, 0]).tofile(folder / "00000.ends")
    os.utime(folder / "00000.ends", ns=(times.st_atime_ns, times.st_mtime_ns))
    second = build_source(config, ByteTokenizer(), 40)[0][2].tolist()
    assert np.bincount(first).tolist() == [5, 16, 4, 4, 11]
    assert np.bincount(second).tolist() == [2, 3, 14, 5, 5, 11]


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda folder: (folder / "tokens.json").unlink(), "has no tokens.json; write the folder with titan-launch"),
        (lambda folder: (folder / "tokens.json").write_text("[1]"), "that titan-launch prepare did not write"),
        (lambda folder: (folder / "tokens.json").write_bytes(b"\xff\xfe"), "that titan-launch prepare did not write"),
        (edit(version=2), "has version 2 of the format, but this release reads version 1; prepare the folder again"),
        (edit(extra=1), "that titan-launch prepare did not write"),
        (edit(dtype="float32"), "that titan-launch prepare did not write"),
        (edit(vocab_size=10**6), "that titan-launch prepare did not write"),
        (edit(tokenizer="0123"), "was prepared with another tokenizer (digest 0123; [tokenizer] has the digest bytes)"),
        (shard(name="../secret"), "that titan-launch prepare did not write"),
        (shard(name="/etc/passwd"), "that titan-launch prepare did not write"),
        (shard(num_tokens=-1), "that titan-launch prepare did not write"),
        (shard(num_tokens=10**15), "00000.tokens has 14 bytes, but the header says 2,000,000,000,000,000"),
        (shard(num_documents=1), "00000.ends has 16 bytes, but the header says 8"),
        (shard(num_documents=2.0), "that titan-launch prepare did not write"),
        (lambda folder: (folder / "00001.tokens").write_bytes(b"123"), "is damaged: 00001.tokens has 3 bytes"),
        (lambda folder: (folder / "00001.ends").unlink(), "is damaged: 00001.ends: No such file or directory"),
        (lambda folder: np.array([7, 6]).tofile(folder / "00000.ends"), "00000.ends does not end at 7"),
        (lambda folder: np.array([7, 7]).tofile(folder / "00000.ends"), "document 1 of 00000.ends does not end after"),
        (lambda folder: np.array([0, 7]).tofile(folder / "00000.ends"), "document 0 of 00000.ends does not end after"),
        (lambda folder: np.array([9, 8, 27]).tofile(folder / "00001.ends"), "document 1 of 00001.ends does not end"),
        (shard(num_tokens=0), "that titan-launch prepare did not write"),
        (shard(largest=257), "has the token id 257 in 00000.tokens, but the vocabulary has 257 tokens (0 to 256)"),
        (
            forget_largest(258),
            "has the token id 258 in 00001.tokens, but the vocabulary has 257 tokens (0 to 256); set",
        ),
    ],
)
def test_files_that_cannot_be_used_are_refused(tmp_path: Path, damage: Any, reason: str) -> None:
    damage(write(tmp_path / "tokens"))
    message = refusal(tmp_path / "tokens")
    assert message.startswith("data.path: ") and reason in message and "\n" not in message


@pytest.mark.parametrize("shards", [(2,), (1, 1)])
def test_documents_that_are_not_pairs_are_refused(tmp_path: Path, shards: tuple[int, ...]) -> None:
    """The second document has one token."""
    message = refusal(write(tmp_path / "tokens", shards, has_pairs=True), seq_len=40, packing="documents")
    assert message.startswith("data.path: has pairs of answers, but a shard has an odd number of documents, or a doc")


def test_verification_finds_changes_of_equal_size(tmp_path: Path) -> None:
    folder = write(tmp_path / "tokens")
    assert verify_token_files(folder).num_documents == len(DOCUMENTS)
    content = (folder / "00001.tokens").read_bytes()
    (folder / "00001.tokens").write_bytes(content[::-1])
    with pytest.raises(TokenFilesError, match="shard 00001 has another digest than the header says"):
        verify_token_files(folder)
    (folder / "00001.tokens").write_bytes(content)
    header = json.loads((folder / "tokens.json").read_text())
    for shard_of_header in header["shards"]:
        del shard_of_header["largest"]
    edit(vocab_size=256, shards=header["shards"])(folder)
    with pytest.raises(TokenFilesError, match=r"has the token id 256 in 00000\.tokens, but the vocabulary has 256"):
        verify_token_files(folder)


def write_megatron(
    prefix: Path,
    dtype: str = "uint16",
    code: int = 8,
    documents: tuple[int, ...] = (0, 1, 2, 5),
    lengths: tuple[int, ...] = tuple(len(document) + 1 for document in DOCUMENTS),
) -> None:
    """Write DOCUMENTS as sequences, in the format of the class `IndexedDataset` of Megatron-LM."""
    sizes = np.array(lengths, "<i4")
    starts = (np.cumsum(sizes) - sizes).astype("<i8") * np.dtype(dtype).itemsize
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(lengths), len(documents))
    borders = np.array(documents, "<i8")
    prefix.with_suffix(".idx").write_bytes(header + sizes.tobytes() + starts.tobytes() + borders.tobytes())
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
    for dtype in ("uint16", "int16", "int64"):
        np.save(tmp_path / "numpy.npy", np.array(STREAM, dtype))
        source = open_tokens(tmp_path / "numpy.npy")
        assert inputs(source) == STREAM[: len(source) * 4] and len(source) == 8, dtype
    assert before.tokenizer == "bytes" and before.changed_to(open_tokens(tmp_path / "small").fingerprint(0)) == ""


def test_files_of_other_programs_are_read_again_after_a_change(tmp_path: Path) -> None:
    """A change that keeps size and time: of the tokens, or of the index alone."""

    def documents() -> str:
        return open_tokens(tmp_path / "small").describe().partition(",")[0]

    def change(name: str, old: bytes, new: bytes) -> None:
        file, times = tmp_path / name, (tmp_path / name).stat()
        content = file.read_bytes()
        assert content.count(old) == 1 and len(old) == len(new)
        file.write_bytes(content.replace(old, new))
        os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))

    write_megatron(tmp_path / "small", documents=(0, 1, 2, 5))
    assert documents() == "3 documents"
    change("small.idx", np.array([1, 2, 5]).tobytes(), np.array([1, 1, 5]).tobytes())
    assert documents() == "2 documents", "one document is empty"
    change("small.bin", np.array([*b"first"], "<u2").tobytes(), np.array([*b"fir", 999, 7], "<u2").tobytes())
    assert "has the token id 999 in small.bin" in refusal(tmp_path / "small")


@pytest.mark.parametrize(
    ("path", "keys", "reason"),
    [
        ("flat.bin", {}, 'data.dtype: must be "uint16" or "uint32": flat.bin has no header that gives the dtype'),
        ("flat.bin", {"dtype": "uint32"}, "has the token id 16,777,332 in flat.bin, but the vocabulary"),
        (
            "odd.bin",
            {"dtype": "uint16"},
            "does not fit the 3 bytes of odd.bin; set another dtype, or copy the file again",
        ),
        ("empty.bin", {"dtype": "uint16"}, "is empty: empty.bin has no tokens"),
        ("large.bin", {"dtype": "uint16"}, "has the token id 50,256 in large.bin, but the vocabulary has 257 tokens"),
        ("negative", {}, "has negative token ids in negative.bin; write the ids as uint16 or uint32"),
        ("int8.npy", {}, "has negative token ids in int8.npy; write the ids as uint16 or uint32"),
        ("llmc.bin", {}, "is damaged: llmc.bin has 34 tokens, but its header says 99"),
        ("small.bin", {"dtype": "uint32"}, "data.dtype: small.bin is not a flat file, and has another dtype"),
        ("floats", {}, "floats.idx has none of the dtypes uint8, int16"),
        ("other", {}, "other.idx is not an index of Megatron-LM in version 1"),
        ("short", {}, "short.idx has another size than its header says"),
        ("mixed", {}, "mixed.idx has documents that do not divide its 5 sequences in order"),
        ("shrinks", {}, "is damaged: shrinks.idx has the length -1 for sequence 1; copy both files again"),
        ("nothing", {}, "is damaged: nothing.idx has the length 0 for sequence 1"),
        ("few", {}, "is damaged: few.idx describes 34 tokens, but few.bin has 33"),
        ("gap", {}, "is damaged: gap.idx has sequences that do not begin where the previous sequence ends"),
        (
            "llmc2.bin",
            {"dtype": "uint16"},
            "begins like a file of llm.c, but its header is incomplete or unknown (known: magic number 20240520 with",
        ),
        (
            "halves.npy",
            {"dtype": "uint16"},
            "halves.npy has float64 of the shape (6,); save a one-dimensional array of little-endian integers",
        ),
        (
            "rows.npy",
            {},
            "rows.npy has int64 of the shape (2, 3); save a one-dimensional array of little-endian integers",
        ),
        ("big.npy", {}, "big.npy has >u2 of the shape (6,); save a one-dimensional array of little-endian integers"),
        ("cut.npy", {}, "is damaged: cut.npy is not a valid .npy file"),
        ("flat.bin.gz", {"dtype": "uint16"}, "cannot be read: flat.bin.gz is a gzip file, not flat numbers"),
        ("arrays.npz", {"dtype": "uint16"}, "cannot be read: arrays.npz is a zip or .npz file, not flat numbers"),
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
    numbers = np.arange(6)
    for name, array in {"halves": numbers / 2, "rows": numbers.reshape(2, 3), "big": numbers.astype(">u2")}.items():
        np.save(tmp_path / f"{name}.npy", array)
    np.save(tmp_path / "int8.npy", np.array([1, -1, 2, 3, 4, 5], np.int8))
    (tmp_path / "cut.npy").write_bytes((tmp_path / "rows.npy").read_bytes()[:40])
    np.savez(tmp_path / "arrays.npz", numbers)
    (tmp_path / "flat.bin.gz").write_bytes(gzip.compress((tmp_path / "flat.bin").read_bytes()))
    write_llmc(tmp_path / "llmc2.bin", 20240520, 2, "uint16")
    write_megatron(tmp_path / "shrinks", lengths=(8, -1, 17, 5, 5))
    write_megatron(tmp_path / "nothing", lengths=(7, 0, 17, 5, 5))
    for name in ("few", "gap"):
        write_megatron(tmp_path / name)
    with (tmp_path / "few.bin").open("r+b") as file:
        file.truncate(2 * (len(STREAM) - 1))
    with (tmp_path / "gap.idx").open("r+b") as file:
        file.seek(34 + 4 * 5 + 8)
        file.write(np.array([2], "<i8").tobytes())
    with (tmp_path / "short.idx").open("r+b") as file:
        file.truncate(60)
    assert reason in refusal(tmp_path / path, **keys)
