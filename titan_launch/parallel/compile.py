"""Compilation by torch.compile: each selected module, and the loss, becomes one graph.

Only the `forward` of a module is compiled. So the hooks of FSDP2 and of tensor parallelism run outside of the graph,
and the names of parameters stay the same. Modules of one class with equal shapes share a graph.

The compiler is imported at its first use, because the import takes a second.
"""

from __future__ import annotations

import functools
import logging
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titan_launch.config.sections.parallelism import ActivationCheckpointConfig, CompileConfig
from titan_launch.core.errors import ConfigError, config_error
from titan_launch.core.globs import alike
from titan_launch.distributed.collectives import on_all_ranks, warn
from titan_launch.distributed.dtensor import local_tensor
from titan_launch.distributed.torch_private import pending_result
from titan_launch.plan.types import ModelPlan, enclosing, parent

_log = logging.getLogger(__name__)

_GRAPHS_PER_MODULE = 8
"""Largest number of graphs per compiled module, for training, evaluation and other batch shapes: PyTorch's default per
function. The modules of a class share one function, so `_prepare` multiplies the limit by their number."""


def compile_pieces(
    model: nn.Module, plan: ModelPlan, config: CompileConfig, activation_checkpoint: ActivationCheckpointConfig
) -> None:
    """Replace the forward of every module of `plan.compiled` by a compiled one. Compilation runs at the first call.

    The new forward raises ConfigError if it cannot be compiled into one graph, or if the backend fails.
    """
    if not plan.compiled:
        return
    _prepare(len(plan.compiled), activation_checkpoint)
    for path in plan.compiled:
        module = model.get_submodule(path)
        module.forward = _compiled(module.forward, config, path)
    _log.info("%s", describe_pieces(plan, config))


def compile_loss(function: Callable[..., Any], config: CompileConfig) -> Callable[..., Any]:
    """Return `function`, which computes the loss. The result is compiled if `[compile]` enables compilation of the
    loss."""
    if not config.enable or "loss" not in config.components:
        return function
    return _compiled(function, config, "the loss")


def eager(config: CompileConfig) -> AbstractContextManager[Any]:
    """Return a context in which compiled modules run eagerly, so that hooks inside of them run."""
    return torch.compiler.set_stance("force_eager") if config.enable else nullcontext()


def describe_pieces(plan: ModelPlan, config: CompileConfig) -> str:
    """Return a log line with the backend, the compiled modules, and the FSDP2 units inside of blocks. These units are
    not compiled."""
    pieces = ", ".join(f"{count} x {pattern}" for pattern, count in alike(plan.compiled).items())
    inside = [u for u in plan.units if any(enclosing(parent(path), plan.inventory.blocks) for path in u.modules)]
    around = ", ".join(dict.fromkeys(unit.reason for unit in inside))
    excluded = f"; not compiled: FSDP2 units of {around}" if around else ""
    return f"compiled by {config.backend}, in one graph each: {pieces}{excluded}"


def _prepare(num_pieces: int, activation_checkpoint: ActivationCheckpointConfig) -> None:
    """Set options of the compiler for the whole process, which may compile several models or pipeline stages."""
    import torch._dynamo.config as options
    import torch._functorch.config

    graphs = _GRAPHS_PER_MODULE * num_pieces
    options.recompile_limit = max(options.recompile_limit, graphs)
    options.accumulated_recompile_limit = max(options.accumulated_recompile_limit, 2 * graphs)
    # Needed for modules that tensor parallelism replicates: their forward replaces DTensors by local parameters.
    options.skip_fwd_side_effects_in_bwd_under_checkpoint = True
    budget = activation_checkpoint.memory_budget if activation_checkpoint.mode == "memory_budget" else 1.0
    torch._functorch.config.activation_memory_budget = budget


def _compiled(compute: Callable[..., Any], config: CompileConfig, name: str) -> Callable[..., Any]:
    """Return `compute` as a compiled function. A graph is for fixed shapes: an input of a different shape gets a graph
    of its own. `name`: the name of `compute` in errors."""
    from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

    graph = torch.compile(compute, fullgraph=True, dynamic=False, backend=config.backend)
    has_run = False

    @functools.wraps(compute)
    def forward(*args: Any, **kwargs: Any) -> Any:
        nonlocal has_run
        args, kwargs = _materialized(args), _materialized(kwargs)
        try:
            result = graph(*args, **kwargs)
        except Exception as error:
            is_compilers = isinstance(error, (TorchDynamoException, FailOnRecompileLimitHit))
            if is_compilers or not has_run:
                compute(*args, **kwargs)  # raises the model's own error, if there is one
            if is_compilers:
                raise _compile_error(error, config, name) from error
            raise
        has_run = True
        return result

    return forward


def _materialized(value: Any) -> Any:
    """Return `value` with plain tensors in place of results of pending collectives (`pending_result`).

    Tensor parallelism passes such results to modules. A graph would then find tensors of a different class in backward.
    """
    if isinstance(value, Tensor):
        local = local_tensor(value)
        return value if pending_result(local) is local else value.clone()
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return type(value)(map(_materialized, value))
    if type(value) is dict:
        return {name: _materialized(item) for name, item in value.items()}
    return value


