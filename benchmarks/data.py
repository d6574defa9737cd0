"""Speed of the data path against other programs, and the time that training waits for data.

    python benchmarks/data.py --write docs/verification/cpu.md
    python benchmarks/data.py --prepare 34 --write docs/verification/cpu.md
    python benchmarks/data.py --packing 10 --write docs/verification/cpu.md
    python benchmarks/data.py --steps --write docs/verification/cpu.md

The first command reads random tokens through the loader, and the same tokens through the loaders of other packages. The
second tokenizes text with `titan-launch prepare`, with the tokenizer alone, and with `datasets`. The third packs random
lengths of documents. The fourth trains each configuration for a few steps. A program whose package is not installed
(`pip install datasets litdata`) gets no row.
"""

from __future__ import annotations

import argparse
import inspect
import itertools
import json
import math
import multiprocessing
import os
import re
import resource
import socket
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from publishing import commit, publish
from torch.utils.data import DataLoader

from titan_launch.cli import main as launcher_main
from titan_launch.config.paths import PYTHON_STDLIB, expand_paths
from titan_launch.config.sections.data import TokensData
from titan_launch.data.corpora.text_files import is_text
from titan_launch.data.loader import Workers, build_train_loader
from titan_launch.data.order import SampleOrder
from titan_launch.data.packing import pack
from titan_launch.data.prepare import usable_cores
from titan_launch.data.sources import build_source
from titan_launch.data.token_files import Encoded, Header, write_header, write_shard
from titan_launch.data.tokenizers import ByteTokenizer, train_tokenizer
from titan_launch.plan.layout import Layout

SEQ_LEN, BATCH_SIZES, WORKERS = 2048, (8, 64), (0, 2)
REPEATS, FIRST_STEPS = 5, 1
LARGEST = 5
"""Number of configurations in the table of the largest shares."""

REPEATS_OF_PREPARE = 3
PACKED_SEQ_LENS = (2048, 8192)
LOG_MEDIAN = math.log(1365) - 1 / 2
"""Logarithm of the median of a log-normal distribution with mean 1,365, if the standard deviation of its logarithm is
1."""

SHARD = "00000.tokens"
LITDATA_CHUNK = (SEQ_LEN + 1) << 12
"""Tokens per file of litdata: 17 MB."""


def write_tokens(folder: Path, num_tokens: int) -> None:
    """Write random tokens as one shard of a folder of token files."""
    rng = np.random.default_rng(0)
    chunks = (rng.integers(0, 256, 1 << 20, dtype=np.uint16) for _ in range(num_tokens >> 20))
    tokenizer = ByteTokenizer()
    shard = write_shard(folder, "00000", map(Encoded, chunks), "uint16", has_targets=False)
    write_header(folder, Header("uint16", tokenizer.vocab_size, tokenizer.digest, False, (shard,)))


