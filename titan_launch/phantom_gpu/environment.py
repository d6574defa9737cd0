"""The GPUs that the phantom GPU can simulate, and the environment variables of processes that see phantom GPUs.

`plan.hardware.DEVICES` has the memory and compute capability of these GPUs.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from titan_launch.core.errors import UserError, did_you_mean
from titan_launch.core.phantom import VARIABLE
from titan_launch.core.terminal import counted
from titan_launch.phantom_gpu.build import build
from titan_launch.plan.hardware import DEVICES, GIB, free_memory_gib

RANK_GIB = 1.2
"""GiB of host memory that a process with a phantom GPU takes: PyTorch's libraries, and small tensors."""

_DRIVER = Path("/proc/driver/nvidia/version")
_KIB, _MIB = 1 << 10, 1 << 20


@dataclass(frozen=True)
class PhantomDevice:
    """The properties of a GPU that PyTorch, Triton and CUTLASS read."""

    driver_name: str
    """Name that the driver reports."""

    processors: int
    """Number of streaming multiprocessors."""

    l2_bytes: int
    bus_bits: int
    """Width of the memory's bus."""


# From the vendor's white papers and data sheets.
PHANTOMS = {
    "a100-40gb": PhantomDevice("NVIDIA A100-SXM4-40GB", 108, 40 * _MIB, 5120),
    "a100-80gb": PhantomDevice("NVIDIA A100-SXM4-80GB", 108, 40 * _MIB, 5120),
    "h100-80gb": PhantomDevice("NVIDIA H100 80GB HBM3", 132, 50 * _MIB, 5120),
    "h100-pcie": PhantomDevice("NVIDIA H100 PCIe", 114, 50 * _MIB, 5120),
    "h100-nvl": PhantomDevice("NVIDIA H100 NVL", 132, 60 * _MIB, 6144),
    "gh200-96gb": PhantomDevice("NVIDIA GH200 480GB", 132, 60 * _MIB, 6144),
    "h200": PhantomDevice("NVIDIA H200", 132, 60 * _MIB, 6144),
    "b200": PhantomDevice("NVIDIA B200", 148, 126 * _MIB, 8192),
    "l40s": PhantomDevice("NVIDIA L40S", 142, 96 * _MIB, 384),
    "a10": PhantomDevice("NVIDIA A10", 72, 6 * _MIB, 384),
    "l4": PhantomDevice("NVIDIA L4", 58, 48 * _MIB, 192),
    "rtx-4090": PhantomDevice("NVIDIA GeForce RTX 4090", 128, 72 * _MIB, 384),
    "rtx-3090": PhantomDevice("NVIDIA GeForce RTX 3090", 82, 6 * _MIB, 384),
}
"""The devices by their names in `plan.hardware.DEVICES`."""


def describe_device(name: str, memory_gib: float | None = None) -> str:
    """Return the value of the variable PHANTOM_DEVICE for a device. `sources/runtime.c` reads this variable.

    `memory_gib`: memory of the phantom GPU; None: that of the device. Raises UserError for an unknown name.
    """
    if name not in PHANTOMS:
        known = f"known: {', '.join(PHANTOMS)}{did_you_mean(name, PHANTOMS)}"
        raise UserError(f'error: unknown phantom GPU "{name}"; {known}')
    device = PHANTOMS[name]
    row = next(row for row in DEVICES if row.name == name)
    memory = int((memory_gib or row.memory_gib) * GIB)
    assert row.capability is not None
    # Largest number of resident threads, and bytes of shared memory, of a multiprocessor (CUDA C++ programming guide,
    # compute capabilities). A block gets at most 1 KiB less than this shared memory.
    threads = 1536 if row.capability in ((8, 6), (8, 9)) else 2048
    shared = {(8, 0): 164, (8, 6): 100, (8, 9): 100}.get(row.capability, 228) * _KIB
    numbers = (memory, *row.capability, device.processors, threads, shared, shared - _KIB)
    return "|".join(map(str, (device.driver_name, *numbers, device.l2_bytes, device.bus_bits)))


@contextmanager
def phantom_gpus(
    device: str, count: int, memory_gib: float | None = None, hides_gpu: bool = False
) -> Iterator[dict[str, str]]:
    """Yield the environment of processes that see `count` GPUs of the kind `device`, a name in `PHANTOMS`.

    `memory_gib`: memory of each GPU; None: that of the device. `hides_gpu`: use phantom GPUs even if this host has a
    GPU. The processes exchange small messages in a folder, which is removed at the end of the block. Raises UserError
    if `device` is unknown, or if the phantom GPU cannot be built. Also raises UserError if the host has a GPU that
    is not hidden, or too little memory.
    """
    if _DRIVER.exists() and not hides_gpu:
        raise UserError("error: this host has a GPU; --hide-gpu hides it and uses phantom GPUs instead")
    description = describe_device(device, memory_gib)
    free = free_memory_gib()
    if free < count * RANK_GIB:
        most = int(free / RANK_GIB)
        needed = f"{count * RANK_GIB:.1f} GiB of host memory, but {free:.1f} GiB are free"
        reason = f"{counted(count, 'phantom GPU')} {'needs' if count == 1 else 'need'} about {needed}"
        fewer = f"at most {counted(most, 'phantom GPU')}, or " if most else ""
        raise UserError(f"error: {reason}; use {fewer}a host with more memory")
    libraries = build()
    shared = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="phantom-", dir=shared) as folder:
        environment = os.environ.copy()
        environment.pop("CUDA_VISIBLE_DEVICES", None)
        yield {
            **environment,
            VARIABLE: description,
            "PHANTOM_GPUS": str(count),
            "PHANTOM_FOLDER": folder,
            "LD_PRELOAD": _joined(libraries / "libcuda.so.1", environment.get("LD_PRELOAD")),
            "LD_LIBRARY_PATH": _joined(libraries, environment.get("LD_LIBRARY_PATH")),
            "PATH": _joined(libraries, environment.get("PATH")),
            "PYTHONPATH": _joined(Path(__file__).parent / "startup", environment.get("PYTHONPATH")),
        }


def _joined(first: Path, rest: str | None) -> str:
    return f"{first}:{rest}" if rest else str(first)
