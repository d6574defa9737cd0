"""Tensors without numbers: their memory, and the graph that autograd would record of them. No torch.

A storage tells the ledger of its birth and of its death. Like PyTorch's it dies with the last reference to it, so what
Python's locals and autograd's graph keep alive there is kept alive here by the same means. (This relies on CPython's
reference counts, as the memory of a PyTorch program does.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf

from titan_launch.plan.memory.ledger import Category, Ledger


class Storage:
    """Bytes that are live as long as somebody holds this object."""

    __slots__ = ("_category", "_ledger", "_num_bytes")

    def __init__(self, ledger: Ledger, num_bytes: int, category: Category):
        self._ledger = ledger
        self._num_bytes = num_bytes
        self._category = category
        ledger.allocate(num_bytes, category)

    def __del__(self) -> None:
        self._ledger.free(self._num_bytes, self._category)

    def relabel(self, category: Category) -> None:
        """Count it as something else from now on."""
        self._ledger.move(self._num_bytes, self._category, category)
        self._category = category


class Tensor:
    """A storage, or a view of one, and the node of the graph that made it (None: it takes no gradient)."""

    __slots__ = ("dtype", "node", "numel", "storage")

    def __init__(self, storage: Storage | None, numel: int, dtype: str, node: Node | None = None):
        self.storage = storage
        """None for what is counted elsewhere: gathered parameters, and numbers too small to count."""
        self.numel = numel
        self.dtype = dtype
        self.node = node

    def detached(self) -> Tensor:
        """The same memory outside of the graph."""
        return Tensor(self.storage, self.numel, self.dtype)


Backward = Callable[[list[Tensor], Sequence[Tensor]], Sequence["Tensor | None"]]
"""From the gradient of a node's output and its saved tensors to the gradients of its inputs. The gradient comes in a
list, so that a node of several steps can take it out and free it half-way."""


Saved = Callable[[], Sequence[Tensor]]
"""Gives what forward has saved; the first call may compute a block again."""


class Node:
    """One step of backward. Nodes run as soon as all their gradients are there, the youngest first."""

    __slots__ = ("backward", "hooks", "inputs", "saved", "sequence")

    def __init__(self, sequence: float, inputs: Sequence[Node | None], backward: Backward | None):
        self.sequence = sequence
        self.inputs = inputs
        self.backward = backward
        self.saved: Saved | None = None
        self.hooks: list[Callable[[], None]] = []
        """What runs before the node, with its gradient complete: hooks on the tensor that it made."""


class Leaf(Node):
    """The end of a path through the graph, at a parameter: it takes the gradient at once, before any other node."""

    __slots__ = ("accumulate", "grad_dtype")

    def __init__(self, accumulate: Callable[[Tensor], None], grad_dtype: Callable[[str], str]):
        super().__init__(inf, (), None)
        self.accumulate = accumulate
        self.grad_dtype = grad_dtype
        """Returns the dtype that a gradient of a dtype is converted to before it is accumulated."""
