"""The table of all metrics of a run. The meter, the console, the dashboard and the documentation use it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Literal

STEP_PARTS = ("data", "forward", "backward", "communication", "optimizer")
"""Parts of a step. Their times and the time of `OTHER` add up to the time of the step."""

OTHER = "other"
"""The part for time that belongs to no named part."""

PAUSES = ("validation", "checkpoint")
"""Parts of a run's time that do not count as step time."""

BEST_LOSS, WITHOUT_IMPROVEMENT = "validation/best_loss", "validation/without_improvement"
"""Metrics of early stopping (`validation.patience`)."""


@dataclass(frozen=True)
class Tag:
    name: str
    """Name of the metric. `<source>` stands for a source of a mixture, `<layer>` and `<module>` for the path of a
    module, and `<group>` for a group of parameters."""

    meaning: str
    combine: Literal["sum", "max", "same"] = "same"
    """Reduction over the ranks. `same`: no reduction, because all ranks have the same value."""

    chart: tuple[str, str] | None = None
    """(page, title) of the dashboard's chart that shows the metric. Tags with the same pair share a chart. The title
    has the unit of the values, because TensorBoard's axes have no labels."""

    console: str | None = None
    """`str.format` pattern of the metric's field in a console line. Ordinary values must give fields of equal width."""

    console_fallback_for: str | None = None
    """Another tag. If that tag is reported, the console does not show this metric."""

    value: Callable[[Any], float | None] | None = None
    """Function of the run (`titan_launch.train.run.Run`) that returns this rank's value at every report. It returns
    None if the value is unknown. None in place of the function: other code adds the metric to the report."""


PAGES = ("Learning", "Speed", "Memory", "Precision", "Data", "Experts", "Health")
"""The pages of the dashboard, in order."""

