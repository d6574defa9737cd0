"""The audit: the dtypes observed in a real step of wrapped models are those of the plan."""

from __future__ import annotations

import json
from contextlib import ExitStack
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from tests.distributed import run_ranks
from tests.precision.steps import SEQ_LEN, train, wrapped
from tests.sampling import rest_is_slow
from tests.tensors import assert_equal, full_state
from tests.train.jobs import TINY_ARGS, TINY_EXPERTS, read_metrics, run_job, this_rank, tiny_job
from titan_launch.config.job import JobConfig
from titan_launch.core.errors import UserError
from titan_launch.core.torch_release import ACCUMULATES_IN_GRAD, MIXES_DTYPES_IN_UNIT
from titan_launch.distributed.torch_private import parameter_group
from titan_launch.models.build import build_model
from titan_launch.precision.audit import Audit, compare
from titan_launch.precision.observation import look_at_storage, observe
from titan_launch.train.build import Surroundings, build_run
from titan_launch.train.loop import train_one_step
from titan_launch.train.model import plan_precision


def audit_of(config: JobConfig, planned: JobConfig | None = None) -> Audit:
    """Return the audit of a step of `config`, compared with its own plan or with that of another job."""
    model, plan, layout = wrapped(config)
    if planned is not None:
        plan = plan_precision(planned, build_model(planned.model, SEQ_LEN))
    with observe(model, plan) as observed:
        train(model, config)
        look_at_storage(model, observed)
    return compare(plan, layout, observed)


def observed_by_name(audit: Audit) -> dict[str, dict[str, Any]]:
    """Return the observations of each module."""
    return {row.name: {f.what: f.observed for f in row.findings if f.observed} for row in audit.modules}


NORMS = {"rmsnorm": "RMSNorm", "layernorm": "LayerNorm", "batchnorm": "BatchNorm"}
RULES: tuple[dict[str, Any], ...] = (
    {},
    {"rules": [{"type": "NORM", "param_dtype": "float32"}]},
    {"rules": [{"type": "NORM", "param_dtype": "float32", "cast_forward_inputs": False, "unit_per": "block"}]},
    {"rules": [{"type": "NORM", "param_dtype": "float32"}, {"match": "HEAD", "param_dtype": "float32"}]},
    {"storage_dtype": "bfloat16"},
    {"storage_dtype": "bfloat16", "rules": [{"match": "HEAD", "param_dtype": "float32", "storage_dtype": "float32"}]},
    {"param_dtype": "float32", "buffer_dtype": "bfloat16"},
    {"param_dtype": "float32", "reduce_dtype": "bfloat16", "rules": [{"match": "HEAD", "reduce_dtype": "float32"}]},
)
"""Rules for each model. NORM is the class of its norms, HEAD the path of its last layer."""

ROUTER = {"match": "layers.*.moe.router", "param_dtype": "float32", "output_dtype": "float32"}
RULES_OF_EXPERTS: tuple[dict[str, Any], ...] = (
    {"rules": [ROUTER]},
    {"storage_dtype": "bfloat16", "buffer_dtype": "bfloat16", "rules": [ROUTER]},
    {"rules": [{"match": "layers.*.moe.experts", "param_dtype": "float32", "output_dtype": "float32"}]},
)
"""Rules for mixtures of experts."""


def cases(replicate: int) -> list[JobConfig]:
    """Return every model with every set of rules. Accumulation modes and activation checkpointing modes alternate."""
    llamas = [({"args": {**TINY_ARGS, "norm": norm}}, name, "output") for norm, name in NORMS.items()]
    conv = ({"name": "tests.parallel.conv_model:ConvNet"}, "BatchNorm", "head")
    experts = ({"args": {**TINY_ARGS, "experts": {**TINY_EXPERTS, "first_dense_layers": 0}}}, "RMSNorm", "output")
    modes = cycle(["immediate", "deferred", "deferred_all_reduce"] if replicate > 1 else ["immediate", "deferred"])
    checkpointing = cycle(["none", "full", "selective"])
    return [
        job(model, precision, norm, head, replicate, next(modes), next(checkpointing))
        for (model, norm, head), rules in (*((model, RULES) for model in (*llamas, conv)), (experts, RULES_OF_EXPERTS))
        for precision in rules
    ]


