"""torch.compile of a model's pieces, each into one graph, and of the loss.

What is compiled is a module's `forward`, so that its own hooks (FSDP2's, those of tensor parallelism) run around the
graph, and its name and parameters stay as they are. Functions are compiled by their code: equal pieces share a graph.

The compiler is imported where something is compiled: that takes a second.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from titan_launch.config.activation_checkpoint import ActivationCheckpointConfig
from titan_launch.config.compile import CompileConfig
from titan_launch.dtensors import local_tensor
from titan_launch.errors import ConfigError, config_error
from titan_launch.loss import Loss
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
