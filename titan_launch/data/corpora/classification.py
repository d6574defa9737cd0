"""A corpus of texts with labels, in JSON lines. The only target of a document is its label, after its last token."""

from __future__ import annotations

from typing import Any

import numpy as np

from titan_launch.config.sections.data import ClassificationData
from titan_launch.core.errors import did_you_mean, listed
from titan_launch.data.chat_rendering import RecordError
from titan_launch.data.corpora.interface import Document
from titan_launch.data.corpora.jsonl import TokenizedLinesCorpus, value_of
from titan_launch.data.token_files import Encoded, Tokens


class ClassificationCorpus(TokenizedLinesCorpus):
    """One text with its label per line."""

    config: ClassificationData
    remedy = "name files with one text and its label per line"

    @property
    def identity(self) -> list[object]:
        """The length of a sample, which also decides the tokens."""
        return [self.seq_len]

    def document(self, record: dict[str, Any], file: tuple[str, int]) -> Document:
        label = self._label(value_of(record, self.config.label, "label"))
        content = self.text_document(value_of(record, self.config.text, "text"), file, "text").content
        (tokens,) = self.tokenizer.encode_documents([content])
        tokens, rule = tokens[:-1], self.config.truncation  # without the token that ends a document
        if len(tokens) > self.seq_len and rule in ("skip", "stop"):
            reason = f"longer than training.seq_len = {self.seq_len:,} tokens"
            raise RecordError(reason, f"it has {len(tokens):,}", "truncation", on_error=rule)
        if not len(tokens):
            raise RecordError("without a text", key="text")
        return Document(content, scored(tokens, label, self.seq_len, rule), file)

    def _label(self, value: object) -> int:
        """Return the number of a label. Raises RecordError."""
        labels = self.config.labels
        if isinstance(value, str) and value in labels:
            return labels.index(value)
        if type(value) is int and 0 <= value < len(labels):
            return value
        hint = did_you_mean(value, labels) if isinstance(value, str) else ""
        detail = f"it is {value!r:.80}{hint}; the labels are {listed(labels, most=8)}, or their numbers from 0"
        raise RecordError("without a known label", detail, "label")


def scored(tokens: Tokens, label: int, longest: int, truncation: str) -> Encoded:
    """Return a document whose only target is `label`, after its last token. `longest`: limit of its number of tokens,
    without the label. `truncation`: "left" keeps the last tokens of a longer document, any other value the first
    ones."""
    kept = tokens[-longest:] if truncation == "left" else tokens[:longest]
    targets = np.zeros(len(kept) + 1, np.bool_)
    targets[-1] = True
    return Encoded(np.append(kept, np.array([label], kept.dtype)), targets)
