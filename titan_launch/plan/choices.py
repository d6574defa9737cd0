"""The alternatives that a plan compares: how gradients accumulate, and what backward computes again. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from titan_launch.config.activation_checkpoint import ActivationCheckpointConfig
from titan_launch.config.gradient_accumulation import GradientAccumulationConfig
from titan_launch.config.job import JobConfig


@dataclass(frozen=True)
class Choice:
    """One row of the plan's table: a mode of accumulation and one of recomputation, neither of them `auto`."""

    accumulation: GradientAccumulationConfig
    recomputation: ActivationCheckpointConfig

    def __post_init__(self) -> None:
        """Nothing that reads a choice need think of `auto`."""
        if "auto" in (self.accumulation.mode, self.recomputation.mode):
            raise ValueError("a choice is what `auto` becomes: resolve it first (plan.resolution)")

    @property
    def label(self) -> str:
        """For tables: `deferred, kept / selective op`."""
        return f"{self.accumulation_label} / {self.recomputation_label}"

    @property
    def accumulation_label(self) -> str:
        """For tables: `deferred, kept`, where parameters stay unsharded."""
        kept = ", kept" if self.accumulation.keep_params_unsharded else ""
        return f"{self.accumulation.mode}{kept}"

    @property
    def recomputation_label(self) -> str:
        """For tables: `none`, `full`, `selective op`, `selective 2`, `full of modules`, `memory_budget 0.5`."""
        chosen = self.recomputation
        if chosen.mode == "memory_budget":
            return f"memory_budget {chosen.memory_budget:g}"
        option = f" {chosen.selective_ac_option}" if chosen.mode == "selective" else ""
        return f"{chosen.mode}{option}{' of modules' if chosen.modules else ''}"


def own_choice(config: JobConfig) -> Choice:
    """What a job whose modes are not `auto` says itself. (`keep_params_unsharded` unset means not kept.)"""
    accumulation, recomputation = config.gradient_accumulation, config.activation_checkpoint
    kept = bool(accumulation.keep_params_unsharded)
    return Choice(accumulation.model_copy(update={"keep_params_unsharded": kept}), recomputation)


def with_choice(config: JobConfig, choice: Choice) -> JobConfig:
    """A job in which a choice is made."""
    made = {"gradient_accumulation": choice.accumulation, "activation_checkpoint": choice.recomputation}
    return config.model_copy(update=made)


def is_auto(config: JobConfig) -> bool:
    """Whether a job leaves one of its modes to the planner."""
    return "auto" in (config.gradient_accumulation.mode, config.activation_checkpoint.mode)
