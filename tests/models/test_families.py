"""Decoder families compared with their classes of `transformers`: logits and gradients of tiny models in fp32."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from titan_launch.config.architectures.decoder import DecoderArgs
from titan_launch.config.architectures.families import FAMILIES
from titan_launch.models.decoder import Decoder

TOKENS = 24
SHAPE = {"dim": 32, "n_layers": 3, "n_heads": 4, "n_kv_heads": 2, "hidden_dim": 48, "vocab_size": 40}


@dataclass(frozen=True)
class Twin:
    """A class of `transformers` with the arguments that the family's own table does not give."""

    model_class: str
    config: Mapping[str, Any]
    """Keys of its configuration, beside the sizes."""

    args: Mapping[str, Any]
    """Arguments of ours, beside those of the family's flavor `debug`."""


SCALING = {"factor": 8.0, "original_max_position": 16}
LINEAR = {"kind": "linear", "factor": 8.0}
WINDOWS = ["sliding_attention", "sliding_attention", "full_attention"]
GEMMA = {"head_dim": 16, "sliding_window": 8, "full_attention_every": 3, "query_scale": 20.0**-0.5}
GEMMA_CONFIG = {"head_dim": 16, "sliding_window": 8, "layer_types": WINDOWS, "query_pre_attn_scalar": 20}


def rope(theta: float, **scaling: Any) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": theta, **scaling}


TWINS = {
    "llama3": Twin(
        "LlamaForCausalLM",
        {
            "tie_word_embeddings": False,
            "rms_norm_eps": 1e-5,
            "rope_parameters": rope(
                500_000.0,
                rope_type="llama3",
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=16,
            ),
        },
        {"rope_scaling": SCALING},
    ),
    "qwen2": Twin(
        "Qwen2ForCausalLM", {"tie_word_embeddings": True, "rope_parameters": rope(1e6)}, {"tie_embeddings": True}
    ),
    "qwen3": Twin("Qwen3ForCausalLM", {"head_dim": 16, "rope_parameters": rope(1e6)}, {"head_dim": 16}),
    "mistral": Twin(
        "MistralForCausalLM",
        {"sliding_window": 8, "rms_norm_eps": 1e-5, "rope_parameters": rope(1e4)},
        {"sliding_window": 8},
    ),
    "gemma2": Twin("Gemma2ForCausalLM", {**GEMMA_CONFIG, "rope_parameters": rope(1e4)}, GEMMA),
    "gemma3": Twin(
        "Gemma3ForCausalLM",
        {
            **GEMMA_CONFIG,
            "rope_parameters": {
                "sliding_attention": rope(1e4),
                "full_attention": rope(1e6, rope_type="linear", factor=8.0),
            },
        },
        {**GEMMA, "rope_scaling": LINEAR},
    ),
    "gpt2": Twin("GPT2LMHeadModel", {"n_positions": 32}, {"n_kv_heads": 4, "max_positions": 32}),
    "phi3": Twin(
        "Phi3ForCausalLM",
        {"sliding_window": 8, "rope_parameters": rope(1e4)},
        {"sliding_window": 8},
    ),
}


