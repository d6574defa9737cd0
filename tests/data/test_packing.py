"""Packed samples have every token of every document, in best-fit order, and train alike on any number of ranks."""

from __future__ import annotations

import os
from contextlib import ExitStack
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.distributed import run_ranks
from tests.train.jobs import read_metrics, run_job, this_rank, tiny_job
from titan_launch.config.job import JobConfig
from titan_launch.config.sections.data import IGNORED_TARGET, TextData
from titan_launch.core.errors import ConfigError
from titan_launch.data.packing import best_fit_decreasing, pack
from titan_launch.data.sources import SampleSource, build_source
from titan_launch.data.sources.tokens import PackedSource
from titan_launch.data.token_files import Header, TokenStream
from titan_launch.data.tokenizers import ByteTokenizer
from titan_launch.train.build import build_run

PROPERTIES = settings(max_examples=60, deadline=None, phases=[Phase.explicit, Phase.generate, Phase.shrink])

HEADER = Header("uint32", 10_000, "", False, ())


def stream_of(shards: list[list[int]], ignored: set[int]) -> TokenStream:
    """Return documents of the given lengths. The tokens count from 1, so that each one occurs once. `ignored`: tokens
    that are not targets."""
    starts = [0, *accumulate(map(sum, shards))]
    tokens = [np.arange(start + 1, stop + 1, dtype=np.uint32) for start, stop in pairwise(starts)]
    ends = [np.cumsum(lengths, dtype=np.int64) for lengths in shards]
    targets = [np.array([token not in ignored for token in shard.tolist()], np.uint8) for shard in tokens]
    paths = [Path(f"{index}.tokens") for index in range(len(shards))]
    return TokenStream(HEADER, tokens, ends, targets if ignored else None, paths, identity=[])


