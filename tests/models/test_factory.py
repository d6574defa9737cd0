"""Factories of the user: training starts from the values that they make, and wrong factories are explained."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.distributed import run_ranks
from tests.tensors import assert_equal, full_state
from tests.train.jobs import this_rank
from titan_launch.config.job import JobConfig
from titan_launch.config.sections.model import ModelConfig
from titan_launch.core.errors import ConfigError, Problem
from titan_launch.distributed.mesh import build_mesh
from titan_launch.models.build import BuiltModel, build_model
from titan_launch.models.factory import HostBuild
from titan_launch.models.host_values import HostValues, num_bytes
from titan_launch.models.init import allocate, initialize
from titan_launch.plan.layout import plan_layout
from titan_launch.train.model import build_on_all_ranks, plan_precision, shard_model

SEED = 7
GIB = 2**30
CPU = torch.device("cpu")


class Own(nn.Module):
    """A module that makes values in every way that a module can, without a `reset_parameters` of its own."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.scale = nn.Parameter(torch.rand(3) + random.random() + float(np.random.rand()))
        self.register_buffer("mask", torch.ones(width, width).tril())
        self.register_buffer("positions", torch.arange(width), persistent=False)
        self.output = nn.Linear(width, 9, bias=False)
        self.output.weight = self.embedding.weight
        self.apply(self._init_weights)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.output(self.embedding(tokens))

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.02)


def pretrained() -> nn.Module:
    """Load a state dict, and return the module in evaluation mode, as `from_pretrained` does."""
    model = Own()
    model.load_state_dict({name: torch.full_like(value, 3) for name, value in model.state_dict().items()})
    return model.eval()


def on_meta() -> nn.Module:
    return nn.Linear(2, 2).eval()


on_meta.meta_device = True  # type: ignore[attr-defined]


def _expected(factory: Callable[[], nn.Module]) -> dict[str, torch.Tensor]:
    """Return the tensors of plain PyTorch under the same seeds."""
    torch.manual_seed(SEED)
    random.seed(SEED)
    np.random.seed(SEED)
    return full_state(factory())


def _config(name: str, **sections: Any) -> JobConfig:
    name = name if ":" in name else f"{__name__}:{name}"
    return JobConfig.model_validate({"model": {"name": name}, "training": {"seed": SEED}, **sections})


def _built(name: str, free_bytes: int = 2**40, **args: Any) -> BuiltModel:
    name = name if ":" in name else f"{__name__}:{name}"
    return build_model(ModelConfig(name=name, args=args), 8, HostBuild(SEED, free_bytes))


@pytest.mark.parametrize("factory", [Own, pretrained])
def test_initial_values_are_those_of_the_factory(factory: Callable[[], nn.Module]) -> None:
    expected = _expected(factory)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    built = _built(factory.__name__)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states[1:]
    module = built.module
    assert isinstance(module, Own) and module.training
    assert all(tensor.is_meta for tensor in [*module.parameters(), *module.buffers()])
    assert module.output.weight is module.embedding.weight
    assert isinstance(built.initializer, HostValues)
    assert built.initializer.num_bytes == sum(tensor.nbytes for tensor in expected.values())
    allocate(module, CPU)
    initialize(module, built.initializer, 0, CPU)
    assert_equal({name: module.state_dict(keep_vars=True).get(name, module.positions) for name in expected}, expected)
    assert list(module.state_dict()) == list(factory().state_dict())


def test_views_of_one_storage_count_once_and_whole() -> None:
    whole = torch.zeros(8)
    assert num_bytes([whole, whole[:2], torch.zeros(3)]) == 4 * (8 + 3)
    whole = whole.to("meta")
    assert num_bytes([whole, whole[:2], torch.zeros(3, device="meta")]) == 4 * (8 + 3)


def _sharded_values() -> dict[str, torch.Tensor]:
    config = _config("Own", precision={"storage_dtype": "bfloat16"})
    built = build_on_all_ranks(config, this_rank())
    mesh = build_mesh(plan_layout(config.parallelism, config.training, dist.get_world_size()), "cpu")
    model = shard_model(config, built, plan_precision(config, built), mesh)
    allocate(model, CPU)
    initialize(model, built.initializer, 0, CPU)
    return full_state(model)


def test_every_sharding_has_the_values_of_the_factory() -> None:
    """Three ranks shard unevenly. Parameters stored in bfloat16 are rounded once."""
    expected = _expected(Own)
    parameters = dict(Own().named_parameters())
    rounded = {name: tensor.bfloat16() if name in parameters else tensor for name, tensor in expected.items()}
    for values in run_ranks(_sharded_values, 3):
        assert_equal(values, rounded)


def test_a_factory_may_declare_the_meta_device() -> None:
    built = _built("on_meta")
    assert not isinstance(built.initializer, HostValues)
    assert built.module.training and all(parameter.is_meta for parameter in built.module.parameters())


