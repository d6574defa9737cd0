"""Random token sequences that a model can learn."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from titan_launch.config.sections.data import SyntheticData
from titan_launch.core.errors import config_error
from titan_launch.data.sources.base import SourceContext

_UINT64 = 2**64


class SyntheticSource:
    """Sequences in which the next token follows from the one before, save for a share of noise.

    The vocabulary stands in a ring, in an order that depends on its size alone: whatever the seed, the same rule is to
    be learned, so a source with another seed can validate. A token is the next one on the ring, or, with probability
    `noise`, any token.
    """

    def __init__(self, config: SyntheticData, seq_len: int):
        self._config = config
        self._seq_len = seq_len
        self._ring = np.argsort(_random_bits(config.vocab_size, 0, config.vocab_size), kind="stable")

    def __len__(self) -> int:
        return self._config.num_samples

    @property
    def num_classes(self) -> int:
        """Size of the vocabulary."""
        return self._config.vocab_size

    def describe(self) -> str:
        """Return how much data there is, as a part of a log line."""
        return f"{len(self):,} random sequences of {self._seq_len} tokens, with a vocabulary of {self.num_classes:,}"

    def fingerprint(self, seed: int) -> None:
        """Return None: the sequences follow from the keys of the job alone."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets, both int64 `[seq_len]`; a pure function of the source's seed and `index`."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        length = self._seq_len + 1
        bits = _random_bits(self._config.seed, index, 2 * length)
        is_noise = (bits[:length] >> np.uint64(11)) * 2.0**-53 < self._config.noise
        is_noise[0] = True
        places = (bits[length:] % np.uint64(self._config.vocab_size)).astype(np.int64)  # on the ring
        steps = np.arange(length)
        last_noise = np.maximum.accumulate(np.where(is_noise, steps, 0))
        tokens = self._ring[(places[last_noise] + steps - last_noise) % self._config.vocab_size]
        sequence = torch.from_numpy(tokens.astype(np.int64))
        return sequence[:-1], sequence[1:]


def build_synthetic(config: SyntheticData, context: SourceContext) -> SyntheticSource:
    """Build the source of `config`. Raises ConfigError when it needs more tokens than the tokenizer has."""
    if config.vocab_size > context.tokenizer.vocab_size:
        reason = f"exceeds the tokenizer's {context.tokenizer.vocab_size} tokens"
        raise config_error((*context.key, "vocab_size"), reason, config.vocab_size)
    return SyntheticSource(config, context.seq_len)


def _random_bits(seed: int, index: int, count: int) -> npt.NDArray[np.uint64]:
    """`count` random words that depend on `seed` and `index` alone.

    Philox is a counter-based generator, made to be keyed, and numpy promises that the raw words of its bit generators
    never change (NEP 19), which it does not promise for what `Generator` makes of them.
    """
    return np.random.Philox(key=np.array([seed % _UINT64, index], dtype=np.uint64)).random_raw(count)
