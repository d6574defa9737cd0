"""From a model on the meta device to a sharded one: the order of wrapping, with a reason at each step."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from titan_launch.config.activation_checkpoint import ActivationCheckpointConfig
from titan_launch.config.batchnorm import BatchNormConfig
from titan_launch.parallel.activation_checkpoint import cast_in_recomputation, checkpoint_activations
from titan_launch.parallel.batchnorm import prepare_batch_norms
from titan_launch.parallel.fsdp import apply_fsdp
from titan_launch.plan.layout import Layout
from titan_launch.plan.recomputation import chosen_blocks
from titan_launch.plan.torch_version import CAN_SHARE_UNITS
from titan_launch.plan.types import ModelPlan
from titan_launch.precision.policy import cast_storage


def parallelize(
    model: nn.Module,
    plan: ModelPlan,
    layout: Layout,
    mesh: DeviceMesh,
    batchnorm: BatchNormConfig,
    statistics_group: dist.ProcessGroup | None,
    recomputation: ActivationCheckpointConfig,
) -> None:
    """Prepare a model on the meta device for distributed training, in place; nothing is allocated.

    1. Storage dtypes, while parameters are plain and cost nothing to replace: FSDP2 takes over what it finds.
    2. BatchNorm layers, whose class FSDP2 extends. `statistics_group`: the ranks they are synchronized over, if any.
    3. Recomputation, inside of FSDP2's hooks: a block is then computed again from the inputs these have cast.
    4. FSDP2 last, around everything: it shards the parameters that are there then.
    """
    blocks = chosen_blocks(plan.inventory.blocks, recomputation)
    cast_storage(model, plan)
    prepare_batch_norms(model, batchnorm, layout.num_microbatches, statistics_group)
    checkpoint_activations(model, blocks, recomputation)
    apply_fsdp(model, plan, mesh)
    if not CAN_SHARE_UNITS:
        cast_in_recomputation(model, plan, blocks)
