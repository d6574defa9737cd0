"""The choice of a run's CUDA kernels, made once before anything is allocated, and logged. If
`kernels.attention` is "auto" on a CPU, `titan_launch.cpu.switch` chooses the attention kernel."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from titan_launch.config.job import JobConfig
from titan_launch.config.rules.tables import missing_on_cpu
from titan_launch.config.sections.data import DataSource, separates_documents
from titan_launch.config.sections.precision import KernelsConfig
from titan_launch.core.errors import ConfigError, config_error
from titan_launch.core.globs import matches
from titan_launch.core.import_string import user_location
from titan_launch.core.patches import replaced
from titan_launch.models.build import BuiltModel
from titan_launch.models.decoder.attention import takes_equal_heads_only
from titan_launch.models.decoder.layers import LatentAttention
from titan_launch.parallel.float8 import check_tensor_cores
from titan_launch.plan.attention_kernels import priority, takes
from titan_launch.plan.layout import Layout
from titan_launch.plan.types import ModelPlan
from titan_launch.precision.policy import torch_dtype

_log = logging.getLogger(__name__)

BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
"""PyTorch's backends by the values of `kernels.attention`."""

_SAFE_CUDNN = 91501
"""The oldest version of cuDNN that may compute attention: 9.15.1, in the format of `torch.backends.cudnn.version()`."""


def use_kernels(
    config: JobConfig, built: BuiltModel, plan: ModelPlan, layout: Layout, device: torch.device, stack: ExitStack
) -> Sequence[str]:
    """Apply the section `[kernels]`, and log the chosen kernels. `built` may be changed (see `_choose_attention`).

    Return a list, which is empty at first. If the backend of `kernels.attention` later refuses a call, PyTorch's
    reasons are added to the list.

    Closing `stack` undoes the choice of attention kernels, but not the precision of matrix products. Raises ConfigError
    if the device, or the shape of the model's attention, does not allow a setting. The devices of all ranks are alike,
    so all ranks raise the same error.
    """
    kernels = config.kernels
    refusals = [] if kernels.attention == "auto" else stack.enter_context(_refusals_collected())
    if device.type != "cuda":
        problems = list(missing_on_cpu(config))
        if problems:
            raise ConfigError(problems)
        if kernels.attention != "auto":
            stack.enter_context(sdpa_kernel(BACKENDS[kernels.attention]))
            _log.info("attention: %s", kernels.attention)
        return refusals
    check_tensor_cores(config.float8, device)
    if config.float8.enable and not config.float8.emulate and not config.compile.enable:
        _log.warning(
            "float8 without compile.enable is slower than bfloat16, because each scaling runs as a separate kernel; "
            "set compile.enable = true"
        )
    set_precision(kernels)
    order = priority(torch.cuda.get_device_capability(device))
    order = without_unsafe_cudnn(kernels.attention, order, torch.backends.cudnn.version())
    obstacle = partial(_check_on, device, built, layout, config.training.seq_len)
    found = _choose_attention(config, built, plan, layout, order, obstacle)
    for dtype, (name, *reasons) in found.items():
        _log.info("attention (%s): %s", dtype, "; ".join([name, *reasons]))
    chosen = [name for name, *_ in found.values()]
    if kernels.attention != "auto":
        stack.enter_context(sdpa_kernel(BACKENDS[kernels.attention]))
    else:  # PyTorch tries the backends in this order in every call, also in models whose attention is unknown
        # Backends that are faster than the chosen ones have refused a call, and could fail in the run.
        tried = order[min(map(order.index, chosen), default=0) :]
        if built.attention is None:  # this model may pass masks, with which cuDNN's gradients can be NaN (issue 196678)
            tried = tuple(name for name in tried if name != "cudnn")
        stack.enter_context(sdpa_kernel([BACKENDS[name] for name in tried], set_priority=True))
    return refusals


def use_planned_kernels(
    config: JobConfig, built: BuiltModel, plan: ModelPlan, layout: Layout, capability: tuple[int, int]
) -> None:
    """Decide for a plan whether the attention of `built` pads its value tensors to the width of the queries, and change
    `built` in place. `use_kernels` decides the same on a GPU of this compute capability. Here,
    `plan.attention_kernels.takes` says which backends are usable, without a call of attention. If `takes` refuses the
    backend that `kernels.attention` names, values are padded."""

    def obstacle(dtype: str, pads_values: bool) -> Obstacle:
        assert built.attention is not None
        widths = built.attention.widths(pads_values)
        return lambda name: None if takes(name, dtype, widths, capability) else "it does not take these shapes"

    with suppress(ConfigError):
        _choose_attention(config, built, plan, layout, priority(capability), obstacle)


