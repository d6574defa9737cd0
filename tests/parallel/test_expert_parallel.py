"""Expert parallelism: experts on several ranks compute, train and are saved like experts on one. `test_matrix.py` has
all divisions."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from tests.distributed import run_ranks
from tests.tensors import cross_entropy_sum
from tests.trace.traces import planned
from tests.train.jobs import this_rank, tiny_job
from titan_launch.checkpoint.index import read_index, read_tensor
from titan_launch.config.axes import EXPERT
from titan_launch.config.job import JobConfig
from titan_launch.core.errors import ConfigError
from titan_launch.distributed.dtensor import local_tensor, own_box, part_of_box
from titan_launch.distributed.mesh import build_mesh
from titan_launch.metrics.traffic import count_collectives
from titan_launch.models.build import build_model
from titan_launch.models.decoder.mixture_of_experts import Experts, count_choices
from titan_launch.models.decoder.table_args import ExpertArgs
from titan_launch.models.init import initialize
from titan_launch.parallel.expert_parallel import Dispatch
from titan_launch.parallel.fsdp import Accumulation
from titan_launch.plan.communication import Traffic
from titan_launch.plan.layout import Layout, plan_layout
from titan_launch.trace.observers import ExchangesCounted
from titan_launch.train.build import build_run
from titan_launch.train.loop import due_now, fit, report, save, train_one_step
from titan_launch.train.model import plan_precision, shard_model
from titan_launch.train.run import Run

EXPERTS = {"top_k": 2, "hidden_dim": 16, "shared_hidden_dim": 16, "expert_bias": True, "balance_loss": 0.1}


def job(folder: Path, name: str, num_experts: int = 4, **sections: dict[str, Any]) -> dict[str, Any]:
    model = {"name": "qwen3_moe", "args": {"head_dim": 8, "experts": {**EXPERTS, "num_experts": num_experts}}}
    optimizer = {"eps": 1e-5, "lr": 1e-2, **sections.pop("optimizer", {})}
    return tiny_job(folder, job={"name": name}, model=model, optimizer=optimizer, **sections)


def compare_dispatched(dtype: torch.dtype) -> None:
    """Compare experts on two ranks with the same experts on each rank alone. The second half of the tests chooses
    experts of the first rank only, so that the other rank computes no row."""
    rank, args = dist.get_rank(), ExpertArgs(num_experts=4, top_k=2, hidden_dim=8, expert_bias=True)
    torch.manual_seed(0)
    alone = Experts(6, args, nn.functional.silu).to(dtype)
    divided = Experts(6, args, nn.functional.silu)
    for name, parameter in alone.named_parameters():
        divided.register_parameter(name, nn.Parameter(parameter.detach()[2 * rank : 2 * rank + 2].clone()))
    divided.dispatch = Dispatch(init_device_mesh("cpu", (2,), mesh_dim_names=(EXPERT.short,))[EXPERT.short])
    for highest in (4, 2):
        torch.manual_seed(1 + rank)
        xs = [torch.randn(5 + rank, 6).to(dtype).requires_grad_()]
        xs.append(xs[0].detach().clone().requires_grad_())
        chosen = torch.rand(5 + rank, highest).argsort(-1)[:, :2]
        weights = torch.randn(5 + rank, 2, 6).to(dtype)
        counts = count_choices(chosen, args.num_experts)
        outputs = [experts(x, chosen, counts) for experts, x in zip((alone, divided), xs, strict=True)]
        gradients = [
            torch.autograd.grad((output * weights).sum(), [x, *experts.parameters()])
            for experts, x, output in zip((alone, divided), xs, outputs, strict=True)
        ]
        torch.testing.assert_close(outputs[1], outputs[0])
        torch.testing.assert_close(gradients[1][0], gradients[0][0])
        for own, whole in zip(gradients[1][1:], gradients[0][1:], strict=True):
            total = whole.float()
            dist.all_reduce(total)  # both ranks' tokens
            torch.testing.assert_close(own.float(), total[2 * rank : 2 * rank + 2], atol=1e-2, rtol=2e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_on_two_ranks_compute_like_experts_on_one(dtype: torch.dtype) -> None:
    run_ranks(compare_dispatched, 2, dtype)


Parts = dict[str, tuple[tuple[int, ...], Tensor]]
"""This rank's parts of tensors, with their offsets in the whole tensors."""


