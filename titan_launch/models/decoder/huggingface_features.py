"""Conversion between keys of Hugging Face's `config.json` and model arguments, without torch.

*The class* is the class of `transformers` for one `model_type`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from titan_launch.models.args import MOST_LAYERS, MOST_TOKENS
from titan_launch.models.decoder.args import DecoderArgs
from titan_launch.models.huggingface.files import CONFIG_FILE, Config, WeightsError, as_text, is_equal, unsupported

_FULL, _SLIDING = "full_attention", "sliding_attention"
"""Values in `layer_types`, the list of `config.json` with the attention of each layer."""


@dataclass(frozen=True)
class Feature:
    """A group of keys of `config.json`, and its conversion to and from arguments of this package's model."""

    keys: tuple[str, ...]
    read: Callable[[Config], Mapping[str, Any]]
    """Function of a `config.json` that returns arguments. Raises WeightsError for a value that is not supported."""

    write: Callable[[DecoderArgs], Mapping[str, Any]]
    """Function of all arguments that returns the values of `keys`. Keys that no reader needs are omitted."""


def same(key: str, arguments: str | tuple[str, ...], *default: Any) -> Feature:
    """Return the `Feature` of a key and of one or more arguments with the same value. `default`: the value if the key
    is absent. Without `default`, the key must be in `config.json`."""
    names = (arguments,) if isinstance(arguments, str) else arguments
    return Feature(
        (key,),
        lambda config: dict.fromkeys(names, _lookup(config, key, *default)),
        lambda args: {key: getattr(args, names[0])},
    )


def _lookup(config: Config, key: str, *default: Any) -> Any:
    if key not in config and not default:
        raise WeightsError(f"{CONFIG_FILE} has no {key}")
    return config.get(key, *default)


def _size(config: Config, key: str, *default: int, smallest: int = 1, largest: int = MOST_TOKENS) -> int:
    """Return the value of a key, a whole number from `smallest` to `largest`. Raises WeightsError for any other value,
    and for a missing key without `default`."""
    value = _lookup(config, key, *default)
    if type(value) is not int or not smallest <= value <= largest:
        raise unsupported(key, value, f"supported: whole numbers from {smallest} to {largest}")
    return value


def _num_layers(config: Config) -> int:
    return _size(config, "num_hidden_layers", largest=MOST_LAYERS)


_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"}


def activation(key: str, default: str) -> Feature:
    """Return the `Feature` of the feed-forward layer's activation. `default`: the class's value if the key is
    absent."""

    def read(config: Config) -> dict[str, Any]:
        value = config.get(key, default)
        if value not in _ACTIVATIONS:
            raise unsupported(key, value, f"supported: {', '.join(_ACTIVATIONS)}")
        return {"activation": _ACTIVATIONS[value]}

    def write(args: DecoderArgs) -> dict[str, Any]:
        return {key: next(name for name in (default, *_ACTIVATIONS) if _ACTIVATIONS[name] == args.activation)}

    return Feature((key,), read, write)


def _read_key_value_heads(config: Config) -> dict[str, Any]:
    number = config.get("num_key_value_heads")
    return {"n_kv_heads": _size(config, "num_attention_heads") if number is None else number}


KEY_VALUE_HEADS = same("num_key_value_heads", "n_kv_heads")
OPTIONAL_KEY_VALUE_HEADS = replace(KEY_VALUE_HEADS, read=_read_key_value_heads)
"""The number of key and value heads. An absent key or null stands for the number of query heads."""

HEADS_OF_GPT2 = Feature(
    ("n_head",),
    lambda config: dict.fromkeys(("n_heads", "n_kv_heads"), _size(config, "n_head")),
    lambda args: {"n_head": args.n_heads},
)
WIDTH_OF_GPT2 = Feature(
    ("n_inner",),
    lambda config: {"hidden_dim": 4 * _size(config, "n_embd") if config.get("n_inner") is None else config["n_inner"]},
    lambda args: {"n_inner": args.hidden_dim},
)


