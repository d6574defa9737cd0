"""A step that is abandoned between its microbatches leaves nothing behind, in every accumulation mode.

A forward without a backward changes nothing between microbatches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import cycle, islice
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from tests.distributed import run_ranks
from tests.sampling import rest_is_slow
from tests.tensors import assert_equal, full_state
from tests.train.jobs import TINY_ARGS, sharded_model, this_mesh, this_rank
from titan_launch.config.job import JobConfig
from titan_launch.config.sections.loss import LossConfig
from titan_launch.config.sections.run import DebugConfig
from titan_launch.core.patches import replaced
from titan_launch.core.torch_release import torch_release
from titan_launch.data.sources import Batch
from titan_launch.distributed.dtensor import local_tensor
from titan_launch.distributed.torch_private import parameter_group
from titan_launch.loss.cross_entropy import CrossEntropy
from titan_launch.optim.registry import build_optimizer
from titan_launch.parallel.fsdp import Accumulation, discard_pending, in_evaluation_mode, without_backward
from titan_launch.train.health.step_guard import StepGuard
from titan_launch.train.step import MicrobatchesInTurn, TrainStep, Update

SEQ_LEN = 8
CHECKPOINTING: list[dict[str, Any]] = [
    {"mode": "none"},
    {"mode": "full"},
    {"mode": "selective"},
    {"mode": "selective", "selective_ac_option": 2},
    {"mode": "full"},
]


def jobs(replicate: int) -> Iterator[JobConfig]:
    """Yield jobs for every accumulation mode, with sharded and with unsharded parameters.

    FSDP has jobs with an fp32 unit of norms and jobs with BatchNorm; HSDP alternates between the two. Activation
    checkpointing modes alternate. Every seventh job of FSDP still has each mode, each norm, and both kinds of
    parameters.
    """
    checkpointing, norms = cycle(CHECKPOINTING), [("rmsnorm", "RMSNorm"), ("batchnorm", "BatchNorm")]
    for mode in (*(["deferred_all_reduce"] if replicate > 1 else []), "immediate", "deferred"):
        for unsharded in (False, True):
            for norm, kind in norms[unsharded : unsharded + 1] if replicate > 1 else norms:
                yield job(
                    mode, unsharded, norm, [{"type": kind, "param_dtype": "float32"}], next(checkpointing), replicate
                )
    if this_rank().world_size > 1:
        yield expert_job(replicate)


def expert_job(replicate: int) -> JobConfig:
    """Return a job with expert parallelism."""
    plain = job("deferred", False, "rmsnorm", [], {"mode": "full"}, replicate)
    args = {**TINY_ARGS, "head_dim": 8, "experts": {"num_experts": 4, "top_k": 2, "hidden_dim": 16}}
    model = plain.model.model_copy(update={"name": "qwen3_moe", "args": args})
    parallelism = plain.parallelism.model_copy(update={"expert_parallel_degree": 2})
    return plain.model_copy(update={"model": model, "parallelism": parallelism})


def job(
    mode: str, unsharded: bool, norm: str, rules: list[dict[str, str]], checkpointing: dict[str, Any], replicate: int
) -> JobConfig:
    return JobConfig.model_validate(
        {
            "model": {"args": {**TINY_ARGS, "norm": norm}},
            "training": {"seq_len": SEQ_LEN},
            "precision": {"param_dtype": "bfloat16", "rules": rules},
            "gradient_accumulation": {"mode": mode, "keep_params_unsharded": unsharded},
            "activation_checkpoint": checkpointing,
            "parallelism": {"data_parallel_replicate_degree": replicate},
            "optimizer": {"lr": 1e-2},
        }
    )


PLACES = [("forward", 2), ("checkpointing", 1), ("backward", 2), ("checkpointing", 2), ("backward", 3)]
"""Points at which steps of three microbatches are abandoned: the phase, and the number of the microbatch."""


class Trained:
    """A job's model, optimizer and accumulation strategy on this rank."""

    def __init__(self, config: JobConfig):
        device = this_rank().device
        self.model = sharded_model(config, SEQ_LEN)
        optimizer = build_optimizer(self.model, config.optimizer)
        for group in optimizer.param_groups:
            group["lr"] = config.optimizer.lr
        accumulation = Accumulation(config.gradient_accumulation)
        self.step = TrainStep(
            self.model,
            MicrobatchesInTurn(self.model, accumulation, device),
            CrossEntropy(LossConfig(chunks=3)),
            Update(optimizer, StepGuard(DebugConfig(), device), 1.0),
            this_mesh(),
            device,
        )

    def state(self) -> dict[str, Tensor]:
        """Return parameters and running statistics, without the sums that a step resets."""
        return {name: t for name, t in full_state(self.model).items() if not name.endswith((".load", "losses"))}


