"""Dtype failures of PyTorch, provoked on wrapped models: each has an explanation, and its remedy works."""

from __future__ import annotations

import gc
import re
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.distributed import run_ranks
from tests.precision.steps import train, wrapped
from tests.train.jobs import explained, this_rank, tiny_job
from titan_launch.config.job import JobConfig
from titan_launch.core.errors import UNSET, ConfigError, Problem, format_key
from titan_launch.core.torch_release import NEWEST_TESTED, torch_release
from titan_launch.precision.diagnosis import explain_dtypes
from titan_launch.train.build import build_run
from titan_launch.train.loop import fit

DIM = 16


class Model(nn.Module):
    """A model with an embedding, two blocks with a residual stream, and an output layer."""

    def __init__(self, block: str) -> None:
        super().__init__()
        self.embedding = nn.Embedding(61, DIM)
        self.layers = nn.ModuleList(BLOCKS[block]() for _ in range(2))
        self.output = nn.Linear(DIM, 61)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = self.add(layer(x), x)
        return self.output(x)

    def add(self, y: Tensor, x: Tensor) -> Tensor:
        return x + y


class ModelInPlace(Model):
    def add(self, y: Tensor, x: Tensor) -> Tensor:
        y += x
        return y


class ModelWithAlias(Model):
    def __init__(self, block: str) -> None:
        super().__init__(block)
        self.layers[0].alias = self.layers[0].layer


class ModelInItsOwnPlace(Model):
    def add(self, y: Tensor, x: Tensor) -> Tensor:
        x += y
        return x


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.inner = nn.Linear(DIM, DIM)
        self.layer = self.build()
        self.proj = nn.Linear(DIM, DIM)
        self.register_buffer("table", torch.ones(DIM))

    def build(self) -> nn.Module:
        return nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(self.middle(self.inner(self.norm(x))))

    def middle(self, x: Tensor) -> Tensor:
        return x

    def reset_parameters(self) -> None:
        nn.init.ones_(self.table)


class MultipliesTable(Block):
    def middle(self, x: Tensor) -> Tensor:
        return x * self.table


class UsesWeight(Block):
    def middle(self, x: Tensor) -> Tensor:
        return F.linear(x, self.proj.weight.to(x.dtype))


class CastsBeforeNorm(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.proj(self.norm(self.inner(x).float()).type_as(x))


class CastsBeforeConv(Block):
    def build(self) -> nn.Module:
        return nn.Conv1d(DIM, DIM, 1)

    def middle(self, x: Tensor) -> Tensor:
        return self.layer(x.transpose(1, 2).float()).transpose(1, 2).contiguous().type_as(x)


class CastsBeforeConvWithoutBias(CastsBeforeConv):
    def build(self) -> nn.Module:
        return nn.Conv1d(DIM, DIM, 1, bias=False)


class CastsBeforeLstm(Block):
    def build(self) -> nn.Module:
        return nn.LSTM(DIM, DIM, batch_first=True)

    def middle(self, x: Tensor) -> Tensor:
        return self.layer(x.float())[0].type_as(x)


class AttendsWithTable(Block):
    def middle(self, x: Tensor) -> Tensor:
        q = x * self.table
        return F.scaled_dot_product_attention(q, q, x).type_as(x)


class ScattersFloat(Block):
    def middle(self, x: Tensor) -> Tensor:
        index = torch.zeros_like(x, dtype=torch.int64)
        return torch.zeros_like(x).scatter(1, index, x.float())


class Transforms(Block):
    def middle(self, x: Tensor) -> Tensor:
        return x + torch.fft.rfft(x).real.sum(-1, keepdim=True)


class TransformsHalf(Block):
    def middle(self, x: Tensor) -> Tensor:
        return x + torch.linalg.svdvals(x.half())[..., :1]


class RunningNorm(nn.Module):
    """A batch norm that does not derive from PyTorch's class, so that no default protects it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(DIM))
        self.bias = nn.Parameter(torch.zeros(DIM))
        self.register_buffer("running_mean", torch.zeros(DIM))
        self.register_buffer("running_var", torch.ones(DIM))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, DIM)
        y = F.batch_norm(flat, self.running_mean, self.running_var, self.weight, self.bias, self.training)
        return y.reshape(x.shape).clone()

    def reset_parameters(self) -> None:
        for tensor, value in ((self.weight, 1.0), (self.bias, 0.0), (self.running_mean, 0.0), (self.running_var, 1.0)):
            nn.init.constant_(tensor, value)


class HasRunningNorm(Block):
    def build(self) -> nn.Module:
        return RunningNorm()

    def middle(self, x: Tensor) -> Tensor:
        return self.layer(x)


class Projection(nn.Module):
    """A matrix product that does not derive from PyTorch's class, so that the plan does not know that it takes one
    dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(DIM, DIM))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.1)


