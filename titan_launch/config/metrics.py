"""`[metrics]`: what is reported, where and how often."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from titan_launch.config.base import Section


class MetricsConfig(Section):
    """What is reported, where and how often."""

    log_freq: Annotated[int, Field(ge=1)] = 10
    """Steps between reports (the first and the last step are always reported). Between reports nothing waits for the
    device."""

    enable_tensorboard: bool = True
    """Write TensorBoard event files below `tb/` in the run folder."""

    peak_tflops_per_device: Annotated[float, Field(gt=0)] | None = None
    """Dense bf16 peak of one device in TFLOP/s, for the MFU. Default: the peak of the GPU where it is known; without a
    peak no MFU is reported."""
