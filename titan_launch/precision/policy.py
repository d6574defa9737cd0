"""Application of planned dtypes: casts of a model's tensors, and FSDP2's `MixedPrecisionPolicy`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from titan_launch.plan.types import ModelPlan, Policy, Unit, full_name


def torch_dtype(name: str) -> torch.dtype:
    """Return the dtype that PyTorch has under a name: `torch.bfloat16` for `"bfloat16"`."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype), name
    return dtype


def mixed_precision_policy(
    policy: Policy, in_place: Mapping[nn.Parameter, torch.dtype] | None = None
) -> MixedPrecisionPolicy:
    """Return a planned policy as FSDP2's `MixedPrecisionPolicy`. If `param_dtype` is None, FSDP2 casts neither
    parameters nor inputs. With any dtype, even float32, FSDP2 casts parameters and, with `cast_forward_inputs`, inputs.

    `in_place`: compute dtypes of the parameters of `ModelPlan.in_place`. This argument requires torch 2.15 or newer.
    """
    own_dtypes: dict[str, Any] = {"param_dtype_override_fn": in_place.get} if in_place else {}
    return MixedPrecisionPolicy(
        param_dtype=_optional(policy.param_dtype),
        reduce_dtype=_optional(policy.reduce_dtype),
        output_dtype=_optional(policy.output_dtype),
        cast_forward_inputs=policy.cast_forward_inputs,
        **own_dtypes,
    )


def _optional(name: str | None) -> torch.dtype | None:
    return None if name is None else torch_dtype(name)


def cast_tensors(model: nn.Module, plan: ModelPlan, dtype_of: Callable[[Unit], str]) -> None:
    """Cast the tensors of a model on the meta device in place. Parameters get the dtype that `dtype_of` returns for
    their unit or their entry of `ModelPlan.in_place` (see `ModelPlan.unit_of`). Floating buffers get their planned
    dtypes."""
    for path, module in model.named_modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                parameter.data = parameter.data.to(torch_dtype(dtype_of(plan.unit_of[path])))
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                module._buffers[name] = buffer.to(torch_dtype(plan.buffer_dtypes[full_name(path, name)]))
