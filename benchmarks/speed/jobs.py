"""The training job, which is the same for every tool.

This module imports the standard library only, because the scripts of all tools import it.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Literal

Division = Literal["whole", "sharded", "replicated"]
"""Division of the parameters: `sharded` by FSDP2, `replicated`, or `whole`: one process without FSDP2 or DDP."""


@dataclass(frozen=True)
class Job:
    """A small Llama, its batch, and its training settings. The defaults are the launcher's flavor `debug`."""

    dim: int = 256
    n_layers: int = 6
    n_heads: int = 8
    n_kv_heads: int = 4
    hidden_dim: int = 768
    vocab_size: int = 320
    seq_len: int = 512
    sequences: int = 4
    """Number of sequences in a microbatch, over all ranks."""

    microbatches: int = 1
    precision: Literal["float32", "bfloat16"] = "bfloat16"
    """Compute dtype. Parameters, gradients and optimizer state are fp32."""

    ranks: int = 1
    division: Division = "sharded"
    steps: int = 8
    lr: float = 1e-3
    max_norm: float = 1.0

    @property
    def local_sequences(self) -> int:
        """Number of sequences in a microbatch of one rank."""
        return self.sequences // self.ranks

    @property
    def tokens(self) -> int:
        """Number of tokens in a step, over all ranks."""
        return self.sequences * self.microbatches * self.seq_len

    @property
    def block_parameters(self) -> int:
        """Number of elements in the matrices of all blocks. Nearly all work of a step is proportional to it."""
        heads = 2 * self.dim * self.dim * (1 + self.n_kv_heads / self.n_heads)
        return int(self.n_layers * (heads + 3 * self.dim * self.hidden_dim))

    def dump(self) -> str:
        """Return the job as JSON."""
        return json.dumps(asdict(self))

    @staticmethod
    def load(text: str) -> Job:
        """Return the job from the JSON that `dump` has written."""
        return Job(**json.loads(text))
