"""`[debug]`: reproducibility and faults."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

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

    spike_sigma: Annotated[float, Field(gt=0)] | None = None
    """Leave a step out, too, when its loss or its gradient norm is more than so many standard deviations above the mean
    of `spike_window`. Unset: no step is left out for that."""

    spike_window: Annotated[int, Field(ge=2, le=1024)] = 128
    """Steps that a spike is measured against: the last ones that were not left out. Nothing is a spike before half of
    them are there."""

    max_skips: Annotated[int, Field(ge=1)] = 10
    """Steps left out in a row, for either reason, after which `on_repeated_skips` applies (on CUDA when the next report
    is due, with no update in between)."""

    on_repeated_skips: Literal["stop", "rollback"] = "stop"
    """What to do after `max_skips`. `stop` ends the run. `rollback` goes back to the last checkpoint, and on from there
    with the data behind the steps that were left out."""

    max_rollbacks: Annotated[int, Field(ge=1)] = 3
    """How often a run goes back; the next time it ends."""
