"""Options of `launch`: numbers of processes and hosts, and arguments for torchrun."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from itertools import takewhile

from titan_launch.core.errors import UserError
from titan_launch.core.terminal import shortened

PROCESSES_WITHOUT_GPU = 2

SHUTDOWN_TIMEOUT_S = 600
"""Default number of seconds that ranks may take after a signal to finish a step, save a checkpoint and end."""

LAUNCH_OPTIONS = {
    "nproc-per-node": (
        "N",
        f"number of ranks on this host (default: auto, one per GPU, or {PROCESSES_WITHOUT_GPU} without a GPU)",
    ),
    "nnodes": ("N", "number of hosts, or min:max if hosts may join and leave (default: 1)"),
    "node-rank": ("N", "number of this host, from 0, for the static rendezvous (default: 0)"),
    "rdzv-backend": ("NAME", "rendezvous of several hosts: c10d or static (default: static)"),
    "rdzv-endpoint": ("HOST:PORT", "host and port of the rendezvous; the same value on every host"),
    "rdzv-id": ("NAME", "name of the job in the rendezvous; the same value on every host"),
    "rdzv-conf": ("KEY=VALUE,...", "settings of the rendezvous, such as join_timeout=600 (seconds)"),
    "master-addr": ("HOST", "host of rank 0, for the static rendezvous (several hosts need it, or --rdzv-endpoint)"),
    "master-port": ("PORT", "port of rank 0, for the static rendezvous (default: 29500)"),
    "local-addr": ("HOST", "address of this host (default: looked up)"),
    "log-dir": ("FOLDER", "folder for the error files of torchrun (default: a temporary folder)"),
    "local-ranks-filter": ("R,R,...", "ranks of this host whose output is shown (default: all)"),
    "max-restarts": ("N", "maximum number of restarts after failures (default: 0)"),
    "shutdown-timeout": ("SECONDS", f"time for ranks to save and end after a signal (default: {SHUTDOWN_TIMEOUT_S})"),
}
"""The options of `launch`: (metavar, help text) by name. All but `shutdown-timeout` are options of torchrun."""


@dataclass(frozen=True)
class Processes:
    """Numbers of processes and hosts, and other arguments for torchrun."""

    per_node: int
    nodes: str
    """Number of hosts, or `min:max`. With `min:max` the world size is not known before the start."""

    torchrun_args: tuple[str, ...]
    shutdown_timeout_s: int = SHUTDOWN_TIMEOUT_S
    """Seconds after a signal until ranks that still run are killed."""

    @property
    def world_size(self) -> int | None:
        """Total number of processes; None if the number of hosts is not fixed."""
        return self.per_node * int(self.nodes) if self.nodes.isdecimal() else None


def plan_processes(options: Mapping[str, str]) -> Processes:
    """Parse the options of `launch`, given by name without `--`. Raises UserError for invalid values."""
    options = dict(options)
    per_node = _processes_per_node(options.pop("nproc-per-node", "auto"))
    nodes, of_nodes = _value(options, "nnodes") or "1", _source(options, "nnodes")
    options.pop("nnodes", None)
    numbers = [_number(part, 1, _MOST) or 0 for part in nodes.split(":", 1)]
    if 0 in numbers or numbers != sorted(numbers):
        raise _wrong(of_nodes, nodes, f"must be a whole number from 1 to {_MOST:,}, or min:max with min at most max")
    for name, (first, last) in {**_RANGES, "node-rank": (0, numbers[-1] - 1)}.items():
        if name in options and _number(options[name], first, last) is None:
            hint = f", since {of_nodes} is {nodes}" if name == "node-rank" else ""
            raise _wrong(f"--{name}", options[name], f"must be a whole number from {first} to {last}{hint}")
    host, colon, port = options.get("rdzv-endpoint", "").rpartition(":")
    if colon and (not host or _number(port, 1, LAST_PORT) is None):
        reason = f"must have the form HOST:PORT, with a port from 1 to {LAST_PORT}"
        raise _wrong("--rdzv-endpoint", options["rdzv-endpoint"], reason)
    shutdown_timeout_s = int(options.pop("shutdown-timeout", SHUTDOWN_TIMEOUT_S))
    args = [f"--nproc-per-node={per_node}", *(f"--{name}={value}" for name, value in options.items())]
    if nodes == "1" and not {"master-addr", "master-port"} & set(options) and not any("rdzv" in o for o in options):
        args.append("--standalone")  # uses a free port, so that several jobs do not collide
    else:
        args.append(f"--nnodes={nodes}")
    return Processes(per_node, nodes, tuple(args), shutdown_timeout_s)


def check_rendezvous(options: Mapping[str, str]) -> None:
    """Raise UserError if several hosts could not find each other with these options of `launch`."""
    value = partial(_value, options)
    nodes = value("nnodes") or "1"
    numbers = [int(number) for number in nodes.split(":")]
    backend = value("rdzv-backend") or "static"
    if numbers[-1] == 1:
        return
    if backend in ("c10d", "etcd", "etcd-v2") and not value("rdzv-endpoint"):  # a plugin may need none
        reason = "needs --rdzv-endpoint HOST:PORT, with the same value on every host"
        raise _wrong(_source(options, "rdzv-backend"), backend, reason)
    if backend == "static" and numbers[0] != numbers[-1]:
        reason = "hosts can join and leave only with --rdzv-backend c10d --rdzv-endpoint HOST:PORT; add these options"
        raise _wrong(_source(options, "nnodes"), nodes, reason)
    if backend == "static" and not (value("master-addr") or value("rdzv-endpoint")):
        reason = "the hosts need an address: add --rdzv-backend c10d --rdzv-endpoint HOST:PORT, or --master-addr HOST"
        raise _wrong(_source(options, "nnodes"), nodes, reason)


def _value(options: Mapping[str, str], name: str) -> str | None:
    """Return an option of `launch`. If it is not set, return the environment variable from which torchrun reads it."""
    return options.get(name) or os.environ.get(_variable(name))


def _source(options: Mapping[str, str], name: str) -> str:
    """Return `--name`, or the name of the environment variable if `_value` returns the variable's value."""
    return _variable(name) if not options.get(name) and os.environ.get(_variable(name)) else f"--{name}"