def _compile_error(error: Exception, config: CompileConfig, name: str) -> ConfigError:
    """Return a ConfigError with one line of text, which names the compiler's error and, if it is known, the line of the
    model's code."""
    from torch._dynamo.exc import BackendCompilerFailed, FailOnRecompileLimitHit

    text = re.sub(r"\Abackend=.* raised:\n", "", str(error))
    head, _, trace = text.partition("from user code:")
    causes = [head.partition("\n")[0].strip(), *re.findall(r"^ *Explanation: (.*)", head, re.MULTILINE)]
    lines = [line for line in re.findall(r'File "([^"]*)", line (\d+)', trace) if not line[0].startswith(_PYTORCH)]
    where = f" ({Path(lines[-1][0]).name}:{lines[-1][1]})" if lines else ""
    what = f"{name}{where}: {': '.join(cause.rstrip('.') for cause in causes)[:300]}"
    if isinstance(error, BackendCompilerFailed):
        is_cached = config.cache_folder is not None
        damaged = "; delete the folder compile.cache_folder if a file there is damaged, or" if is_cached else ";"
        reason = f"failed on {what}{damaged} set compile.enable = false"
        if config.backend == "inductor":
            reason += (
                '; to find the cause, set compile.backend = "aot_eager", which generates no kernels (FlexAttention '
                "then stores all scores)"
            )
        return config_error(("compile", "backend"), reason, config.backend)
    remedy = "change that line, or " if lines else ""
    if isinstance(error, FailOnRecompileLimitHit):
        what = f"{name}: the inputs have too many different shapes, or the code has too many variants"
        remedy = "give blocks inputs of equal shapes, or "
    reason = f"cannot make one graph of {what}; {remedy}set compile.enable = false"
    return config_error(("compile", "enable"), reason, True)


_PYTORCH = str(Path(torch.__file__).parent)


_TRITON = "TRITON_CACHE_DIR"


@contextmanager
def cache_folder(config: CompileConfig) -> Iterator[None]:
    """Let the compiler read and write kernels in `compile.cache_folder` until the `with` block ends.

    Enter the block before the first graph of a run. At the end of the block the environment is restored, and all graphs
    are dropped, so that a later run uses its own folder. Ranks and runs may share a folder, because the key of an entry
    is a hash of its source. Collective if a folder is set. Raise ConfigError on all ranks if a rank cannot create the
    folder.
    """
    if not config.enable or config.cache_folder is None:
        yield
        return
    from torch._inductor.runtime.cache_dir_utils import temporary_cache_dir

    name = config.cache_folder
    folder = on_all_ranks(lambda: _created_folder(name))[dist.get_rank()]
    triton = os.environ.get(_TRITON)
    # temporary_cache_dir sets inductor's variable, and makes inductor forget its kernels at both ends of the block.
    with _one_warning_of_unreadable_entries(name), temporary_cache_dir(folder):
        try:
            yield
        finally:
            torch.compiler.reset()  # drops the graphs, which refer to the kernels
            if triton is None:  # inductor has set the variable to a subfolder of its cache
                os.environ.pop(_TRITON, None)


@contextmanager
def _one_warning_of_unreadable_entries(name: str) -> Iterator[None]:
    """Replace inductor's warnings (a traceback for each unreadable cache entry) by a single warning."""
    is_logged = False

    def is_shown(record: logging.LogRecord) -> bool:
        nonlocal is_logged
        if not record.exc_info or not record.getMessage().endswith("unable to load compiled graph"):
            return True
        if not is_logged:
            error = record.exc_info[1]
            reason = f"{type(error).__name__}: {error}"
            warn(_log, 'compile.cache_folder = "%s" has damaged entries (%s), which are compiled again', name, reason)
        is_logged = True
        return False

    log = logging.getLogger("torch._inductor.codecache")
    log.addFilter(is_shown)
    try:
        yield
    finally:
        log.removeFilter(is_shown)


def _created_folder(name: str) -> str:
    """Create a folder, and return its absolute path. Raise ConfigError if that fails."""
    try:
        folder = Path(name).expanduser().absolute()
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError) as error:  # RuntimeError: "~user" of an unknown user
        reason = f"cannot be created ({error}); name a folder that this user may write to"
        raise config_error(("compile", "cache_folder"), reason, name) from error
    return str(folder)


class CompileTime:
    """Seconds of compilation in this process, and numbers of graphs with compiled or cached kernels."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._since: float | None = None
        self._graphs_before = _graphs()

    def begin(self, _: object = None) -> None:
        """Note the start of a compilation. The argument is ignored."""
        self._since = time.perf_counter()

    def end(self, _: object = None) -> None:
        """Add the time since `begin`. The argument is ignored."""
        if self._since is not None:
            self._seconds += time.perf_counter() - self._since
            self._since = None

    def take(self) -> float:
        """Return the seconds of compilation since the last call. Log them if they are not 0."""
        seconds, self._seconds = self._seconds, 0.0
        graphs = _graphs()
        made, found = (now - before for now, before in zip(graphs, self._graphs_before, strict=True))
        self._graphs_before = graphs
        if seconds:
            kernels = f"; graphs: {made} compiled, {found} from the cache" if made or found else ""
            _log.info("compilation: %.1f s%s", seconds, kernels)
        return seconds


@contextmanager
def compile_time() -> Iterator[CompileTime]:
    """Measure all compilation until the `with` block ends. Backward graphs are compiled in the first backward."""
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
    """Return two counts of this process: graphs that inductor has compiled, and graphs that it found in its cache."""
    from torch._dynamo.utils import counters

    return counters["inductor"]["fxgraph_cache_miss"], counters["inductor"]["fxgraph_cache_hit"]
