"""From a job and the table of its model's modules to units. No torch."""

from __future__ import annotations

from dataclasses import replace

from titan_launch.config.activation_checkpoint import ActivationCheckpointConfig
from titan_launch.config.gradient_accumulation import GradientAccumulationConfig
from titan_launch.config.job import JobConfig
from titan_launch.plan.choices import Choice, is_auto, with_choice
from titan_launch.plan.compilation import compiled_modules
from titan_launch.plan.float8 import float8_modules
from titan_launch.plan.layout import Layout
from titan_launch.plan.pipeline import plan_stages
from titan_launch.plan.recomputation import recomputed_modules
from titan_launch.plan.resharding import plan_resharding
from titan_launch.plan.types import Inventory, ModelPlan
from titan_launch.plan.units import plan_model
from titan_launch.torch_release import CAN_SHARE_UNITS


def with_whole_parameters(config: JobConfig, layout: Layout) -> JobConfig:
    """The job, with parameters that stay where they are on ranks that share them with no other, if it leaves that open.

    FSDP2 gathers nothing there, with its `replicate` as little as with one shard; what it frees after forward it copies
    once more for backward. Not under `auto`, which asks for memory first and has kept parameters among its choices, nor
    with offloaded parameters, which would all come to the GPU.
    """
    parallelism = config.parallelism
    is_open = parallelism.fsdp_reshard_after_forward == "default" and not is_auto(config)
    if layout.parameter_shards > 1 or not is_open or config.training.enable_cpu_offload:
        return config
    kept = parallelism.model_copy(update={"fsdp_reshard_after_forward": "never"})
    return config.model_copy(update={"parallelism": kept})


def plan_kept(config: JobConfig, inventory: Inventory, kept: bool) -> ModelPlan:
    """The units of a job under any choice of modes: only whether parameters are kept decides about them.

    Raises ConfigError for precision rules that the model does not go with.
    """
    accumulation = GradientAccumulationConfig(keep_params_unsharded=kept)
    return plan_job(with_choice(config, Choice(accumulation, ActivationCheckpointConfig())), inventory)


def plan_job(config: JobConfig, inventory: Inventory) -> ModelPlan:
    """The units and dtypes of a job's model, what of it is computed again and compiled, and its stages; neither of its
    modes is `auto` any more.

    Raises ConfigError for precision rules, recomputation, compilation or stages that the model does not go with.
    """
    recomputed = recomputed_modules(inventory, config.activation_checkpoint)
    resharding = plan_resharding(config.parallelism, config.gradient_accumulation)
    plan = plan_model(inventory, config.precision, resharding, CAN_SHARE_UNITS)
    return replace(
        plan,
        recomputed=recomputed,
        compiled=compiled_modules(config, inventory, plan.units, recomputed),
        float8=float8_modules(config.float8, plan),
        stages=plan_stages(inventory, config.parallelism),
    )
