"""The loss as sums over valid targets: of logits, and in chunks of classes in an output layer."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils._python_dispatch import TorchDispatchMode

from tests.distributed import run_ranks
from titan_launch.config.sections.data import IGNORED_TARGET
from titan_launch.config.sections.loss import LossConfig
from titan_launch.core.errors import ConfigError
from titan_launch.loss.cross_entropy import CrossEntropy
from titan_launch.loss.interface import count_valid
from titan_launch.models.decoder.layers import CappedLinear
from titan_launch.models.decoder.mixture_of_experts import z_losses

REGULARIZED: dict[str, Any] = {"z_loss": 0.02, "label_smoothing": 0.1}


@functools.cache
def batch() -> tuple[Tensor, Tensor]:
    """Return inputs (2, 12, 16) and targets below 61, some of which are ignored."""
    generator = torch.Generator().manual_seed(0)
    x, targets = (
        torch.randn(2, 12, 16, generator=generator, dtype=torch.float64),
        torch.randint(0, 61, (2, 12), generator=generator),
    )
    targets[0, 2:5] = IGNORED_TARGET
    return x, targets


def output_layer(kind: type[nn.Linear], dtype: torch.dtype, bias: bool) -> nn.Linear:
    layer = (CappedLinear(16, 61, cap=5.0) if kind is CappedLinear else nn.Linear(16, 61, bias=bias)).double()
    generator = torch.Generator().manual_seed(1)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, generator=generator)
    return layer.to(dtype)


Measured = dict[str, Tensor]


def measured(layer: nn.Linear, config: LossConfig, in_head: bool, targets: Tensor | None = None) -> Measured:
    """Return the sums of training and of validation, and all gradients."""
    x, all_targets = batch()
    targets = all_targets if targets is None else targets
    x = x.to(layer.weight.dtype).requires_grad_()
    loss = CrossEntropy(config)
    if in_head:
        loss.compute_in(layer)
    with loss.given(targets):
        outputs = layer(x)
    sums = loss.sums(outputs, targets)
    assert sums.dtype == torch.float32
    (sums / 7)[0].backward()
    with torch.no_grad(), loss.given(targets):
        validation = loss.sums(layer(x), targets)
    gradients = {name: p.grad for name, p in (("x", x), *layer.named_parameters()) if p.grad is not None}
    assert gradients.keys() == {"x", *dict(layer.named_parameters())}
    return {"sums": sums.detach(), "validation": validation, **gradients}


def exactly(config: LossConfig, kind: type[nn.Linear], dtype: torch.dtype, bias: bool) -> Measured:
    """Return the same by the definitions, from the same values, in fp64."""
    layer, (x, targets) = output_layer(kind, dtype, bias).double(), batch()
    x = x.to(dtype).double().requires_grad_()
    logits = layer(x)[targets != IGNORED_TARGET]
    wanted = targets[targets != IGNORED_TARGET]
    log_probabilities = logits.log_softmax(-1)
    of_target = -log_probabilities.gather(-1, wanted[:, None]).sum()
    smooth = -log_probabilities.mean(-1).sum()
    smoothing = config.label_smoothing
    z_loss = config.z_loss * logits.exp().sum(-1).log().square().sum()
    sums = torch.stack([(1 - smoothing) * of_target + smoothing * smooth + z_loss, z_loss.detach()])
    (sums / 7)[0].backward()
    validation = torch.stack([of_target, (logits.argmax(-1) == wanted).sum()])
    gradients = {name: p.grad for name, p in (("x", x), *layer.named_parameters()) if p.grad is not None}
    return {"sums": sums.detach(), "validation": validation.detach(), **gradients}


def error(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm().clamp(min=1e-12))


def test_the_scales_of_z_losses_are_those_on_the_pages() -> None:
    """Of logits that are 0: docs/how_to/losses.md, and of a router: docs/how_to/mixtures_of_experts.md."""
    targets = torch.tensor([3, 4, IGNORED_TARGET])
    cross_entropy, reported = CrossEntropy(LossConfig(z_loss=1e-4)).sums(torch.zeros(3, 128_256), targets) / 2
    assert (round(float(reported), 4), round(float(cross_entropy - reported), 2)) == (0.0138, 11.76)
    assert [round(0.001 * loss, 4) for loss in z_losses(torch.zeros(2, 5, 128)).tolist()] == [0.0235] * 2


@pytest.mark.parametrize("kind", [nn.Linear, CappedLinear])
@pytest.mark.parametrize("settings", [{}, REGULARIZED], ids=["plain", "regularized"])
def test_every_way_to_compute_the_loss_is_exact(kind: type[nn.Linear], settings: dict[str, Any]) -> None:
    """In bf16 the gradient of the weight has the same bits with chunks as without: each element is one rounded sum. The
    gradient of the input is a sum over chunks, and has one rounding more."""
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 6e-3)):
        config = LossConfig(**settings)
        exact = exactly(config, kind, dtype, bias=bool(settings))
        whole = measured(output_layer(kind, dtype, bool(settings)), config, in_head=False)
        ways = {"logits": whole}
        for chunks in (2, 3, 8, 100):
            chunked = LossConfig(chunks=chunks, **settings)
            for in_head in (False, True):
                layer = output_layer(kind, dtype, bool(settings))
                ways[f"{chunks} chunks, {in_head}"] = measured(layer, chunked, in_head)
        for way, found in ways.items():
            assert found.keys() == exact.keys()
            # bf16 logits are rounded, which is not the loss's own error
            for name in found:
                assert error(found[name], exact[name]) < tolerance, (way, name)
            assert float(found["validation"][1]) == float(whole["validation"][1]), way
            if dtype == torch.bfloat16 and way.endswith("True"):
                assert torch.equal(found["weight"], whole["weight"]), way
                assert error(found["x"], exact["x"]) < 2 * error(whole["x"], exact["x"]), way


def test_without_valid_targets_sums_and_gradients_are_zero() -> None:
    nothing = torch.full((2, 12), IGNORED_TARGET)
    for chunks, in_head in ((1, False), (3, False), (3, True)):
        layer = output_layer(nn.Linear, torch.float32, bias=True)
        found = measured(layer, LossConfig(chunks=chunks, **REGULARIZED), in_head, nothing)
        assert not any(tensor.any() for tensor in found.values()), (chunks, in_head)
    assert count_valid(nothing).item() == 0 and count_valid(batch()[1]).item() == 21


def test_a_frozen_weight_or_input_takes_no_gradient() -> None:
    layer, (x, targets) = output_layer(nn.Linear, torch.float32, bias=True), batch()
    loss = CrossEntropy(LossConfig(chunks=4))
    loss.compute_in(layer)
    for parameter in layer.parameters():
        parameter.requires_grad_(False)
    x = x.float().requires_grad_()
    with loss.given(targets):
        loss.sums(layer(x), targets)[0].backward()
    assert x.grad is not None and layer.weight.grad is None and layer.bias.grad is None
    layer.weight.requires_grad_(True)
    with loss.given(targets):
        loss.sums(layer(x.detach()), targets)[0].backward()
    assert layer.weight.grad is not None and layer.bias.grad is None


def test_the_head_returns_logits_without_targets_and_refuses_a_changed_output() -> None:
    layer, (x, targets) = output_layer(nn.Linear, torch.float32, bias=False), batch()
    expected = layer(x.float())
    loss = CrossEntropy(LossConfig(chunks=4))
    loss.compute_in(layer)
    assert torch.equal(layer(x.float()), expected)
    with loss.given(targets):
        outputs = layer(x.float())
    with pytest.raises(
        ConfigError, match=r"loss\.chunks: with chunks, the model's output layer computes the loss, but"
    ):
        loss.sums(outputs[None], targets)


def test_logits_are_rounded_as_the_policies_say() -> None:
    """The loss of bf16 logits of an fp32 head, and its gradient, are those of the cast without chunks."""
    x, targets = batch()
    whole, head = (output_layer(nn.Linear, torch.float32, bias=False) for _ in range(2))
    expected = CrossEntropy().sums(whole(x.float()).bfloat16(), targets)
    expected[0].backward()
    loss = CrossEntropy(LossConfig(chunks=4))
    loss.compute_in(head, [torch.bfloat16])
    with loss.given(targets):
        found = loss.sums(head(x.float()), targets)
    found[0].backward()
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(head.weight.grad, whole.weight.grad)
    assert not torch.equal(expected, CrossEntropy().sums(whole(x.float()), targets))


def test_counts_the_targets_with_the_largest_logit() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0], [3.0, 0.0, 0.0], [0.0, 1.0, 1.0], [0.0, 1.0, 1.0], [9.0, 0.0, 0.0]])
    targets = torch.tensor([1, 2, 1, 2, IGNORED_TARGET])
    repeated = logits.repeat(1, 8)  # of equal logits, the first is the largest: that of the first chunk
    for chunks in (1, 2):
        with torch.no_grad():
            assert (
                CrossEntropy(LossConfig(chunks=chunks)).sums(logits.view(1, 5, 3).bfloat16(), targets.view(1, 5))[1]
                == 2
            )
            assert CrossEntropy(LossConfig(chunks=chunks)).sums(repeated, targets)[1] == 2


def test_large_logits_lose_no_digits() -> None:
    logits = torch.randn(24, 40, generator=torch.Generator().manual_seed(0)) + 1e4
    targets = torch.arange(24)
    exact = F.cross_entropy(logits.double(), targets, reduction="sum")
    for chunks in (1, 3):
        assert error(CrossEntropy(LossConfig(chunks=chunks)).sums(logits, targets)[0], exact) < 1e-6


class LargestTensor(TorchDispatchMode):
    """A dispatch mode that records the elements of the largest tensor that an operation creates."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple) else (result,):
            if isinstance(tensor, Tensor):
                self.numel = max(self.numel, tensor.numel())
        return result


