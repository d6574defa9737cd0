"""The floating-point operations (FLOPs) of a job for one sample.

Forward and backward run on the meta device, whose tensors have shapes and no values, and the operations that run are
counted. So the gradients of frozen parameters cost no FLOPs. Operations that activation checkpointing runs twice count
twice, except in `flops_of_run`. Each multiplication and each addition of matrix products, convolutions and attention
counts as one FLOP. Other operations do not count.

The conventions are those of PaLM (arXiv:2204.02311, appendix B) and TorchTitan, so MFUs can be compared. All pairs of
tokens count in attention, although causal attention needs only half of the pairs, and separate documents need even
fewer. In a layer with a sliding window, each token has as many pairs as the window has tokens. The backward of
attention counts as two forwards.
"""

from __future__ import annotations

import copy
import logging
import warnings
from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from titan_launch.config.job import JobConfig
from titan_launch.config.sections.parallelism import CompileConfig
from titan_launch.core.patches import generators_seeded, loggers_silenced, replaced
from titan_launch.distributed.torch_private import grouped_products_have_shapes
from titan_launch.loss.build import build_loss
from titan_launch.loss.second_model import build_frozen_model
from titan_launch.models.blocks import blocks_removed
from titan_launch.models.build import BuiltModel
from titan_launch.models.decoder import attention, layers, mixture_of_experts
from titan_launch.models.decoder.mixture_of_experts import ExpertProduct
from titan_launch.models.host_values import attributes_digest
from titan_launch.parallel.activation_checkpoint import checkpoint_activations
from titan_launch.plan.job import with_values
from titan_launch.plan.memory.depth import block_signatures
from titan_launch.plan.step_time import Flops
from titan_launch.plan.types import ModelPlan, outermost
from titan_launch.train.batches import RunData, known_input_shape, make_microbatch, sample_format
from titan_launch.train.model import build_job_model, plan_precision
from titan_launch.train.step import forward_backward

_log = logging.getLogger(__name__)

_SAMPLES = 2
"""Number of samples of the counted microbatch. BatchNorm needs more than one sample in training."""


def flops_of_run(config: JobConfig, built: BuiltModel, plan: ModelPlan, data: RunData) -> int | None:
    """Return the FLOPs of one sample. A run computes TFLOP/s and MFU from this number. An operation counts once
    even if activation checkpointing, or a loss in chunks (`loss.chunks`), runs it twice.

    If a user's own model declares its FLOPs, return these; otherwise count them. If counting fails, log the reason and
    return None. `built` is not changed.
    """
    if built.flops_per_sample is not None:
        return built.flops_per_sample
    with unknown_if_it_fails():
        config = with_values(config, {("loss", "chunks"): 1})
        built, plan = replace(built, module=copy.deepcopy(built.module)), replace(plan, checkpointed=(), loss_head=None)
        shape = known_input_shape(config) or tuple(data.train[0][0].shape)
        return count_flops(config, built, plan, shape, data.num_classes).per_sample
    return None


@contextmanager
def unknown_if_it_fails() -> Iterator[None]:
    """Suppress an error in the block, which runs a model on the meta device, and log it as the reason for missing
    TFLOP/s. If the model does not run on any device, the run or the planner raises the error later."""
    try:
        yield
    except Exception as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        message = (
            "no TFLOP/s: the FLOPs cannot be counted, because the model does not run on the meta device (%s); to "
            "declare the FLOPs, add a method flops_per_sample(seq_len) to the model"
        )
        _log.info(message, reason[-1])


def flops_of_job(config: JobConfig) -> Flops:
    """Return the FLOPs of one sample of a job without `auto`. Raises ConfigError if the job cannot run, and the errors
    of `count_flops`."""
    built = build_job_model(config)
    return count_flops(config, built, plan_precision(config, built), *sample_format(config))


