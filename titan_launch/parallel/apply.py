"""From a model on the meta device to a sharded one: the order of wrapping, with a reason at each step."""

from __future__ import annotations

from collections.abc import Mapping

import torch.distributed as dist
from torch import nn

from titan_launch.config.sections.parallelism import ActivationCheckpointConfig, CompileConfig, ParallelismConfig
from titan_launch.config.sections.precision import BatchNormConfig, Float8Config
from titan_launch.core.torch_release import CAN_SHARE_UNITS
from titan_launch.distributed.mesh import Mesh
from titan_launch.models.spec import TensorStyle
from titan_launch.parallel.activation_checkpoint import cast_in_recomputation, checkpoint_activations
from titan_launch.parallel.batchnorm import prepare_batch_norms
from titan_launch.parallel.compile import compile_pieces
from titan_launch.parallel.float8 import convert_to_float8
from titan_launch.parallel.fsdp import apply_fsdp
from titan_launch.parallel.tensor_parallel import apply_tensor_parallel
from titan_launch.plan.compilation import checkpoints_compiled
from titan_launch.plan.types import ModelPlan
from titan_launch.precision.policy import cast_storage


def parallelize(
    model: nn.Module,
    plan: ModelPlan,
    mesh: Mesh,
    *,
    styles: Mapping[str, TensorStyle] | None,
    parallelism: ParallelismConfig,
    batchnorm: BatchNormConfig,
    statistics_group: dist.ProcessGroup | None,
    recomputation: ActivationCheckpointConfig,
    compilation: CompileConfig,
    float8: Float8Config,
    offloads: bool,
) -> None:
    """Prepare a model on the meta device for distributed training, in place; nothing is allocated.

    1. Storage dtypes, while parameters are plain and cost nothing to replace: FSDP2 takes over what it finds.
    2. Linear layers in float8, whose parameters keep their names and dtypes. Never together with tensor parallelism.
    3. Tensor parallelism by the model's `styles`, whose DTensors FSDP2 shards further.
    4. BatchNorm layers, whose class FSDP2 extends. `statistics_group`: the ranks they are synchronized over, if any.
    5. Recomputation, inside of FSDP2's hooks: a block is then computed again from the inputs these have cast.
    6. Compilation around it, so that a graph has its recomputation inside; under tensor parallelism, where it cannot,
       the other way round. It, too, is inside of FSDP2's hooks, which cannot be in a graph.
    7. FSDP2 last, around everything: it shards the parameters that are there then. `offloads`: they stay on the host.
    """
    cast_storage(model, plan)
    convert_to_float8(model, plan, float8)
    if mesh.tensor is not None:
        assert styles is not None, "check_tensor_plan comes first"
        apply_tensor_parallel(model, styles, mesh.tensor, parallelism)
    prepare_batch_norms(model, batchnorm, mesh.layout.num_microbatches, statistics_group)
    if checkpoints_compiled(recomputation, mesh.layout.tensor):
        compile_pieces(model, plan, compilation, recomputation)
        checkpoint_activations(model, plan.recomputed, recomputation)
    else:
        checkpoint_activations(model, plan.recomputed, recomputation)
        compile_pieces(model, plan, compilation, recomputation)
    apply_fsdp(model, plan, mesh.fsdp, offloads)
    if not CAN_SHARE_UNITS:
        cast_in_recomputation(model, plan, plan.recomputed)
