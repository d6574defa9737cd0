"""Memory of autograd: it records a graph, saves tensors in the graph, and frees them in backward. No torch.

The order of backward and of frees is that of PyTorch's engine (torch/csrc/autograd/engine.cpp). Two gradients of one
tensor are added into a third tensor, as in PyTorch when another reference to the first exists. Activation checkpointing
is `torch.utils.checkpoint` with `use_reentrant=False`: a saved tensor is a placeholder, and the first access runs the
forward of its block again, up to the last saved tensor.
"""

from __future__ import annotations

import heapq
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from titan_launch.config.sections.base import DTYPE_BYTES
from titan_launch.plan.memory.analytic.offload import Offloader
from titan_launch.plan.memory.analytic.tensors import Backward, Leaf, Node, Saved, Tensor
from titan_launch.plan.memory.fsdp import Storage
from titan_launch.plan.memory.ledger import Category, Ledger

Keeps = Callable[[], Callable[[str], bool]]
"""A factory of predicates for selective activation checkpointing. Each run of a block gets a new predicate. The
predicate takes the name of a costly operation, and returns True if the result of the operation is saved. It is called
once per costly operation, in the order in which they run."""


class _BlockRepeated(Exception):  # noqa: N818 (not an error)
    """Raised to end the second forward of a checkpointed block after the last tensor that backward needs."""


class _Saved:
    """A placeholder for the tensors that one operation saved in a checkpointed block."""

    __slots__ = ("__weakref__", "block")

    def __init__(self, block: _Block):
        self.block = block


class _Block:
    """One run of a checkpointed block in forward: the function that backward runs a second time, and the tensors of
    that run."""

    def __init__(self, compute: Callable[[Tensor], Tensor], x: Callable[[], Tensor], keeps: Keeps | None):
        """`x`: returns the input."""
        self.compute = compute
        self.x = x
        self.keeps = keeps
        self.saved: list[weakref.ref[_Saved]] = []
        self.kept: deque[Callable[[], Any]] = deque()
        """Saved results of costly operations (`selective_ac_option = "op"`)."""
        self.repeated: weakref.WeakKeyDictionary[_Saved, Sequence[Tensor]] = weakref.WeakKeyDictionary()
        self.num_repeated = 0
        self.is_repeated = False