def test_logits_exist_for_one_chunk_at_a_time() -> None:
    x, targets = torch.randn(64, 8, requires_grad=True), torch.randint(0, 160, (64,))
    for chunks, expected in ((1, 64 * 160), (4, 64 * 40)):
        head, loss = nn.Linear(8, 160, bias=False), CrossEntropy(LossConfig(chunks=chunks))
        if chunks > 1:
            loss.compute_in(head)
        with LargestTensor() as largest, loss.given(targets):
            loss.sums(head(x), targets)[0].backward()
        assert largest.numel == expected


def divided_by_class() -> None:
    """Compare the loss of logits that two ranks divide by class with that of whole logits, on every rank."""
    mesh = init_device_mesh("cpu", (2,))
    generator = torch.Generator().manual_seed(0)
    targets = torch.randint(0, 48, (2, 8), generator=generator)
    targets[0, 2:5] = IGNORED_TARGET
    logits = torch.randn(2, 8, 48, generator=generator).mul(30)
    logits[1, :4] = logits[1, :4].round().clamp(0, 1)  # equal logits on both ranks
    own = logits.chunk(2, dim=-1)[mesh.get_local_rank()]
    whole = logits.requires_grad_()
    expected = CrossEntropy(LossConfig(**REGULARIZED)).sums(whole, targets)
    (expected / 7)[0].backward()
    for chunks in (1, 2, 100):
        divided = DTensor.from_local(own.detach(), mesh, [Shard(2)], run_check=False).requires_grad_()
        loss = CrossEntropy(LossConfig(chunks=chunks, **REGULARIZED))
        sums = loss.sums(divided, targets)
        (sums / 7)[0].backward()
        torch.testing.assert_close(sums, expected, rtol=1e-6, atol=0)
        assert divided.grad is not None and divided.grad.placements == (Shard(2),) and whole.grad is not None
        torch.testing.assert_close(divided.grad.full_tensor(), whole.grad, rtol=2e-6, atol=2e-7)
        with torch.no_grad():
            torch.testing.assert_close(
                loss.sums(divided, targets), CrossEntropy().sums(whole, targets), rtol=1e-6, atol=0
            )


def test_logits_divided_by_class_give_the_same_loss() -> None:
    run_ranks(divided_by_class, 2)
