"""The loss of a job as sums over items. The training step divides them by its global number of items.

The items of the cross-entropy are the valid targets. `train.losses` has losses with other items.

Without chunks a model returns logits, and the loss is computed from them. With chunks (`loss.chunks`) the output layer
of the model computes the loss itself (`models.chunked_loss`), and logits exist for one chunk of classes at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from titan_launch.config.sections.data import IGNORED_TARGET
from titan_launch.config.sections.loss import LossConfig
from titan_launch.core.errors import config_error
from titan_launch.loss.chunked import Adjust, ChunkedLoss, Classes, Kernels, Method


class LogitsCheck(Protocol):
    """A check of logits before the loss is computed."""

    def __call__(self, shape: Sequence[int], targets: Tensor, /) -> None:
        """Raise an error if logits of this shape do not fit the targets."""


class Loss:
    """The loss of a job.

    loss.prepare(inputs, targets, documents)
    with loss.given(targets):
        outputs = model(inputs)
    sums = loss.sums(outputs, targets)
    """

    num_sums = 2
    """Number of sums with gradients enabled."""

    accuracy_of_items = False
    """True if validation reports a fraction of the items as accuracy. False: a fraction of the valid targets."""

    tags: tuple[str, ...]
    """Metrics of the sums after the first one, with gradients enabled. Sums without a tag are not reported."""

    frozen: nn.Module | None = None
    """A second model, which is not trained, and whose outputs the loss reads. It is wrapped like the trained model."""

    def __init__(
        self,
        config: LossConfig | None = None,
        check: LogitsCheck = lambda shape, targets: None,
        compiled: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda function: function,
    ):
        """`compiled` compiles a function of tensors."""
        self._config = LossConfig() if config is None else config
        self._validation = LossConfig(chunks=self._config.chunks)
        self.tags = (Z_LOSS,) if self._config.z_loss else ()
        self._check = check
        self._plain = compiled(_plain_sums)
        self._kernels = Kernels.compiled(compiled)
        self._has_head = False
        self.targets: Tensor | None = None
        """The targets of the forward that runs; None if the output layer is to return logits."""

    def compute_in(self, head: nn.Module, dtypes: Sequence[torch.dtype] = ()) -> None:
        """Let `head`, an `nn.Linear`, return `sums` in place of logits while targets are given.

        The logits are the output of the layer. If the layer has the method `adjust_logits`, an elementwise function
        such as a soft cap, the method is applied to each chunk. Then the logits are cast to `dtypes`, one after the
        other.
        """
        self._has_head = True
        adjust = _adjustment(getattr(head, "adjust_logits", None), dtypes)
        head.forward = MethodType(_head_forward(self, head.forward, adjust), head)

    def counts(self, targets: Tensor, documents: Tensor | None) -> Tensor:
        """Return the number of items, by which sums are divided, and of valid targets: int64 (2), on the device of the
        targets. `documents`: as in `data.sources.Batch`."""
        return count_valid(targets).expand(2)

    def prepare(self, inputs: Tensor, targets: Tensor, documents: Tensor | None) -> None:
        """Compute what the loss needs besides the outputs of the model, before the model's forward. Collective."""

    @contextmanager
    def given(self, targets: Tensor) -> Iterator[None]:
        """Provide the targets of the model's next forward to its output layer during the block."""
        self.targets = targets
        try:
            yield
        finally:
            self.targets = None

    def takes(self, tensor: Tensor, targets: Tensor) -> bool:
        """Return True if a tensor in a model's outputs has the shape of logits, or of `sums` from the output layer."""
        if self._has_head:
            return tensor.shape == (2,)
        return tensor.ndim > 0 and tensor.shape[:-1] == targets.shape

    def sums(self, outputs: Any, targets: Tensor) -> Tensor:
        """Return two sums over the valid targets, in fp32, from what the model has returned.

        With gradients enabled: the loss, which is the cross-entropy plus the z-loss times its weight, and this z-loss
        alone. Only the first takes a gradient. Without gradients: the cross-entropy without label smoothing, and the
        number of targets with the largest logit. Of equal logits, the first counts as the largest.

        `outputs` are logits (..., classes), or the sums if the output layer computes them. `targets` are class indices
        (...). If no target is valid, the sums and the gradients are 0, and all ranks still run the same backward.
        Collective if the logits are divided over ranks by class.
        """
        if self._has_head:
            if outputs.shape != (2,):
                raise config_error(("loss", "chunks"), _CHANGED_OUTPUT, self._config.chunks)
            return outputs
        self._check(outputs.shape, targets)
        if isinstance(outputs, DTensor):
            assert outputs.placements == (Shard(outputs.ndim - 1),), outputs.placements
            logits = outputs.to_local()
            return self._in_chunks(Classes.of(outputs, logits.shape[-1]), logits, None, None, targets, None)
        if self._config.chunks > 1:
            return self._in_chunks(Classes(outputs.shape[-1]), outputs, None, None, targets, None)
        logits, targets = outputs.reshape(-1, outputs.shape[-1]), targets.reshape(-1)
        if not torch.is_grad_enabled():
            return torch.stack([F.cross_entropy(logits.float(), targets, **_SUM), (logits.argmax(-1) == targets).sum()])
        sums: Tensor = self._plain(logits, targets, self._config.z_loss, self._config.label_smoothing)
        return sums

    def of_head(self, head: Any, x: Tensor, targets: Tensor, adjust: Adjust | None) -> Tensor:
        """Return `sums` of the logits that `head` would make of `x`. With tensor parallelism the sums are a DTensor, as
        the outputs of other divided layers."""
        weight, bias = head.weight, head.bias
        self._check((*x.shape[:-1], weight.shape[0]), targets)
        if not isinstance(weight, DTensor):
            return self._in_chunks(Classes(weight.shape[0]), x, weight, bias, targets, adjust)
        assert isinstance(x, DTensor), "tensor parallelism makes DTensors of the input and the weight"
        own_weight, own_bias = weight.to_local(), None if bias is None else bias.to_local()
        own_x = x.to_local(grad_placements=[Partial()])  # each rank's classes give a part of the gradient
        classes = Classes.of(weight, own_weight.shape[0])
        sums = self._in_chunks(classes, own_x, own_weight, own_bias, targets, adjust)
        return DTensor.from_local(sums, weight.device_mesh, [Replicate()], run_check=False)

    def _in_chunks(
        self,
        classes: Classes,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        targets: Tensor,
        adjust: Adjust | None,
    ) -> Tensor:
        validates = not torch.is_grad_enabled()
        config = self._validation if validates else self._config
        method = Method(config, classes, adjust, self._kernels, counts_correct=validates)
        sums: Tensor = ChunkedLoss.apply(x.reshape(-1, x.shape[-1]), weight, bias, targets.reshape(-1), method)
        return sums


