"""Small jobs of language models, whose plans are compared with traces."""

from __future__ import annotations

from typing import Any

from titan_launch.config.job import JobConfig
from titan_launch.config.sections.data import TextData, separates_documents
from titan_launch.models.decoder.families import FAMILIES
from titan_launch.plan.hardware import Kernels
from titan_launch.plan.job import Choice
from titan_launch.plan.layout import Layout, plan_layout

ARGS = {"dim": 48, "n_layers": 3, "n_heads": 4, "n_kv_heads": 2, "hidden_dim": 100, "vocab_size": 320}
FP32_NORMS = {"rules": [{"match": ["layers.*.*_norm", "norm"], "param_dtype": "float32"}]}
FROZEN = {"frozen_storage_dtype": "bfloat16"}
SGD = {"name": "SGD", "weight_decay": 1e-4}
FULL, SELECTIVE = {"mode": "full"}, {"mode": "selective"}
WINDOW = {"sliding_window": 8}
FP32_ROUTERS = {"rules": [{"match": "layers.*.moe.router", "param_dtype": "float32", "output_dtype": "float32"}]}
EXPERTS = {"num_experts": 8, "top_k": 2, "hidden_dim": 40, "balance_loss": 0.1}
GPT_OSS = {"router_bias": True, "expert_bias": True, "gate_limit": 7.0, "z_loss": 0.1, "balance_loss": 0.0}
DEEPSEEK = {
    "score": "sigmoid",
    "num_groups": 4,
    "top_k_groups": 2,
    "top_k": 3,
    "selection_bias_rate": 0.001,
    "shared_hidden_dim": 56,
    "first_dense_layers": 1,
}
WITH_SINKS: dict[str, Any] = {**WINDOW, "head_dim": 16, "experts": {"hidden_dim": 24, "balance_loss": 0.0}}


def accumulation(mode: str, unsharded: bool = False) -> dict[str, Any]:
    return {"mode": mode, "keep_params_unsharded": unsharded}


def offloaded(checkpointing: dict[str, Any]) -> dict[str, Any]:
    """Return sections with activation offloading, and with microbatches whose activations are large enough for it."""
    batch = {"seq_len": 128, "local_batch_size": 4, "global_batch_size": 4 * 4 * 3}
    return {"activation_checkpoint": {**checkpointing, "offload": True}, "training": batch}


