"""`[training]`: batch, length, clipping and seed of the run."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from titan_launch.config.base import Section


class TrainingConfig(Section):
    """Batch, length, clipping and seed of the run."""

    seq_len: Annotated[int, Field(ge=1)] = 256
    """Tokens in a sequence. Not used with images."""

    local_batch_size: Annotated[int, Field(ge=1)] = 4
    """Samples (sequences, or images) in a microbatch on each data-parallel rank."""

    global_batch_size: Annotated[int, Field(ge=1)] | None = None
    """Samples in an optimizer step, over all ranks and microbatches. The number of microbatches follows:
    `global_batch_size / (local_batch_size * data-parallel ranks)`, which must be whole. Default: one microbatch."""

    steps: Annotated[int, Field(ge=1)] = 100
    """Optimizer steps in the whole run, those before a resume included."""

    max_norm: Annotated[float, Field(ge=0)] = 1.0
    """Clip the gradient of all parameters together to this norm. 0: do not clip, only report the norm."""

    loss_chunks: Annotated[int, Field(ge=1)] = 1
    """Parts in which the loss goes through a microbatch's targets, one after the other. The fp32 copies of the logits
    (12 bytes per token and class) then exist for one part at a time, for one more softmax in backward; the gradient
    stays the same, bit for bit."""

    enable_cpu_offload: bool = False
    """Keep sharded parameters, their gradients and the optimizer's state in host memory, and update there: a unit's
    parameters come to the GPU when they are gathered. For models that do not fit otherwise: a step takes longer."""

    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Seed of the initial parameters and of the order of the data."""

    gc_freq: Annotated[int, Field(ge=1)] = 50
    """Python's garbage collector runs every this many steps, on all ranks together, and at no other time: a rank that
    collects alone holds up all the others."""
