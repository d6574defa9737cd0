"""Functions that find and check the logits in a model's outputs. Each failed check is a ConfigError on `model.name`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from titan_launch.config.sections.data import SampleUnit
from titan_launch.core.errors import ConfigError, config_error
from titan_launch.models.documents import document_arguments

LogitsCheck = Callable[[Sequence[int], Tensor], None]
"""A function of the shape of the logits, and of the targets. It raises ConfigError if the shape does not fit the
targets."""

FORWARD = "the model's forward "
"""The first words of every error about a model's forward. The key of these errors is `model.name`."""

INPUTS = {"tokens": "token ids (batch, seq_len)", "images": "images (batch, channels, height, width)"}
_LOGITS = {"tokens": "(batch, seq_len, classes)", "images": "(batch, classes)"}
DATA = {"tokens": "the vocabulary of the data has {} tokens", "images": "the images of the data have {} classes"}


def forward_error(reason: str, contract: str = "") -> ConfigError:
    """Return a ConfigError about the model's forward. `reason`: the rest of the sentence that `FORWARD` begins.
    `contract` explains the required arguments and outputs."""
    return config_error(("model", "name"), FORWARD + reason + contract)


def logits_contract(unit: SampleUnit) -> str:
    """Return the end of an error message: what a forward gets, and that it must return logits."""
    return (
        f"; forward(inputs) gets one tensor, {INPUTS[unit]}, and must return the logits, a tensor {_LOGITS[unit]}; "
        'the launcher computes the loss, or, with model.loss = "mean" or "sum", forward(inputs, labels) returns it'
    )


def are_logits(tensor: Tensor, targets: Tensor) -> bool:
    """Return True if a tensor in a model's outputs has the shape of logits: (*targets.shape, classes)."""
    return tensor.ndim > 0 and tensor.shape[:-1] == targets.shape


def find_logits(outputs: Any, targets: Tensor, fits: Callable[[Tensor, Tensor], bool] = are_logits) -> Tensor | None:
    """Return the logits in a model's outputs; None if there are none.

    If the outputs are a single tensor, this tensor is the logits; a scalar is never the logits. For other outputs, the
    logits are their attribute or entry `logits`. Without such an entry, the logits are the first floating-point tensor
    in a tuple or list for which `fits(tensor, targets)` is True: by default, a tensor of the shape (*targets.shape,
    classes).
    """
    if isinstance(outputs, Tensor):
        return outputs if outputs.ndim else None
    logits = entry(outputs, "logits")
    if logits is None and isinstance(outputs, (tuple, list)):
        tensors = (part for part in outputs if isinstance(part, Tensor) and part.is_floating_point())
        logits = next((tensor for tensor in tensors if fits(tensor, targets)), None)
    return logits if isinstance(logits, Tensor) else None


def entry(outputs: Any, name: str) -> Any:
    """Return the entry `name` of outputs that are a mapping, or the attribute `name` of other outputs. Return None if
    there is no such entry or attribute."""
    return outputs.get(name) if isinstance(outputs, Mapping) else getattr(outputs, name, None)


def select_logits(outputs: Any, targets: Tensor, fits: Callable[[Tensor, Tensor], bool] = are_logits) -> Tensor:
    """Return the logits in a model's outputs (see `find_logits`). If the outputs are a single tensor, return this
    tensor, even if it is a scalar. Raise ConfigError if there are no logits."""
    logits = outputs if isinstance(outputs, Tensor) else find_logits(outputs, targets, fits)
    if logits is None:
        contract = logits_contract("tokens" if targets.ndim > 1 else "images")
        lack = ' without an entry "logits"' if isinstance(outputs, Mapping) else ""
        lack = " without logits" if isinstance(outputs, (tuple, list)) else lack
        raise forward_error(f"returns a {type(outputs).__name__}{lack}", contract)
    return logits


def logits_of(model: nn.Module, inputs: Tensor, targets: Tensor, documents: Tensor | None) -> Tensor:
    """Return the logits of a microbatch. Raises ConfigError if the model returns none."""
    return select_logits(model(inputs, **document_arguments(model, documents)), targets)


def logits_check(unit: SampleUnit, num_classes: int) -> LogitsCheck:
    """Return a check of the shape of logits. The check does not wait for the device.

    `num_classes`: smallest allowed number of classes of the logits. The check raises ConfigError if the shape is not
    (*targets.shape, classes), or has too few classes. Without the check, a target beyond the classes would abort the
    process on a GPU.
    """

    contract = logits_contract(unit)

    def check(shape: Sequence[int], targets: Tensor) -> None:
        if not shape:
            raise forward_error("returns a scalar, probably the loss, instead of logits", contract)
        if tuple(shape[:-1]) != targets.shape:
            shapes = f"{tuple(shape)} for targets of the shape {tuple(targets.shape)}"
            raise forward_error(f"returns a tensor of the shape {shapes}", contract)
        if shape[-1] < num_classes:
            reason = f"returns logits of {shape[-1]} classes, but {DATA[unit].format(num_classes)}"
            raise forward_error(f"{reason}; give the model's last layer {num_classes} outputs")

    return check
