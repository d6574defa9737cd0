"""The balance of the experts' load: auxiliary losses, selection biases, metrics, and a check that both forwards of
activation checkpointing choose the same experts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from titan_launch.config.axes import CONTEXT
from titan_launch.core.errors import listed
from titan_launch.distributed.collectives import warn
from titan_launch.distributed.dtensor import local_tensor
from titan_launch.distributed.mesh import Mesh
from titan_launch.models.decoder.mixture_of_experts import ContextGroup, MixtureOfExperts
from titan_launch.parallel.activation_checkpoint import current_forward
from titan_launch.plan.experts import is_grouped
from titan_launch.plan.types import ModelPlan

_log = logging.getLogger(__name__)

UNUSED = 0.01
"""An expert counts as unused if its load is below this fraction of the mean load of its layer."""

_MIN_MEAN_LOAD = 20
"""Smallest mean load at which an expert can count as unused. At this mean load, an expert that is chosen with the mean
probability has a load of 0 only with probability e^-20."""


def prepare_experts(model: nn.Module, plan: ModelPlan, mesh: Mesh, device: str) -> None:
    """Prepare all mixtures of experts in place. Set the scale of their auxiliary losses and, with context parallelism,
    the group of ranks that divide the sequences. Nothing is communicated. `device`: type of the device that will run
    the model.

    Log a warning for settings that make routing imprecise, or the products of experts slow.

    The losses of all ranks and microbatches of a step add up to means over the step's samples. Ranks with the same
    tokens compute the same losses, and the router's gradients are summed over these ranks. So the scale is divided by
    the number of ranks that have the same tokens. With context parallelism, each rank computes the part of these losses
    that its own tokens contribute.
    """
    layers, layout, context = _layers(model), mesh.layout, mesh.along(CONTEXT)
    for layer in layers.values():
        layer.loss_scale = 1 / (layout.global_batch_size * layout.token_copies)
        if context is not None:
            layer.context_group = ContextGroup(context.get_group().group_name, context.size())
    routers = [f"{path}.router" for path, layer in layers.items() if layer.args.score == "sigmoid"]
    reduced = [path for path in routers if _logits_dtype(plan, path) == "bfloat16"]
    if reduced:
        warn(
            _log,
            "router precision: the logits of %s are bfloat16. A bfloat16 has 8 significant bits, so close logits "
            "become equal, and rounding decides which experts are chosen. Add a rule to "
            '[[precision.rules]] with match = "**.router", param_dtype = "float32" and output_dtype = "float32"',
            listed(reduced),
        )
    if device == "cuda":
        _warn_of_slow_products(layers, plan)


def _warn_of_slow_products(layers: Mapping[str, MixtureOfExperts], plan: ModelPlan) -> None:
    """Log a warning if the widths of experts on this rank, or the LoRA ranks of adapters, prevent grouped products on
    GPUs."""
    slow: dict[str, tuple[int, int]] = {}
    odd: list[str] = []
    for path, layer in layers.items():
        _, hidden, width = local_tensor(layer.experts.w1).shape
        is_bf16 = plan.unit_of[f"{path}.experts"].compute_dtype == "bfloat16"
        if is_bf16 and not is_grouped("cuda", "bfloat16", (width, hidden)):
            slow[path] = (width, hidden)
        shapes = [adapter.get_parameter("a").shape[1:] for adapter in (layer.experts.lora or {}).values()]
        if is_bf16 and not all(is_grouped("cuda", "bfloat16", shape) for shape in shapes):
            odd.append(path)
    if slow:
        path, (width, hidden) = next(iter(slow.items()))
        warn(
            _log,
            "products of experts: grouped products in bfloat16 require widths that are multiples of 8, but a rank has "
            "the widths %d and %d in %s. The experts of %s are computed one after another, which is slower. Change "
            "model.args.experts.hidden_dim, the width of the model or parallelism.tensor_parallel_degree",
            width,
            hidden,
            path,
            listed(list(slow)),
        )
    if odd:
        warn(
            _log,
            "products of adapters: grouped products in bfloat16 require that the LoRA rank and the widths of the "
            "experts are multiples of 8. The adapters of the experts of %s are computed one after another, which is "
            "slower. Change lora.rank or these widths",
            listed(odd),
        )


def _logits_dtype(plan: ModelPlan, router: str) -> str:
    """Return the dtype of a router's logits when the experts are chosen. `router`: path of the router."""
    unit = plan.unit_of[router]
    returned = unit.policy.output_dtype if router in unit.modules else None
    return returned or unit.compute_dtype


