"""What the launcher knows about a model of this package."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from titan_launch.models.initializers import Initializer


@dataclass(frozen=True)
class ModelSpec:
    """One model: how it is built, divided, counted and initialised.

    `args` below is the model's arguments class of `titan_launch.config.architectures`.
    """

    build: Callable[[Any, int], nn.Module]
    """(args, seq_len) to the module, on the default device."""

    blocks: tuple[str, ...]
    """Globs of the modules that become an FSDP unit each."""

    head: tuple[str, ...]
    """Paths of the modules that run last, in order."""

    flops_per_sample: Callable[[Any, int], int | None]
    """(args, seq_len) to the FLOPs of forward and backward for one sample: for a language model, a whole sequence."""

    initializer: Callable[[Any], Initializer]
    """args to what fills the parameters and buffers."""

    embeddings: tuple[str, ...] = ()
    """Paths of the modules that run first and whose weights nothing but their own forward reads: backward needs only
    the indices."""
