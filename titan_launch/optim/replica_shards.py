"""An optimizer that is sharded over the replicas of a model (HSDP): each replica updates a chunk of every local shard.

    gradients of this replica's samples -> reduce-scatter -> gradients of all samples, of this replica's chunks
    -> clipping and update of the chunks -> all-gather -> parameters

FSDP2 uses only the ranks of one replica. The exchange between replicas uses public collectives, once per step and
unit. The reduce-scatter of a unit starts during the step's last backward, as soon as FSDP2 has reduced the unit's
gradients. With CPU offload, the reduce-scatter starts after backward. Optimizer state exists for the chunks only. A
chunk is a box (a range of indices along each dim) of the whole tensor. So a checkpoint depends neither on the number of
replicas nor on the sharding of the optimizer over them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titan_launch.config.axes import REPLICATE
from titan_launch.distributed.collectives import all_gather_single, reduce_scatter_single
from titan_launch.distributed.dtensor import Shard, local_tensor, own_box
from titan_launch.distributed.mesh import Mesh
from titan_launch.distributed.torch_private import ALL_GATHER, REDUCE_SCATTER, CollectiveCallback
from titan_launch.plan.replica_shards import chunk_numel
from titan_launch.plan.types import ModelPlan, Unit


class ReplicaChunk(NamedTuple):
    """The part of a parameter's local shard that a replica updates: consecutive elements that form a box."""

    start: int
    """Index of the chunk's first element in the flat shard."""

    stop: int
    offsets: tuple[int, ...]
    """Offset of the box in the shard, by dim."""

    shape: tuple[int, ...]

    def of(self, shard: Tensor) -> Tensor:
        """Return a view of the chunk. `shard`: the local shard of the parameter or of its gradient."""
        return shard.view(-1)[self.start : self.stop].view(self.shape)


