"""The gradients of a sharded optimizer leave for the other replicas while the last backward of a step still runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from tests.distributed import run_ranks
from tests.sampling import rest_is_slow
from tests.tensors import assert_equal, full_state
from tests.train.jobs import run_job, this_rank, tiny_job
from tests.train.test_any_module import Text
from titan_launch.config.job import JobConfig
from titan_launch.distributed.dtensor import local_tensor
from titan_launch.distributed.torch_private import ALL_GATHER, REDUCE_SCATTER
from titan_launch.optim.registry import replicas_of
from titan_launch.optim.replica_shards import ReplicaShards
from titan_launch.train.build import build_run
from titan_launch.train.loop import train_one_step
from titan_launch.train.run import Run

ACCUMULATED: dict[str, Any] = {"global_batch_size": 8, "max_norm": 0.0}
BLOCKS = ("layers.1", "layers.0")
SHARDED: dict[str, Any] = {"data_parallel_replicate_degree": 2, "shard_optimizer_over_replicas": True}
OFFLOADED = {**ACCUMULATED, "enable_cpu_offload": True}


def build(job: dict[str, Any], stack: ExitStack) -> Run:
    return build_run(JobConfig.model_validate(job), this_rank(), stack)


def events_of_step(job: dict[str, Any], blocks: Sequence[str]) -> list[str]:
    """Train two steps. Return the exchanges of the second, the starts of the backwards of `blocks`, and the end of the
    last backward with the number of parameters that still have the gradient of a whole shard."""
    events: list[str] = []
    with ExitStack() as stack:
        run = build(job, stack)
        replicas = replicas_of(run.optimizer)
        assert replicas is not None
        reduce_gradients = replicas.reduce_gradients

        def end_of_backward() -> None:
            events.append(f"end, {sum(p.grad is not None for p in run.model.parameters())} whole gradients")
            reduce_gradients()
            for parameter in (p for p in run.model.parameters() if p.grad is not None):
                assert parameter.grad.shape == parameter.shape
                assert local_tensor(parameter.grad).shape == replicas.chunk(parameter).shape

        def watch_backward(path: str, module: nn.Module, args: Any, output: Tensor) -> None:
            if output.requires_grad:
                output.register_hook(lambda _: events.append(path))

        replicas.reduce_gradients = end_of_backward  # type: ignore[method-assign]
        for path in blocks:
            run.model.get_submodule(path).register_forward_hook(partial(watch_backward, path))
        stack.enter_context(replicas.watched(lambda kind, *_: events.append(kind)))
        train_one_step(run)
        events.clear()
        train_one_step(run)
    return events


@pytest.mark.parametrize("mode", ["immediate", "deferred"])
def test_units_leave_in_the_last_backward_as_soon_as_they_are_reduced(tmp_path: Path, mode: str) -> None:
    """With gloo the hooks of FSDP2 run in the order of backward, so each block leaves before the backward of the next
    one ends. The embedding is reduced at the end of backward."""
    job = tiny_job(tmp_path, training=ACCUMULATED, parallelism=SHARDED, gradient_accumulation={"mode": mode})
    seen = run_ranks(events_of_step, 4, job, BLOCKS)
    assert seen[1:] == seen[:-1]
    in_last = [REDUCE_SCATTER, "layers.1", REDUCE_SCATTER, "layers.0", REDUCE_SCATTER, REDUCE_SCATTER]
    assert seen[0] == [*BLOCKS, *in_last, "end, 0 whole gradients", *[ALL_GATHER] * 4]


def test_gradients_in_host_memory_leave_after_backward(tmp_path: Path) -> None:
    job = tiny_job(tmp_path, training=OFFLOADED, parallelism=SHARDED)
    events = run_ranks(events_of_step, 4, job, BLOCKS)[0]
    (end,) = (index for index, event in enumerate(events) if event.startswith("end"))
    assert events[:end] == [*BLOCKS, *BLOCKS] and events[end] != "end, 0 whole gradients"


class Odd(Text):
    """A model that runs its first block twice, and uses neither its second block nor a parameter of its third."""

    width = 64
    """The parts that replicas update then have multiples of 16 elements. PyTorch's AdamW rounds the elements that do
    not fill a vector of the CPU differently."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks.append(self.block())
        self.blocks[2].register_parameter("unused", nn.Parameter(self.output.weight.detach()[:4].clone()))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for index in (0, 2, 0):
            x = x + self.blocks[index](x)
        return self.output(x)


