"""The part of a tensor that a rank has under FSDP2 and tensor parallelism."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from titan_launch.checkpoint.snapshot import shards_of
from titan_launch.distributed.dtensor import chunk_sizes, local_tensor, own_part
from titan_launch.trace.fake_group import fake_process_group

SHARDS, TENSOR = 3, 2


@pytest.mark.parametrize("style", [None, ColwiseParallel(), RowwiseParallel()], ids=["FSDP2", "colwise", "rowwise"])
@pytest.mark.parametrize("rows", [12, 10, 7, 4], ids=["even", "uneven", "uneven twice", "fewer than ranks"])
def test_the_parts_of_all_ranks_cover_the_tensor(style: ParallelStyle | None, rows: int) -> None:
    """Compare the computed part of every parameter with the local tensor of every rank. The parts of all ranks hold
    every element, once in each replica. A checkpoint writes each part at the same offsets."""
    seen: dict[str, list[float]] = {"weight": [], "bias": []}
    for rank in range(SHARDS * TENSOR):
        with fake_process_group(SHARDS * TENSOR, rank):
            for name, parameter in divided(rows, style):
                part = own_part(numbered(parameter.shape), parameter)
                assert torch.equal(part, local_tensor(parameter))
                (shard,) = shards_of({name: parameter}).values()
                assert not part.numel() or numbered(parameter.shape)[shard.offsets] == part.flatten()[0]
                seen[name] += part.flatten().tolist()
    for name, size in (("weight", rows * 8), ("bias", rows)):
        replicas = TENSOR if style is None or (name == "bias" and isinstance(style, RowwiseParallel)) else 1
        assert sorted(seen[name]) == sorted([*range(size)] * replicas)


def divided(rows: int, style: ParallelStyle | None) -> Iterator[tuple[str, DTensor]]:
    """Return the parameters of a linear layer, filled with consecutive numbers, as this rank has them."""
    mesh = init_device_mesh("cpu", (SHARDS, TENSOR), mesh_dim_names=("dp_shard", "tp"))
    model = nn.Sequential(nn.Linear(8, rows)).requires_grad_(False)
    for parameter in model.parameters():
        parameter.copy_(numbered(parameter.shape))
    if style is not None:
        parallelize_module(model, mesh["tp"], {"0": style}, src_data_rank=None)
    fully_shard(model, mesh=mesh["dp_shard"])
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        yield name.removeprefix("0."), parameter


def numbered(shape: torch.Size) -> Tensor:
    """Return a tensor with a different number in every element."""
    return torch.arange(float(shape.numel())).view(shape)


@pytest.mark.parametrize(("length", "ranks"), [(12, 3), (10, 4), (2, 4), (0, 2)])
def test_chunk_sizes_are_those_of_pytorchs_chunk(length: int, ranks: int) -> None:
    chunks = [len(chunk) for chunk in torch.arange(length).chunk(ranks)]
    assert chunk_sizes(length, ranks) == [*chunks, *[0] * (ranks - len(chunks))]
