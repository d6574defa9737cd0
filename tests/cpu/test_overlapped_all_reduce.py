"""All-reduces that overlap with backward give the gradients of FSDP2's blocking ones, bit for bit."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from tests.distributed import run_ranks
from tests.sampling import rest_is_slow
from tests.tensors import assert_equal
from tests.train.jobs import TINY_ARGS, sharded_model, this_rank
from titan_launch.config.job import JobConfig
from titan_launch.core.patches import replaced
from titan_launch.cpu import overlapped_all_reduce as overlapped
from titan_launch.distributed.torch_private import parameter_groups
from titan_launch.parallel.fsdp import Accumulation, discard_pending


def built(mode: str = "immediate", reduce_dtype: str = "float32") -> tuple[JobConfig, nn.Module]:
    """Return the config of a job with two replicas, and its model on this rank."""
    config = JobConfig.model_validate(
        {
            "model": {"args": TINY_ARGS},
            "training": {"seq_len": 8},
            "precision": {"param_dtype": "bfloat16", "reduce_dtype": reduce_dtype},
            "gradient_accumulation": {"mode": mode},
            "parallelism": {"data_parallel_replicate_degree": 2},
        }
    )
    model = sharded_model(config, 8)
    overlapped.overlap_all_reduces(model)
    return config, model


def gradients(config: JobConfig, model: nn.Module, microbatches: int = 1) -> dict[str, Tensor]:
    """Return this rank's gradients by parameter, read as soon as backward has returned."""
    strategy = Accumulation(config.gradient_accumulation)
    generator = torch.Generator().manual_seed(this_rank().rank)
    for index in range(microbatches):
        strategy.begin_microbatch(model, is_last=index == microbatches - 1)
        model(torch.randint(0, 61, (2, 8), generator=generator)).square().sum().backward()
    found = {}
    for name, parameter in model.named_parameters():
        assert isinstance(parameter.grad, DTensor)
        found[name] = parameter.grad.to_local().clone()
    model.zero_grad()
    return found


@contextmanager
def counted() -> Iterator[list[int]]:
    """Count the pending all-reduces whenever another one is started. The last rank starts its all-reduces late, so that
    those of the others do not finish by chance."""
    begun: list[int] = []
    add = overlapped._PendingAllReduces.add

    def noted(works: Any, work: dist.Work) -> None:
        add(works, work)
        begun.append(len(works._works))

    allreduce = overlapped._OverlappingGroup.allreduce

    def slowly(group: Any, *args: Any) -> None:
        if this_rank().rank == this_rank().world_size - 1:
            time.sleep(0.02)
        allreduce(group, *args)

    with (
        replaced(overlapped._PendingAllReduces, "add", noted),
        replaced(overlapped._OverlappingGroup, "allreduce", slowly),
    ):
        yield begun


def compare_with_waiting(mode: str, reduce_dtype: str, microbatches: int) -> tuple[int, list[int]]:
    """Return the number of units, and the result of `counted` for a step."""
    config, model = built(mode, reduce_dtype)
    with counted() as begun:
        beside = gradients(config, model, microbatches)
    units = parameter_groups(model)
    for unit in units:
        info: Any = unit.mesh_info
        info.replicate_process_group = info.replicate_process_group._group
    waited = gradients(config, model, microbatches)
    assert_equal(beside, waited)
    return len(units), begun


MODES = ("immediate", "deferred", "deferred_all_reduce")


def compare_modes(microbatches: int) -> list[tuple[int, list[int]]]:
    """Return the results of `compare_with_waiting` for each mode, in float32."""
    return [compare_with_waiting(mode, "float32", microbatches) for mode in MODES]


@pytest.mark.parametrize("ranks", rest_is_slow([2, 4]))
def test_the_all_reduces_of_all_units_overlap_with_backward(ranks: int) -> None:
    """On 4 ranks there are two replicas of two shards."""
    for results in run_ranks(compare_modes, ranks, 1):
        for mode, (units, begun) in zip(MODES, results, strict=True):
            assert begun == list(range(1, units + 1)), mode


