"""A model on the meta device, as the planner sees it."""

from __future__ import annotations

from titan_launch.config.job import JobConfig
from titan_launch.models.build import BuiltModel
from titan_launch.models.context_plan import check_context_plan
from titan_launch.models.inventory import take_inventory
from titan_launch.models.tensor_plan import check_tensor_plan
from titan_launch.parallel.batchnorm import check_batch_norms
from titan_launch.plan.job import plan_job
from titan_launch.plan.types import Inventory, ModelPlan
from titan_launch.train.forward import check_signature


def inspect_model(config: JobConfig, built: BuiltModel) -> Inventory:
    """Return the table of a model's modules.

    Raises ConfigError for a forward that takes other arguments than the inputs, and for BatchNorm statistics, tensor
    parallelism or context parallelism that the model does not go with: only its classes can tell.
    """
    check_signature(built.module, config.data.unit)
    check_batch_norms(built.module, config.batchnorm)
    check_tensor_plan(built.module, built.tensor_parallel, config.parallelism)
    context, seq_len = config.parallelism.context_parallel_degree, config.training.seq_len
    check_context_plan(built.module, built.context_parallel, context, seq_len, config.batchnorm)
    return take_inventory(built.module, built.blocks, built.head, built.embeddings, built.chain)


def plan_precision(config: JobConfig, built: BuiltModel) -> ModelPlan:
    """The units and dtypes of a model on the meta device.

    Raises ConfigError for precision rules, BatchNorm statistics or recomputation that the model does not go with.
    """
    return plan_job(config, inspect_model(config, built))
