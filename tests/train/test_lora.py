"""Training of adapters: equal in every division, to `peft` in a plain loop, and after a resume."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import adapter_units
from tests.distributed import run_ranks
from tests.models.parity import random_model
from tests.packages import needs
from tests.sampling import sampled
from tests.tensors import assert_equal, full_state
from tests.train.jobs import TINY_ARGS, read_metrics, run_job, run_job_until, this_rank, tiny_job
from titan_launch.config.job import JobConfig
from titan_launch.config.loading.load import load_job
from titan_launch.core.torch_release import CAN_SHARE_UNITS, MIXES_DTYPES_IN_UNIT
from titan_launch.models.build import build_model
from titan_launch.models.factory import HostBuild
from titan_launch.models.init import allocate, initialize
from titan_launch.plan.communication import Collectives
from titan_launch.plan.freezing import is_adapter
from titan_launch.plan.report.unit_table import summary_of_job
from titan_launch.precision.audit import compare
from titan_launch.precision.observation import look_at_storage, observe
from titan_launch.train.build import build_run
from titan_launch.train.loop import train_one_step

pytestmark = needs("peft")

STEPS = 2


class Net(nn.Module):
    """A model of somebody else, whose values come from its factory."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(62, 16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)) for _ in range(2))
        self.output = nn.Linear(16, 62)

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x)
        logits: Tensor = self.output(x)
        return logits


ARGS = {**TINY_ARGS, "vocab_size": 62}
USER = {"model": {"name": "tests.train.test_lora:Net"}, "lora": {"targets": ["embedding", "blocks.*.*"]}}
EXPERTS = {
    "model": {"args": {**ARGS, "experts": {"num_experts": 4, "top_k": 2, "hidden_dim": 24}}},
    "lora": {"targets": ["layers.**"]},
}
RULES = [
    {"match": ["layers.0.attention.*", "output"], "rank": 2, "alpha": 5.0},
    {"match": ["layers.*.feed_forward.w2"], "rank": 6},
    {"match": ["layers.**.wq"], "alpha": 3.0},
]
NAMES_OF_PEFT = {"optimizer": {"name": "Muon"}, "lora": {"targets": ["all-linear", "lm_head"]}}
MODELS: tuple[dict[str, Any], ...] = ({"lora": {"rules": RULES}}, EXPERTS, USER, NAMES_OF_PEFT)
Division = tuple[int, dict[str, Any]]
"""Index in `MODELS`, and the way in which two ranks divide the work."""

DIVISIONS: tuple[Division, ...] = (
    (0, {"gradient_accumulation": {"mode": "deferred"}, "activation_checkpoint": {"mode": "selective"}}),
    (0, {"parallelism": {"tensor_parallel_degree": 2}, "activation_checkpoint": {"mode": "full"}}),
    (0, {"parallelism": {"tensor_parallel_degree": 2, "sequence_parallel": False}}),
    (0, {"parallelism": {"pipeline_parallel_degree": 2}}),
    (1, {"parallelism": {"expert_parallel_degree": 2}}),
    (1, {"parallelism": {"tensor_parallel_degree": 2}}),
    (2, {"parallelism": {"data_parallel_replicate_degree": 2}}),
    (3, {}),
)


def lora_job(folder: Path, name: str, **sections: dict[str, Any]) -> dict[str, Any]:
    lora = {"targets": ["layers.*.attention.*", "layers.*.feed_forward.*", "output"], "rank": 4, "alpha": 8.0}
    job = tiny_job(
        folder,
        **{**sections, "model": {}},
        job={"name": name, "dump_folder": str(folder), "device": "cpu"},
        data={"kind": "synthetic", "vocab_size": 62, "num_samples": 40},
        training={"seq_len": 16, "local_batch_size": 1, "global_batch_size": 4, "steps": STEPS, "max_norm": 0.0},
        lr_scheduler={"kind": "constant"},
    )
    # If a gradient is almost 0, the sign of its rounding error decides the sign of Adam's update.
    job["optimizer"] = {"lr": 1e-2, "weight_decay": 0.0, "eps": 1e-5, **sections.get("optimizer", {})}
    job["lora"] = {**lora, **sections.get("lora", {})}
    job["model"] = sections.get("model", {"args": ARGS})
    return job


