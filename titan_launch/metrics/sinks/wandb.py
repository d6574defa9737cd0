"""Metrics as a run of Weights & Biases."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping

from wandb import Settings, init, login

from titan_launch.metrics.sinks.interface import Sink, SinkContext

_log = logging.getLogger(__name__)


class WandbSink(Sink):
    """A sink that writes a run of Weights & Biases. The environment variables of wandb apply, such as WANDB_PROJECT.

    Without a login, and without WANDB_MODE, the run is recorded offline in the run folder. If a run resumes, its W&B
    run continues. Steps that run again are recorded again, at the same position of the axis "step".
    """

    def __init__(self, run: SinkContext):
        """Raises an error of wandb if the run cannot be created."""
        mode = None if os.environ.get("WANDB_MODE") or login(prompt=False) else "offline"
        self._run = init(
            project=os.environ.get("WANDB_PROJECT", "titan_launch"),
            name=run.name,
            id=run.run_id,
            resume="allow",
            dir=run.folder,
            config=dict(run.config),
            mode=mode,
            settings=Settings(silent=True, console="off"),
        )
        self._run.define_metric("*", step_metric="step")
        if mode == "offline":
            folder = os.path.dirname(self._run.dir)
            _log.info("wandb: not logged in, so the run is recorded offline; to upload it: wandb sync %s", folder)

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Hand the metrics to wandb's process, which writes or uploads them."""
        self._run.log({"step": step, **scalars})

    def close(self, failed: bool = False) -> None:
        """Wait until everything is written or uploaded, and set the state of the run."""
        self._run.finish(exit_code=int(failed))
