"""PyTorch's flight recorder: the last collectives of every rank, written down when one does not end."""

from __future__ import annotations

import json
import os
import pickle
from contextlib import suppress
from pathlib import Path

import torch.distributed as dist
from torch._C import _distributed_c10d
from torch.distributed import distributed_c10d

from titan_launch.parallel.timeouts import LEFT_OUT
from titan_launch.train.flight_records import FOLDER, GLOO_FOLDER, record_path


def configure_flight_recorder(run_folder: Path, size: int) -> None:
    """Remember `size` collectives, and have NCCL write them to the run's folder when one times out; 0: neither.

    PyTorch reads these settings when the first process group is made, so this comes before.
    """
    os.environ["TORCH_FR_BUFFER_SIZE"] = str(size)
    os.environ["TORCH_FR_DUMP_TEMP_FILE"] = str(record_path(run_folder, FOLDER, "").absolute())
    os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] = "1" if size else "0"


def make_room_for_nccl(run_folder: Path) -> None:
    """Make the folder that NCCL writes to, once the run's folder is there."""
    (run_folder / FOLDER).mkdir(exist_ok=True)


def dump_flight_recorder(run_folder: Path) -> None:
    """Write this rank's collectives to `flight_recorder/rank_N`, as `torchfrtrace` reads them; from any thread.

    With NCCL, those of gloo go to `flight_recorder_gloo/rank_N`. When a collective of NCCL times out, NCCL writes its
    own to the same file; gloo records, but never writes. What cannot be written is left out: this is called when
    something has gone wrong already.
    """
    traces = {FOLDER: _nccl_trace, GLOO_FOLDER: _gloo_trace} if _has_nccl() else {FOLDER: _gloo_trace}
    for folder, trace in traces.items():
        path = record_path(run_folder, folder, dist.get_rank())
        with suppress(OSError, RuntimeError):
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(trace())


def collectives_begun() -> int:
    """How many collectives this rank has begun, in all groups but those of `LEFT_OUT`; 0 where nothing is recorded.

    The same on ranks that are at the same place, as long as all belong to the same kinds of groups.
    """
    dumps = [_distributed_c10d._dump_fr_trace_json]  # type: ignore[attr-defined]
    if _has_nccl():
        dumps.append(_distributed_c10d._dump_nccl_trace_json)  # type: ignore[attr-defined]
    last: dict[tuple[int, str], int] = {}
    for backend, dump in enumerate(dumps):  # a group of both has a count of each
        for entry in json.loads(dump(True, False)).get("entries", []):
            name, description = entry["process_group"]
            if description not in LEFT_OUT:
                last[backend, name] = max(last.get((backend, name), 0), entry["collective_seq_id"])
    return sum(last.values())


def _has_nccl() -> bool:
    return dist.is_nccl_available() and dist.get_backend() != "gloo"


def _nccl_trace() -> bytes:
    return bytes(_distributed_c10d._dump_nccl_trace())  # type: ignore[attr-defined]


def _gloo_trace() -> bytes:
    """Gloo's record, with the ranks of its groups: it lacks them, and without them ranks cannot be compared."""
    trace = pickle.loads(_distributed_c10d._dump_fr_trace(True, True, False))  # type: ignore[attr-defined]
    trace["pg_config"] = {
        group.group_name: {
            "name": group.group_name,
            "desc": group.group_desc,
            "ranks": str(dist.get_process_group_ranks(group)),
        }
        for group in list(distributed_c10d._world.pg_map)
    }
    return pickle.dumps(trace)