def microbatches(step: int, count: int = 3) -> list[Batch]:
    generator = torch.Generator().manual_seed(100 * step + this_rank().rank)
    tokens = torch.randint(0, 61, (count, 4, SEQ_LEN + 1), generator=generator)
    return [Batch(t[:, :-1], t[:, 1:]) for t in tokens]


class Abandoned(BaseException):
    """An exception that, like KeyboardInterrupt, is not an Exception."""


@contextmanager
def failing(model: nn.Module, microbatch: int, where: str) -> Iterator[None]:
    """Raise `Abandoned` in the last block, while this microbatch runs forward, backward or its second forward."""
    block, forwards, in_block = model.get_submodule("layers.1"), [0], [0]

    def count(*_: Any) -> None:
        forwards[0] += 1
        in_block[0] = 0

    def enter(*_: Any) -> None:
        in_block[0] += 1
        if forwards[0] == microbatch and in_block[0] == {"forward": 1, "checkpointing": 2}.get(where):
            raise Abandoned

    def leave(module: nn.Module, args: Any, output: Tensor) -> None:
        if forwards[0] == microbatch and where == "backward":
            output.register_hook(fail)

    def fail(grad: Tensor) -> None:
        raise Abandoned

    inner = next(module for name, module in block.named_modules() if name in ("feed_forward.w2", "moe.router"))
    first = model.get_submodule("layers.0")
    handles = [model.register_forward_pre_hook(count), inner.register_forward_pre_hook(enter)]
    handles.append(first.register_forward_hook(leave))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def assert_nothing_is_left(model: nn.Module) -> None:
    for module in filter(lambda module: isinstance(module, FSDPModule), model.modules()):
        group = parameter_group(module)
        if group is not None:
            assert group.is_sharded and group._all_gather_result is None
            assert all(t.untyped_storage().size() == 0 for p in group.fsdp_params for t in p.all_gather_outputs)
    assert all(parameter.grad is None for parameter in model.parameters())


def abandon_in_all_modes(replicate: int, by_hand: bool, every: int) -> None:
    if by_hand:
        del FSDPModule.reset_iter_state  # this rank ends with the test
    for config in islice(jobs(replicate), 0, None, every):
        expected, trained = Trained(config), Trained(config)
        for number in range(2):
            expected.step(microbatches(number))
        trained.step(microbatches(0))
        before = trained.state()
        for where, microbatch in PLACES[:: 1 if config.activation_checkpoint.mode == "full" else 2]:
            with failing(trained.model, microbatch, where), pytest.raises(Abandoned):
                trained.step(microbatches(7))
            assert_nothing_is_left(trained.model)
        assert_equal(trained.state(), before)
        trained.step(microbatches(1))
        assert_equal(trained.state(), expected.state())


