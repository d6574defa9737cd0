"""Measurements of single modules: norms of gradients, parameters and updates, and root mean squares of outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titan_launch.core.observer import Observer, StepResult, WatchedStep
from titan_launch.distributed.dtensor import local_tensor, number_of_copies
from titan_launch.metrics.memory import is_in_backward
from titan_launch.plan.layout import Layout
from titan_launch.plan.types import is_within

_NORMS = ("learned/grad_norm", "learned/param_norm", "learned/update_norm")
_OUTPUTS = ("activations/rms", "activations/underflow", "activations/overflow")


class Learned(Observer):
    """An observer that measures single modules in each reported step, without waiting for the device."""

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        paths: Sequence[str],
        groups: Mapping[str, Sequence[str]] | None,
        device: torch.device,
        stack: ExitStack,
        layout: Layout,
    ):
        """`modules`: this rank's modules by path; the path of the root is "". `paths`: paths of the modules, on any
        pipeline rank, that are measured one by one. `groups`: for each group name, the paths of modules whose outputs
        are measured together; None if no outputs are measured. Closing `stack` removes all hooks.

        If the optimizer is sharded over replicas, each replica has all parameters, but only a part of each gradient. So
        sums over ranks count parameters and updates once per replica, and are divided by the number of replicas.
        """
        self._paths = paths
        named = [
            (name, p) for name, p in modules[""].named_parameters() if any(is_within(name, path) for path in paths)
        ]
        self._parameters = [parameter for _, parameter in named]
        copies = [number_of_copies(parameter, layout.fsdp_replicas) for parameter in self._parameters]
        self._shares = torch.tensor([1 / number for number in copies], device=device)
        self._replicas = layout.optimizer_replicas
        pairs = [(i, j) for i, (name, _) in enumerate(named) for j, path in enumerate(paths) if is_within(name, path)]
        self._members, self._owners = torch.tensor(pairs, dtype=torch.int64, device=device).reshape(-1, 2).unbind(1)
        self._norms = torch.zeros(len(_NORMS), len(paths), device=device)
        self._before: list[Tensor] = []
        self._is_measured, self._is_on = False, False
        outputs = {} if groups is None else {**{path: [path] for path in paths}, **groups}
        self._names = [*outputs]
        self._outputs = torch.zeros(len(self._names), 1 + len(_OUTPUTS), device=device)
        for index, members in enumerate(outputs.values()):
            for path in members:
                if path in modules:  # otherwise another pipeline rank has the module
                    hook = modules[path].register_forward_hook(partial(self._add_outputs, index))
                    stack.callback(hook.remove)

    def before_step(self, step: WatchedStep) -> None:
        self._is_measured = self._is_on = step.is_reported
        if self._is_on:
            self._outputs.zero_()

    @torch.no_grad()
    def before_update(self) -> None:
        """Measure gradients and parameters. Copies of the parameters are kept until the end of the step."""
        if not self._is_on:
            return
        values = self._locals()
        gradients = [torch.zeros((), device=p.device) if p.grad is None else p.grad for p in self._parameters]
        gradients = [local_tensor(gradient).float() for gradient in gradients]
        self._norms[0], self._norms[1] = self._squares(gradients), self._squares(values) / self._replicas
        self._before = values

    def after_step(self, step: WatchedStep, result: StepResult) -> None:
        if self._before:
            torch._foreach_sub_(self._before, self._locals())
            self._norms[2] = self._squares(self._before) / self._replicas
        self._is_on, self._before = False, []

    def abandon_step(self, error: BaseException) -> None:
        """Drop the copies of the parameters, and stop measuring the step."""
        self._is_on, self._before = False, []

    def _locals(self) -> list[Tensor]:
        """Return copies in fp32 of this rank's parts of the parameters."""
        return [local_tensor(p).detach().to(torch.float32, copy=True) for p in self._parameters]

    def _squares(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the sum of squares of each module's tensors. `tensors`: one for each parameter. If several ranks have
        copies of a tensor, the sum over ranks counts only one copy."""
        sums = self._norms.new_zeros(len(self._paths))
        if not tensors:
            return sums
        norms = torch.stack(torch._foreach_norm(list(tensors))).to(sums.device)
        return sums.index_add_(0, self._owners, (norms.square() * self._shares)[self._members])

    def _add_outputs(self, index: int, module: nn.Module, args: Any, output: Any) -> None:
        """Add the outputs of a forward to the sums of the module or group with the number `index`."""
        if not self._is_on or not torch.is_grad_enabled() or is_in_backward():
            return  # a loss may run the model without gradients, and activation checkpointing runs forwards again
        limits = torch.finfo(torch.bfloat16)
        for tensor in output if isinstance(output, (tuple, list)) else [output]:
            if isinstance(tensor, Tensor) and tensor.is_floating_point():
                x = local_tensor(tensor).detach().float()
                size = x.abs()
                self._outputs[index, 0] += x.numel()
                self._outputs[index, 1] += x.square().sum()
                self._outputs[index, 2] += ((size < limits.tiny) & (size > 0)).sum()
                self._outputs[index, 3] += (~(size <= limits.max)).sum()

    def take_metrics(self) -> dict[str, Tensor]:
        """Return the measurements of the last step by tag, the same on all ranks. The dict is empty if the step was not
        measured. Collective."""
        if not self._is_measured:
            return {}
        together = torch.cat([self._norms.flatten(), self._outputs.flatten()])
        if dist.is_initialized():
            dist.all_reduce(together)
        squares, outputs = together.split([self._norms.numel(), self._outputs.numel()])
        norms = squares.view_as(self._norms).sqrt()
        values = {f"{kind}/{path}": norms[i, j] for i, kind in enumerate(_NORMS) for j, path in enumerate(self._paths)}
        values |= {f"learned/update_ratio/{path}": norms[2, j] / norms[1, j] for j, path in enumerate(self._paths)}
        for name, (count, total, below, above) in zip(
            self._names, outputs.view_as(self._outputs).unbind(), strict=True
        ):
            found = ((total / count).sqrt(), below / count, above / count)
            values |= {f"{kind}/{name}": value for kind, value in zip(_OUTPUTS, found, strict=True)}
        return values
