"""A decoder without values: the table of its modules, and the memory that its forward allocates. No torch.

This module copies the modules and the local variables of `titan_launch.models.decoder`, because both determine which
tensors stay alive. Tests compare the table with the built model, and the memory with a traced model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial

from titan_launch.config.architectures.decoder import DecoderArgs
from titan_launch.config.architectures.experts import ExpertArgs
from titan_launch.config.architectures.latent_attention import LatentAttentionArgs
from titan_launch.config.job import JobConfig
from titan_launch.core.globs import matches
from titan_launch.plan.hardware import Kernels
from titan_launch.plan.job import plan_units
from titan_launch.plan.memory.analytic import ops
from titan_launch.plan.memory.analytic.experts import AnalyticExperts
from titan_launch.plan.memory.analytic.replay import AnalyticModel, Compute, ReplayContext
from titan_launch.plan.memory.analytic.tensors import Tensor
from titan_launch.plan.types import EXPERTS, MIXTURE_OF_EXPERTS, Inventory, ModuleInfo, TensorInfo, full_name


class AnalyticDecoder:
    """The model on one rank. `forward` allocates the memory of one microbatch."""

    def __init__(self, args: DecoderArgs, context: ReplayContext):
        self.args = args
        self.seq_len = context.seq_len
        self.autograd = context.autograd
        self.kernels = context.kernels
        self.weight = context.weight
        self.call = context.call
        self.statistics_ranks = context.statistics_ranks
        self.loss_chunks = context.loss_chunks
        self.has_documents = context.has_documents
        self.experts = None if args.experts is None else AnalyticExperts(args.experts, args.dim, context)

    def forward(self, tokens: Tensor, blocks: Iterable[str]) -> Tensor:
        """Return the logits of `tokens`, or the loss in chunks. Only the blocks with the paths `blocks` run."""
        positions = self.autograd.new(tokens.numel, "int32") if self.has_documents else None  # of tokens in documents
        x = self.call("tok_embeddings", self._embed, tokens)
        if self.args.positions == "learned":
            x = self.call("pos_embeddings", partial(self._add_positions, positions), x)
        for path in blocks:
            x = self.call(path, self._block(path, positions), x)
        return self._output(self._norm("norm", x))

    def _embed(self, tokens: Tensor) -> Tensor:
        weight, width = self.weight("tok_embeddings.weight"), self.args.dim
        if not self.args.scale_embeddings:
            return ops.embedding(self.autograd, weight, tokens.numel, width)
        return ops.scale(self.autograd, ops.embedding(self.autograd, weight, tokens.numel, width))

    def _add_positions(self, positions: Tensor | None, x: Tensor) -> Tensor:
        weight, dim = self.weight("pos_embeddings.weight"), self.args.dim
        if positions is None:
            return ops.add_rows(self.autograd, x, ops.embedding(self.autograd, weight, self.seq_len, dim))
        return ops.add(self.autograd, x, ops.embedding(self.autograd, weight, positions.numel, dim, positions))

    def _output(self, x: Tensor) -> Tensor:
        def capped(x: Tensor) -> Tensor:
            autograd, logits = self.autograd, self._product("output", x)
            return ops.scale(autograd, ops.saving_result(autograd, ops.scale(autograd, logits)))

        if self.loss_chunks > 1:
            return self.call("output", self._loss, x)
        return self._linear("output", x) if self.args.logits_soft_cap is None else self.call("output", capped, x)

    def _loss(self, x: Tensor) -> Tensor:
        args, weight = self.args, self.weight("output.weight")
        return ops.chunked_loss(
            self.autograd, x, weight, args.dim, self.loss_chunks, is_capped=args.logits_soft_cap is not None
        )

    def _block(self, path: str, positions: Tensor | None) -> Compute:
        def attended(x: Tensor) -> Tensor:
            return self._attention(f"{path}.attention", positions, self._norm(f"{path}.attention_norm", x))

        def fed(x: Tensor) -> Tensor:
            layer = self._mixture if self.args.has_experts(_index(path)) else self._feed_forward
            return layer(path, self._norm(f"{path}.ffn_norm", x))

        def forward(x: Tensor) -> Tensor:
            x = ops.add(self.autograd, x, self._post_norm(f"{path}.attention_post_norm", attended(x)))
            return ops.add(self.autograd, x, self._post_norm(f"{path}.ffn_post_norm", fed(x)))

        return forward

    def _attention(self, path: str, positions: Tensor | None, x: Tensor) -> Tensor:
        args = self.args
        rotate = partial(self._rotate, positions)

        def forward(x: Tensor) -> Tensor:
            q, k, v = (self._linear(f"{path}.{name}", x) for name in ("wq", "wk", "wv"))
            if args.qk_norm:
                q, k = self._norm(f"{path}.q_norm", q), self._norm(f"{path}.k_norm", k)
            if args.positions == "rope":
                q, k = self.call("rope", rotate, q), self.call("rope", rotate, k)
            attended = self._attend(_index(path), positions, q, k, v)
            if args.attention_sinks:
                attended = self.call(f"{path}.sinks", partial(self._add_sinks, f"{path}.sinks"), attended)
            return self._linear(f"{path}.wo", attended)

        return self.call(path, forward, x)

    def _add_sinks(self, path: str, attended: Tensor) -> Tensor:
        num_rows = attended.numel // self.args.head_width
        return ops.attention_sinks(self.autograd, attended, self.weight(f"{path}.weight"), num_rows)

    def _attend(self, layer: int, positions: Tensor | None, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        args, num_rows = self.args, q.numel // self.args.head_width
        is_plain = positions is None and args.attention_soft_cap is None and not args.attention_sinks
        if is_plain and not args.is_cut(layer, self.seq_len):
            return ops.attention(self.autograd, q, k, v, num_rows, self.seq_len, self.kernels)
        num_queries = self.seq_len if positions is None else positions.numel
        return ops.masked_attention(self.autograd, q, k, v, num_rows, num_queries * self.seq_len, self.kernels)

    def _rotate(self, positions: Tensor | None, x: Tensor) -> Tensor:
        return ops.rotate(self.autograd, x, 0 if positions is None else positions.numel * self.args.head_width)

    def _mixture(self, block: str, x: Tensor) -> Tensor:
        path, experts = f"{block}.moe", self.experts
        assert experts is not None
        has_shared = experts.args.shared_hidden_dim is not None
        shared = partial(self._gated, f"{path}.shared_experts") if has_shared else None
        return self.call(path, partial(experts.forward, path, self._linear, shared), x)

    def _feed_forward(self, block: str, x: Tensor) -> Tensor:
        return self._gated(f"{block}.feed_forward", x)

    def _gated(self, path: str, x: Tensor) -> Tensor:
        def hidden(x: Tensor) -> Tensor:
            return ops.activation(self.autograd, self._linear(f"{path}.w1", x))

        def forward(x: Tensor) -> Tensor:
            if not self.args.gated:
                return self._linear(f"{path}.w2", hidden(x))
            return self._linear(f"{path}.w2", ops.multiply(self.autograd, hidden(x), self._linear(f"{path}.w3", x)))

        return self.call(path, forward, x)

    def _linear(self, path: str, x: Tensor) -> Tensor:
        return self.call(path, lambda x: self._product(path, x), x)

    def _product(self, path: str, x: Tensor) -> Tensor:
        args, name = self.args, path.rpartition(".")[2]
        weight = self.weight(f"{path}.weight")
        width_in = weight.numel // args.dim if name in ("w2", "wo") else args.dim
        bias = self.weight(f"{path}.bias") if _has_bias(args, name) else None
        return ops.linear(self.autograd, x, weight, width_in, bias)

    def _post_norm(self, path: str, x: Tensor) -> Tensor:
        return self._norm(path, x) if self.args.post_norms else x

    def _norm(self, path: str, x: Tensor) -> Tensor:
        def forward(x: Tensor) -> Tensor:
            weight = self.weight(f"{path}.weight")
            if self.args.norm == "rmsnorm":
                x = ops.view(self.autograd, x)
                if self.args.norm_unit_offset:
                    weight = ops.add_number(self.autograd, weight)
                return ops.rms_norm(self.autograd, x, weight, self.kernels)
            bias = self.weight(f"{path}.bias")
            if self.args.norm == "layernorm":
                return ops.layer_norm(self.autograd, x, weight, bias, self.kernels)
            if self.statistics_ranks:
                return ops.synchronized_batch_norm(self.autograd, x, weight, bias, self.statistics_ranks)
            return ops.batch_norm(self.autograd, x, weight, bias)

        return self.call(path, forward, x)


def decoder_inventory(args: DecoderArgs, seq_len: int) -> Inventory:
    """Return the same inventory as `models.build.take_inventory` for a decoder with these arguments."""
    blocks = tuple(f"layers.{index}" for index in range(args.n_layers))
    embeddings = ("tok_embeddings", "pos_embeddings") if args.positions == "learned" else ("tok_embeddings",)
    modules = tuple(_modules(args, seq_len))
    return Inventory(modules, blocks, ("norm", "output"), embeddings, output_layer="output")


def _modules(args: DecoderArgs, seq_len: int) -> Iterator[ModuleInfo]:
    dim, has_local_rope = args.dim, args.local_rope_theta is not None
    yield ModuleInfo("", ("titan_launch.models.decoder.Decoder",), True)
    if args.positions == "rope":
        yield _rope(args, seq_len, "rope", "rope")
        if has_local_rope:
            yield _rope(args, seq_len, "local_rope", "local_rope")
    own = (f"{_LAYERS}.ScaledEmbedding",) if args.scale_embeddings else ()
    yield _matrix("tok_embeddings", (*own, _EMBEDDING), args.vocab_size, dim)
    if args.positions == "learned":
        table = _matrix("pos_embeddings", (f"{_LAYERS}.LearnedPositions", _EMBEDDING), args.num_positions, dim)
        yield replace(table, buffers=(TensorInfo("rows", (args.num_positions,), "int64", False, is_saved=False),))
    yield ModuleInfo("layers", ("torch.nn.modules.container.ModuleList",), False)
    for index in range(args.n_layers):
        block = f"layers.{index}"
        yield ModuleInfo(block, ("titan_launch.models.decoder.TransformerBlock",), True)
        yield _norm(args, f"{block}.attention_norm", dim)
        yield from _attention(args, f"{block}.attention")
        if args.positions == "rope":
            is_local = has_local_rope and args.window_of(index) is not None
            yield _rope(args, seq_len, f"{block}.attention.rope", "local_rope" if is_local else "rope")
        if args.post_norms:
            yield _norm(args, f"{block}.attention_post_norm", dim)
        yield _norm(args, f"{block}.ffn_norm", dim)
        if args.experts is None or not args.has_experts(index):
            yield from _feed_forward(args, f"{block}.feed_forward", args.hidden_dim)
        else:
            yield from _mixture(args, args.experts, f"{block}.moe")
        if args.post_norms:
            yield _norm(args, f"{block}.ffn_post_norm", dim)
    yield _norm(args, "norm", dim)
    own = () if args.logits_soft_cap is None else (f"{_LAYERS}.CappedLinear",)
    yield _matrix("output", (*own, _LINEAR), args.vocab_size, dim, "tok_embeddings" if args.tie_embeddings else None)


def _attention(args: DecoderArgs, path: str) -> Iterator[ModuleInfo]:
    if args.latent_attention is not None:
        yield from _latent_attention(args, args.latent_attention, path)
        return
    yield ModuleInfo(path, (f"{_LAYERS}.Attention",), True)
    yield _linear(args, f"{path}.wq", args.query_width, args.dim)
    yield _linear(args, f"{path}.wk", args.kv_width, args.dim)
    yield _linear(args, f"{path}.wv", args.kv_width, args.dim)
    yield _linear(args, f"{path}.wo", args.dim, args.query_width)
    for name in ("q_norm", "k_norm") if args.qk_norm else ():
        yield _norm(args, f"{path}.{name}", args.head_width)
    if args.attention_sinks:
        yield ModuleInfo(f"{path}.sinks", (f"{_LAYERS}.AttentionSinks",), True, (_parameter("weight", args.n_heads),))


def _feed_forward(args: DecoderArgs, path: str, hidden: int) -> Iterator[ModuleInfo]:
    yield ModuleInfo(path, (f"{_LAYERS}.FeedForward",), True)
    yield _linear(args, f"{path}.w1", hidden, args.dim)
    yield _linear(args, f"{path}.w2", args.dim, hidden)
    if args.gated:
        yield _linear(args, f"{path}.w3", hidden, args.dim)


def _mixture(args: DecoderArgs, experts: ExpertArgs, path: str) -> Iterator[ModuleInfo]:
    number, dim, hidden = experts.num_experts, args.dim, experts.hidden_dim
    buffers = {"selection_bias": number, "load": number, "auxiliary_losses": 2}
    if experts.selection_bias_rate is None:
        del buffers["selection_bias"]
    infos = (
        TensorInfo(name, (size,), "float32", True, is_saved=name == "selection_bias") for name, size in buffers.items()
    )
    yield ModuleInfo(path, (MIXTURE_OF_EXPERTS,), True, buffers=tuple(infos))
    yield _linear(args, f"{path}.router", number, dim)
    shapes: dict[str, tuple[int, ...]] = {"w1": (hidden, dim), "w2": (dim, hidden), "w3": (hidden, dim)}
    if experts.expert_bias:
        shapes |= {"b1": (hidden,), "b2": (dim,), "b3": (hidden,)}
    parameters = (replace(_parameter(name, number, *shape), is_stacked=True) for name, shape in shapes.items())
    yield ModuleInfo(f"{path}.experts", (EXPERTS,), True, tuple(parameters))
    if experts.shared_hidden_dim is not None:
        yield from _feed_forward(args, f"{path}.shared_experts", experts.shared_hidden_dim)


def _index(path: str) -> int:
    """Return the index of the block that a module lies in."""
    return int(path.split(".")[1])


def _latent_attention(args: DecoderArgs, latent: LatentAttentionArgs, path: str) -> Iterator[ModuleInfo]:
    rank, latents = latent.q_lora_rank, latent.kv_lora_rank
    yield ModuleInfo(path, (f"{_LAYERS}.LatentAttention",), True)
    if rank is None:
        yield _linear(args, f"{path}.wq", args.query_width, args.dim)
    else:
        yield _linear(args, f"{path}.wq_a", rank, args.dim)
        yield _norm(args, f"{path}.q_norm", rank)
        yield _linear(args, f"{path}.wq_b", args.query_width, rank)
    yield _linear(args, f"{path}.wkv_a", latents + latent.qk_rope_head_dim, args.dim)
    yield _norm(args, f"{path}.kv_norm", latents)
    expanded = args.n_heads * (latent.qk_nope_head_dim + latent.v_head_dim)
    yield _linear(args, f"{path}.wkv_b", expanded, latents)
    yield _linear(args, f"{path}.wo", args.dim, args.attended_width)


_LAYERS = "titan_launch.models.layers"
_EMBEDDING, _LINEAR = "torch.nn.modules.sparse.Embedding", "torch.nn.modules.linear.Linear"

_RMSNORM = (f"{_LAYERS}.RMSNorm", "torch.nn.modules.normalization.RMSNorm")
_NORM_CLASSES: dict[tuple[str, bool], tuple[str, ...]] = {
    ("rmsnorm", False): _RMSNORM,
    ("rmsnorm", True): (f"{_LAYERS}.UnitOffsetRMSNorm", *_RMSNORM),
    ("layernorm", False): ("torch.nn.modules.normalization.LayerNorm",),
    ("batchnorm", False): (
        f"{_LAYERS}.BatchNorm",
        "torch.nn.modules.batchnorm.BatchNorm1d",
        "torch.nn.modules.batchnorm._BatchNorm",
        "torch.nn.modules.batchnorm._NormBase",
    ),
}
"""The classes of a norm, by `norm` and `norm_unit_offset`."""


def _has_bias(args: DecoderArgs, name: str) -> bool:
    if name in ("wq", "wk", "wv"):
        return args.qkv_bias
    if name == "router":
        return args.experts is not None and args.experts.router_bias
    if name.endswith(("_a", "_b")):
        return False
    return args.attention_output_bias if name == "wo" else name != "output" and args.feed_forward_bias


def _parameter(name: str, *shape: int, tied_to: str | None = None) -> TensorInfo:
    return TensorInfo(name, shape, "float32", is_floating=True, requires_grad=True, tied_to=tied_to)


def _matrix(path: str, classes: tuple[str, ...], rows: int, columns: int, same_as: str | None = None) -> ModuleInfo:
    tied_to = None if same_as is None else full_name(same_as, "weight")
    return ModuleInfo(path, classes, True, (_parameter("weight", rows, columns, tied_to=tied_to),))


def _linear(args: DecoderArgs, path: str, rows: int, columns: int) -> ModuleInfo:
    matrix = _matrix(path, (_LINEAR,), rows, columns)
    if not _has_bias(args, path.rpartition(".")[2]):
        return matrix
    return replace(matrix, parameters=(*matrix.parameters, _parameter("bias", rows)))


def _norm(args: DecoderArgs, path: str, width: int) -> ModuleInfo:
    names = ("weight",) if args.norm == "rmsnorm" else ("weight", "bias")
    buffers: tuple[TensorInfo, ...] = ()
    if args.norm == "batchnorm":
        statistics = (TensorInfo(name, (width,), "float32", True) for name in ("running_mean", "running_var"))
        buffers = (*statistics, TensorInfo("num_batches_tracked", (), "int64", False))
    parameters = tuple(_parameter(name, width) for name in names)
    return ModuleInfo(path, _NORM_CLASSES[args.norm, args.norm_unit_offset], True, parameters, buffers)


def _rope(args: DecoderArgs, seq_len: int, path: str, first: str) -> ModuleInfo:
    """Return the entry of a rotary embedding at `path`. Attention modules share it. `first`: its first path."""
    is_first = path == first
    tied_to = None if is_first else full_name(first, "table")
    buffer = TensorInfo("table", (seq_len, args.rotary_width // 2, 2), "float32", True, tied_to=tied_to, is_saved=False)
    classes = (f"{_LAYERS}.RotaryEmbedding",)
    return ModuleInfo(path, classes, True, buffers=(buffer,), same_as=None if is_first else first)


def unknown_part(config: JobConfig, args: DecoderArgs, kernels: Kernels) -> str | None:
    """Return the part of a job that the replay does not support; None if it supports the whole job.

    Activation checkpointing of a rotary embedding is not supported, because layers share this module. Attention with a
    soft cap or sinks is not supported on a CPU, where it is many operations. Latent attention is not supported. Of a
    loss in chunks, chunks of logits that a rule casts, and chunks of logits that the model returns, are not supported.
    Raises ConfigError for precision rules that the model does not support.
    """
    if args.latent_attention is not None:
        return "model.args.latent_attention"
    paths = ("rope", "local_rope", "layers.0.attention.rope")
    if any(matches(glob, path) for glob in config.activation_checkpoint.modules for path in paths):
        return "activation_checkpoint.modules with the rotary embedding, which layers share"
    if args.attention_sinks and kernels == "cpu":
        return "model.args.attention_sinks = true on a CPU"
    if args.attention_soft_cap is not None and kernels == "cpu":
        return f"model.args.attention_soft_cap = {args.attention_soft_cap} on a CPU"
    if config.loss.chunks == 1:
        return None
    if any(matches(glob, "output") for glob in config.activation_checkpoint.modules):
        return "loss.chunks with a checkpointed output layer in activation_checkpoint.modules"
    if config.float8.enable or any(rule.output_dtype is not None for rule in config.precision.rules):
        plan = plan_units(config, decoder_inventory(args, config.training.seq_len), False)
        if plan.loss_head is None:
            return "loss.chunks with an output layer in float8"
        if plan.logits_dtypes:
            return "loss.chunks with output_dtype of the logits in precision.rules"
    return None


ANALYTIC = AnalyticModel(decoder_inventory, lambda args, context: AnalyticDecoder(args, context).forward, unknown_part)
