import gzip
import itertools
import json
import random
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from titan_launch.config.sections.data import CorpusData, HuggingFaceData, JsonlData, ParquetData, TextData
from titan_launch.core.errors import ConfigError
from titan_launch.core.files import CACHE_VARIABLE
from titan_launch.data.corpora.interface import Corpus, is_held_out
from titan_launch.data.corpora.parquet import ParquetCorpus
from titan_launch.data.sources import build_source
from titan_launch.data.sources.tokens import TokenSource
from titan_launch.data.tokenizers import ByteTokenizer

SEQ_LEN = 8


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))


def build(config: CorpusData) -> TokenSource:
    source = build_source(config, ByteTokenizer(), SEQ_LEN)
    assert isinstance(source, TokenSource)
    return source


def samples(config: CorpusData) -> list[list[int]]:
    source = build(config)
    return [source[index][0].tolist() for index in range(len(source))]


def problem(config: CorpusData) -> str:
    with pytest.raises(ConfigError) as caught:
        build(config)
    return str(caught.value)


def texts(number: int) -> list[str]:
    """Return texts of 0 to 59 characters, some of which have several bytes."""
    draw = random.Random(0)
    return ["".join(draw.choices("abcdé \n\N{SNOWMAN}", k=draw.randrange(60))) for _ in range(number)]


def json_lines(documents: list[str], **keys: Any) -> str:
    return "".join(json.dumps({**keys, "meta": {"text": text}}) + "\n" for text in documents)


def write_parquet(path: Path, documents: list[Any], row_group_size: int = 5, column: str = "text") -> str:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    table = pyarrow.table({"number": list(range(len(documents))), column: documents})
    parquet.write_table(table, path, row_group_size=row_group_size)
    return str(path)


def write_zst(path: Path, content: bytes) -> None:
    zstd = pytest.importorskip("compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd")
    path.write_bytes(zstd.compress(content))


DOCUMENTS = texts(70)


def text_files(folder: Path, write: Callable[[Path, bytes], Any] = Path.write_bytes, suffix: str = "") -> TextData:
    (folder / "files").mkdir()
    for index, text in enumerate(DOCUMENTS):
        write(folder / "files" / f"{index:03}.txt{suffix}", text.encode())
    return TextData(path=str(folder / "files"))


def gzip_files(folder: Path) -> TextData:
    return text_files(folder, lambda path, content: path.write_bytes(gzip.compress(content)), ".gz")


def zst_files(folder: Path) -> TextData:
    return text_files(folder, write_zst, ".zst")


def jsonl(folder: Path) -> JsonlData:
    (folder / "a.jsonl").write_text(json_lines(DOCUMENTS[:50]))
    (folder / "b.jsonl").write_text("\n" + json_lines(DOCUMENTS[50:]).rstrip("\n").replace("\n", "\r\n\r\n"))
    (folder / "README.md").write_text("This file is not read.")
    return JsonlData(kind="jsonl", path=str(folder), field="meta.text")


def compressed_jsonl(folder: Path) -> JsonlData:
    halves = [gzip.compress(json_lines(half).encode()) for half in (DOCUMENTS[:30], DOCUMENTS[30:50])]
    (folder / "a.json.gz").write_bytes(b"".join(halves))
    write_zst(folder / "b.ndjson.zst", json_lines(DOCUMENTS[50:]).encode())
    return JsonlData(kind="jsonl", path=str(folder), field="meta.text")


def parquet(folder: Path) -> ParquetData:
    write_parquet(folder / "a.parquet", DOCUMENTS[:50])
    write_parquet(folder / "b.parquet", DOCUMENTS[50:])
    return ParquetData(kind="parquet", path=str(folder))


def huggingface(folder: Path) -> HuggingFaceData:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict({"text": DOCUMENTS}).save_to_disk(folder / "rows")
    return HuggingFaceData(kind="huggingface", path=str(folder / "rows"))


def huggingface_splits(folder: Path) -> HuggingFaceData:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"body": DOCUMENTS, "number": list(range(len(DOCUMENTS)))})
    datasets.DatasetDict(train=rows.select([1]), test=rows).save_to_disk(folder / "rows")
    return HuggingFaceData(kind="huggingface", path=str(folder / "rows"), column="body", hf_split="test")


@pytest.mark.parametrize(
    "write",
    [
        gzip_files,
        zst_files,
        jsonl,
        compressed_jsonl,
        parquet,
        huggingface,
        huggingface_splits,
    ],
)
@pytest.mark.parametrize("part_bytes", [200, None])
def test_the_same_documents_give_the_same_samples_in_each_kind_and_any_parts(
    write: Callable[[Path], CorpusData], part_bytes: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "plain").mkdir()
    expected = samples(text_files(tmp_path / "plain"))
    if part_bytes is not None:
        monkeypatch.setattr(Corpus, "part_bytes", part_bytes)
    (tmp_path / "other").mkdir()
    assert samples(write(tmp_path / "other")) == expected


