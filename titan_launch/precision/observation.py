"""Dtypes that a wrapped model really computes, stores and communicates in, observed by hooks; and the state of a failed
forward or backward.
"""

from __future__ import annotations

import re
import traceback
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titan_launch.config.sections.precision import PrecisionConfig, PrecisionRule
from titan_launch.core.errors import UNSET, KeyPath, Problem
from titan_launch.core.globs import matches
from titan_launch.distributed.torch_private import CONVERSION, REDUCTION, collectives_watched, parameter_group
from titan_launch.plan.types import ModelPlan, ModuleInfo, Unit, full_name, is_within

INPUTS, OUTPUTS = "inputs", "outputs"
PARAMETERS, GRADIENTS = "parameters", "gradients"
STORED_PARAMETERS, STORED_GRADIENTS = "stored parameters", "stored gradients"
AUTOCAST = "autocast"


def buffer(name: str) -> str:
    """What a buffer of a module is called among the things seen."""
    return f"buffer {name}"


@dataclass
class Seen:
    """The floating dtypes that one module or unit was seen with."""

    dtypes: defaultdict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    """By what has them: `inputs`, `all-gather`, ..."""

    num_forwards: int = 0
    """Times its forward began, recomputation included; of a unit, 0."""

    returns_view: bool = False
    """Whether an output that takes a gradient was a view; of a unit, False."""

    def note(self, what: str, value: Any) -> None:
        """Add the dtypes of the floating tensors in a value."""
        self.dtypes[what].update(dtype_of(tensor) for tensor in floating_tensors(value))


@dataclass(frozen=True)
class Observations:
    """What was seen of a model."""

    modules: dict[str, Seen]
    """By path; a module with several parents under the first one's."""

    units: tuple[Seen, ...]
    """In the order of the plan's units."""


@contextmanager
def observe(model: nn.Module, plan: ModelPlan) -> Iterator[Observations]:
    """Watch a wrapped model until the end of the block: no number changes, and nothing is left on the model then.

    Hooks that are registered after wrapping see the inputs that FSDP2 has cast, and the outputs. The collectives of
    units are not seen on an untested release of PyTorch.
    """
    paths = [info.path for info in plan.inventory.modules if info.same_as is None]
    observed = Observations({path: Seen() for path in paths}, tuple(Seen() for _ in plan.units))
    with ExitStack() as hooks:
        for path, seen in observed.modules.items():
            _watch_module(model.get_submodule(path), seen, hooks)
        for unit, seen in zip(plan.units, observed.units, strict=True):
            _watch_unit(model.get_submodule(unit.modules[0]), seen, hooks)
        yield observed


def look_at_storage(model: nn.Module, observed: Observations) -> None:
    """Add what is stored at the end of a backward: sharded parameters, their gradients, and buffers."""
    for path, seen in observed.modules.items():
        module = model.get_submodule(path)
        for parameter in module.parameters(recurse=False):
            if isinstance(parameter, DTensor):
                seen.note(STORED_PARAMETERS, parameter)
                seen.note(STORED_GRADIENTS, parameter.grad)
        _note_buffers(module, seen)


def _watch_module(module: nn.Module, seen: Seen, hooks: ExitStack) -> None:
    with_hook: dict[int, Tensor] = {}  # holds the parameters, so that no id is used twice

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.num_forwards += 1
        seen.note(INPUTS, (args, kwargs))
        seen.dtypes[AUTOCAST].update(autocast_dtypes((args, kwargs)))
        seen.note(PARAMETERS, list(module._parameters.values()))
        _note_buffers(module, seen)
        for parameter in module._parameters.values():  # whole ones, which autograd sees; shards take their place later
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


def _watch_unit(module: nn.Module, seen: Seen, hooks: ExitStack) -> None:
    """`module`: any of the unit's, which share their collectives."""
    group = parameter_group(module)
    if group is not None:
        hooks.enter_context(collectives_watched(group, lambda kind, output, sent: seen.note(kind, (sent, output))))


def autocast_dtypes(value: Any) -> Iterator[str]:
    """What torch.autocast would compute in, on the devices of a value's floating tensors; nothing where it is off."""
    for device_type in {tensor.device.type for tensor in floating_tensors(value)}:
        if torch.is_autocast_enabled(device_type):
            yield str(torch.get_autocast_dtype(device_type)).removeprefix("torch.")


def floating_tensors(value: Any) -> Iterator[Tensor]:
    """The floating tensors in a value, and in the collections and dataclasses in it: those that FSDP2 casts."""
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
    """`torch.bfloat16` as `"bfloat16"`."""
    return str(tensor.dtype).removeprefix("torch.")


_PYTORCH = str(Path(torch.__file__).parent)
_FLOATING = {"float": "float32", "half": "float16", "double": "float64"}
_NAMES = re.compile("bfloat16|float16|half|float64|double|float32|float(?!ing|8)", re.IGNORECASE)


@dataclass(frozen=True)
class Running:
    """A module whose forward was running."""

    path: str
    inputs: frozenset[str]
    """Dtypes of the floating tensors among its arguments."""


