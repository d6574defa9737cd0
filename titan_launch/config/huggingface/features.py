"""Keys of Hugging Face's `config.json`, and the model arguments that say the same. No torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from titan_launch.config.architectures.decoder import DecoderArgs
from titan_launch.config.architectures.experts import ExpertArgs

CONFIG_FILE, ADAPTER_CONFIG_FILE = "config.json", "adapter_config.json"

_FULL, _SLIDING = "full_attention", "sliding_attention"
"""Kinds of attention in `layer_types`."""

Config = Mapping[str, Any]
"""The table in a `config.json`."""


class WeightsError(Exception):
    """A folder of weights that cannot be used. The message is a clause with the reason and the remedy."""


@dataclass(frozen=True)
class Feature:
    """A group of keys of `config.json`, and the arguments of this package's model that say the same."""

    keys: tuple[str, ...]
    read: Callable[[Config], Mapping[str, Any]]
    """Function from a `config.json` to arguments. It raises WeightsError for a value that is not supported."""

    write: Callable[[DecoderArgs], Mapping[str, Any]]
    """Function from all arguments to values of `keys`."""


def same(key: str, argument: str, *default: Any) -> Feature:
    """Return a key that only has another name. Without `default` the key must be in `config.json`."""
    return Feature(
        (key,), lambda config: {argument: _lookup(config, key, *default)}, lambda args: {key: getattr(args, argument)}
    )


def _lookup(config: Config, key: str, *default: Any) -> Any:
    if key not in config and not default:
        raise WeightsError(f"{CONFIG_FILE} has no {key}")
    return config.get(key, *default)


_ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"}


def activation(key: str, default: str) -> Feature:
    """Return the key of the activation of the feed-forward layer."""

    def read(config: Config) -> dict[str, Any]:
        value = config.get(key, default)
        if value not in _ACTIVATIONS:
            raise unsupported(key, value, f"supported: {', '.join(_ACTIVATIONS)}")
        return {"activation": _ACTIVATIONS[value]}

    def write(args: DecoderArgs) -> dict[str, Any]:
        own = args.activation
        names = [default, *_ACTIVATIONS]
        return {key: next(name for name in names if _ACTIVATIONS[name] == own)}

    return Feature((key,), read, write)


def _read_key_value_heads(config: Config) -> dict[str, Any]:
    number = config.get("num_key_value_heads")
    return {"n_kv_heads": _lookup(config, "num_attention_heads") if number is None else number}


KEY_VALUE_HEADS = Feature(
    ("num_key_value_heads",), _read_key_value_heads, lambda args: {"num_key_value_heads": args.n_kv_heads}
)
HEADS_OF_GPT2 = Feature(
    ("n_head",),
    lambda config: dict.fromkeys(("n_heads", "n_kv_heads"), _lookup(config, "n_head")),
    lambda args: {"n_head": args.n_heads},
)
POSITIONS_OF_GPT2 = Feature(
    ("n_positions", "max_position_embeddings"),
    lambda config: {"max_positions": config.get("n_positions", 1024)},
    lambda args: {"n_positions": args.max_positions},
)
WIDTH_OF_GPT2 = Feature(
    ("n_inner",),
    lambda config: {"hidden_dim": config.get("n_inner") or 4 * _lookup(config, "n_embd")},
    lambda args: {"n_inner": args.hidden_dim},
)


def head_dim(default: int | None) -> Feature:
    """Return the key of the width of a head. The argument stays unset if it follows from the other sizes."""

    def read(config: Config) -> dict[str, Any]:
        width = config.get("head_dim", default)
        ratio = _lookup(config, "hidden_size") / _lookup(config, "num_attention_heads")
        return {"head_dim": None if width == ratio else width}

    return Feature(("head_dim",), read, lambda args: {"head_dim": args.head_width})


def attention_bias(default: bool = False) -> Feature:
    """Return the key of the biases of queries, keys, values, and of the output of attention."""

    def read(config: Config) -> dict[str, Any]:
        return dict.fromkeys(("qkv_bias", "attention_output_bias"), bool(config.get("attention_bias", default)))

    return Feature(("attention_bias",), read, lambda args: {"attention_bias": args.qkv_bias})


FEED_FORWARD_BIAS = Feature(
    ("mlp_bias",),
    lambda config: {"feed_forward_bias": bool(config.get("mlp_bias"))},
    lambda args: {"mlp_bias": args.feed_forward_bias},
)
QUERY_SCALE = Feature(
    ("query_pre_attn_scalar",),
    lambda config: {"query_scale": config.get("query_pre_attn_scalar", 256) ** -0.5},
    lambda args: {"query_pre_attn_scalar": _inverse_square(args.query_scale or args.head_width**-0.5)},
)


