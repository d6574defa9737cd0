"""The order in which a model on the meta device is wrapped for distributed training, with a reason for each step."""

from __future__ import annotations

from collections.abc import Mapping

import torch.distributed as dist
from torch import nn

from titan_launch.config.axes import TENSOR
from titan_launch.config.job import JobConfig
from titan_launch.core.torch_release import CAN_SHARE_UNITS
from titan_launch.distributed.mesh import Mesh
from titan_launch.models.spec import TensorStyle
from titan_launch.parallel.activation_checkpoint import cast_in_second_forward, checkpoint_activations
from titan_launch.parallel.activation_offload import offload_activations
from titan_launch.parallel.batchnorm import prepare_batch_norms
from titan_launch.parallel.compile import compile_pieces
from titan_launch.parallel.expert_balance import prepare_experts
from titan_launch.parallel.expert_parallel import divide_experts
from titan_launch.parallel.float8 import convert_to_float8
from titan_launch.parallel.fsdp import apply_fsdp
from titan_launch.parallel.tensor_parallel import apply_tensor_parallel
from titan_launch.plan.module_selection import checkpoints_compiled
from titan_launch.plan.types import ModelPlan, outermost
from titan_launch.precision.policy import cast_tensors


def parallelize(
    model: nn.Module,
    plan: ModelPlan,
    mesh: Mesh,
    config: JobConfig,
    styles: Mapping[str, TensorStyle] | None,
    statistics_group: dist.ProcessGroup | None,
) -> None:
    """Prepare a model on the meta device for distributed training, in place; nothing is allocated.

    1. Cast to storage dtypes, while parameters are plain tensors without memory. FSDP2 keeps the dtypes that it finds.
    2. Convert linear layers to float8. Names and dtypes of parameters stay. float8 excludes tensor parallelism.
    3. Apply tensor parallelism by the model's `styles` (None is allowed without it), and expert parallelism. FSDP2 then
       shards the resulting DTensors further.
    4. Prepare BatchNorm layers, before FSDP2 replaces their class. `statistics_group`: the ranks over which statistics
       are synchronized; None for local statistics. Set the scale of the auxiliary losses of mixtures of experts.
    5. Apply activation checkpointing inside of FSDP2's hooks. The second forward then gets inputs that FSDP2 has cast.
    6. Compile around activation checkpointing, so that one graph contains both forwards. With tensor parallelism, a
       graph can contain both only for `selective_ac_option = "op"`. For other options, compilation is inside of
       checkpointing. FSDP2's hooks cannot be in a graph, and stay outside.
    7. Offload activations around compiled forwards and checkpoints, so that offloading sees all tensors that they save
       for backward.
    8. Apply FSDP2 last, because it shards the parameters that exist at its call. Before torch 2.13, then add the casts
       that FSDP2 omits in the second forward.
    """
    activation_checkpoint = config.activation_checkpoint
    cast_tensors(model, plan, lambda unit: unit.storage_dtype)
    convert_to_float8(model, plan, config.float8)
    apply_tensor_parallel(model, styles, mesh.along(TENSOR), config.parallelism, plan.loss_head is not None)
    divide_experts(model, mesh)
    is_first_of_stage = dist.get_rank() % mesh.layout.ranks_per_stage == 0
    prepare_batch_norms(model, config.batchnorm, mesh.layout.num_microbatches, statistics_group, is_first_of_stage)
    prepare_experts(model, plan, mesh, mesh.ranks.device_type)
    if checkpoints_compiled(config):
        compile_pieces(model, plan, config.compile, activation_checkpoint)
        checkpoint_activations(model, plan.checkpointed, activation_checkpoint)
    else:
        checkpoint_activations(model, plan.checkpointed, activation_checkpoint)
        compile_pieces(model, plan, config.compile, activation_checkpoint)
    if activation_checkpoint.offload:
        offload_activations(model, outermost(plan.inventory.blocks), mesh.ranks.device_type)
    apply_fsdp(model, plan, mesh, config.training.enable_cpu_offload)
    if not CAN_SHARE_UNITS:
        cast_in_second_forward(model, plan)
