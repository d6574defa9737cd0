"""Muon (K. Jordan, 2024; arXiv:2502.16982) for sharded matrices. Each matrix is gathered on one rank, which computes
its update. With tensor parallelism, each matrix is gathered on all ranks of one tensor-parallel group, which compute
the same update.

A rank computes the updates of several matrices of equal shape together. The stacked parameters of experts have three
axes, of which the first counts the experts. Each rank updates the matrices of its own experts, without communication.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from titan_launch.config.optimizers import alike, matrices_at_once, matrix_batches, muon_parts
from titan_launch.config.sections.training import MuonConfig, OptimizerConfig
from titan_launch.optim.flat import divided
from titan_launch.optim.matrix_gather import MatrixGather
from titan_launch.optim.shards import LocalShard, ShardGroup, count_step, in_float32, masters, moments, store

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of the polynomial in `orthogonalized`. Its slope at 0 is large, so small singular values grow fast."""


class Matrix(NamedTuple):
    """A matrix, or a stack of matrices, that Muon updates, with the settings of its group."""

    shard: LocalShard
    lr: float
    weight_decay: float


def update_muon(groups: Sequence[ShardGroup], config: OptimizerConfig, applied: Tensor) -> None:
    """Update all groups. Collective over the ranks that share the matrices. `groups` must have the same order on all
    ranks. `applied`: a scalar on the device that is 1, or 0 for a skipped step, whose gradients must be 0. The host
    does not wait for the device, except with CPU offload."""
    for group in groups:
        count_step(group.shards, applied)
    matrices = [Matrix(shard, group.lr, group.weight_decay) for group in groups for shard in group.shards]
    experts = [matrix for matrix in matrices if matrix.shard.full.ndim == 3]
    for same in alike(experts, lambda matrix: matrix.shard.full.shape[1:]):
        for part in _parts(same):
            _update_experts(part, config.muon, applied)
    others = [matrix for matrix in matrices if matrix.shard.full.ndim == 2]
    for same in alike(others, lambda matrix: matrix.shard.gather):
        division = same[0].shard.gather
        for batch in matrix_batches(same, lambda matrix: matrix.shard.full.shape, division.size):
            _update(division, batch, config.muon, applied)


def _update_experts(experts: Sequence[Matrix], config: MuonConfig, applied: Tensor) -> None:
    """Update the matrices of this rank's experts. `check_stacks` ensures that this rank holds whole matrices."""
    parts = _directions(experts, config, applied)
    full = experts[0].shard.full
    device = full.device_mesh.device_type if isinstance(full, DTensor) else full.device
    directions = parts.view(-1, *full.shape[1:])
    for matrices in directions.split(matrices_at_once(directions.shape)):
        matrices.copy_(orthogonalized(matrices.to(device), config.ns_steps).mul_(applied))
    _apply(experts, divided(parts, [matrix.shard.gradient.shape for matrix in experts]), config, applied)


def _update(division: MatrixGather, batch: Sequence[Sequence[Matrix]], config: MuonConfig, applied: Tensor) -> None:
    """Update the matrices of a batch. `batch`: lists of matrices of equal shape (stacks), at most one for each rank of
    `division`. The i-th rank computes the updates of the i-th stack."""
    matrices = [matrix for stack in batch for matrix in stack]
    shapes = [torch.Size((len(stack), *stack[0].shard.full.shape)) for stack in batch]
    full = division.gather(_directions(matrices, config, applied), shapes)
    if full is not None:
        full = orthogonalized(full, config.ns_steps).mul_(applied)
    updates = division.scatter(full, shapes)
    del full
    _apply(matrices, updates, config, applied)


