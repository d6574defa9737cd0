"""Chats in JSON lines, through the chat template of a tokenizer. Only the assistant's turns are targets."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from titan_launch.config.sections.data import ChatData
from titan_launch.core.errors import KeyPath, listed
from titan_launch.data.corpora.base import Document
from titan_launch.data.corpora.chat_template import ChatTemplate, Message, Span, load_template
from titan_launch.data.corpora.jsonl import LinesCorpus
from titan_launch.data.corpora.records import RecordError, utf8
from titan_launch.data.token_files import Encoded, token_dtype
from titan_launch.data.tokenizers import Tokenizer

_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant", "bard": "assistant"}
"""Roles of ShareGPT's format that have another name in templates."""


class ChatCorpus(LinesCorpus):
    """One chat per line. Each chat is one document."""

    config: ChatData
    remedy = "name files with one chat per line"
    has_targets = True

    def __init__(self, config: ChatData, tokenizer: Tokenizer, key: KeyPath, seq_len: int):
        """Load the template. Raises ConfigError on the key `template`."""
        super().__init__(config, tokenizer, key, seq_len)
        self.template: ChatTemplate = load_template(
            config.template, config.template_args, tokenizer, (*key, "template")
        )

    @property
    def identity(self) -> Sequence[object]:
        """The template and the longest chat also decide the tokens."""
        return [self.template.text, str(self.template.variables), self.seq_len]

    def document(self, record: dict[str, Any], file: tuple[str, int]) -> Document:
        """Return the tokens of a chat. Raises RecordError."""
        messages, train_on = chat_messages(record), self.config.train_on
        if train_on != "all" and not any(message["role"] == "assistant" for message in messages):
            raise RecordError("without a message of the assistant")
        tools = record.get("tools")
        if not isinstance(tools, list | None):
            raise RecordError('without an array in "tools"')
        text, spans = self.template.render(messages, tools, train_on)
        utf8(text)  # raises
        tokens, offsets = self.tokenizer.encode_chat(text)
        kept = self._kept(len(tokens))
        targets = _within(offsets, spans)[kept]
        if not targets[1:].any():
            if len(targets) < len(tokens):
                raise RecordError("without a target", "it was truncated", "truncation")
            raise RecordError("without a target", "the chat template writes no text of the assistant", "template")
        chat = Encoded(np.array(tokens[kept], token_dtype(self.tokenizer.vocab_size)), targets)
        return Document(json.dumps(messages, sort_keys=True).encode(), chat, file)

    def encode(self, contents: Sequence[Encoded]) -> list[Encoded]:
        """Return the documents, which are tokens already."""
        return list(contents)

    def _kept(self, num_tokens: int) -> slice:
        """Return the part of a chat that fits into a sequence. Raises RecordError if a longer chat is not used."""
        longest, rule = self.seq_len + 1, self.config.truncation
        if num_tokens > longest and rule in ("skip", "stop"):
            reason = f"longer than training.seq_len + 1 = {longest:,} tokens"
            raise RecordError(reason, f"it has {num_tokens:,}", "truncation", on_error=rule)
        return slice(-longest, None) if rule == "left" else slice(longest)


def chat_messages(record: Mapping[str, Any]) -> list[Message]:
    """Return the messages of a line in one of four formats. Raises RecordError for any other line.

    - `{"messages": [{"role": ..., "content": ...}, ...]}` (OpenAI)
    - `{"conversations": [{"from": ..., "value": ...}, ...]}` (ShareGPT)
    - `{"prompt": ..., "response": ...}` or `completion`: texts, or arrays of messages
    - `{"instruction": ..., "input": ..., "output": ...}` (Alpaca), of which `input` may be missing

    A string `system` becomes the first message.
    """
    answer = next((name for name in ("response", "completion", "output") if name in record), None)
    question = next((name for name in ("prompt", "instruction") if name in record), None)
    if "messages" in record:
        messages = _messages(record, "messages")
    elif "conversations" in record:
        messages = _messages(record, "conversations")
    elif answer is not None and question is not None:
        asked = record[question]
        if isinstance(asked, str) and isinstance(extra := record.get("input"), str) and extra:
            asked = f"{asked}\n\n{extra}"
        asked_and_answered = {question: _as_message(asked, "user"), answer: _as_message(record[answer], "assistant")}
        messages = [*_messages(asked_and_answered, question), *_messages(asked_and_answered, answer)]
    else:
        known = '"messages", "conversations", "prompt" with "response", or "instruction" with "output"'
        raise RecordError("not a chat", f"its keys are {listed(list(record), most=8)}; a chat has {known}")
    system = record.get("system")
    return [{"role": "system", "content": system}, *messages] if isinstance(system, str) and system else messages


def _as_message(text: object, role: str) -> object:
    return text if isinstance(text, list) else [{"role": role, "content": text}]


def _messages(record: Mapping[str, Any], key: str) -> list[Message]:
    """Return the messages in an array. Raises RecordError for any other value."""
    found = record[key]
    if not isinstance(found, list) or not found or not all(isinstance(item, dict) for item in found):
        raise RecordError(f'without messages in "{key}"', "it must be an array of objects")
    messages = [_named(item) for item in found]
    for number, message in enumerate(messages, start=1):
        if not isinstance(message["role"], str):
            raise RecordError("without the role of a message", f'message {number} of "{key}"')
        if not isinstance(message.get("content"), str) and not message.get("tool_calls"):
            raise RecordError("without the text of a message", f'message {number} of "{key}" needs a string')
    return messages


def _named(message: dict[str, Any]) -> Message:
    """Return a message with `role` and `content`, which ShareGPT calls `from` and `value`."""
    if "role" in message:
        return message
    role = message.get("from")
    return {"role": _ROLES.get(str(role), role), "content": message.get("value")}


def _within(offsets: Sequence[tuple[int, int]], spans: Sequence[Span]) -> npt.NDArray[np.bool_]:
    """Return True for each token with a character in a span. `offsets`: first character of each token, and its end."""
    starts, stops = np.array(offsets, np.int64).reshape(-1, 2).T
    within = np.zeros(len(starts), np.bool_)
    for span in spans:
        within |= (stops > span.start) & (starts < span.stop)
    return within
