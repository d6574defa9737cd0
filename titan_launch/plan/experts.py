"""The rows of tokens that experts compute, and their exchange between ranks (expert parallelism). No torch.

The router decides these numbers in a run. A plan assumes that each rank sends as many rows to every other rank, and
that the planned rank receives `planner.expert_load` times the mean of the ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction

from titan_launch.config.architectures import known_args
from titan_launch.config.job import JobConfig
from titan_launch.config.sections.base import DTYPE_BYTES
from titan_launch.config.sections.parallelism import ActivationCheckpointConfig
from titan_launch.plan.communication import Exchange
from titan_launch.plan.layout import Layout
from titan_launch.plan.module_selection import checkpointed_modules, selection
from titan_launch.plan.types import ModelPlan, enclosing, is_within, parent


def equal_parts(total: int, parts: int) -> list[int]:
    """Return `parts` numbers with the sum `total`, which differ by at most 1. The larger ones come first."""
    quotient, remainder = divmod(total, parts)
    return [quotient + (index < remainder) for index in range(parts)]


MIN_GROUPED_WIDTH = 8
"""Smallest width of a bf16 matrix that `torch.nn.functional.grouped_mm` takes: a row has 16 bytes."""


def is_grouped(device: str, dtype: str, widths: Iterable[int]) -> bool:
    """Return True if one kernel, `torch.nn.functional.grouped_mm`, computes the products of all experts of a layer.

    It does so on CUDA in bf16, if a row of every matrix has a multiple of 16 bytes. PyTorch checks these strides in
    forward and in backward (2.11 to 2.15: `GroupedMMUtils.h`). Otherwise the experts are computed one after another.
    `device`: type of the device. `widths`: widths of the experts' inputs and hidden states on a rank.
    """
    is_aligned = all(width * DTYPE_BYTES[dtype] % 16 == 0 for width in widths)
    return device == "cuda" and dtype == "bfloat16" and is_aligned


def received_rows(num_rows: int, ranks: int, expert_load: float) -> int:
    """Return the rows that the rank with the most rows receives, if each of `ranks` ranks sends `num_rows` rows.

    `expert_load`: its rows over the mean of the ranks. It cannot exceed `ranks`: that rank then computes all rows.
    """
    return round(num_rows * min(expert_load, ranks))


@dataclass(frozen=True)
class Dispatch:
    """The exchange of tokens in a layer of experts, for one microbatch."""

    path: str
    """Path of the layer's `Experts`."""

    num_experts: int
    """Experts of the layer, on all ranks."""

    sent: int
    """Rows that a rank sends: its tokens x top_k."""

    received: int
    """Rows that the planned rank receives."""

    row_bytes: int
    """Bytes of a row, in the compute dtype of the experts."""

    rows_take_gradients: bool
    """True if anything in front of the layer is trained."""

    results_take_gradients: bool
    """True if the rows take gradients, or the experts are trained."""

    def exchange(self, ranks: int, forwards: int) -> Exchange:
        """Return the all-to-alls of a microbatch among `ranks` ranks. `forwards`: 2 if activation checkpointing repeats
        the forward.

        A forward sends the numbers of rows (int64), the rows, and the results back. A backward sends the gradients of
        the results and of the rows, if they take any. A rank keeps its own part.
        """
        rows, results = self.sent * self.row_bytes, self.received * self.row_bytes
        of_results, of_rows = [rows] * self.results_take_gradients, [results] * self.rows_take_gradients
        calls = [*[8 * self.num_experts, rows, results] * forwards, *of_results, *of_rows]
        return Exchange(len(calls), sum(round(num_bytes * Fraction(ranks - 1, ranks)) for num_bytes in calls))


def dispatches(config: JobConfig, plan: ModelPlan, layout: Layout) -> list[Dispatch]:
    """Return the exchange of every layer whose experts are divided over ranks. The list is empty without expert
    parallelism, and for a user's own model, whose routing is unknown."""
    args = known_args(config.model)
    top_k = None if args is None else args.experts_per_token()
    if layout.expert == 1 or top_k is None:
        return []
    num_rows = layout.local_batch_size * config.training.seq_len // layout.context * top_k
    received = received_rows(num_rows, layout.expert, config.planner.expert_load)
    return [*_dispatches(plan, num_rows, received)]


def _dispatches(plan: ModelPlan, sent: int, received: int) -> Iterator[Dispatch]:
    for module in plan.inventory.modules:
        if module.has_experts and module.same_as is None:
            num_experts, _, width = next(p.shape for p in module.parameters if len(p.shape) == 3)
            row_bytes = width * DTYPE_BYTES[plan.unit_of[module.path].compute_dtype]
            rows, results = _takes_gradients(plan, parent(module.path)), _is_trained(plan, module.path)
            yield Dispatch(module.path, num_experts, sent, received, row_bytes, rows, rows or results)


def _takes_gradients(plan: ModelPlan, path: str) -> bool:
    """Return True if the input of a module takes gradients: a module in front of it is trained, or a pipeline stage
    ends there. (The modules of this package's language models run in the order of the inventory.)"""
    modules = plan.inventory.modules
    is_in_first = not plan.stages or enclosing(path, plan.stages[0].modules)
    before = itertools.takewhile(lambda module: module.path != path, modules)
    return not is_in_first or any(p.requires_grad for module in before for p in module.parameters)


def _is_trained(plan: ModelPlan, path: str) -> bool:
    inside = (module for module in plan.inventory.modules if is_within(module.path, path))
    return any(p.requires_grad for module in inside for p in module.parameters)


def exchange_of_step(
    config: JobConfig, plan: ModelPlan, layout: Layout, checkpointing: ActivationCheckpointConfig
) -> Exchange:
    """Return the all-to-alls of a rank in a step with a mode of activation checkpointing.

    Selective activation checkpointing per operation saves their results, so that its second forward sends nothing. A
    module without a backward has no second forward.
    """
    again = () if selection(checkpointing) == "op" else checkpointed_modules(plan.inventory, checkpointing)
    repeated = [path for path in again if _takes_gradients(plan, path) or _is_trained(plan, path)]
    exchanges = (
        dispatch.exchange(layout.expert, forwards=2 if enclosing(dispatch.path, repeated) else 1)
        for dispatch in dispatches(config, plan, layout)
    )
    microbatch = sum(exchanges, start=Exchange())
    count = layout.num_microbatches
    return Exchange(microbatch.calls * count, microbatch.sent_bytes * count)


def active_parameters(config: JobConfig, plan: ModelPlan) -> int:
    """Return the number of parameters that compute a token: all, or without the experts that a token does not choose.
    (For a user's own model, all parameters count.)"""
    args = known_args(config.model)
    active = None if args is None else args.num_active_parameters()
    return plan.inventory.num_parameters if active is None else active


def describe_load(config: JobConfig, plan: ModelPlan, layout: Layout) -> str | None:
    """Return the assumed load of experts and the memory of a layer's received rows, in words. None without expert
    parallelism."""
    layers = dispatches(config, plan, layout)
    if not layers:
        return None
    largest = max(layers, key=lambda dispatch: dispatch.row_bytes)
    load = min(config.planner.expert_load, layout.expert)
    kind = "uniform (planner.expert_load = 1)" if load == 1 else f"{load:g} x the mean (planner.expert_load)"
    mib = largest.received * largest.row_bytes / 2**20
    return f"{kind}: a rank receives {largest.received:,} rows per layer and microbatch, {mib:,.1f} MiB per buffer"