def twin_of(family: str) -> torch.nn.Module:
    """Return the class of `transformers` with random weights, large enough to bend every function."""
    transformers = pytest.importorskip("transformers")
    twin, kv_heads = TWINS[family], TWINS[family].args.get("n_kv_heads", SHAPE["n_kv_heads"])
    sizes = {
        "hidden_size": SHAPE["dim"],
        "num_hidden_layers": SHAPE["n_layers"],
        "num_attention_heads": SHAPE["n_heads"],
        "num_key_value_heads": kv_heads,
        "n_inner" if family == "gpt2" else "intermediate_size": SHAPE["hidden_dim"],
        "vocab_size": SHAPE["vocab_size"],
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
    }
    model_class = getattr(transformers, twin.model_class)
    config = model_class.config_class(**sizes, **twin.config, attn_implementation="eager")
    torch.manual_seed(0)
    model = model_class(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return model


def by_our_names(tensors: Mapping[str, Tensor], args: DecoderArgs) -> dict[str, Tensor]:
    """Return the tensors of `transformers` by our names, with the rotated pairs of channels side by side."""
    found = {}
    for name, tensor in _separate(tensors, args):
        for theirs, ours in {**_NAMES, **(_GEMMA_NAMES if args.post_norms else {})}.items():
            name = re.sub(theirs, ours, name)
        if args.positions == "rope" and re.search(r"\.(wq|wk|q_norm|k_norm)\.", name):
            tensor = tensor.unflatten(0, (-1, 2, args.head_width // 2)).transpose(1, 2).reshape(tensor.shape)
        found[name] = tensor
    return found


_NAMES = {
    r"^(model|transformer)\.": "",
    r"^h\.": "layers.",
    r"^(embed_tokens|wte)": "tok_embeddings",
    r"^wpe": "pos_embeddings",
    r"^lm_head": "output",
    r"^ln_f": "norm",
    r"\.(self_attn|attn)\.": ".attention.",
    r"\.mlp\.": ".feed_forward.",
    r"\.(input_layernorm|ln_1)": ".attention_norm",
    r"\.(post_attention_layernorm|ln_2)": ".ffn_norm",
    r"attention\.(o_proj|c_proj)": "attention.wo",
    r"\.([qkv])_proj": r".w\1",
    r"gate_proj|c_fc": "w1",
    r"down_proj|c_proj": "w2",
    r"up_proj": "w3",
}
_GEMMA_NAMES = {
    r"\.(post_attention_layernorm|ffn_norm)": ".attention_post_norm",
    r"pre_feedforward_layernorm": "ffn_norm",
    r"post_feedforward_layernorm": "ffn_post_norm",
}


def _separate(tensors: Mapping[str, Tensor], args: DecoderArgs) -> Iterator[tuple[str, Tensor]]:
    """Yield separate matrices [width_out, width_in], where `transformers` has several in one, or transposed ones."""
    qkv, gate = [args.query_width, args.kv_width, args.kv_width], [args.hidden_dim] * 2
    for name, tensor in tensors.items():
        if "c_" in name and tensor.ndim == 2:
            tensor = tensor.T
        fused = re.search("c_attn|qkv_proj|gate_up_proj", name)
        if fused is None:
            yield name, tensor
            continue
        is_gate = fused[0] == "gate_up_proj"
        parts = zip(("gate", "up") if is_gate else "qkv", tensor.split(gate if is_gate else qkv), strict=True)
        yield from ((name.replace(fused[0], f"{part}_proj"), rows) for part, rows in parts)


@pytest.mark.parametrize("family", TWINS)
def test_logits_and_gradients_are_those_of_transformers(family: str) -> None:
    twin = twin_of(family)
    row = {**FAMILIES[family]["debug"], **SHAPE, **TWINS[family].args}
    args = DecoderArgs.model_validate(row)
    model = Decoder(args, TOKENS)
    values = by_our_names(dict(twin.named_parameters()), args)
    model.load_state_dict(values, strict=False)
    assert values.keys() == dict(model.named_parameters()).keys()
    tokens = torch.randint(0, args.vocab_size, (2, TOKENS + 1))
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    expected, actual = twin(inputs, use_cache=False).logits, model(inputs)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    for logits in (expected, actual):
        F.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
    gradients = by_our_names({name: p.grad for name, p in twin.named_parameters()}, args)
    for name, parameter in model.named_parameters():
        largest = float(gradients[name].abs().max())  # 0 but for rounding, of the biases of GPT-2's keys
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=0, atol=1e-4 * largest + 1e-6, msg=name)


def test_every_family_has_a_twin() -> None:
    assert TWINS.keys() == FAMILIES.keys()
