"""Replacements for operations that save different tensors for backward on CUDA and on a CPU.

Eager PyTorch saves the same tensors on both devices, except for a few operations. The replacements compute nothing.
Their outputs have the right shape, dtype and strides, and the tensors that they save have the right size.

- RMSNorm: a CPU runs several operations, which save two fp32 copies of the input. CUDA's `_fused_rms_norm` saves the
  input and, for each row, an fp32 `rstd`. If weight and input have different dtypes, CUDA runs the same operations as a
  CPU, and nothing is replaced.
- LayerNorm: both devices run the same operation. CUDA saves `mean` and `rstd` in fp32 even for a bf16 input.
- Attention: CUDA runs flash attention for fp16 and bf16, and memory-efficient attention for fp32 or with a mask. If the
  shapes are not (batch, heads, tokens, head_dim), CUDA runs the kernel that stores all scores. The same holds for
  grouped queries in fp32 or with a mask, and for every call with `kernels.attention = "math"`. If values have another
  width than queries, in fp16 or bf16 and without a mask, the replacement uses cuDNN's kernel. This kernel saves as many
  bytes as flash attention, and supports widths up to `plan.attention_kernels.WIDEST_FLASH`.
- Attention with a sliding window, a soft cap, attention sinks or documents: CUDA runs FlexAttention, which saves its
  inputs, its output, and an fp32 logsumexp for each query. The memory of its block mask is not counted.
- Matrix products of experts: CUDA runs one grouped product in bf16 (`plan.experts.is_grouped`). With other dtypes, and
  on a CPU, there is one product for each expert. In both cases, the inputs of the experts and the stacked matrices are
  saved. A trace does not know which tokens each expert gets, so it divides the tokens of a rank equally among the
  experts of the rank. With expert parallelism, a rank receives the mean number of tokens over ranks, times
  `planner.expert_load`. Classes of `transformers` call the grouped product in any dtype, also on a CPU. Before 2.15,
  PyTorch's shape function of the grouped product rejects fp32, so this function is replaced.
- BatchNorm needs no replacement: CUDA's native kernel, cuDNN's and the CPU's save the input and two fp32 numbers for
  each channel.

CUDA's behavior above is known from PyTorch's source (2.13: `layer_norm.cpp`, `sdp_utils.cpp`, `derivatives.yaml`).
Workspaces inside kernels (flash attention's backward, cuDNN's convolutions) are not counted. The replacements apply to
functions of `torch.nn.functional`, to the layers of `torch.nn` that call them, and to `torch.rms_norm` and
`torch.layer_norm`. A function that a model's file imports by name is not replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from titan_launch.core.patches import replaced
from titan_launch.distributed.torch_private import functions_wrapped, grouped_products_have_shapes, shard_to_send
from titan_launch.models.decoder import attention, layers, mixture_of_experts
from titan_launch.models.decoder.mixture_of_experts import ExpertProduct, grouped_product, looped_product, widths_of
from titan_launch.parallel import expert_parallel
from titan_launch.plan.attention_kernels import WIDEST_FLASH
from titan_launch.plan.experts import equal_parts, is_grouped, received_rows
from titan_launch.plan.hardware import Kernels
from titan_launch.plan.speeds import Work
from titan_launch.precision.observation import dtype_of

_aten = torch.ops.aten
_REDUCED = (torch.float16, torch.bfloat16)


@contextmanager
def kernels_replaced(
    kernels: Kernels,
    backend: str = "auto",
    expert_load: float = 1.0,
    note: Callable[[Work], None] = lambda work: None,
) -> Iterator[None]:
    """Until the `with` block ends, let CPU operations save the same tensors for backward as operations on a device of
    the family `kernels`.

    `backend`: value of `kernels.attention` in the job. `expert_load`: value of `planner.expert_load`. `note`: function
    that is called with the work of a kernel whose replacement runs no operation.
    """
    with ExitStack() as stack:
        stack.enter_context(grouped_products_have_shapes())
        if kernels == "cuda":
            for owner in (F, torch):
                stack.enter_context(replaced(owner, "rms_norm", _rms_norm))
                stack.enter_context(replaced(owner, "layer_norm", _layer_norm))
            if backend != "math":
                stack.enter_context(replaced(F, "scaled_dot_product_attention", scaled_dot_product_attention))
            flex = partial(_flex_attention, note)
            stack.enter_context(replaced(attention, "masked_attention", lambda *args: flex(*args).values))
            stack.enter_context(replaced(layers, "attend_with_logsumexp", flex))
            stack.enter_context(replaced(attention, "takes_equal_heads_only", lambda q: q.dtype == torch.float32))
        if backend == "math":
            stack.enter_context(replaced(F, "scaled_dot_product_attention", _attention_of_all_scores))
        stack.enter_context(replaced(mixture_of_experts, "expert_product", partial(_expert_product, kernels)))
        stack.enter_context(replaced(expert_parallel, "split_sizes", partial(_split_sizes, expert_load)))
        yield


@contextmanager
def copies_from_host() -> Iterator[None]:
    """Let FSDP2 copy host shards of parameters to the device. A trace has only one device, so the copy is a clone."""

    def all_gather_inputs(parameter: Any) -> list[Tensor]:
        shard, dtype = shard_to_send(parameter)
        copy = shard.clone()
        return [copy if dtype is None else copy.to(dtype)]

    with functions_wrapped({"all_gather_inputs": lambda _: property(all_gather_inputs)}):
        yield


class _FusedNorm(torch.autograd.Function):
    """A norm that only saves input, weight, bias, and `num_statistics` fp32 numbers for each row of `row_size`
    elements."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, row_size: int, num_statistics: int
    ) -> Tensor:
        rows = x.numel() // row_size
        statistics = [x.new_empty(rows, dtype=torch.float32) for _ in range(num_statistics)]
        ctx.save_for_backward(x, weight, bias, *statistics)
        return x.clone(memory_format=torch.contiguous_format)  # reads and writes as many bytes as the kernel

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, *_ = ctx.saved_tensors
        of_x, *needs = ctx.needs_input_grad[:3]
        kept = zip((weight, bias), needs, strict=True)
        # The kernels read input and gradient twice.
        result = x.clone().add_(grad.reshape(x.shape)) if of_x else None
        return (result, *(torch.empty_like(tensor) if needs else None for tensor, needs in kept), None, None)


