"""The table of all metrics of a run. The meter, the console, the dashboard and the documentation use it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Tag:
    """A metric."""

    name: str
    """Name, in which `<source>` stands for the name of a source of a mixture, and `<layer>` for the path of a layer."""

    combine: Literal["sum", "max", "same"]
    """Reduction over the ranks. `same`: no reduction, because all ranks have the same value."""

    meaning: str
    chart: tuple[str, str] | None = None
    """(group, title) of the dashboard's chart that shows the metric. Tags with the same pair share a chart."""

    console: str | None = None
    """`str.format` pattern of the metric's field in a console line. Ordinary values must give fields of equal width."""

    console_fallback_for: str | None = None
    """Another tag. If that tag is reported, the console does not show this metric."""

    value: Callable[[Any], float] | None = None
    """Function of the run (`titan_launch.train.run.Run`) that returns this rank's value at every report. None: the code
    that measures the value passes it to the meter."""


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
        "Largest mean loss of a single rank; infinite if a rank's loss is NaN.",
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
        "Position in the data, in epochs. Samples that a rollback skipped count. With a mixture, an epoch has as many "
        "samples as all sources.",
        value=lambda run: run.progress.data_position / run.order.num_samples,
    ),
    Tag(
        "data/share/<source>",
        "same",
        "Share of a source of the mixture in all samples so far, from 0 to 1.",
        chart=("data", "share of samples"),
    ),
    Tag(
        "data/epoch/<source>",
        "same",
        "Position in a source of the mixture, in epochs of this source.",
        chart=("data", "epochs"),
    ),
    Tag(
        "train/skipped_steps",
        "same",
        "Skipped steps so far: their loss or gradient was not finite, or was a spike.",
        chart=("loss", "skipped steps"),
        value=lambda run: run.progress.skipped_steps,
    ),
    Tag(
        "train/rollbacks",
        "same",
        "Rollbacks so far: returns to a checkpoint after too many skipped steps.",
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
        "`throughput/tokens_per_second` divided by the number of devices.",
        chart=("throughput", "tokens per second per device"),
    ),
    Tag(
        "throughput/images_per_second",
        "same",
        "Images per second of training, over all ranks. It replaces tokens per second if samples are images.",
        chart=("throughput", "images per second"),
        console="{:>11,.0f} img/s",
    ),
    Tag(
        "throughput/images_per_second_per_device",
        "same",
        "`throughput/images_per_second` divided by the number of devices.",
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
        "`throughput/tflops_per_device` in percent of the device's bf16 peak. Reported if the peak is known or given.",
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
        "Seconds per step that training waits for data; a part of `time/step_s`.",
        chart=("time", "seconds per step"),
    ),
    Tag(
        "time/compile_s",
        "max",
        "Seconds of compilation since the last report, with `compile.enable`. The log counts graphs from the cache.",
    ),
    Tag(
        "time/checkpoint_stall_s",
        "max",
        "Seconds that training waited for checkpoints since the last report: for the previous checkpoint, and for the "
        'copy of the state (with `async_mode = "disabled"`, for the complete checkpoint).',
        chart=("time", "seconds of a checkpoint"),
    ),
    Tag(
        "checkpoint/failed_saves",
        "max",
        "Failed saves of checkpoints since this process started.",
    ),
    Tag(
        "comm/all_gather_gib",
        "same",
        "With `comm.count_traffic`: bytes of all-gathered parameters on one rank per step, in GiB, without validation; "
        "mean of the steps since the last report.",
        chart=("communication", "GiB per step"),
    ),
    Tag(
        "comm/reduce_scatter_gib",
        "same",
        "With `comm.count_traffic`: bytes of reduce-scattered gradients on one rank per step, in GiB; mean of the "
        "steps since the last report.",
        chart=("communication", "GiB per step"),
    ),
    Tag(
        "comm/all_reduce_gib",
        "same",
        "With `comm.count_traffic`: bytes of gradients that are all-reduced between replicas (HSDP) on one rank per "
        "step, in GiB; mean of the steps since the last report.",
        chart=("communication", "GiB per step"),
    ),
    Tag(
        "comm/collectives",
        "same",
        "With `comm.count_traffic`: number of all-gathers, reduce-scatters and all-reduces of FSDP2 on one rank per "
        "step, without validation; mean of the steps since the last report.",
        chart=("communication", "collectives"),
    ),
    Tag(
        "comm/exposed_s",
        "max",
        "With `comm.profile_freq`: seconds in which only NCCL kernels ran on the GPU, in the last profiled step since "
        "the last report.",
        chart=("communication", "seconds per step"),
    ),
    Tag(
        "memory/predicted_active_gib",
        "same",
        "The planner's prediction of `memory/max_active_gib`. If the model must be traced, it is reported after the "
        "trace.",
        chart=("memory", "GiB"),
    ),
    Tag(
        "memory/max_active_gib",
        "max",
        "Peak memory of tensors since the last report, in GiB. On a CPU it is measured once, in the third step of the "
        "process.",
        chart=("memory", "GiB"),
    ),
    Tag(
        "memory/max_reserved_gib",
        "max",
        "Peak memory that the CUDA allocator reserved since the last report, in GiB.",
        chart=("memory", "GiB"),
        console="reserved memory {:6.2f} GiB",
    ),
    Tag(
        "memory/max_rss_gib",
        "max",
        "Peak resident host memory of the process so far, in GiB, without the data workers.",
        chart=("memory", "GiB"),
        console="host memory {:6.2f} GiB",
        console_fallback_for="memory/max_reserved_gib",
    ),
    Tag(
        "memory/alloc_retries",
        "max",
        "Allocations so far for which the CUDA allocator first had to free cached memory, which is slow.",
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
        "Fraction of the validation targets (images or next tokens) that are predicted correctly, from 0 to 1. A "
        "target is predicted correctly if its class has the largest logit.",
        chart=("loss", "accuracy"),
        console="accuracy {:7.2%}",
    ),
    Tag(
        "validation/loss/<source>",
        "same",
        "`validation/loss` of one source of a mixture.",
        chart=("data", "validation loss"),
    ),
    Tag(
        "validation/accuracy/<source>",
        "same",
        "`validation/accuracy` of one source of a mixture.",
        chart=("data", "validation accuracy"),
    ),
    Tag(
        "validation/ema_loss",
        "same",
        "`validation/loss` of the moving average of the weights (`[ema]`), also for each source of a mixture.",
        chart=("loss", "loss"),
        console="EMA loss {:8.4f}",
    ),
    Tag(
        "validation/ema_accuracy",
        "same",
        "`validation/accuracy` of the moving average of the weights (`[ema]`), also for each source of a mixture.",
        chart=("loss", "accuracy"),
        console="EMA accuracy {:7.2%}",
    ),
    Tag(
        "batchnorm/running_mean_divergence",
        "same",
        "Largest distance of a rank's running mean from the pooled mean, in pooled standard deviations. Reported at "
        "validations and checkpoints, with BatchNorm and several ranks.",
        chart=("batchnorm", "divergence of running statistics"),
    ),
    Tag(
        "batchnorm/running_var_divergence",
        "same",
        "Largest distance of a rank's running variance from the pooled variance, as a fraction of the pooled variance. "
        "Reported at validations and checkpoints, with BatchNorm and several ranks.",
        chart=("batchnorm", "divergence of running statistics"),
    ),
    Tag(
        "experts/load_max_over_mean/<layer>",
        "max",
        "Load of the expert with the largest load, divided by the mean load of the layer's experts. The load is the "
        "number of choices since the last report, over all ranks. 1 is an equal load; `num_experts / top_k` is the "
        "largest possible value.",
        chart=("experts", "largest load over mean load"),
    ),
    Tag(
        "experts/entropy/<layer>",
        "max",
        "Entropy of the distribution of the load over the layer's experts, divided by the logarithm of their number. "
        "1 is an equal load; 0 is the load of a single expert.",
        chart=("experts", "entropy of the load"),
    ),
    Tag(
        "experts/unused/<layer>",
        "max",
        "Share of the layer's experts with a load below 1 % of the mean load, from 0 to 1. 0 if the mean load is below "
        "20, which is too small to tell.",
        chart=("experts", "share of unused experts"),
    ),
    Tag(
        "experts/balance_loss",
        "sum",
        "Balance loss with its weight, as it enters the gradient: sum over layers, mean over the samples of all steps "
        "since the last report. It is not part of `train/loss`.",
        chart=("experts", "auxiliary losses"),
    ),
    Tag(
        "experts/z_loss",
        "sum",
        "Router z-loss with its weight, as it enters the gradient: sum over layers, mean over the samples of all steps "
        "since the last report. It is not part of `train/loss`.",
        chart=("experts", "auxiliary losses"),
    ),
    Tag(
        "experts/dropped",
        "sum",
        "Choices without a computation. Always 0, because no token is dropped.",
    ),
]

