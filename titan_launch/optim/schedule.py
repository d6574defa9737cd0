"""The learning rate as a pure function of the step, so a resumed run needs no scheduler state."""

from __future__ import annotations

import math

from torch.optim import Optimizer

from titan_launch.config.lr_scheduler import SchedulerConfig, WarmupStableDecay


def lr_factor(config: SchedulerConfig, step: int, total_steps: int) -> float:
    """The learning rate of an optimizer step, as a fraction of the peak. Steps count from 1.

    Warm-up is linear from 0, before the first step, to the peak at step `warmup_steps` (without warm-up: at step 1).
    The fall starts after the last step at the peak, and would reach `min_lr_factor` at step `total_steps + 1`, so that
    no step is spent on a learning rate of 0.
    """
    if step < config.warmup_steps:
        return step / config.warmup_steps
    last_at_peak = max(config.warmup_steps, total_steps - _decay_steps(config, total_steps), 1)
    if step <= last_at_peak:
        return 1.0
    done = (step - last_at_peak) / (total_steps + 1 - last_at_peak)
    return config.min_lr_factor + (1 - config.min_lr_factor) * _fall(_shape(config), min(done, 1.0))


def set_lr(optimizer: Optimizer, base_lr: float, factor: float) -> None:
    """Set the learning rate of every group: `base_lr * factor`, times the group's own `lr_factor`."""
    for group in optimizer.param_groups:
        group["lr"] = base_lr * factor * group["lr_factor"]


def _decay_steps(config: SchedulerConfig, total_steps: int) -> int:
    return round(config.decay_ratio * total_steps) if isinstance(config, WarmupStableDecay) else total_steps


def _shape(config: SchedulerConfig) -> str:
    return config.decay_type if isinstance(config, WarmupStableDecay) else config.kind


def _fall(shape: str, done: float) -> float:
    """From 1 where nothing of the decay is done (0) to 0 where all is (1)."""
    if shape == "cosine":
        return (1 + math.cos(math.pi * done)) / 2
    if shape == "sqrt":
        return 1 - math.sqrt(done)
    return 1 - done
