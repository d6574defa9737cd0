"""The assignment of parameters to groups."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from titan_launch.config.optimizers import GroupSettings
from titan_launch.config.sections.training import OptimizerConfig
from titan_launch.core.errors import ConfigError, Problem
from titan_launch.models.build import take_inventory
from titan_launch.models.decoder.mixture_of_experts import Experts
from titan_launch.models.decoder.table_args import ExpertArgs
from titan_launch.optim.groups import group_parameters
from titan_launch.plan.layout import Layout
from titan_launch.plan.param_groups import check_param_groups, check_stacks, matrix_stacks, trained_parameters


class ScaleNorm(nn.Module):
    """A norm, recognized by its name, with a weight of two dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 3))


class Subclass(ScaleNorm): ...


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.output = nn.Linear(3, 7, bias=False)
        self.embedding = nn.Embedding(7, 3)
        self.output.weight = self.embedding.weight
        self.positions = nn.Embedding(4, 3)
        self.layers = nn.ModuleList(nn.MultiheadAttention(3, 1) for _ in range(2))
        self.norm = Subclass()
        self.gain = nn.Parameter(torch.ones(3))
        self.frozen = nn.Linear(3, 3).requires_grad_(False)


def _named(model: nn.Module, **config: Any) -> dict[str, list[str]]:
    names = {parameter: name for name, parameter in model.named_parameters()}
    settings = OptimizerConfig.model_validate(config)
    groups = group_parameters(model, settings, head=("output",))
    found = {group.name: [names[parameter] for parameter in group.parameters.values()] for group in groups}
    planned = dict[str, list[str]]()
    for name, parameter in trained_parameters(take_inventory(model, (), ("output",)), settings).items():
        planned.setdefault(parameter.group, []).append(name)
    assert planned == found
    return found


def _problems(model: nn.Module, *matches: str) -> tuple[Problem, ...]:
    config = OptimizerConfig.model_validate({"param_groups": [{"match": match} for match in matches]})
    with pytest.raises(ConfigError) as caught:
        check_param_groups(take_inventory(model, ()), config)
    return caught.value.problems


def test_norms_biases_embeddings_and_vectors_have_no_weight_decay() -> None:
    matrices = [f"layers.{i}.{name}" for i in (0, 1) for name in ("in_proj_weight", "out_proj.weight")]
    groups = _named(Model())
    assert groups["default, weight decay 0.1"] == matrices
    assert set(groups["default, weight decay 0"]) == {
        "output.weight",  # the embedding weight, with its first name
        "positions.weight",
        *(f"layers.{i}.{name}" for i in (0, 1) for name in ("in_proj_bias", "out_proj.bias")),
        "norm.weight",
        "gain",
    }
    assert len(groups) == 2


def test_the_first_matching_group_wins() -> None:
    groups = _named(
        Model(),
        weight_decay=0.3,
        param_groups=[
            {"match": "embedding.*", "lr_factor": 0.5, "weight_decay": 0.2},
            {"match": "layers.0.**", "lr_factor": 2.0},
            {"match": "layers.**", "weight_decay": 0.0},
        ],
    )
    assert groups == {
        "param_groups.0, weight decay 0.2": ["output.weight"],
        "param_groups.1, weight decay 0.3": ["layers.0.in_proj_weight", "layers.0.out_proj.weight"],
        "param_groups.1, weight decay 0": ["layers.0.in_proj_bias", "layers.0.out_proj.bias"],
        "param_groups.2, weight decay 0": [
            f"layers.1.{name}" for name in ("in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias")
        ],
        "default, weight decay 0": ["gain", "positions.weight", "norm.weight"],
    }


def test_muon_updates_only_hidden_matrices() -> None:
    """Norms, embeddings, biases, the output layer and weights that are shared with one of these are not for Muon."""
    model = nn.ModuleDict({"inner": Model(), "output": nn.Linear(3, 7), "conv": nn.Conv1d(3, 3, 2)})
    groups = _named(model, name="Muon", param_groups=[{"match": "inner.layers.1.**", "algorithm": "AdamW"}])
    matrices = ["inner.layers.0.in_proj_weight", "inner.layers.0.out_proj.weight"]
    assert groups["default, Muon, weight decay 0.1"] == matrices
    assert "output.weight" in groups["default, weight decay 0.1"]
    named = _named(model, muon={"lr_factor": 3.0}, param_groups=[{"match": "output.weight", "algorithm": "Muon"}])
    assert named["param_groups.0, Muon, weight decay 0.1"] == ["output.weight"]


def test_weight_decay_is_not_inherited_by_another_algorithm() -> None:
    """SGD does not use the weight decay of AdamW, and AdamW does not use that of SGD."""
    model = nn.ModuleDict({"one": nn.Linear(2, 2, bias=False), "other": nn.Linear(2, 2, bias=False)})
    assert list(_named(model, name="SGD")) == ["default, SGD, weight decay 0"]
    assert list(_named(model, name="SGD", weight_decay=1e-4)) == ["default, SGD, weight decay 0.0001"]
    sgd, adamw = ({"match": "other.*", "algorithm": algorithm} for algorithm in ("SGD", "AdamW"))
    names = ["default, weight decay 0.3", "param_groups.0, SGD, weight decay 0"]
    assert list(_named(model, weight_decay=0.3, param_groups=[sgd])) == names
    names = ["default, SGD, weight decay 0.0001", "param_groups.0, weight decay 0.1"]
    assert list(_named(model, name="SGD", weight_decay=1e-4, param_groups=[adamw])) == names


