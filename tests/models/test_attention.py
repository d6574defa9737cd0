"""Attention against its formula, with every option and on every path."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from titan_launch.models.decoder import attention
from titan_launch.models.decoder.attention import (
    Documents,
    KeyValueCache,
    ScoreOptions,
    attend,
    attend_with_logsumexp,
    causal_attention,
    make_block_mask,
)
from titan_launch.models.decoder.layers import AttentionSinks

DOCUMENTS = torch.tensor([[0] * 5 + [1] * 3 + [2] * 2, [7] * 10])

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "scale": {"scale": 0.1},
    "window": {"window": 3},
    "window of one": {"window": 1},
    "window over all tokens": {"window": 10},
    "soft cap": {"soft_cap": 0.5, "scale": 0.7},
    "soft cap and window": {"soft_cap": 0.5, "window": 4},
    "documents": {"documents": DOCUMENTS},
    "documents and window": {"documents": DOCUMENTS, "window": 2},
    "all": {"documents": DOCUMENTS, "window": 4, "soft_cap": 0.5, "scale": 0.7},
}

MASKED = [name for name in OPTIONS if name not in ("plain", "scale", "window over all tokens")]


def explicit_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    documents: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    distance = torch.arange(q.shape[2])[:, None] - torch.arange(q.shape[2])
    excluded = distance < 0
    if window is not None:
        excluded = excluded | (distance >= window)
    if documents is not None:
        excluded = (excluded | (documents[:, :, None] != documents[:, None, :]))[:, None]
    scores = scores.masked_fill(excluded.to(q.device), -torch.inf)
    if sinks is None:
        return scores.softmax(-1) @ v
    columns = sinks[:, None, None].expand(len(q), -1, q.shape[2], 1)
    return torch.cat([scores, columns], dim=-1).softmax(-1)[..., :-1] @ v


def random_sinks(device: str = "cpu") -> AttentionSinks:
    sinks = AttentionSinks(6).to(device)
    with torch.no_grad():
        sinks.weight.copy_(torch.linspace(-2, 3, 6))
    return sinks


def arguments(name: str) -> tuple[ScoreOptions, Documents | None]:
    """Return the arguments of `attend` for a row of `OPTIONS`."""
    return score_arguments(OPTIONS[name], "cpu")


def score_arguments(options: dict[str, Any], device: str) -> tuple[ScoreOptions, Documents | None]:
    """Return the arguments of `attend` for the arguments of `explicit_attention`."""
    options = dict(options)
    numbers = options.pop("documents", None)
    documents = None if numbers is None else Documents(numbers.to(device), [options.get("window")])
    return ScoreOptions(**options), documents


def _inputs(
    n_kv_heads: int,
    dtype: torch.dtype = torch.float32,
    width_of_values: int = 16,
    num_tokens: int = 10,
    width: int = 16,
) -> list[Tensor]:
    generator, shape = torch.Generator().manual_seed(0), (2, num_tokens)  # tokens before heads, as in a model
    shapes = [(*shape, 6, width), (*shape, n_kv_heads, width), (*shape, n_kv_heads, width_of_values)]
    return [torch.randn(shape, generator=generator).to(dtype).transpose(1, 2).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("n_kv_heads", [1, 2, 6])
@pytest.mark.parametrize("name", OPTIONS)
def test_attention_is_its_formula(name: str, n_kv_heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_QUERIES", 4)  # 4 + 4 + 2 queries
    inputs, upstream = _inputs(n_kv_heads), torch.randn(2, 6, 10, 16)
    actual, expected = attend(*inputs, *arguments(name)), explicit_attention(*inputs, **OPTIONS[name])
    torch.testing.assert_close(actual, expected)
    gradients = [torch.autograd.grad(output, inputs, upstream) for output in (actual, expected)]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("name", OPTIONS)
def test_sinks_are_columns_of_the_scores(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_QUERIES", 4)
    sinks, upstream = random_sinks(), torch.randn(2, 6, 10, 16)
    inputs = [*_inputs(2), sinks.weight]
    actual = sinks(*attend_with_logsumexp(*inputs[:3], *arguments(name)))
    expected = explicit_attention(*inputs[:3], **OPTIONS[name], sinks=sinks.weight)
    torch.testing.assert_close(actual, expected)
    gradients = [torch.autograd.grad(output, inputs, upstream) for output in (actual, expected)]
    torch.testing.assert_close(*gradients)
    in_bf16 = sinks(*attend_with_logsumexp(*(x.bfloat16() for x in inputs[:3]), *arguments(name)))
    assert in_bf16.dtype == torch.bfloat16
    torch.testing.assert_close(in_bf16.float(), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("name", OPTIONS)
def test_the_result_has_the_dtype_of_the_queries(name: str) -> None:
    inputs = _inputs(2, torch.bfloat16)
    actual = attend(*inputs, *arguments(name))
    expected = explicit_attention(*(x.float() for x in inputs), **OPTIONS[name])
    assert actual.dtype == torch.bfloat16
    torch.testing.assert_close(actual.float(), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("width", [12, 20])
@pytest.mark.parametrize("name", OPTIONS)
def test_values_may_have_another_width(name: str, width: int) -> None:
    inputs, upstream = _inputs(2, width_of_values=width), torch.randn(2, 6, 10, width)
    actual, expected = attend(*inputs, *arguments(name)), explicit_attention(*inputs, **OPTIONS[name])
    torch.testing.assert_close(actual, expected)
    gradients = [torch.autograd.grad(output, inputs, upstream) for output in (actual, expected)]
    torch.testing.assert_close(*gradients)


def test_values_that_are_not_padded_give_the_same_attention() -> None:
    """The kernel that stores all scores takes values of any width on a CPU."""
    inputs = _inputs(2, width_of_values=12)
    torch.testing.assert_close(causal_attention(*inputs, pads_values=False), causal_attention(*inputs))


def test_values_of_another_width_have_a_fused_kernel() -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        causal_attention(*_inputs(2, width_of_values=12))


def test_plain_attention_is_pytorchs_own() -> None:
    """A window that excludes nothing changes no bit."""
    q, k, v = _inputs(6)
    own = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert torch.equal(attend(q, k, v, ScoreOptions(window=10)), own)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("name", MASKED)
def test_flex_attention_is_the_formula(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its forward runs on a CPU without compilation; a kernel needs a GPU."""
    monkeypatch.setattr(attention, "_compiled_flex_attention", attention.flex_attention)
    q, k, v = (x.detach() for x in _inputs(2))
    options, documents = arguments(name)
    _make_block_masks(documents, options.window)
    actual = attention._flex_attention(q, k, v, options, documents)
    torch.testing.assert_close(actual, explicit_attention(q, k, v, **OPTIONS[name]))
    sinks = random_sinks()
    with_sinks = sinks(*attention._flex_attention(q, k, v, options, documents, has_logsumexp=True))
    torch.testing.assert_close(with_sinks, explicit_attention(q, k, v, **OPTIONS[name], sinks=sinks.weight))