TAGS = [
    Tag(
        "train/loss",
        "Mean loss over all ranks, and over the steps since the last report that were not skipped. If all of these "
        "steps were skipped: the loss of the reported step. The loss is that of `loss.name`. By default, it is the "
        "cross-entropy of all targets that are not ignored, with label smoothing and without the z-loss.",
        combine="sum",
        chart=("Learning", "loss"),
        console="loss {:8.4f}",
    ),
    Tag(
        "train/perplexity",
        "Exponential of `train/loss`, if this is the cross-entropy of next tokens without label smoothing.",
        chart=("Learning", "perplexity"),
    ),
    Tag(
        "train/z_loss",
        "With `loss.z_loss`: this weight times the mean of (ln Z)² in the reported step, over the targets that are not "
        "ignored. Z is the sum of exp(logit). The gradient is that of the sum of `train/loss` and `train/z_loss`.",
        combine="sum",
        chart=("Learning", "z-loss"),
    ),
    Tag(
        "distillation/kl_divergence",
        'With `loss.name = "distillation"`: mean KL divergence of the step, KL(teacher ‖ model), at '
        "`loss.distillation.temperature`. It is not multiplied by its weight in the loss.",
        combine="sum",
        chart=("Learning", "parts of the distillation loss"),
    ),
    Tag(
        "distillation/cross_entropy",
        'With `loss.name = "distillation"`: mean cross-entropy of the step. It is not multiplied by its weight in the '
        "loss.",
        combine="sum",
        chart=("Learning", "parts of the distillation loss"),
    ),
    Tag(
        "preference/reward_chosen",
        "With a loss of pairs: mean reward of the chosen answers of the step. The reward of `dpo` is `loss.dpo.beta` "
        "times the log-ratio; docs/how_to/losses.md has the rewards of the other losses.",
        combine="sum",
        chart=("Learning", "rewards of answers"),
    ),
    Tag(
        "preference/reward_rejected",
        "With a loss of pairs: mean reward of the rejected answers of the step.",
        combine="sum",
        chart=("Learning", "rewards of answers"),
    ),
    Tag(
        "preference/reward_margin",
        "`preference/reward_chosen` minus `preference/reward_rejected`.",
        combine="sum",
        chart=("Learning", "rewards of answers"),
        console="margin {:8.4f}",
    ),
    Tag(
        "preference/signed_reward",
        "With `kto`: mean reward of the answers of the step. The reward of an undesirable answer counts with the "
        "opposite sign.",
        combine="sum",
        chart=("Learning", "rewards of answers"),
        console="reward {:8.4f}",
    ),
    Tag(
        "preference/baseline",
        "With `kto`: the baseline of the step. It is `loss.kto.beta` times the mean log-ratio of mismatched answers, "
        "or 0 if this product is negative.",
        combine="sum",
        chart=("Learning", "rewards of answers"),
    ),
    Tag(
        "preference/accuracy",
        "With a loss of pairs: fraction of the step's pairs whose chosen answer has the higher reward, from 0 to 1. "
        "With `kto`: fraction of the answers with a reward above (desirable) or below (undesirable) the baseline.",
        combine="sum",
        chart=("Learning", "accuracy of preferences (0 to 1)"),
        console="preferred {:7.2%}",
    ),
    Tag(
        "train/loss_max",
        "Largest mean loss of a rank in the reported step. Infinite if a rank's loss is not finite.",
        combine="max",
        chart=("Learning", "loss"),
    ),
    Tag(
        "train/grad_norm",
        "Norm of the whole gradient of the reported step, before clipping.",
        chart=("Learning", "gradient norm"),
        console="grad norm {:8.3f}",
    ),
    Tag("train/lr", "Learning rate of the reported step.", chart=("Learning", "learning rate"), console="lr {:9.3e}"),
    Tag(
        "train/lr/<group>",
        "Learning rate of a group of `[[optimizer.param_groups]]`, if the groups have different learning rates.",
        chart=("Learning", "learning rate"),
    ),
    Tag(
        "learned/grad_norm/<module>",
        "With `metrics.modules`: norm of the gradients of a module's parameters in the reported step, before clipping.",
        chart=("Learning", "gradient norm of modules"),
    ),
    Tag(
        "learned/param_norm/<module>",
        "With `metrics.modules`: norm of a module's parameters before the update.",
        chart=("Learning", "parameter norm of modules"),
    ),
    Tag(
        "learned/update_norm/<module>",
        "With `metrics.modules`: norm of the change of a module's parameters in the reported step.",
        chart=("Learning", "update norm of modules"),
    ),
    Tag(
        "learned/update_ratio/<module>",
        "With `metrics.modules`: `learned/update_norm` divided by `learned/param_norm`.",
        chart=("Learning", "update norm over parameter norm"),
    ),
    Tag(
        "activations/rms/<module>",
        "With `metrics.modules`: root mean square of a module's outputs in the reported step. For each precision "
        "rule, one more value covers the outputs of all modules of the rule.",
        chart=("Precision", "root mean square of outputs"),
    ),
    Tag(
        "activations/underflow/<module>",
        "With `metrics.modules`: fraction of the outputs in `activations/rms` that are not 0 and have a magnitude "
        "below the smallest normal bfloat16 number, 1.2e-38.",
        chart=("Precision", "share of outputs that underflow (0 to 1)"),
    ),
    Tag(
        "activations/overflow/<module>",
        "With `metrics.modules`: fraction of the outputs in `activations/rms` that are NaN, or whose magnitude is "
        "above the largest bfloat16 number, 3.4e38.",
        chart=("Precision", "share of outputs that overflow (0 to 1)"),
    ),
    Tag(
        "train/samples_seen",
        "Samples of all steps of the run so far, over all ranks. Samples that a rollback skipped do not count.",
        value=lambda run: run.progress.samples_seen,
    ),
    Tag(
        "train/epoch",
        "Position in the data, in epochs, including samples that a rollback skipped. With a mixture, an epoch has as "
        "many samples as all sources together.",
        value=lambda run: run.progress.data_position / run.batches.order.num_samples,
    ),
    Tag(
        "data/share/<source>",
        "Fraction of all samples so far that came from a source of the mixture, from 0 to 1.",
        chart=("Data", "share of each source in the samples (0 to 1)"),
    ),
    Tag(
        "data/tokens/<source>",
        "Tokens of a source of the mixture so far, including padding.",
        chart=("Data", "tokens of each source"),
    ),
    Tag(
        "data/epoch/<source>",
        "Position in a source of the mixture, in epochs of this source.",
        chart=("Data", "epochs of each source"),
    ),
    Tag(
        "train/skipped_steps",
        "Skipped steps so far: their loss or gradient was not finite, or was a spike.",
        chart=("Health", "skipped steps"),
        value=lambda run: run.progress.skipped_steps,
    ),
    Tag(
        "train/rollbacks",
        "Rollbacks so far: returns to a checkpoint after too many skipped steps.",
        chart=("Health", "rollbacks"),
        value=lambda run: run.progress.rollbacks,
    ),
    Tag(
        "throughput/tokens_per_second",
        "Targets that are not ignored, per second of training, over all ranks.",
        chart=("Speed", "tokens per second"),
        console="{:>11,.0f} tok/s",
    ),
    Tag(
        "throughput/tokens_per_second_per_device",
        "`throughput/tokens_per_second` divided by the number of devices.",
        chart=("Speed", "tokens per second per device"),
    ),
    Tag(
        "throughput/images_per_second",
        "Images per second of training, over all ranks. It replaces tokens per second if samples are images.",
        chart=("Speed", "images per second"),
        console="{:>11,.0f} img/s",
    ),
    Tag(
        "throughput/images_per_second_per_device",
        "`throughput/images_per_second` divided by the number of devices.",
        chart=("Speed", "images per second per device"),
    ),
    Tag(
        "throughput/tflops_per_device",
        "Floating-point operations of the model per second of training and device, in TFLOP/s. Positions with an "
        "ignored target count, too.",
        chart=("Speed", "TFLOP/s per device"),
    ),
    Tag(
        "throughput/mfu_percent",
        "`throughput/tflops_per_device` in percent of the device's bf16 peak. Reported if the peak is known or given.",
        chart=("Speed", "model FLOPs utilization (%)"),
        console="MFU {:5.1f} %",
    ),
    Tag(
        "time/step_s",
        "Seconds per step, without validation and checkpoints.",
        chart=("Speed", "time of a step (s)"),
        console="{:8.3f} s/step",
    ),
    Tag(
        "time/data_s",
        "Seconds per step that training waits for data. This metric and the next five are the parts of `time/step_s`, "
        "and add up to it. On CUDA, they are times of the compute stream, so data that arrives in time counts 0.",
        chart=("Speed", "where the time of a step goes (s)"),
    ),
    Tag(
        "time/forward_s",
        "Seconds per step in forwards and losses, without communication.",
        chart=("Speed", "where the time of a step goes (s)"),
    ),
    Tag(
        "time/backward_s",
        "Seconds per step in backwards. The second forwards of activation checkpointing count, and communication does "
        "not.",
        chart=("Speed", "where the time of a step goes (s)"),
    ),
    Tag(
        "time/communication_s",
        "Seconds per step in which computation waits for FSDP2's collectives or copies to and from their buffers, and "
        "in which a pipeline rank waits for other stages. Collectives of other axes count as forward or backward.",
        chart=("Speed", "where the time of a step goes (s)"),
    ),
    Tag(
        "time/optimizer_s",
        "Seconds per step in clipping and in the update.",
        chart=("Speed", "where the time of a step goes (s)"),
    ),
    Tag(
        "time/other_s",
        "Seconds per step in everything else, such as counting targets, synchronizing ranks, metrics and reports.",
        chart=("Speed", "where the time of a step goes (s)"),
    ),
    Tag(
        "time/validation_s",
        "Seconds per step in validations since the previous report, including a validation at this report. Not part of "
        "`time/step_s`.",
        chart=("Speed", "where the time of a step goes (s)"),
    ),
    Tag(
        "time/checkpoint_s",
        "Seconds per step for which the run waited for checkpoints since the previous report, including rollbacks. "
        "The last report of a run includes the final checkpoint. Not part of `time/step_s`.",
        chart=("Speed", "where the time of a step goes (s)"),
    ),
    Tag(
        "time/compile_s",
        "With `compile.enable`: seconds of compilation since the last report. The number of graphs from the compile "
        "cache is only in the log.",
        combine="max",
        chart=("Speed", "compilation (s per report)"),
    ),
    Tag(
        "time/checkpoint_stall_s",
        "Seconds that training waited for checkpoints since the last report: for the previous checkpoint, and for the "
        'copy of the state (with `async_mode = "disabled"`, for the complete checkpoint).',
        combine="max",
        chart=("Speed", "waiting for checkpoints (s per report)"),
    ),
    Tag(
        "checkpoint/failed_saves",
        "Failed saves of checkpoints since this process started.",
        combine="max",
        chart=("Health", "failed saves of checkpoints"),
    ),
    Tag(
        "comm/all_gather_gib",
        "With `comm.count_traffic`: bytes of all-gathered parameters on one rank per step, in GiB, without validation; "
        "mean of the steps since the last report.",
        chart=("Speed", "GiB communicated per step"),
    ),
    Tag(
        "comm/reduce_scatter_gib",
        "With `comm.count_traffic`: bytes of reduce-scattered gradients on one rank per step, in GiB; mean of the "
        "steps since the last report.",
        chart=("Speed", "GiB communicated per step"),
    ),
    Tag(
        "comm/all_reduce_gib",
        "With `comm.count_traffic`: bytes of gradients that are all-reduced between replicas (HSDP) on one rank per "
        "step, in GiB; mean of the steps since the last report.",
        chart=("Speed", "GiB communicated per step"),
    ),
    Tag(
        "comm/collectives",
        "With `comm.count_traffic`: number of all-gathers, reduce-scatters and all-reduces of FSDP2 on one rank per "
        "step, without validation; mean of the steps since the last report.",
        chart=("Speed", "collectives per step"),
    ),
    Tag(
        "comm/exposed_s",
        "With `comm.profile_freq`: seconds in which only NCCL kernels ran on the GPU, in the last profiled step since "
        "the last report.",
        combine="max",
        chart=("Speed", "exposed communication (s per step)"),
    ),
    Tag(
        "memory/predicted_active_gib",
        "The planner's prediction of `memory/max_active_gib`. It needs a recording of the job from an earlier `plan` "
        "or run. If there is none, a run on GPUs starts a process that makes the recording.",
        chart=("Memory", "peak memory (GiB)"),
    ),
    Tag(
        "memory/limit_gib",
        "Memory limit of a rank in the planner, in GiB: the memory of its device, its part of the host's memory, or "
        "`planner.memory_gib`.",
        value=lambda run: run.job.hardware.memory_gib,
    ),
    Tag(
        "memory/max_active_gib",
        "Peak memory of tensors since the last report, in GiB. On a CPU it is measured once, in the third step of the "
        "process.",
        combine="max",
        chart=("Memory", "peak memory (GiB)"),
    ),
    Tag(
        "memory/max_reserved_gib",
        "Peak memory that the CUDA allocator reserved since the last report, in GiB.",
        combine="max",
        chart=("Memory", "peak memory (GiB)"),
        console="reserved memory {:6.2f} GiB",
    ),
    Tag(
        "memory/max_rss_gib",
        "Peak resident host memory of the process so far, in GiB, without the data workers.",
        combine="max",
        chart=("Memory", "peak memory (GiB)"),
        console="host memory {:6.2f} GiB",
        console_fallback_for="memory/max_reserved_gib",
    ),
    Tag(
        "memory/alloc_retries",
        "Allocations so far for which the CUDA allocator first had to free cached memory, which is slow.",
        combine="max",
        chart=("Health", "allocation retries and out-of-memory errors"),
    ),
    Tag(
        "memory/ooms",
        "CUDA out-of-memory errors so far.",
        combine="max",
        chart=("Health", "allocation retries and out-of-memory errors"),
    ),
    Tag(
        "validation/loss",
        "Mean cross-entropy over all targets of the held-out samples, without label smoothing and z-loss. With a loss "
        "of pairs, `kto` or a function of your own: the mean of that loss, without label smoothing.",
        chart=("Learning", "loss"),
        console="validation loss {:8.4f}",
    ),
    Tag(
        BEST_LOSS,
        "With `validation.patience`: lowest value so far of the validation loss that `checkpoint.keep_best` compares.",
        chart=("Learning", "loss"),
    ),
    Tag(
        WITHOUT_IMPROVEMENT,
        "With `validation.patience`: number of validations in a row without an improvement. The run ends when this "
        "number reaches `validation.patience`.",
        chart=("Learning", "validations without improvement"),
    ),
    Tag(
        "validation/perplexity",
        "Exponential of `validation/loss`, if this is the cross-entropy of next tokens.",
        chart=("Learning", "perplexity"),
    ),
    Tag(
        "validation/accuracy",
        "Fraction of the validation targets (images or next tokens) that are predicted correctly, from 0 to 1. A "
        "target is predicted correctly if its class has the largest logit. With a loss of pairs: fraction of the "
        "held-out pairs whose chosen answer has the higher reward. With `kto`: fraction of the held-out answers with a "
        "reward above (desirable) or below (undesirable) 0.",
        chart=("Learning", "accuracy (0 to 1)"),
        console="accuracy {:7.2%}",
    ),
    Tag(
        "validation/loss/<source>",
        "`validation/loss` of one source of a mixture.",
        chart=("Data", "validation loss of each source"),
    ),
    Tag(
        "validation/accuracy/<source>",
        "`validation/accuracy` of one source of a mixture.",
        chart=("Data", "validation accuracy of each source (0 to 1)"),
    ),
    Tag(
        "validation/ema_loss",
        "`validation/loss` of the moving average of the weights (`[ema]`).",
        chart=("Learning", "loss"),
        console="EMA loss {:8.4f}",
    ),
    Tag("validation/ema_perplexity", "Exponential of `validation/ema_loss`.", chart=("Learning", "perplexity")),
    Tag(
        "validation/ema_accuracy",
        "`validation/accuracy` of the moving average of the weights (`[ema]`).",
        chart=("Learning", "accuracy (0 to 1)"),
        console="EMA accuracy {:7.2%}",
    ),
    Tag(
        "validation/ema_loss/<source>",
        "`validation/ema_loss` of one source of a mixture.",
        chart=("Data", "validation loss of each source"),
    ),
    Tag(
        "validation/ema_accuracy/<source>",
        "`validation/ema_accuracy` of one source of a mixture.",
        chart=("Data", "validation accuracy of each source (0 to 1)"),
    ),
    Tag(
        "batchnorm/running_mean_divergence",
        "Largest distance of a rank's running mean from the pooled mean, in pooled standard deviations. Reported at "
        "validations and checkpoints, with BatchNorm and several ranks.",
        chart=("Health", "divergence of running statistics (relative)"),
    ),
    Tag(
        "batchnorm/running_var_divergence",
        "Largest distance of a rank's running variance from the pooled variance, as a fraction of the pooled variance. "
        "Reported at validations and checkpoints, with BatchNorm and several ranks.",
        chart=("Health", "divergence of running statistics (relative)"),
    ),
    Tag(
        "experts/load_max_over_mean/<layer>",
        "Load of the expert with the largest load, divided by the mean load of the layer's experts. The load of an "
        "expert is the number of tokens for which it was chosen since the last report, over all ranks. 1 is an equal "
        "load; `num_experts / top_k` is the largest possible value.",
        combine="max",
        chart=("Experts", "largest load over mean load"),
    ),
    Tag(
        "experts/entropy/<layer>",
        "Entropy of the distribution of the load over the layer's experts, divided by the logarithm of their number. "
        "1: all experts have the same load. 0: a single expert has the whole load.",
        combine="max",
        chart=("Experts", "entropy of the load (0 to 1)"),
    ),
    Tag(
        "experts/unused/<layer>",
        "Fraction of the layer's experts with a load below 1 % of the mean load, from 0 to 1. If the mean load is "
        "below 20 tokens, which is too few to tell, the fraction is 0.",
        combine="max",
        chart=("Experts", "share of unused experts (0 to 1)"),
    ),
    Tag(
        "experts/balance_loss",
        "Balance loss with its weight, as it enters the gradient: sum over layers, mean over the samples of the steps "
        "since the last report that were not skipped. It is not part of `train/loss`.",
        combine="sum",
        chart=("Experts", "auxiliary losses"),
    ),
    Tag(
        "experts/z_loss",
        "Router z-loss with its weight, as it enters the gradient: squared logsumexp of the router's logits, sum over "
        "layers, mean over the samples of the steps since the last report that were not skipped. It is not part of "
        "`train/loss`.",
        combine="sum",
        chart=("Experts", "auxiliary losses"),
    ),
]


