"""The tokenizer of a `tokenizer.json`, in a helper process with limits. So this module imports little."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

_RANDOM = ("dropout", "alpha", "nbest_size")
"""Keys of BPE and Unigram models that make the tokens of a text random. `tokenizers` 0.23 reads only `dropout` from a
file."""

IDS = "I"
"""Type code of the arrays of ids: 32 bits."""


class Facts(NamedTuple):
    """Properties of a loaded tokenizer. The helper process sends them once."""

    vocab_size: int
    special_tokens: list[str]
    changed: dict[str, Any]
    """The keys of `_RANDOM` that the file sets, with their values. `LoadedTokenizer` sets these keys to None, so that a
    text always has the same tokens."""


class LoadedTokenizer:
    """A tokenizer of the package `tokenizers`, without randomness, padding and truncation.

    Methods return lists of ids as the bytes of an array of type `IDS`, because bytes are sent to another process
    faster.
    """

    def __init__(self, content: bytes):
        """Load a `tokenizer.json`. `content`: content of the file. Raises the exceptions of the package."""
        import tokenizers

        self._tokenizer = tokenizers.Tokenizer.from_buffer(content)
        model: Any = self._tokenizer.model
        changed = {name: getattr(model, name) for name in _RANDOM if getattr(model, name, None)}
        for name in changed:
            setattr(model, name, None)
        self._tokenizer.encode_special_tokens = True
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        added = self._tokenizer.get_added_tokens_decoder().values()
        size = 1 + max(vocabulary.values(), default=-1)
        self._facts = Facts(size, [token.content for token in added if token.special], changed)

    def facts(self) -> Facts:
        return self._facts

    def token_to_id(self, name: str) -> int | None:
        found: int | None = self._tokenizer.token_to_id(name)
        return found

    def begin(self) -> str | None:
        """Return the special token that the tokenizer puts before a text; None if it puts none."""
        encoding = self._tokenizer.encode("a")
        return str(encoding.tokens[0]) if encoding.tokens and encoding.special_tokens_mask[0] else None

    def encode(self, text: str) -> bytes:
        """Return the ids of a text. Names of special tokens in the text are plain text, and no special tokens are
        added."""
        return array(IDS, self._tokenizer.encode(text, add_special_tokens=False).ids).tobytes()

    def encode_documents(self, documents: Sequence[bytes]) -> tuple[bytes, list[int]]:
        """Return the concatenated ids of UTF-8 documents, and the number of ids of each document. No special tokens are
        added."""
        texts = [document.decode() for document in documents]
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        parts = [array(IDS, encoding.ids).tobytes() for encoding in encodings]
        return b"".join(parts), [len(encoding) for encoding in encodings]

    def encode_chat(self, text: str) -> tuple[bytes, bytes]:
        """Return the ids of a text, and for each token the start and the end (exclusive) of its characters. Names of
        special tokens in the text become these tokens."""
        self._tokenizer.encode_special_tokens = False
        try:
            encoding = self._tokenizer.encode(text, add_special_tokens=False)
        finally:
            self._tokenizer.encode_special_tokens = True
        offsets = array(IDS, chain.from_iterable(encoding.offsets))
        return array(IDS, encoding.ids).tobytes(), offsets.tobytes()

    def decode(self, tokens: Sequence[int], keep_special: bool) -> str:
        """Return the text of tokens, with the names of special tokens only if `keep_special`."""
        return str(self._tokenizer.decode(tokens, skip_special_tokens=not keep_special))
