"""Optimizer state in 8 bits: precision, skipped steps, and the same run after a resume."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.distributed import run_ranks
from tests.tensors import Operations, assert_equal, full_state, full_tensor
from tests.train.jobs import TINY_ARGS, read_metrics, run_job, run_job_until, this_rank, tiny_job
from titan_launch.config.job import JobConfig
from titan_launch.config.sections.training import OptimizerConfig
from titan_launch.core.errors import UserError
from titan_launch.optim.eight_bit import Codes, decode, encode, initial_codes
from titan_launch.optim.registry import build_optimizer, step_unless
from titan_launch.train.build import build_run
from titan_launch.train.loop import fit


def coded(values: Tensor, name: str) -> Codes:
    codes = Codes(*initial_codes(nn.Parameter(values), name).values())
    encode([codes], name, [values.clone()])
    return codes


@pytest.mark.parametrize("shape", [(5, 256), (3, 700), (2, 3, 512), (6, 40, 3, 3), (0, 300)])
@pytest.mark.parametrize("name", ["exp_avg", "exp_avg_sq"])
def test_values_are_close_and_stored_again_without_a_change(name: str, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    values = torch.randn(shape) * 10.0 ** torch.randint(-5, 1, shape)
    values = values**2 if name == "exp_avg_sq" else values
    codes = coded(values, name)
    (found,) = decode([codes], name)
    largest = values.abs().amax() if values.numel() else 0
    assert (found - values).abs().le(0.04 * values.abs() + 0.01 * largest).all()
    if name == "exp_avg_sq":
        assert (found > 0).eq(values > 0).all(), "a second moment is rounded to 0"
    assert_equal(dict(enumerate(coded(found, name))), dict(enumerate(codes)))  # type: ignore[arg-type]


@pytest.mark.parametrize(("shape", "num_scales"), [((64, 32, 3, 3), 2), ((256, 64, 1, 1), 1), ((2, 8, 512), 2)])
def test_a_kernel_of_a_convolution_has_few_scales(shape: tuple[int, ...], num_scales: int) -> None:
    assert coded(torch.rand(shape), "exp_avg").scales.shape == (*shape[: 1 if len(shape) == 4 else 2], num_scales)


def test_zeros_and_tiny_values_are_zeros() -> None:
    for values in (torch.zeros(2, 256), torch.full((2, 256), 1e-30)):
        for name in ("exp_avg", "exp_avg_sq"):
            assert not decode([coded(values.clone(), name)], name)[0].any()


@pytest.mark.parametrize("name", ["exp_avg", "exp_avg_sq"])
def test_tensors_that_are_stored_together_are_stored_as_alone(name: str) -> None:
    values = [
        torch.rand(shape) for shape in [(5, 256), (3, 700), (2, 512), (2, 3, 700), (0, 256), (4, 7), (7, 300, 1, 1)]
    ]
    alone = [coded(value, name) for value in values]
    together = [Codes(*initial_codes(nn.Parameter(value), name).values()) for value in values]
    encode(together, name, [value.clone() for value in values])
    decoded = decode(together, name)
    for one, other, found in zip(alone, together, decoded, strict=True):
        assert_equal(dict(enumerate(one)), dict(enumerate(other)))  # type: ignore[arg-type]
        assert torch.equal(found, decode([one], name)[0])
    encode(together, name, decoded)  # they follow one another in memory, and are not copied
    for one, other in zip(alone, together, strict=True):
        assert_equal(dict(enumerate(one)), dict(enumerate(other)))  # type: ignore[arg-type]


def wide_model() -> nn.Module:
    """Return a model with 300 parameters, whose shapes have the proportions of Llama 8B."""
    shapes = {
        "q": (48, 48),
        "k": (12, 48),
        "v": (12, 48),
        "o": (48, 48),
        "1": (168, 48),
        "3": (168, 48),
        "2": (48, 168),
    }
    shapes |= {"n": (48,), "m": (48,)}
    blocks = ({name: nn.Parameter(torch.randn(shape)) for name, shape in shapes.items()} for _ in range(33))
    ends = {"embedding": nn.Embedding(1503, 48), "norm": nn.RMSNorm(48), "output": nn.Linear(48, 1503, bias=False)}
    return nn.ModuleDict({**ends, "layers": nn.ModuleList([nn.ParameterDict(block) for block in blocks])})


@pytest.mark.parametrize(
    ("settings", "dtype", "most"),
    [
        ({"state_dtype": "int8"}, torch.float32, 10),
        ({"rounding": "stochastic"}, torch.bfloat16, 30),
        ({"name": "SGD", "state_dtype": "int8"}, torch.float32, 5),
        ({"name": "Muon"}, torch.float32, 2),
        pytest.param({"name": "Muon", "state_dtype": "int8"}, torch.float32, 3, marks=pytest.mark.slow),
        pytest.param({"name": "Muon", "rounding": "stochastic"}, torch.bfloat16, 10, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_step_calls_few_operations_for_a_parameter(settings: dict[str, Any], dtype: torch.dtype, most: int) -> None:
    """Views do not count: they launch no kernel."""
    torch.manual_seed(0)
    model = wide_model().to(dtype)
    optimizer = build_optimizer(model, OptimizerConfig.model_validate(settings))
    for _ in range(2):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        with Operations() as operations:
            optimizer.step()
    views = ("view", "as_strided", "detach", "split", "slice", "unsqueeze", "select")
    calls = sum(count for name, count in operations.counts.items() if not name.startswith(views))
    assert len([*model.parameters()]) == 300
    assert calls < most * 300, operations.counts.most_common()


@pytest.mark.parametrize("settings", [{}, {"name": "SGD"}, {"name": "Muon"}])
def test_a_skipped_step_changes_no_bit(settings: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(300, 40), nn.Linear(40, 5))
    optimizer = build_optimizer(model, OptimizerConfig.model_validate({**settings, "state_dtype": "int8"}), head=("1",))

    def step(nonfinite: bool) -> dict[str, Tensor]:
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, torch.nan) if nonfinite else torch.randn_like(parameter)
        step_unless(optimizer, torch.tensor(float(nonfinite)))
        names = {parameter: name for name, parameter in model.named_parameters()}
        states = {f"{names[p]}/{k}": v.clone() for p, state in optimizer.state.items() for k, v in state.items()}
        return {**states, **{name: parameter.detach().clone() for name, parameter in model.named_parameters()}}

    step(False)
    before = step(False)
    assert {v.dtype for k, v in before.items() if k.startswith("0.weight/")} == {torch.int8, torch.float32}
    assert_equal(step(True), before)


ARGS = {**TINY_ARGS, "dim": 64, "hidden_dim": 300}


def job(folder: Path, name: str, dtype: str | None, steps: int = 4) -> dict[str, Any]:
    return tiny_job(
        folder,
        job={"name": name, "device": "cpu", "dump_folder": str(folder)},
        model={"args": ARGS},
        optimizer={"lr": 3e-3, "state_dtype": dtype},
        training={"steps": steps, "global_batch_size": 4, "local_batch_size": 1, "seq_len": 16},
        checkpoint={"enable": True, "interval": 2},
    )


def optimizer_state(run: Any) -> dict[str, Tensor]:
    names = {parameter: name for name, parameter in run.model.named_parameters()}
    states = run.optimizer.state.items()
    return {f"{names[p]}/{key}": full_tensor(value) for p, state in states for key, value in state.items()}


def resumed(folder: Path, name: str) -> dict[str, Tensor]:
    """Return the optimizer state of a run that has just resumed."""
    with ExitStack() as stack:
        return optimizer_state(build_run(JobConfig.model_validate(job(folder, name, "int8")), this_rank(), stack))


def resumed_in_float32(folder: Path, name: str) -> str:
    """Return the error of a run that would read codes as values."""
    changed = job(folder, name, "float32")
    changed["checkpoint"] = {**changed["checkpoint"], "accept_changes": True}
    with ExitStack() as stack, pytest.raises(UserError) as caught:
        build_run(JobConfig.model_validate(changed), this_rank(), stack)
    return str(caught.value)


def train(folder: Path) -> dict[str, Tensor]:
    """Train with float32 and 8-bit state, and interrupt and resume a run. Return the state after 2 steps."""
    run_job(job(folder, "float32", None))
    expected = run_job(job(folder, "int8", "int8"))
    interrupted = job(folder, "interrupted", "int8")
    run_job_until(interrupted, 2)
    with ExitStack() as stack:
        run = build_run(JobConfig.model_validate(interrupted), this_rank(), stack)
        assert run.first_step == 3
        state = {name: value.clone() for name, value in optimizer_state(run).items()}
        assert any(value.dtype == torch.int8 and value.any() for value in state.values())
        fit(run)
        assert_equal(full_state(run.model), expected)
    return state


@pytest.mark.slow
def test_a_run_resumes_bit_for_bit_and_on_other_ranks(tmp_path: Path) -> None:
    state = run_ranks(train, 2, tmp_path, timeout=200)[0]
    losses = [[row["train/loss"] for row in read_metrics(tmp_path, name)] for name in ("float32", "int8")]
    assert losses[0] != losses[1]
    assert losses[1] == pytest.approx(losses[0], rel=2e-3)
    assert "of another optimizer" in run_ranks(resumed_in_float32, 1, tmp_path, "interrupted")[0]
    (tmp_path / "interrupted" / "checkpoints" / "step-4").rename(tmp_path / "last")  # the one before is resumed
    assert_equal(run_ranks(resumed, 1, tmp_path, "interrupted")[0], state)
