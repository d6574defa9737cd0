"""The hardware that a plan assumes: memory, speeds and links of a device; and a table of accelerators. This module does
not import torch."""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from titan_launch.config.job import JobConfig
from titan_launch.core.errors import ConfigError, Problem, config_error, did_you_mean
from titan_launch.core.terminal import counted
from titan_launch.plan.speeds import (
    DataSheetSpeeds,
    Kernels,
    Measured,
    MeasuredSpeeds,
    Speeds,
    link_of,
    read_measured,
)

GIB = 2**30


def format_bytes(num_bytes: int) -> str:
    """Return a number of bytes as text: `22.4 GiB`, or `22.4 MiB` below 1 GiB."""
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB else f"{num_bytes / GIB * 1024:.1f} MiB"


def format_memory(num_bytes: float) -> str:
    """Return memory as text with two decimals: `22.41 GiB`, or `22.41 MiB` below 0.1 GiB."""
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= 0.1 * GIB else f"{num_bytes / GIB * 1024:.2f} MiB"


_OVERHEAD_GIB, _FRAGMENTATION = 2.0, 0.15
"""Defaults of `planner.overhead_gib` and `planner.fragmentation` on a GPU. The overhead is a guess. The fragmentation
is enough for PyTorch's allocator in the shipped jobs (`benchmarks/phantom_memory.py` runs the allocator without a
GPU)."""

_WORKSPACE_MIB, _SMALL_WORKSPACE_MIB = 32.0, 8.125
"""Workspace of cuBLAS in a matrix product, in MiB: on Hopper and later GPUs, and on earlier GPUs (PyTorch's
CublasHandlePool.cpp)."""

_PROCESS_GIB = 0.5
"""Default overhead in GiB on a CPU if `planner.memory_gib` is unset, so that ranks share the machine's memory: the
interpreter, torch and its threads. Otherwise, the default on a CPU is 0."""

_MARGIN, _MARGIN_GIB = 0.05, 0.5
"""Default margin below the memory limit: a fraction of the limit, and the smallest margin on a GPU in GiB."""


NO_LIMIT = (
    "needs a memory limit, and none is known; set planner.device or planner.memory_gib, or plan with --device or "
    "--memory-gib"
)
"""Error message for a key that is `auto`, if `Hardware.memory_gib` is None."""


@dataclass(frozen=True)
class Hardware:
    """The hardware that a plan assumes. `plan.report.table.format_assumptions` formats it."""

    kernels: Kernels
    device: str | None
    """Name in the device table, or the name that the driver reports. None: no device is assumed."""

    memory_gib: float | None
    """Memory limit of one device in GiB. None: unknown, and predictions get no verdict."""

    memory_source: str
    """Source of the memory limit, in words."""

    overhead_gib: float
    """Memory outside of tensors, in GiB: on a GPU, CUDA context and NCCL; on a CPU, the rest of the process."""

    fragmentation: float
    """Memory that the allocator reserves beyond the memory in use, as a fraction of the memory in use."""

    workspace_bytes: int
    """Workspace of cuBLAS in a matrix product; 0 on a CPU."""

    margin_gib: float
    """Memory that must stay free below the limit for the verdict `fits`, in GiB."""

    peak_tflops: float | None
    mfu: float | None
    """Fraction of the peak FLOP/s that a step reaches. None: `speeds` give the time of each operation."""

    speeds: Speeds | None
    """Speeds of operations and collectives. None: `mfu` gives the time of computation."""

    intra_node_gb_per_s: float | None
    inter_node_gb_per_s: float | None
    gpus_per_node: int

    @property
    def usable_bytes(self) -> float | None:
        """Memory limit of one device minus the margin, in bytes. None: unknown."""
        return None if self.memory_gib is None else (self.memory_gib - self.margin_gib) * GIB

    def reserved_bytes(self, needed_bytes: float) -> float:
        """Return the bytes that a process takes from the device if its tensors need `needed_bytes`."""
        return needed_bytes * (1 + self.fragmentation) + self.overhead_gib * GIB


