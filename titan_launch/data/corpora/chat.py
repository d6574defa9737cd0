"""Chats in JSON lines, through the chat template of a tokenizer. Only the assistant's turns are targets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from titan_launch.config.sections.data import ChatData
from titan_launch.core.errors import KeyPath, listed
from titan_launch.data.chat_template import ChatTemplate, Span, TemplateProblem, load_template
from titan_launch.data.corpora.base import Document, Skipped
from titan_launch.data.corpora.jsonl import LinesCorpus
from titan_launch.data.corpora.records import RecordError
from titan_launch.data.token_files import Encoded, token_dtype
from titan_launch.data.tokenizers import Tokenizer

Message = dict[str, Any]
"""A message of a chat, as templates expect it: `{"role": "user", "content": "..."}`, perhaps with more keys."""

_ROLES = {"human": "user", "gpt": "assistant", "bing": "assistant", "chatgpt": "assistant", "bard": "assistant"}
"""Roles of ShareGPT's format that have another name in templates."""


class ChatCorpus(LinesCorpus):
    """One chat per line. Each chat is one document."""

    config: ChatData
    remedy = "name files with one chat per line"
    has_targets = True

    def __init__(self, config: ChatData, tokenizer: Tokenizer, key: KeyPath, seq_len: int):
        """Load the template. Raises ConfigError on the key `template`."""
        super().__init__(config, tokenizer, key, seq_len)
        self.template: ChatTemplate = load_template(config.template, tokenizer, (*key, "template"))

    @property
    def identity(self) -> Sequence[object]:
        """The template and the longest chat also decide the tokens."""
        return [self.template.text, self.seq_len]

    def document(self, record: dict[str, Any], file: tuple[str, int]) -> Document | Skipped:
        """Return the tokens of a chat. Raises RecordError."""
        messages = chat_messages(record)
        is_answered = any(message["role"] == "assistant" for message in messages)
        if not is_answered and self.config.train_on != "all":
            raise RecordError("without a message of the assistant")
        try:
            text, spans = self.template.render(messages, record.get("tools"))
        except TemplateProblem as problem:
            raise RecordError(problem.reason, problem.detail, "template") from None
        if self.config.train_on == "last":
            spans = spans[-1:]
        elif self.config.train_on == "all":
            spans = [Span(0, len(text))]
        tokens, starts = self.tokenizer.encode_template(text)
        encoded = Encoded(np.array(tokens, token_dtype(self.tokenizer.vocab_size)), _within(starts, spans))
        name = text.encode(errors="replace")
        return self._shortened(encoded, name, file)

    def encode(self, contents: Sequence[Encoded]) -> list[Encoded]:
        """Return the documents, which are tokens already."""
        return list(contents)

    def _shortened(self, chat: Encoded, name: bytes, file: tuple[str, int]) -> Document | Skipped:
        """Return a chat that fits into a sequence."""
        longest, rule = self.seq_len + 1, self.config.truncation
        assert chat.targets is not None
        if len(chat.tokens) > longest:
            reason = f"longer than {longest} tokens"
            if rule == "stop":
                raise RecordError(reason, f"it has {len(chat.tokens):,}", "truncation")
            if rule == "skip":
                return Skipped(reason, "")
            part = slice(0, longest) if rule == "right" else slice(-longest, None)
            chat = Encoded(chat.tokens[part], chat.targets[part])
        assert chat.targets is not None
        if not chat.targets[1:].any():
            raise RecordError("without a token of the assistant in its first or last tokens", key="truncation")
        return Document(name, chat, file)


def chat_messages(record: Mapping[str, Any]) -> list[Message]:
    """Return the messages of a line in one of four formats. Raises RecordError for any other line.

    - `{"messages": [{"role": ..., "content": ...}, ...]}`
    - `{"conversations": [{"from": ..., "value": ...}, ...]}` (ShareGPT)
    - `{"prompt": ..., "response": ...}` or `completion`: texts, or lists of messages
    - `{"instruction": ..., "input": ..., "output": ...}` (Alpaca), of which `input` may be missing
    """
    if "messages" in record:
        return _checked(record["messages"], "messages")
    if "conversations" in record:
        turns = _list_of_objects(record["conversations"], "conversations")
        named = [
            {"role": _ROLES.get(turn.get("from", ""), turn.get("from")), "content": turn.get("value")} for turn in turns
        ]
        return _checked(named, "conversations")
    answer = next((name for name in ("response", "completion", "output") if name in record), None)
    question = next((name for name in ("prompt", "instruction") if name in record), None)
    if answer is None or question is None:
        known = '"messages", "conversations", "prompt" with "response", or "instruction" with "output"'
        raise RecordError("not a chat", f"its keys are {listed(list(record), most=8)}; a chat has {known}")
    extra = record.get("input")
    asked = record[question] if not extra else f"{record[question]}\n\n{extra}"
    return [
        *_checked(_as_messages(asked, "user"), question),
        *_checked(_as_messages(record[answer], "assistant"), answer),
    ]


def _as_messages(text: object, role: str) -> object:
    return text if isinstance(text, list) else [{"role": role, "content": text}]


def _list_of_objects(value: object, key: str) -> list[Message]:
    if not isinstance(value, list) or not value or not all(isinstance(item, dict) for item in value):
        raise RecordError(f'without messages in "{key}"', "it must be an array of objects")
    return value


def _checked(value: object, key: str) -> list[Message]:
    messages = _list_of_objects(value, key)
    for number, message in enumerate(messages, start=1):
        if not isinstance(message.get("role"), str):
            raise RecordError("without the role of a message", f'message {number} of "{key}"')
        has_text = isinstance(message.get("content"), str)
        if not has_text and not message.get("tool_calls"):
            raise RecordError("without the text of a message", f'message {number} of "{key}" needs a string')
    return messages


def _within(starts: Sequence[int], spans: Sequence[Span]) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Return True for each token that begins in a span. `starts`: index of the first character of each token."""
    positions = np.array(starts, dtype=np.int64)
    within = np.zeros(len(positions), dtype=np.bool_)
    for span in spans:
        within |= (positions >= span.start) & (positions < span.stop)
    return within
