"""Tokenizers: bytes, and the `tokenizer.json` files of Hugging Face."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from titan_launch.config.sections.tokenizer import (
    TOKENIZER_FILE,
    TokenizerConfig,
    read_tokenizer_json,
    special_token,
    tokenizer_file,
)
from titan_launch.core.errors import config_error
from titan_launch.data.token_files import Tokens, token_dtype


class Tokenizer(Protocol):
    """A conversion between text and token ids."""

    @property
    def vocab_size(self) -> int:
        """Number of distinct tokens, which are 0 to `vocab_size` - 1."""

    @property
    def end_of_document(self) -> int:
        """Token that ends a document."""

    @property
    def digest(self) -> str:
        """Digest of everything that decides the tokens of a document."""

    def encode(self, text: str) -> list[int]:
        """Return the tokens of `text`, without tokens around it. Names of special tokens in it are plain text."""

    def encode_documents(self, documents: Sequence[bytes]) -> list[Tokens]:
        """Return the tokens of each UTF-8 document, including the tokens that begin and end it."""

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of `tokens`. Invalid text becomes U+FFFD; special tokens are dropped."""

    @property
    def folder(self) -> Path | None:
        """Folder of the tokenizer's files; None if it has none."""

    @property
    def special_tokens(self) -> Sequence[str]:
        """Names of the special tokens."""

    def encode_template(self, text: str) -> tuple[list[int], list[int]]:
        """Return the tokens of a chat that a template has rendered, and the index of each token's first character. Names
        of special tokens become these tokens."""


class ByteTokenizer:
    """A tokenizer in which every byte is a token (0 to 255). Token 256 ends a document."""

    vocab_size = 257
    end_of_document = 256
    digest = "bytes"
    folder = None
    special_tokens = ()

    def encode(self, text: str) -> list[int]:
        """Return the bytes of `text` in UTF-8."""
        return list(text.encode())

    def encode_documents(self, documents: Sequence[bytes]) -> list[Tokens]:
        """Return the n bytes of each document and the end-of-document token: `[n + 1]`."""
        return [self._encode(data) for data in documents]

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of `tokens`. Invalid UTF-8 becomes U+FFFD; end-of-document tokens are dropped."""
        return bytes(int(token) for token in tokens if token < self.end_of_document).decode("utf-8", errors="replace")

    def encode_template(self, text: str) -> tuple[list[int], list[int]]:
        """Return the bytes of a text, and the index of each byte's character."""
        starts = [index for index, character in enumerate(text) for _ in character.encode()]
        return self.encode(text), starts

    def _encode(self, data: bytes) -> npt.NDArray[np.uint16]:
        tokens = np.empty(len(data) + 1, dtype=np.uint16)
        tokens[:-1] = np.frombuffer(data, dtype=np.uint8)
        tokens[-1] = self.end_of_document
        return tokens


class HuggingFaceTokenizer:
    """A tokenizer that a `tokenizer.json` describes, run by the package `tokenizers`."""

    def __init__(self, config: TokenizerConfig):
        """Load the file. Raises ConfigError on `tokenizer.path`, or on the key of a special token that it lacks."""
        self._config = config
        content = read_tokenizer_json(config)
        self._tokenizer = _load(config, content)
        self.vocab_size = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values())
        self._dtype = token_dtype(self.vocab_size)
        self._begin = [] if config.begin_of_document is None else [self.token(config.begin_of_document)]
        self.end_of_document = self.token(special_token(config))
        digest = hashlib.blake2b(content, digest_size=16)
        digest.update(f"{self._begin} {self.end_of_document}".encode())
        self.digest = digest.hexdigest()

    @property
    def folder(self) -> Path:
        """Folder of the `tokenizer.json`."""
        return tokenizer_file(self._config).parent

    @property
    def special_tokens(self) -> list[str]:
        """Names of the special tokens."""
        return [token.content for token in self._tokenizer.get_added_tokens_decoder().values() if token.special]

    def encode_template(self, text: str) -> tuple[list[int], list[int]]:
        """Return the tokens of a chat that a template has rendered, and the index of each token's first character. Names
        of special tokens become these tokens."""
        self._tokenizer.encode_special_tokens = False
        try:
            encoding = self._tokenizer.encode(text, add_special_tokens=False)
        finally:
            self._tokenizer.encode_special_tokens = True
        return list(encoding.ids), [start for start, _ in encoding.offsets]

    def token(self, name: str) -> int:
        """Return the id of the token `name`, which `special_token` has checked."""
        return int(self._tokenizer.token_to_id(name))

    def encode(self, text: str) -> list[int]:
        """Return the tokens of `text`, without tokens around it. Names of special tokens in it are plain text."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def encode_documents(self, documents: Sequence[bytes]) -> list[Tokens]:
        """Return the tokens of each UTF-8 document, including the tokens that begin and end it."""
        texts = [document.decode() for document in documents]
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        end = [self.end_of_document]
        return [np.array([*self._begin, *encoding.ids, *end], dtype=self._dtype) for encoding in encodings]

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of `tokens`. Invalid text becomes U+FFFD; special tokens are dropped."""
        return str(self._tokenizer.decode([int(token) for token in tokens], skip_special_tokens=True))


def build_tokenizer(config: TokenizerConfig) -> Tokenizer:
    """Return the tokenizer that `[tokenizer]` describes. Raises ConfigError for a file that cannot be used."""
    return ByteTokenizer() if config.kind == "bytes" else HuggingFaceTokenizer(config)


def _load(config: TokenizerConfig, content: bytes) -> Any:
    key = ("tokenizer", "path")
    try:
        from tokenizers import Tokenizer as Fast  # optional, and slow to import
    except ImportError:
        reason = "needs the package tokenizers, which is not installed: pip install 'titan-launch[hf]'"
        raise config_error(key, reason, config.path) from None
    try:
        tokenizer = Fast.from_buffer(content)
    except Exception as error:  # tokenizers raises plain exceptions
        reason = f"cannot be used: {error}; name a tokenizer.json of Hugging Face"
        raise config_error(key, reason, config.path) from None
    tokenizer.encode_special_tokens = True
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def tokenizer_beside(folder: Path) -> TokenizerConfig | None:
    """Return the configuration of the tokenizer in a Hugging Face folder, with the token that it puts before a text;
    None if the folder has none. Raises ConfigError."""
    if not (folder / TOKENIZER_FILE).is_file():
        return None
    config = TokenizerConfig(kind="huggingface", path=str(folder))
    encoding = _load(config, read_tokenizer_json(config)).encode("a")
    begin = encoding.tokens[0] if encoding.special_tokens_mask[0] else None
    return config.model_copy(update={"begin_of_document": begin})
