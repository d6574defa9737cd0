"""All metrics of a run, as data for the meter, the console, the dashboard and the documentation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Tag:
    """A metric."""

    name: str
    combine: Literal["sum", "max", "same"]
    """Reduction over the ranks: sum, maximum, or none because all ranks have the same value."""

    meaning: str
    chart: tuple[str, str] | None = None
    """Group and title of the dashboard's chart that shows it; tags with the same pair share a chart."""

    console: str | None = None
    """Its field in a line of the console, for `str.format`; always of the same width for ordinary values."""

    console_fallback_for: str | None = None
    """The console does not show the metric if this tag is reported."""

    value: Callable[[Any], float] | None = None
    """The value on this rank, from the run (`titan_launch.train.run.Run`), at every report. None: the part of the
    launcher that measures the value reports it."""


TAGS = [
    Tag(
        "train/loss",
        "sum",
        "Mean cross-entropy of the step over all targets of all ranks that are not ignored, with label smoothing and "
        "without the z-loss.",
        chart=("loss", "loss"),
        console="loss {:8.4f}",
    ),
    Tag(
        "train/z_loss",
        "sum",
        "With `loss.z_loss`: mean z-loss of the step over the same targets, times its weight.",
        chart=("loss", "z-loss"),
    ),
    Tag(
        "train/loss_max",
        "max",
        "Largest of the ranks' own mean losses; infinite where a rank's loss is not a number.",
        chart=("loss", "loss"),
    ),
    Tag(
        "train/grad_norm",
        "same",
        "Norm of the whole gradient before clipping.",
        chart=("loss", "gradient norm"),
        console="grad norm {:8.3f}",
    ),
    Tag(
        "train/lr",
        "same",
        "Learning rate of the step.",
        chart=("loss", "learning rate"),
        console="lr {:9.3e}",
    ),
    Tag(
        "train/samples_seen",
        "same",
        "Samples consumed since the run began, over all ranks.",
        value=lambda run: run.progress.samples_seen,
    ),
    Tag(
        "train/epoch",
        "same",
        "Position in the data, in passes over it. Samples that a rollback moved past count.",
        value=lambda run: run.progress.data_position / run.epoch_size,
    ),
    Tag(
        "train/skipped_steps",
        "same",
        "Skipped steps so far: those whose loss or gradient was not finite, or a spike.",
        chart=("loss", "skipped steps"),
        value=lambda run: run.progress.skipped_steps,
    ),
    Tag(
        "train/rollbacks",
        "same",
        "Times so far that the run went back to a checkpoint after too many skipped steps.",
        chart=("loss", "rollbacks"),
        value=lambda run: run.progress.rollbacks,
    ),
    Tag(
        "throughput/tokens_per_second",
        "same",
        "Targets that are not ignored, per second of training, over all ranks.",
        chart=("throughput", "tokens per second"),
        console="{:>11,.0f} tok/s",
    ),
    Tag(
        "throughput/tokens_per_second_per_device",
        "same",
        "The same per device.",
        chart=("throughput", "tokens per second per device"),
    ),
    Tag(
        "throughput/images_per_second",
        "same",
        "In place of tokens where the samples are images: those per second of training, over all ranks.",
        chart=("throughput", "images per second"),
        console="{:>11,.0f} img/s",
    ),
    Tag(
        "throughput/images_per_second_per_device",
        "same",
        "The same per device.",
        chart=("throughput", "images per second per device"),
    ),
    Tag(
        "throughput/tflops_per_device",
        "same",
        "Floating-point operations of the model per second of training and device, in TFLOP/s. Every position counts; "
        "activation checkpointing does not.",
        chart=("throughput", "TFLOP/s per device"),
    ),
    Tag(
        "throughput/mfu_percent",
        "same",
        "The same in percent of the device's bf16 peak. Only where the peak is known or given.",
        chart=("throughput", "model FLOPs utilization (%)"),
        console="MFU {:5.1f} %",
    ),
    Tag(
        "time/step_s",
        "same",
        "Seconds per step, without validation and checkpoints.",
        chart=("time", "seconds per step"),
        console="{:8.3f} s/step",
    ),
    Tag(
        "time/data_s",
        "max",
        "Part of it spent waiting for data.",
        chart=("time", "seconds per step"),
    ),
    Tag(
        "time/compile_s",
        "max",
        "Seconds of compiling since the last report, where something is compiled; the log has what the cache saved.",
    ),
    Tag(
        "time/checkpoint_stall_s",
        "max",
        "Seconds that training waited for checkpoints since the last report: for the one before to be complete, "
        'and for the copy of the state (with `async_mode = "disabled"`, for all of it).',
        chart=("time", "seconds of a checkpoint"),
    ),
    Tag(
        "checkpoint/failed_saves",
        "max",
        "Checkpoints that could not be saved since this process started.",
    ),
    Tag(
        "comm/all_gather_gib",
        "same",
        "With `comm.count_traffic`: parameters that one rank receives per step, in GiB, mean of the steps since the "
        "last report. Validation does not count.",
        chart=("communication", "GiB per step"),
    ),
    Tag(
        "comm/reduce_scatter_gib",
        "same",
        "Likewise: gradients that one rank sends.",
        chart=("communication", "GiB per step"),
    ),
    Tag(
        "comm/all_reduce_gib",
        "same",
        "Likewise: gradients that are summed between replicas (HSDP).",
        chart=("communication", "GiB per step"),
    ),
    Tag("comm/collectives", "same", "Calls of all three kinds per step.", chart=("communication", "collectives")),
    Tag(
        "comm/exposed_s",
        "max",
        "With `comm.profile_freq`, of the last step that was profiled since the last report: seconds in which NCCL ran "
        "on the GPU and nothing else.",
        chart=("communication", "seconds per step"),
    ),
    Tag(
        "memory/predicted_active_gib",
        "same",
        "What the planner predicts for `memory/max_active_gib`. For a model that it must trace, from when that is "
        "done.",
        chart=("memory", "GiB"),
    ),
    Tag(
        "memory/max_active_gib",
        "max",
        "Largest amount of memory in use since the last report, in GiB, as torch allocates it. On a CPU measured once, "
        "in the third step of the process.",
        chart=("memory", "GiB"),
    ),
    Tag(
        "memory/max_reserved_gib",
        "max",
        "Largest amount of CUDA memory held by the allocator since the last report, in GiB.",
        chart=("memory", "GiB"),
        console="reserved memory {:6.2f} GiB",
    ),
    Tag(
        "memory/max_rss_gib",
        "max",
        "Largest resident memory of the process so far, in GiB, without the data workers.",
        chart=("memory", "GiB"),
        console="host memory {:6.2f} GiB",
        console_fallback_for="memory/max_reserved_gib",
    ),
    Tag(
        "memory/alloc_retries",
        "max",
        "Times so far that the CUDA allocator had to give memory back to find some. Other than 0 costs speed.",
        chart=("memory", "allocator"),
    ),
    Tag(
        "memory/ooms",
        "max",
        "CUDA out-of-memory errors so far.",
        chart=("memory", "allocator"),
    ),
    Tag(
        "validation/loss",
        "same",
        "Mean cross-entropy over all targets of the held-out samples, without label smoothing and z-loss.",
        chart=("loss", "loss"),
        console="validation loss {:8.4f}",
    ),
    Tag(
        "validation/accuracy",
        "same",
        "Share of these targets, from 0 to 1, that have the largest logit: of images or, for text, next tokens.",
        chart=("loss", "accuracy"),
        console="accuracy {:7.2%}",
    ),
    Tag(
        "batchnorm/running_mean_divergence",
        "same",
        "Largest distance of a rank's running mean from the pooled one, in pooled standard deviations. Like the next, "
        "at validations and checkpoints, with BatchNorm and several ranks.",
        chart=("batchnorm", "divergence of running statistics"),
    ),
    Tag(
        "batchnorm/running_var_divergence",
        "same",
        "Largest distance of a rank's running variance from the pooled one, relative to it.",
        chart=("batchnorm", "divergence of running statistics"),
    ),
]


def dashboard_layout() -> dict[str, dict[str, list[str]]]:
    """Group -> chart title -> names of the tags in it."""
    layout: dict[str, dict[str, list[str]]] = {}
    for tag in TAGS:
        if tag.chart:
            group, title = tag.chart
            layout.setdefault(group, {}).setdefault(title, []).append(tag.name)
    return layout


def markdown_table() -> str:
    """Return the table of all metrics for the documentation."""
    over_ranks = {"sum": "sum", "max": "maximum", "same": "-"}
    rows = [f"| `{tag.name}` | {tag.meaning} | {over_ranks[tag.combine]} |" for tag in TAGS]
    return "\n".join(["| tag | meaning | over ranks |", "|---|---|---|", *rows, ""])