def train_divided(folder: Path, divisions: Sequence[Division]) -> list[dict[str, Tensor]]:
    """Train the divisions one after the other. Return the adapters."""
    states = []
    for index, (model, sections) in enumerate(divisions):
        state = run_job(lora_job(folder, f"2-{index}", **MODELS[model], **sections))
        states.append({name: tensor for name, tensor in state.items() if is_adapter(name)})
    return states


PeftResult = tuple[list[float], dict[str, Tensor]]
"""Losses and adapters."""

WITH_PEFT = (0, 2)
"""The models that `peft` trains too."""


def train_alone(folder: Path, models: set[int]) -> tuple[dict[int, dict[str, Tensor]], dict[int, PeftResult]]:
    """Train models on one rank, with the launcher and with `peft`. Return the adapters of the first."""
    states = {model: run_job(lora_job(folder, f"1-{model}", **MODELS[model])) for model in sorted(models)}
    adapters = {model: {name: state[name] for name in state if is_adapter(name)} for model, state in states.items()}
    return adapters, {model: peft_alone(folder, model) for model in WITH_PEFT}


def peft_alone(folder: Path, model: int) -> PeftResult:
    """Train the adapters of `peft` in a plain loop. Return the losses, and the adapters in our names."""
    from peft import LoraConfig, inject_adapter_in_model

    job = JobConfig.model_validate(lora_job(folder, f"peft-{model}", **MODELS[model]))
    base, ours = build_model(job.model, 16, HostBuild(42, 2**34)), build_model(job.model, 16, None, job.lora)
    losses = []
    with ExitStack() as stack:
        run = build_run(job, this_rank(), stack)
        state = full_state(run.model)
        allocate(base.module, torch.device("cpu"))
        initialize(base.module, base.initializer, job.training.seed, torch.device("cpu"))
        base.module.load_state_dict({name: state[name] for name in base.module.state_dict()})
        names = [name.rpartition(".")[0] for name in state if name.endswith(".lora.a")]
        targets = [name.removesuffix(".lora") for name in names]
        own = {target: job.lora.of(target) for target in targets}
        config = LoraConfig(
            r=job.lora.rank,
            lora_alpha=job.lora.alpha,
            target_modules=targets,
            rank_pattern={target: values.rank for target, values in own.items()},
            alpha_pattern={target: values.alpha for target, values in own.items()},
        )
        wrapped = inject_adapter_in_model(config, base.module)
        parameters = dict(wrapped.named_parameters())
        pairs = {}
        for target in targets:
            is_embedding = f"{target}.lora_embedding_A.default" in parameters
            for theirs, own in (("A", "a"), ("B", "b")):
                name = f"{target}.lora_embedding_{theirs}.default"
                pairs[f"{target}.lora.{own}"] = parameters[
                    name if is_embedding else f"{target}.lora_{theirs}.default.weight"
                ]
        with torch.no_grad():
            for name, parameter in pairs.items():
                parameter.copy_(state[name])
        assert len(pairs) == sum(parameter.requires_grad for parameter in parameters.values())
        assert len(list(ours.module.parameters())) == len(parameters)
        optimizer = torch.optim.AdamW(pairs.values(), lr=1e-2, betas=(0.9, 0.95), eps=1e-5, weight_decay=0.0)
        for _ in range(STEPS):
            optimizer.zero_grad()
            microbatches = [next(run.batches.train) for _ in range(run.job.layout.num_microbatches)]
            inputs, targets_of = (torch.cat([batch[index] for batch in microbatches]) for index in (0, 1))
            loss = F.cross_entropy(wrapped(inputs).flatten(0, 1), targets_of.flatten())
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses, {name: parameter.detach() for name, parameter in pairs.items()}


@sampled("divisions", DIVISIONS, 4)
def test_two_ranks_equal_one_and_peft_in_a_plain_loop(divisions: tuple[Division, ...], tmp_path: Path) -> None:
    ((alone, of_peft),) = run_ranks(train_alone, 1, tmp_path, {*WITH_PEFT, *(model for model, _ in divisions)})
    divided = run_ranks(train_divided, 2, tmp_path, divisions, timeout=300)[0]
    for index, (model, _) in enumerate(divisions):
        assert _curve(tmp_path, f"2-{index}") == pytest.approx(_curve(tmp_path, f"1-{model}"), rel=1e-5)
        assert max(float((divided[index][n] - alone[model][n]).abs().max()) for n in divided[index]) < 1e-5
    for model, (losses, adapters) in of_peft.items():
        assert losses == pytest.approx([row["train/loss"] for row in read_metrics(tmp_path, f"1-{model}")], abs=1e-5)
        assert max(float((adapters[name] - tensor).abs().max()) for name, tensor in alone[model].items()) < 1e-5


