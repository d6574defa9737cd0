"""Measures a run while it trains, without holding the device up."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from titan_launch.config.sections.data import SampleUnit
from titan_launch.metrics.tags import TAGS
from titan_launch.plan.hardware import GIB

_WINDOW_TARGETS = "targets in the window"


class Meter:
    """Turns what happens between two reports (a window) into the metrics of `titan_launch.metrics.tags`.

        with meter.loading():
            batch = next(batches)
        ...                                     # forward, backward
        meter.end_step(valid_global)
        if is_time_to_report:
            scalars = meter.report(...)
        with meter.paused():
            ...                                 # validation, checkpoint

    Nothing waits for the device except `report` and the two ends of `paused`. The first window starts when the meter
    is built.
    """

    def __init__(
        self,
        *,
        device: torch.device,
        world_size: int,
        unit: SampleUnit = "tokens",
        flops_per_step_per_device: float | None = None,
        peak_flops: float | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        """`world_size`: ranks of the default process group, each with one device; alone, it needs no group.

        `unit`: what has a target, and so is counted in the throughput.

        `flops_per_step_per_device` counts all positions, ignored ones included; without it no TFLOP/s are reported, and
        without `peak_flops` (of one device, in FLOP/s) no MFU.
        """
        self._device = device
        self._world_size = world_size
        self._unit = unit
        self._flops_per_step = flops_per_step_per_device
        self._peak_flops = peak_flops
        self._clock = clock
        self._targets = torch.zeros((), dtype=torch.float64, device=device)
        self._start_window()

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Time spent in here is time spent waiting for data."""
        start = self._clock()
        yield
        self._loading_s += self._clock() - start

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Time spent in here counts neither as step time nor in the throughput.

        Waits for the device at both ends: work that training has queued up belongs to training, and what is queued in
        here does not.
        """
        self._synchronize()
        start = self._clock()
        yield
        self._synchronize()
        self._paused_s += self._clock() - start

    def end_step(self, valid_global: Tensor) -> None:
        """A step is over, as far as the host is concerned: the device may still work on it.

        `valid_global`: the step's targets that are not ignored, over all ranks; a tensor with one element.
        """
        self._targets += valid_global
        self._steps += 1

    def report(
        self,
        *,
        loss_sum: Tensor,
        valid_local: Tensor,
        valid_global: Tensor,
        grad_norm: Tensor,
        measured: Mapping[str, float] | None = None,
    ) -> dict[str, float]:
        """The metrics of the window, by tag; the next window starts.

        Every rank must call it at the same step: it waits for the device, reduces over the ranks (one sum, one maximum)
        and reads the results in one transfer. All ranks get the same losses and maxima; times are this rank's.

        `loss_sum`: this rank's losses of the last step, added up and divided by `valid_global`, so that the sum over
        the ranks is the mean. `valid_local`, `valid_global`: targets of the last step that are not ignored, on this
        rank and on all. `grad_norm`: of the whole gradient, the same on all ranks. All have one element.
        `measured`: what else this rank has to report, by tag; all ranks have the same tags.
        """
        if not self._steps:
            raise RuntimeError("report() without a step since the last report")
        values = self._combine(
            {
                "train/loss": loss_sum,
                "train/loss_max": _own_mean(loss_sum, valid_local, valid_global),
                "train/grad_norm": grad_norm,
                "time/data_s": self._loading_s / self._steps,
                _WINDOW_TARGETS: self._targets,
                **_memory(self._device),
                **(measured or {}),
            }
        )
        targets = values.pop(_WINDOW_TARGETS)
        if values["train/loss_max"] == -torch.inf:
            del values["train/loss_max"]  # no rank has had a target
        # Only now is the device done with the window, so only now is its time known.
        values |= self._rates(targets, self._clock() - self._window_start - self._paused_s)
        self._start_window()
        return values

    def _rates(self, targets: float, seconds: float) -> dict[str, float]:
        rates = {
            "time/step_s": seconds / self._steps,
            f"throughput/{self._unit}_per_second": targets / seconds,
            f"throughput/{self._unit}_per_second_per_device": targets / seconds / self._world_size,
        }
        if self._flops_per_step is not None:
            flops_per_second = self._flops_per_step * self._steps / seconds
            rates["throughput/tflops_per_device"] = flops_per_second / 1e12
            if self._peak_flops is not None:
                rates["throughput/mfu_percent"] = 100 * flops_per_second / self._peak_flops
        return rates

    @torch.no_grad()
    def _combine(self, local: Mapping[str, float | Tensor]) -> dict[str, float]:
        """Reduce every value as its tag says (one without a tag is the same on all ranks) and bring it to the host."""
        how_to_combine = {tag.name: tag.combine for tag in TAGS}
        names: dict[str, list[str]] = {"sum": [], "max": [], "same": []}
        unchanged: dict[str, float] = {}
        for name, value in local.items():
            how = how_to_combine.get(name, "same")
            if how == "same" and not isinstance(value, Tensor):
                unchanged[name] = value
            else:
                names[how].append(name)
        on_device = {name: value for name, value in local.items() if isinstance(value, Tensor)}
        on_host = [name for name in local if name not in on_device and name not in unchanged]
        # float64 holds every integer up to 2^53, float32 only up to 16 million: too few for the targets of a window.
        # One copy for all of them: the host waits for each copy.
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
        self._steps = 0
        self._loading_s = 0.0
        self._paused_s = 0.0
        self._targets.zero_()
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        self._window_start = self._clock()

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _own_mean(loss_sum: Tensor, valid_local: Tensor, valid_global: Tensor) -> Tensor:
    """This rank's mean loss, -inf without targets, which no maximum picks, and inf for a loss that is not a number,
    which a maximum could drop (whether it does depends on the backend and on the order of the ranks)."""
    mean = (loss_sum.double() * valid_global / valid_local).nan_to_num(nan=torch.inf, posinf=torch.inf)
    return torch.where(valid_local > 0, mean, -torch.inf)


def _memory(device: torch.device) -> dict[str, float]:
    """What the host knows of this rank's memory; does not wait for the device."""
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