def parts_of(run: Run) -> Parts:
    """Return this rank's parts of parameters and optimizer state, by the names of a checkpoint."""
    tensors: dict[str, Tensor] = {}
    for name, parameter in run.model.named_parameters():
        states = run.optimizer.state[parameter] if run.optimizer.state else {}
        tensors |= {f"model.{name}": parameter} | {f"optimizer.{name}.{key}": state for key, state in states.items()}
    parts: Parts = {}
    for name, tensor in tensors.items():
        assert isinstance(tensor, DTensor) or tensor.ndim == 0
        parts[name] = (own_box(tensor.shape, tensor)[0], local_tensor(tensor).detach().clone())
    return parts


def assert_parts(parts: Parts, whole: dict[str, Tensor]) -> None:
    """Check that the parts are those of the whole tensors, bit for bit."""
    assert parts.keys() == whole.keys()
    for name, (offsets, part) in parts.items():
        assert torch.equal(part, part_of_box(whole[name], offsets, part.shape)), name


def trained(config: dict[str, Any], steps: int) -> tuple[Parts, list[tuple[float, float]]]:
    """Return the parts with which a run starts, and the losses and gradient norms of its next steps."""
    with ExitStack() as stack:
        run, measured = build_run(JobConfig.model_validate(config), this_rank(), stack), []
        parts = parts_of(run)
        for _ in range(steps):
            due = due_now(run)
            train_one_step(run)
            scalars = report(run, due)
            measured.append((scalars["train/loss"], scalars["train/grad_norm"]))
        return parts, measured


def train_and_save(config: dict[str, Any]) -> Parts:
    """Train a job to its end, save it, and return the parts with which it started."""
    with ExitStack() as stack:
        run = build_run(JobConfig.model_validate(config), this_rank(), stack)
        parts = parts_of(run)
        fit(run)
        save(run)
        return parts


def all_trained(jobs: list[dict[str, Any]], steps: int) -> list[tuple[Parts, list[tuple[float, float]]]]:
    return [trained(config, steps) for config in jobs]


@pytest.mark.slow
@pytest.mark.parametrize(("num_experts", "degrees"), [(4, (4,)), (4, (1,)), (6, (2, 1))])
def test_a_checkpoint_moves_between_degrees_bitwise(tmp_path: Path, num_experts: int, degrees: tuple[int, ...]) -> None:
    """With 6 experts, FSDP2 shards the 3 experts of a rank along their second dim over 2 ranks."""

    def divided(name: str, degree: int, **checkpoint: Any) -> dict[str, Any]:
        checkpoints, training = {"enable": True, "interval": 1, **checkpoint}, {"steps": 1 if name == "saved" else 3}
        parallelism, constant = {"expert_parallel_degree": degree}, {"kind": "constant", "warmup_steps": 0}
        return job(
            tmp_path,
            name,
            num_experts,
            parallelism=parallelism,
            checkpoint=checkpoints,
            training=training,
            lr_scheduler=constant,
        )

    initial = run_ranks(train_and_save, 4, divided("saved", 2))
    folder = tmp_path / "saved/checkpoints/step-1"
    index = read_index(folder)
    saved = {name: read_tensor(folder, tensor) for name, tensor in index.items() if name.split(".")[0] != "progress"}
    saved = {name: tensor for name, tensor in saved.items() if name.startswith(("model.", "optimizer."))}
    path = str(folder)
    on_four = run_ranks(
        all_trained, 4, [divided(f"load{degree}", degree, load=path) for degree in degrees], 2, timeout=200
    )
    ((alone, losses),) = run_ranks(all_trained, 1, [divided("alone", 1, load=path)], 2)[0]
    ((begun, _),) = run_ranks(all_trained, 1, [divided("begun", 1)], 0)[0]
    for parts in initial:
        assert_parts(parts, {name: part for name, (_, part) in begun.items()})
    whole = {name: saved[name] for name in alone}
    assert any("exp_avg_sq" in name for name in whole)
    assert_parts(alone, whole)
    for of_rank in on_four:
        for parts, measured in of_rank:
            assert_parts(parts, whole)
            assert measured == [pytest.approx(pair, rel=1e-5) for pair in losses]


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "offload": {"training": {"enable_cpu_offload": True}},
    "compiled": {"compile": {"enable": True, "backend": "eager"}},
    "compiled, full": {"compile": {"enable": True, "backend": "eager"}, "activation_checkpoint": {"mode": "full"}},
    "Muon, EMA": {"optimizer": {"name": "Muon"}, "ema": {"decay": 0.9}},
    "SGD": {"optimizer": {"name": "SGD", "eps": 1e-8}},
    "unsharded": {"gradient_accumulation": {"mode": "immediate", "keep_params_unsharded": True}},
}


