"""What CPU offload keeps off the device. No torch."""

from __future__ import annotations

from titan_launch.config.training import TrainingConfig
from titan_launch.plan.footprint import Category
from titan_launch.plan.hardware import Kernels

_OFFLOADED = frozenset(
    {Category.PARAMETERS, Category.GRADIENTS, Category.OPTIMIZER, Category.OPTIMIZER_TEMPORARIES},
)


def on_host(training: TrainingConfig, kernels: Kernels) -> frozenset[Category]:
    """What is not in the device's memory. On a CPU that memory is the host's, and all of it counts."""
    return _OFFLOADED if training.enable_cpu_offload and kernels == "cuda" else frozenset()
