"""Pairs of answers: both layouts give the same documents, and the two chats of a pair stay in one sample."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from titan_launch.config.sections.data import PreferenceData, TokensData, UnpairedPreferenceData
from titan_launch.core.errors import ConfigError
from titan_launch.core.files import CACHE_VARIABLE
from titan_launch.data.corpora.chat import PreferenceCorpus, UnpairedPreferenceCorpus, preference_messages
from titan_launch.data.packing import longest_pair, pack
from titan_launch.data.prepare import prepare
from titan_launch.data.sources import SampleSource, build_source
from titan_launch.data.sources.tokens import PackedSource
from titan_launch.data.tokenizers import ByteTokenizer
from titan_launch.train.describe_data import decode_sample

SEQ_LEN = 300


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("jinja2")
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))


def turn(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


ASKED, GOOD, BAD = turn("user", "Hi"), turn("assistant", "Hello"), turn("assistant", "No")
LAYOUTS: list[dict[str, Any]] = [
    {"prompt": "Hi", "chosen": "Hello", "rejected": "No"},
    {"prompt": [ASKED], "chosen": [GOOD], "rejected": [BAD]},
    {"chosen": [ASKED, GOOD], "rejected": [ASKED, BAD]},
    {"prompt": "Hi", "chosen": [ASKED, GOOD], "rejected": [ASKED, BAD]},
]


def test_every_layout_is_the_same_pair() -> None:
    assert {json.dumps(preference_messages(line)) for line in LAYOUTS} == {json.dumps([[ASKED, GOOD], [ASKED, BAD]])}
    system = turn("system", "Be brief.")
    assert preference_messages({**LAYOUTS[0], "system": "Be brief."}) == [[system, ASKED, GOOD], [system, ASKED, BAD]]


def test_the_formats_of_the_docs_are_read() -> None:
    page = (Path(__file__).parents[3] / "docs/how_to/losses.md").read_text()
    lines = re.findall(r"^```json\n(.*?)^```", page, re.DOTALL | re.MULTILINE)[0].splitlines()
    assert len(lines) == 3
    for line in lines:
        chosen, rejected = preference_messages(json.loads(line))
        assert chosen == [turn("user", "Say hello."), turn("assistant", "Hello!")]
        assert rejected == [turn("user", "Say hello."), turn("assistant", "No.")]


def build(path: Path, lines: list[Any], seq_len: int = SEQ_LEN, **keys: Any) -> SampleSource:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    data = PreferenceData(kind="preferences", path=str(path), template="chatml", **keys)
    return build_source(data, ByteTokenizer(), seq_len)


def problem(path: Path, lines: list[Any], **keys: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        build(path, lines, **keys)
    return str(caught.value)


def chats_of(source: SampleSource) -> list[list[list[tuple[str, bool]]]]:
    """Return the passages of each document of each sample, and whether they are targets."""
    return [
        [
            [(p["text"], p["counts"]) for p in document["text"]]
            for document in decode_sample(source[index], ByteTokenizer())
        ]
        for index in range(len(source))
    ]


BEFORE = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
PAIR = [[(BEFORE, False), ("Hello<|im_end|>", True)], [(BEFORE, False), ("No<|im_end|>", True)]]


def test_a_sample_has_whole_pairs_and_only_answers_are_targets(tmp_path: Path) -> None:
    earlier = [turn("user", "A?"), turn("assistant", "B.")]
    chats = {"chosen": [*earlier, ASKED, GOOD], "rejected": [*earlier, ASKED, BAD]}
    source = build(tmp_path / "a.jsonl", [*LAYOUTS[:2], chats])
    short, long = sorted(chats_of(source), key=len, reverse=True)
    assert short == [*PAIR, *PAIR]
    chosen, rejected = long
    for document, answer in ((chosen, "Hello"), (rejected, "No")):
        *_, (before, before_counts), (text, counts) = document
        assert "B.<|im_end|>" in before and not before_counts
        assert (text, counts) == (f"{answer}<|im_end|>", True)


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(2, 9), st.integers(2, 9)), min_size=1, max_size=20), room=st.integers(0, 20)
)
def test_pairs_are_packed_together(lengths: list[tuple[int, int]], room: int) -> None:
    ends = np.cumsum([length for pair in lengths for length in pair])
    seq_len = longest_pair(np.diff(ends, prepend=0)) + room
    packing = pack(ends, seq_len, has_pairs=True)
    starts = dict(enumerate((ends - np.diff(ends, prepend=0)).tolist()))
    seen = []
    for sample in range(len(packing.ends)):
        pieces, _ = packing.pieces_of([sample])
        assert packing.lengths[pieces].sum() <= seq_len
        documents = [next(n for n, s in starts.items() if s == start) for start in packing.starts[pieces].tolist()]
        assert all(b == a + 1 and a % 2 == 0 for a, b in zip(documents[::2], documents[1::2], strict=True))
        seen += documents
    assert sorted(seen) == list(range(2 * len(lengths)))


def test_long_pairs_are_skipped_cut_or_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    long = {**LAYOUTS[0], "chosen": "a" * 500}
    source = build(file, [LAYOUTS[0], long])
    assert len(source) == 1
    note = "; skipped 1 line: 1 longer than training.seq_len = 300 tokens; first: a.jsonl, line 2"
    assert source.describe().endswith(note) and source.describe().startswith("1 file, 2 documents, ")
    found = problem(file, [long], truncation="stop")
    assert found.startswith("data.truncation: a.jsonl, line 1 is longer than training.seq_len = 300 tokens (its two")
    _, targets, documents = build(file, [long], truncation="right")[0]
    lengths = [int((documents == number).sum()) for number in (0, 1)]
    assert lengths == [150, len(BEFORE) + len("No<|im_end|>\n") - 1]
    assert (targets != -100).sum() == 151 - len(BEFORE) + len("No<|im_end|>")
    assert "without a target (it was truncated)" in problem(file, [long], truncation="right", seq_len=90)
    assert len(build(file, [long], truncation="left", train_on="end", seq_len=2)) == 1


BAD_LINES: list[tuple[Any, str]] = [
    ({"prompt": "a", "response": "b"}, 'without "chosen" (its keys are prompt, response; a line needs "chosen" and '),
    ({"prompt": "a", "chosen": "b"}, 'without "rejected" (its keys are prompt, chosen; '),
    ({"chosen": "\n\nHuman: a\n\nAssistant: b", "rejected": "c"}, 'without a prompt ("chosen" and "rejected" begin '),
    ({"prompt": "a", "chosen": [ASKED, BAD], "rejected": "c"}, "a pair of a whole chat and an answer (write "),
    ({"prompt": "a", "chosen": "b", "rejected": None}, 'without the text of a message (message 1 of "rejected" '),
    ({"chosen": [ASKED], "rejected": [ASKED, BAD]}, "without a message of the assistant; "),
]


def test_lines_that_are_no_pairs_are_named_or_counted(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    for line, reason in BAD_LINES:
        found = problem(file, [LAYOUTS[0], line])
        assert found.startswith(f"data.path: a.jsonl, line 2 is {reason}"), found
    source = build(file, [LAYOUTS[0], *(line for line, _ in BAD_LINES)], on_error="skip")
    assert "skipped 6 lines" in source.describe()


RATED = [
    {"prompt": "Hi", "completion": "Hello", "label": True},
    {"messages": [ASKED, BAD], "label": False},
]


def rated(file: Path, lines: list[Any], seq_len: int = SEQ_LEN, **keys: Any) -> SampleSource:
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    data = UnpairedPreferenceData(kind="unpaired_preferences", path=str(file), template="chatml", **keys)
    return build_source(data, ByteTokenizer(), seq_len)


def test_the_last_target_of_an_answer_is_its_label(tmp_path: Path) -> None:
    inputs, targets, documents = rated(tmp_path / "a.jsonl", RATED)[0]
    for number, (answer, label) in enumerate((("Hello", 1), ("No", 0))):
        own = targets[documents == number]
        *answered, last = own[own != -100].tolist()
        assert bytes(answered).decode() == f"{answer}<|im_end|>" and last == label == own[-1]
        assert bytes(inputs[documents == number].tolist()).decode() == f"{BEFORE}{answer}<|im_end|>\n"


def test_answers_without_a_label_or_too_long_are_named_or_cut(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    chat = {"prompt": "Hi", "completion": "Hello"}
    for line, detail in ((chat, "true means a desirable answer"), ({**chat, "label": 1}, "its value is 1")):
        with pytest.raises(ConfigError, match=re.escape(f'is without true or false in "label" ({detail}')):
            rated(file, [line])
    length = len(f"{BEFORE}Hello<|im_end|>\n")
    assert len(rated(file, [RATED[0]], seq_len=length)) == 1
    with pytest.raises(ConfigError, match=rf"longer than training\.seq_len = {length - 1} tokens \(it has {length}\)"):
        rated(file, [RATED[0]], seq_len=length - 1, truncation="stop")
    for truncation in ("right", "left"):
        inputs, targets, _ = rated(file, [RATED[0]], seq_len=length - 4, truncation=truncation)[0]
        assert len(inputs) == length - 4 and targets[-1] == 1


def test_prepared_answers_keep_their_labels_and_are_never_divided(tmp_path: Path) -> None:
    source = rated(tmp_path / "a.jsonl", RATED)
    config = UnpairedPreferenceData(kind="unpaired_preferences", path=str(tmp_path / "a.jsonl"), template="chatml")
    header = prepare(UnpairedPreferenceCorpus(config, ByteTokenizer(), ("data",), SEQ_LEN), tmp_path / "tokens")
    assert header.has_ratings and not header.has_pairs

    def opened(seq_len: int, packing: Any) -> SampleSource:
        data = TokensData(kind="tokens", path=str(tmp_path / "tokens"), packing=packing)
        return build_source(data, ByteTokenizer(), seq_len)

    for own, other in zip(source[0], opened(SEQ_LEN, "documents")[0], strict=True):
        assert own.equal(other)
    with pytest.raises(ConfigError, match="would divide the answers with a label in the token files"):
        opened(SEQ_LEN, "concat")
    with pytest.raises(ConfigError, match=r"has answers with a label\. The longest takes"):
        opened(30, "documents")


def test_prepared_pairs_are_the_same_samples(tmp_path: Path) -> None:
    source = build(tmp_path / "a.jsonl", LAYOUTS)
    assert isinstance(source, PackedSource) and source.has_pairs
    config = PreferenceData(kind="preferences", path=str(tmp_path / "a.jsonl"), template="chatml")
    header = prepare(PreferenceCorpus(config, ByteTokenizer(), ("data",), SEQ_LEN), tmp_path / "tokens")
    assert header.has_pairs and header.num_documents == 8

    def opened(seq_len: int, packing: Any) -> SampleSource:
        data = TokensData(kind="tokens", path=str(tmp_path / "tokens"), packing=packing)
        return build_source(data, ByteTokenizer(), seq_len)

    assert chats_of(opened(SEQ_LEN, "documents")) == chats_of(source)
    with pytest.raises(
        ConfigError, match=r'data\.packing: would divide the pairs of answers in the token files; set "documents"'
    ):
        opened(SEQ_LEN, "concat")
    with pytest.raises(ConfigError, match=r"has pairs of answers\. The longest takes 131 positions"):
        opened(100, "documents")
