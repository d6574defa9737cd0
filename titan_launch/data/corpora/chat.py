"""Corpora of chats, of pairs of answers, and of answers with a label, in JSON lines.

A chat template turns each chat into text. By default, only turns of the assistant are targets (`train_on`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from titan_launch.config.sections.data import ChatData, PreferenceData, UnpairedPreferenceData
from titan_launch.core.errors import KeyPath, listed
from titan_launch.data.chat_rendering import Message, RecordError, Span
from titan_launch.data.corpora.chat_template import ChatTemplate, load_template
from titan_launch.data.corpora.interface import Document
from titan_launch.data.corpora.jsonl import TokenizedLinesCorpus, scored
from titan_launch.data.corpora.records import utf8
from titan_launch.data.token_files import Encoded, Tokens, token_dtype
from titan_launch.data.tokenizers import Offsets, Tokenizer

_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant", "bard": "assistant"}
"""Roles of ShareGPT's format that have another name in templates."""


class ChatCorpus(TokenizedLinesCorpus):
    """One chat per line. Each chat is one document."""

    config: ChatData
    remedy = "name files with one chat per line"

    def __init__(self, config: ChatData, tokenizer: Tokenizer, key: KeyPath, seq_len: int):
        """Load the template. Raises ConfigError on the key `template`."""
        super().__init__(config, tokenizer, key, seq_len)
        self.template: ChatTemplate = load_template(config, tokenizer, (*key, "template"))

    @property
    def identity(self) -> Sequence[object]:
        """The template's text and variables, and the length of a sample: further values that decide the tokens."""
        return [self.template.renderer.text, str(self.template.renderer.variables), self.seq_len]

    def document(self, record: dict[str, Any], file: tuple[str, int]) -> Document:
        messages = chat_messages(record)
        chat = self.tokenized(messages, record)
        longest, rule = self.seq_len + 1, self.config.truncation
        num_tokens = len(chat.tokens) - self.has_ratings
        if len(chat.tokens) > longest and rule in ("skip", "stop"):
            limit = f"training.seq_len = {longest - 1:,}" if self.has_ratings else f"training.seq_len + 1 = {longest:,}"
            reason = f"longer than {limit} tokens"
            raise RecordError(reason, f"it has {num_tokens:,}", "truncation", on_error=rule)
        return Document(json.dumps(messages, sort_keys=True).encode(), self.truncated(chat, longest), file)

    def tokenized(self, messages: Sequence[Message], record: Mapping[str, Any]) -> Encoded:
        """Return a chat before truncation. `record`: the line, which may have `tools`. Raises the errors of
        `rendered`."""
        return self.rendered(messages, record, self.config.train_on)

    def rendered(
        self, messages: Sequence[Message], record: Mapping[str, Any], train_on: Literal["assistant", "last", "all"]
    ) -> Encoded:
        """Return a chat before truncation, with the targets that `train_on` names. Raises RecordError for a chat that
        cannot be used, and the ConfigError of `ChatTemplate.render`."""
        tools = record.get("tools")
        if train_on != "all" and not any(message["role"] == "assistant" for message in messages):
            raise RecordError("without a message of the assistant")
        if not isinstance(tools, list | None):
            raise RecordError('a chat whose "tools" are not an array', f"they are {tools!r:.80}")
        text, spans = self.template.render(messages, tools, train_on)
        utf8(text)  # raises RecordError
        tokens, offsets = self.tokenizer.encode_chat(text)
        return Encoded(np.array(tokens, token_dtype(self.tokenizer.vocab_size)), _within(offsets, spans))

    def truncated(self, chat: Encoded, longest: int) -> Encoded:
        """Return at most `longest` tokens of a chat. Raises RecordError if no target is left."""
        kept = slice(-longest, None) if self.config.truncation == "left" else slice(longest)
        assert chat.targets is not None
        targets = chat.targets[kept]
        if not targets[1:].any():
            if len(targets) < len(chat.tokens):
                raise RecordError("without a target", "it was truncated", "truncation")
            detail = f'answers of train_on = "{self.config.train_on}" have "weight": 0 or "train": false'
            detail += ", or the chat template does not write them"
            raise RecordError("without a target", detail, "template")
        return Encoded(chat.tokens[kept], targets)