class Autograd:
    """The autograd engine. It also makes all tensors, and its ledger counts their memory."""

    def __init__(self, ledger: Ledger):
        self.ledger = ledger
        self.offloader = Offloader(ledger)
        """It packs every saved tensor. Only tensors of blocks that `Offloader.run` runs are offloaded."""
        self.is_backward = False
        """True during backward, which includes the second forward of checkpointed blocks."""
        self._num_nodes = 0
        self._recording: _Block | None = None
        self._repeating: _Block | None = None
        self._keep: Callable[[str], bool] | None = None

    def new(self, numel: int, dtype: str, category: Category = Category.ACTIVATIONS) -> Tensor:
        """Return a new tensor of `numel` elements, whose memory counts under `category`."""
        return Tensor(Storage(self.ledger, numel * DTYPE_BYTES[dtype], category), numel, dtype)

    def product(self, numel: int, dtype: str, category: Category = Category.ACTIVATIONS) -> Tensor:
        """Return the new result of a matrix product."""
        result = self.new(numel, dtype, category)
        self.ledger.product()
        return result

    def record(self, output: Tensor, inputs: Sequence[Tensor], backward: Backward, *saved: Saved) -> Tensor:
        """Return `output` with a new node, which passes gradients to the nodes of `inputs`. `saved`: results of
        `save`. If no input takes a gradient, return `output` without a node, and free what was saved."""
        nodes = [x.node for x in inputs]
        if nodes.count(None) == len(nodes):
            return output
        self._num_nodes += 1
        node = Node(self._num_nodes, nodes, backward)
        if saved:
            node.saved = saved[0] if len(saved) == 1 else lambda: [tensor for part in saved for tensor in part()]
        output.node = node
        return output

    def save(self, *tensors: Tensor) -> Saved:
        """Save tensors for backward, and return a function that returns them.

        As in PyTorch, an operation saves its inputs before it runs, and its results afterwards.
        """
        kept = [tensor.detached() for tensor in tensors]
        if self._repeating is not None:
            return self._save_again(self._repeating, kept)
        if self._recording is None:
            packed = [self.offloader.pack(tensor) for tensor in kept]
            return lambda: [recall() for recall in packed]
        block = self._recording
        saved = _Saved(block)
        block.saved.append(weakref.ref(saved))
        return lambda: self._recall(saved)

    def run_costly(self, name: str, compute: Callable[[], Any]) -> Any:
        """Return the result of `compute`, an operation that selective activation checkpointing may save.

        The second forward of a checkpointed block returns the saved result instead of running the operation again. The
        tensors of a saved result have no node.
        """
        block = self._repeating or self._recording
        if block is None or self._keep is None or not self._keep(name):
            return compute()
        if self._repeating is not None:
            return block.kept.popleft()()
        result = compute()
        block.kept.append(self._pack_result(name, result))
        return result

    def _pack_result(self, name: str, result: Any) -> Callable[[], Any]:
        if name == "all_gather":  # the result of a collective is not offloaded
            return lambda: result
        if isinstance(result, Tensor):
            return self.offloader.pack(result)
        packed = [self.offloader.pack(part) for part in result]
        return lambda: [recall() for recall in packed]

    def checkpoint(self, compute: Callable[[Tensor], Tensor], x: Tensor, keeps: Keeps | None = None) -> Tensor:
        """Return `compute(x)`, run with activation checkpointing. `keeps`: the results that selective checkpointing
        saves."""
        block = _Block(compute, self.offloader.pack(x), keeps)
        self._recording, self._keep = block, keeps and keeps()
        try:
            return compute(x)
        finally:
            self._recording = self._keep = None

    def backward(self, loss: Tensor, gradient: Tensor) -> None:
        """Run backward from `loss`, whose gradient is `gradient`."""
        root, loss.node = loss.node, None
        assert root is not None
        self.is_backward = True
        missing, gradients, ready = _count_edges(root), {root: gradient}, [(-root.sequence, id(root), root)]
        del root, gradient
        while ready:
            node = heapq.heappop(ready)[2]
            for hook in node.hooks:
                hook()
            results = [*self._run(node, [gradients.pop(node)])]
            for index, following in enumerate(node.inputs):
                if following is None:
                    continue
                self._pass_on(following, results, index, gradients)
                missing[following] -= 1
                if not missing[following]:
                    heapq.heappush(ready, (-following.sequence, id(following), following))
        self.is_backward = False

    def _pass_on(self, node: Node, results: list[Tensor | None], index: int, gradients: dict[Node, Tensor]) -> None:
        """Add result `index` to the gradient that a node already has, and drop the reference in `results`."""
        result, results[index] = results[index], None
        assert result is not None, "a node between the loss and a parameter has a gradient"
        before = gradients.get(node)
        if before is not None:
            result = self.new(before.numel, before.dtype, Category.BACKWARD)
        gradients[node] = result

    def _run(self, node: Node, gradient: list[Tensor]) -> Sequence[Tensor | None]:
        if isinstance(node, Leaf):
            node.accumulate(gradient.pop())
            return ()
        saved = node.saved() if node.saved is not None else ()
        assert node.backward is not None
        gradients = node.backward(gradient, saved)
        results = [self._converted(*pair) for pair in zip(node.inputs, gradients, strict=True)]
        node.saved = node.backward = None
        return results

    def _converted(self, following: Node | None, gradient: Tensor | None) -> Tensor | None:
        """If `following` is the node of a parameter, return the gradient in the dtype in which the parameter
        accumulates gradients. For other nodes, return the gradient unchanged."""
        if not isinstance(following, Leaf) or gradient is None:
            return gradient
        dtype = following.grad_dtype(gradient.dtype)
        return gradient if dtype == gradient.dtype else self.new(gradient.numel, dtype, Category.BACKWARD)

    def _recall(self, saved: _Saved) -> Sequence[Tensor]:
        block = saved.block
        if not block.is_repeated:
            block.is_repeated = True
            self._repeat(block)
        return block.repeated.pop(saved)

    def _repeat(self, block: _Block) -> None:
        self._repeating, self._keep = block, block.keeps and block.keeps()
        try:
            block.compute(block.x())
        except _BlockRepeated:
            pass
        finally:
            self._repeating = self._keep = None

    def _save_again(self, block: _Block, tensors: Sequence[Tensor]) -> Saved:
        saved = block.saved[block.num_repeated]()
        block.num_repeated += 1
        if saved is not None:
            block.repeated[saved] = tensors
        if block.num_repeated == len(block.saved):
            raise _BlockRepeated
        return lambda: tensors


def _count_edges(root: Node) -> dict[Node, int]:
    """Return, for each node that `root` leads to, the number of gradients it waits for."""
    edges: dict[Node, int] = {}
    unseen, seen = [root], {root}
    while unseen:
        for following in unseen.pop().inputs:
            if following is None:
                continue
            edges[following] = edges.get(following, 0) + 1
            if following not in seen:
                seen.add(following)
                unseen.append(following)
    return edges
