"""Checks of a model's forward, and explanations of its errors. Each failed check is a ConfigError on `model.name`."""

from __future__ import annotations

import copy
import inspect
import linecache
import math
import re
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from titan_launch.config.sections.data import IGNORED_TARGET, SampleUnit
from titan_launch.config.sections.loss import LossConfig
from titan_launch.core.errors import ConfigError, config_error
from titan_launch.core.import_string import is_user_file
from titan_launch.distributed.torch_private import roots
from titan_launch.loss.cross_entropy import LogitsCheck, Loss, count_valid
from titan_launch.models.blocks import has_forward
from titan_launch.models.documents import document_arguments
from titan_launch.models.lora import class_without_adapter
from titan_launch.parallel.fsdp import without_backward

FORWARD = "the model's forward "
"""The first words of every error of this module. The errors concern the key `model.name`."""

_INPUTS = {"tokens": "token ids (batch, seq_len)", "images": "images (batch, channels, height, width)"}
_LOGITS = {"tokens": "(batch, seq_len, classes)", "images": "(batch, classes)"}
_DATA = {"tokens": "the vocabulary of the data has {} tokens", "images": "the images of the data have {} classes"}


def check_signature(model: nn.Module, unit: SampleUnit, has_own_loss: bool = False) -> None:
    """Raise ConfigError for a model whose forward cannot be called with the inputs as the only argument.

    With `has_own_loss` the forward must also take `labels`.
    """
    contract = _own_loss_contract(unit) if has_own_loss else _logits_contract(unit)
    if not has_forward(model):
        raise _error(f"is missing: {type(model).__name__} defines none", contract)
    try:
        inspect.signature(model.forward).bind(None, **({"labels": None} if has_own_loss else {}))
    except TypeError as error:
        code = getattr(inspect.unwrap(type(model).forward), "__code__", None)
        location = "" if code is None else f" at {code.co_filename}:{code.co_firstlineno}"
        call = "the arguments (inputs, labels=targets)" if has_own_loss else "one argument"
        raise _error(f"{location} cannot be called with {call} ({error})".lstrip(), contract) from None


