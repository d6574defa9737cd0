"""The loss as a sum over valid targets."""

from __future__ import annotations

import torch

from titan_launch.constants import IGNORED_TARGET
from titan_launch.loss import count_correct, count_valid, cross_entropy_sum


def test_sums_over_valid_targets_of_any_shape() -> None:
    logits = torch.randn(2, 3, 5, dtype=torch.float64)
    targets = torch.tensor([[0, 4, IGNORED_TARGET], [2, IGNORED_TARGET, 1]])
    expected = sum(
        -logits[b, t].softmax(-1)[target].log()
        for b, row in enumerate(targets.tolist())
        for t, target in enumerate(row)
        if target != IGNORED_TARGET
    )
    loss = cross_entropy_sum(logits, targets)
    assert loss.shape == () and loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(
        cross_entropy_sum(logits[0], targets[0]) + cross_entropy_sum(logits[1], targets[1]), loss
    )
    assert count_valid(targets).item() == 4


def test_computes_bfloat16_outputs_in_float32() -> None:
    logits = torch.randn(64, 11).bfloat16()
    targets = torch.randint(0, 11, (64,))
    assert torch.equal(cross_entropy_sum(logits, targets), cross_entropy_sum(logits.float(), targets))


def test_without_valid_targets_the_loss_is_zero_and_backward_works() -> None:
    logits = torch.randn(4, 5, requires_grad=True)
    targets = torch.full((4,), IGNORED_TARGET)
    loss = cross_entropy_sum(logits, targets)
    loss.backward()
    assert loss.item() == 0.0
    assert logits.grad is not None and torch.equal(logits.grad, torch.zeros_like(logits))
    assert count_valid(targets).item() == 0


def test_counts_the_targets_with_the_largest_logit() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0], [3.0, 0.0, 0.0], [0.0, 1.0, 1.0], [0.0, 1.0, 1.0], [9.0, 0.0, 0.0]])
    targets = torch.tensor([1, 2, 1, 2, IGNORED_TARGET])
    assert count_correct(logits, targets).item() == 2  # of equal logits, the first is the largest
    assert count_correct(logits.view(1, 5, 3).bfloat16(), targets.view(1, 5)).item() == 2
