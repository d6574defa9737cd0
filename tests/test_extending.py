"""The diffs of docs/how_to/extending.md fit the package, and the job file trains with everything that they add."""

from __future__ import annotations

import importlib
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import make_dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.distributed import run_ranks
from tests.plan.memory.test_optimizer_memory import measure
from tests.train.jobs import read_metrics, run_job, this_rank, tiny_job
from titan_launch import cli
from titan_launch.config.job import JobConfig
from titan_launch.config.sections.training import OptimizerConfig
from titan_launch.plan.hardware import GIB
from titan_launch.plan.job import configured_choice
from titan_launch.plan.layout import plan_layout
from titan_launch.trace.recorder import recorded_engine
from titan_launch.train.build import build_run
from titan_launch.train.loop import fit
from titan_launch.train.observers import Observers

PEAK = "memory/max_active_gib"
REPO = Path(__file__).parent.parent
PAGE = (REPO / "docs" / "how_to" / "extending.md").read_text()
RECIPES = {
    heading: re.findall(r"^```diff\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    for heading, text in re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", PAGE, flags=re.DOTALL | re.MULTILINE)
}


def files_of(heading: str) -> Iterator[tuple[str, str]]:
    """Yield the path and the diff of every file of a recipe."""
    (diff,) = RECIPES[heading]
    for file in re.split(r"^\+\+\+ ", diff, flags=re.MULTILINE)[1:]:
        path, _, changes = file.partition("\n")
        yield path, changes


def added(changes: str) -> str:
    return "".join(line[1:] for line in changes.splitlines(keepends=True) if line.startswith("+"))


def patched(file: Path, changes: str) -> str:
    """Return the text of a file with the changes of a recipe."""
    if not file.exists():
        return added(changes)
    text = file.read_text().splitlines()
    hunks = [hunk.splitlines() for hunk in re.split(r"^@@ ?", changes, flags=re.MULTILINE)[1:]]
    for (header, *lines), following in zip(hunks, [*hunks[1:], [""]], strict=True):
        place = text.index(header) + 1 if header else text.index(following[0])
        for line in lines:
            if line.startswith("+"):
                text.insert(place, line[1:])
            else:
                place = text.index(line.removeprefix("-"), place)
            if line.startswith("-"):
                del text[place]
            else:
                place += 1
    return "\n".join([*text, ""])


def apply(heading: str, under: tuple[str, ...] = ("",)) -> None:
    """Add the new files of a recipe as modules, and its lines to the modules and tables of the package. `under`: first
    parts of the paths of files to change."""
    for path, changes in files_of(heading):
        if not path.startswith(under):
            continue
        name = path.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
        if not (REPO / path).exists():
            sys.modules[name] = ModuleType(name)
            exec(compile(added(changes), path, "exec"), vars(sys.modules[name]))
            continue
        names = vars(importlib.import_module(name))
        for hunk in re.split(r"^@@", changes, flags=re.MULTILINE)[1:]:
            header, _, lines = hunk.partition("\n")
            table = re.match(r" (\w+).* = ([{\[])$", header)
            if table is None:
                exec(added(lines), names)
            elif table[2] == "{":
                names[table[1]].update(eval(f"{{{added(lines)}}}", names))
            else:
                names[table[1]].extend(eval(f"[{added(lines)}]", names))


@pytest.mark.parametrize("heading", RECIPES)
def test_the_context_lines_of_the_diffs_are_in_the_package(heading: str) -> None:
    for path, changes in files_of(heading):
        if (REPO / path).exists():
            text = (REPO / path).read_text().splitlines()
            around = [line for line in changes.splitlines() if not line.startswith("+") and line != "@@"]
            assert all(line.removeprefix("@@ ").removeprefix("-") in text for line in around), path
        else:
            assert "@@" not in changes


@pytest.mark.slow
def test_the_package_with_all_recipes_passes_the_linter_and_is_imported(tmp_path: Path) -> None:
    """The linter finds unknown names, unsorted imports and long lines."""
    shutil.copytree(REPO / "titan_launch", tmp_path / "titan_launch", symlinks=True)
    shutil.copy(REPO / "pyproject.toml", tmp_path)
    changed = sorted({path for heading in RECIPES for path, _ in files_of(heading)})
    for heading in RECIPES:
        for path, changes in files_of(heading):
            text = patched(tmp_path / path, changes)
            (tmp_path / path).parent.mkdir(exist_ok=True)
            (tmp_path / path).write_text(text)
    modules = [path.removesuffix(".py").replace("/", ".").removesuffix(".__init__") for path in changed]
    for options in (["-m", "ruff", "check"], ["-m", "ruff", "format", "--check"]):
        subprocess.run([sys.executable, *options, *changed], cwd=tmp_path, check=True)
    subprocess.run([sys.executable, "-c", f"import {', '.join(modules)}"], cwd=tmp_path, check=True)


