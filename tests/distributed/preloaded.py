"""Modules that the server of ranks imports before it forks the ranks (see `tests.distributed`)."""

from contextlib import suppress
from pathlib import Path

import pytest  # noqa: F401
import torch.distributed.checkpoint.state_dict
import torch.profiler
import torch.utils.tensorboard  # noqa: F401

import titan_launch.checkpoint.writer
import titan_launch.commands.plan
import titan_launch.trace.recorder
import titan_launch.train.main
import titan_launch.train.pipeline_step  # noqa: F401
from tests.train.jobs import tiny_job
from titan_launch.config.job import JobConfig
from titan_launch.core.patches import torchao_import_silenced
from titan_launch.plan.layout import plan_layout
from titan_launch.plan.memory.recordings import NotRecordedError, Recordings
from titan_launch.train.model import build_job_model, plan_precision

with suppress(ImportError):
    import s3fs  # noqa: F401  half a second of each rank with an object store

with suppress(ImportError), torchao_import_silenced():
    import transformers.modeling_utils  # noqa: F401  a second of each rank with a class of `transformers`

# Each process does these two things once: pydantic builds the validator of a section when it is first used, and the
# cache of recordings digests the package's files. No tensor with values is made, and no autograd graph.
_job = JobConfig.model_validate(tiny_job(Path()))
plan_precision(_job, build_job_model(_job))
with suppress(NotRecordedError):
    Recordings(_job, plan_layout(_job.parallelism, _job.training, 1), "cpu", recorder=None).subject()
