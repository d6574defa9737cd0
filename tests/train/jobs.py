"""Tiny jobs, and functions that run them on the ranks of a test."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.distributed import run_ranks
from tests.tensors import full_state
from titan_launch.config.job import JobConfig
from titan_launch.core.errors import RunError, UserError
from titan_launch.distributed.mesh import Mesh, build_mesh
from titan_launch.distributed.process_group import Ranks
from titan_launch.models.factory import HostBuild
from titan_launch.models.init import initialize
from titan_launch.plan.communication import Traffic
from titan_launch.plan.hardware import hardware_of
from titan_launch.plan.job import configured_choice
from titan_launch.plan.layout import Layout, plan_layout
from titan_launch.plan.memory.ledger import Footprint
from titan_launch.plan.types import ModelPlan
from titan_launch.trace.recorder import recorded_engine
from titan_launch.train.build import build_run
from titan_launch.train.explain import explain
from titan_launch.train.health.skipped_steps import act_on_skipped_steps
from titan_launch.train.loop import compared_loss, due_now, fit, is_saved, report, save, train_one_step
from titan_launch.train.measure import MEASURED, PREDICTED
from titan_launch.train.model import build_job_model, plan_precision, shard_model
from titan_launch.train.run import Run
from titan_launch.train.trace_subprocess import with_hardware

TINY_ARGS = {"dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "hidden_dim": 48, "vocab_size": 61}
TINY_EXPERTS: dict[str, Any] = {
    "num_experts": 8,
    "top_k": 2,
    "hidden_dim": 24,
    "shared_hidden_dim": 16,
    "first_dense_layers": 1,
    "score": "sigmoid",
    "selection_bias_rate": 0.05,
    "balance_loss": 0.5,
    "z_loss": 0.1,
}
"""`[model.args.experts]` with everything that balances the load."""

TINY_JOB_FILE = """
[job]
name = "tiny"
dump_folder = "."
device = "cpu"

[model.args]
dim = 32
n_layers = 1
n_heads = 4
n_kv_heads = 2
"""
"""The first tables of a job file that trains on text in seconds. The other tables follow."""


def tiny_job(folder: Path, **sections: dict[str, Any]) -> dict[str, Any]:
    """Return a job that takes well under a second: fp32, synthetic data, four samples a step. `sections` are merged
    over it. Without `checkpoint.enable` it saves nothing, unless `checkpoint.save_last` is given."""
    job: dict[str, dict[str, Any]] = {
        "job": {"name": "tiny", "dump_folder": str(folder), "device": "cpu"},
        "model": {"args": dict(TINY_ARGS)},
        "data": {"kind": "synthetic", "vocab_size": 61, "num_samples": 40},
        "training": {"seq_len": 16, "local_batch_size": 1, "global_batch_size": 4, "steps": 4},
        "precision": {"param_dtype": "float32"},
        "optimizer": {"lr": 1e-2},
        "metrics": {"log_freq": 1, "enable_tensorboard": False},
    }
    for name, values in sections.items():
        job.setdefault(name, {})
        args = {**job[name].get("args", {}), **values.get("args", {})}
        job[name] = {**job[name], **values}
        if args:
            job[name]["args"] = args
    checkpoint = job.get("checkpoint", {})
    job["checkpoint"] = {"save_last": checkpoint.get("enable", False), **checkpoint}
    return job


_MODEL = """
import os, signal, time
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(61, 8)
        self.output = nn.Linear(8, 61, bias=False)

    def forward(self, tokens):
        {in_forward}
        return self.output(self.embedding(tokens))

def build():
    {in_build}
    return Model()
"""


def model_source(in_forward: str = "pass", in_build: str = "pass") -> str:
    """Return the source of a module with a user's model `Model` and its factory `build`. Each first runs a statement in
    one line, which may use `os`, `signal` and `time`."""
    return _MODEL.format(in_forward=in_forward, in_build=in_build)


def this_rank() -> Ranks:
    """Return the rank of a test, on the CPU."""
    return Ranks(dist.get_rank(), dist.get_world_size(), torch.device("cpu"))


def this_mesh() -> Mesh:
    """Return a mesh of all ranks of a test, each with its own data."""
    return build_mesh(Layout(1, dist.get_world_size(), local_batch_size=1, num_microbatches=1), "cpu")


def record(job: dict[str, Any], ranks: int) -> tuple[Footprint, Traffic]:
    """Record a job, as an earlier plan would, so that its run on CPUs knows the predicted memory. Return the planned
    memory and traffic. The process must have no process group."""
    config = JobConfig.model_validate(job)
    layout = plan_layout(config.parallelism, config.training, ranks)
    engine = recorded_engine(with_hardware(config, hardware_of(config, ranks, "cpu")), layout, "cpu")
    choice = configured_choice(config)
    return engine(choice), engine.traffic(choice)


def log_lines() -> list[str]:
    """Return a list to which this process adds each line that the launcher logs from now on."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("titan_launch")
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    return lines


