"""`[comm]`: the process group, and what is measured of it."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from titan_launch.config.base import Section


class CommConfig(Section):
    """The process group, and what is measured of it."""

    timeout_seconds: Annotated[int, Field(ge=1)] = 600
    """A collective that takes longer than this ends the run."""

    count_traffic: bool = False
    """Count FSDP2's collectives and the bytes in them as they are called, and report them per step (`comm/*`): they are
    those that `plan` prints. Nothing waits for it."""

    profile_freq: Annotated[int, Field(ge=0)] = 0
    """Every so many steps one runs under PyTorch's profiler, and `comm/exposed_s` reports how long a NCCL kernel ran
    and nothing else did: communication that is not hidden. That step waits for the device, and takes longer. CUDA only.
    0: never."""
