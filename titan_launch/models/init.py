"""Initial parameters and buffers, which are the same for every sharding and every number of ranks.

Every rank computes the unsharded tensors of one module at a time, and keeps only its own shards. The random seed
depends only on the job's seed and the module's path. Nothing is communicated, except for the values of a user's
factory: one rank of each host has these values, and sends every other rank of the host its shards.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from titan_launch.distributed.dtensor import local_tensor, own_box, own_part
from titan_launch.models.host_values import HostValues
from titan_launch.models.initializers import Initializer, call_reset_parameters, own_tensors
from titan_launch.models.lora import LoRA
from titan_launch.models.weights.folder import Weights
from titan_launch.plan.types import full_name


def allocate(model: nn.Module, device: torch.device, parameters_on_host: bool = False) -> None:
    """Replace a model's meta tensors by uninitialized tensors on `device`, in place. Shared parameters stay shared.
    `parameters_on_host`: True to allocate the parameters on the host."""
    before = [(module, dict(module._parameters)) for module in model.modules()]
    model.to_empty(device="cpu" if parameters_on_host else device)
    allocated: dict[nn.Parameter, nn.Parameter | None] = {}
    for module, parameters in before:  # `to_empty` gives each owner of a shared plain parameter a separate tensor
        for name, parameter in parameters.items():
            if parameter is not None:
                module._parameters[name] = allocated.setdefault(parameter, module._parameters[name])
    if not parameters_on_host:
        return
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty_like(buffer, device=device)


def initialize(model: nn.Module, initializer: Initializer | HostValues, seed: int, device: torch.device) -> None:
    """Fill the tensors of an allocated model, sharded or not, in place. Collective if `initializer` is a HostValues.

    Adapters (`models.lora`) are always filled by their own `reset_parameters`, not by `initializer`.

    An Initializer computes on `device` even if the parameters are on the host, so offloading does not change the
    values. A shared tensor is filled once, as a tensor of its first owner in `named_modules`. Children are filled
    before parents. The extra memory is at most the size of the largest single module, unsharded and in fp32.
    """
    if isinstance(initializer, HostValues):
        _copy_values(model, initializer)
    for path, module, tensors in reversed(list(_owners(model))):
        fill = call_reset_parameters if isinstance(module, LoRA) else initializer
        if isinstance(fill, HostValues):
            continue
        twin = _unsharded_twin(module, device)
        digest = hashlib.blake2b(f"{seed}:{path}".encode(), digest_size=8).digest()
        with _seeded(int.from_bytes(digest, "little"), device), torch.no_grad():
            fill(twin, path)
            for name, tensor in tensors.items():
                _copy_shard(tensor, own_tensors(twin)[name])


@torch.no_grad()
def _copy_values(model: nn.Module, values: HostValues) -> None:
    targets = _distinct_tensors(model)
    for name, part in values.take_parts({name: own_box(target.shape, target) for name, target in targets.items()}):
        local_tensor(targets[name]).copy_(part)


@torch.no_grad()
def load_weights(model: nn.Module, weights: Weights, names: Collection[str] | None = None) -> int:
    """Copy the weights into an allocated model, sharded or not, in place. Tensors that `weights` does not have keep
    their values. Return the number of bytes, in the dtypes of the files, that this rank has copied.

    `names`: full names of the tensors to copy, by default all. Nothing is communicated: each rank reads its own parts.
    """
    num_bytes = 0
    for _, target, part in _own_parts(model, weights, weights.pieces if names is None else names):
        target.copy_(part)
        num_bytes += part.nbytes
    return num_bytes


@torch.no_grad()
def differing_weights(model: nn.Module, weights: Weights, names: Collection[str]) -> list[str]:
    """Return the names, among `names`, of the tensors whose values differ between the model and `weights`. Only this
    rank's part of each tensor is compared, in the dtype of the model."""
    parts = _own_parts(model, weights, names)
    return [name for name, own, part in parts if not torch.equal(own, part.to(own))]