def _variable(name: str) -> str:
    return f"PET_{name.replace('-', '_').upper()}"


def _processes_per_node(text: str) -> int:
    if text in ("auto", "gpu"):
        gpus = count_gpus()
        if text == "gpu" and not gpus:
            raise UserError('error: --nproc-per-node gpu: this host has no GPU; use "auto" or a number')
        return gpus or PROCESSES_WITHOUT_GPU
    number = _number(text, 1, _MOST_PER_HOST)
    if number is None:
        reason = f'must be a whole number of at least 1 and at most {_MOST_PER_HOST:,}, "gpu" or "auto"'
        raise _wrong("--nproc-per-node", text, reason)
    return number


LAST_PORT = 65535
_MOST = 10**6
_MOST_PER_HOST = 1024
_RANGES = {"master-port": (1, LAST_PORT), "max-restarts": (0, _MOST), "shutdown-timeout": (0, _MOST)}
"""Smallest and largest valid value of each option that is a number."""


def _number(text: str, first: int, last: int) -> int | None:
    """Return the whole number in `text`; None if `text` is not a whole number from `first` to `last`."""
    return int(text) if text.isdecimal() and len(text) < 10 and first <= int(text) <= last else None


def _wrong(source: str, text: str, reason: str) -> UserError:
    return UserError(f"error: {source} {shortened(text)}: {reason}")


def count_gpus() -> int:
    """Return the number of visible GPUs of this host, without torch. On a host without `nvidia-smi`, such as some
    containers, all GPUs that `CUDA_VISIBLE_DEVICES` names count."""
    return len(_gpus() if shutil.which("nvidia-smi") else _visible_gpus() or ())


def find_gpus() -> list[tuple[str, float]]:
    """Return (name, memory in GiB) of each visible GPU of this host, without torch. A GPU without a memory size
    (`[N/A]`) is omitted."""
    return [(name, float(mib) / 1024) for name, mib in _gpus() if mib.isdecimal()]


def _gpus() -> list[tuple[str, str]]:
    """Return (name, memory in MiB) of each GPU that `CUDA_VISIBLE_DEVICES` names, or of all GPUs of this host. The
    facts come from the driver. If the variable has n names that are not all numbers, such as UUIDs, return the first n
    GPUs of this host."""
    visible = _visible_gpus()
    if visible == []:
        return []
    rows = _ask_driver("--query-gpu=name,memory.total", "--format=csv,noheader,nounits")
    pairs = [(name.strip(), mib.strip()) for name, comma, mib in (row.rpartition(",") for row in rows) if comma]
    if visible is not None:
        numbers = [int(gpu) for gpu in visible if gpu.isdecimal()]
        all_named = len(numbers) == len(visible)
        pairs = [pairs[number] for number in numbers if number < len(pairs)] if all_named else pairs[: len(visible)]
    return pairs


def _visible_gpus() -> list[str] | None:
    """Return the GPUs in `CUDA_VISIBLE_DEVICES`; None if the variable is not set. As in CUDA, an entry that is neither
    a number nor a UUID, such as -1, ends the list."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return None
    entries = map(str.strip, visible.split(","))
    return list(takewhile(lambda gpu: gpu.isdecimal() or gpu.startswith(("GPU-", "MIG-")), entries))


def _ask_driver(*options: str) -> list[str]:
    """Return the lines that `nvidia-smi` prints; an empty list without a driver, or if the command fails."""
    try:
        answer = subprocess.run(["nvidia-smi", *options], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return answer.stdout.splitlines() if answer.returncode == 0 else []