def test_a_parameter_that_muon_cannot_update_is_an_error() -> None:
    def reasons(model: nn.Module, head: tuple[str, ...] = (), **config: Any) -> list[str]:
        with pytest.raises(ConfigError) as caught:
            check_param_groups(take_inventory(model, (), head), OptimizerConfig.model_validate(config))
        return [problem.reason for problem in caught.value.problems]

    group = {"match": "layers.0.**", "algorithm": "Muon"}
    (reason,) = reasons(Model(), param_groups=[group])
    assert reason.startswith("Muon is for matrices, but layers.0.in_proj_bias has 1 axis;")
    (reason,) = reasons(Model(), name="Muon")
    assert 'match = "output.*", algorithm = "AdamW"' in reason
    (reason,) = reasons(nn.Sequential(nn.Conv1d(2, 2, 2), nn.Linear(2, 2)), ("1",), name="Muon")
    assert reason.startswith("the model has no matrix that this algorithm can update")


def test_groups_carry_their_settings() -> None:
    config = OptimizerConfig.model_validate({"param_groups": [{"match": "weight", "lr_factor": 0.1}]})
    weight, bias = group_parameters(nn.Linear(2, 2), config)
    assert weight.settings == GroupSettings("AdamW", 0.1, 0.1)
    assert bias.settings == GroupSettings("AdamW", 1.0, 0.0)


def test_groups_without_effect_are_errors() -> None:
    key = ("optimizer", "param_groups")
    assert _problems(Model(), "layers.**", "layers.0.**", "possitions.weight") == (
        Problem(
            (*key, 1, "match"),
            "every parameter that this glob matches is already in an earlier group; put the narrower group first",
            "layers.0.**",
        ),
        Problem(
            (*key, 2, "match"),
            'matches no trainable parameter; did you mean "positions.weight"?',
            "possitions.weight",
        ),
    )
    (problem,) = _problems(Model(), "frozen.*")
    assert problem.reason.startswith("matches no trainable parameter")


def test_stacked_parameters_of_experts_are_matrices_and_their_biases_vectors() -> None:
    model = nn.ModuleDict({"experts": stacked_experts(8), "output": nn.Linear(6, 7)})
    named = _named(model, name="Muon")
    assert named["default, Muon, weight decay 0.1"] == ["experts.w1", "experts.w2", "experts.w3"]
    assert {"experts.b1", "experts.b2", "experts.b3"} < {*named["default, weight decay 0"]}
    config = OptimizerConfig.model_validate({"name": "Muon", "param_groups": [{"match": "**.b1", "algorithm": "Muon"}]})
    with pytest.raises(ConfigError, match="Muon is for matrices"):
        check_param_groups(take_inventory(model, (), ("output",)), config)


def stacked_experts(num_experts: int) -> Experts:
    args = ExpertArgs(num_experts=num_experts, top_k=1, hidden_dim=8, expert_bias=True)
    return Experts(6, args, nn.functional.silu)


@pytest.mark.parametrize(
    ("layout", "reason"),
    [
        ({"shard": 4}, None),
        ({"shard": 16, "expert": 2}, "FSDP2 divides each expert of .* 4 experts over 8 ranks"),
        ({"shard": 7}, None),  # padded to 14 experts, which stay whole
        ({"shard": 4, "tensor": 2}, "tensor_parallel_degree = 2 divides each expert"),
        ({"shard": 4, "replicate": 2, "shards_optimizer": True}, None),
        ({"shard": 4, "replicate": 4, "shards_optimizer": True}, "divides experts .* has 2 experts .* are 4 replicas"),
        # shards of 3, 3 and 2 experts
        ({"shard": 3, "replicate": 4, "shards_optimizer": True}, "divides experts .* has 2 experts .* are 4 replicas"),
    ],
)
def test_muon_needs_whole_matrices_of_experts(layout: dict[str, int], reason: str | None) -> None:
    model = nn.ModuleDict({"experts": stacked_experts(8), "output": nn.Linear(6, 7)})
    inventory = take_inventory(model, (), ("output",))
    grid = Layout(**{"replicate": 1, "local_batch_size": 1, "num_microbatches": 1, **layout})
    config = OptimizerConfig(name="Muon")
    with nullcontext() if reason is None else pytest.raises(ConfigError, match=reason):
        check_stacks(matrix_stacks(inventory, config), config, grid)
    other = OptimizerConfig.model_validate(
        {"name": "Muon", "param_groups": [{"match": "**.experts.*", "algorithm": "AdamW"}]}
    )
    check_stacks(matrix_stacks(inventory, other), other, grid)
