"""A wrapped model and its training steps, for the tests of precision."""

from __future__ import annotations

import torch
from torch import nn

from tests.tensors import cross_entropy_sum
from tests.train.jobs import planned_and_sharded
from titan_launch.config.job import JobConfig
from titan_launch.parallel.fsdp import Accumulation
from titan_launch.plan.layout import Layout
from titan_launch.plan.types import ModelPlan

SEQ_LEN = 16


def wrapped(config: JobConfig) -> tuple[nn.Module, ModelPlan, Layout]:
    """Return a job's model on this rank, initialised, with its plan."""
    return planned_and_sharded(config, SEQ_LEN)


def train(model: nn.Module, config: JobConfig) -> None:
    """Run forward and backward over two microbatches."""
    strategy = Accumulation(config.gradient_accumulation)
    tokens = torch.arange(2 * SEQ_LEN).reshape(2, SEQ_LEN)
    for is_last in (False, True):
        strategy.begin_microbatch(model, is_last)
        cross_entropy_sum(model(tokens), tokens).backward()
