"""Modules that the server of ranks imports before it forks the ranks (see `tests.distributed`)."""

from pathlib import Path

import pytest  # noqa: F401
import torch.profiler
import torch.utils.tensorboard  # noqa: F401

import titan_launch.checkpoint.writer
import titan_launch.commands.plan
import titan_launch.trace.recorder
import titan_launch.train.main
import titan_launch.train.pipeline_step  # noqa: F401
from tests.train.jobs import tiny_job
from titan_launch.config.job import JobConfig

JobConfig.model_validate(tiny_job(Path()))  # pydantic builds the validator of a section when it is first used
