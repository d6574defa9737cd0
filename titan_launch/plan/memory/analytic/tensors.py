"""Tensors without values: their memory, and the graph that autograd would record. No torch.

A storage reports its allocation and its free to the ledger. Like a storage of PyTorch, it is freed with the last
reference to it: local variables and the graph of autograd keep tensors alive here as in PyTorch. (This relies on
CPython's reference counts, as the memory of a PyTorch program does.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf

from titan_launch.plan.memory.fsdp import Storage


class Tensor:
    """A tensor without values. Views share a storage. `node` is the autograd node that made the tensor; None: the
    tensor takes no gradient."""

    __slots__ = ("dtype", "node", "numel", "storage")

    def __init__(self, storage: Storage | None, numel: int, dtype: str, node: Node | None = None):
        self.storage = storage
        """None if the memory is counted elsewhere, as for unsharded parameters, or is too small to count."""
        self.numel = numel
        self.dtype = dtype
        self.node = node

    def detached(self) -> Tensor:
        """Return a tensor with the same storage outside of the graph."""
        return Tensor(self.storage, self.numel, self.dtype)


Backward = Callable[[list[Tensor], Sequence[Tensor]], Sequence["Tensor | None"]]
"""Computes the gradients of a node's inputs from the gradient of its output and its saved tensors. The output's
gradient is in a list: a node of several operations removes it from the list to free it early."""


Saved = Callable[[], Sequence[Tensor]]
"""Returns the tensors that forward saved. The first call may run the forward of a checkpointed block again."""


class Node:
    """An operation of backward. A node is ready when all its gradients have arrived. Of the nodes that are ready, the
    newest runs first."""

    __slots__ = ("backward", "hooks", "inputs", "saved", "sequence")

    def __init__(self, sequence: float, inputs: Sequence[Node | None], backward: Backward | None):
        self.sequence = sequence
        self.inputs = inputs
        self.backward = backward
        self.saved: Saved | None = None
        self.hooks: list[Callable[[], None]] = []
        """Hooks on the tensor that the node made. They run before the node, with the complete gradient."""


class Leaf(Node):
    """The node of a parameter. It takes the gradient at once, before any other node runs."""

    __slots__ = ("accumulate", "grad_dtype")

    def __init__(self, accumulate: Callable[[Tensor], None], grad_dtype: Callable[[str], str]):
        super().__init__(inf, (), None)
        self.accumulate = accumulate
        self.grad_dtype = grad_dtype
        """Returns the dtype to which a gradient is converted before it is accumulated, given the gradient's dtype."""
