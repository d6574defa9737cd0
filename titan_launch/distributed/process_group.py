"""The process group: rendezvous of all ranks, creation, destruction and timeouts."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from titan_launch.config.sections.run import UNWATCHED_GROUPS
from titan_launch.core.errors import RunError, Stopped, config_error, listed
from titan_launch.core.phantom import check_operators
from titan_launch.core.signals import RESTART_SIGNAL, RESTART_STATUS, agent_keeps_store, signal_name, store_is_gone
from titan_launch.distributed.torch_private import process_groups, set_timeout


@dataclass(frozen=True)
class Ranks:
    """Rank of this process, world size, and device."""

    rank: int
    world_size: int
    device: torch.device

    @property
    def is_rank_0(self) -> bool:
        """True on rank 0, which prints the log and writes reports. (Each rank writes its log file and its part of a
        checkpoint.)"""
        return self.rank == 0

    @property
    def on_host(self) -> int:
        """Number of ranks on this host (torchrun's LOCAL_WORLD_SIZE). Without torchrun: the world size."""
        return int(os.environ.get("LOCAL_WORLD_SIZE", self.world_size))

    @property
    def first_on_host(self) -> int:
        """The lowest rank on this host. The ranks of a host are consecutive."""
        return self.rank - int(os.environ.get("LOCAL_RANK", self.rank % self.on_host))


@contextmanager
def process_group(
    device_choice: str, timeout_seconds: int, stop_signal: Callable[[], int] = lambda: 0
) -> Iterator[Ranks]:
    """Join the process group that torchrun's environment variables describe. Without torchrun, create a group of this
    process alone. Destroy the group at the end of the block.

    `device_choice`: see `choose_device`. `timeout_seconds`: timeout of the rendezvous, and of collectives until
    `set_timeouts` changes it.

    GPU runs use NCCL for GPU tensors and gloo for CPU tensors. CPU runs use gloo. `stop_signal` returns the number of a
    signal that asked the run to end, or 0. Rank 0 polls this function while it waits for other ranks.

    If the block raises an error, the group is not destroyed. Destruction of an NCCL group would wait for collectives
    that other ranks never join. Then this process would not exit, and torchrun would not notice the failure.

    Raises ConfigError if the host has too few GPUs, and RunError if the ranks do not reach each other in time or the
    store is gone. Raises Stopped if ranks are still missing 15 s after a signal on rank 0.
    """
    device = choose_device(device_choice, int(os.environ.get("LOCAL_RANK", "0")))
    if device.type == "cuda":
        check_operators(torch)
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    timeout = timedelta(seconds=timeout_seconds)
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    with _store_errors_explained(rank, world_size):
        group_store = wait_for_ranks(
            _connect(rank, world_size, timeout), rank, world_size, timeout_seconds, stop_signal
        )
    # Without `device_id`, NCCL takes the device from LOCAL_RANK, which is wrong if each rank sees only one GPU.
    own = device if device.type == "cuda" else None
    dist.init_process_group(
        backend, store=group_store, rank=rank, world_size=world_size, timeout=timeout, device_id=own
    )
    yield Ranks(rank, world_size, device)
    dist.destroy_process_group()
    _wait_for_exit(group_store, rank, world_size)


@contextmanager
def _store_errors_explained(rank: int, world_size: int) -> Iterator[None]:
    """If the store cannot be reached, raise a RunError that names the store's address and quotes PyTorch's error."""
    try:
        yield
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        remedy = "check that the first host runs, and that no firewall blocks this port"
        reason = f"cannot reach the other ranks at {where}; {remedy} (PyTorch: {error})"
        raise RunError(f"rank {rank} of {world_size} {reason}") from error


def _connect(rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    """Return the rendezvous store of all ranks.

    Raises RunError if torchrun's agent hosts the store and has ended. Without this check, a TCPStore would retry until
    the timeout.
    """
    if "RANK" not in os.environ:
        return dist.HashStore()
    if store_is_gone():
        place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        reason = f"the agent of host 0, which hosts the store at {place}, has ended; start all hosts again"
        raise RunError(f"rank {rank} of {world_size} cannot reach the other ranks: {reason}")
    store, _, _ = next(rendezvous("env://", rank, world_size, timeout=timeout))
    return store


def _wait_for_exit(store: dist.Store, rank: int, world_size: int) -> None:
    """If rank 0 hosts the store, let rank 0 wait until the other ranks are about to exit, but at most 10 s. If rank 0
    exited first, NCCL's threads on the other ranks would log that the store is gone."""
    if agent_keeps_store():
        return
    deadline = time.monotonic() + 10
    with suppress(dist.DistError):  # rank 0 has stopped waiting; the run has still succeeded
        store.add("left", 1)
        while rank == 0 and store.add("left", 0) < world_size and time.monotonic() < deadline:
            time.sleep(0.01)


def choose_device(choice: str, local_rank: int) -> torch.device:
    """Return the device of this process. `choice`: `cpu`, `cuda` (the GPU whose number is the local rank), or `auto`
    (`cuda` if the host has a GPU, else `cpu`). Raises ConfigError if the host has too few GPUs."""
    if choice == "cpu" or (choice == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    available = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if local_rank >= available:
        raise config_error(
            ("job", "device"),
            f"this host has too few GPUs ({available}): a process here needs GPU {local_rank} (counted from 0); "
            'start at most one process per GPU, or set job.device = "cpu"',
            choice,
        )
    return torch.device("cuda", local_rank)


def set_timeouts(seconds: int) -> None:
    """Set the timeout of later collectives in all process groups of this rank except `UNWATCHED_GROUPS`. Every rank
    must call this function.

    The timeout also applies to the groups of a DeviceMesh, which PyTorch creates with a default timeout (gloo: 30
    minutes, NCCL: 10 minutes).
    """
    for group in process_groups():
        if group.group_desc not in UNWATCHED_GROUPS:
            set_timeout(group, timedelta(seconds=seconds))


# Rendezvous

_LEADER = "titan_launch/leader"
_POLL_S = (0.01, 0.5)
"""Seconds between two polls of the store: first, and maximum."""

_WAIT_AFTER_SIGNAL_S = 15.0


def wait_for_ranks(
    store: dist.Store, rank: int, world_size: int, timeout_seconds: float, stop_signal: Callable[[], int]
) -> dist.Store:
    """Wait for the other ranks of this start. Return `store` with a prefix for keys that only these ranks use.

    torchrun keeps one store across restarts. Without a prefix, restarted ranks would read the addresses of dead
    processes from the store. torchrun has no id that all ranks share and that changes with each start, because each
    agent counts only its own failures. So rank 0 publishes a random id of the start in the store. Every other rank
    reads the id, stores its own random name under the id, and waits for a reply to this name. If the id is from a dead
    rank 0 of an earlier start, no reply comes, and the rank uses the next id that appears.

    Raises RunError if ranks do not join in time. If `stop_signal()` returns a signal on rank 0 while ranks are missing,
    rank 0 waits for at most 15 more seconds. If ranks are still missing then, all ranks that have joined raise Stopped.
    """
    clock = _Clock(timeout_seconds)
    start = _admit_ranks(store, world_size, clock, stop_signal) if rank == 0 else _join(store, rank, clock)
    return dist.PrefixStore(f"titan_launch/{start}", store)


class _Clock:
    """Time between two polls of the store, and deadline of the rendezvous."""

    def __init__(self, timeout_seconds: float):
        self.timeout_seconds = timeout_seconds
        self._deadline = time.monotonic() + timeout_seconds
        self._pause = _POLL_S[0]

    def pause(self) -> bool:
        """Sleep and return True. Each call sleeps longer, up to 0.5 s. After the deadline, return False at once."""
        if time.monotonic() >= self._deadline:
            return False
        time.sleep(self._pause)
        self._pause = min(self._pause * 1.5, _POLL_S[1])
        return True


def _admit_ranks(store: dist.Store, world_size: int, clock: _Clock, stop_signal: Callable[[], int]) -> str:
    start = uuid.uuid4().hex
    store.set(_LEADER, start)
    greetings = [f"{start}/{rank}" for rank in range(1, world_size)]
    signalled_at = None
    while greetings and not store.check(greetings):
        if signalled_at is None and stop_signal():
            signalled_at = time.monotonic()
        if signalled_at is not None and time.monotonic() - signalled_at >= _WAIT_AFTER_SIGNAL_S:
            _reply(store, [key for key in greetings if store.check([key])], f"stop {stop_signal()}")
            raise _stopped(stop_signal())
        if not clock.pause():
            missing = [str(rank) for rank, key in enumerate(greetings, start=1) if not store.check([key])]
            ranks, have = ("rank", "has") if len(missing) == 1 else ("ranks", "have")
            late = f"{ranks} {listed(missing, most=8)} of {world_size} {have}"
            remedy = "read the logs of all hosts, or increase comm.init_timeout_seconds"
            raise RunError(f"{late} not joined the process group in {clock.timeout_seconds:g} s; {remedy}")
    _reply(store, greetings, start)
    return start


def _join(store: dist.Store, rank: int, clock: _Clock) -> str:
    own_name, known_leader = uuid.uuid4().hex, None
    while not store.check([own_name]):
        leader = store.get(_LEADER).decode() if store.check([_LEADER]) else None
        if leader != known_leader and leader is not None:
            store.set(f"{leader}/{rank}", own_name)
            known_leader = leader
        if not clock.pause():
            reason = "rank 0 did not start, or waits for other ranks"
            remedy = "read the log of rank 0, or increase comm.init_timeout_seconds"
            late = f"rank {rank} was not admitted to the process group in {clock.timeout_seconds:g} s"
            raise RunError(f"{late}: {reason}; {remedy}")
    reply = store.get(own_name).decode()
    if reply.startswith("stop "):
        raise _stopped(int(reply.removeprefix("stop ")))
    return reply


def _reply(store: dist.Store, greetings: list[str], reply: str) -> None:
    if greetings:
        for name in store.multi_get(greetings):
            store.set(name.decode(), reply)


def _stopped(number: int) -> Stopped:
    if number == RESTART_SIGNAL:
        return Stopped("a new host joined while ranks waited for other ranks: all ranks will restart", RESTART_STATUS)
    return Stopped(f"stopped by {signal_name(number)} while waiting for other ranks; nothing was trained", 0)
