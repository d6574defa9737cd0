"""Rules across sections for torch.compile, activation checkpointing and CUDA kernels."""

from __future__ import annotations

from collections.abc import Iterator

from titan_launch.config.job import JobConfig
from titan_launch.config.sections.precision import KernelsConfig
from titan_launch.core.errors import KeyPath, Problem

_MODE: KeyPath = ("activation_checkpoint", "mode")
_MODULES: KeyPath = ("activation_checkpoint", "modules")
_ENABLE: KeyPath = ("compile", "enable")
_BACKEND: KeyPath = ("compile", "backend")
_COMPONENTS: KeyPath = ("compile", "components")
_CACHE: KeyPath = ("compile", "cache_folder")
_TENSOR: KeyPath = ("parallelism", "tensor_parallel_degree")


def compile_options_are_for_compile(config: JobConfig) -> Iterator[Problem]:
    """How to compile is said only where it is done. (Defaults are let pass: a record has them.)"""
    if not config.compile.enable:
        reason = "is for compile.enable = true; set that, or drop this key"
        for name, value in config.compile.changed("backend", "components", "cache_folder"):
            yield Problem(("compile", name), reason, value, also=(_ENABLE,))


def cache_is_for_kernels(config: JobConfig) -> Iterator[Problem]:
    """Only inductor makes what can be kept."""
    compiles = config.compile
    if compiles.cache_folder == "":
        yield Problem(_CACHE, "is no folder; name one, or drop this key for the compiler's own", "")
    elif compiles.enable and compiles.cache_folder is not None and compiles.backend != "inductor":
        reason = f'is for kernels, and compile.backend "{compiles.backend}" makes none; set "inductor", or drop this'
        yield Problem(_CACHE, reason, compiles.cache_folder, also=(_BACKEND,))


def selective_option_is_for_selective(config: JobConfig) -> Iterator[Problem]:
    """Without selective checkpointing there is nothing to select. (The default is let pass: a record has it.)"""
    yield from _option_of_another_mode(config, "selective_ac_option", "selective")


def modules_are_checkpointed(config: JobConfig) -> Iterator[Problem]:
    """Modules are for the modes that compute modules again."""
    checkpointing = config.activation_checkpoint
    if checkpointing.modules and checkpointing.mode in ("none", "memory_budget"):
        reason = (
            f'are for the modes that compute modules again, and activation_checkpoint.mode is "{checkpointing.mode}"; '
            'set "full", "selective" or "auto", or drop this key'
        )
        yield Problem(_MODULES, reason, list(checkpointing.modules), also=(_MODE,))


def budget_is_for_memory_budget(config: JobConfig) -> Iterator[Problem]:
    """Only the compiler goes by a budget. (The default is let pass: a record has it.)"""
    yield from _option_of_another_mode(config, "memory_budget", "memory_budget")


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
    cache_is_for_kernels,
    selective_option_is_for_selective,
    modules_are_checkpointed,
    budget_is_for_memory_budget,
    budget_has_a_compiler,
    something_is_compiled,
    compiled_loss_is_in_one_part,
    compiled_loss_is_computed_alone,
)
"""All of them."""


def _option_of_another_mode(config: JobConfig, option: str, wanted: str) -> Iterator[Problem]:
    """An option that is chosen, of a mode of recomputation that is not."""
    mode = config.activation_checkpoint.mode
    if mode != wanted:
        reason = f'is for mode = "{wanted}", and activation_checkpoint.mode is "{mode}"; set that, or drop this key'
        for name, value in config.activation_checkpoint.changed(option):
            yield Problem(("activation_checkpoint", name), reason, value, also=(_MODE,))


_DEVICE: KeyPath = ("job", "device")
_ATTENTION: KeyPath = ("kernels", "attention")


def kernels_are_there(config: JobConfig) -> Iterator[Problem]:
    """A job for CPUs asks for no kernel that only GPUs have. (Where `job.device` is "auto", the run finds out.)"""
    if config.job.device == "cpu":
        yield from missing_on_cpu(config.kernels)


def missing_on_cpu(kernels: KernelsConfig) -> Iterator[Problem]:
    """What of `[kernels]` a CPU does not have."""
    if kernels.attention in ("cudnn", "efficient"):
        reason = 'is a kernel for GPUs, and the device is "cpu"; set "auto", "flash" or "math", or train on GPUs'
        yield Problem(_ATTENTION, reason, kernels.attention, also=(_DEVICE,))
    for name, value in kernels.changed("float32_precision", "bf16_reduced_precision_reduction"):
        reason = 'is a setting of GPUs, and the device is "cpu"; drop this key, or train on GPUs'
        yield Problem(("kernels", name), reason, value, also=(_DEVICE,))


def ring_has_kernels(config: JobConfig) -> Iterator[Problem]:
    """PyTorch's ring attention divides fused kernels only."""
    degree = config.parallelism.context_parallel_degree
    if degree > 1 and config.kernels.attention == "math":
        reason = (
            f"cannot be divided over parallelism.context_parallel_degree = {degree} ranks: ring attention is there for "
            'the fused kernels; set "auto"'
        )
        yield Problem(_ATTENTION, reason, "math", also=(("parallelism", "context_parallel_degree"),))


KERNEL_RULES = (kernels_are_there, ring_has_kernels)
"""All of them."""
