"""Random token sequences with a pattern that a model can learn."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from titan_launch.config.sections.data import SyntheticData
from titan_launch.core.errors import config_error
from titan_launch.data.order import random_words
from titan_launch.data.sources.interface import SourceContext


class SyntheticSource:
    """Sequences in which each token determines the next one, except for random noise.

    The vocabulary is arranged in a ring, in an order that depends only on its size. With probability `noise` a token is
    random, otherwise it is the next token on the ring. All seeds share this rule, so a source with another seed can
    serve as validation data.
    """

    def __init__(self, config: SyntheticData, seq_len: int):
        self._config = config
        self._seq_len = seq_len
        self.num_classes = config.vocab_size
        self._ring = np.argsort(random_words(config.vocab_size, 0, config.vocab_size), kind="stable")

    def __len__(self) -> int:
        return self._config.num_samples

    def describe(self) -> str:
        return f"{len(self):,} random sequences of {self._seq_len} tokens, with a vocabulary of {self.num_classes:,}"

    def fingerprint(self, seed: int) -> None:
        """Return None: the job keys alone determine the sequences."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Return inputs and targets, both int64 `[seq_len]`. They depend only on `index`, `seq_len`, and the keys of
        the section."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        length = self._seq_len + 1
        bits = random_words(self._config.seed, index, 2 * length)
        is_noise = (bits[:length] >> np.uint64(11)) * 2.0**-53 < self._config.noise
        is_noise[0] = True
        places = (bits[length:] % np.uint64(self._config.vocab_size)).astype(np.int64)  # positions on the ring
        steps = np.arange(length)
        last_noise = np.maximum.accumulate(np.where(is_noise, steps, 0))
        tokens = self._ring[(places[last_noise] + steps - last_noise) % self._config.vocab_size]
        sequence = torch.from_numpy(tokens.astype(np.int64))
        return sequence[:-1], sequence[1:]


def build_synthetic(config: SyntheticData, context: SourceContext) -> SyntheticSource:
    """Build the source of `config`. Raises ConfigError if `vocab_size` exceeds the vocabulary size of the tokenizer."""
    if config.vocab_size > context.tokenizer.vocab_size:
        reason = f"exceeds the tokenizer's vocabulary size; set at most {context.tokenizer.vocab_size}"
        raise config_error((*context.key, "vocab_size"), reason, config.vocab_size)
    return SyntheticSource(config, context.seq_len)