def head_dim(default: int | None = None, may_be_null: bool = False, must_divide: bool = False) -> Feature:
    """Return the `Feature` of the width of a head. The argument stays unset if the width is `hidden_size` / number
    of heads.

    `default`: the class's value if the key is absent. `may_be_null`: True if the class accepts null. `must_divide`:
    True if the class refuses a `hidden_size` that is no multiple of the number of heads.
    """

    def read(config: Config) -> dict[str, Any]:
        width = config.get("head_dim", default)
        if "head_dim" in config and not (type(width) is int or (width is None and may_be_null)):
            raise unsupported("head_dim", width, "the class needs a whole number; remove the key")
        dim, heads = _size(config, "hidden_size"), _size(config, "num_attention_heads")
        if must_divide and dim % heads:
            raise unsupported("hidden_size", dim, f"the class needs a multiple of num_attention_heads = {heads}")
        ratio = dim / heads
        return {"head_dim": None if width == ratio else width}

    return Feature(("head_dim",), read, lambda args: {"head_dim": args.head_width})


QUERY_SCALE = Feature(
    ("query_pre_attn_scalar",),
    lambda config: {"query_scale": _size(config, "query_pre_attn_scalar", 256) ** -0.5},
    lambda args: {"query_pre_attn_scalar": _inverse_square(args.score_scale)},
)


def _inverse_square(scale: float) -> float | int:
    """Return `scale ** -2`. If the result differs from a whole number only by rounding, return the whole number as an
    int."""
    value = scale**-2
    return round(value) if abs(value - round(value)) < 1e-9 * value else value


# Rotary embeddings. transformers 5 writes `rope_parameters`, with the base in it; earlier releases write `rope_theta`
# and `rope_scaling`, which all releases read.

_LLAMA3 = {
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_position_embeddings": "original_max_position",
}
_YARN_NULLABLE = ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim")
_YARN_OPTIONAL = (*_YARN_NULLABLE, "truncate")
_YARN = {
    "factor": "factor",
    "original_max_position_embeddings": "original_max_position",
    **{name: name for name in _YARN_OPTIONAL},
}
_SCALINGS = {"default": {}, "linear": {"factor": "factor"}, "llama3": _LLAMA3, "yarn": _YARN}
"""For each supported RoPE type, its keys in `config.json`, with their names in `rope_scaling` of this package."""

_ORIGINAL = "original_max_position_embeddings"
_ALL_CHANNELS = "supported: 1.0, which rotates all channels of a head"
_ROPE_KEYS = ("rope_parameters", "rope_scaling", "rope_theta")


def _rope_table(config: Config, key: str) -> dict[str, Any]:
    """Return the table of RoPE parameters that a key has. The table is empty if the key is absent or null."""
    table = config.get(key)
    if not isinstance(table, dict | None):
        raise unsupported(key, table, "supported: a table of RoPE parameters, or null")
    return dict(table or {})


def _read_rope(
    rope: Config, theta: Any, key: str, longest: Any, kinds: Sequence[str] = tuple(_SCALINGS)
) -> tuple[Any, dict[str, Any] | None]:
    """Return (`rope_theta`, `rope_scaling`) from `rope`, a table of RoPE parameters. The scaling is None for the RoPE
    type `default`.

    `theta`: the base if the table has none. `key`: key of the table, for errors. `longest`: the sequence length of
    pre-training if the table has none. `kinds`: RoPE types of the class. Raises WeightsError for values that are not
    supported.
    """
    rope = dict(rope)
    theta = rope.pop("rope_theta", theta)
    if theta is None:
        raise unsupported(f"{key}.rope_theta", None, "supported: numbers above 1")
    names = [rope.pop(name) for name in ("rope_type", "type") if name in rope]
    kind = names[0] if names else "default"
    if names[1:] not in ([], [kind]):
        raise unsupported(f"{key}.type", names[1], f"rope_type is {as_text(kind)}; remove the key type")
    if not is_equal(factor := rope.pop("partial_rotary_factor", 1.0), 1.0):
        raise unsupported(f"{key}.partial_rotary_factor", factor, _ALL_CHANNELS)
    if kind not in kinds:
        raise unsupported(f"{key}.rope_type", kind, f"supported: {', '.join(kinds)}")
    known = _SCALINGS[kind]
    if unknown := [name for name in rope if name not in (*known, _ORIGINAL)]:
        raise unsupported(f"{key}.{unknown[0]}", rope[unknown[0]], f"not a parameter of the RoPE type {kind}")
    if _ORIGINAL in known and _ORIGINAL not in rope and longest is not None:
        rope[_ORIGINAL] = longest
    if missing := [name for name in known if name not in (*rope, *_YARN_OPTIONAL)]:
        raise WeightsError(f"{CONFIG_FILE}: {key} of the type {kind} has no {', '.join(missing)}")
    if nulls := [name for name in known if name in rope and rope[name] is None and name not in _YARN_NULLABLE]:
        raise unsupported(f"{key}.{nulls[0]}", None, f"the RoPE type {kind} needs a value")
    given = {own: rope[name] for name, own in known.items() if rope.get(name) is not None}
    return theta, {"kind": kind, **given} if known else None