MODEL_RUNS = ("model", "model-2", "model-3", "model-4")
"""Equal runs. If gloo's thread happens to free a buffer late, one of them measures more memory."""


def train(folder: Path) -> dict[str, Any]:
    """Train a job with every recipe in turn, then with all of them. Return the losses, the reported sum and the bytes
    of the optimizer."""
    for heading in ("A model", "A data source", "A metric", "An optimizer"):
        apply(heading)
    for section in (OptimizerConfig, JobConfig):
        section.model_rebuild(force=True)  # the server of ranks has built the validators
    sections: dict[str, dict[str, Any]] = {
        "model": {"model": {"name": "bigram"}},
        "data": {"data": {"kind": "counting", "vocab_size": 61}},
        "optimizer": {"optimizer": {"name": "Signum", "beta1": 0.8, "lr": 1e-2}},
    }
    jobs = {**sections, **dict.fromkeys(MODEL_RUNS, sections["model"])}
    jobs["all"] = {name: section for each in sections.values() for name, section in each.items()}
    losses = {}
    for name, changed in jobs.items():
        run_job({**tiny_job(folder, job={"name": name}), **changed})
        losses[name] = [report["train/loss"] for report in read_metrics(folder, name)]
    elements = read_metrics(folder, "all")[-1]["memory/parameter_elements"]
    cases = [
        ({}, torch.float32),
        ({"rounding": "stochastic"}, torch.bfloat16),
        ({"master_weights": True}, torch.bfloat16),
    ]
    bytes_of = [measure({"name": "Signum", **settings}, dtype, (2,), 32) for settings, dtype in cases]
    return {"losses": losses, "elements": elements, "bytes": bytes_of}


def observed(folder: Path) -> list[float]:
    """Train with the observer of the recipe, and return what it reports."""
    apply("An observer", ("titan_launch/metrics/",))
    made = importlib.import_module("titan_launch.metrics.largest_gradient").LargestGradient
    with ExitStack() as stack:
        run = build_run(JobConfig.model_validate(tiny_job(folder)), this_rank(), stack)
        extended = make_dataclass("Extended", [("largest_gradient", made)], bases=(Observers,), frozen=True)
        fit(replace(run, observers=extended(*vars(run.observers).values(), made(run.model))))
    return [report["train/largest_gradient"] for report in read_metrics(folder)]


def test_the_observer_of_the_recipe_reports_what_it_has_seen(tmp_path: Path) -> None:
    found, _ = run_ranks(observed, 2, tmp_path)
    norms = [report["train/grad_norm"] for report in read_metrics(tmp_path)]
    assert len(found) == 4 and all(norm / 200 < largest < norm for largest, norm in zip(found, norms, strict=True))


def planned_peak(folder: Path) -> float:
    """Return the planned memory of the job `model` in `train`, in GiB. A plan needs the arguments and the module."""
    apply("A model")
    config = JobConfig.model_validate({**tiny_job(folder), "model": {"name": "bigram"}})
    layout = plan_layout(config.parallelism, config.training, 2)
    return recorded_engine(config, layout, "cpu")(configured_choice(config)).peak_bytes / GIB


def test_the_package_trains_with_the_additions_of_the_recipes(tmp_path: Path) -> None:
    """The test runs on two ranks. `sum` adds a value of each rank. The planned bytes of the optimizer, and of a step of
    the model, are the measured ones."""
    found, _ = run_ranks(train, 2, tmp_path)
    context = get_context("forkserver")  # that of `run_ranks`: the server has loaded PyTorch
    with ProcessPoolExecutor(1, mp_context=context) as pool:  # the recipe changes tables of the package
        planned_gib = pool.submit(planned_peak, tmp_path).result()
    measured_gib = [row[PEAK] for name in MODEL_RUNS for row in read_metrics(tmp_path, name) if PEAK in row]
    assert len(measured_gib) == len(MODEL_RUNS) and planned_gib == pytest.approx(min(measured_gib), rel=0.01)
    for name, losses in found["losses"].items():
        assert len(losses) == 4 and losses[-1] < losses[0], name
    assert found["elements"] == 2 * 16 * 320
    for measured, planned in found["bytes"]:
        assert measured == pytest.approx(planned, rel=0.01, abs=64)


def test_the_command_line_runs_the_command_of_the_recipe(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "COMMANDS", dict(cli.COMMANDS))
    monkeypatch.setitem(sys.modules, "titan_launch.commands.models", ModuleType("models"))  # restored after the test
    apply("A command")
    assert cli.main(["models"]) == 0
    assert "resnet: debug, resnet18" in capsys.readouterr().out
