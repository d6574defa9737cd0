"""Muon, SGD, and AdamW in several dtypes compared with the published algorithms, for every sharding of parameters."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from tests.distributed import run_ranks
from tests.sampling import rest_is_slow
from tests.tensors import Operations
from titan_launch.config import optimizers
from titan_launch.config.optimizers import matrix_batches
from titan_launch.config.sections.training import MuonConfig, OptimizerConfig
from titan_launch.models.decoder.mixture_of_experts import Experts
from titan_launch.models.decoder.table_args import ExpertArgs
from titan_launch.optim.groups import group_parameters
from titan_launch.optim.muon import orthogonalized
from titan_launch.optim.registry import MixedOptimizer, build_optimizer, step_unless

Values = dict[str, Tensor]

MUON = {
    "name": "Muon",
    "lr": 0.02,
    "param_groups": [
        {"match": "2.weight", "lr_factor": 0.5, "weight_decay": 0.3},
        {"match": "3.weight", "algorithm": "AdamW"},
    ],
}
STOCHASTIC = {"rounding": "stochastic", "lr": 0.02}
SGD = {"name": "SGD", "lr": 0.02, "weight_decay": 0.1, "sgd": {"momentum": 0.8, "nesterov": True}}
CASES: dict[str, tuple[dict[str, Any], torch.dtype]] = {
    "muon": (MUON, torch.float32),
    "muon, stochastic": ({**MUON, "rounding": "stochastic"}, torch.bfloat16),
    "stochastic": (STOCHASTIC, torch.bfloat16),
    "masters": ({"master_weights": True, "state_dtype": "float32", "lr": 0.02}, torch.bfloat16),
    "sgd": ({**SGD, "param_groups": [{"match": "3.weight", "algorithm": "Muon"}]}, torch.float32),
    "sgd, stochastic": ({**SGD, "rounding": "stochastic"}, torch.bfloat16),
    "sgd, masters": ({**SGD, "sgd": {}, "master_weights": True, "state_dtype": "float32"}, torch.bfloat16),
    "sgd without momentum": ({**SGD, "sgd": {"momentum": 0.0}, "master_weights": True}, torch.bfloat16),
    "states": ({"state_dtype": "bfloat16", "rounding": "stochastic", "lr": 0.02}, torch.float32),
}


def small_model(dtype: torch.dtype = torch.float32) -> nn.Module:
    """Return a model with tall, wide and uneven matrices and an output layer."""
    torch.manual_seed(0)
    layers = nn.Linear(12, 20), nn.LayerNorm(20), nn.Linear(20, 8, bias=False), nn.Linear(8, 33), nn.Linear(33, 3)
    return nn.Sequential(*layers).to(dtype)


def sharded(model: nn.Module, *shape: int, names: tuple[str, ...] = ("replicate", "shard")) -> nn.Module:
    """Apply tensor parallelism, if the mesh has its axis, then FSDP2, as the launcher does."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names[-len(shape) :])
    if names[-1] == "tp":
        plan = {"0": ColwiseParallel(), "1": _Replicated(), "2": RowwiseParallel()}
        parallelize_module(model, mesh["tp"], {**plan, "3": _Replicated(), "4": _Replicated()})
        mesh = mesh[names[0]]
    for layer in model.children():
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


class _Replicated(ParallelStyle):
    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, parameter in list(module.named_parameters(recurse=False)):
            module.register_parameter(name, nn.Parameter(distribute_tensor(parameter, device_mesh)))
        return module


def optimizer_of(model: nn.Module, case: str) -> Optimizer:
    return build_optimizer(model, OptimizerConfig.model_validate(CASES[case][0]), head=("4",), seed=3)


def set_gradients(model: nn.Module, step: int, factor: float = 1.0) -> None:
    """Set random gradients that depend on the step and not on the sharding."""
    generator = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        full = factor * torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        parameter.grad = divided_like(parameter, full) if isinstance(parameter, DTensor) else full


def divided_like(parameter: DTensor, full: Tensor) -> DTensor:
    """Shard a full tensor as a parameter is sharded."""
    (chunk,) = parameter.__create_chunk_list__()
    part = full[tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.sizes, strict=True))].clone()
    mesh, placements = parameter.device_mesh, parameter.placements
    return DTensor.from_local(part, mesh, placements, shape=full.shape, stride=full.stride(), run_check=False)


def train(model: nn.Module, optimizer: Optimizer, steps: range, skipped: tuple[int, ...] = ()) -> None:
    for step in steps:
        set_gradients(model, step, math.nan if step in skipped else 1.0)
        step_unless(optimizer, torch.tensor(float(step in skipped)))


