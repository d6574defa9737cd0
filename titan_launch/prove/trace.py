"""The outputs of modules and the gradients of their inputs in one step, on one process and on the ranks of a layout.

Each rank compares its own parts with those of one process, so nothing is communicated. The layout tells which samples,
tokens and parts of matrices a rank has. A tensor whose shape fits none of these, such as the tokens of an expert, is
not compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titan_launch.config.axes import TENSOR
from titan_launch.distributed.dtensor import local_tensor
from titan_launch.distributed.torch_private import roots
from titan_launch.metrics.memory import is_in_backward
from titan_launch.models.blocks import PassThrough
from titan_launch.models.build import SPECS
from titan_launch.models.decoder.mixture_of_experts import Experts
from titan_launch.models.parallel_plans import style_by_module
from titan_launch.models.spec import TensorStyle
from titan_launch.parallel.context_parallel import sequence_part
from titan_launch.prove.results import INPUT_GRADIENT, LOSS, OUTPUT, Departure, Event
from titan_launch.train.run import Run

_PARTS_OF_SUMS: Mapping[str, frozenset[TensorStyle]] = {
    OUTPUT: frozenset({"latent", "experts", "router", "shared_rowwise"}),
    INPUT_GRADIENT: frozenset(
        {"colwise", "latent", "by_head", "heads", "experts", "router", "shared_colwise", "shared_rowwise"}
    ),
}
"""Tensor-parallel styles, by kind of tensor. In modules of these styles, a tensor of this kind may be a partial sum on
each rank, so it is not compared."""


@dataclass
class Trace:
    """The tensors of a step by event: for each call of a module, the pair (number, tensor). The number is the count of
    the tensors that were traced before."""

    num_microbatches: int
    tensors: dict[Event, list[tuple[int, Tensor]]] = field(default_factory=dict)
    num_calls: int = 0

    def add(self, event: Event, tensor: Tensor) -> None:
        self.tensors.setdefault(event, []).append((self.num_calls, tensor.detach().clone()))
        self.num_calls += 1


@contextmanager
def traced(run: Run) -> Iterator[Trace]:
    """Trace all modules of this rank's model until the `with` block ends."""
    trace = Trace(run.job.layout.num_microbatches)
    with ExitStack() as stack:
        for root in roots(run.model):
            for path, module in root.named_modules():
                if not isinstance(module, (PassThrough, nn.ModuleList, nn.ModuleDict)):
                    before, after = partial(_before, trace, path), partial(_after, trace, path)
                    stack.callback(module.register_forward_pre_hook(before, prepend=True).remove)
                    stack.callback(module.register_forward_hook(after).remove)
        yield trace


def _is_traced(tensor: Any) -> bool:
    is_activation = isinstance(tensor, Tensor) and tensor.is_floating_point() and not tensor.is_meta
    return is_activation and torch.is_grad_enabled() and not is_in_backward()


