"""The mixture of experts, compared with a plain loop over tokens' experts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.tensors import Operations
from titan_launch.config.sections.model import LoRAConfig
from titan_launch.models.decoder import mixture_of_experts
from titan_launch.models.decoder.mixture_of_experts import (
    MixtureOfExperts,
    balance_losses,
    choose,
    grouped_product,
    looped_product,
)
from titan_launch.models.decoder.table_args import ExpertArgs
from titan_launch.models.lora import add_adapters
from titan_launch.plan.experts import is_grouped

DIM = 16
DEEPSEEK: dict[str, Any] = {
    "score": "sigmoid",
    "num_groups": 4,
    "top_k_groups": 2,
    "scale": 2.5,
    "selection_bias_rate": 0.001,
    "shared_hidden_dim": 12,
}
GPT_OSS: dict[str, Any] = {"router_bias": True, "expert_bias": True, "gate_limit": 1.0}


def layer(**args: Any) -> MixtureOfExperts:
    """Return a layer with random values, in fp32."""
    torch.manual_seed(0)
    experts = ExpertArgs.model_validate({"num_experts": 8, "top_k": 3, "hidden_dim": 24, **args})
    shared = None if experts.shared_hidden_dim is None else nn.Linear(DIM, DIM)
    moe = MixtureOfExperts(DIM, experts, nn.functional.silu, shared)
    with torch.no_grad():
        for parameter in moe.experts.parameters():
            parameter.mul_(3)
        if moe.selection_bias is not None:
            moe.selection_bias.normal_(std=0.2)
    return moe


def computed_by_loops(moe: MixtureOfExperts, x: Tensor) -> Tensor:
    """Return the layer's output, of one token after another."""
    logits = moe.router(x)
    return torch.stack([_token(moe, row, row_logits) for row, row_logits in zip(x[0], logits[0], strict=True)])[None]


def _token(moe: MixtureOfExperts, x: Tensor, logits: Tensor) -> Tensor:
    args, experts = moe.args, moe.experts
    scores = logits.softmax(0) if args.score == "softmax" else logits.sigmoid()
    ranked = scores if moe.selection_bias is None else scores + moe.selection_bias
    size = args.num_experts // args.num_groups
    best = ranked.detach().unflatten(0, (-1, size)).sort().values[:, -2:].sum(1)
    groups = best.argsort()[-args.top_k_groups :].tolist()
    candidates = [expert for expert in range(args.num_experts) if args.num_groups == 1 or expert // size in groups]
    chosen = sorted(candidates, key=ranked.tolist().__getitem__)[-args.top_k :]
    total = sum(scores[expert] for expert in chosen) if args.normalize else 1.0
    result = torch.zeros_like(x) if moe.shared_experts is None else moe.shared_experts(x)
    for expert in chosen:
        biases = [0.0 if b is None else b[expert] for b in (experts.b1, experts.b2, experts.b3)]
        gate, up = experts.w1[expert] @ x + biases[0], experts.w3[expert] @ x + biases[2]
        if args.gate_limit is None:
            hidden = nn.functional.silu(gate) * up
        else:
            gate, up = gate.clamp(max=args.gate_limit), up.clamp(-args.gate_limit, args.gate_limit)
            hidden = gate * torch.sigmoid(1.702 * gate) * (up + 1)
        result = result + args.scale * scores[expert] / total * (experts.w2[expert] @ hidden + biases[1])
    return result


@pytest.mark.parametrize("args", [{}, {"normalize": False}, DEEPSEEK, GPT_OSS], ids=str)
def test_outputs_and_gradients_are_those_of_loops(args: dict[str, Any]) -> None:
    moe = layer(**args)
    x = torch.randn(1, 30, DIM, requires_grad=True)
    inputs = [x, *moe.parameters()]
    actual, expected = moe(x), computed_by_loops(moe, x)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5 * float(expected.detach().abs().max()))
    gradients = [torch.autograd.grad(out.square().sum(), inputs, retain_graph=True) for out in (actual, expected)]
    for own, of_loops in zip(*gradients, strict=True):
        torch.testing.assert_close(own, of_loops, rtol=1e-4, atol=1e-4 * float(of_loops.abs().max()))


@pytest.mark.parametrize(("dtype", "width"), [(torch.float32, 16), (torch.float64, 5), (torch.bfloat16, 12)])
def test_looped_products_are_those_of_linear_layers(dtype: torch.dtype, width: int) -> None:
    """An expert without rows, widths that grouped products reject, and tensors that take no gradient."""
    counts = [5, 0, 30, 5]
    rows, weights, bias = (torch.randn(size, dtype=dtype) for size in ((40, width), (4, 7, width), (4, 7)))
    gradient = torch.randn(40, 7, dtype=dtype)
    for given in ([rows, weights, bias], [rows, weights], [weights], [rows]):
        needed = [tensor.requires_grad_() for tensor in given]
        own_bias = bias if len(given) == 3 else None
        looped = looped_product(counts)(rows, weights, own_bias)
        linear = torch.cat(
            [
                nn.functional.linear(part, weights[index], None if own_bias is None else own_bias[index])
                for index, part in enumerate(rows.split(counts))
            ]
        )
        assert torch.equal(looped, linear)
        pairs = zip(*(torch.autograd.grad(out, needed, gradient) for out in (looped, linear)), strict=True)
        assert all(torch.equal(own, expected) for own, expected in pairs)
        for tensor in needed:
            tensor.requires_grad_(False)


