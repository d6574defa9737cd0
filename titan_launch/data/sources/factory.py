"""Samples from the user's own code: `kind = "package.module:factory"`.

A factory is called as `factory(context, **args)`, with a `SourceContext`. It returns one of:

- an object with `__len__` and `__getitem__`, and optionally `__getitems__(indices) -> list of samples`. The same index
  always returns the same sample;
- an iterable of samples: a stream.

An object or a stream may have the attribute `num_classes` and the method `describe() -> str`. An object with
`__getitem__` may also have `fingerprint() -> str`, whose result changes when the data changes. A stream may have
`state_dict` and `load_state_dict`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from titan_launch.config.image_format import ImageFormat, misfits
from titan_launch.config.sections.data import IGNORED_TARGET, FactoryData, stream_problems
from titan_launch.core.errors import ConfigError, UserError, config_error
from titan_launch.core.fingerprint import Fingerprint, fingerprint_of
from titan_launch.core.import_string import import_factory, user_traceback
from titan_launch.data.sources.interface import Sample, SampleSource, SourceContext, bytes_of
from titan_launch.data.sources.stream import SampleReader, StreamSource


class FactorySource:
    """The samples of an object with `__len__` and `__getitem__`. Each sample is checked when it is read."""

    def __init__(self, data: Any, check: SampleCheck, description: str):
        self._data, self._check, self._description = data, check, description
        self.num_classes = check.num_classes

    def __len__(self) -> int:
        return len(self._data)

    def describe(self) -> str:
        return f"{len(self):,} samples of {self._description}"

    def fingerprint(self, seed: int) -> Fingerprint:
        """Return the fingerprint of samples or, if the object has a method `fingerprint`, of the text that this method
        returns."""
        if hasattr(self._data, "fingerprint"):
            content = str(self._data.fingerprint()).encode()
            return fingerprint_of([], len(self), lambda index: content, seed)
        return fingerprint_of([], len(self), lambda index: bytes_of(self[index]), seed)

    def __getitem__(self, index: int) -> Sample:
        """Return sample `index`. Raises UserError if `SampleCheck` refuses the sample."""
        return self._check(self._data[index], f"sample {index}")

    def read_batch(self, indices: Sequence[int], positions: Sequence[int] | None) -> Sample:
        """See `BatchSource.read_batch`. `positions` has no effect. Raises UserError for a wrong sample, and if the
        user's `__getitems__` returns too few or too many samples."""
        if hasattr(self._data, "__getitems__"):
            found = list(self._data.__getitems__(list(indices)))
            if len(found) != len(indices):
                wanted = f"must return one sample for each of the {len(indices)} indices, but returns {len(found)}"
                raise UserError(f"{self._check.name}: __getitems__ {wanted}")
            samples = [self._check(sample, f"sample {index}") for index, sample in zip(indices, found, strict=True)]
        else:
            samples = [self[index] for index in indices]
        return tuple(map(torch.stack, zip(*samples, strict=True)))


def build_factory(config: FactoryData, context: SourceContext) -> SampleSource:
    """Call the user's factory, and build a source of the object that the factory returns. Raises ConfigError if the
    factory fails, if the object or its first or last sample is invalid, or if keys do not fit a stream."""
    key = (*context.key, "kind")
    factory = import_factory(config.kind, key)

    def call() -> Any:
        try:
            return factory(context, **config.args)
        except ConfigError:
            raise
        except Exception as error:
            raise config_error(key, f"failed:\n{user_traceback(error)}", config.kind) from error

    data = call()
    has_index = hasattr(data, "__len__") and hasattr(data, "__getitem__")
    if not has_index and not hasattr(data, "__iter__"):
        reason = (
            f"must return an object with __len__ and __getitem__, or an iterable, but returns a {type(data).__name__}"
        )
        raise config_error(key, reason, config.kind)
    if has_index and not len(data):
        raise config_error(key, "returns an object without samples: its length is 0", config.kind)
    try:
        first = data[0] if has_index else next(iter(data))
        check = SampleCheck.of(first, config, context, getattr(data, "num_classes", None))
        description = str(data.describe()) if hasattr(data, "describe") else config.kind
        if has_index:
            check(data[len(data) - 1], f"sample {len(data) - 1}")
            return FactorySource(data, check, description)
    except ConfigError:
        raise
    except UserError as error:
        raise config_error(key, str(error).removeprefix(f"{config.kind}: "), config.kind) from None
    except StopIteration:
        raise config_error(key, "returns an iterable without samples", config.kind) from None
    except Exception as error:
        raise config_error(key, f"returns data that cannot be read:\n{user_traceback(error)}", config.kind) from error
    if problems := list(stream_problems(config, context.key)):
        raise ConfigError(problems)

    def open_part(part: int, parts: int) -> SampleReader:
        return SampleReader(call, check, part, parts)

    return StreamSource(open_part, first, check.num_classes, description)


