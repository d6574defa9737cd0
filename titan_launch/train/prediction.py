"""Predicted memory beside measured memory: what keeps the planner honest, in every run."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from dataclasses import dataclass

from titan_launch.config.job import JobConfig
from titan_launch.errors import RunError, UserError
from titan_launch.plan.analytic.engine import analytic_engine, unknown_part
from titan_launch.plan.choices import own_choice
from titan_launch.plan.hardware import GIB, Hardware
from titan_launch.plan.layout import Layout
from titan_launch.torch_release import is_tested_release
from titan_launch.train.tracing import Tracing

_log = logging.getLogger(__name__)

PREDICTED, MEASURED = "memory/predicted_active_gib", "memory/max_active_gib"
TOLERANCE = 0.1
"""A larger difference, as a share of what was measured, is worth a warning."""


@dataclass(frozen=True)
class Prediction:
    """The active memory that a step is predicted to take, at its peak."""

    gib: float
    place: str
    """Where in the step that is, in words."""


class MemoryCheck:
    """Reports what the planner predicts for a run, and compares it once with what is measured."""

    def __init__(self, config: JobConfig, layout: Layout, hardware: Hardware, stack: ExitStack):
        """A job that the analytic engine does not know is traced by another process, while the run goes on; `stack`
        ends it. Not where it would be the memory of another rank (of a pipeline), or take more than the run (on CPUs,
        with matrices or sequences divided)."""
        self._prediction: Prediction | None = None
        self._tracing: Tracing | None = None
        self._measured_gib: float | None = None
        self._is_compared = False
        if not is_tested_release():
            return
        if config.compile.enable:
            _log.info("memory is not predicted: the compiler decides what is kept; `plan` shows it without one")
            return
        if config.float8.enable:
            _log.info("memory is not predicted: the planner does not know what torchao keeps; `plan` shows it without")
            return
        if unknown_part(config) is None:
            footprint = analytic_engine(config, layout, hardware.kernels)(own_choice(config))
            self._prediction = Prediction(footprint.peak_bytes / GIB, str(footprint.place))
            return
        if layout.pipeline > 1 or (layout.model_parallel > 1 and hardware.kernels == "cpu"):
            _log.info("memory is not predicted beside a run with %s: see `plan`", unknown_part(config))
            return
        try:
            self._tracing = Tracing(config, layout.world_size, hardware, stack)
        except OSError as error:  # no room for files or processes
            _log.info("memory is not predicted: %s", error)

    def scalars(self, measured_gib: float | None) -> dict[str, float]:
        """What there is to report by now; never waits. `measured_gib`: the peak of a window, or of a step, in which
        nothing but training has happened, if there is one."""
        self._look_at_trace()
        if self._measured_gib is None:
            self._measured_gib = measured_gib
        self._compare()
        return {} if self._prediction is None else {PREDICTED: self._prediction.gib}

    def _look_at_trace(self) -> None:
        if self._tracing is None or self._tracing.is_running:
            return
        try:
            rows = self._tracing.result()["rows"]
            row = next(row for row in rows if row["is_chosen"])
            self._prediction = Prediction(row["active_bytes"] / GIB, row["peak"]["text"])
        except (UserError, RunError) as error:
            _log.info("memory is not predicted: %s", str(error).splitlines()[-1])
        self._tracing = None

    def _compare(self) -> None:
        if self._is_compared or self._prediction is None or self._measured_gib is None:
            return
        self._is_compared = True
        predicted, measured = self._prediction, self._measured_gib
        if abs(predicted.gib - measured) > TOLERANCE * measured:
            _log.warning(
                "memory: the peak is %s in use, and %s were predicted (%s); do not rely on the plan of this job",
                *(_in_words(measured), _in_words(predicted.gib), predicted.place),
            )


def _in_words(gib: float) -> str:
    return f"{gib:.2f} GiB" if gib >= 0.1 else f"{gib * 1024:.2f} MiB"
