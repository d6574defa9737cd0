"""Comparison of every combination of parallelisms with one process.

`test_matrix.py` uses a part of the combinations, and docs/verification/numerics.md has the results of this part:

    python -m tests.parallel.matrix --write docs/verification/numerics.md

`--all` runs every combination.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from benchmarks.publishing import publish
from tests.distributed import run_ranks
from tests.train.jobs import TINY_ARGS, step_and_report, this_rank, tiny_job
from titan_launch.config.job import JobConfig
from titan_launch.core.torch_release import SPLITS_BACKWARD_OF_EXPERTS
from titan_launch.distributed.ring_attention_on_cpu import ring_attention_on_cpu
from titan_launch.train.build import build_run

STEPS = 3
TOLERANCE = 1e-5
"""Relative tolerance of the loss and of the gradient norm."""


@dataclass(frozen=True)
class Division:
    """One way to divide the ranks."""

    name: str
    ranks: int
    parallelism: dict[str, Any] = field(hash=False)
    has_experts: bool = False
    """True for a mixture of experts, False for a dense decoder."""
    n_layers: int = 2

    @property
    def has_replicas(self) -> bool:
        """Return True if FSDP2 all-reduces gradients between replicas."""
        is_sharded = self.parallelism.get("shard_optimizer_over_replicas", False)
        return self.parallelism.get("data_parallel_replicate_degree", 1) > 1 and not is_sharded

    @property
    def is_pipeline(self) -> bool:
        """Return True if the layers are divided over stages."""
        return "pipeline_parallel_degree" in self.parallelism

    @property
    def alone(self) -> Case:
        """The case of one process that trains the same model."""
        return Case(Division("one process", 1, {}, self.has_experts, self.n_layers), "no rules", "immediate", "none")

    @property
    def splits_backward(self) -> bool:
        """Return True if the schedule splits backward. Such a schedule requires deferred reduction and unsharded
        parameters, and excludes selective activation checkpointing by operation."""
        return "ZeroBubble" in self.parallelism.get("pipeline_parallel_schedule", "")


def _division(name: str, ranks: int, **parallelism: Any) -> Division:
    return Division(name, ranks, parallelism, n_layers=_layers(parallelism))


def _of_experts(name: str, ranks: int, **parallelism: Any) -> Division:
    return Division(f"experts: {name}", ranks, parallelism, has_experts=True, n_layers=_layers(parallelism))


def _layers(parallelism: dict[str, Any]) -> int:
    """Return the number of layers of the model: one for each stage of the longest pipeline, or 2."""
    return 4 if "pipeline_parallel_degree" in parallelism else 2


TP, CP, PP, REPLICAS = (
    {f"{axis}_degree": 2}
    for axis in ("tensor_parallel", "context_parallel", "pipeline_parallel", "data_parallel_replicate")
)
SHARDED_OPTIMIZER = {**REPLICAS, "shard_optimizer_over_replicas": True}
EP2, EP4 = ({"expert_parallel_degree": degree} for degree in (2, 4))
UNBALANCED = {"context_parallel_load_balance": False, "context_parallel_rotate_method": "alltoall"}
DIVISIONS = (
    _division("FSDP", 2),
    _division("replicas", 2, **REPLICAS),
    _division("replicas, sharded optimizer", 2, **SHARDED_OPTIMIZER),
    _division("TP", 2, **TP),
    _division("TP, no sequence parallelism", 2, **TP, sequence_parallel=False),
    _division("TP, no loss parallelism", 2, **TP, loss_parallel=False),
    _division("CP", 2, **CP),
    _division("CP, unbalanced, alltoall", 2, **CP, **UNBALANCED),
    *(
        _division(f"PP, {schedule}", 2, **PP, pipeline_parallel_schedule=schedule)
        for schedule in ("1F1B", "GPipe", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble")
    ),
    _division("FSDP", 4),
    _division("HSDP", 4, **REPLICAS),
    _division("HSDP, sharded optimizer", 4, **SHARDED_OPTIMIZER),
    _division("FSDP x TP", 4, **TP),
    _division("replicas x TP", 4, **REPLICAS, **TP),
    _division("replicas x TP, sharded optimizer", 4, **SHARDED_OPTIMIZER, **TP),
    _division("FSDP x CP", 4, **CP),
    _division("TP x CP", 4, **TP, **CP),
    _division("FSDP x PP, 1F1B", 4, **PP),
    _division("FSDP x PP, ZBVZeroBubble", 4, **PP, pipeline_parallel_schedule="ZBVZeroBubble"),
    _division("replicas x PP, Interleaved1F1B", 4, **REPLICAS, **PP, pipeline_parallel_schedule="Interleaved1F1B"),
    _division("TP x PP, 1F1B", 4, **TP, **PP),
    _division("CP x PP, 1F1B", 4, **CP, **PP),
    _of_experts("FSDP", 2),
    _of_experts("EP", 2, **EP2),
    _of_experts("TP", 2, **TP),
    _of_experts("TP, no sequence parallelism", 2, **TP, sequence_parallel=False),
    _of_experts("CP", 2, **CP),
    _of_experts("EP over CP", 2, **EP2, **CP),
    _of_experts("EP 4", 4, **EP4),
    _of_experts("FSDP x EP", 4, **EP2),
    _of_experts("replicas x EP", 4, **EP2, **REPLICAS),
    _of_experts("replicas x EP, sharded optimizer", 4, **EP2, **SHARDED_OPTIMIZER),
    _of_experts("EP 2 x TP", 4, **EP2, **TP),
    _of_experts("EP 4 over FSDP x CP", 4, **EP4, **CP),
    *(
        [_of_experts("EP 2 x PP, ZBVZeroBubble", 4, **EP2, **PP, pipeline_parallel_schedule="ZBVZeroBubble")]
        if SPLITS_BACKWARD_OF_EXPERTS
        else []
    ),
)
"""The verified divisions. A degree that is not named is 1, and FSDP2 shards over the remaining ranks."""

RULES: dict[str, list[dict[str, Any]]] = {
    "no rules": [],
    "rules": [{"type": "RMSNorm", "param_dtype": "float32"}, {"match": "output", "param_dtype": "float32"}],
}
DENSE: dict[str, Any] = {"args": {**TINY_ARGS, "vocab_size": 64}}
EXPERTS: dict[str, Any] = {
    "name": "qwen3_moe",
    "args": {
        **DENSE["args"],
        "head_dim": 8,
        "experts": {
            "num_experts": 4,
            "top_k": 2,
            "hidden_dim": 16,
            "shared_hidden_dim": 16,
            "expert_bias": True,
            "balance_loss": 0.1,
            "z_loss": 0.01,
        },
    },
}
"""A mixture of experts in every layer. 4 experts are divided over up to 4 ranks."""

CHECKPOINTING: dict[str, dict[str, Any]] = {
    "none": {"mode": "none"},
    "full": {"mode": "full"},
    "selective": {"mode": "selective"},
    "every second": {"mode": "selective", "selective_ac_option": 2},
}


@dataclass(frozen=True)
class Case:
    """One job to compare with one process."""

    division: Division
    rules: str
    mode: str
    checkpointing: str

    @property
    def local(self) -> int:
        """Number of samples in a microbatch. A step has 8 samples: in 4 microbatches for a pipeline, else in 2."""
        shared = [value for name, value in self.division.parallelism.items() if name in (*TP, *CP, *PP)]
        num_microbatches = 4 if self.division.is_pipeline else 2
        return 8 * prod(shared) // (self.division.ranks * num_microbatches)

    def job(self, folder: Path) -> dict[str, Any]:
        """Return the job as plain data. It computes in fp32, so that results differ only by the order of sums."""
        model = EXPERTS if self.division.has_experts else DENSE
        return tiny_job(
            folder,
            model={**model, "args": {**model["args"], "n_layers": self.division.n_layers}},
            data={"vocab_size": 64},
            training={"global_batch_size": 8, "local_batch_size": self.local, "steps": STEPS, "seq_len": 16},
            precision={"rules": RULES[self.rules]},
            gradient_accumulation={
                "mode": self.mode,
                "keep_params_unsharded": self.division.splits_backward or None,
            },
            activation_checkpoint=CHECKPOINTING[self.checkpointing],
            parallelism=self.division.parallelism,
            # If a gradient is almost 0, the sign of its rounding error decides the sign of Adam's update.
            optimizer={"eps": 1e-5},
            checkpoint={"enable": False},
        )


def cases(divisions: Iterable[Division] = DIVISIONS) -> list[Case]:
    """Return all cases of the product."""
    return [
        Case(division, *choice)
        for division in divisions
        for choice in itertools.product(RULES, _modes(division), _checkpointings(division))
    ]


def sample(divisions: Iterable[Division] = DIVISIONS) -> list[Case]:
    """Return a part of all cases: every division with every accumulation mode.

    Each division trains with and without activation checkpointing. The activation checkpointing mode and the precision
    rules change from one division to the next.
    """
    picked = []
    for offset, division in enumerate(divisions):
        modes, (none, *others) = _modes(division), _checkpointings(division)
        checkpointings = (none, others[offset % 2], others[(offset + 1) % 2])
        picked += [
            Case(division, list(RULES)[(index + offset) % 2], modes[index % len(modes)], checkpointings[index])
            for index in range(max(2, len(modes)))
        ]
    return picked


def _modes(division: Division) -> tuple[str, ...]:
    if division.splits_backward:
        return ("deferred",)
    return ("immediate", "deferred", *(["deferred_all_reduce"] if division.has_replicas else []))


def _checkpointings(division: Division) -> tuple[str, ...]:
    return ("none", "full", "every second") if division.splits_backward else ("none", "full", "selective")


Measured = list[tuple[float, float]]
"""Loss and gradient norm of every step."""


def train(cases: Sequence[Case], folder: Path, num_steps: int = STEPS) -> list[Measured]:
    """Train the jobs one after the other on this rank, and return their losses and norms."""
    return [_train(case, folder / str(index), num_steps) for index, case in enumerate(cases)]


def _train(case: Case, folder: Path, num_steps: int) -> Measured:
    steps = []
    with ExitStack() as stack:
        if "context_parallel_degree" in case.division.parallelism:
            stack.enter_context(ring_attention_on_cpu())
        run = build_run(JobConfig.model_validate(case.job(folder)), this_rank(), stack)
        for _ in range(num_steps):
            scalars = step_and_report(run)
            steps.append((scalars["train/loss"], scalars["train/grad_norm"]))
    return steps


def differences(cases: Sequence[Case], folder: Path, num_steps: int = STEPS) -> dict[Case, tuple[float, float]]:
    """Return the largest relative differences of the loss and of the gradient norm from one process.

    The maximum is over steps and ranks. All cases must have the same number of ranks.
    """
    (ranks,) = {case.division.ranks for case in cases}
    references = list(dict.fromkeys(case.division.alone for case in cases))
    (measured_alone,) = run_ranks(train, 1, references, folder / "alone", num_steps)
    alone = dict(zip(references, measured_alone, strict=True))
    by_rank = run_ranks(train, ranks, cases, folder / f"{ranks}_ranks", num_steps, timeout=20 + 20 * len(cases))
    return {
        case: (
            max(_apart(measured, alone[case.division.alone], 0) for measured in of_ranks),
            max(_apart(measured, alone[case.division.alone], 1) for measured in of_ranks),
        )
        for case, of_ranks in zip(cases, zip(*by_rank, strict=True), strict=True)
    }


def _apart(measured: Measured, alone: Measured, index: int) -> float:
    return max(abs(own[index] - one[index]) / one[index] for own, one in zip(measured, alone, strict=True))


def table(measured: dict[Case, tuple[float, float]]) -> str:
    """Return a table with one row for each division."""
    rows: dict[Division, list[tuple[Case, tuple[float, float]]]] = defaultdict(list)
    for case, difference in measured.items():
        rows[case.division].append((case, difference))
    lines = [
        "| layout | CPU ranks (gloo) | runs without, with checkpointing | accumulation | loss | gradient norm |",
        "|---|---:|---|---|---:|---:|",
    ]
    for division, found in rows.items():
        loss, norm = (max(difference[index] for _, difference in found) for index in (0, 1))
        modes = ", ".join(dict.fromkeys(case.mode for case, _ in found))
        without = sum(case.checkpointing == "none" for case, _ in found)
        runs = f"{without}, {len(found) - without}"
        lines.append(f"| {division.name} | {division.ranks} | {runs} | {modes} | {loss:.1e} | {norm:.1e} |")
    return "\n".join(lines)


def main() -> None:
    """Run the cases and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path, help="the Markdown file with the table's markers")
    parser.add_argument("--all", action="store_true", help="every combination, not only those of the tests")
    arguments = parser.parse_args()
    chosen = cases() if arguments.all else sample()
    measured: dict[Case, tuple[float, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for ranks in (2, 4):
            own = [case for case in chosen if case.division.ranks == ranks]
            measured |= differences(own, Path(folder, str(ranks)))
    publish(table(measured), "parallel_matrix", arguments.write)


if __name__ == "__main__":
    main()
