"""PyTorch's flight recorder, which writes the last collectives of each rank to files when a collective hangs. `launch`
reads these files to report the unfinished collective."""

from __future__ import annotations

import os
import pickle
import pickletools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from titan_launch.config.sections.run import UNWATCHED_GROUPS
from titan_launch.core.errors import listed
from titan_launch.core.files import MIB, read_regular
from titan_launch.core.json_files import parse_json
from titan_launch.core.terminal import one_line
from titan_launch.core.torch_release import DUMPS_FLIGHT_RECORDS_BY
from titan_launch.distributed.torch_private import flight_record, flight_record_entries, process_groups

FOLDER = "flight_recorder"
"""Name of the folder in the run folder that has NCCL's records, or gloo's records in a run on CPUs."""

GLOO_FOLDER = "flight_recorder_gloo"
"""Name of the folder in the run folder that has gloo's records in a run with NCCL. It is a folder of its own, because
`torchfrtrace` cannot compare both backends at once."""

_PREFIX = "rank_"

_MOST_BYTES = 256 * MIB
"""Largest size in bytes of a record that is read. A record of 20,000 collectives with stack traces has about 60 MiB."""

_MOST_OPCODES = 8_000_000
"""Largest number of pickle opcodes in a record that is read. Unpickling takes up to 70 bytes of memory for each
opcode."""


@dataclass(frozen=True)
class _Collective:
    """A collective of one group, equal on all ranks of the group."""

    group: str
    members: tuple[int, ...]
    """Ranks of the group. They distinguish the groups of a mesh, which may have equal names."""

    description: str
    name: str
    """Backend and operation, such as `gloo:all_reduce`; for NCCL `nccl:all_reduce`, and from torch 2.15 on
    `nccl2:all_reduce`."""

    number: int
    """Sequence number within the group, from 1."""

    is_p2p: bool

    def __str__(self) -> str:
        return one_line(f"{self.name} number {self.number} of group {self.description}")


@dataclass(frozen=True)
class _Record:
    """Collectives that one rank recorded, oldest first."""

    started: list[_Collective]
    unfinished: _Collective | None
    """First collective that did not finish."""


def record_path(run_folder: Path, folder: str, rank: int | str) -> Path:
    """Return the path of a rank's record for `torchfrtrace`. If `rank` is empty, return the prefix to which NCCL
    appends the rank."""
    return run_folder / folder / f"{_PREFIX}{rank}"


def unfinished_collectives(run_folder: Path, since: float) -> Iterator[str]:
    """Yield a description of the first unfinished collective of every rank, without duplicates. A description names the
    ranks that started the collective, and the ranks that did not start it. For a send or receive, only the ranks
    that started it are named. `since`: start time of the ranks, in seconds since the epoch. Older records are
    ignored."""
    for folder in (FOLDER, GLOO_FOLDER):
        records = dict(sorted(_read_records(run_folder / folder, since)))
        for collective in dict.fromkeys(record.unfinished for record in records.values() if record.unfinished):
            yield _describe(collective, records)


def ranks_listed(ranks: Sequence[int]) -> str:
    """Return `rank 3`, or `ranks 0, 1, 2`."""
    return f"rank{'s' if len(ranks) > 1 else ''} {listed([*map(str, ranks)], most=8)}"


def _describe(collective: _Collective, records: Mapping[int, _Record]) -> str:
    started = [rank for rank, record in records.items() if collective in record.started]
    missing = [rank for rank in collective.members if rank not in started]
    if collective.is_p2p or not missing:
        return f"{collective}: started by {ranks_listed(started)}"
    last_started = {
        rank: records[rank].started[-1] if rank in records and records[rank].started else "no record"
        for rank in missing[:3]
    }
    last = ", ".join(f"on rank {rank}: {text}" for rank, text in last_started.items())
    return f"{collective}: started by {ranks_listed(started)}, not by {ranks_listed(missing)} (last started {last})"


def _read_records(folder: Path, since: float) -> Iterator[tuple[int, _Record]]:
    for path in folder.glob(f"{_PREFIX}*"):
        rank = path.name.removeprefix(_PREFIX)
        try:
            if rank.isdecimal() and path.stat().st_mtime >= since:
                yield int(rank), _parse(_load(read_regular(path, _MOST_BYTES)))
        except Exception:  # an aborted process may leave a damaged record; other records remain useful
            continue


