"""Active memory of a rank, replayed without torch: FSDP2's schedule around the operations of a Llama."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import cache

from titan_launch.config.activation_checkpoint import ActivationCheckpointConfig
from titan_launch.config.architectures import resolve_args
from titan_launch.config.architectures.llama3 import Llama3Args
from titan_launch.config.gradient_accumulation import GradientAccumulationConfig
from titan_launch.config.job import JobConfig
from titan_launch.config.model import ModelConfig
from titan_launch.plan.analytic.llama3 import llama3_inventory
from titan_launch.plan.analytic.replay import Replay
from titan_launch.plan.choices import Choice, with_choice
from titan_launch.plan.depth import block_signatures, find_shortcut, without_blocks
from titan_launch.plan.footprint import Footprint, extrapolate
from titan_launch.plan.hardware import Kernels
from titan_launch.plan.job import plan_job
from titan_launch.plan.layout import Layout
from titan_launch.plan.recomputation import chosen_blocks
from titan_launch.plan.types import Inventory, ModelPlan


def knows(model: ModelConfig) -> bool:
    """Whether this engine has the model. (Other blocks than the Llama's own make other units, which a trace finds.)"""
    return model.name == "llama3" and model.blocks is None


def model_inventory(config: JobConfig) -> Inventory:
    """The table of a known model's modules."""
    return llama3_inventory(_args(config), config.training.seq_len)


def analytic_engine(config: JobConfig, layout: Layout, kernels: Kernels) -> Callable[[Choice], Footprint]:
    """What gives the footprint of a job under other modes of accumulation and recomputation.

    `kernels`: whose footprint operations have. Where many blocks are alike, two shallower models are replayed, and
    their footprints extrapolated: memory is an affine function of depth.
    """
    inventory, args = model_inventory(config), _args(config)

    @cache
    def planned(kept: bool) -> tuple[ModelPlan, list[Hashable]]:
        """The plan and the signatures of its blocks: of a choice, only whether parameters are kept decides about it."""
        accumulation = GradientAccumulationConfig(keep_params_unsharded=kept)
        plan = plan_job(with_choice(config, Choice(accumulation, ActivationCheckpointConfig())), inventory)
        return plan, block_signatures(plan)

    def footprint(choice: Choice) -> Footprint:
        plan, signatures = planned(bool(choice.accumulation.keep_params_unsharded))
        again = chosen_blocks(inventory.blocks, choice.recomputation)

        def replay(removed: Sequence[str] = ()) -> Footprint:
            left = without_blocks(plan, removed) if removed else plan
            return Replay(with_choice(config, choice), args, left, layout, kernels, again).step()

        shortcut = find_shortcut(signatures, inventory.blocks, again)
        if shortcut is None:
            return replay()
        shorter, longer = replay(shortcut.removed_from_shorter), replay(shortcut.removed_from_longer)
        return extrapolate(shorter, longer, shortcut.factor)

    return footprint


def _args(config: JobConfig) -> Llama3Args:
    args = resolve_args(config.model.name, config.model.flavor, config.model.args)
    assert isinstance(args, Llama3Args)
    return args
