"""An optimizer that is sharded over the replicas of HSDP trains like one that is not, with a part of the state."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.distributed import run_ranks
from tests.parallel.conv_model import ConvNet
from tests.sampling import rest_is_slow, sampled
from tests.tensors import assert_equal
from tests.train.jobs import TINY_EXPERTS, read_metrics, run_job, run_job_until, this_rank, tiny_job
from titan_launch.checkpoint.index import read_index, read_tensor
from titan_launch.config.job import JobConfig
from titan_launch.distributed.dtensor import local_tensor, part_of_box
from titan_launch.distributed.ring_attention_on_cpu import ring_attention_on_cpu
from titan_launch.metrics.memory import track
from titan_launch.optim import replica_shards
from titan_launch.optim.registry import replicas_of
from titan_launch.optim.replica_shards import chunk_of
from titan_launch.plan.communication import exchanged_units
from titan_launch.plan.memory.ledger import Category, Ledger, StepPoint, book_update, state_bytes, temporary_bytes
from titan_launch.plan.memory.replay import group_sizes
from titan_launch.plan.mup import UNSCALED
from titan_launch.train.build import build_run

ONE_BLOCK: dict[str, Any] = {"args": {"n_layers": 1}}
UNCLIPPED: dict[str, Any] = {"global_batch_size": 8, "max_norm": 0.0}
STORED_IN_BF16: dict[str, Any] = {"param_dtype": "float32", "storage_dtype": "bfloat16", "reduce_dtype": "bfloat16"}
OF_EXPERTS: dict[str, Any] = {**TINY_EXPERTS, "num_experts": 4, "first_dense_layers": 0}
EXPERTS: dict[str, Any] = {"name": "qwen3_moe", "args": {"head_dim": 8, "n_layers": 1, "experts": OF_EXPERTS}}
FEW_EXPERTS: dict[str, Any] = {"num_experts": 2, "top_k": 1, "hidden_dim": 24}
CASES: dict[str, dict[str, Any]] = {
    "AdamW": {"metrics": {"log_freq": 1, "modules": ["layers.*"]}},
    "foreach": {"optimizer": {"implementation": "foreach"}, "precision": {"param_dtype": "bfloat16"}},
    "SGD": {"optimizer": {"name": "SGD", "lr": 0.1, "weight_decay": 1e-4}},
    "Muon in 8 bits": {"optimizer": {"name": "Muon", "state_dtype": "int8"}},
    "stochastic": {
        "optimizer": {"name": "Muon", "rounding": "stochastic"},
        "precision": STORED_IN_BF16,
        "training": {"global_batch_size": 4, "max_norm": 0.0},
    },
    "masters": {
        "optimizer": {"master_weights": True, "state_dtype": "float32"},
        "precision": STORED_IN_BF16,
        "training": {"global_batch_size": 4, "max_norm": 0.0},
    },
    "BatchNorm": {"model": {"args": {"norm": "batchnorm"}}, "batchnorm": {"statistics": "synchronized"}},
    "offload": {"training": {**UNCLIPPED, "enable_cpu_offload": True}},
    "skipped": {
        "training": {**UNCLIPPED, "steps": 8},
        "debug": {"spike_sigma": 0.1, "spike_window": 2},
        "optimizer": {"lr": 1e-2},
    },
    "experts": {"model": EXPERTS},
    "experts, Muon": {"model": EXPERTS, "optimizer": {"name": "Muon"}},
    "experts, EP": {"model": EXPERTS, "parallelism": {"expert_parallel_degree": 2}},
    "TP": {"model": {"args": {"vocab_size": 64}}, "parallelism": {"tensor_parallel_degree": 2}},
    "TP, Muon": {
        "model": {"args": {"vocab_size": 64}},
        "parallelism": {"tensor_parallel_degree": 2},
        "optimizer": {"name": "Muon"},
    },
    "CP": {"parallelism": {"context_parallel_degree": 2}},
    "PP": {"model": {"args": {"n_layers": 2}}, "parallelism": {"pipeline_parallel_degree": 2}},
    "clipped": {"training": {"global_batch_size": 8, "max_norm": 0.5}},
    "few experts": {"model": {"name": "qwen3_moe", "args": {"head_dim": 8, "n_layers": 1, "experts": FEW_EXPERTS}}},
    "LoRA, empty shards": {"lora": {"targets": ["layers.*.attention.wq"], "rank": 1}},
    "tied": {"model": {"args": {"tie_embeddings": True}}},
    "frozen at first": {"training": {**UNCLIPPED, "unfreeze": [{"match": "layers.0.**", "after_step": 1}]}},
    "convolutions in 8 bits": {
        "model": {"name": f"{__name__}:convolutions"},
        "optimizer": {"state_dtype": "int8"},
    },
}


def convolutions(**llama: Any) -> ConvNet:
    """Return a convolutional network. `llama`: the arguments of the other cases."""
    return ConvNet()


def jobs_of(
    folder: Path, case: str, replicas: int = 2, mode: str = "immediate", steps: int = 2
) -> tuple[dict[str, Any], ...]:
    """Return two equal jobs, whose optimizer is sharded only in the second. `mode`: mode of the second; FSDP2 reduces
    between replicas once per step in the first too."""
    sections, once = CASES[case], "deferred_all_reduce"
    return tuple(
        tiny_job(
            folder,
            **{
                "model": ONE_BLOCK,
                **sections,
                "training": {"steps": steps, **sections.get("training", UNCLIPPED)},
                "job": {"name": name},
                "gradient_accumulation": {"mode": once if mode == "immediate" and not is_sharded else mode},
                "parallelism": {
                    "data_parallel_replicate_degree": replicas,
                    "shard_optimizer_over_replicas": is_sharded,
                    **sections.get("parallelism", {}),
                },
            },
        )
        for name, is_sharded in (("whole", False), ("sharded", True))
    )


def train_both(folder: Path, cases: list[str], mode: str) -> None:
    for case in cases:
        with ring_attention_on_cpu():
            whole, sharded = (run_job(job) for job in jobs_of(folder / case, case, mode=mode))
        assert whole.keys() == sharded.keys()
        assert [name for name in whole if not torch.equal(whole[name], sharded[name])] == [], case


@sampled("cases", [case for case in CASES if case != "clipped"], 11)
def test_with_two_replicas_every_bit_is_that_of_fsdp2(cases: tuple[str, ...], tmp_path: Path) -> None:
    """A sum of two gradients has one order, and no update depends on the order of anything else."""
    run_ranks(train_both, 4, tmp_path, list(cases), "immediate", timeout=600)
    if "skipped" in cases:
        skipped = [read_metrics(tmp_path / "skipped", name)[-1]["train/skipped_steps"] for name in ("whole", "sharded")]
        assert skipped[0] == skipped[1] > 0
    whole, sharded = (read_metrics(tmp_path / "AdamW", name) for name in ("whole", "sharded"))
    for before, after in zip(whole, sharded, strict=True):
        measured = {tag: value for tag, value in before.items() if tag.startswith("learned/") or "grad_norm" in tag}
        assert len(measured) > 4
        assert {tag: after[tag] for tag in measured} == pytest.approx(measured, rel=1e-5)


@sampled("cases", ("SGD", "AdamW"))
def test_deferred_gradients_are_those_of_fsdp2(cases: tuple[str, ...], tmp_path: Path) -> None:
    run_ranks(train_both, 4, tmp_path, list(cases), "deferred")


def train_close(folder: Path, replicas: int) -> None:
    for case in ("clipped", "Muon in 8 bits", "few experts"):
        training = {**CASES[case].get("training", UNCLIPPED), "global_batch_size": 2 * dist.get_world_size()}
        whole, sharded = (
            # With the default eps, AdamW's update of a gradient near 0 has the size of the learning rate.
            run_job(
                {**job, "training": {**job["training"], **training}, "optimizer": {**job["optimizer"], "eps": 1e-5}}
            )
            for job in jobs_of(folder / case, case, replicas)
        )
        # In 8 bits, a gradient that differs in its last bit may get another code. The embeddings of rare tokens have
        # gradients near 0 (see above); with few experts, they differed by 1.5e-6.
        tolerance = {"Muon in 8 bits": 1e-3, "few experts": 3e-6}.get(case, 1e-6)
        for name, tensor in whole.items():
            torch.testing.assert_close(
                sharded[name], tensor, rtol=0, atol=tolerance, msg=lambda text, at=f"{case}: {name}": f"{at}: {text}"
            )


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "replicas"), [(3, 3), (4, 2), (4, 4), (8, 4)])
def test_with_more_replicas_sums_differ_only_in_their_order(tmp_path: Path, ranks: int, replicas: int) -> None:
    """With clipping the norm is a sum in another order, too."""
    run_ranks(train_close, ranks, tmp_path, replicas, timeout=600)


def saving(job: dict[str, Any]) -> dict[str, Any]:
    checkpoint = {"enable": True, "interval": 1, "accept_changes": True}
    return {**job, "checkpoint": checkpoint, "ema": {"decay": 0.9}}


def resume_all_as_the_other(folder: Path, cases: tuple[str, ...]) -> None:
    for case in cases:
        resume_as_the_other(folder / case, case)


def resume_as_the_other(folder: Path, case: str) -> None:
    """Compare the checkpoints of both jobs. Then let each resume from that of the other."""
    jobs = [saving(job) for job in jobs_of(folder, case)]
    whole = run_job(jobs[0])
    run_job_until(jobs[1], 1)
    saved = [folder / f"{job['job']['name']}/checkpoints/step-1" for job in jobs]
    index, expected = map(read_index, reversed(saved))
    assert index.keys() == expected.keys()
    for name, tensor in expected.items():
        if not name.startswith("random"):
            assert torch.equal(read_tensor(saved[1], index[name]), read_tensor(saved[0], tensor)), name
    for job, of_other in zip(jobs, reversed(saved), strict=True):
        resumed = {"name": f"{job['job']['name']}-resumed"}
        load = {**job["checkpoint"], "load": str(of_other)}
        assert_equal(run_job({**job, "job": {**job["job"], **resumed}, "checkpoint": load}), whole)
        assert read_metrics(folder, resumed["name"])[0]["step"] == 2


@sampled("cases", ("Muon in 8 bits", "masters", "convolutions in 8 bits"), 3)
def test_checkpoints_of_both_are_bitwise_equal_and_each_resumes_from_the_other(
    cases: tuple[str, ...], tmp_path: Path
) -> None:
    run_ranks(resume_all_as_the_other, 4, tmp_path, cases, timeout=300)


def load_and_compare(job: dict[str, Any], checkpoint: Path) -> None:
    """Compare this replica's chunks with the checkpoint from which they were loaded."""
    index = read_index(checkpoint)
    with ExitStack() as stack:
        run = build_run(JobConfig.model_validate(job), this_rank(), stack)
        state = run.state.state_dict()
        chunks = {f"ema.{name}": chunk for name, chunk in state["ema"].items()}
        for name, of_parameter in state["optimizer"].items():
            chunks |= {f"optimizer.{name}.{key}": value for key, value in of_parameter.items() if key != "step"}
        for name, chunk in chunks.items():
            part = part_of_box(read_tensor(checkpoint, index[name]), chunk.offsets, chunk.local.shape)
            assert torch.equal(part, chunk.local), name


