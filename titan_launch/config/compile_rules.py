"""Rules across sections for torch.compile and recomputation. Part of `titan_launch.config.rules`."""

from __future__ import annotations

from collections.abc import Iterator

from titan_launch.config.activation_checkpoint import ActivationCheckpointConfig
from titan_launch.config.compile import CompileConfig
from titan_launch.config.job import JobConfig
from titan_launch.errors import KeyPath, Problem

_MODE: KeyPath = ("activation_checkpoint", "mode")
_MODULES: KeyPath = ("activation_checkpoint", "modules")
_BUDGET: KeyPath = ("activation_checkpoint", "memory_budget")
_ENABLE: KeyPath = ("compile", "enable")
_BACKEND: KeyPath = ("compile", "backend")
_COMPONENTS: KeyPath = ("compile", "components")
_TENSOR: KeyPath = ("parallelism", "tensor_parallel_degree")


def compile_options_are_for_compile(config: JobConfig) -> Iterator[Problem]:
    """How to compile is said only where it is done. (Defaults are let pass: a record has them.)"""
    for key in (_BACKEND, _COMPONENTS):
        name = str(key[-1])
        value = getattr(config.compile, name)
        if not config.compile.enable and value != CompileConfig.model_fields[name].default:
            reason = "is for compile.enable = true; set that, or drop this key"
            yield Problem(key, reason, list(value) if isinstance(value, tuple) else value, also=(_ENABLE,))


def selective_option_is_for_selective(config: JobConfig) -> Iterator[Problem]:
    """Without selective checkpointing there is nothing to select. (The default is let pass: a record has it.)"""
    option, mode = config.activation_checkpoint.selective_ac_option, config.activation_checkpoint.mode
    if mode != "selective" and option != _default("selective_ac_option"):
        reason = f'is for mode = "selective", and activation_checkpoint.mode is "{mode}"; set that, or drop this key'
        yield Problem(("activation_checkpoint", "selective_ac_option"), reason, option, also=(_MODE,))


def modules_are_recomputed(config: JobConfig) -> Iterator[Problem]:
    """Modules are for the modes that compute modules again."""
    recomputation = config.activation_checkpoint
    if recomputation.modules and recomputation.mode in ("none", "memory_budget"):
        reason = (
            f'are for the modes that compute modules again, and activation_checkpoint.mode is "{recomputation.mode}"; '
            'set "full", "selective" or "auto", or drop this key'
        )
        yield Problem(_MODULES, reason, list(recomputation.modules), also=(_MODE,))


def budget_is_for_memory_budget(config: JobConfig) -> Iterator[Problem]:
    """Only the compiler goes by a budget. (The default is let pass: a record has it.)"""
    budget, mode = config.activation_checkpoint.memory_budget, config.activation_checkpoint.mode
    if mode != "memory_budget" and budget != _default("memory_budget"):
        reason = f'is for mode = "memory_budget", and activation_checkpoint.mode is "{mode}"; set that, or drop this'
        yield Problem(_BUDGET, reason, budget, also=(_MODE,))


def budget_has_a_compiler(config: JobConfig) -> Iterator[Problem]:
    """What is kept under a budget is decided where the backward graph is made."""
    if config.activation_checkpoint.mode != "memory_budget":
        return
    mode, others = "memory_budget", 'or take "selective"'
    compiles = config.compile
    if not compiles.enable or "model" not in compiles.components:
        key = _COMPONENTS if compiles.enable else _ENABLE
        wanted = 'add "model" to compile.components' if compiles.enable else "set compile.enable = true"
        yield Problem(_MODE, f"is what the compiler of the blocks does; {wanted}, {others}", mode, also=(key,))
    elif compiles.backend == "eager":
        reason = f'needs a backend that makes backward graphs, and compile.backend is "eager"; set "inductor", {others}'
        yield Problem(_MODE, reason, mode, also=(_BACKEND,))
    if config.parallelism.tensor_parallel_degree > 1:
        reason = (
            "does not go with tensor parallelism: PyTorch's partitioner cannot tell the size of a mesh in the graph; "
            'set "full" or "selective", or tensor_parallel_degree = 1'
        )
        yield Problem(_MODE, reason, mode, also=(_TENSOR,))


def something_is_compiled(config: JobConfig) -> Iterator[Problem]:
    """Who compiles says what."""
    if config.compile.enable and not config.compile.components:
        reason = 'names nothing to compile; name "model", "loss" or both, or set compile.enable = false'
        yield Problem(_COMPONENTS, reason, [], also=(_ENABLE,))


def compiled_loss_is_in_one_part(config: JobConfig) -> Iterator[Problem]:
    """Chunks save what a compiled loss does not make."""
    chunks = config.training.loss_chunks
    if config.compile.enable and "loss" in config.compile.components and chunks > 1:
        reason = (
            "the compiled loss makes no fp32 copies of the logits that parts would save; set 1, or leave "
            '"loss" out of compile.components'
        )
        yield Problem(("training", "loss_chunks"), reason, chunks, also=(_ENABLE, _COMPONENTS))


def _default(name: str) -> object:
    return ActivationCheckpointConfig.model_fields[name].default


def compiled_loss_is_computed_alone(config: JobConfig) -> Iterator[Problem]:
    """What ranks compute together has collectives in the middle, and its own backward."""
    parallelism = config.parallelism
    is_divided = parallelism.tensor_parallel_degree > 1 and parallelism.loss_parallel
    if config.compile.enable and "loss" in config.compile.components and is_divided:
        reason = (
            "the loss of logits that are divided by class cannot be compiled, and makes no whole fp32 copies either; "
            'leave "loss" out, or set parallelism.loss_parallel = false'
        )
        also = (_ENABLE, _TENSOR, ("parallelism", "loss_parallel"))
        yield Problem(_COMPONENTS, reason, list(config.compile.components), also=also)


COMPILE_RULES = (
    compile_options_are_for_compile,
    selective_option_is_for_selective,
    modules_are_recomputed,
    budget_is_for_memory_budget,
    budget_has_a_compiler,
    something_is_compiled,
    compiled_loss_is_in_one_part,
    compiled_loss_is_computed_alone,
)
"""All of them."""