def _choose_attention(
    config: JobConfig,
    built: BuiltModel,
    plan: ModelPlan,
    layout: Layout,
    order: Sequence[str],
    obstacle: Callable[[str, bool], Obstacle],
) -> dict[str, list[str]]:
    """Return the result of `choose` for each dtype of attention. If the value tensors have another width than the
    queries, and the chosen backends allow this, set `pads_values` to False in the model of `built`. With context
    parallelism, values are padded.

    `obstacle`: function of a dtype and of `ScoreOptions.pads_values` that returns an `Obstacle`. Raises ConfigError as
    `choose` does.
    """
    found: dict[str, list[str]] = {}
    takes_unpadded: list[bool] = []
    for dtype in attention_dtypes(config.data, built, plan):
        padded, unpadded = obstacle(dtype, True), obstacle(dtype, False)
        found[dtype] = choose(config.kernels.attention, order, _either(unpadded, padded))
        takes_unpadded.append(unpadded(found[dtype][0]) is None)
    has_whole_sequences = layout.tokens_on_rank(config.training.seq_len) == config.training.seq_len
    if found and all(takes_unpadded) and has_whole_sequences:  # ring attention has not been tried with other widths
        for module in built.module.modules():
            if isinstance(module, LatentAttention):
                module.options = replace(module.options, pads_values=False)
    return found


def explain_refusal(error: BaseException, kernels: KernelsConfig, refusals: Sequence[str]) -> ConfigError | None:
    """Return the ConfigError if the backend that `kernels.attention` names has refused a call of attention; None for a
    different error.

    PyTorch reports a refusal only when attention is called. `refusals`: the reasons that PyTorch's warnings gave before
    the error.
    """
    if kernels.attention == "auto" or not isinstance(error, RuntimeError) or _NO_KERNEL not in str(error):
        return None  # "auto" allows the backend "math", which accepts every call
    place = user_location(error)
    where = f" at {place}" if place else ""
    reason = f'cannot be used{where}: {_listed(refusals)}; set "auto", which finds a usable backend, or "math"'
    return config_error(("kernels", "attention"), reason, kernels.attention)


def set_precision(kernels: KernelsConfig) -> None:
    """Set the precision of float32 matrix products and convolutions, and of the partial sums of bfloat16 matrix
    products, on GPUs. The settings hold for the whole process."""
    is_reduced = kernels.float32_precision == "tf32"
    torch.set_float32_matmul_precision("high" if is_reduced else "highest")
    torch.backends.cudnn.allow_tf32 = is_reduced
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = kernels.bf16_reduced_precision_reduction
    sums = "bfloat16 allowed" if kernels.bf16_reduced_precision_reduction else "float32"
    _log.info(
        "float32 matrix products: %s; partial sums of bfloat16 matrix products: %s", kernels.float32_precision, sums
    )


def without_unsafe_cudnn(wanted: str, order: tuple[str, ...], version: int | None) -> tuple[str, ...]:
    """Return `order` without cuDNN if `version` is older than `_SAFE_CUDNN`, else `order`. For an older version, raise
    ConfigError if `wanted` is "cudnn", and log the reason if `wanted` is "auto". `version`: result of
    `torch.backends.cudnn.version()`; None without cuDNN."""
    if version is None or version >= _SAFE_CUDNN:
        return order
    unsafe = (
        f"cuDNN {_dotted(version)} is older than {_dotted(_SAFE_CUDNN)}, and accesses memory wrongly where the length "
        "of a sequence is not a multiple of 128 (pytorch issue 169849)"
    )
    if wanted == "cudnn":
        reason = f'cannot be used: {unsafe}; install cuDNN {_dotted(_SAFE_CUDNN)} or later, or set "auto"'
        raise config_error(("kernels", "attention"), reason, wanted)
    if wanted == "auto":
        _log.info("attention: cudnn is not used: %s", unsafe)
    return tuple(name for name in order if name != "cudnn")


def _dotted(version: int) -> str:
    major, rest = divmod(version, 10_000 if version >= 90_000 else 1_000)  # 8.9.7 is 8907
    return f"{major}.{rest // 100}.{rest % 100}"


