"""A conversation with a chat model: messages of a user, and answers that the model generates."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from typing import NamedTuple

import torch

from titan_launch.core.errors import UserError
from titan_launch.data.chat_rendering import Message
from titan_launch.inference.generation import Sampling, TextStream, TokenSequence, generate_tokens
from titan_launch.inference.language_model import LanguageModel


class Answer(NamedTuple):
    """An answer to a message. Reading its pieces generates the answer."""

    pieces: Generator[str, None, None]
    """The pieces of the text. After the last piece, the answer is added to the conversation. If `close` or an error
    ends the answer early, the text so far is added, unless it is empty."""

    stream: TextStream
    num_tokens: int
    """Number of tokens of the conversation before the answer."""

    max_new_tokens: int
    """Largest number of tokens of the answer."""

    @property
    def is_cut(self) -> bool:
        """True if the answer was cut off after `max_new_tokens` tokens."""
        return self.stream.num_tokens == self.max_new_tokens and not self.stream.is_stopped


class Conversation:
    """A conversation that caches its keys and values from one answer to the next.

    For each answer, the template renders the whole conversation again. The new tokens may differ from those in the
    cache: a template may omit the reasoning of earlier answers, and the tokenizer may encode an answer differently. So
    the cache is shortened to the tokens before the first difference, or emptied if it cannot be shortened.
    """

    def __init__(self, model: LanguageModel, sequence: TokenSequence, system: str | None = None):
        """`model`: a model with a chat template. `sequence`: an empty `TokenSequence` of `model.module`. `system`: text
        of a system message, with which the conversation begins; None: no system message."""
        self.model = model
        self.sequence = sequence
        self._first: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        self.messages = self._first

    def reset(self) -> None:
        self.messages = self._first

    def answer(
        self,
        text: str,
        max_new_tokens: int,
        sampling: Sampling,
        generator: torch.Generator | None = None,
        stop: Sequence[str] = (),
    ) -> Answer:
        """Return the answer to a message of the user. The answer is generated while its pieces are read.
        `max_new_tokens`: largest number of tokens of the answer; the model's longest sequence may lower it. `stop`:
        texts that end the answer.

        Raises UserError if the template refuses the message, if the message contains the name of a special token, or if
        the model has no room for an answer.
        """
        model, messages = self.model, [*self.messages, {"role": "user", "content": text}]
        tokens = model.encode_chat(messages)
        room = model.max_tokens - len(tokens)
        if room < 1:
            longest = f"the model takes at most {model.max_tokens}, including the answer"
            reason = f"the conversation has {len(tokens)} tokens, but {longest}"
            raise UserError(f"error: {reason}; shorten the message, or type /reset to begin a new conversation")
        most = min(max_new_tokens, room)
        new = generate_tokens(model, tokens, most, sampling, generator, self.sequence)
        stream = TextStream(model.tokenizer.decode, (), (*stop, *model.end_texts))
        return Answer(self._pieces(messages, new, stream), stream, len(tokens), most)

    def _pieces(self, messages: list[Message], tokens: Iterator[int], stream: TextStream) -> Generator[str, None, None]:
        text, is_complete = "", False
        try:
            for piece in stream.pieces(tokens):
                text += piece
                yield piece
            is_complete = True
        finally:
            if text or is_complete:
                self.messages = [*messages, {"role": "assistant", "content": text}]
