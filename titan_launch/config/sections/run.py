"""`[job]`, `[metrics]`, `[profiling]`, `[debug]`, `[prove]`, `[comm]` and `[planner]`: the run as a whole, its reports
and its predictions."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from titan_launch.config.sections.section import Array, Positive, Section, Table, is_import_string
from titan_launch.core.errors import did_you_mean

_FILE_NAME = "^[A-Za-z0-9][A-Za-z0-9._-]*$"


def is_file_name(text: str) -> bool:
    """Return True if a text can be the name of a job."""
    return re.fullmatch(_FILE_NAME, text) is not None


def _file_name(name: str) -> str:
    if is_file_name(name):
        return name
    raise ValueError("must consist of letters, digits, `.`, `_` and `-`, and start with a letter or a digit")


class GeneralConfig(Section):
    """Name, folder and device of the run."""

    name: Annotated[str, AfterValidator(_file_name), Field(json_schema_extra={"pattern": _FILE_NAME})] = "job"
    """Name of the run, and of its folder in `dump_folder`. It consists of letters, digits, `.`, `_` and `-`, and starts
    with a letter or a digit."""

    dump_folder: str = "outputs"
    """Folder that holds the run folders, relative to the working directory."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the run. `auto`: CUDA if there is a GPU, else the CPU. The backend is NCCL on `cuda`, gloo on `cpu`."""

    @property
    def run_folder(self) -> Path:
        """Folder of all files that a run writes."""
        return Path(self.dump_folder, self.name)


SINKS_WITH_PACKAGE = ("wandb", "mlflow")
"""Sinks that need a package of the same name."""


def _sinks(names: tuple[str, ...]) -> tuple[str, ...]:
    for name in names:
        if name not in SINKS_WITH_PACKAGE and not is_import_string(name):
            known = ", ".join(f'"{known}"' for known in SINKS_WITH_PACKAGE)
            raise ValueError(
                f'"{name}" must be {known}, or package.module:factory{did_you_mean(name, SINKS_WITH_PACKAGE)}'
            )
        if names.count(name) > 1:
            raise ValueError(f'"{name}" is listed {names.count(name)} times; remove the repetition')
    return names


class MetricsConfig(Section):
    """Reports of the run: their interval and destination."""

    log_freq: Annotated[int, Field(ge=1)] = 10
    """Steps between reports. The first and the last step are always reported. Between reports, the host waits for the
    device only in steps that `comm.profile_freq` measures."""

    enable_tensorboard: bool = True
    """Write TensorBoard event files to the folder `tb/` of the run folder."""

    modules: Array[str] = ()
    """Globs of modules to measure in every reported step. The metrics `learned/*` are norms of the modules' gradients,
    parameters and updates. The metrics `activations/*` are root mean square, overflow and underflow of the modules'
    outputs. For each precision rule, one more value of each `activations/*` metric covers all modules of the rule. A
    measured step needs memory for a float32 copy of the measured parameters. With `compile.enable`, outputs are not
    measured."""

    sinks: Annotated[Array[str], AfterValidator(_sinks)] = ()
    """Further destinations of the reports. `wandb`: Weights & Biases (`pip install 'titan-launch[wandb]'`); without a
    login, W&B records the run offline, in the run folder. `mlflow`: MLflow (`pip install 'titan-launch[mlflow]'`).
    `package.module:factory`: a sink of your own; `factory(run)` gets a `SinkContext` and returns a
    `titan_launch.metrics.sinks.Sink`. A sink that cannot be opened is an error at the start of the run. A sink that
    fails later gets no more reports, and training continues."""

    peak_tflops_per_device: Annotated[float, Field(gt=0)] | None = None
    """Dense bf16 peak of one device in TFLOP/s, for the MFU. Default: the peak of the GPU, if it is known. Without a
    peak no MFU is reported."""


class ProfilingConfig(Section):
    """Profiles of steps by `torch.profiler`. Each of `ranks` writes `profiling/step-N_rank-R.json.gz` in the run
    folder, where N is the last step of the profile. This file is a Chrome trace with the phases of the step, for
    Perfetto or chrome://tracing. A table of the top operations is beside it. Profiled steps take longer. A rank that
    gets the signal RTMIN (`kill -s RTMIN PID`) also profiles its next step."""

    start_step: Annotated[int, Field(ge=1)] | None = None
    """First step of the profile, counted from 1. Unset: no profile, except by the signal."""

    num_steps: Annotated[int, Field(ge=1)] = 1
    """Number of consecutive steps in the profile. One trace contains all these steps."""

    ranks: Annotated[Array[Annotated[int, Field(ge=0)]], Field(min_length=1)] = (0,)
    """Ranks that write a profile."""

    memory: bool = False
    """Record all allocations of the GPU from the start of the run, and write snapshots for
    https://docs.pytorch.org/memory_viz: `profiling/step-N_rank-R.pickle` after the profiled steps, and
    `profiling/out-of-memory_rank-R.pickle` when memory runs out. Only on CUDA."""


