"""The trace engine: traces of two depths instead of the full model, traffic, and models that cannot be traced."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.sampling import rest_is_slow
from tests.trace.traces import FP32_NORMS, a_job, planned
from titan_launch.core.errors import ConfigError
from titan_launch.plan.communication import Traffic
from titan_launch.plan.job import Choice
from titan_launch.plan.memory.ledger import Footprint
from titan_launch.trace import trace_engine as depth
from titan_launch.trace.trace_engine import TraceEngine

CONV = {"name": "examples.conv_lm:build", "args": {"vocab_size": 61, "dim": 16, "n_layers": 8}}
LLAMA = {"args": {"n_layers": 7}}
DEEP: dict[str, dict[str, Any]] = {
    "Llama": {"model": LLAMA, "training": {"global_batch_size": 4}},
    "Llama, deferred, one unit for all norms": {
        "model": LLAMA,
        "precision": FP32_NORMS,
        "gradient_accumulation": {"mode": "deferred"},
        "training": {"global_batch_size": 8},
    },
    "Llama, every second block checkpointed": {
        "model": {"args": {"n_layers": 13}},
        "training": {"global_batch_size": 4},
        "activation_checkpoint": {"mode": "selective", "selective_ac_option": 2},
    },
    "Llama, one unit for attention, whose reduction is the peak only in a deep model": {
        "model": {"args": {"n_layers": 9}},
        "activation_checkpoint": {"mode": "full"},
        "gradient_accumulation": {"mode": "immediate", "keep_params_unsharded": True},
        "precision": {"rules": [{"match": "layers.*.attention", "param_dtype": "float32"}]},
        "training": {"global_batch_size": 8},
    },
    "Llama, one block in fp32": {
        "model": {"args": {"n_layers": 12}},
        "training": {"global_batch_size": 4},
        "precision": {"param_dtype": "bfloat16", "rules": [{"match": "layers.1", "param_dtype": "float32"}]},
    },
    "Llama, one block with a learning rate of its own": {
        "model": {"args": {"n_layers": 9}},
        "training": {"global_batch_size": 4},
        "optimizer": {"implementation": "foreach", "param_groups": [{"match": "layers.1.**", "lr_factor": 0.5}]},
    },
    "a user's own": {"model": CONV},
    "a user's own, full activation checkpointing": {"model": CONV, "activation_checkpoint": {"mode": "full"}},
}


@pytest.fixture
def traced_blocks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the number of blocks of each trace of a test, in order."""
    seen: list[int] = []

    def trace_step(config: Any, built: Any, plan: Any, layout: Any, kernels: Any, rank: int) -> Any:
        seen.append(len(plan.inventory.blocks))
        return original(config, built, plan, layout, kernels, rank)

    original = depth.trace_step
    monkeypatch.setattr(depth, "trace_step", trace_step)
    return seen


def ask(sections: dict[str, Any], ranks: int = 4) -> tuple[Footprint, Traffic]:
    config, layout, choice = a_job(ranks, **sections)
    traced = TraceEngine(config, layout, "cuda")
    return traced(choice), traced.traffic(choice)


