"""`[tokenizer]`, and the parts of a `tokenizer.json` that a check of the job file needs."""

from __future__ import annotations

import os
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from titan_launch.config.sections.section import Section
from titan_launch.core.errors import ConfigError, KeyPath, config_error, did_you_mean
from titan_launch.core.files import MIB, file_state, read_regular
from titan_launch.core.terminal import one_line

TOKENIZER_FILE, SETTINGS_FILE, TEMPLATE_FILE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"

NAMES_FILE = "special_tokens_map.json"
"""Name of the file in which earlier releases of `transformers` wrote the named tokens, such as `eos_token`."""

ADDED_FILE = "added_tokens.json"
"""Name of the file in which earlier releases of `transformers` wrote the ids of added tokens."""

BYTES_VOCABULARY = 257
"""Vocabulary size of the tokenizer `bytes`."""


class TokenizerConfig(Section):
    """Conversion of text to tokens. Not used with images."""

    kind: Literal["bytes", "huggingface"] = "bytes"
    """The tokenizer. `bytes`: each byte of the UTF-8 text is a token (0 to 255), and token 256 ends a document; no
    download is needed. `huggingface`: the file `path`, which needs `pip install 'titan-launch[tokenizers]'`."""

    path: str | None = None
    """A `tokenizer.json`, or a folder that contains one, such as the folder of a Hugging Face model. `titan-launch
    prepare --train-tokenizer` writes such a file. Only with `kind = "huggingface"`."""

    end_of_document: str | None = None
    """Name of the special token that ends each document. Default: the `eos_token` of the `tokenizer_config.json` beside
    the file, or of the `special_tokens_map.json` that overrides it, or one of the usual names: `<|endoftext|>`, `</s>`,
    `<|end_of_text|>`, `<eos>`. Only with `kind = "huggingface"`."""

    begin_of_document: str | None = None
    """Name of the special token that begins each document. Default: no token. Only with `kind = "huggingface"`."""


_USUAL_ENDS = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>")


MOST_BYTES = 64 * MIB
"""Limit of the size of a `tokenizer.json`. The largest published files have 35 MB. A file with 900,000 tokens has 60
MB."""

_MOST_VALUES, _MOST_KEYS = 4_000_000, 1_500_000
"""Limits of the number of values, and of the number of keys, in a `tokenizer.json`. A file with 260,000 tokens and
580,000 merges has about 2,000,000 values. A file with 900,000 tokens and their scores has 2,700,000 values. In a
vocabulary without scores, each token is a key."""

_UNUSED_IDS = 100_000
"""Number of ids that may be unused, besides one unused id per token. The number is limited because the largest id
decides how many rows the embedding has."""


def tokenizer_file(config: TokenizerConfig) -> Path:
    """Return the path of the `tokenizer.json` that `path` names."""
    path = Path(config.path or "")
    return path / TOKENIZER_FILE if os.path.isdir(path) else path


def unusable(config: TokenizerConfig, reason: str) -> ConfigError:
    """Return the error for a `tokenizer.json` that cannot be used."""
    return config_error(("tokenizer", "path"), reason, config.path)


def read_tokenizer_json(config: TokenizerConfig) -> bytes:
    """Return the content of the `tokenizer.json`. Raises ConfigError for `tokenizer.path` if the file cannot be
    read."""
    try:
        return read_regular(tokenizer_file(config), MOST_BYTES)
    except (OSError, ValueError) as error:  # ValueError: NUL in the path
        reason = error.strerror if isinstance(error, OSError) else error
        reason = f"cannot be read: {reason}; name a {TOKENIZER_FILE}, or a folder that contains one"
        raise unusable(config, reason) from None


def vocabulary_size(config: TokenizerConfig) -> int:
    """Return the vocabulary size: the largest token id plus 1. Raises ConfigError if the tokenizer's file cannot be
    used."""
    return BYTES_VOCABULARY if config.kind == "bytes" else 1 + max(_tokens(config).values())


def special_token(config: TokenizerConfig) -> str:
    """Return the name of the token that ends a document. Raises ConfigError if the tokenizer's file cannot be used, or
    if the file lacks this token or the token that `begin_of_document` names."""
    tokens = _tokens(config)
    for key in ("begin_of_document", "end_of_document"):
        name = getattr(config, key)
        if name is not None and name not in tokens:
            special = (token for token in tokens if token[:1] in ("<", "["))
            similar = did_you_mean(name, islice(special, _MOST_COMPARED))
            reason = f"is not a token of {tokenizer_file(config)}{one_line(similar)}"
            raise config_error(("tokenizer", key), reason, name)
    if config.end_of_document is not None:
        return config.end_of_document
    if (named := _named_beside(config)) and named not in tokens:
        reason = f'has no token "{one_line(named)}", which is the "eos_token" of {_files_beside(config)}'
        raise unusable(config, f"{reason}; correct the eos_token, or set tokenizer.end_of_document")
    for name in (named, *_USUAL_ENDS):
        if name in tokens:
            return name
    reason = f"must name the token that ends a document: {tokenizer_file(config)} has none of {', '.join(_USUAL_ENDS)}"
    raise config_error(("tokenizer", "end_of_document"), reason)


def token_id(config: TokenizerConfig, name: str) -> int:
    """Return the id of a token that `special_token` has returned."""
    return _tokens(config)[name]


_MOST_COMPARED = 10_000
"""Largest number of names that are compared with a misspelt name. The comparison takes up to a second."""


