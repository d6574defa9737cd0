"""Cost of a step outside forward and backward: a few collectives, and as many operations for a deep model as for a
shallow one."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

from tests.distributed import run_ranks
from tests.tensors import Operations
from tests.train.jobs import this_rank, tiny_job
from titan_launch.config.job import JobConfig
from titan_launch.train.build import build_run
from titan_launch.train.loop import train_one_step
from titan_launch.train.step import forward_backward


def quiet_step(job: dict[str, Any]) -> dict[str, int]:
    """Return the operations of a third step outside forward and backward, with collectives and without those of
    FSDP2."""
    with ExitStack() as stack:
        run = build_run(JobConfig.model_validate(job), this_rank(), stack)
        for _ in range(2):
            train_one_step(run)
            run.control.agree()
        operations = Operations()

        def uncounted(*args: Any) -> Any:
            operations.is_counting = False
            try:
                return forward_backward(*args)
            finally:
                operations.is_counting = True

        stack.enter_context(mock.patch("titan_launch.train.step.forward_backward", uncounted))
        with operations:
            run.step([next(run.batches.train)])
            run.control.agree()
        return dict(operations.counts)


def test_a_step_has_few_operations_outside_forward_and_backward(tmp_path: Path) -> None:
    def job(layers: int) -> dict[str, Any]:
        return tiny_job(
            tmp_path / str(layers),
            model={"args": {"n_layers": layers}},
            training={"global_batch_size": 2, "steps": 9},
            metrics={"log_freq": 9},
            debug={"audit_precision": False},
            checkpoint={"enable": False},
        )

    shallow, deep = (run_ranks(quiet_step, 2, job(layers))[0] for layers in (1, 4))
    assert shallow == deep  # norms, clipping and update handle all parameters together
    collectives = {name: count for name, count in deep.items() if name.startswith(("c10d", "_c10d"))}
    # The count of targets, the gradient norm, the step guard, and the common decisions of ranks:
    assert collectives == {"c10d.allreduce_": 4}
    assert "_local_scalar_dense" not in deep  # the host reads nothing from the device
