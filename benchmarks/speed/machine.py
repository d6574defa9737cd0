"""Description of the machine and the versions of a measurement."""

from __future__ import annotations

import os
import platform
from datetime import date
from importlib.metadata import version
from pathlib import Path

from benchmarks.publishing import commit
from benchmarks.speed.contestants import Environments


def machine_line(environments: Environments | None = None) -> str:
    """Return one line with date, processor, memory, system, versions and commit."""
    parts = [
        f"{date.today().isoformat()}",
        f"{os.cpu_count()} cores ({_processor()}), {_memory_gib():.0f} GiB",
        f"{platform.system()} {platform.release().partition('-')[0]}",
        f"Python {platform.python_version()}",
        f"torch {version('torch')}",
        f"commit {commit()}",
    ]
    peers = environments.versions() if environments else {}
    if peers:
        parts.append("peers: " + ", ".join(f"{name} {number}" for name, number in peers.items()))
    return "; ".join(parts)


def _processor() -> str:
    names = [line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _memory_gib() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []
