"""FSDP2's units around the operations of a known model: the hooks of `plan.memory.fsdp`, with casts and autograd. No
torch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from titan_launch.plan.memory.analytic.autograd import Autograd
from titan_launch.plan.memory.analytic.ops import cast
from titan_launch.plan.memory.analytic.tensors import Leaf, Tensor
from titan_launch.plan.memory.fsdp import Context, Parameter, ShardedUnit, State
from titan_launch.plan.types import Policy, TensorInfo, Unit


def cast_input(autograd: Autograd, x: Tensor, policy: Policy) -> Tensor:
    """Return the input of a module, cast by the policy at its border."""
    return x if policy.input_dtype is None else cast(autograd, x, policy.input_dtype)


def cast_output(autograd: Autograd, output: Tensor, policy: Policy) -> Tensor:
    """Return the output of a module, cast by the policy at its border."""
    return output if policy.output_dtype is None else cast(autograd, output, policy.output_dtype)


class CalledUnit(ShardedUnit):
    """A unit whose hooks the replayed modules call."""

    def __init__(
        self,
        context: Context,
        autograd: Autograd,
        unit: Unit,
        casts_inputs: bool,
        parameters: Sequence[tuple[TensorInfo, Unit, bool]],
    ):
        """`casts_inputs`: result of `ModelPlan.casts_inputs`. `parameters`: each with its entry in `ModelPlan.unit_of`,
        and with the result of `Layout.is_ignored`."""
        super().__init__(context, unit, parameters)
        self._autograd = autograd
        self._casts_inputs = casts_inputs
        self._modules_to_run: set[str] = set()
        self.tensors = [self._tensor(weight) for weight in self.weights]
        """The tensors that operations take, one for each of `weights`. The unit counts their memory."""

    def _tensor(self, weight: Parameter) -> Tensor:
        leaf = None
        if weight.is_trained:
            index = self.parameters.index(weight)
            leaf = Leaf(partial(self._take, index), partial(self.grad_dtype, index))
        return Tensor(None, weight.numel, weight.computed, leaf)

    def _take(self, index: int, gradient: Tensor) -> None:
        assert gradient.storage is not None
        gradient.storage.dtype = gradient.dtype
        self.accumulate(index, gradient.storage)

    def enter(self, x: Tensor) -> Tensor:
        """Begin the forward of a module of the unit. Return its input, cast as FSDP2 casts it."""
        if not self._modules_to_run:
            self._modules_to_run.update(self.unit.modules)
        self.pre_forward()
        if self._casts_inputs:
            x = cast_input(self._autograd, x, self.unit.policy)
        if self.state is State.PRE_BACKWARD or not self.parameters:
            return x
        is_entering = self.group_state is not State.FORWARD
        self.unshard_in_forward()
        self.prefetch_in_forward()
        return self._with_post_backward(x) if is_entering and x.node is not None else x

    def leave(self, path: str, output: Tensor) -> Tensor:
        """End the forward of a module of the unit. Return its output, cast to the unit's output dtype."""
        self._modules_to_run.discard(path)
        if not self._modules_to_run and self.state is not State.PRE_BACKWARD:
            self.post_forward(in_backward=self._autograd.is_backward)
            if output.node is not None:
                output.node.hooks.append(self.pre_backward)
        return cast_output(self._autograd, output, self.unit.policy)

    def _with_post_backward(self, x: Tensor) -> Tensor:
        """Return the input with a node that ends the unit's backward, like FSDP2's `RegisterPostBackwardFunction`."""

        def backward(gradient: list[Tensor], saved: Sequence[Tensor]) -> Sequence[Tensor | None]:
            self.post_backward()
            return (gradient.pop(),)

        return self._autograd.record(Tensor(x.storage, x.numel, x.dtype), (x,), backward)

    def finalize_backward(self) -> None:
        """End a backward, also if the second forward of a block has run only a part of the unit's modules."""
        super().finalize_backward()
        self._modules_to_run.clear()