def orthogonalized(matrices: Tensor, steps: int) -> Tensor:
    """Return the matrices in bfloat16, with singular values close to 1, after `steps` Newton-Schulz iterations.
    `matrices` is one matrix (rows, columns), or a stack (matrices, rows, columns).

    First each matrix is divided by its Frobenius norm. Each iteration applies a quintic polynomial to the singular
    values of a matrix X, by the smaller of the products X X^T and X^T X. `matrices` may be overwritten.
    """
    a, b, c = _COEFFICIENTS
    given = matrices.bfloat16()
    is_tall = given.shape[-2] > given.shape[-1]
    x = given.mT if is_tall else given
    x.div_(x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7))
    # All steps use the same four buffers. They are row-major, because otherwise the last bits of the results of a stack
    # would differ from those of a single matrix.
    results = x.new_empty(x.shape), given.reshape(x.shape)
    gram = x.new_empty(*x.shape[:-1], x.shape[-2])
    polynomial = torch.empty_like(gram)
    add_product = torch.addmm if x.ndim == 2 else torch.baddbmm
    for step in range(steps):
        torch.matmul(x, x.mT, out=gram)
        add_product(gram, gram, gram, beta=b, alpha=c, out=polynomial)
        x = add_product(x, polynomial, x, beta=a, out=results[step % 2])
    if is_tall and steps % 2 == 0:  # x is in the memory of `given`, so a copy of x.mT to `matrices` would overlap
        return results[0].view(given.shape).copy_(x.mT)
    return x.mT if is_tall else x


def _parts(matrices: Sequence[Matrix]) -> list[list[Matrix]]:
    return muon_parts(matrices, lambda matrix: matrix.shard.gradient.numel())


def _directions(matrices: Sequence[Matrix], config: MuonConfig, applied: Tensor) -> Tensor:
    """Update the momentum buffers in the state with this step's gradients. Return the directions of the updates in
    bfloat16: a flat tensor of all shards, one after another."""
    shapes = [matrix.shard.gradient.shape for matrix in matrices]
    device = matrices[0].shard.gradient.device
    flat = torch.empty(sum(shape.numel() for shape in shapes), dtype=torch.bfloat16, device=device)
    remaining = iter(divided(flat, shapes))
    for part in _parts(matrices):
        _direct([matrix.shard for matrix in part], [next(remaining) for _ in part], config, applied)
    return flat


def _direct(shards: Sequence[LocalShard], targets: Sequence[Tensor], config: MuonConfig, applied: Tensor) -> None:
    """Update the momentum buffers of some shards, and store the directions of their updates in `targets`."""
    gradients, momenta = in_float32([shard.gradient for shard in shards]), moments(shards, "momentum_buffer")
    torch._foreach_lerp_(momenta, gradients, [((1 - config.momentum) * applied).float()] * len(shards))
    directions = torch._foreach_lerp(gradients, momenta, config.momentum) if config.nesterov else momenta
    torch._foreach_copy_(list(targets), directions)
    del gradients, directions
    store(shards, "momentum_buffer", momenta)


def _apply(matrices: Sequence[Matrix], updates: Sequence[Tensor], config: MuonConfig, applied: Tensor) -> None:
    """Apply weight decay and the updates to the parameters."""
    remaining = iter(updates)
    for part in _parts(matrices):
        parameters = masters([matrix.shard for matrix in part])
        changes = zip(part, parameters, remaining, strict=False)
        for same in alike(changes, lambda change: _factors(change[0], config)):
            decay, factor = _factors(same[0][0], config)
            changed = [parameter for _, parameter, _ in same]
            torch._foreach_mul_(changed, (1 - decay * applied).float())
            torch._foreach_add_(changed, [update.to(changed[0].device) for _, _, update in same], alpha=-factor)
        store([matrix.shard for matrix in part], "parameter", parameters)


def _factors(matrix: Matrix, config: MuonConfig) -> tuple[float, float]:
    """Return (lr * weight decay, lr * scale of the update). The scale depends on `optimizer.muon.adjust_lr_fn`."""
    rows, columns = matrix.shard.full.shape[-2:]
    is_original = config.adjust_lr_fn == "original"
    scale = math.sqrt(max(1.0, rows / columns)) if is_original else 0.2 * math.sqrt(max(rows, columns))
    return matrix.lr * matrix.weight_decay, matrix.lr * scale