class DebugConfig(Section):
    """Reproducibility, checks of dtypes, and skipped steps."""

    deterministic: bool = False
    """Use only deterministic kernels. Steps may take longer. An operation without a deterministic kernel is an
    error."""

    audit_precision: bool | None = None
    """Compare the dtypes of all inputs, parameters, gradients, buffers, outputs and collectives of the first step with
    the plan. If a dtype differs, the run ends before its first update. With a release of PyTorch that is not tested, a
    warning is logged instead. The result is in `precision_audit.json`. Later steps are not affected. Unset: true for
    the `debug` flavor, for a model of your own and for a class of `transformers`."""

    on_nonfinite: Literal["stop", "skip"] = "stop"
    """Action if the loss or the gradient norm of a step is not finite on at least one rank. The update is then skipped
    on all ranks. `stop` ends the run with an error that names the step. On CUDA, the run ends at the next report, and
    all steps until then are skipped. `skip` continues the run."""

    spike_sigma: Annotated[float, Field(gt=0)] | None = None
    """Also skip a step if its loss or its gradient norm exceeds the mean of earlier steps by more than this number of
    standard deviations. `spike_window` sets the number of earlier steps. Unset: no step is skipped for this reason."""

    spike_window: Annotated[int, Field(ge=2, le=1024)] = 128
    """Number of steps from which the mean and the standard deviation for `spike_sigma` are computed: the latest steps
    that were not skipped. Detection starts after half of this number of steps."""

    max_skips: Annotated[int, Field(ge=1)] = 10
    """Number of consecutive skipped steps after which `on_repeated_skips` applies. On CUDA, this action follows at the
    next report, and all steps until then are skipped."""

    on_repeated_skips: Literal["stop", "rollback"] = "stop"
    """Action after `max_skips` consecutive skipped steps. `stop` ends the run. `rollback` loads the last checkpoint,
    and continues with the data after the skipped steps."""

    max_rollbacks: Annotated[int, Field(ge=1)] = 3
    """Maximum number of rollbacks of a run. If one more rollback is needed, the run ends."""


class ProveConfig(Section):
    """Settings of the command `prove`, which trains the twin: a small copy of the job. Other commands read only the key
    `certificate`."""

    args: Table = Field(default_factory=dict)
    """Arguments of the twin's model, which replace the sizes in `[model.args]` by smaller sizes. A model of your own
    needs this table, and so does a class of `transformers` whose sizes are not known. A model of this package does not
    need this table."""

    vocab_size: Annotated[int, Field(ge=2)] | None = None
    """Number of different tokens of the twin's data. A number above 64 counts as 64. The twin's embedding must have at
    least this many rows. Default: 64, or the vocabulary size of the model or the data if that is smaller."""

    certificate: str | None = None
    """Path of the certificate that `prove --out` wrote, relative to the working directory. `launch --require-proof` and
    the header of a run's log read this file instead of the certificates in the cache of this host."""


UNWATCHED_GROUPS = ("checkpoint",)
"""Descriptions (`group_desc`) of the process groups that have neither `comm.timeout_seconds` nor hang detection. Ranks
may wait in these groups for a long time while another rank writes its part of a checkpoint."""


