"""A model on the meta device, as the planner sees it."""

from __future__ import annotations

from titan_launch.config.job import JobConfig
from titan_launch.models.build import BuiltModel
from titan_launch.models.inventory import take_inventory
from titan_launch.parallel.batchnorm import check_batch_norms
from titan_launch.plan.job import plan_job
from titan_launch.plan.types import Inventory, ModelPlan


def inspect_model(config: JobConfig, built: BuiltModel) -> Inventory:
    """The table of a model's modules.

    Raises ConfigError for BatchNorm statistics that the model does not go with: only its classes can tell.
    """
    check_batch_norms(built.module, config.batchnorm)
    return take_inventory(built.module, built.blocks, built.head, built.embeddings)


def plan_precision(config: JobConfig, built: BuiltModel) -> ModelPlan:
    """The units and dtypes of a model on the meta device.

    Raises ConfigError for precision rules, BatchNorm statistics or recomputation that the model does not go with.
    """
    return plan_job(config, inspect_model(config, built))
