"""Floating-point operations of a step, and the time of a step as an interval under stated assumptions. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from titan_launch.config.architectures import ARCHITECTURES, resolve_args
from titan_launch.config.architectures.base import ModelArgs
from titan_launch.config.rules.parallelism import SPLIT_BACKWARD_SCHEDULES, stages_per_rank
from titan_launch.config.sections.model import ModelConfig
from titan_launch.config.sections.parallelism import ActivationCheckpointConfig, ParallelismConfig
from titan_launch.plan.communication import LinkTraffic
from titan_launch.plan.hardware import Hardware
from titan_launch.plan.layout import Layout
from titan_launch.plan.module_selection import checkpointed_modules, checkpoints_modules, selection
from titan_launch.plan.types import Inventory, ModelPlan


@dataclass(frozen=True)
class StepTime:
    """Predicted seconds of a step, between full overlap and no overlap of communication and computation."""

    compute: float | None
    """Seconds of computation, with the bubble. None if FLOPs or peak FLOP/s are unknown."""

    communication: float | None
    """Seconds of communication. None if a required bandwidth is unknown."""

    bubble: float = 0.0
    """Part of `compute` in which a rank waits for other pipeline stages."""

    @property
    def interval(self) -> tuple[float, float] | None:
        """Shortest and longest time of the step in seconds. None if computation or communication is unknown."""
        if self.compute is None or self.communication is None:
            return None
        return max(self.compute, self.communication), self.compute + self.communication

    def ties_with(self, other: StepTime) -> bool:
        """Return True if either of two steps may be the shorter one: their intervals overlap or are unknown."""
        if self.interval is None or other.interval is None:
            return True
        (low, high), (other_low, other_high) = self.interval, other.interval
        return low <= other_high and other_low <= high


def estimate_step_time(
    flops_per_rank: float | None, link_traffic: LinkTraffic, hardware: Hardware, bubble_share: float = 0.0
) -> StepTime:
    """Return the time of a step: computation at `mfu` of the peak, and communication at full bandwidth.

    Links within and across nodes are used at the same time, so the longer time counts. `bubble_share`: see the function
    `bubble_share`.
    """
    compute = None
    if flops_per_rank is not None and hardware.peak_tflops is not None:
        compute = flops_per_rank / (hardware.peak_tflops * 1e12 * hardware.mfu)
    links = (
        _seconds(link_traffic.within, hardware.intra_node_gb_per_s),
        _seconds(link_traffic.across, hardware.inter_node_gb_per_s),
    )
    known = [seconds for seconds in links if seconds is not None]
    communication = max(known) if len(known) == len(links) else None
    if compute is None:
        return StepTime(None, communication)
    bubble = compute * bubble_share
    return StepTime(compute + bubble, communication, bubble)


def bubble_share(parallelism: ParallelismConfig, layout: Layout) -> float:
    """Return the time that a rank waits while a pipeline fills and empties, as a share of its compute time.

    The share is (p - 1) / (v m) for p ranks with v equal stages and m microbatches (arXiv:2104.04473). Zero-bubble
    schedules compute weight gradients while a rank would wait. Their share counts as 0, the best case
    (arXiv:2401.10241).
    """
    if parallelism.pipeline_parallel_schedule in SPLIT_BACKWARD_SCHEDULES:
        return 0.0
    return (layout.pipeline - 1) / (stages_per_rank(parallelism) * layout.num_microbatches)


def _seconds(num_bytes: float, gb_per_s: float | None) -> float | None:
    if not num_bytes:
        return 0.0
    return None if gb_per_s is None else num_bytes / (gb_per_s * 1e9)


@dataclass(frozen=True)
class ModelFlops:
    """The FLOPs of one sample, and those that activation checkpointing adds."""

    per_sample: int | None
    """FLOPs of forward and backward of one sample; None if unknown. Attention counts all pairs of tokens, also masked
    pairs."""

    blocks: tuple[str, ...]
    """Paths of the model's blocks."""

    args: ModelArgs | None = None
    """The arguments of a model of this package."""

    seq_len: int = 0

    @property
    def of_experts(self) -> float:
        """Part of the FLOPs of a sample that chosen experts compute; 0 if it is unknown."""
        if self.args is None or not self.per_sample:
            return 0.0
        return self.args.expert_flops_per_sample(self.seq_len) / self.per_sample

    @property
    def is_exact(self) -> bool:
        """True if the FLOPs that activation checkpointing adds are counted exactly.

        Otherwise, checkpointing of all blocks counts as one more forward of the model: a third of its FLOPs.
        """
        return self._block_flops(saves_costly_ops=False) is not None

    def checkpointed_per_sample(self, checkpointing: ActivationCheckpointConfig) -> int | None:
        """Return the FLOPs that `checkpointing` adds for one sample; None if unknown."""
        if checkpointing.mode == "none":
            return 0
        if checkpointing.modules or not checkpoints_modules(checkpointing):
            return None
        saves_costly_ops = selection(checkpointing) == "op"
        num_blocks = self._num_blocks(checkpointing)
        block_flops = self._block_flops(saves_costly_ops)
        if block_flops is not None:
            return num_blocks * block_flops
        if self.per_sample is None or saves_costly_ops:
            return None
        return self.per_sample * num_blocks // (3 * self._num_blocks(_FULL))

    def _block_flops(self, saves_costly_ops: bool) -> int | None:
        return None if self.args is None else self.args.checkpointed_block_flops(self.seq_len, saves_costly_ops)

    def _num_blocks(self, checkpointing: ActivationCheckpointConfig) -> int:
        return len(checkpointed_modules(Inventory((), self.blocks), checkpointing))

    def total_per_sample(self, checkpointing: ActivationCheckpointConfig) -> int | None:
        """Return the FLOPs for one sample, including those that `checkpointing` adds; None if unknown."""
        added = self.checkpointed_per_sample(checkpointing)
        return None if added is None or self.per_sample is None else self.per_sample + added


def loss_head_flops(plan: ModelPlan, positions: int) -> int:
    """Return the FLOPs that a loss in chunks adds for one sample: backward repeats the product of the output layer.

    `positions`: number of targets of a sample. Return 0 if the model returns logits.
    """
    if plan.loss_head is None:
        return 0
    weight = next(p for p in plan.inventory.by_path[plan.loss_head].parameters if p.name == "weight")
    return 2 * positions * weight.numel


_FULL = ActivationCheckpointConfig(mode="full")


def flops_of_model(
    model: ModelConfig, seq_len: int, blocks: tuple[str, ...], per_sample: int | None = None
) -> ModelFlops:
    """Return the FLOPs of a job's model. `per_sample`: the FLOPs per sample that a user's own model declares."""
    if model.name not in ARCHITECTURES:
        return ModelFlops(per_sample, blocks)
    args = resolve_args(model.name, model.flavor, model.args)
    return ModelFlops(args.flops_per_sample(seq_len), blocks, args, seq_len)
