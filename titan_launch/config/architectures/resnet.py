"""`[model.args]` of `resnet`, and its size table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from titan_launch.config.architectures.base import ModelArgs
from titan_launch.config.sections.base import Array
from titan_launch.config.sections.data import ImageFormat, SampleUnit

Positive = Annotated[int, Field(ge=1)]
BlockKind = Literal["basic", "bottleneck"]

EXPANSION = {"basic": 1, "bottleneck": 4}
"""Channels that a block hands on, as a multiple of its stage's width."""


class ResNetArgs(ModelArgs):
    """The shape of a ResNet."""

    unit: ClassVar[SampleUnit] = "images"

    block: BlockKind
    """`basic`: two 3x3 convolutions. `bottleneck`: 1x1, 3x3, 1x1, the last with four times the channels."""

    depths: Array[Positive]
    """Number of blocks of each stage."""

    widths: Array[Positive]
    """Channels of each stage's 3x3 convolutions. Every stage but the first halves height and width."""

    stem: Literal["imagenet", "small"]
    """What stands before the blocks. `imagenet`: a 7x7 convolution and a pooling, which divide height and width by 4.
    `small`: a 3x3 convolution that keeps them, for images of up to about 64 pixels."""

    image_size: Positive
    """Height and width of the images."""

    in_channels: Positive = 3
    """Channels of the images: 1 for gray ones."""

    num_classes: Positive = 1000
    """Classes to tell apart; more than the largest label."""

    batchnorm_momentum: Annotated[float, Field(gt=0, le=1)] = 0.1
    """Weight of a microbatch in the running statistics."""

    batchnorm_eps: Annotated[float, Field(gt=0)] = 1e-5
    """Added to the variance."""

    zero_init_residual: bool = True
    """Start every block as the identity, by a weight of 0 in its last BatchNorm (arXiv:1706.02677, section 5.1)."""

    def problems(self) -> Iterator[tuple[tuple[str, ...], str]]:
        """Yield stages without a number in both lists."""
        if not self.depths:
            yield ("depths",), "there must be at least one stage"
        elif len(self.depths) != len(self.widths):
            stages = f"depths has {len(self.depths)} stages and widths {len(self.widths)}"
            yield ("widths", "depths"), f"{stages}; give each stage one number in both"

    def images_taken(self) -> ImageFormat:
        """Return the format of the images that the model takes."""
        return ImageFormat(self.in_channels, self.image_size, self.image_size, self.num_classes)

    def flops_per_sample(self, seq_len: int) -> int:
        """Return the FLOPs of forward and backward for one image."""
        return flops_per_image(self)


@dataclass(frozen=True)
class _Convolution:
    """A convolution without bias, followed by a BatchNorm."""

    in_channels: int
    out_channels: int
    kernel_size: int
    out_size: int
    """Height and width of its output."""

    @property
    def num_weights(self) -> int:
        """Weights of the kernel."""
        return self.kernel_size**2 * self.in_channels * self.out_channels

    @property
    def multiply_adds(self) -> int:
        """Multiply-adds of one image in forward: every weight at every position of the output, the padding's too."""
        return self.num_weights * self.out_size**2


def num_parameters(args: ResNetArgs) -> int:
    """Parameters of the model.

    A convolution from C to C' channels has k k C C' weights and its BatchNorm 2 C'; the last layer K (C + 1), for C
    channels of the last block and K classes. The convolutions are the stem, and in a block of width W on C channels

        basic        3x3 C W,  3x3 W W
        bottleneck   1x1 C W,  3x3 W W,  1x1 W 4W
        shortcut     1x1 from C to the block's output (W or 4W), where the block changes channels or size
    """
    convolutions = sum(conv.num_weights + 2 * conv.out_channels for conv in _convolutions(args))
    return convolutions + args.num_classes * (_out_channels(args) + 1)


def flops_per_image(args: ResNetArgs) -> int:
    """FLOPs of forward and backward for one image: 6 M - 2 S.

    M are the multiply-adds of forward: k k C C' H' W' for a convolution whose output is H' x W', C K for the last
    layer. Each is two FLOPs in forward, and twice that in backward, for the gradients of the weights and of the input;
    the stem (S) is spared the latter, as nobody needs the gradient of the images. BatchNorm, ReLU and pooling, a few
    operations per element, are left out, as is usual.
    """
    stem, *others = (conv.multiply_adds for conv in _convolutions(args))
    return 4 * stem + 6 * (sum(others) + _out_channels(args) * args.num_classes)


def _convolutions(args: ResNetArgs) -> Iterator[_Convolution]:
    """All convolutions, the stem first."""
    size, channels = args.image_size, args.widths[0]
    if args.stem == "imagenet":
        size = _halved(size)
        yield _Convolution(args.in_channels, channels, 7, size)
        size = _halved(size)  # the pooling
    else:
        yield _Convolution(args.in_channels, channels, 3, size)
    for stage, (depth, width) in enumerate(zip(args.depths, args.widths, strict=True)):
        for index in range(depth):
            halves = stage > 0 and index == 0
            yield from _block(args.block, channels, width, size, halves)
            size, channels = _halved(size) if halves else size, width * EXPANSION[args.block]


def _block(kind: BlockKind, channels: int, width: int, size: int, halves: bool) -> Iterator[_Convolution]:
    out_size, out_channels = _halved(size) if halves else size, width * EXPANSION[kind]
    if kind == "basic":
        yield _Convolution(channels, width, 3, out_size)
        yield _Convolution(width, width, 3, out_size)
    else:
        yield _Convolution(channels, width, 1, size)
        yield _Convolution(width, width, 3, out_size)
        yield _Convolution(width, out_channels, 1, out_size)
    if halves or channels != out_channels:
        yield _Convolution(channels, out_channels, 1, out_size)


def _halved(size: int) -> int:
    """Half, rounded up: what a stride of 2 leaves, with a padding of half the kernel."""
    return (size + 1) // 2


def _out_channels(args: ResNetArgs) -> int:
    return args.widths[-1] * EXPANSION[args.block]


_IMAGENET: dict[str, Any] = {"widths": [64, 128, 256, 512], "stem": "imagenet", "image_size": 224}

# As published for ImageNet (arXiv:1512.03385, table 1; the bottleneck halves in its 3x3 convolution, as torchvision's
# does); `debug` is for the 8x8 digits of scikit-learn on a CPU.
FLAVORS: dict[str, dict[str, Any]] = {
    "debug": {
        "block": "basic",
        "depths": [1, 1, 1],
        "widths": [16, 32, 64],
        "stem": "small",
        "image_size": 8,
        "in_channels": 1,
        "num_classes": 10,
    },
    "resnet18": {"block": "basic", "depths": [2, 2, 2, 2], **_IMAGENET},
    "resnet34": {"block": "basic", "depths": [3, 4, 6, 3], **_IMAGENET},
    "resnet50": {"block": "bottleneck", "depths": [3, 4, 6, 3], **_IMAGENET},
    "resnet101": {"block": "bottleneck", "depths": [3, 4, 23, 3], **_IMAGENET},
}
