"""Vision Transformer (arXiv:2010.11929): an encoder of the patches of an image.

    images -> embeddings -> n_layers x [ x + attention(attention_norm(x)), x + feed_forward(ffn_norm(x)) ]
           -> norm -> pool -> output -> logits

The modules inside of a block have the same names as in the decoders. The arguments are in
`titan_launch.models.vit.args`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan_launch.models.initializers import InitTable, constant, truncated_normal
from titan_launch.models.spec import ModelSpec, TensorStyle
from titan_launch.models.vit.args import ViTArgs


class PatchEmbedding(nn.Module):
    """Linear map of patches to tokens. It adds learned positions and, with `pool = "class_token"`, a class token."""

    class_token: nn.Parameter | None

    def __init__(self, args: ViTArgs):
        super().__init__()
        size = args.patch_size
        self.projection = nn.Conv2d(args.in_channels, args.dim, kernel_size=size, stride=size)
        token = nn.Parameter(torch.zeros(args.dim)) if args.pool == "class_token" else None
        self.register_parameter("class_token", token)
        self.positions = nn.Embedding(args.num_tokens, args.dim)  # embeddings get no weight decay

    def forward(self, images: Tensor) -> Tensor:
        """Map (batch, in_channels, image_size, image_size) to (batch, tokens, dim). The class token is first."""
        x = self.projection(images).flatten(2).transpose(1, 2)
        if self.class_token is not None:
            x = torch.cat((self.class_token.expand(len(x), 1, -1), x), dim=1)
        return x + self.positions(torch.arange(x.shape[1], device=x.device))


class Attention(nn.Module):
    """Self-attention in which every token attends to every token."""

    def __init__(self, args: ViTArgs):
        super().__init__()
        self.head_dim = args.head_dim
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(args.dim, args.dim) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, tokens, dim) to the same shape."""
        # [batch, heads, tokens, head_dim]; the number of heads follows from the weights
        q, k, v = (
            project(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for project in (self.wq, self.wk, self.wv)
        )
        return self.wo(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2))


class FeedForward(nn.Module):
    """The feed-forward layer: w2(gelu(w1 x))."""

    def __init__(self, args: ViTArgs):
        super().__init__()
        self.w1 = nn.Linear(args.dim, args.hidden_dim)
        self.w2 = nn.Linear(args.hidden_dim, args.dim)

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., dim) to the same shape."""
        return self.w2(F.gelu(self.w1(x)))


class Block(nn.Module):
    """Attention and feed-forward. Each gets the normalized residual stream, and its result is added to the residual
    stream."""

    def __init__(self, args: ViTArgs):
        super().__init__()
        self.attention_norm = nn.LayerNorm(args.dim, eps=args.norm_eps)
        self.attention = Attention(args)
        self.ffn_norm = nn.LayerNorm(args.dim, eps=args.norm_eps)
        self.feed_forward = FeedForward(args)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, tokens, dim) to the same shape."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


class Pool(nn.Module):
    """Reduction of all tokens to one vector: the class token, or the mean."""

    def __init__(self, args: ViTArgs):
        super().__init__()
        self.uses_class_token = args.pool == "class_token"

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, tokens, dim) to (batch, dim)."""
        return x[:, 0] if self.uses_class_token else x.mean(dim=1)


class ViT(nn.Module):
    """A Vision Transformer for images of one size."""

    def __init__(self, args: ViTArgs):
        super().__init__()
        self.embeddings = PatchEmbedding(args)
        self.layers = nn.ModuleList(Block(args) for _ in range(args.n_layers))
        self.norm = nn.LayerNorm(args.dim, eps=args.norm_eps)
        self.pool = Pool(args)
        self.output = nn.Linear(args.dim, args.num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Map images (batch, in_channels, image_size, image_size) to logits (batch, num_classes)."""
        x = self.embeddings(images)
        for layer in self.layers:
            x = layer(x)
        return self.output(self.pool(self.norm(x)))


def initial_values(args: ViTArgs) -> InitTable:
    """Return the initial values of the ViT authors' code. The output layer is 0, so the first loss is log(num_classes).

    Matrices keep the variance of activations and gradients (Glorot and Bengio, 2010). The projection of patches keeps
    the variance of the pixels.
    """
    pixels = args.in_channels * args.patch_size**2
    return InitTable(
        [
            ("embeddings.projection.weight", truncated_normal(pixels**-0.5)),
            ("embeddings.class_token", constant(0.0)),
            ("embeddings.positions.weight", truncated_normal(0.02)),
            ("output.weight", constant(0.0)),
            ("**.bias", constant(0.0)),
            ("**.*norm.weight", constant(1.0)),
            ("layers.**.w?.weight", nn.init.xavier_uniform_),
        ]
    )


TENSOR_PARALLEL: dict[str, TensorStyle] = {
    "embeddings": "sequence",
    "embeddings.*": "sequence",
    "layers.*.*_norm": "sequence",
    "layers.*.attention": "input",
    "layers.*.attention.w[qkv]": "colwise",
    "layers.*.attention.wo": "rowwise",
    "layers.*.feed_forward": "input",
    "layers.*.feed_forward.w1": "colwise",
    "layers.*.feed_forward.w2": "rowwise",
    "norm": "sequence",
    "output": "head",
}
"""Styles of tensor parallelism by glob of modules. They require `sequence_parallel = false`, because every rank embeds
all patches."""

SPEC = ModelSpec(
    build=lambda args, seq_len: ViT(args),
    blocks=("layers.*",),
    head=("norm", "output"),
    initializer=initial_values,
    pipeline_order=("embeddings", "layers.*", "norm", "pool", "output"),
    tensor_parallel=TENSOR_PARALLEL,
)
