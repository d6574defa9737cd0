"""The initial values that a factory gave its module, and their transfer from one rank of a host to the others."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titan_launch.distributed.dtensor import part_of_box
from titan_launch.models.initializers import own_tensors
from titan_launch.plan.types import full_name

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtypes by their size in bytes."""

_COLUMNS = 512
"""Columns of the table in which `_digest` arranges the elements of a tensor."""

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and lengths of a part of a tensor, by dim."""


@dataclass(frozen=True)
class HostValues:
    """The values that a factory gave its module's tensors."""

    by_name: dict[str, Tensor]
    """Tensors on the host by full name. A shared tensor has several names. On a rank without values, the tensors are on
    the meta device."""

    owner: int | None = None
    """The rank that has the values; None: this rank."""

    receivers: tuple[int, ...] = ()
    """The ranks to which this rank sends their parts of the values."""

    @property
    def num_bytes(self) -> int:
        """Host memory of the values in bytes. A shared tensor counts once."""
        return num_bytes(self.by_name.values())

    def digests(self) -> dict[str, str]:
        """Return a digest of each tensor's dtype, shape and elements, by full name."""
        return {name: _digest(tensor) for name, tensor in self.by_name.items()}

    def owned_by(self, rank: int) -> HostValues:
        """Return a copy with all tensors on the meta device, for a rank that gets its parts from the rank `rank`."""
        return replace(self, by_name={name: value.to("meta") for name, value in self.by_name.items()}, owner=rank)

    def take_parts(self, boxes: Mapping[str, Box]) -> Iterator[tuple[str, Tensor]]:
        """Yield (full name, this rank's part) of each tensor in `boxes`. Collective over the ranks that share the
        values.

        `boxes`: offsets and lengths of this rank's part of each tensor, by full name. The rank with the values drops
        each tensor as soon as all ranks have their parts, and also each tensor that no rank asks for.
        """
        if self.owner is not None:
            dist.send_object_list([dict(boxes)], self.owner)
            for name in filter(boxes.__contains__, self.by_name):
                part = torch.empty(boxes[name][1], dtype=self.by_name[name].dtype)
                if part.numel():
                    dist.recv(part, self.owner)
                yield name, part
            return
        requests = {rank: _received_boxes(rank) for rank in self.receivers}
        for name in list(self.by_name):
            value = self.by_name.pop(name)
            for rank, others in requests.items():
                if name in others and (part := part_of_box(value, *others[name])).numel():
                    dist.send(part.contiguous(), rank)
            if name in boxes:
                yield name, part_of_box(value, *boxes[name])


def _received_boxes(rank: int) -> dict[str, Box]:
    received: list[Any] = [None]
    dist.recv_object_list(received, rank)
    boxes: dict[str, Box] = received[0]
    return boxes


def take_values(module: nn.Module) -> HostValues:
    """Move a module's tensors to the meta device, in place, and return their values. Shared tensors stay shared."""
    values: dict[str, Tensor] = {}
    twins: dict[Tensor, Tensor] = {}
    for path, owner in module.named_modules():
        for name, tensor in own_tensors(owner).items():
            values[full_name(path, name)] = tensor.detach()
            if tensor not in twins:
                twins[tensor] = meta_twin(tensor)
            table: dict[str, Any] = owner._parameters if name in owner._parameters else owner._buffers
            table[name] = twins[tensor]
    return HostValues(values)


def meta_twin(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor on the meta device with the same shape, dtype and attributes."""
    twin = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    if isinstance(tensor, nn.Parameter):
        twin = nn.Parameter(twin, tensor.requires_grad)
    vars(twin).update(vars(tensor))
    return twin


def num_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the storages of tensors; a shared storage counts once."""
    return sum(storage.nbytes() for storage in {tensor.untyped_storage() for tensor in tensors})


def describe_tensors(module: nn.Module) -> dict[str, str]:
    """Return a description of each tensor of a module, by full name: the dtype, the shape, whether the tensor is
    trained, and the tensor that it is tied to, if any."""
    first: dict[Tensor, str] = {}
    described = {}
    for path, owner in module.named_modules():
        for name, tensor in own_tensors(owner).items():
            own = full_name(path, name)
            kind = "trained" if tensor.requires_grad else "not trained"
            tied = f", tied to {first[tensor]}" if tensor in first else ""
            described[own] = f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}, {kind}{tied}"
            first.setdefault(tensor, own)
    return described


def attributes_digest(module: nn.Module) -> str:
    """Return a digest of the classes and attributes of a module and of all its submodules. Parameters, buffers and the
    attributes that every `nn.Module` has do not count.

    Numbers, strings and plain tensors count by value. So do containers and dataclasses of these values, up to 4 levels
    deep. Tensors on the meta device count by dtype and shape. Other attributes count by their class.
    """
    of_all = vars(nn.Module()).keys()
    own = [(path, child, vars(child).keys() - of_all) for path, child in module.named_modules()]
    return digest_of(
        [(path, type(m).__qualname__, _plain({key: vars(m)[key] for key in keys})) for path, m, keys in own]
    )


def _plain(value: Any, depth: int = 4) -> Any:
    """Return an object as a string or a nested list of strings. Below `depth` levels of containers, return the class
    name of a container in place of its content."""
    if isinstance(value, Tensor):
        return f"{value.dtype} {tuple(value.shape)} on meta" if value.is_meta else _digest(value.detach())
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        return repr(value)
    if is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in fields(value)}
    if depth and isinstance(value, Mapping):
        return sorted([repr(key), _plain(item, depth - 1)] for key, item in value.items())
    if depth and isinstance(value, (list, tuple, set, frozenset)):
        items = [_plain(item, depth - 1) for item in value]
        return sorted(map(repr, items)) if isinstance(value, (set, frozenset)) else items
    return type(value).__qualname__


def digest_of(value: Any) -> str:
    """Return a hexadecimal digest of nested lists, dicts and strings."""
    return hashlib.blake2b(json.dumps(value).encode(), digest_size=16).hexdigest()


def _digest(tensor: Tensor) -> str:
    """Return a hexadecimal digest of a tensor's dtype, shape and elements.

    The bits of the elements are arranged as a table of integers, which is summed along rows and along columns. These
    sums run at memory bandwidth, and they change for almost every permutation of the elements.
    """
    plain = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    bits = plain.reshape(-1).view(_INTEGERS[plain.element_size()])
    rows = len(bits) // _COLUMNS
    table, rest = bits[: rows * _COLUMNS].view(rows, _COLUMNS), bits[rows * _COLUMNS :]
    digest = hashlib.blake2b(f"{tensor.dtype} {tuple(tensor.shape)}".encode(), digest_size=8)
    for part in (table.sum(0, dtype=torch.int64), table.sum(1, dtype=torch.int64), rest):
        digest.update(part.numpy().tobytes())
    return digest.hexdigest()
