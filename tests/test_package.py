"""The wheel carries the configs, the steps of the Dockerfile run, and the docs build."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

import pytest
import tomli

from tests.train.jobs import read_metrics

REPO = Path(__file__).parent.parent


def steps() -> list[tuple[str, str]]:
    """Return the instructions of the Dockerfile with their arguments, in order."""
    lines = (line for line in (REPO / "Dockerfile").read_text().splitlines() if not line.startswith("#"))
    text = "\n".join(lines).replace("\\\n", " ")
    return [(name, rest.strip()) for name, _, rest in (line.partition(" ") for line in text.splitlines() if line)]


def test_the_dockerfile_follows_the_rules_of_images() -> None:
    """Hadolint's common rules: tags, no package lists and caches in layers, no root, commands as JSON."""
    found = steps()
    assert found[0][0] == "FROM" and found[-1][0] == "CMD"
    for name, rest in found:
        if name == "FROM":
            assert re.fullmatch(r"[\w/.-]+:[\w.-]*\d[\w.-]*( AS \w+)?", rest), "the base has a version"
        elif name == "RUN":
            subprocess.run(["bash", "-n", "-c", rest], check=True)
            assert "sudo" not in rest and ("pip install" not in rest or "--no-cache-dir" in rest)
            if "apt-get" in rest:
                assert "--no-install-recommends" in rest and "rm -rf /var/lib/apt/lists/*" in rest
        elif name in ("CMD", "ENTRYPOINT"):
            assert all(isinstance(word, str) for word in json.loads(rest))
        elif name == "COPY" and not rest.startswith("--from"):
            assert all((REPO / source).exists() for source in rest.split()[:-1])
        else:
            assert name in ("COPY", "ENV", "USER", "WORKDIR")
    assert [rest for name, rest in found if name == "USER"][-1] != "root"
    ignored = (REPO / ".dockerignore").read_text().splitlines()
    sources = {word for name, rest in found if name == "COPY" and "--from" not in rest for word in rest.split()[:-1]}
    assert {f"!{source}" for source in sources} <= set(ignored)
    extras = set(re.findall(r"\[([\w,]+)\]\"", "".join(rest for name, rest in found if name == "RUN"))[0].split(","))
    assert extras <= tomli.loads((REPO / "pyproject.toml").read_text())["project"]["optional-dependencies"].keys()


def test_uv_locks_the_tested_versions() -> None:
    """To change a version, edit constraints.txt and run `uv lock` as CONTRIBUTING.md says."""
    locked = {package["name"]: package["version"] for package in tomli.loads((REPO / "uv.lock").read_text())["package"]}
    lines = [line for line in (REPO / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    tested = {name.replace("_", "-"): version for name, _, version in (line.partition("==") for line in lines)}
    assert {name: locked[name] for name in tested} == tested


def run(command: str | list[str], folder: Path, environment: Mapping[str, str]) -> str:
    arguments = ["bash", "-c", command] if isinstance(command, str) else command
    result = subprocess.run(arguments, cwd=folder, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.slow
@pytest.mark.skipif(find_spec("build") is None, reason="the package build is not installed")
@pytest.mark.timeout(600)
def test_the_steps_of_the_dockerfile_make_a_program_that_trains_a_config_that_it_carries(tmp_path: Path) -> None:
    """The steps run without the base image, in a folder in place of its root, and with an environment that has the
    packages of this one, but not this checkout."""
    venv.create(tmp_path / "venv", with_pip=True)
    site = next((tmp_path / "venv").glob("lib/python*/site-packages"))
    (site / "packages.pth").write_text(sysconfig.get_paths()["purelib"])
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"PATH": f"{tmp_path}/venv/bin:{os.environ['PATH']}", "PIP_NO_DEPS": "1", "OMP_NUM_THREADS": "1"}
    folder = tmp_path
    for name, rest in steps():
        moved = re.sub(r"(?<![\w.])/(src|dist|tmp|work)\b", rf"{tmp_path}/\1", rest)
        if name == "WORKDIR":
            folder = Path(moved)
            folder.mkdir(exist_ok=True)
        elif name == "COPY":
            *sources, target = moved.removeprefix("--from=wheel ").split()
            for source in sources:
                into = folder / target
                into.parent.mkdir(exist_ok=True)
                origin = REPO / source
                if origin.is_dir():
                    shutil.copytree(origin, into, symlinks=True)
                else:
                    shutil.copy(origin, into)
        elif name == "RUN" and not rest.startswith(("apt-get", "useradd")):
            run(moved, folder, environment)
    program = str(tmp_path / "venv/bin/titan-launch")
    where = run(
        [str(tmp_path / "venv/bin/python"), "-c", "import titan_launch; print(titan_launch.__file__)"],
        folder,
        environment,
    )
    assert where.startswith(str(site)), "the installed package runs, not the checkout"
    assert (
        run([program, "--version"], folder, environment).split()[1]
        == tomli.loads((REPO / "pyproject.toml").read_text())["project"]["version"]
    )
    small = ["--training.steps=2", "--training.seq_len=32", "--model.args.n_layers=1", "--validation.max_samples=4"]
    run([program, "launch", "--config", "llama_bn", "--job.device=cpu", *small], folder, environment)
    assert read_metrics(folder / "outputs", "llama_bn")[-1]["step"] == 2
    run([program, "init", "precision/fp32", "--out", "mine.toml"], folder, environment)
    run([program, "check", "--config", "mine.toml"], folder, environment)


def test_the_site_has_every_page() -> None:
    nav = (REPO / "mkdocs.yml").read_text().partition("\nnav:")[2]
    pages = {str(page.relative_to(REPO / "docs")) for page in (REPO / "docs").rglob("*.md")}
    assert sorted(re.findall(r"[\w/]+\.md", nav)) == sorted(pages)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("material") is None, reason="mkdocs-material is not installed")
def test_the_site_builds_without_warnings(tmp_path: Path) -> None:
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    run(["scripts/build_docs.sh", str(tmp_path / "site")], REPO, environment)
    page = (tmp_path / "site/index.html").read_text()
    assert "getting_started/install_and_first_run.html" in page
    assert json.loads((tmp_path / "site/search/search_index.json").read_text())["docs"]
    scripts = re.findall(r'<(?:script|link)[^>]+(?:src|href)="(https?://[^"]+)"', page)
    assert [url for url in scripts if "canonical" not in url] == [], "the site loads nothing from other hosts"