@torch.no_grad()
def copy_whole(target: Tensor, values: Tensor) -> None:
    """Copy this rank's part of the whole tensor `values` into `target`, a parameter that may be sharded. Rows and
    columns of the parameter beyond the shape of `values` are set to 0."""
    if values.shape != target.shape:
        whole = values.new_zeros(target.shape)
        whole[tuple(map(slice, values.shape))] = values
        values = whole
    _copy_shard(target, values)


def _own_parts(model: nn.Module, weights: Weights, names: Collection[str]) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield (full name, this rank's part in the model, this rank's part in the weights) of each tensor in `names` that
    both the model and the weights have. Empty parts are skipped."""
    for name, target in _distinct_tensors(model).items():
        if name in weights.pieces and name in names:
            offsets, lengths = own_box(target.shape, target)
            if 0 not in lengths:
                yield name, local_tensor(target), weights.read(name, offsets, lengths)


def _distinct_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers of a model by full name. A shared tensor has the name in its first owner."""
    return {full_name(path, name): tensor for path, _, own in _owners(model) for name, tensor in own.items()}


def _owners(model: nn.Module) -> Iterator[tuple[str, nn.Module, dict[str, Tensor]]]:
    """Yield (path, module, tensors by name). A shared tensor is listed only for the first module that owns it."""
    seen = set[int]()
    for path, module in model.named_modules():
        own = {name: tensor for name, tensor in own_tensors(module).items() if id(tensor) not in seen}
        seen.update(map(id, own.values()))
        if own:
            yield path, module, own


def _unsharded_twin(module: nn.Module, device: torch.device) -> nn.Module:
    """Return a copy of `module` with its original class, and with unsharded, uninitialised tensors. The copy shares its
    other attributes with `module`. It has no children, because the children of `module` are sharded. Only the copy of
    an `nn.MultiheadAttention` has children: those of `module`."""
    classes: Iterator[type[nn.Module]] = (cls for cls in type(module).__mro__ if issubclass(cls, nn.Module))
    cls = next(cls for cls in classes if not issubclass(cls, FSDPModule))  # `fully_shard` replaces the class
    twin = cls.__new__(cls)
    twin.__dict__.update(module.__dict__)
    twin.__dict__["_parameters"] = {
        name: None if p is None else nn.Parameter(_uninitialised(p, device), p.requires_grad)
        for name, p in module._parameters.items()
    }
    twin.__dict__["_buffers"] = {
        name: None if b is None else _uninitialised(b, device) for name, b in module._buffers.items()
    }
    if not isinstance(module, nn.MultiheadAttention):  # its reset method sets its child's bias to 0
        twin.__dict__["_modules"] = {}
    return twin


def _uninitialised(like: Tensor, device: torch.device) -> Tensor:
    """Return a tensor with the shape of `like`: zeros for integers, else NaN. Floating-point tensors are fp32 or wider,
    so that values are rounded only once, when they are copied into the model."""
    if not (like.is_floating_point() or like.is_complex()):
        return torch.zeros(like.shape, dtype=like.dtype, device=device)
    dtype = torch.promote_types(like.dtype, torch.float32)
    return torch.full(like.shape, torch.nan, dtype=dtype, device=device)


def _copy_shard(target: Tensor, source: Tensor) -> None:
    """Copy this rank's part of the unsharded `source` into `target`, cast to the dtype of `target`."""
    local_tensor(target).copy_(own_part(source.detach(), target))


@contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seed the default generators of the host and of `device`. Restore their states when the `with` block ends."""
    devices = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(devices, device_type="cuda" if device.type == "cpu" else device.type):
        # torch.manual_seed would also store the seed, with a stack trace, for every kind of device not in use.
        torch.default_generator.manual_seed(seed)
        if device.type != "cpu":
            torch.get_device_module(device).manual_seed(seed)
        yield
