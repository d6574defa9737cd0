"""torch.compile of a model's pieces, each into one graph, and of the loss.

What is compiled is a module's `forward`, so that its own hooks (FSDP2's, those of tensor parallelism) run around the
graph, and its name and parameters stay as they are. Functions are compiled by their code: equal pieces share a graph.

The compiler is imported where something is compiled: that takes a second.
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
from titan_launch.distributed.collectives import on_all_ranks, warn
from titan_launch.distributed.dtensor import local_tensor
from titan_launch.models.loss import Loss
from titan_launch.plan.compilation import alike
from titan_launch.plan.types import ModelPlan, enclosing, parent

_log = logging.getLogger(__name__)

_FORMS = 8
"""How often one function may be compiled anew for each piece: training, evaluation, another shape of batch. PyTorch's
default, which is for a function alone, and which all pieces of one class would share."""


def compile_pieces(
    model: nn.Module, plan: ModelPlan, config: CompileConfig, recomputation: ActivationCheckpointConfig
) -> None:
    """Let the forward of every piece of `plan.compiled` be compiled at its first call, in place.

    The call raises ConfigError for what cannot be one graph, on every rank that makes it.
    """
    if not plan.compiled:
        return
    _prepare(len(plan.compiled), recomputation)
    for path in plan.compiled:
        module = model.get_submodule(path)
        module.forward = _compiled(module.forward, config, path)
    _log.info("%s", describe_pieces(plan, config))


def compile_loss(loss: Loss, config: CompileConfig) -> Loss:
    """The loss, compiled if `[compile]` says so."""
    if not config.enable or "loss" not in config.components:
        return loss
    return _compiled(loss, config, "the loss")


def eager(config: CompileConfig) -> AbstractContextManager[Any]:
    """Around calls that hooks inside of pieces are to see: they run as if nothing were compiled."""
    return torch.compiler.set_stance("force_eager") if config.enable else nullcontext()


def describe_pieces(plan: ModelPlan, config: CompileConfig) -> str:
    """Which modules are compiled, and how: one line for the log."""
    pieces = ", ".join(f"{count} x {pattern}" for pattern, count in alike(plan.compiled).items())
    inside = [u for u in plan.units if any(enclosing(parent(path), plan.inventory.blocks) for path in u.modules)]
    around = ", ".join(dict.fromkeys(unit.reason for unit in inside))
    left_out = f"; not the units of {around}" if around else ""
    return f"compiled by {config.backend}, in one graph each: {pieces}{left_out}"


def _prepare(num_pieces: int, recomputation: ActivationCheckpointConfig) -> None:
    """The compiler's settings, which are the process's."""
    import torch._dynamo.config
    import torch._functorch.config

    torch._dynamo.config.recompile_limit = _FORMS * num_pieces
    torch._dynamo.config.accumulated_recompile_limit = 2 * _FORMS * num_pieces
    # Modules that tensor parallelism leaves whole put local parameters in place of DTensors, and take them away again.
    torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True
    budget = recomputation.memory_budget if recomputation.mode == "memory_budget" else 1.0
    torch._functorch.config.activation_memory_budget = budget


def _compiled(compute: Callable[..., Any], config: CompileConfig, name: str) -> Callable[..., Any]:
    """Shapes are those of the job, so that none is made a variable: where another comes there is another graph."""
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
                compute(*args, **kwargs)  # where the model itself is at fault, this raises what is known and explained
            if is_compilers:
                raise _explained(error, config, name) from error
            raise
        has_run = True
        return result

    return forward


def _materialized(value: Any) -> Any:
    """Arguments with the results of collectives that nobody has waited for (tensor parallelism hands them on) waited
    for: as inputs of a graph they would meet backward as tensors of another class."""
    from torch.distributed._functional_collectives import AsyncCollectiveTensor  # it has no public name

    if isinstance(value, Tensor):
        return value.clone() if isinstance(local_tensor(value), AsyncCollectiveTensor) else value
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return type(value)(map(_materialized, value))
    if type(value) is dict:
        return {name: _materialized(item) for name, item in value.items()}
    return value


def _explained(error: Exception, config: CompileConfig, name: str) -> ConfigError:
    """What the compiler says, in one line, and where in the model's code it says so."""
    from torch._dynamo.exc import BackendCompilerFailed, FailOnRecompileLimitHit

    text = re.sub(r"\Abackend=.* raised:\n", "", str(error))
    head, _, trace = text.partition("from user code:")
    said = [head.partition("\n")[0].strip(), *re.findall(r"^ *Explanation: (.*)", head, re.MULTILINE)]
    lines = [line for line in re.findall(r'File "([^"]*)", line (\d+)', trace) if not line[0].startswith(_PYTORCH)]
    where = f" ({Path(lines[-1][0]).name}:{lines[-1][1]})" if lines else ""
    what = f"{name}{where}: {': '.join(part.rstrip('.') for part in said)[:_LONGEST]}"
    if isinstance(error, BackendCompilerFailed):
        kept = config.cache_folder is not None
        damaged = "; delete compile.cache_folder if a file there is damaged, or" if kept else ";"
        reason = f'failed on {what}{damaged} set another one ("aot_eager" makes no kernels), or compile.enable = false'
        return config_error(("compile", "backend"), reason, config.backend)
    if isinstance(error, FailOnRecompileLimitHit):
        what = f"{name}: its inputs have had too many shapes, or it has too many forms"
    remedy = "change that line" if lines else "give blocks inputs of equal shapes"
    return config_error(("compile", "enable"), f"cannot make one graph of {what}; {remedy}, or set false", True)


_LONGEST = 300
_PYTORCH = str(Path(torch.__file__).parent)


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
    folder = on_all_ranks(lambda: _made(name))[dist.get_rank()]
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