def train_both(folder: Path, model: dict[str, Any], training: dict[str, Any], always_last: bool = False) -> None:
    """Compare FSDP2's own HSDP with an optimizer that is sharded over the replicas. `always_last`: gradients leave in
    every microbatch, so that each unit is reduced again after it has left."""
    begin = ReplicaShards.begin_microbatch
    if always_last:  # the rank ends with the test
        ReplicaShards.begin_microbatch = lambda self, is_last: begin(self, True)  # type: ignore[method-assign]
    jobs = (
        tiny_job(
            folder / str(is_sharded),
            training=training,
            parallelism={**SHARDED, "shard_optimizer_over_replicas": is_sharded},
            gradient_accumulation={"mode": "immediate"},
        )
        for is_sharded in (False, True)
    )
    whole, sharded = (run_job({**job, "model": {**job["model"], **model}}) for job in jobs)
    assert_equal(sharded, whole)


def test_unused_parameters_leave_after_backward_and_train_as_without_sharding(tmp_path: Path) -> None:
    model = {"name": f"{__name__}:Odd", "args": {}}
    job = {**tiny_job(tmp_path, training={"max_norm": 0.0}, parallelism=SHARDED), "model": model}
    events = run_ranks(events_of_step, 4, job, ("blocks.0", "blocks.2"))[0]
    at_end = ["end, 2 whole gradients", REDUCE_SCATTER, *[ALL_GATHER] * 4]
    assert events == ["blocks.0", "blocks.2", "blocks.0", REDUCE_SCATTER, REDUCE_SCATTER, *at_end]
    run_ranks(train_both, 4, tmp_path, model, {"max_norm": 0.0})


@pytest.mark.parametrize("ranks", rest_is_slow([2, 4]))
def test_units_that_are_reduced_again_after_they_have_left_are_summed(tmp_path: Path, ranks: int) -> None:
    """Both then sum each microbatch over the replicas, and add up these sums: the bits are those of `immediate`. On
    four ranks, parameters are also sharded within a replica."""
    run_ranks(train_both, ranks, tmp_path, {}, ACCUMULATED, True)


class Abandoned(BaseException):
    """An exception that, like KeyboardInterrupt, is not an Exception."""


def abandon_and_repeat(job: dict[str, Any]) -> None:
    """Compare two runs. In the second, all ranks abandon a step after some units have left, and repeat it."""
    states = []
    for is_abandoned in (False, True):
        with ExitStack() as stack:
            run = build(job, stack)
            replicas = replicas_of(run.optimizer)
            assert replicas is not None
            microbatches = [next(run.batches.train) for _ in range(run.job.layout.num_microbatches)]
            run.step(microbatches)
            if is_abandoned:
                with pytest.raises(Abandoned), replicas.watched(failing_at_third()):
                    run.step(microbatches)
            run.step(microbatches)
            states.append(full_state(run.model))
    assert_equal(*states)


def failing_at_third() -> Callable[[str, Tensor, Tensor], None]:
    """Return a watcher that abandons a step before its third exchange."""
    exchanges: list[str] = []

    def watch(kind: str, *_: Tensor) -> None:
        exchanges.append(kind)
        if len(exchanges) == 3:
            raise Abandoned

    return watch


def test_an_abandoned_step_leaves_nothing_behind(tmp_path: Path) -> None:
    run_ranks(abandon_and_repeat, 2, tiny_job(tmp_path, training=ACCUMULATED, parallelism=SHARDED))