class PreferenceCorpus(ChatCorpus):
    """One pair of answers per line. Each pair is two documents: the chat with the chosen answer, and the chat with the
    rejected answer."""

    config: PreferenceData
    remedy = "name files with one pair of answers per line"
    has_pairs = True

    def tokenized(self, messages: Sequence[Message], record: Mapping[str, Any]) -> Encoded:
        """Return a chat before truncation. With `train_on = "end"`, the only target is a placeholder after the last
        token."""
        if self.config.train_on != "end":
            return super().tokenized(messages, record)
        tokens = self.rendered(messages, record, "all").tokens
        return scored(tokens, 0, len(tokens), "")

    def truncated(self, chat: Encoded, longest: int) -> Encoded:
        if self.config.train_on != "end":
            return super().truncated(chat, longest)
        return scored(chat.tokens[:-1], 0, longest - 1, self.config.truncation)

    def document(self, record: dict[str, Any], file: tuple[str, int]) -> Document:
        pair = preference_messages(record)
        chosen, rejected = (self.tokenized(messages, record) for messages in pair)
        rule, longest = self.config.truncation, self.seq_len + 1
        if len(chosen.tokens) + len(rejected.tokens) - 2 > self.seq_len:  # n tokens take n - 1 positions of a sample
            if rule in ("skip", "stop"):
                reason = f"longer than training.seq_len = {self.seq_len:,} tokens"
                detail = f"its two chats have {len(chosen.tokens):,} and {len(rejected.tokens):,} tokens"
                raise RecordError(reason, detail, "truncation", on_error=rule)
            longest = self.seq_len // 2 + 1
        chosen, rejected = self.truncated(chosen, longest), self.truncated(rejected, longest)
        assert chosen.targets is not None and rejected.targets is not None
        both = Encoded(
            np.concatenate([chosen.tokens, rejected.tokens]),
            np.concatenate([chosen.targets, rejected.targets]),
            len(chosen.tokens),
        )
        return Document(json.dumps(pair, sort_keys=True).encode(), both, file)


class UnpairedPreferenceCorpus(ChatCorpus):
    """One chat with a label per line. The label is the last token of the document, and never an input: 1 for a
    desirable answer, and 0 for an undesirable one."""

    config: UnpairedPreferenceData
    remedy = "name files with one chat and its label per line"
    has_ratings = True

    def tokenized(self, messages: Sequence[Message], record: Mapping[str, Any]) -> Encoded:
        """Return a chat before truncation, followed by its label. Raises RecordError for a chat without a label, and
        the errors of `rendered`."""
        label = record.get("label")
        if not isinstance(label, bool):
            detail = f"its value is {label!r:.80}" if "label" in record else "true means a desirable answer"
            raise RecordError('without true or false in "label"', detail)
        chat = self.rendered(messages, record, self.config.train_on)
        return _with_label(chat, np.array([label], chat.tokens.dtype))

    def truncated(self, chat: Encoded, longest: int) -> Encoded:
        """Return at most `longest` tokens of a chat, including the label. Raises RecordError if no token of the answer
        is left."""
        assert chat.targets is not None
        kept = super().truncated(Encoded(chat.tokens[:-1], chat.targets[:-1]), longest - 1)
        return _with_label(kept, chat.tokens[-1:])


def _with_label(chat: Encoded, label: Tokens) -> Encoded:
    assert chat.targets is not None
    return Encoded(np.append(chat.tokens, label), np.append(chat.targets, True))


ANSWERS = ("chosen", "rejected")
"""Keys that make a line a pair of answers."""


def preference_messages(record: Mapping[str, Any]) -> list[list[Message]]:
    """Return the messages of the chosen and of the rejected chat of a line. Raises RecordError for any other line.

    - `{"chosen": [messages], "rejected": [messages]}`: whole chats; a `prompt` beside them is ignored, because the
      chats contain the prompt
    - `{"prompt": ..., "chosen": ..., "rejected": ...}`: texts, or arrays of messages; the answers follow the prompt

    A string `system` becomes the first message.
    """
    if missing := [key for key in ANSWERS if key not in record]:
        known = '"chosen" and "rejected", and also "prompt" if these two are only answers'
        detail = f"its keys are {listed(list(record), most=8) or 'none'}; a line needs {known}"
        raise RecordError(f'without "{missing[0]}"', detail)
    answers = {key: _as_message(record[key], "assistant") for key in ANSWERS}
    chats = [_messages(answers, key) for key in ANSWERS]
    are_answers = [chat[0]["role"] == "assistant" for chat in chats]
    if any(are_answers):
        if not all(are_answers):
            raise RecordError("a pair of a whole chat and an answer", 'write "chosen" and "rejected" alike')
        if "prompt" not in record:
            detail = '"chosen" and "rejected" begin with an answer; add "prompt", or write whole chats'
            raise RecordError("without a prompt", detail)
        prompt = _messages({"prompt": _as_message(record["prompt"], "user")}, "prompt")
        chats = [[*prompt, *chat] for chat in chats]
    return [[*_system(record), *chat] for chat in chats]


