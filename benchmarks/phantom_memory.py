"""Comparison of planned memory with the memory that PyTorch's allocator takes on a phantom GPU, without a GPU.

    python benchmarks/phantom_memory.py [--only GLOB ...] [--write docs/verification/gpu.md]
    python benchmarks/phantom_memory.py --published [--only GLOB ...] [--write docs/verification/planner.md]
        [--rows benchmarks/published_results.md]

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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from published_memory import OWN, PRECISIONS, Run, config_of, median_and_worst, read_runs
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
    "published",
    "planned reserved",
    "requested",
    "measured reserved",
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
        return (ended.stderr.strip().splitlines() or ["no message"])[-1].strip().replace(f"{config}: ", "")
    plan: dict[str, Any] = json.loads(ended.stdout[ended.stdout.index("{\n") :])
    return plan


class Job(NamedTuple):
    """A job to measure."""

    name: str
    path: Path
    ranks: int
    options: list[str]
    """Further options of `plan`."""

    cells: Callable[[Figures], list[str]]
    """Cells of the table's row behind `head`."""

    texts: tuple[str, ...] = ()

    @property
    def head(self) -> list[str]:
        """The first cells of the table's row, which need no measurement."""
        return [self.name, str(self.ranks), *self.texts]


def shipped() -> Iterator[Job]:
    """Yield each shipped configuration that trains by itself."""
    for path in sorted(_CONFIGS.rglob("*.toml")):
        if path.stem not in ("resume", "custom_model"):
            name = str(path.relative_to(_CONFIGS))
            cells = partial(Figures.cells, is_planned=name not in _NOT_PLANNED)
            yield Job(name, path, _RANKS.get(path.stem, 2), ["--device=h100-80gb", "--memory-gib=400"], cells)


def published(folder: Path) -> Iterator[Job]:
    """Yield each run of others that states reserved memory. docs/verification/gpu.md has that of this project."""
    stated = (run for run in read_runs() if run.reserved_gib is not None and run.source != OWN)
    for index, run in enumerate(stated):
        path = folder / f"{index}.json"
        path.write_text(dump_job(config_of(run, as_published=True)))
        texts = (PRECISIONS[run.kind], f"{run.reserved_gib:.1f}")
        yield Job(f"{run.source}: {run.name}", path, run.ranks, [], partial(_beside, run), texts)


def _beside(run: Run, found: Figures) -> list[str]:
    assert run.reserved_gib is not None
    figures = (found.planned_reserved, found.requested, found.reserved)
    return [*(f"{value:.1f}" for value in figures), f"{found.reserved / run.reserved_gib:.3f}"]


def measured_rows(
    jobs: Iterable[Job], only: Sequence[str], earlier: Mapping[str, list[str]]
) -> tuple[list[list[str]], dict[str, Figures | None]]:
    """Return the rows of a table, and the figures of the jobs that were measured, by name; None for jobs that failed.

    `earlier`: rows of an earlier table by their first cells, for the jobs that no glob of `only` matches.
    """
    rows, found = [], dict[str, Figures | None]()
    for job in jobs:
        if not any(fnmatch(job.name, glob) for glob in only):
            rows += [earlier[job.name]] if job.name in earlier else []
            continue
        plan = measure(job.path, job.ranks, job.options)
        found[job.name] = figures = None if isinstance(plan, str) else Figures.of(plan)
        rows.append([*job.head, *([str(plan)] if figures is None else job.cells(figures))])
        print(" | ".join(rows[-1]), file=sys.stderr, flush=True)
    return rows, found


def _table(columns: list[str], rows: Iterable[list[str]]) -> str:
    return markdown_table([columns, *([*row, *[""] * (len(columns) - len(row))] for row in rows)])


def ratios_by_group(rows: Iterable[list[str]]) -> str:
    """Return a table: measured over published reserved memory, by source and precision."""
    groups: dict[tuple[str, str], list[float | None]] = {}
    for name, _, precision, *_, ratio in rows:
        groups.setdefault((name.partition(":")[0], precision), []).append(_number(ratio))
    table = [["source", "precision", "runs", "measured", "measured / published reserved"]]
    for group, ratios in groups.items():
        measured = sum(ratio is not None for ratio in ratios)
        table.append([*group, str(len(ratios)), str(measured), median_and_worst(ratios)])
    return markdown_table(table, texts=2)


def _number(cell: str) -> float | None:
    """Return the number in a cell; None for the cell of a job that failed."""
    try:
        return float(cell)
    except ValueError:
        return None


def main() -> int:
    """Measure all rows."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--published", action="store_true", help="measure the published runs")
    parser.add_argument("--only", default=["*"], nargs="+", metavar="GLOB", help="measure the rows whose names match")
    text = "Markdown file with the markers; rows that are not measured stay as they are there"
    parser.add_argument("--write", type=Path, help=text)
    text = "with --published: Markdown file for the table of runs, as --write; --write then gets the table of sources"
    parser.add_argument("--rows", type=Path, help=text)
    options = parser.parse_args()
    marker, file = ("phantom_published", options.rows) if options.published else ("phantom_memory", options.write)
    earlier = published_rows(marker, file) if file else {}
    with tempfile.TemporaryDirectory() as folder:
        jobs = published(Path(folder)) if options.published else shipped()
        rows, found = measured_rows(jobs, options.only, earlier)
    if options.published:
        publish(_table(_PUBLISHED_COLUMNS, rows), marker, file)
        publish(ratios_by_group(rows), "phantom_groups", options.write)
        return 0
    publish(_table(_COLUMNS, rows), marker, file)
    return int(not all(each and (name in _NOT_PLANNED or each.is_right) for name, each in found.items()))


if __name__ == "__main__":
    sys.exit(main())
