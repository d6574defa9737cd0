"""Wall seconds of the command `plan`, for the first plan of a job and for the second.

    python benchmarks/plan_times.py [--only GLOB ...] [--write docs/verification/planner.md]
    python benchmarks/plan_times.py --every [--write docs/verification/planner.md]

A time is that of a whole process, from its start to its end. The first plan begins with an empty cache: it imports
torch and records microbatches in each activation checkpointing mode. The second finds the recordings; its time is the
median of three. Both print all choices. With `--every`, the first plans of every job file in configs/, of every recipe
of `init`, and of the largest size of every family are measured, each once. Recipes that need a model get Llama 3.1 8B:
a sparse file has the header of its weights, and no values. The exit status is 1 if a plan fails.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from fnmatch import fnmatch
from importlib.metadata import version
from pathlib import Path

from publishing import markdown_table, publish

from titan_launch.core.files import CACHE_VARIABLE
from titan_launch.data.tokenizers import train_tokenizer
from titan_launch.models.architectures import ARCHITECTURES
from titan_launch.recipes.recipes import RECIPES

_CHECKOUT = Path(__file__).parent.parent
_LORA = '--lora.targets=["layers.*.attention.w*", "layers.*.feed_forward.w*"]'
_PIPELINE = ["--parallelism.tensor_parallel_degree=8", "--parallelism.pipeline_parallel_degree=4"]
_SYNTHETIC = "--data.kind=synthetic"
_BATCH = ["--training.seq_len=4096", "--training.local_batch_size=1"]


def _flavor(name: str, flavor: str) -> list[str]:
    """Return the options of a job with random tokens."""
    model = [f"--model.name={name}", f"--model.flavor={flavor}"]
    return [
        "--config=llama_debug",
        *model,
        _SYNTHETIC,
        *_BATCH,
        *(["--training.seq_len=1024"] if name == "gpt2" else []),
    ]


JOBS: dict[str, tuple[int, list[str]]] = {
    "Llama 3 8B": (8, ["--config=llama3_8b"]),
    "Llama 3 8B, LoRA": (8, ["--config=llama3_8b", _LORA]),
    "Llama 3 70B": (512, ["--config=llama3_70b"]),
    "Llama 3 70B, LoRA": (512, ["--config=llama3_70b", _LORA]),
    "Llama 3 70B, TP 8 x PP 4, 1F1B": (512, ["--config=llama3_70b", *_PIPELINE]),
    "Qwen 3 30B-A3B, expert parallelism 8": (16, ["--config=qwen3_30b_a3b", "--parallelism.expert_parallel_degree=8"]),
    "DeepSeek-V3 16B-A3B": (8, _flavor("deepseek_v3", "16B-A3B")),
    "Gemma 3 12B": (8, _flavor("gemma3", "12B")),
    "GPT-OSS 20B": (8, _flavor("gpt_oss", "20B")),
    "`resnet_bn.toml`": (2, ["--config=resnet_bn"]),
    "`vit_debug.toml`": (2, ["--config=vit_debug"]),
    "`llama_bn.toml`": (2, ["--config=llama_bn"]),
}
"""Ranks and options of each job."""


def seconds(ranks: int, options: list[str], cache: str) -> float | str:
    """Return the wall seconds of a plan; the last line of its error if it fails."""
    command = [sys.executable, "-m", "titan_launch", "plan", *options, f"--world-size={ranks}", "--device=h100-80gb"]
    began = time.perf_counter()
    variables = {**os.environ, CACHE_VARIABLE: cache}
    ended = subprocess.run(command, capture_output=True, text=True, cwd=_CHECKOUT, env=variables)
    took = time.perf_counter() - began
    has_answer = "does not fit" in ended.stdout + ended.stderr  # also an answer for a job with `auto`, which is refused
    return took if ended.returncode == 0 or has_answer else (ended.stderr.strip().splitlines() or ["no message"])[-1]


MOST_SECONDS = 10
"""Wall seconds of a first plan, on an idle machine of two cores."""

_WORLD_SIZES = (8, 4, 2, 16, 64, 512)
"""Tried in this order, until the job accepts one."""


def _every_job(folder: Path) -> dict[str, list[str]]:
    """Return the options of every job: files, recipes and families."""
    files = {path.relative_to(_CHECKOUT).as_posix(): path for path in sorted((_CHECKOUT / "configs").rglob("*.toml"))}
    model = _folder_without_values(folder / "model")
    records = {"chat": {"prompt": "Say one.", "response": "one"}}
    records["preferences"] = {"prompt": "Say one.", "chosen": "one", "rejected": "two"}
    for name, recipe in RECIPES.items():
        init = ["init", name, "--out", str(folder / f"{name}.toml"), *([f"--model={model}"] * recipe.needs_model)]
        if record := records.get(recipe.kinds[0]):
            data = folder / f"{name}.jsonl"
            data.write_text(f"{json.dumps(record)}\n" * 10_000)
            init.append(f"--data={data}")
        subprocess.run([sys.executable, "-m", "titan_launch", *init], check=True, capture_output=True, cwd=_CHECKOUT)
    return {
        **{name: [f"--config={path}"] for name, path in files.items()},
        **{f"recipe {name}": [f"--config={folder / name}.toml"] for name in RECIPES},
        **{
            f"{name} {flavor}": _flavor(name, flavor)
            for name, architecture in ARCHITECTURES.items()
            if name not in ("resnet", "vit")
            for flavor in [*architecture.flavors][-1:]
        },
    }


def _folder_without_values(folder: Path) -> Path:
    """Write the files of Llama 3.1 8B; the values of its weights are a hole in a file."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    train_tokenizer(["text"], 300, folder)
    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "vocab_size": 128256}
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope = {"rope_theta": 500000.0, **scaling, "original_max_position_embeddings": 8192}
    config = LlamaConfig(**sizes, num_key_value_heads=8, max_position_embeddings=131072, rope_parameters=rope)
    with torch.device("meta"):
        tensors = LlamaForCausalLM(config).state_dict()
    header, end = {}, 0
    for name, tensor in tensors.items():
        begin, end = end, end + 2 * tensor.numel()
        header[name] = {"dtype": "BF16", "shape": [*tensor.shape], "data_offsets": [begin, end]}
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return folder


