"""Floating-point operations of a step, recomputation included. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from titan_launch.config.activation_checkpoint import ActivationCheckpointConfig
from titan_launch.config.architectures import resolve_args
from titan_launch.config.architectures.llama3 import Llama3Args, flops_per_token, recomputed_flops_per_token
from titan_launch.config.model import ModelConfig
from titan_launch.plan.recomputation import recomputed_modules, recomputes_modules, selection
from titan_launch.plan.types import Inventory


@dataclass(frozen=True)
class ModelFlops:
    """What one sample costs, and what computing blocks again adds to it."""

    per_sample: int | None
    """Forward and backward of one sample, all pairs of tokens counted in attention; None where unknown."""

    blocks: tuple[str, ...]
    """Paths of the model's blocks."""

    llama: Llama3Args | None = None
    """The arguments of a model whose blocks' FLOPs are known."""

    seq_len: int = 0

    @property
    def is_exact(self) -> bool:
        """Whether what recomputation adds is counted; otherwise a full one is taken for one more forward of the whole
        model, a third of its FLOPs."""
        return self.llama is not None

    def recomputed_per_sample(self, recomputation: ActivationCheckpointConfig) -> int | None:
        """What `recomputation` adds for one sample; None where unknown."""
        if recomputation.mode == "none":
            return 0
        if recomputation.modules or not recomputes_modules(recomputation):
            return None
        keeps_costly_ops = selection(recomputation) == "op"
        num_blocks = self._num_blocks(recomputation)
        if self.llama is not None:
            return num_blocks * self.seq_len * recomputed_flops_per_token(self.llama, self.seq_len, keeps_costly_ops)
        if self.per_sample is None or keeps_costly_ops:
            return None
        return self.per_sample * num_blocks // (3 * self._num_blocks(_FULL))

    def _num_blocks(self, recomputation: ActivationCheckpointConfig) -> int:
        return len(recomputed_modules(Inventory((), self.blocks), recomputation))

    def total_per_sample(self, recomputation: ActivationCheckpointConfig) -> int | None:
        """Everything that is computed for one sample; None where unknown."""
        recomputed = self.recomputed_per_sample(recomputation)
        return None if recomputed is None or self.per_sample is None else self.per_sample + recomputed


_FULL = ActivationCheckpointConfig(mode="full")


def flops_of_model(
    model: ModelConfig, seq_len: int, blocks: tuple[str, ...], per_sample: int | None = None
) -> ModelFlops:
    """The FLOPs of a job's model, whose `per_sample` is not needed for a Llama."""
    args = resolve_args(model.name, model.flavor, model.args) if ":" not in model.name else None
    if isinstance(args, Llama3Args):
        return ModelFlops(seq_len * flops_per_token(args, seq_len), blocks, args, seq_len)
    return ModelFlops(per_sample, blocks)
