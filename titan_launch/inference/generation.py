"""Generation of text: a cache of keys and values, the choice of the next token, and the pieces of text as they come."""

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
    """The choice of the next token."""

    temperature: float = 0.0
    """Divisor of the logits. 0 chooses the token with the largest logit (greedy)."""

    top_k: int | None = None
    """Choose among this number of tokens: those with the largest logits. None: all tokens."""

    top_p: float = 1.0
    """Choose among the fewest tokens, the most probable ones, whose probabilities add up to at least this number."""


def probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """Return the probability with which each token is chosen, in fp32. `logits`: (vocabulary). `top_k` applies before
    `top_p`, whose sum is over the tokens that are left."""
    logits = logits.float()
    if sampling.temperature == 0:
        return torch.zeros_like(logits).index_fill_(0, logits.argmax(), 1.0)
    shares, order = (logits / sampling.temperature).softmax(-1).sort(descending=True, stable=True)
    if sampling.top_k is not None:
        shares[sampling.top_k :] = 0
        shares /= shares.sum()
    shares[shares.cumsum(-1) - shares >= sampling.top_p] = 0  # the first token stays: the sum before it is 0
    return torch.zeros_like(shares).scatter_(0, order, shares / shares.sum())


def choose(logits: Tensor, sampling: Sampling, generator: torch.Generator | None = None) -> int:
    """Return the next token. `generator`: on the host, where the token is drawn."""
    if sampling.temperature == 0:
        return int(logits.argmax())
    return int(torch.multinomial(probabilities(logits.cpu(), sampling), 1, generator=generator))


class TokenSequence:
    """A sequence of tokens that a model has computed, and that further tokens extend.

    Without a cache, as here, each call computes the whole sequence.
    """

    def __init__(self, module: nn.Module):
        """`module`: the model, whose parameters are on one device."""
        self.module = module
        self.device = next((tensor.device for tensor in module.parameters()), None)
        self.tokens: list[int] = []
        """The tokens that are computed."""

        self.num_kept = 0
        """Number of tokens that the last call of `continued_as` kept."""

    def continued_as(self, tokens: Sequence[int]) -> list[int]:
        """Keep what the sequence shares with the beginning of `tokens`, as far as the model can. Return the tokens that
        are left to compute, which are at least one."""
        shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(self.tokens, tokens, strict=False)))
        self.num_kept = self._shortened(min(shared, len(tokens) - 1))
        del self.tokens[self.num_kept :]
        return list(tokens[self.num_kept :])

    def extend(self, tokens: Sequence[int]) -> Tensor:
        """Return the logits (vocabulary) of the last of some new tokens."""
        logits = self._logits(tokens)
        self.tokens += tokens
        return logits

    def _shortened(self, num_tokens: int) -> int:
        """Keep the first `num_tokens` tokens, or fewer. Return their number."""
        return num_tokens

    def _logits(self, tokens: Sequence[int]) -> Tensor:
        return logits_of(self.module, self._rows([*self.tokens, *tokens]))[0, -1]

    def _rows(self, tokens: Sequence[int]) -> Tensor:
        return torch.tensor([list(tokens)], device=self.device)


class _OwnCache(TokenSequence):
    """A sequence of a model that keeps a cache itself. The caches of `transformers` have no common way to forget some
    tokens, so a sequence with another end is computed again."""

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
    """A sequence of a decoder of this package, whose layers of attention have caches."""

    def __init__(self, module: Decoder, max_tokens: int):
        super().__init__(module)
        self.output = module.output
        self.positions = [child for child in module.modules() if isinstance(child, (RotaryEmbedding, LearnedPositions))]
        self.attentions = [child for child in module.modules() if isinstance(child, (Attention, LatentAttention))]
        self.caches = [KeyValueCache(max_tokens) for _ in self.attentions]

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Give the caches to the model until the end of the block. Its output layer computes the last token only."""

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
    """Yield an empty sequence for the forwards of `module` until the end of the block.

    A decoder of this package gets a cache in each layer of attention, with memory for `max_tokens` tokens, which grows
    if more come. A model whose forward takes `past_key_values`, as the classes of `transformers` do, keeps a cache
    itself. Any other model computes the whole sequence in each call.
    """
    if isinstance(module, Decoder):
        sequence = _DecoderSequence(module, max_tokens)
        with sequence.attached():
            yield sequence
    else:
        yield _OwnCache(module) if has_cache(module) else TokenSequence(module)


def has_cache(module: nn.Module) -> bool:
    """Return True if the model can cache keys and values, so that a new token does not repeat earlier forwards."""
    return isinstance(module, Decoder) or {"past_key_values", "use_cache"} <= _parameters(module)


def _parameters(module: nn.Module) -> set[str]:
    return set(inspect.signature(module.forward).parameters)


def logits_of(module: nn.Module, tokens: Tensor) -> Tensor:
    """Return the logits (batch, tokens, vocabulary) of whole sequences. Raises UserError if the model returns none."""
    logits = find_logits(module(tokens), tokens)
    if logits is None:
        raise UserError(f"error: the forward of {type(module).__name__} returns no logits (batch, tokens, vocabulary)")
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

    `sequence`: one of the model with which the prompt may begin; its tokens are then not computed again. Raises
    UserError for an empty prompt, and if the sequence could become longer than those of the model.
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
    """The text of tokens that come one by one, as pieces. The pieces joined are the text of all tokens up to a stop.

    Text is held back while it may be a part of a character or of a stop text. Tokens are decoded together with those
    before them, since some tokenizers drop the space before the first token.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], prompt: Sequence[int], stop: Sequence[str] = ()):
        """`prompt`: the tokens before those of the stream; none for a text of its own, such as an answer. `stop`: texts
        that end the stream. They are not part of it."""
        self._decode = decode
        self._stop = stop
        self._tokens = list(prompt[-8:])
        self._start, self._end = 0, len(self._tokens)
        self._taken = len(decode(self._tokens))
        self._held = ""
        self.num_tokens = 0
        self.is_stopped = False

    def pieces(self, tokens: Iterable[int]) -> Iterator[str]:
        """Yield the pieces of text of some tokens: one for each token, and what is held back at their end."""
        for token in tokens:
            yield self.push(token)
            if self.is_stopped:
                return
        yield self.close()

    def push(self, token: int) -> str:
        """Return the piece of text that a token completes; often empty."""
        self._tokens.append(token)
        self.num_tokens += 1
        text = self._decode(self._tokens[self._start :])
        # A part of a character is up to three U+FFFD at the end: one for all of its bytes, or one for each.
        complete = text.rstrip(_REPLACEMENT)
        complete += _REPLACEMENT * max(0, len(text) - len(complete) - _MOST_HELD)
        piece = complete[self._taken :]
        self._taken = max(self._taken, len(complete))
        if complete == text:
            self._start, self._end = self._end, len(self._tokens)
            self._taken = len(self._decode(self._tokens[self._start :]))
        return self._up_to_stop(piece)

    def close(self) -> str:
        """Return the text that is still held back."""
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
