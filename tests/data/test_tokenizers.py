import numpy as np

from titan_launch.config.sections.tokenizer import TokenizerConfig
from titan_launch.data.tokenizers import build_tokenizer


def test_a_document_becomes_its_bytes_and_an_end_token() -> None:
    tokens = build_tokenizer(TokenizerConfig()).encode_documents(["aé\n".encode()])[0]
    assert tokens.dtype == np.uint16
    assert tokens.tolist() == [97, 195, 169, 10, 256]


def test_an_empty_document_becomes_an_end_token() -> None:
    assert build_tokenizer(TokenizerConfig()).encode_documents([b""])[0].tolist() == [256]


def test_decode_reverses_encode() -> None:
    tokenizer = build_tokenizer(TokenizerConfig())
    text = "Grüße, 世界 🌍\n"
    assert tokenizer.decode(tokenizer.encode_documents([text.encode()])[0]) == text
    assert tokenizer.vocab_size == 257


def test_decode_survives_half_a_character() -> None:
    assert build_tokenizer(TokenizerConfig()).decode([97, 195, 98]) == "a\ufffdb"
