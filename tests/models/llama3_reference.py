"""Makes `data/llama3_reference.json`: what Hugging Face's Llama computes. Run where `transformers` is installed:

    pip install transformers && python -m tests.models.llama3_reference

The file was made with transformers 5.23.0 and torch 2.13.0. The weights are not in it: they come from numpy's legacy
generator, whose numbers never change.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch

DATA = Path(__file__).parent / "data" / "llama3_reference.json"

# 16 tokens of original context: within the 24 tokens below, slow, middle and fast channel pairs all occur.
ARGS: dict[str, Any] = {
    "dim": 32,
    "n_layers": 2,
    "n_heads": 4,
    "n_kv_heads": 2,
    "hidden_dim": 48,
    "vocab_size": 40,
    "rope_theta": 10_000.0,
    "rope_scaling": {"factor": 8.0, "original_max_position": 16},
}
TOKENS = [[(7 * i * i + 3 * i + 1) % 40 for i in range(24)]]

PUBLISHED = {"8B": (128, 8.0), "1B": (64, 32.0)}
"""Head dimension and scaling factor of published models; theta is 500,000 and the original context 8192."""


def weight(name: str, shape: torch.Size) -> torch.Tensor:
    """Return the value of a parameter, by its name in this package."""
    draw = np.random.RandomState(zlib.crc32(name.encode())).standard_normal(tuple(shape))
    values = 1 + 0.3 * draw if name.endswith("norm.weight") else 0.3 * draw
    return torch.tensor(values, dtype=torch.float32)


_HF_NAMES = {
    "tok_embeddings": "embed_tokens",
    "attention.w": "self_attn.",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}


def _our_name(hf_name: str) -> str:
    name = hf_name.removeprefix("model.").replace("lm_head", "output")
    for ours, theirs in _HF_NAMES.items():
        name = name.replace(theirs, ours)
    return name.replace("_proj", "")


def _hf_value(name: str, shape: torch.Size) -> torch.Tensor:
    """Permute the rows of a weight: Hugging Face rotates channel i with i + head_dim / 2, this package (like Meta) 2 i
    with 2 i + 1."""
    value = weight(_our_name(name), shape)
    if not name.endswith(("q_proj.weight", "k_proj.weight")):
        return value
    head_dim = ARGS["dim"] // ARGS["n_heads"]
    return value.unflatten(0, (-1, head_dim // 2, 2)).transpose(1, 2).reshape(shape)


def _hf_config(head_dim: int, theta: float, factor: float, original: int, **shape: int) -> Any:
    from transformers import LlamaConfig

    rope = {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": original,
    }
    return LlamaConfig(head_dim=head_dim, rope_parameters=rope, rms_norm_eps=1e-5, tie_word_embeddings=False, **shape)


def _logits() -> list[list[list[float]]]:
    from transformers import LlamaForCausalLM

    config = _hf_config(
        ARGS["dim"] // ARGS["n_heads"],
        ARGS["rope_theta"],
        ARGS["rope_scaling"]["factor"],
        ARGS["rope_scaling"]["original_max_position"],
        hidden_size=ARGS["dim"],
        intermediate_size=ARGS["hidden_dim"],
        num_hidden_layers=ARGS["n_layers"],
        num_attention_heads=ARGS["n_heads"],
        num_key_value_heads=ARGS["n_kv_heads"],
        vocab_size=ARGS["vocab_size"],
    )
    config._attn_implementation = "eager"
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(_hf_value(name, parameter.shape))
        return model(torch.tensor(TOKENS)).logits.tolist()


def _frequencies(head_dim: int, factor: float) -> list[float]:
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    return LlamaRotaryEmbedding(_hf_config(head_dim, 500_000.0, factor, 8192)).inv_freq.tolist()


def main() -> None:
    """Write the file."""
    reference = {
        "logits": [[[round(x, 6) for x in token] for token in sequence] for sequence in _logits()],
        "frequencies": {name: _frequencies(*shape) for name, shape in PUBLISHED.items()},
    }
    DATA.write_text(json.dumps(reference) + "\n")


if __name__ == "__main__":
    main()