def _tokens(config: TokenizerConfig) -> dict[str, int]:
    """Return the id of each token by its name. Raises ConfigError if the tokenizer's file cannot be used."""
    file = tokenizer_file(config)
    try:
        return _parse(file, tuple(file_state(file)))
    except OSError:
        read_tokenizer_json(config)  # raises ConfigError with the reason
        raise
    except ValueError as error:
        reason = f"is not a {TOKENIZER_FILE} of Hugging Face: {error}; name such a file, or a folder that contains one"
        raise unusable(config, reason) from None


@lru_cache(maxsize=4)
def _parse(file: Path, state: tuple[int, ...]) -> dict[str, int]:
    """Return the id of each token by its name, as the package `tokenizers` numbers them. Raises OSError, and ValueError
    if the file is not a valid `tokenizer.json`. `state`: state of the file, so that a changed file is parsed again
    despite the cache."""
    from titan_launch.core.json_files import parse_json  # imported here: most job files do not need it

    try:
        content = parse_json(read_regular(file, MOST_BYTES), _MOST_VALUES, _MOST_KEYS)
    except ValueError as error:
        raise ValueError(f"it is not valid JSON: {error}") from None
    model = content.get("model") if isinstance(content, dict) else None
    if not isinstance(model, dict):
        raise ValueError('it has no object "model"')
    tokens = _vocabulary(model.get("vocab"))
    added = content.get("added_tokens") or []
    if not isinstance(added, list):
        raise ValueError('"added_tokens" is not an array')
    size, last = len(tokens), -1
    for index, token in enumerate(added):
        name = token.get("content") if isinstance(token, dict) else None
        if not isinstance(name, str) or not _is_id(token.get("id")):
            raise ValueError(f'"added_tokens.{index}" is not an object with a string "content" and a whole number "id"')
        if name:
            last = max(last, tokens.setdefault(name, max(size, last + 1)))
            if tokens[name] != token["id"]:
                numbers = f"has the id {token['id']}, but the package tokenizers would give it the id {tokens[name]}"
                raise ValueError(f'"added_tokens.{index}" ("{one_line(name[:40])}") {numbers}')
    if not tokens:
        raise ValueError('"model.vocab" has no tokens')
    return tokens


def _vocabulary(found: Any) -> dict[str, int]:
    """Return the id of each token in "model.vocab". `found`: the value of this key. Raises ValueError if the value is
    neither an object with valid ids nor an array of pairs (token, score)."""
    if isinstance(found, list):  # Unigram: [token, score] by id
        for index, pair in enumerate(found):
            if not (isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], str)):
                raise ValueError(f'"model.vocab.{index}" is not a pair of a token and its score')
        return {token: index for index, (token, _) in enumerate(found)}
    if not isinstance(found, dict):
        raise ValueError('"model.vocab" is neither an object nor an array')
    largest = 2 * len(found) + _UNUSED_IDS
    for name, number in found.items():
        if not _is_id(number) or number > largest:
            limit = f"a whole number from 0 to {largest:,} (2 x the number of tokens + {_UNUSED_IDS:,})"
            place = f'the id of "{one_line(name[:40])}" in "model.vocab"'
            raise ValueError(f"{place} is {number!r:.40}, but an id must be {limit}")
    tokens: dict[str, int] = found
    return tokens


def _is_id(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 31


def _named_beside(config: TokenizerConfig) -> str:
    """Return the `eos_token` of the files beside the `tokenizer.json`; "" if there is none."""
    name = read_settings(tokenizer_file(config).parent, ("tokenizer", "path"), config.path).get("eos_token")
    name = name.get("content", "") if isinstance(name, dict) else name or ""
    if not isinstance(name, str):
        reason = f'"eos_token" of {_files_beside(config)} is neither a string nor an object with a string "content"'
        raise unusable(config, f"{reason}; correct or remove the eos_token")
    return name


def _files_beside(config: TokenizerConfig) -> str:
    return f"{tokenizer_file(config).with_name(SETTINGS_FILE)} or the {NAMES_FILE} beside it"


def read_settings(folder: Path, key: KeyPath, value: object) -> dict[str, Any]:
    """Return the settings of the tokenizer in a folder: the content of its `tokenizer_config.json`. As in
    `transformers`, if these settings have no `added_tokens_decoder`, a `special_tokens_map.json` overrides them and
    extends their lists, and an `added_tokens.json` has the added tokens. Raises ConfigError if a file cannot be read or
    is not a JSON object. `key` and `value`: key of the error, and its value in the job."""
    settings = _read_object(folder / SETTINGS_FILE, key, value)
    if "added_tokens_decoder" in settings:
        return settings
    named, added = (_read_object(folder / name, key, value) for name in (NAMES_FILE, ADDED_FILE))
    for name, tokens in named.items():
        both = isinstance(settings.get(name), list) and isinstance(tokens, list)
        settings[name] = [*settings[name], *tokens] if both else tokens
    return {**settings, "added_tokens_decoder": {str(number): token for token, number in added.items()}}


def _read_object(path: Path, key: KeyPath, value: object) -> dict[str, Any]:
    """Return the object in a JSON file; an empty dict if the file is missing. Raises ConfigError on `key`."""
    from titan_launch.core.json_files import read_json

    try:
        found = read_json(path)
        reason = "" if isinstance(found, dict) else "not an object"
    except FileNotFoundError:
        return {}
    except OSError as error:
        reason = str(error.strerror)
    except ValueError as error:
        reason = f"not valid JSON: {error}"
    if reason:
        raise config_error(key, f"cannot use {path}: {reason}; correct this file, or remove it", value)
    content: dict[str, Any] = found
    return content
