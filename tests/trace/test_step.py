"""A trace compared with PyTorch's allocator in a step on real tensors."""

from __future__ import annotations

import time
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.distributed import run_ranks
from tests.trace.allocator import allocated_peaks
from tests.trace.traces import FP32_NORMS, a_job
from titan_launch.plan.memory.ledger import Category, Footprint, StepPoint
from titan_launch.trace.fake_group import fake_process_group, sends_held
from titan_launch.trace.step import trace_step
from titan_launch.train.model import build_job_model, plan_precision

BF16 = {"param_dtype": "bfloat16"}
DEFERRED = {"mode": "deferred"}
RESNET = {
    "model": {"name": "resnet"},
    "data": {"kind": "images"},
    "training": {"local_batch_size": 2, "global_batch_size": 16},
}
MIXTRAL = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 4, "vocab_size": 61}
MIXTRAL |= {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
OF_TRANSFORMERS: dict[str, Any] = {"model": {"name": "huggingface", "args": {**MIXTRAL, "num_key_value_heads": 2}}}
JOBS: dict[str, dict[str, Any]] = {
    "immediate": {},
    "one microbatch, bf16": {"training": {"global_batch_size": 4}, "precision": BF16},
    "deferred, unsharded parameters, fp32": {"gradient_accumulation": {**DEFERRED, "keep_params_unsharded": True}},
    "deferred, bf16": {"precision": BF16, "gradient_accumulation": DEFERRED},
    "full activation checkpointing": {"precision": BF16, "activation_checkpoint": {"mode": "full"}},
    "selective activation checkpointing": {"precision": BF16, "activation_checkpoint": {"mode": "selective"}},
    "norms in fp32": {"precision": FP32_NORMS, "gradient_accumulation": DEFERRED},
    "LayerNorm, foreach": {"model": {"args": {"norm": "layernorm"}}, "optimizer": {"implementation": "foreach"}},
    "tied embeddings, chunked loss": {"model": {"args": {"tie_embeddings": True}}, "loss": {"chunks": 4}},
    "BatchNorm": {"precision": BF16, "model": {"args": {"norm": "batchnorm"}}},
    "a user's own, for-loop": {
        "model": {"name": "examples.conv_lm:build", "args": {"vocab_size": 61, "dim": 32}},
        "optimizer": {"implementation": "for-loop"},
    },
    "HSDP": {
        "parallelism": {"data_parallel_replicate_degree": 2},
        "gradient_accumulation": {"mode": "deferred_all_reduce"},
    },
    "TP": {
        "parallelism": {"tensor_parallel_degree": 2},
        "precision": BF16,
        "model": {"args": {"vocab_size": 62}},
    },
    "1F1B": {"parallelism": {"pipeline_parallel_degree": 2}, "precision": BF16},
    "TP without its options": {
        "parallelism": {"tensor_parallel_degree": 2, "sequence_parallel": False, "loss_parallel": False},
        "activation_checkpoint": {"mode": "full"},
        "model": {"args": {"vocab_size": 62}},
    },
    "interleaved, with TP": {
        "parallelism": {
            "pipeline_parallel_degree": 2,
            "tensor_parallel_degree": 2,
            "pipeline_parallel_schedule": "Interleaved1F1B",
        },
        "model": {"args": {"n_layers": 4, "vocab_size": 62}},
        "training": {"global_batch_size": 4},
    },
    "experts of transformers in fp32, selective": {
        **OF_TRANSFORMERS,
        "activation_checkpoint": {"mode": "selective"},
    },
    "experts of transformers in fp32": OF_TRANSFORMERS,
    "ViT, TP": {
        "model": {"name": "vit"},
        "data": {"kind": "images"},
        "training": {"local_batch_size": 2, "global_batch_size": 4},
        "parallelism": {"tensor_parallel_degree": 2, "sequence_parallel": False},
    },
    # In fp32: oneDNN's bf16 convolutions cache scratch memory between calls, which only the allocator sees.
    "ResNet, deferred": {**RESNET, "gradient_accumulation": DEFERRED},
    "ResNet": RESNET,
    "EMA, stored in bf16": {
        "precision": {"param_dtype": "float32", "storage_dtype": "bfloat16"},
        "ema": {"decay": 0.9},
    },
}


def trace(ranks: int, sections: dict[str, Any], kernels: Any = "cpu", rank: int = 0) -> Footprint:
    config, layout, _ = a_job(ranks, **sections)
    built = build_job_model(config)
    return trace_step(config, built, plan_precision(config, built), layout, kernels, rank).footprint


LAST_STAGE = 3


QUICK = ("deferred, bf16", "TP without its options")


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("1F1B", LAST_STAGE),
        *(pytest.param(name, 0, marks=[pytest.mark.slow] * (name not in QUICK)) for name in JOBS),
    ],
)
def test_a_traced_step_has_the_memory_that_the_allocator_reports(name: str, rank: int) -> None:
    footprint = trace(4, JOBS[name], rank=rank)
    phases = footprint.by_phase()
    of_update = phases.pop("optimizer")
    of_backward = max(phases.values())
    config, layout, _ = a_job(4, **JOBS[name])
    really_of_backward, really_of_update = allocated_peaks(config, layout, rank)
    assert of_backward == pytest.approx(really_of_backward, rel=0.01)
    assert of_update == pytest.approx(really_of_update, rel=0.01)


