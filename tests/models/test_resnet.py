"""ResNet: published sizes, formulas, arithmetic step by step, and training under FSDP2."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.distributed import run_ranks
from tests.tensors import assert_equal, cross_entropy_sum, full_state
from tests.train.jobs import sharded_model
from titan_launch.config.job import JobConfig
from titan_launch.models.init import initialize
from titan_launch.models.resnet.args import FLAVORS, ResNetArgs
from titan_launch.models.resnet.module import SPEC, ResNet, initial_values

CPU = torch.device("cpu")
BLOCKS = ("basic", "bottleneck")
STEMS = ("small", "imagenet")

TINY: dict[str, Any] = {
    "block": "basic",
    "depths": [2, 1],
    "widths": [4, 8],
    "stem": "small",
    "image_size": 9,
    "in_channels": 2,
    "num_classes": 5,
}


def tiny_args(**overrides: Any) -> ResNetArgs:
    return ResNetArgs.model_validate({**TINY, **overrides})


def tiny_model(**overrides: Any) -> ResNet:
    args = tiny_args(**overrides)
    model = ResNet(args)
    initialize(model, initial_values(args), 0, CPU)
    return model


def on_meta(args: ResNetArgs) -> nn.Module:
    with torch.device("meta"):
        return SPEC.build(args, 1)


def test_published_sizes() -> None:
    models = {flavor: on_meta(ResNetArgs.model_validate(row)) for flavor, row in FLAVORS.items()}
    sizes = {flavor: sum(p.numel() for p in model.parameters()) for flavor, model in models.items()}
    del sizes["debug"]
    assert sizes == {"resnet18": 11_689_512, "resnet34": 21_797_672, "resnet50": 25_557_032, "resnet101": 44_549_160}


def test_module_names_are_torchvisions() -> None:
    names = set(on_meta(ResNetArgs.model_validate(FLAVORS["resnet50"])).state_dict())
    assert len(names) == 320  # as many as torchvision's resnet50
    assert {"conv1.weight", "bn1.running_var", "fc.weight", "fc.bias"} < names
    assert {"layer1.0.conv3.weight", "layer4.2.bn3.num_batches_tracked", "layer3.0.downsample.1.bias"} < names
    assert not any(name.startswith("layer1.1.downsample") for name in names)


def test_shapes_of_the_stages() -> None:
    args = ResNetArgs.model_validate(FLAVORS["resnet50"])
    model, shapes = on_meta(args), {}
    for name, module in model.named_children():
        module.register_forward_hook(lambda m, inputs, y, name=name: shapes.update({name: tuple(y.shape[1:])}))
    model(torch.zeros(2, 3, 224, 224, device="meta"))
    assert shapes == {
        "conv1": (64, 112, 112),
        "bn1": (64, 112, 112),
        "relu": (64, 112, 112),
        "maxpool": (64, 56, 56),
        "layer1": (256, 56, 56),
        "layer2": (512, 28, 28),
        "layer3": (1024, 14, 14),
        "layer4": (2048, 7, 7),
        "avgpool": (2048,),
        "fc": (1000,),
    }


def normalized(x: Tensor, norm: nn.Module) -> Tensor:
    """Return the output of a training BatchNorm, computed from its definition."""
    mean, variance = x.mean((0, 2, 3), keepdim=True), x.var((0, 2, 3), correction=0, keepdim=True)
    weight, bias = norm.weight[:, None, None], norm.bias[:, None, None]
    return (x - mean) / (variance + 1e-5).sqrt() * weight + bias


def test_logits_are_those_of_the_formula() -> None:
    """The formula is written out for a block with an identity shortcut and one with a convolution."""
    model = tiny_model(zero_init_residual=False)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            nn.init.normal_(parameter, mean=1.0 if name.endswith("weight") else 0.0)
    images = torch.randn(3, 2, 9, 9)
    w = dict(model.named_parameters())

    x = normalized(F.conv2d(images, w["conv1.weight"], padding=1), model.bn1).relu()
    for path, stride in (("layer1.0", 1), ("layer1.1", 1), ("layer2.0", 2)):
        block = model.get_submodule(path)
        y = F.conv2d(x, w[f"{path}.conv1.weight"], stride=stride, padding=1)
        y = normalized(y, block.bn1).relu()
        y = normalized(F.conv2d(y, w[f"{path}.conv2.weight"], padding=1), block.bn2)
        if stride == 2:
            x = normalized(F.conv2d(x, w[f"{path}.downsample.0.weight"], stride=2), block.downsample[1])
        x = (x + y).relu()
    expected = x.mean((2, 3)) @ w["fc.weight"].T + w["fc.bias"]

    torch.testing.assert_close(model(images), expected, rtol=1e-4, atol=1e-5)


def test_a_bottleneck_block_computes_the_formula() -> None:
    block = tiny_model(block="bottleneck", zero_init_residual=False).get_submodule("layer2.0")
    x = torch.randn(3, 16, 9, 9)
    y = normalized(F.conv2d(x, block.conv1.weight), block.bn1).relu()
    y = normalized(F.conv2d(y, block.conv2.weight, stride=2, padding=1), block.bn2).relu()
    y = normalized(F.conv2d(y, block.conv3.weight), block.bn3)
    shortcut = normalized(F.conv2d(x, block.downsample[0].weight, stride=2), block.downsample[1])
    torch.testing.assert_close(block(x), (y + shortcut).relu(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("block", BLOCKS)
def test_initial_values(block: str) -> None:
    model = tiny_model(block=block, widths=[64, 128])
    convolution = model.get_submodule("layer2.0.conv2").weight
    assert convolution.std().item() == pytest.approx((2 / (128 * 9)) ** 0.5, rel=0.05)  # fan out
    assert model.fc.weight.std().item() == pytest.approx(0.01, rel=0.1) and not model.fc.bias.any()
    norms = {name: module for name, module in model.named_modules() if isinstance(module, nn.BatchNorm2d)}
    last = "bn2" if block == "basic" else "bn3"
    for name, norm in norms.items():
        assert torch.equal(norm.weight, torch.full_like(norm.weight, 0.0 if name.endswith(last) else 1.0)), name
        assert (
            not norm.bias.any()
            and not norm.running_mean.any()
            and torch.equal(norm.running_var, torch.ones_like(norm.running_var))
        )


def test_a_block_starts_as_the_identity() -> None:
    x = torch.rand(3, 4, 9, 9)
    assert torch.equal(tiny_model().get_submodule("layer1.0")(x), x)
    assert not torch.allclose(tiny_model(zero_init_residual=False).get_submodule("layer1.0")(x), x)


@pytest.mark.parametrize(("depths", "widths", "culprit"), [([], [], "depths"), ([1, 2], [4], "widths")])
def test_depths_and_widths_that_do_not_agree_are_an_error(depths: list[int], widths: list[int], culprit: str) -> None:
    ((fields, _),) = tiny_args(depths=depths, widths=widths).problems()
    assert fields[0] == culprit


@pytest.mark.parametrize("block", BLOCKS)
def test_a_resnet_trains_from_the_meta_device_under_fsdp(block: str, single_process_group: None) -> None:
    """Build in fp32 on the meta device, shard, allocate and initialise. Loss and gradients are those of the plain
    model, and nothing warns."""
    args, plain = tiny_args(block=block), tiny_model(block=block)
    model = on_meta(args)
    mesh = init_device_mesh("cpu", (1,))
    for path in ("layer1.0", "layer1.1", "layer2.0"):
        fully_shard(model.get_submodule(path), mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device=CPU)
    initialize(model, initial_values(args), 0, CPU)
    images, targets = torch.randn(4, 2, 9, 9), torch.randint(0, 5, (4,))
    losses = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for each in (plain, model):
            losses.append(cross_entropy_sum(each(images), targets))
            losses[-1].backward()
    assert torch.equal(*losses)
    for (name, expected), (_, actual) in zip(plain.named_parameters(), model.named_parameters(), strict=True):
        torch.testing.assert_close(actual.grad.full_tensor(), expected.grad, msg=name)


def initial_state(job: dict[str, Any]) -> dict[str, Tensor]:
    return full_state(sharded_model(JobConfig.model_validate(job), seq_len=1))


def test_initial_values_do_not_depend_on_the_number_of_ranks() -> None:
    job = {"model": {"name": "resnet", "args": TINY}, "training": {"local_batch_size": 1, "global_batch_size": 4}}
    expected = {name: tensor.detach() for name, tensor in tiny_model().state_dict().items()}
    for world_size in (1, 2, 4):
        for state in run_ranks(initial_state, world_size, job):
            assert_equal(state, expected)
