"""The environment of processes that have a phantom GPU."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from titan_launch.core.errors import UserError
from titan_launch.core.phantom import VARIABLE
from titan_launch.phantom_gpu.build import build
from titan_launch.phantom_gpu.devices import describe_device
from titan_launch.plan.hardware import free_memory_gib

RANK_GIB = 1.2
"""Memory of the host that a process with a phantom GPU takes: PyTorch's libraries, and small tensors."""

_DRIVER = Path("/proc/driver/nvidia/version")


@contextmanager
def phantom_gpus(
    device: str, count: int, memory_gib: float | None = None, hides_gpu: bool = False
) -> Iterator[dict[str, str]]:
    """Yield the environment of processes that see `count` GPUs of the kind `device`, a name in `devices.PHANTOMS`.

    `memory_gib`: memory of each GPU; None: that of the device. `hides_gpu`: use phantom GPUs even if this host has a
    GPU. The processes exchange small messages in a folder, which is removed at the end of the block. Raises UserError
    if `device` is unknown, if the host has a GPU that is not hidden, if the host has too little memory, or if the
    phantom GPU cannot be built.
    """
    if _DRIVER.exists() and not hides_gpu:
        raise UserError("error: this host has a GPU; --hide-gpu hides it and uses phantom GPUs instead")
    description = describe_device(device, memory_gib)
    free = free_memory_gib()
    if free < count * RANK_GIB:
        most = int(free / RANK_GIB)
        needed = f"{count * RANK_GIB:.0f} GiB of host memory, but {free:.1f} GiB are free"
        reason = f"{count} phantom GPUs need about {needed}"
        raise UserError(f"error: {reason}; use at most {most} phantom GPUs, or a host with more memory")
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