_OF_SOME_MODELS = ("experts",)
"""Groups of the dashboard that exist only for models whose first report has a metric of the group."""


def tag_of(name: str) -> Tag | None:
    """Return the tag of a metric, also if `<source>` or `<layer>` stands for the last part of its name. None if there
    is none."""
    group, _, rest = name.partition("/")
    kind, separator, _ = rest.partition("/")
    known = (name, *(f"{group}/{kind}/<{part}>" for part in ("source", "layer") if separator))
    return next((tag for tag in TAGS if tag.name in known), None)


def dashboard_layout(reported: Iterable[str] = ()) -> dict[str, dict[str, list[str]]]:
    """Return the dashboard: a dict from group to a dict from chart title to the names of its tags. `reported`: the
    metrics of the first report."""
    layout: dict[str, dict[str, list[str]]] = {}
    groups = {name.partition("/")[0] for name in reported}
    for tag in TAGS:
        if tag.chart and (tag.chart[0] not in _OF_SOME_MODELS or tag.chart[0] in groups):
            group, title = tag.chart
            layout.setdefault(group, {}).setdefault(title, []).append(tag.name)
    return layout


def markdown_table() -> str:
    """Return the Markdown table of all metrics for the documentation."""
    over_ranks = {"sum": "sum", "max": "maximum", "same": "-"}
    rows = [f"| `{tag.name}` | {tag.meaning} | {over_ranks[tag.combine]} |" for tag in TAGS]
    return "\n".join(["| tag | meaning | over ranks |", "|---|---|---|", *rows, ""])