def planned_hardware(config: JobConfig, world_size: int) -> Hardware:
    """Return the assumptions of a plan for `world_size` ranks. Raises ConfigError as `hardware_of` does."""
    return hardware_of(config, ranks_on_machine=min(world_size, config.planner.gpus_per_node))


def hardware_of(
    config: JobConfig,
    ranks_on_machine: int,
    kernels: Kernels | None = None,
    device_name: str | None = None,
    device_memory_gib: float | None = None,
) -> Hardware:
    """Return the assumptions of `[planner]` and `[metrics]`, completed from the device table.

    A run passes `kernels`. On a GPU, a run also passes `device_name` (as the driver reports it) and
    `device_memory_gib`. `plan` may run on another machine, so it passes none of the three. Without `kernels`, CPU
    kernels are assumed if `job.device` is `cpu` and `planner.device` is not set; otherwise, GPU kernels.

    `ranks_on_machine`: number of ranks that share the memory of this machine, if this memory is the limit. Raises
    ConfigError if `planner.device` is not in the table, or as `_speeds` does.
    """
    planner = config.planner
    if problems := [*planned_device_exists(config)]:
        raise ConfigError(problems)
    named = next((device for device in DEVICES if device.name == planner.device), None)
    kernels = kernels or ("cpu" if config.job.device == "cpu" and named is None else "cuda")
    known = named or (find_device(device_name) if device_name else None)
    memory, source = _memory(config, known, kernels, ranks_on_machine, device_memory_gib)
    is_gpu = kernels == "cuda"
    shares_machine = not is_gpu and planner.memory_gib is None
    overhead = _OVERHEAD_GIB if is_gpu else _PROCESS_GIB if shares_machine else 0.0
    within, across = _links(config, known)
    speeds = _speeds(config, planner.device or device_name, known, kernels)
    is_older = known is not None and known.capability is not None and known.capability < (9, 0)
    workspace_mib = _SMALL_WORKSPACE_MIB if is_older else _WORKSPACE_MIB
    return Hardware(
        kernels=kernels,
        device=known.name if known else device_name,
        memory_gib=memory,
        memory_source=source,
        overhead_gib=_first(planner.overhead_gib, overhead),
        fragmentation=_first(planner.fragmentation, _FRAGMENTATION if is_gpu else 0.0),
        workspace_bytes=round(workspace_mib * 2**20) if is_gpu else 0,
        margin_gib=_first(planner.margin_gib, max(_MARGIN * (memory or 0.0), _MARGIN_GIB if is_gpu else 0.0)),
        peak_tflops=_peak_tflops(config, known),
        mfu=None if speeds is not None else _first(planner.mfu, DEFAULT_MFU),
        speeds=speeds,
        intra_node_gb_per_s=within,
        inter_node_gb_per_s=across,
        gpus_per_node=planner.gpus_per_node,
    )


DEFAULT_MFU = 0.38
"""Default of `planner.mfu` if the speeds of the device are not known. TorchTitan's published runs of Llama 3 8B on H100
reach 0.37, or 0.42 if compiled."""


