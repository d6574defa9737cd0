"""`[validation]`: loss and accuracy on data held out from training."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from titan_launch.config.base import Section
from titan_launch.config.data import DataConfig


class ValidationConfig(Section):
    """Loss and accuracy on data held out from training: over all ranks, every target with the same weight, in
    evaluation mode."""

    freq: Annotated[int, Field(ge=0)] = 0
    """Steps between validations. 0: never."""

    local_batch_size: Annotated[int, Field(ge=1)] = 8
    """Samples per batch on each data-parallel rank."""

    max_samples: Annotated[int, Field(ge=1)] | None = None
    """Validate on this many samples, the same ones every time. Default: all."""

    data: DataConfig | None = None
    """The held-out source, with the keys of `[data]`."""
