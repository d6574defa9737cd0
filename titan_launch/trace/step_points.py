"""Where a step is: told to a ledger by hooks on the modules that run one after the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from titan_launch.metrics.memory import is_in_backward
from titan_launch.models.inventory import has_forward
from titan_launch.plan.memory.ledger import Ledger, StepPoint
from titan_launch.plan.types import Inventory, full_name, outermost, parent
from titan_launch.precision.observation import floating_tensors


class StepPoints:
    """Enters a ledger's places. Forward reaches a module before FSDP2 gathers its parameters, backward when the
    gradient of its output is there; the loss lasts until then, its own backward included."""

    def __init__(self, ledger: Ledger):
        self._ledger = ledger
        self._counts: dict[nn.Module, int] = {}
        self._inside: str | None = None
        self.microbatch = 0
        """The one that is gone through."""

    def begin_microbatch(self, index: int) -> None:
        """What comes now belongs to this microbatch."""
        self.microbatch = index
        self._enter("forward", "")

    @contextmanager
    def watch(self, model: nn.Module, paths: Sequence[str], has_loss: bool = True) -> Iterator[None]:
        """Follow the modules at `paths`, and the model, until the end of the block. `has_loss`: whether a loss follows
        its forward."""
        with ExitStack() as hooks:
            hooks.callback(model.register_forward_pre_hook(self._begin_next, prepend=True).remove)
            for path in paths:
                module = model.get_submodule(path)
                hooks.callback(module.register_forward_pre_hook(partial(self._begin, path), prepend=True).remove)
                hooks.callback(module.register_forward_hook(partial(self._end, path), prepend=True).remove)
            if has_loss:
                hooks.callback(model.register_forward_hook(lambda *_: self._enter("loss", "")).remove)
            yield

    def _enter(self, phase: str, unit: str) -> None:
        self._ledger.enter(StepPoint(self.microbatch, phase, unit))

    def _begin_next(self, model: nn.Module, _: Any) -> None:
        """A model, or a stage of a pipeline, goes through the microbatches one after the other."""
        index = self._counts.get(model, 0)
        self._counts[model] = index + 1
        self.begin_microbatch(index)

    def _begin(self, path: str, *_: Any) -> None:
        """Not of what runs inside another, such as a rotary embedding that the model owns and its blocks call."""
        if self._inside is None and not is_in_backward():
            self._inside = path
            self._enter("forward", path)

    def _end(self, path: str, module: nn.Module, args: Any, output: Any) -> None:
        if self._inside != path or is_in_backward():
            return
        self._inside = None
        for tensor in floating_tensors(output):
            if tensor.requires_grad:
                tensor.register_hook(partial(self._begin_backward, path, self.microbatch))

    def _begin_backward(self, path: str, microbatch: int, gradient: Tensor) -> None:
        self.microbatch = microbatch
        self._enter("backward", path)


def stations(model: nn.Module, inventory: Inventory) -> list[str]:
    """Paths of the modules that a forward goes through one after the other: the blocks, and beside them the outermost
    modules that hold no block. What of the model is elsewhere (on other stages of a pipeline) is left out."""
    blocks = outermost(inventory.blocks)
    found: list[str] = []
    _collect(model, "", set(blocks), {around for block in blocks for around in _ancestors(block)}, found)
    return [path for path in found if path in inventory.by_path]


def _collect(module: nn.Module, path: str, blocks: set[str], around: set[str], found: list[str]) -> None:
    for name, child in module.named_children():
        child_path = full_name(path, name)
        if child_path in around or (child_path not in blocks and not has_forward(child)):
            _collect(child, child_path, blocks, around, found)
        else:
            found.append(child_path)


def _ancestors(path: str) -> Iterator[str]:
    while path := parent(path):
        yield path
