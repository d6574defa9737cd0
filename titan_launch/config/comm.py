"""`[comm]`: the process group, and what is measured of it."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from titan_launch.config.base import Section


class CommConfig(Section):
    """The process group, and what is measured of it."""

    init_timeout_seconds: Annotated[int, Field(ge=1)] = 1800
    """A collective that takes longer than this ends the run, up to the end of the first step of the process: while
    ranks build, load a checkpoint, and warm up."""

    timeout_seconds: Annotated[int, Field(ge=1)] = 600
    """A collective that takes longer than this ends the run, from then on, after a resume as well. It holds for every
    group of ranks, but not for the one that writes checkpoints."""

    hang_seconds: Annotated[int, Field(ge=0)] | None = None
    """When a rank makes no progress for so long, every rank writes the stacks of its threads to `hangs/rank_N.txt` and
    its collectives to `flight_recorder/rank_N` (with NCCL, those of gloo to `flight_recorder_gloo/rank_N`), and the log
    names the ranks that are behind. Until the end of the first step, and while a checkpoint is saved or loaded, it is
    longer, in the proportion of `init_timeout_seconds` to `timeout_seconds`. Unset: half of `timeout_seconds`.
    0 disables hang detection."""

    flight_recorder_size: Annotated[int, Field(ge=0)] = 2000
    """Collectives that PyTorch's flight recorder remembers on each rank, to be written to `flight_recorder/rank_N` when
    one times out or a rank hangs. 0: off."""

    count_traffic: bool = False
    """Count FSDP2's collectives and the bytes in them as they are called, and report them per step (`comm/*`): they are
    those that `plan` prints. Nothing waits for it."""

    profile_freq: Annotated[int, Field(ge=0)] = 0
    """Every so many steps one runs under PyTorch's profiler, and `comm/exposed_s` reports how long a NCCL kernel ran
    and nothing else did: communication that is not hidden. That step waits for the device, and takes longer. CUDA only.
    0: never."""
