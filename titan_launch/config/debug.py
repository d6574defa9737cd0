"""`[debug]`: reproducibility and faults."""

from __future__ import annotations

from typing import Literal

from titan_launch.config.base import Section


class DebugConfig(Section):
    """Reproducibility and faults."""

    deterministic: bool = False
    """Use only deterministic kernels, and fail where there is none. Slower."""

    on_nonfinite: Literal["stop", "skip"] = "stop"
    """What to do when the loss or the gradient norm is not finite on any rank. The update is left out on all ranks in
    either case. `stop` then ends the run with the number of the step (on CUDA when the next report is due, with no
    update in between); `skip` goes on."""
