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
    """An answer that is generated while its pieces are read."""

    pieces: Generator[str, None, None]
    """The text. Its end, or `close` after the first text, adds the answer to the conversation."""

    stream: TextStream
    num_tokens: int
    """Tokens of the conversation before the answer."""

    max_new_tokens: int
    """Most tokens of the answer."""

    @property
    def is_cut(self) -> bool:
        """True if the answer has the most tokens that it may have, and not yet an end."""
        return self.stream.num_tokens == self.max_new_tokens and not self.stream.is_stopped


class Conversation:
    """A conversation whose keys and values are kept from answer to answer.

    Each answer renders the whole conversation. A template may write an earlier message differently once a later one
    follows, for example without its thoughts. The tokens of this text may also differ from the generated tokens. So the
    keys and values of the tokens before the first difference are kept, and the others are computed again.
    """

    def __init__(self, model: LanguageModel, sequence: TokenSequence, system: str | None = None):
        """`model`: a model with a chat template. `sequence`: an empty sequence of its module. `system`: text of the
        first message."""
        self.model = model
        self.sequence = sequence
        self._first: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        self.messages = self._first
        """The messages so far."""

    def reset(self) -> None:
        """Begin a new conversation."""
        self.messages = self._first

    def answer(
        self,
        text: str,
        max_new_tokens: int,
        sampling: Sampling,
        generator: torch.Generator | None = None,
        stop: Sequence[str] = (),
    ) -> Answer:
        """Return the answer to a message of the user. `max_new_tokens`: most tokens of the answer, unless the model has
        room for fewer. `stop`: texts that end the answer.

        Raises UserError if the template refuses the message, or if the model has no room for an answer.
        """
        model, messages = self.model, [*self.messages, {"role": "user", "content": text}]
        tokens = model.encode_chat(messages)
        room = model.max_tokens - len(tokens)
        if room < 1:
            reason = f"the conversation has {len(tokens)} tokens, but the model takes {model.max_tokens} at most"
            raise UserError(f"error: {reason}, with its answer; shorten the message, or begin anew with /reset")
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
