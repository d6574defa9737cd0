"""How text becomes tokens."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import numpy as np
import numpy.typing as npt

from titan_launch.config.sections.data import TokenizerConfig


class Tokenizer(Protocol):
    """Turns documents into tokens and back."""

    @property
    def vocab_size(self) -> int:
        """Number of different tokens: they run from 0 to `vocab_size` - 1."""

    def encode_document(self, data: bytes) -> npt.NDArray[np.uint16]:
        """The tokens `[n]` of a whole document (UTF-8), the one that ends it included."""

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of `tokens`; what is not valid text becomes U+FFFD, ends of documents disappear."""


class ByteTokenizer:
    """Every byte is a token (0 to 255); 256 ends a document."""

    vocab_size = 257
    end_of_document = 256

    def encode_document(self, data: bytes) -> npt.NDArray[np.uint16]:
        """The bytes of `data` `[n]` and the end of the document, together `[n + 1]`."""
        tokens = np.empty(len(data) + 1, dtype=np.uint16)
        tokens[:-1] = np.frombuffer(data, dtype=np.uint8)
        tokens[-1] = self.end_of_document
        return tokens

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of `tokens`; what is not valid UTF-8 becomes U+FFFD, ends of documents disappear."""
        return bytes(int(token) for token in tokens if token < self.end_of_document).decode("utf-8", errors="replace")


def build_tokenizer(config: TokenizerConfig) -> Tokenizer:
    """The tokenizer that `[tokenizer]` describes; there is one kind so far, `bytes`."""
    return ByteTokenizer()