# name, which may begin with that of a model: ranks (replicas, shards), microbatches, kernels, overrides of
# [model.args], other sections
PLANNED: dict[str, tuple[tuple[int, int], int, Kernels, dict[str, Any], dict[str, Any]]] = {
    "plain": ((1, 8), 1, "cuda", {}, {}),
    "deferred": ((1, 8), 3, "cuda", {}, {"gradient_accumulation": accumulation("deferred")}),
    "zero2": ((1, 8), 3, "cuda", {}, {"gradient_accumulation": accumulation("deferred", unsharded=True)}),
    "uneven": (
        (1, 7),
        2,
        "cuda",
        {"hidden_dim": 101, "vocab_size": 61},
        {"activation_checkpoint": FULL, "loss": {"chunks": 3}},
    ),
    "hsdp": ((2, 4), 3, "cuda", {}, {"gradient_accumulation": accumulation("deferred_all_reduce")}),
    "hsdp at once": ((2, 4), 2, "cpu", {}, {"activation_checkpoint": SELECTIVE, "precision": FP32_NORMS}),
    "sharded optimizer": (
        (4, 2),
        3,
        "cuda",
        {"hidden_dim": 101, "vocab_size": 61, "n_layers": 5},
        {
            "parallelism": {"shard_optimizer_over_replicas": True},
            "optimizer": {"name": "Muon", "state_dtype": "int8"},
            "ema": {"decay": 0.9},
        },
    ),
    "sharded optimizer, replicated": (
        (3, 1),
        2,
        "cpu",
        {"tie_embeddings": True},
        {
            "parallelism": {"shard_optimizer_over_replicas": True},
            "gradient_accumulation": accumulation("deferred"),
            "optimizer": {"implementation": "foreach"},
            "precision": {"reduce_dtype": "float32", "storage_dtype": "bfloat16"},
        },
    ),
    "replicated": (
        (4, 1),
        2,
        "cuda",
        {},
        {"gradient_accumulation": accumulation("deferred"), "precision": FP32_NORMS, "loss": {"chunks": 2}},
    ),
    "qwen3_moe, sharded optimizer": (
        (2, 4),
        2,
        "cuda",
        {},
        {"parallelism": {"shard_optimizer_over_replicas": True, "expert_parallel_degree": 2}},
    ),
    "sharded optimizer, the exchange is the peak": (
        (4, 2),
        1,
        "cuda",
        {"dim": 64, "vocab_size": 200, "n_layers": 9},
        {
            "parallelism": {"shard_optimizer_over_replicas": True},
            "precision": {"storage_dtype": "bfloat16"},
            "training": {"seq_len": 4, "local_batch_size": 1, "global_batch_size": 8},
        },
    ),
    "alone": ((1, 1), 4, "cpu", {"norm": "layernorm"}, {"optimizer": {**SGD, "implementation": "foreach"}}),
    "tied": ((1, 4), 2, "cuda", {"tie_embeddings": True}, {"loss": {"chunks": 5}}),
    "batchnorm": ((1, 2), 2, "cpu", {"norm": "batchnorm"}, {"activation_checkpoint": FULL}),
    "synchronized": (
        (1, 4),
        2,
        "cuda",
        {"norm": "batchnorm"},
        {"batchnorm": {"statistics": "synchronized"}, "activation_checkpoint": SELECTIVE},
    ),
    "synchronized over many": (
        (4, 128),
        2,
        "cuda",
        {"norm": "batchnorm"},
        {"batchnorm": {"statistics": "synchronized"}, "precision": {"param_dtype": "float32"}},
    ),
    "deep": ((1, 4), 2, "cuda", {"n_layers": 9}, {"activation_checkpoint": SELECTIVE, "precision": FP32_NORMS}),
    "deep, one unit for attention": (
        (1, 8),
        2,
        "cuda",
        {"n_layers": 9},
        {
            "activation_checkpoint": FULL,
            "gradient_accumulation": accumulation("immediate", unsharded=True),
            "precision": {"rules": [{"match": "layers.*.attention", "param_dtype": "float32"}]},
        },
    ),
    "every second block": (
        (1, 4),
        2,
        "cuda",
        {"n_layers": 12},
        {"activation_checkpoint": {"mode": "selective", "selective_ac_option": 2}},
    ),
    "offloaded": (
        (2, 2),
        3,
        "cuda",
        {},
        {"training": {"enable_cpu_offload": True}, "gradient_accumulation": accumulation("deferred_all_reduce")},
    ),
    **{
        f"{name}activations offloaded": ((1, 4), 3, "cuda", {"n_layers": 7, "dim": 64, **args}, job)
        for name, args, job in (
            ("", {}, offloaded({})),
            ("in full, ", {}, offloaded(FULL)),
            ("per operation, ", {"n_kv_heads": 4}, offloaded(SELECTIVE)),
            ("every second block, ", {"n_layers": 12}, offloaded({**SELECTIVE, "selective_ac_option": 2})),
            ("qwen3_moe, ", {}, offloaded({})),
        )
    },
    "parts of blocks": (
        (1, 4),
        2,
        "cuda",
        {"n_layers": 7},
        {
            "activation_checkpoint": {**SELECTIVE, "modules": ["layers.*.attention", "layers.*.feed_forward"]},
            "precision": FP32_NORMS,
        },
    ),
    "every second part": (
        (1, 4),
        2,
        "cpu",
        {"n_layers": 7},
        {"activation_checkpoint": {**SELECTIVE, "selective_ac_option": 2, "modules": ["layers.*.feed_forward"]}},
    ),
    "muon and EMA, stored in bf16": (
        (1, 2),
        2,
        "cpu",
        {},
        {
            "precision": {"storage_dtype": "bfloat16"},
            "optimizer": {"name": "Muon", "rounding": "stochastic"},
            "ema": {"decay": 0.9},
        },
    ),
    "fp32, stored in bf16": (
        (1, 4),
        2,
        "cuda",
        {},
        {
            "precision": {"param_dtype": "float32", "storage_dtype": "bfloat16"},
            "optimizer": {"implementation": "for-loop"},
        },
    ),
    "qwen2, tied": ((1, 4), 2, "cuda", {"tie_embeddings": True}, {"activation_checkpoint": SELECTIVE}),
    "qwen2 on a CPU": ((1, 2), 2, "cpu", {}, {"activation_checkpoint": FULL, "precision": FP32_NORMS}),
    "qwen3": ((1, 4), 2, "cuda", {}, {"activation_checkpoint": SELECTIVE}),
    "qwen3, fp32 norms of heads": (
        (1, 2),
        2,
        "cpu",
        {},
        {"precision": {"rules": [{"match": "layers.*.attention.*_norm", "param_dtype": "float32"}]}},
    ),
    "mistral": ((1, 4), 2, "cuda", WINDOW, {"activation_checkpoint": SELECTIVE}),
    "mistral on a CPU": ((1, 4), 2, "cpu", {**WINDOW, "n_layers": 8}, {"activation_checkpoint": SELECTIVE}),
    "gemma2": ((1, 4), 2, "cuda", {**WINDOW, "n_layers": 9}, {"activation_checkpoint": FULL}),
    "gemma2, chunks of the loss": ((2, 2), 2, "cuda", WINDOW, {"loss": {"chunks": 3}}),
    "gemma3": ((1, 4), 2, "cuda", {**WINDOW, "full_attention_every": 3}, {"activation_checkpoint": SELECTIVE}),
    "gemma3 on a CPU": ((1, 2), 2, "cpu", {**WINDOW, "full_attention_every": 3}, {"precision": FP32_NORMS}),
    "gpt2": ((1, 4), 2, "cuda", {"max_positions": 40}, {"activation_checkpoint": SELECTIVE}),
    "gpt2 on a CPU": ((1, 3), 2, "cpu", {"n_kv_heads": 4}, {"activation_checkpoint": FULL, "precision": FP32_NORMS}),
    "gpt_oss": ((1, 4), 2, "cuda", WITH_SINKS, {}),
    "gpt_oss, checkpointed": ((1, 2), 2, "cuda", {**WITH_SINKS, "n_layers": 4}, {"activation_checkpoint": SELECTIVE}),
    "gpt_oss in fp32": ((1, 2), 2, "cuda", WITH_SINKS, {"precision": {"param_dtype": "float32"}}),
    "phi3": ((2, 2), 3, "cuda", WINDOW, {"precision": {"param_dtype": "float32"}}),
    "olmo2": ((1, 4), 2, "cuda", {}, {"activation_checkpoint": SELECTIVE}),
    "qwen3_moe": ((1, 4), 2, "cuda", {}, {"activation_checkpoint": SELECTIVE}),
    "qwen3_moe, fp32 routers": (
        (1, 2),
        2,
        "cuda",
        {},
        {"activation_checkpoint": FULL, "precision": FP32_ROUTERS, "loss": {"chunks": 3}},
    ),
    "qwen3_moe, GPT-OSS, in bf16": ((1, 4), 2, "cuda", {"experts": GPT_OSS}, {}),
    "qwen3_moe, GPT-OSS, on a CPU": ((1, 2), 2, "cpu", {"experts": GPT_OSS}, {"activation_checkpoint": FULL}),
    "qwen3_moe, DeepSeek": ((1, 4), 1, "cuda", {"experts": DEEPSEEK, "n_layers": 8}, {}),
    "qwen3_moe, FSDP2 shards the widths": ((1, 3), 2, "cpu", {"experts": {"num_experts": 4, "hidden_dim": 24}}, {}),
    "qwen3_moe, EP 2, an unequal load": (
        (2, 4),
        2,
        "cuda",
        {},
        {
            "parallelism": {"expert_parallel_degree": 2},
            "planner": {"expert_load": 1.5},
            "activation_checkpoint": SELECTIVE,
            "gradient_accumulation": accumulation("deferred"),
        },
    ),
    "qwen3_moe, EP 4 on a CPU": (
        (1, 4),
        2,
        "cpu",
        {"experts": {**DEEPSEEK, "first_dense_layers": 0}},
        {"parallelism": {"expert_parallel_degree": 4}, "activation_checkpoint": FULL, "precision": FP32_NORMS},
    ),
    "frozen, all but norms and head": (
        (1, 4),
        2,
        "cuda",
        {},
        {"training": {"trainable": ["layers.*.*_norm.*", "norm.*", "output.*"]}, "precision": FROZEN},
    ),
    "frozen embedding and first blocks": (
        (2, 2),
        3,
        "cuda",
        {"n_layers": 5},
        {
            "training": {"frozen": ["tok_embeddings.*", "layers.[01].**"]},
            "activation_checkpoint": FULL,
            "gradient_accumulation": accumulation("deferred"),
        },
    ),
    "frozen first blocks, selective": (
        (1, 4),
        2,
        "cuda",
        {"n_layers": 5},
        {"training": {"frozen": ["tok_embeddings.*", "layers.[01].**"]}, "activation_checkpoint": SELECTIVE},
    ),
    "frozen, all but queries": (
        (1, 4),
        2,
        "cpu",
        {"n_layers": 9},
        {
            "training": {"trainable": ["layers.*.attention.w[qv].*"]},
            "activation_checkpoint": SELECTIVE,
            "precision": FP32_NORMS,
        },
    ),
    "frozen, all but queries, no checkpointing": (
        (1, 4),
        2,
        "cuda",
        {},
        {
            "training": {"trainable": ["layers.*.attention.wq.*"]},
            "loss": {"chunks": 3},
            "optimizer": {"master_weights": True},
            "precision": {"storage_dtype": "bfloat16"},
        },
    ),
    "frozen, all but the head": (
        (1, 4),
        2,
        "cpu",
        {},
        {"training": {"trainable": ["output.*"]}, "precision": FP32_NORMS},
    ),
    "frozen MLPs, layernorm": (
        (1, 2),
        2,
        "cpu",
        {"norm": "layernorm"},
        {
            "training": {"frozen": ["layers.*.feed_forward.**", "tok_embeddings.*"]},
            "gradient_accumulation": accumulation("immediate", unsharded=True),
        },
    ),
    "qwen3_moe, EP 2, frozen first blocks": (
        (1, 4),
        2,
        "cuda",
        {"n_layers": 4},
        {
            "training": {
                "frozen": ["tok_embeddings.*", "layers.[01].**", "layers.2.*_norm.*", "layers.2.attention.**"]
            },
            "parallelism": {"expert_parallel_degree": 2},
            "activation_checkpoint": FULL,
        },
    ),
    "qwen3_moe, trained routers": (
        (1, 2),
        2,
        "cpu",
        {"experts": DEEPSEEK},
        {"training": {"trainable": ["layers.*.moe.router.*", "layers.*.attention.**"]}},
    ),
    "gpt2, frozen biases": (
        (1, 4),
        2,
        "cuda",
        {"max_positions": 40},
        {"training": {"frozen": ["**.bias", "pos_embeddings.*"]}},
    ),
    "qwen3_moe, frozen experts": (
        (1, 4),
        2,
        "cuda",
        {},
        {"training": {"frozen": ["layers.*.moe.experts.*"]}},
    ),
    "qwen3_moe, EP 4, trained head": (
        (1, 4),
        2,
        "cuda",
        {},
        {"training": {"trainable": ["output.*"]}, "parallelism": {"expert_parallel_degree": 4}},
    ),
    "alone, frozen first block": (
        (1, 1),
        2,
        "cuda",
        {"tie_embeddings": True},
        {"training": {"frozen": ["tok_embeddings.*", "layers.0.**"]}, "precision": FROZEN},
    ),
    "z-loss of whole logits": ((1, 4), 2, "cuda", {}, {"loss": {"z_loss": 1e-4}}),
    "z-loss in fp32": ((2, 2), 2, "cpu", {}, {"loss": {"z_loss": 1e-4}, "precision": {"param_dtype": "float32"}}),
    "gemma2, z-loss": ((1, 2), 2, "cuda", WINDOW, {"loss": {"z_loss": 1e-4, "label_smoothing": 0.1}}),
    "z-loss in chunks": ((1, 4), 2, "cuda", {}, {"loss": {"z_loss": 1e-4, "chunks": 3}}),
    "mistral, packed": ((1, 2), 2, "cuda", WINDOW, {"activation_checkpoint": SELECTIVE}),
    "packed": ((1, 2), 2, "cpu", {}, {"precision": FP32_NORMS}),
    "tied, frozen embedding": (
        (1, 4),
        2,
        "cuda",
        {"tie_embeddings": True},
        {"training": {"frozen": ["tok_embeddings.*"]}, "loss": {"chunks": 5}},
    ),
    "gpt2, packed": ((1, 2), 2, "cpu", {"n_kv_heads": 4}, {"activation_checkpoint": FULL}),
}