def _inverse_square(scale: float) -> float | int:
    """Return `scale ** -2`, as a whole number if it is one apart from rounding."""
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
_YARN_OPTIONAL = ("beta_fast", "beta_slow", "truncate", "attention_factor", "mscale", "mscale_all_dim")
_YARN = {
    "factor": "factor",
    "original_max_position_embeddings": "original_max_position",
    **{name: name for name in _YARN_OPTIONAL},
}
_SCALINGS = {"default": {}, "linear": {"factor": "factor"}, "llama3": _LLAMA3, "yarn": _YARN}
"""Keys of each supported RoPE type, with the fields of `rope_scaling` of this package."""


def _read_rope(rope: Config | None, theta: float, key: str) -> tuple[float, dict[str, Any] | None]:
    """Return the base and the scaling of a table of RoPE parameters. `theta`: base if the table does not name it."""
    rope = dict(rope or {})
    theta = rope.pop("rope_theta", theta)
    names = [rope.pop(name) for name in ("rope_type", "type") if name in rope]
    kind = names[0] if names else "default"
    if rope.pop("partial_rotary_factor", 1.0) != 1.0:
        raise unsupported(f"{key}.partial_rotary_factor", "other than 1", "all channels of a head are rotated")
    if kind not in _SCALINGS:
        raise unsupported(f"{key}.rope_type", kind, f"supported: {', '.join(_SCALINGS)}")
    known = _SCALINGS[kind]
    if unknown := [name for name in rope if name not in (*known, "original_max_position_embeddings")]:
        raise unsupported(f"{key}.{unknown[0]}", rope[unknown[0]], f"not a parameter of the RoPE type {kind}")
    rope = {name: value for name, value in rope.items() if value is not None}
    if missing := [name for name in known if name not in (*rope, *_YARN_OPTIONAL)]:
        raise WeightsError(f"{CONFIG_FILE}: {key} of the type {kind} has no {', '.join(missing)}")
    return theta, {
        "kind": kind,
        **{own: rope[name] for name, own in known.items() if name in rope},
    } if known else None


def _write_scaling(args: DecoderArgs) -> dict[str, Any] | None:
    scaling = args.rope_scaling
    if scaling is None:
        return None
    values = {key: getattr(scaling, own) for key, own in _SCALINGS[scaling.kind].items()}
    return {"rope_type": scaling.kind, **{key: value for key, value in values.items() if value is not None}}


def _one_rope(config: Config, theta: float, default: Config) -> dict[str, Any]:
    key = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    outside = ("partial_rotary_factor", "original_max_position_embeddings")  # keys beside the table that go first
    rope = {**(config.get(key) or default), **{name: config[name] for name in outside if name in config}}
    theta, scaling = _read_rope(rope, config.get("rope_theta", theta), key)
    return {"rope_theta": theta, "rope_scaling": scaling}


def rope(theta: float = 10_000.0, scaling: Config | None = None) -> Feature:
    """Return the keys of rotary embeddings that all layers share. `theta` and `scaling`: the class's own defaults."""
    unscaled = None if scaling is None else {"rope_type": "default"}
    return Feature(
        ("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor"),
        partial(_one_rope, theta=theta, default=scaling or {}),
        lambda args: {"rope_theta": args.rope_theta, "rope_scaling": _write_scaling(args) or unscaled},
    )


YARN_OF_GPT_OSS = {
    "rope_type": "yarn",
    "factor": 32.0,
    "original_max_position_embeddings": 4096,
    "truncate": False,
}


def _two_ropes(config: Config) -> dict[str, Any]:
    ropes = config.get("rope_parameters") or {_FULL: config.get("rope_scaling")}
    theta, scaling = _read_rope(ropes.get(_FULL), config.get("rope_theta", 1e6), f"rope_parameters.{_FULL}")
    base = config.get("rope_local_base_freq", 10_000.0)
    local, local_scaling = _read_rope(ropes.get(_SLIDING), base, f"rope_parameters.{_SLIDING}")
    if local_scaling is not None:
        raise unsupported(f"rope_parameters.{_SLIDING}.rope_type", local_scaling["kind"], "supported: default")
    return {"rope_theta": theta, "rope_scaling": scaling, "local_rope_theta": local}


ROPES_OF_GEMMA3 = Feature(
    ("rope_parameters", "rope_scaling", "rope_theta", "rope_local_base_freq"),
    _two_ropes,
    lambda args: {
        "rope_theta": args.rope_theta,
        "rope_scaling": _write_scaling(args),
        "rope_local_base_freq": args.local_rope_theta or args.rope_theta,
    },
)

# Sliding windows. `layer_types` names the attention of each layer; without it each class has a rule of its own.