@pytest.mark.slow
def test_any_number_of_replicas_loads_every_bit(tmp_path: Path) -> None:
    job = saving(jobs_of(tmp_path, "experts", steps=1)[1])
    run_ranks(run_job, 4, job)
    checkpoint = tmp_path / "sharded/checkpoints/step-1"
    for ranks, replicas in ((3, 3), (4, 4)):
        parallelism = {**job["parallelism"], "data_parallel_replicate_degree": replicas}
        training = {**job["training"], "global_batch_size": 12}
        run_ranks(load_and_compare, ranks, {**job, "parallelism": parallelism, "training": training}, checkpoint)


LARGE: dict[str, Any] = {
    "args": {"dim": 64, "n_layers": 1, "n_heads": 4, "n_kv_heads": 2, "hidden_dim": 192, "vocab_size": 512}
}


def measure(job: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """Return measured and planned bytes on this rank, after a step: the optimizer state, and the peak while gradients
    are exchanged, parameters updated and exchanged.

    Nothing is exchanged, because a thread of gloo holds the last tensor that it has sent.
    """
    for name in ("reduce_scatter_single", "all_gather_single"):  # the rank ends with the test
        setattr(replica_shards, name, lambda *args, **kwargs: SimpleNamespace(wait=lambda: None))
    config = JobConfig.model_validate(job)
    with ExitStack() as stack:
        run = build_run(config, this_rank(), stack)
        replicas, found = replicas_of(run.optimizer), []
        for _ in range(3):
            for parameter in run.model.parameters():
                parameter.grad = torch.ones_like(parameter)
            ledger = Ledger()
            ledger.enter(StepPoint(0, "step", ""))
            with track(run.model, ledger, run.optimizer):
                before = ledger.total
                if replicas is not None:
                    replicas.reduce_gradients()
                run.optimizer.step()
                if replicas is not None:
                    replicas.gather_parameters()
                run.optimizer.zero_grad()
                found.append(ledger.footprint().peak_bytes - before)
        states = [value for state in run.optimizer.state.values() for value in state.values() if value.ndim]
        planned, groups = (
            Ledger(),
            group_sizes([(run.job.plan, run.job.plan)], config.optimizer, run.job.layout, UNSCALED),
        )
        planned.enter(StepPoint(0, "step", ""))
        gradients = sum(local_tensor(parameter).nbytes for parameter in run.model.parameters())
        planned.allocate(gradients, Category.GRADIENTS)
        temporaries = temporary_bytes(config.optimizer, groups, run.job.layout.optimizer_shards)
        book_update(planned, temporaries, exchanged_units(run.job.plan, run.job.layout).values(), run.job.layout, False)
        return {
            "state": (sum(local_tensor(state).nbytes for state in states), state_bytes(config.optimizer, groups)),
            "update": (min(found[1:]), planned.footprint().peak_bytes - gradients),
        }


OPTIMIZERS = {
    "int8": {"state_dtype": "int8"},
    "foreach": {"implementation": "foreach"},
    "Muon": {"name": "Muon", "state_dtype": "bfloat16"},
    "AdamW": {},
}


def measure_both(
    folder: Path, replicas: int, names: tuple[str, ...]
) -> list[dict[str, dict[str, tuple[float, float]]]]:
    jobs = [{**job, "model": LARGE} for job in jobs_of(folder, "AdamW", replicas)]
    return [{name: measure({**job, "optimizer": OPTIMIZERS[name]}) for name in names} for job in jobs]


@pytest.mark.parametrize("replicas", rest_is_slow([2, 4]))
@sampled("names", list(OPTIMIZERS))
def test_the_state_is_divided_by_the_replicas_and_planned_bytes_are_the_measured_ones(
    tmp_path: Path, replicas: int, names: tuple[str, ...]
) -> None:
    ranks = run_ranks(measure_both, 4, tmp_path, replicas, names, timeout=300)
    for name in names:
        largest = [max(rank[is_sharded][name]["state"][0] for rank in ranks) for is_sharded in (0, 1)]
        assert largest[1] * replicas == pytest.approx(largest[0], rel=0.01), name
        for what in ("state", "update"):
            measured, planned = ranks[0][1][name][what]
            assert measured == pytest.approx(planned, rel=0.01, abs=64), (name, what)


@pytest.mark.parametrize("shape", [(5,), (6, 4), (1, 4), (0, 4), (2, 8, 4), (3, 8, 4), (2, 7, 4), (4, 3, 2, 2)])
@pytest.mark.parametrize("replicas", [2, 3, 4])
def test_chunks_are_boxes_that_cover_a_shard_once(shape: tuple[int, ...], replicas: int) -> None:
    seen = torch.zeros(shape, dtype=torch.int32)
    for index in range(replicas):
        chunk = chunk_of(seen.shape, replicas, index)
        chunk.of(seen).add_(1)
        box = seen
        for dim, (offset, length) in enumerate(zip(chunk.offsets, chunk.shape, strict=True)):
            box = box.narrow(dim, offset, length) if length else box[:0]
        assert box.shape == chunk.shape or not box.numel()
        assert not box.numel() or box.data_ptr() == chunk.of(seen).data_ptr()
    assert bool((seen == 1).all())
    if shape == (2, 8, 4) and replicas == 4:  # 4 replicas share 2 experts
        assert chunk.shape == (1, 4, 4)
