"""Which kernels a run computes with: decided once, before anything is allocated, and logged."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.backends.cuda import (
    SDPAParams,
    can_use_cudnn_attention,
    can_use_efficient_attention,
    can_use_flash_attention,
)
from torch.nn.attention import SDPBackend, sdpa_kernel

from titan_launch.config.job import JobConfig
from titan_launch.config.kernel_rules import missing_on_cpu
from titan_launch.config.kernels import KernelsConfig
from titan_launch.errors import ConfigError, config_error
from titan_launch.globs import matches
from titan_launch.models.build import BuiltModel
from titan_launch.models.layers.attention import takes_equal_heads_only
from titan_launch.models.layers.blocked_attention import blocked_attention, lengths
from titan_launch.parallel.float8 import check_units
from titan_launch.plan.layout import Layout
from titan_launch.plan.types import ModelPlan
from titan_launch.precision.policy import torch_dtype
from titan_launch.registry import user_place

_log = logging.getLogger(__name__)

BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
"""What `kernels.attention` names, the fastest first, on Hopper and later."""

_CHECKS = {
    "cudnn": can_use_cudnn_attention,
    "flash": can_use_flash_attention,
    "efficient": can_use_efficient_attention,
}
_HOPPER = (9, 0)


def use_kernels(
    config: JobConfig, built: BuiltModel, plan: ModelPlan, layout: Layout, device: torch.device, stack: ExitStack
) -> None:
    """Set what `[kernels]` says until `stack` is closed (the precision of products for good), and log it.

    Raises ConfigError for what the device, or the shape of the model's attention, does not have; the same on all ranks,
    whose devices are alike.
    """
    check_units(config.float8, device)
    if config.float8.enable and not config.float8.emulate and not config.compile.enable:
        _log.warning("float8 without compile.enable is slower than bfloat16: every scaling is a kernel of its own")
    kernels = config.kernels
    if device.type != "cuda":
        problems = list(missing_on_cpu(kernels))
        if problems:
            raise ConfigError(problems)
        _use_on_cpu(config, built, plan, layout, stack)
        return
    set_precision(kernels)
    order = priority(torch.cuda.get_device_capability(device))
    for dtype in attention_dtypes(built, plan):
        check = _check_on(device, built, layout, dtype, config.training.seq_len)
        _log.info("attention in %s: %s", dtype, choose(kernels.attention, order, check))
    if kernels.attention != "auto":
        stack.enter_context(sdpa_kernel(BACKENDS[kernels.attention]))
    else:  # PyTorch goes by the order in every call, so that models of which nothing is known do too
        stack.enter_context(sdpa_kernel([BACKENDS[name] for name in order], set_priority=True))


def _use_on_cpu(config: JobConfig, built: BuiltModel, plan: ModelPlan, layout: Layout, stack: ExitStack) -> None:
    wanted = config.kernels.attention
    if wanted != "auto":
        stack.enter_context(sdpa_kernel(BACKENDS[wanted]))
        _log.info("attention: %s", wanted)
        return
    dtypes = attention_dtypes(built, plan)
    blocked = {
        dtype for dtype, tokens in lengths().items() if layout.context == 1 and config.training.seq_len in tokens
    }
    # Of a model whose attention is not known, the calls decide.
    if blocked.intersection(map(torch_dtype, dtypes)) or (blocked and built.attention is None):
        stack.enter_context(blocked_attention())
    for dtype in dtypes:
        _log.info(
            "attention in %s: %s", dtype, "blocks of tokens" if torch_dtype(dtype) in blocked else "PyTorch's choice"
        )


@contextmanager
def attention_failures_explained(kernels: KernelsConfig) -> Iterator[None]:
    """Run forwards and backwards: raise ConfigError where the backend that `kernels.attention` names does not take what
    the model calls it with, which only the call can tell. PyTorch's warnings, which say why, become part of the error.
    """
    if kernels.attention == "auto":
        yield  # math is always left
        return
    reasons: list[str] = []
    show = warnings.showwarning

    def keep_reasons(message: Warning | str, *rest: Any, **others: Any) -> None:
        if "sdp_utils" not in str(message):  # the source file of the checks
            show(message, *rest, **others)
        elif not _reason(message).endswith("because:"):  # a heading
            reasons.append(_reason(message))

    warnings.showwarning = keep_reasons  # unlike catch_warnings, it does not show again what was shown
    try:
        yield
    except RuntimeError as error:
        if "No available kernel" not in str(error):
            raise
        place = user_place(error)
        why = ", ".join(dict.fromkeys(reasons)) or _UNSAID
        reason = f'cannot be used{f" at {place}" if place else ""}: {why}; set "auto", which finds one, or "math"'
        raise config_error(("kernels", "attention"), reason, kernels.attention) from error
    finally:
        warnings.showwarning = show


def set_precision(kernels: KernelsConfig) -> None:
    """How exact products of float32 and sums of bfloat16 are on GPUs; for the whole process."""
    is_reduced = kernels.float32_precision == "tf32"
    torch.set_float32_matmul_precision("high" if is_reduced else "highest")
    torch.backends.cudnn.allow_tf32 = is_reduced
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = kernels.bf16_reduced_precision_reduction
    sums = "may be added up" if kernels.bf16_reduced_precision_reduction else "are not added up"
    _log.info("products of float32: %s; partial sums of bfloat16 %s in it", kernels.float32_precision, sums)


def priority(capability: tuple[int, int]) -> tuple[str, ...]:
    """The backends, the fastest first, on a GPU of a compute capability."""
    return tuple(BACKENDS) if capability >= _HOPPER else ("flash", "cudnn", "efficient", "math")


def attention_dtypes(built: BuiltModel, plan: ModelPlan) -> list[str]:
    """What the model's attention computes in, each once; nothing where its attention is not known."""
    if built.attention is None:
        return []
    paths = [module.path for module in plan.inventory.modules if matches(built.attention.queries_from, module.path)]
    return list(dict.fromkeys(plan.unit_of[path].compute_dtype for path in paths))


