"""Expert parallelism (arXiv:2006.16668): each rank holds some experts of a layer, and a token is sent to its experts.

    rows of a rank, sorted by expert -> all-to-all -> rows of the rank's experts from all ranks -> sorted by expert
        -> experts -> back to the order of arrival -> all-to-all -> results, in the order in which the rows were sent

A row is the hidden vector of a token for one of the experts that the token chooses.

The parameters of experts become DTensors. On the expert axis of the mesh each rank holds whole experts. On the tensor
axis each rank holds a part of every expert's width, so its results are partial sums. FSDP2 then shards each rank's
part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard

from titan_launch.config.axes import EXPERT, TENSOR
from titan_launch.distributed.mesh import Mesh
from titan_launch.models.decoder.mixture_of_experts import Experts, Permuted, inverse_of
from titan_launch.models.lora import LoRA
from titan_launch.parallel.tensor_parallel import divide_adapter, divide_locally

_WIDTH_DIM = {"w1": 1, "w3": 1, "b1": 1, "b3": 1, "w2": 2}
"""For each parameter of experts, the dim along which tensor parallelism divides it. `b2` is replicated."""


def divide_experts(model: nn.Module, mesh: Mesh) -> None:
    """Divide the parameters of all `Experts` modules, and of their adapters, over the ranks of the axes `EXPERT` and
    `TENSOR`, in place.

    With expert parallelism, these modules also exchange their tokens by a `Dispatch`. Without expert and tensor
    parallelism, nothing changes. `model`: on the meta device. Nothing is allocated or communicated.
    """
    ranks, among_experts = mesh.along(EXPERT, TENSOR), mesh.along(EXPERT)
    if ranks is None:
        return
    for module in model.modules():
        if isinstance(module, Experts):
            divide_locally(
                module, ranks, {name: _placements(_WIDTH_DIM.get(name), ranks) for name in module._parameters}
            )
            for name, adapter in (module.lora or {}).items():
                assert isinstance(adapter, LoRA)
                along = {"a": 2} if name == "w2" else {"b": 1}
                divide_adapter(adapter, ranks, {matrix: _placements(along.get(matrix), ranks) for matrix in "ab"})
            if among_experts is not None:
                module.dispatch = Dispatch(among_experts)


def _placements(width_dim: int | None, ranks: DeviceMesh) -> list[Placement]:
    """Return the placements of a parameter of experts. `width_dim`: the dim along which tensor parallelism divides the
    parameter; None if it is replicated."""
    width: Placement = Replicate() if width_dim is None else Shard(width_dim)
    return [Shard(0) if axis == EXPERT.short else width for axis in ranks.mesh_dim_names or ()]


class Dispatch:
    """The exchange of tokens between the ranks that divide the experts of a layer.

    A forward has three all-to-alls: numbers of rows, rows, and results. A backward has two. The host waits for the
    device once in a forward, because it must know the numbers of rows. The host waits once more if the experts are
    computed one after another (see `plan.experts.is_grouped`).
    """

    def __init__(self, mesh: DeviceMesh):
        """`mesh`: the expert axis."""
        self._ranks = mesh.size()
        self._group = mesh.get_group().group_name

    def __call__(self, compute: Callable[[Tensor, Tensor], Tensor], rows: Tensor, counts: Tensor) -> Tensor:
        """Return the results for rows that are sorted by expert, in the shape and order of `rows`. Collective.

        `rows`: (rows, dim). `counts`: number of rows of each expert of the layer, of shape (experts).
        `compute(rows, counts)` returns the results for rows that are sorted by the experts of this rank.
        """
        there = exchanged_counts(counts, self._ranks, self._group)
        sent, received = split_sizes(counts, there, len(rows))
        rows = _Exchanged.apply(rows, received, sent, self._group)
        order = order_by_expert(there, len(rows))
        places = inverse_of(order)
        rows = Permuted.apply(rows, order, places)
        rows = compute(rows, there.sum(0))
        rows = Permuted.apply(rows, places, order)
        return _Exchanged.apply(rows, sent, received, self._group)


def exchanged_counts(counts: Tensor, ranks: int, group: str) -> Tensor:
    """Return the number of rows that each rank sends to each expert of this rank. Collective.

    The result is int64 (ranks, experts of a rank). `counts`: number of rows that this rank sends to each expert of the
    layer, of shape (experts).
    """
    even = [len(counts) // ranks] * ranks
    return _all_to_all(counts, even, even, group).view(ranks, -1)


def split_sizes(counts: Tensor, there: Tensor, num_rows: int) -> tuple[list[int], list[int]]:
    """Return the numbers of rows that this rank sends to each rank and receives from each rank. The host waits for the
    device.

    `counts`: number of rows that this rank sends to each expert. `there`: result of `exchanged_counts`. `num_rows`:
    number of rows that this rank sends to all experts. Only the function that replaces `split_sizes` in a trace uses
    `num_rows`.
    """
    sent, received = torch.stack([counts.view_as(there).sum(1), there.sum(1)]).tolist()
    return sent, received


def order_by_expert(there: Tensor, num_rows: int) -> Tensor:
    """Return the indices that sort received rows by expert: int64 (rows). Rows of one expert are sorted by the rank
    that sent them, and rows of one rank keep their order.

    `there`: result of `exchanged_counts`. `num_rows`: sum of `there` as a Python number, so that the host does not wait
    for the device.
    """
    experts = torch.arange(there.numel(), device=there.device) % there.shape[1]
    return experts.repeat_interleave(there.flatten(), output_size=num_rows).argsort(stable=True)


class _Exchanged(torch.autograd.Function):
    """An all-to-all of rows. The backward sends the gradients of the received rows back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, received: Sequence[int], sent: Sequence[int], group: str) -> Tensor:
        ctx.sizes = sent, received, group
        return _all_to_all(rows, received, sent, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return _all_to_all(gradients[0], *ctx.sizes), None, None, None


def _all_to_all(rows: Tensor, received: Sequence[int], sent: Sequence[int], group: str) -> Tensor:
    """Send `sent[i]` rows to the i-th rank, and return `received[i]` rows from it, in the order of ranks.

    The collective is functional, so that selective activation checkpointing can save its result.
    """
    functional = torch.ops._c10d_functional
    exchanged: Tensor = functional.all_to_all_single(rows.contiguous(), received, sent, group)
    waited: Tensor = functional.wait_tensor(exchanged)
    return waited