class ExpertBalance:
    """The loads of all mixtures of experts of this rank, and the selection biases that balance them.

    In training, each layer counts in its buffer `load` how many tokens chose each expert, over the microbatches of a
    step. At the end of a step, `end_step` adds the loads to a window, which covers the steps since the last report.
    Then the step calls `reset`, which sets the loads to 0.

    Selection biases move if a layer's `selection_bias_rate` is above 0. The loads of each step are then summed over all
    ranks that have different tokens, by one all-reduce for all layers. Otherwise, only the loads of the window are
    summed over these ranks, when the window is read.
    """

    def __init__(self, model: nn.Module, group: dist.ProcessGroup | None, device: torch.device):
        """`group`: the ranks that have different tokens and the same parameters; None for all ranks."""
        self._group = group
        self._layers = _layers(model)
        args = [layer.args for layer in self._layers.values()]
        self._sizes = [arg.num_experts for arg in args]
        self._num_experts = torch.tensor(self._sizes, dtype=torch.float64, device=device)[:, None]
        rates = [arg.selection_bias_rate or 0.0 for arg in args]
        self._rates = torch.tensor(rates, dtype=torch.float64, device=device)[:, None]
        self._moves = any(rates)
        columns = max(self._sizes, default=1)  # without layers, there are no rows, and `amax` needs a column
        self._window = torch.zeros(len(args), columns, dtype=torch.float64, device=device)
        """Sum of the loads: of all ranks if biases move, else of this rank. It has a row for each layer; the rows of
        layers with fewer experts end in zeros."""

        self._losses = torch.zeros(2, dtype=torch.float64, device=device)
        """Sums of the auxiliary losses of this rank's layers in the window: balance losses, then z-losses."""

        self._num_steps = torch.zeros((), dtype=torch.float64, device=device)
        """Number of steps in the window that were not skipped."""

        self._collapsed: set[str] = set()
        """Layers that have collapsed since the run began."""

    @torch.no_grad()
    def end_step(self, is_skipped: Tensor) -> None:
        """Move the selection biases and add the loads to the window. If `is_skipped`, a scalar on the device, is not 0,
        change nothing. Collective over the group if biases move. The host does not wait for the device.

        The bias of an expert moves by `selection_bias_rate` times the sign of (mean load - load). The load covers all
        tokens of the step (arXiv:2408.15664).
        """
        layers, is_trained = list(self._layers.values()), is_skipped == 0
        if not layers:
            return
        loads = [layer.load.double() for layer in layers]
        load = torch.stack(loads) if len(set(self._sizes)) == 1 else pad_sequence(loads, batch_first=True)
        if self._moves:
            dist.all_reduce(load, group=self._group)
            above = load.sum(1, keepdim=True) - load * self._num_experts  # whole numbers: the sign is exact
            moves = torch.where(is_trained, self._rates * torch.sign(above), 0.0).float().unbind()
            balanced = [(m.selection_bias, move) for m, move in zip(layers, moves, strict=True)]
            pairs = [(bias, move[: len(bias)]) for bias, move in balanced if bias is not None]
            torch._foreach_add_([bias for bias, _ in pairs], [move for _, move in pairs])
        losses = torch.stack([layer.auxiliary_losses for layer in layers]).double().sum(0)
        self._window += torch.where(is_trained, load, 0.0)
        self._losses += torch.where(is_trained, losses, 0.0)
        self._num_steps += is_trained

    def reset(self) -> None:
        """Set the loads and the auxiliary losses of the current step to 0."""
        buffers = [buffer for layer in self._layers.values() for buffer in (layer.load, layer.auxiliary_losses)]
        if buffers:
            torch._foreach_zero_(buffers)

    def restart_window(self) -> None:
        """Drop all steps since the last report, and start the next window."""
        for tensor in (self._window, self._losses, self._num_steps):
            tensor.zero_()

    @torch.no_grad()
    def take(self, layers: Sequence[str]) -> dict[str, Tensor]:
        """Return this rank's part of the metrics `experts/*` by tag, and start the next window.

        `layers`: paths of all mixtures of experts of the model. Layers of other pipeline ranks have the value 0.
        Collective over the group if no bias moves. The host does not wait for the device. If all steps of the window
        were skipped, the metrics are 0.
        """
        load = self._window.clone()
        if self._layers and not self._moves:
            dist.all_reduce(load, group=self._group)
        losses = self._losses / self._num_steps.clamp(min=1)
        values = {"experts/balance_loss": losses[0], "experts/z_loss": losses[1]}
        zero = torch.zeros_like(self._num_steps)
        for name, of_layers in self._statistics(load).items():
            own = dict(zip(self._layers, of_layers.unbind(), strict=True))
            values |= {f"experts/{name}/{path}": own.get(path, zero) for path in layers}
        self.restart_window()
        return values

    def newly_collapsed(self, reported: Mapping[str, float]) -> dict[str, tuple[float, float]]:
        """Return, by path, the layers that have collapsed for the first time, each with (fraction of unused experts,
        largest load divided by mean load). A layer has collapsed if more than half of its experts are unused.
        `reported`: metrics by tag, over all ranks."""
        found = {}
        for tag, unused in reported.items():
            path = tag.removeprefix("experts/unused/")
            if path != tag and path not in self._collapsed and unused > 0.5:
                found[path] = (unused, reported[f"experts/load_max_over_mean/{path}"])
        self._collapsed |= found.keys()
        return found

    def _statistics(self, load: Tensor) -> dict[str, Tensor]:
        """Return statistics of each layer's row in `load`: float64 tensors of shape (layers), by name of the metric."""
        total, number = load.sum(1, keepdim=True).clamp(min=1), self._num_experts
        mean = total / number
        exists = torch.arange(load.shape[1], device=load.device) < number
        return {
            "load_max_over_mean": (load / mean).amax(1),
            "entropy": (torch.special.entr(load / total) / number.clamp(min=2).log()).sum(1),
            "unused": ((load < UNUSED * mean) & exists & (mean >= _MIN_MEAN_LOAD)).sum(1) / number[:, 0],
        }


