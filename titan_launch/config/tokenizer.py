"""`[tokenizer]`: how text becomes tokens."""

from __future__ import annotations

from typing import Literal

from titan_launch.config.base import Section

VOCABULARY_SIZES = {"bytes": 257}
"""Tokens of the tokenizers whose vocabulary is fixed."""


class TokenizerConfig(Section):
    """How text becomes tokens. Not used with images."""

    kind: Literal["bytes"] = "bytes"
    """`bytes`: every byte of the UTF-8 text is a token (0 to 255), and 256 ends a document. Nothing to download."""
