"""The call of a model, checks of its forward, and explanations of its errors. A failed check raises a ConfigError that
names the key `model.name`."""

from __future__ import annotations

import copy
import inspect
import linecache
import re
import traceback
from collections.abc import Iterator
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from titan_launch.config.sections.data import SampleUnit
from titan_launch.core.errors import ConfigError
from titan_launch.core.import_string import is_user_file
from titan_launch.data.sources import Batch
from titan_launch.distributed.torch_private import roots
from titan_launch.loss.interface import Loss
from titan_launch.loss.model_loss import model_loss_contract
from titan_launch.loss.outputs import DATA, find_logits, forward_error, logits_contract
from titan_launch.models.blocks import has_forward
from titan_launch.models.documents import document_arguments
from titan_launch.models.lora import class_without_adapter


def check_signature(model: nn.Module, unit: SampleUnit, has_own_loss: bool = False) -> None:
    """Raise ConfigError for a model without a forward, and for a forward that cannot be called with the inputs as the
    only argument. With `has_own_loss`, the arguments are the inputs and `labels`. `unit` only changes the text of the
    error."""
    contract = model_loss_contract(unit) if has_own_loss else logits_contract(unit)
    if not has_forward(model):
        raise forward_error(f"is missing: {type(model).__name__} defines none", contract)
    try:
        inspect.signature(model.forward).bind(None, **({"labels": None} if has_own_loss else {}))
    except TypeError as error:
        code = getattr(inspect.unwrap(type(model).forward), "__code__", None)
        location = "" if code is None else f" at {code.co_filename}:{code.co_firstlineno}"
        call = "the arguments (inputs, labels=targets)" if has_own_loss else "one argument"
        raise forward_error(f"{location} cannot be called with {call} ({error})".lstrip(), contract) from None


def run_model(model: nn.Module, batch: Batch, loss: Loss) -> Any:
    """Run a model without pipeline stages, and return the outputs that `loss.sums` reads. `batch` is on the model's
    device. Call `loss.prepare` first. `explain_forward` explains errors of this call."""
    with loss.given(batch.targets):
        arguments = document_arguments(model, batch.documents) | loss.arguments(model, batch.targets)
        return loss.select(model(batch.inputs, **arguments), batch.targets)


def explain_forward(error: BaseException) -> ConfigError | None:
    """Return the ConfigError for a call of `run_model` that failed. Three causes are known: the model's forward expects
    other inputs, an embedding has too few rows, or a tensor is on another device. Return None for a different error."""
    frames = list(traceback.walk_tb(error.__traceback__))
    calls = (index for index, (frame, _) in enumerate(frames) if frame.f_code is run_model.__code__)
    start = next(calls, None)
    if start is None or not isinstance(error, Exception):
        return None
    # The inputs are read from the frame of the call, because another reference would keep them in memory for longer.
    call = frames[start][0].f_locals
    model, inputs, loss = call["model"], call["batch"].inputs, call["loss"]
    user_frames = [(frame, line) for frame, line in frames[start:] if is_user_file(frame.f_code.co_filename)]
    if isinstance(error, ConfigError) or not user_frames:
        return None
    frame, line = user_frames[-1]
    location = f"{frame.f_code.co_filename}:{line}"
    if str(error) == "index out of range in self":
        return _missing_row(frames[-2][0], model, location)
    message = str(error).partition("\n")[0]
    failure = f"fails at {location} ({type(error).__name__}: {message})"
    if isinstance(error, RuntimeError) and re.search("same device|expected device", message):
        attribute = next(_plain_tensors(model, inputs.device), None)
        return None if attribute is None else forward_error(f"{failure}; {attribute}")
    text = linecache.getline(frame.f_code.co_filename, line)
    if _misuses_inputs(error, frame, text, inputs) or _misses_arguments(error, frame, text, model):
        return forward_error(failure, loss.contract("images" if inputs.is_floating_point() else "tokens"))
    return None