def all_cases(folder: Path, degree: int) -> list[list[tuple[float, float]]]:
    parallelism = {"expert_parallel_degree": degree}
    jobs = [job(folder, str(i), parallelism=parallelism, **case) for i, case in enumerate(CASES.values())]
    return [trained(config, 2)[1] for config in jobs]


@pytest.mark.slow
def test_offload_compilation_and_optimizers_train_like_one_process(tmp_path: Path) -> None:
    alone = run_ranks(all_cases, 1, tmp_path / "alone", 1)[0]
    for of_rank in run_ranks(all_cases, 4, tmp_path / "divided", 2, timeout=200):
        for name, measured, expected in zip(CASES, of_rank, alone, strict=True):
            tolerance = 1e-3 if "Muon" in name else 1e-5  # Newton-Schulz iterations are in bf16
            assert measured == [pytest.approx(pair, rel=tolerance) for pair in expected], name
        assert of_rank[0] == of_rank[1]  # offload changes no bit


def muon_with_divided_matrices(folder: Path) -> str:
    parallelism = {"expert_parallel_degree": 2}
    with pytest.raises(ConfigError) as caught:
        trained(job(folder, "muon", 6, parallelism=parallelism, optimizer={"name": "Muon"}), 0)
    return str(caught.value)


def test_muon_refuses_experts_whose_matrices_are_divided(tmp_path: Path) -> None:
    (message, *_) = run_ranks(muon_with_divided_matrices, 4, tmp_path)
    assert "Muon needs whole matrices of experts, but FSDP2 divides each expert of layers.0" in message


def job_to_count(folder: Path, parallelism: dict[str, Any], mode: str) -> tuple[JobConfig, Layout]:
    """Return a job of two microbatches on 4 ranks. fp32 norms have a unit of their own."""
    rules = [{"type": "RMSNorm", "param_dtype": "float32"}]
    config = JobConfig.model_validate(
        job(
            folder,
            "tiny",
            parallelism=parallelism,
            precision={"param_dtype": "bfloat16", "rules": rules},
            gradient_accumulation={"mode": mode},
            training={"global_batch_size": None, "local_batch_size": 1},
        )
    )
    return config, replace(plan_layout(config.parallelism, config.training, 4), num_microbatches=2)


def counted(config: JobConfig, layout: Layout) -> Traffic:
    """Return the traffic of one step."""
    built = build_model(config.model, 16)
    plan, mesh = plan_precision(config, built), build_mesh(layout, "cpu")
    model = shard_model(config, built, plan, mesh).to_empty(device="cpu")
    initialize(model, built.initializer, 0, torch.device("cpu"))
    strategy, tokens = Accumulation(config.gradient_accumulation), 16
    inputs = torch.randint(0, 61, (1, tokens))
    with count_collectives(model) as count, ExchangesCounted(mesh, count):
        for index in range(2):
            strategy.begin_microbatch(model, is_last=index == 1)
            cross_entropy_sum(model(inputs), inputs).backward()
    return count.traffic


@pytest.mark.parametrize(
    ("mode", "parallelism"),
    [
        pytest.param("immediate", {"expert_parallel_degree": 2}, marks=pytest.mark.slow),
        ("deferred_all_reduce", {"expert_parallel_degree": 2, "data_parallel_replicate_degree": 2}),
    ],
)
def test_counted_collectives_and_exchanges_are_the_planned_ones(
    tmp_path: Path, mode: str, parallelism: dict[str, Any]
) -> None:
    """The choices are not equal, so a rank may send more results than another. The sum over all ranks is planned."""
    config, layout = job_to_count(tmp_path, parallelism, mode)
    _, expected = planned(config, layout, "cpu")
    found = run_ranks(counted, 4, config, layout)
    for seen in found:
        assert replace(seen, expert=expected.expert) == expected
        assert seen.expert.calls == expected.expert.calls == 5 * 4
    assert sum(seen.expert.sent_bytes for seen in found) == 4 * expected.expert.sent_bytes
