"""Traces of tiny jobs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.train.jobs import tiny_job
from titan_launch.config.job import JobConfig
from titan_launch.plan.job import Choice
from titan_launch.plan.layout import Layout, plan_layout

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