class Failure:
    """An error of a model's forward or backward, which must have its traceback still."""

    def __init__(self, error: Exception, model: nn.Module, plan: ModelPlan, precision: PrecisionConfig):
        self.text = re.split(r"\. |\n", str(error))[0].rstrip(".")
        """PyTorch's first sentence."""
        self.plan = plan
        self._model, self._precision = model, precision
        self._frames = list(traceback.walk_tb(error.__traceback__))

    def floating_dtypes(self) -> set[str]:
        """Those that the text names, in whichever of PyTorch's ways: Float, c10::BFloat16, torch.float32."""
        names = {name.lower() for name in _NAMES.findall(self.text)}
        return {_FLOATING.get(name, name) for name in names}

    def running(self) -> list[Running]:
        """The modules whose forward was running, outermost first; none in backward, but for recomputation."""
        paths = {id(self._model.get_submodule(m.path)): m.path for m in self.plan.inventory.modules if not m.same_as}
        found = []
        for frame, _ in self._frames:
            code = frame.f_code
            names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
            path = paths.get(id(frame.f_locals.get(names[0]))) if names else None
            if code.co_name == "forward" and path is not None:
                arguments = [frame.f_locals.get(name) for name in names[1:]]
                found.append(Running(path, frozenset(map(dtype_of, floating_tensors(arguments)))))
        return found

    def line(self) -> str:
        """`model.py:42`: the innermost line that is not PyTorch's."""
        lines = [(frame.f_code.co_filename, line) for frame, line in self._frames]
        name, line = next(((n, line) for n, line in reversed(lines) if not n.startswith(_PYTORCH)), lines[-1])
        return f"{Path(name).name}:{line}"

    def reduced_gradients(self) -> dict[str, str]:
        """Dtypes of the gradients that FSDP2 was about to reduce, by the parameter's name."""
        reduced = self._locals(REDUCTION)
        pairs = zip(reduced.get("fsdp_params", ()), reduced.get("unsharded_grads", ()), strict=False)
        dtypes = {self._name(parameter): dtype_of(gradient) for parameter, gradient in pairs}
        return {name: dtype for name, dtype in dtypes.items() if name is not None}

    def parameter_never_gathered(self) -> str | None:
        """The parameter that FSDP2 was looking for a gradient of, by name."""
        return self._name(self._locals(CONVERSION).get("self"))

    def _locals(self, function: str) -> Mapping[str, Any]:
        """The variables of a function that was running."""
        return next((frame.f_locals for frame, _ in self._frames if frame.f_code.co_name == function), {})

    def _name(self, fsdp_parameter: Any) -> str | None:
        sharded = getattr(fsdp_parameter, "sharded_param", None)
        return next((name for name, parameter in self._model.named_parameters() if parameter is sharded), None)

    def stored_otherwise(self) -> Iterator[tuple[str, str, str]]:
        """Path, name and dtype of the parameters that are not stored as planned."""
        for path, unit in self.plan.unit_of.items():
            for name, parameter in self._model.get_submodule(path)._parameters.items():
                if parameter is not None and dtype_of(parameter) != unit.storage_dtype:
                    yield path, name, dtype_of(parameter)

    def units_without_gradients(self) -> list[Unit]:
        """The units that have to get gradients and have none yet, in wrapping order."""
        return [
            unit for unit in self.plan.units if unit.is_trained and not any(self._has_gradient(p) for p in unit.modules)
        ]

    def _has_gradient(self, path: str) -> bool:
        return any(parameter.grad is not None for parameter in self._model.get_submodule(path).parameters())

    def describe(self, path: str) -> str:
        """A module by path and class."""
        return f"{path or 'the model'} ({self.plan.inventory.by_path[path].class_name})"

    def rule(self, unit: Unit) -> PrecisionRule | None:
        """The rule that a unit comes from."""
        return None if unit.key is None else self._precision.rules[int(unit.key[-1])]

    def buffers_in_another_dtype(self, module: ModuleInfo) -> dict[str, str]:
        """A module's floating buffers, by name, that are not of the dtype that it computes in."""
        path, computes_in = module.path, self.plan.unit_of[module.path].compute_dtype
        dtypes = {b.name: self.plan.buffer_dtypes[full_name(path, b.name)] for b in module.buffers if b.is_floating}
        return {name: dtype for name, dtype in dtypes.items() if dtype != computes_in}

    def has_parameters(self, path: str) -> bool:
        """Whether a rule can apply to a module: it, or what is inside, has parameters."""
        return any(m.parameters for m in self.plan.inventory.modules if is_within(m.path, path))

    def is_leaf(self, path: str) -> bool:
        """Whether nothing is inside a module."""
        return not any(m.path != path and is_within(m.path, path) for m in self.plan.inventory.modules)

    def problem(self, key: KeyPath, reason: str, value: object = UNSET) -> Problem:
        """What is wrong with a key, with PyTorch's own words, for those who search for them."""
        return Problem(key, f"{reason} (PyTorch: {self.text})", value)

    def glob(self, path: str) -> str:
        """A pattern for a module and its like in the other blocks; the path itself where that would match others."""
        block = next((block for block in self.plan.inventory.blocks if is_within(path, block)), "")
        around, _, index = block.rpartition(".")
        if not index.isdigit():
            return path
        pattern = f"{around}.*{path.removeprefix(block)}"
        classes = {m.classes for m in self.plan.inventory.modules if matches(pattern, m.path)}
        return pattern if len(classes) == 1 else path