def chat_messages(record: Mapping[str, Any]) -> list[Message]:
    """Return the messages of a line in one of four formats. Raises RecordError for any other line.

    - `{"messages": [{"role": ..., "content": ...}, ...]}` (OpenAI)
    - `{"conversations": [{"from": ..., "value": ...}, ...]}` (ShareGPT)
    - `{"prompt": ..., "response": ...}`: texts, or arrays of messages
    - `{"instruction": ..., "input": ..., "output": ...}` (Alpaca), of which `input` may be missing, or be named
      `context` (Dolly)

    In the last two formats, the answer is in `response`, `completion` or `output`. A string `system` becomes the first
    message.
    """
    keys = chat_keys(record)
    for group in _KEYS:
        if len(both := [key for key in group if record.get(key) is not None]) > 1 and both[0] in keys:
            raise RecordError(f'a chat with both "{both[0]}" and "{both[1]}"')
    if len(keys) == 1:
        messages = _messages(record, keys[0])
    elif keys:
        question, answer = keys
        if record.get("history"):
            raise RecordError('a chat with "history"', 'write a chat of several turns as "messages"')
        asked = record[question]
        for key in ("input", "context") if question == "instruction" else ("input",):
            if extra := _text(record, key):
                if not isinstance(asked, str):
                    raise RecordError(f'a chat with "{key}", but without a string in "{question}"')
                asked = f"{asked}\n\n{extra}"
        asked_and_answered = {question: _as_message(asked, "user"), answer: _as_message(record[answer], "assistant")}
        messages = [*_messages(asked_and_answered, question), *_messages(asked_and_answered, answer)]
    else:
        known = '"messages", "conversations", "prompt" with "response", or "instruction" with "output"'
        found = [key if record[key] is not None else f"{key}: null" for key in record]
        raise RecordError("not a chat", f"its keys are {listed(found, most=8) or 'none'}; a chat has {known}")
    return [*_system(record), *messages]


def _system(record: Mapping[str, Any]) -> list[Message]:
    """Return a list with the system message of a line; an empty list if the line has no text in `system`. Raises
    RecordError for another value of `system`."""
    text = _text(record, "system")
    return [{"role": "system", "content": text}] if text else []


def _text(record: Mapping[str, Any], key: str) -> str:
    """Return the string `record[key]`. Return "" if the key is missing or null. Raises RecordError for any other
    value."""
    text = record.get(key)
    if not isinstance(text, str | None):
        raise RecordError(f'a chat without a string in "{key}"', f"it is {text!r:.80}")
    return text or ""


_KEYS = (("messages", "conversations"), ("prompt", "instruction"), ("response", "completion", "output"))
"""Keys of whole chats, of questions, and of answers. A line may have only one key of a group."""


def chat_keys(record: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the keys that make a line a chat: the key of its messages, or the keys of a question and its answer.
    Return an empty tuple for any other line. A key with null counts as absent."""
    found = ((name for name in group if record.get(name) is not None) for group in _KEYS)
    whole, question, answer = (next(names, None) for names in found)
    if whole is not None:
        return (whole,)
    return () if question is None or answer is None else (question, answer)


def _as_message(text: object, role: str) -> object:
    return text if isinstance(text, list) else [{"role": role, "content": text}]


def _messages(record: Mapping[str, Any], key: str) -> list[Message]:
    """Return the messages in the array `record[key]`. Raises RecordError for any other value."""
    found = record[key]
    if not isinstance(found, list) or not found or not all(isinstance(item, dict) for item in found):
        raise RecordError(f'without messages in "{key}"', "it must be an array of one or more objects")
    messages = [_named(item) for item in found]
    for number, message in enumerate(messages, start=1):
        if not isinstance(message["role"], str):
            raise RecordError("without the role of a message", f'message {number} of "{key}"')
        if (calls := message.get("tool_calls")) and not isinstance(calls, list):
            raise RecordError('a chat whose "tool_calls" are not an array', f"message {number} has {calls!r:.80}")
        if not isinstance(message.get("content"), str) and not calls:
            raise RecordError("without the text of a message", f'message {number} of "{key}" needs a string')
    return messages


def _named(message: dict[str, Any]) -> Message:
    """Return a message with `role` and `content`, which ShareGPT calls `from` and `value`, and with its further
    keys."""
    if "role" in message:
        return message
    role, further = message.get("from"), {key: message[key] for key in message if key not in ("from", "value")}
    return {**further, "role": _ROLES.get(str(role), role), "content": message.get("value")}


def _within(offsets: Offsets, spans: Sequence[Span]) -> npt.NDArray[np.bool_]:
    """Return an array `[tokens]`: True for each token that has a character in one of the spans."""
    starts, stops = offsets.T
    within = np.zeros(len(starts), np.bool_)
    for span in spans:
        within |= (stops > span.start) & (starts < span.stop)
    return within
