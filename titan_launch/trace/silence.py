"""A trace beside a run, or before one."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

_TALKATIVE = ("torch._subclasses.fake_tensor", "torch.distributed.tensor._redistribute", "titan_launch.parallel")


@contextmanager
def silence() -> Iterator[None]:
    """Without warnings and logs: a run prints its own, and an error that PyTorch logs as it raises it is reported."""
    loggers = [logging.getLogger(name) for name in _TALKATIVE]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
