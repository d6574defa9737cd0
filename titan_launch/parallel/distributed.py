"""The process group: joining it, and leaving it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from titan_launch.errors import config_error


@dataclass(frozen=True)
class Ranks:
    """This process among the others, and the device it computes on."""

    rank: int
    world_size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        """Whether this is the rank that writes and prints."""
        return self.rank == 0


@contextmanager
def process_group(device_choice: str, timeout_seconds: int) -> Iterator[Ranks]:
    """Join the group that torchrun describes, or make one of this process alone; destroy it at the end.

    After an error it is left to the end of the process: destroying an NCCL group waits for collectives that the other
    ranks will never join, and would keep torchrun from noticing the failure.

    CUDA uses NCCL, with gloo beside it for tensors on the CPU; CPU uses gloo. Raises ConfigError when `job.device` is
    `cuda` and there is none for this rank.
    """
    device = choose_device(device_choice, int(os.environ.get("LOCAL_RANK", "0")))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    timeout = timedelta(seconds=timeout_seconds)
    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    yield Ranks(dist.get_rank(), dist.get_world_size(), device)
    dist.destroy_process_group()


def choose_device(choice: str, local_rank: int) -> torch.device:
    """The device of this process: `auto` is the GPU of its local rank where there is a GPU, and the CPU otherwise."""
    if choice == "cpu" or (choice == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    available = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if local_rank >= available:
        raise config_error(
            ("job", "device"),
            f"this host has {available} GPUs, but a process here wants number {local_rank} (counted from 0); "
            f'start at most {available} processes per host, or set "cpu"',
            choice,
        )
    return torch.device("cuda", local_rank)