def test_grouped_products_require_rows_of_16_bytes_in_bfloat16_on_cuda() -> None:
    cases = {("cuda", "bfloat16", (24, 40)): True, ("cuda", "bfloat16", (24, 20)): False}
    cases |= {("cuda", "bfloat16", (12, 40)): False, ("cuda", "float32", (24, 40)): False}
    cases |= {("cpu", "bfloat16", (24, 40)): False, ("meta", "bfloat16", (24, 40)): False}
    assert {case: is_grouped(*case) for case in cases} == cases


_ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 0.1}


@pytest.mark.parametrize("dtype", _ROUNDING)
def test_grouped_products_are_those_of_the_loop(dtype: torch.dtype) -> None:
    counts = torch.tensor([5, 0, 30, 5])
    given = [torch.randn(size, dtype=dtype, requires_grad=True) for size in ((40, 32), (4, 24, 32), (4, 24))]
    grouped, looped = grouped_product(counts)(*given), looped_product(counts.tolist())(*given)
    torch.testing.assert_close(grouped, looped, rtol=2e-2, atol=_ROUNDING[dtype])
    weights = torch.randn_like(grouped)
    gradients = [torch.autograd.grad((out * weights).sum(), given) for out in (grouped, looped)]
    for own, of_loop in zip(*gradients, strict=True):
        torch.testing.assert_close(own, of_loop, rtol=2e-2, atol=_ROUNDING[dtype])


@pytest.mark.parametrize(("width", "rank"), [(60, 8), (64, 4), (64, 8)])
def test_adapters_are_grouped_only_if_all_their_widths_are_suitable(
    width: int, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A product decides as on CUDA. `F.grouped_mm` rejects unsuitable widths on a CPU too."""
    args = ExpertArgs(num_experts=4, top_k=2, hidden_dim=width)
    model = nn.Sequential(MixtureOfExperts(64, args, F.silu))
    add_adapters(model, LoRAConfig(targets=["0.experts"], rank=rank), device=torch.device("cpu"))
    for adapter in model[0].experts.lora.values():
        nn.init.normal_(adapter.b, std=0.1)
    x = torch.randn(1, 12, 64).bfloat16()
    model, expected = model.bfloat16(), model.bfloat16()(x)
    monkeypatch.setattr(mixture_of_experts, "is_grouped", lambda device, *case: is_grouped("cuda", *case))
    actual = model(x)
    torch.testing.assert_close(actual, expected, rtol=2e-2, atol=2e-2)
    actual.float().sum().backward()


def test_experts_without_rows_have_no_gradients_where_pytorch_gives_them_some(monkeypatch: pytest.MonkeyPatch) -> None:
    """On Blackwell, its grouped product does (pytorch issue 172439)."""
    counts, own = torch.tensor([5, 0, 30]), mixture_of_experts._OfUsedExperts
    weights = torch.randn(3, 24, 32, requires_grad=True)
    (gradient,) = torch.autograd.grad(own.apply(weights, counts), weights, torch.ones(3, 24, 32))
    assert gradient.amax((1, 2)).tolist() == gradient.amin((1, 2)).tolist() == [1, 0, 1]
    biases = torch.randn(3, 24, requires_grad=True)
    monkeypatch.setattr(F, "grouped_mm", lambda *_, **__: torch.ones(3, 8, 24))
    result = mixture_of_experts._OfRows.apply(biases, counts, counts.cumsum(0).int(), 35)
    (gradient,) = torch.autograd.grad(result, biases, torch.ones(35, 24))
    assert gradient.amax(1).tolist() == gradient.amin(1).tolist() == [1, 0, 1]


def test_gradients_of_grouped_biases_are_summed_in_fp32() -> None:
    """Their only error is one rounding to bf16, and no kernel adds in bf16 with atomics on CUDA, as `index_add` does.
    Sums in bf16 stop growing: 256 + 1 is 256."""
    counts = torch.tensor([2500, 0, 1, 599])
    given = [torch.randn(size).bfloat16().requires_grad_() for size in ((3100, 32), (4, 24, 32), (4, 24))]
    gradient = torch.rand(3100, 24).bfloat16()
    parts = gradient.split(counts.tolist())
    expected = torch.stack([part.double().sum(0) for part in parts])
    for product in (grouped_product(counts), looped_product(counts.tolist())):
        result = product(*given)
        with Operations() as backward:
            sums = [torch.autograd.grad(result, given[2], gradient, retain_graph=True)[0] for _ in range(2)]
        assert torch.equal(*sums)
        torch.testing.assert_close(sums[0].double(), expected, rtol=2**-8, atol=0)
        assert not {"index_add", "index_add_", "index_put", "index_put_", "scatter_add"} & set(backward.counts)
    in_bf16 = torch.zeros(24, dtype=torch.bfloat16)
    for row in parts[0]:
        in_bf16 += row
    assert (in_bf16.double() < 0.5 * expected[0]).all()


def test_the_balance_loss_is_1_for_an_equal_load() -> None:
    logits = torch.eye(8).repeat(2, 4, 1) * 1e-3  # each expert is the first choice equally often
    args = ExpertArgs(num_experts=8, top_k=1, hidden_dim=4)
    torch.testing.assert_close(balance_losses(choose(logits, args)), torch.ones(2))


def test_losses_reach_the_router_but_not_the_output() -> None:
    x = torch.randn(2, 30, DIM)
    plain, weighted = layer(), layer(balance_loss=0.1, z_loss=0.01)
    assert torch.equal(plain(x), weighted(x))
    logits = weighted.router(x)
    choice = choose(logits, weighted.args)
    loss = 0.1 * balance_losses(choice).mean() + 0.01 * logits.logsumexp(-1).square().mean()
    (expected,) = torch.autograd.grad(loss, weighted.router.weight)
    (actual,) = torch.autograd.grad(weighted(x), weighted.router.weight, torch.zeros_like(x))
    torch.testing.assert_close(actual, expected)