class CommConfig(Section):
    """Timeouts, hang detection and measurements of collectives."""

    init_timeout_seconds: Annotated[int, Field(ge=1, le=1_000_000)] = 1800
    """Timeout of collectives, in seconds, until the process has finished its first step: while ranks build the model,
    load a checkpoint and warm up. A collective that takes longer ends the run."""

    timeout_seconds: Annotated[int, Field(ge=1, le=1_000_000)] = 600
    """Timeout of collectives, in seconds. This timeout applies after the first step of the process, to all process
    groups except the group that writes checkpoints. A collective that takes longer ends the run. While a rollback loads
    a checkpoint, `init_timeout_seconds` applies instead."""

    hang_seconds: Annotated[int, Field(ge=0)] | None = None
    """Seconds without progress after which a rank counts as hanging. Such a rank writes the stacks of its threads to
    `hangs/rank_N.txt`, and its collectives to `flight_recorder/rank_N`. (In a run with NCCL, gloo's collectives are in
    `flight_recorder_gloo/rank_N`.) The log names the ranks that are behind. Until the end of the first step, and while
    a checkpoint is saved or loaded, this number is multiplied by `init_timeout_seconds / timeout_seconds`. Unset: half
    of `timeout_seconds`. 0 disables hang detection."""

    flight_recorder_size: Annotated[int, Field(ge=0)] = 2000
    """Number of collectives that PyTorch's flight recorder keeps on each rank. These records are written to
    `flight_recorder/rank_N` if a collective times out or a rank hangs. 0 disables the flight recorder."""

    count_traffic: bool = False
    """Count FSDP2's collectives and their bytes, and report them per step (`comm/*`). The numbers are the same as in
    the output of `plan`. Counting does not make the host wait for the device."""

    profile_freq: Annotated[int, Field(ge=0)] = 0
    """Interval, in steps, at which one step runs under PyTorch's profiler. `comm/exposed_s` reports the time in which a
    NCCL kernel ran and no other kernel did: exposed communication. The profiled step waits for the device, and takes
    longer. CUDA only. 0 disables profiling."""


class PlannerConfig(Section):
    """Assumptions about the hardware, for predictions of memory and time. `plan`, `mode = "auto"` and the predicted
    memory of a run use these assumptions. `plan` prints all of them."""

    device: str | None = None
    """Accelerator to plan for, by its name in the device table: `h100-80gb`, `a100-40gb`, ... (the error for an unknown
    name lists all names). The device sets memory, peak and bandwidths; the keys below override them. Default: in a run,
    the GPU of the machine; in `plan`, none. Without a device, `plan` says whether the job fits only if `memory_gib` is
    set or the job is for CPUs."""

    memory_gib: Positive | None = None
    """Memory limit of one device, in GiB, as torch reports it. Default: the memory of the device. On a CPU (`job.device
    = "cpu"`, no `planner.device`): the machine's memory divided by the ranks on the machine. If the process has a lower
    limit (`ulimit`), this limit is the default."""

    margin_gib: Annotated[float, Field(ge=0)] | None = None
    """Memory, in GiB, that must stay free below the limit. If a combination of modes leaves less memory free, `plan`
    does not report it as `fits`, and `auto` does not choose it. Default: 5 % of the limit, and on a GPU at least
    0.5."""

    intra_node_gb_per_s: Positive | None = None
    """Bandwidth of one GPU to other GPUs on its node, in GB/s (1e9 bytes, one direction). Default: the bandwidth of the
    device."""

    inter_node_gb_per_s: Positive | None = None
    """Bandwidth of one GPU to other nodes, in GB/s (1e9 bytes, one direction): 50 if each GPU has an adapter of 400
    Gb/s. Default: the usual bandwidth for the device."""

    gpus_per_node: Annotated[int, Field(ge=1)] = 8
    """Number of GPUs per node; on CPUs, number of ranks per node. Ranks are numbered node by node."""

    speeds: str | None = None
    """File that `titan-launch measure-device` wrote, relative to the working directory: measured times of matrix
    products, attention, memory and collectives, from which step times are predicted. Default: the figures of the
    device's data sheet, reduced to the fractions that large operations reach."""

    mfu: Annotated[float, Field(gt=0, le=1)] | None = None
    """Fraction of the peak FLOP/s that a step reaches. If this key is set, step times are predicted from this fraction,
    not from the times of single operations. The peak is `metrics.peak_tflops_per_device`, or else the peak of the
    device. FLOPs that activation checkpointing repeats are included, as in HFU, but not in `throughput/mfu_percent`.
    Default: 0.38 if `speeds` is not set and the device is not in the table of devices."""

    expert_load: Annotated[float, Field(ge=1)] = 1.0
    """Assumed imbalance with expert parallelism: the largest number of rows (tokens) that a rank receives for its
    experts, divided by the mean over the ranks. 1 is a uniform load. The largest value is
    `parallelism.expert_parallel_degree`: one rank computes all rows. Larger values count as this degree. Memory,
    traffic and time are predicted for the rank with the most rows."""

    overhead_gib: Annotated[float, Field(ge=0)] | None = None
    """Memory outside of tensors, in GiB: the CUDA context and NCCL. Default: 2 on a GPU; on a CPU 0.5 for the
    process, or 0 if `memory_gib` is set."""

    fragmentation: Annotated[float, Field(ge=0)] | None = None
    """Memory that the allocator reserves beyond the memory in use, as a fraction of the memory in use. Default: 0.15 on
    a GPU, where PyTorch's allocator needed 0.08 to 0.15 for eager jobs; 0 on a CPU."""
