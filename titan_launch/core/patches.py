"""Context managers for temporary changes of attributes, environment variables, loggers, random number generators and
garbage collection."""

from __future__ import annotations

import gc
import logging
import os
import random
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute of `owner` until the end of the block, even if the block raises an error.

    If `owner` inherits the attribute from a class, the new value is set on `owner` itself, and deleted at the end.
    """
    is_own = name in vars(owner)
    before = vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if is_own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)


@contextmanager
def environment(**variables: str) -> Iterator[None]:
    """Set environment variables until the end of the block, even if the block raises an error."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def loggers_silenced(*names: str, below: int = logging.CRITICAL) -> Iterator[None]:
    """Drop log records below the level `below` in these loggers until the end of the block, even if the block raises an
    error."""
    with ExitStack() as stack:
        for logger in map(logging.getLogger, names):
            stack.callback(logger.setLevel, logger.level)
            logger.setLevel(below)
        yield


def torchao_import_silenced() -> AbstractContextManager[None]:
    """Return a context manager that drops the warnings that torchao logs when it is imported. The warnings are about
    kernels that training does not use.

    If torchao is installed, `transformers` imports it together with a model's class.
    """
    return loggers_silenced("torchao", "torch.utils._pytree", below=logging.ERROR)


@contextmanager
def generators_seeded(seed: int) -> Iterator[None]:
    """Seed the generators of PyTorch (CPU), Python and NumPy until the end of the block, and then restore their states.

    The GPU's generator does not change.
    """
    import numpy as np
    import torch  # not imported by a check of a job file

    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    torch.default_generator.manual_seed(seed)  # torch.manual_seed would also seed the GPU, which draws dropout masks
    random.seed(seed)
    np.random.seed(seed % 2**32)
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])


@contextmanager
def garbage_collection_disabled() -> Iterator[None]:
    """Disable garbage collection during the block."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Disable garbage collection during the block. At its end, exempt all existing objects from later collections
    (`gc.freeze`).

    Importing PyTorch creates a million permanent objects. Garbage collection takes 10 % to 25 % of the import time.
    """
    with garbage_collection_disabled():
        yield
        gc.freeze()
