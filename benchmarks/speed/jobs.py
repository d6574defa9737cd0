"""What is trained: the same for every tool. Only the standard library, since all tools' scripts import it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Literal

Division = Literal["whole", "sharded", "replicated"]
"""What ranks do with parameters: `whole` is one process without FSDP2 or DDP."""


@dataclass(frozen=True)
class Job:
    """A small Llama, its batch, and how it is trained. The default is the launcher's flavor `debug`."""

    dim: int = 256
    n_layers: int = 6
    n_heads: int = 8
    n_kv_heads: int = 4
    hidden_dim: int = 768
    vocab_size: int = 320
    seq_len: int = 512
    sequences: int = 4
    """Of all ranks together, in a microbatch."""

    microbatches: int = 1
    precision: Literal["float32", "bfloat16"] = "bfloat16"
    """Of the computation. Parameters, gradients and the optimizer's state are fp32."""

    ranks: int = 1
    division: Division = "sharded"
    steps: int = 8
    lr: float = 1e-3
    max_norm: float = 1.0

    @property
    def local_sequences(self) -> int:
        """In a microbatch of one rank."""
        return self.sequences // self.ranks

    @property
    def tokens(self) -> int:
        """In a step, over all ranks."""
        return self.sequences * self.microbatches * self.seq_len

    @property
    def block_parameters(self) -> int:
        """Elements of the matrices of all blocks, which nearly all of a step's work is proportional to."""
        heads = 2 * self.dim * self.dim * (1 + self.n_kv_heads / self.n_heads)
        return int(self.n_layers * (heads + 3 * self.dim * self.hidden_dim))

    def dump(self) -> str:
        """As JSON."""
        return json.dumps(asdict(self))

    @staticmethod
    def load(text: str) -> Job:
        """What `dump` has written."""
        return Job(**json.loads(text))
