"""Speed of a mixture of experts on a CPU: the launcher, plain PyTorch by hand, and `transformers`.

    python benchmarks/experts.py
    python benchmarks/experts.py --rounds 5 --write docs/verification/benchmarks.md

All train the flavor `debug` of `qwen3_moe` on random tokens in one process, with AdamW and clipping. Each run is a
process of its own, and the contestants take turns. A run counts with the median of its steps without the first two.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import torch
import torch.nn.functional as F
from publishing import commit, publish
from torch import Tensor, nn

from titan_launch.models.architectures import resolve_args
from titan_launch.models.decoder.args import DecoderArgs
from titan_launch.models.decoder.module import Decoder

SEQUENCES, SEQ_LEN, LR = 4, 512, 5e-4
WITHOUT_FIRST = 2


class PlainExperts(nn.Module):
    """The mixture of experts as it is often written: for each expert, the tokens that chose it are looked up."""

    def __init__(self, args: DecoderArgs):
        super().__init__()
        assert args.experts is not None
        dim, self.options = args.dim, args.experts
        widths = ((dim, self.options.hidden_dim), (dim, self.options.hidden_dim), (self.options.hidden_dim, dim))
        self.router = nn.Linear(dim, self.options.num_experts, bias=False)
        self.experts = nn.ModuleList(
            nn.ModuleList(nn.Linear(*width, bias=False) for width in widths) for _ in range(self.options.num_experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, tokens, dim) to the same shape."""
        rows = x.flatten(0, 1)
        weights, chosen = self.router(rows).float().softmax(-1).topk(self.options.top_k)
        weights = weights / weights.sum(-1, keepdim=True)
        result = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            assert isinstance(expert, nn.ModuleList)
            gate, up, down = expert
            tokens, place = (chosen == number).nonzero(as_tuple=True)
            own = rows[tokens]
            output = down(F.silu(gate(own)) * up(own)) * weights[tokens, place, None]
            result.index_add_(0, tokens, output.to(result.dtype))
        return result.view_as(x)


def build_plain() -> nn.Module:
    """Return the launcher's decoder with `PlainExperts`."""
    args = resolve_args("qwen3_moe", "debug", {})
    assert isinstance(args, DecoderArgs)
    model = Decoder(args, SEQ_LEN)
    for layer in model.layers:
        layer.moe = PlainExperts(args)
    return model


def build_transformers(implementation: str) -> nn.Module:
    """Return the class of `transformers` with the same sizes."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    args = resolve_args("qwen3_moe", "debug", {})
    assert isinstance(args, DecoderArgs) and args.experts is not None
    config = Qwen3MoeConfig(
        hidden_size=args.dim,
        num_hidden_layers=args.n_layers,
        num_attention_heads=args.n_heads,
        num_key_value_heads=args.n_kv_heads,
        head_dim=args.head_width,
        vocab_size=args.vocab_size,
        num_experts=args.experts.num_experts,
        num_experts_per_tok=args.experts.top_k,
        moe_intermediate_size=args.experts.hidden_dim,
        norm_topk_prob=True,
        tie_word_embeddings=False,
        use_cache=False,
    )
    config._experts_implementation = implementation
    model: nn.Module = Qwen3MoeForCausalLM(config)
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "plain PyTorch": build_plain,
    "transformers, one expert at a time": lambda: build_transformers("eager"),
    "transformers, grouped products": lambda: build_transformers("grouped_mm"),
}
"""The models that `train_by_hand` trains, by contestant."""


def train_by_hand(model: nn.Module, dtype: torch.dtype, steps: int) -> list[float]:
    """Train a model in a plain loop, in bf16 under autocast. Return the seconds of each step."""
    torch.manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    seconds = []
    for _ in range(steps):
        start = time.perf_counter()
        tokens = torch.randint(0, 256, (SEQUENCES, SEQ_LEN + 1))
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            outputs = model(tokens[:, :-1])
        logits = outputs if isinstance(outputs, Tensor) else outputs.logits
        F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - start)
    return seconds


LAUNCHER = "titan_launch"
CONFIG = Path(__file__).parents[1] / "configs" / "qwen3_moe_debug.toml"


def train_with_launcher(dtype: str, steps: int) -> list[float]:
    """Run the launcher. Return the seconds of each step."""
    with tempfile.TemporaryDirectory() as folder:
        keys = {
            "job.name": "experts",
            "job.dump_folder": folder,
            "job.device": "cpu",
            "training.seq_len": SEQ_LEN,
            "training.local_batch_size": SEQUENCES,
            "training.global_batch_size": SEQUENCES,
            "training.steps": steps,
            "precision.param_dtype": dtype,
            "optimizer.lr": LR,
            "metrics.log_freq": 1,
            "checkpoint.save_last": "false",
        }
        command = [
            sys.executable,
            "-m",
            "titan_launch",
            "--config",
            str(CONFIG),
            *(f"--{key}={value}" for key, value in keys.items()),
        ]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        reports = Path(folder, "experts", "metrics.jsonl").read_text().splitlines()
    return [json.loads(report)["time/step_s"] for report in reports]


def seconds_of_step(contestant: str, dtype: str, steps: int) -> float:
    """Return the median of the steps of a run in a new process."""
    command = [sys.executable, __file__, "--contestant", contestant, "--dtype", dtype, "--steps", str(steps)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return statistics.median(json.loads(done.stdout.splitlines()[-1])[WITHOUT_FIRST:])


def table(rounds: int, steps: int) -> str:
    """Return a Markdown table of all contestants."""
    rows = []
    for dtype in ("float32", "bfloat16"):
        measured: dict[str, list[float]] = {name: [] for name in (*MODELS, LAUNCHER)}
        names = list(measured)
        for turn in range(rounds):
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                measured[name].append(seconds_of_step(name, dtype, steps))
                print(f"{dtype}, {name}: {measured[name][-1]:.3f} s", file=sys.stderr, flush=True)
        plain = measured["plain PyTorch"]
        for name, seconds in measured.items():
            ratio = statistics.median(own / base for own, base in zip(seconds, plain, strict=True))
            speed = SEQUENCES * SEQ_LEN / statistics.median(seconds)
            spread = f"{1000 * statistics.median(seconds):.0f} ({1000 * min(seconds):.0f} to {1000 * max(seconds):.0f})"
            rows.append(f"| {dtype} | {name} | {spread} | {ratio:.2f} | {speed:,.0f} |")
    about = f"{os.cpu_count()} CPU cores, torch {torch.__version__}, transformers {version('transformers')}"
    lines = [
        f"{about}, commit {commit()}; {rounds} rounds of {steps} steps.",
        "",
        "| dtype | contestant | step, ms (smallest to largest) | over baseline | tokens/s |",
        "|---|---|---|---|---|",
        *rows,
    ]
    return "\n".join(lines)


def main() -> None:
    """Measure, or run one contestant and print its seconds as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--write", type=Path, metavar="PAGE", help="Markdown page with the markers of this benchmark")
    parser.add_argument("--contestant", choices=(*MODELS, LAUNCHER), help="run one contestant in this process")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    arguments = parser.parse_args()
    if arguments.contestant is None:
        publish(table(arguments.rounds, arguments.steps), "experts", arguments.write)
    elif arguments.contestant == LAUNCHER:
        print(json.dumps(train_with_launcher(arguments.dtype, arguments.steps)))
    else:
        model, dtype = MODELS[arguments.contestant](), getattr(torch, arguments.dtype)
        print(json.dumps(train_by_hand(model, dtype, arguments.steps)))


if __name__ == "__main__":
    main()
