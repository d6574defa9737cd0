"""What is known about accelerators: their memory, their peak, and how fast they talk to each other."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Device:
    """A kind of accelerator, as one rank sees it."""

    name: str
    """What the command line calls it."""

    match: tuple[str, ...]
    """The lower-case words of the name that the driver reports, save for neutral ones."""

    memory_gib: float
    """Memory that torch reports as the device's total, which is less than the data sheet says; rounded down."""

    peak_bf16_tflops: float
    """Peak of the matrix units in bfloat16 with float32 accumulation, in TFLOP/s: dense, without sparsity, at the boost
    clock of the data sheet."""

    intra_node_gb_per_s: float
    """What it sends to others on its node, in GB/s, one direction: all its links together where a switch or a full mesh
    connects them, the slower ones where pairs are connected better than others."""

    inter_node_gb_per_s: float
    """What it sends to other nodes, in GB/s, one direction: its share of the adapters of the usual server."""


# Peaks are from the makers' data sheets; NVIDIA prints most with 2:4 sparsity, which is twice the dense figure.
# Devices without bfloat16 matrix units (V100, T4) are left out on purpose.
#
# Links: data sheets print both directions together, which is twice the figure here. NVLink: A100 600 GB/s, H100, H200
# and GH200 900, B200 1,800; H100 NVL has 600, but in pairs only. PCIe with 16 lanes: generation 4 carries 32 GB/s each
# way, generation 5 64. Cards that may have an NVLink bridge to one neighbour (H100 PCIe and NVL, RTX 3090) are given
# PCIe, which a ring over more than two goes through. AMD: MI300X and MI325X have seven Infinity Fabric links of 64 GB/s
# each way to the seven others; the two halves of an MI250X reach the nearest other module by one link of 50.
#
# Adapters: DGX A100 has one of 200 Gb/s (25 GB/s) for each GPU, DGX H100, H200 and B200 and the usual servers for
# MI300X and MI325X one of 400 Gb/s; nodes of MI250X, as in Frontier, four of 200 Gb/s for eight halves. For PCIe cards,
# consumer ones too, which have no usual server, 100 Gb/s for each is assumed: set planner.inter_node_gb_per_s.
DEVICES = (
    # NVIDIA A100 data sheet: 312, the same for PCIe and SXM. The links are those of SXM.
    Device("a100-40gb", ("a100", "40gb"), 39.3, 312, 300, 25),
    Device("a100-80gb", ("a100", "80gb"), 79.1, 312, 300, 25),
    # NVIDIA H100 data sheet, with sparsity: SXM 1,979, PCIe 1,513, NVL 1,671.
    Device("h100-80gb", ("h100", "80gb", "hbm3"), 79.1, 989, 450, 50),
    Device("h100-pcie", ("h100", "pcie"), 79.1, 756, 64, 12.5),
    Device("h100-nvl", ("h100", "nvl"), 93.0, 835, 64, 12.5),
    # NVIDIA GH200 data sheet, with sparsity: 1,979. The name counts the CPU's memory; the GPU has 96 GB.
    Device("gh200-96gb", ("gh200", "480gb"), 94.5, 989, 450, 50),
    # NVIDIA H200 data sheet, with sparsity: 1,979 (SXM).
    Device("h200", ("h200",), 139.7, 989, 450, 50),
    # NVIDIA HGX B200 data sheet, with sparsity: 36 PFLOP/s for 8.
    Device("b200", ("b200",), 178.3, 2250, 900, 50),
    # NVIDIA L40S (733 with sparsity), A10 (250), L4 (242) data sheets. PCIe of generation 4.
    Device("l40s", ("l40s",), 44.3, 362, 32, 12.5),
    Device("a10", ("a10",), 21.9, 125, 32, 12.5),
    Device("l4", ("l4",), 21.9, 121, 32, 12.5),
    # NVIDIA Ada and Ampere GA102 architecture white papers: bf16 with fp32 accumulation, dense. PCIe of generation 4.
    Device("rtx-4090", ("rtx", "4090"), 23.5, 165, 32, 12.5),
    Device("rtx-3090", ("rtx", "3090"), 23.5, 71, 32, 12.5),
    # AMD Instinct data sheets. An MI250X is two devices (GCDs): 383 for both.
    Device("mi250x", ("mi250x",), 63.9, 191.5, 50, 12.5),
    Device("mi300x", ("mi300x",), 191.9, 1307, 448, 50),
    Device("mi325x", ("mi325x",), 255.9, 1307, 448, 50),
)

# Words that say nothing about the speed. Any other word in a name may mean another product: a MIG slice, a laptop part.
_NEUTRAL_WORDS = {"nvidia", "geforce", "amd", "instinct", "oam", "sxm4", "pcie"}


def find_device(name: str) -> Device | None:
    """The device behind a name: `NVIDIA H100 80GB HBM3`, as the driver reports it, or `h100-80gb`, as `DEVICES` does.

    None for a device that is not in the table, since a wrong peak is worse than none: an A10G is not an A10, nor an
    RTX 3090 Ti an RTX 3090.
    """
    words = set(re.findall(r"[a-z0-9]+", name.lower()))
    for device in DEVICES:
        significant = set(device.match)
        if name == device.name or words - (_NEUTRAL_WORDS - significant) == significant:
            return device
    return None