@dataclass(frozen=True)
class SampleCheck:
    """A check that samples have the form that models and the loss require."""

    name: str
    """Import string of the factory, for errors."""

    forms: tuple[tuple[str, tuple[int, ...], torch.dtype], ...]
    """(Name, shape, dtype) of each tensor of a sample."""

    num_classes: int
    """Number of classes of the targets. For tokens, this is the size of the vocabulary."""

    @classmethod
    def of(cls, first: Any, config: FactoryData, context: SourceContext, num_classes: int | None) -> SampleCheck:
        """Return the check of a factory's samples. Raises ConfigError for images of a wrong form, for images that do
        not fit the model, and for images of an unknown number of classes. Raises UserError if the new check refuses the
        first sample.

        `first`: the first sample. `num_classes`: the attribute `num_classes` of the object that the factory returned;
        None without this attribute. The number of classes is then that of the model or the tokenizer.
        """
        key = (*context.key, "kind")
        if config.unit == "tokens":
            vocab_size = num_classes or context.tokenizer.vocab_size
            names = ("input", "target", "documents")[: 2 + (config.samples == "documents")]
            dtypes = (torch.int64, torch.int64, torch.int32)
            forms = tuple((name, (context.seq_len,), dtype) for name, dtype in zip(names, dtypes, strict=False))
            check = cls(config.kind, forms, vocab_size)
        else:
            taken = context.images_taken
            classes = num_classes or (None if taken is None else taken.num_classes)
            if classes is None:
                raise config_error(
                    key, "returns an object with images, but without the attribute num_classes; add it", config.kind
                )
            shape = tuple(first[0].shape) if isinstance(first, tuple) and isinstance(first[0], Tensor) else ()
            if len(shape) != 3:
                wanted = "a pair of a float32 image [channels, height, width] and an int64 class"
                found = f"a tuple ({', '.join(map(_form, first[:4]))})" if isinstance(first, tuple) else _form(first)
                raise config_error(key, f"sample 0 must be {wanted}, but is {found}", config.kind)
            held = ImageFormat(*shape, num_classes=classes)
            for problem in misfits(held, taken) if taken is not None else ():
                found = problem.partition(";")[0]
                reason = f"{found}; return images that fit the model, or change model.args"
                raise config_error(key, reason, config.kind)
            check = cls(config.kind, (("input", shape, torch.float32), ("target", (), torch.int64)), classes)
        check(first, "sample 0")
        return check

    def __call__(self, sample: Any, where: str) -> Sample:
        """Return the sample unchanged. Raises UserError if its form, its tokens, its targets or its document numbers
        are wrong. `where`: name of the sample in the error."""
        if not isinstance(sample, tuple) or len(sample) != len(self.forms):
            names = ", ".join(name for name, *_ in self.forms)
            raise self._error(where, f"must be a tuple ({names}), but is {_form(sample)}")
        for (name, shape, dtype), tensor in zip(self.forms, sample, strict=True):
            if not isinstance(tensor, Tensor) or (tuple(tensor.shape), tensor.dtype) != (shape, dtype):
                raise self._error(where, f"{name} must be a tensor {list(shape)} of {dtype}, but is {_form(tensor)}")
        inputs, targets, *documents = sample
        if not inputs.is_floating_point() and not _in_range(inputs, self.num_classes):
            raise self._error(where, f"input has tokens outside of the vocabulary, 0 to {self.num_classes - 1}")
        if not _in_range(targets[targets != IGNORED_TARGET], self.num_classes):
            allowed = f"0 to {self.num_classes - 1}, or {IGNORED_TARGET} for a target that does not count"
            raise self._error(where, f"target must be {allowed}")
        if documents and (int(documents[0][0]) != 0 or not _in_range(documents[0].diff(), 2)):
            reason = "documents must begin at 0 in each sample and rise by 0 or 1 from token to token"
            raise self._error(where, reason)
        return sample

    def _error(self, where: str, reason: str) -> UserError:
        return UserError(f"{self.name}: {where}: {reason}")


def _in_range(values: Tensor, limit: int) -> bool:
    return not values.numel() or (int(values.min()) >= 0 and int(values.max()) < limit)


def _form(value: Any) -> str:
    """Return a short description of a value for an error."""
    if isinstance(value, Tensor):
        return f"a tensor {list(value.shape)} of {value.dtype}"
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}"
    return f"a {type(value).__name__}"
