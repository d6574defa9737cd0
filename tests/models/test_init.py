"""Initial values do not depend on how the model is divided."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.distributed import run_ranks
from titan_launch.core.errors import ConfigError, UserError
from titan_launch.models.decoder.args import DecoderArgs
from titan_launch.models.decoder.module import Decoder, llama_values
from titan_launch.models.init import initialize
from titan_launch.models.initializers import Initializer, InitTable, call_reset_parameters, check_reset_parameters

CPU = torch.device("cpu")


class Scale(nn.Module):
    """A module with a random parameter and a computed buffer, which its own `reset_parameters` sets."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim))
        self.register_buffer("steps", torch.empty(dim, dtype=torch.int64), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight)
        self.steps = torch.arange(len(self.weight), device=self.weight.device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight + self.steps


def users_model() -> nn.Module:
    model = nn.Sequential(nn.Embedding(7, 6), Scale(6), nn.MultiheadAttention(6, 2), nn.Linear(6, 7), nn.BatchNorm1d(7))
    model[3].weight = model[0].weight
    return model


def _build(kind: str) -> tuple[nn.Module, Initializer]:
    if kind == "users":
        return users_model(), call_reset_parameters
    args = DecoderArgs(
        dim=12, n_layers=2, n_heads=2, n_kv_heads=1, hidden_dim=11, vocab_size=13, norm="batchnorm", tie_embeddings=True
    )
    return Decoder(args, 8), llama_values(args)


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _values(model: nn.Module) -> dict[str, torch.Tensor]:
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: _whole(tensor.detach()) for name, tensor in named}


def _initialized(kind: str, seed: int = 5) -> dict[str, torch.Tensor]:
    model, initializer = _build(kind)
    initialize(model, initializer, seed, CPU)
    return _values(model)


def _sharded_from_meta(kind: str, mesh_shape: tuple[int, ...]) -> dict[str, torch.Tensor]:
    with torch.device("meta"):
        model, initializer = _build(kind)
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("replicate", "shard")[-len(mesh_shape) :])
    if isinstance(model, Decoder):
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
    else:
        fully_shard(model[1], mesh=mesh)
        fully_shard(model[2], mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device=CPU)
    torch.manual_seed(dist.get_rank())
    state = torch.get_rng_state()
    initialize(model, initializer, 5, CPU)
    assert torch.equal(torch.get_rng_state(), state)
    return _values(model)


def _both_from_meta(mesh_shape: tuple[int, ...]) -> dict[str, dict[str, torch.Tensor]]:
    return {kind: _sharded_from_meta(kind, mesh_shape) for kind in ("llama", "users")}


@pytest.mark.parametrize("mesh_shape", [(3,), (2, 2)])
def test_every_sharding_has_bitwise_equal_initial_values(mesh_shape: tuple[int, ...]) -> None:
    """Three ranks shard unevenly, and some have no part of a tensor. 2 x 2 is HSDP."""
    expected = {kind: _initialized(kind) for kind in ("llama", "users")}
    for values in run_ranks(_both_from_meta, torch.Size(mesh_shape).numel(), mesh_shape):
        for kind in expected:
            assert values[kind].keys() == expected[kind].keys()
            for name, tensor in values[kind].items():
                assert tensor.dtype == expected[kind][name].dtype and torch.equal(tensor, expected[kind][name]), name


def test_initial_values_depend_on_the_seed_and_the_path() -> None:
    first, other = _initialized("users", seed=5), _initialized("users", seed=6)
    assert not torch.equal(first["0.weight"], other["0.weight"])
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    initialize(model, call_reset_parameters, 5, CPU)
    assert not torch.equal(model[0].weight, model[1].weight)


def test_buffers_are_computed_and_shared_weights_filled_once() -> None:
    model, _ = _build("users")
    initialize(model, call_reset_parameters, 5, CPU)
    assert model[3].weight is model[0].weight
    assert model[0].weight.std().item() > 0.5  # the value of the embedding, not of the linear layer
    assert model[1].steps.tolist() == list(range(6))
    assert torch.equal(model[2].out_proj.bias, torch.zeros(6))


def test_initial_values_in_a_lower_storage_dtype_are_rounded_once() -> None:
    exact = nn.Linear(64, 64)
    rounded = copy.deepcopy(exact).bfloat16()
    for model in (exact, rounded):
        initialize(model, call_reset_parameters, 5, CPU)
    assert torch.equal(rounded.weight, exact.weight.bfloat16())


def test_a_name_without_a_rule_is_an_error() -> None:
    with pytest.raises(AssertionError, match=r"no rule for (weight|bias)"):
        initialize(nn.Linear(2, 2), InitTable([("layers.*", lambda tensor: None)]), 0, CPU)


class Orphan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(2))
        self.register_buffer("mask", torch.ones(2).bool())


def test_modules_with_parameters_but_without_reset_parameters_are_named_once() -> None:
    with pytest.raises(ConfigError) as caught:
        check_reset_parameters(nn.Sequential(nn.Linear(2, 2), Orphan(), Orphan()))
    (problem,) = caught.value.problems
    assert problem.key == ("model", "name")
    assert problem.reason.startswith("Orphan (1) owns table, mask but has no reset_parameters to fill them;")
    check_reset_parameters(users_model())


class Faulty(nn.Linear):
    """A linear layer with a mask, whose `reset_parameters` fails in one of several ways."""

    def __init__(self, fault: str) -> None:
        self.fault = "none"
        super().__init__(2, 2)
        self.fault = fault
        self.gain = nn.Parameter(torch.ones(2))
        self.register_buffer("mask", torch.ones(2).bool())
        self.child = nn.Linear(2, 2)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if self.fault == "child":
            nn.init.zeros_(self.child.weight)


def _fault(model: nn.Module) -> str:
    with pytest.raises(UserError) as caught:
        initialize(model, call_reset_parameters, 0, CPU)
    return str(caught.value)


def test_tensors_left_unset_are_named() -> None:
    message = _fault(nn.Sequential(Faulty("none")))
    assert message.startswith("reset_parameters of Faulty (0) does not fill gain, mask.")


def test_a_failing_reset_parameters_shows_the_users_traceback() -> None:
    message = _fault(Faulty("child"))
    assert message.startswith("reset_parameters of Faulty (the model itself) failed. The method is called on a copy")
    assert "nn.init.zeros_(self.child.weight)" in message and "initializers.py" not in message


def test_reset_parameters_is_called_for_children_before_parents() -> None:
    order: list[str] = []

    def note(module: nn.Module, path: str) -> None:
        order.append(path)
        call_reset_parameters(module, path)

    initialize(users_model(), note, 0, CPU)
    assert order == ["4", "3", "2.out_proj", "2", "1", "0"]