def _speeds(config: JobConfig, name: str | None, known: Device | None, kernels: Kernels) -> Speeds | None:
    """Return the speeds of the device; None if they are not known, or if `planner.mfu` is set. `name`: name of the
    device, or None. `known`: row of the device in the table, or None. Raises ConfigError as `_measured_here` does."""
    planner = config.planner
    measured = None if planner.speeds is None else _measured_here(config, name, known, kernels)
    if planner.mfu is not None:
        return None
    within, across = map(link_of, ("within", "across"), _links(config, known))
    if measured is not None:
        # Bandwidths in `[planner]` replace measurements of collectives on the same links.
        given = (planner.intra_node_gb_per_s, planner.inter_node_gb_per_s)
        left = tuple(c for c in measured.collectives if given[c.crossings > 0] is None)
        source = f"measured by {measured.ranks} ranks on {measured.device} ({planner.speeds})"
        overlaps, measured = kernels == "cuda", replace(measured, collectives=left)
        return MeasuredSpeeds(source, within, across, overlaps, measured=measured)
    peak = _peak_tflops(config, known)
    if known is None or peak is None or kernels != "cuda":
        return None
    tf32 = config.kernels.float32_precision == "tf32" and known.capability is not None
    share = known.product_share
    reached = 1e12 * share * peak * _IN_A_STEP
    float32 = 1e12 * (peak / 2 if tf32 else known.peak_fp32_tflops) * min(share, 0.75)
    forward, backward = _ATTENTION.get(known.capability or (0, 0), (1.05, 0.8))
    return DataSheetSpeeds(
        f"the data sheet of {known.name}",
        within,
        across,
        flops_per_s={"bfloat16": reached, "float32": float32, "float8_e4m3fn": 2 * reached},
        shares={"attention": forward / share, "attention_backward": backward / share, "convolution": 0.7},
        memory_bytes_per_s=1e9 * known.memory_gb_per_s * _MEMORY_SHARE,
    )


def _measured_here(config: JobConfig, name: str | None, known: Device | None, kernels: Kernels) -> Measured:
    """Return the measurements in the file `planner.speeds`. Raises ConfigError as `read_measured` does, and if the
    measurements do not apply to this device or job. The arguments are those of `_speeds`."""
    file = config.planner.speeds
    assert file is not None
    measured, reason = read_measured(file), None
    if measured.kernels != kernels:
        reason = (
            f"was measured on {measured.device}, but the job is planned for {kernels} kernels; measure the planned "
            "device with titan-launch measure-device"
        )
    elif name is not None and measured.device != name and (known is None or find_device(measured.device) != known):
        reason = (
            f"was measured on {measured.device}, not on {name}; measure the planned device with titan-launch "
            "measure-device"
        )
    elif kernels == "cuda" and config.kernels.float32_precision == "tf32":
        reason = (
            "was measured with float32 matrix products in full precision, but this job uses TF32; set "
            'kernels.float32_precision = "ieee", or remove planner.speeds'
        )
    if reason is not None:
        raise config_error(("planner", "speeds"), reason, file)
    return measured


def _peak_tflops(config: JobConfig, known: Device | None) -> float | None:
    return config.metrics.peak_tflops_per_device or (known.peak_bf16_tflops if known else None)


def _links(config: JobConfig, known: Device | None) -> tuple[float | None, float | None]:
    """Return the bandwidths within a node and across nodes in GB/s; None for an unknown bandwidth."""
    within = config.planner.intra_node_gb_per_s or (known.intra_node_gb_per_s if known else None)
    across = config.planner.inter_node_gb_per_s or (known.inter_node_gb_per_s if known else None)
    return within, across


_MEMORY_SHARE = 0.85
"""Share of the memory's bandwidth that elementwise operations reach. An addition on an H100 reaches 0.94 (JAX's scaling
book). Other operations reach less."""

_ATTENTION = {(8, 0): (1.13, 0.97), (8, 6): (1.8, 1.2), (8, 9): (1.8, 1.2)}
"""FLOP/s of causal attention in forward and in backward, divided by the device's peak, by compute capability.

The numbers are for heads of width 128. All pairs of tokens count, though causal attention computes only half of the
pairs, so a number may exceed 1. Sources: A100 in SimuMax's table for (8, 0); RTX 4090 with flash attention in tvm's
table for (8, 6) and (8, 9). Source of the default in `_speeds`: cuDNN on H100, in the charts of FlashAttention-3. The
default for backward is the number for attention without a mask.
"""

_IN_A_STEP = 0.8
"""Speed of matrix products in a step, divided by the speed of the best shape. The number is fitted to steps without
torch.compile on an H200 (docs/verification/gpu.md). On an MI325X, ten published shapes reach 0.74 (AMD's TAF and
MAF)."""


