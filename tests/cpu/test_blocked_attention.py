from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from titan_launch.config.job import JobConfig
from titan_launch.cpu import blocked_attention as blocked
from titan_launch.cpu import switch
from titan_launch.cpu.blocked_attention import attention, blocked_attention, gradients
from titan_launch.models.build import build_model
from titan_launch.plan.layout import Layout
from titan_launch.train.kernel_choice import attention_dtypes, use_kernels
from titan_launch.train.model import plan_precision

_aten = torch.ops.aten
_FORWARD = _aten._scaled_dot_product_flash_attention_for_cpu
_BACKWARD = _aten._scaled_dot_product_flash_attention_for_cpu_backward

SHAPES = {
    "one block": (1, 4, 4, 40, 16),
    "blocks of heads that share none": (2, 4, 4, 300, 8),
    "blocks of heads that share one of keys": (3, 6, 2, 300, 8),
    "a sequence of whole blocks": (1, 2, 1, 256, 32),
    "more heads for a key than a block has rows": (1, 160, 1, 5, 8),
    "one token": (2, 2, 1, 1, 8),
}


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "tokens first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "heads first": lambda x: x.contiguous(),
    "a part of another": lambda x: (
        torch.cat((x, x), -1).transpose(1, 2).contiguous().transpose(1, 2)[..., : x.shape[-1]]
    ),
}
"""Memory layouts of a (batch, heads, tokens, width) tensor. The first one is the output of a model's projections."""


def tensors(shape: tuple[int, int, int, int, int], dtype: torch.dtype, layout: str = "tokens first") -> list[Tensor]:
    """Return queries, keys, values and the gradient of the result."""
    batch, heads, keys, tokens, width = shape
    torch.manual_seed(0)
    return [LAYOUTS[layout](torch.randn(batch, n, tokens, width).to(dtype)) for n in (heads, keys, keys, heads)]


def exact(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, scale: float) -> list[Tensor]:
    """Return the result and the gradients, computed by the formula in float64."""
    q, k, v = (tensor.detach().double().requires_grad_() for tensor in (q, k, v))
    keys, values = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
    future = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)
    result = torch.softmax((scale * q @ keys.mT).masked_fill(future, -math.inf), -1) @ values
    return [result, *torch.autograd.grad(result, (q, k, v), grad.double())]


def errors(own: list[Tensor], right: list[Tensor]) -> list[float]:
    """Return the norm of each error relative to the norm of the exact tensor."""
    return [
        float((a - b).norm() / b.norm().clamp(min=1)) for a, b in zip(own, (t.detach() for t in right), strict=True)
    ]


@pytest.mark.parametrize("scores", [2**19, 2**12], ids=["all heads together", "few heads together"])
@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_error_of_blocked_attention_is_that_of_pytorchs_kernel(
    shape: tuple[int, int, int, int, int], scale: float | None, scores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocked, "_BLOCK_SCORES", scores)
    for dtype in (torch.float32, torch.bfloat16):
        q, k, v, grad = tensors(shape, dtype)
        right = exact(q, k, v, grad, scale or shape[-1] ** -0.5)
        result, sums = attention(q, k, v, scale)
        own = [result, *gradients(grad, q, k, v, scale)]
        other, other_sums = _FORWARD(q, k, v, 0.0, True, scale=scale)
        others = [other, *_BACKWARD(grad, q, k, v, other, other_sums, 0.0, True, scale=scale)]
        for mine, theirs in zip(errors(own, right), errors(others, right), strict=True):
            assert mine <= 1.7 * theirs + torch.finfo(dtype).eps / 4
        torch.testing.assert_close(sums, other_sums, atol=1e-3 if dtype == torch.bfloat16 else 1e-5, rtol=0)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_results_have_the_strides_of_pytorchs_kernel(layout: str) -> None:
    """The strides also agree on the meta device, which a compiler uses."""
    shape = SHAPES["blocks of heads that share one of keys"]
    q, k, v, grad = tensors(shape, torch.bfloat16, layout)
    result, sums = attention(q, k, v)
    own = [result, sums, *gradients(grad, q, k, v)]
    for device in ("cpu", "meta"):
        q, k, v, grad = (tensor.to(device) for tensor in (q, k, v, grad))
        other, other_sums = _FORWARD(q, k, v, 0.0, True)
        others = [other, other_sums, *_BACKWARD(grad, q, k, v, other, other_sums, 0.0, True)]
        for mine, theirs in zip(own, others, strict=True):
            assert (mine.dtype, mine.shape, mine.stride()) == (theirs.dtype, theirs.shape, theirs.stride())


