"""Modules that use PyTorch in less common ways train on two ranks as on one, and load in plain PyTorch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn

from tests.distributed import run_ranks
from tests.tensors import assert_equal
from tests.train.jobs import read_metrics, run_job, tiny_job
from titan_launch.config.sections.data import SyntheticData
from titan_launch.config.sections.model import ModelConfig
from titan_launch.config.sections.tokenizer import TokenizerConfig
from titan_launch.data.sources import build_source
from titan_launch.data.tokenizers import build_tokenizer
from titan_launch.models.build import build_model, recorded_model, take_inventory
from titan_launch.models.factory import scalars_as_vectors

VOCABULARY, TOKENS, SEED = 61, 16, 0


class Text(nn.Module):
    """Embedding, blocks and head. Each model changes one of them."""

    width = 16

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, self.width)
        self.blocks = nn.ModuleList(self.block() for _ in range(2))
        self.output = nn.Linear(self.width, VOCABULARY, bias=False)

    def block(self) -> nn.Module:
        return nn.Sequential(nn.Linear(self.width, self.width), nn.Tanh())

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.output(x)


class Scaled(nn.Module):
    """A module with a scalar as a parameter, as the temperature of CLIP, which is tied."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.scale = self.tied = nn.Parameter(torch.tensor(0.3))

    def forward(self, x: Tensor) -> Tensor:
        assert self.scale.shape == ()
        return self.linear(x) * self.scale.exp() / self.tied.cosh()


class Scalars(Text):
    def block(self) -> nn.Module:
        return Scaled()


class Tied(Text):
    def __init__(self) -> None:
        super().__init__()
        self.output.weight = self.embedding.weight


class Frozen(Text):
    """A frozen embedding, a frozen block, and a block with a frozen bias."""

    def __init__(self) -> None:
        super().__init__()
        for module in (self.embedding, self.blocks[0]):
            module.requires_grad_(False)
        self.blocks[1].get_parameter("0.bias").requires_grad = False


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.attention(x, x, x, attn_mask=mask, is_causal=True, need_weights=False)[0]


class Attentive(Text):
    def block(self) -> nn.Module:
        return Attention()


class Dropped(Text):
    def block(self) -> nn.Module:
        return nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.2))


MODELS = (Scalars, Tied, Frozen, Attentive, Dropped)
HELD_OUT = {"kind": "synthetic", "vocab_size": VOCABULARY, "num_samples": 8, "seed": 1}


def train_all(folder: Path) -> dict[str, dict[str, Tensor]]:
    torch.set_num_threads(1)
    return {model.__name__: train(folder / model.__name__, model.__name__) for model in MODELS}


def train(folder: Path, model: str) -> dict[str, Tensor]:
    job = tiny_job(
        folder,
        training={"seq_len": TOKENS, "steps": 3, "seed": SEED},
        optimizer={"lr": 3e-2, "eps": 1e-4},
        checkpoint={"save_last": True},
        validation={"freq": 3, "data": HELD_OUT},
    )
    return run_job({**job, "model": {"name": f"{__name__}:{model}"}})


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[Path, dict[str, dict[str, Tensor]]]]:
    """Train every model on one rank and on two. Return the folders and the parameters."""
    folders = {world_size: tmp_path_factory.mktemp(str(world_size)) for world_size in (1, 2)}
    return {size: (folder, run_ranks(train_all, size, folder)[0]) for size, folder in folders.items()}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("model", MODELS)
def test_two_ranks_train_as_one(
    model: type[Text], trained: dict[int, tuple[Path, dict[str, dict[str, Tensor]]]]
) -> None:
    name = model.__name__
    (one_folder, one), (folder, two) = trained[1], trained[2]
    reports = read_metrics(folder / name)
    losses = [report["train/loss"] for report in reports if "train/loss" in report]
    assert losses[-1] < losses[0]
    if model is not Dropped:  # ranks draw different dropout masks
        expected = [report["train/loss"] for report in read_metrics(one_folder / name) if "train/loss" in report]
        assert losses == pytest.approx(expected, rel=1e-5)
        assert all(torch.allclose(two[name][key], value, atol=1e-5) for key, value in one[name].items())

    plain = recorded_model(folder / name / "tiny" / "config.json").eval()
    dcp.load({"model": plain.state_dict()}, checkpoint_id=folder / name / "tiny" / "checkpoints" / "latest")
    assert_equal({key: value for key, value in plain.state_dict().items() if key in two[name]}, two[name])
    source = build_source(SyntheticData.model_validate(HELD_OUT), build_tokenizer(TokenizerConfig()), TOKENS)
    inputs, targets = (torch.stack(column) for column in zip(*(source[i] for i in range(8)), strict=True))
    with torch.no_grad():
        loss = F.cross_entropy(plain(inputs).flatten(0, 1), targets.flatten()).item()
    assert loss == pytest.approx(reports[-1]["validation/loss"], rel=1e-6)


def test_frozen_parameters_keep_their_values(trained: dict[int, tuple[Path, dict[str, dict[str, Tensor]]]]) -> None:
    torch.manual_seed(SEED)
    initial = Frozen()
    for name, parameter in initial.named_parameters():
        assert torch.equal(parameter, trained[2][1]["Frozen"][name]) != parameter.requires_grad, name


def test_checkpoints_have_scalars_of_shape_1(trained: dict[int, tuple[Path, dict[str, dict[str, Tensor]]]]) -> None:
    """`load_state_dict` of PyTorch accepts this shape for a scalar."""
    values = trained[2][1]["Scalars"]
    assert values["blocks.0.scale"].shape == (1,) and values["blocks.0.scale"] != 0.3
    plain = Scalars()
    plain.load_state_dict({name: values[name.replace("tied", "scale")] for name in plain.state_dict()})
    assert plain.get_parameter("blocks.1.scale") == values["blocks.1.scale"]


def test_blocks_with_scalars_compile_and_keep_their_class() -> None:
    built = build_model(ModelConfig(name=f"{__name__}:Scalars"), TOKENS)
    assert [info.class_name for info in take_inventory(built.module, built.blocks).modules].count("Scaled") == 2
    blocks = [Scaled(), Scaled()]
    for block in blocks:
        scalars_as_vectors(block)
    assert type(blocks[0]) is type(blocks[1]) is not Scaled and isinstance(blocks[0], Scaled)
    blocks[1].load_state_dict(blocks[0].state_dict())
    x = torch.ones(2, 16)
    compiled = torch.compile(blocks[1], backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x), blocks[0](x))
