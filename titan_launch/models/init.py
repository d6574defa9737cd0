"""Initial parameters and buffers that are the same for every sharding and every number of ranks.

Every rank makes each module's tensors whole, from a seed that depends on the module's path only, and keeps its shard.
Nothing is communicated, and no more than one module is whole at a time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from titan_launch.distributed.dtensor import local_tensor, own_part
from titan_launch.models.factory import HostValues
from titan_launch.models.initializers import Initializer, own_tensors
from titan_launch.plan.types import full_name


def allocate(model: nn.Module, device: torch.device, parameters_on_host: bool = False) -> None:
    """Give a model on the meta device memory on `device`, uninitialised, in place; with `parameters_on_host` its
    parameters on the host."""
    model.to_empty(device="cpu" if parameters_on_host else device)
    if not parameters_on_host:
        return
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty_like(buffer, device=device)


def initialize(model: nn.Module, initializer: Initializer | HostValues, seed: int, device: torch.device) -> None:
    """Fill a model that `allocate` has given memory, sharded or not, in place; with `HostValues` copy them.

    Values are made on `device`, so that they are the same where parameters are on the host. A shared tensor is filled
    once, by the first module in `named_modules` that owns it. Children come before parents. No communication. Beyond
    the model itself it needs the memory of the largest single module, whole and in fp32.
    """
    if isinstance(initializer, HostValues):
        _copy_values(model, initializer)
        return
    for path, module, names in reversed(list(_owners(model))):
        twin = _whole_twin(module, device)
        with _seeded(_module_seed(seed, path), device), torch.no_grad():
            initializer(twin, path)
            for name in names:
                _copy_shard(own_tensors(module)[name], own_tensors(twin)[name])


@torch.no_grad()
def _copy_values(model: nn.Module, values: HostValues) -> None:
    for path, module, names in _owners(model):
        for name in names:
            _copy_shard(own_tensors(module)[name], values.by_name[full_name(path, name)])


def _owners(model: nn.Module) -> Iterator[tuple[str, nn.Module, list[str]]]:
    """Modules that own tensors themselves, with the names of those that no module before them owns too."""
    seen: set[int] = set()
    for path, module in model.named_modules():
        names = [name for name, tensor in own_tensors(module).items() if id(tensor) not in seen]
        seen.update(id(tensor) for tensor in own_tensors(module).values())
        if names:
            yield path, module, names


def _whole_twin(module: nn.Module, device: torch.device) -> nn.Module:
    """A module like `module` before it was wrapped, with whole, uninitialised tensors of its own.

    Its attributes are shared with the original. It has no children, since those of the original are sharded.
    """
    cls = _original_class(module)
    twin = cls.__new__(cls)
    twin.__dict__.update(module.__dict__)
    twin.__dict__["_parameters"] = {
        name: None if p is None else nn.Parameter(_uninitialised(p, device), p.requires_grad)
        for name, p in module._parameters.items()
    }
    twin.__dict__["_buffers"] = {
        name: None if b is None else _uninitialised(b, device) for name, b in module._buffers.items()
    }
    if not isinstance(module, nn.MultiheadAttention):  # it sets its child's bias to zero, which needs no whole tensor
        twin.__dict__["_modules"] = {}
    return twin


def _original_class(module: nn.Module) -> type[nn.Module]:
    """The class of a module, or the one it had before `fully_shard` replaced it."""
    classes: Iterator[type[nn.Module]] = (cls for cls in type(module).__mro__ if issubclass(cls, nn.Module))
    return next(cls for cls in classes if not issubclass(cls, FSDPModule))


def _uninitialised(like: Tensor, device: torch.device) -> Tensor:
    """Floating tensors hold NaN until they are filled, and are fp32 where storage is less: one rounding, at the end."""
    if not (like.is_floating_point() or like.is_complex()):
        return torch.zeros(like.shape, dtype=like.dtype, device=device)
    dtype = torch.promote_types(like.dtype, torch.float32)
    return torch.full(like.shape, torch.nan, dtype=dtype, device=device)


def _copy_shard(target: Tensor, whole: Tensor) -> None:
    """Copy into a tensor the part of `whole` that it holds, cast to its dtype."""
    if isinstance(target, DTensor):
        local_tensor(target).copy_(own_part(whole.detach(), target))
    else:
        target.copy_(whole)


def _module_seed(seed: int, path: str) -> int:
    digest = hashlib.blake2b(f"{seed}:{path}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


@contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seed the default generators of the host and of `device`; afterwards they are where they were."""
    devices = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(devices, device_type="cuda" if device.type == "cpu" else device.type):
        # Not torch.manual_seed, which also notes the seed, with a stack trace, for every kind of device not in use.
        torch.default_generator.manual_seed(seed)
        if device.type != "cpu":
            torch.get_device_module(device).manual_seed(seed)
        yield
