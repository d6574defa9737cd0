"""Comparison of planned memory with the memory that PyTorch's allocator takes on a phantom GPU, without a GPU.

    python benchmarks/phantom_memory.py [--only GLOB ...] [--write docs/verification/gpu.md]
    python benchmarks/phantom_memory.py --published [--only GLOB ...] [--write docs/verification/planner.md]

Needs a CUDA build of torch. Every row is one `titan-launch plan --measure`: three steps of the fullest rank.

The first command measures the shipped configurations. "Above the streams" is what the allocator reserves beyond the
sum of the planned peaks of the CUDA streams: the planner's `fragmentation`. It is shown for jobs of 1 GiB and more. The
exit status is 1 if the planned active memory is not within 0.3 % of what the tensors of a job request, or if the
allocator reserves more than the planner estimates for a job of 1 GiB and more. Compiled jobs and jobs in fp8 are
planned as eager bf16 jobs, and not compared.

The second command measures the runs of `published_runs.toml` whose reserved memory is published, compiled and in fp8
where their sources say so.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from published_memory import PRECISIONS, Run, config_of, read_runs
from publishing import markdown_table, publish, published_rows

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
_COLUMNS = [
    "job",
    "ranks",
    "planned active",
    "requested",
    "measured active",
    "planned reserved",
    "measured reserved",
    "above the streams",
]
_PUBLISHED_COLUMNS = [
    "run",
    "ranks",
    "precision",
    "planned reserved",
    "requested",
    "measured reserved",
    "published",
    "measured / published",
]


class Figures(NamedTuple):
    """Planned and measured memory of a job, in GiB. Reserved memory is without the overhead of the process."""

    planned: float
    requested: float
    active: float
    planned_reserved: float
    reserved: float
    fragmentation: float
    """Value of `planner.fragmentation` in the plan."""

    @classmethod
    def of(cls, plan: dict[str, Any]) -> Figures:
        """Return the figures of the chosen row of a plan with `--measure`, as JSON."""
        row = next(row for row in plan["rows"] if row["is_chosen"])
        assumed, measured = plan["assumptions"], plan["trial"]
        return cls(
            row["active_bytes"] / GIB,
            measured["requested"] / GIB,
            measured["active"] / GIB,
            row["reserved_bytes_estimated"] / GIB - assumed["overhead_gib"],
            measured["reserved"] / GIB,
            assumed["fragmentation"],
        )

    @property
    def is_large(self) -> bool:
        """True if the memory is many segments of the allocator, whose smallest have 2 MiB."""
        return self.requested > 1

    @property
    def is_right(self) -> bool:
        """True if the plan of the job holds."""
        is_estimated = not self.is_large or self.reserved <= self.planned_reserved
        return is_estimated and abs(self.requested - self.planned) < _TOLERANCE * self.requested

    def cells(self, is_planned: bool) -> list[str]:
        """Return the cells of the table. `is_planned`: False for jobs whose plan is that of an eager bf16 job."""
        streams = self.planned_reserved / (1 + self.fragmentation)
        above = f"{self.reserved / streams - 1:.1%}" if is_planned and self.is_large else ""
        in_use = (f"{value:.3f}" for value in (self.planned, self.requested, self.active))
        return [*in_use, f"{self.planned_reserved:.2f}", f"{self.reserved:.2f}", above]


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


def shipped() -> Iterator[tuple[str, Path, int]]:
    """Yield name, file and ranks of each shipped configuration that trains by itself."""
    for path in sorted(_CONFIGS.rglob("*.toml")):
        if path.stem not in ("resume", "custom_model"):
            yield str(path.relative_to(_CONFIGS)), path, _RANKS.get(path.stem, 2)


def compared_with_published(only: Sequence[str], earlier: Mapping[str, list[str]]) -> str:
    """Return the table of the published runs that state reserved memory, with the ratios by source and precision.
    `earlier`: rows of the table, by their first cells, for the runs that no glob of `only` matches."""
    table, ratios = [_PUBLISHED_COLUMNS], dict[str, list[float]]()
    with tempfile.TemporaryDirectory() as folder:
        for run in (run for run in read_runs() if run.reserved_gib is not None):
            name, published = f"{run.source}: {run.name}", f"{run.reserved_gib:.1f}"
            if not any(fnmatch(name, glob) for glob in only):
                table += [earlier[name]] if name in earlier else []
                continue
            path = Path(folder, "job.json")
            path.write_text(dump_job(config_of(run, as_published=True)))
            plan = measure(path, run.ranks, [])
            figures = [plan, "", "", published, ""] if isinstance(plan, str) else _beside(Figures.of(plan), run)
            table.append([name, str(run.ranks), PRECISIONS[run.kind], *figures])
            print(" | ".join(table[-1]), file=sys.stderr, flush=True)
    for name, _, precision, *_, ratio in table[1:]:
        ratios.setdefault(f"{name.partition(':')[0]}, {precision}", []).append(float(ratio or "nan"))
    lines = [f"- {group}: {_described(values)}" for group, values in ratios.items()]
    return "\n".join([markdown_table(table), "", "Measured over published reserved memory:", "", *lines])


def _beside(found: Figures, run: Run) -> list[str]:
    assert run.reserved_gib is not None
    measured = (found.planned_reserved, found.requested, found.reserved, run.reserved_gib)
    return [*(f"{value:.1f}" for value in measured), f"{found.reserved / run.reserved_gib:.3f}"]


def _described(ratios: Sequence[float]) -> str:
    known = [ratio for ratio in ratios if ratio == ratio]
    failed = f"; {len(ratios) - len(known)} not measured" * (len(known) < len(ratios))
    if not known:
        return f"{len(ratios)} runs{failed}"
    worst = max(known, key=lambda ratio: max(ratio, 1 / ratio))
    return f"{len(ratios)} runs, median {median(known):.3f}, worst {worst:.3f}{failed}"


def compared_with_plans(only: Sequence[str], earlier: Mapping[str, list[str]]) -> tuple[str, bool]:
    """Return the table of the shipped configurations, and True if all plans hold. `earlier`: as above."""
    table, is_right = [_COLUMNS], True
    for name, path, ranks in shipped():
        if not any(fnmatch(name, glob) for glob in only):
            table += [earlier[name]] if name in earlier else []
            continue
        plan = measure(path, ranks, ["--device=h100-80gb", "--memory-gib=400"])
        if isinstance(plan, str):
            table.append([name, str(ranks), plan, "", "", "", "", ""])
            is_right = False
        else:
            is_planned, found = name not in _NOT_PLANNED, Figures.of(plan)
            is_right &= not is_planned or found.is_right
            table.append([name, str(ranks), *found.cells(is_planned)])
        print(" | ".join(table[-1]), file=sys.stderr, flush=True)
    return markdown_table(table), is_right


def main() -> int:
    """Measure all rows."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--published", action="store_true", help="measure the published runs")
    parser.add_argument("--only", default=["*"], nargs="+", metavar="GLOB", help="measure the rows whose names match")
    text = "Markdown file with the markers; rows that are not measured stay as they are there"
    parser.add_argument("--write", type=Path, help=text)
    options = parser.parse_args()
    marker = "phantom_published" if options.published else "phantom_memory"
    earlier = published_rows(marker, options.write) if options.write else {}
    if options.published:
        text, is_right = compared_with_published(options.only, earlier), True
    else:
        text, is_right = compared_with_plans(options.only, earlier)
    publish(text, marker, options.write)
    return int(not is_right)


if __name__ == "__main__":
    sys.exit(main())
