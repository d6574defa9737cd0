"""Muon (K. Jordan, 2024; arXiv:2502.16982) for sharded matrices. In each step, one rank gathers each full matrix.

The stacked parameters of experts have three axes: the first counts the experts. Each of their matrices is updated by
the rank that holds it, without communication.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from titan_launch.config.optimizers import matrices_at_once
from titan_launch.config.sections.training import MuonConfig, OptimizerConfig
from titan_launch.optim.matrix_gather import MatrixGather
from titan_launch.optim.shards import LocalShard, ShardGroup, masters, moments, store

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic polynomial. Its slope at 0 is large, so small singular values grow fast."""

_EPS = 1e-7


class Matrix(NamedTuple):
    """A matrix that Muon updates, with the settings of its group."""

    shard: LocalShard
    lr: float
    weight_decay: float


def update_muon(groups: Sequence[ShardGroup], config: OptimizerConfig, applied: Tensor) -> None:
    """Update all groups. Collective over the ranks that share the matrices, in the same order on all ranks.

    `applied`: scalar on the device, 1, or 0 for a skipped step. The gradients of a skipped step must be 0. The host
    does not wait for the device.
    """
    matrices = [Matrix(shard, group.lr, group.weight_decay) for group in groups for shard in group.shards]
    for stack in (matrix for matrix in matrices if matrix.shard.full.ndim == 3):
        _update_stack(stack, config.muon, applied)
    for division, batch in _batches([matrix for matrix in matrices if matrix.shard.full.ndim == 2]):
        _update(division, batch, config.muon, applied)


def _update_stack(stack: Matrix, config: MuonConfig, applied: Tensor) -> None:
    """Update the matrices of this rank's experts. `check_stacks` ensures that this rank holds whole matrices."""
    directions = _direction(stack.shard, config, applied)
    device = stack.shard.full.device_mesh.device_type if isinstance(stack.shard.full, DTensor) else directions.device
    for matrices in directions.split(matrices_at_once(directions.shape)):  # a launch of a kernel for many experts
        matrices.copy_(orthogonalized(matrices.to(device), config.ns_steps).mul_(applied))
    _apply(stack, directions, config, applied)


def _update(division: MatrixGather, batch: Sequence[Matrix], config: MuonConfig, applied: Tensor) -> None:
    shapes = [matrix.shard.full.shape for matrix in batch]
    full = division.gather([_direction(matrix.shard, config, applied) for matrix in batch], shapes)
    if full is not None:
        full = orthogonalized(full, config.ns_steps).mul_(applied)
    updates = division.scatter(full, shapes)
    del full
    for matrix, update in zip(batch, updates, strict=True):
        _apply(matrix, update, config, applied)


def orthogonalized(matrices: Tensor, steps: int) -> Tensor:
    """Return a matrix (rows, columns), or each of a stack (matrices, rows, columns), with singular values close to 1,
    in bfloat16, by `steps` Newton-Schulz iterations.

    First each matrix is divided by its Frobenius norm. Each iteration applies a quintic polynomial, computed from the
    smaller of the two products of the matrix with its transpose. `matrices` may be overwritten.
    """
    a, b, c = _COEFFICIENTS
    x = matrices.bfloat16()
    is_tall = x.shape[-2] > x.shape[-1]
    x = x.mT if is_tall else x
    x.div_(x.norm(dim=(-2, -1), keepdim=True).clamp(min=_EPS))
    result, gram = torch.empty_like(x), x.new_empty(*x.shape[:-1], x.shape[-2])
    polynomial = torch.empty_like(gram)
    add_product = torch.addmm if x.ndim == 2 else torch.baddbmm
    for _ in range(steps):  # the results use the same four buffers
        torch.matmul(x, x.mT, out=gram)
        add_product(gram, gram, gram, beta=b, alpha=c, out=polynomial)
        add_product(x, polynomial, x, beta=a, out=result)
        x, result = result, x
    return x.mT if is_tall else x


def scale_of_update(config: MuonConfig, rows: int, columns: int) -> float:
    """Return the factor on the learning rate of a matrix (see `optimizer.muon.adjust_lr_fn`)."""
    if config.adjust_lr_fn == "original":
        return math.sqrt(max(1.0, rows / columns))
    return 0.2 * math.sqrt(max(rows, columns))


def _batches(matrices: Sequence[Matrix]) -> Iterator[tuple[MatrixGather, list[Matrix]]]:
    """Yield batches of matrices with equal sharding, with at most one matrix per rank.

    Matrices are sorted by size, because ranks wait for the largest matrix of a batch.
    """
    divided_alike: dict[MatrixGather, list[Matrix]] = {}
    for matrix in sorted(matrices, key=lambda matrix: matrix.shard.full.numel(), reverse=True):
        divided_alike.setdefault(matrix.shard.gather, []).append(matrix)
    for division, group in divided_alike.items():
        for start in range(0, len(group), division.size):
            yield division, group[start : start + division.size]


def _direction(shard: LocalShard, config: MuonConfig, applied: Tensor) -> Tensor:
    """Update the momentum in the state with this step's gradient. Return the update's direction, in bfloat16."""
    shard.state["step"].add_(applied)
    gradient, (momentum,) = shard.gradient.float(), moments([shard], "momentum_buffer")
    momentum.lerp_(gradient, ((1 - config.momentum) * applied).float())
    direction = gradient.lerp(momentum, config.momentum) if config.nesterov else momentum
    direction = direction.to(torch.bfloat16, copy=True)
    store([shard], "momentum_buffer", [momentum])
    return direction


def _apply(matrix: Matrix, update: Tensor, config: MuonConfig, applied: Tensor) -> None:
    shard = matrix.shard
    rows, columns = shard.full.shape[-2:]
    (parameter,) = masters([shard])
    parameter.mul_(1 - matrix.lr * matrix.weight_decay * applied)
    parameter.add_(update.to(parameter.device), alpha=-matrix.lr * scale_of_update(config, rows, columns))
    store([shard], "parameter", [parameter])
