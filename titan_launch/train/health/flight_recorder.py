"""PyTorch's flight recorder: the last collectives of every rank, written to files when a collective hangs."""

from __future__ import annotations

import os
import pickle
from contextlib import suppress
from pathlib import Path

import torch.distributed as dist

from titan_launch.config.sections.run import UNWATCHED_GROUPS
from titan_launch.distributed.torch_private import flight_record, flight_record_entries, process_groups
from titan_launch.train.health.flight_records import FOLDER, GLOO_FOLDER, record_path


def configure_flight_recorder(run_folder: Path, size: int) -> None:
    """Record the last `size` collectives, and have NCCL write them to the run folder after a timeout. 0 disables both.

    PyTorch reads these settings when the first process group is created, so call this function before.
    """
    os.environ["TORCH_FR_BUFFER_SIZE"] = str(size)
    os.environ["TORCH_FR_DUMP_TEMP_FILE"] = str(record_path(run_folder, FOLDER, "").absolute())
    os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] = "1" if size else "0"


def create_nccl_folder(run_folder: Path) -> None:
    """Create the folder to which NCCL writes. The run folder must exist."""
    (run_folder / FOLDER).mkdir(exist_ok=True)


def dump_flight_recorder(run_folder: Path) -> None:
    """Write this rank's collectives to `flight_recorder/rank_N`, which `torchfrtrace` reads. Any thread may call this.

    In a run with NCCL, the collectives of gloo go to `flight_recorder_gloo/rank_N`. After a timeout NCCL writes its own
    record to the same file; gloo never writes one. Errors are suppressed, because this function runs after another
    error.
    """
    folders = {FOLDER: "nccl", GLOO_FOLDER: "gloo"} if _has_nccl() else {FOLDER: "gloo"}
    for folder, backend in folders.items():
        path = record_path(run_folder, folder, dist.get_rank())
        with suppress(OSError, RuntimeError, AttributeError):
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(flight_record("nccl") if backend == "nccl" else _gloo_record())


def collectives_started() -> int:
    """Return the number of collectives that this rank has started, without `UNWATCHED_GROUPS`; 0 without a recorder.

    Ranks at the same point of a run have equal numbers if all belong to the same kinds of groups.
    """
    last: dict[tuple[str, str], int] = {}
    for backend in ("gloo", "nccl") if _has_nccl() else ("gloo",):  # a group with both backends counts each
        for entry in flight_record_entries(backend):
            name, description = entry["process_group"]
            if description not in UNWATCHED_GROUPS:
                last[backend, name] = max(last.get((backend, name), 0), entry["collective_seq_id"])
    return sum(last.values())


def _has_nccl() -> bool:
    return dist.is_nccl_available() and dist.get_backend() != "gloo"


def _gloo_record() -> bytes:
    """Return gloo's record, with the ranks of its groups added: the comparison of ranks needs them."""
    trace = pickle.loads(flight_record("gloo"))  # this process has just written the record
    trace["pg_config"] = {
        group.group_name: {
            "name": group.group_name,
            "desc": group.group_desc,
            "ranks": str(dist.get_process_group_ranks(group)),
        }
        for group in process_groups()
    }
    return pickle.dumps(trace)
