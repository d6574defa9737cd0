"""Run folders with known figures, written by the code that writes those of a run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.train.jobs import tiny_job
from titan_launch.config.job import JobConfig
from titan_launch.config.loading.load import dump_job
from titan_launch.metrics.sinks.jsonl import JsonlSink
from titan_launch.train.run_folder.attempt import Launch
from titan_launch.train.run_folder.folder import LOCK_FILE
from titan_launch.train.run_folder.records import CONFIG_FILE, LAUNCH_FILE

SECONDS = {1: 9.0, 2: 0.5, 4: 0.25, 6: 0.5, 8: 0.75}
"""Seconds per step of the reports. The first step is slow."""


def reports(loss: float = 2.0, speed: float = 1.0) -> dict[int, dict[str, float]]:
    """Return five reports of a run on 2 ranks with 100 tokens a step: the loss falls by 0.1 a step."""
    return {
        step: {
            "train/loss": loss - step / 10,
            "train/grad_norm": 1.5,
            "train/samples_seen": 4.0 * step,
            "train/skipped_steps": 0.0,
            "train/rollbacks": 0.0,
            "time/step_s": seconds / speed,
            "time/data_s": 0.1 * seconds / speed,
            "throughput/tokens_per_second": speed * 100 / seconds,
            "throughput/tokens_per_second_per_device": speed * 50 / seconds,
            "memory/predicted_active_gib": 2.0,
            **({"memory/max_active_gib": 2.5} if step == 4 else {}),
            **({"validation/loss": loss - step / 20} if step in (4, 8) else {}),
        }
        for step, seconds in SECONDS.items()
    }


def record(
    folder: Path, metrics: Mapping[int, Mapping[str, float]], has_ended: bool = True, **sections: dict[str, Any]
) -> Path:
    """Write the folder of a run with 8 steps, and return it. `sections`: as in `tiny_job`."""
    job = tiny_job(folder.parent, **{"training": {"steps": 8, "global_batch_size": 4}, **sections})
    job["job"]["name"] = folder.name
    folder.mkdir(parents=True)
    (folder / CONFIG_FILE).write_text(dump_job(JobConfig.model_validate(job)))
    (folder / LAUNCH_FILE).write_text(Launch((), None, has_ended).to_json())
    (folder / LOCK_FILE).touch()
    sink = JsonlSink(folder / "metrics.jsonl")
    for step, scalars in metrics.items():
        sink.write(step, scalars)
    sink.close()
    return folder


def add_log(folder: Path, attempt: int, *lines: str, rank: int = 0) -> None:
    """Write the log of a rank. Each line is `LEVEL text`; the lines are a minute apart."""
    path = folder / "logs" / f"attempt-{attempt}" / f"rank_{rank}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    stamped = (f"2026-11-23 {attempt:02}:{minute:02}:00,000 {line}" for minute, line in enumerate(lines))
    path.write_text("".join(f"{line}\n" for line in stamped))


def audit(folder: Path) -> None:
    """Write the records of units and dtypes."""
    unit = {"storage_dtype": "float32", "compute_dtype": "bfloat16", "reduce_dtype": "float32", "output_dtype": None}
    units = [{"name": f"layers.{n}", "parameters": 10, "reason": "block", **unit} for n in range(3)]
    (folder / "units.json").write_text(json.dumps(units))
    planned = [{"name": f"layers.{n}", "as_planned": n < 2} for n in range(3)]
    (folder / "precision_audit.json").write_text(json.dumps({"differences": [], "modules": [], "units": planned}))