def describe_collapse(step: int, collapsed: Mapping[str, tuple[float, float]]) -> str:
    """Return the text of a warning about layers that have collapsed. `collapsed`: result of
    `ExpertBalance.newly_collapsed`, not empty."""
    path, (unused, largest) = max(collapsed.items(), key=lambda item: item[1])
    others = f" (and {len(collapsed) - 1} more)" if len(collapsed) > 1 else ""
    return (
        f"step {step}: the load of the experts of {path}{others} has collapsed: {unused:.0%} of the experts got less "
        f"than {UNUSED:.0%} of the mean load since the last report, and the largest load is {largest:.1f} times the "
        "mean. Set or increase model.args.experts.balance_loss or selection_bias_rate, or decrease optimizer.lr; "
        "set model.args.experts.z_loss if the logits of the router grow"
    )


def _layers(model: nn.Module) -> dict[str, MixtureOfExperts]:
    return {path: module for path, module in model.named_modules() if isinstance(module, MixtureOfExperts)}


@contextmanager
def choices_watched(model: nn.Module) -> Iterator[Callable[[], list[str]]]:
    """Watch whether both forwards of activation checkpointing choose the same experts, until the `with` block ends.

    Yield a function that returns a line for each layer whose second forward chose other experts than the first. The
    function waits for the device.
    """
    digests: dict[str, dict[object, list[Tensor]]] = {}

    def watch(path: str, layer: MixtureOfExperts) -> Callable[..., None]:
        calls = digests.setdefault(path, {})

        def note(_: nn.Module, args: tuple[Any, ...]) -> None:
            call = current_forward.get()
            if call is not None:
                calls.setdefault(call, []).append(_digest(args[1]))

        return note

    def differing() -> list[str]:
        calls = [pair for of_layer in digests.values() for pair in of_layer.values() if len(pair) == 2]
        if not calls:
            return []
        rows = iter(torch.stack([torch.stack(pair) for pair in calls]).tolist())
        lines = []
        for path, of_layer in digests.items():
            pairs = [next(rows) for pair in of_layer.values() if len(pair) == 2]
            wrong = sum(first != second for first, second in pairs)
            if wrong:
                lines.append(
                    f"{path}: in {wrong} of {len(pairs)} microbatches, the second forward of activation checkpointing "
                    "chose other experts than the first, so the gradients are wrong; compute the choice only from "
                    'inputs and parameters, or set activation_checkpoint.mode = "none"'
                )
        return lines

    with ExitStack() as hooks:
        for path, layer in _layers(model).items():
            hooks.callback(layer.experts.register_forward_pre_hook(watch(path, layer)).remove)
        yield differing


def _digest(chosen: Tensor) -> Tensor:
    """Return a hash of expert numbers and of their positions: int64, without waiting for the device."""
    places = torch.arange(1, chosen.numel() + 1, device=chosen.device) * 0x9E3779B97F4A7C1  # products wrap around
    places = (places ^ (places >> 29)) * 0x3F58476D1CE4E5B9
    return ((chosen.flatten() + 1) * (places ^ (places >> 32))).sum()
