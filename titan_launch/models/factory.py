"""Calls of a user's model factory: on the host, with values, or on the meta device, without values."""

from __future__ import annotations

import inspect
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parameter import is_lazy

from titan_launch.config.sections.model import HUGGINGFACE, ModelConfig
from titan_launch.core.errors import ConfigError, Problem, config_error, did_you_mean
from titan_launch.core.import_string import user_traceback
from titan_launch.core.patches import generators_seeded, replaced
from titan_launch.models.host_values import HostValues, meta_twin, num_bytes, take_values
from titan_launch.models.initializers import check_reset_parameters
from titan_launch.plan.hardware import GIB, free_memory_gib


class TooLargeError(ConfigError):
    """Error: a model is larger than any real model. After this error, the build is not repeated on another device."""


@dataclass(frozen=True)
class HostBuild:
    """Settings for calling a factory on a host."""

    seed: int
    """Seed of the generators of PyTorch, Python and NumPy."""

    free_bytes: int
    """Free memory of the host before the factory is called."""

    on_meta: bool = False
    """True: the module is built on the meta device, without values, because another rank has the values."""


def build_on_meta(config: ModelConfig, factory: Callable[..., Any]) -> nn.Module:
    """Build a factory's module on the meta device. `call_reset_parameters` fills the module later. The factory must
    have the attribute `meta_device = True`.

    Raise ConfigError if the factory fails, or if `reset_parameters` cannot fill the module.
    """
    with torch.device("meta"):
        module = _call(config, factory, " on the meta device, where tensors have shapes but no values")
    check_reset_parameters(module)
    return module


def build_for_planning(config: ModelConfig, factory: Callable[..., Any]) -> nn.Module:
    """Build a factory's module for planning, with parameters and buffers on the meta device.

    If the factory fails on the meta device, it is called again on the host, except after a TooLargeError. Raise
    ConfigError if no call succeeds. Plain attributes that are tensors on the meta device become zeros on the host.
    """
    module = None
    try:
        with torch.device("meta"):
            module = _call(config, factory)
    except TooLargeError:
        raise
    except ConfigError:
        pass
    if module is None:
        module, _ = build_on_host(config, factory, HostBuild(seed=0, free_bytes=int(free_memory_gib() * GIB)))
    for child in module.modules():
        for name, value in vars(child).items():
            if isinstance(value, Tensor) and value.is_meta:
                setattr(child, name, torch.zeros_like(value, device="cpu"))
    return module


def build_on_host(config: ModelConfig, factory: Callable[..., Any], host: HostBuild) -> tuple[nn.Module, HostValues]:
    """Build a factory's module on the host, with seeded random generators.

    Return the module, in training mode and with its tensors on the meta device, and the values of the tensors. Raise
    ConfigError if the factory fails, if the tensors do not fit into free host memory, if a tensor is not on the host,
    or if two parameters begin at the same memory address.
    """
    with generators_seeded(host.seed), _memory_limited(host.free_bytes):
        try:
            module = _call(config, factory, explains_memory=True)
        except _OutOfHostMemory as error:
            raise _too_large(config, factory, error, host) from None
    _check_is_on_host(module)
    _check_is_not_shared(module)
    return module, take_values(module)


def build_without_values(
    config: ModelConfig, factory: Callable[..., Any], host: HostBuild
) -> tuple[nn.Module, HostValues]:
    """Build a factory's module on the meta device, for a rank that gets the values from another rank.

    Return the module, in training mode, and HostValues with meta tensors. While the factory runs, `torch.load` loads
    tensors to the meta device. Raise ConfigError if the factory fails.
    """

    def load_without_values(*args: Any, **kwargs: Any) -> Any:
        return load(*args, **{**kwargs, "map_location": "meta"})

    load = torch.load
    with generators_seeded(host.seed), warnings.catch_warnings(), replaced(torch, "load", load_without_values):
        warnings.simplefilter("ignore")  # `load_state_dict` warns that it does nothing
        with torch.device("meta"):
            module = _call(config, factory)
    return module, take_values(module)