def _before(trace: Trace, path: str, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Watch the gradient of a module's first input. The module gets a view of the input, because the gradient of the
    view comes from this module alone. The gradient of the input itself is a sum over all modules that read it."""
    if not args or not _is_traced(args[0]) or not args[0].requires_grad:
        return None
    first = args[0].view_as(args[0])
    first.register_hook(lambda gradient: trace.add(Event(INPUT_GRADIENT, path), gradient))
    return (first, *args[1:])


def _after(trace: Trace, path: str, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    found = output[0] if isinstance(output, (tuple, list)) and output else getattr(output, "logits", output)
    if not _is_traced(found):
        return
    trace.add(Event(OUTPUT, path), found)
    if not path and found.requires_grad:
        found.register_hook(lambda gradient: trace.add(Event(LOSS, ""), gradient))


def departures(run: Run, trace: Trace, reference: Trace, tolerance: float) -> list[Departure]:
    """Return the events of this rank whose tensors differ by more than `tolerance` from those of one process, in any
    order."""
    place = _Place(run)
    found = []
    for event, calls in reference.tensors.items():
        own = trace.tensors.get(event)
        if own is None or place.skips(event):
            continue
        uses = len(own) // trace.num_microbatches  # calls in one forward
        if len(own) % trace.num_microbatches or len(calls) != uses * reference.num_microbatches:
            continue
        for index, (_, tensor) in enumerate(own):
            microbatch, use = divmod(index, uses)
            error = _error(tensor, place, [other for _, other in calls[use::uses]], microbatch)
            if error is not None and not error <= tolerance:
                found.append(Departure(calls[use][0], event, error))
    return found


def _error(own: Tensor, place: _Place, of_one_process: list[Tensor], microbatch: int) -> float | None:
    """Return the relative difference of a tensor from that of one process; None if the tensors cannot be compared."""
    if not own.dim():
        return None
    wanted = place.part(torch.cat(of_one_process), own, microbatch)
    if wanted is None:
        return None
    local = local_tensor(own)
    norm = float(wanted.double().norm())
    return float((local.double() - wanted.double()).norm()) / norm if norm > _NOTHING else 0.0


_NOTHING = 1e-9
"""A tensor of one process with a smaller norm than this is a rounding error. Its difference counts as 0."""


class _Place:
    """The parts of samples, tokens and matrices that this rank has."""

    def __init__(self, run: Run):
        layout, config = run.job.layout, run.config
        self._batch, self._local = layout.global_batch_size, layout.local_batch_size
        self._ranks, self._index = layout.data_parallel, layout.data_rank(run.ranks.rank)
        self._part, ranks = sequence_part(run.mesh, config.parallelism), run.mesh.along(TENSOR)
        self._tensor = layout.tensor
        self._tensor_rank = 0 if ranks is None else ranks.get_local_rank()
        self._seq_len = config.training.seq_len
        is_divided = layout.tensor > 1 or layout.expert > 1
        self._experts = {p for p, m in run.model.named_modules() if isinstance(m, Experts)} if is_divided else set()
        spec = SPECS.get(config.model.name)
        styles = getattr(run.model, "tensor_parallel", None) if spec is None else spec.tensor_parallel
        self._styles = style_by_module(run.model, styles) if styles and layout.tensor > 1 else {}

    def skips(self, event: Event) -> bool:
        """Return True for a tensor that is not compared: it may be a partial sum, or it belongs to experts that are
        divided over ranks."""
        if event.path in self._experts:
            return True
        return self._styles.get(event.path) in _PARTS_OF_SUMS.get(event.kind, ())

    def part(self, whole: Tensor, own: Tensor, microbatch: int) -> Tensor | None:
        """Return the part of `whole`, a tensor of all samples, that this rank has in a microbatch. None: `own` is a
        partial sum, or its shape fits no part."""
        if isinstance(own, DTensor) and any(place.is_partial() for place in own.placements):
            return None
        local = local_tensor(own)
        if len(whole) % self._batch:
            return None
        first = (microbatch * self._ranks + self._index) * self._local
        rows = whole.unflatten(0, (self._batch, -1))[first : first + self._local]
        rows = self._tokens(rows, local)
        found = rows.flatten(0, 1)
        if found.dim() != local.dim():
            return None
        for dim in range(found.dim()):
            if found.shape[dim] == local.shape[dim] * self._tensor > local.shape[dim]:
                found = found.chunk(self._tensor, dim)[self._tensor_rank]
        return found if found.shape == local.shape else None

    def _tokens(self, rows: Tensor, local: Tensor) -> Tensor:
        """Return this rank's part of the token axis: the first axis with as many elements as a sequence has tokens.
        Return `rows` unchanged if there is no such axis, or if sequences are not divided."""
        if self._part is None:
            return rows
        axis = next((dim for dim in range(1, rows.dim()) if rows.shape[dim] == self._seq_len), None)
        return rows if axis is None else self._part.of(rows, axis)
