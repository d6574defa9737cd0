"""All-reduces beside backward give the gradients that those give which FSDP2 waits for."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from tests.distributed import run_ranks
from tests.train.jobs import TINY_ARGS, sharded_model, this_rank
from titan_launch.accumulation.strategies import build_strategy
from titan_launch.config.job import JobConfig
from titan_launch.fsdp_state import parameter_groups
from titan_launch.parallel import replicas
from titan_launch.parallel.discard import discard_pending
from titan_launch.patches import replaced


def job(mode: str, reduce_dtype: str) -> JobConfig:
    return JobConfig.model_validate(
        {
            "model": {"args": {**TINY_ARGS}},
            "training": {"seq_len": 8},
            "precision": {"param_dtype": "bfloat16", "reduce_dtype": reduce_dtype},
            "gradient_accumulation": {"mode": mode},
            "parallelism": {"data_parallel_replicate_degree": 2},
        }
    )


def gradients(config: JobConfig, model: nn.Module, microbatches: int) -> list[Tensor]:
    """This rank's, read as soon as backward has returned."""
    strategy = build_strategy(config.gradient_accumulation)
    generator = torch.Generator().manual_seed(this_rank().rank)
    for index in range(microbatches):
        strategy.begin_microbatch(model, is_last=index == microbatches - 1)
        model(torch.randint(0, 61, (2, 8), generator=generator)).square().sum().backward()
    found = []
    for parameter in model.parameters():
        assert isinstance(parameter.grad, DTensor)
        found.append(parameter.grad.to_local().clone())
    model.zero_grad()
    return found


@contextmanager
def counted() -> Iterator[list[int]]:
    """How many all-reduces nothing has waited for yet, whenever one more is begun. The last rank is slow: it begins
    them late, so that the others' are not done by chance."""
    begun: list[int] = []
    add = replicas._Begun.add

    def noted(works: Any, work: dist.Work) -> None:
        add(works, work)
        begun.append(len(works._works))

    allreduce = replicas._Replicas.allreduce

    def slowly(group: Any, *args: Any) -> None:
        if this_rank().rank == this_rank().world_size - 1:
            time.sleep(0.02)
        allreduce(group, *args)

    with replaced(replicas._Begun, "add", noted), replaced(replicas._Replicas, "allreduce", slowly):
        yield begun


def compare_with_waiting(mode: str, reduce_dtype: str, microbatches: int) -> tuple[int, list[int]]:
    """Returns the number of units, and what `counted` counts in a step."""
    config = job(mode, reduce_dtype)
    model = sharded_model(config, 8)
    with counted() as begun:
        beside = gradients(config, model, microbatches)
    units = parameter_groups(model)
    for unit in units:
        info: Any = unit.mesh_info
        info.replicate_process_group = info.replicate_process_group._group
    waited = gradients(config, model, microbatches)
    assert all(torch.equal(own, other) for own, other in zip(beside, waited, strict=True))
    return len(units), begun


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("mode", ["immediate", "deferred", "deferred_all_reduce"])
def test_all_units_are_summed_beside_backward(mode: str, ranks: int) -> None:
    """4 ranks: two shards, twice."""
    for units, begun in run_ranks(compare_with_waiting, ranks, mode, "float32", 1):
        assert begun == list(range(1, units + 1))


@pytest.mark.parametrize("mode", ["immediate", "deferred", "deferred_all_reduce"])
def test_sums_that_are_added_to_others_are_waited_for(mode: str) -> None:
    """In `immediate` the first microbatch's are not, and the others' are."""
    for units, begun in run_ranks(compare_with_waiting, 2, mode, "float32", 3):
        assert begun == list(range(1, units + 1))


def test_sums_that_are_cast_are_waited_for() -> None:
    for _, begun in run_ranks(compare_with_waiting, 2, "deferred", "bfloat16", 2):
        assert begun == []


class FailedError(Exception):
    """Of a model."""


def fail_in_backward() -> bool:
    """Returns whether the backward after one that an error has ended gives what it should."""
    config = job("immediate", "float32")
    model = sharded_model(config, 8)
    right = gradients(config, model, 1)

    def fail(gradient: Tensor) -> None:
        raise FailedError

    def fail_after(module: nn.Module, args: object, output: Tensor) -> None:
        output.register_hook(fail)

    handle = model.get_submodule("layers.0").register_forward_hook(fail_after)
    with counted() as begun, pytest.raises(FailedError):
        gradients(config, model, 1)
    assert begun, "some units were on their way"
    handle.remove()
    discard_pending(model)
    with counted() as begun:
        again = gradients(config, model, 1)
    assert begun == list(range(1, len(begun) + 1)), "of the failed backward nothing is left"
    return all(torch.equal(own, other) for own, other in zip(again, right, strict=True))


def test_a_backward_that_fails_leaves_nothing_for_the_next() -> None:
    assert run_ranks(fail_in_backward, 2) == [True, True]


def backward_within_backward() -> bool:
    """A block is computed again and differentiated by a backward of its own, which ends first."""
    config = job("immediate", "float32")
    model = sharded_model(config, 8)
    right = gradients(config, model, 1)
    block = model.get_submodule("layers.1")
    forward = block.forward
    with replaced(block, "forward", lambda x: checkpoint(forward, x, use_reentrant=True)), counted() as begun:
        own = gradients(config, model, 1)
    assert len(begun) == len(parameter_groups(model))
    return all(torch.equal(first, second) for first, second in zip(own, right, strict=True))


def test_a_backward_within_another_loses_no_sum() -> None:
    assert run_ranks(backward_within_backward, 2) == [True, True]


def hooks_read_sums() -> bool:
    """What hooks of the sharded parameters are shown is what is left at the end."""
    config = job("immediate", "float32")
    model = sharded_model(config, 8)
    shown: dict[int, Tensor] = {}

    def show(parameter: Tensor) -> None:
        assert isinstance(parameter.grad, DTensor)
        shown[id(parameter)] = parameter.grad.to_local().clone()

    parameters = list(model.parameters())
    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(show)
    with counted() as begun:
        left = gradients(config, model, 1)
    assert not begun
    return all(torch.equal(shown[id(p)], own) for p, own in zip(parameters, left, strict=True))


def test_hooks_are_shown_sums() -> None:
    assert run_ranks(hooks_read_sums, 2) == [True, True]


def wait_in_vain(reduce_dtype: str) -> str:
    """What rank 0 is told when the other replica does not come."""
    config = job("immediate", reduce_dtype)
    model = sharded_model(config, 8)
    impatient = dist.new_group(timeout=timedelta(seconds=0.5))
    if this_rank().rank == 1:
        return ""
    for unit in parameter_groups(model):
        info: Any = unit.mesh_info
        info.replicate_process_group._group = impatient
    with pytest.raises(RuntimeError) as caught:
        gradients(config, model, 1)
    return str(caught.value)


@pytest.mark.parametrize("reduce_dtype", ["float32", "bfloat16"])
def test_the_error_is_gloo_s_beside_backward_and_in_it(reduce_dtype: str) -> None:
    message, _ = run_ranks(wait_in_vain, 2, reduce_dtype)
    assert "Timed out waiting 500ms" in message