def _write_scaling(args: DecoderArgs) -> dict[str, Any] | None:
    scaling = args.rope_scaling
    if scaling is None:
        return None
    values = {key: getattr(scaling, own) for key, own in _SCALINGS[scaling.kind].items()}
    return {"rope_type": scaling.kind, **{key: value for key, value in values.items() if value is not None}}


def _contradiction(config: Config) -> WeightsError:
    """Return the error for two tables of RoPE parameters that contradict each other."""
    reason = (
        "it differs from rope_parameters, and transformers would ignore keys of rope_parameters, such as rope_theta"
    )
    return unsupported("rope_scaling", config["rope_scaling"], f"{reason}; put all parameters into rope_parameters")


def rope(
    theta: float = 10_000.0,
    default: Config | None = None,
    kinds: Sequence[str] = tuple(_SCALINGS),
    yarn_needs: str | None = None,
) -> Feature:
    """Return the `Feature` of rotary embeddings that all layers share.

    `theta`: the base that the class uses by default. `default`: the RoPE table that the class uses if `rope_parameters`
    is absent; None for a table without scaling. `kinds`: RoPE types of the class. `yarn_needs`: a key that the class
    needs to compute YaRN; None if no key is needed.
    """
    unscaled = None if default is None else {"rope_type": "default"}

    def read(config: Config) -> dict[str, Any]:
        if default is not None and config.get("rope_parameters", default) is None:
            reason = "null means no scaling in transformers 5.0, but YaRN in later releases; remove the key"
            raise unsupported("rope_parameters", None, reason)
        outside = {name: config[name] for name in ("partial_rotary_factor", _ORIGINAL) if name in config}
        if not is_equal(factor := outside.pop("partial_rotary_factor", 1.0), 1.0):
            raise unsupported("partial_rotary_factor", factor, _ALL_CHANNELS)
        if _ORIGINAL in outside and type(outside[_ORIGINAL]) is not int:
            raise unsupported(_ORIGINAL, outside[_ORIGINAL], "supported: a number of tokens")
        found = []
        for key in ("rope_scaling", "rope_parameters"):  # the order of precedence in transformers
            table = _rope_table(config, key)
            if {_ORIGINAL} <= outside.keys() & table.keys() and outside[_ORIGINAL] != table[_ORIGINAL]:
                raise unsupported(_ORIGINAL, outside[_ORIGINAL], f"{key} has {as_text(table[_ORIGINAL])}")
            if table:
                base, longest = config.get("rope_theta", theta), config.get("max_position_embeddings")
                found.append((*_read_rope({**table, **outside}, base, key, longest, kinds), key))
        if not found:
            table = {} if default is None or "rope_parameters" in config else dict(default)
            found.append((*_read_rope(table, config.get("rope_theta", theta), key, None, kinds), key))
        base, scaling, key = found[0]
        if (base, scaling) != found[-1][:2]:
            raise _contradiction(config)
        if scaling is not None and scaling["kind"] == "yarn" and yarn_needs and config.get(yarn_needs) is None:
            model_type, needed = config.get("model_type"), f"{CONFIG_FILE} has {yarn_needs}; add this key"
            reason = f"transformers computes YaRN for {model_type} only if {needed}"
            raise unsupported(f"{key}.rope_type", "yarn", reason)
        return {"rope_theta": base, "rope_scaling": scaling}

    return Feature(
        (*_ROPE_KEYS, "partial_rotary_factor", _ORIGINAL),
        read,
        lambda args: {"rope_theta": args.rope_theta, "rope_scaling": _write_scaling(args) or unscaled},
    )