class HasProjection(HasRunningNorm):
    def build(self) -> nn.Module:
        return Projection()


class ChangesInput(Block):
    def forward(self, x: Tensor) -> Tensor:
        x += self.proj(x)
        return x


class ActivatesInput(Block):
    def build(self) -> nn.Module:
        return nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(self.layer(x))


class ReturnsView(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x.sin().reshape(-1, DIM)).view(x.shape)


class SetsFactor(Block):
    def forward(self, x: Tensor) -> Tensor:
        self.set_gradient_divide_factor(3.0)
        self.set_force_sum_reduction_for_comms(False)
        return super().forward(x)


class RunsNowAndThen(HasProjection):
    num_forwards = 0

    def middle(self, x: Tensor) -> Tensor:
        self.num_forwards += 1
        return self.layer(x) if self.num_forwards == 2 else x


class CastsInEvaluation(Block):
    def middle(self, x: Tensor) -> Tensor:
        return x if self.training else x.float()


class Fails(Block):
    def middle(self, x: Tensor) -> Tensor:
        raise RuntimeError("the dtype of this error is float, and of nothing else")


class TakesIndices(Block):
    def middle(self, x: Tensor) -> Tensor:
        return torch.where(x > 0, 1, 0) @ torch.ones(DIM, DIM)


BLOCKS = {block.__name__: block for block in Block.__subclasses__() + CastsBeforeConv.__subclasses__()}
BLOCKS |= {block.__name__: block for block in (Block, HasProjection, RunsNowAndThen)}


@dataclass(frozen=True)
class Case:
    """A failure, its explanation, and jobs that follow the remedy."""

    block: str
    reason: str
    """The explanation without PyTorch's words. LINE stands for a line number."""

    key: str = "precision"
    value: Any = UNSET
    rules: tuple[dict[str, Any], ...] = ()
    helps: tuple[tuple[dict[str, Any], ...], ...] = ()
    """Rules that follow the remedy, each a job that trains."""

    mode: str = "immediate"
    helpful_modes: tuple[str, ...] = ()
    model: str = "Model"
    until: tuple[int, int] = NEWEST_TESTED
    """The last release of PyTorch on which the job fails. Later ones train."""


def rule(match: str, param_dtype: str | None = None, **others: Any) -> dict[str, Any]:
    return {"match": match, **({} if param_dtype is None else {"param_dtype": param_dtype}), **others}


def either(match: str) -> tuple[tuple[dict[str, Any], ...], ...]:
    return ((rule(match, "bfloat16"),), (rule(match, "float32"),))


def meeting(module: str, match: str, dtypes: str = '"float32"') -> str:
    return (
        f"an operation in {module} has inputs of two dtypes (test_diagnosis.py:LINE); cast them to one dtype, or add "
        f'[[precision.rules]] with match = "{match}" and param_dtype = {dtypes} (inputs are cast)'
    )


def foreign(module: str, match: str) -> str:
    return meeting(module, match, '"bfloat16" or "float32"')


