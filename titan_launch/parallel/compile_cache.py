"""What compiling costs: the folder in which its results outlast a run, and the time it takes."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from titan_launch.config.compile import CompileConfig
from titan_launch.errors import config_error

_log = logging.getLogger(__name__)


def use_cache_folder(config: CompileConfig) -> None:
    """Let the compiler keep what it makes in `compile.cache_folder`, and look there first; before the first graph.

    Ranks and runs may share it: what is kept is found by a hash of what it was made of. Raises ConfigError where it
    cannot be made.
    """
    if config.enable and config.cache_folder is not None:
        try:
            folder = Path(config.cache_folder).expanduser().absolute()
            folder.mkdir(parents=True, exist_ok=True)
        except (OSError, RuntimeError) as error:  # RuntimeError: the home of a user who is not there
            raise config_error(("compile", "cache_folder"), f"cannot be made: {error}", config.cache_folder) from error
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)


class CompileTime:
    """Seconds that this process has compiled, and how many graphs' kernels it made or found in the cache."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._since: float | None = None
        self._graphs_before = _graphs()

    def begin(self, _: object = None) -> None:
        """A compilation begins."""
        self._since = time.perf_counter()

    def end(self, _: object = None) -> None:
        """It has ended."""
        if self._since is not None:
            self._seconds += time.perf_counter() - self._since
            self._since = None

    def take(self) -> float:
        """Seconds since the last call, which the log says too where something was compiled."""
        seconds, self._seconds = self._seconds, 0.0
        graphs = _graphs()
        made, found = (now - before for now, before in zip(graphs, self._graphs_before, strict=True))
        self._graphs_before = graphs
        if seconds:
            kernels = f"; kernels of {made} graphs were made, of {found} found in the cache" if made or found else ""
            _log.info("compiling took %.1f s%s", seconds, kernels)
        return seconds


@contextmanager
def compile_time() -> Iterator[CompileTime]:
    """Measures until the end of the block. Backward graphs count, which are compiled by the first backward."""
    from torch._dynamo.callback import callback_handler

    counted = CompileTime()
    callback_handler.register_start_callback(counted.begin)
    callback_handler.register_end_callback(counted.end)
    try:
        yield counted
    finally:
        callback_handler.remove_start_callback(counted.begin)
        callback_handler.remove_end_callback(counted.end)


def _graphs() -> tuple[int, int]:
    """Graphs whose kernels inductor has made so far, and those it has found in its cache."""
    from torch._dynamo.utils import counters

    return counters["inductor"]["fxgraph_cache_miss"], counters["inductor"]["fxgraph_cache_hit"]
