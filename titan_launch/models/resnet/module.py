"""ResNet (arXiv:1512.03385): residual blocks of convolutions, with a BatchNorm after each convolution.

    images -> stem -> stages of blocks [ relu(shortcut(x) + convolutions(x)) ] -> mean over the pixels -> fc -> logits

Module names and the position of the stride are the same as in torchvision. The arguments are in
`titan_launch.models.resnet.args`.
"""

from __future__ import annotations

from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from titan_launch.models.initializers import InitTable, constant, normal
from titan_launch.models.resnet.args import EXPANSION, ResNetArgs
from titan_launch.models.spec import ModelSpec


class BasicBlock(nn.Module):
    """Residual block of two 3x3 convolutions."""

    def __init__(self, args: ResNetArgs, channels: int, width: int, stride: int):
        super().__init__()
        self.conv1 = _conv(channels, width, 3, stride)
        self.bn1 = _norm(args, width)
        self.conv2 = _conv(width, width, 3)
        self.bn2 = _norm(args, width)
        self.downsample = _shortcut(args, channels, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Map images (batch, channels, h, w) to (batch, `width` channels, h / stride, w / stride), with sizes rounded
        up."""
        y = F.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        return F.relu(y + self.downsample(x))


class Bottleneck(nn.Module):
    """Residual block of three convolutions: 1x1 reduces the channels, 3x3 follows, 1x1 expands the channels again."""

    def __init__(self, args: ResNetArgs, channels: int, width: int, stride: int):
        super().__init__()
        out_channels = width * EXPANSION["bottleneck"]
        self.conv1 = _conv(channels, width, 1)
        self.bn1 = _norm(args, width)
        self.conv2 = _conv(width, width, 3, stride)
        self.bn2 = _norm(args, width)
        self.conv3 = _conv(width, out_channels, 1)
        self.bn3 = _norm(args, out_channels)
        self.downsample = _shortcut(args, channels, out_channels, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Map images (batch, channels, h, w) to (batch, 4 * `width` channels, h / stride, w / stride), with sizes
        rounded up."""
        y = F.relu(self.bn1(self.conv1(x)))
        y = F.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        return F.relu(y + self.downsample(x))


class MeanOverPixels(nn.Module):
    """The mean of each channel over all pixels."""

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, channels, height, width) to (batch, channels)."""
        return x.mean(dim=(2, 3))


_BLOCKS: dict[str, type[BasicBlock] | type[Bottleneck]] = {"basic": BasicBlock, "bottleneck": Bottleneck}


class ResNet(nn.Module):
    """A ResNet for images of any size."""

    def __init__(self, args: ResNetArgs):
        super().__init__()
        channels = args.widths[0]
        is_small = args.stem == "small"
        self.conv1 = _conv(args.in_channels, channels, 3 if is_small else 7, stride=1 if is_small else 2)
        self.bn1 = _norm(args, channels)
        self.relu = nn.ReLU()
        self.maxpool = nn.Identity() if is_small else nn.MaxPool2d(kernel_size=3, stride=2, padding=1)
        self.stages = [f"layer{stage + 1}" for stage in range(len(args.depths))]
        for name, depth, width in zip(self.stages, args.depths, args.widths, strict=True):
            stride = 1 if name == "layer1" else 2
            self.add_module(name, _stage(args, channels, width, depth, stride))
            channels = width * EXPANSION[args.block]
        self.avgpool = MeanOverPixels()
        self.fc = nn.Linear(channels, args.num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Map images (batch, in_channels, height, width) to logits (batch, num_classes)."""
        x = self.maxpool(self.relu(self.bn1(self.conv1(images))))
        for name in self.stages:
            x = self.get_submodule(name)(x)
        return self.fc(self.avgpool(x))


def _stage(args: ResNetArgs, channels: int, width: int, depth: int, stride: int) -> nn.Sequential:
    """Return `depth` blocks of one width. The first block takes `channels` channels and has the stride."""
    block, out_channels = _BLOCKS[args.block], width * EXPANSION[args.block]
    others = (block(args, out_channels, width, 1) for _ in range(depth - 1))
    return nn.Sequential(block(args, channels, width, stride), *others)


def _conv(in_channels: int, out_channels: int, kernel_size: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(in_channels, out_channels, kernel_size, stride, padding=kernel_size // 2, bias=False)


def _norm(args: ResNetArgs, channels: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(channels, eps=args.batchnorm_eps, momentum=args.batchnorm_momentum)


def _shortcut(args: ResNetArgs, channels: int, out_channels: int, stride: int) -> nn.Module:
    """Return a module that maps a block's input to the shape of the block's output."""
    if stride == 1 and channels == out_channels:
        return nn.Identity()
    return nn.Sequential(_conv(channels, out_channels, 1, stride), _norm(args, out_channels))


def initial_values(args: ResNetArgs) -> InitTable:
    """Return initial values: convolutions preserve the gradient's variance (arXiv:1502.01852), logits are near 0."""
    draw = partial(nn.init.kaiming_normal_, mode="fan_out", nonlinearity="relu")
    last_norm = "layer*.*.bn2.weight" if args.block == "basic" else "layer*.*.bn3.weight"
    return InitTable(
        [
            (last_norm, constant(0.0 if args.zero_init_residual else 1.0)),
            ("fc.weight", normal(0.01)),
            ("**.bias", constant(0.0)),
            ("**.running_mean", constant(0.0)),
            ("**.running_var", constant(1.0)),
            ("**.num_batches_tracked", constant(0)),
            *((f"**.{conv}.weight", draw) for conv in ("conv[123]", "downsample.0")),
            *((f"**.{norm}.weight", constant(1.0)) for norm in ("bn[123]", "downsample.1")),
        ]
    )


SPEC = ModelSpec(
    build=lambda args, seq_len: ResNet(args),
    blocks=("layer*.*",),
    head=("fc",),
    pipeline_order=("conv1", "bn1", "relu", "maxpool", "layer*.*", "avgpool", "fc"),
    initializer=initial_values,
)
