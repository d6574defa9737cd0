"""Gradient norm and gradient clipping."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.distributed import run_ranks
from titan_launch.optim.clip import clip_grad_norm


def _model(scale: float = 1.0) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 1))
    (model(torch.full((2, 5), 2.0)).sum() * scale).backward()
    return model


def _gradient(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def test_gradients_are_clipped_and_the_norm_before_is_returned() -> None:
    model = _model()
    before = _gradient(model)
    without_gradient = nn.Parameter(torch.zeros(3))
    norm = clip_grad_norm([without_gradient, *model.parameters()], 0.5)
    assert norm.shape == () and type(norm) is torch.Tensor
    torch.testing.assert_close(norm, before.norm())
    torch.testing.assert_close(_gradient(model), before * 0.5 / before.norm(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("max_norm", [0.0, 1e6])
def test_gradients_below_the_maximum_norm_are_unchanged(max_norm: float) -> None:
    model = _model()
    before = _gradient(model)
    clip_grad_norm(model.parameters(), max_norm)
    assert torch.equal(_gradient(model), before)


def test_without_gradients_the_norm_is_zero() -> None:
    assert clip_grad_norm(nn.Linear(2, 2).parameters(), 1.0).item() == 0.0
    assert clip_grad_norm([], 1.0).item() == 0.0


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_norm_that_is_not_finite_is_returned(bad: float, monkeypatch: pytest.MonkeyPatch) -> None:
    model = _model(bad)
    with monkeypatch.context() as forbidden:  # the host must not read the device
        forbidden.setattr(torch.Tensor, "item", None)
        forbidden.setattr(torch.Tensor, "__bool__", None)
        norm = clip_grad_norm(model.parameters(), 1.0)
    assert not norm.isfinite()


def _clip_sharded(mesh_shape: tuple[int, ...]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 1))
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("replicate", "shard")[-len(mesh_shape) :])
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    model(torch.full((2, 5), 2.0)).sum().backward()
    norm = clip_grad_norm(model.parameters(), 0.5)
    assert type(norm) is torch.Tensor
    return norm, [p.grad.full_tensor() for p in model.parameters()]


@pytest.mark.parametrize("mesh_shape", [(2,), (2, 1)])
def test_the_gradient_norm_covers_all_shards(mesh_shape: tuple[int, ...]) -> None:
    plain = _model()
    expected = clip_grad_norm(plain.parameters(), 0.5)
    for norm, gradients in run_ranks(_clip_sharded, 2, mesh_shape):
        torch.testing.assert_close(norm, expected)
        torch.testing.assert_close(torch.cat([g.flatten() for g in gradients]), _gradient(plain))