def run_job(job: dict[str, Any]) -> dict[str, Tensor]:
    """Train a job on this rank and return its whole parameters and buffers."""
    with ExitStack() as stack:
        run = build_run(JobConfig.model_validate(job), this_rank(), stack)
        with explained(run):
            fit(run)
        return full_state(run.model)


def error_of_run(job: dict[str, Any]) -> str:
    """Train a job on this rank, and return its error or an empty string."""
    try:
        run_job(job)
    except (RunError, UserError) as error:
        return str(error)
    return ""


@contextmanager
def explained(run: Run) -> Iterator[None]:
    """Raise the errors of a run in the block as `train` raises them."""
    try:
        yield
    except Exception as error:
        while error.__traceback__ and error.__traceback__.tb_frame.f_globals["__name__"].startswith("tests."):
            error.__traceback__ = error.__traceback__.tb_next  # a test's frames would count as the user's code
        found = explain(error, run.config, run.watchdog, run)
        if found is None:
            raise
        raise found from error


def step_and_report(run: Run) -> dict[str, float]:
    """Train one step, and return the metrics of its report by tag."""
    train_one_step(run)
    return report(run, due_now(run))


def run_job_until(job: dict[str, Any], step: int) -> None:
    """Train a job until a step, and leave it as if the process had been killed."""
    with ExitStack() as stack:
        run: Run = build_run(JobConfig.model_validate(job), this_rank(), stack)
        while run.progress.step < step:
            train_one_step(run)
            act_on_skipped_steps(run)
            due = due_now(run)
            scalars = report(run, due)
            if is_saved(run, due):
                save(run, compared_loss(scalars))


def run_and_interrupt(whole: dict[str, Any], part: dict[str, Any], step: int) -> dict[str, Tensor]:
    """Train a job to its end and return its state, then an equal one until a step, from the same random numbers."""
    torch.manual_seed(0)
    state = run_job(whole)
    torch.manual_seed(0)
    run_job_until(part, step)
    return state


def sharded_model(config: JobConfig, seq_len: int) -> nn.Module:
    """Return a job's model on this rank: planned, wrapped and initialised with seed 0, as the launcher does."""
    return planned_and_sharded(config, seq_len)[0]


def planned_and_sharded(config: JobConfig, seq_len: int) -> tuple[nn.Module, ModelPlan, Layout]:
    """Return the same model with its plan and the layout of the ranks."""
    ranks = this_rank()
    training = config.training.model_copy(update={"seq_len": seq_len})
    built = build_job_model(config.model_copy(update={"training": training}), HostBuild(seed=0, free_bytes=2**40))
    layout = plan_layout(config.parallelism, config.training, ranks.world_size)
    plan = plan_precision(config, built)
    model = shard_model(config, built, plan, build_mesh(layout, ranks.device.type))
    model.to_empty(device=ranks.device)
    initialize(model, built.initializer, 0, ranks.device)
    return model, plan, layout


def run_measured(
    job: dict[str, Any],
    ranks: int,
    rel: float,
    run: Callable[[dict[str, Any]], Any] = run_job,
    planned: float | None = None,
) -> list[dict[str, float]]:
    """Train until step 3 measures the planned memory, three times at most, and return the last run's reports.

    A run measures more if gloo's thread happens to free a buffer late. `planned`: in GiB; by default what the run
    itself reports.
    """
    for _ in range(3):
        run_ranks(run, ranks, job)
        reports = read_metrics(Path(job["job"]["dump_folder"]), job["job"]["name"])
        if reports[2][MEASURED] == pytest.approx(planned or reports[2][PREDICTED], rel=rel):
            break
    return reports


def read_metrics(folder: Path, name: str = "tiny") -> list[dict[str, float]]:
    """Return the reports of a run, in order."""
    return [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