def count_flops(
    config: JobConfig, built: BuiltModel, plan: ModelPlan, input_shape: tuple[int, ...], num_classes: int
) -> Flops:
    """Return the FLOPs of one sample, summed over all ranks that share the sample. The forward of the loss's teacher
    or reference model counts too. Raises an error of any class if the model does not run on the meta device.

    If a model of this package has more than two blocks of one kind, not all of them run. The model first runs with one
    block of each kind. Then it runs once more for each kind, with a second block of this kind. The difference is the
    FLOPs of this block. The difference is added for every further block of this kind.

    `built`: the job's model on the meta device, which is changed in place. `input_shape`: shape of one input. Kernels,
    parallelism and dtypes do not change the result.
    """
    meta = torch.device("meta")
    config = config.model_copy(update={"compile": CompileConfig()})
    model = built.module
    kinds = [kind for kind in _blocks_by_kind(model, plan) if len(kind) > 2] if config.model.is_of_package else []
    with _counted_kernels():
        checkpoint_activations(model, plan.checkpointed, config.activation_checkpoint)
        frozen = build_frozen_model(config)
        if frozen is not None:
            frozen.module.requires_grad_(False).eval()
        loss = build_loss(model, plan, config, num_classes, has_values=False, frozen=frozen)
        with meta:
            microbatch, num_items = make_microbatch(config, input_shape, _SAMPLES), torch.ones(())

        def without(removed: Collection[str]) -> Flops:
            with blocks_removed(model, removed), _Count() as count:
                forward_backward(model, microbatch, meta, lambda: num_items, loss)
            return Flops(count.flops.total() // _SAMPLES, count.flops[_GROUPED] // _SAMPLES)

        repeated = {block for kind in kinds for block in kind[1:]}
        total = one_of_each = without(repeated)
        for kind in kinds:
            two = without(repeated - {kind[1]})
            total = total.plus(two.plus(one_of_each, -1), len(kind) - 1)
    return total


def _blocks_by_kind(model: nn.Module, plan: ModelPlan) -> Iterator[list[str]]:
    """Yield the paths of the blocks of each kind, in the order of the model. Blocks of one kind run the same operations
    in forward and backward. Blocks inside of other blocks are not listed.

    The kind of the first block is a guess, because it depends on the modules before the block. A wrong guess does no
    harm, because the first block of each kind is counted by itself.
    """
    kinds: defaultdict[Hashable, list[str]] = defaultdict(list)
    for block, signature in zip(outermost(plan.inventory.blocks), block_signatures(plan), strict=True):
        kinds[signature, attributes_digest(model.get_submodule(block))].append(block)
    yield from kinds.values()


@contextmanager
def _counted_kernels() -> Iterator[None]:
    """Let attention and experts run as single operations, as on a GPU, until the end of the block."""
    with ExitStack() as stack:
        stack.enter_context(loggers_silenced("titan_launch.loss.build"))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.enter_context(generators_seeded(0))  # the run's random numbers stay the same
        stack.enter_context(grouped_products_have_shapes())
        stack.enter_context(replaced(F, "scaled_dot_product_attention", _attention))
        stack.enter_context(replaced(attention, "causal_attention", lambda q, k, v, *_: _attention(q, k, v)))
        stack.enter_context(replaced(attention, "masked_attention", _masked_attention))
        stack.enter_context(replaced(layers, "attend_with_logsumexp", _attend_with_logsumexp))
        stack.enter_context(replaced(mixture_of_experts, "expert_product", _expert_product))
        yield


_aten = torch.ops.aten
_ATTENTION = _aten._scaled_dot_product_efficient_attention
_GROUPED = _aten._grouped_mm


def _attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
    """Run attention as one operation, which takes value tensors of any width, and return its output. Mask, scale and
    dropout are ignored, because they do not change the FLOPs."""
    shape = *query.shape[:-1], value.shape[-1]
    query, key, value = (x if x.dim() == 4 else x.reshape(-1, *x.shape[-3:]) for x in (query, key, value))
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    attended: Tensor = _ATTENTION(query, key, value, None, True)[0]
    return attended.reshape(shape)


def _masked_attention(
    q: Tensor, k: Tensor, v: Tensor, options: attention.ScoreOptions, documents: attention.Documents | None
) -> Tensor:
    """Replace `attention.masked_attention`: each query reads as many keys as the window has tokens; without a window,
    all keys."""
    return _attention(q, *(x[:, :, : options.window] for x in (k, v)))


def _attend_with_logsumexp(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: attention.ScoreOptions,
    documents: attention.Documents | None = None,
) -> attention.Attended:
    """Replace `layers.attend_with_logsumexp`."""
    values = _masked_attention(q, k, v, options, documents)
    return attention.Attended(values, values.sum(-1, dtype=torch.float32))


def _expert_product(rows: Tensor, counts: Tensor, *weights: Tensor) -> ExpertProduct:
    """Replace `mixture_of_experts.expert_product`. Values and strides do not change the FLOPs."""

    def product(rows: Tensor, weights: Tensor, bias: Tensor | None) -> Tensor:
        result: Tensor = _GroupedProduct.apply(rows, weights, counts.to(torch.int32))
        return result if bias is None else result + bias[0]

    return product


class _GroupedProduct(torch.autograd.Function):
    """The product of rows (rows, in) and matrices (experts, out, in), and its gradients, without PyTorch's checks of
    strides."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weights, ends)
        result: Tensor = _GROUPED(rows, weights.mT, ends)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        rows, weights, ends = ctx.saved_tensors
        of_rows, of_weights, _ = ctx.needs_input_grad
        return (
            _GROUPED(gradients[0], weights, ends) if of_rows else None,
            _GROUPED(gradients[0].mT, rows, ends) if of_weights else None,
            None,
        )


def attention_flops(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    """Return the FLOPs of one forward of attention. The tensors have the shapes (batch, heads, tokens, width)."""
    batch, heads, queries, width = query.shape
    return int(2 * batch * heads * queries * key.shape[2] * (width + value.shape[3]))


def _grouped_flops(a: Any, b: Any, *_: Any, **__: Any) -> int:
    """Return the FLOPs of a grouped product. If both factors are stacks of matrices, the matrices are multiplied in
    pairs. Otherwise the groups divide the rows, the columns or the inner dimension, so the number of groups does not
    matter."""
    pairs = a.shape[0] if a.dim() == b.dim() == 3 else 1
    return int(2 * pairs * a.shape[-2] * a.shape[-1] * b.shape[-1])


FORMULAS = {
    **flop_registry,
    _ATTENTION: attention_flops,
    _aten._scaled_dot_product_efficient_attention_backward: lambda _, *args, **options: 2 * attention_flops(*args),
    _aten._scaled_dot_product_flash_attention_for_cpu: attention_flops,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda _, *args, **options: 2 * attention_flops(*args),
    _GROUPED: _grouped_flops,
}
"""For each operation, a function of the operation's arguments that returns its FLOPs: PyTorch's functions
(`flop_registry`), and five functions that replace or complete them."""


class _Count(TorchDispatchMode):
    """A dispatch mode that adds up the FLOPs of the operations that run."""

    def __init__(self) -> None:
        super().__init__()
        self.flops: Counter[Any] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        formula = FORMULAS.get(func.overloadpacket)
        if formula is not None:
            self.flops[func.overloadpacket] += formula(*args, **kwargs, out_val=result)
        return result
