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

FOLDER = "flight_recorder"


def configure_flight_recorder(run_folder: Path, size: int) -> None:
    """Remember `size` collectives, and have NCCL write them to the run's folder when one times out; 0: neither.

    PyTorch reads these settings when the first process group is made, so this comes before.
    """
    os.environ["TORCH_FR_BUFFER_SIZE"] = str(size)
    os.environ["TORCH_FR_DUMP_TEMP_FILE"] = str((run_folder / FOLDER / "rank_").absolute())
    os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] = "1" if size else "0"


def make_room_for_nccl(run_folder: Path) -> None:
    """Make the folder that NCCL writes to, once the run's folder is there."""
    (run_folder / FOLDER).mkdir(exist_ok=True)


def dump_flight_recorder(run_folder: Path) -> None:
    """Write this rank's collectives to `flight_recorder/rank_N`, as `torchfrtrace` reads them; from any thread.

    NCCL does that by itself when a collective times out; gloo records, but never writes. What cannot be written is
    left out: this is called when something has gone wrong already.
    """
    path = run_folder / FOLDER / f"rank_{dist.get_rank()}"
    with suppress(OSError, RuntimeError):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(_trace())


def collectives_begun() -> int:
    """How many collectives this rank has begun, in all groups but those of `LEFT_OUT`; 0 where nothing is recorded.

    The same on ranks that are at the same place, as long as all belong to the same kinds of groups.
    """
    dump = _distributed_c10d._dump_nccl_trace_json if _has_nccl() else _distributed_c10d._dump_fr_trace_json  # type: ignore[attr-defined]
    last: dict[str, int] = {}
    for entry in json.loads(dump(True, False)).get("entries", []):
        name, description = entry["process_group"]
        if description not in LEFT_OUT:
            last[name] = max(last.get(name, 0), entry["collective_seq_id"])
    return sum(last.values())


def _has_nccl() -> bool:
    return dist.is_nccl_available() and dist.get_backend() != "gloo"


def _trace() -> bytes:
    """NCCL's record where there is one, else gloo's, to which the ranks of its groups are added: it lacks them, and
    without them `torchfrtrace` cannot compare ranks."""
    if _has_nccl():
        return bytes(_distributed_c10d._dump_nccl_trace())  # type: ignore[attr-defined]
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
