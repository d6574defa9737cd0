"""Rules across sections for torch.compile, activation checkpointing and CUDA kernels."""

from __future__ import annotations

from collections.abc import Iterator

from titan_launch.config.architectures import known_args
from titan_launch.config.job import JobConfig
from titan_launch.config.rules.data import keys_of_packed_documents
from titan_launch.config.sections.parallelism import ActivationCheckpointConfig
from titan_launch.config.sections.precision import KernelsConfig
from titan_launch.core.errors import KeyPath, Problem, format_key

_MODE: KeyPath = ("activation_checkpoint", "mode")
_MODULES: KeyPath = ("activation_checkpoint", "modules")
_ENABLE: KeyPath = ("compile", "enable")
_BACKEND: KeyPath = ("compile", "backend")
_COMPONENTS: KeyPath = ("compile", "components")
_CACHE: KeyPath = ("compile", "cache_folder")
_TENSOR: KeyPath = ("parallelism", "tensor_parallel_degree")


def compile_options_are_for_compile(config: JobConfig) -> Iterator[Problem]:
    """Report a problem for each option of `[compile]` that is set while `compile.enable` is false. (Default values are
    accepted, because the `config.json` of a run contains every key.)"""
    if not config.compile.enable:
        reason = "has no effect with compile.enable = false; set compile.enable = true, or remove this key"
        for name, value in config.compile.changed("backend", "components", "cache_folder"):
            yield Problem(("compile", name), reason, value, also=(_ENABLE,))


def cache_has_kernels(config: JobConfig) -> Iterator[Problem]:
    """Report a problem if `compile.cache_folder` is empty, or if it is set and the backend compiles no kernels."""
    compiles = config.compile
    if compiles.cache_folder == "":
        yield Problem(_CACHE, "must be the path of a folder; remove this key to use the compiler's default folder", "")
    elif compiles.enable and compiles.cache_folder is not None and compiles.backend != "inductor":
        reason = (
            f'stores compiled kernels, but compile.backend = "{compiles.backend}" compiles none; '
            'set compile.backend = "inductor", or remove this key'
        )
        yield Problem(_CACHE, reason, compiles.cache_folder, also=(_BACKEND,))


def selective_option_is_for_selective(config: JobConfig) -> Iterator[Problem]:
    """Report a problem if `selective_ac_option` is set but the mode is not `selective`. (The default value is accepted,
    because the `config.json` of a run contains every key.)"""
    yield from _option_of_another_mode(config, "selective_ac_option", "selective")


def modules_are_checkpointed(config: JobConfig) -> Iterator[Problem]:
    """Report a problem if `activation_checkpoint.modules` is set but the mode ignores this key."""
    checkpointing = config.activation_checkpoint
    if checkpointing.modules and checkpointing.mode in ("none", "memory_budget"):
        reason = (
            f'has no effect with activation_checkpoint.mode = "{checkpointing.mode}"; '
            'set mode = "full", "selective" or "auto", or remove this key'
        )
        yield Problem(_MODULES, reason, list(checkpointing.modules), also=(_MODE,))


def budget_is_for_memory_budget(config: JobConfig) -> Iterator[Problem]:
    """Report a problem if the key `memory_budget` is set but the mode is not `memory_budget`. (The default value is
    accepted, because the `config.json` of a run contains every key.)"""
    yield from _option_of_another_mode(config, "memory_budget", "memory_budget")


def budget_has_a_compiler(config: JobConfig) -> Iterator[Problem]:
    """Report a problem if the mode is `memory_budget` and backward is not compiled or tensor parallelism is on."""
    if config.activation_checkpoint.mode != "memory_budget":
        return
    mode, others = "memory_budget", 'or set mode = "selective"'
    compiles = config.compile
    if not compiles.enable or "model" not in compiles.components:
        key = _COMPONENTS if compiles.enable else _ENABLE
        wanted = 'add "model" to compile.components' if compiles.enable else "set compile.enable = true"
        yield Problem(_MODE, f"requires compiled blocks; {wanted}, {others}", mode, also=(key,))
    elif compiles.backend == "eager":
        reason = (
            'requires a compiled backward, but compile.backend = "eager" does not compile backward; '
            f'set compile.backend = "inductor", {others}'
        )
        yield Problem(_MODE, reason, mode, also=(_BACKEND,))
    if config.parallelism.tensor_parallel_degree > 1:
        reason = (
            "is not supported with tensor parallelism: PyTorch's partitioner cannot determine the size of a DeviceMesh "
            'in the graph; set "full" or "selective", or parallelism.tensor_parallel_degree = 1'
        )
        yield Problem(_MODE, reason, mode, also=(_TENSOR,))