def planned_device_exists(config: JobConfig) -> Iterator[Problem]:
    """Yield a problem if `planner.device` is not in the device table."""
    name = config.planner.device
    remedy = (
        "; for another device, remove this key and set planner.memory_gib, planner.intra_node_gb_per_s, "
        "planner.inter_node_gb_per_s and metrics.peak_tflops_per_device"
    )
    if name is not None and (reason := unknown_device(name, remedy)):
        yield Problem(("planner", "device"), reason, name)


def unknown_device(name: str, remedy: str = "") -> str | None:
    """Return an error message if `name` is not in the device table; None if it is. `remedy`: a further clause of the
    message, which begins with "; "."""
    names = [device.name for device in DEVICES]
    if name in names:
        return None
    return f"unknown device; known devices: {', '.join(names)}{remedy}{_variants(name, names)}"


def _variants(name: str, names: Sequence[str]) -> str:
    """Return a hint for the unknown device `name`: all devices whose names begin with this name (three for `h100`), or
    else the device with the most similar name. Return "" if no name is similar."""
    variants = [f'"{known}"' for known in names if known.startswith(f"{name.lower()}-")]
    if len(variants) < 2:
        return did_you_mean(name, names)
    return f"; did you mean {', '.join(variants[:-1])} or {variants[-1]}?"


def _memory(
    config: JobConfig, known: Device | None, kernels: Kernels, ranks_on_machine: int, found_gib: float | None
) -> tuple[float | None, str]:
    """Return the memory limit of a rank in GiB (None: unknown), and its source in words."""
    if config.planner.memory_gib is not None:
        return config.planner.memory_gib, "planner.memory_gib"
    if config.planner.device is not None and known is not None:
        return known.memory_gib, known.name
    if found_gib is not None:
        return found_gib, "the smallest device of this run"
    if kernels == "cpu":
        machine, limit = machine_memory_gib(), process_memory_gib()
        if limit is not None and limit < machine / ranks_on_machine:
            return limit, f"the limit of this process (ulimit): {limit:.1f} GiB"
        return machine / ranks_on_machine, f"this machine: {machine:.1f} GiB / {counted(ranks_on_machine, 'rank')}"
    return None, "unknown"


def process_memory_gib() -> float | None:
    """Return the memory that this process may hold by its resource limits (`ulimit -v`, `ulimit -d`), in GiB; None
    without a limit. Reserved address space that the process does not use is subtracted from the limit."""
    limits = {"VmSize:": resource.RLIMIT_AS, "VmData:": resource.RLIMIT_DATA}
    found = []
    for name, kind in limits.items():
        limit = resource.getrlimit(kind)[0]
        with suppress(OSError, ValueError, IndexError):  # the system may omit rows of this file
            used, resident = (_table(Path("/proc/self/status"), (row,))[0] * 1024 for row in (name, "VmRSS:"))
            if limit != resource.RLIM_INFINITY:
                found.append(max(0, limit - used + resident))
    return min(found) / GIB if found else None


_CGROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)
"""Pairs of files: memory limit and memory usage of a container, in bytes. The first pair belongs to cgroup version 2,
and the second pair to version 1."""


