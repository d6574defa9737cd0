"""Tiny `config.json`s of classes of `transformers`, written without that library."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

needs_transformers = pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")

VOCABULARY, POSITIONS = 64, 32

_DECODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": POSITIONS,
}
_IMAGES = {"num_channels": 1, "id2label": {"0": "a", "1": "b", "2": "c"}, "label2id": {"a": 0, "b": 1, "c": 2}}

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "pad_token_id": None, **_DECODER},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "tie_word_embeddings": True, **_DECODER},
    "gpt2": {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": VOCABULARY,
        "n_positions": POSITIONS,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "bos_token_id": 0,
        "eos_token_id": 0,
    },
    "vit": {
        "architectures": ["ViTForImageClassification"],
        "model_type": "vit",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 6,
        "patch_size": 3,
        **_IMAGES,
    },
    "resnet": {
        "architectures": ["ResNetForImageClassification"],
        "model_type": "resnet",
        "embedding_size": 8,
        "hidden_sizes": [8, 16],
        "depths": [1, 1],
        "layer_type": "basic",
        **_IMAGES,
    },
}
"""Language models and image classifiers, by `model_type`."""

NORMS = {"llama": "LlamaRMSNorm", "qwen2": "Qwen2RMSNorm", "gpt2": "LayerNorm", "vit": "LayerNorm"}
"""The class of the norms that a rule computes in fp32. BatchNorm needs no rule."""


def write_config(folder: Path, name: str, **keys: Any) -> str:
    """Write the `config.json` of a model, with `keys` over those of `CONFIGS`, and return the folder's path."""
    folder.mkdir(parents=True, exist_ok=True)
    table = {**CONFIGS[name], "transformers_version": "5.0.0", "torch_dtype": "bfloat16", **keys}
    (folder / "config.json").write_text(json.dumps(table))
    return str(folder)
