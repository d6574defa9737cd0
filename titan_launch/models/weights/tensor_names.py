"""Names and layouts of the tensors in Hugging Face files, for the parameters of this package's models. No torch."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from titan_launch.core.globs import matches

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Piece:
    """The place of a parameter in a tensor of a file.

    Some files hold several parameters in one tensor, one after another along the axis of output features, and some hold
    matrices as (input features, output features). The rows of this package's matrices are output features.
    """

    tensor: str
    """Name of the tensor in the file."""

    start: int = 0
    """Number of output features of other parameters before this one."""

    is_transposed: bool = False

    rotary_width: int | None = None
    """Width of a head, if the rows of each head are in another order. Rotary embeddings rotate pairs of channels: the
    channels 2i and 2i + 1 here, and i and i + width / 2 in the file. None: the same order."""


@dataclass(frozen=True)
class TensorNames:
    """The module names of a class of `transformers`."""

    modules: Mapping[str, str]
    """Module of the file by module of this package, without `prefix`. `*` is the number of the layer. Modules with the
    same name in the file are one tensor there, in this order."""

    prefix: str = "model."
    """Prefix of all tensors but the head's. Files of the model without a head lack it."""

    transposed: tuple[str, ...] = ()
    """Ends of the file's modules whose weights are (input features, output features)."""

    has_rope: bool = True
    unused: tuple[str, ...] = ("**.rotary_emb.inv_freq",)
    """Globs of tensors without effect, which older files have."""


_HEAD = "lm_head"

_LLAMA = {
    "tok_embeddings": "embed_tokens",
    "layers.*.attention_norm": "layers.*.input_layernorm",
    "layers.*.attention.wq": "layers.*.self_attn.q_proj",
    "layers.*.attention.wk": "layers.*.self_attn.k_proj",
    "layers.*.attention.wv": "layers.*.self_attn.v_proj",
    "layers.*.attention.wo": "layers.*.self_attn.o_proj",
    "layers.*.attention.q_norm": "layers.*.self_attn.q_norm",
    "layers.*.attention.k_norm": "layers.*.self_attn.k_norm",
    "layers.*.ffn_norm": "layers.*.post_attention_layernorm",
    "layers.*.feed_forward.w1": "layers.*.mlp.gate_proj",
    "layers.*.feed_forward.w3": "layers.*.mlp.up_proj",
    "layers.*.feed_forward.w2": "layers.*.mlp.down_proj",
    "norm": "norm",
    "output": _HEAD,
}
_GEMMA = {
    **_LLAMA,
    "layers.*.attention_post_norm": "layers.*.post_attention_layernorm",
    "layers.*.ffn_norm": "layers.*.pre_feedforward_layernorm",
    "layers.*.ffn_post_norm": "layers.*.post_feedforward_layernorm",
}
_PHI3 = {
    **_LLAMA,
    "layers.*.attention.wq": "layers.*.self_attn.qkv_proj",
    "layers.*.attention.wk": "layers.*.self_attn.qkv_proj",
    "layers.*.attention.wv": "layers.*.self_attn.qkv_proj",
    "layers.*.feed_forward.w1": "layers.*.mlp.gate_up_proj",
    "layers.*.feed_forward.w3": "layers.*.mlp.gate_up_proj",
}
_GPT2 = {
    "tok_embeddings": "wte",
    "pos_embeddings": "wpe",
    "layers.*.attention_norm": "h.*.ln_1",
    "layers.*.attention.wq": "h.*.attn.c_attn",
    "layers.*.attention.wk": "h.*.attn.c_attn",
    "layers.*.attention.wv": "h.*.attn.c_attn",
    "layers.*.attention.wo": "h.*.attn.c_proj",
    "layers.*.ffn_norm": "h.*.ln_2",
    "layers.*.feed_forward.w1": "h.*.mlp.c_fc",
    "layers.*.feed_forward.w2": "h.*.mlp.c_proj",
    "norm": "ln_f",
    "output": _HEAD,
}

NAMES: dict[str, TensorNames] = {
    "llama": TensorNames(_LLAMA),
    "qwen2": TensorNames(_LLAMA),
    "qwen3": TensorNames(_LLAMA),
    "mistral": TensorNames(_LLAMA),
    "gemma2": TensorNames(_GEMMA),
    "gemma3_text": TensorNames(_GEMMA),
    "gpt2": TensorNames(
        _GPT2,
        prefix="transformer.",
        transposed=("c_attn", "c_proj", "c_fc"),
        has_rope=False,
        unused=("**.h.*.attn.bias", "**.h.*.attn.masked_bias"),
    ),
    "phi3": TensorNames(_PHI3),
}
"""Names of the classes of `titan_launch.config.huggingface.FAMILIES`, by `model_type`."""

_ROTATED = ("wq", "wk", "q_norm", "k_norm")


def pieces_of(
    model_type: str | None, shapes: Mapping[str, Shape], head_width: int | None, names_in_file: Collection[str] = ()
) -> dict[str, Piece]:
    """Return the place of each parameter in the files of a folder.

    `model_type`: None for a folder with the names of this package. `shapes`: shape of each parameter by full name.
    `names_in_file`: names of the folder's tensors, to recognize files without the prefix. Names that the table does not
    have, such as buffers of BatchNorm, have no piece.
    """
    if model_type is None:
        return {name: Piece(name) for name in shapes}
    names = NAMES[model_type]
    has_prefix = not names_in_file or any(name.startswith(names.prefix) for name in names_in_file)
    prefix = names.prefix if has_prefix else ""
    pieces: dict[str, Piece] = {}
    for name, (module, leaf) in {name: _split(name) for name in shapes}.items():
        layer, pattern = _pattern(module)
        if pattern not in names.modules:
            continue
        theirs = names.modules[pattern]
        before = [other for other, target in names.modules.items() if target == theirs]
        before = before[: before.index(pattern)]
        sizes = [shapes[f"{other.replace('*', layer)}.{leaf}"][0] for other in before]
        is_rotated = names.has_rope and module.rpartition(".")[2] in _ROTATED
        pieces[name] = Piece(
            tensor=f"{'' if theirs == _HEAD else prefix}{theirs.replace('*', layer)}.{leaf}",
            start=sum(sizes),
            is_transposed=leaf == "weight" and theirs.endswith(names.transposed or ("?",)),
            rotary_width=head_width if is_rotated else None,
        )
    return pieces


def tensor_shapes(pieces: Mapping[str, Piece], shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    """Return the shapes of the file's tensors that the pieces make up."""
    whole: dict[str, Shape] = {}
    for name, piece in pieces.items():
        before, shape = whole.get(piece.tensor, (0,)), shapes[name]
        whole[piece.tensor] = (before[0] + shape[0], *shape[1:]) if shape else shape
    transposed = {piece.tensor for piece in pieces.values() if piece.is_transposed}
    return {name: shape[::-1] if name in transposed else shape for name, shape in whole.items()}


def is_unused(model_type: str | None, tensor: str) -> bool:
    """Return True for a tensor of a file that has no effect."""
    return model_type is not None and any(matches(glob, tensor) for glob in NAMES[model_type].unused)


def _split(name: str) -> tuple[str, str]:
    module, _, leaf = name.rpartition(".")
    return module, leaf


def _pattern(module: str) -> tuple[str, str]:
    """Return the number of the layer in a module's path, and the path with `*` in its place."""
    found = re.fullmatch(r"layers\.(\d+)\.(.*)", module)
    return (found[1], f"layers.*.{found[2]}") if found else ("", module)