def build_buffers_on_host(config: ModelConfig, factory: Callable[..., Any]) -> tuple[nn.Module, HostValues]:
    """Build a factory's module whose parameters will be read from files.

    Return the module, with its tensors on the meta device, and the values of its buffers. A parameter moves to the meta
    device as soon as it is registered, before it gets values. Raise ConfigError if the factory fails.
    """

    def move(module: nn.Module, name: str, parameter: nn.Parameter) -> Any:
        return parameter if parameter.is_meta else meta_twin(parameter)

    try:
        with register_module_parameter_registration_hook(move):
            module = _call(config, factory, explains_memory=True)
    except _OutOfHostMemory:
        reason = "has a tensor larger than host memory; correct the sizes in model.args or config.json (model.path)"
        raise config_error(("model", "name"), reason, config.name) from None
    values = take_values(module)
    return module, replace(values, by_name={name: value for name, value in values.by_name.items() if not value.is_meta})


def _call(
    config: ModelConfig, factory: Callable[..., Any], where: str = "", explains_memory: bool = False
) -> nn.Module:
    """Call a factory and return its module in training mode. Raise ConfigError if the factory fails, or if its module
    is not supported. With `explains_memory`, raise _OutOfHostMemory instead if the host has too little memory. `where`:
    the device of the call, in words for errors."""
    _check_arguments(factory, config)
    try:
        module = factory(**config.args)
    except (ConfigError, _OutOfHostMemory):
        raise
    except Exception as error:
        if explains_memory and (isinstance(error, MemoryError) or "can't allocate memory" in str(error)):
            raise _OutOfHostMemory(0) from error
        advice = "; remove .cuda() and .to(device) from the factory: the launcher moves the module to the device"
        hint = advice if any(word in str(error) for word in ("CUDA", "NVIDIA")) else ""
        reason = f"failed{where}{hint}:\n{user_traceback(error)}"
        raise config_error(("model", "name"), reason, config.name) from error
    problem = None
    if not isinstance(module, nn.Module):
        problem = f"must return a torch.nn.Module, but returns a {type(module).__name__}"
    elif isinstance(module, torch.jit.ScriptModule):
        problem = "returns a scripted module, which cannot be sharded; remove torch.jit"
    elif hasattr(module, "_orig_mod"):
        problem = "returns a compiled module; remove torch.compile, and set compile.enable = true"
    if problem is not None:
        raise config_error(("model", "name"), problem, config.name)
    reason = "the parameter {} is lazy and has no shape; create its module with the number of input features"
    if lazy := [name for name, parameter in module.named_parameters() if is_lazy(parameter)]:
        raise ConfigError(Problem(("model", "name"), reason.format(name)) for name in lazy)
    scalars_as_vectors(module)
    if not module.training:  # `from_pretrained` returns a module in evaluation mode
        module.train()
    return module


def scalars_as_vectors(module: nn.Module) -> None:
    """Give the scalar parameters of a module the shape (1,), in place, because FSDP2 shards along the first axis.

    The module's code still reads scalars. For this, each submodule with scalar parameters gets a subclass of its class.
    A property of the subclass returns the scalar under the name of the parameter. In checkpoints, the shape is (1,).
    """
    vectors: dict[nn.Parameter, nn.Parameter] = {}
    for child in module.modules():
        scalars = {name: p for name, p in child._parameters.items() if p is not None and not is_lazy(p) and not p.ndim}
        for name, scalar in scalars.items():
            if scalar not in vectors:
                vectors[scalar] = nn.Parameter(scalar.detach().reshape(1), scalar.requires_grad)
                vars(vectors[scalar]).update(vars(scalar))
            child._parameters[name] = vectors[scalar]
        if scalars:
            cls: Any = type(child)
            child.__class__ = _with_scalars(cls, tuple(scalars))