def compile_has_components(config: JobConfig) -> Iterator[Problem]:
    """Report a problem if `compile.enable` is true but `compile.components` is empty."""
    if config.compile.enable and not config.compile.components:
        reason = 'must not be empty; name "model", "loss" or both, or set compile.enable = false'
        yield Problem(_COMPONENTS, reason, [], also=(_ENABLE,))


COMPILE_RULES = (
    compile_options_are_for_compile,
    cache_has_kernels,
    selective_option_is_for_selective,
    modules_are_checkpointed,
    budget_is_for_memory_budget,
    budget_has_a_compiler,
    compile_has_components,
)
"""Rules for compilation and activation checkpointing."""


def _option_of_another_mode(config: JobConfig, option: str, wanted: str) -> Iterator[Problem]:
    """Report a problem if `option` of `[activation_checkpoint]` is set but the mode is not `wanted`, the only mode that
    reads it."""
    mode = config.activation_checkpoint.mode
    if mode != wanted:
        reason = f'has no effect with activation_checkpoint.mode = "{mode}"; set mode = "{wanted}", or remove this key'
        for name, value in config.activation_checkpoint.changed(option):
            yield Problem(("activation_checkpoint", name), reason, value, also=(_MODE,))


_DEVICE: KeyPath = ("job", "device")
_ATTENTION: KeyPath = ("kernels", "attention")


def kernels_exist_on_the_device(config: JobConfig) -> Iterator[Problem]:
    """Report a problem for each setting that a CPU does not support, if the device is "cpu". (If `job.device` is
    "auto", the run checks this at its start.)"""
    if config.job.device == "cpu":
        yield from missing_on_cpu(config.kernels, config.activation_checkpoint)


def missing_on_cpu(kernels: KernelsConfig, checkpointing: ActivationCheckpointConfig) -> Iterator[Problem]:
    """Report a problem for each setting of `[kernels]`, and for activation offloading, which a CPU does not support."""
    if checkpointing.offload:
        reason = (
            'copies activations from a GPU to host memory, but the device is "cpu", whose tensors are in host memory; '
            "remove this key, or train on GPUs"
        )
        yield Problem(("activation_checkpoint", "offload"), reason, True, also=(_DEVICE,))
    if kernels.attention in ("cudnn", "efficient"):
        reason = 'is a kernel for GPUs, but the device is "cpu"; set "auto", "flash" or "math", or train on GPUs'
        yield Problem(_ATTENTION, reason, kernels.attention, also=(_DEVICE,))
    for name, value in kernels.changed("float32_precision", "bf16_reduced_precision_reduction"):
        reason = 'is a setting for GPUs, but the device is "cpu"; remove this key, or train on GPUs'
        yield Problem(("kernels", name), reason, value, also=(_DEVICE,))


def ring_attention_has_kernels(config: JobConfig) -> Iterator[Problem]:
    """Report a problem if the attention kernel is `math` with context parallelism, because ring attention supports only
    fused kernels."""
    degree = config.parallelism.context_parallel_degree
    if degree > 1 and config.kernels.attention == "math":
        reason = (
            f"is not supported with parallelism.context_parallel_degree = {degree}: ring attention requires a fused "
            'kernel; set "auto"'
        )
        yield Problem(_ATTENTION, reason, "math", also=(("parallelism", "context_parallel_degree"),))


def attention_backend_is_used(config: JobConfig) -> Iterator[Problem]:
    """Report a problem if a backend of `scaled_dot_product_attention` is set for a model whose attention runs as
    FlexAttention."""
    args, backend = known_args(config.model), config.kernels.attention
    if backend == "auto" or args is None:
        return
    option, packing = args.beyond_causal_attention(config.training.seq_len), [*keys_of_packed_documents(config)]
    if option is not None or packing:
        what = f'{format_key(packing[0])} = "documents"' if option is None else f"model.args.{option}"
        reason = f'is a kernel for plain causal attention, which {what} is not; set "auto"'
        model: tuple[KeyPath, ...] = (("model", "name"), ("model", "flavor"), ("model", "args"))
        yield Problem(_ATTENTION, reason, backend, also=(*model, ("training", "seq_len"), *packing))


KERNEL_RULES = (kernels_exist_on_the_device, ring_attention_has_kernels, attention_backend_is_used)
"""Rules for CUDA kernels."""
