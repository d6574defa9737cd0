"""Checks of a model's forward, and explanations of its errors. Each failed check is a ConfigError on `model.name`."""

from __future__ import annotations

import inspect
import linecache
import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from titan_launch.config.sections.data import SampleUnit
from titan_launch.core.errors import ConfigError, config_error
from titan_launch.core.import_string import is_user_file
from titan_launch.distributed.torch_private import roots
from titan_launch.models.build import has_forward
from titan_launch.models.loss import Loss

FORWARD = "the model's forward "
"""The first words of every error of this module. The errors concern the key `model.name`."""

_INPUTS = {"tokens": "token ids (batch, seq_len)", "images": "images (batch, channels, height, width)"}
_LOGITS = {"tokens": "(batch, seq_len, classes)", "images": "(batch, classes)"}
_DATA = {"tokens": "the vocabulary of the data has {} tokens", "images": "the images of the data have {} classes"}


def check_signature(model: nn.Module, unit: SampleUnit) -> None:
    """Raise ConfigError for a model whose forward cannot be called with the inputs as the only argument."""
    if not has_forward(model):
        raise _error(f"is missing: {type(model).__name__} defines none", unit)
    try:
        inspect.signature(model.forward).bind(None)
    except TypeError as error:
        code = getattr(inspect.unwrap(type(model).forward), "__code__", None)
        location = "" if code is None else f" at {code.co_filename}:{code.co_firstlineno}"
        raise _error(f"{location} cannot be called with one argument ({error})".lstrip(), unit) from None


@contextmanager
def forward_explained(model: nn.Module, inputs: Tensor) -> Iterator[None]:
    """Raise ConfigError when `model(inputs)` fails because the forward does not accept one tensor, or because an
    embedding has too few rows."""
    try:
        yield
    except Exception as error:
        problem = _explanation(error, model, inputs)
        if problem is None:
            raise
        raise problem from error


def logits_of(outputs: Any, inputs: Tensor) -> Tensor:
    """Return the logits in a model's outputs: `outputs.logits` (as in `transformers`), or else the outputs themselves.

    Raises ConfigError when the outputs hold no tensor of logits.
    """
    logits = getattr(outputs, "logits", outputs)
    if not isinstance(logits, Tensor):
        raise _error(f"returns a {type(outputs).__name__}", _unit_of(inputs))
    return logits


def checked_loss(loss_sum: Loss, unit: SampleUnit, num_classes: int) -> Loss:
    """Return `loss_sum` with a preceding check of the logits' shape, which does not wait for the device.

    `num_classes`: number of classes of the data; for tokens, the size of the vocabulary. The check raises ConfigError
    if the logits are not (*targets.shape, classes), or have fewer classes than the data. Without the check,
    a target beyond the classes would abort the process on a GPU.
    """

    def checked(logits: Tensor, targets: Tensor) -> Tensor:
        if logits.ndim == 0:
            raise _error("returns a scalar, as if it computed the loss", unit)
        if logits.shape[:-1] != targets.shape:
            shapes = f"{tuple(logits.shape)} for targets of the shape {tuple(targets.shape)}"
            raise _error(f"returns a tensor of the shape {shapes}", unit)
        if logits.shape[-1] < num_classes:
            reason = f"returns logits of {logits.shape[-1]} classes, but {_DATA[unit].format(num_classes)}"
            raise _error(f"{reason}; give the model's last layer {num_classes} outputs")
        return loss_sum(logits, targets)

    return checked


def check_embeddings(model: nn.Module, vocab_size: int) -> None:
    """Make the first forward of a model raise ConfigError if an `nn.Embedding` of the token ids has fewer than
    `vocab_size` rows.

    The check does not read the ids, so it does not wait for the device and works on tensors without values.
    """
    model_inputs: list[Any] = []
    handles: list[RemovableHandle] = []

    def note_inputs(module: nn.Module, args: tuple[Any, ...]) -> None:
        model_inputs[:] = args[:1]

    def compare(path: str, module: nn.Embedding, args: tuple[Any, ...]) -> None:
        if model_inputs and args and args[0] is model_inputs[0] and module.num_embeddings < vocab_size:
            reason = f"looks up token ids in {path} (Embedding), which has {module.num_embeddings} rows, but "
            raise _error(f"{reason}{_DATA['tokens'].format(vocab_size)}; set its rows to {vocab_size}")

    def end(module: nn.Module, args: tuple[Any, ...], outputs: Any) -> None:
        model_inputs.clear()
        for handle in handles:
            handle.remove()

    for root in roots(model):
        handles.append(root.register_forward_pre_hook(note_inputs, prepend=True))
        handles.append(root.register_forward_hook(end))
        for path, module in root.named_modules():
            if isinstance(module, nn.Embedding) and type(module).forward is nn.Embedding.forward:
                handles.append(module.register_forward_pre_hook(partial(compare, path), prepend=True))


