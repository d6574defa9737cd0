"""Keys of Hugging Face's `config.json`, and the model arguments that say the same. No torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from titan_launch.config.architectures.decoder import DecoderArgs

CONFIG_FILE = "config.json"

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


ATTENTION_BIAS = Feature(
    ("attention_bias",),
    lambda config: dict.fromkeys(("qkv_bias", "attention_output_bias"), bool(config.get("attention_bias"))),
    lambda args: {"attention_bias": args.qkv_bias},
)
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


def _one_rope(config: Config) -> dict[str, Any]:
    key = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    outside = ("partial_rotary_factor", "original_max_position_embeddings")  # keys beside the table that go first
    rope = {**(config.get(key) or {}), **{name: config[name] for name in outside if name in config}}
    theta, scaling = _read_rope(rope, config.get("rope_theta", 10_000.0), key)
    return {"rope_theta": theta, "rope_scaling": scaling}


ROPE = Feature(
    ("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor"),
    _one_rope,
    lambda args: {"rope_theta": args.rope_theta, "rope_scaling": _write_scaling(args)},
)


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


def _windows_by_pattern(default: int) -> Callable[[Config], dict[str, Any]]:
    def read(config: Config) -> dict[str, Any]:
        every = config.get("sliding_window_pattern", config.get("_sliding_window_pattern", default))
        window, layers = config.get("sliding_window", 4096), _lookup(config, "num_hidden_layers")
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
WINDOWS_OF_GEMMA2 = Feature(
    ("sliding_window", "layer_types"),
    _windows_by_pattern(2),
    lambda args: {"sliding_window": args.sliding_window, "layer_types": _write_types(args)},
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


def unsupported(key: str, value: Any, reason: str) -> WeightsError:
    """Return the error for a value of `config.json` that no model of this package computes."""
    return WeightsError(f"{CONFIG_FILE} has {key} = {json.dumps(value)}, which is not supported ({reason})")