def job(
    model: dict[str, Any],
    precision: dict[str, Any],
    norm: str,
    head: str,
    replicate: int,
    mode: str,
    checkpointing: str,
) -> JobConfig:
    text = json.dumps(precision).replace("NORM", norm).replace("HEAD", head)
    return JobConfig.model_validate(
        {
            "model": model,
            "training": {"seq_len": SEQ_LEN},
            "precision": json.loads(text),
            "parallelism": {"data_parallel_replicate_degree": replicate},
            "gradient_accumulation": {"mode": mode},
            "activation_checkpoint": {"mode": checkpointing},
        }
    )


def all_as_planned(replicate: int, every: int) -> None:
    for config in cases(replicate)[::-every]:  # mixtures of experts are last
        audit = audit_of(config)
        assert audit.differences() == [], (audit.differences(), config)
        checkpoints = config.activation_checkpoint.mode != "none"
        for row in audit.modules:
            if row.remark == "container":
                continue
            unseen = [finding.what for finding in row.findings if finding.planned and not finding.observed]
            # The inputs of the model and of its embedding are integers, and autocast is off.
            takes_integers = not row.name or (row.classes == "Embedding" and row.unit.reason == "embedding")
            assert unseen == (["inputs"] if takes_integers else []) + ["autocast"] and not row.remark, (row, config)
            in_block = row.name.startswith(("layers.0.", "blocks.0."))
            assert not in_block or row.classes == "RotaryEmbedding" or row.num_forwards == (4 if checkpoints else 2), (
                row
            )
        for row in audit.units:
            shards = dist.get_world_size() // replicate
            seen = {finding.what for finding in row.findings if finding.observed}
            expected = {"all-gather", "reduce-scatter"} if shards > 1 else set()
            expected |= {"all-reduce"} if replicate > 1 else set()
            assert seen == (expected if row.unit.num_parameters else set()), (row, config)


@pytest.mark.parametrize(
    ("ranks", "replicate", "every"), rest_is_slow([(1, 1, 11), (2, 1, 1), (4, 2, 13), (4, 1, 5), (2, 2, 11)], 4)
)
def test_every_model_computes_stores_and_communicates_in_the_planned_dtypes(
    ranks: int, replicate: int, every: int
) -> None:
    run_ranks(all_as_planned, ranks, replicate, every)  # no period of the modes divides these strides


