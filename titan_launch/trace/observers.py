"""Observers of a traced step: the current point of the step, and collectives of model parallelism."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from fractions import Fraction
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from titan_launch.config.axes import MODEL_AXES, Axis
from titan_launch.distributed.mesh import Mesh
from titan_launch.metrics.memory import OP_DEVICE, is_in_backward
from titan_launch.metrics.traffic import TrafficCount
from titan_launch.models.blocks import has_forward
from titan_launch.plan.communication import Exchange, Traffic
from titan_launch.plan.memory.ledger import Ledger, StepPoint
from titan_launch.plan.types import Inventory, full_name, outermost, outward, parent
from titan_launch.precision.observation import floating_tensors


class StepPoints:
    """Hooks that set the current step point of a ledger.

    The forward of a module begins before FSDP2 all-gathers its parameters. The backward of a module begins when the
    gradient of its output exists. The phase "loss" lasts until the backward of the first module begins, so it
    includes the backward of the loss.
    """

    def __init__(self, ledger: Ledger):
        self._ledger = ledger
        self._counts: dict[nn.Module, int] = {}
        self._inside: str | None = None
        self.microbatch = 0

    def begin_microbatch(self, index: int) -> None:
        """Enter the forward of microbatch `index`. The step points that follow belong to this microbatch."""
        self.microbatch = index
        self._enter("forward", "")

    @contextmanager
    def watch(self, model: nn.Module, paths: Sequence[str], has_loss: bool = True) -> Iterator[None]:
        """Observe the modules at `paths` and the model until the `with` block ends.

        `has_loss`: True if a loss follows the model's forward.
        """
        with ExitStack() as hooks:
            hooks.callback(model.register_forward_pre_hook(self._begin_next, prepend=True).remove)
            for path in paths:
                module = model.get_submodule(path)
                hooks.callback(module.register_forward_pre_hook(partial(self._begin, path), prepend=True).remove)
                hooks.callback(module.register_forward_hook(partial(self._end, path), prepend=True).remove)
            if has_loss:
                hooks.callback(model.register_forward_hook(self._begin_loss).remove)
            yield

    def _enter(self, phase: str, unit: str) -> None:
        self._ledger.enter(StepPoint(self.microbatch, phase, unit))

    def _begin_next(self, model: nn.Module, _: Any) -> None:
        """Begin the next microbatch of a model or of a pipeline stage. A forward without gradients begins no
        microbatch: it belongs to the same microbatch as the next forward with gradients."""
        if not torch.is_grad_enabled():
            return
        index = self._counts.get(model, 0)
        self._counts[model] = index + 1
        self.begin_microbatch(index)

    def _begin_loss(self, *_: Any) -> None:
        if torch.is_grad_enabled():
            self._enter("loss", "")

    def _begin(self, path: str, *_: Any) -> None:
        """Begin the forward of a module. Do nothing if the module runs inside another observed module, or in backward.

        Example of the first case: a rotary embedding that the model owns, and that its blocks call.
        """
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


def modules_in_order(model: nn.Module, inventory: Inventory) -> list[str]:
    """Return the paths of the outermost blocks, and of all other outermost modules with a forward that contain no
    block.

    A forward runs these modules one after another. Modules of other pipeline stages are omitted.
    """
    blocks = set(outermost(inventory.blocks))
    around_blocks = {path for block in blocks for path in outward(parent(block))}

    def inside(module: nn.Module, path: str) -> Iterator[str]:
        for name, child in module.named_children():
            child_path = full_name(path, name)
            if child_path in around_blocks or (child_path not in blocks and not has_forward(child)):
                yield from inside(child, child_path)
            else:
                yield child_path

    return [path for path in inside(model, "") if path in inventory.by_path]


_SENT_SHARE: dict[str, Callable[[int], Fraction]] = {
    "all_reduce": lambda n: Fraction(2 * (n - 1), n),
    "all_gather_into_tensor": lambda n: Fraction(n - 1),
    "reduce_scatter_tensor": lambda n: Fraction(n - 1, n),
    "all_to_all_single": lambda n: Fraction(n - 1, n),
    "broadcast": lambda n: Fraction(1),
    "send": lambda n: Fraction(1),
}
"""Bytes that each of n ranks sends, divided by the bytes of its input, as a function of n. The keys are functional
collectives and point-to-point operations."""

_IN_PLACE = {
    "allreduce_": ("all_reduce", 0),
    "_allgather_base_": ("all_gather_into_tensor", 1),
    "allgather_": ("all_gather_into_tensor", 1),
    "_reduce_scatter_base_": ("reduce_scatter_tensor", 1),
    "reduce_scatter_": ("reduce_scatter_tensor", 1),
    "alltoall_base_": ("all_to_all_single", 1),
    "alltoall_": ("all_to_all_single", 1),
    "broadcast_": ("broadcast", 0),
    "send": ("send", 0),
}
"""(key of `_SENT_SHARE`, index of the input argument), by operation of a process group."""

_OF_FSDP = ("_allgather_base_", "_reduce_scatter_base_")
"""The operations by which FSDP2 all-gathers and reduce-scatters. Ring attention and experts use functional
collectives."""

_SENDS_NOTHING = ("recv_", "barrier", "wait_tensor", "_wrap_tensor_autograd")


class ExchangesCounted(TorchDispatchMode):
    """A dispatch mode that counts collectives, both functional ones and those of a process group."""

    def __init__(self, mesh: Mesh, count: TrafficCount):
        """Add to `count` the traffic of this rank along the axes of model parallelism.

        The bytes are those of ring algorithms (see `plan.communication`). Collectives over other groups do not count.
        """
        super().__init__()
        self._axes: dict[str, tuple[Axis, int]] = {
            ranks.get_group().group_name: (axis, ranks.size()) for axis in MODEL_AXES if (ranks := mesh.along(axis))
        }
        self._count = count

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:  # DTensor dispatches again with local tensors
            return NotImplemented
        if func is OP_DEVICE:
            return args[0].device
        if func.namespace in ("c10d", "_c10d_functional"):
            name = func.overloadpacket.__name__
            if name == "wait_tensor" and isinstance(args[0], FakeTensor):
                return args[0]  # a run returns this tensor; the operation would return a new fake tensor
            self._see(name, args)
        return func(*args, **(kwargs or {}))

    def _see(self, operation: str, args: Sequence[Any]) -> None:
        if operation in _SENDS_NOTHING or (group := _group_of(args)) not in self._axes:
            return
        axis, size = self._axes[group]
        name, index = _IN_PLACE.get(operation, (operation, 0))
        # FSDP2's group may have the same ranks as the axis, but FSDP2's collectives do not count here.
        if axis.is_within_shards and operation in _OF_FSDP:
            return
        if name not in _SENT_SHARE:
            reason = f"a trace cannot count the bytes that {operation} sends along the {axis.name} axis"
            raise NotImplementedError(f"{reason}; use one of these collectives: {', '.join(_SENT_SHARE)}")
        sent = _num_bytes(args[index]) * _SENT_SHARE[name](size)
        counted: dict[str, Any] = {axis.name: Exchange(1, round(sent))}
        self._count.add(Traffic(**counted))


def _group_of(args: Sequence[Any]) -> str:
    """Return the name of a collective's group. In a functional collective, the name is the last argument of type
    `str`. Other collectives have the group itself as an argument."""
    names = [arg for arg in args if isinstance(arg, str)]
    if names:
        return names[-1]
    group = next(arg for arg in args if isinstance(arg, torch.ScriptObject))  # a second object is the reduce operation
    name: str = dist.ProcessGroup.unbox(group).group_name
    return name


def _num_bytes(given: Tensor | Sequence[Any]) -> int:
    return given.nbytes if isinstance(given, Tensor) else sum(map(_num_bytes, given))
