"""Models of this package beside those of `transformers`, with the same tiny random weights, in fp32 on a CPU.

    python -m tests.models.parity [--write docs/verification/models.md]

Each row saves a random model of `transformers`, and reads it as a run does. The table has the largest differences of
logits and gradients, and tells whether import and export return every tensor bit for bit.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.publishing import publish
from titan_launch.cli import main
from titan_launch.config.sections.model import ModelConfig
from titan_launch.models.architectures import resolve_args
from titan_launch.models.build import SPECS, take_inventory
from titan_launch.models.huggingface.config_json import read_folder_config
from titan_launch.models.init import load_weights
from titan_launch.models.weights.folder import Weights, find_weights
from titan_launch.models.weights.writing import Entry, in_file_layout

SEQ_LEN, VOCABULARY = 24, 61

_SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "attn_implementation": "eager",
    "pad_token_id": None,  # transformers would not train the row of the padding
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LLAMA_3_1 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "truncate": False,
}
_QWEN3_MOE = {"head_dim": 16, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 20}
_LINEAR = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
_GEMMA = {**_SIZES, "head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 24}

_DEEPSEEK_V3 = {
    **_SIZES,
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 12,
    "n_group": 4,
    "topk_group": 2,
    "rope_parameters": {**_YARN, "truncate": True, "mscale": 1.0, "mscale_all_dim": 1.0},
}
_MOONLIGHT = {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "n_shared_experts": 2, "rms_norm_eps": 1e-5}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama 2": ("llama", _SIZES),
    "Llama 3.1, RoPE scaling": ("llama", {**_SIZES, "rope_parameters": _LLAMA_3_1}),
    "Llama, YaRN": ("llama", {**_SIZES, "rope_parameters": _YARN}),
    "Llama, biases, wide heads, tied": (
        "llama",
        {**_SIZES, "attention_bias": True, "mlp_bias": True, "head_dim": 12, "tie_word_embeddings": True},
    ),
    "Qwen 2.5": ("qwen2", _SIZES),
    "Qwen 2.5, tied, windows": (
        "qwen2",
        {
            **_SIZES,
            "use_sliding_window": True,
            "sliding_window": 8,
            "max_window_layers": 0,
            "tie_word_embeddings": True,
        },
    ),
    "Qwen 3": ("qwen3", {**_SIZES, "head_dim": 16}),
    "Qwen 3, tied": ("qwen3", {**_SIZES, "head_dim": 16, "tie_word_embeddings": True}),
    "Mistral 7B": ("mistral", {**_SIZES, "sliding_window": 8}),
    "Gemma 2": ("gemma2", _GEMMA),
    "Gemma 3": ("gemma3_text", {**_GEMMA, "num_hidden_layers": 7, "rope_parameters": _LINEAR}),
    "Qwen 3, experts": ("qwen3_moe", {**_SIZES, **_QWEN3_MOE, "mlp_only_layers": [0], "norm_topk_prob": True}),
    "Qwen 3, experts, weights not normalized": ("qwen3_moe", {**_SIZES, **_QWEN3_MOE}),
    "Mixtral": ("mixtral", {**_SIZES, "num_local_experts": 5, "sliding_window": 8}),
    "GPT-OSS": (
        "gpt_oss",
        {
            **_SIZES,
            "head_dim": 16,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "sliding_window": 8,
            "swiglu_limit": 0.5,
            "rope_parameters": {**_YARN, "rope_theta": 150_000.0},
        },
    ),
    "GPT-2": (
        "gpt2",
        {
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
            "vocab_size": VOCABULARY,
            "n_positions": 64,
            "attn_implementation": "eager",
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    "Phi-3": ("phi3", {**_SIZES, "sliding_window": 8}),
    "OLMo 2": ("olmo2", _SIZES),
    "DeepSeek-V3": ("deepseek_v3", _DEEPSEEK_V3),
    "Moonlight": ("deepseek_v3", {**_DEEPSEEK_V3, **_MOONLIGHT, "rope_parameters": None, "rope_theta": 50_000.0}),
}
"""A tiny configuration of each family: its `model_type`, and keys of its `config.json`."""


@dataclass(frozen=True)
class Parity:
    """Largest differences between a model of this package and the same of `transformers`."""

    logits: float
    gradients: float
    """Of all parameters, relative to the largest gradient of the parameter's tensor, or of all experts' tensors."""

    comes_back: bool
    """True if import and export return every tensor bit for bit."""


def random_model(case: str, folder: Path, kind: Any = None, **changes: Any) -> nn.Module:
    """Save a random model of `transformers`, without parameters that have a special value, and return it. `kind`: the
    class that makes it, by default `AutoModelForCausalLM`."""
    from transformers import AutoConfig, AutoModelForCausalLM

    model_type, keys = CASES[case]
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **{**keys, **changes})
    model = (kind or AutoModelForCausalLM).from_config(config).eval()
    biases = (buffer for name, buffer in model.named_buffers() if name.endswith("bias"))  # of the choice of experts
    with torch.no_grad():
        for tensor in (*model.parameters(), *biases):
            tensor.add_(torch.randn_like(tensor), alpha=0.1)
    model.save_pretrained(folder)
    return model


def read_model(folder: Path, args: Mapping[str, Any] | None = None, **keys: Any) -> tuple[nn.Module, Weights]:
    """Return the model of this package with the weights in a folder, as a run reads them. `args`: arguments of the
    model, by default those of the folder. `keys`: further keys of `[model]`."""
    found = read_folder_config(folder)
    args = dict(found.args if args is None else args)
    config = ModelConfig(name=found.name, flavor=found.flavor, args=args, weights=str(folder), **keys)
    module = SPECS[found.name].build(resolve_args(found.name, found.flavor, args), SEQ_LEN)
    weights = find_weights(config, take_inventory(module, ()))
    load_weights(module, weights)
    return module, weights


def samples() -> tuple[Tensor, Tensor]:
    """Return tokens and targets, (3, SEQ_LEN) each."""
    tokens = torch.randint(VOCABULARY, (3, SEQ_LEN + 1), generator=torch.Generator().manual_seed(1))
    return tokens[:, :-1], tokens[:, 1:]


def parity(case: str, folder: Path) -> Parity:
    """Compare the models of a case. Files are written below `folder`."""
    theirs = random_model(case, folder / "theirs")
    ours, weights = read_model(folder / "theirs")
    tokens, targets = samples()
    logits = {model: model(tokens) for model in (ours, theirs)}
    logits[theirs] = logits[theirs].logits
    for values in logits.values():
        F.cross_entropy(values.flatten(0, 1), targets.flatten()).backward()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(parameter.grad)
    theirs.save_pretrained(folder / "gradients")
    return Parity(
        logits=float((logits[ours] - logits[theirs]).detach().abs().max()),
        gradients=_gradient_difference(ours, weights, tensors_of(folder / "gradients")),
        comes_back=same_tensors(folder / "theirs", round_trip(folder / "theirs", folder)),
    )


def _gradient_difference(ours: nn.Module, weights: Weights, theirs: Mapping[str, Tensor]) -> float:
    """Return the largest difference from the gradients `theirs`, which are in the layout of files, with the values of
    buffers beside them."""
    values = {**dict(ours.named_buffers()), **{name: p.grad for name, p in ours.named_parameters()}}
    read = in_file_layout(weights.pieces, values.__getitem__)
    differences, largest = defaultdict(float), defaultdict(float)
    for name, gradient in theirs.items():
        parameter = re.sub(r"experts\.\d+", "experts", name)
        own = read(Entry(name, tuple(gradient.shape), torch.float32))
        differences[parameter] = max(differences[parameter], float((own - gradient).abs().max()))
        largest[parameter] = max(largest[parameter], float(gradient.abs().max()))
    return max(difference / largest[name] for name, difference in differences.items())


def round_trip(source: Path, folder: Path) -> Path:
    """Import a folder and export it again. Return the folder of the export."""
    assert main(["import", str(source), "--out", str(folder / "imported")]) == 0
    assert main(["export", str(folder / "imported"), "--out", str(folder / "exported"), "--max-shard-size=10KB"]) == 0
    return folder / "exported"


def tensors_of(folder: Path) -> dict[str, Tensor]:
    """Return all tensors of a folder, read with the library, and checked against the index if there is one."""
    from safetensors.torch import load_file

    found = {file.name: load_file(file) for file in folder.glob("*.safetensors")}
    index = folder / "model.safetensors.index.json"
    if index.exists():
        table: Mapping[str, str] = json.loads(index.read_text())["weight_map"]
        assert table == {name: file for file, tensors in found.items() for name in tensors}
    return {name: tensor for tensors in found.values() for name, tensor in tensors.items()}


def same_tensors(one: Path, other: Path) -> bool:
    """Return True if two folders have the same tensors, bit for bit."""
    a, b = tensors_of(one), tensors_of(other)
    return a.keys() == b.keys() and all(a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]) for name in a)


def table() -> str:
    """Return the table of all cases, in Markdown."""
    rows = ["| model | `model_type` | logits | gradients | round trip |", "|---|---|---:|---:|---|"]
    for case, (model_type, _) in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            result = parity(case, Path(folder))
        verdict = "bitwise" if result.comes_back else "differs"
        rows.append(f"| {case} | `{model_type}` | {result.logits:.1e} | {result.gradients:.1e} | {verdict} |")
    return "\n".join(rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, metavar="PAGE", help="replace the table of this page")
    publish(table(), "parity", parser.parse_args().write)