IN_PLACE = (
    "changes in place a tensor that it got through the boundary of an FSDP2 unit (test_diagnosis.py:LINE); write "
    "x = x + y in place of x += y, drop inplace=True, or change a copy, x.clone()"
)
RUNNING_NORM = (
    "layers.0.layer (RunningNorm) computes in bfloat16 with float32 buffers (running_mean, running_var), but "
    "its operation requires one dtype"
)
FLOAT_BLOCKS = ((rule("layers.*", "float32"),),)
CASES = (
    Case("MultipliesTable", foreign("layers.0.proj (Linear)", "layers.*.proj"), helps=either("layers.*.proj")),
    Case("CastsBeforeNorm", foreign("layers.0.norm (LayerNorm)", "layers.*.norm"), helps=either("layers.*.norm")),
    Case("CastsBeforeConv", foreign("layers.0.layer (Conv1d)", "layers.*.layer"), helps=either("layers.*.layer")),
    Case(
        "CastsBeforeConvWithoutBias",
        foreign("layers.0.layer (Conv1d)", "layers.*.layer"),
        helps=either("layers.*.layer"),
    ),
    Case("CastsBeforeLstm", foreign("layers.0.layer (LSTM)", "layers.*.layer"), helps=either("layers.*.layer")),
    Case(
        "MultipliesTable",
        foreign("layers.0.proj (Linear)", "layers.*.proj").replace(
            "rules]] with", "rules]] before precision.rules.0 with"
        ),
        key="precision.rules.0",
        rules=(rule("layers.*", "bfloat16"),),
        helps=((rule("layers.*.proj", "bfloat16"), rule("layers.*", "bfloat16")),),
    ),
    Case("AttendsWithTable", meeting("layers.0 (AttendsWithTable)", "layers.*"), helps=FLOAT_BLOCKS),
    Case("ScattersFloat", meeting("layers.0 (ScattersFloat)", "layers.*"), helps=FLOAT_BLOCKS),
    Case(
        "Transforms",
        "an operation in layers.0 (Transforms) (test_diagnosis.py:LINE) does not take bfloat16; cast its inputs to "
        'float32, or add [[precision.rules]] with match = "layers.*" and param_dtype = "float32" (inputs are cast)',
        helps=FLOAT_BLOCKS,
    ),
    Case(
        "Transforms",
        "an operation in layers.0 (Transforms) (test_diagnosis.py:LINE) does not take bfloat16; cast its inputs to "
        'float32, or set "float32", and remove cast_forward_inputs = false, so that inputs are cast',
        key="precision.rules.0.param_dtype",
        value="bfloat16",
        rules=(rule("layers.*", "bfloat16", cast_forward_inputs=False),),
        helps=FLOAT_BLOCKS,
    ),
    Case(
        "TransformsHalf",
        "an operation in layers.0 (TransformsHalf) (test_diagnosis.py:LINE) does not take float16; cast its inputs to "
        "float32",
        key="model.name",
    ),
    Case(
        "HasRunningNorm",
        f'{RUNNING_NORM}; add [[precision.rules]] with match = "layers.*.layer" and param_dtype = "float32" '
        "(inputs are cast)",
        helps=((rule("layers.*.layer", "float32"),),),
    ),
    Case(
        "HasRunningNorm",
        f'{RUNNING_NORM}; set "float32", so that inputs are cast',
        key="precision.rules.0.param_dtype",
        value="bfloat16",
        rules=(rule("layers.*.layer", "bfloat16"),),
        helps=((rule("layers.*.layer", "float32"),),),
    ),
    Case(
        "Block",
        "the consumer of this output, layers.0.inner (Linear), computes in bfloat16; remove this key",
        key="precision.rules.1.output_dtype",
        value="float32",
        rules=(rule("output", "float32", output_dtype="float32"), rule("**.norm", "float32", output_dtype="float32")),
        helps=((rule("output", "float32", output_dtype="float32"), rule("**.norm", "float32")),),
    ),
    Case(
        "HasProjection",
        "an operation in layers.0.layer (Projection) has inputs of two dtypes (test_diagnosis.py:LINE); cast them "
        'to one dtype, or set "float32", so that inputs are cast',
        key="precision.rules.0.param_dtype",
        rules=(rule("layers.*.layer"),),
        helps=((rule("layers.*.layer", "float32"),),),
    ),
    Case(
        "HasProjection",
        "an operation in layers.0.layer (Projection) has inputs of two dtypes (test_diagnosis.py:LINE); cast them "
        "to one dtype, or remove this key, so that inputs are cast",
        key="precision.rules.0.cast_forward_inputs",
        value=False,
        rules=(rule("layers.*.layer", "float32", cast_forward_inputs=False),),
        helps=((rule("layers.*.layer", "float32"),),),
    ),
    Case(
        "UsesWeight",
        "layers.0 (UsesWeight) uses the parameters of layers.0.proj (Linear) while they are sharded: FSDP2 gathers the "
        "parameters of a unit when its module is called, and the module was not called (test_diagnosis.py:LINE); "
        'match the module around it ("layers.*")',
        key="precision.rules.0",
        rules=(rule("layers.*.proj", "float32"),),
        helps=((rule("layers.*", "float32"),),),
    ),
    Case(
        "Block",
        "the model changes a tensor in place after it was the input of an FSDP2 unit, as in x += block(x); write "
        "x = x + block(x), or change a copy, x.clone()",
        key="model.name",
        model="ModelInItsOwnPlace",
    ),
    Case("ChangesInput", f"layers.0 (ChangesInput) {IN_PLACE}", key="model.name"),
    Case("ActivatesInput", f"layers.0.layer (ReLU) {IN_PLACE}", key="model.name"),
    Case(
        "ReturnsView",
        "backward used sharded parameters: most likely the output of layers.0 (ReturnsView) or of a unit "
        "after it is a view (x.view, x[...]) that is then changed in place; write x = x + y in place of x += y, "
        "drop inplace=True, or return x.clone()",
        key="model.name",
        model="ModelInPlace",
    ),
    Case(
        "RunsNowAndThen",
        "FSDP2 reduces all gradients of a unit in one dtype. A module got gradients only in the last microbatch, and "
        "these have the compute dtype. The gradient sums of the other modules of the unit have the reduce dtype; set "
        'mode = "immediate"',
        key="gradient_accumulation.mode",
        mode="deferred",
        until=(2, 14),
        helpful_modes=("immediate",),
    ),
    Case(
        "RunsNowAndThen",
        "no module of unit layers.1.layer ran in the first microbatch, so FSDP2 cannot defer its reduction; set "
        'mode = "immediate"',
        key="gradient_accumulation.mode",
        mode="deferred",
        until=(2, 14),
        rules=(rule("layers.1.layer", "bfloat16"),),
        helpful_modes=("immediate",),
    ),
)


