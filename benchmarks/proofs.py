"""Proofs of all job files in `configs/` and of all recipes: results and seconds.

    python benchmarks/proofs.py [--only GLOB ...] [--write docs/verification/prove.md]

A time is that of the proof, without the start of the process that ranks are forked from, which takes the import of
torch, and without the cache of certificates. Recipes get a random model of transformers, and data of a few lines. The
exit status is 1 if a layout is not proven.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from fnmatch import fnmatch
from importlib.metadata import version
from pathlib import Path
from typing import Any

from publishing import markdown_table, publish

from titan_launch.config.loading.load import load_job
from titan_launch.core.errors import UserError
from titan_launch.data.tokenizers import train_tokenizer
from titan_launch.prove.main import prove
from titan_launch.recipes.recipes import RECIPES

_CHECKOUT = Path(__file__).parent.parent
_CHAT = {"prompt": "Say a word.", "response": "word"}
_PAIR = {"prompt": "Say a word.", "chosen": "word", "rejected": "no"}
_LINES = {"chat": ("chats.jsonl", _CHAT), "preferences": ("pairs.jsonl", _PAIR)}


def main() -> int:
    """Prove the jobs and write the table. Return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=["*"], metavar="GLOB", help="names of the jobs to prove")
    parser.add_argument("--write", type=lambda name: Path(name).resolve(), help="Markdown file to write the table into")
    arguments = parser.parse_args()
    rows = [("job", "result", "largest run", "gradient", "seconds")]
    with tempfile.TemporaryDirectory() as folder:
        jobs = {str(path.relative_to(_CHECKOUT)): path for path in sorted((_CHECKOUT / "configs").rglob("*.toml"))}
        jobs |= {f"recipe {name}": name for name in RECIPES}  # type: ignore[misc]
        for name, job in jobs.items():
            if any(fnmatch(name, glob) for glob in arguments.only):
                path = job if isinstance(job, Path) else _recipe(job, Path(folder))
                rows.append((f"`{name}`", *_proven(path)))
                print(" | ".join(rows[-1]), flush=True)
    machine = f"{os.cpu_count()} cores, Python {platform.python_version()}, torch {version('torch')}"
    publish(f"{markdown_table(rows, texts=3)}\n\nMachine: {machine}.", "proofs", arguments.write)
    return int(any(row[1] != "proven" for row in rows[1:]))


def _recipe(name: str, folder: Path) -> Path:
    """Write the job file of a recipe, and the folders that it needs."""
    recipe, options = RECIPES[name], list[str]()
    kind = recipe.kinds[0]
    if kind in _LINES:
        file, record = _LINES[kind]
        (folder / file).write_text("".join(json.dumps({**record, "id": number}) + "\n" for number in range(200)))
        options += ["--data", file]
    if recipe.needs_model:
        _write_model(folder / "model")
        options += ["--model", "model"]
    _run(["init", name, "--out", f"{name}.toml", *options], folder)
    return folder / f"{name}.toml"


def _write_model(folder: Path) -> None:
    """Write a random model of transformers, with a tokenizer."""
    if folder.exists():
        return
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "vocab_size": 320}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
    AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **sizes, **heads)).save_pretrained(folder)
    train_tokenizer(["a few words"], 300, folder.parent / "tokenizer")
    (folder / "tokenizer.json").write_text((folder.parent / "tokenizer" / "tokenizer.json").read_text())


def _proven(job: Path) -> tuple[str, str, str, str]:
    """Return the cells of a row about a job."""
    os.chdir(job.parent if _CHECKOUT not in job.parents else _CHECKOUT)  # paths in a job, and modules of the user
    try:
        found = prove(load_job(str(job)).config)
    except UserError as error:
        return str(error), "", "", ""
    largest = max(found.rows, key=lambda row: (row.precision == "float32", row.ranks))
    reasons = [*found.problems, *(f"{finding.module} ({finding.how})" for finding in found.findings)]
    run, error_of_gradient = f"{largest.ranks} ranks: {largest.name}", f"{largest.errors['gradient']:.0e}"
    return "; ".join([found.verdict, *reasons]), run, error_of_gradient, f"{found.seconds:.0f}"


def _run(arguments: list[str], folder: Path) -> None:
    variables = {**os.environ, "PYTHONPATH": str(_CHECKOUT)}
    command = [sys.executable, "-m", "titan_launch", *arguments]
    subprocess.run(command, cwd=folder, env=variables, capture_output=True, check=True)


if __name__ == "__main__":
    sys.exit(main())
