"""Tokenizers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import numpy as np
import numpy.typing as npt

from titan_launch.config.sections.data import TokenizerConfig


class Tokenizer(Protocol):
    """A conversion between UTF-8 documents and token ids."""

    @property
    def vocab_size(self) -> int:
        """Number of distinct tokens, which are 0 to `vocab_size` - 1."""

    def encode_document(self, data: bytes) -> npt.NDArray[np.uint16]:
        """Return the tokens `[n]` of a UTF-8 document, including the end-of-document token."""

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of `tokens`. Invalid text becomes U+FFFD; end-of-document tokens are dropped."""


class ByteTokenizer:
    """A tokenizer in which every byte is a token (0 to 255). Token 256 ends a document."""

    vocab_size = 257
    end_of_document = 256

    def encode_document(self, data: bytes) -> npt.NDArray[np.uint16]:
        """Return the n bytes of `data` and the end-of-document token: `[n + 1]`."""
        tokens = np.empty(len(data) + 1, dtype=np.uint16)
        tokens[:-1] = np.frombuffer(data, dtype=np.uint8)
        tokens[-1] = self.end_of_document
        return tokens

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of `tokens`. Invalid UTF-8 becomes U+FFFD; end-of-document tokens are dropped."""
        return bytes(int(token) for token in tokens if token < self.end_of_document).decode("utf-8", errors="replace")


def build_tokenizer(config: TokenizerConfig) -> Tokenizer:
    """Return the tokenizer that `[tokenizer]` describes. The only kind is `bytes`."""
    return ByteTokenizer()