def _two_ropes(config: Config) -> dict[str, Any]:
    tables, old = _rope_table(config, "rope_parameters"), _rope_table(config, "rope_scaling")
    longest, ropes = config.get("max_position_embeddings"), {}
    if config.get("rope_parameters") is None:
        tables = {name: {"rope_type": "default"} for name in (_FULL, _SLIDING)}
    if tables.keys() != {_FULL, _SLIDING} or None in tables.values():
        raise unsupported("rope_parameters", tables, f"supported: a table with the tables {_FULL} and {_SLIDING}")
    for name, table, base in (
        (_FULL, {**_rope_table(tables, _FULL), **old}, config.get("rope_theta", 1e6)),
        (_SLIDING, _rope_table(tables, _SLIDING), config.get("rope_local_base_freq", 10_000.0)),
    ):
        key = "rope_scaling" if name == _FULL and old else f"rope_parameters.{name}"
        if not is_equal(table.get("truncate", True), True):
            raise unsupported(f"{key}.truncate", table["truncate"], "the class ignores this key; remove it")
        ropes[name] = _read_rope(table, base, key, longest, tuple(_SCALINGS) if name == _FULL else ("default",))
    if old and config.get("rope_parameters") is not None:
        alone = _two_ropes({key: value for key, value in config.items() if key != "rope_scaling"})
        if (alone["rope_theta"], alone["rope_scaling"]) != ropes[_FULL]:
            raise _contradiction(config)
    theta, scaling = ropes[_FULL]
    return {"rope_theta": theta, "rope_scaling": scaling, "local_rope_theta": ropes[_SLIDING][0]}


ROPES_OF_GEMMA3 = Feature(
    (*_ROPE_KEYS, "rope_local_base_freq"),
    _two_ropes,
    lambda args: {
        "rope_theta": args.rope_theta,
        "rope_scaling": _write_scaling(args),
        "rope_local_base_freq": args.local_rope_theta or args.rope_theta,
    },
)

# Sliding windows. `layer_types` names the attention of each layer. If that key is absent, each class has a rule.


def _window_arguments(config: Config, window: Any, rule: Sequence[str]) -> dict[str, Any]:
    """Return the arguments that choose the attention of each layer. `rule`: the attention of each layer if
    `config.json` has no `layer_types`. Raises WeightsError for values that are not supported."""
    types = rule if config.get("layer_types") is None else config["layer_types"]
    if not isinstance(types, list) or len(types) != len(rule) or {*types} - {_FULL, _SLIDING}:
        needed = f"{len(rule)} entries (num_hidden_layers), each {_FULL} or {_SLIDING}"
        raise unsupported("layer_types", types, f"supported: {needed}")
    if _SLIDING not in types:
        return {"sliding_window": None}
    if window is None:
        raise unsupported("sliding_window", None, f"layers with {_SLIDING} (layer_types) need a window")
    full = [layer + 1 for layer, kind in enumerate(types) if kind == _FULL]
    if not full or types == _layer_types(len(types), full[0]):
        return {"sliding_window": window, "full_attention_every": full[0] if full else None}
    return {"sliding_window": window, "full_attention_layers": full}


def _layer_types(n_layers: int, every: int | None) -> list[str]:
    """Return the attention of each layer, if all layers except every N-th have a window. `every`: N, or None."""
    return [_FULL if every and layer % every == 0 else _SLIDING for layer in range(1, n_layers + 1)]


def _write_types(args: DecoderArgs) -> list[str]:
    return [_FULL if args.window_of(layer) is None else _SLIDING for layer in range(args.n_layers)]


def _windows_of_qwen(config: Config) -> dict[str, Any]:
    window = _window_of_qwen(config)["sliding_window"]
    layers, first = range(_num_layers(config)), _size(config, "max_window_layers", 28, smallest=0)
    return _window_arguments(
        config, window, [_SLIDING if window is not None and layer >= first else _FULL for layer in layers]
    )


