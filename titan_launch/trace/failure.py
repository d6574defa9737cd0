"""Why a model cannot be traced, told with the place in its own code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)

from titan_launch.config.model import ModelConfig
from titan_launch.errors import ConfigError, config_error
from titan_launch.registry import user_place, user_traceback

_NEEDS_VALUES = (DataDependentOutputException, DynamicOutputShapeException)
_UNSUPPORTED = (UnsupportedOperatorException, UnsupportedFakeTensorException)
_SAID_BY_RUNTIME_ERROR = {".numpy()": "tensor.numpy()", "Cannot access data pointer": "tensor.data_ptr()"}


@contextmanager
def failures_explained(config: ModelConfig) -> Iterator[None]:
    """Raise ConfigError on `model.name` for an operation that needs values, or that PyTorch cannot do without them, and
    with the traceback for another error of a user's own model; other errors come as they are."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        operation = _unfit_operation(error)
        if operation is not None:
            reason = _unfit(operation, user_place(error, or_own=True))
            raise config_error(("model", "name"), reason, config.name) from error
        if ":" not in config.name:
            raise
        reason = "failed while it was traced: run on tensors that have shapes but no values"
        raise config_error(("model", "name"), f"{reason}\n{user_traceback(error)}", config.name) from error


def _unfit(operation: str, place: str | None) -> str:
    return (
        f"cannot be traced: {operation}{f' at {place}' if place else ''} needs the values of a tensor, and a trace has "
        "only shapes; compute it with operations whose output shapes do not depend on values (torch.where, masked_fill)"
    )


def _unfit_operation(error: Exception) -> str | None:
    """The name of the operation that cannot run on fake tensors; None where the error is of another kind."""
    if isinstance(error, (*_NEEDS_VALUES, *_UNSUPPORTED)):
        operation = getattr(error, "func", None) or next(iter(error.args), "an operation")
        return _READABLE.get(str(operation), str(operation))
    if isinstance(error, RuntimeError):
        return next((name for part, name in _SAID_BY_RUNTIME_ERROR.items() if part in str(error)), None)
    return None


_READABLE = {
    "aten._local_scalar_dense.default": "aten._local_scalar_dense (tensor.item(), a tensor as a number or condition)",
    "aten.nonzero.default": "aten.nonzero (torch.nonzero, or a mask as an index)",
}
