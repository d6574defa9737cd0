"""Generation of text: a cache of keys and values, sampling of the next token, and decoding of tokens."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, nn

from titan_launch.core.errors import UserError
from titan_launch.inference.language_model import LanguageModel
from titan_launch.loss.outputs import find_logits
from titan_launch.models.decoder.attention import KeyValueCache
from titan_launch.models.decoder.layers import Attention, LatentAttention, LearnedPositions, RotaryEmbedding
from titan_launch.models.decoder.module import Decoder


@dataclass(frozen=True)
class Sampling:
    """The settings for the choice of the next token."""

    temperature: float = 0.0
    """Divisor of the logits. 0 always chooses the token with the largest logit (greedy)."""

    top_k: int | None = None
    """Choose only among the `top_k` tokens with the largest logits. None: among all tokens."""

    top_p: float = 1.0
    """Choose only among the most probable tokens: as few as possible, but at least one, so that their probabilities add
    up to at least `top_p`."""


def probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """Return the probability with which each token is chosen, in fp32. `logits`: (vocabulary). `top_k` applies first.
    For `top_p`, the probabilities of the remaining tokens are scaled to a sum of 1."""
    logits = logits.float()
    if sampling.temperature == 0:
        return torch.zeros_like(logits).index_fill_(0, logits.argmax(), 1.0)
    scaled = (logits - logits.max()).double() / sampling.temperature  # at most 0: a small temperature gives no inf
    shares, order = scaled.softmax(-1).float().sort(descending=True, stable=True)
    if sampling.top_k is not None:
        shares[sampling.top_k :] = 0
        shares /= shares.sum()
    dropped = shares.cumsum(-1) - shares >= sampling.top_p
    dropped[0] = False  # also if `top_p` is 0
    shares[dropped] = 0
    return torch.zeros_like(shares).scatter_(0, order, shares / shares.sum())


def choose(logits: Tensor, sampling: Sampling, generator: torch.Generator | None = None) -> int:
    """Return the next token. `generator`: a generator on the CPU, because the token is drawn there."""
    if sampling.temperature == 0:
        return int(logits.argmax())
    return int(torch.multinomial(probabilities(logits.cpu(), sampling), 1, generator=generator))


class TokenSequence:
    """A sequence of tokens that a model has processed. `extend` adds tokens.

    This base class has no cache, so each call of `extend` computes the whole sequence. Subclasses have caches.
    """

    def __init__(self, module: nn.Module):
        """`module`: the model, whose parameters are on one device."""
        self.module = module
        self.device = next((tensor.device for tensor in module.parameters()), None)
        self.tokens: list[int] = []
        """The tokens that the model has processed."""

        self.num_kept = 0
        """Number of tokens that the last call of `continued_as` kept."""

    def continued_as(self, tokens: Sequence[int]) -> list[int]:
        """Shorten the sequence to the longest prefix that it shares with `tokens[:-1]`. If the cache cannot be
        shortened to this length, shorten the sequence further. Return the rest of `tokens`, at least one token, for
        `extend`."""
        shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(self.tokens, tokens, strict=False)))
        self.num_kept = self._shortened(min(shared, len(tokens) - 1))
        del self.tokens[self.num_kept :]
        return list(tokens[self.num_kept :])

    def extend(self, tokens: Sequence[int]) -> Tensor:
        """Run the model on `tokens`, and append them to the sequence. Return logits (vocabulary) of the last token."""
        logits = self._logits(tokens)
        self.tokens += tokens
        return logits

    def _shortened(self, num_tokens: int) -> int:
        """Shorten the cache to the first `num_tokens` tokens, or to fewer. Return the number of tokens that are still
        in the cache."""
        return num_tokens

    def _logits(self, tokens: Sequence[int]) -> Tensor:
        return logits_of(self.module, self._rows([*self.tokens, *tokens]))[0, -1]

    def _rows(self, tokens: Sequence[int]) -> Tensor:
        return torch.tensor([list(tokens)], device=self.device)


class _OwnCache(TokenSequence):
    """A sequence of a model that returns its own cache, such as a class of `transformers`. These caches have no common
    method to remove tokens. So if the end of a sequence changes, the whole sequence is computed again."""

    past: Any = None

    def _shortened(self, num_tokens: int) -> int:
        if num_tokens == len(self.tokens):
            return num_tokens
        self.past = None
        return 0

    def _logits(self, tokens: Sequence[int]) -> Tensor:
        outputs = self.module(self._rows(tokens), past_key_values=self.past, use_cache=True)
        self.past = outputs.past_key_values
        logits: Tensor = outputs.logits[0, -1]
        return logits


class _DecoderSequence(TokenSequence):
    """A sequence of a decoder of this package, with a cache for each attention layer."""

    def __init__(self, module: Decoder, max_tokens: int):
        super().__init__(module)
        self.output = module.output
        self.positions = [child for child in module.modules() if isinstance(child, (RotaryEmbedding, LearnedPositions))]
        self.attentions = [child for child in module.modules() if isinstance(child, (Attention, LatentAttention))]
        self.caches = [KeyValueCache(max_tokens) for _ in self.attentions]

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Until the `with` block ends, let the model's attention layers use the caches, and its output layer compute
        only the last token."""

        def last_token(output: nn.Module, args: tuple[Tensor]) -> Tensor:
            return args[0][:, -1:]

        hook = self.output.register_forward_pre_hook(last_token)
        try:
            for attention, cache in zip(self.attentions, self.caches, strict=True):
                attention.cache = cache
            yield
        finally:
            hook.remove()
            for attention in self.attentions:
                attention.cache = None
            for child in self.positions:
                child.position = 0

    def _shortened(self, num_tokens: int) -> int:
        for cache in self.caches:
            cache.shorten(num_tokens)
        return num_tokens

    def _logits(self, tokens: Sequence[int]) -> Tensor:
        for child in self.positions:
            child.position = len(self.tokens)
        logits: Tensor = self.module(self._rows(tokens))
        return logits[0, -1]


