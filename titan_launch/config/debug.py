"""`[debug]`: reproducibility and faults."""

from __future__ import annotations

from typing import Literal

from titan_launch.config.base import Section


class DebugConfig(Section):
    """Reproducibility and faults."""

    deterministic: bool = False
    """Use only deterministic kernels, and fail where there is none. Slower."""

    audit_precision: bool | None = None
    """Watch the first step of the process and compare the dtypes of all inputs, parameters, gradients, buffers, outputs
    and collectives with the plan; the run ends before its first update where they differ. The result is in
    `precision_audit.json`. Later steps cost nothing. Unset: on for the `debug` flavor and for a model of your own."""

    on_nonfinite: Literal["stop", "skip"] = "stop"
    """What to do when the loss or the gradient norm is not finite on any rank. The update is left out on all ranks in
    either case. `stop` then ends the run with the number of the step (on CUDA when the next report is due, with no
    update in between); `skip` goes on."""