@pytest.mark.parametrize("has_documents", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 127, 128, 129, 384, 1120])
def test_block_masks_are_those_of_pytorch(num_tokens: int, has_documents: bool) -> None:
    """PyTorch finds the blocks from a mask of all pairs of tokens."""
    from torch.nn.attention.flex_attention import create_block_mask

    begins = torch.rand(3, num_tokens, generator=torch.Generator().manual_seed(0)) < 0.01
    documents = begins.int().cumsum(-1) if has_documents else None
    for window in (None, 1, 100, 128, 129, 300, 2000):
        actual = make_block_mask(num_tokens, window, documents, torch.device("cpu"))
        batch_size = 3 if has_documents else None
        own = create_block_mask(actual.mask_mod, batch_size, None, num_tokens, num_tokens, device="cpu")
        assert (actual.seq_lengths, actual.BLOCK_SIZE) == (own.seq_lengths, own.BLOCK_SIZE)
        for name in ("kv", "q", "full_kv", "full_q"):
            numbers, indices = (getattr(own, f"{name}_{kind}") for kind in ("num_blocks", "indices"))
            assert torch.equal(getattr(actual, f"{name}_num_blocks"), numbers)
            is_read = torch.arange(indices.shape[-1]) < numbers[..., None]
            assert torch.equal(getattr(actual, f"{name}_indices")[is_read], indices[is_read])


class OnCUDA(Tensor):
    """A tensor of a CPU that pretends to be on CUDA."""

    is_cuda = True


def test_layers_with_the_same_window_share_a_block_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int | None] = []

    def make(num_tokens: int, window: int | None, *others: Any) -> Any:
        made.append(window)
        return make_block_mask(num_tokens, window, *others)

    monkeypatch.setattr(attention, "make_block_mask", make)
    documents = Documents(DOCUMENTS.as_subclass(OnCUDA), [4, None, 4, None])
    assert len(made) == 2 and documents.block_masks.keys() == {4, None}
    assert not Documents(DOCUMENTS, [4, None]).block_masks  # a CPU has no kernel for them


def test_microbatches_with_documents_share_a_graph() -> None:
    """The block masks are inputs of a compiled block, because they are built outside of it."""
    from torch._dynamo.testing import CompileCounter

    q, k, v = (x.detach() for x in _inputs(2))
    counter = CompileCounter()
    compiled = torch.compile(attention._flex_attention, backend=counter, fullgraph=True, dynamic=False)
    for numbers in (DOCUMENTS, DOCUMENTS.flip(0)):
        documents = Documents(numbers, [4])
        _make_block_masks(documents, 4)
        actual = compiled(q, k, v, ScoreOptions(window=4), documents)
        torch.testing.assert_close(actual, explicit_attention(q, k, v, window=4, documents=numbers))
    assert counter.frame_count == 1


