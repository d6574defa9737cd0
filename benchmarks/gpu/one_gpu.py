"""Steps for one GPU: facts, tests, pairs of runs that must agree, long sequences, generation, waits and branches."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.gpu import gpu_tests
from benchmarks.gpu.comparisons import EXACT, FP32_ROUNDING, ROUNDING, Tolerance
from benchmarks.gpu.jobs import (
    ACTIVATION_OFFLOAD,
    BRANCHES,
    COMPILED,
    CPU_OFFLOAD,
    DETERMINISTIC,
    DOCUMENT_TOKENS,
    DOCUMENTS,
    FP32,
    FULL,
    GEMMA2,
    GEMMA3,
    GPT_OSS,
    STEPS,
    TEXT,
    WAITS,
    Options,
    Setting,
    obstacle,
)
from benchmarks.gpu.steps import Step, agreement_of, last_output_line, memory_of

_LAUNCHER = ("titan_launch",)
_GROUPED, _LOOPED = (("benchmarks.gpu.expert_product", product) for product in ("grouped", "looped"))

COUNTED = {"TORCH_LOGS": "recompiles"}
EAGER_ROUNDING = {"TORCHINDUCTOR_EMULATE_PRECISION_CASTS": "1"}
"""Environments of pairs: recompilations are logged; fused kernels round where eager operations do."""


@dataclass(frozen=True)
class Pair:
    """Two runs whose losses and gradient norms must agree."""

    name: str
    common: Options
    first: Options = field(default_factory=dict)
    second: Options = field(default_factory=dict)
    tolerance: Tolerance = ROUNDING
    programs: tuple[Sequence[str], Sequence[str]] = (_LAUNCHER, _LAUNCHER)
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of both runs."""


def _selective(option: str) -> Options:
    return {"activation_checkpoint.mode": "selective", "activation_checkpoint.selective_ac_option": option}


PAIRS = (
    Pair("experts: grouped and looped", GPT_OSS, programs=(_GROUPED, _LOOPED)),
    Pair(  # the gradient norm is then that of the biases
        "experts: grouped and looped, only biases trained",
        {**GPT_OSS, "training.trainable": '["layers.*.moe.experts.b*"]'},
        programs=(_GROUPED, _LOOPED),
    ),
    *(  # not GPT-OSS, whose experts multiply differences of bf16: losses then differ by 1 % after 5 steps on an H200
        Pair(f"{name}: eager and compiled", options, second=COMPILED, environment=EAGER_ROUNDING)
        for name, options in (("gemma2", GEMMA2), ("gemma3", GEMMA3))
    ),
    *(
        Pair(f"{name} in fp32: eager and compiled", {**options, **FP32}, second=COMPILED, tolerance=FP32_ROUNDING)
        for name, options in (("gpt-oss", GPT_OSS), ("gemma2", GEMMA2), ("gemma3", GEMMA3))
    ),
    Pair(
        "documents: 7 packed in a sample and each alone",
        DOCUMENTS,
        {"training.seq_len": 7 * DOCUMENT_TOKENS, "training.local_batch_size": 2},
        {"training.seq_len": DOCUMENT_TOKENS, "training.local_batch_size": 14},
    ),
    Pair("activation offload: off and on", DETERMINISTIC, second=ACTIVATION_OFFLOAD, tolerance=EXACT),
    Pair(
        "activation offload after full checkpointing: off and on",
        {**DETERMINISTIC, **FULL},
        second=ACTIVATION_OFFLOAD,
        tolerance=EXACT,
    ),
    Pair("CPU offload: off and on", {}, second=CPU_OFFLOAD),
    Pair("gemma3: without and with selective checkpointing", GEMMA3, second=_selective("2"), environment=COUNTED),
    Pair("gemma3: without and with checkpointing per op", GEMMA3, second=_selective("op"), environment=COUNTED),
    Pair(
        "gemma3, compiled: without and with checkpointing per op",
        {**GEMMA3, **COMPILED},
        second=_selective("op"),
        environment=COUNTED,
    ),
)


def groups(setting: Setting) -> Iterator[list[Step]]:
    """Yield groups of steps in order. The steps of a group run at the same time."""
    without_values = [] if setting.has_values else ["--without-values"]
    facts = [sys.executable, "-m", "benchmarks.gpu.facts", *without_values]
    yield [Step("facts", [facts], detail=last_output_line, is_quoted=True)]
    # pyproject.toml has -q; -vv names each test when it begins, so the log of a test that hangs names it.
    tests = gpu_tests.command("-k", "not predicted", "-vv")
    skipped = "" if setting.has_values else "the tests compare values"
    yield [Step("small GPU tests", [tests], 300, last_output_line, skipped=skipped)]
    yield [pair_step(pair, setting) for pair in PAIRS]
    yield [long_sequence(setting)]
    yield [generation(setting, without_values)]
    yield [waits("plain", {}, setting), *(waits(name, BRANCHES[name], setting) for name in WAITS)]
    yield [branch_step(name, setting) for name in BRANCHES]


def pair_step(pair: Pair, setting: Setting) -> Step:
    """Return the step of a pair: both runs, one after the other, and their comparison."""
    environment = ["env", *(f"{name}={value}" for name, value in pair.environment.items())] if pair.environment else []
    names = [f"{pair.name}, {number}" for number in ("first", "second")]
    runs = zip(names, (pair.first, pair.second), pair.programs, strict=True)
    commands = [
        [*environment, *setting.training(name, {"metrics.log_freq": 1, **pair.common, **own}, program=program)]
        for name, own, program in runs
    ]
    one, other = map(setting.run_folder, names)
    detail = agreement_of(one, other, pair.tolerance)
    skipped = obstacle({**pair.first, **pair.second}, setting.is_smoke)
    return Step(f"pair: {pair.name}", commands, 240, detail, skipped=skipped)


def long_sequence(setting: Setting) -> Step:
    """Return the step of a long sequence with windows, of which all scores would need more memory than a GPU has."""
    name, tokens = "gemma3 at 32,768 tokens", setting.sized(32_768, 512)
    options = {**GEMMA3, **FULL, "training.seq_len": tokens, "training.local_batch_size": 1, "loss.chunks": 16}
    return Step(name, [setting.training(name, options)], 240, memory_of(setting.run_folder(name)))


def generation(setting: Setting, without_values: Sequence[str]) -> Step:
    """Return the step that trains on text, and generates from the run."""
    name = "generation without and with cuDNN"
    train = setting.training(name, {**TEXT, "checkpoint.save_last": True, "training.seq_len": 512})
    generate = [sys.executable, "-m", "benchmarks.gpu.generation", str(setting.run_folder(name)), *without_values]
    return Step(name, [train, generate], detail=last_output_line)


def waits(name: str, options: Options, setting: Setting) -> Step:
    """Return the step that counts the waits of a run."""
    name = f"waits: {name}"
    command = setting.training(name, options, program=("benchmarks.gpu.waits",))
    skipped = obstacle(options, setting.is_smoke)
    return Step(name, [command], detail=last_output_line, is_quoted=True, skipped=skipped)


def branch_step(name: str, setting: Setting) -> Step:
    """Return the step of a branch: six training steps. A run with checkpoints is then resumed for three more."""
    jobs = [dict(BRANCHES[name])]
    if "checkpoint.enable" in BRANCHES[name]:
        jobs.append({**BRANCHES[name], "training.steps": STEPS + 3})
    commands = [setting.training(name, job) for job in jobs]
    return Step(name, commands, skipped=obstacle(BRANCHES[name], setting.is_smoke))