@cache
def chunk_of(shape: torch.Size, replicas: int, index: int) -> ReplicaChunk:
    """Return the chunk of replica `index`. `shape`: shape of the local shard, which is the same in all replicas."""
    size, numel = chunk_numel(shape, replicas), shape.numel()
    start, stop = min(index * size, numel), min((index + 1) * size, numel)
    row = numel // shape[0] if numel else 1
    if size % row == 0:
        return ReplicaChunk(start, stop, (start // row, *[0] * (len(shape) - 1)), ((stop - start) // row, *shape[1:]))
    _, rows, columns = shape  # a stack of matrices; the chunk is within one matrix
    matrix, offset = divmod(start // columns, rows)
    return ReplicaChunk(start, stop, (matrix, offset, 0), (1, (stop - start) // columns, columns))


class _Place(NamedTuple):
    """The position of a parameter's chunks in the buffers of its unit.

    A buffer has a row for each replica. A row has that replica's chunks of all parameters, one after another. The
    chunks of the last replicas may be smaller, or empty; the elements behind them are not used.
    """

    parameter: nn.Parameter
    start: int
    """Index of the first element of the parameter's chunk in a row."""

    size: int
    """Number of elements of the first replica's chunk, which is the largest chunk."""

    def pairs(self, buffer: Tensor, shard: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield pairs of views with equal shapes: (view of `buffer`, view of `shard`). `buffer`: (replicas, row). The
        first pair is for all chunks of full size. A second pair is for a smaller chunk, if there is one."""
        flat = shard.view(-1)
        if not len(flat):
            return
        full, rest = divmod(len(flat), self.size)
        yield buffer[:full, self.start : self.start + self.size], flat[: full * self.size].view(full, self.size)
        if rest:
            yield buffer[full, self.start : self.start + rest], flat[full * self.size :]


@dataclass(eq=False)
class _ExchangedUnit:
    """The trained parameters of an FSDP2 unit, which are exchanged together, and the state of their exchange."""

    places: list[_Place]
    width: int
    """Number of elements of a row of the buffers."""

    reduce_dtype: torch.dtype
    seen: set[nn.Parameter] = field(default_factory=set)
    """Parameters whose gradients FSDP2 has reduced in the last backward, and whose reduce-scatter over the replicas has
    not started."""

    left: list[_Place] = field(default_factory=list)
    """Parameters for whose gradients the reduce-scatter over the replicas has started."""

    row: Tensor | None = None
    """This replica's chunks of all gradients whose reduce-scatter is done, summed over the replicas, in the storage
    dtype. None before the first reduce-scatter is done."""


class _Exchange(NamedTuple):
    """A reduce-scatter between the replicas that has started. Its tensors live until `work` is done."""

    unit: _ExchangedUnit
    work: dist.Work
    received: Tensor
    sent: Tensor


class ReplicaShards:
    """The chunks of this rank, and the exchange of gradients and parameters between the replicas.

    A step calls `begin_microbatch` before each microbatch (in a pipeline, before each backward), `reduce_gradients`
    after its last backward, and `gather_parameters` after the update. The last two methods are collective over the
    replicas. With `leave_early`, the last backward is collective, too. All replicas must compute gradients of the same
    parameters, in the same order, as FSDP2 demands of all ranks.
    """

    def __init__(self, model: nn.Module, plan: ModelPlan, mesh: Mesh, leave_early: bool):
        """`model`: a model that FSDP2 has wrapped. `plan`: the plan of the whole model. `mesh`: a mesh with replicas.
        `leave_early`: True if the exchange of gradients starts during the last backward
        (`plan.replica_shards.gradients_leave_early`)."""
        replicas = mesh.along(REPLICATE)
        assert replicas is not None, "a sharded optimizer has replicas"
        self.replicas = replicas.size()
        self.group = replicas.get_group()
        """Process group of the ranks that have the same local shards, one rank of each replica."""

        self.ranks_of_matrices = mesh.data_group or dist.group.WORLD
        """The ranks of all replicas that share the parameters, in the order (replica, shard)."""

        self._index = replicas.get_local_rank()
        self._device = torch.device(mesh.ranks.device_type)
        units = [self._exchanged(unit, parameters) for unit, parameters in trained_by_unit(model, plan).items()]
        # The largest first, as in `plan.memory.ledger.book_update`. This rank's shards of small units may be empty.
        units = [unit for unit in units if unit.width]
        self._units = sorted(units, key=lambda unit: unit.width * unit.reduce_dtype.itemsize, reverse=True)
        self._watchers: list[CollectiveCallback] = []
        self._is_last = False
        self._started: _Exchange | None = None
        for unit in self._units if leave_early else ():
            for place in unit.places:
                place.parameter.register_post_accumulate_grad_hook(partial(self._reduced, unit))

    def _exchanged(self, unit: Unit, parameters: list[nn.Parameter]) -> _ExchangedUnit:
        places, width = [], 0
        for parameter in parameters:
            size = chunk_numel(local_tensor(parameter).shape, self.replicas)
            places.append(_Place(parameter, width, size))
            width += size
        return _ExchangedUnit(places, width, getattr(torch, unit.reduce_dtype))

    def chunk(self, parameter: Tensor) -> ReplicaChunk:
        """Return this replica's chunk of a parameter."""
        return chunk_of(local_tensor(parameter).shape, self.replicas, self._index)

    def of(self, parameter: Tensor, tensor: Tensor) -> Tensor:
        """Return this replica's chunk of a tensor that is sharded like `parameter`, as a plain tensor: a view. `tensor`
        may also be a gradient that `reduce_gradients` has reduced to the chunk."""
        local, chunk = local_tensor(tensor), self.chunk(parameter)
        return local if tuple(local.shape) == chunk.shape else chunk.of(local)

    def shard_of(self, parameter: Tensor, chunk: Tensor, size: tuple[int, ...]) -> Shard:
        """Return a chunk with its offsets in a whole tensor of shape `size` that is sharded like `parameter`."""
        assert isinstance(parameter, DTensor), "FSDP2 shards all trained parameters"
        offsets, _ = own_box(size, parameter)
        within = self.chunk(parameter).offsets[: len(size)]  # scales of a convolution have fewer axes than the weight
        return Shard(chunk, tuple(a + b for a, b in zip(offsets, within, strict=True)), size)

    def begin_microbatch(self, is_last: bool) -> None:
        """Prepare for the next backward. `is_last`: True if no later backward of the step adds to the same gradients.
        With `leave_early`, the reduce-scatters of these gradients then start during the backward."""
        self._is_last = is_last

    @torch.no_grad()
    def _reduced(self, unit: _ExchangedUnit, parameter: Tensor) -> None:
        """Start the exchange of a unit when FSDP2 has reduced all gradients of the unit.

        FSDP2 calls this hook in the CUDA stream of its reduction, and later makes the compute stream wait for that
        stream. Tensors are made, read and freed in the order of that stream, like FSDP2's own gradients.
        """
        if not self._is_last:
            return
        assert isinstance(parameter, nn.Parameter), "FSDP2 calls the hook with the sharded parameter"
        unit.seen.add(parameter)
        # FSDP2 reduces the gradients of a unit in the order of its parameters, so the last parameter is checked first.
        if all(p in unit.seen or not p.requires_grad for p, *_ in reversed(unit.places)):
            self.start(unit)

    @torch.no_grad()
    def reduce_gradients(self) -> None:
        """Sum all gradients over the replicas: start each reduce-scatter that the last backward has not started, and
        wait for all reduce-scatters.

        Every gradient is then a DTensor with the shape of the parameter. Its local tensor is only this replica's chunk.
        """
        for unit in self._units:
            self.start(unit)
        self._finish()
        for unit in self._units:
            for place in unit.left:
                assert unit.row is not None
                place.parameter.grad = self._gradient_of_chunk(place, unit.row)
        self.discard()

    def discard(self) -> None:
        """Drop all gradients whose reduce-scatter has started. Backward starts no other reduce-scatter before the next
        call of `begin_microbatch`. This method is not collective."""
        self._is_last, self._started = False, None
        for unit in self._units:
            unit.seen.clear()
            unit.left.clear()
            unit.row = None

    def start(self, unit: _ExchangedUnit) -> None:
        """Start the reduce-scatter of the gradients that a unit has now. Wait for the previous reduce-scatter first, so
        that only one unit has buffers at a time."""
        # FSDP2 demands that all ranks have gradients of the same parameters.
        places = [place for place in unit.places if place.parameter.grad is not None]
        unit.seen.clear()
        if not places:  # all parameters are still frozen (`training.unfreeze`), or all exchanges have started
            return
        self._finish()
        sent = torch.zeros(self.replicas, unit.width, dtype=unit.reduce_dtype, device=self._device)
        _copy_gradients(places, sent)
        for place in places:
            place.parameter.grad = None  # all gradients of the unit are views of one tensor, which this frees
        received = torch.empty(unit.width, dtype=unit.reduce_dtype, device=self._device)
        self._report(REDUCE_SCATTER, received, sent)
        work = reduce_scatter_single(received, sent.view(-1), group=self.group, async_op=True)
        unit.left += places
        self._started = _Exchange(unit, work, received, sent)

    def _finish(self) -> None:
        """Wait for the reduce-scatter that has started, if any, and add its result to `unit.row`. On CUDA the stream
        waits instead of the host."""
        if self._started is None:
            return
        self._started.work.wait()
        unit, received = self._started.unit, self._started.received
        self._started = None  # frees the buffer that was sent, before the cast
        # FSDP2 reduces the gradients of a unit twice if the unit ran twice in the forward.
        row = self.stored(received, unit)
        unit.row = row if unit.row is None else unit.row.add_(row)

    def stored(self, received: Tensor, unit: _ExchangedUnit) -> Tensor:
        """Return received gradients in the storage dtype, on the device of the sharded parameters."""
        stored = local_tensor(unit.places[0].parameter)
        return received.to(stored.device, stored.dtype)

    def _gradient_of_chunk(self, place: _Place, row: Tensor) -> Tensor:
        parameter, chunk = place.parameter, self.chunk(place.parameter)
        assert isinstance(parameter, DTensor), "FSDP2 shards all trained parameters"
        return DTensor.from_local(
            row[place.start : place.start + chunk.stop - chunk.start].view(chunk.shape),
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )

    @torch.no_grad()
    def gather_parameters(self) -> None:
        """All-gather the updated chunks, so that every replica has the new values of all its shards."""
        for unit in self._units:
            self._gather(unit)

    def _gather(self, unit: _ExchangedUnit) -> None:
        dtype = local_tensor(unit.places[0].parameter).dtype
        rows = torch.empty(self.replicas, unit.width, dtype=dtype, device=self._device)
        own = rows[self._index]
        for place in unit.places:
            values = self.of(place.parameter, place.parameter).view(-1)
            own[place.start : place.start + len(values)].copy_(values)
        self._report(ALL_GATHER, rows, own)
        all_gather_single(rows.view(-1), own, group=self.group)
        for place in unit.places:
            for received, flat in place.pairs(rows, local_tensor(place.parameter)):
                flat.copy_(received)

    @contextmanager
    def watched(self, on_collective: CollectiveCallback) -> Iterator[None]:
        """Call `on_collective` before every collective of the exchange until the end of the block."""
        self._watchers.append(on_collective)
        try:
            yield
        finally:
            self._watchers.remove(on_collective)

    def _report(self, kind: str, output: Tensor, sent: Tensor) -> None:
        for watcher in self._watchers:
            watcher(kind, output, sent)


def trained_by_unit(model: nn.Module, plan: ModelPlan) -> Mapping[Unit, list[nn.Parameter]]:
    """Return the trained parameters of each FSDP2 unit, in the order of `model.named_modules()`. A shared parameter is
    listed once. `model`: the whole model, or the stages of a rank. `plan`: the plan of the whole model."""
    found: dict[Unit, list[nn.Parameter]] = {}
    seen: set[nn.Parameter] = set()
    for path, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            if parameter.requires_grad and parameter not in seen:
                seen.add(parameter)
                found.setdefault(plan.sharded_by[path], []).append(parameter)
    return found


def _copy_gradients(places: list[_Place], buffer: Tensor) -> None:
    # A function, because its variables are views of the gradients, and would keep them alive in the caller.
    for place in places:
        assert place.parameter.grad is not None
        for rows, flat in place.pairs(buffer, local_tensor(place.parameter.grad)):
            rows.copy_(flat)
