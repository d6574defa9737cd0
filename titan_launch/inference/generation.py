"""Generation of text: a cache of keys and values, the choice of the next token, and the pieces of text as they come."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from titan_launch.core.errors import UserError
from titan_launch.inference.language_model import LanguageModel
from titan_launch.models.attention import KeyValueCache
from titan_launch.models.decoder import Decoder
from titan_launch.models.layers import Attention, LatentAttention, LearnedPositions, RotaryEmbedding
from titan_launch.models.loss import Loss
from titan_launch.train.forward import find_logits


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


Forward = Callable[[Tensor], Tensor]
"""A function of the tokens (1, n) that follow those of earlier calls. It returns the logits of the last token."""


@contextmanager
def cached_forward(module: nn.Module, max_tokens: int) -> Iterator[Forward]:
    """Yield a function that extends a sequence of up to `max_tokens` tokens.

    A decoder of this package gets a cache in each layer of attention until the end of the block. A model whose forward
    takes `past_key_values`, as the classes of `transformers` do, keeps a cache itself. Any other model computes the
    whole sequence in each call.
    """
    if isinstance(module, Decoder):
        with _attached_caches(module, max_tokens) as forward:
            yield forward
    else:
        yield _own_cache(module) if has_cache(module) else _whole_sequence(module)


def has_cache(module: nn.Module) -> bool:
    """Return True if a new token does not compute the earlier tokens again."""
    return isinstance(module, Decoder) or {"past_key_values", "use_cache"} <= _parameters(module)


def _parameters(module: nn.Module) -> set[str]:
    return set(inspect.signature(module.forward).parameters)


@contextmanager
def _attached_caches(module: Decoder, max_tokens: int) -> Iterator[Forward]:
    positions = [child for child in module.modules() if isinstance(child, (RotaryEmbedding, LearnedPositions))]
    attentions = [child for child in module.modules() if isinstance(child, (Attention, LatentAttention))]
    num_tokens = 0

    def forward(tokens: Tensor) -> Tensor:
        nonlocal num_tokens
        for child in positions:
            child.position = num_tokens
        num_tokens += tokens.shape[1]
        logits: Tensor = module(tokens)
        return logits[0, -1]

    def last_token(output: nn.Module, args: tuple[Tensor]) -> Tensor:
        return args[0][:, -1:]

    hook = module.output.register_forward_pre_hook(last_token)
    try:
        for attention in attentions:
            attention.cache = KeyValueCache(max_tokens)
        yield forward
    finally:
        hook.remove()
        for attention in attentions:
            attention.cache = None
        for child in positions:
            child.position = 0


def _own_cache(module: nn.Module) -> Forward:
    past: Any = None

    def forward(tokens: Tensor) -> Tensor:
        nonlocal past
        outputs = module(tokens, past_key_values=past, use_cache=True)
        past = outputs.past_key_values
        logits: Tensor = outputs.logits[0, -1]
        return logits

    return forward


def _whole_sequence(module: nn.Module) -> Forward:
    earlier: list[Tensor] = []

    def forward(tokens: Tensor) -> Tensor:
        earlier[:] = [torch.cat([*earlier, tokens], dim=1)]
        return logits_of(module, earlier[0])[0, -1]

    return forward


def logits_of(module: nn.Module, tokens: Tensor) -> Tensor:
    """Return the logits (batch, tokens, vocabulary) of whole sequences. Raises UserError if the model returns none."""
    logits = find_logits(module(tokens), tokens, Loss())
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
) -> Iterator[int]:
    """Yield up to `max_new_tokens` tokens after a prompt, without the token that ends the text.

    Raises UserError for an empty prompt, and if the sequence could become longer than those of the model.
    """
    if not prompt:
        raise UserError("error: the prompt is empty; give at least one character")
    if len(prompt) + max_new_tokens > model.max_tokens:
        reason = f"the prompt has {len(prompt)} tokens, and --max-new-tokens is {max_new_tokens}"
        room = model.max_tokens - len(prompt)
        remedy = f"set --max-new-tokens to at most {room}" if room > 0 else "shorten the prompt"
        raise UserError(f"error: {reason}, but the model takes {model.max_tokens} tokens at most; {remedy}")
    model.make_room(len(prompt) + max_new_tokens)
    with cached_forward(model.module, len(prompt) + max_new_tokens) as forward:
        new = list(prompt)
        for _ in range(max_new_tokens):
            token = choose(forward(torch.tensor([new], device=model.device)), sampling, generator)
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
        """`stop`: texts that end the stream. They are not part of it."""
        self._decode = decode
        self._stop = stop
        self._tokens = list(prompt[-8:])
        self._start, self._end = 0, len(self._tokens)
        self._taken = len(decode(self._tokens))
        self._held = ""
        self.is_stopped = False

    def push(self, token: int) -> str:
        """Return the piece of text that a token completes; often empty."""
        self._tokens.append(token)
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


def generate_text(
    model: LanguageModel,
    prompt: Sequence[int],
    max_new_tokens: int,
    sampling: Sampling,
    generator: torch.Generator | None = None,
    stop: Sequence[str] = (),
    on_token: Callable[[], object] = lambda: None,
) -> Iterator[str]:
    """Yield the text after a prompt, in pieces. The arguments and errors are those of `generate_tokens`; `on_token` is
    called for each token."""
    stream = TextStream(model.tokenizer.decode, prompt, stop)
    for token in generate_tokens(model, prompt, max_new_tokens, sampling, generator):
        on_token()
        yield stream.push(token)
        if stream.is_stopped:
            return
    yield stream.close()
