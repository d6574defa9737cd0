"""The tokenizer of bytes, and tokenizers in a `tokenizer.json`."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from titan_launch.config.sections.tokenizer import TokenizerConfig, vocabulary_size
from titan_launch.core.errors import ConfigError
from titan_launch.data.tokenizers import END_OF_DOCUMENT, Tokenizer, build_tokenizer, train_tokenizer

TEXT = "Grüße, 世界 🌍\n"


def test_a_document_becomes_its_bytes_and_an_end_token() -> None:
    tokens = build_tokenizer(TokenizerConfig()).encode_documents(["aé\n".encode()])[0]
    assert tokens.dtype == np.uint16
    assert tokens.tolist() == [97, 195, 169, 10, 256]


def test_an_empty_document_becomes_an_end_token() -> None:
    assert build_tokenizer(TokenizerConfig()).encode_documents([b""])[0].tolist() == [256]


def test_decode_reverses_encode() -> None:
    tokenizer = build_tokenizer(TokenizerConfig())
    assert tokenizer.decode(tokenizer.encode_documents([TEXT.encode()])[0]) == TEXT
    assert tokenizer.vocab_size == 257


def test_decode_survives_half_a_character() -> None:
    assert build_tokenizer(TokenizerConfig()).decode([97, 195, 98]) == "a\ufffdb"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a trained tokenizer of 300 tokens."""
    pytest.importorskip("tokenizers")
    folder = tmp_path_factory.mktemp("trained") / "tokenizer"
    assert train_tokenizer(texts(), 300, folder) == 300
    return folder


def texts() -> list[str]:
    return [f"the number {number} is one of the numbers\n" * 3 for number in range(50)]


def load(path: Path, **keys: Any) -> Tokenizer:
    return build_tokenizer(TokenizerConfig(kind="huggingface", path=str(path), **keys))


def test_training_is_deterministic_and_transformers_loads_the_result(trained: Path, tmp_path: Path) -> None:
    train_tokenizer(texts(), 300, tmp_path / "again")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "again" / name).read_bytes() == (trained / name).read_bytes()
    assert train_tokenizer(["ab"], 300, tmp_path / "small") == 258, "256 bytes, ab, and the end of a document"
    tokenizer = load(trained)
    (tokens,) = tokenizer.encode_documents([TEXT.encode()])
    assert tokenizer.decode(tokens) == TEXT and tokens[-1] == tokenizer.end_of_document
    assert tokenizer.vocab_size == 300 == vocabulary_size(TokenizerConfig(kind="huggingface", path=str(trained)))
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(trained)
    assert theirs.eos_token == END_OF_DOCUMENT
    assert [*theirs(TEXT)["input_ids"], theirs.eos_token_id] == tokens.tolist()


def test_names_of_special_tokens_in_text_are_text(trained: Path) -> None:
    tokenizer = load(trained)
    for loaded in (tokenizer, pickle.loads(pickle.dumps(tokenizer))):
        (tokens,) = loaded.encode_documents([END_OF_DOCUMENT.encode()])
        assert tokens.tolist().count(tokenizer.end_of_document) == 1 and len(tokens) > 2


def test_a_text_always_has_the_same_tokens(trained: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Keys that drop merges at random, cut the tokens, or pad them, have no effect."""
    caplog.set_level("INFO", logger="titan_launch")
    content = json.loads((trained / "tokenizer.json").read_text())
    content["model"]["dropout"] = 0.5
    content["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    content["padding"] = {
        "strategy": {"Fixed": 99},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": END_OF_DOCUMENT,
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = load(tmp_path)
    (message,) = (record.getMessage() for record in caplog.records)
    ignored = "which is ignored, so that a text always has the same tokens"
    assert message == f'tokenizer: {tmp_path}/tokenizer.json sets "dropout" = 0.5, {ignored}'
    documents = [text.encode() for text in texts()]
    expected = [tokens.tolist() for tokens in load(trained).encode_documents(documents)]
    for loaded in (tokenizer, pickle.loads(pickle.dumps(tokenizer))):
        for _ in range(3):
            assert [tokens.tolist() for tokens in loaded.encode_documents(documents)] == expected


def test_the_digest_follows_the_tokens_and_not_the_path(trained: Path, tmp_path: Path) -> None:
    moved = tmp_path / "other.json"
    moved.write_bytes((trained / "tokenizer.json").read_bytes())
    assert load(moved).digest == load(trained).digest
    assert load(moved, begin_of_document=END_OF_DOCUMENT).digest != load(trained).digest


def edited(change: Callable[[Any], None]) -> Callable[[Path], None]:
    """Return a function that changes the content of a `tokenizer.json`."""

    def apply(file: Path) -> None:
        content = json.loads(file.read_text())
        change(content)
        file.write_text(json.dumps(content))

    return apply


def fifo(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


@pytest.mark.parametrize(
    ("damage", "keys", "message"),
    [
        (lambda file: file.unlink(), {}, "tokenizer.path: cannot be read: No such file or directory; name a"),
        (fifo, {}, "tokenizer.path: cannot be read: not a regular file"),
        (lambda file: file.write_bytes(b"\xff{"), {}, "tokenizer.path: is not a tokenizer.json of Hugging Face"),
        (lambda file: file.write_text("[]"), {}, "tokenizer.path: is not a tokenizer.json of Hugging Face"),
        (edited(lambda c: c["model"].update(type="None")), {}, "tokenizer.path: cannot be used: "),
        (edited(lambda c: c["model"]["merges"].append("x y")), {}, "tokenizer.path: cannot be used: "),
        (edited(lambda c: c.pop("model")), {}, "tokenizer.path: is not a tokenizer.json of Hugging Face"),
        (
            edited(lambda c: (c["added_tokens"].clear(), c["model"]["vocab"].pop(END_OF_DOCUMENT))),
            {},
            "tokenizer.end_of_document: must name the token that ends a document",
        ),
        (
            lambda file: file.with_name("tokenizer_config.json").write_text('{"eos_token": "</s>"}'),
            {},
            'tokenizer.path: has no token "</s>", which is the "eos_token" of ',
        ),
        (edited(lambda c: None), {"end_of_document": "<|endoftex|>"}, 'did you mean "<|endoftext|>"?'),
        (edited(lambda c: None), {"begin_of_document": "<s>"}, "tokenizer.begin_of_document: is not a token of"),
    ],
)
def test_tokenizers_that_cannot_be_used_are_refused(
    trained: Path, tmp_path: Path, damage: Any, keys: Any, message: str
) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_bytes((trained / "tokenizer.json").read_bytes())
    damage(file)
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, **keys)
    assert message in str(caught.value)
