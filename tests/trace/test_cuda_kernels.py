"""Tensors saved for backward while stand-ins replace CUDA's kernels."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from titan_launch.models.decoder.attention import causal_attention
from titan_launch.trace.cuda_kernels import kernels_replaced

B, T, D, H, K, HEAD = 2, 64, 32, 4, 2, 8
BF16, FP32 = torch.bfloat16, torch.float32


def kept_bytes(make: Callable[[], tuple[Callable[..., Tensor], list[Tensor]]]) -> int:
    """Return the bytes saved for backward, on tensors without values. Check the shapes of the gradients."""
    storages: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    with FakeTensorMode(), kernels_replaced("cuda"):
        function, inputs = make()
        for tensor in inputs:
            tensor.requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            output = function(*inputs)
        for tensor, gradient in zip(inputs, torch.autograd.grad(output.float().sum(), inputs), strict=True):
            assert (gradient.shape, gradient.dtype) == (tensor.shape, tensor.dtype)
        return sum(storages.values())


def norm(function: Callable[..., Tensor], dtype: torch.dtype, *weights: torch.dtype) -> int:
    return kept_bytes(
        lambda: (
            lambda x, *parameters: function(x, (D,), *parameters),
            [torch.empty(B, T, D, dtype=dtype), *(torch.empty(D, dtype=weight) for weight in weights)],
        )
    )


def attention(
    function: Callable[..., Tensor], dtype: torch.dtype, kv_heads: int, mask: tuple[int, ...] | None = None
) -> int:
    def make() -> tuple[Callable[..., Tensor], list[Tensor]]:
        given = {} if mask is None else {"attn_mask": torch.empty(mask, dtype=dtype)}
        heads = (H, kv_heads, kv_heads)
        return lambda q, k, v: function(q, k, v, **given), [torch.empty(B, n, T, HEAD, dtype=dtype) for n in heads]

    return kept_bytes(make)


def test_rms_norm_keeps_its_input_and_a_factor_for_each_row() -> None:
    assert norm(lambda *args: F.rms_norm(*args), BF16, BF16) == 2 * B * T * D + 2 * D + 4 * B * T
    assert norm(lambda *args: torch.rms_norm(*args), FP32, FP32) == 4 * B * T * D + 4 * D + 4 * B * T


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
def test_rms_norm_of_two_dtypes_is_several_operations_on_cuda_too() -> None:
    assert norm(lambda *args: F.rms_norm(*args), BF16, FP32) > 2 * 4 * B * T * D


def test_layer_norm_keeps_two_fp32_numbers_for_each_row() -> None:
    assert norm(lambda *args: F.layer_norm(*args), BF16, BF16, BF16) == 2 * B * T * D + 2 * 2 * D + 2 * 4 * B * T


def test_flash_attention_keeps_inputs_output_and_a_number_for_each_query() -> None:
    tokens = B * T * HEAD * 2
    assert attention(causal_attention, BF16, K) == pytest.approx(tokens * (2 * H + 2 * K) + 4 * B * H * T, abs=64)


def test_fp32_attention_repeats_keys_and_values() -> None:
    """`causal_attention` repeats them on CUDA: the fused kernel needs as many heads of keys as of queries."""
    tokens = B * T * HEAD * 4
    assert attention(causal_attention, FP32, K) == pytest.approx(tokens * 4 * H + 4 * B * H * T, abs=64)


def test_attention_without_a_fused_kernel_stores_all_scores() -> None:
    def grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    def plain(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask)

    scores = 4 * B * H * T * T
    assert attention(grouped, FP32, K) >= scores > attention(plain, FP32, H)
    assert attention(plain, BF16, H, mask=(B, 1, T, T)) < scores


def test_kernels_of_a_cpu_job_are_not_replaced() -> None:
    before = (F.rms_norm, torch.rms_norm, F.layer_norm, F.scaled_dot_product_attention)
    with kernels_replaced("cpu"):
        assert (F.rms_norm, torch.rms_norm, F.layer_norm, F.scaled_dot_product_attention) == before
    with pytest.raises(ZeroDivisionError), kernels_replaced("cuda"):
        assert F.rms_norm is not before[0]
        raise ZeroDivisionError
    assert (F.rms_norm, torch.rms_norm, F.layer_norm, F.scaled_dot_product_attention) == before


def test_modules_call_the_stand_ins_of_the_kernels() -> None:
    with FakeTensorMode(), kernels_replaced("cuda"):
        x = torch.empty(B, T, D, requires_grad=True)
        assert (
            type(nn.RMSNorm(D)(x).grad_fn).__name__ == type(nn.LayerNorm(D)(x).grad_fn).__name__ == "_FusedNormBackward"
        )
