"""Planned dtypes become torch's, on the model and in FSDP2's policy."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from titan_launch.plan.types import Policy


def torch_dtype(name: str) -> torch.dtype:
    """`"bfloat16"` as `torch.bfloat16`."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype), name
    return dtype


def mixed_precision_policy(policy: Policy) -> MixedPrecisionPolicy:
    """FSDP2's form of a planned policy. None stays None: `param_dtype=None` is not `float32`, it casts no inputs."""
    return MixedPrecisionPolicy(
        param_dtype=_optional(policy.param_dtype),
        reduce_dtype=_optional(policy.reduce_dtype),
        output_dtype=_optional(policy.output_dtype),
        cast_forward_inputs=policy.cast_forward_inputs,
    )


def _optional(name: str | None) -> torch.dtype | None:
    return None if name is None else torch_dtype(name)


def cast_storage(model: nn.Module, storage_dtype: str, buffer_dtypes: Mapping[str, str]) -> None:
    """Give a model on the meta device the dtypes it is stored in: one for all floating parameters (FSDP2 wants a
    uniform one per unit), and the planned ones for some buffers. Other buffers stay as the model made them: a running
    statistic is a moving average, and rounding it to bf16 stops it from moving.
    """
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(torch_dtype(storage_dtype))
    for name, dtype in buffer_dtypes.items():
        path, _, leaf = name.rpartition(".")
        owner = model.get_submodule(path)
        owner._buffers[leaf] = model.get_buffer(name).to(torch_dtype(dtype))