@contextmanager
def in_evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put a wrapped model into evaluation mode during the block, for forwards without a backward. Gradients of a step
    that has begun do not change."""
    was_training = {  # a frozen BatchNorm stays frozen
        module: module.training for root in roots(model) for module in root.modules()
    }
    for root in roots(model):
        root.eval()
    try:
        with without_backward(model):
            yield
    finally:
        for module, flag in was_training.items():
            module.training = flag


@contextmanager
def forward_explained(model: nn.Module, inputs: Tensor, loss: Loss) -> Iterator[None]:
    """Raise ConfigError when a model's forward fails because it expects other inputs, because an embedding has too few
    rows, or because of a tensor on another device."""
    try:
        yield
    except Exception as error:
        contract = loss.contract if isinstance(loss, OwnLoss) else _logits_contract(_unit_of(inputs))
        problem = _explanation(error, model, inputs, contract)
        if problem is None:
            raise
        raise problem from error


def label_arguments(model: nn.Module, targets: Tensor, loss: Loss) -> dict[str, Tensor]:
    """Return the keyword arguments of a forward: with `OwnLoss`, the labels.

    The language models of `transformers` shift `labels` by one token, and not `shift_labels`. Their forward passes
    `shift_labels` on to `loss_function` among other keyword arguments.
    """
    if not isinstance(loss, OwnLoss):
        return {}
    parameters = inspect.signature(model.forward).parameters
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    if "shift_labels" in parameters or (takes_any and hasattr(model, "loss_function")):
        return {"labels": targets, "shift_labels": targets}
    return {"labels": targets}


def select_outputs(outputs: Any, targets: Tensor, loss: Loss) -> Any:
    """Return the outputs of a model that `loss` reads: the logits, or with `OwnLoss` a tuple of loss and logits.

    The others, such as a cache of keys and values, are freed before the loss is computed. Raise ConfigError when the
    outputs have neither.
    """
    if isinstance(loss, OwnLoss):
        return loss.find(outputs), find_logits(outputs, targets, loss)
    logits = outputs if isinstance(outputs, Tensor) else find_logits(outputs, targets, loss)
    if logits is None:
        contract = _logits_contract("tokens" if targets.ndim > 1 else "images")
        raise _error(f"returns a {type(outputs).__name__}{_without_logits(outputs)}", contract)
    return logits


def logits_of(model: nn.Module, inputs: Tensor, targets: Tensor, documents: Tensor | None) -> Tensor:
    """Return the logits of a microbatch. Raises ConfigError if the model returns none."""
    outputs = model(inputs, **document_arguments(model, documents))
    logits: Tensor = select_outputs(outputs, targets, Loss())
    return logits


def find_logits(outputs: Any, targets: Tensor, loss: Loss) -> Tensor | None:
    """Return the logits in a model's outputs, or None. If the output layer computes `loss`, return its sums instead.

    The logits are the outputs themselves, their attribute or entry `logits`, or the first floating-point tensor of
    shape (*targets.shape, classes) in a tuple.
    """
    if isinstance(outputs, Tensor):
        return outputs if outputs.ndim else None
    logits = _entry(outputs, "logits")
    if logits is None and isinstance(outputs, (tuple, list)):
        tensors = (part for part in outputs if isinstance(part, Tensor) and part.is_floating_point())
        logits = next((tensor for tensor in tensors if loss.takes(tensor, targets)), None)
    return logits if isinstance(logits, Tensor) else None


def _entry(outputs: Any, name: str) -> Any:
    return outputs.get(name) if isinstance(outputs, Mapping) else getattr(outputs, name, None)


def _without_logits(outputs: Any) -> str:
    if isinstance(outputs, Mapping):
        return ' without an entry "logits"'
    return " without logits" if isinstance(outputs, (tuple, list)) else ""


class OwnLoss(Loss):
    """The loss that a model computes itself, as the sum over the valid targets of a microbatch."""

    def __init__(self, reduction: Literal["mean", "sum"], unit: SampleUnit, has_values: bool = True):
        """`has_values`: False for a trace, whose tensors have no values to check."""
        super().__init__(LossConfig(chunks=8))  # for `_check_shift`
        self._reduction = reduction
        self._checks_shift = has_values and unit == "tokens"
        self.contract = _own_loss_contract(unit)
        """The part of an error that says what a forward gets and must return."""

    def find(self, outputs: Any) -> Tensor:
        """Return the loss in a model's outputs, in fp32. Raise ConfigError if there is none."""
        loss = _entry(outputs, "loss")
        if loss is None:
            loss = outputs[0] if isinstance(outputs, (tuple, list)) and outputs else outputs
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            shape = f" of the shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else ""
            raise _error(f"returns a {type(loss).__name__}{shape} instead of a loss", self.contract)
        return loss.float().reshape(())

    def sums(self, outputs: tuple[Tensor, Tensor | None], targets: Tensor) -> Tensor:
        """Return two sums over the valid targets, in fp32. `outputs`: loss and logits.

        The first is the loss: a mean is multiplied by the number of valid targets. The second is 0 with gradients
        enabled. Without gradients it is the number of targets with the largest logit, or NaN without logits.

        Raise ConfigError if the loss shifts the targets once more.
        """
        loss, logits = outputs
        if logits is not None and not self.takes(logits, targets):
            logits = None
        if self._checks_shift:
            self._check_shift(loss.detach(), logits, targets)
        if self._reduction == "mean":
            num_valid = count_valid(targets)
            loss = (loss * num_valid).where(num_valid > 0, 0)  # a mean over no targets is NaN
        second = torch.zeros_like(loss)
        if not torch.is_grad_enabled():
            second = torch.full_like(loss, math.nan) if logits is None else (logits.argmax(-1) == targets).sum()
        return torch.stack([loss, second])

    @torch.no_grad()
    def _check_shift(self, loss: Tensor, logits: Tensor | None, targets: Tensor) -> None:
        """Raise ConfigError if the loss is the cross-entropy of the targets shifted by one token.

        The losses of both alignments are compared until they differ, usually in the first step. The host waits for
        the device. Without logits there is no check.
        """
        if logits is None:
            self._checks_shift = False
            return
        ignored = torch.full_like(targets[:, :1], IGNORED_TARGET)
        expected, shifted = (
            super(OwnLoss, self).sums(logits, wanted)[0] / (count_valid(wanted) if self._reduction == "mean" else 1)
            for wanted in (targets, torch.cat([targets[:, 1:], ignored], 1))
        )
        if not (expected - shifted).abs() > 1e-3 * shifted.abs():
            return
        self._checks_shift = False
        if (loss - shifted).abs() < 1e-4 * shifted.abs():
            reason = (
                "shifts the labels by one token, but the targets are shifted already; remove model.loss, so that the "
                "launcher computes the loss of its logits, or compare the logits at each position with its label"
            )
            raise _error(reason)


def logits_check(unit: SampleUnit, num_classes: int) -> LogitsCheck:
    """Return a check of the logits' shape, which does not wait for the device.

    `num_classes`: number of classes of the data; for tokens, the size of the vocabulary. The check raises ConfigError
    if the logits are not (*targets.shape, classes), or have fewer classes than the data. Without the check,
    a target beyond the classes would abort the process on a GPU.
    """

    contract = _logits_contract(unit)

    def check(shape: Sequence[int], targets: Tensor) -> None:
        if not shape:
            raise _error("returns a scalar, as if it computed the loss", contract)
        if tuple(shape[:-1]) != targets.shape:
            shapes = f"{tuple(shape)} for targets of the shape {tuple(targets.shape)}"
            raise _error(f"returns a tensor of the shape {shapes}", contract)
        if shape[-1] < num_classes:
            reason = f"returns logits of {shape[-1]} classes, but {_DATA[unit].format(num_classes)}"
            raise _error(f"{reason}; give the model's last layer {num_classes} outputs")

    return check


