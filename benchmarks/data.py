"""Speed of the data path: samples from memory-mapped token files, and the time that training waits for data.

    python benchmarks/data.py --write docs/verification/cpu.md
    python benchmarks/data.py --steps configs/llama_bn.toml configs/resnet_bn.toml --write docs/verification/cpu.md
    python benchmarks/data.py --prepare 34 --write docs/verification/cpu.md

The first command reads random tokens through the loader and compares it with copies from a plain memory map of the
same file. The second trains each configuration for a few steps. The third tokenizes text with `titan-launch prepare`
and compares it with calls of the tokenizer alone.
"""

from __future__ import annotations

import argparse
import itertools
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import torch
from publishing import commit, publish

from titan_launch.config.sections.data import PYTHON_STDLIB, TextData, TokensData, expand_paths
from titan_launch.data.corpora.text import is_text
from titan_launch.data.loader import build_train_loader
from titan_launch.data.order import SampleOrder
from titan_launch.data.prepare import usable_cores
from titan_launch.data.sources import SampleSource, build_source
from titan_launch.data.token_files import Encoded, Header, write_header, write_shard
from titan_launch.data.tokenizers import ByteTokenizer, train_tokenizer
from titan_launch.plan.layout import Layout

SEQ_LEN, BATCH_SIZES, WORKERS = 2048, (8, 64), (0, 2)
REPEATS, TRAINED_STEPS, FIRST_STEPS = 5, 6, 2
REPEATS_OF_PREPARE = 3


def write_tokens(folder: Path, num_tokens: int) -> None:
    """Write random tokens as one shard of a folder of token files."""
    rng = np.random.default_rng(0)
    chunks = (rng.integers(0, 256, 1 << 20, dtype=np.uint16) for _ in range(num_tokens >> 20))
    tokenizer = ByteTokenizer()
    shard = write_shard(folder, "00000", map(Encoded, chunks), "uint16", has_targets=False)
    write_header(folder, Header("uint16", tokenizer.vocab_size, tokenizer.digest, False, (shard,)))


