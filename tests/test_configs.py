"""Every shipped config parses, plans its units, and trains a step if a CPU can."""

from __future__ import annotations

import json
import math
import re
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from tests.distributed import run_ranks
from tests.packages import add_empty_packages, skip_without
from tests.sampling import rest_is_slow
from tests.train.jobs import this_rank
from titan_launch.cli import main
from titan_launch.config.loading.load import load_job
from titan_launch.config.sections.data import ImageData
from titan_launch.models.build import build_model
from titan_launch.plan.layout import plan_layout
from titan_launch.plan.report.unit_table import format_units
from titan_launch.train.build import build_run
from titan_launch.train.loop import fit
from titan_launch.train.model import plan_precision

REPO = Path(__file__).parent.parent
CONFIGS = sorted((REPO / "configs").rglob("*.toml"))
NEEDS_GPUS = {
    "llama3_8b": 8,
    "llama3_8b_float8": 8,
    "llama3_70b": 64,
    "llama3_405b": 512,
    "qwen3_30b_a3b": 16,
    "context": 8,
}
ON_CPU = [path for path in CONFIGS if path.stem not in NEEDS_GPUS]


@pytest.fixture(autouse=True)
def in_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPO)


def name_of(path: Path) -> str:
    return str(path.relative_to(REPO / "configs").with_suffix(""))


def ranks_of(path: Path) -> int:
    """Return the number of ranks in the config's launch line."""
    launch = re.search(r"--nproc-per-node (\d+)", path.read_text())
    return NEEDS_GPUS.get(path.stem) or (int(launch[1]) if launch else 1)


@pytest.mark.parametrize("path", CONFIGS, ids=name_of)
def test_a_config_describes_itself_and_its_launch(path: Path) -> None:
    schema, comment, *rest = path.read_text().splitlines()
    assert (path.parent / schema.removeprefix("#:schema ")).resolve() == REPO / "docs/reference/job.schema.json"
    assert comment.startswith("# ")
    header = "\n".join(line for line in rest if line.startswith("#"))
    assert f"configs/{name_of(path)}.toml" in header or "scripts/run_train.sh" in header


@pytest.mark.parametrize("path", CONFIGS, ids=name_of)
def test_a_config_passes_the_check(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    add_empty_packages(tmp_path / "packages", monkeypatch)
    assert main(["check", "--config", str(path), "--world-size", str(ranks_of(path))]) == 0, capsys.readouterr().err


@pytest.mark.parametrize("path", CONFIGS, ids=name_of)
def test_units_of_a_config_hold_every_parameter_once(path: Path) -> None:
    config = load_job(str(path)).config
    layout = plan_layout(config.parallelism, config.training, ranks_of(path))
    plan = plan_precision(config, build_model(config.model, config.training.seq_len))
    assert sum(unit.num_parameters for unit in plan.units) == plan.inventory.num_parameters
    assert format_units(plan, layout).count("\n") >= 2


def train_a_step(path: str, folder: str) -> None:
    overrides = [
        f"--job.dump_folder={folder}",
        "--job.device=cpu",
        "--training.steps=1",
        "--training.seq_len=32",
    ]
    if load_job(path).config.data.unit == "tokens":
        overrides.append("--data={kind='synthetic'}")  # this directory has no data
    config = load_job(path, overrides).config
    torch.set_num_threads(1)
    with ExitStack() as stack:
        fit(build_run(config, this_rank(), stack))


@pytest.mark.parametrize("path", rest_is_slow(ON_CPU[::-1], 20), ids=name_of)
def test_a_config_trains_a_step(path: Path, tmp_path: Path) -> None:
    data = load_job(str(path)).config.data
    if isinstance(data, ImageData):
        skip_without("sklearn")
    run_ranks(train_a_step, ranks_of(path), str(path), str(tmp_path))
    (folder,) = tmp_path.iterdir()
    report = json.loads((folder / "metrics.jsonl").read_text())
    num_classes = 10 if isinstance(data, ImageData) else 257
    # The loss of a uniform guess is log(num_classes).
    assert report["step"] == 1 and 0.7 < report["train/loss"] / math.log(num_classes) < 1.5