def _error(reason: str, unit: SampleUnit | None = None) -> ConfigError:
    """Return a ConfigError about the model's forward. With `unit`, the message explains which inputs the forward gets
    and which logits it must return."""
    if unit is not None:
        reason += (
            f"; forward(inputs) gets one tensor, {_INPUTS[unit]}, and must return the logits, a tensor "
            f"{_LOGITS[unit]}; the launcher computes the loss"
        )
    return config_error(("model", "name"), FORWARD + reason)


def _unit_of(inputs: Tensor) -> SampleUnit:
    return "images" if inputs.is_floating_point() else "tokens"


def _explanation(error: Exception, model: nn.Module, inputs: Tensor) -> ConfigError | None:
    """Return the ConfigError that replaces an error in a forward: wrong use of its arguments, or an embedding with too
    few rows. Return None for any other error."""
    frames = list(traceback.walk_tb(error.__traceback__))
    user_frames = [(frame, line) for frame, line in frames if is_user_file(frame.f_code.co_filename)]
    if isinstance(error, ConfigError) or not user_frames:
        return None
    frame, line = user_frames[-1]
    location = f"{frame.f_code.co_filename}:{line}"
    if str(error) == "index out of range in self":
        return _missing_row(frames[-2][0], model, location)
    text = linecache.getline(frame.f_code.co_filename, line)
    if _misuses_inputs(error, frame, text, inputs) or _misses_arguments(error, frame, text, model):
        message = str(error).partition("\n")[0]
        return _error(f"fails at {location} ({type(error).__name__}: {message})", _unit_of(inputs))
    return None


def _misuses_inputs(error: Exception, frame: FrameType, text: str, inputs: Tensor) -> bool:
    """Return True if the line that failed, `text`, uses the inputs as a dict, a tuple or an object."""

    def is_inputs(value: Any) -> bool:  # also a copy of the inputs in another dtype
        is_alike = isinstance(value, Tensor) and value.shape == inputs.shape
        return is_alike and value.is_floating_point() == inputs.is_floating_point()

    if isinstance(error, AttributeError):
        return is_inputs(error.obj)
    by_name = re.search(r"\[\s*['\"]", text) is not None
    is_indexed = by_name and isinstance(error, (IndexError, TypeError, ValueError))
    return (is_indexed or _UNPACKED.search(str(error)) is not None) and any(map(is_inputs, frame.f_locals.values()))


_UNPACKED = re.compile("must be a mapping|values to unpack|dictionary update sequence")


def _misses_arguments(error: Exception, frame: FrameType, text: str, model: nn.Module) -> bool:
    """Return True if the line that failed, `text`, uses an argument of the model's forward that is missing.

    The forward declares such an argument as optional, or reads it from `**kwargs`."""
    code, names = frame.f_code, frame.f_code.co_varnames
    if code.co_name != "forward" or frame.f_locals.get(names[0]) is not model:
        return False
    num_named = code.co_argcount + code.co_kwonlyargcount
    if isinstance(error, KeyError):
        keywords = names[num_named + bool(code.co_flags & inspect.CO_VARARGS)]
        return bool(code.co_flags & inspect.CO_VARKEYWORDS and re.search(rf"\b{keywords}\s*\[", text))
    missing = [name for name in names[2:num_named] if frame.f_locals.get(name, code) is None]
    return "NoneType" in str(error) and any(re.search(rf"\b{name}\b(?!\s*=[^=])", text) for name in missing)


def _missing_row(frame: FrameType, model: nn.Module, location: str) -> ConfigError | None:
    """Return the error of an `nn.Embedding` for an index beyond its rows. `frame`: frame of the embedding's forward."""
    module, indices = frame.f_locals.get("self"), frame.f_locals.get("input")
    if not isinstance(module, nn.Embedding) or not isinstance(indices, Tensor):
        return None
    path = next(path for path, other in model.named_modules() if other is module)
    lowest, highest = (int(index) for index in indices.aminmax())
    index = lowest if lowest < 0 else highest
    reason = f"looks up the index {index} in {path} (Embedding), which has {module.num_embeddings} rows"
    if index < 0:
        return _error(f"{reason} (at {location}); indices count from 0")
    return _error(f"{reason} (at {location}); add rows, or lower training.seq_len if the indices are positions")