def _window_of_qwen(config: Config) -> dict[str, Any]:
    is_used = config.get("use_sliding_window", False)
    if not isinstance(is_used, bool):
        raise unsupported("use_sliding_window", is_used, "supported: true or false")
    window = config.get("sliding_window", 4096)
    if type(window) not in (int, type(None)):
        raise unsupported("sliding_window", window, "supported: a number of tokens, or null")
    return {"sliding_window": window if is_used else None}


def windows_by_pattern(default: int, default_window: int, pattern: str | None = None) -> Feature:
    """Return the `Feature` of sliding windows. If `layer_types` is absent, each layer has a window, except every N-th.

    `default`: the class's default of N. `default_window`: the class's default of the window. `pattern`: the key for N,
    if the class has one.
    """

    def read(config: Config) -> dict[str, Any]:
        window, every = config.get("sliding_window", default_window), default
        if type(window) is not int:  # these classes make a mask with a window even if no layer uses it
            raise unsupported("sliding_window", window, "supported: a number of tokens")
        if pattern is not None:
            every = config.get(pattern, default)
        return _window_arguments(config, window, _layer_types(_num_layers(config), every))

    def write(args: DecoderArgs) -> dict[str, Any]:
        window = args.sliding_window
        every = 1 if window is None else args.full_attention_every or args.n_layers + 1
        patterns = {} if pattern is None or args.full_attention_layers else {pattern: every}
        return {"sliding_window": window or default_window, "layer_types": _write_types(args), **patterns}

    return Feature(("sliding_window", "layer_types", *([] if pattern is None else [pattern])), read, write)


WINDOWS_OF_QWEN = Feature(
    ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types"),
    _windows_of_qwen,
    lambda args: {
        "use_sliding_window": args.sliding_window is not None,
        "sliding_window": args.sliding_window,
        "max_window_layers": args.n_layers if args.sliding_window is None else 0,
        "layer_types": _write_types(args),
    },
)
WINDOWS_OF_QWEN3_MOE = Feature(
    ("use_sliding_window", "sliding_window", "max_window_layers"),
    _window_of_qwen,
    lambda args: {"use_sliding_window": args.sliding_window is not None, "sliding_window": args.sliding_window},
)
"""The sliding window of Qwen3-MoE. With `use_sliding_window`, all layers have a window: the class ignores
`max_window_layers`."""


# Mixtures of experts, and latent attention. A folder of weights does not contain the auxiliary losses of experts:
# the job sets them.


def _in_table(argument: str, **keys: tuple[Any, ...]) -> Feature:
    """Return the `Feature` of keys that correspond to arguments in the table `argument`, such as `experts`. `keys`: for
    each key, the argument in the table, and the class's default. A key without a default must be in `config.json`."""

    def read(config: Config) -> dict[str, Any]:
        return {argument: {own: _lookup(config, key, *default) for key, (own, *default) in keys.items()}}

    def write(args: DecoderArgs) -> dict[str, Any]:
        table = getattr(args, argument)
        if table is None:
            name = argument.replace("_", " ")
            raise WeightsError(f"the class of transformers has {name}, but model.args.{argument} is unset")
        return {key: getattr(table, own) for key, (own, *_) in keys.items()}

    return Feature(tuple(keys), read, write)


_QWEN3_MOE = _in_table(
    "experts",
    num_local_experts=("num_experts",),
    num_experts_per_tok=("top_k", 8),
    moe_intermediate_size=("hidden_dim",),
    norm_topk_prob=("normalize", False),
    mlp_only_layers=("first_dense_layers", None),
)


def _read_experts_of_qwen3(config: Config) -> dict[str, Any]:
    experts = _QWEN3_MOE.read(config)["experts"]
    dense = [] if experts["first_dense_layers"] is None else experts["first_dense_layers"]
    if not isinstance(dense, list) or dense != list(range(len(dense))):
        raise unsupported("mlp_only_layers", dense, "layers without experts must be the first ones")
    return {"experts": {**experts, "first_dense_layers": len(dense)}}


def _write_experts_of_qwen3(args: DecoderArgs) -> dict[str, Any]:
    written = dict(_QWEN3_MOE.write(args))
    number = written.pop("num_local_experts")  # all releases of transformers read the name num_experts
    return {"num_experts": number, **written, "mlp_only_layers": list(range(written["mlp_only_layers"]))}