def test_a_folder_of_data_files_is_a_data_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("datasets")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "huggingface")
    (tmp_path / "rows").mkdir()
    path = write_parquet(tmp_path / "rows" / "a.parquet", DOCUMENTS)
    rows = HuggingFaceData(kind="huggingface", path=str(tmp_path / "rows"))
    assert samples(rows) == samples(ParquetData(kind="parquet", path=path))
    assert problem(rows.model_copy(update={"hf_split": "test"})).startswith(
        "data.path: cannot be loaded: Unknown split \"test\". Should be one of ['train']; correct "
    )


@pytest.mark.parametrize("part_bytes", [1, 2, 7, 30, 31, 1000])
def test_each_line_belongs_to_one_part(part_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Corpus, "part_bytes", part_bytes)
    (tmp_path / "a.jsonl").write_text('{"text": "first"}\n\n\n{"text": "second"}\n{"text": "third"}')
    source = build(JsonlData(kind="jsonl", path=str(tmp_path / "a.jsonl")))
    tokens = itertools.chain.from_iterable(source[index][0].tolist() for index in range(len(source)))
    assert ByteTokenizer().decode(tokens) == "firstsecondthi"
    assert source.describe() == "1 file, 3 documents, 19 tokens, 2 samples of 8"


def test_parts_of_parquet_files_have_the_size_of_the_column_of_text(tmp_path: Path) -> None:
    """A struct is one column of Arrow, and several columns of Parquet."""
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    meta, documents = [{"a": number, "b": str(number)} for number in range(20)], [text * 50 for text in texts(20)]
    parts = []
    for name, columns in (("flat", {"text": documents}), ("nested", {"meta": meta, "text": documents, "n": meta})):
        parquet.write_table(pyarrow.table(columns), tmp_path / name, row_group_size=5)
        corpus = ParquetCorpus(
            ParquetData(kind="parquet", path=str(tmp_path / name)), ByteTokenizer(), ("data",), seq_len=8
        )
        parts.append([part.num_bytes for part in corpus.parts()])
    assert parts[0] == parts[1] and parts[0][0] > 10_000


def test_records_are_held_out_by_their_text(tmp_path: Path) -> None:
    documents = [f"document {number}, {'x' * 12}" for number in range(200)]
    (tmp_path / "lines.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    paths = {
        JsonlData: str(tmp_path / "lines.jsonl"),
        ParquetData: write_parquet(tmp_path / "rows.parquet", documents[::-1]),
    }
    for kind, path in paths.items():
        keys = {"kind": kind.model_fields["kind"].annotation.__args__[0], "path": path, "validation_percent": 20}
        sides = {
            split: ByteTokenizer().decode(itertools.chain.from_iterable(samples(kind(**keys, split=split))))
            for split in ("train", "validation")
        }
        for text in documents:
            shown = text.partition("x")[0]  # the last sample lacks the end of the last document
            assert (shown in sides["validation"]) == is_held_out(text, 20)
            assert (shown in sides["train"]) == (not is_held_out(text, 20))


LINES = [
    b'{"text": "good"}',
    b"{'text': 1}",
    b'{"body": "x", "id": 3}',
    b'{"text": null}',
    b"[1]",
    b'{"text": "\xff"}',
    b'{"text": "\\ud800"}',
    b"[" * 100_000,
    b'{"text": "also good"}',
]


