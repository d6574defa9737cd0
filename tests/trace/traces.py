"""Tiny jobs to trace, and plans of jobs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.train.jobs import tiny_job
from titan_launch.config.job import JobConfig
from titan_launch.plan.communication import Traffic
from titan_launch.plan.hardware import Kernels
from titan_launch.plan.job import Choice, configured_choice
from titan_launch.plan.layout import Layout, plan_layout
from titan_launch.plan.memory.ledger import Footprint
from titan_launch.plan.types import Inventory
from titan_launch.trace.recorder import recorded_engine
from titan_launch.train.model import build_job_model, inspect_model

FP32_NORMS = {"param_dtype": "bfloat16", "rules": [{"type": "RMSNorm", "param_dtype": "float32"}]}


def a_job(ranks: int, **sections: dict[str, Any]) -> tuple[JobConfig, Layout, Choice]:
    """Return a tiny job (see `tests.train.jobs`) of three microbatches, for a trace of `ranks` ranks."""
    training = {"seq_len": 32, "local_batch_size": 1, "global_batch_size": 12, **sections.pop("training", {})}
    job = tiny_job(Path("unused"), training=training, **sections)
    for name in ("data", "model"):
        if {"kind", "name"} & sections.get(name, {}).keys():  # a section of another kind has its own keys
            job[name] = sections[name]
    config = JobConfig.model_validate(job)
    layout = plan_layout(config.parallelism, config.training, ranks)
    return config, layout, Choice(config.gradient_accumulation, config.activation_checkpoint)


def model_inventory(config: JobConfig) -> Inventory:
    """Return the table of the modules of a job's model."""
    return inspect_model(config, build_job_model(config))


def planned(config: JobConfig, layout: Layout, kernels: Kernels) -> tuple[Footprint, Traffic]:
    """Return memory and traffic of a job in its own modes, as `plan` does. The process must have no process group."""
    engine, choice = recorded_engine(config, layout, kernels), configured_choice(config)
    return engine(choice), engine.traffic(choice)
