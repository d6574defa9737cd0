"""The optimizer, its learning rates, and skipped updates."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from tests.distributed import run_ranks
from titan_launch.config.sections.training import OptimizerConfig
from titan_launch.optim.registry import build_optimizer, step_unless
from titan_launch.optim.schedule import set_lr

IMPLEMENTATIONS = ("fused", "foreach", "for-loop")


def _model() -> nn.Module:
    """Return a model whose last parameter is on one of two ranks only."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 1))


def _sharded(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model[0], mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _config(implementation: str, name: str = "AdamW") -> OptimizerConfig:
    groups = [{"match": "2.weight", "lr_factor": 0.5}]
    settings = {"name": name, "lr": 0.1, "implementation": implementation, "param_groups": groups}
    return OptimizerConfig.model_validate(settings)


def _train(model: nn.Module, optimizer: Optimizer, steps: list[int], bad: tuple[int, ...] = ()) -> None:
    """Train on data that depends on the step. Bad steps have NaN gradients and are skipped."""
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        model(torch.randn(4, 5, generator=generator)).square().sum().backward()
        if step in bad:
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad.mul_(torch.nan)
        step_unless(optimizer, torch.tensor(float(step in bad)))
        optimizer.zero_grad()


def _state(model: nn.Module, optimizer: Optimizer) -> dict[str, torch.Tensor]:
    state = {}
    for name, parameter in model.named_parameters():
        tensors = {"value": parameter.detach(), **optimizer.state[parameter]}
        for key, tensor in tensors.items():
            state[f"{name}/{key}"] = (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()
    return state


def _assert_equal(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in actual.items():
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_adamw_is_the_published_algorithm(implementation: str) -> None:
    model = nn.Linear(3, 2)
    weight, bias = (p.detach().clone().double() for p in (model.weight, model.bias))
    optimizer = build_optimizer(model, OptimizerConfig.model_validate({"lr": 0.1, "implementation": implementation}))
    moments = [[torch.zeros_like(p), torch.zeros_like(p)] for p in (weight, bias)]
    for step in (1, 2, 3):
        x = torch.randn(4, 3)
        model(x).square().sum().backward()
        for p, (m, v), decay, actual in zip(
            (weight, bias), moments, (0.1, 0.0), (model.weight, model.bias), strict=True
        ):
            gradient = actual.grad.double()
            m.mul_(0.9).add_(gradient, alpha=0.1)
            v.mul_(0.95).add_(gradient.square(), alpha=0.05)
            p.mul_(1 - 0.1 * decay)
            p.sub_(0.1 * (m / (1 - 0.9**step)) / ((v / (1 - 0.95**step)).sqrt() + 1e-8))
        optimizer.step()
        optimizer.zero_grad()
        torch.testing.assert_close(model.weight.double(), weight, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(model.bias.double(), bias, rtol=1e-5, atol=1e-6)


def test_set_lr_scales_every_group() -> None:
    optimizer = build_optimizer(_model(), _config("fused"))
    set_lr(optimizer, base_lr=0.2, factor=0.5)
    assert {group["name"].split(",")[0]: group["lr"] for group in optimizer.param_groups} == {
        "default": 0.1,
        "param_groups.0": 0.05,
    }


def _check_skipping(implementation: str, shard: bool, name: str = "AdamW") -> dict[str, torch.Tensor]:
    """Check that a model that skips bad steps is bitwise equal to one without bad steps. The first step is bad, too."""
    model, never = (_sharded(_model()) if shard else _model() for _ in range(2))
    optimizer, never_optimizer = (build_optimizer(m, _config(implementation, name)) for m in (model, never))
    _train(model, optimizer, [0, 1], bad=(0,))
    before = _state(model, optimizer)
    _train(model, optimizer, [2], bad=(2,))
    _assert_equal(_state(model, optimizer), before)
    _train(model, optimizer, [3])
    _train(never, never_optimizer, [1, 3])
    _assert_equal(_state(model, optimizer), _state(never, never_optimizer))
    assert not {"found_inf", "grad_scale"} & vars(optimizer).keys()
    return _state(model, optimizer)


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_skipped_step_changes_no_parameter_and_no_optimizer_state(implementation: str, name: str) -> None:
    _check_skipping(implementation, shard=False, name=name)


def _check_all_sharded() -> dict[str, Any]:
    states = {implementation: _check_skipping(implementation, shard=True) for implementation in IMPLEMENTATIONS}
    return states | {"SGD": _check_skipping("fused", shard=True, name="SGD")}


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_skipped_step_changes_no_sharded_parameter_and_no_optimizer_state(world_size: int) -> None:
    plain = {"fused": _check_skipping("fused", shard=False), "SGD": _check_skipping("fused", shard=False, name="SGD")}
    for states in run_ranks(_check_all_sharded, world_size):
        for case, expected in plain.items():
            for name, tensor in states[case].items():
                torch.testing.assert_close(tensor, expected[name], rtol=1e-5, atol=1e-6, msg=name)


def test_the_fused_update_does_not_read_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _model()
    optimizer = build_optimizer(model, _config("fused"))
    model(torch.randn(4, 5)).sum().backward()
    flag = torch.tensor(1.0)
    monkeypatch.setattr(torch.Tensor, "item", None)
    monkeypatch.setattr(torch.Tensor, "__bool__", None)
    step_unless(optimizer, flag)
