"""The process group: how ranks join it and leave it, and its timeouts."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from titan_launch.config.sections.run import UNWATCHED_GROUPS
from titan_launch.core.errors import RunError, config_error
from titan_launch.core.signals import agent_keeps_store, store_is_gone
from titan_launch.distributed.rendezvous import wait_for_ranks
from titan_launch.distributed.torch_private import process_groups, set_timeout

_EXIT_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Ranks:
    """This process among the others, and the device it computes on."""

    rank: int
    world_size: int
    device: torch.device

    @property
    def is_rank_0(self) -> bool:
        """Whether this is the rank that writes and prints."""
        return self.rank == 0

    @property
    def on_host(self) -> int:
        """Number of ranks on this host, as torchrun says; all ranks where nothing says it."""
        return int(os.environ.get("LOCAL_WORLD_SIZE", self.world_size))


@contextmanager
def process_group(
    device_choice: str, timeout_seconds: int, stop_signal: Callable[[], int] = lambda: 0
) -> Iterator[Ranks]:
    """Join the group that torchrun describes, or make one of this process alone; destroy it at the end.

    `stop_signal` returns the number of a signal that asks the run to end, or 0; it is asked while ranks are missing.

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
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    with _store_errors_explained(rank, world_size):
        group_store = wait_for_ranks(
            _connect(rank, world_size, timeout), rank, world_size, timeout_seconds, stop_signal
        )
    dist.init_process_group(backend, store=group_store, rank=rank, world_size=world_size, timeout=timeout)
    yield Ranks(rank, world_size, device)
    dist.destroy_process_group()
    _wait_for_exit(group_store, rank, world_size)


@contextmanager
def _store_errors_explained(rank: int, world_size: int) -> Iterator[None]:
    """Raise RunError if the store cannot be reached, or no longer."""
    try:
        yield
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise RunError(f"rank {rank} of {world_size} cannot reach the others at {where}: {error}") from error


def _connect(rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    """Return the store through which the ranks find each other.

    Raises RunError if the agent keeps the store, as it does on a single host, and has ended: a TCPStore would try again
    until the timeout.
    """
    if "RANK" not in os.environ:
        return dist.HashStore()
    if store_is_gone():
        place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        reason = f"the agent of host 0, which keeps the store at {place}, has ended"
        raise RunError(f"rank {rank} of {world_size} cannot reach the others: {reason}")
    store, _, _ = next(rendezvous("env://", rank, world_size, timeout=timeout))
    return store


def _wait_for_exit(store: dist.Store, rank: int, world_size: int) -> None:
    """Rank 0 goes last: where torchrun does not keep the store, it ends with rank 0, and NCCL's threads on other ranks
    complain of that until their groups are destroyed."""
    if agent_keeps_store():
        return
    deadline = time.monotonic() + _EXIT_TIMEOUT_S
    with suppress(dist.DistError):  # rank 0 has given up waiting: the run has ended well all the same
        store.add("left", 1)
        while rank == 0 and store.add("left", 0) < world_size and time.monotonic() < deadline:
            time.sleep(0.01)


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


def set_timeouts(seconds: int) -> None:
    """End the run when a collective begun from now on takes longer than `seconds`, in any group of this rank.

    On this rank only, so all have to call it. Groups of a DeviceMesh are among them, which are made with PyTorch's own
    timeout (30 minutes on gloo, 10 on NCCL), whatever the process group was given.
    """
    for group in process_groups():
        if group.group_desc not in UNWATCHED_GROUPS:
            set_timeout(group, timedelta(seconds=seconds))
