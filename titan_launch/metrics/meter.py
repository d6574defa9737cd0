"""Measurement of a run's metrics, without waiting for the device in each step."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from titan_launch.config.sections.data import SampleUnit
from titan_launch.core.observer import Observer, StepResult, WatchedStep
from titan_launch.metrics.tags import OTHER, PAUSES, STEP_PARTS, tag_of
from titan_launch.metrics.timeline import Timeline
from titan_launch.plan.hardware import GIB

_WINDOW_TARGETS = "targets in the window"


class Meter(Observer):
    """Collector of the metrics of `titan_launch.metrics.tags` over a window, which is the time between two reports.

        meter.timeline.begin("data")
        batch = next(batches)
        meter.timeline.begin("forward")
        ...
        meter.after_step(step, result)
        if is_time_to_report:
            scalars = meter.report(measured)
        with meter.paused("validation"):
            ...
        scalars |= meter.pauses()

    Only `report`, `restart_window` and both ends of `paused` wait for the device. The first window starts when the
    meter is created.
    """

    def __init__(
        self,
        *,
        timeline: Timeline,
        world_size: int,
        unit: SampleUnit = "tokens",
        flops_per_step_per_device: float | None = None,
        peak_flops: float | None = None,
    ):
        """`world_size`: number of ranks of the default process group; with 1 no group is needed.

        `unit`: unit of the throughput. The meter counts targets; each token and each image has one target.

        `flops_per_step_per_device`: FLOPs of a step on one device, including positions with an ignored target. If None,
        no TFLOP/s are reported.
        `peak_flops`: peak of one device in FLOP/s. If None, no MFU is reported. `timeline`: the timeline to which the
        step reports when each of its parts begins.
        """
        self._device = timeline.device
        self._clock = timeline.clock
        self._world_size = world_size
        self._unit = unit
        self._flops_per_step = flops_per_step_per_device
        self._peak_flops = peak_flops
        self.timeline = timeline
        """Clock that divides the window's time on this rank into parts."""

        self._targets, self._losses, self._counted = (
            torch.zeros((), dtype=torch.float64, device=self._device) for _ in range(3)
        )
        self._pauses = dict.fromkeys(PAUSES, 0.0)
        self._told_pauses: dict[str, float] = {}
        self._reported_steps = 0
        self._last: StepResult | None = None
        self.restart_window()

    def restart_window(self) -> None:
        """Drop all steps since the last report. The next window starts now. On CUDA, the host waits for the device."""
        self.timeline.take()
        self._start_window()

    @contextmanager
    def paused(self, part: str) -> Iterator[None]:
        """Exclude the time of the `with` block from step time and throughput. Count it under `part` (see `PAUSES`).

        The host waits for the device at both ends of the block. So step time includes all work that was queued before
        the block, and no work that was queued in the block.
        """
        self._synchronize()
        start = self._clock()
        with self.timeline.whole(part):
            yield
            self._synchronize()
        seconds = self._clock() - start
        self._paused_s += seconds
        self._pauses[part] += seconds

    def pauses(self) -> dict[str, float]:
        """Return the time of the pauses that belong to the last report, by tag, in seconds per step.

        These are the pauses between the last two reports, and those since the last report, such as a validation after
        the reported step. A pause that this method returned before the last report does not count again. The dict is
        empty before the first report.
        """
        if not self._reported_steps:
            return {}
        self._told_pauses = dict(self._pauses)
        return {f"time/{name}_s": seconds / self._reported_steps for name, seconds in self._pauses.items()}

    def late_pauses(self) -> dict[str, float]:
        """Return those metrics of `pauses` that have changed since the last call of `pauses`. The dict is empty if
        `pauses` was not called since the last report."""
        if not self._told_pauses:
            return {}
        changed = [f"time/{name}_s" for name, seconds in self._pauses.items() if seconds != self._told_pauses[name]]
        told = self.pauses()
        return {tag: told[tag] for tag in changed}

    def after_step(self, step: WatchedStep, result: StepResult) -> None:
        """Count a step that the host has finished. The device may still run it. The targets of a skipped step count,
        but its loss does not."""
        self._targets += result.targets_global
        self._losses += torch.where(result.is_skipped == 0, result.loss_sum.detach(), 0)
        self._counted += result.is_skipped == 0
        self._steps += 1
        self._last = result

    def report(self, measured: Mapping[str, float | Tensor]) -> dict[str, float]:
        """Return the metrics of the window by tag, and start the next window.

        Every rank must call this method at the same step. The method runs two all-reduces, one for sums and one for
        maxima. It copies the results to the host in one transfer, which waits for the device. Metrics that are reduced
        over ranks are equal on all ranks. `time/step_s` and throughputs are measured on this rank.

        `train/loss` is the mean of the steps that were not skipped. If all steps of the window were skipped, it is the
        loss of the last step. `train/loss_max` is missing if `items_global` of the last step is 0. `measured`: further
        metrics of this rank by tag; all ranks pass the same tags. A rank that could not measure `comm/exposed_s` passes
        -inf.

        Raises RuntimeError if no step was counted since the last report.
        """
        if self._last is None:
            raise RuntimeError("report() was called without a step since the last report; call after_step first")
        last = self._last
        values = self._combine(
            {
                "train/loss": torch.where(self._counted > 0, self._losses / self._counted, last.loss_sum),
                "train/loss_max": _own_mean(last.loss_sum, last.items_local, last.items_global),
                "train/grad_norm": last.grad_norm,
                _WINDOW_TARGETS: self._targets,
                **_memory(self._device),
                **last.parts,
                **measured,
            }
        )
        targets = values.pop(_WINDOW_TARGETS)
        for name in ("train/loss_max", "comm/exposed_s"):
            if values.get(name) == -torch.inf:
                del values[name]  # no rank had an item, or no rank could measure the time
        # The device has finished the window only now, so the time is read here.
        values |= self._rates(targets, self._clock() - self._window_start - self._paused_s)
        self._pauses = {name: seconds - self._told_pauses.get(name, 0.0) for name, seconds in self._pauses.items()}
        self._told_pauses, self._reported_steps = {}, self._steps
        self._start_window()
        return values

    def _rates(self, targets: float, seconds: float) -> dict[str, float]:
        rates = {
            "time/step_s": seconds / self._steps,
            **self._parts(seconds),
            f"throughput/{self._unit}_per_second": targets / seconds,
            f"throughput/{self._unit}_per_second_per_device": targets / seconds / self._world_size,
        }
        if self._flops_per_step is not None:
            flops_per_second = self._flops_per_step * self._steps / seconds
            rates["throughput/tflops_per_device"] = flops_per_second / 1e12
            if self._peak_flops is not None:
                rates["throughput/mfu_percent"] = 100 * flops_per_second / self._peak_flops
        return rates

    def _parts(self, seconds: float) -> dict[str, float]:
        """Return the parts of a step's time in seconds per step. `seconds`: time of all steps of the window."""
        spent = self.timeline.take()
        parts = {name: spent.get(name, 0.0) for name in STEP_PARTS}
        parts[OTHER] = seconds - sum(parts.values())
        return {f"time/{name}_s": part / self._steps for name, part in parts.items()}

    @torch.no_grad()
    def _combine(self, local: Mapping[str, float | Tensor]) -> dict[str, float]:
        """Reduce every value over the ranks as `Tag.combine` says, and return the results on the host. A value whose
        name is not in `TAGS` must be equal on all ranks."""
        names: dict[str, list[str]] = {"sum": [], "max": [], "same": []}
        unchanged: dict[str, float] = {}
        for name, value in local.items():
            tag = tag_of(name)
            how = "same" if tag is None else tag.combine
            if how == "same" and not isinstance(value, Tensor):
                unchanged[name] = value
            else:
                names[how].append(name)
        on_device = {name: value for name, value in local.items() if isinstance(value, Tensor)}
        on_host = [name for name in local if name not in on_device and name not in unchanged]
        # float64, because float32 does not hold every integer above 16 million, and a window may have more targets.
        # One copy for all values, because the host waits for each copy.
        copied = torch.tensor([local[name] for name in on_host], dtype=torch.float64).to(self._device)
        on_device |= dict(zip(on_host, copied.unbind(), strict=True))
        vectors = {
            how: torch.stack([on_device[name].to(self._device, torch.float64) for name in group])
            for how, group in names.items()
        }
        if self._world_size > 1:
            dist.all_reduce(vectors["sum"], dist.ReduceOp.SUM)
            dist.all_reduce(vectors["max"], dist.ReduceOp.MAX)
        combined = torch.cat(list(vectors.values())).tolist()  # the host waits here
        return dict(zip(names["sum"] + names["max"] + names["same"], combined, strict=True)) | unchanged

    def _start_window(self) -> None:
        self._steps, self._last = 0, None
        self._paused_s = 0.0
        for total in (self._targets, self._losses, self._counted):
            total.zero_()
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        self._window_start = self._clock()

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _own_mean(loss_sum: Tensor, items_local: Tensor, items_global: Tensor) -> Tensor:
    """Return this rank's mean loss: -inf if `items_local` is 0, and inf if the loss is NaN.

    A maximum over ranks ignores -inf. NaN is replaced, because some backends ignore NaN in a maximum.
    """
    mean = (loss_sum.double() * items_global / items_local).nan_to_num(nan=torch.inf, posinf=torch.inf)
    return torch.where(items_local > 0, mean, -torch.inf)


def _memory(device: torch.device) -> dict[str, float]:
    """Return the memory metrics of this rank by tag, without waiting for the device."""
    rss_unit = 1 if sys.platform == "darwin" else 1024
    memory = {"memory/max_rss_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * rss_unit / GIB}
    if device.type == "cuda":
        stats = torch.cuda.memory_stats(device)
        memory |= {
            "memory/max_active_gib": stats["active_bytes.all.peak"] / GIB,
            "memory/max_reserved_gib": stats["reserved_bytes.all.peak"] / GIB,
            "memory/alloc_retries": stats["num_alloc_retries"],
            "memory/ooms": stats["num_ooms"],
        }
    return memory