def tag_of(name: str) -> Tag | None:
    """Return the tag of a metric: one with the same name, or one whose placeholder, such as `<source>`, stands for the
    part of the name after the second slash. Return None if no tag matches."""
    group, _, rest = name.partition("/")
    kind, separator, _ = rest.partition("/")
    known = (name, *(f"{group}/{kind}/<{part}>" for part in ("source", "layer", "module", "group") if separator))
    return next((tag for tag in TAGS if tag.name in known), None)


def dashboard_layout(expected: Collection[str]) -> dict[str, dict[str, list[str]]]:
    """Return the dashboard as nested dicts: page -> chart title -> names of the tags in the chart.

    `expected`: all metrics that the run reports, from the start or only later. The dashboard has no other tags, and no
    chart without a tag.
    """
    layout: dict[str, dict[str, list[str]]] = {page: {} for page in PAGES}
    reported = {tag.name for name in expected if (tag := tag_of(name)) is not None}
    for tag in TAGS:
        if tag.chart and tag.name in reported:
            page, title = tag.chart
            layout[page].setdefault(title, []).append(tag.name)
    return {page: charts for page, charts in layout.items() if charts}


def markdown_table() -> str:
    """Return the Markdown table of all metrics for the documentation."""
    over_ranks = {"sum": "sum", "max": "maximum", "same": "-"}
    rows = [f"| `{tag.name}` | {tag.meaning} | {over_ranks[tag.combine]} |" for tag in TAGS]
    return "\n".join(["| tag | meaning | over ranks |", "|---|---|---|", *rows, ""])