def planned_job(name: str) -> tuple[JobConfig, Layout, Choice, Kernels]:
    """Return the job of a row of `PLANNED`."""
    (replicas, shards), num_microbatches, kernels, args, sections = PLANNED[name]
    family = max((family for family in FAMILIES if name.startswith(family)), key=len, default="llama3")
    if family == "qwen3_moe":
        args = {"head_dim": 12, **args, "experts": {**EXPERTS, **args.get("experts", {})}}
    batch = {"seq_len": 33, "local_batch_size": 2, "global_batch_size": 2 * num_microbatches * replicas * shards}
    job = {
        "model": {"name": family, "args": {**ARGS, **args}},
        "data": {"kind": "synthetic", "vocab_size": 61},
        **sections,
        "parallelism": {
            "data_parallel_replicate_degree": replicas,
            "data_parallel_shard_degree": shards,
            **sections.get("parallelism", {}),
        },
        "training": {**batch, **sections.get("training", {})},
    }
    config = JobConfig.model_validate(job)
    if name.endswith("packed"):
        config = config.model_copy(update={"data": TextData().model_copy(update={"packing": "documents"})})
        assert separates_documents(config.data)
    layout = plan_layout(config.parallelism, config.training, replicas * shards)
    return config, layout, Choice(config.gradient_accumulation, config.activation_checkpoint), kernels