def _curve(folder: Path, name: str) -> list[float]:
    return [row[tag] for row in read_metrics(folder, name) for tag in ("train/loss", "train/grad_norm")]


def losses_of_first_steps(folder: Path, jobs: list[dict[str, Any]]) -> list[float]:
    for index, job in enumerate(jobs):
        run_job({**job, "training": {**job["training"], "steps": 1}, "job": {**job["job"], "name": f"first-{index}"}})
    return [read_metrics(folder, f"first-{index}")[0]["train/loss"] for index in range(len(jobs))]


def resumed(folder: Path) -> list[dict[str, Tensor]]:
    """Return the states of a run with dropout: uninterrupted, resumed after step 1, and with other random numbers."""
    sections: dict[str, Any] = {"lora": {"dropout": 0.5}, "checkpoint": {"enable": True, "interval": 1}}
    torch.manual_seed(1)
    states = [run_job(lora_job(folder, "whole", **sections))]
    torch.manual_seed(1)
    run_job_until(lora_job(folder, "resumed", **sections), 1)
    torch.manual_seed(2)
    return [*states, *(run_job(lora_job(folder, name, **sections)) for name in ("resumed", "other"))]


FIRST_STEPS: dict[str, dict[str, Any]] = {
    "weights": {},
    "bf16": {"precision": {"param_dtype": "bfloat16"}},
    "experts": EXPERTS,
    "user": USER,
}


@sampled("names", list(FIRST_STEPS))
def test_the_first_step_is_that_of_the_base(names: tuple[str, ...], tmp_path: Path) -> None:
    random_model("Llama 2", tmp_path / "hf")
    file, model = tmp_path / "job.json", {"weights": str(tmp_path / "hf"), "args": {"vocab_size": 62}}
    file.write_text(json.dumps(lora_job(tmp_path, "first", model=model)))
    read = {"model": load_job(str(file)).config.model_dump(mode="json", exclude_none=True)["model"]}
    jobs = [lora_job(tmp_path, "first", **(FIRST_STEPS[name] or read)) for name in names]
    bases = [{**job, "lora": {}} for job in jobs]
    (losses,) = run_ranks(losses_of_first_steps, 1, tmp_path, [*jobs, *bases])
    assert losses[: len(jobs)] == losses[len(jobs) :]


@pytest.mark.slow
def test_dropout_resumes(tmp_path: Path) -> None:
    whole, again, other = run_ranks(resumed, 2, tmp_path)[0]
    assert_equal(whole, again)
    assert not torch.equal(whole["output.lora.a"], other["output.lora.a"])


BF16 = {"param_dtype": "bfloat16", "frozen_storage_dtype": "bfloat16"}
FP32_ADAPTERS = {**BF16, "rules": [{"type": "LoRA", "param_dtype": "float32"}]}
FP32_NORMS = {"rules": [{"type": "RMSNorm", "param_dtype": "float32", "storage_dtype": "float32"}]}
PLACED: dict[str, dict[str, Any]] = {
    "deferred-selective": {"gradient_accumulation": {"mode": "deferred"}, **DIVISIONS[0][1], "precision": BF16},
    "fp32-adapters-full": {"activation_checkpoint": {"mode": "full"}, "precision": FP32_ADAPTERS},
    "fp32-norms": {"precision": {**BF16, **FP32_NORMS}},
    "replicas": {"parallelism": {"data_parallel_replicate_degree": 2}, "precision": FP32_ADAPTERS},
    "offload": {"training": {"enable_cpu_offload": True}, "precision": BF16},
    "TP": {"parallelism": {"tensor_parallel_degree": 2}, "precision": FP32_ADAPTERS},
    "EP": {**EXPERTS, "parallelism": {"expert_parallel_degree": 2}, "precision": BF16},
    "embedding": {**USER, "precision": BF16},
    "unfreeze": {"training": {"unfreeze": [{"match": "layers.1.*_norm.*", "after_step": 1}]}, "precision": BF16},
}
"""Jobs whose adapters and their optimizer state have the same bits in place and in units of their own."""


