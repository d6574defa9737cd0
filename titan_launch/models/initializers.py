"""Functions that fill the tensors of one module: a table of rules, or the module's own `reset_parameters`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from torch import Tensor, nn

from titan_launch.core.errors import ConfigError, Problem, UserError
from titan_launch.core.globs import matches
from titan_launch.core.import_string import user_traceback
from titan_launch.plan.mup import WidthScales
from titan_launch.plan.types import full_name


class Initializer(Protocol):
    """A function that fills the parameters and buffers that a module owns itself, not the tensors of its children."""

    def __call__(self, module: nn.Module, path: str) -> None:
        """Fill every parameter and buffer of `module`, whose path in the model is `path`.

        The tensors are plain, not sharded. Floating-point tensors have a dtype of at least 32 bits and are filled with
        NaN. Other tensors are filled with 0. The module has no children, except for an `nn.MultiheadAttention`. The
        caller has seeded torch's default generators and disabled gradients.
        """


def own_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers that a module owns itself, by name. The tensors of its children are omitted."""
    both = {**module._parameters, **module._buffers}
    return {name: tensor for name, tensor in both.items() if tensor is not None}


Fill = Callable[[Tensor], object]
"""A function that fills a tensor in place."""


def constant(value: float) -> Fill:
    """Return a function that fills a tensor with `value`."""
    return lambda tensor: tensor.fill_(value)


def normal(std: float) -> Fill:
    """Return a function that fills a tensor from a normal distribution with mean 0."""
    return lambda tensor: tensor.normal_(std=std)


def truncated_normal(std: float) -> Fill:
    """Return a function that fills a tensor from a normal distribution with mean 0, truncated at 3 `std`."""
    return lambda tensor: nn.init.trunc_normal_(tensor, std=std, a=-3 * std, b=3 * std)


class InitTable:
    """A table of (glob, fill function). For a parameter or buffer, the first glob that matches its full name decides.
    None in place of the function: the module's `reset_parameters` fills the tensor."""

    def __init__(self, rules: Sequence[tuple[str, Fill | None]]):
        self._rules = tuple(rules)

    def __call__(self, module: nn.Module, path: str) -> None:
        """Fill the module's tensors by their rules."""
        for name, tensor in own_tensors(module).items():
            own = full_name(path, name)
            fills = [fill for pattern, fill in self._rules if matches(pattern, own)]
            assert fills, f"the model's table of initial values has no rule for {own}"
            if fills[0] is not None:
                fills[0](tensor)
            else:
                reset = _reset_method(module)
                assert reset is not None, f"{own} has no reset_parameters"
                reset()


def scaled_values(values: Initializer, scales: WidthScales) -> Initializer:
    """Return an initializer that fills a module by `values` and then multiplies each parameter by its scale."""

    def fill(module: nn.Module, path: str) -> None:
        values(module, path)
        for name, parameter in module.named_parameters(recurse=False):
            parameter.mul_(scales.of(full_name(path, name)).std)

    return fill


def call_reset_parameters(module: nn.Module, path: str) -> None:
    """Fill a module's own tensors by calling its `reset_parameters`. Adapters, and models whose factory declares
    `meta_device = True`, are filled in this way. Raise UserError if the method fails, or does not fill a tensor."""
    before = {name: (tensor, tensor._version) for name, tensor in own_tensors(module).items()}
    where = f"reset_parameters of {type(module).__name__} ({path or 'the model itself'})"
    reset = _reset_method(module)
    assert reset is not None, "check_reset_parameters must run before"
    try:
        reset()
    except Exception as error:
        raise UserError(
            f"{where} failed. The method is called on a copy of the module without submodules, and must fill the "
            f"parameters and buffers that the module owns itself:\n{user_traceback(error)}"
        ) from error
    unfilled = [name for name, tensor in own_tensors(module).items() if not _is_filled(tensor, *before[name])]
    if unfilled:
        raise UserError(
            f"{where} does not fill {', '.join(unfilled)}. The factory declares meta_device = True, so the values from "
            "__init__ are lost: let reset_parameters fill every parameter and buffer that the module owns itself, or "
            "remove meta_device"
        )


def _is_filled(tensor: Tensor, before: Tensor, version: int) -> bool:
    if tensor.is_floating_point() or tensor.is_complex():
        return not bool(tensor.isnan().any())
    return tensor is not before or tensor._version > version


def check_reset_parameters(model: nn.Module) -> None:
    """Raise ConfigError on `model.name` if tensors would lose their values on the meta device: tensors of a module
    without `reset_parameters`, and tensors that are plain attributes."""
    problems = [*_without_reset_parameters(model), *_lost_tensors(model)]
    if problems:
        raise ConfigError(problems)


def _lost_tensors(model: nn.Module) -> Iterator[Problem]:
    for path, module in model.named_modules():
        names = [name for name, value in vars(module).items() if isinstance(value, Tensor) and value.is_meta]
        for name in names:
            where = f"{type(module).__name__} ({path or 'the model itself'})"
            yield Problem(
                ("model", "name"),
                f"{where} holds the tensor {name} as a plain attribute; the factory declares meta_device = True, so "
                f'the values of {name} are lost: use register_buffer("{name}", ...) and fill the buffer in '
                "reset_parameters, or remove meta_device",
            )


def _without_reset_parameters(model: nn.Module) -> Iterator[Problem]:
    reported: set[type] = set()
    for path, module in model.named_modules():
        tensors = own_tensors(module)
        if not tensors or type(module) in reported or _reset_method(module) is not None:
            continue
        reported.add(type(module))
        yield Problem(
            ("model", "name"),
            f"{type(module).__name__} ({path or 'the model itself'}) owns {', '.join(tensors)} but has no "
            "reset_parameters to fill them; the factory declares meta_device = True, so the values from __init__ are "
            "lost: add the method and call it in __init__, or remove meta_device",
        )


def _reset_method(module: nn.Module) -> Callable[[], object] | None:
    # MultiheadAttention is the only class of torch with a private name for the method.
    return getattr(
        module, "_reset_parameters" if isinstance(module, nn.MultiheadAttention) else "reset_parameters", None
    )