@pytest.mark.parametrize("name", rest_is_slow(list(DEEP), len(DEEP)))
def test_two_depths_extrapolated_equal_the_full_model(
    name: str, traced_blocks: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    footprint, traffic = ask(DEEP[name])
    is_own = ":" in DEEP[name].get("model", {}).get("name", "")
    assert len(traced_blocks) == 2 + is_own  # a third depth verifies that the model grows evenly
    monkeypatch.setattr(depth, "find_shortcut", lambda *_: None)
    whole, traffic_of_whole = ask(DEEP[name])
    assert traced_blocks[-1] > max(traced_blocks[:-1])
    assert traffic == traffic_of_whole
    assert footprint.peaks == {point: whole.peaks[point] for point in footprint.peaks}
    assert (footprint.peak_bytes, footprint.peak_point) == (whole.peak_bytes, whole.peak_point)


def test_a_model_that_counts_its_blocks_is_traced_with_all_blocks(traced_blocks: list[int]) -> None:
    counted, _ = ask({"model": {"name": "tests.trace.models:Chain", "args": {"n_layers": 7, "counts": True}}})
    assert traced_blocks == [5, 7]  # the last block differs from the others
    plain, _ = ask({"model": {"name": "tests.trace.models:Chain", "args": {"n_layers": 7}}})
    assert counted.peak_bytes == plain.peak_bytes


@pytest.mark.parametrize(("dense", "blocks"), rest_is_slow([("outputs", [5, 6, 8]), ("values", [5, 6, 7, 8])]))
def test_a_model_that_grows_unevenly_is_traced_with_all_blocks(
    dense: str, blocks: list[int], traced_blocks: list[int]
) -> None:
    """The input of every layer has the outputs of all earlier layers, so memory grows with the square of the depth.

    Gradients of the outputs make each backward longer, which two depths show. Their values only make it larger.
    """
    model = {"name": "tests.trace.models:Chain", "args": {"n_layers": 8, "dense": dense}}
    ask({"model": model, "training": {"seq_len": 512}})
    assert traced_blocks == blocks


@pytest.mark.parametrize(
    ("mode", "num_microbatches"),
    rest_is_slow([("immediate", 7), ("immediate", 1), ("deferred_all_reduce", 7), ("deferred", 3)]),
)
def test_collectives_on_hsdp_are_the_planned_ones(mode: str, num_microbatches: int) -> None:
    sections: dict[str, Any] = {
        "parallelism": {"data_parallel_replicate_degree": 2},
        "gradient_accumulation": {"mode": mode},
        "training": {"global_batch_size": 4 * num_microbatches},
        "precision": FP32_NORMS,
    }
    config, layout, _ = a_job(4, **sections)
    counted = ask(sections)[1]
    assert counted == planned(config, layout, "cuda")[1]
    assert counted.all_reduce_bytes > 0


def test_a_choice_overrides_the_modes_of_the_job(traced_blocks: list[int]) -> None:
    config, layout, choice = a_job(2)
    _, _, other = a_job(2, activation_checkpoint={"mode": "full"}, gradient_accumulation={"mode": "deferred"})
    traced = TraceEngine(config, layout, "cpu")
    chosen = Choice(other.accumulation, choice.activation_checkpoint)
    footprints = [traced(each) for each in (choice, chosen, choice)]
    assert footprints[0] is footprints[2] and len(traced_blocks) == 2
    assert footprints[1].peak_bytes > footprints[0].peak_bytes


def test_a_trace_of_1024_ranks_costs_no_more() -> None:
    footprint, traffic = ask({"training": {"global_batch_size": 1024}}, ranks=1024)
    assert footprint.peak_bytes > 0 and traffic.collectives.all_gathers == 5


LIBRARY = torch.library.Library("titan_tests", "DEF")
LIBRARY.define("without_fake(Tensor x) -> Tensor")


def reason(does: str) -> str:
    """Return the reason why a model whose forward does this (see `tests.trace.models`) cannot be traced."""
    config, layout, choice = a_job(2, model={"name": "tests.trace.models:Chain", "args": {"n_layers": 1, "does": does}})
    with pytest.raises(ConfigError) as caught:
        TraceEngine(config, layout, "cuda")(choice)
    (problem,) = caught.value.problems
    assert (problem.key, problem.value) == (("model", "name"), "tests.trace.models:Chain")
    return problem.reason


@pytest.mark.parametrize(
    ("does", "operation", "line"),
    rest_is_slow(
        [
            ("item", "aten._local_scalar_dense (tensor.item(), a tensor as a number or condition)", '"item": '),
            ("condition", "aten._local_scalar_dense", '"condition": '),
            ("numpy", "tensor.numpy()", '"numpy": '),
            ("nonzero", "aten.nonzero", '"nonzero": '),
            ("unsupported", "titan_tests.without_fake.default", '"unsupported": '),
            ("mask", "aten.nonzero (torch.nonzero, or a mask as an index)", '"mask": '),
        ]
    ),
)
def test_an_operation_that_a_trace_cannot_run_is_named_with_its_line(does: str, operation: str, line: str) -> None:
    printed = reason(does)
    assert printed.startswith(f"cannot be traced: {operation}")
    problem = "is not supported by PyTorch's fake tensors" if does == "unsupported" else "needs the values of a tensor"
    location = printed.split(" at ")[1].split(f" {problem}")[0]
    file, number = location.rsplit(":", 1)
    with open(file) as stream:
        assert line in stream.readlines()[int(number) - 1]


def test_another_error_in_a_trace_is_shown_with_its_traceback() -> None:
    printed = reason("shape")
    assert printed.startswith("failed in a trace, on tensors")
    assert "tests/trace/models.py" in printed and "must have same reduction dim" in printed
