"""Comparison of planned memory with the memory that PyTorch's allocator takes on a phantom GPU, without a GPU.

    python benchmarks/phantom_memory.py [--only GLOB] [--write docs/verification/gpu.md]

Needs a CUDA build of torch. Every row is one `titan-launch plan --measure`: three steps of the fullest rank. The first
rows are the shipped configurations, the others the runs of `published_memory.py`, here compiled and in fp8 where the
reports say so. The exit status is 1 if the planned active memory of a shipped configuration is not within 0.3 % of what
its tensors request. Compiled jobs and jobs in fp8 are planned as eager bf16 jobs, and not compared.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from published_memory import REPORTS, Report, job_of
from publishing import publish

from titan_launch.config.loading.load import dump_job
from titan_launch.plan.hardware import GIB

_CHECKOUT = Path(__file__).parent.parent
_CONFIGS = _CHECKOUT / "configs"
_RANKS = {
    "deferred_all_reduce": 4,
    "llama3_8b": 8,
    "llama3_8b_float8": 8,
    "context": 8,
    "llama3_70b": 64,
    "qwen3_30b_a3b": 64,
    "llama3_405b": 512,
}
"""Ranks of the shipped configurations; 2 for the others."""

_NOT_PLANNED = ("llama3_8b_float8.toml", "parallel/compiled.toml")
_TOLERANCE = 0.003


def measure(config: Path, ranks: int, options: list[str]) -> dict[str, Any] | str:
    """Return the plan of a job with its measured memory, as JSON; the last line of the error if it fails."""
    command = [sys.executable, "-m", "titan_launch", "plan", "--config", str(config), f"--world-size={ranks}", "--json"]
    ended = subprocess.run(
        [*command, "--rows=own", "--measure", *options], capture_output=True, text=True, cwd=_CHECKOUT
    )
    if ended.returncode:
        return (ended.stderr.strip().splitlines() or ["no message"])[-1]
    plan: dict[str, Any] = json.loads(ended.stdout[ended.stdout.index("{\n") :])
    return plan


def shipped() -> Iterator[tuple[str, Path, int, list[str]]]:
    """Yield name, file, ranks and options of each shipped configuration that trains by itself."""
    for path in sorted(_CONFIGS.rglob("*.toml")):
        if path.stem not in ("resume", "custom_model"):
            yield (
                str(path.relative_to(_CONFIGS)),
                path,
                _RANKS.get(path.stem, 2),
                ["--device=h100-80gb", "--memory-gib=400"],
            )


def published(folder: Path) -> Iterator[tuple[str, Path, int, list[str], Report]]:
    """Yield name, file, ranks, options and report of each published run."""
    for index, report in enumerate(REPORTS):
        path = folder / f"{index}.json"
        path.write_text(dump_job(job_of(report, as_published=True)))
        memory = "139.7" if "H200" in report.name else "95"
        yield f"published: {report.name}", path, report.ranks, ["--device=h100-80gb", f"--memory-gib={memory}"], report


def main() -> int:
    """Measure all rows."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--only", default="*", metavar="GLOB", help="measure the rows whose names match")
    parser.add_argument("--write", type=Path, help="Markdown file with the markers")
    options = parser.parse_args()
    columns = [
        "job",
        "ranks",
        "planned active",
        "requested",
        "measured active",
        "planned reserved",
        "measured reserved",
        "published",
    ]
    table, is_right = [columns, ["---"] * len(columns)], True
    with tempfile.TemporaryDirectory() as folder:
        jobs = [*((*job, None) for job in shipped()), *published(Path(folder))]
        for name, path, ranks, extra, report in jobs:
            if not fnmatch(name, options.only):
                continue
            plan = measure(path, ranks, extra)
            known = f"{report.reserved_gib:.1f}" if report else ""
            if isinstance(plan, str):
                table.append([name, str(ranks), plan, "", "", "", known])
                is_right = False
            else:
                row = next(row for row in plan["rows"] if row["is_chosen"])
                requested, active, reserved = (
                    plan["trial"][kind] / GIB for kind in ("requested", "active", "reserved")
                )
                planned = (
                    row["active_bytes"] / GIB,
                    row["reserved_bytes_estimated"] / GIB - plan["assumptions"]["overhead_gib"],
                )
                is_compared = report is None and name not in _NOT_PLANNED
                is_right &= not is_compared or abs(requested - planned[0]) < _TOLERANCE * requested
                figures = [
                    f"{planned[0]:.3f}",
                    f"{requested:.3f}",
                    f"{active:.3f}",
                    f"{planned[1]:.2f}",
                    f"{reserved:.2f}",
                ]
                table.append([name, str(ranks), *figures, known])
            print(" | ".join(table[-1]), file=sys.stderr, flush=True)
    publish("\n".join(f"| {' | '.join(row)} |" for row in table), "phantom_memory", options.write)
    return int(not is_right)


if __name__ == "__main__":
    sys.exit(main())