class Casts(nn.Module):
    """A model that casts its own buffer and has a hook that casts the input of its norm. One layer is frozen, one does
    not run."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(61, 16)
        self.norm = nn.LayerNorm(16)
        self.norm.register_forward_pre_hook(lambda _, args: (args[0].bfloat16(),))
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.idle = nn.Linear(16, 16)
        self.output = nn.Linear(16, 61)
        self.register_buffer("table", torch.ones(16))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.frozen(self.norm(self.embedding(tokens)))
        self.table = self.table.to(x.dtype)
        return self.output(x * self.table)

    def reset_parameters(self) -> None:
        nn.init.ones_(self.table)


CASTS = {"name": f"{__name__}:Casts"}
FP32_NORM = {"rules": [{"type": "LayerNorm", "param_dtype": "float32", "output_dtype": "bfloat16"}]}


def differences_of_casts(folder: Path) -> None:
    own = {"placement": "own_unit"}  # the hook of a rule in place runs after that of the model
    precision = {"param_dtype": "bfloat16", **FP32_NORM, **own}
    sections = tiny_job(folder, model={**CASTS, "args": {}}, precision=precision)
    sections["model"].pop("args")
    with ExitStack() as stack:
        process = Surroundings(locate_key=lambda _: "job.toml:7")
        run = build_run(JobConfig.model_validate(sections), this_rank(), stack, process)
        before = full_state(run.model)
        with pytest.raises(UserError) as raised:
            train_one_step(run)
        after = full_state(run.model)
        assert after.pop("table").dtype == torch.bfloat16 and before.pop("table").dtype == torch.float32
        assert_equal(after, before)
        assert str(raised.value) == (
            "precision audit: the first step was not as planned, and the run ends before its update (all dtypes are in "
            f"{folder / 'tiny' / 'precision_audit.json'}; usual causes are casts in the model's own forward or hooks; "
            "debug.audit_precision = false disables the audit)\n"
            "  (root) (Casts), buffer table: planned float32, observed bfloat16 and float32 (unit: root)\n"
            "  norm (LayerNorm), inputs: planned float32, observed bfloat16 (unit: precision.rules.0, job.toml:7)"
        )


def test_a_cast_in_the_model_ends_the_run_before_the_first_update(tmp_path: Path) -> None:
    run_ranks(differences_of_casts, 2, tmp_path)
    audit = json.loads((tmp_path / "tiny" / "precision_audit.json").read_text())
    assert len(audit["differences"]) == 2
    rows = {row["name"]: row for row in audit["modules"]}
    assert rows["norm"]["dtypes"]["inputs"] == {"planned": "float32", "observed": ["bfloat16"]}
    assert [name for name, row in rows.items() if not row["as_planned"]] == ["", "norm"]
    assert (rows["idle"]["remark"], rows["frozen"]["remark"], rows["output"]["remark"]) == ("did not run", "frozen", "")
    assert rows["idle"]["dtypes"]["gradients"]["observed"] == rows["frozen"]["dtypes"]["gradients"]["observed"] == []


def mistakes_in_wrapping() -> None:
    model = {"args": dict(TINY_ARGS)}
    as_planned = JobConfig.model_validate({"model": model})
    precision = {"param_dtype": "float32", "storage_dtype": "bfloat16", "reduce_dtype": "bfloat16"}
    lines = audit_of(
        JobConfig.model_validate({"model": model, "precision": precision}), planned=as_planned
    ).differences()
    linear, block = "layers.*.attention.wq (2) (Linear)", "layers.* (2) (TransformerBlock)"
    for line in (
        f"{block}, inputs: planned bfloat16, observed float32 (unit: block)",
        f"{linear}, parameters: planned bfloat16, observed float32 (unit: block)",
        # From torch 2.15 on autograd would also pass gradients in the dtypes of the wrong plan.
        *([] if ACCUMULATES_IN_GRAD else [f"{linear}, gradients: planned bfloat16, observed float32 (unit: block)"]),
        f"{linear}, stored parameters: planned float32, observed bfloat16 (unit: block)",
        f"{linear}, stored gradients: planned float32, observed bfloat16 (unit: block)",
        f"{block}, all-gather: planned bfloat16, observed float32 (unit: block)",
        f"{block}, reduce-scatter: planned float32, observed bfloat16 (unit: block)",
    ):
        assert line in lines, (line, lines)
    bf16_table = JobConfig.model_validate({"model": model, "precision": {"buffer_dtype": "bfloat16"}})
    assert audit_of(as_planned, planned=bf16_table).differences() == [
        "rope (RotaryEmbedding), buffer table: planned bfloat16, observed float32 (unit: root)"
    ]


def test_a_model_with_other_units_differs_from_the_plan() -> None:
    run_ranks(mistakes_in_wrapping, 2)


def hooks_on(model: nn.Module) -> dict[str, list[Any]]:
    """Return everything on a model that could still observe it."""
    return {
        path: [
            list(module._forward_pre_hooks.values()),
            list(module._forward_hooks.values()),
            [list((p._backward_hooks or {}).values()) for p in module._parameters.values() if p is not None],
            *(
                [type(group._all_gather_comm), type(group._reduce_scatter_comm), group._all_reduce_hook]
                for group in filter(None, [parameter_group(module) if isinstance(module, FSDPModule) else None])
            ),
        ]
        for path, module in model.named_modules()
    }


def nothing_is_left() -> None:
    config = job({"args": {**TINY_ARGS, "norm": "batchnorm"}}, {}, "", "", 2, "deferred", "full")
    model, plan, layout = wrapped(config)
    train(model, config)  # the hooks of the first forward are removed by then
    before = hooks_on(model)
    handed_out: list[Tensor] = []
    model.output.register_forward_pre_hook(lambda module, _: handed_out.append(module.weight))
    with observe(model, plan):
        assert hooks_on(model) != before
        train(model, config)
        assert handed_out[0]._backward_hooks
    model.output._forward_pre_hooks.popitem()
    assert hooks_on(model) == before
    assert not handed_out[0]._backward_hooks
    assert layout.shard == 2


def test_the_audit_leaves_no_hook_on_the_model() -> None:
    run_ranks(nothing_is_left, 4)


def with_and_without_audit(folder: Path, replicate: int, modes: tuple[str, ...]) -> None:
    for mode in modes:
        states = []
        for audited in (True, False):
            sections = tiny_job(
                folder / f"{mode}-{audited}",
                model={"args": {"norm": "batchnorm"}},
                training={"global_batch_size": 8, "steps": 2},
                precision={"param_dtype": "bfloat16", "rules": [{"match": "output", "param_dtype": "float32"}]},
                parallelism={"data_parallel_replicate_degree": replicate},
                gradient_accumulation={"mode": mode},
                debug={"audit_precision": audited},
            )
            states.append(run_job(sections))
        assert_equal(*states)


@pytest.mark.parametrize("ranks_of_replicas", rest_is_slow([2, 4]))
def test_an_audit_changes_no_bit_of_a_run(tmp_path: Path, ranks_of_replicas: int) -> None:
    run_ranks(with_and_without_audit, 2, tmp_path, 1, ("deferred",))
    run_ranks(with_and_without_audit, ranks_of_replicas, tmp_path, 2, ("deferred_all_reduce",))
    for mode in ("deferred", "deferred_all_reduce"):
        audited, other = (
            [row["train/loss"] for row in read_metrics(tmp_path / f"{mode}-{on}")] for on in (True, False)
        )
        assert audited == other
        audit = json.loads((tmp_path / f"{mode}-True" / "tiny" / "precision_audit.json").read_text())
        assert audit["differences"] == [] and audit["units"]
        assert not (tmp_path / f"{mode}-False" / "tiny" / "precision_audit.json").exists()


def three_starts(folder: Path) -> None:
    run_job(tiny_job(folder / "debug", training={"steps": 1}))
    large = {"flavor": "1B", "args": {"rope_scaling": None, "tie_embeddings": False}}
    run_job(tiny_job(folder / "large", model=large, training={"steps": 1}))
    checkpoint = {"interval": 1, "enable": True}
    run_job(tiny_job(folder / "resumed", checkpoint=checkpoint, training={"steps": 1}))
    (folder / "resumed" / "tiny" / "precision_audit.json").unlink()
    run_job(tiny_job(folder / "resumed", checkpoint=checkpoint, training={"steps": 2}))


def test_the_audit_is_on_by_default_for_models_of_the_user_in_every_process(tmp_path: Path) -> None:
    run_ranks(three_starts, 1, tmp_path)
    written = {
        name: (tmp_path / name / "tiny" / "precision_audit.json").exists() for name in ("debug", "large", "resumed")
    }
    assert written == {"debug": True, "large": False, "resumed": True}


def table() -> str:
    precision = {"rules": [{"type": "RMSNorm", "param_dtype": "float32"}]}
    return audit_of(job({"args": dict(TINY_ARGS)}, precision, "", "", 1, "immediate", "none")).as_markdown()


def test_the_table_has_one_row_for_equal_modules() -> None:
    modules, units = run_ranks(table, 2)[0].split("\n\n")
    columns = "inputs | parameters | gradients | buffers | outputs | stored parameters | stored gradients"
    assert modules.splitlines()[0] == f"| module | class | forwards | {columns} | from |"
    assert (
        "| layers.*.attention_norm (2) | RMSNorm | 2 | float32 | float32 | float32 | - | bfloat16 | float32 | float32 "
        "| precision.rules.0 |"
    ) in modules
    assert (
        "| layers.*.attention.wq (2) | Linear | 2 | (bfloat16) | bfloat16 | bfloat16 | - | (bfloat16) | float32 "
        "| float32 | block |"
    ) in modules
    assert units.splitlines()[0] == "| unit | class | forwards | all-gather | reduce-scatter | from |"
    gathered = "uint8" if MIXES_DTYPES_IN_UNIT else "bfloat16"  # fp32 norms are gathered with their blocks
    assert f"| layers.* (2) | TransformerBlock |  | {gathered} | float32 | block |" in units


class UsesAutocast(nn.Module):
    """A model that computes its last layer in the dtype of autocast, not in that of its precision rule."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(61, 16)
        self.output = nn.Linear(16, 61)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        with torch.autocast("cpu", torch.bfloat16):
            return self.output(x)


def differences_under_autocast() -> list[str]:
    rules = [{"match": "output", "param_dtype": "float32", "output_dtype": "float32"}]
    model = {"name": f"{__name__}:UsesAutocast"}
    return audit_of(JobConfig.model_validate({"model": model, "precision": {"rules": rules}})).differences()


def test_autocast_is_reported_as_a_difference_from_the_plan() -> None:
    (differences,) = run_ranks(differences_under_autocast, 1)
    assert differences == ["output (Linear), autocast: planned off, observed bfloat16 (unit: precision.rules.0)"]