def _make_block_masks(documents: Documents | None, window: int | None) -> None:
    """Make the block masks that documents have on CUDA only."""
    if documents is not None:
        documents.block_masks = {window: make_block_mask(10, window, documents.numbers, documents.numbers.device)}


@pytest.mark.parametrize("name", [name for name in OPTIONS if "documents" not in OPTIONS[name]])
def test_the_last_tokens_attend_to_a_cache_as_in_the_whole_sequence(name: str) -> None:
    q, k, v = _inputs(n_kv_heads=2)
    cache, (options, _) = KeyValueCache(max_tokens=12), arguments(name)
    parts = [slice(0, 5), slice(5, 8), slice(8, 9), slice(9, 10)]
    with torch.no_grad():
        cached = [(q[:, :, part], *cache.append(k[:, :, part], v[:, :, part], options.window)) for part in parts]
        actual = torch.cat([attend(*tensors, options) for tensors in cached], dim=2)
        torch.testing.assert_close(actual, attend(q, k, v, options))
        sinks = random_sinks()
        parts_with_sinks = [sinks(*attend_with_logsumexp(*tensors, options)) for tensors in cached]
        whole = sinks(*attend_with_logsumexp(q, k, v, options))
        torch.testing.assert_close(torch.cat(parts_with_sinks, dim=2), whole)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_causal_attention_has_a_fused_kernel_on_cuda(dtype: torch.dtype) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs CUDA")
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k = (torch.randn(2, heads, 64, 64, device="cuda", dtype=dtype) for heads in (8, 2))
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]):
        attended = causal_attention(q, k, k)
    expected = explicit_attention(*(t.float().cpu() for t in (q, k, k)))
    torch.testing.assert_close(attended.float().cpu(), expected, rtol=2e-2, atol=2e-2)


_TOKENS_OF_ONE, _WIDTH = 112, 128
"""On CUDA, each of the ten tokens of `OPTIONS` is 112 tokens: 1,120 in all, several blocks of 128 and a part of one."""


def options_on_cuda(name: str) -> dict[str, Any]:
    """Return the row of `OPTIONS` for 1,120 tokens. A window of one token stays."""
    options = dict(OPTIONS[name])
    if options.get("window", 1) > 1:
        options["window"] *= _TOKENS_OF_ONE
    if "documents" in options:
        options["documents"] = options["documents"].repeat_interleave(_TOKENS_OF_ONE, dim=1)
    return options


def assert_parts_are_close(actual: Tensor, expected: Tensor) -> None:
    """Compare each head's tokens in parts of 112 by the norm of their difference: late tokens have small values, and a
    block that is wrong must not hide behind early ones."""
    parts = [x.detach().float().cpu().unflatten(2, (-1, _TOKENS_OF_ONE)).flatten(3) for x in (actual, expected)]
    limit = 0.02 * parts[1].norm(dim=-1) + 0.002 * parts[1].shape[-1] ** 0.5
    assert ((parts[0] - parts[1]).norm(dim=-1) <= limit).all()


@pytest.mark.gpu
@pytest.mark.filterwarnings("error:flex_attention called without torch.compile")
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("name", MASKED)
def test_flex_attention_on_cuda(name: str, has_sinks: bool) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs CUDA")
    torch._dynamo.reset()  # each test compiles all that it needs
    check_flex_attention(name, has_sinks, "cuda")


def check_flex_attention(name: str, has_sinks: bool, device: str) -> None:
    """Compare the attention of bf16 tensors on a device, and its gradients, with the formula in fp32."""
    options, sinks = options_on_cuda(name), random_sinks(device)
    num_tokens = 10 * _TOKENS_OF_ONE
    inputs = _inputs(2, torch.bfloat16, _WIDTH, num_tokens, _WIDTH)
    upstream = torch.randn(2, 6, num_tokens, _WIDTH, generator=torch.Generator().manual_seed(1)).bfloat16()
    own = [x.detach().to(device).requires_grad_() for x in inputs]
    given = score_arguments(options, device)
    actual = sinks(*attend_with_logsumexp(*own, *given)) if has_sinks else attend(*own, *given)
    wide, sink = [x.detach().float().requires_grad_() for x in inputs], sinks.weight.detach().cpu().requires_grad_()
    expected = explicit_attention(*wide, **options, sinks=sink if has_sinks else None)
    assert actual.dtype == torch.bfloat16
    assert_parts_are_close(actual, expected)
    actual.backward(upstream.to(device))
    expected.backward(upstream.float())
    for gradient, of_formula in zip(own, wide, strict=True):
        assert gradient.grad is not None and of_formula.grad is not None
        assert_parts_are_close(gradient.grad, of_formula.grad)
    if has_sinks:
        assert sinks.weight.grad is not None and sink.grad is not None
        torch.testing.assert_close(sinks.weight.grad.cpu(), sink.grad, rtol=2e-2, atol=2e-2 * float(sink.grad.norm()))