@pytest.fixture(scope="module")
def immediate() -> Footprint:
    """Return the trace of a job without changes."""
    return trace(4, {})


def test_categories_of_tensors_that_live_for_the_whole_step(immediate: Footprint) -> None:
    config, _, _ = a_job(4)
    built = build_job_model(config)
    # The first of 4 ranks has 16 of the 61 rows of each of two tables.
    local = sum(p.numel() for p in built.module.parameters()) * 4 // 4 + 3 * 32
    local += 3 * 32
    held = immediate.peaks[StepPoint(2, "optimizer", "")].by_category
    assert held[Category.PARAMETERS] == held[Category.GRADIENTS] == local
    assert held[Category.OPTIMIZER] == 2 * local


def test_deferred_accumulation_holds_whole_gradients_between_microbatches(immediate: Footprint) -> None:
    config, _, _ = a_job(4)
    whole = sum(p.numel() for p in build_job_model(config).module.parameters()) * 4
    for footprint, held in ((immediate, 0), (trace(4, {"gradient_accumulation": DEFERRED}), whole)):
        peak = footprint.peaks[StepPoint(1, "forward", "")]
        assert peak.by_category[Category.UNSHARDED_GRADIENTS] == held


def test_step_points_follow_the_model_forward_and_backward(immediate: Footprint) -> None:
    points = [point for point in immediate.peaks if point.microbatch == 0 and point.unit]
    modules = ["tok_embeddings", "layers.0", "layers.1", "norm", "output"]
    forth, back = [("forward", path) for path in modules], [("backward", path) for path in reversed(modules)]
    assert [(point.phase, point.unit) for point in points] == forth + back


def test_a_trace_restores_the_state_of_the_process() -> None:
    before = (torch.nn.functional.rms_norm, torch.UntypedStorage.resize_)
    trace(4, {}, "cuda")
    assert (torch.nn.functional.rms_norm, torch.UntypedStorage.resize_) == before
    assert not dist.is_initialized()


def test_a_trace_within_another_process_group_is_refused() -> None:
    with fake_process_group(2), pytest.raises(RuntimeError, match="has a process group, but a trace creates its own"):
        trace(4, {})
    assert not dist.is_initialized()


def life_of_a_sent_tensor() -> tuple[bool, bool]:
    """Return whether what this rank sends lives after the wait, and after its work was dropped."""
    if dist.get_rank() == 1:
        dist.recv(torch.empty(4), 0)
        return True, False
    sent = torch.ones(4)
    alive = weakref.ref(sent.untyped_storage())
    work = dist.isend(sent, 1)
    del sent
    work.wait()
    held = alive() is not None
    del work
    deadline = time.monotonic() + 60  # gloo's thread may still have it for a moment
    while alive() is not None and time.monotonic() < deadline:
        time.sleep(0.001)
    return held, alive() is not None


def test_a_trace_holds_what_it_sends_for_as_long_as_gloo() -> None:
    (of_gloo, _) = run_ranks(life_of_a_sent_tensor, 2)
    with fake_process_group(2), sends_held():
        assert life_of_a_sent_tensor() == of_gloo == (True, False)
    with fake_process_group(2):
        assert life_of_a_sent_tensor() == (False, False)
