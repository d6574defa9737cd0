"""Flight records of all ranks name the collective that did not finish."""

from __future__ import annotations

import codecs
import os
import pickle
import pickletools
import random
import resource
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.distributed import run_ranks
from titan_launch.core.torch_release import torch_release
from titan_launch.distributed import torch_private
from titan_launch.launch.torchrun import _abort_cause
from titan_launch.train.health import flight_recorder
from titan_launch.train.health.flight_recorder import (
    FOLDER,
    GLOO_FOLDER,
    _load,
    collectives_started,
    dump_flight_recorder,
    record_path,
    unfinished_collectives,
)


def wait_for_the_last_rank(folder: Path) -> int:
    """Start a collective on all ranks but the last, write the records, and return the number started by this rank."""
    pair = dist.new_group([1, 2], group_desc="pair")
    dist.all_reduce(torch.ones(1))
    is_last = dist.get_rank() == dist.get_world_size() - 1
    group = None if dist.get_rank() == 0 else pair
    if not is_last:
        work = dist.all_reduce(torch.ones(1), group=group, async_op=True)
    time.sleep(0.2)
    dump_flight_recorder(folder)
    number = collectives_started()
    while len(list((folder / FOLDER).iterdir())) < dist.get_world_size():  # the record of each rank, before the rest
        time.sleep(0.01)
    if is_last:
        dist.all_reduce(torch.ones(1), group=pair)
        dist.all_reduce(torch.ones(1))
    else:
        work.wait()
        if group is not None:
            dist.all_reduce(torch.ones(1))
    return number


def test_unfinished_collectives_are_named_with_the_ranks_that_did_not_start_them(tmp_path: Path) -> None:
    assert run_ranks(wait_for_the_last_rank, 3, tmp_path) == [2, 2, 1]
    last = "gloo:all_reduce number 1 of group default_pg"
    assert list(unfinished_collectives(tmp_path, since=0)) == [
        "gloo:all_reduce number 2 of group default_pg: started by rank 0, not by ranks 1, 2 "
        f"(last started on rank 1: gloo:all_reduce number 1 of group pair, on rank 2: {last})",
        f"gloo:all_reduce number 1 of group pair: started by rank 1, not by rank 2 (last started on rank 2: {last})",
    ]
    assert list(unfinished_collectives(tmp_path, since=time.time() + 60)) == []  # of an earlier start
    assert _abort_cause(tmp_path, since=0).startswith(": native code aborted the process; the lines above")


def entry(number: int, state: str, description: str = "dp_shard", backend: str = "nccl") -> dict[str, Any]:
    return {
        "process_group": ("5", description),
        "collective_seq_id": number,
        "p2p_seq_id": 0,
        "is_p2p": False,
        "profiling_name": f"{backend}:all_gather",
        "state": state,
        "retired": state == "completed",
    }


def write_record(folder: Path, rank: int, *entries: dict[str, Any]) -> None:
    path = record_path(folder, FOLDER, rank)
    path.parent.mkdir(exist_ok=True)
    groups = {"5": {"name": "5", "desc": "dp_shard", "ranks": "[0, 1, 2]"}}
    path.write_bytes(pickle.dumps({"entries": entries, "pg_config": groups}))


@pytest.mark.parametrize("backend", ["nccl", "nccl2"])
def test_the_end_of_a_run_that_nccl_aborted_names_the_collective_and_the_ranks(backend: str, tmp_path: Path) -> None:
    started = entry(8, "scheduled" if backend == "nccl2" else "started", backend=backend)
    write_record(tmp_path, 0, entry(7, "completed", backend=backend), started, entry(9, "scheduled", backend=backend))
    write_record(tmp_path, 1, entry(7, "completed", backend=backend), entry(8, "started", "checkpoint"))
    record_path(tmp_path, FOLDER, 2).write_bytes(b"half of a rec")
    assert _abort_cause(tmp_path, since=0).splitlines() == [
        ": NCCL's watchdog thread aborts the process when CUDA fails, or when a collective takes longer than "
        "comm.timeout_seconds (comm.init_timeout_seconds until the end of the first step); PyTorch's lines above name "
        "the cause",
        f"not finished: {backend}:all_gather number 8 of group dp_shard: started by rank 0, not by ranks 1, 2 (last "
        f"started on rank 1: {backend}:all_gather number 7 of group dp_shard, on rank 2: no record); see the flight "
        f"records and stacks in {tmp_path}",
    ]