def find_output_layer(model: nn.Module, seq_len: int) -> str | None:
    """Return the path of the `nn.Linear` whose output a model of token ids returns as logits, unchanged.

    `model` is on the meta device and not wrapped. A copy of it runs one sequence. Return None if there is no such
    layer, if it runs more than once, or if the model does not run on the meta device.
    """
    copied, ran = copy.deepcopy(model), list[tuple[str, Tensor]]()
    for path, module in copied.named_modules():
        if isinstance(module, nn.Linear) and (_is_plain(module) or hasattr(module, "adjust_logits")):
            module.register_forward_hook(lambda _, args, output, path=path: ran.append((path, output)))
    tokens = torch.zeros(1, seq_len, dtype=torch.int64, device="meta")
    try:
        with torch.no_grad():
            logits = find_logits(copied(tokens), tokens, Loss())
    except Exception:  # the run itself reports errors of a forward
        return None
    found = next((path for path, output in ran if output is logits), None)
    return found if [path for path, _ in ran].count(found or "") == 1 else None


def _is_plain(module: nn.Linear) -> bool:
    return class_without_adapter(module).forward is nn.Linear.forward and "forward" not in vars(module)


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
            if isinstance(module, nn.Embedding) and class_without_adapter(module).forward is nn.Embedding.forward:
                handles.append(module.register_forward_pre_hook(partial(compare, path), prepend=True))


def _error(reason: str, contract: str = "") -> ConfigError:
    """Return the error of a forward. `contract` explains the required arguments and outputs."""
    return config_error(("model", "name"), FORWARD + reason + contract)


def _logits_contract(unit: SampleUnit) -> str:
    return (
        f"; forward(inputs) gets one tensor, {_INPUTS[unit]}, and must return the logits, a tensor {_LOGITS[unit]}; "
        'the launcher computes the loss, or uses that of forward(inputs, labels) with model.loss = "mean" or "sum"'
    )


def _own_loss_contract(unit: SampleUnit) -> str:
    return (
        f"; with model.loss, forward(inputs, labels=targets) gets {_INPUTS[unit]} and must return its loss, a scalar: "
        'alone, first in a tuple, or as the attribute or entry "loss"'
    )


def _unit_of(inputs: Tensor) -> SampleUnit:
    return "images" if inputs.is_floating_point() else "tokens"


def _explanation(error: Exception, model: nn.Module, inputs: Tensor, contract: str) -> ConfigError | None:
    """Return the ConfigError that replaces an error in a forward: wrong use of its arguments, an embedding with too
    few rows, or a tensor that is a plain attribute on another device. Return None for any other error."""
    frames = list(traceback.walk_tb(error.__traceback__))
    user_frames = [(frame, line) for frame, line in frames if is_user_file(frame.f_code.co_filename)]
    if isinstance(error, ConfigError) or not user_frames:
        return None
    frame, line = user_frames[-1]
    location = f"{frame.f_code.co_filename}:{line}"
    if str(error) == "index out of range in self":
        return _missing_row(frames[-2][0], model, location)
    message = str(error).partition("\n")[0]
    failure = f"fails at {location} ({type(error).__name__}: {message})"
    if isinstance(error, RuntimeError) and _OTHER_DEVICE.search(message):
        attribute = next(_plain_tensors(model, inputs.device), None)
        return None if attribute is None else _error(f"{failure}; {attribute}")
    text = linecache.getline(frame.f_code.co_filename, line)
    if _misuses_inputs(error, frame, text, inputs) or _misses_arguments(error, frame, text, model):
        return _error(failure, contract)
    return None


_OTHER_DEVICE = re.compile("same device|expected device")


def _plain_tensors(model: nn.Module, device: torch.device) -> Iterator[str]:
    """Describe the tensors on other devices that modules hold as plain attributes, also in lists, tuples and dicts."""
    attributes = ((path, module, *item) for path, module in model.named_modules() for item in vars(module).items())
    for path, module, name, value in attributes:
        inside = list(value.values()) if isinstance(value, dict) else value
        values = inside if isinstance(inside, (list, tuple)) else [inside]
        other = next((each for each in values if isinstance(each, Tensor) and each.device != device), None)
        if other is not None and name not in _TABLES:
            owner = f"{type(module).__name__} ({path or 'the model itself'})"
            yield (
                f"{owner} holds a tensor on {other.device} in the plain attribute {name}, and the launcher moves only "
                f"parameters and buffers to {device}; register it in __init__: "
                f'self.register_buffer("{name}", ..., persistent=False)'
            )


_TABLES = {"_parameters", "_buffers"}


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