def test_bad_lines_stop_the_run_or_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Corpus, "part_bytes", 2500)
    path = tmp_path / "a.jsonl"
    expected = [
        ("path", "is not valid JSON (Expecting property name enclosed in double quotes at column 2)"),
        ("field", 'is without the key "text" (its keys: body, id)'),
        ("field", 'is without a string in "text" (it is null)'),
        ("path", "is not a JSON object"),
        ("path", "is not UTF-8 text"),
        ("path", "is not valid Unicode (it has half of a surrogate pair)"),
        ("path", "is not valid JSON (more than 64 nested arrays and objects)"),
    ]
    config = JsonlData(kind="jsonl", path=str(path))
    for line, (key, reason) in zip(LINES[1:-1], expected, strict=True):
        for before in (1, 300):  # the second file has several parts
            path.write_bytes(b"\n".join([LINES[0]] * before + [line]))
            remedy = 'correct this line, or set data.on_error = "skip"'
            assert problem(config) == f"data.{key}: a.jsonl, line {before + 1} {reason}; {remedy}"
    path.write_bytes(b"\n".join(LINES))
    source = build(config.model_copy(update={"on_error": "skip"}))
    assert source.describe() == (
        '1 file, 2 documents, 15 tokens, 1 sample of 8; skipped 7 lines: 2 not valid JSON, 1 without the key "text", '
        '1 without a string in "text", 1 not a JSON object, 1 not UTF-8 text, 1 not valid Unicode; first: a.jsonl, '
        "line 2"
    )
    path.write_bytes(b"[]\n")
    assert problem(config.model_copy(update={"on_error": "skip"})) == (
        "data.path: has no documents (skipped 1 line: 1 not a JSON object; first: a.jsonl, line 1); name files with "
        "one JSON object per line"
    )
    path.write_text('{"text": "alone"}\n')
    monkeypatch.setattr("titan_launch.data.corpora.jsonl.MOST_LINE", len('{"text": "alone"}'))
    assert "1 file, 1 document, 6 tokens" in problem(config), "the end of a line does not count"
    side = "train" if is_held_out("alone", 5) else "validation"
    assert problem(config.model_copy(update={"split": side})) == (
        "data.split: is empty: with validation_percent = 5, no document belongs to it; provide more documents (each "
        'line is one document), or other data with split = "all"'
    )


def test_damaged_compressed_files_are_named(tmp_path: Path) -> None:
    content = "".join(texts(100)).encode()
    whole = {"a.gz": gzip.compress(content)}
    write_zst(tmp_path / "a.zst", content)
    whole["a.zst"] = (tmp_path / "a.zst").read_bytes()
    for name, data in whole.items():
        for damaged in (data[: len(data) // 2], b"text"):
            path = tmp_path / name
            path.write_bytes(damaged)
            error = problem(TextData(path=str(path)))
            assert error.startswith(f"data.path: cannot read {path}: it is damaged (")
            assert error.endswith("; compress or copy it again")


def test_bad_tables_name_the_column(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", ["some text", None, "more text"], column="body")
    config = ParquetData(kind="parquet", path=path)
    assert problem(config) == "data.column: is not a column of a.parquet; its columns are number, body"
    number = problem(config.model_copy(update={"column": "number"}))
    assert number == "data.column: is a column of int64 in a.parquet, not of text; columns of text: body"
    body = config.model_copy(update={"column": "body"})
    remedy = 'correct this row, or set data.on_error = "skip"'
    assert problem(body) == f'data.column: row 1 of a.parquet is without a string in "body" (it is null); {remedy}'
    assert build(body.model_copy(update={"on_error": "skip"})).describe() == (
        '1 file, 2 documents, 20 tokens, 2 samples of 8; skipped 1 row: 1 without a string in "body"; first: row 1 of '
        "a.parquet"
    )
    (tmp_path / "a.parquet").write_text("text")
    assert problem(body).startswith(f"data.path: cannot read {path}: it is not a valid Parquet file (")


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    pytest.importorskip("datasets")
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)  # it is read from the environment at import
    yield


@pytest.mark.usefixtures("offline")
def test_bad_data_sets_of_hugging_face_say_what_exists(tmp_path: Path) -> None:
    config = huggingface_splits(tmp_path)
    path = config.path

    def changed(**keys: Any) -> str:
        return problem(config.model_copy(update=keys))

    assert changed(hf_split="tests") == (
        f'data.hf_split: is not a split of {path}; its splits are train, test; did you mean "test"?'
    )
    assert changed(subset="en") == "data.subset: a folder that save_to_disk wrote has no subsets; remove this key"
    assert changed(column="text") == f"data.column: is not a column of {path}; its columns are body, number"
    assert changed(path="nobody/nothing").startswith(
        "data.path: is not a folder on this machine, and the Hugging Face Hub cannot be reached ("
    )
    shutil.rmtree(Path(path) / "test")
    assert changed().startswith("data.path: cannot be loaded: ")


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.parquet").touch()
    (tmp_path / "a.zst").touch()
    for name in ("pyarrow", "datasets", "compression", "backports"):
        monkeypatch.setitem(sys.modules, name, None)
    install = "which is not installed: pip install 'titan-launch"
    parquet_problem = problem(ParquetData(kind="parquet", path=str(tmp_path / "a.parquet")))
    assert parquet_problem == f"data.kind: needs the package pyarrow, {install}[parquet]'"
    rows_problem = problem(HuggingFaceData(kind="huggingface", path=str(tmp_path)))
    assert rows_problem == f"data.kind: needs the package datasets, {install}[datasets]'"
    assert problem(TextData(path=str(tmp_path / "a.zst"))) == (
        f"data.path: cannot read {tmp_path}/a.zst: it needs the package backports.zstd, {install}[zst]'"
    )
