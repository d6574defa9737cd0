"""Balance of the experts' load over a step: the scale of auxiliary losses."""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from titan_launch.models.mixture_of_experts import ContextGroup, MixtureOfExperts
from titan_launch.plan.layout import Layout


def prepare_experts(model: nn.Module, layout: Layout, context: DeviceMesh | None) -> None:
    """Set the scale of the auxiliary losses of all mixtures of experts, in place. Nothing is communicated.

    All ranks and microbatches of a step add up to means over the step's samples. With tensor parallelism, each rank
    computes the whole losses, and the router's gradients are summed over these ranks. With context parallelism, each
    rank computes its tokens' part. `context`: the ranks that divide every sequence; None if there is one.
    """
    for module in model.modules():
        if isinstance(module, MixtureOfExperts):
            module.loss_scale = 1 / (layout.global_batch_size * layout.tensor)
            if context is not None:
                module.context_group = ContextGroup(context.get_group().group_name, context.size())