def _parse(trace: dict[str, Any]) -> _Record:
    groups = {name: parse_json(group["ranks"]) for name, group in trace["pg_config"].items()}
    members = {str(name): tuple(int(rank) for rank in ranks) for name, ranks in groups.items()}
    started: list[_Collective] = []
    unfinished: _Collective | None = None
    for entry in trace["entries"]:
        (group, description), name = entry["process_group"], entry["profiling_name"]
        if not all(isinstance(text, str) and len(text) < 1000 for text in (group, description, name)):
            raise ValueError("a name is not text, or too long")  # such as nested tuples, whose hash may take forever
        if description in UNWATCHED_GROUPS:
            continue
        is_p2p = bool(entry["is_p2p"])
        number = entry["p2p_seq_id" if is_p2p else "collective_seq_id"]
        if not isinstance(number, int) or number.bit_length() > 64:
            raise ValueError("a collective has no valid sequence number")
        ranks = members.get(group, ())
        started.append(_Collective(group, ranks, description, name, number, is_p2p))
        if not entry["retired"] and entry["state"] != "completed":
            unfinished = unfinished or started[-1]
    return _Record(started, unfinished)


_PLAIN_OPCODES = {
    *("PROTO", "FRAME", "STOP", "MARK", "NONE", "NEWTRUE", "NEWFALSE", "INT", "BININT", "BININT1", "BININT2"),
    *("LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT", "UNICODE", "SHORT_BINUNICODE", "BINUNICODE"),
    *("EMPTY_LIST", "LIST", "APPEND", "APPENDS", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"),
    *("EMPTY_DICT", "DICT", "SETITEM", "SETITEMS"),
    *("GET", "BINGET", "LONG_BINGET", "PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"),
}
"""Pickle opcodes that create numbers, strings, lists, tuples and dicts, and do not import, call or set anything."""


def _load(content: bytes) -> Any:
    """Unpickle numbers, strings, lists, tuples and dicts. Raises UnpicklingError for every other opcode, and for too
    many opcodes."""
    for number, (opcode, argument, _) in enumerate(pickletools.genops(content)):
        if number > _MOST_OPCODES:
            raise pickle.UnpicklingError(f"a flight record has more than {_MOST_OPCODES:,} opcodes")
        # The unpickler allocates a table as long as the largest index of a memo entry.
        if opcode.name not in _PLAIN_OPCODES or ("PUT" in opcode.name and int(argument or 0) > len(content)):
            raise pickle.UnpicklingError(f"a flight record has the opcode {opcode.name} {argument}")
    return pickle.loads(content)


def configure_flight_recorder(run_folder: Path, size: int) -> None:
    """Record the last `size` collectives, and let NCCL write them to the run folder after a timeout. 0 disables both.
    PyTorch reads these settings when the first process group is created, so call this function before that."""
    os.environ["TORCH_FR_BUFFER_SIZE"] = str(size)
    os.environ["TORCH_FR_DUMP_TEMP_FILE"] = str(record_path(run_folder, FOLDER, "").absolute())
    os.environ[DUMPS_FLIGHT_RECORDS_BY] = "1" if size else "0"


def dump_flight_recorder(run_folder: Path) -> None:
    """Write this rank's collectives to `flight_recorder/rank_N`, which `torchfrtrace` reads. Any thread may call this
    function.

    In a run with NCCL, the collectives of gloo go to `flight_recorder_gloo/rank_N`. (After a timeout NCCL also writes
    its record by itself. Gloo never does so.) Errors are suppressed, because this function runs after another error.
    """
    folders = {FOLDER: "nccl", GLOO_FOLDER: "gloo"} if _has_nccl() else {FOLDER: "gloo"}
    for folder, backend in folders.items():
        path = record_path(run_folder, folder, dist.get_rank())
        with suppress(OSError, RuntimeError, AttributeError):
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(flight_record("nccl") if backend == "nccl" else _gloo_record())


def collectives_started() -> int:
    """Return the number of collectives that this rank has started; 0 without a flight recorder.

    Collectives of the groups in `UNWATCHED_GROUPS` do not count. At the same point of a run, two ranks have equal
    numbers if their groups are of the same kinds (such as data-parallel and tensor-parallel groups).
    """
    last: dict[tuple[str, str], int] = {}
    for backend in ("gloo", "nccl") if _has_nccl() else ("gloo",):  # in a group with both backends, both count
        for entry in flight_record_entries(backend):
            name, description = entry["process_group"]
            if description not in UNWATCHED_GROUPS:
                last[backend, name] = max(last.get((backend, name), 0), entry["collective_seq_id"])
    return sum(last.values())


def _has_nccl() -> bool:
    return dist.is_nccl_available() and dist.get_backend() != "gloo"


def _gloo_record() -> bytes:
    """Return gloo's record with the ranks of each group. Gloo does not record these ranks, but `torchfrtrace` needs
    them."""
    trace = pickle.loads(flight_record("gloo"))  # safe, because this process has just made the record
    trace["pg_config"] = {
        group.group_name: {
            "name": group.group_name,
            "desc": group.group_desc,
            "ranks": str(dist.get_process_group_ranks(group)),
        }
        for group in process_groups()
    }
    return pickle.dumps(trace)