def placed_job(folder: Path, name: str, placement: str, run: str) -> dict[str, Any]:
    sections = {**PLACED[name]}
    training = sections.pop("training", {})
    job = lora_job(folder, f"{name}-{run}", **sections, checkpoint={"enable": True, "interval": 1})
    job["precision"] = {**sections["precision"], "placement": placement}
    job["training"] |= training
    return job


def placed(folder: Path, names: Sequence[str]) -> list[list[dict[str, Tensor]]]:
    """Return the states of runs with adapters in units of their own, in place, and in place from step 1 on."""
    found = []
    for name in names:
        states = [run_job(placed_job(folder, name, where, where)) for where in ("own_unit", "in_place")]
        run_job_until(placed_job(folder, name, "own_unit", "resumed"), 1)
        found.append([*states, run_job(placed_job(folder, name, "in_place", "resumed"))])
    return found


@pytest.mark.skipif(not MIXES_DTYPES_IN_UNIT, reason="before torch 2.15 adapters have units of their own")
@sampled("names", list(PLACED), 3)
def test_adapters_in_place_and_in_units_of_their_own_have_the_same_bits(names: tuple[str, ...], tmp_path: Path) -> None:
    for ranks, some in ((1, ("fp32-adapters-full",)), (2, names)):
        folder = tmp_path / str(ranks)
        found = run_ranks(placed, ranks, folder, some, timeout=400)[0]
        for name, (own, inside, resumed) in zip(some, found, strict=True):
            assert_equal(own, inside)
            assert_equal(own, resumed)
            assert _curve(folder, f"{name}-own_unit") == _curve(folder, f"{name}-in_place")


def audited(folder: Path) -> tuple[list[str], dict[str, dict[str, Any]], list[tuple[int, str]], str]:
    """Return the differences from the plan, the observations of two modules, the units of adapters, and the line about
    adapters in the log."""
    with ExitStack() as stack:
        run = build_run(
            JobConfig.model_validate(lora_job(folder, "audit", precision=FP32_ADAPTERS)), this_rank(), stack
        )
        with observe(run.model, run.job.plan) as observed:
            train_one_step(run)
            look_at_storage(run.model, observed)
        audit = compare(run.job.plan, run.job.layout, observed)
    seen = {row.name: {f.what: f.observed for f in row.findings if f.observed} for row in audit.modules}
    units = [(len(unit.modules), unit.reason) for unit in run.job.plan.boundaries if unit.is_trained]
    modules = {name: seen[name] for name in ("layers.0.attention.wq", "layers.0.attention.wq.lora")}
    return (
        audit.differences(),
        modules,
        units,
        dict(summary_of_job(run.config, run.job.plan, run.job.layout))["adapters"],
    )


def test_adapters_in_fp32_on_a_base_in_bf16_are_in_place_or_one_unit(tmp_path: Path) -> None:
    differences, seen, units, line = run_ranks(audited, 2, tmp_path)[0]
    assert "2 x layers.*.attention.wk" in line and line.endswith("1 x output; rank 4, alpha 8")
    expected = [(15, "precision.rules.0")] if CAN_SHARE_UNITS else [(1, "precision.rules.0")] * 15
    assert differences == [] and units == expected
    base, adapter = seen.values()
    assert base["parameters"] == base["stored parameters"] == ("bfloat16",)
    assert adapter["parameters"] == adapter["stored parameters"] == adapter["gradients"] == ("float32",)
    assert (adapter["inputs"], adapter["outputs"], base["outputs"]) == (("float32",), ("bfloat16",), ("bfloat16",))


def test_adapters_add_a_reduce_scatter_to_each_block_or_two_collectives_to_the_model() -> None:
    found = {name: planned for name, planned, traced in adapter_units.counts(2) if planned == traced}
    base = 5  # all-gathers of two blocks, the last of them once, and of the embedding and the head
    per_adapter = Collectives(base + 7 * (2 * 1 + 1), 14)
    assert found == {
        **({"in place": Collectives(base, 2)} if MIXES_DTYPES_IN_UNIT else {}),
        "one unit for the model": Collectives(base + 1, 1) if CAN_SHARE_UNITS else per_adapter,
        "one unit per block": Collectives(base + 3, 2) if CAN_SHARE_UNITS else per_adapter,
        "one unit per adapter": per_adapter,
    }
