"""The compared tools (contestants), and the command that starts each of them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.speed.jobs import Division, Job

REPO = Path(__file__).parents[2]

BARE = "bare"
LAUNCHER = "launcher"


@dataclass(frozen=True)
class Contestant:
    """A tool, as one row of a table."""

    name: str
    label: str
    module: str
    """Module to start: a script of `tools`, or the launcher."""

    division: Division | None = None
    """Division that replaces the job's; None keeps the job's."""

    package: str | None = None
    """Package that must be installed in the peers' environment. None: the tool runs in this environment."""

    has_agent: bool = False
    """True if the tool starts its processes itself, without torchrun."""

    options: Mapping[str, Any] = field(default_factory=dict)
    """Sections of the job file that replace those of the job, used by the launcher only."""


_TOOLS = "benchmarks.speed.tools."
CONTESTANTS = {
    contestant.name: contestant
    for contestant in (
        Contestant(BARE, "bare loop, FSDP2", _TOOLS + "bare"),
        Contestant("bare-whole", "bare loop without FSDP2", _TOOLS + "bare", "whole"),
        Contestant("bare-ddp", "bare loop, DDP", _TOOLS + "bare", "replicated"),
        Contestant(LAUNCHER, "**titan_launch**", "titan_launch"),
        Contestant(
            "launcher-flash",
            "**titan_launch**, PyTorch's attention",
            "titan_launch",
            options={"kernels": {"attention": "flash"}},
        ),
        Contestant(
            "launcher-agent",
            "**titan_launch**, started by `titan-launch launch` instead of torchrun",
            "titan_launch",
            has_agent=True,
        ),
        Contestant("trainer", "Hugging Face Trainer", _TOOLS + "transformers_trainer", package="transformers"),
        Contestant("accelerate", "Accelerate", _TOOLS + "accelerate_loop", package="accelerate"),
        Contestant("litgpt", "litgpt", _TOOLS + "litgpt_pretrain", package="litgpt"),
        Contestant("torchtitan", "TorchTitan", _TOOLS + "torchtitan_train", package="torchtitan"),
    )
}


@dataclass(frozen=True)
class Environments:
    """The Python of the launcher and the bare loop, and the Python of the peers, if any."""

    own: str = sys.executable
    peers: str | None = None

    def versions(self) -> dict[str, str]:
        """Return the versions of the packages in the peers' environment, by package; empty without peers."""
        if self.peers is None:
            return {}
        names = ["torch", *sorted({c.package for c in CONTESTANTS.values() if c.package})]
        script = (
            "import sys, importlib.metadata as m, importlib.util as u\n"
            "print(*(f'{n}={m.version(n)}' for n in sys.argv[1:] if u.find_spec(n)))"
        )
        found = subprocess.run([self.peers, "-c", script, *names], capture_output=True, text=True, check=True).stdout
        return dict(word.split("=", 1) for word in found.split())


def command(contestant: Contestant, job: Job, environments: Environments, folder: Path) -> list[str]:
    """Return the command with which a user would start a tool on a job. `folder`: for its job file and output."""
    python = environments.peers if contestant.package else environments.own
    assert python is not None, f"{contestant.name} needs the peers' environment"
    if contestant.module != "titan_launch":
        return [*processes(python, job.ranks), "-m", contestant.module, job.dump()]
    path = folder / "job.toml"
    path.write_text(to_toml({**launcher_sections(job, folder), **contestant.options}))
    if contestant.has_agent:
        ranks = ["--nproc-per-node", str(job.ranks)]
        return [python, "-m", "titan_launch", "launch", *ranks, "--config", str(path)]
    return [*processes(python, job.ranks), "-m", "titan_launch", "--config", str(path)]


def processes(python: str, ranks: int) -> list[str]:
    """Return the command that starts `ranks` processes: torchrun, or Python for a single process."""
    if ranks == 1:
        return [python]
    return [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]


def launcher_sections(job: Job, folder: Path) -> dict[str, dict[str, Any]]:
    """Return the sections of the launcher's job file. All other keys have their defaults."""
    shape = ("dim", "n_layers", "n_heads", "n_kv_heads", "hidden_dim", "vocab_size")
    replicas = job.ranks if job.division == "replicated" else 1
    return {
        "job": {"name": "speed", "dump_folder": str(folder / "outputs"), "device": "cpu"},
        "model": {"name": "llama3", "flavor": "debug", "args": {name: getattr(job, name) for name in shape}},
        "data": {"kind": "synthetic"},
        "training": {
            "seq_len": job.seq_len,
            "local_batch_size": job.local_sequences,
            "global_batch_size": job.sequences * job.microbatches,
            "steps": job.steps,
            "max_norm": job.max_norm,
        },
        "optimizer": {"lr": job.lr},
        "precision": {"param_dtype": job.precision},
        "parallelism": {"data_parallel_replicate_degree": replicas},
        "checkpoint": {"save_last": False},  # the other tools do not save checkpoints
    }


def to_toml(sections: Mapping[str, Any], path: str = "") -> str:
    """Return nested tables as TOML. Values are strings, numbers, booleans, lists of these, or tables."""
    lines = []
    for name, value in sections.items():
        key = f"{path}{name}"
        tables = value if isinstance(value, list) else [value]
        for table in tables:
            nested = {k: v for k, v in table.items() if isinstance(v, dict) or _is_list_of_tables(v)}
            plain = {k: v for k, v in table.items() if k not in nested}
            lines.append(f"[[{key}]]" if isinstance(value, list) else f"[{key}]")
            lines += [f"{k} = {_toml_value(v)}" for k, v in plain.items()]
            lines.append(to_toml(nested, f"{key}."))
    return "\n".join(line for line in lines if line)


def _is_list_of_tables(value: Any) -> bool:
    return isinstance(value, list) and any(isinstance(item, dict) for item in value)


def _toml_value(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_toml_value, value))}]"
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else repr(value)
