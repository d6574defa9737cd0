"""From a model on the meta device to a sharded one: the order of wrapping, with a reason at each step."""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from titan_launch.parallel.fsdp import apply_fsdp
from titan_launch.plan.types import ModelPlan
from titan_launch.precision.policy import cast_storage


def parallelize(model: nn.Module, plan: ModelPlan, mesh: DeviceMesh) -> None:
    """Prepare a model on the meta device for distributed training, in place; nothing is allocated.

    1. Storage dtypes, while parameters are plain and cost nothing to replace: FSDP2 takes over what it finds.
    2. FSDP2 last, around everything: it shards the parameters that are there then.
    """
    cast_storage(model, plan)
    apply_fsdp(model, plan, mesh)