@cache
def _with_scalars(cls: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    """Return a subclass of `cls` with the same name, whose attributes `names` return these parameters as scalars. A
    DTensor, and None in place of a parameter, are returned unchanged."""

    def scalar(name: str) -> property:
        def read(module: nn.Module) -> Tensor | None:
            parameter = module._parameters[name]
            if parameter is None or isinstance(parameter, DTensor):
                return parameter  # FSDP2 reads its shards by this name
            return parameter.reshape(())

        return property(read)

    same: dict[str, Any] = {name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(cls.__name__, (cls,), {**same, **{name: scalar(name) for name in names}})


def _check_arguments(factory: Callable[..., Any], config: ModelConfig) -> None:
    try:
        signature = inspect.signature(factory)
    except ValueError:  # some callables in C have no signature
        return
    try:
        signature.bind(**config.args)
    except TypeError as error:
        unknown = [name for name in config.args if name not in signature.parameters]
        hint = did_you_mean(unknown[0], signature.parameters) if unknown else ""
        raise config_error(("model", "args"), f"{config.name}{signature}: {error}{hint}", config.args) from None


def _check_is_on_host(module: nn.Module) -> None:
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if tensor.is_meta:
            reason = (
                f"the module has {name} on the meta device, without values; build the module on the host, or give the "
                "factory the attribute meta_device = True and let reset_parameters fill the module"
            )
            raise config_error(("model", "name"), reason)
        if tensor.device.type != "cpu":
            reason = f"the module has {name} on {tensor.device}; leave the module on the host"
            raise config_error(("model", "name"), f"{reason}: the launcher moves it to the device")


def _check_is_not_shared(module: nn.Module) -> None:
    """Raise ConfigError if two parameters begin at the same memory address: FSDP2 would update them separately."""
    names: dict[int, str] = {}
    for name, parameter in module.named_parameters():
        other = names.setdefault(parameter.data_ptr(), name) if parameter.nbytes else name
        if other != name:
            reason = (
                f"the module has two parameters in the same memory, {other} and {name}; to tie them, assign one "
                "parameter to both names"
            )
            raise config_error(("model", "name"), reason)


class _OutOfHostMemory(MemoryError):  # noqa: N818 - code outside of this module does not name it
    """Error: the tensors of a factory's module do not fit into the host's memory."""

    def __init__(self, counted_bytes: int):
        super().__init__(counted_bytes)
        self.counted_bytes = counted_bytes
        """Bytes of the tensors that the factory had registered, including the tensor that exceeded the limit. 0 if
        PyTorch failed to allocate a tensor."""


@contextmanager
def _memory_limited(limit_bytes: int) -> Iterator[None]:
    """Raise _OutOfHostMemory as soon as the tensors that modules register in the `with` block exceed `limit_bytes`.

    The free memory of the host would show a tensor too late, because `torch.empty` does not write to the memory that it
    allocates.
    """
    sizes: dict[int, int] = {}

    def count(tensor: Tensor | None) -> None:
        if tensor is None or is_lazy(tensor) or tensor.is_meta or id(tensor) in sizes:
            return
        sizes[id(tensor)] = tensor.nbytes
        weakref.finalize(tensor, sizes.pop, id(tensor))
        if (total := sum(sizes.values())) > limit_bytes:
            raise _OutOfHostMemory(total)

    def count_registered(module: nn.Module, name: str, tensor: Tensor | None) -> None:
        count(tensor)

    def copied(parameter: nn.Parameter, memo: dict[int, Any]) -> nn.Parameter:
        copy = deepcopy(parameter, memo)
        count(copy)
        return copy

    deepcopy = nn.Parameter.__deepcopy__  # copies of layers (`nn.TransformerEncoder`) call no registration hook
    with (
        register_module_parameter_registration_hook(count_registered),
        register_module_buffer_registration_hook(count_registered),
        replaced(nn.Parameter, "__deepcopy__", copied),
    ):
        yield


def _too_large(
    config: ModelConfig, factory: Callable[..., Any], error: _OutOfHostMemory, host: HostBuild
) -> ConfigError:
    try:
        with torch.device("meta"):
            module = factory(**config.args)
        needed, qualifier = num_bytes([*module.parameters(), *module.buffers()]), ""
    except Exception:  # the factory fails on the meta device, so only the bytes before the error are known
        needed = 0
    if needed <= host.free_bytes:  # the number is unknown, or the factory also makes tensors outside of the module
        needed, qualifier = error.counted_bytes or host.free_bytes, "more than "
    remedy = "give the factory the attribute meta_device = True and let reset_parameters fill the module"
    if config.name == HUGGINGFACE:
        remedy = "use a host with more memory, or set model.weights without model.exclude_from_weights"
    reason = f"{needed / GIB:.1f} GiB of host memory, but only {host.free_bytes / GIB:.1f} GiB are free; {remedy}"
    return config_error(("model", "name"), f"needs {qualifier}{reason}", config.name)