def job(case: Case, rules: tuple[dict[str, Any], ...], mode: str, placement: str = "own_unit") -> JobConfig:
    return JobConfig.model_validate(
        {
            "model": {"name": f"{__name__}:{case.model}", "args": {"block": case.block}},
            "training": {"seq_len": 16},
            "precision": {"rules": rules, "placement": placement},
            "gradient_accumulation": {"mode": mode},
        }
    )


def failure_of(config: JobConfig) -> ConfigError:
    model, plan, _ = wrapped(config)
    with pytest.raises((RuntimeError, ValueError, AssertionError, AttributeError)) as raised:
        train(model, config)
    found = explain_dtypes(raised.value, model, plan, config.precision)
    assert found is not None, raised.value
    found.__cause__ = raised.value
    return found


def words(problem: Problem) -> str:
    """Return the explanation without PyTorch's words and without line numbers."""
    return re.sub(r"\.py:\d+", ".py:LINE", problem.reason.partition(" (PyTorch: ")[0])


def check(case: Case) -> None:
    if torch_release() > case.until:
        assert_trains(job(case, case.rules, case.mode))
        return
    error = failure_of(job(case, case.rules, case.mode))
    (problem,) = error.problems
    problem_found = (format_key(problem.key), words(problem))
    assert problem_found == (case.key, case.reason), problem_found
    assert problem.value is case.value or problem.value == case.value
    problem_found, cause = problem.reason.partition(" (PyTorch: ")[2].removesuffix(")"), error.__cause__
    assert problem_found and str(cause).startswith(problem_found), (problem_found, cause)
    for rules, mode in (
        *((rules, case.mode) for rules in case.helps),
        *((case.rules, m) for m in case.helpful_modes),
    ):
        assert_trains(job(case, rules, mode))