def test_an_expanded_gradient_is_accepted() -> None:
    q, k, v, _ = tensors(SHAPES["blocks of heads that share one of keys"], torch.float32)
    ones = torch.ones(()).expand(q.shape)
    for own, other in zip(gradients(ones, q, k, v), gradients(ones.contiguous(), q, k, v), strict=True):
        assert torch.equal(own, other)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the calls of the blocked functions, on any CPU."""
    seen: list[str] = []
    for name in ("attention", "gradients"):

        def noted(name: str, inner: Any, *args: Any) -> Any:
            seen.append(name)
            return inner(*args)

        monkeypatch.setattr(blocked, name, partial(noted, name, getattr(blocked, name)))
    for module in (blocked, switch):
        monkeypatch.setattr(module, "lengths", lambda: {torch.float32: range(16, 65)})
    return seen


def attend(tokens: int = 32, dtype: torch.dtype = torch.float32, batch: int = 2, **options: Any) -> list[Tensor]:
    q, k, v, grad = tensors((batch, 4, 2, tokens, 8), dtype)
    inputs = [tensor.requires_grad_() for tensor in (q, k, v)]
    result = F.scaled_dot_product_attention(*inputs, enable_gqa=True, **{"is_causal": True} | options)
    return [result, *torch.autograd.grad(result, inputs, grad)]


def test_the_blocked_kernel_replaces_pytorchs_only_within_its_context(calls: list[str]) -> None:
    before = attend()
    with blocked_attention():
        during = attend()
        assert calls == ["attention", "gradients"]
        with blocked_attention():  # another run in the same process
            attend()
        attend()
    assert len(calls) == 6
    after = attend()
    assert len(calls) == 6
    for first, second, third in zip(before, during, after, strict=True):
        assert torch.equal(first, third) and not torch.equal(first, second)
        torch.testing.assert_close(first, second)


@pytest.mark.parametrize(
    "call",
    [
        {"tokens": 15},
        {"tokens": 65},
        {"dtype": torch.float64},
        {"is_causal": False},
        {"batch": 0},
        {"is_causal": False, "attn_mask": torch.ones(32, 32).tril().log()},
    ],
    ids=["short", "long", "dtype", "not causal", "empty", "mask"],
)
def test_other_calls_use_pytorchs_kernel(call: dict[str, Any], calls: list[str]) -> None:
    before = attend(**call)
    with blocked_attention():
        during = attend(**call)
    assert not calls
    assert all(torch.equal(first, second) for first, second in zip(before, during, strict=True))


def test_the_precision_of_other_matrix_products_is_restored() -> None:
    products: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = products.fp32_precision
    q, k, v, grad = tensors((1, 2, 2, 8, 8), torch.bfloat16)
    attention(q, k, v)
    with pytest.raises(RuntimeError):
        gradients(grad[..., :4], q, k, v)  # the shape is not that of the result
    assert products.fp32_precision == before


def test_blocked_attention_stays_on_until_the_last_of_its_contexts_closes(calls: list[str]) -> None:
    first, second = ExitStack(), ExitStack()
    first.enter_context(blocked_attention())
    second.enter_context(blocked_attention())
    first.close()
    attend()
    second.close()
    attend()
    assert len(calls) == 2


def test_a_compiled_function_gets_the_strides_that_it_expects(calls: list[str]) -> None:
    """The strides of the queries differ from those of a model's projections."""

    def heads(q: Tensor, k: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(2 * q, k, k, is_causal=True).view(-1, 32, 8).square().sum()

    q = tensors((2, 4, 4, 32, 8), torch.float32, "heads first")[0].requires_grad_()
    right = torch.autograd.grad(heads(q, q), q)[0]
    with blocked_attention():
        own = torch.autograd.grad(torch.compile(heads, backend="aot_eager", fullgraph=True)(q, q), q)[0]
    assert calls == ["attention", "gradients"]
    torch.testing.assert_close(own, right, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize(
    ("backend", "context", "tokens", "expected"),
    [("auto", 1, 32, 1), ("flash", 1, 32, 0), ("auto", 2, 32, 0), ("auto", 1, 128, 0)],
)
def test_a_run_uses_blocked_attention_by_default(
    backend: str, context: int, tokens: int, expected: int, calls: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Blocked attention is also off for keys that are divided over ranks and for long sequences."""
    sections = {
        "kernels": {"attention": backend},
        "training": {"seq_len": tokens},
        "precision": {"param_dtype": "float32"},
    }
    config = JobConfig.model_validate(sections)
    built = build_model(config.model, tokens)
    plan, cpu = plan_precision(config, built), torch.device("cpu")
    layout = Layout(1, 1, local_batch_size=1, num_microbatches=1, context=context)
    caplog.set_level("INFO", logger="titan_launch")
    with ExitStack() as stack:
        use_kernels(config, built, plan, layout, cpu, stack)
        dtypes = attention_dtypes(config.data, built, plan)
        stack.enter_context(switch.cpu_speedups(built.module, config.kernels, layout, tokens, dtypes, ()))
        attend()
    assert len(calls) == 2 * expected
    used = "blocked CPU kernel, for sequences of 16 to 64 tokens" if expected else "PyTorch's CPU kernels"
    expected_log = "attention: flash" if backend == "flash" else f"attention (float32): {used}"
    assert [record.getMessage() for record in caplog.records] == [expected_log]
