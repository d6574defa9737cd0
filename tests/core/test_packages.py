"""Optional packages: the table that messages use, and `check`, which finds missing ones without an import."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import tomli

from tests.packages import add_empty_packages
from tests.train.jobs import TINY_ARGS
from titan_launch.cli import main
from titan_launch.core.packages import PACKAGES, is_installed
from titan_launch.data.tokenizers import train_tokenizer

REPO = Path(__file__).parents[2]


def test_the_extras_install_the_packages() -> None:
    extras = tomli.loads((REPO / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    installed = {name: {re.split("[>=;]", package)[0] for package in extra} for name, extra in extras.items()}
    assert {module: p.name for module, p in PACKAGES.items() if p.name not in installed[p.extra]} == {}


def test_a_folder_with_the_name_of_a_package_is_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`wandb` writes runs to a folder `wandb` in the working directory, which `python -m` searches for modules."""
    (tmp_path / "no_such_package").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert not is_installed("no_such_package") and not is_installed("no_such_parent.module")
    (tmp_path / "no_such_package/__init__.py").touch()
    assert is_installed("no_such_package")


NEEDS = {
    "wandb": ('metrics.sinks = ["wandb"]', "metrics.sinks.0"),
    "mlflow": ('metrics.sinks = ["mlflow"]', "metrics.sinks.0"),
    "torchao": ("float8.enable = true", "float8.enable"),
    "tokenizers": ('tokenizer = { kind = "huggingface", path = "tokenizer" }', "tokenizer.kind"),
    "jinja2": ('data = { kind = "chat", path = "a.jsonl", template = "chatml" }', "data.kind"),
    "pyarrow": ('data = { kind = "parquet", path = "a.parquet" }', "data.kind"),
    "datasets": ('data = { kind = "huggingface", path = "rows" }', "data.kind"),
    "backports.zstd": ('data = { kind = "text", path = ["a.txt", "b.zst"] }', "data.path"),
    "sklearn": ('data.kind = "images"\nmodel = { name = "resnet", args = {} }', "data.path"),
    "PIL": ('data = { kind = "images", path = "photos" }\nmodel = { name = "resnet", args = {} }', "data.path"),
    "s3fs": ('checkpoint.store = "s3://bucket/runs"', "checkpoint.store"),
    "gcsfs": ('checkpoint.store = "gs://bucket/runs"', "checkpoint.store"),
    "safetensors": ('lora = { targets = ["q_proj"], adapter = "peft" }', "lora.adapter"),
}
"""A job that needs a module, and the key that needs it."""


@pytest.mark.parametrize("module", NEEDS)
def test_check_names_a_missing_package(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without the package the only problem names its key, and with a package of this name there is none."""
    monkeypatch.chdir(tmp_path)
    write_files()
    keys, key = NEEDS[module]
    arguments = "".join(f"{name} = {value}\n" for name, value in {**TINY_ARGS, "vocab_size": 320}.items())
    text = keys if "model" in keys else f"{keys}\n\n[model.args]\n{arguments}"
    Path("job.toml").write_text(text)
    for name in ("compression.zstd", module):
        monkeypatch.setitem(sys.modules, name, None)
    assert main(["check", "--config", "job.toml"]) == 2
    package = PACKAGES[module]
    reason = f"needs the package {package.name}, which is not installed: pip install 'titan-launch[{package.extra}]'"
    error = capsys.readouterr().err
    assert error.startswith("error: job.toml:1: ") and f"{key} = " in error and error.endswith(f": {reason}\n"), error
    monkeypatch.delitem(sys.modules, module)
    add_empty_packages(tmp_path / "packages", monkeypatch, [module])
    assert main(["check", "--config", "job.toml"]) == 0, capsys.readouterr().err


def write_files() -> None:
    """Write the files that the jobs name."""
    pytest.importorskip("tokenizers")
    train_tokenizer(["text"], 300, Path("tokenizer"))
    Path("photos/cat").mkdir(parents=True)
    Path("peft").mkdir()
    Path("peft/adapter_config.json").write_text('{"peft_type": "LORA", "r": 16, "lora_alpha": 32}')
    for file in ("a.jsonl", "a.parquet", "a.txt", "b.zst", "photos/cat/a.png"):
        Path(file).touch()
    Path("rows").mkdir()