_original_rms_norm = torch.rms_norm  # the function that `F.rms_norm` calls


def _rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    if weight is not None and weight.dtype != input.dtype:
        return _original_rms_norm(input, list(normalized_shape), weight, eps)
    output: Tensor = _FusedNorm.apply(input, weight, None, prod(normalized_shape), 1)
    return output


def _layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Tensor:
    output: Tensor = _FusedNorm.apply(input, weight, bias, prod(normalized_shape), 2)
    return output


def scaled_dot_product_attention(  # noqa: PLR0913 - the signature is PyTorch's
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Call the attention kernel that CUDA would choose. This function replaces `F.scaled_dot_product_attention`. It has
    the same name, because context parallelism finds the function by its name."""
    is_plain = query.dim() == key.dim() == value.dim() == 4
    has_equal_heads = is_plain and query.shape[1] == key.shape[1]
    if is_plain and query.dtype in _REDUCED and attn_mask is None:
        if query.shape[-1] == value.shape[-1]:
            flash = _aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)
            return _first(flash)
        # Values have another width only if the model does not pad them (`ScoreOptions.pads_values`).
        if has_equal_heads and max(query.shape[-1], value.shape[-1]) <= WIDEST_FLASH:
            cudnn = _aten._scaled_dot_product_cudnn_attention(
                query, key, value, None, torch.is_grad_enabled(), dropout_p, is_causal, False, scale=scale
            )
            return _first(cudnn)
    if has_equal_heads and query.dtype in (*_REDUCED, torch.float32):
        needs_gradient = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
        bias = None if attn_mask is None else attn_mask.expand(*query.shape[:3], key.shape[2])
        efficient = _aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, needs_gradient, dropout_p, is_causal, scale=scale
        )
        return _first(efficient)
    options = {"scale": scale, "enable_gqa": enable_gqa}
    return _attention_of_all_scores(query, key, value, attn_mask, dropout_p, is_causal, **options)


def _attention_of_all_scores(*args: Any, **options: Any) -> Tensor:
    return _first(_aten._scaled_dot_product_attention_math(*args, **options))


class _FlexAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, note: Callable[[Work], None], window: int | None, *qkv: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = qkv
        ctx.note, ctx.work = note, _attention_work(q, k, v, window)
        note(ctx.work)
        as_queries = sorted(range(4), key=q.stride, reverse=True)  # the widths of queries and values may differ
        output = torch.empty_permuted((*q.shape[:3], v.shape[3]), as_queries, dtype=q.dtype, device=q.device)
        logsumexp = q.new_empty(q.shape[:3], dtype=torch.float32)
        ctx.save_for_backward(q, k, v, output, logsumexp)
        ctx.set_materialize_grads(False)
        return output, logsumexp

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # unpacks all saved tensors, because the kernel reads them
        flops, *others = ctx.work.sizes
        ctx.note(ctx.work._replace(kind="attention_backward", sizes=(2 * flops, *others)))
        return (None, None, *(torch.empty_like(x) for x in saved[:3]))


def _attention_work(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Work:
    """Return the work of a forward of attention. With a window, each query reads as many keys as the window has.
    Without a window, every pair of tokens counts, as in `train.flops`."""
    every = k.shape[2]
    keys = min(every, window or every)
    flops = 2 * prod(q.shape[:3]) * keys * (q.shape[3] + v.shape[3])
    return Work("attention", dtype_of(q), (flops, keys, q.shape[3], int(keys == every)))


def _flex_attention(
    note: Callable[[Work], None], q: Tensor, k: Tensor, v: Tensor, options: attention.ScoreOptions, *documents: Any
) -> attention.Attended:
    return attention.Attended(*_FlexAttention.apply(note, options.window, q, k, v))


def _expert_product(kernels: Kernels, rows: Tensor, counts: Tensor, *weights: Tensor) -> ExpertProduct:
    """Return the product of experts that runs on the device family, in place of `mixture_of_experts.expert_product`.
    The values of `counts` are not read."""
    if is_grouped(kernels, dtype_of(rows), widths_of(weights)):
        return grouped_product(counts)
    return looped_product(equal_parts(rows.shape[0], counts.shape[0]))


def _split_sizes(expert_load: float, counts: Tensor, there: Tensor, num_rows: int) -> tuple[list[int], list[int]]:
    """Return the numbers of rows to send to and to receive from each rank, in place of `expert_parallel.split_sizes`.
    The values of `counts` and `there` are not read."""
    ranks = there.shape[0]
    return equal_parts(num_rows, ranks), equal_parts(received_rows(num_rows, ranks, expert_load), ranks)


def _first(outputs: tuple[Tensor, ...]) -> Tensor:
    return outputs[0]
