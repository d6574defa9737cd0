"""The cross-entropy of logits, with label smoothing and z-loss.

Without chunks, the model returns logits, and the loss is computed from them. With chunks (`loss.chunks`) and a loss
head (`ModelPlan.loss_head`), the output layer of the model computes the loss (`loss/chunked.py`). Logits then exist
only for one chunk of classes at a time. With chunks but without a loss head, the model returns logits, and the loss is
computed from them in chunks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from titan_launch.config.sections.data import IGNORED_TARGET
from titan_launch.config.sections.loss import LossConfig
from titan_launch.core.errors import config_error
from titan_launch.loss.chunked import Adjust, ChunkedLoss, Classes, Kernels, Method
from titan_launch.loss.interface import Z_LOSS, Compile, Loss, count_correct
from titan_launch.loss.outputs import LogitsCheck, are_logits, select_logits


class CrossEntropy(Loss):
    """The cross-entropy of the valid targets. The items are these targets."""

    def __init__(
        self,
        config: LossConfig | None = None,
        check: LogitsCheck = lambda shape, targets: None,
        compiled: Compile = lambda function: function,
    ):
        super().__init__(check)
        self._config = LossConfig() if config is None else config
        self._validation = LossConfig(chunks=self._config.chunks)
        if self._config.z_loss:
            self.tags = (Z_LOSS,)
        self._plain = compiled(_plain_sums)
        self._kernels = Kernels.compiled(compiled)
        self._has_head = False
        self.targets: Tensor | None = None
        """The targets inside a `given` block, for the output layer. None outside: the layer then returns logits."""

    def compute_in(self, head: nn.Module, dtypes: Sequence[torch.dtype] = ()) -> None:
        """Change the forward of `head`, an `nn.Linear`, in place: inside a `with loss.given(targets)` block, the layer
        returns the sums of the loss instead of logits.

        The logits are the output of the layer. If the layer has the method `adjust_logits`, an elementwise function
        such as a soft cap, `adjust_logits` is applied to each chunk of logits. Then each chunk is cast to all `dtypes`,
        one after the other.
        """
        self._has_head = True
        loss, compute = self, head.forward
        adjust = _adjustment(getattr(head, "adjust_logits", None), dtypes)

        # Named `self`, because an out-of-memory message names the module that is `self` in the traceback's frames.
        def forward(self: nn.Module, x: Tensor) -> Tensor:
            return compute(x) if loss.targets is None else loss.of_head(self, x, loss.targets, adjust)

        head.forward = MethodType(forward, head)

    @contextmanager
    def given(self, targets: Tensor) -> Iterator[None]:
        self.targets = targets
        try:
            yield
        finally:
            self.targets = None

    def select(self, outputs: Any, targets: Tensor) -> Tensor:
        """Return the logits in a model's outputs. If the output layer computes the loss, return the two sums of the
        loss instead. Raise ConfigError if the outputs have no such tensor."""
        fits = (lambda tensor, _: tensor.shape == (2,)) if self._has_head else are_logits
        return select_logits(outputs, targets, fits)

    def sums(self, outputs: Any, targets: Tensor) -> Tensor:
        """Return two sums over the valid targets, in fp32, from the model's outputs.

        With gradients enabled, the first sum is the loss: the cross-entropy, with label smoothing, plus the weighted
        z-loss. The second sum is the weighted z-loss alone. Backward runs through the first one only. Without
        gradients, the first sum is the cross-entropy without label smoothing and z-loss. The second sum is then the
        number of correct predictions (`count_correct`).

        `outputs`: logits (..., classes), or the sums if the output layer computes them. `targets`: class indices (...).
        If no target is valid, the sums and the gradients are 0, and all ranks still run the same backward. Collective
        if the logits are divided over ranks by class. Raises ConfigError if the outputs have the wrong shape.
        """
        if self._has_head:
            if outputs.shape != (2,):
                reason = (
                    "with chunks, the model's output layer computes the loss, but the model's forward does not always "
                    "return the result of this layer; return the result unchanged, or set loss.chunks = 1"
                )
                raise config_error(("loss", "chunks"), reason, self._config.chunks)
            return outputs
        self._check(outputs.shape, targets)
        if isinstance(outputs, DTensor):
            assert outputs.placements == (Shard(outputs.ndim - 1),), outputs.placements
            return self._in_chunks(Classes.of(outputs, -1), outputs.to_local(), targets)
        if self._config.chunks > 1:
            return self._in_chunks(Classes.of(outputs, -1), outputs, targets)
        logits, targets = outputs.reshape(-1, outputs.shape[-1]), targets.reshape(-1)
        if not torch.is_grad_enabled():
            cross_entropy = F.cross_entropy(logits.float(), targets, **_SUM)
            return torch.stack([cross_entropy, count_correct(logits, targets)])
        sums: Tensor = self._plain(logits, targets, self._config.z_loss, self._config.label_smoothing)
        return sums

    def of_head(self, head: Any, x: Tensor, targets: Tensor, adjust: Adjust | None) -> Tensor:
        """Return the two sums that `sums` describes, from the input `x` of the output layer `head`. With tensor
        parallelism, the result is a replicated DTensor, because the output hook of ColwiseParallel needs a DTensor."""
        weight, bias = head.weight, head.bias
        self._check((*x.shape[:-1], weight.shape[0]), targets)
        classes = Classes.of(weight, 0)
        if not isinstance(weight, DTensor):
            return self._in_chunks(classes, x, targets, weight, bias, adjust)
        assert isinstance(x, DTensor), "a DTensor weight requires a DTensor input"
        own_weight, own_bias = weight.to_local(), None if bias is None else bias.to_local()
        own_x = x.to_local(grad_placements=[Partial()])  # the gradients from all ranks' classes add up
        sums = self._in_chunks(classes, own_x, targets, own_weight, own_bias, adjust)
        return DTensor.from_local(sums, weight.device_mesh, [Replicate()], run_check=False)

    def _in_chunks(
        self,
        classes: Classes,
        x: Tensor,
        targets: Tensor,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        adjust: Adjust | None = None,
    ) -> Tensor:
        validates = not torch.is_grad_enabled()
        config = self._validation if validates else self._config
        method = Method(config, classes, adjust, self._kernels, counts_correct=validates)
        sums: Tensor = ChunkedLoss.apply(x.reshape(-1, x.shape[-1]), weight, bias, targets.reshape(-1), method)
        return sums


def _adjustment(adjust: Adjust | None, dtypes: Sequence[torch.dtype]) -> Adjust | None:
    """Return one function that applies `adjust` and then casts to all `dtypes`; None without `adjust` and `dtypes`."""
    if adjust is None and not dtypes:
        return None

    def adjusted(logits: Tensor) -> Tensor:
        logits = logits if adjust is None else adjust(logits)
        for dtype in dtypes:
            logits = logits.to(dtype)
        return logits

    return adjusted


_SUM: dict[str, Any] = {"ignore_index": IGNORED_TARGET, "reduction": "sum"}


def _plain_sums(logits: Tensor, targets: Tensor, z_loss: float, label_smoothing: float) -> Tensor:
    """Return the sums of the loss and of the weighted z-loss, without chunks, from the logits (n, classes)."""
    logits = logits.float()
    cross_entropy = F.cross_entropy(logits, targets, label_smoothing=label_smoothing, **_SUM)
    if not z_loss:
        return torch.stack([cross_entropy, torch.zeros_like(cross_entropy)])
    squares = logits.logsumexp(-1).square().where(targets != IGNORED_TARGET, 0)
    weighted = z_loss * squares.sum()
    return torch.stack([cross_entropy + weighted, weighted.detach()])
