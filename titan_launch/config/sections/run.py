"""`[job]`, `[metrics]`, `[debug]`, `[comm]` and `[planner]`: the run as a whole, and what it reports."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from titan_launch.config.sections.base import Section


def _file_name(name: str) -> str:
    is_plain = name.isascii() and name.replace(".", "").replace("_", "").replace("-", "").isalnum()
    if is_plain and name[0].isalnum():
        return name
    raise ValueError("must consist of letters, digits, `.`, `_` and `-`, and start with a letter or a digit")


class GeneralConfig(Section):
    """What the run is called, where it writes and what it runs on."""

    name: Annotated[
        str,
        AfterValidator(_file_name),
        Field(json_schema_extra={"pattern": "^[A-Za-z0-9][A-Za-z0-9._-]*$"}),
    ] = "job"
    """Name of the run, and of its folder below `dump_folder`. Letters, digits, `.`, `_` and `-`."""

    dump_folder: str = "outputs"
    """Folder that holds the run folders, relative to the working directory."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """What to compute on. `auto` takes CUDA where there is a GPU. The backend follows: NCCL on `cuda`, gloo on
    `cpu`."""

    @property
    def run_folder(self) -> Path:
        """Folder of all files that a run writes."""
        return Path(self.dump_folder, self.name)


class MetricsConfig(Section):
    """What is reported, where and how often."""

    log_freq: Annotated[int, Field(ge=1)] = 10
    """Steps between reports (the first and the last step are always reported). Between reports nothing waits for the
    device."""

    enable_tensorboard: bool = True
    """Write TensorBoard event files below `tb/` in the run folder."""

    peak_tflops_per_device: Annotated[float, Field(gt=0)] | None = None
    """Dense bf16 peak of one device in TFLOP/s, for the MFU. Default: the peak of the GPU where it is known; without a
    peak no MFU is reported."""


class DebugConfig(Section):
    """Reproducibility and faults."""

    deterministic: bool = False
    """Use only deterministic kernels, and fail where there is none. Slower."""

    audit_precision: bool | None = None
    """Watch the first step of the process and compare the dtypes of all inputs, parameters, gradients, buffers, outputs
    and collectives with the plan; the run ends before its first update where they differ. The result is in
    `precision_audit.json`. Later steps cost nothing. Unset: on for the `debug` flavor and for a model of your own."""

    on_nonfinite: Literal["stop", "skip"] = "stop"
    """Reaction to a loss or gradient norm that is not finite on any rank. Both values skip the step on all ranks.
    `stop` then ends the run with the number of the step (on CUDA when the next report is due, with no update in
    between); `skip` continues."""

    spike_sigma: Annotated[float, Field(gt=0)] | None = None
    """A step is also skipped if its loss or its gradient norm is more than this number of standard deviations above the
    mean of `spike_window`. Unset: no step is skipped for that."""

    spike_window: Annotated[int, Field(ge=2, le=1024)] = 128
    """Number of steps against which a spike is measured: the last steps that were not skipped. No step is a spike
    before half of the window is full."""

    max_skips: Annotated[int, Field(ge=1)] = 10
    """Number of skipped steps in a row, for either reason, after which `on_repeated_skips` applies (on CUDA when the
    next report is due, with no update in between)."""

    on_repeated_skips: Literal["stop", "rollback"] = "stop"
    """Reaction to `max_skips` skipped steps. `stop` ends the run. `rollback` returns to the last checkpoint, and
    continues with the data after the skipped steps."""

    max_rollbacks: Annotated[int, Field(ge=1)] = 3
    """Number of rollbacks of a run. Instead of another rollback the run ends."""


UNWATCHED_GROUPS = ("checkpoint",)
"""Descriptions of process groups without timeout and hang detection. While one rank writes its part of a checkpoint,
the others wait long."""


class CommConfig(Section):
    """The process group, and what is measured of it."""

    init_timeout_seconds: Annotated[int, Field(ge=1)] = 1800
    """A collective that takes longer than this ends the run, up to the end of the first step of the process: while
    ranks build, load a checkpoint, and warm up."""

    timeout_seconds: Annotated[int, Field(ge=1)] = 600
    """A collective that takes longer than this ends the run, from then on, after a resume as well. It holds for every
    group of ranks, but not for the one that writes checkpoints."""

    hang_seconds: Annotated[int, Field(ge=0)] | None = None
    """When a rank makes no progress for so long, every rank writes the stacks of its threads to `hangs/rank_N.txt` and
    its collectives to `flight_recorder/rank_N` (with NCCL, those of gloo to `flight_recorder_gloo/rank_N`), and the log
    names the ranks that are behind. Until the end of the first step, and while a checkpoint is saved or loaded, it is
    longer, in the proportion of `init_timeout_seconds` to `timeout_seconds`. Unset: half of `timeout_seconds`.
    0 disables hang detection."""

    flight_recorder_size: Annotated[int, Field(ge=0)] = 2000
    """Collectives that PyTorch's flight recorder remembers on each rank, to be written to `flight_recorder/rank_N` when
    one times out or a rank hangs. 0: off."""

    count_traffic: bool = False
    """Count FSDP2's collectives and the bytes in them as they are called, and report them per step (`comm/*`): they are
    those that `plan` prints. Nothing waits for it."""

    profile_freq: Annotated[int, Field(ge=0)] = 0
    """Every so many steps one runs under PyTorch's profiler, and `comm/exposed_s` reports how long a NCCL kernel ran
    and nothing else did: communication that is not hidden. That step waits for the device, and takes longer. CUDA only.
    0: never."""


_Positive = Annotated[float, Field(gt=0)]


class PlannerConfig(Section):
    """Assumptions about the machines, for predictions of memory and time. `plan`, `mode = "auto"` and the predicted
    memory of a run use them. `plan` prints all of them."""

    device: str | None = None
    """Accelerator to plan for, by its name in the device table: `h100-80gb`, `a100-40gb`, ... (an unknown name lists
    all). The device sets memory, peak and bandwidths; the keys below override them. Default: in a run, the GPU of the
    machine; in `plan`, none. Without a device, `plan` gives no verdicts unless `memory_gib` is set."""

    memory_gib: _Positive | None = None
    """Memory limit of one device, in GiB, as torch reports it. Default: the memory of the device. On a CPU
    (`job.device = "cpu"`, no `planner.device`): the machine's memory divided by the ranks on the machine."""

    margin_gib: Annotated[float, Field(ge=0)] | None = None
    """Memory, in GiB, that must stay free below the limit for the verdict `fits`; `auto` chooses no mode that leaves
    less free. Default: 5 % of the limit, and on a GPU at least 0.5."""

    intra_node_gb_per_s: _Positive | None = None
    """Bandwidth of one GPU to other GPUs on its node, in GB/s (1e9 bytes, one direction). Default: that of the
    device."""

    inter_node_gb_per_s: _Positive | None = None
    """Bandwidth of one GPU to other nodes, in GB/s (1e9 bytes, one direction): a 400 Gb/s adapter for each GPU is 50.
    Default: the usual bandwidth for the device."""

    gpus_per_node: Annotated[int, Field(ge=1)] = 8
    """GPUs of one node, or ranks of one node on CPUs. Ranks are numbered node by node."""

    mfu: Annotated[float, Field(gt=0, le=1)] = 0.38
    """Fraction of the peak FLOP/s (`metrics.peak_tflops_per_device`, else the device's) at which a step is computed.
    FLOPs of activation checkpointing count, as in HFU; `throughput/mfu_percent` does not count them. TorchTitan's
    published runs of Llama 3 8B on H100 reach 0.37, and 0.42 compiled."""

    overhead_gib: Annotated[float, Field(ge=0)] | None = None
    """Memory outside of tensors, in GiB: the CUDA context, NCCL, cuBLAS. Default: 2 on a GPU; on a CPU 0.5 for the
    process, or 0 if `memory_gib` is set."""

    fragmentation: Annotated[float, Field(ge=0)] | None = None
    """Memory that the allocator reserves beyond the memory in use, as a fraction of the memory in use. Default: 0.15 on
    a GPU (fitted to published figures); 0 on a CPU, whose allocator returns freed memory."""