def measure_every() -> tuple[str, bool]:
    """Return a table of the slowest first plans, and whether one failed."""
    found: list[tuple[float, str, int]] = []
    with tempfile.TemporaryDirectory() as folder:
        jobs = _every_job(Path(folder))
        failed = dict.fromkeys(jobs, "")
        for name, options in jobs.items():
            for ranks in _WORLD_SIZES:
                with tempfile.TemporaryDirectory() as cache:
                    took = seconds(ranks, options, cache)
                if not isinstance(took, str):
                    found.append((took, name, ranks))
                    del failed[name]
                    break
                failed[name] = took
            print(failed.get(name) or found[-1], file=sys.stderr, flush=True)
    found.sort(reverse=True)
    table = [["job", "ranks", "first plan, s"], *([name, str(n), f"{took:.2g}"] for took, name, n in found[:8])]
    times = [took for took, _, _ in found]
    slower = sum(took > MOST_SECONDS for took in times)
    summary = (
        f"The slowest of {len(found)} jobs; median {statistics.median(times):.2g} s; over {MOST_SECONDS} s: {slower}."
    )
    return "\n\n".join([markdown_table(table, texts=1), summary, *map(": ".join, failed.items())]), bool(failed)


def measure_named(only: Sequence[str]) -> tuple[str, bool]:
    """Return a table of the jobs whose names match one of the globs, and whether a plan failed."""
    table, has_failed = [["job", "ranks", "first plan, s", "second plan, s"]], False
    for name, (ranks, options) in JOBS.items():
        if not any(fnmatch(name, glob) for glob in only):
            continue
        with tempfile.TemporaryDirectory() as cache:
            first, *later = (seconds(ranks, options, cache) for _ in range(4))
        times = [first, sorted(later, key=lambda took: (isinstance(took, str), took))[1]]
        has_failed |= any(isinstance(took, str) for took in (first, *later))
        table.append([name, str(ranks), *(took if isinstance(took, str) else f"{took:.2g}" for took in times)])
        print(" | ".join(table[-1]), file=sys.stderr, flush=True)
    return markdown_table(table, texts=1), has_failed


def main() -> int:
    """Measure the jobs, one after another."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--only", default=["*"], nargs="+", metavar="GLOB", help="measure the jobs whose names match")
    parser.add_argument("--every", action="store_true", help="measure the first plan of every job file and family")
    parser.add_argument("--write", type=Path, help="Markdown file with the markers")
    arguments = parser.parse_args()
    table, has_failed = measure_every() if arguments.every else measure_named(arguments.only)
    machine = f"{os.cpu_count()} cores, torch {version('torch')}, Python {platform.python_version()}"
    publish(f"{table}\n\n{machine}.", "first_plans" if arguments.every else "plan_times", arguments.write)
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main())