def choose(wanted: str, order: Sequence[str], obstacle: Callable[[str], str | None]) -> str:
    """The backend that is used, and why not those before it, in words. `obstacle`: why one cannot be used, or None.

    Raises ConfigError where the wanted one cannot be.
    """
    if wanted != "auto":
        reason = obstacle(wanted)
        if reason is not None:
            raise config_error(
                ("kernels", "attention"), f'cannot be used: {reason}; set "auto", which finds one', wanted
            )
        return wanted
    reasons: list[str] = []
    for name in order:
        reason = obstacle(name)
        if reason is None:
            return "; ".join([name, *reasons])
        reasons.append(f"not {name}: {reason}")
    raise AssertionError("math can always be used")


def _check_on(
    device: torch.device, built: BuiltModel, layout: Layout, dtype: str, seq_len: int
) -> Callable[[str], str | None]:
    """Asks PyTorch about one call of the model's attention on a rank."""
    heads = built.attention
    assert heads is not None
    tokens = seq_len // layout.context

    def made(num_heads: int) -> Tensor:
        shape = (layout.local_batch_size, tokens, num_heads // layout.tensor, heads.width)
        return torch.empty(shape, dtype=torch_dtype(dtype), device=device, requires_grad=True).transpose(1, 2)

    query = made(heads.queries)
    key = made(heads.queries if takes_equal_heads_only(query) else heads.keys)
    parameters = SDPAParams(query, key, key, None, 0.0, True, query.shape[1] != key.shape[1])

    def obstacle(name: str) -> str | None:
        if name == "math":
            return None
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            if _CHECKS[name](parameters, debug=True):
                return None
        return ", ".join(_reason(warning.message) for warning in said) or _UNSAID

    return obstacle


_UNSAID = "PyTorch does not say why"


def _reason(message: Warning | str) -> str:
    """PyTorch warns once for each reason, followed by where in its source that is."""
    return str(message).partition("(Triggered internally")[0].strip().rstrip(".")
