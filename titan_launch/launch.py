"""torchrun in this process: the job file is checked once before, and a failed worker's own error stays the last word.

Started from the shell, torchrun ends every failure with a 40-line banner and exit status 1. Called from here, the
status is the failed worker's, and its message stands alone.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from titan_launch.errors import UserError

TORCHRUN_OPTIONS = (
    "nproc-per-node",
    "nnodes",
    "node-rank",
    "rdzv-backend",
    "rdzv-endpoint",
    "rdzv-id",
    "rdzv-conf",
    "master-addr",
    "master-port",
    "local-addr",
    "log-dir",
    "local-ranks-filter",
)
"""The options of torchrun that are passed on."""

PROCESSES_WITHOUT_GPU = 2


@dataclass(frozen=True)
class Processes:
    """How many processes are started, and what else torchrun is told."""

    per_node: int
    nodes: str
    """A number, or `min:max`, in which case the world size is not known before the start."""

    torchrun_args: tuple[str, ...]

    @property
    def world_size(self) -> int | None:
        """All processes, where the number of nodes is fixed."""
        return self.per_node * int(self.nodes) if self.nodes.isdecimal() else None


def plan_processes(options: Mapping[str, str]) -> Processes:
    """Read torchrun's options. Raises UserError for a number of processes or nodes that is none."""
    options = dict(options)
    per_node = _processes_per_node(options.pop("nproc-per-node", "auto"))
    nodes = options.pop("nnodes", "1")
    if not all(part.isdecimal() and int(part) >= 1 for part in nodes.split(":", 1)):
        raise UserError(f"error: --nnodes {nodes}: must be a whole number of at least 1, or min:max")
    for name in ("node-rank", "master-port"):
        if not options.get(name, "0").isdecimal():
            raise UserError(f"error: --{name} {options[name]}: must be a whole number")
    args = [f"--nproc-per-node={per_node}", *(f"--{name}={value}" for name, value in options.items())]
    if nodes == "1" and not {"master-addr", "master-port"} & set(options) and not any("rdzv" in o for o in options):
        args.append("--standalone")  # a free port of this host, so that several jobs do not collide
    else:
        args.append(f"--nnodes={nodes}")
    return Processes(per_node, nodes, tuple(args))


def _processes_per_node(text: str) -> int:
    if text in ("auto", "gpu"):
        gpus = count_gpus()
        if text == "gpu" and not gpus:
            raise UserError("error: --nproc-per-node gpu: this host has no GPU")
        return gpus or PROCESSES_WITHOUT_GPU
    if not text.isdecimal() or int(text) < 1:
        raise UserError(f'error: --nproc-per-node {text}: must be a whole number of at least 1, "gpu" or "auto"')
    return int(text)


def count_gpus() -> int:
    """GPUs of this host that CUDA will show, without importing torch: `CUDA_VISIBLE_DEVICES`, or `nvidia-smi`."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([device for device in visible.split(",") if device.strip() not in ("", "-1")])
    try:
        listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU ") for line in listing.stdout.splitlines())


def launch(processes: Processes, worker_args: Sequence[str]) -> int:
    """Run the training processes and wait for them. Returns the exit status of the first that failed, or 0."""
    _share_cores(processes.per_node)
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    logging.disable(logging.CRITICAL)  # torchrun's own account of a failure would bury the worker's
    args = torchrun.parse_args([*processes.torchrun_args, "-m", "titan_launch", *worker_args])
    try:
        torchrun.run(args)
    except ChildFailedError as error:
        return _report_failure({rank: failure.exitcode for rank, failure in error.failures.items()})
    except SignalException as error:
        return 128 + error.sigval
    return 0


def _report_failure(exit_codes: Mapping[int, int]) -> int:
    """The status of the worker that failed first: one that exits has spoken itself, one that was killed could not.

    Whoever was killed comes first: the others have failed at their next collective. (SIGTERM is how torchrun stops the
    others, and says nothing.)
    """
    killed = {rank: -code for rank, code in exit_codes.items() if code < 0 and -code != signal.SIGTERM}
    if not killed:
        status = next((code for code in exit_codes.values() if code > 0), 128 + signal.SIGTERM)
        if status == 128 + signal.SIGTERM:
            print(f"error: rank {min(exit_codes)} was ended by SIGTERM", file=sys.stderr)
        return status
    rank, number = next(iter(killed.items()))
    name = signal.Signals(number).name
    hint = "; the usual cause is that the host ran out of memory" if number == signal.SIGKILL else ""
    print(f"error: rank {rank} was killed by {name}{hint}", file=sys.stderr)
    return 128 + number


def _share_cores(processes: int) -> None:
    """Divide the cores among the processes: torchrun would give every one a single thread."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // processes)))
