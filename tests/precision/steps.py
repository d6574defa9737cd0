"""A wrapped model, and the forwards and backwards of a step."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from titan_launch.accumulation.strategies import build_strategy
from titan_launch.config.job import JobConfig
from titan_launch.loss import cross_entropy_sum
from titan_launch.models.build import build_model
from titan_launch.models.init import initialize
from titan_launch.plan.layout import Layout, plan_layout
from titan_launch.plan.types import ModelPlan
from titan_launch.train.build import shard_model
from titan_launch.train.plan import plan_precision

SEQ_LEN = 16


def wrapped(config: JobConfig) -> tuple[nn.Module, ModelPlan, Layout]:
    """A job's model on this rank, initialised, with its plan."""
    built = build_model(config.model, SEQ_LEN)
    layout = plan_layout(config.parallelism, config.training, dist.get_world_size())
    plan = plan_precision(config, built)
    model = shard_model(config, built, plan, layout, torch.device("cpu"))
    model.to_empty(device="cpu")
    initialize(model, built.initializer, 0, torch.device("cpu"))
    return model, plan, layout


def train(model: nn.Module, config: JobConfig) -> None:
    """Forward and backward over two microbatches."""
    strategy = build_strategy(config.gradient_accumulation)
    tokens = torch.arange(2 * SEQ_LEN).reshape(2, SEQ_LEN)
    for is_last in (False, True):
        strategy.begin_microbatch(model, is_last)
        cross_entropy_sum(model(tokens), tokens).backward()