def attention_dtypes(data: DataSource, built: BuiltModel, plan: ModelPlan) -> list[str]:
    """Return the dtypes in which the model's plain causal attention computes. The list is empty if the attention of the
    model is unknown, or if the training data separates documents."""
    if built.attention is None or separates_documents(data):
        return []
    paths = [module.path for module in plan.inventory.modules if matches(built.attention.queries_from, module.path)]
    return list(dict.fromkeys(plan.unit_of[path].compute_dtype for path in paths))


Obstacle = Callable[[str], str | None]
"""A function of a backend's name that returns the reason why the backend cannot be used, or None."""


def choose(wanted: str, order: Sequence[str], obstacle: Obstacle) -> list[str]:
    """Return a list: the name of the backend to use, then a reason for each faster backend that cannot be used.
    `order`: names of the backends, fastest first. Raises ConfigError if the wanted backend cannot be used."""
    if wanted != "auto":
        reason = obstacle(wanted)
        if reason is not None:
            raise config_error(
                ("kernels", "attention"), f'cannot be used: {reason}; set "auto", which finds a usable backend', wanted
            )
        return [wanted]
    reasons: list[str] = []
    for name in order:
        reason = obstacle(name)
        if reason is None:
            return [name, *reasons]
        reasons.append(f"not {name}: {reason}")
    raise AssertionError('the backend "math" can always be used')


def _either(first: Obstacle, second: Obstacle) -> Obstacle:
    """Return an `Obstacle` that returns None if `first` or `second` does, and otherwise the reason of `second`."""
    return lambda name: None if first(name) is None else second(name)


def _check_on(
    device: torch.device, built: BuiltModel, layout: Layout, seq_len: int, dtype: str, pads_values: bool
) -> Obstacle:
    """Return an `Obstacle`, a function that tries a kernel: it calls attention once, with the shapes that the model's
    attention has on a rank, and returns None or the error. `pads_values`: as in `ScoreOptions`."""
    heads = built.attention
    assert heads is not None
    tokens, (width, value_width) = layout.tokens_on_rank(seq_len), heads.widths(pads_values)

    def made(num_heads: int, width: int) -> Tensor:
        shape = (layout.local_batch_size, tokens, num_heads // layout.tensor, width)
        return torch.empty(shape, dtype=torch_dtype(dtype), device=device, requires_grad=True).transpose(1, 2)

    def call() -> Tensor:
        query = made(heads.queries, width)
        num_heads = heads.queries if takes_equal_heads_only(query) else heads.keys
        key, value = made(num_heads, width), made(num_heads, value_width)
        has_groups = query.shape[1] != key.shape[1]
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=has_groups)

    # "math" is not tried, because it accepts every call, and a call would allocate all scores.
    return lambda name: None if name == "math" else refusal(BACKENDS[name], call)


def refusal(backend: SDPBackend, call: Callable[[], object]) -> str | None:
    """Run `call`, a call of attention, with only this backend enabled. Return the reason for which PyTorch refuses the
    call, or None if the call succeeds.

    PyTorch's own checks (`torch.backends.cuda.can_use_flash_attention` and others) write their reasons to standard
    error only.
    """
    with warnings.catch_warnings(), _refusals_collected() as reasons, sdpa_kernel(backend):
        warnings.simplefilter("always")
        try:
            call()
        except RuntimeError as error:
            return _listed(reasons) if _NO_KERNEL in str(error) else str(error).partition("\n")[0]
    return None


_NO_KERNEL = "No available kernel"
"""Text of PyTorch's error if no enabled backend takes a call. Warnings before the error give the reasons."""


@contextmanager
def _refusals_collected() -> Iterator[list[str]]:
    """Collect the warnings in which PyTorch says why it refuses a backend, until the end of the block. These warnings
    are not shown. Yield the list of the reasons."""
    reasons: list[str] = []
    show = warnings.showwarning

    def keep_reasons(message: Warning | str, *rest: Any, **others: Any) -> None:
        text, _, place = str(message).partition("(Triggered internally")
        text = text.strip().rstrip(".")
        if "sdp_utils" not in place:  # the source file of the checks
            show(message, *rest, **others)
        elif not text.endswith(("because:", "runtime disabled")):  # not a heading, and not about a disabled backend
            reasons.append(text)

    with replaced(warnings, "showwarning", keep_reasons):  # catch_warnings would also show earlier warnings again
        yield reasons


def _listed(reasons: Sequence[str]) -> str:
    return ", ".join(dict.fromkeys(reasons)) or "PyTorch gives no reason"
