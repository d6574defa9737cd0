"""Tokenizers: bytes, and the `tokenizer.json` files of Hugging Face."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from titan_launch.config.sections.tokenizer import (
    SETTINGS_FILE,
    TOKENIZER_FILE,
    TokenizerConfig,
    read_tokenizer_json,
    special_token,
    tokenizer_file,
    unusable,
    vocabulary_size,
)
from titan_launch.core.errors import config_error
from titan_launch.core.files import MIB, remove
from titan_launch.core.limited_process import CallError, LimitedObject, Limits
from titan_launch.core.packages import is_installed, not_installed
from titan_launch.core.terminal import one_line
from titan_launch.data.loaded_tokenizer import Facts, LoadedTokenizer
from titan_launch.data.token_files import Tokens, token_dtype

_log = logging.getLogger(__name__)

Offsets = npt.NDArray[np.int64]
"""For each token, the start and the end (exclusive) of its characters in the text: `[tokens, 2]`."""


class Tokenizer(Protocol):
    """A conversion between text and token ids."""

    @property
    def vocab_size(self) -> int:
        """Number of token ids, which are 0 to `vocab_size` - 1. Some of the ids may have no token."""

    @property
    def end_of_document(self) -> int:
        """Id of the token that ends a document."""

    @property
    def digest(self) -> str:
        """Digest of everything that decides the tokens of a document."""

    def encode(self, text: str) -> list[int]:
        """Return the tokens of `text`, without tokens that begin or end a document. Names of special tokens in the text
        are plain text."""

    def encode_documents(self, documents: Sequence[bytes]) -> list[Tokens]:
        """Return the tokens of each UTF-8 document, including the tokens that begin and end it."""

    def decode(self, tokens: Iterable[int], keep_special: bool = False) -> str:
        """Return the text of `tokens`. Invalid text becomes U+FFFD. `keep_special`: True writes the names of special
        tokens, False omits them."""

    @property
    def folder(self) -> Path | None:
        """Folder of the tokenizer's files; None if the tokenizer has no files."""

    @property
    def special_tokens(self) -> Sequence[str]:
        """Names of the special tokens."""

    def encode_chat(self, text: str) -> tuple[list[int], Offsets]:
        """Return the tokens of a text that a chat template has written, and their offsets. Names of special tokens
        become these tokens."""


class ByteTokenizer:
    """A tokenizer in which every byte is a token (0 to 255). Token 256 ends a document."""

    vocab_size = 257
    end_of_document = 256
    digest = "bytes"
    folder = None
    special_tokens = ()

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_documents(self, documents: Sequence[bytes]) -> list[Tokens]:
        end = np.uint16(self.end_of_document)
        return [np.append(np.frombuffer(document, np.uint8), end) for document in documents]

    def decode(self, tokens: Iterable[int], keep_special: bool = False) -> str:
        end = b"<end of document>" if keep_special else b""
        data = b"".join(bytes([token]) if token < self.end_of_document else end for token in map(int, tokens))
        return data.decode("utf-8", errors="replace")

    def encode_chat(self, text: str) -> tuple[list[int], Offsets]:
        offsets = [(index, index + 1) for index, character in enumerate(text) for _ in character.encode()]
        return self.encode(text), np.array(offsets, np.int64).reshape(-1, 2)


_LIMITS = Limits(memory_per_byte=600, answer=64 * MIB, answer_per_byte=40)
"""Limits of the helper process for each call of a tokenizer. The package `tokenizers` needs up to 500 bytes of memory
for each token. The result of the first call has all special tokens, so it may be large."""


