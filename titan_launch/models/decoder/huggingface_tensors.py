"""Names and layouts of the tensors in Hugging Face files, for the parameters of this package's models, without torch.

`NAMES` has an entry for each class of `transformers`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from titan_launch.core.globs import matches

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Piece:
    """The place of a parameter in a file: the tensor that contains it, and its position in that tensor.

    The matrices of this package are (output features, input features). The parameters of experts have one matrix or
    vector for each expert, along their first axis. Files may differ in three ways. A tensor may hold several parameters
    along the axis of output features, one after another or alternating. A matrix may be (input features, output
    features). Each expert may have a tensor of its own.
    """

    tensor: str
    """Name of the tensor in the file. If each expert has a tensor, `*` stands for the number of the expert."""

    start: int = 0
    """Number of output features in the tensor before the first output feature of this parameter."""

    step: int = 1
    """Distance from one output feature of this parameter to the next. If the distance is above 1, output features of
    other parameters lie between them."""

    is_transposed: bool = False

    num_experts: int | None = None
    """Number of experts along the first axis; None if the parameter does not belong to experts."""

    rotary_width: int | None = None
    """Head width if the file has the output features of each head in another order; else None. In such a file, rotary
    embeddings rotate the channels i and i + width / 2 of a head together; in this package, 2i and 2i + 1."""

    @property
    def has_tensor_per_expert(self) -> bool:
        """True if the file has a tensor for each expert."""
        return "*" in self.tensor

    @property
    def tensors(self) -> list[str]:
        """Names of the tensors in the file, in the order of the experts."""
        if not self.has_tensor_per_expert:
            return [self.tensor]
        return [self.tensor.replace("*", str(expert)) for expert in range(self.num_experts or 0)]

    @property
    def axis(self) -> int:
        """Axis of the output features in a tensor of the file, after conversion to the layout of this package: 1 if
        axis 0 counts the experts, else 0."""
        return int(self.num_experts is not None and not self.has_tensor_per_expert)


@dataclass(frozen=True)
class TensorNames:
    """The names and layouts of the tensors in files of a class of `transformers`."""

    modules: Mapping[str, str]
    """Names of modules in the file, without `prefix`, by their names in this package. `*` is the number of the layer.
    If several modules have one name in the file, a tensor with this name has the parameters of all these modules, in
    the order of this table."""

    parameters: Mapping[str, str] = field(default_factory=dict)
    """Names of tensors in the file, without `prefix`, by names of parameters in this package. The table has the
    parameters whose names do not follow from `modules`. The first `*` is the number of the layer. A second `*` is the
    number of the expert."""

    prefix: str = "model."
    """Prefix of tensor names. The name of the output layer has no prefix. In files of a class without an output layer,
    such as `GPT2Model`, no name has a prefix."""

    transposed: tuple[str, ...] = ()
    """Endings of the names of tensors that are (input features, output features) in the file."""

    alternating: tuple[str, ...] = ()
    """Endings of the names of tensors in which the output features of several parameters alternate."""

    has_halves: bool = True
    """True if rotary embeddings rotate the channels i and i + width / 2 of a head in the file; see
    `Piece.rotary_width`."""

    unused: tuple[str, ...] = ("**.rotary_emb.inv_freq",)
    """Globs of tensors in the file that no model reads."""

    def tensor_of(self, pattern: str) -> str | None:
        """Return the name of the file's tensor for a parameter, without `prefix`; None if the file has none. In both
        names, the first `*` is the number of the layer. In the result, a second `*` is the number of the expert."""
        module, _, leaf = pattern.rpartition(".")
        if pattern in self.parameters:
            return self.parameters[pattern]
        return f"{self.modules[module]}.{leaf}" if module in self.modules else None

    def name_of(self, pattern: str) -> str | None:
        """Return the name that a module or a parameter has in the file, without `prefix`; None if the file has no such
        name. In `pattern` and in the result, `*` stands for the number of the layer."""
        return self.modules.get(pattern) or self.tensor_of(pattern)


LM_HEAD, SCORE = "lm_head", "score"
"""Names of the output layer in files: of a language model, and of a classifier or reward model."""

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
    "output": LM_HEAD,
}
_GEMMA = {
    **_LLAMA,
    "layers.*.attention_post_norm": "layers.*.post_attention_layernorm",
    "layers.*.ffn_norm": "layers.*.pre_feedforward_layernorm",
    "layers.*.ffn_post_norm": "layers.*.post_feedforward_layernorm",
}
_PHI3 = {
    **_LLAMA,
    **dict.fromkeys((f"layers.*.attention.{name}" for name in ("wq", "wk", "wv")), "layers.*.self_attn.qkv_proj"),
    **dict.fromkeys((f"layers.*.feed_forward.{name}" for name in ("w1", "w3")), "layers.*.mlp.gate_up_proj"),
}
_OLMO2 = {
    **{own: theirs for own, theirs in _LLAMA.items() if own not in ("layers.*.attention_norm", "layers.*.ffn_norm")},
    "layers.*.attention_post_norm": "layers.*.post_attention_layernorm",
    "layers.*.ffn_post_norm": "layers.*.post_feedforward_layernorm",
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
    "output": LM_HEAD,
}

_EXPERTS, _SELECTION_BIAS = "layers.*.moe.experts", "layers.*.moe.selection_bias"
_MIXTRAL = {**_LLAMA, "layers.*.moe.router": "layers.*.block_sparse_moe.gate"}
_GPT_OSS = {**_LLAMA, "layers.*.moe.router": "layers.*.mlp.router"}
_QWEN3_MOE = {**_LLAMA, "layers.*.moe.router": "layers.*.mlp.gate"}
_EXPERTS_OF_GPT_OSS = {
    f"{_EXPERTS}.w1": "layers.*.mlp.experts.gate_up_proj",
    f"{_EXPERTS}.w3": "layers.*.mlp.experts.gate_up_proj",
    f"{_EXPERTS}.w2": "layers.*.mlp.experts.down_proj",
    f"{_EXPERTS}.b1": "layers.*.mlp.experts.gate_up_proj_bias",
    f"{_EXPERTS}.b3": "layers.*.mlp.experts.gate_up_proj_bias",
    f"{_EXPERTS}.b2": "layers.*.mlp.experts.down_proj_bias",
}
_DEEPSEEK_V3 = {
    **_QWEN3_MOE,
    "layers.*.attention.wq_a": "layers.*.self_attn.q_a_proj",
    "layers.*.attention.q_norm": "layers.*.self_attn.q_a_layernorm",
    "layers.*.attention.wq_b": "layers.*.self_attn.q_b_proj",
    "layers.*.attention.wkv_a": "layers.*.self_attn.kv_a_proj_with_mqa",
    "layers.*.attention.kv_norm": "layers.*.self_attn.kv_a_layernorm",
    "layers.*.attention.wkv_b": "layers.*.self_attn.kv_b_proj",
    "layers.*.moe.shared_experts.w1": "layers.*.mlp.shared_experts.gate_proj",
    "layers.*.moe.shared_experts.w3": "layers.*.mlp.shared_experts.up_proj",
    "layers.*.moe.shared_experts.w2": "layers.*.mlp.shared_experts.down_proj",
}


def _tensor_of_each_expert(w1: str, w2: str, w3: str, module: str) -> dict[str, str]:
    """Return `TensorNames.parameters` of the experts, for files with a tensor for each expert."""
    names = {"w1": w1, "w2": w2, "w3": w3}
    return {f"{_EXPERTS}.{own}": f"layers.*.{module}.experts.*.{theirs}.weight" for own, theirs in names.items()}


NAMES: dict[str, TensorNames] = {
    "llama": TensorNames(_LLAMA),
    "qwen2": TensorNames(_LLAMA),
    "qwen3": TensorNames(_LLAMA),
    "qwen3_moe": TensorNames(_QWEN3_MOE, _tensor_of_each_expert("gate_proj", "down_proj", "up_proj", "mlp")),
    "mistral": TensorNames(_LLAMA),
    "mixtral": TensorNames(_MIXTRAL, _tensor_of_each_expert("w1", "w2", "w3", "block_sparse_moe")),
    "gemma2": TensorNames(_GEMMA),
    "gemma3_text": TensorNames(_GEMMA),
    "gpt2": TensorNames(
        _GPT2,
        prefix="transformer.",
        transposed=("c_attn.weight", "c_proj.weight", "c_fc.weight"),
        has_halves=False,
        unused=("**.h.*.attn.bias", "**.h.*.attn.masked_bias"),
    ),
    "gpt_oss": TensorNames(
        _GPT_OSS,
        {**_EXPERTS_OF_GPT_OSS, "layers.*.attention.sinks.weight": "layers.*.self_attn.sinks"},
        transposed=("experts.gate_up_proj", "experts.down_proj"),
        alternating=("gate_up_proj", "gate_up_proj_bias"),
    ),
    "phi3": TensorNames(_PHI3),
    "olmo2": TensorNames(_OLMO2),
    "deepseek_v3": TensorNames(
        _DEEPSEEK_V3,
        {
            **_tensor_of_each_expert("gate_proj", "down_proj", "up_proj", "mlp"),
            _SELECTION_BIAS: "layers.*.mlp.gate.e_score_correction_bias",
        },
        has_halves=False,
        unused=("**.rotary_emb.inv_freq", "**.layers.61.**"),  # the module that predicts a second token
    ),
}
"""`TensorNames` of the classes in `titan_launch.models.decoder.huggingface_classes.FAMILIES`, by `model_type`."""


def is_selection_bias(name: str) -> bool:
    """Return True for the name of selection biases of experts. These buffers change what a model computes. As in
    `transformers`, every file has them in fp32, even if the parameters have another dtype."""
    return matches(_SELECTION_BIAS, name)


def pieces_of(
    model_type: str | None,
    shapes: Mapping[str, Shape],
    head_width: int | None,
    names_in_file: Collection[str] = (),
    has_labels: bool = False,
) -> dict[str, Piece]:
    """Return the `Piece` of each parameter in the files of a folder, by full name.

    `model_type`: None for a folder with the names of this package. `shapes`: shape of each parameter by full name.
    `head_width`: width of an attention head. `names_in_file`: names of the folder's tensors, to recognize files without
    the prefix. `has_labels`: True for a classifier or a reward model. The result lacks parameters that `NAMES` does not
    contain, such as buffers of BatchNorm.
    """
    if model_type is None:
        return {name: Piece(name) for name in shapes}
    names = NAMES[model_type]
    has_prefix = not names_in_file or any(name.startswith(names.prefix) for name in names_in_file)
    prefix = names.prefix if has_prefix else ""
    pieces: dict[str, Piece] = {}
    for name, shape in shapes.items():
        layer, pattern = _pattern(name)
        module, _, leaf = pattern.rpartition(".")
        theirs = f"{SCORE}.weight" if has_labels and pattern == "output.weight" else names.tensor_of(pattern)
        if theirs is None:
            continue
        candidates = (*names.parameters, *(f"{other}.{leaf}" for other in names.modules))
        sharing = [other for other in candidates if names.tensor_of(other) == theirs]
        before = sharing[: sharing.index(pattern)] if sharing else []
        is_alternating, is_of_experts = theirs.endswith(names.alternating), module == _EXPERTS
        sizes = [shapes[other.replace("*", layer)][int(is_of_experts)] for other in before]
        is_rotated = names.has_halves and module.rpartition(".")[2] in ("wq", "wk", "q_norm", "k_norm")
        pieces[name] = Piece(
            tensor=_with_prefix(prefix, theirs).replace("*", layer, 1),
            start=len(before) if is_alternating else sum(sizes),
            step=len(sharing) if is_alternating else 1,
            is_transposed=theirs.endswith(names.transposed),
            num_experts=shape[0] if is_of_experts else None,
            rotary_width=head_width if is_rotated else None,
        )
    return pieces


def names_in_transformers(paths: Iterable[str]) -> dict[str, set[str]]:
    """Return the names that classes of `transformers` give to modules and parameters, by path in this package.

    Paths that no class has, such as the paths of a user's own model, are omitted. Only classes that have all other
    paths are considered. For example, `layers.0.ffn_norm` has different names in Gemma and in Llama, and other paths of
    the model exclude one of the two.
    """
    patterns = {path: _pattern(path) for path in paths}
    known = {pattern for _, pattern in patterns.values() if any(names.name_of(pattern) for names in NAMES.values())}
    classes = [names for names in NAMES.values() if all(map(names.name_of, known))]
    found: dict[str, set[str]] = {}
    for path, (layer, pattern) in patterns.items():
        for names in classes if pattern in known else ():
            theirs = names.name_of(pattern) or ""
            found.setdefault(path, set()).add(_with_prefix(names.prefix, theirs).replace("*", layer, 1))
    return found


def ends_in(glob: str, paths: Iterable[str]) -> list[str]:
    """Return the paths whose end matches a glob, such as `q_proj`. The end of the path itself may match, or the end of
    its name in `transformers`. `peft` reads the names of its targets in the same way."""
    ends, names = f"**.{glob}", names_in_transformers(paths)
    return [path for path in paths if any(matches(ends, name) for name in (path, *names.get(path, ())))]


def tensor_shapes(pieces: Mapping[str, Piece], shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    """Return the shapes of the tensors that files with these pieces have. `shapes`: shape of each parameter."""
    whole: dict[str, Shape] = {}
    for name, piece in pieces.items():
        shape = shapes[name][1:] if piece.has_tensor_per_expert else shapes[name]
        for tensor in piece.tensors:
            before, axis = whole.get(tensor), piece.axis
            rows = 0 if before is None else before[axis]
            whole[tensor] = (*shape[:axis], rows + shape[axis], *shape[axis + 1 :]) if shape else shape
    transposed = {tensor for piece in pieces.values() if piece.is_transposed for tensor in piece.tensors}
    return {name: (*shape[:-2], *shape[:-3:-1]) if name in transposed else shape for name, shape in whole.items()}


def is_unused(model_type: str | None, tensor: str) -> bool:
    """Return True for a tensor of a file that no model reads."""
    return model_type is not None and any(matches(glob, tensor) for glob in NAMES[model_type].unused)


def _with_prefix(prefix: str, name: str) -> str:
    """Return the name of a module or tensor in the file. Names of the output layer have no prefix."""
    return name if name.partition(".")[0] in (LM_HEAD, SCORE) else prefix + name


def _pattern(name: str) -> tuple[str, str]:
    """Return the number of the layer in a name, and the name with `*` in its place. Outside of layers, return "" and
    the name."""
    found = re.fullmatch(r"layers\.(\d+)\.(.*)", name)
    return (found[1], f"layers.*.{found[2]}") if found else ("", name)
