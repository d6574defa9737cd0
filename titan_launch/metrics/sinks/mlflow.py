"""Metrics as a run of MLflow."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from itertools import islice

from mlflow import MlflowClient
from mlflow.entities import Metric, Param

from titan_launch.core.errors import leaves
from titan_launch.metrics.sinks.interface import Sink, SinkContext

_MAX_METRICS, _MAX_PARAMS = 1000, 100
"""Largest numbers of metrics and parameters in one call of MLflow's REST API."""

_RUN_ID = "titan_launch.run_id"
"""Tag of MLflow's run that holds `SinkContext.run_id`."""


class MlflowSink(Sink):
    """A sink that writes a run of MLflow. The environment variables of MLflow apply, such as MLFLOW_TRACKING_URI and
    MLFLOW_EXPERIMENT_NAME.

    The keys of the job become the parameters of MLflow's run. If a run resumes, MLflow's run continues. If steps run
    again, their metrics are added, and MLflow shows the latest values.
    """

    def __init__(self, run: SinkContext):
        """Raises an error of MLflow if the tracking server or folder cannot be used."""
        self._client = MlflowClient()
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "titan_launch")
        experiment = self._client.get_experiment_by_name(name)
        experiment_id = experiment.experiment_id if experiment else self._client.create_experiment(name)
        found = self._client.search_runs([experiment_id], f"tags.`{_RUN_ID}` = '{run.run_id}'", max_results=1)
        if found:
            self._run_id = found[0].info.run_id
            self._client.set_terminated(self._run_id, "RUNNING")
            return
        created = self._client.create_run(experiment_id, run_name=run.name, tags={_RUN_ID: run.run_id})
        self._run_id = created.info.run_id
        params = (Param(key, str(value)) for key, value in leaves(run.config))
        while part := list(islice(params, _MAX_PARAMS)):
            self._client.log_batch(self._run_id, params=part)

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Send the metrics to the tracking server, or write them to the tracking folder."""
        now = int(time.time() * 1000)
        metrics = (Metric(tag, value, now, step) for tag, value in scalars.items())
        while part := list(islice(metrics, _MAX_METRICS)):
            self._client.log_batch(self._run_id, metrics=part)

    def text(self, tag: str, text: str) -> None:
        """Store a text as an artifact."""
        self._client.log_text(self._run_id, text, f"{tag}.md")

    def close(self, failed: bool = False) -> None:
        """Set the state of MLflow's run: FAILED if `failed`, else FINISHED."""
        self._client.set_terminated(self._run_id, "FAILED" if failed else "FINISHED")
