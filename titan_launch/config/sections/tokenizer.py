"""`[tokenizer]`, and the parts of a `tokenizer.json` that a check of the job file needs."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from titan_launch.config.sections.base import Section
from titan_launch.core.errors import config_error, did_you_mean
from titan_launch.core.files import read_regular

TOKENIZER_FILE = "tokenizer.json"

BYTES_VOCABULARY = 257
"""Vocabulary size of the tokenizer `bytes`."""


class TokenizerConfig(Section):
    """Conversion of text to tokens. Not used with images."""

    kind: Literal["bytes", "huggingface"] = "bytes"
    """The tokenizer. `bytes`: each byte of the UTF-8 text is a token (0 to 255), and token 256 ends a document; no
    download is needed. `huggingface`: the file `path`, which needs `pip install 'titan-launch[tokenizers]'`."""

    path: str | None = None
    """A `tokenizer.json`, or a folder that contains one, such as the folder of a Hugging Face model. `titan-launch
    prepare --train-tokenizer` writes one. Only with `kind = "huggingface"`."""

    end_of_document: str | None = None
    """Name of the special token that ends each document. Default: the `eos_token` of the `tokenizer_config.json` beside
    the file, or one of the usual names: `<|endoftext|>`, `</s>`, `<|end_of_text|>`, `<eos>`. Only with
    `kind = "huggingface"`."""

    begin_of_document: str | None = None
    """Name of the special token that begins each document. Default: no token. Only with `kind = "huggingface"`."""


_USUAL_ENDS = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>")


def tokenizer_file(config: TokenizerConfig) -> Path:
    """Return the path of the `tokenizer.json` that `path` names."""
    path = Path(config.path or "")
    return path / TOKENIZER_FILE if path.is_dir() else path


def read_tokenizer_json(config: TokenizerConfig) -> bytes:
    """Return the content of the `tokenizer.json`. Raises ConfigError on `tokenizer.path`."""
    try:
        return read_regular(tokenizer_file(config))
    except OSError as error:
        reason = f"cannot be read: {error.strerror}; name a {TOKENIZER_FILE}, or a folder that contains one"
        raise config_error(("tokenizer", "path"), reason, config.path) from None


def vocabulary_size(config: TokenizerConfig) -> int:
    """Return the number of tokens. Raises ConfigError."""
    return BYTES_VOCABULARY if config.kind == "bytes" else 1 + max(_tokens(config).values())


def special_token(config: TokenizerConfig) -> str:
    """Return the name of the token that ends a document. Raises ConfigError if the tokenizer lacks this token, or the
    token that begins a document."""
    tokens = _tokens(config)
    for key in ("begin_of_document", "end_of_document"):
        name = getattr(config, key)
        if name is not None and name not in tokens:
            special = (token for token in tokens if token[:1] in ("<", "["))
            reason = f"is not a token of {tokenizer_file(config)}{did_you_mean(name, special)}"
            raise config_error(("tokenizer", key), reason, name)
    if config.end_of_document is not None:
        return config.end_of_document
    for name in (_named_beside(tokenizer_file(config)), *_USUAL_ENDS):
        if name in tokens:
            return name
    reason = f"must name the token that ends a document: {tokenizer_file(config)} has none of {', '.join(_USUAL_ENDS)}"
    raise config_error(("tokenizer", "end_of_document"), reason)


def _tokens(config: TokenizerConfig) -> dict[str, int]:
    file = tokenizer_file(config)
    try:
        return _parse(file, file.stat().st_mtime_ns)
    except OSError:
        read_tokenizer_json(config)  # raises
        raise
    except (ValueError, KeyError, TypeError, AttributeError):
        reason = f"is not a {TOKENIZER_FILE} of Hugging Face; name such a file, or a folder that contains one"
        raise config_error(("tokenizer", "path"), reason, config.path) from None


@lru_cache(maxsize=4)
def _parse(file: Path, changed: int) -> dict[str, int]:
    import json  # imported here, as below: most job files do not need it

    content = json.loads(read_regular(file))
    vocabulary: Any = content["model"]["vocab"]
    if isinstance(vocabulary, list):  # Unigram: [token, score] by id
        vocabulary = {token: index for index, (token, _) in enumerate(vocabulary)}
    tokens = {**vocabulary, **{token["content"]: token["id"] for token in content.get("added_tokens") or ()}}
    if not tokens:
        raise ValueError
    return {str(name): int(index) for name, index in tokens.items()}


def _named_beside(file: Path) -> str:
    """Return the end-of-sequence token that the `tokenizer_config.json` beside the file names; "" without one."""
    import json

    try:
        name = json.loads(read_regular(file.with_name("tokenizer_config.json"))).get("eos_token")
    except (OSError, ValueError, AttributeError):
        return ""
    return str(name.get("content", "") if isinstance(name, dict) else name or "")
