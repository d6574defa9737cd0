"""The learning rate as a pure function of the step, so that a resumed run needs no scheduler state."""

from __future__ import annotations

import math

from torch.optim import Optimizer

from titan_launch.config.sections.training import Constant, SchedulerConfig, WarmupStableDecay


def lr_factor(config: SchedulerConfig, step: int, total_steps: int) -> float:
    """Return the learning rate of an optimizer step, as a fraction of the peak. Steps count from 1.

    During warm-up the rate grows linearly: step k of n has k / n of the peak. Without warm-up, step 1 is at the peak.
    The decay begins after the last step at the peak. It would reach `min_lr_factor` only at step `total_steps + 1`, so
    no step of the run has the rate 0. If warm-up and decay do not fit into `total_steps`, they are clipped.
    """
    warmup, decay = _clipped_phases(config, total_steps)
    if step < warmup:
        return step / warmup
    last_at_peak = max(total_steps - decay, 1)
    if isinstance(config, Constant) or step <= last_at_peak:
        return 1.0
    done = (step - last_at_peak) / (total_steps + 1 - last_at_peak)
    shape = config.decay_type if isinstance(config, WarmupStableDecay) else config.kind
    return config.min_lr_factor + (1 - config.min_lr_factor) * _fall(shape, min(done, 1.0))


def describe_clipping(config: SchedulerConfig, total_steps: int) -> str | None:
    """Return a log line if warm-up or decay is clipped; None if both fit into `total_steps`."""
    phases = zip(("warm-up", "decay"), _phases(config, total_steps), _clipped_phases(config, total_steps), strict=True)
    clipped = [f"{name} is clipped from {wanted} to {fits} steps" for name, wanted, fits in phases if fits < wanted]
    if not clipped:
        return None
    return f"learning rate: {' and '.join(clipped)}, because the run has {total_steps} steps"


def set_lr(optimizer: Optimizer, base_lr: float, factor: float) -> None:
    """Set the learning rate of every group: `base_lr * factor`, times the group's own `lr_factor`."""
    for group in optimizer.param_groups:
        group["lr"] = base_lr * factor * group["lr_factor"]


def _phases(config: SchedulerConfig, total_steps: int) -> tuple[int, int]:
    """Return the numbers of warm-up and decay steps that the job asks for. With `cosine` and `linear`, all steps after
    the warm-up are decay steps."""
    if isinstance(config, WarmupStableDecay):
        return config.warmup_steps, round(config.decay_ratio * total_steps)
    return config.warmup_steps, 0 if isinstance(config, Constant) else max(total_steps - config.warmup_steps, 0)


def _clipped_phases(config: SchedulerConfig, total_steps: int) -> tuple[int, int]:
    """Return the numbers of warm-up and decay steps that fit into `total_steps`. Decay is clipped before warm-up."""
    warmup, decay = _phases(config, total_steps)
    warmup = min(warmup, total_steps)
    return warmup, min(decay, total_steps - warmup)


def _fall(shape: str, done: float) -> float:
    """Return the factor of the decay: 1 at the beginning of the decay (`done` = 0), and 0 at its end (`done` = 1)."""
    if shape == "cosine":
        return (1 + math.cos(math.pi * done)) / 2
    if shape == "sqrt":
        return 1 - math.sqrt(done)
    return 1 - done