def memory_map(folder: Path, batch_size: int) -> Iterator[None]:
    """Copy samples in random order from a memory map, without an order of epochs, targets or tensors."""
    tokens = np.asarray(np.memmap(folder / "00000.tokens", np.uint16, mode="r"))
    starts = np.random.default_rng(0).permutation((len(tokens) - 1) // SEQ_LEN) * SEQ_LEN
    while True:
        for first in range(0, len(starts) - batch_size, batch_size):
            batch = np.empty((batch_size, SEQ_LEN + 1), np.int64)
            for row, start in zip(batch, starts[first : first + batch_size].tolist(), strict=True):
                row[:] = tokens[start : start + SEQ_LEN + 1]
            yield


@contextmanager
def loader(source: SampleSource, batch_size: int, num_workers: int) -> Iterator[Iterator[object]]:
    """Yield the batches of the loader that a run has."""
    layout = Layout(1, 1, local_batch_size=batch_size, num_microbatches=1)
    order = SampleOrder(len(source), seed=0, shuffle=True)
    with build_train_loader(source, order, layout, 0, start=0, num_workers=num_workers) as batches:
        yield iter(batches)


def speed(batches: Iterator[object], batch_size: int) -> tuple[float, float]:
    """Return million tokens per second, and per CPU second of this process: the best of several repetitions."""
    count = 8192 // batch_size
    for _ in range(10):
        next(batches)
    wall, cpu = [], []
    for _ in range(REPEATS):
        start, start_cpu = time.perf_counter(), time.process_time()
        for _ in range(count):
            next(batches)
        wall.append(time.perf_counter() - start)
        cpu.append(time.process_time() - start_cpu)
    tokens = count * batch_size * SEQ_LEN / 1e6
    return tokens / min(wall), tokens / min(cpu)


def table_of_loading(num_tokens: int) -> str:
    """Return a Markdown table of the speed of the loader and of a plain memory map."""
    torch.set_num_threads(1)
    lines = [
        f"Tokens of {SEQ_LEN} per sample, commit {commit()}; the best of {REPEATS} repetitions.",
        "",
        "| samples per batch | reader | million tokens/s | million tokens per CPU second of the training process |",
        "|---|---|---|---|",
    ]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_tokens(folder, num_tokens)
        source = build_source(TokensData(kind="tokens", path=name), ByteTokenizer(), SEQ_LEN)
        for batch_size in BATCH_SIZES:
            speeds = {"memory map, one copy": speed(memory_map(folder, batch_size), batch_size)}
            for num_workers in WORKERS:
                with loader(source, batch_size, num_workers) as batches:
                    speeds[f"loader, {num_workers} workers"] = speed(batches, batch_size)
            lines += [f"| {batch_size} | {name} | {wall:,.0f} | {cpu:,.0f} |" for name, (wall, cpu) in speeds.items()]
    return "\n".join(lines)


def share_of_step(config: str, num_workers: int) -> tuple[float, float]:
    """Train a configuration. Return the seconds of a step, and those in which it waits for data."""
    with tempfile.TemporaryDirectory() as folder:
        keys = {
            "job.dump_folder": folder,
            "job.name": "data",
            "job.device": "cpu",
            "training.steps": TRAINED_STEPS,
            "lr_scheduler.warmup_steps": 1,
            "metrics.log_freq": FIRST_STEPS,
            "validation.freq": 0,
            "checkpoint.enable": "false",
            "checkpoint.save_last": "false",
            "data.num_workers": num_workers,
        }
        overrides = [f"--{key}={value}" for key, value in keys.items()]
        command = [sys.executable, "-m", "titan_launch", "train", "--config", config, *overrides]
        subprocess.run(command, check=True, capture_output=True)
        reports = [json.loads(line) for line in Path(folder, "data", "metrics.jsonl").read_text().splitlines()]
    steady = [report for report in reports if report["step"] > FIRST_STEPS]
    step, data = (sum(report[f"time/{name}"] for report in steady) / len(steady) for name in ("step_s", "data_s"))
    return step, data


def table_of_steps(configs: Sequence[str]) -> str:
    """Return a Markdown table of the time that training waits for data."""
    lines = [
        f"One rank on a CPU, commit {commit()}; mean of steps {FIRST_STEPS + 1} to {TRAINED_STEPS}.",
        "",
        "| configuration | workers | `time/step_s` | `time/data_s` | share |",
        "|---|---|---|---|---|",
    ]
    for config in configs:
        for num_workers in WORKERS:
            step, data = share_of_step(config, num_workers)
            lines.append(f"| `{config}` | {num_workers} | {step:.3f} | {data:.6f} | {data / step:.3%} |")
            print(lines[-1], flush=True)
    return "\n".join(lines)


def copies_of_the_standard_library(folder: Path, megabytes: int) -> list[str]:
    """Write copies of the source code of Python's standard library. Return the texts."""
    texts: list[str] = []
    size = 0
    for copy in itertools.count():
        for name, path in expand_paths(TextData(path=PYTHON_STDLIB)):
            if size >= megabytes * 1e6:
                return texts
            content = path.read_bytes()
            if is_text(content):
                (folder / f"{copy}_{name.replace('/', '_')}").write_bytes(content)
                texts.append(content.decode())
                size += len(content)
    raise AssertionError


def cpu_seconds() -> float:
    """Return the CPU time of this process and of its processes that have ended."""
    usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def table_of_preparation(megabytes: int) -> str:
    """Return a Markdown table of the speed of `prepare` and of the tokenizer alone, on all cores."""
    import tokenizers

    cores = usable_cores()
    wall: dict[str, list[float]] = {}
    cpu: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as name:
        text, folder = Path(name, "text"), Path(name, "tokenizer")
        text.mkdir()
        texts = copies_of_the_standard_library(text, megabytes)
        train_tokenizer(texts[:500], 8192, folder)
        bare = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        for repeat in range(REPEATS_OF_PREPARE):

            def timed(name: str, action: Callable[[], object]) -> None:
                start, start_cpu = time.perf_counter(), cpu_seconds()
                action()
                wall.setdefault(name, []).append(time.perf_counter() - start)
                cpu.setdefault(name, []).append(cpu_seconds() - start_cpu)

            def encode() -> None:
                for first in range(0, len(texts), 1000):
                    bare.encode_batch_fast(texts[first : first + 1000], add_special_tokens=False)

            for workers in (1, cores):
                timed(f"the tokenizer alone, {cores} threads", encode)
                options = {"out": f"{name}/tokens_{workers}_{repeat}", "tokenizer": folder, "workers": workers}
                command = [sys.executable, "-m", "titan_launch", "prepare", str(text)]
                command += [f"--{option}={value}" for option, value in options.items()]
                about = f"{cores} processes" if workers > 1 else f"1 process, {cores} threads"
                timed(f"titan-launch prepare, {about}", partial(subprocess.run, command, check=True))
    size = sum(len(content.encode()) for content in texts) / 1e6
    alone, *_ = wall
    rows = [
        f"| {name} | {size / min(wall[name]):.2f} | {min(wall[alone]) / min(wall[name]):.0%} "
        f"| {size / min(cpu[name]):.2f} | {min(cpu[alone]) / min(cpu[name]):.0%} |"
        for name in wall
    ]
    lines = [
        f"{size:,.0f} MB in {len(texts):,} files, a byte-level BPE of 8,192 tokens, commit {commit()}; the best of "
        f"{REPEATS_OF_PREPARE} repetitions.",
        "",
        "| program | MB/s | of the tokenizer alone | MB per CPU second | of the tokenizer alone |",
        "|---|---|---|---|---|",
        *rows,
    ]
    return "\n".join(lines)


def main() -> None:
    """Measure, print the table, and write it to a page of the docs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", nargs="+", metavar="CONFIG", help="train these configurations instead of reading")
    parser.add_argument("--prepare", type=int, metavar="MB", help="measure `titan-launch prepare` on this much text")
    parser.add_argument("--num-tokens", type=int, default=200_000_000, help="tokens of the file (default: %(default)s)")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="Markdown page with the markers of this benchmark")
    arguments = parser.parse_args()
    if arguments.steps:
        publish(table_of_steps(arguments.steps), "data_steps", arguments.write)
    elif arguments.prepare:
        publish(table_of_preparation(arguments.prepare), "data_preparation", arguments.write)
    else:
        publish(table_of_loading(arguments.num_tokens), "data_loading", arguments.write)


if __name__ == "__main__":
    main()