def find_output_layer(model: nn.Module, seq_len: int) -> str | None:
    """Return the path of the output layer of a model of token ids: the `nn.Linear` whose unchanged output is the
    logits. `model` is on the meta device and not wrapped. A copy of the model runs one sequence. Return None if there
    is no such layer, if it runs more than once, or if the model does not run on the meta device."""
    copied, ran = copy.deepcopy(model), list[tuple[str, Tensor]]()
    for path, module in copied.named_modules():
        if not isinstance(module, nn.Linear):
            continue
        is_plain = class_without_adapter(module).forward is nn.Linear.forward and "forward" not in vars(module)
        if is_plain or hasattr(module, "adjust_logits"):
            module.register_forward_hook(lambda _, args, output, path=path: ran.append((path, output)))
    tokens = torch.zeros(1, seq_len, dtype=torch.int64, device="meta")
    try:
        with torch.no_grad():
            logits = find_logits(copied(tokens), tokens)
    except Exception:  # the run itself reports errors of a forward
        return None
    found = next((path for path, output in ran if output is logits), None)
    return found if [path for path, _ in ran].count(found or "") == 1 else None


def check_embeddings(model: nn.Module, vocab_size: int) -> None:
    """Make the first forward of a model raise ConfigError if an `nn.Embedding` of the token ids has fewer than
    `vocab_size` rows.

    The check does not read the ids. So the host does not wait for the device, and the model may run on the meta device.
    """
    model_inputs: list[Any] = []
    handles: list[RemovableHandle] = []

    def note_inputs(module: nn.Module, args: tuple[Any, ...]) -> None:
        model_inputs[:] = args[:1]

    def compare(path: str, module: nn.Embedding, args: tuple[Any, ...]) -> None:
        if model_inputs and args and args[0] is model_inputs[0] and module.num_embeddings < vocab_size:
            reason = f"looks up token ids in {path} (Embedding), which has {module.num_embeddings} rows, but "
            raise forward_error(f"{reason}{DATA['tokens'].format(vocab_size)}; give the Embedding {vocab_size} rows")

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


def _plain_tensors(model: nn.Module, device: torch.device) -> Iterator[str]:
    """Yield an error text for each module attribute with a tensor on another device than `device`. The attribute is the
    tensor, or a list, tuple or dict with the tensor. Parameters and buffers are not checked."""
    attributes = ((path, module, *item) for path, module in model.named_modules() for item in vars(module).items())
    for path, module, name, value in attributes:
        inside = list(value.values()) if isinstance(value, dict) else value
        values = inside if isinstance(inside, (list, tuple)) else [inside]
        other = next((each for each in values if isinstance(each, Tensor) and each.device != device), None)
        if other is not None and name not in ("_parameters", "_buffers"):
            owner = f"{type(module).__name__} ({path or 'the model itself'})"
            yield (
                f"{owner} holds a tensor on {other.device} in the plain attribute {name}, and the launcher moves only "
                f"parameters and buffers to {device}; register it in __init__: "
                f'self.register_buffer("{name}", ..., persistent=False)'
            )


def _misuses_inputs(error: Exception, frame: FrameType, text: str, inputs: Tensor) -> bool:
    """Return True if the failed line of code, `text`, uses the inputs as a dict, a tuple or an object."""

    def is_inputs(value: Any) -> bool:  # also a copy of the inputs in another dtype
        is_alike = isinstance(value, Tensor) and value.shape == inputs.shape
        return is_alike and value.is_floating_point() == inputs.is_floating_point()

    if isinstance(error, AttributeError):
        return is_inputs(error.obj)
    by_name = re.search(r"\[\s*['\"]", text) is not None
    is_indexed = by_name and isinstance(error, (IndexError, TypeError, ValueError))
    is_unpacked = re.search("must be a mapping|values to unpack|dictionary update sequence", str(error)) is not None
    return (is_indexed or is_unpacked) and any(map(is_inputs, frame.f_locals.values()))


def _misses_arguments(error: Exception, frame: FrameType, text: str, model: nn.Module) -> bool:
    """Return True if the failed line of code, `text`, uses an argument of the model's forward that the call did not
    pass. Such an argument is optional, or is read from `**kwargs`."""
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
    """Return the error for an `nn.Embedding` that has no row for an index; None if another module failed. `frame`:
    frame of the failed module's forward."""
    module, indices = frame.f_locals.get("self"), frame.f_locals.get("input")
    if not isinstance(module, nn.Embedding) or not isinstance(indices, Tensor):
        return None
    path = next(path for path, other in model.named_modules() if other is module)
    lowest, highest = (int(index) for index in indices.aminmax())
    index = lowest if lowest < 0 else highest
    reason = f"looks up the index {index} in {path} (Embedding), which has {module.num_embeddings} rows"
    if index < 0:
        return forward_error(f"{reason} (at {location}); indices count from 0")
    return forward_error(f"{reason} (at {location}); add rows, or lower training.seq_len if the indices are positions")
