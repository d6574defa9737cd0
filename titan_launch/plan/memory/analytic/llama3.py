"""Llama 3 without values: the table of its modules, and the memory that its forward allocates. No torch.

This module copies the modules and the local variables of `titan_launch.models.llama3`, because both determine which
tensors stay alive. Tests compare the table with the built model, and the memory with a traced model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from titan_launch.config.architectures.llama3 import Llama3Args, NormKind
from titan_launch.config.job import JobConfig
from titan_launch.core.globs import matches
from titan_launch.plan.memory.analytic import ops
from titan_launch.plan.memory.analytic.replay import AnalyticModel, Compute, ReplayContext
from titan_launch.plan.memory.analytic.tensors import Tensor
from titan_launch.plan.types import Inventory, ModuleInfo, TensorInfo, full_name


class AnalyticLlama3:
    """The model on one rank. `forward` allocates the memory of one microbatch."""

    def __init__(self, args: Llama3Args, context: ReplayContext):
        self.args = args
        self.seq_len = context.seq_len
        self.autograd = context.autograd
        self.kernels = context.kernels
        self.weight = context.weight
        self.call = context.call
        self.statistics_ranks = context.statistics_ranks

    def forward(self, tokens: Tensor, blocks: Iterable[str]) -> Tensor:
        """Return the logits of `tokens`. Only the blocks with the paths `blocks` run."""
        x = self.call("tok_embeddings", self._embed, tokens)
        for path in blocks:
            x = self.call(path, self._block(path), x)
        return self._linear("output", self._norm("norm", x))

    def _embed(self, tokens: Tensor) -> Tensor:
        return ops.embedding(self.autograd, self.weight("tok_embeddings.weight"), tokens.numel, self.args.dim)

    def _block(self, path: str) -> Compute:
        def forward(x: Tensor) -> Tensor:
            x = ops.add(self.autograd, x, self._attention(f"{path}.attention", self._norm(f"{path}.attention_norm", x)))
            return ops.add(
                self.autograd, x, self._feed_forward(f"{path}.feed_forward", self._norm(f"{path}.ffn_norm", x))
            )

        return forward

    def _attention(self, path: str, x: Tensor) -> Tensor:
        def forward(x: Tensor) -> Tensor:
            q, k, v = (self._linear(f"{path}.{name}", x) for name in ("wq", "wk", "wv"))
            q, k = self.call("rope", self._rotate, q), self.call("rope", self._rotate, k)
            num_rows = q.numel // self.args.head_dim
            attended = ops.attention(self.autograd, q, k, v, num_rows, self.seq_len, self.kernels)
            return self._linear(f"{path}.wo", attended)

        return self.call(path, forward, x)

    def _rotate(self, x: Tensor) -> Tensor:
        return ops.rotate(self.autograd, x)

    def _feed_forward(self, path: str, x: Tensor) -> Tensor:
        def forward(x: Tensor) -> Tensor:
            return self._linear(
                f"{path}.w2",
                ops.multiply(
                    self.autograd,
                    ops.silu(self.autograd, self._linear(f"{path}.w1", x)),
                    self._linear(f"{path}.w3", x),
                ),
            )

        return self.call(path, forward, x)

    def _linear(self, path: str, x: Tensor) -> Tensor:
        width_in = self.args.hidden_dim if path.endswith(".w2") else self.args.dim

        def forward(x: Tensor) -> Tensor:
            return ops.linear(self.autograd, x, self.weight(f"{path}.weight"), width_in)

        return self.call(path, forward, x)

    def _norm(self, path: str, x: Tensor) -> Tensor:
        def forward(x: Tensor) -> Tensor:
            weight = self.weight(f"{path}.weight")
            if self.args.norm == "rmsnorm":
                return ops.rms_norm(self.autograd, ops.view(self.autograd, x), weight, self.kernels)
            bias = self.weight(f"{path}.bias")
            if self.args.norm == "layernorm":
                return ops.layer_norm(self.autograd, x, weight, bias, self.kernels)
            if self.statistics_ranks:
                return ops.synchronized_batch_norm(self.autograd, x, weight, bias, self.statistics_ranks)
            return ops.batch_norm(self.autograd, x, weight, bias)

        return self.call(path, forward, x)


def llama3_inventory(args: Llama3Args, seq_len: int) -> Inventory:
    """Return the same inventory as `models.build.take_inventory` for a Llama with these arguments."""
    blocks = tuple(f"layers.{index}" for index in range(args.n_layers))
    modules = tuple(_modules(args, seq_len))
    return Inventory(modules, blocks, head=("norm", "output"), embeddings=("tok_embeddings",))


def _modules(args: Llama3Args, seq_len: int) -> Iterator[ModuleInfo]:
    width, kv_width = args.dim, args.n_kv_heads * args.head_dim
    yield ModuleInfo("", ("titan_launch.models.llama3.Llama3",), True)
    yield _rope(args, seq_len, "rope")
    yield _matrix("tok_embeddings", _EMBEDDING, args.vocab_size, width)
    yield ModuleInfo("layers", ("torch.nn.modules.container.ModuleList",), False)
    for index in range(args.n_layers):
        block = f"layers.{index}"
        yield ModuleInfo(block, ("titan_launch.models.llama3.TransformerBlock",), True)
        yield _norm(args, f"{block}.attention_norm")
        yield ModuleInfo(f"{block}.attention", ("titan_launch.models.layers.Attention",), True)
        yield _matrix(f"{block}.attention.wq", _LINEAR, width, width)
        yield _matrix(f"{block}.attention.wk", _LINEAR, kv_width, width)
        yield _matrix(f"{block}.attention.wv", _LINEAR, kv_width, width)
        yield _matrix(f"{block}.attention.wo", _LINEAR, width, width)
        yield _rope(args, seq_len, f"{block}.attention.rope")
        yield _norm(args, f"{block}.ffn_norm")
        yield ModuleInfo(f"{block}.feed_forward", ("titan_launch.models.layers.FeedForward",), True)
        yield _matrix(f"{block}.feed_forward.w1", _LINEAR, args.hidden_dim, width)
        yield _matrix(f"{block}.feed_forward.w2", _LINEAR, width, args.hidden_dim)
        yield _matrix(f"{block}.feed_forward.w3", _LINEAR, args.hidden_dim, width)
    yield _norm(args, "norm")
    yield _matrix("output", _LINEAR, args.vocab_size, width, "tok_embeddings.weight" if args.tie_embeddings else None)


_EMBEDDING, _LINEAR = "torch.nn.modules.sparse.Embedding", "torch.nn.modules.linear.Linear"

_NORM_CLASSES: dict[NormKind, tuple[str, ...]] = {
    "rmsnorm": ("titan_launch.models.layers.RMSNorm", "torch.nn.modules.normalization.RMSNorm"),
    "layernorm": ("torch.nn.modules.normalization.LayerNorm",),
    "batchnorm": (
        "titan_launch.models.layers.BatchNorm",
        "torch.nn.modules.batchnorm.BatchNorm1d",
        "torch.nn.modules.batchnorm._BatchNorm",
        "torch.nn.modules.batchnorm._NormBase",
    ),
}


def _parameter(name: str, *shape: int, tied_to: str | None = None) -> TensorInfo:
    return TensorInfo(name, shape, "float32", is_floating=True, requires_grad=True, tied_to=tied_to)


def _matrix(path: str, class_name: str, rows: int, columns: int, tied_to: str | None = None) -> ModuleInfo:
    return ModuleInfo(path, (class_name,), True, (_parameter("weight", rows, columns, tied_to=tied_to),))


def _norm(args: Llama3Args, path: str) -> ModuleInfo:
    names = ("weight",) if args.norm == "rmsnorm" else ("weight", "bias")
    buffers: tuple[TensorInfo, ...] = ()
    if args.norm == "batchnorm":
        statistics = (TensorInfo(name, (args.dim,), "float32", True) for name in ("running_mean", "running_var"))
        buffers = (*statistics, TensorInfo("num_batches_tracked", (), "int64", False))
    parameters = tuple(_parameter(name, args.dim) for name in names)
    return ModuleInfo(path, _NORM_CLASSES[args.norm], True, parameters, buffers)


def _rope(args: Llama3Args, seq_len: int, path: str) -> ModuleInfo:
    """Return the entry of the rotary embedding at `path`. All attention modules share this module."""
    first, name = "rope", "table"
    is_first = path == first
    tied_to = None if is_first else full_name(first, name)
    buffer = TensorInfo(name, (seq_len, args.head_dim // 2, 2), "float32", True, tied_to=tied_to)
    classes = ("titan_launch.models.layers.RotaryEmbedding",)
    return ModuleInfo(path, classes, True, buffers=(buffer,), same_as=None if is_first else first)


def unknown_part(config: JobConfig) -> str | None:
    """Return the part of a job that the replay does not support; None if it supports the whole job.

    Activation checkpointing of the rotary embedding is not supported, because all layers share this module.
    """
    paths = ("rope", "layers.0.attention.rope")
    if any(matches(glob, path) for glob in config.activation_checkpoint.modules for path in paths):
        return "activation_checkpoint.modules with the rotary embedding, which all layers share"
    return None


ANALYTIC = AnalyticModel(llama3_inventory, lambda args, context: AnalyticLlama3(args, context).forward, unknown_part)