def recorded_by_a_hook(folder: Path) -> list[str]:
    """Start collectives on a backend that PyTorch's hook records, as it records `nccl2`. Return their names."""
    from torch.distributed.distributed_c10d import FlightRecorderHook
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    assert dist.group.WORLD is not None
    hook = FlightRecorderHook.attach(dist.group.WORLD, [0, 1])
    dist.all_reduce(torch.ones(1))
    dist.all_reduce(torch.ones(1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_private, "_implementation", lambda backend: backend if backend == "gloo" else "fake")
        patch.setattr(flight_recorder, "_has_nccl", lambda: True)
        assert collectives_started() == 2
        dump_flight_recorder(folder)
    hook.remove()
    record = _load(record_path(folder, FOLDER, 1).read_bytes())
    assert [group["ranks"] for group in record["pg_config"].values()] == ["[0, 1]"]
    return [entry["profiling_name"] for entry in record["entries"]]


@pytest.mark.skipif(torch_release() < (2, 15), reason="needs torch 2.15, which records other backends by a hook")
def test_a_record_of_pytorchs_hook_is_read(tmp_path: Path) -> None:
    assert run_ranks(recorded_by_a_hook, 1, tmp_path) == [["fake:all_reduce"] * 2]


def test_a_record_cannot_run_code(tmp_path: Path) -> None:
    class Harmful:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "made"),)

    write_record(tmp_path, 0, {"process_group": Harmful()})
    assert list(unfinished_collectives(tmp_path, since=0)) == []
    assert not (tmp_path / "made").exists()


def mutated(content: bytes, rng: random.Random) -> bytes:
    """Return a pickle with opcodes inserted, swapped, or nested, with arguments of any kind."""
    spots = [position for _, _, position in pickletools.genops(content)]
    data = bytearray(content)
    for _ in range(rng.randint(1, 3)):
        at = rng.choice(spots)
        opcode = rng.choice(pickletools.opcodes).code.encode("latin-1")
        argument = rng.choice((b"", b"os\nmkdir\n", b"\xff\xff\xff\x7f", b"\x02os\x94", b"999999999\n", content))
        if rng.random() < 0.5:
            data[at:at] = opcode + argument
        elif at < len(data):
            data[at : at + 1] = opcode
    return bytes(data)


def test_mutated_records_load_as_plain_values_or_not_at_all() -> None:
    rng = random.Random(0)
    trace = {
        "pg_config": {"0": {"ranks": "[0, 1]"}},
        "entries": [entry(1, "started"), {"state": 2.5, "of": (None, True)}],
    }
    records = [pickle.dumps(trace, protocol) for protocol in range(6)]
    codecs.lookup("raw-unicode-escape")  # Python imports this module for an invalid string
    events: list[str] = []
    is_watching = True

    def watch(event: str, args: Any) -> None:
        if is_watching and event in ("pickle.find_class", "import", "exec", "os.mkdir", "os.system"):
            events.append(f"{event} {args[:2]}")

    sys.addaudithook(watch)  # an audit hook cannot be removed
    before, loaded = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, 0
    for _ in range(6000):
        with suppress(Exception):
            _load(mutated(rng.choice(records), rng))
            loaded += 1
    is_watching = False
    assert not events
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # KiB
    assert 0 < loaded < 3000


def dump_beside_nccl(folder: Path) -> tuple[bytes, int]:
    """Write the records beside one of NCCL. Return NCCL's record, and the collectives started in both."""
    dist.all_reduce(torch.ones(1))
    json = b'{"entries": [{"process_group": ["0", "default_pg"], "collective_seq_id": 40}]}'
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flight_recorder, "_has_nccl", lambda: True)
        library = torch._C._distributed_c10d
        patch.setattr(library, "_dump_nccl_trace", lambda: b"of NCCL", raising=False)
        patch.setattr(library, "_dump_nccl_trace_json", lambda *_: json, raising=False)
        dump_flight_recorder(folder)
        return record_path(folder, FOLDER, dist.get_rank()).read_bytes(), collectives_started()


def test_the_record_of_gloo_is_written_beside_that_of_nccl(tmp_path: Path) -> None:
    assert run_ranks(dump_beside_nccl, 2, tmp_path) == [(b"of NCCL", 41)] * 2
    trace = pickle.loads(record_path(tmp_path, GLOO_FOLDER, 1).read_bytes())
    assert [entry["profiling_name"] for entry in trace["entries"]] == ["gloo:all_reduce"]
    assert trace["pg_config"]["0"]["ranks"] == "[0, 1]"