def test_all_reduces_that_are_added_to_earlier_gradients_do_not_overlap() -> None:
    """In mode `immediate`, the all-reduces of the first microbatch overlap and those of later microbatches do not."""
    for results in run_ranks(compare_modes, 2, 3):
        for mode, (units, begun) in zip(MODES, results, strict=True):
            assert begun == list(range(1, units + 1)), mode


def test_all_reduces_whose_result_is_cast_do_not_overlap() -> None:
    for _, begun in run_ranks(compare_with_waiting, 2, "deferred", "bfloat16", 2):
        assert begun == []


def test_the_dtype_of_the_trained_parameters_decides_whether_the_result_is_cast() -> None:
    """A frozen parameter may have another dtype (`precision.frozen_storage_dtype`)."""
    frozen = nn.Parameter(torch.ones(1, dtype=torch.bfloat16), requires_grad=False)
    trained = nn.Parameter(torch.ones(1))
    unit = SimpleNamespace(fsdp_params=[SimpleNamespace(sharded_param=p) for p in (frozen, trained)])
    group = overlapped._OverlappingGroup(overlapped._PendingAllReduces(), cast(Any, None), unit)
    found: list[bool] = []
    trained.register_hook(lambda g: found.extend(group._is_read_at_once(g.to(p.dtype)) for p in (frozen, trained)))
    trained.sum().backward()
    assert found == [True, False]


class FailedError(Exception):
    """An error raised by a model."""


def fail_in_backward() -> None:
    """Compare the backward after a failed one with the expected gradients."""
    config, model = built()
    right = gradients(config, model)

    def fail(gradient: Tensor) -> None:
        raise FailedError

    def fail_after(module: nn.Module, args: object, output: Tensor) -> None:
        output.register_hook(fail)

    handle = model.get_submodule("layers.0").register_forward_hook(fail_after)
    with counted() as begun, pytest.raises(FailedError):
        gradients(config, model)
    assert begun, "all-reduces of some units were pending"
    handle.remove()
    discard_pending(model)
    with counted() as begun:
        again = gradients(config, model)
    assert begun == list(range(1, len(begun) + 1)), "an all-reduce of the failed backward is still pending"
    assert_equal(again, right)


def test_a_failed_backward_leaves_no_pending_all_reduce() -> None:
    run_ranks(fail_in_backward, 2)


def backward_within_backward() -> None:
    """Checkpoint a block and differentiate it in a backward of its own, which ends before the outer one."""
    config, model = built()
    right = gradients(config, model)
    block = model.get_submodule("layers.1")
    forward = block.forward
    with replaced(block, "forward", partial(checkpoint, forward, use_reentrant=True)), counted() as begun:
        own = gradients(config, model)
    assert len(begun) == len(parameter_groups(model))
    assert_equal(own, right)


def test_a_nested_backward_loses_no_all_reduce() -> None:
    run_ranks(backward_within_backward, 2)


def hooks_read_sums() -> None:
    """Compare the gradients that hooks of the sharded parameters receive with the final ones."""
    config, model = built()
    shown: dict[str, Tensor] = {}

    def show(name: str, parameter: Tensor) -> None:
        assert isinstance(parameter.grad, DTensor)
        shown[name] = parameter.grad.to_local().clone()

    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(partial(show, name))
    with counted() as begun:
        left = gradients(config, model)
    assert not begun
    assert_equal(shown, left)


def test_hooks_receive_reduced_gradients() -> None:
    run_ranks(hooks_read_sums, 2)


def wait_in_vain(reduce_dtype: str) -> str:
    """Return the error on rank 0 when the other replica does not join the all-reduce."""
    config, model = built(reduce_dtype=reduce_dtype)
    impatient = dist.new_group(timeout=timedelta(seconds=0.5))
    if this_rank().rank == 1:
        return ""
    for unit in parameter_groups(model):
        info: Any = unit.mesh_info
        info.replicate_process_group._group = impatient
    with pytest.raises(RuntimeError) as caught:
        gradients(config, model)
    return str(caught.value)


@pytest.mark.parametrize("reduce_dtype", ["float32", "bfloat16"])
def test_an_all_reduce_that_fails_raises_the_error_of_gloo(reduce_dtype: str) -> None:
    message, _ = run_ranks(wait_in_vain, 2, reduce_dtype)
    assert "Timed out waiting 500ms" in message
