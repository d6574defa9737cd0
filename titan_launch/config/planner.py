"""`[planner]`: what is assumed about the machines when memory and time are predicted."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from titan_launch.config.base import Section

_Positive = Annotated[float, Field(gt=0)]


class PlannerConfig(Section):
    """What is assumed about the machines when memory and time are predicted: by `plan`, by `mode = "auto"`, and where
    a run reports predicted memory beside measured memory. All of it is printed with the predictions."""

    device: str | None = None
    """The accelerator to plan for, by its name in the device table: `h100-80gb`, `a100-40gb`, ... (an unknown name
    lists all). It gives memory, peak and bandwidths, each of which a key of its own overrides. Default: in a run, the
    GPU there is; in `plan`, none, and the table then has no verdicts unless `memory_gib` is set."""

    memory_gib: _Positive | None = None
    """Memory of one device, in GiB, as torch reports it. Default: the device's. On a CPU (`job.device = "cpu"`, no
    `device` here): the machine's memory divided by the ranks on it."""

    intra_node_gb_per_s: _Positive | None = None
    """What one GPU sends to others on its node, in GB/s (1e9 bytes, one direction). Default: the device's."""

    inter_node_gb_per_s: _Positive | None = None
    """What one GPU sends to other nodes, in GB/s (1e9 bytes, one direction): a 400 Gb/s adapter for each GPU is 50.
    Default: what is usual for the device."""

    gpus_per_node: Annotated[int, Field(ge=1)] = 8
    """GPUs, or on CPUs ranks, of one node; ranks are numbered node by node."""

    mfu: Annotated[float, Field(gt=0, le=1)] = 0.38
    """The share of the peak (`metrics.peak_tflops_per_device`, else the device's) at which a step is computed,
    recomputation included (so what is also called HFU; `throughput/mfu_percent` leaves recomputation out). TorchTitan's
    published runs of Llama 3 8B on H100 come to 0.37 and, compiled, 0.42."""

    overhead_gib: Annotated[float, Field(ge=0)] | None = None
    """Memory that is not in tensors: the CUDA context, NCCL, cuBLAS. Default: 2 on a GPU; on a CPU 0.5 for the process,
    but none where `memory_gib` says what tensors may take."""

    fragmentation: Annotated[float, Field(ge=0)] | None = None
    """By how much the allocator reserves more than is in use, as a share. Default: 0.15 on a GPU (fitted to published
    figures), 0 on a CPU, whose allocator gives memory back."""
