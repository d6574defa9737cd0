"""The optimizer's algorithms as data: their settings, their state tensors, and the memory of an update.

An algorithm is an entry of `ALGORITHMS`, and a file in `titan_launch/optim/` that implements its update. This module
does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from operator import attrgetter
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeVar

from titan_launch.config.sections.section import DTYPE_BYTES

if TYPE_CHECKING:
    from titan_launch.config.sections.training import OptimizerConfig

T = TypeVar("T")

BLOCK = 256
"""Number of elements that share a scale in optimizer state of 8 bits (`optimizer.state_dtype = "int8"`)."""


def names_in_8_bits(name: str) -> tuple[str, str]:
    """Return the names under which the codes and the scales of the 8-bit state tensor `name` are stored. Both names
    differ from `name`, so that 8-bit codes in a checkpoint are not read as float values."""
    return f"{name}_codes", f"{name}_scales"


def length_of_row(shape: Sequence[int]) -> int:
    """Return the number of elements in a row of a state tensor: the length of the last axis. Exception: for a kernel of
    a 2D or 3D convolution, whose last axis is short, a row has all weights of an output channel."""
    return _rows(shape)[1]


def shape_of_scales(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of the scales of a state tensor of shape `shape`: one scale for each block of `BLOCK` elements
    in a row."""
    rows, length = _rows(shape)
    return (*rows, -(-length // BLOCK))


def _rows(shape: Sequence[int]) -> tuple[Sequence[int], int]:
    """Return (sizes of the axes that count the rows, elements in a row)."""
    axes = 1 if len(shape) > 3 else len(shape) - 1
    return shape[:axes], prod(shape[axes:])


class ShardSize(NamedTuple):
    """The shard of a trained parameter on one rank."""

    shape: tuple[int, ...]
    """Shape of the whole parameter."""

    num_elements: int
    """Number of elements of the shard."""

    dtype: str
    """Storage dtype."""

    @property
    def size(self) -> int:
        """Bytes of the shard in its storage dtype."""
        return self.num_elements * DTYPE_BYTES[self.dtype]

    @property
    def gradient_copy(self) -> int:
        """Bytes of a float32 copy of the gradient; 0 if the gradient is float32."""
        return 0 if self.dtype == "float32" else 4 * self.num_elements

    def state_dtype(self, config: OptimizerConfig) -> str:
        """Return the dtype of the state tensors: `optimizer.state_dtype`, or else the storage dtype. The state of
        vectors is float32 instead of int8."""
        if config.state_dtype == "int8" and len(self.shape) < 2:
            return "float32"
        return config.state_dtype or self.dtype

    def state_size(self, config: OptimizerConfig) -> int:
        """Return the bytes of a state tensor, including the scales of a tensor in 8 bits."""
        dtype = self.state_dtype(config)
        scales = 4 * self._padded // BLOCK if dtype == "int8" else 0
        return self.num_elements * DTYPE_BYTES[dtype] + scales

    @property
    def _padded(self) -> int:
        """Number of elements of the shard after each row is padded to whole blocks."""
        columns = length_of_row(self.shape)
        return self.num_elements // columns * (-(-columns // BLOCK) * BLOCK)

    def state_copy(self, config: OptimizerConfig) -> int:
        """Return the bytes of a float32 copy of a state tensor; 0 if the state is float32."""
        return 4 * self.num_elements if DTYPE_BYTES[self.state_dtype(config)] < 4 else 0

    def decoding(self, config: OptimizerConfig) -> int:
        """Return the bytes of the temporary tensors while a state tensor in 8 bits is copied to float32, without the
        copy itself: an int32 index for each element, and later a float32 scale. Return 0 for any other dtype."""
        return 4 * self._padded if self.state_dtype(config) == "int8" else 0

    def encoding(self, config: OptimizerConfig) -> int:
        """Return the bytes of the temporary tensors while float32 values are stored in a state tensor. 8 bits: the
        indices of codes, as int32 and then as int8, and a copy of the values if rows do not consist of whole blocks.
        bfloat16: the bytes of `draw`. float32: 0."""
        if self.state_dtype(config) != "int8":
            return self.draw(config) if self.state_copy(config) else 0
        return (5 if self._padded == self.num_elements else 8) * self._padded

    def parameter_copy(self, config: OptimizerConfig) -> int:
        """Return the bytes of a float32 copy of the parameter; 0 if the parameter is float32 or has a master weight."""
        return 0 if has_master(config, self.dtype) else self.gradient_copy

    def draw(self, config: OptimizerConfig) -> int:
        """Return the bytes that stochastic rounding allocates for a shard that is rounded (not float32): a random
        number and an intermediate result per element, both int32. 0 without stochastic rounding."""
        return 8 * self.num_elements if config.rounding == "stochastic" else 0


class GroupSettings(NamedTuple):
    """The settings that all parameters of a group share."""

    algorithm: str
    lr_factor: float
    weight_decay: float


class GroupSizes(NamedTuple):
    """The shards of all parameters with the same settings, on one rank."""

    settings: GroupSettings
    shards: Sequence[ShardSize]


Temporaries = Callable[[Sequence[GroupSizes], "OptimizerConfig", int], int]
"""A function of (groups, config, ranks). It returns the peak memory, in bytes, of the temporary tensors of an update.
`ranks`: number of ranks over which the state of a parameter is sharded, by FSDP2 and over the replicas together."""


@dataclass(frozen=True)
class PyTorchUpdate:
    """PyTorch's implementation of an algorithm. A parameter and its state must have the same dtype. Stochastic rounding
    and master weights are not supported."""

    update: str
    """Import string of the function `update(group, config, found_inf)`, which updates one `ShardGroup`. `found_inf`: a
    tensor that is not 0 for a skipped step; None if no step is skipped."""

    temporaries: Temporaries

    counts_on_host: bool = False
    """True if `foreach` and `for-loop` keep the step counts on the CPU. (`fused` keeps them on the device.)"""


@dataclass(frozen=True)
class Algorithm:
    """An algorithm of the optimizer. Its update computes in float32, and supports moments and parameters of any dtype,
    and master weights."""

    update: str
    """Import string of the function `update(groups, config, applied)`, which updates all `ShardGroup`s of the
    algorithm. `applied` is 1, or 0 for a skipped step, whose gradients are 0 too. (This is an import string, because
    importing the function would import torch.)"""

    state: Callable[[OptimizerConfig], tuple[str, ...]]
    """Returns the names of the state tensors, without the step count and the master weight. Each tensor has the shape
    of the parameter, and the dtype of `ShardSize.state_dtype`."""

    temporaries: Temporaries
    """Peak memory of the temporary tensors of `update`."""

    settings: tuple[str, ...] = ()
    """Keys and tables of `[optimizer]` that this algorithm reads, and that not all algorithms read."""

    weight_decay: float = 0.1
    """Default of `optimizer.weight_decay`."""

    decay: Literal["decoupled", "coupled"] = "decoupled"
    """Kind of weight decay. `decoupled`: separate from the gradient, as in AdamW. `coupled`: added to the gradient.
    `optimizer.weight_decay` applies only to algorithms with the same kind of weight decay as `optimizer.name`."""

    for_others: str | None = None
    """Name of the algorithm for the parameters that this algorithm does not update. (Muon updates only the matrices
    within the model, including the stacked matrices of experts.) None: this algorithm updates all parameters."""

    lr_factor: Callable[[OptimizerConfig], float] = lambda config: 1.0
    """Returns the number by which the learning rate is multiplied for this algorithm."""

    pytorch: PyTorchUpdate | None = None
    """PyTorch's implementation. It is used if it supports the job's dtypes, rounding and master weights. None:
    PyTorch's implementation is not used."""


def has_master(config: OptimizerConfig, *storage_dtypes: str) -> bool:
    """Return True if any parameter of these storage dtypes has a float32 master weight."""
    return config.master_weights and "bfloat16" in storage_dtypes


def batches(shards: Sequence[T], num_elements: Callable[[T], int], limit: int | None = None) -> list[list[T]]:
    """Divide consecutive shards of parameters into batches that are updated together.

    `num_elements`: returns the number of elements of a shard. `limit`: largest number of elements in a batch with
    several shards; by default, the number of elements of the largest shard.
    """
    limit = max(map(num_elements, shards), default=0) if limit is None else limit
    found: list[list[T]] = []
    total = 0
    for shard in shards:
        if not found or total + num_elements(shard) > limit:
            found.append([])
            total = 0
        found[-1].append(shard)
        total += num_elements(shard)
    return found


def _in_batches(of_batch: Callable[[Sequence[ShardSize], OptimizerConfig], int]) -> Temporaries:
    """Return the function for an update in batches (see `batches`). It returns the largest result of `of_batch`, which
    returns the peak memory of one batch in bytes."""

    def temporaries(groups: Sequence[GroupSizes], config: OptimizerConfig, ranks: int) -> int:
        parts = (part for group in groups for part in batches(group.shards, attrgetter("num_elements")))
        return max((of_batch(part, config) for part in parts), default=0)

    return temporaries


def _decoding(shards: Sequence[ShardSize], config: OptimizerConfig) -> int:
    """Return the peak memory in bytes while one state tensor per parameter of a batch (see `batches`) is copied to
    float32, including the copies."""
    copies, peak = 0, 0
    for part in alike(shards, _row_width):
        copies += sum(shard.state_copy(config) for shard in part)
        peak = max(peak, copies + sum(shard.decoding(config) for shard in part))
    return peak


def _encoding(shards: Sequence[ShardSize], config: OptimizerConfig) -> int:
    """Return the peak memory in bytes (see `ShardSize.encoding`) while one state tensor per parameter of a batch is
    stored."""
    key = _row_width if config.state_dtype == "int8" else _inner_axes
    return max(sum(shard.encoding(config) for shard in part) for part in alike(shards, key))


def _draw(shards: Sequence[ShardSize], config: OptimizerConfig) -> int:
    """Return the peak memory in bytes (see `ShardSize.draw`) while tensors of a batch are rounded stochastically."""
    return max(sum(shard.draw(config) for shard in part) for part in alike(shards, _inner_axes))


def _row_width(shard: ShardSize) -> int:
    """Return the length of a shard's rows; 0 if a row consists of whole blocks. Shards with equal results are decoded
    and encoded together."""
    return columns if (columns := length_of_row(shard.shape)) % BLOCK else 0


def _inner_axes(shard: ShardSize) -> tuple[int, ...]:
    return shard.shape[1:]


def alike(items: Iterable[T], key: Callable[[T], Hashable]) -> list[list[T]]:
    """Divide items into lists of items with equal keys. The lists, and the items in a list, have the order of
    `items`."""
    found: dict[Hashable, list[T]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return list(found.values())


@_in_batches
def _adamw(shards: Sequence[ShardSize], config: OptimizerConfig) -> int:
    gradients = sum(shard.gradient_copy for shard in shards)
    moments = sum(shard.state_copy(config) for shard in shards)
    roots = 4 * sum(shard.num_elements for shard in shards)
    parameters = sum(shard.parameter_copy(config) for shard in shards)
    draw, encoding = _draw(shards, config), _encoding(shards, config)
    return max(
        gradients + moments + max(moments, _decoding(shards, config)),
        roots + 2 * moments + encoding,
        roots + moments + parameters,
        parameters + moments + encoding,
        parameters + (draw if parameters else 0),
    )


def _pytorch_adamw(groups: Sequence[GroupSizes], config: OptimizerConfig, ranks: int) -> int:
    """Return the peak memory of PyTorch's AdamW in bytes. `fused` works in place. `foreach` allocates the square roots
    of all second moments of a group. `for-loop` allocates two tensors of the size of one second moment, while one such
    tensor of the previous parameter still exists."""
    sizes = [[shard.size for shard in group.shards] for group in groups]
    if config.implementation == "fused":
        return 0
    if config.implementation == "foreach":
        return max(map(sum, sizes))
    return max(2 * size + before for group in sizes for before, size in pairwise([0, *group]))


@_in_batches
def _sgd(shards: Sequence[ShardSize], config: OptimizerConfig) -> int:
    gradients = sum(shard.gradient_copy for shard in shards)
    updates = 4 * sum(shard.num_elements for shard in shards)
    momenta = sum(shard.state_copy(config) for shard in shards) if config.sgd.momentum else 0
    parameters = sum(shard.parameter_copy(config) for shard in shards)
    stored = max(_decoding(shards, config), momenta + _encoding(shards, config)) if momenta else 0
    return max(
        parameters + updates + gradients,
        parameters + updates + stored,
        parameters + (_draw(shards, config) if parameters else 0),
    )


def _pytorch_sgd(groups: Sequence[GroupSizes], config: OptimizerConfig, ranks: int) -> int:
    """Return the peak memory of PyTorch's SGD in bytes. `fused` works in place. `foreach` adds weight decay to a copy
    of all gradients of a group. `for-loop` adds weight decay to a copy of one gradient, and makes another copy for
    Nesterov's momentum."""
    if config.implementation == "fused":
        return 0
    found = []
    for settings, shards in groups:
        is_decayed, sizes = settings.weight_decay > 0, [shard.size for shard in shards]
        foreach = config.implementation == "foreach"
        found.append(is_decayed * sum(sizes) if foreach else (is_decayed + config.sgd.nesterov) * max(sizes))
    return max(found)


_MUON_LIMIT = 1 << 24
"""Largest number of elements that Muon processes at once. A parameter with more elements is processed alone. With 2^24
elements, a kernel on a GPU runs longer than its launch takes."""


def muon_parts(shards: Sequence[T], num_elements: Callable[[T], int]) -> list[list[T]]:
    """Divide consecutive shards into parts of at most `_MUON_LIMIT` elements; a larger shard is a part of its own. Muon
    has float32 copies of one part at a time."""
    return batches(shards, num_elements, _MUON_LIMIT)


def matrices_at_once(shape: Sequence[int]) -> int:
    """Return the number of matrices of a stack that Muon processes together in its iterations. `shape`: (matrices,
    rows, columns) of the stack."""
    number, rows, columns = shape
    return min(number, max(1, _MUON_LIMIT // (rows * columns)))


def matrix_batches(matrices: Sequence[T], shape_of: Callable[[T], Sequence[int]], ranks: int) -> list[list[list[T]]]:
    """Divide the matrices that `ranks` ranks share into batches. A batch is a list of stacks, at most one per rank. A
    stack is a list of matrices with the same shape, which one rank processes together.

    `shape_of`: returns the rows and columns of a matrix. All stacks of a shape have the same size, except the last one,
    which may be smaller. The largest stacks come first, because all ranks wait for the largest stack of a batch.
    """
    stacks: list[list[T]] = []
    for same in alike(matrices, lambda matrix: tuple(shape_of(matrix))):
        number = len(same)
        turns = -(-number // (ranks * matrices_at_once((number, *shape_of(same[0])))))
        size = -(-number // (ranks * turns))
        stacks += [same[start : start + size] for start in range(0, number, size)]
    stacks.sort(key=lambda stack: len(stack) * prod(shape_of(stack[0])), reverse=True)
    return [stacks[start : start + ranks] for start in range(0, len(stacks), ranks)]


def _muon(groups: Sequence[GroupSizes], config: OptimizerConfig, ranks: int) -> int:
    shards = [shard for group in groups for shard in group.shards]
    matrices = [shard for shard in shards if len(shard.shape) == 2]
    batches_of_matrices = matrix_batches(matrices, lambda shard: shard.shape, ranks)
    peaks = [_muon_batch(batch, config, ranks) for batch in batches_of_matrices]
    for experts in alike([shard for shard in shards if len(shard.shape) == 3], _inner_axes):
        peaks += [_muon_experts(part, config) for part in muon_parts(experts, attrgetter("num_elements"))]
    return max(peaks)


def _muon_experts(part: Sequence[ShardSize], config: OptimizerConfig) -> int:
    """Return the peak memory in bytes while this rank updates the matrices of its experts in `part`."""
    _, rows, columns = part[0].shape
    elements = sum(shard.num_elements for shard in part)
    computed = matrices_at_once((elements // (rows * columns), rows, columns)) * min(rows, columns)
    iterations = 2 * computed * (max(rows, columns) + 2 * min(rows, columns))
    return 2 * elements + max(_muon_direction(part, config), iterations, _muon_update(part, config))


def _muon_batch(batch: Sequence[Sequence[ShardSize]], config: OptimizerConfig, ranks: int) -> int:
    """Return the peak memory in bytes while a batch is updated, on the rank that computes the largest stack of the
    batch."""
    shards = [shard for stack in batch for shard in stack]
    rows, columns = shards[0].shape
    parts, own = muon_parts(shards, attrgetter("num_elements")), 2 * sum(shard.num_elements for shard in shards)
    whole, gram = 2 * len(batch[0]) * rows * columns, 2 * len(batch[0]) * min(rows, columns) ** 2
    directions = own + max(_muon_direction(part, config) for part in parts)
    updates = max(_muon_update(part, config) for part in parts)
    iterations = 2 * (whole + gram)
    if ranks == 1:
        return max(directions, iterations, whole + updates)
    return max(directions, own + whole, iterations, 2 * whole + own, own + updates)


def _muon_direction(part: Sequence[ShardSize], config: OptimizerConfig) -> int:
    """Return the peak memory in bytes while Muon computes the directions of a part: the matrices that Muon then makes
    orthogonal. This memory includes float32 copies of gradients, momenta and directions, and the bytes to decode and
    encode the momenta. It does not include the directions in bfloat16."""
    gradients = sum(shard.gradient_copy for shard in part)
    momenta = sum(shard.state_copy(config) for shard in part)
    directions = 4 * sum(shard.num_elements for shard in part) if config.muon.nesterov else 0
    return max(gradients + max(_decoding(part, config), momenta + directions), momenta + _encoding(part, config))


def _muon_update(part: Sequence[ShardSize], config: OptimizerConfig) -> int:
    """Return the bytes that the update of a part's shards allocates: float32 copies, and the bytes of `draw`."""
    copies = sum(shard.parameter_copy(config) for shard in part)
    return copies + _draw(part, config) if copies else 0


ALGORITHMS: dict[str, Algorithm] = {
    "AdamW": Algorithm(
        "titan_launch.optim.adamw:update_adamw",
        lambda config: ("exp_avg", "exp_avg_sq"),
        _adamw,
        settings=("beta1", "beta2", "eps"),
        pytorch=PyTorchUpdate("titan_launch.optim.adamw:update_pytorch", _pytorch_adamw, counts_on_host=True),
    ),
    "Muon": Algorithm(
        "titan_launch.optim.muon:update_muon",
        lambda config: ("momentum_buffer",),
        _muon,
        settings=("muon",),
        for_others="AdamW",
        lr_factor=lambda config: config.muon.lr_factor,
    ),
    "SGD": Algorithm(
        "titan_launch.optim.sgd:update_sgd",
        lambda config: ("momentum_buffer",) if config.sgd.momentum else (),
        _sgd,
        settings=("sgd",),
        weight_decay=0.0,
        decay="coupled",
        pytorch=PyTorchUpdate("titan_launch.optim.sgd:update_pytorch", _pytorch_sgd),
    ),
}
"""The algorithms by name: the values of `optimizer.name`, and of `algorithm` in a parameter group."""
