"""Hooks that record the dtypes in which a wrapped model computes, stores and communicates."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titan_launch.distributed.torch_private import collectives_watched, parameter_group
from titan_launch.plan.types import ModelPlan

INPUTS, OUTPUTS = "inputs", "outputs"
PARAMETERS, GRADIENTS = "parameters", "gradients"
STORED_PARAMETERS, STORED_GRADIENTS = "stored parameters", "stored gradients"
AUTOCAST = "autocast"


def buffer(name: str) -> str:
    """Return the key in `Seen.dtypes` for the buffer with this name."""
    return f"buffer {name}"


@dataclass
class Seen:
    """The observed floating dtypes of one module, or the dtypes of the collectives of one FSDP2 unit."""

    dtypes: defaultdict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    """Observed dtypes by kind of tensor: `inputs`, `all-gather`, ..."""

    num_forwards: int = 0
    """Number of forwards of a module, including the second forwards of activation checkpointing. 0 for a unit."""

    returns_view: bool = False
    """True if an output of a module was a view that requires a gradient. False for a unit."""

    def note(self, what: str, value: Any) -> None:
        """Add the dtypes of the floating tensors in a value to the kind of tensor `what`."""
        self.dtypes[what].update(dtype_of(tensor) for tensor in floating_tensors(value))


@dataclass(frozen=True)
class Observations:
    """The observations of a model."""

    modules: dict[str, Seen]
    """Observations by module path. A module with several parents is listed under its first path."""

    units: tuple[Seen, ...]
    """Observations of the units, in the order of the plan's units."""


@contextmanager
def observe(model: nn.Module, plan: ModelPlan) -> Iterator[Observations]:
    """Record the dtypes of a wrapped model until the `with` block ends, by hooks that change no value.

    The hooks are registered after wrapping, so they get the inputs that FSDP2 has cast. On an untested release of
    PyTorch, the collectives of units are not recorded.
    """
    paths = [info.path for info in plan.inventory.distinct]
    observed = Observations({path: Seen() for path in paths}, tuple(Seen() for _ in plan.units))
    with ExitStack() as hooks:
        for path, seen in observed.modules.items():
            _watch_module(model.get_submodule(path), seen, hooks)
        for unit, gathered, seen in zip(plan.units, plan.gathered_dtypes(), observed.units, strict=True):
            _watch_unit(model.get_submodule(unit.modules[0]), gathered == "uint8", seen, hooks)
        yield observed


def look_at_storage(model: nn.Module, observed: Observations) -> None:
    """After a backward, add to `observed` the dtypes of sharded parameters, of frozen parameters that FSDP2 ignores, of
    gradients, and of buffers."""
    for path, seen in observed.modules.items():
        module = model.get_submodule(path)
        for parameter in module.parameters(recurse=False):
            if isinstance(parameter, DTensor) or not parameter.requires_grad:  # FSDP2 ignores some frozen parameters
                seen.note(STORED_PARAMETERS, parameter)
                seen.note(STORED_GRADIENTS, parameter.grad)
        _note_buffers(module, seen)


def _watch_module(module: nn.Module, seen: Seen, hooks: ExitStack) -> None:
    with_hook: dict[int, Tensor] = {}  # keeps the parameters alive, so that no id is reused

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.num_forwards += 1
        seen.note(INPUTS, (args, kwargs))
        devices = {tensor.device.type for tensor in floating_tensors((args, kwargs))}
        enabled = [torch.get_autocast_dtype(device) for device in devices if torch.is_autocast_enabled(device)]
        seen.dtypes[AUTOCAST].update(str(dtype).removeprefix("torch.") for dtype in enabled)
        seen.note(PARAMETERS, list(module._parameters.values()))
        _note_buffers(module, seen)
        for parameter in module._parameters.values():  # unsharded parameters, which autograd uses
            if parameter is not None and parameter.requires_grad and id(parameter) not in with_hook:
                with_hook[id(parameter)] = parameter
                hooks.callback(parameter.register_hook(partial(seen.note, GRADIENTS)).remove)

    def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        seen.note(OUTPUTS, output)
        seen.returns_view |= any(tensor._is_view() and tensor.requires_grad for tensor in floating_tensors(output))
        _note_buffers(module, seen)

    hooks.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
    hooks.callback(module.register_forward_hook(after).remove)


def _note_buffers(module: nn.Module, seen: Seen) -> None:
    for name, tensor in module._buffers.items():
        seen.note(buffer(name), tensor)


def _watch_unit(module: nn.Module, gathers_bytes: bool, seen: Seen, hooks: ExitStack) -> None:
    """Record the collectives of the unit that `module` belongs to. All modules of a unit share its collectives.

    `gathers_bytes`: True if the plan all-gathers parameters of several dtypes as bytes (uint8). Then uint8 is recorded.
    Otherwise uint8, such as weights in float8, is not recorded.
    """

    def note(kind: str, output: Tensor, sent: Tensor) -> None:
        if gathers_bytes:
            seen.dtypes[kind].update((dtype_of(sent), dtype_of(output)))
        else:
            seen.note(kind, (sent, output))

    group = parameter_group(module)
    if group is not None:
        hooks.enter_context(collectives_watched(group, note))


def floating_tensors(value: Any) -> Iterator[Tensor]:
    """Yield the floating tensors in a value, its collections and its dataclasses: the tensors that FSDP2 casts."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, Mapping):
        yield from floating_tensors(list(value.values()))
    elif isinstance(value, (list, tuple, set, frozenset)):
        for item in value:
            yield from floating_tensors(item)
    elif is_dataclass(value) and not isinstance(value, type):
        yield from floating_tensors([getattr(value, item.name) for item in fields(value)])


def dtype_of(tensor: Tensor) -> str:
    """Return the name of a tensor's dtype, such as `"bfloat16"`."""
    return str(tensor.dtype).removeprefix("torch.")