@PROPERTIES
@given(
    shards=st.lists(st.lists(st.integers(0, 40), min_size=1, max_size=12).filter(any), min_size=1, max_size=4),
    seq_len=st.integers(1, 12),
    ignored=st.sets(st.integers(1, 60), max_size=20),
)
def test_every_pair_of_every_document_is_in_one_sample(
    shards: list[list[int]], seq_len: int, ignored: set[int]
) -> None:
    stream = stream_of(shards, ignored)
    source = PackedSource(stream, pack(stream.document_ends(), seq_len), "")
    document_of = dict(enumerate(np.repeat(np.arange(stream.num_documents), [n for s in shards for n in s]), 1))
    seen: list[tuple[int, int]] = []
    holders: dict[int, set[tuple[int, int]]] = {}
    samples = [source[index] for index in range(len(source))]
    for index, (inputs, targets, documents) in enumerate(samples):
        assert inputs.dtype == targets.dtype == torch.int64 and documents.dtype == torch.int32
        assert inputs.shape == targets.shape == documents.shape == (seq_len,)
        assert documents[0] == 0 and set(documents.diff().tolist()) <= {0, 1}
        rows = list(zip(inputs.tolist(), targets.tolist(), documents.tolist(), strict=True))
        numbers = {number for token, _, number in rows if token}
        for place, (token, target, number) in enumerate(rows):
            if not token:  # padding: at the end, with a number of its own
                assert target == IGNORED_TARGET and number not in numbers and not any(inputs[place:])
                continue
            seen.append((token, token + 1))
            assert document_of[token] == document_of[token + 1]
            assert target == (IGNORED_TARGET if token + 1 in ignored else token + 1)
            assert place == 0 or (rows[place - 1][0] == token - 1) == (rows[place - 1][2] == number)
            holders.setdefault(int(document_of[token]), set()).add((index, number))
    assert sorted(seen) == [(t, t + 1) for t in document_of if document_of[t] == document_of.get(t + 1)]
    lengths = [n for shard in shards for n in shard]
    for document, pieces in holders.items():
        assert len(pieces) == -(-(lengths[document] - 1) // seq_len)
    firsts = [int(inputs[0]) for inputs, _, _ in samples]
    assert firsts == sorted(firsts)
    if samples:
        columns = zip(source.read_batch([*range(len(source))]), zip(*samples, strict=True), strict=True)
        assert all(torch.equal(batch.long(), torch.stack(column).long()) for batch, column in columns)


def naive_best_fit(lengths: list[int], capacity: int) -> list[int]:
    """Return the free space of each bin."""
    bins: list[int] = []
    for length in sorted(lengths, reverse=True):
        free = min((free for free in bins if free >= length), default=capacity)
        if free in bins:
            bins.remove(free)
        bins.append(free - length)
    return sorted(bins)


def next_fit(lengths: list[int], capacity: int) -> int:
    bins, free = 0, 0
    for length in lengths:
        bins, free = (bins, free) if length <= free else (bins + 1, capacity)
        free -= length
    return bins


@PROPERTIES
@given(st.integers(1, 30).flatmap(lambda c: st.tuples(st.just(c), st.lists(st.integers(1, c), max_size=60))))
def test_the_bins_are_those_of_best_fit_decreasing(case: tuple[int, list[int]]) -> None:
    capacity, lengths = case
    bin_of = best_fit_decreasing(np.array(lengths, np.int32), capacity)
    free = capacity - np.bincount(bin_of, weights=lengths) if lengths else np.zeros(0)
    assert sorted(free.tolist()) == naive_best_fit(lengths, capacity)


def test_a_million_documents_take_a_moment_and_no_padding() -> None:
    """The number of steps in Python depends on the different lengths, not on the documents."""
    lengths = np.random.default_rng(0).lognormal(6.5, 1.2, 1_000_000).astype(np.int64) + 1
    packing = pack(np.cumsum(lengths), 2048)
    assert packing.summary.padding < 1e-4
    short = lengths[lengths < 2048].astype(np.int32)
    assert best_fit_decreasing(short, 2048).max() < 0.9 * next_fit(short.tolist(), 2048)
    assert packing.lengths.sum() == (lengths - 1).sum()
    assert np.diff(packing.ends, prepend=0).min() > 0


def build(path: Path, seq_len: int = 8, **keys: Any) -> SampleSource:
    return build_source(TextData(path=str(path), **keys), ByteTokenizer(), seq_len)


def test_text_is_packed_once_per_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TITAN_LAUNCH_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "text"
    folder.mkdir()
    for name, text in {"a": "abcdefghijk", "b": "mno", "c": "", "d": "pqrs"}.items():
        (folder / name).write_text(text)
    source = build(folder, packing="documents")
    # "abcdefghijk" end: 11 pairs, in pieces of 8 and 3; "mno" end: 3; "pqrs" end: 4; the empty file has no pair
    assert source.describe() == "4 files, 22 tokens, 3 samples of 8, 25.00% padding, 1 of 3 documents cut"
    samples = [tuple(column.tolist() for column in source[index]) for index in range(3)]
    end, none = 256, IGNORED_TARGET
    assert samples[0] == ([*b"abcdefgh"], [*b"bcdefghi"], [0] * 8)
    assert samples[1] == ([*b"ijkpqrs", 0], [*b"jk", end, *b"qrs", end, none], [0] * 3 + [1] * 4 + [2])
    assert samples[2] == ([*b"mno", *[0] * 5], [*b"no", end, *[none] * 5], [0] * 3 + [1] * 5)
    with pytest.raises(IndexError):
        source[3]

    files = {file: os.stat(file).st_mtime_ns for file in (tmp_path / "cache").rglob("*.npy")}
    again = build(folder, packing="documents", shuffle=False)
    assert files == {file: os.stat(file).st_mtime_ns for file in (tmp_path / "cache").rglob("*.npy")}
    before = source.fingerprint(0)
    assert before is not None and before.changed_to(again.fingerprint(0)) == ""  # type: ignore[arg-type]
    assert len([*(tmp_path / "cache/tokens").glob("*/tokens.json")]) == 1  # also for concat:
    assert len(build(folder)) == 2
    assert len([*(tmp_path / "cache/tokens").glob("*/tokens.json")]) == 1

    with pytest.raises(ConfigError) as caught:
        build(folder / "c", packing="documents")
    reason = "has no document of at least 2 tokens: 1 file, 1 token; name more text"
    assert str(caught.value) == f"data.path: {reason}"


LENGTHS = (3, 9, 14, 5, 30, 2, 7, 11, 6, 4, 18, 8)


def job(tmp_path: Path, name: str, steps: int) -> dict[str, Any]:
    data = {"kind": "text", "path": str(tmp_path / "text"), "packing": "documents"}
    config = tiny_job(
        tmp_path,
        job={"name": name},
        model={"args": {"vocab_size": 257}},
        validation={"freq": 1, "data": data, "local_batch_size": 3},
        training={"steps": steps},
        checkpoint={"enable": True, "interval": 1},
        lr_scheduler={"kind": "constant"},
    )
    return {**config, "data": data}


def loss_without_packing(config: dict[str, Any]) -> float:
    """Train a job. Return the mean loss per target of the documents, each in a forward of its own."""
    run_job(config)
    with ExitStack() as stack:
        run = build_run(JobConfig.model_validate(config), this_rank(), stack)
        total, count = 0.0, 0
        for file in sorted(Path(config["data"]["path"]).iterdir()):
            tokens = torch.tensor([*file.read_bytes(), 256])
            for start in range(0, len(tokens) - 1, 16):
                piece = tokens[start : start + 17]
                with torch.no_grad():
                    logits = run.model(piece[None, :-1])[0]
                total += F.cross_entropy(logits.float(), piece[1:], reduction="sum").item()
                count += len(piece) - 1
    return total / count


def train_and_resume(configs: list[dict[str, Any]]) -> None:
    for config in configs:
        run_job(config)


def test_packed_runs_do_not_depend_on_ranks_and_resume_exactly(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    for number, length in enumerate(LENGTHS):
        (tmp_path / f"text/{number:02}.txt").write_text("the quick brown fox jumps over the dog"[:length] + str(number))
    [loss] = run_ranks(loss_without_packing, 1, job(tmp_path, "one", 2))
    run_ranks(train_and_resume, 2, [job(tmp_path, "two", steps) for steps in (1, 2)])
    names = ("train/loss", "train/grad_norm", "validation/loss", "data/position")
    one, two = (
        [[report.get(name, 0) for name in names] for report in read_metrics(tmp_path, name)] for name in ("one", "two")
    )
    assert len(one) == 2
    assert np.array(two) == pytest.approx(np.array(one), rel=1e-4)
    assert one[-1][2] == pytest.approx(loss, rel=1e-5)
