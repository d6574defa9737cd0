"""PyTorch's schedules (torch.distributed.pipelining) over stages that FSDP2 has wrapped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

from titan_launch.accumulation.strategies import AccumulationStrategy
from titan_launch.config.pipeline_rules import SPLIT_BACKWARD_SCHEDULES
from titan_launch.parallel.pipeline import LocalStage, Pipeline
from titan_launch.torch_private import ForwardOrder, accumulate_in_reduce_dtype, give_forward_order, take_forward_order


def build_schedule(
    name: str,
    num_microbatches: int,
    pipeline: Pipeline,
    inputs: Tensor,
    accumulation: AccumulationStrategy,
    device: torch.device,
    loss: Callable[[Tensor, Tensor], Tensor],
) -> Any:
    """PyTorch's schedule of that name for steps of so many microbatches, through this rank's stages; it scales nothing.

    `inputs`: of a microbatch. `loss`: (outputs, targets) of one to its part of the step's loss.
    """
    boundaries = pipeline.boundaries.of(inputs)
    stages = [
        ScheduledStage(
            local,
            len(pipeline.plan.stages),
            boundaries[local.stage.index : local.stage.index + 2],
            accumulation,
            pipeline,
            device,
            splits_backward=name in SPLIT_BACKWARD_SCHEDULES,
        )
        for local in pipeline.local
    ]
    kind = get_schedule_class(name)
    what: Any = stages[0] if issubclass(kind, PipelineScheduleSingle) else stages
    return kind(what, num_microbatches, loss_fn=loss, scale_grads=False)


class ScheduledStage(PipelineStage):
    """PyTorch's stage, with FSDP2 working as it does without a pipeline."""

    def __init__(
        self,
        local: LocalStage,
        num_stages: int,
        boundaries: tuple[Tensor, ...],
        accumulation: AccumulationStrategy,
        pipeline: Pipeline,
        device: torch.device,
        splits_backward: bool,
    ):
        index = local.stage.index
        taken, given = (_with_gradient(tensor) for tensor in boundaries)
        super().__init__(
            _Hidden(local.module), index, num_stages, device, input_args=taken, output_args=given, group=pipeline.group
        )
        self._root = local.module
        self._fsdp_root = cast(Any, local.module)  # with the methods of the newest release
        self._accumulation = accumulation
        self._splits_backward = splits_backward
        self._orders: dict[int, ForwardOrder] = {}
        if splits_backward and hasattr(FSDPModule, "finalize_backward"):
            self._fsdp_root.set_manual_backward_finalization(True)

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        self._orders[fwd_chunk_id] = take_forward_order(self._root)
        return output

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        give_forward_order(self._root, self._orders.pop(bwd_chunk_id))
        self._accumulation.begin_microbatch(self._root, is_last=last_backward and not self._splits_backward)
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
        accumulate_in_reduce_dtype(self._root)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Reduce gradients and free parameters, where weights have a backward of their own.

        `finalize_backward` is public from torch 2.15 on; the other branch can go with torch 2.14.
        """
        if not self._splits_backward:
            return
        if hasattr(FSDPModule, "finalize_backward"):
            self._fsdp_root.set_requires_gradient_sync(True)
            self._fsdp_root.set_reshard_after_backward(True)
            self._fsdp_root.finalize_backward()
        else:
            hidden, self.submod = self.submod, self._root
            try:
                super().perform_reduce_grad(grad_scale_factor)
            finally:
                self.submod = hidden

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """First messages, with which torch before 2.13 connects the ranks: not with this one, which holds two stages in
        a row (ZBV). Gloo has no connection to itself."""
        return [op for op in super()._get_init_p2p_neighbors_ops() if op.group_peer != self.group_rank]


class _Hidden(nn.Module):
    """A wrapped module around which the schedule does not see FSDP2. It would take over what FSDP2 does: gather a
    whole stage at once, keep it until the step's end, and reduce gradients there, in every mode of accumulation."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self, *args: Any) -> Any:
        return self.module(*args).contiguous()  # what is sent must be


def _with_gradient(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_() if tensor.is_floating_point() else tensor