@pytest.mark.parametrize(
    ("ranks", "replicate", "by_hand"),
    [
        (2, 1, False),
        pytest.param(1, 1, False, marks=pytest.mark.slow),
        pytest.param(2, 1, True, marks=pytest.mark.slow),
        pytest.param(4, 2, False, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_an_abandoned_step_changes_no_bit_of_the_next(ranks: int, replicate: int, by_hand: bool, every: int) -> None:
    """Every seventh job, or all. `by_hand` uses the clean-up that torch 2.11 and 2.12 need and 2.13 and 2.14 accept."""
    if by_hand and torch_release() not in ((2, 13), (2, 14)):
        pytest.skip("only torch 2.13 and 2.14 can reset an iteration in both ways")
    run_ranks(abandon_in_all_modes, ranks, replicate, by_hand, every)


class LossWithForward(CrossEntropy):
    """A loss with a forward without a backward before each forward of training, as with a reference model."""

    def __init__(self, model: nn.Module):
        super().__init__(LossConfig(chunks=3))
        self._model = model

    @torch.no_grad()
    def prepare(self, inputs: Tensor, targets: Tensor, documents: Tensor | None) -> None:
        with in_evaluation_mode(self._model), self.given(targets):
            self._model(inputs.flip(0))


def evaluate_between_microbatches(replicate: int, every: int) -> None:
    for config in islice(jobs(replicate), 0, None, every):
        expected, trained = Trained(config), Trained(config)
        trained.step.loss = LossWithForward(trained.model)
        for number in range(2):
            norms = [each.step(microbatches(number)).grad_norm.item() for each in (expected, trained)]
            assert norms[0] == norms[1] > 0, config.gradient_accumulation
        assert_equal(trained.state(), expected.state())


@pytest.mark.parametrize(("ranks", "replicate"), rest_is_slow([(2, 1), (1, 1), (4, 2)], 3))
@pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_a_forward_without_a_backward_changes_no_gradient_of_the_step(ranks: int, replicate: int, every: int) -> None:
    run_ranks(evaluate_between_microbatches, ranks, replicate, every)


def prefetch_for_a_module_that_does_not_run() -> None:
    model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(3)))
    first, second, _ = model
    for module in (*model, model):
        fully_shard(module, mesh=this_mesh().fsdp)
    first.set_modules_to_forward_prefetch([second])  # type: ignore[operator]
    inputs, weight = torch.ones(1, 4), torch.zeros(4, 4)

    def forward(skips: bool) -> Tensor:
        """Run the model, or all of it but the second layer."""
        run = nn.Sequential.forward if not skips else (lambda own, x: own[2](own[0](x)))
        with replaced(nn.Sequential, "forward", run), torch.no_grad(), without_backward(model):
            output: Tensor = model(inputs)
        return output

    forward(skips=False)
    forward(skips=True)
    with torch.no_grad():
        local_tensor(second.weight).copy_(weight.chunk(2)[this_rank().rank])
    assert forward(skips=False).abs().max() == 0, "an all-gather of the old weight was used"


def test_an_all_gather_ahead_of_a_module_that_does_not_run_is_not_used_later() -> None:
    run_ranks(prefetch_for_a_module_that_does_not_run, 2)


def abandon_before_anything_has_run() -> None:
    config = next(jobs(1))
    trained = Trained(config)
    discard_pending(trained.model)
    expected = Trained(config)
    for each in (trained, expected):
        each.step(microbatches(0))
    assert_equal(trained.state(), expected.state())


def test_a_model_that_has_not_run_yet_has_nothing_to_discard() -> None:
    run_ranks(abandon_before_anything_has_run, 1)


def abandon_in_an_all_gather() -> None:
    """Interrupt an all-gather at the fifth of a block's nine parameters, so that some parameters are unsharded and
    others not."""
    config = job("deferred", False, "rmsnorm", [], {"mode": "none"}, 1)
    expected, trained = Trained(config), Trained(config)
    for each in (trained, expected):
        each.step(microbatches(0))
    block = trained.model.get_submodule("layers.1")
    assert isinstance(block, FSDPModule)
    parameter = parameter_group(block).fsdp_params[4]  # type: ignore[union-attr]
    for method in ("init_unsharded_param", "to_unsharded"):
        with pytest.MonkeyPatch.context() as patch, pytest.raises(Abandoned):
            patch.setattr(parameter, method, raise_abandoned)
            trained.step(microbatches(7))
        assert_nothing_is_left(trained.model)
    for each in (trained, expected):
        each.step(microbatches(1))
    assert_equal(trained.state(), expected.state())


def raise_abandoned() -> None:
    raise Abandoned


def test_an_interrupted_all_gather_is_freed() -> None:
    run_ranks(abandon_in_an_all_gather, 1)
    run_ranks(abandon_in_an_all_gather, 2)


def abandon_in_the_update() -> None:
    trained = Trained(job("deferred", False, "rmsnorm", [], {"mode": "none"}, 1))
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Abandoned):
        patch.setattr("titan_launch.train.step.step_unless", lambda *_: raise_abandoned())
        trained.step(microbatches(0))
    assert_nothing_is_left(trained.model)


def test_an_update_that_is_interrupted_leaves_no_gradients_to_the_next_step() -> None:
    run_ranks(abandon_in_the_update, 1)


def leave_without_discarding(reset: Callable[[Any], None]) -> bool:
    """Return True if `reset` cleans up after an abandoned step, so that the next step has the usual result."""
    config = job("deferred", False, "rmsnorm", [], {"mode": "none"}, 1)
    expected, trained = Trained(config), Trained(config)
    with pytest.MonkeyPatch.context() as patch, failing(trained.model, 2, "forward"), pytest.raises(Abandoned):
        patch.setattr("titan_launch.train.step.discard_pending", lambda model: None)
        trained.step(microbatches(7))
    reset(trained.model)
    for each in (trained, expected):
        each.step(microbatches(0))
    ours, theirs = trained.state(), expected.state()
    return all(torch.equal(ours[name], theirs[name]) for name in ours)


def zero_grad_and_reset(model: Any) -> None:
    model.reset_iter_state()
    model.zero_grad()


@pytest.mark.parametrize(("reset", "since"), [(discard_pending, (2, 11)), (zero_grad_and_reset, (2, 15))])
def test_pytorchs_reset_functions_clear_a_deferred_accumulation_from_a_release_on(
    reset: Any, since: tuple[int, int]
) -> None:
    """`since` is the first release on which `reset` does."""
    if not hasattr(FSDPModule, "reset_iter_state") and reset is zero_grad_and_reset:
        pytest.skip("this release of PyTorch cannot reset an iteration")
    assert run_ranks(leave_without_discarding, 2, reset) == [torch_release() >= since] * 2