def _window_arguments(window: int | None, types: Sequence[str]) -> dict[str, Any]:
    """Return the arguments for layers with the attentions `types`; the full ones must be every N-th layer."""
    if window is None or _SLIDING not in types:
        return {"sliding_window": None, "full_attention_every": None}
    every = types.index(_FULL) + 1 if _FULL in types else None
    if list(types) != _layer_types(len(types), window, every):
        raise unsupported("layer_types", list(types), "full attention must be in every N-th layer, or in none")
    return {"sliding_window": window, "full_attention_every": every}


def _layer_types(n_layers: int, window: int | None, every: int | None) -> list[str]:
    is_full = [window is None or (every and (layer + 1) % every == 0) for layer in range(n_layers)]
    return [_FULL if full else _SLIDING for full in is_full]


def _write_types(args: DecoderArgs) -> list[str]:
    return _layer_types(args.n_layers, args.sliding_window, args.full_attention_every)


def _windows_of_qwen(config: Config) -> dict[str, Any]:
    window = config.get("sliding_window", 4096) if config.get("use_sliding_window") else None
    layers, first = range(_lookup(config, "num_hidden_layers")), config.get("max_window_layers", 28)
    types = config.get("layer_types") or [_SLIDING if window and layer >= first else _FULL for layer in layers]
    return _window_arguments(window, types)


def _windows_by_pattern(default: int, default_window: int = 4096) -> Callable[[Config], dict[str, Any]]:
    def read(config: Config) -> dict[str, Any]:
        every = config.get("sliding_window_pattern", config.get("_sliding_window_pattern", default))
        window, layers = config.get("sliding_window", default_window), _lookup(config, "num_hidden_layers")
        rule = _layer_types(layers, window, every)
        return _window_arguments(window, config.get("layer_types") or rule)

    return read


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
    lambda config: {"sliding_window": config.get("sliding_window", 4096) if config.get("use_sliding_window") else None},
    lambda args: {"use_sliding_window": args.sliding_window is not None, "sliding_window": args.sliding_window},
)
"""All layers have the window, whatever `max_window_layers` is."""

WINDOWS_OF_GEMMA2 = Feature(
    ("sliding_window", "layer_types"),
    _windows_by_pattern(2),
    lambda args: {"sliding_window": args.sliding_window, "layer_types": _write_types(args)},
)
WINDOWS_OF_GPT_OSS = Feature(
    WINDOWS_OF_GEMMA2.keys, _windows_by_pattern(2, default_window=128), WINDOWS_OF_GEMMA2.write
)
WINDOWS_OF_GEMMA3 = Feature(
    ("sliding_window", "layer_types", "sliding_window_pattern", "_sliding_window_pattern"),
    _windows_by_pattern(6),
    lambda args: {
        "sliding_window": args.sliding_window,
        "sliding_window_pattern": args.full_attention_every or args.n_layers + 1,
        "layer_types": _write_types(args),
    },
)


# Mixtures of experts. The auxiliary losses are no part of the model that a folder holds: the job sets them.


def _experts(args: DecoderArgs) -> ExpertArgs:
    if args.experts is None:
        raise WeightsError("the class of transformers has experts, but model.args.experts is unset")
    return args.experts


def _num_experts(config: Config) -> int:
    """Return the number of experts: transformers 5 writes `num_local_experts` for all classes."""
    return config["num_experts"] if "num_experts" in config else _lookup(config, "num_local_experts")


def _read_experts_of_qwen3(config: Config) -> dict[str, Any]:
    dense = config.get("mlp_only_layers") or []
    if list(dense) != list(range(len(dense))):
        raise unsupported("mlp_only_layers", list(dense), "layers without experts must be the first ones")
    return {
        "experts": {
            "num_experts": _num_experts(config),
            "top_k": config.get("num_experts_per_tok", 8),
            "hidden_dim": _lookup(config, "moe_intermediate_size"),
            "normalize": config.get("norm_topk_prob", False),
            "first_dense_layers": len(dense),
        }
    }


def _write_experts_of_qwen3(args: DecoderArgs) -> dict[str, Any]:
    experts = _experts(args)
    return {
        "num_experts": experts.num_experts,
        "num_experts_per_tok": experts.top_k,
        "moe_intermediate_size": experts.hidden_dim,
        "norm_topk_prob": experts.normalize,
        "mlp_only_layers": list(range(experts.first_dense_layers)),
    }


EXPERTS_OF_QWEN3_MOE = Feature(
    (
        "num_experts",
        "num_local_experts",
        "num_experts_per_tok",
        "moe_intermediate_size",
        "norm_topk_prob",
        "mlp_only_layers",
    ),
    _read_experts_of_qwen3,
    _write_experts_of_qwen3,
)


