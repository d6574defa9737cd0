"""Rendezvous of all ranks at each start of a run. After a restart, the ranks use the same torchrun store as before."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable

import torch.distributed as dist

from titan_launch.core.errors import RunError, Stopped, listed
from titan_launch.core.signals import signal_name

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
            missing = [rank for rank, key in enumerate(greetings, start=1) if not store.check([key])]
            raise _missing(missing, world_size, clock)
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
            reason = "rank 0 did not start, or it waits for other ranks"
            raise RunError(
                f"rank {rank} was not admitted to the process group in {clock.timeout_seconds:g} s: {reason}"
            )
    reply = store.get(own_name).decode()
    if reply.startswith("stop "):
        raise _stopped(int(reply.removeprefix("stop ")))
    return reply


def _reply(store: dist.Store, greetings: list[str], reply: str) -> None:
    if greetings:
        for name in store.multi_get(greetings):
            store.set(name.decode(), reply)


def _missing(missing: list[int], world_size: int, clock: _Clock) -> RunError:
    shown = listed([*map(str, missing)], most=8)
    are = f"rank {shown} of {world_size} has" if len(missing) == 1 else f"ranks {shown} of {world_size} have"
    return RunError(f"{are} not joined the process group in {clock.timeout_seconds:g} s")


def _stopped(number: int) -> Stopped:
    return Stopped(f"stopped by {signal_name(number)} while waiting for other ranks; nothing was trained", 0)