def machine_memory_gib() -> float:
    """Return the memory of this machine in GiB, or the limit of this container if that is lower."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([memory, *(limit for limit, _ in _container_limits())]) / GIB


def free_memory_gib() -> float:
    """Return the memory that processes on this machine, or in this container, can still allocate, in GiB. Page cache
    counts as free. Without /proc/meminfo, all memory of the machine counts as free."""
    free = [machine_memory_gib() * GIB]
    with suppress(OSError):
        free += [kib * 1024 for kib in _table(Path("/proc/meminfo"), ("MemAvailable:",))]
    for limit, usage in _container_limits():
        with suppress(OSError):
            cache = sum(_table(usage.with_name("memory.stat"), ("inactive_file", "active_file")))
            free.append(limit - int(usage.read_text()) + cache)
    return max(0.0, min(free)) / GIB


def _container_limits() -> Iterator[tuple[int, Path]]:
    """Yield each memory limit of this container in bytes, with the file that contains the memory usage."""
    for limit, usage in _CGROUPS:
        with suppress(OSError):
            text = Path(limit).read_text().strip()
            if text.isdecimal():
                yield int(text), Path(usage)


def _table(file: Path, names: Sequence[str]) -> list[int]:
    """Return the numbers after the given names in a file whose lines are `name number ...`."""
    rows = (line.split() for line in file.read_text().splitlines())
    return [int(row[1]) for row in rows if len(row) > 1 and row[0] in names]


def _first(given: float | None, default: float) -> float:
    return default if given is None else given


@dataclass(frozen=True)
class Device:
    """A kind of accelerator, as one rank sees it."""

    name: str
    """Name in `planner.device`."""

    match: tuple[str, ...]
    """Lower-case words that identify the device in the name that the driver reports. Other words of that name must be
    in `_NEUTRAL_WORDS`."""

    memory_gib: float
    """Total memory that torch reports, in GiB, rounded down. The data sheet has a larger number."""

    peak_bf16_tflops: float
    """Dense peak of the matrix units in bfloat16 with float32 accumulation, in TFLOP/s, at the boost clock of the data
    sheet."""

    peak_fp32_tflops: float
    """Dense peak of float32 by the data sheet, in TFLOP/s."""

    memory_gb_per_s: float
    """Bandwidth of the memory by the data sheet, in GB/s."""

    intra_node_gb_per_s: float
    """Bandwidth to the other devices of the node in GB/s, in one direction. With a switch or a full mesh, this is the
    sum over all links. If pairs of devices have links of different speeds, the slower links count."""

    inter_node_gb_per_s: float
    """Bandwidth to other nodes in GB/s, in one direction: one device's share of the network adapters of a usual
    server."""

    capability: tuple[int, int] | None = None
    """Compute capability; None for a device that is not from NVIDIA."""

    product_share: float = 0.75
    """Share of the peak that large bfloat16 products reach."""


# Peaks are from the vendors' data sheets. NVIDIA prints most peaks with 2:4 sparsity, which is twice the dense peak.
# Devices without bfloat16 matrix units (V100, T4) are omitted on purpose.
#
# Links: data sheets print both directions together, which is twice the figure here. NVLink: A100 600 GB/s, H100, H200
# and GH200 900, B200 1,800; H100 NVL has 600, but in pairs only. PCIe with 16 lanes: generation 4 carries 32 GB/s each
# way, generation 5 64. Cards that may have an NVLink bridge to one neighbour (H100 PCIe and NVL, RTX 3090) have the
# bandwidth of PCIe here, because a ring of more than two cards uses PCIe. AMD: MI300X and MI325X have seven Infinity
# Fabric links of 64 GB/s each way to the seven other devices. The halves of an MI250X have one link of 50 GB/s to the
# nearest other MI250X.
#
# `product_share` is that of the best of many shapes: from ml-engineering (compute/accelerator/README.md), and for L40S
# and RTX cards from torch-performance-test-data (database.md). The default of 0.75 is an assumption.
#
# Network adapters: DGX A100 has one of 200 Gb/s (25 GB/s) per GPU. DGX H100, H200 and B200 and the usual servers for
# MI300X and MI325X have one of 400 Gb/s per GPU. Nodes of MI250X, as in Frontier, have four of 200 Gb/s for eight
# halves. PCIe cards, including consumer cards, have no usual server: the table assumes 100 Gb/s per card, and
# planner.inter_node_gb_per_s overrides it.
DEVICES = (
    # NVIDIA A100 data sheet: 312, the same for PCIe and SXM. The links are those of SXM.
    Device("a100-40gb", ("a100", "40gb"), 39.3, 312, 19.5, 1555, 300, 25, (8, 0), 0.87),
    Device("a100-80gb", ("a100", "80gb"), 79.1, 312, 19.5, 2039, 300, 25, (8, 0), 0.87),
    # NVIDIA H100 data sheet, with sparsity: SXM 1,979, PCIe 1,513, NVL 1,671.
    Device("h100-80gb", ("h100", "80gb", "hbm3"), 79.1, 989, 67, 3350, 450, 50, (9, 0), 0.8),
    Device("h100-pcie", ("h100", "pcie"), 79.1, 756, 51, 2000, 64, 12.5, (9, 0)),
    Device("h100-nvl", ("h100", "nvl"), 93.0, 835, 60, 3900, 64, 12.5, (9, 0)),
    # NVIDIA GH200 data sheet, with sparsity: 1,979. The name counts the CPU's memory; the GPU has 96 GB.
    Device("gh200-96gb", ("gh200", "480gb"), 94.5, 989, 67, 4000, 450, 50, (9, 0), 0.8),
    # NVIDIA H200 data sheet, with sparsity: 1,979 (SXM).
    Device("h200", ("h200",), 139.7, 989, 67, 4800, 450, 50, (9, 0), 0.8),
    # NVIDIA HGX B200 data sheet, with sparsity: 36 PFLOP/s for 8.
    Device("b200", ("b200",), 178.3, 2250, 75, 8000, 900, 50, (10, 0), 0.78),
    # NVIDIA L40S (733 with sparsity), A10 (250), L4 (242) data sheets. PCIe of generation 4.
    Device("l40s", ("l40s",), 44.3, 362, 91.6, 864, 32, 12.5, (8, 9), 0.74),
    Device("a10", ("a10",), 21.9, 125, 31.2, 600, 32, 12.5, (8, 6)),
    Device("l4", ("l4",), 21.9, 121, 30.3, 300, 32, 12.5, (8, 9)),
    # NVIDIA Ada and Ampere GA102 architecture white papers: bf16 with fp32 accumulation, dense. PCIe of generation 4.
    Device("rtx-4090", ("rtx", "4090"), 23.5, 165, 82.6, 1008, 32, 12.5, (8, 9), 1),
    Device("rtx-3090", ("rtx", "3090"), 23.5, 71, 35.6, 936, 32, 12.5, (8, 6), 1),
    # AMD Instinct data sheets. An MI250X is two devices (GCDs): 383 for both.
    Device("mi250x", ("mi250x",), 63.9, 191.5, 23.9, 1638, 50, 12.5),
    Device("mi300x", ("mi300x",), 191.9, 1307, 163.4, 5300, 448, 50, None, 0.52),
    Device("mi325x", ("mi325x",), 255.9, 1307, 163.4, 6000, 448, 50, None, 0.62),
)

# Words that do not change the speed. Any other word in a name may mean another product: a MIG slice, or a laptop GPU.
_NEUTRAL_WORDS = {"nvidia", "geforce", "amd", "instinct", "oam", "sxm4", "pcie"}


def find_device(name: str) -> Device | None:
    """Return the device of a name: `NVIDIA H100 80GB HBM3`, as the driver reports it, or `h100-80gb`, as in `DEVICES`.
    Return None for a device that is not in the table, such as an A10G, because a wrong peak is worse than none."""
    words = set(re.findall(r"[a-z0-9]+", name.lower()))
    for device in DEVICES:
        significant = set(device.match)
        if name == device.name or words - (_NEUTRAL_WORDS - significant) == significant:
            return device
    return None


def representative(name: str | None) -> str | None:
    """Return the name of the first device in the table that has the same compute capability as the device `name`, so
    that PyTorch chooses the same kernels. None: `name` is not in the table, or has no compute capability."""
    known = find_device(name or "")
    capability = None if known is None else known.capability
    return next((device.name for device in DEVICES if capability and device.capability == capability), None)
