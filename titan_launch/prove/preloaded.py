"""Modules that are imported once, before ranks are forked (`prove.ranks`)."""

import titan_launch.prove.measure
import titan_launch.prove.weights
import titan_launch.train.pipeline_step  # noqa: F401
from titan_launch.config.job import JobConfig

JobConfig.model_validate({})  # builds the validators of pydantic, once for all ranks