def values_of(model: nn.Module, optimizer: Optimizer) -> Values:
    """Return parameters and optimizer states, gathered."""
    return {
        f"{name}/{key}": (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
        for name, parameter in model.named_parameters()
        for key, value in {"value": parameter, **optimizer.state[parameter]}.items()
    }


def assert_same(actual: Values, expected: Values, tolerance: float = 0.0) -> None:
    assert actual.keys() == expected.keys()
    for name, value in actual.items():
        assert value.dtype == expected[name].dtype, name
        torch.testing.assert_close(value, expected[name], rtol=tolerance, atol=tolerance, msg=name)


def trained_alone(case: str) -> Values:
    model = small_model(CASES[case][1])
    optimizer = optimizer_of(model, case)
    train(model, optimizer, range(4))
    return values_of(model, optimizer)


@pytest.mark.parametrize("adjust_lr_fn", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_muon_equals_pytorchs_muon(adjust_lr_fn: str, nesterov: bool) -> None:
    muon = {"adjust_lr_fn": adjust_lr_fn, "nesterov": nesterov, "momentum": 0.9, "ns_steps": 4}
    ours, theirs = (nn.ModuleList([nn.Linear(9, 30, bias=False), nn.Linear(9, 5, bias=False)]) for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    config = OptimizerConfig.model_validate({"name": "Muon", "lr": 0.1, "muon": muon})
    optimizer = build_optimizer(ours, config, head=("none",))
    reference = torch.optim.Muon(theirs.parameters(), lr=0.1, weight_decay=0.1, **muon)
    for step in range(3):
        set_gradients(ours, step)
        set_gradients(theirs, step)
        optimizer.step()
        reference.step()
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("ns_steps", [4, 5])
def test_muon_updates_stacked_experts_as_separate_matrices(ns_steps: int) -> None:
    experts = Experts(6, ExpertArgs(num_experts=3, top_k=1, hidden_dim=8), nn.functional.silu)
    names = ("w1", "w2", "w3")
    matrices = [[nn.Linear(*reversed(part.shape), bias=False) for part in getattr(experts, name)] for name in names]
    separate = nn.ModuleDict({name: nn.ModuleList(of_name) for name, of_name in zip(names, matrices, strict=True)})
    config = OptimizerConfig.model_validate({"name": "Muon", "lr": 0.1, "muon": {"ns_steps": ns_steps}})
    optimizers = [build_optimizer(model, config, head=("none",)) for model in (experts, separate)]
    for step in range(2):
        set_gradients(experts, step)
        for stack, of_name in zip(experts.parameters(), matrices, strict=True):
            for linear, value, gradient in zip(of_name, stack, stack.grad, strict=True):
                linear.weight.data = value.detach().clone() if step == 0 else linear.weight.data
                linear.weight.grad = gradient.clone()
        for optimizer in optimizers:
            optimizer.step()
    for stack, of_name in zip(experts.parameters(), matrices, strict=True):
        assert torch.equal(stack, torch.stack([linear.weight for linear in of_name]))


@pytest.mark.parametrize(
    ("settings", "dtype"),
    [
        ({}, torch.float32),
        ({"state_dtype": "int8"}, torch.float32),
        ({"state_dtype": "int8", "muon": {"nesterov": False}}, torch.float32),
        ({"state_dtype": "bfloat16", "rounding": "stochastic"}, torch.bfloat16),
    ],
    ids=str,
)
def test_muon_updates_equal_shapes_together_as_each_alone(
    settings: dict[str, Any], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a limit of one element, every matrix is computed alone. On some CPUs a batch of products rounds differently
    from single ones."""
    found = []
    for limit in (optimizers._MUON_LIMIT, 1):
        monkeypatch.setattr(optimizers, "_MUON_LIMIT", limit)
        torch.manual_seed(0)
        shapes = [(40, 300), (40, 300), (300, 40), (64, 64), (300, 40), (40, 300), (64, 64)]
        model = nn.ModuleList([nn.Linear(*shape, bias=False) for shape in shapes]).to(dtype)
        optimizer = build_optimizer(model, OptimizerConfig.model_validate({"name": "Muon", **settings}), head=("none",))
        with Operations() as operations:
            train(model, optimizer, range(3), skipped=(1,))
        found.append((values_of(model, optimizer), operations.counts["baddbmm.out"]))
    (together, few), (alone, many) = found
    assert_same(together, alone, tolerance=1e-5)
    assert (few, many) == (3 * 3 * 10, 3 * 7 * 10)  # steps x shapes or matrices x two products in five iterations


def test_matrices_of_a_shape_are_divided_equally_among_ranks() -> None:
    shapes = [(4, 8)] * 9 + [(64, 64)] * 3 + [(8, 4)]
    batches = matrix_batches(range(len(shapes)), lambda index: shapes[index], 2)
    assert batches == [[[9, 10], [11]], [[0, 1, 2, 3, 4], [5, 6, 7, 8]], [[12]]]


@pytest.mark.parametrize("implementation", ["fused", "foreach", "for-loop", "mixed"])
@pytest.mark.parametrize(
    ("momentum", "nesterov", "weight_decay"), [(0.9, False, 1e-2), (0.9, True, 0.0), (0.0, False, 0.1)]
)
def test_sgd_equals_pytorchs_sgd(implementation: str, momentum: float, nesterov: bool, weight_decay: float) -> None:
    """PyTorch's own implementations agree bit for bit. The one of this package rounds differently."""
    ours, theirs = (nn.ModuleList([nn.Linear(9, 30, bias=False), nn.Linear(9, 5, bias=False)]) for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    sgd = {"momentum": momentum, "nesterov": nesterov}
    settings: dict[str, Any] = {"name": "SGD", "lr": 0.1, "weight_decay": weight_decay, "sgd": sgd}
    how: dict[str, Any] = {"for-loop": {"foreach": False}, "mixed": {}}.get(implementation, {implementation: True})
    if implementation == "mixed":
        config = OptimizerConfig.model_validate(settings)
        optimizer: Optimizer = MixedOptimizer(group_parameters(ours, config), config, is_mixed=True, seed=0)
    else:
        settings["implementation"] = implementation
        optimizer = build_optimizer(ours, OptimizerConfig.model_validate(settings))
    reference = torch.optim.SGD(theirs.parameters(), lr=0.1, weight_decay=weight_decay, **sgd, **how)
    for step in range(3):
        set_gradients(ours, step)
        set_gradients(theirs, step)
        optimizer.step()
        reference.step()
    tolerance = 1e-6 if implementation == "mixed" else 0.0
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=tolerance, atol=tolerance)
        names = {"step", "momentum_buffer"} if momentum else {"step"}
        assert optimizer.state[mine].keys() == names and optimizer.state[mine]["step"] == 3


def test_muon_updates_have_singular_values_near_one() -> None:
    values = torch.linalg.svdvals(orthogonalized(torch.randn(30, 20), MuonConfig().ns_steps).float())
    assert values.min() > 0.6 and values.max() < 1.3


def test_adamw_in_float32_equals_pytorchs_adamw() -> None:
    """In float32 the update for low precision rounds nothing, so it equals PyTorch's."""
    ours, theirs = small_model(), small_model()
    config = OptimizerConfig(lr=0.02)
    reference = build_optimizer(theirs, config)
    optimizer = MixedOptimizer(group_parameters(ours, config), config, is_mixed=True, seed=0)
    for model, each in ((ours, optimizer), (theirs, reference)):
        train(model, each, range(5), skipped=(0, 3))
    assert_same(values_of(ours, optimizer), values_of(theirs, reference), 1e-6)


def train_in_parts(optimizer_of_model: Callable[[nn.Module], Optimizer]) -> Values:
    """Train six steps, the second one skipped, with a resume in between. One parameter has gradients from the third
    step on, another one in every second step."""
    model, resumed = small_model(), small_model()
    optimizer, other = optimizer_of_model(model), optimizer_of_model(resumed)
    for step in range(6):
        if step == 4:
            resumed.load_state_dict(model.state_dict())
            other.load_state_dict(optimizer.state_dict())
            model, optimizer = resumed, other
        set_gradients(model, step, math.nan if step == 1 else 1.0)
        if step < 2:
            model[0].bias.grad = None
        if step % 2:
            model[3].bias.grad = None
        step_unless(optimizer, torch.tensor(float(step == 1)))
    return values_of(model, optimizer)


def test_each_parameter_counts_its_own_steps() -> None:
    """The bias correction of each parameter counts its own steps, as in PyTorch."""
    config = OptimizerConfig(lr=0.02)
    ours = train_in_parts(lambda m: MixedOptimizer(group_parameters(m, config), config, is_mixed=True, seed=0))
    theirs = train_in_parts(lambda m: build_optimizer(m, config))
    assert [ours[f"{name}/step"] for name in ("0.weight", "0.bias", "3.bias")] == [5, 4, 3]
    assert_same(ours, theirs, 1e-6)


def test_a_deep_model_is_updated_in_as_few_operations_as_a_shallow_one() -> None:
    """The test counts operations that launch a kernel: a group has one bias correction, and lists of tensors are
    updated together."""
    counts = []
    for depth in (1, 8):
        model = nn.Sequential(nn.Linear(64, 64), *(nn.LayerNorm(4) for _ in range(depth)))
        optimizer = build_optimizer(model, OptimizerConfig(state_dtype="bfloat16"))
        for step in range(2):
            set_gradients(model, step)
            with Operations() as operations:
                step_unless(optimizer, torch.zeros(()))
        without_kernel = ("view.dtype", "empty_like", "detach")
        counts.append({name: n for name, n in operations.counts.items() if name not in without_kernel})
    assert counts[0] == counts[1]
    assert counts[0]["pow.Scalar"] == 2 * len(optimizer.param_groups)


class _NoHostReads(TorchDispatchMode):
    """A dispatch mode that fails when the host reads a number from the device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten._local_scalar_dense.default, "the host reads a number"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("case", CASES)
def test_a_skipped_step_changes_no_parameter_and_no_optimizer_state(case: str) -> None:
    """The first step of a run can be skipped, too. The host does not wait for the device."""
    model, never = small_model(CASES[case][1]), small_model(CASES[case][1])
    optimizer, other = optimizer_of(model, case), optimizer_of(never, case)
    with _NoHostReads():
        train(model, optimizer, range(4), skipped=(0, 2))
    for step in (1, 3):
        train(never, other, range(step, step + 1))
    assert_same(values_of(model, optimizer), values_of(never, other))


def test_small_updates_are_lost_by_nearest_rounding_only() -> None:
    """100 updates of 1e-4 each start at 1. The next lower bfloat16 number is 1 - 2^-8."""
    means = {}
    for name, config in {
        "nearest": {"state_dtype": "float32"},
        "stochastic": {"rounding": "stochastic"},
        "masters": {"master_weights": True},
    }.items():
        model = nn.Linear(32, 32, bias=False, dtype=torch.bfloat16)
        nn.init.ones_(model.weight)
        settings = {"lr": 1e-4, "weight_decay": 0.0, **config}
        optimizer = build_optimizer(model, OptimizerConfig.model_validate(settings))
        for _ in range(100):
            model.weight.grad = torch.ones_like(model.weight)
            optimizer.step()
        means[name] = 1 - model.weight.float().mean().item()
    assert means["nearest"] == 0
    assert means["stochastic"] == pytest.approx(0.01, rel=0.1)
    assert means["masters"] == pytest.approx(0.01, rel=0.25)  # the number nearest to 0.99


def test_only_bfloat16_parameters_have_master_weights() -> None:
    model = small_model(torch.bfloat16)
    model[1].float()
    optimizer = optimizer_of(model, "masters")
    train(model, optimizer, range(1))
    assert {p.dtype for p in model.parameters() if "master" in optimizer.state[p]} == {torch.bfloat16}
    assert {p.dtype for p in model.parameters() if "master" not in optimizer.state[p]} == {torch.float32}


TENSOR_PARALLEL = ("shard", "tp")
DIVISIONS: dict[int, list[tuple[tuple[int, ...], tuple[str, ...], tuple[str, ...]]]] = {
    2: [
        ((2,), ("shard",), tuple(CASES)),
        ((1, 2), TENSOR_PARALLEL, ("muon, stochastic", "masters", "sgd, stochastic")),
    ],
    4: [
        ((2, 2), ("replicate", "shard"), ("muon", "sgd")),
        ((2, 2), TENSOR_PARALLEL, ("muon", "muon, stochastic", "sgd")),
    ],
}
"""Meshes, the names of their axes, and cases, by number of ranks."""


def _train_divided() -> list[tuple[str, Values]]:
    """Train half of the steps after a resume into another model."""
    results = []
    for shape, names, cases in DIVISIONS[dist.get_world_size()]:
        for case in cases:
            first, second = (sharded(small_model(CASES[case][1]), *shape, names=names) for _ in range(2))
            optimizer, resumed = optimizer_of(first, case), optimizer_of(second, case)
            train(first, optimizer, range(2))
            model_state, optimizer_state = get_state_dict(first, optimizer)
            set_state_dict(second, resumed, model_state_dict=model_state, optim_state_dict=optimizer_state)
            train(second, resumed, range(2, 4))
            results.append((case, values_of(second, resumed)))
    return results


@pytest.fixture(scope="module")
def alone() -> dict[str, Values]:
    """Return the result of each case on one rank."""
    return {case: trained_alone(case) for case in CASES}


@pytest.mark.parametrize("world_size", rest_is_slow(list(DIVISIONS)))
def test_every_sharding_gives_the_same_parameters(world_size: int, alone: dict[str, Values]) -> None:
    """The parameters are bitwise equal, except for PyTorch's fused AdamW (beside Muon) and SGD: they round differently
    at the end of a shard."""
    for results in run_ranks(_train_divided, world_size):
        for case, values in results:
            assert_same(values, alone[case], 1e-6 if case in ("muon", "sgd") else 0.0)