def _read_experts_of_mixtral(config: Config) -> dict[str, Any]:
    width = _lookup(config, "intermediate_size")
    experts = {"num_experts": _num_experts(config), "top_k": config.get("num_experts_per_tok", 2), "hidden_dim": width}
    return {"hidden_dim": width, "experts": experts}


def _write_experts_of_mixtral(args: DecoderArgs) -> dict[str, Any]:
    experts = _experts(args)
    return {
        "num_local_experts": experts.num_experts,
        "num_experts_per_tok": experts.top_k,
        "intermediate_size": experts.hidden_dim,
    }


EXPERTS_OF_MIXTRAL = Feature(
    ("num_local_experts", "num_experts", "num_experts_per_tok", "intermediate_size"),
    _read_experts_of_mixtral,
    _write_experts_of_mixtral,
)


def _read_experts_of_gpt_oss(config: Config) -> dict[str, Any]:
    found = _read_experts_of_mixtral({"num_experts_per_tok": 4, **config})
    own = {"router_bias": True, "expert_bias": True, "gate_limit": config.get("swiglu_limit", 7.0)}
    return {**found, "experts": {**found["experts"], **own}}


EXPERTS_OF_GPT_OSS = Feature(
    (*EXPERTS_OF_MIXTRAL.keys, "swiglu_limit", "experts_per_token"),
    _read_experts_of_gpt_oss,
    lambda args: {**_write_experts_of_mixtral(args), "swiglu_limit": _experts(args).gate_limit},
)


def _read_experts_of_deepseek(config: Config) -> dict[str, Any]:
    width, num_shared = config.get("moe_intermediate_size", 2048), config.get("n_shared_experts", 1)
    if not num_shared:
        raise unsupported("n_shared_experts", num_shared, "at least 1")
    return {
        "experts": {
            "num_experts": config.get("n_routed_experts", config.get("num_local_experts", 256)),
            "top_k": config.get("num_experts_per_tok", 8),
            "hidden_dim": width,
            "shared_hidden_dim": num_shared * width,
            "first_dense_layers": config.get("first_k_dense_replace", 3),
            "score": "sigmoid",
            "normalize": config.get("norm_topk_prob", True),
            "scale": config.get("routed_scaling_factor", 2.5),
            "num_groups": config.get("n_group", 8),
            "top_k_groups": config.get("topk_group", 4),
            "selection_bias_rate": 0.0,
        }
    }


def _write_experts_of_deepseek(args: DecoderArgs) -> dict[str, Any]:
    experts = _experts(args)
    num_shared, rest = divmod(experts.shared_hidden_dim or 0, experts.hidden_dim)
    if rest or not num_shared or experts.selection_bias_rate is None:
        reason = "whose width is a multiple of that of an expert, and selection biases"
        raise WeightsError(f"DeepseekV3ForCausalLM of transformers needs a shared expert, {reason}")
    return {
        "n_routed_experts": experts.num_experts,
        "num_experts_per_tok": experts.top_k,
        "moe_intermediate_size": experts.hidden_dim,
        "n_shared_experts": num_shared,
        "first_k_dense_replace": experts.first_dense_layers,
        "norm_topk_prob": experts.normalize,
        "routed_scaling_factor": experts.scale,
        "n_group": experts.num_groups,
        "topk_group": experts.top_k_groups,
        "num_nextn_predict_layers": 0,
    }


EXPERTS_OF_DEEPSEEK = Feature(
    (
        *("n_routed_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size", "n_shared_experts"),
        *("first_k_dense_replace", "norm_topk_prob", "routed_scaling_factor", "n_group", "topk_group"),
        *("num_nextn_predict_layers", "num_mtp_layers"),  # modules that predict further tokens, which are not loaded
    ),
    _read_experts_of_deepseek,
    _write_experts_of_deepseek,
)

_LATENT = {"kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}


def _write_latent_attention(args: DecoderArgs) -> dict[str, Any]:
    if args.latent_attention is None:
        raise WeightsError("the class of transformers has latent attention, but model.args.latent_attention is unset")
    return {key: getattr(args.latent_attention, key) for key in _LATENT}


LATENT_ATTENTION = Feature(
    (*_LATENT, "qk_head_dim", "head_dim"),
    lambda config: {"latent_attention": {key: config.get(key, default) for key, default in _LATENT.items()}},
    _write_latent_attention,
)
"""(`qk_head_dim` and `head_dim` follow from the others.)"""


def unsupported(key: str, value: Any, reason: str) -> WeightsError:
    """Return the error for a value of `config.json` that no model of this package computes."""
    return WeightsError(f"{CONFIG_FILE} has {key} = {json.dumps(value)}, which is not supported ({reason})")
