"""The rows that experts compute, and their exchange between ranks (expert parallelism). This module does not import
torch.

A row is the hidden vector of a token for one of its experts. In a run, the router decides how many rows each expert
gets. A plan assumes that the planned rank sends equal numbers of rows to all ranks. It also assumes that this rank
receives `planner.expert_load` times the mean over the ranks.
"""

from __future__ import annotations

from collections.abc import Iterable

from titan_launch.config.axes import EXPERT
from titan_launch.config.job import JobConfig
from titan_launch.config.rules.parallelism import NO_EXPERTS, misfit_of_experts
from titan_launch.config.sections.section import DTYPE_BYTES
from titan_launch.core.errors import config_error
from titan_launch.core.terminal import counted
from titan_launch.models.architectures import known_args
from titan_launch.plan.layout import Layout
from titan_launch.plan.types import Inventory, ModelPlan


def equal_parts(total: int, parts: int) -> list[int]:
    """Return `parts` numbers that differ by at most 1, with the sum `total`, the larger ones first."""
    quotient, remainder = divmod(total, parts)
    return [quotient + (index < remainder) for index in range(parts)]


MIN_GROUPED_WIDTH = 8
"""Smallest width of a bf16 matrix that `torch.nn.functional.grouped_mm` supports: 8 elements have 16 bytes."""


def is_grouped(device: str, dtype: str, widths: Iterable[int]) -> bool:
    """Return True if one kernel, `torch.nn.functional.grouped_mm`, computes the products of all experts of a layer.
    Otherwise the experts are computed one after another. `device`: type of the device, such as `cuda`. `widths`: widths
    of the experts' inputs and hidden states on a rank, in elements."""
    # The kernel needs rows with a multiple of 16 bytes, in forward and in backward (torch 2.11 to 2.15:
    # `GroupedMMUtils.h`).
    is_aligned = all(width * DTYPE_BYTES[dtype] % 16 == 0 for width in widths)
    return device == "cuda" and dtype == "bfloat16" and is_aligned


def check_experts(inventory: Inventory, degree: int) -> None:
    """Raise ConfigError if expert parallelism over `degree` ranks is not possible: the model has no experts, or the
    degree does not divide the number of experts of a layer. A degree of 1 is always possible."""
    if degree == 1:
        return
    modules = [module for module in inventory.modules if module.has_experts]
    counts = ((f"the number of experts in {m.path}", m.parameters[0].shape[0]) for m in modules)
    misfits = (misfit_of_experts(degree, count, noun) for noun, count in counts)
    reason = next(filter(None, misfits), None) if modules else NO_EXPERTS
    if reason is not None:
        raise config_error(EXPERT.key, reason, degree, also=(("model", "name"), ("model", "args")))


def describe_division(layout: Layout) -> str:
    """Return the division of the experts over ranks, in words; empty without expert parallelism."""
    if layout.expert == 1:
        return ""
    shards = layout.parameter_shards // layout.expert
    divided = f"the experts of each layer are divided over {layout.expert} ranks"
    return f"{divided}; FSDP2 shards each part over {counted(shards, 'rank')}"


def largest_load(config: JobConfig, layout: Layout) -> float:
    """Return the rows that the busiest rank receives, divided by the mean over the ranks: `planner.expert_load`, or the
    degree of expert parallelism if that is smaller."""
    return min(config.planner.expert_load, layout.expert)


def received_rows(num_rows: int, ranks: int, expert_load: float) -> int:
    """Return the number of rows that the busiest of `ranks` ranks receives, if each rank sends `num_rows` rows. The
    result is the mean, `num_rows`, times `expert_load`. An `expert_load` above `ranks` counts as `ranks`: one rank then
    receives all rows."""
    return round(num_rows * min(expert_load, ranks))


def active_parameters(config: JobConfig, plan: ModelPlan) -> int:
    """Return the number of parameter elements that compute a token: all elements, without those of the experts that the
    router does not choose. (In a user's own model, all elements count. The adapters of experts count in any model.)"""
    args, total = known_args(config.model), plan.inventory.num_parameters
    top_k = None if args is None else args.experts_per_token()
    if top_k is None:
        return total
    modules = (module for module in plan.inventory.distinct if module.has_experts)
    parameters = (p for module in modules for p in module.parameters)  # dim 0: the experts of a layer
    return total - sum(p.numel - p.numel // p.shape[0] * top_k for p in parameters)


def describe_load(config: JobConfig, plan: ModelPlan, layout: Layout) -> str | None:
    """Return the assumed load of experts, and the memory of the rows that a layer receives, in words. Return None
    without expert parallelism, and for a user's own model, whose routing is unknown."""
    args = known_args(config.model)
    top_k = None if args is None else args.experts_per_token()
    if layout.expert == 1 or top_k is None:
        return None
    load, wanted = largest_load(config, layout), config.planner.expert_load
    num_rows = layout.local_batch_size * layout.tokens_on_rank(config.training.seq_len) * top_k
    received = received_rows(num_rows, layout.expert, wanted)
    row_bytes = max(
        module.parameters[0].shape[2] * DTYPE_BYTES[plan.unit_of[module.path].compute_dtype]
        for module in plan.inventory.modules
        if module.has_experts
    )
    more = "" if load == wanted else f" = {wanted:g}, limited to {layout.expert} ranks"
    kind = "uniform (planner.expert_load = 1)" if load == 1 else f"{load:g} x the mean (planner.expert_load{more})"
    mib = received * row_bytes / 2**20
    rows = f"{counted(received, 'row')} (one for each token and expert)"
    return f"{kind}: the busiest rank receives {rows} per layer and microbatch, {mib:,.1f} MiB per buffer"
