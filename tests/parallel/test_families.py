"""The decoder families divided over ranks train like one process."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.distributed import run_ranks
from tests.parallel.test_tensor_parallel import TWO, assert_close, train_one
from tests.sampling import sampled
from tests.train.jobs import TINY_ARGS
from titan_launch.distributed.ring_attention_on_cpu import ring_attention_on_cpu

SEQUENCES_WHOLE = {**TWO, "sequence_parallel": False}
CONTEXT, PIPELINE = {"context_parallel_degree": 2}, {"pipeline_parallel_degree": 2}
BOTH = {**TWO, **CONTEXT}

SHAPE = {**TINY_ARGS, "vocab_size": 64, "n_layers": 3}
WINDOW = {"sliding_window": 5, "full_attention_every": 2}
LATENT = {"kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}
YARN = {"kind": "yarn", "factor": 4.0, "original_max_position": 16, "mscale": 0.7, "mscale_all_dim": 0.3}
ARGS: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "gemma2": {"head_dim": 16, **WINDOW},
    "gemma3": {"head_dim": 16, **WINDOW, "tie_embeddings": False},
    "olmo2": {},
    "gpt2": {"n_kv_heads": 4, "max_positions": 20, "tie_embeddings": False},
    "gpt_oss": {"head_dim": 16, **WINDOW, "experts": {"num_experts": 4, "top_k": 2, "hidden_dim": 20}},
    "deepseek_v3": {
        "n_kv_heads": 4,
        "latent_attention": {**LATENT, "q_lora_rank": 24},
        "rope_scaling": YARN,
        "experts": {"hidden_dim": 16, "shared_hidden_dim": 32},
    },
    "llama3, latents of keys": {"n_kv_heads": 4, "latent_attention": LATENT, "norm": "layernorm"},
}
"""Arguments by case: a family, and what the arguments change."""

OF_RANK = (".rows", ".table", ".load", ".auxiliary_losses")
"""Buffers of a rank: rows of positions are divided with the sequence, and each rank counts the load of its samples."""

FamilyCase = tuple[str, dict[str, Any]]
"""A case of `ARGS`, and a division."""

CASES: list[FamilyCase] = [
    ("gemma3", PIPELINE),
    ("qwen2", TWO),
    ("qwen3", TWO),
    ("gemma2", {}),
    ("gemma2", TWO),
    ("gemma3", TWO),
    ("olmo2", TWO),
    ("olmo2", SEQUENCES_WHOLE),
    ("gpt2", TWO),
    ("gpt_oss", {}),
    ("gpt2", SEQUENCES_WHOLE),
    ("gpt2", PIPELINE),
    ("gpt2", CONTEXT),
    ("gpt_oss", TWO),
    ("gpt_oss", SEQUENCES_WHOLE),
    ("gpt_oss", PIPELINE),
    ("deepseek_v3", {"expert_parallel_degree": 2}),
    ("deepseek_v3", TWO),
    ("deepseek_v3", CONTEXT),
    ("deepseek_v3", PIPELINE),
    ("llama3, latents of keys", TWO),
    ("llama3, latents of keys", SEQUENCES_WHOLE),
    ("gpt2", BOTH),
]
"""Divisions of two ranks, and one of four. Rotary embedding is divided in the other tests of this folder."""


def train(cases: Sequence[FamilyCase], folder: Path) -> list[dict[str, Tensor]]:
    """Train jobs one after the other. Return the loss and the gradient norm of each step, and the parameters."""
    trained = []
    for index, (case, parallelism) in enumerate(cases):
        model = {"name": case.partition(",")[0], "args": {**SHAPE, **ARGS[case]}}
        job = {"model": model, "parallelism": parallelism}
        with ExitStack() as stack:
            if parallelism.get("context_parallel_degree"):
                stack.enter_context(ring_attention_on_cpu())
            trained.append(train_one(job, folder / str(index)))
    return trained


@sampled("cases", CASES, 12)
def test_families_train_like_one_process(cases: tuple[FamilyCase, ...], tmp_path: Path) -> None:
    names = list(dict.fromkeys(case for case, _ in cases))
    ((*alone,),) = run_ranks(train, 1, [(case, {}) for case in names], tmp_path / "1")
    expected = dict(zip(names, alone, strict=True))
    for ranks in (2, 4):
        own_cases = [case for case in cases if (case[1] == BOTH) == (ranks == 4)]
        for by_case in run_ranks(train, ranks, own_cases, tmp_path / str(ranks)) if own_cases else ():
            for (case, parallelism), trained in zip(own_cases, by_case, strict=True):
                # A pipeline stage has some of the parameters.
                own = {name: value for name, value in trained.items() if not name.endswith(OF_RANK)}
                assert_close(f"{case} {parallelism}", own, {name: expected[case][name] for name in own}, 1e-5)
                assert torch.all(trained["train/grad_norm"] > 0.1)
