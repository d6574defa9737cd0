"""What compiling costs: the folder in which its results outlast a run, and the time it takes."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from titan_launch.collective import on_all, warn
from titan_launch.config.compile import CompileConfig
from titan_launch.errors import config_error

_log = logging.getLogger(__name__)

_TRITON = "TRITON_CACHE_DIR"


@contextmanager
def cache_folder(config: CompileConfig) -> Iterator[None]:
    """Until the end of the block the compiler keeps what it makes in `compile.cache_folder`, and looks there first.

    Around a run, from before its first graph. After it the environment is as it was, and what this process has compiled
    is forgotten, so that a later run makes its kernels in a folder of its own, or finds them there. Ranks and runs may
    share a folder: what is kept is found by a hash of what it was made of. Collective, where a folder is named; raises
    ConfigError on all ranks where one cannot make it.
    """
    if not config.enable or config.cache_folder is None:
        yield
        return
    from torch._inductor.runtime.cache_dir_utils import temporary_cache_dir

    name = config.cache_folder
    folder = on_all(lambda: _made(name))[dist.get_rank()]
    triton = os.environ.get(_TRITON)
    # The latter sets inductor's variable, and forgets its kernels at both ends.
    with _unreadable_entries_said_once(name), temporary_cache_dir(folder):
        try:
            yield
        finally:
            torch.compiler.reset()  # graphs, which refer to the kernels
            if triton is None:  # inductor has put it below its own folder
                os.environ.pop(_TRITON, None)


@contextmanager
def _unreadable_entries_said_once(name: str) -> Iterator[None]:
    """One warning in place of inductor's, which come with a traceback for each entry that it cannot read."""
    is_said = False

    def is_shown(record: logging.LogRecord) -> bool:
        nonlocal is_said
        if not record.exc_info or not record.getMessage().endswith("unable to load compiled graph"):
            return True
        if not is_said:
            error = record.exc_info[1]
            reason = f"{type(error).__name__}: {error}"
            warn(_log, 'compile.cache_folder = "%s": entries are damaged (%s); they are made anew', name, reason)
        is_said = True
        return False

    log = logging.getLogger("torch._inductor.codecache")
    log.addFilter(is_shown)
    try:
        yield
    finally:
        log.removeFilter(is_shown)


def _made(name: str) -> str:
    """The absolute path of a folder, which is there then."""
    try:
        folder = Path(name).expanduser().absolute()
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError) as error:  # RuntimeError: the home of a user who is not there
        raise config_error(("compile", "cache_folder"), f"cannot be made: {error}", name) from error
    return str(folder)


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