class HuggingFaceTokenizer:
    """A tokenizer that a `tokenizer.json` describes. The package `tokenizers` runs in a helper process with limits,
    because the rules in the file can double a text again and again, or search a text forever. Methods raise ConfigError
    on `tokenizer.path` if a call fails or exceeds a limit."""

    def __init__(self, config: TokenizerConfig):
        """Load the file. Raises ConfigError on `tokenizer.path`, or on the key of a special token that the file
        lacks."""
        self._config = config
        end_of_document = special_token(config)  # also checks that the file has `begin_of_document`
        content = read_tokenizer_json(config)
        self._call = partial(_call, config, _load(config, content))
        facts: Facts = self._call("facts")
        for name, value in facts.changed.items():
            text = 'tokenizer: %s sets "%s" = %s, which is ignored, so that a text always has the same tokens'
            _log.info(text, tokenizer_file(config), name, value)
        self.vocab_size, self.special_tokens = facts.vocab_size, facts.special_tokens
        if self.vocab_size > vocabulary_size(config):
            listed = f"the file lists ids only up to {vocabulary_size(config) - 1:,}"
            reason = f"has token ids up to {self.vocab_size - 1:,} after loading, but {listed}"
            raise unusable(config, f"{reason}; write it again with save_pretrained of transformers")
        self._dtype = token_dtype(self.vocab_size)
        self._begin = [] if config.begin_of_document is None else [self.token(config.begin_of_document)]
        self.end_of_document = self.token(end_of_document)
        digest = hashlib.blake2b(content, digest_size=16)
        digest.update(f"{self._begin} {self.end_of_document}".encode())
        self.digest = digest.hexdigest()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle only the configuration: another process loads the file again."""
        return HuggingFaceTokenizer, (self._config,)

    @property
    def folder(self) -> Path:
        return tokenizer_file(self._config).parent

    def encode_chat(self, text: str) -> tuple[list[int], Offsets]:
        ids, offsets = self._call("encode_chat", text)
        return _ids(ids).tolist(), _ids(offsets).astype(np.int64).reshape(-1, 2)

    def token(self, name: str) -> int:
        """Return the id of the token `name`, which `special_token` has found in the file. Raises ConfigError if the
        package `tokenizers` does not find the token."""
        found: int | None = self._call("token_to_id", name)
        if found is None:
            reason = f'lists the token "{one_line(name)}", but the package tokenizers does not find it'
            raise unusable(self._config, f"{reason}; write it again with save_pretrained of transformers")
        return found

    def encode(self, text: str) -> list[int]:
        return _ids(self._call("encode", text)).tolist()

    def encode_documents(self, documents: Sequence[bytes]) -> list[Tokens]:
        content, lengths = self._call("encode_documents", documents)
        ids, begin = _ids(content), len(self._begin)
        found, start = [], 0
        for length in lengths:
            tokens = np.empty(begin + length + 1, dtype=self._dtype)
            tokens[:begin], tokens[-1] = self._begin, self.end_of_document
            tokens[begin:-1] = ids[start : start + length]
            found.append(tokens)
            start += length
        return found

    def decode(self, tokens: Iterable[int], keep_special: bool = False) -> str:
        return str(self._call("decode", [int(token) for token in tokens], keep_special))


def _ids(content: bytes) -> npt.NDArray[np.uint32]:
    return np.frombuffer(content, np.uint32)


def build_tokenizer(config: TokenizerConfig) -> Tokenizer:
    """Return the tokenizer that `[tokenizer]` describes. Raises ConfigError for a file that cannot be used."""
    return ByteTokenizer() if config.kind == "bytes" else HuggingFaceTokenizer(config)


END_OF_DOCUMENT = "<|endoftext|>"
"""Name of the only special token of a tokenizer from `train_tokenizer`. GPT-2 uses the same name."""


def train_tokenizer(texts: Iterable[str], vocab_size: int, folder: Path) -> int:
    """Train a byte-level BPE tokenizer and write it to a new folder, which `transformers` also loads. Return the number
    of its tokens: `vocab_size`, or less for little text. The same texts always give the same files. Raises ConfigError
    if the package `tokenizers` is not installed."""
    try:
        import tokenizers  # optional, and slow to import
    except ImportError:
        raise config_error(("tokenizer", "kind"), not_installed("tokenizers"), "huggingface") from None
    byte_level = tokenizers.pre_tokenizers.ByteLevel
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = byte_level(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=sorted(byte_level.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    partial = folder.with_name(f"{folder.name}.partial")
    remove(partial)
    partial.mkdir(parents=True)
    (partial / TOKENIZER_FILE).write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END_OF_DOCUMENT}
    (partial / SETTINGS_FILE).write_text(json.dumps(about, indent=1), encoding="utf-8")
    partial.rename(folder)
    return int(tokenizer.get_vocab_size())


def _load(config: TokenizerConfig, content: bytes) -> LimitedObject:
    """Return a `LoadedTokenizer` in the helper process. The first call of a method loads `content` there. Raises
    ConfigError if the package `tokenizers` is not installed."""
    if "tokenizers" not in sys.modules and not is_installed("tokenizers"):
        raise config_error(("tokenizer", "path"), not_installed("tokenizers"), config.path)
    return LimitedObject(_LIMITS, LoadedTokenizer, content)


def _call(config: TokenizerConfig, loaded: LimitedObject, method: str, *arguments: Any) -> Any:
    """Return the result of a method of a `LoadedTokenizer`. Raises ConfigError on `tokenizer.path` if the call fails or
    exceeds a limit."""
    try:
        return loaded.call(method, *arguments)
    except CallError as error:
        what = f"{tokenizer_file(config)}{'' if error.is_stopped else ':'} {error}"
        raise unusable(config, f"cannot be used: {what}; name a {TOKENIZER_FILE} of Hugging Face") from None


def tokenizer_beside(folder: Path) -> TokenizerConfig | None:
    """Return the configuration of the tokenizer in a Hugging Face folder. Its `begin_of_document` is the token that the
    tokenizer puts before a text. Return None if the folder has no `tokenizer.json`. Raises ConfigError for a file that
    cannot be used."""
    if not os.path.isfile(folder / TOKENIZER_FILE):
        return None
    config = TokenizerConfig(kind="huggingface", path=str(folder))
    begin = _call(config, _load(config, read_tokenizer_json(config)), "begin")
    return config.model_copy(update={"begin_of_document": begin})
