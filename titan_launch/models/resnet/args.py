"""`[model.args]` of `resnet`, and its size table."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from titan_launch.config.image_format import ImageFormat
from titan_launch.config.sections.data import SampleUnit
from titan_launch.config.sections.section import Array
from titan_launch.models.args import MOST_LAYERS, Layers, ModelArgs, Pixels, TwinNeeds, Width

EXPANSION = {"basic": 1, "bottleneck": 4}
"""For each kind of block: its number of output channels, as a multiple of the width of its stage."""


class ResNetArgs(ModelArgs):
    """Sizes and options of a ResNet."""

    unit: ClassVar[SampleUnit] = "images"

    block: Literal["basic", "bottleneck"]
    """Kind of the residual blocks. `basic`: two 3x3 convolutions. `bottleneck`: 1x1, 3x3 and 1x1 convolutions. The last
    convolution has four times as many output channels as the other two."""

    depths: Array[Layers]
    """Number of blocks of each stage."""

    widths: Array[Width]
    """Channels of the 3x3 convolutions of each stage. Every stage but the first halves height and width."""

    stem: Literal["imagenet", "small"]
    """The layers before the blocks. `imagenet`: a 7x7 convolution and a pooling layer, which divide height and width by
    4. `small`: a 3x3 convolution that does not change height and width, for images of up to about 64 pixels."""

    image_size: Pixels
    """Height and width of the images."""

    in_channels: Width = 3
    """Channels of the images: 1 for gray images."""

    num_classes: Width = 1000
    """Number of classes. It must be larger than the largest label."""

    batchnorm_momentum: Annotated[float, Field(gt=0, le=1)] = 0.1
    """Weight of a microbatch in the running statistics; with `batchnorm.momentum_per = "step"`, weight of a step."""

    batchnorm_eps: Annotated[float, Field(gt=0)] = 1e-5
    """Epsilon of each BatchNorm, which is added to the variance."""

    zero_init_residual: bool = True
    """Initialize the weight of the last BatchNorm of each block with 0, so that at first a block returns only its
    shortcut (arXiv:1706.02677, section 5.1)."""

    # `ModelArgs` documents the methods below.

    def problems(self) -> Iterator[tuple[tuple[str, ...], str]]:
        if not self.depths:
            yield ("depths",), "must have at least one stage"
        elif sum(self.depths) > MOST_LAYERS:
            yield ("depths",), f"has {sum(self.depths)} blocks; write {MOST_LAYERS} or less"
        elif len(self.depths) != len(self.widths):
            stages = f"depths has {len(self.depths)} stages, but widths has {len(self.widths)}"
            yield ("widths", "depths"), f"{stages}; write one number per stage in both"

    def twin(self, needs: TwinNeeds) -> dict[str, Any]:
        return {
            "depths": self.depths if needs.keeps_depth else [min(depth, 2) for depth in self.depths],
            "widths": [min(width, 8 * 2**index) for index, width in enumerate(self.widths)],
            "image_size": min(self.image_size, 32 if self.stem == "imagenet" else 8),
            "num_classes": needs.rows(self.num_classes, 10),
        }

    def images_taken(self) -> ImageFormat:
        return ImageFormat(self.in_channels, self.image_size, self.image_size, self.num_classes)


_IMAGENET: dict[str, Any] = {"widths": [64, 128, 256, 512], "stem": "imagenet", "image_size": 224}

# The ResNets have the sizes published for ImageNet (arXiv:1512.03385, table 1). A bottleneck halves height and width in
# its 3x3 convolution, as in torchvision. `debug` is for the 8x8 digits of scikit-learn on a CPU.
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