_CHANGED_OUTPUT = (
    "the output layer of the model computes the loss, but the model does not return the output of that layer unchanged "
    "in every forward; return it unchanged, or set 1"
)


def _head_forward(loss: Loss, compute: Callable[[Tensor], Tensor], adjust: Adjust | None) -> Callable[..., Tensor]:
    """Return the forward of an output layer. Its first argument is the module: explanations of errors look for it."""

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        return compute(x) if loss.targets is None else loss.of_head(self, x, loss.targets, adjust)

    return forward


def _adjustment(adjust: Adjust | None, dtypes: Sequence[torch.dtype]) -> Adjust | None:
    """Return `adjust` and then the casts to `dtypes` as one function; None if there is nothing to do."""
    if adjust is None and not dtypes:
        return None

    def adjusted(logits: Tensor) -> Tensor:
        logits = logits if adjust is None else adjust(logits)
        for dtype in dtypes:
            logits = logits.to(dtype)
        return logits

    return adjusted


Z_LOSS = "train/z_loss"
"""Metric of a sum that is part of the loss, but not of `train/loss`."""

_SUM: dict[str, Any] = {"ignore_index": IGNORED_TARGET, "reduction": "sum"}


def _plain_sums(logits: Tensor, targets: Tensor, z_loss: float, label_smoothing: float) -> Tensor:
    """Return the sums of loss and z-loss of whole logits (n, classes), by PyTorch's own operations."""
    logits = logits.float()
    cross_entropy = F.cross_entropy(logits, targets, label_smoothing=label_smoothing, **_SUM)
    if not z_loss:
        return torch.stack([cross_entropy, torch.zeros_like(cross_entropy)])
    squares = logits.logsumexp(-1).square().where(targets != IGNORED_TARGET, 0)
    weighted = z_loss * squares.sum()
    return torch.stack([cross_entropy + weighted, weighted.detach()])


def means_of_step(sums: Tensor, num_items: Tensor) -> Tensor:
    """Return a microbatch's part of the step's loss: its sums, divided by the number of the step's items over all
    ranks."""
    return sums / num_items.clamp(min=1)


def count_valid(targets: Tensor) -> Tensor:
    """Return how many targets are not ignored: an int64 scalar on their device."""
    return (targets != IGNORED_TARGET).sum()