def memory_map(folder: Path, batch_size: int, num_workers: int) -> Generator[object]:
    """Copy samples in random order from a memory map, without an order of epochs, targets or tensors."""
    tokens = np.asarray(np.memmap(folder / SHARD, np.uint16, mode="r"))
    starts = np.random.default_rng(0).permutation((len(tokens) - 1) // SEQ_LEN) * SEQ_LEN
    while True:
        for first in range(0, len(starts) - batch_size, batch_size):
            batch = np.empty((batch_size, SEQ_LEN + 1), np.int64)
            for row, start in zip(batch, starts[first : first + batch_size].tolist(), strict=True):
                row[:] = tokens[start : start + SEQ_LEN + 1]
            yield batch


def launcher(folder: Path, batch_size: int, num_workers: int) -> Generator[object]:
    """Yield the batches of the loader that a run has."""
    source = build_source(TokensData(kind="tokens", path=str(folder)), ByteTokenizer(), SEQ_LEN)
    layout = Layout(1, 1, local_batch_size=batch_size, num_microbatches=1)
    order = SampleOrder(len(source), seed=0, shuffle=True)
    with build_train_loader(source, order, layout, 0, start=0, workers=Workers(num_workers)) as batches:
        yield from batches


def datasets_loader(folder: Path, batch_size: int, num_workers: int) -> Generator[object]:
    """Yield batches of a Dataset of `datasets`, one row per sample, through PyTorch's DataLoader."""
    import datasets
    import pyarrow as pa

    saved = folder / "datasets"
    if not saved.exists():
        datasets.disable_progress_bars()
        tokens = np.memmap(folder / SHARD, np.uint16, mode="r")
        used = len(tokens) // (SEQ_LEN + 1) * (SEQ_LEN + 1)
        rows = pa.FixedSizeListArray.from_arrays(pa.array(tokens[:used]), SEQ_LEN + 1)
        datasets.Dataset(pa.table({"tokens": rows})).save_to_disk(saved)
    samples = datasets.load_from_disk(saved).with_format("torch")
    loader = DataLoader(samples, batch_size, shuffle=True, drop_last=True, num_workers=num_workers)
    while True:
        yield from (batch["tokens"] for batch in loader)


def read_tokens(path: Path, first: int) -> npt.NDArray[np.uint16]:
    """Return `LITDATA_CHUNK` tokens of a file."""
    return np.fromfile(path, np.uint16, LITDATA_CHUNK, offset=first * 2)


def litdata_loader(folder: Path, batch_size: int, num_workers: int) -> Generator[object]:
    """Yield batches of litdata's StreamingDataLoader, as int64 like those of the other readers."""
    from litdata import StreamingDataLoader, StreamingDataset, TokensLoader, optimize

    shard, written = folder / SHARD, folder / "litdata"
    if not written.exists():
        pieces = range(0, shard.stat().st_size // 2, LITDATA_CHUNK)
        options = {"chunk_size": LITDATA_CHUNK, "num_workers": 2, "start_method": "fork", "verbose": False}
        optimize(partial(read_tokens, shard), list(pieces), str(written), item_loader=TokensLoader(), **options)
    samples = StreamingDataset(str(written), item_loader=TokensLoader(SEQ_LEN + 1), shuffle=True, drop_last=True)
    loader = StreamingDataLoader(samples, batch_size=batch_size, num_workers=num_workers)
    while True:
        yield from (batch.long() for batch in loader)


@dataclass(frozen=True)
class Reader:
    """A program that reads the tokens."""

    batches: Callable[[Path, int, int], Generator[object]]
    workers: tuple[int, ...] = (0, 2)
    package: str | None = None


READERS = {
    "launcher": Reader(launcher),
    "memory map, one copy": Reader(memory_map, workers=(0,)),
    "datasets and DataLoader": Reader(datasets_loader, package="datasets"),
    "litdata": Reader(litdata_loader, package="litdata"),
}


def is_installed(package: str | None) -> bool:
    """Return whether a contestant's package is installed. Print a line if it is not."""
    found = package is None or find_spec(package) is not None
    if not found:
        print(f"{package} is not installed: the table has no row for it", file=sys.stderr)
    return found


def versions(*packages: str) -> str:
    """Return the versions of those packages that are installed."""
    return ", ".join(f"{package} {version(package)}" for package in packages if find_spec(package))


def speed(batches: Generator[object], batch_size: int, num_samples: int) -> tuple[float, float]:
    """Return million tokens per second, and per CPU second of this process: the best of several repetitions."""
    count = num_samples // batch_size
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


def table_of_loading(num_tokens: int, num_samples: int) -> str:
    """Return a Markdown table of the speed of the launcher's loader and of other readers of the same tokens."""
    torch.set_num_threads(1)
    lines = [
        f"Tokens of {SEQ_LEN} per sample, {num_samples} samples per repetition, the best of {REPEATS} repetitions; "
        f"commit {commit()}, {versions('torch', 'datasets', 'litdata')}.",
        "",
        "| samples per batch | workers | reader | million tokens/s | ratio to the launcher "
        "| million tokens per CPU second of the training process |",
        "|---|---|---|---|---|---|",
    ]
    readers = {name: reader for name, reader in READERS.items() if is_installed(reader.package)}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_tokens(folder, num_tokens)
        for batch_size, num_workers in itertools.product(BATCH_SIZES, WORKERS):
            of_launcher = None
            for label, reader in readers.items():
                if num_workers not in reader.workers:
                    continue
                with closing(reader.batches(folder, batch_size, num_workers)) as batches:
                    wall, cpu = speed(batches, batch_size, num_samples)
                of_launcher = of_launcher or wall
                ratio = wall / of_launcher
                lines.append(f"| {batch_size} | {num_workers} | {label} | {wall:,.1f} | {ratio:.3f} | {cpu:,.1f} |")
                print(lines[-1], file=sys.stderr, flush=True)
    return "\n".join(lines)


def ranks_of(config: Path) -> int:
    """Return the number of ranks in the launch line of a shipped configuration; 0 if it has none."""
    launch = re.search(r"--nproc-per-node (\d+)", config.read_text())
    return int(launch[1]) if launch else 0


def train(arguments: list[str], ranks: int, rank: int, port: int, log: Path) -> None:
    """Train in this process, as one of `ranks` ranks of a host."""
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    os.environ.update({name: str(value) for name, value in places.items()} | {"MASTER_ADDR": "127.0.0.1"})
    os.environ["MASTER_PORT"] = str(port)
    with log.open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    torch.set_num_threads(max(1, usable_cores() // ranks))
    sys.exit(launcher_main(arguments))


def share_of_step(config: Path, ranks: int, num_workers: int, steps: int) -> tuple[float, float]:
    """Train a configuration. Return the seconds of a step, and those in which rank 0 waits for data."""
    with tempfile.TemporaryDirectory() as folder:
        keys = {
            "job.dump_folder": folder,
            "job.name": "data",
            "job.device": "cpu",
            "training.steps": steps,
            "lr_scheduler.warmup_steps": 1,
            "metrics.log_freq": 1,
            "validation.freq": 0,
            "checkpoint.enable": "false",
            "checkpoint.save_last": "false",
            "debug.on_repeated_skips": "stop",
            "data.num_workers": num_workers,
        }
        arguments = ["train", "--config", str(config), *(f"--{key}={value}" for key, value in keys.items())]
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        fork, log = multiprocessing.get_context("fork"), Path(folder, "log")
        # Processes are forked, because the import of torch would take most of the time of a short run.
        processes = [fork.Process(target=train, args=(arguments, ranks, rank, port, log)) for rank in range(ranks)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        if any(process.exitcode for process in processes):
            raise SystemExit(f"error: {config}: training failed:\n{log.read_text()}")
        reports = [json.loads(line) for line in Path(folder, "data", "metrics.jsonl").read_text().splitlines()]
    steady = [report for report in reports if report["step"] > FIRST_STEPS]
    step, data = (sum(report[f"time/{name}"] for report in steady) / len(steady) for name in ("step_s", "data_s"))
    return step, data


class Waiting(NamedTuple):
    """The measurements of one configuration, as means over steps of rank 0."""

    config: Path
    ranks: int
    workers: int
    step_s: float
    data_s: float

    @property
    def share(self) -> float:
        """Part of a step in which training waits for data."""
        return self.data_s / self.step_s

    def row(self) -> str:
        """Return a row of the table."""
        times = f"{self.step_s:.3f} | {self.data_s:.6f} | {self.share:.3%}"
        return f"| `{self.config}` | {self.ranks} | {self.workers} | {times} |"


def table_of_steps(configs: Sequence[Path], steps: int) -> str:
    """Return Markdown tables of the time that training waits for data."""
    import_module("titan_launch.train.main")  # once, and not in every forked process
    measured = []
    for config, num_workers in itertools.product(configs, WORKERS):
        ranks = ranks_of(config) or 1
        measured.append(Waiting(config, ranks, num_workers, *share_of_step(config, ranks, num_workers, steps)))
        print(measured[-1].row(), file=sys.stderr, flush=True)
    return summary_of_steps(measured, steps)


def summary_of_steps(measured: Sequence[Waiting], steps: int) -> str:
    """Return two Markdown tables: the smallest, median and largest share for each number of workers, and the largest
    shares."""
    lines = [
        f"{len(measured) // len(WORKERS)} configurations, {usable_cores()} CPU cores, commit {commit()}; mean of steps "
        f"{FIRST_STEPS + 1} to {steps}.",
        "",
        "| workers per rank | smallest share | median | largest |",
        "|---|---|---|---|",
    ]
    for num_workers in WORKERS:
        shares = [each.share for each in measured if each.workers == num_workers]
        lines.append(f"| {num_workers} | {min(shares):.3%} | {median(shares):.3%} | {max(shares):.3%} |")
    lines += [
        "",
        "| largest shares | ranks | workers per rank | `time/step_s` | `time/data_s` | share |",
        "|---|---|---|---|---|---|",
        *(each.row() for each in sorted(measured, key=lambda each: -each.share)[:LARGEST]),
    ]
    return "\n".join(lines)


def on_cpu() -> list[Path]:
    """Return the shipped configurations that a CPU can train: those whose launch line has at most 4 ranks."""
    return [config for config in sorted(Path("configs").rglob("*.toml")) if 0 < ranks_of(config) <= 4]


def copies_of_the_standard_library(folder: Path, megabytes: int) -> list[str]:
    """Write copies of the source code of Python's standard library. Return the texts."""
    texts: list[str] = []
    size = 0
    for copy in itertools.count():
        for name, path in expand_paths(PYTHON_STDLIB):
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


def tokenize_with_datasets(text: str, tokenizer: str, out: str, num_proc: str) -> None:
    """Tokenize files with `Dataset.map`, and save the result."""
    import datasets
    import tokenizers

    datasets.disable_progress_bars()
    bare = tokenizers.Tokenizer.from_file(f"{tokenizer}/tokenizer.json")
    features = datasets.Features({"tokens": datasets.List(datasets.Value("uint16"))})

    def encode(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        return {"tokens": [found.ids for found in bare.encode_batch_fast(batch["text"], add_special_tokens=False)]}

    files = {"data_files": f"{text}/*", "sample_by": "document", "split": "train", "cache_dir": f"{out}_cache"}
    documents = datasets.load_dataset("text", **files)
    options = {"batched": True, "num_proc": int(num_proc), "remove_columns": ["text"], "features": features}
    documents.map(encode, **options).save_to_disk(out)


def in_new_interpreter(function: Callable[..., object], *arguments: str) -> None:
    """Call a function in a new process, which imports only what the function imports, as a command does."""
    code = f"import sys\n{inspect.getsource(function)}\n{function.__name__}(*sys.argv[1:])"
    subprocess.run([sys.executable, "-c", code, *arguments], check=True)


def table_of_preparation(megabytes: int) -> str:
    """Return a Markdown table of the speed of `prepare` and of the tokenizer alone, on all cores."""
    import tokenizers

    cores, with_datasets = usable_cores(), is_installed("datasets")
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

            timed(f"the tokenizer alone, {cores} threads", encode)
            for workers in (1, cores):
                options = {"out": f"{name}/tokens_{workers}_{repeat}", "tokenizer": folder, "workers": workers}
                command = [sys.executable, "-m", "titan_launch", "prepare", str(text)]
                command += [f"--{option}={value}" for option, value in options.items()]
                about = f"{cores} processes" if workers > 1 else f"1 process, {cores} threads"
                timed(f"titan-launch prepare, {about}", partial(subprocess.run, command, check=True))
            if with_datasets:
                arguments = map(str, (text, folder, f"{name}/datasets_{repeat}", cores))
                about = f"Dataset.map and save_to_disk, {cores} processes"
                timed(about, partial(in_new_interpreter, tokenize_with_datasets, *arguments))
    size = sum(len(content.encode()) for content in texts) / 1e6
    alone, *_ = wall
    rows = [
        f"| {name} | {size / min(wall[name]):.2f} | {min(wall[alone]) / min(wall[name]):.0%} "
        f"| {size / min(cpu[name]):.2f} | {min(cpu[alone]) / min(cpu[name]):.0%} |"
        for name in wall
    ]
    lines = [
        f"{size:,.0f} MB in {len(texts):,} files, a byte-level BPE of 8,192 tokens, the best of {REPEATS_OF_PREPARE} "
        f"repetitions; commit {commit()}, {versions('tokenizers', 'datasets')}.",
        "",
        "| program | MB/s | of the tokenizer alone | MB per CPU second | of the tokenizer alone |",
        "|---|---|---|---|---|",
        *rows,
    ]
    return "\n".join(lines)


def table_of_packing(millions: int) -> str:
    """Return a Markdown table of time, memory and padding of the packing of documents with random lengths."""
    rng = np.random.default_rng(0)
    lengths = np.ceil(rng.lognormal(LOG_MEDIAN, 1.0, millions * 1_000_000)).astype(np.int64)
    ends = np.cumsum(lengths)
    lines = [
        f"{millions} million documents, {ends[-1] / 1e9:.1f} billion tokens, lengths log-normal with mean "
        f"{lengths.mean():,.0f} and median {np.median(lengths):,.0f}; one core, commit {commit()}.",
        "",
        "| `seq_len` | CPU seconds | memory besides the lengths | documents cut | padding |",
        "|---|---|---|---|---|",
    ]
    for seq_len in PACKED_SEQ_LENS:
        start = time.process_time()
        summary = pack(ends, seq_len).summary
        seconds = time.process_time() - start
        tracemalloc.start()
        pack(ends, seq_len)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        cut = summary.num_cut / summary.num_documents
        lines.append(f"| {seq_len:,} | {seconds:.1f} | {peak / 1e9:.2f} GB | {cut:.1%} | {summary.padding:.5%} |")
        print(lines[-1], file=sys.stderr, flush=True)
    return "\n".join(lines)


def main() -> None:
    """Measure, print the table, and write it to a page of the docs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    about = "train these configurations instead of reading; without names: all of configs/ that a CPU can train"
    parser.add_argument("--steps", nargs="*", type=Path, metavar="CONFIG", help=about)
    about = "steps of each training (default: %(default)s)"
    parser.add_argument("--trained-steps", type=int, default=4, metavar="N", help=about)
    parser.add_argument("--prepare", type=int, metavar="MB", help="measure `titan-launch prepare` on this much text")
    about = "pack this many million documents with random lengths"
    parser.add_argument("--packing", type=int, metavar="MILLIONS", help=about)
    parser.add_argument("--num-tokens", type=int, default=200_000_000, help="tokens of the file (default: %(default)s)")
    parser.add_argument("--num-samples", type=int, default=8192, help="samples per repetition (default: %(default)s)")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="Markdown page with the markers of this benchmark")
    arguments = parser.parse_args()
    if arguments.steps is not None:
        publish(table_of_steps(arguments.steps or on_cpu(), arguments.trained_steps), "data_steps", arguments.write)
    elif arguments.packing:
        publish(table_of_packing(arguments.packing), "data_packing", arguments.write)
    elif arguments.prepare:
        publish(table_of_preparation(arguments.prepare), "data_preparation", arguments.write)
    else:
        publish(table_of_loading(arguments.num_tokens, arguments.num_samples), "data_loading", arguments.write)


if __name__ == "__main__":
    main()