def assert_trains(config: JobConfig) -> None:
    model, _, _ = wrapped(config)
    train(model, config)
    assert all(p.grad is not None for p in model.output.parameters())


def every_failure() -> None:
    for case in CASES:
        check(case)


def test_every_dtype_failure_is_explained_and_its_remedy_works() -> None:
    run_ranks(every_failure, 2)


SETS_FACTOR = Case(
    "SetsFactor",
    "the model sets a gradient divide factor, which gloo cannot apply, and the loss is divided already; remove "
    "set_gradient_divide_factor and set_force_sum_reduction_for_comms from the model",
    key="model.name",
)


def failed_collective() -> None:
    check(SETS_FACTOR)
    gc.collect()
    time.sleep(0.3)  # gloo raises the error again in the next collective


def test_a_gradient_divide_factor_set_by_the_model_is_explained() -> None:
    run_ranks(failed_collective, 2)


def what_no_job_can_provoke() -> None:
    """Raise errors that occur on CUDA only, or that need a model which changes its own state during the step."""
    for name in ("Model", "ModelWithAlias"):
        config = job(Case("HasRunningNorm", "", model=name), (), "immediate")
        model, plan, _ = wrapped(config)
        # The words are those of PyTorch issue 105548.
        on_cuda = RuntimeError("Expected running_mean to have type BFloat16 but got Float")
        explained = explain_dtypes(on_cuda, model, plan, config.precision)
        assert explained is not None and words(explained.problems[0]) == next(
            case.reason for case in CASES if case.block == "HasRunningNorm"
        )

    config = JobConfig.model_validate({**job(Case("Block", ""), (), "immediate").model_dump(exclude_unset=True)})
    config = config.model_copy(update={"precision": config.precision.model_copy(update={"storage_dtype": "bfloat16"})})
    model, plan, _ = wrapped(config)
    model.layers[0].norm.float()
    with pytest.raises(AssertionError) as raised:
        train(model, config)
    found = explain_dtypes(raised.value, model, plan, config.precision)
    assert found is not None
    (problem,) = found.problems
    assert (format_key(problem.key), words(problem)) == (
        "precision",
        "layers.0.norm.weight was cast to float32 after it was sharded, and its unit is stored in bfloat16; remove "
        'that cast, or add [[precision.rules]] with match = "layers.*.norm", storage_dtype = "float32" and '
        'param_dtype = "float32"',
    )


def test_dtype_failures_that_no_job_on_a_cpu_can_provoke_are_explained() -> None:
    run_ranks(what_no_job_can_provoke, 2)


def other_errors_pass() -> None:
    for block, text in (("Fails", "the dtype of this error is float"), ("TakesIndices", "Long|long")):
        config = job(Case(block, ""), (), "immediate")
        model, plan, _ = wrapped(config)
        with pytest.raises(RuntimeError, match=text) as raised:
            train(model, config)
        assert explain_dtypes(raised.value, model, plan, config.precision) is None


def test_errors_other_than_dtype_failures_are_raised_unchanged() -> None:
    run_ranks(other_errors_pass, 1)


def in_a_run(folder: Path) -> None:
    for name, block, steps_done in (("evaluation", "CastsInEvaluation", 1), ("training", "MultipliesTable", 0)):
        held_out = {"kind": "synthetic", "vocab_size": 61, "num_samples": 8, "seed": 1}
        sections = tiny_job(folder, precision={"param_dtype": "bfloat16"}, validation={"freq": 1, "data": held_out})
        sections["job"]["name"] = name
        sections["model"] = {"name": f"{__name__}:Model", "args": {"block": block}}
        with ExitStack() as stack:
            run = build_run(JobConfig.model_validate(sections), this_rank(), stack)
            with pytest.raises(ConfigError, match=r'match = "layers\.\*\.proj"'), explained(run):
                fit(run)
            assert run.progress.step == steps_done


def test_dtype_failures_in_training_and_validation_steps_are_explained(tmp_path: Path) -> None:
    run_ranks(in_a_run, 1, tmp_path)
