"""Rendezvous: ranks find each other, and ignore the ranks of an earlier start."""

from __future__ import annotations

import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from titan_launch.core.errors import RunError, Stopped
from titan_launch.distributed.process_group import process_group, wait_for_ranks


def meet_all(
    store: dist.Store, ranks: list[int], world_size: int, timeout: float = 30, signal_on_zero: int = 0
) -> list[str | Exception]:
    """Return what each of `ranks` reads of the data of rank 0 through its store, or its failure."""

    def one(rank: int) -> str | Exception:
        try:
            group_store = wait_for_ranks(store, rank, world_size, timeout, lambda: 0 if rank else signal_on_zero)
        except (RunError, Stopped) as error:
            return error
        if rank == 0:
            group_store.set("address", "of this start")
        return str(group_store.get("address").decode())

    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(one, ranks))


def test_a_restart_ignores_the_data_of_dead_ranks() -> None:
    store = dist.HashStore()
    store.set("address", "of nobody")
    dead = wait_for_ranks(store, 0, 1, 30, lambda: 0)
    dead.set("address", "of the dead")
    for _ in range(3):  # each start finds the data of the one before: its leader, and the messages of its ranks
        assert meet_all(store, [2, 1, 0], 3) == ["of this start"] * 3


def test_missing_ranks_are_named() -> None:
    zero, one = meet_all(dist.HashStore(), [0, 1], 4, timeout=1)
    assert isinstance(zero, RunError) and "ranks 2, 3 of 4 have not joined" in str(zero)
    assert isinstance(one, RunError) and "rank 1 was not admitted" in str(one)


def test_a_signal_ends_the_wait_for_missing_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("titan_launch.distributed.process_group._WAIT_AFTER_SIGNAL_S", 0.5)
    for number, status, text in ((signal.SIGTERM, 0, "SIGTERM while waiting"), (signal.SIGUSR2, 75, "a new host")):
        for end in meet_all(dist.HashStore(), [0, 1], 3, signal_on_zero=number):
            assert isinstance(end, Stopped) and end.status == status and text in str(end)


def test_a_rank_does_not_wait_for_a_store_whose_agent_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as closed:
        closed.bind(("localhost", 0))
        rank = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(closed.getsockname()[1])}
        for name, value in {**rank, "TORCHELASTIC_USE_AGENT_STORE": "True"}.items():
            monkeypatch.setenv(name, value)
        began = time.monotonic()
        with pytest.raises(RunError, match=r"rank 0 of 2 cannot reach .*, has ended"), process_group("cpu", 300):
            pass
    assert time.monotonic() - began < 60
