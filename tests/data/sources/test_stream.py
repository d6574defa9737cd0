"""Parts of streams, and their states."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from titan_launch.config.sections.data import FactoryData, HuggingFaceData
from titan_launch.core.errors import ConfigError, UserError
from titan_launch.core.files import CACHE_VARIABLE
from titan_launch.data.corpora.interface import is_held_out
from titan_launch.data.loader import StreamLoader, Workers
from titan_launch.data.sources import StreamSource, build_source
from titan_launch.data.tokenizers import ByteTokenizer

TEXTS = [f"row {number}: {'x' * (number % 9)}" for number in range(23)]


def stream(name: str, number: int = 10) -> StreamSource:
    config = FactoryData(kind=f"tests.data.sources.test_factory:{name}", shuffle=False, args={"number": number})
    source = build_source(config, ByteTokenizer(), 4)
    assert isinstance(source, StreamSource)
    return source


def rows(folder: Path, **keys: Any) -> HuggingFaceData:
    datasets = pytest.importorskip("datasets")
    if not (folder / "rows").exists():
        datasets.Dataset.from_dict({"text": TEXTS, "number": list(range(len(TEXTS)))}).save_to_disk(folder / "rows")
    keys = {"shuffle": False, "streaming": True, **keys}
    return HuggingFaceData(kind="huggingface", path=str(folder / "rows"), **keys)


def open_rows(folder: Path, **keys: Any) -> StreamSource:
    source = build_source(rows(folder, **keys), ByteTokenizer(), 4)
    assert isinstance(source, StreamSource)
    return source


def inputs(source: StreamSource, part: int, parts: int, number: int) -> list[list[int]]:
    return [sample[0].tolist() for sample in itertools.islice(source.open_part(part, parts), number)]


def test_parts_take_turns_and_repeat() -> None:
    source = stream("Stream")
    firsts = [[sample[0] for sample in inputs(source, part, 3, 8)] for part in range(3)]
    assert firsts == [[0, 3, 6, 9, 0, 3, 6, 9], [1, 4, 7, 1, 4, 7, 1, 4], [2, 5, 8, 2, 5, 8, 2, 5]]
    with pytest.raises(UserError, match="fewer samples than the 12 ranks need; use fewer data-parallel ranks"):
        inputs(source, 11, 12, 1)


def test_a_stream_of_rows_has_the_samples_of_its_token_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    indexed = build_source(rows(tmp_path, streaming=False), ByteTokenizer(), 4)
    source = open_rows(tmp_path)
    samples = list(itertools.islice(source.open_part(0, 1), len(indexed)))
    assert [[tensor.tolist() for tensor in sample] for sample in samples] == [
        [tensor.tolist() for tensor in indexed[index]] for index in range(len(indexed))
    ]


def test_the_parts_of_a_stream_of_rows_are_all_rows_of_the_split(tmp_path: Path) -> None:
    source = open_rows(tmp_path, split="train", validation_percent=30)
    texts = [ByteTokenizer().decode(itertools.chain(*inputs(source, part, 2, 200))) for part in range(2)]
    for number, text in enumerate(TEXTS):
        assert [text in of_part for of_part in texts] == [
            number % 2 == part and not is_held_out(text, 30) for part in range(2)
        ]


def batches(loader: StreamLoader, number: int) -> list[list[list[int]]]:
    return [batch.inputs.tolist() for batch in itertools.islice(loader, number)]


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("kind", ["Stream", "StatefulStream", "rows"])
def test_a_resumed_stream_goes_on_with_the_same_batches(kind: str, num_workers: int, tmp_path: Path) -> None:
    source = open_rows(tmp_path) if kind == "rows" else stream(kind)

    def loader() -> StreamLoader:
        return StreamLoader(source, 1, 2, 3, Workers(num_workers))

    with loader() as whole:
        expected = batches(whole, 40)
    for done in (1, 4, 27):
        with loader() as first:
            batches(first, done)
            state = json.dumps(first.state_dict())
        with loader() as second:
            second.load_state_dict(json.loads(state))
            assert batches(second, 40 - done) == expected[done:]


def test_bad_rows_of_a_stream_stop_the_run_or_are_skipped(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    table = {"text": ["first", None, "third"], "number": [1, 2, 3]}
    datasets.Dataset.from_dict(table).save_to_disk(tmp_path / "rows")
    with pytest.raises(ConfigError, match=r"data.column: row 1 of this rank is without a string in \"text\""):
        inputs(open_rows(tmp_path), 0, 1, 5)
    source = open_rows(tmp_path, on_error="skip")
    assert ByteTokenizer().decode(itertools.chain(*inputs(source, 0, 1, 6))) == "firstthirdfirstthird"[:20]
    with pytest.raises(ConfigError, match=r"data.column: is not a column of .*; its columns are text, number"):
        open_rows(tmp_path, column="body")
