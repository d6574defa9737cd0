"""Building a module on the meta device from `[model]`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from titan_launch.config.sections.model import ModelConfig
from titan_launch.core.errors import ConfigError, Problem
from titan_launch.models.build import build_model, recorded_model
from titan_launch.models.decoder.module import Decoder
from titan_launch.models.initializers import call_reset_parameters

THIS = __name__


class Net(nn.Module):
    """Two lists of blocks. One is inside the other list, with an entry that has nothing to shard."""

    def __init__(self, width: int = 4, depth: int = 2) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(width, width))
        self.stages = nn.ModuleList(
            nn.ModuleList([*(nn.Linear(width, width) for _ in range(depth)), nn.ReLU()]) for _ in range(2)
        )
        self.tail = nn.ModuleDict({"heads": nn.ModuleList([nn.Sequential(nn.ModuleList([nn.Linear(width, 2)]))])})

    def flops_per_sample(self, seq_len: int) -> int:
        return 10 * seq_len


def fails(width: int) -> nn.Module:
    raise ValueError(f"width {width}")


def not_a_module() -> dict[str, Any]:
    return {}


class Block(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Sequential(nn.Linear(width, width), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return x


class Stages(nn.Module):
    """The containers of torchvision's ResNet."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.layer1 = nn.Sequential(Block(), Block())
        self.layer2 = nn.Sequential(Block(8))
        self.output = nn.Linear(4, 4)


class ListOfNorms(Stages):
    """Norms in a ModuleList, one for each of the blocks, which are in Sequentials."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(4) for _ in range(3))


class ListsOfBlocksAndNorms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.BatchNorm1d(4), nn.Sequential(nn.GroupNorm(2, 4), nn.ReLU())])
        self.layers = nn.ModuleList([nn.Linear(4, 4), Block()])


class Attributes(nn.Module):
    """Pairs of blocks that are attributes, and a small head in a Sequential."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1000, 4)
        self.early, self.late = Pair(), Pair()
        self.head = nn.Sequential(Block(2), Block(2))


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Inner(), Inner()

    def forward(self, x: Tensor) -> Tensor:
        return x


class Inner(Block):
    """A block whose parts are repeated too, and hold less."""

    def __init__(self) -> None:
        super().__init__(16)
        self.third = Block(8)


def encoder() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2), 2)


@pytest.mark.parametrize(
    ("name", "paths", "origin"),
    [
        (
            "Net",
            ("stages.0.0", "stages.0.1", "stages.1.0", "stages.1.1", "tail.heads.0"),
            "the entries of nn.ModuleList",
        ),
        ("encoder", ("layers.0", "layers.1"), "the entries of nn.ModuleList"),
        ("Stages", ("layer1.0", "layer1.1", "layer2.0"), "the repeated modules in nn.Sequential"),
        ("ListOfNorms", ("layer1.0", "layer1.1", "layer2.0"), "the repeated modules in nn.Sequential"),
        ("ListsOfBlocksAndNorms", ("layers.0", "layers.1"), "the entries of nn.ModuleList"),
        ("Attributes", ("early.a", "early.b", "late.a", "late.b"), "the most repeated class"),
        ("Pair", ("a", "b"), "the most repeated class"),
        ("Block", (), ""),
    ],
)
def test_blocks_of_a_model_that_declares_none(name: str, paths: tuple[str, ...], origin: str) -> None:
    built = build_model(ModelConfig(name=f"{THIS}:{name}"), 8)
    assert (built.blocks, built.blocks_origin) == (paths, origin)


def _problem(**config: Any) -> Problem:
    with pytest.raises(ConfigError) as caught:
        build_model(ModelConfig.model_validate(config), 8)
    return caught.value.problems[0]


def test_a_model_of_the_package_is_built() -> None:
    built = build_model(ModelConfig(name="llama3", flavor="debug", args={"n_layers": 2, "norm": "layernorm"}), 64)
    assert isinstance(built.module, Decoder) and built.module.rope.table.shape[0] == 64
    assert all(tensor.is_meta for tensor in [*built.module.parameters(), *built.module.buffers()])
    assert built.blocks == ("layers.0", "layers.1")
    assert built.head == ("norm", "output")


def test_a_users_model_is_built() -> None:
    built = build_model(ModelConfig(name=f"{THIS}:Net", args={"width": 6}), 8)
    assert isinstance(built.module, Net) and built.module.stem[0].weight.shape == (6, 6)
    assert all(parameter.is_meta for parameter in built.module.parameters())
    assert built.head == ()
    assert built.flops_per_sample == 80
    assert built.initializer is call_reset_parameters


def test_a_users_model_needs_neither_flops_nor_a_module_list() -> None:
    built = build_model(ModelConfig(name="torch.nn:Linear", args={"in_features": 2, "out_features": 3}), 8)
    assert built.blocks == () and built.flops_per_sample is None


def test_blocks_by_glob() -> None:
    assert build_model(ModelConfig(name=f"{THIS}:Net", blocks=("stem", "stages.*.0")), 8).blocks == (
        "stem",
        "stages.0.0",
        "stages.1.0",
    )
    assert build_model(ModelConfig(name=f"{THIS}:Net", blocks=()), 8).blocks == ()
    assert build_model(ModelConfig(name="llama3", blocks=("layers.[01]",)), 8).blocks == ("layers.0", "layers.1")


def test_blocks_that_match_nothing() -> None:
    problem = _problem(name="llama3", blocks=["layers.*", "output", "noorm"])
    assert problem == Problem(("model", "blocks", 2), 'matches no module of the model; did you mean "norm"?', "noorm")
    problem = _problem(name="llama3", blocks=["layers"])
    assert problem.reason == 'matches only layers, a container without a forward; did you mean "layers.*"?'


def test_wrong_arguments_are_named() -> None:
    problem = _problem(name=f"{THIS}:Net", args={"widht": 3})
    assert problem.key == ("model", "args")
    assert problem.reason.startswith(f"{THIS}:Net(width: 'int' = 4")
    assert problem.reason.endswith("""got an unexpected keyword argument 'widht'; did you mean "width"?""")
    assert "missing a required argument: 'width'" in _problem(name=f"{THIS}:fails").reason


def test_a_failing_factory_shows_the_users_traceback() -> None:
    problem = _problem(name=f"{THIS}:fails", args={"width": 2})
    assert problem.key == ("model", "name")
    assert problem.reason.startswith("failed:\n") and problem.reason.endswith("ValueError: width 2")
    assert "in fails" in problem.reason and "models/factory.py" not in problem.reason


def test_factories_without_a_trainable_model_are_refused() -> None:
    assert _problem(name=f"{THIS}:not_a_module").reason == "must return a torch.nn.Module, but returns a dict"


def test_factories_are_found_in_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    Path("build_net.py").write_text("from torch import nn\n\ndef build(width):\n    return nn.Linear(width, 1)\n")
    config = ModelConfig(name="build_net:build", args={"width": 3})
    assert build_model(config, 8).module.in_features == 3
    Path("config.json").write_text(json.dumps({"model": config.model_dump(mode="json"), "training": {"seq_len": 8}}))
    whole = recorded_model("config.json")
    assert isinstance(whole, nn.Linear) and whole.weight.device.type == "cpu"