class Large(nn.Module):
    """A module of many GiB of memory that is never written."""

    def __init__(self, gib: int, needs_values: bool = False) -> None:
        super().__init__()
        for index in range(gib):
            setattr(self, f"part_{index}", nn.Parameter(torch.empty(GIB // 4)))
            if needs_values:
                torch.zeros(1).item()


class Huge(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.empty(2**50))


class OnMeta(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.empty(2, device="meta"))


class OnGpu(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.cuda()


class Copied(nn.Module):
    """A module whose layers PyTorch copies from one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 2, batch_first=True), num_layers=6)


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(3, 2)
        self.output = nn.Linear(2, 3, bias=False)
        self.output.weight = nn.Parameter(self.embedding.weight)


def compiled() -> Any:
    return torch.compile(nn.Linear(2, 2))


def scripted() -> Any:
    return torch.jit.script(nn.Linear(2, 2))


class Lazy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.output = nn.LazyLinear(3)


_REMEDY = "give the factory the attribute meta_device = True and let reset_parameters fill the module"


@pytest.mark.filterwarnings("ignore:.torch.jit.script")
@pytest.mark.parametrize(
    ("factory", "args", "reason"),
    [
        (
            "Large",
            {"gib": 9},
            f"needs 9.0 GiB of host memory, but only 4.0 GiB are free; {_REMEDY}",
        ),
        (
            "Large",
            {"gib": 9, "needs_values": True},
            f"needs more than 5.0 GiB of host memory, but only 4.0 GiB are free; {_REMEDY}",
        ),
        (
            "Huge",
            {},
            f"needs 4194304.0 GiB of host memory, but only 4.0 GiB are free; {_REMEDY}",
        ),
        (
            "OnMeta",
            {},
            "the module has table on the meta device, without values; build the module on the host, or give the "
            "factory the attribute meta_device = True and let reset_parameters fill the module",
        ),
        (
            "OnGpu",
            {},
            "failed; remove .cuda() and .to(device) from the factory: the launcher moves the module to the device:",
        ),
        (
            "Shared",
            {},
            "the module has two parameters in the same memory, embedding.weight and output.weight; to tie them, assign "
            "one parameter to both names",
        ),
        ("compiled", {}, "returns a compiled module; remove torch.compile, and set compile.enable = true"),
        ("scripted", {}, "returns a scripted module, which cannot be sharded; remove torch.jit"),
        (
            "Lazy",
            {},
            "the parameter output.weight is lazy and has no shape; create its module with the number of input features",
        ),
    ],
)
def test_a_factory_that_cannot_be_used(factory: str, args: dict[str, Any], reason: str) -> None:
    if factory == "OnGpu" and torch.cuda.is_available():
        reason = "the module has weight on cuda:0; leave the module on the host: the launcher moves it to the device"
    with pytest.raises(ConfigError) as caught:
        _built(factory, free_bytes=4 * GIB, **args)
    problem = caught.value.problems[0]
    assert problem.key == ("model", "name")
    assert problem.reason.splitlines()[0] == reason


def test_the_memory_of_copied_layers_is_counted() -> None:
    """Copies register nothing. While they are made, the layer that they are made of is there too."""
    size = sum(parameter.nbytes for parameter in Copied().parameters())
    _built("Copied", free_bytes=size * 7 // 6)
    with pytest.raises(ConfigError, match="GiB of host memory, but"):
        _built("Copied", free_bytes=size - 1)


class Replaced(nn.Module):
    """A module that creates its parameter repeatedly and keeps the last one."""

    def __init__(self) -> None:
        super().__init__()
        for _ in range(8):
            self.table = nn.Parameter(torch.empty(1000))


def test_replaced_parameters_are_not_counted() -> None:
    _built("Replaced", free_bytes=9000)


def other_on_rank_1() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    if dist.get_rank() == 1:
        nn.init.zeros_(model[1].bias)
    return model


def permuted_on_rank_1() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(1000, 7))
    if dist.get_rank() == 1:
        weight = model[1].weight.detach()
        weight.copy_(weight.flip(dist.get_rank()))
    return model


def reordered_on_rank_1() -> nn.Module:
    names = ["a", "b"] if dist.get_rank() == 0 else ["b", "a"]
    return nn.ModuleDict({name: nn.PReLU() for name in names})


def fails_on_rank_1() -> nn.Module:
    if dist.get_rank() == 1:
        raise FileNotFoundError("weights.pt")
    return nn.Linear(2, 2)


def resized_on_rank_1() -> nn.Module:
    return nn.Linear(2, 2 + dist.get_rank())


def _problems_of(names: list[str]) -> list[Problem]:
    """Return the errors of factories, each with one problem, on hosts with one rank each."""
    os.environ["LOCAL_WORLD_SIZE"] = "1"
    problems = []
    for name in names:
        with pytest.raises(ConfigError) as caught:
            build_on_all_ranks(_config(name), this_rank())
        problems += caught.value.problems
    return problems


def test_all_ranks_raise_the_same_error_for_a_factory_that_differs_by_host() -> None:
    names = ["other_on_rank_1", "fails_on_rank_1", "permuted_on_rank_1", "reordered_on_rank_1", "resized_on_rank_1"]
    both = run_ranks(_problems_of, 2, names)
    assert both[0] == both[1]
    differs, fails, permuted, reordered, resized = both[0]
    assert permuted.reason.startswith("the factory makes other values on rank 1 than on rank 0, in 1.weight;")
    assert reordered.reason.startswith("the factory registers its tensors in another order on rank 1 than on rank 0;")
    assert differs.key == fails.key == ("model", "name")
    only = "draw random numbers only from torch, random and numpy, whose seeds are equal on all ranks"
    assert differs.reason == (
        "the factory makes other values on rank 1 than on rank 0, in 1.bias; fill every tensor (torch.empty does not), "
        f"and {only}"
    )
    assert resized.reason == (
        "the factory makes other tensors on rank 1 than on rank 0 (weight, bias): weight is float32 (3, 2), trained "
        f"instead of float32 (2, 2), trained; {only}"
    )
    assert fails.reason.startswith("failed:") and fails.reason.endswith("FileNotFoundError: weights.pt")


class Attributes(nn.Module):
    """A module with attributes that depend on values, drawn on the CPU explicitly."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.order = torch.randperm(1000, device="cpu").tolist()
        self.mask = torch.ones(8) / 2
        self.rank = dist.get_rank()


def _values_on_one_host(path: str) -> list[tuple[dict[str, torch.Tensor], list[int] | None, torch.Tensor | None]]:
    """Return the values of several factories, and the attributes of `Attributes`, on two ranks of one host."""
    results = []
    for name, args in (("Own", {}), ("needs_values", {}), ("Attributes", {}), ("from_file", {"path": path})):
        config = _config(name, model={"name": f"{__name__}:{name}", "args": args})
        built = build_on_all_ranks(config, this_rank())
        assert isinstance(built.initializer, HostValues)
        by_name = built.initializer.by_name
        assert all(tensor.is_meta == (dist.get_rank() > 0) for tensor in by_name.values())
        mesh = build_mesh(plan_layout(config.parallelism, config.training, 2), "cpu")
        module = built.module
        if name == "Own":
            module = shard_model(config, built, plan_precision(config, built), mesh)
        allocate(module, CPU)
        initialize(module, built.initializer, 0, CPU)
        assert by_name == ({} if dist.get_rank() == 0 else by_name)
        results.append((full_state(module), getattr(module, "order", None), getattr(module, "mask", None)))
    with pytest.raises(ConfigError, match="registers its tensors in another order on rank 1"):
        build_on_all_ranks(_config("reordered_on_rank_1"), this_rank())
    with pytest.raises(ConfigError, match=r"FileNotFoundError: weights\.pt"):
        build_on_all_ranks(_config("fails_on_rank_1"), this_rank())
    return results


def test_one_rank_of_a_host_has_the_values_and_hands_them_on(tmp_path: Path) -> None:
    """The second rank builds on the meta device, and on the host where that fails or changes an attribute."""
    torch.save(Own().state_dict(), tmp_path / "weights.pt")
    both = run_ranks(_values_on_one_host, 2, str(tmp_path / "weights.pt"))
    for (values, order, mask), (others, other_order, other_mask) in zip(*both, strict=True):
        assert_equal(values, others)
        assert order == other_order and (mask is other_mask is None or torch.equal(mask, other_mask))
    (own, *_), (needed, *_), _, (loaded, *_) = both[0]
    assert_equal(own, _expected(Own))
    assert_equal(needed, _expected(needs_values))
    from_plain = full_state(from_file(str(tmp_path / "weights.pt")))
    assert_equal({name: loaded[name] for name in from_plain}, from_plain)


def needs_values() -> nn.Module:
    return nn.Linear(int(torch.ones(2).sum().item()), 2)


class PlainTensor(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.table = torch.ones(2)


@pytest.mark.parametrize("name", ["Own", "pretrained", "needs_values", "PlainTensor"])
def test_a_model_for_planning_has_no_values(name: str) -> None:
    module = build_model(ModelConfig(name=f"{__name__}:{name}"), 8).module
    assert module.training and all(tensor.is_meta for tensor in [*module.parameters(), *module.buffers()])
    if isinstance(module, PlainTensor):
        assert not module.table.is_meta  # a trace computes with this value


def from_file(path: str) -> nn.Module:
    model = Own()
    model.load_state_dict(torch.load(path, weights_only=True))
    return model


def test_a_factory_that_reads_a_file_starts_from_it(tmp_path: Path) -> None:
    model = Own()
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    built = _built("from_file", path=str(tmp_path / "weights.pt"))
    assert isinstance(built.initializer, HostValues)
    assert_equal(dict(built.initializer.by_name), {**model.state_dict(), "positions": model.positions})