@contextmanager
def token_sequence(module: nn.Module, max_tokens: int = 0) -> Iterator[TokenSequence]:
    """Yield an empty sequence of `module`, which can be used until the `with` block ends.

    In a decoder of this package, each attention layer gets a cache with memory for `max_tokens` tokens. For more
    tokens, the cache grows. A model whose forward takes `past_key_values` and `use_cache`, like the classes of
    `transformers`, has its own cache. Any other model computes the whole sequence in each call of `extend`.
    """
    if isinstance(module, Decoder):
        sequence = _DecoderSequence(module, max_tokens)
        with sequence.attached():
            yield sequence
    else:
        yield _OwnCache(module) if has_cache(module) else TokenSequence(module)


def has_cache(module: nn.Module) -> bool:
    """Return True if the model can cache keys and values."""
    parameters = inspect.signature(module.forward).parameters
    return isinstance(module, Decoder) or parameters.keys() >= {"past_key_values", "use_cache"}


def logits_of(module: nn.Module, tokens: Tensor) -> Tensor:
    """Return the logits (batch, tokens, vocabulary) of whole sequences. Raises UserError if the model returns none."""
    logits = find_logits(module(tokens), tokens)
    if logits is None:
        reason = f"the forward of {type(module).__name__} returns no logits (batch, tokens, vocabulary)"
        raise UserError(f"error: {reason}; return logits, or an object with the field logits")
    return logits


@torch.inference_mode()
def generate_tokens(
    model: LanguageModel,
    prompt: Sequence[int],
    max_new_tokens: int,
    sampling: Sampling,
    generator: torch.Generator | None = None,
    sequence: TokenSequence | None = None,
) -> Iterator[int]:
    """Yield up to `max_new_tokens` tokens after a prompt, without the token that ends the text.

    `sequence`: an earlier sequence of this model, whose cache is used again (see `continued_as`). Raises UserError if
    the prompt is empty, if the prompt and `max_new_tokens` together exceed `model.max_tokens`, or if the model returns
    no logits.
    """
    if not prompt:
        raise UserError("error: the prompt is empty; give at least one character")
    longest = len(prompt) + max_new_tokens
    if longest > model.max_tokens:
        reason = f"the prompt has {len(prompt)} tokens, and --max-new-tokens is {max_new_tokens}"
        room = model.max_tokens - len(prompt)
        remedy = f"set --max-new-tokens to at most {room}" if room > 0 else "shorten the prompt"
        raise UserError(f"error: {reason}, but the model takes {model.max_tokens} tokens at most; {remedy}")
    model.make_room(longest)
    with token_sequence(model.module, longest) if sequence is None else nullcontext(sequence) as computed:
        new = computed.continued_as(prompt)
        for _ in range(max_new_tokens):
            token = choose(computed.extend(new), sampling, generator)
            if token in model.end_tokens:
                return
            yield token
            new = [token]


_REPLACEMENT, _MOST_HELD = "\N{REPLACEMENT CHARACTER}", 3


class TextStream:
    """A decoder of tokens that arrive one by one. It returns pieces of text. The joined pieces are the text of all
    tokens up to the first stop text.

    Text is held back while it may be the beginning of a character or of a stop text. New tokens are decoded together
    with some tokens before them, because some tokenizers drop the space before the first token.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], prompt: Sequence[int], stop: Sequence[str] = ()):
        """`prompt`: the tokens that the text continues; empty if the text stands alone, like an answer in a chat.
        `stop`: texts that end the stream. The stream does not contain the stop text."""
        self._decode = decode
        self._stop = stop
        self._tokens = list(prompt[-8:])
        self._start, self._end = 0, len(self._tokens)
        self._taken = len(decode(self._tokens))
        self._held = ""
        self.num_tokens = 0
        self.is_stopped = False

    def pieces(self, tokens: Iterable[int]) -> Iterator[str]:
        """Yield one piece of text for each token and, after the last token, the text that was held back. Some pieces
        are empty. A stop text ends the pieces."""
        for token in tokens:
            yield self.push(token)
            if self.is_stopped:
                return
        yield self.close()

    def push(self, token: int) -> str:
        """Add a token. Return the piece of text that the token completes, which is often empty."""
        self._tokens.append(token)
        self.num_tokens += 1
        text = self._decode(self._tokens[self._start :])
        # An incomplete character is decoded to up to three U+FFFD at the end: one for all of its bytes, or one for each
        # byte.
        complete = text.rstrip(_REPLACEMENT)
        complete += _REPLACEMENT * max(0, len(text) - len(complete) - _MOST_HELD)
        piece = complete[self._taken :]
        self._taken = max(self._taken, len(complete))
        if complete == text:
            self._start, self._end = self._end, len(self._tokens)
            self._taken = len(self._decode(self._tokens[self._start :]))
        return self._up_to_stop(piece)

    def close(self) -> str:
        """End the stream. Return the text that is still held back."""
        if self.is_stopped:
            return ""
        rest = self._up_to_stop(self._decode(self._tokens[self._start :])[self._taken :])
        return rest if self.is_stopped else rest + self._held

    def _up_to_stop(self, piece: str) -> str:
        text = self._held + piece
        found = [text.index(stop) for stop in self._stop if stop in text]
        if found:
            self.is_stopped, self._held = True, ""
            return text[: min(found)]
        lengths = (length for stop in self._stop for length in range(len(stop)) if text.endswith(stop[:length]))
        shown = len(text) - max(lengths, default=0)
        self._held = text[shown:]
        return text[:shown]
