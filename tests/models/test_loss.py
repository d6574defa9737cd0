"""The loss as a sum over valid targets."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils._python_dispatch import TorchDispatchMode

from tests.distributed import run_ranks
from titan_launch.config.sections.data import IGNORED_TARGET
from titan_launch.models.loss import count_correct, count_valid, cross_entropy_sum


def test_the_loss_is_a_sum_over_valid_targets_of_any_shape() -> None:
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


def test_the_loss_of_bfloat16_logits_is_computed_in_float32() -> None:
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


def test_correct_predictions_are_the_targets_with_the_largest_logit() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0], [3.0, 0.0, 0.0], [0.0, 1.0, 1.0], [0.0, 1.0, 1.0], [9.0, 0.0, 0.0]])
    targets = torch.tensor([1, 2, 1, 2, IGNORED_TARGET])
    assert count_correct(logits, targets).item() == 2  # of equal logits, the first is the largest
    assert count_correct(logits.view(1, 5, 3).bfloat16(), targets.view(1, 5)).item() == 2


def loss_and_gradient(logits: Tensor, targets: Tensor, chunks: int) -> tuple[Tensor, Tensor]:
    leaf = logits.detach().clone().requires_grad_()
    loss = cross_entropy_sum(leaf, targets, chunks)
    (loss / 7).backward()
    assert leaf.grad is not None
    return loss.detach(), leaf.grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("chunks", [2, 5, 24, 100])  # of 24 targets: even, uneven, one each, more than targets
def test_chunks_change_no_bit_of_the_gradient(dtype: torch.dtype, chunks: int) -> None:
    generator = torch.Generator().manual_seed(chunks)
    logits = torch.randn(2, 3, 4, 11, generator=generator).mul(3).to(dtype)
    targets = torch.randint(0, 11, (2, 3, 4), generator=generator)
    targets[0, 1] = IGNORED_TARGET  # whole chunks, and parts of some
    loss, gradient = loss_and_gradient(logits, targets, 1)
    chunked_loss, chunked_gradient = loss_and_gradient(logits, targets, chunks)
    assert chunked_loss.dtype == torch.float32
    torch.testing.assert_close(chunked_loss, loss, rtol=1e-6, atol=0)
    assert gradient.dtype == chunked_gradient.dtype == dtype and torch.equal(chunked_gradient, gradient)
    assert torch.count_nonzero(gradient) > 0


def test_the_chunked_loss_of_an_empty_batch_is_zero() -> None:
    for shape in ((0, 5), (3, 5)):
        targets = torch.full(shape[:1], IGNORED_TARGET)
        loss, gradient = loss_and_gradient(torch.randn(shape), targets, 4)
        assert loss.item() == 0 and torch.equal(gradient, torch.zeros(shape))


class LargestFloat32(TorchDispatchMode):
    """A dispatch mode that records the elements of the largest fp32 tensor that an operation creates."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple) else (result,):
            if isinstance(tensor, Tensor) and tensor.dtype == torch.float32:
                self.numel = max(self.numel, tensor.numel())
        return result


def test_fp32_copies_of_the_logits_exist_for_one_chunk_at_a_time() -> None:
    targets = torch.randint(0, 11, (64,))
    for chunks, expected in ((1, 64 * 11), (4, 16 * 11)):
        with LargestFloat32() as largest:
            loss_and_gradient(torch.randn(64, 11, dtype=torch.bfloat16), targets, chunks)
        assert largest.numel == expected


def divided_by_class() -> list[int]:
    """Compare the loss of logits that two ranks divide by class with that of full logits, on every rank. Return the
    largest fp32 tensors of the divided logits in one chunk and in four, and of the full logits."""
    mesh = init_device_mesh("cpu", (2,))
    generator = torch.Generator().manual_seed(0)
    targets = torch.randint(0, 24, (2, 8), generator=generator)
    targets[0, 2:5] = IGNORED_TARGET
    sizes = []
    for dtype in (torch.float32, torch.bfloat16):
        logits = torch.randn(2, 8, 24, generator=generator).mul(30).to(dtype)
        logits[1, :4] = logits[1, :4].round().clamp(0, 1)  # equal logits on both ranks
        own = logits.chunk(2, dim=-1)[mesh.get_local_rank()]
        expected, expected_gradient = loss_and_gradient(logits, targets, 1)
        divided = DTensor.from_local(own, mesh, [Shard(2)], run_check=False)
        assert count_correct(divided, targets) == count_correct(logits, targets)
        for chunks in (1, 4, 100):
            leaf = divided.detach().requires_grad_()
            with LargestFloat32() as largest:
                loss = cross_entropy_sum(leaf, targets, chunks)
                (loss / 7).backward()
            torch.testing.assert_close(loss.detach(), expected, rtol=1e-6, atol=0)
            assert leaf.grad is not None and leaf.grad.placements == (Shard(2),) and leaf.grad.dtype == dtype
            torch.testing.assert_close(leaf.grad.full_tensor(), expected_gradient, rtol=1e-6, atol=1e-7)
            sizes.append(largest.numel)
    nothing = DTensor.from_local(own, mesh, [Shard(2)], run_check=False).requires_grad_()
    loss = cross_entropy_sum(nothing, torch.full((2, 8), IGNORED_TARGET))
    loss.backward()
    assert loss.item() == 0 and nothing.grad is not None and not nothing.grad.to_local().any()
    return sizes[3:5]


def test_logits_sharded_by_class_give_the_same_loss() -> None:
    own = 16 * 24 // 2
    assert run_ranks(divided_by_class, 2) == [[own, own // 4]] * 2
