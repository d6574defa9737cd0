"""The size tables of the decoder families, by family and flavor.

The sizes are those of the `config.json` files that were published with the weights. The flavor `debug` of each family
is for the byte tokenizer on a CPU.
"""

from __future__ import annotations

from typing import Any

Flavors = dict[str, dict[str, Any]]


def _flavors(common: dict[str, Any], flavors: Flavors) -> Flavors:
    """Return the flavors of a family. A flavor overrides `common`."""
    return {name: {**common, **flavor} for name, flavor in flavors.items()}


def _size(
    dim: int, n_layers: int, n_heads: int, n_kv_heads: int, hidden_dim: int, vocab_size: int, **others: Any
) -> dict[str, Any]:
    shape = {"dim": dim, "n_layers": n_layers, "n_heads": n_heads, "n_kv_heads": n_kv_heads}
    return {**shape, "hidden_dim": hidden_dim, "vocab_size": vocab_size, **others}


def _experts(num_experts: int, top_k: int, hidden_dim: int, **others: Any) -> dict[str, Any]:
    return {"num_experts": num_experts, "top_k": top_k, "hidden_dim": hidden_dim, "balance_loss": 0.001, **others}


_DEBUG = _size(256, 6, 8, 4, 768, 320)
_LLAMA_3_1: dict[str, Any] = {"rope_scaling": {"kind": "llama3", "factor": 8.0}}
_LLAMA_3_2: dict[str, Any] = {"rope_scaling": {"kind": "llama3", "factor": 32.0}, "tie_embeddings": True}
_QWEN: dict[str, Any] = {"norm_eps": 1e-6, "rope_theta": 1_000_000.0}
_GEMMA: dict[str, Any] = {
    "norm_eps": 1e-6,
    "norm_unit_offset": True,
    "post_norms": True,
    "activation": "gelu_tanh",
    "tie_embeddings": True,
    "scale_embeddings": True,
}
_LINEAR: dict[str, Any] = {"rope_scaling": {"kind": "linear", "factor": 8.0}}
_GPT_OSS: dict[str, Any] = {"router_bias": True, "expert_bias": True, "gate_limit": 7.0}
_DEEPSEEK: dict[str, Any] = {"score": "sigmoid", "selection_bias_rate": 0.001, "balance_loss": 0.0001, "scale": 2.5}
_LATENT = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
_SMALL_LATENT = {"kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32}
_YARN = {"kind": "yarn", "factor": 40.0, "original_max_position": 4096, "mscale": 1.0, "mscale_all_dim": 1.0}

FAMILIES: dict[str, Flavors] = {
    # Llama 3.1 (8B, 70B, 405B) and 3.2 (1B, 3B), arXiv:2407.21783.
    "llama3": {
        "debug": _DEBUG,
        "1B": _size(2048, 16, 32, 8, 8192, 128_256, **_LLAMA_3_2),
        "3B": _size(3072, 28, 24, 8, 8192, 128_256, **_LLAMA_3_2),
        "8B": _size(4096, 32, 32, 8, 14_336, 128_256, **_LLAMA_3_1),
        "70B": _size(8192, 80, 64, 8, 28_672, 128_256, **_LLAMA_3_1),
        "405B": _size(16_384, 126, 128, 8, 53_248, 128_256, **_LLAMA_3_1),
    },
    # Qwen 2.5 (arXiv:2412.15115), the base models. (The larger instruction-tuned models have `norm_eps` = 1e-6.)
    "qwen2": _flavors(
        {**_QWEN, "qkv_bias": True},
        {
            "debug": _DEBUG,
            "0.5B": _size(896, 24, 14, 2, 4864, 151_936, tie_embeddings=True),
            "1.5B": _size(1536, 28, 12, 2, 8960, 151_936, tie_embeddings=True),
            "3B": _size(2048, 36, 16, 2, 11_008, 151_936, tie_embeddings=True),
            "7B": _size(3584, 28, 28, 4, 18_944, 152_064),
            "14B": _size(5120, 48, 40, 8, 13_824, 152_064, norm_eps=1e-5),
            "32B": _size(5120, 64, 40, 8, 27_648, 152_064, norm_eps=1e-5),
            "72B": _size(8192, 80, 64, 8, 29_568, 152_064, norm_eps=1e-5),
        },
    ),
    # Qwen 3 (arXiv:2505.09388), the dense models.
    "qwen3": _flavors(
        {**_QWEN, "qk_norm": True, "head_dim": 128},
        {
            "debug": {**_DEBUG, "head_dim": 32},
            "0.6B": _size(1024, 28, 16, 8, 3072, 151_936, tie_embeddings=True),
            "1.7B": _size(2048, 28, 16, 8, 6144, 151_936, tie_embeddings=True),
            "4B": _size(2560, 36, 32, 8, 9728, 151_936, tie_embeddings=True),
            "8B": _size(4096, 36, 32, 8, 12_288, 151_936),
            "14B": _size(5120, 40, 40, 8, 17_408, 151_936),
            "32B": _size(5120, 64, 64, 8, 25_600, 151_936),
        },
    ),
    # Qwen 3 (arXiv:2505.09388), the mixtures of experts.
    "qwen3_moe": _flavors(
        {**_QWEN, "qk_norm": True, "head_dim": 128},
        {
            "debug": {**_DEBUG, "head_dim": 32, "experts": _experts(8, 2, 256)},
            "30B-A3B": _size(2048, 48, 32, 4, 6144, 151_936, experts=_experts(128, 8, 768)),
            "235B-A22B": _size(4096, 94, 64, 4, 12_288, 151_936, experts=_experts(128, 8, 1536)),
        },
    ),
    # Mistral 7B (arXiv:2310.06825): `7B` is version 0.1.
    "mistral": {
        "debug": {**_DEBUG, "rope_theta": 10_000.0, "sliding_window": 64},
        "7B": _size(4096, 32, 32, 8, 14_336, 32_000, rope_theta=10_000.0, sliding_window=4096),
        "7B-v0.3": _size(4096, 32, 32, 8, 14_336, 32_768, rope_theta=1_000_000.0),
    },
    # Mixtral 8x7B (arXiv:2401.04088) and 8x22B, version 0.1.
    "mixtral": _flavors(
        {"rope_theta": 1_000_000.0},
        {
            "debug": {**_DEBUG, "experts": _experts(8, 2, 256)},
            "8x7B": _size(4096, 32, 32, 8, 14_336, 32_000, experts=_experts(8, 2, 14_336)),
            "8x22B": _size(6144, 56, 48, 8, 16_384, 32_000, experts=_experts(8, 2, 16_384)),
        },
    ),
    # Gemma 2 (arXiv:2408.00118).
    "gemma2": _flavors(
        {
            **_GEMMA,
            "rope_theta": 10_000.0,
            "sliding_window": 4096,
            "full_attention_every": 2,
            "attention_soft_cap": 50.0,
            "logits_soft_cap": 30.0,
        },
        {
            "debug": {**_DEBUG, "head_dim": 64, "sliding_window": 64},
            "2B": _size(2304, 26, 8, 4, 9216, 256_000, head_dim=256),
            "9B": _size(3584, 42, 16, 8, 14_336, 256_000, head_dim=256),
            "27B": _size(4608, 46, 32, 16, 36_864, 256_000, head_dim=128, query_scale=144**-0.5),
        },
    ),
    # The language models of Gemma 3 (arXiv:2503.19786), without the image encoder of 4B and larger models.
    "gemma3": _flavors(
        {
            **_GEMMA,
            "qk_norm": True,
            "rope_theta": 1_000_000.0,
            "local_rope_theta": 10_000.0,
            "sliding_window": 1024,
            "full_attention_every": 6,
        },
        {
            "debug": {**_DEBUG, "head_dim": 64, "sliding_window": 64},
            "1B": _size(1152, 26, 4, 1, 6912, 262_144, head_dim=256, sliding_window=512),
            "4B": _size(2560, 34, 8, 4, 10_240, 262_208, head_dim=256, **_LINEAR),
            "12B": _size(3840, 48, 16, 8, 15_360, 262_208, head_dim=256, **_LINEAR),
            "27B": _size(5376, 62, 32, 16, 21_504, 262_208, head_dim=128, query_scale=168**-0.5, **_LINEAR),
        },
    ),
    # GPT-2 (Radford et al., 2019).
    "gpt2": _flavors(
        {
            "norm": "layernorm",
            "positions": "learned",
            "max_positions": 1024,
            "qkv_bias": True,
            "attention_output_bias": True,
            "feed_forward_bias": True,
            "activation": "gelu_tanh",
            "gated": False,
            "tie_embeddings": True,
        },
        {
            "debug": {**_DEBUG, "n_kv_heads": 8, "hidden_dim": 1024},
            "124M": _size(768, 12, 12, 12, 3072, 50_257),
            "355M": _size(1024, 24, 16, 16, 4096, 50_257),
            "774M": _size(1280, 36, 20, 20, 5120, 50_257),
            "1.5B": _size(1600, 48, 25, 25, 6400, 50_257),
        },
    ),
    # GPT-OSS (arXiv:2508.10925).
    "gpt_oss": _flavors(
        {
            "rope_theta": 150_000.0,
            "rope_scaling": {"kind": "yarn", "factor": 32.0, "original_max_position": 4096, "truncate": False},
            "qkv_bias": True,
            "attention_output_bias": True,
            "attention_sinks": True,
            "sliding_window": 128,
            "full_attention_every": 2,
            "head_dim": 64,
        },
        {
            "debug": {**_DEBUG, "head_dim": 32, "sliding_window": 64, "experts": _experts(8, 4, 256, **_GPT_OSS)},
            "20B": _size(2880, 24, 64, 8, 2880, 201_088, experts=_experts(32, 4, 2880, **_GPT_OSS)),
            "120B": _size(2880, 36, 64, 8, 2880, 201_088, experts=_experts(128, 4, 2880, **_GPT_OSS)),
        },
    ),
    # Phi-3 (arXiv:2404.14219).
    "phi3": _flavors(
        {"rope_theta": 10_000.0},
        {
            "debug": {**_DEBUG, "n_kv_heads": 8, "sliding_window": 64},
            "mini-4k": _size(3072, 32, 32, 32, 8192, 32_064, sliding_window=2047),
        },
    ),
    # OLMo 2 (arXiv:2501.00656).
    "olmo2": _flavors(
        {
            "norm_eps": 1e-6,
            "pre_norms": False,
            "post_norms": True,
            "qk_norm": True,
            "qk_norm_over": "all_heads",
            "rope_theta": 500_000.0,
        },
        {
            "debug": _DEBUG,
            "1B": _size(2048, 16, 16, 16, 8192, 100_352),
            "7B": _size(4096, 32, 32, 32, 11_008, 100_352),
            "13B": _size(5120, 40, 40, 40, 13_824, 100_352),
            "32B": _size(5120, 64, 40, 8, 27_648, 100_352),
        },
    ),
    # DeepSeek-V3 (arXiv:2412.19437), without the module that predicts a second token. `16B-A3B` is Moonlight
    # (arXiv:2502.16982), which has the same architecture. The rates of load balancing are from DeepSeek-V3's training.
    "deepseek_v3": _flavors(
        {"norm_eps": 1e-6, "rope_theta": 10_000.0},
        {
            "debug": {
                **_DEBUG,
                "n_kv_heads": 8,
                "latent_attention": {**_SMALL_LATENT, "q_lora_rank": 96},
                "experts": _experts(
                    8, 2, 192, shared_hidden_dim=192, first_dense_layers=1, num_groups=4, top_k_groups=2, **_DEEPSEEK
                ),
            },
            "16B-A3B": _size(
                *(2048, 27, 16, 16, 11_264, 163_840),
                norm_eps=1e-5,
                rope_theta=50_000.0,
                latent_attention=_LATENT,
                experts=_experts(
                    64, 6, 1408, shared_hidden_dim=2816, first_dense_layers=1, **{**_DEEPSEEK, "scale": 2.446}
                ),
            ),
            "671B-A37B": _size(
                *(7168, 61, 128, 128, 18_432, 129_280),
                latent_attention={**_LATENT, "q_lora_rank": 1536},
                rope_scaling=_YARN,
                experts=_experts(
                    256,
                    8,
                    2048,
                    shared_hidden_dim=2048,
                    first_dense_layers=3,
                    num_groups=8,
                    top_k_groups=4,
                    **_DEEPSEEK,
                ),
            ),
        },
    ),
}
"""The size table of each family, by the name in `[model]`."""
