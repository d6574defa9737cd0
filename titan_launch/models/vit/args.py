"""`[model.args]` of `vit`, and its size table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from titan_launch.config.image_format import ImageFormat
from titan_launch.config.sections.data import SampleUnit
from titan_launch.models.args import Layers, ModelArgs, Parts, Pixels, TwinNeeds, Width


class ViTArgs(ModelArgs):
    """Sizes and options of a Vision Transformer."""

    unit: ClassVar[SampleUnit] = "images"
    supports_tensor_parallel: ClassVar[bool] = True

    image_size: Pixels
    """Height and width of the images: a multiple of `patch_size`."""

    patch_size: Pixels
    """Height and width of a patch in pixels. Each patch is a token."""

    dim: Width
    """Width of the residual stream."""

    n_layers: Layers
    """Number of blocks."""

    n_heads: Parts
    """Number of attention heads. It must divide `dim`."""

    hidden_dim: Width
    """Width of the hidden layer of the feed-forward layer."""

    in_channels: Width = 3
    """Channels of the images: 1 for gray images."""

    num_classes: Width = 1000
    """Number of classes. It must be larger than the largest label."""

    pool: Literal["class_token", "mean"] = "class_token"
    """Input of the output layer. `class_token`: a token with learned values, which attends to all patches. `mean`: the
    mean of all patches; there is no class token (arXiv:2205.01580)."""

    norm_eps: Annotated[float, Field(gt=0)] = 1e-6
    """Epsilon of the normalization layers, which is added to the variance."""

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.dim // self.n_heads

    @property
    def num_tokens(self) -> int:
        """Number of tokens of an image: its patches, and the class token if there is one."""
        return (self.image_size // self.patch_size) ** 2 + (self.pool == "class_token")

    # `ModelArgs` documents the methods below.

    def problems(self) -> Iterator[tuple[tuple[str, ...], str]]:
        for whole, part in (("image_size", "patch_size"), ("dim", "n_heads")):
            if getattr(self, whole) % getattr(self, part):
                reason = f"{whole} ({getattr(self, whole)}) must be a multiple of {part} ({getattr(self, part)})"
                yield (part, whole), reason

    def images_taken(self) -> ImageFormat:
        return ImageFormat(self.in_channels, self.image_size, self.image_size, self.num_classes)

    def num_layers(self) -> int:
        return self.n_layers

    def twin(self, needs: TwinNeeds) -> dict[str, Any]:
        heads = min(self.n_heads, 2)
        return {
            "image_size": 8,
            "patch_size": 2,
            "n_heads": heads,
            "dim": heads * min(self.head_dim, 16),
            "hidden_dim": needs.rows(self.hidden_dim, 48),
            "num_classes": needs.rows(self.num_classes, 10),
            "n_layers": self.n_layers if needs.keeps_depth else min(self.n_layers, max(2, needs.stages)),
        }

    def tensor_parallel_sizes(self) -> Mapping[str, int]:
        return {name: int(getattr(self, name)) for name in ("n_heads", "hidden_dim", "num_classes")}


def _size(patch_size: int, dim: int, n_layers: int, n_heads: int, hidden_dim: int) -> dict[str, Any]:
    shape = {"patch_size": patch_size, "dim": dim, "n_layers": n_layers, "n_heads": n_heads, "hidden_dim": hidden_dim}
    return {"image_size": 224, **shape}


# The ViTs have the sizes published for ImageNet: B, L and H in arXiv:2010.11929 (table 1), Ti and S in arXiv:2012.12877
# and arXiv:2106.10270. The number after the size is `patch_size`. `debug` is for the 8x8 digits of scikit-learn on a
# CPU.
FLAVORS: dict[str, dict[str, Any]] = {
    "debug": {**_size(2, 64, 4, 4, 256), "image_size": 8, "in_channels": 1, "num_classes": 10},
    "Ti/16": _size(16, 192, 12, 3, 768),
    "S/16": _size(16, 384, 12, 6, 1536),
    "B/16": _size(16, 768, 12, 12, 3072),
    "L/16": _size(16, 1024, 24, 16, 4096),
    "H/14": _size(14, 1280, 32, 16, 5120),
}