EXPERTS_OF_QWEN3_MOE = Feature(_QWEN3_MOE.keys, _read_experts_of_qwen3, _write_experts_of_qwen3)


def _experts_of_mixtral(top_k: int, **others: tuple[Any, ...]) -> Feature:
    """Return the `Feature` of experts. The key `intermediate_size` is the width of experts and also of the feed-forward
    layer. `top_k`: the class's default."""
    experts = _in_table(
        "experts",
        num_local_experts=("num_experts",),
        num_experts_per_tok=("top_k", top_k),
        intermediate_size=("hidden_dim",),
        **others,
    )
    return replace(experts, read=lambda config: {**experts.read(config), "hidden_dim": config["intermediate_size"]})


EXPERTS_OF_MIXTRAL = _experts_of_mixtral(2)
_GPT_OSS = _experts_of_mixtral(4, swiglu_limit=("gate_limit", 7.0))


def _read_experts_of_gpt_oss(config: Config) -> dict[str, Any]:
    found = _GPT_OSS.read(config)
    if found["experts"]["gate_limit"] is None:
        raise unsupported("swiglu_limit", None, "supported: numbers above 0")
    return {**found, "experts": {**found["experts"], "router_bias": True, "expert_bias": True}}


EXPERTS_OF_GPT_OSS = replace(_GPT_OSS, read=_read_experts_of_gpt_oss)
_DEEPSEEK = _in_table(
    "experts",
    n_routed_experts=("num_experts", 256),
    num_experts_per_tok=("top_k", 8),
    moe_intermediate_size=("hidden_dim", 2048),
    first_k_dense_replace=("first_dense_layers", 3),
    norm_topk_prob=("normalize", True),
    routed_scaling_factor=("scale", 2.5),
    n_group=("num_groups", 8),
    topk_group=("top_k_groups", 4),
)


def _read_experts_of_deepseek(config: Config) -> dict[str, Any]:
    width, num_shared = _size(config, "moe_intermediate_size", 2048), _size(config, "n_shared_experts", 1)
    _size(config, "num_nextn_predict_layers", 1, smallest=0)  # modules for further tokens, which are not loaded
    shared = {"shared_hidden_dim": num_shared * width, "score": "sigmoid", "selection_bias_rate": 0.0}
    return {"experts": {**_DEEPSEEK.read(config)["experts"], **shared}}


def _write_experts_of_deepseek(args: DecoderArgs) -> dict[str, Any]:
    written, experts = _DEEPSEEK.write(args), args.experts
    assert experts is not None
    num_shared, rest = divmod(experts.shared_hidden_dim or 0, experts.hidden_dim)
    if rest or not num_shared or experts.selection_bias_rate is None:
        width = f"{experts.shared_hidden_dim} (it must be a multiple of experts.hidden_dim = {experts.hidden_dim})"
        lacking = "selection_bias_rate = None" if num_shared and not rest else f"shared_hidden_dim = {width}"
        reason = f"has no counterpart of experts.{lacking}; --format plain writes any model"
        raise WeightsError(f"DeepseekV3ForCausalLM of transformers {reason}")
    return {**written, "n_shared_experts": num_shared, "num_nextn_predict_layers": 0}


EXPERTS_OF_DEEPSEEK = Feature(
    (*_DEEPSEEK.keys, "n_shared_experts", "num_nextn_predict_layers"),
    _read_experts_of_deepseek,
    _write_experts_of_deepseek,
)
_WIDTHS = {"kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
_LATENT = _in_table("latent_attention", **{key: (key, default) for key, default in _WIDTHS.items()})


def _read_latent_attention(config: Config) -> dict[str, Any]:
    latent = _LATENT.read(config)["latent_attention"]
    rotated = latent["qk_rope_head_dim"]
    for key, width in (("head_dim", rotated), ("qk_head_dim", latent["qk_nope_head_dim"] + rotated)):
        if not is_equal(config.get(key, width), width):
            raise unsupported(key, config[key], f"qk_nope_head_dim and qk_rope_head_dim require {width}")
    return {"latent_attention": latent}


LATENT_ATTENTION = Feature((*_LATENT.keys, "qk_head_dim", "head_dim"), _read_latent_attention, _LATENT.write)
