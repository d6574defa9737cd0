"""Steps for a host with eight GPUs: every kind of parallelism against one rank, hangs, a killed rank, and the 8B model.

The number of ranks is that of the setting. The comments name degrees for eight.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping

from benchmarks.gpu.cases import FLOAT8
from benchmarks.gpu.comparisons import ROUNDING
from benchmarks.gpu.jobs import (
    ACTIVATION_OFFLOAD,
    COMPILED,
    CPU_OFFLOAD,
    EXPERTS,
    FULL,
    SMALL,
    Options,
    Setting,
    obstacle,
)
from benchmarks.gpu.processes import slowness
from benchmarks.gpu.runs import BASE, overrides
from benchmarks.gpu.steps import Step, agreement_of, last_output_line, last_report, memory_of


def communication(setting: Setting) -> Options:
    """Return options with which a hang ends a run in two minutes, not ten. The first step waits longer, for the
    compiler of the slowest rank."""
    return {"comm.timeout_seconds": 120, "comm.init_timeout_seconds": 240 * slowness(setting.has_values)}


REFERENCE = "1 rank"


def parallelisms(ranks: int) -> Mapping[str, Options]:
    """Return the options of every run that is compared with one rank."""
    return {
        f"{ranks} ranks, immediate": {"gradient_accumulation.mode": "immediate"},
        f"{ranks} ranks, deferred": {"gradient_accumulation.mode": "deferred"},
        f"HSDP 2x{ranks // 2}": {"parallelism.data_parallel_replicate_degree": 2},
        f"HSDP 2x{ranks // 2}, deferred all-reduce": {
            "parallelism.data_parallel_replicate_degree": 2,
            "gradient_accumulation.mode": "deferred_all_reduce",
        },
        "TP 2": {"parallelism.tensor_parallel_degree": 2},
        "CP 2": {"parallelism.context_parallel_degree": 2},
        "PP 2": {"parallelism.pipeline_parallel_degree": 2},
        "activation offload": {**FULL, **ACTIVATION_OFFLOAD},
        "CPU offload": CPU_OFFLOAD,
    }


def groups(setting: Setting) -> Iterator[list[Step]]:
    """Yield the steps in order, each as a group of its own, because a step uses all GPUs."""
    yield [compared(REFERENCE, {}, 1, setting)]
    for name, options in parallelisms(setting.ranks).items():
        yield [compared(name, options, setting.ranks, setting)]
    for degree in (setting.ranks, setting.ranks // 2):
        yield [experts(degree, setting)]
    yield [killed_and_resumed(setting)]
    yield [stopped(setting)]
    for name, how in {"eager": {}, "compiled": COMPILED, "compiled, float8": {**COMPILED, **FLOAT8}}.items():
        yield [large(f"8B, {name}", how, setting)]


def compared(name: str, options: Options, ranks: int, setting: Setting) -> Step:
    """Return the step of a run with the batch of the reference, to which it is compared."""
    common = {
        "model.args.n_layers": 8,
        "model.args.tie_embeddings": False,  # a pipeline cannot share a weight between its first and its last stage
        "metrics.log_freq": 1,
        "training.global_batch_size": 4 * setting.ranks,
    }
    command = setting.training(name, {**communication(setting), **common, **options}, ranks)
    reference, own = map(setting.run_folder, (REFERENCE, name))
    detail = last_report if name == REFERENCE else agreement_of(reference, own, ROUNDING)
    return Step(name, [command], 180, detail, skipped=obstacle(options, setting.is_smoke))


def experts(degree: int, setting: Setting) -> Step:
    """Return the step of 200 training steps with expert parallelism, in which communicators could wait for each other
    forever."""
    name = f"4 layers of 30B-A3B, EP {degree}x{setting.ranks // degree}"
    options = {
        **EXPERTS,
        "model.args.experts.num_experts": 128,
        "model.args.n_layers": 4,
        "parallelism.expert_parallel_degree": degree,
        "training.steps": setting.sized(200, 12),
        "metrics.log_freq": 20,
    }
    return Step(name, [setting.training(name, {**communication(setting), **options}, setting.ranks)], 300)


def killed_and_resumed(setting: Setting) -> Step:
    """Return the step that trains without disturbance, and again with a killed rank and a resume."""
    name, limit = "rank killed, run resumed", 180
    options = {
        **communication(setting),
        **SMALL,  # two runs keep two checkpoints each
        "checkpoint.enable": True,
        "checkpoint.async_mode": "process",
        "checkpoint.interval": setting.sized(20, 2),
        "checkpoint.keep_latest": 2,
        "training.steps": setting.sized(60, 20),
        "metrics.log_freq": 1,  # a report is a mean since the last one, and the first step after a resume has one
    }
    whole, disturbed = f"{name}, whole", f"{name}, disturbed"
    run = setting.training(disturbed, options, setting.ranks)
    commands = [
        setting.training(whole, options, setting.ranks),
        disturbance("kill", disturbed, options, limit, setting),
        run,
    ]
    detail = agreement_of(setting.run_folder(whole), setting.run_folder(disturbed), ROUNDING)
    return Step(name, commands, limit, detail)


def stopped(setting: Setting) -> Step:
    """Return the step in which a rank stops, and the error must name it."""
    name, limit = "rank stopped, error names it", 400
    options = {**communication(setting), "training.steps": 1_000_000, "metrics.log_freq": 1}
    if setting.is_smoke:
        options |= {"comm.timeout_seconds": 8, "comm.hang_seconds": 3}
    return Step(name, [disturbance("stop", name, options, limit, setting)], limit, last_output_line)


def disturbance(kind: str, name: str, options: Options, limit: int, setting: Setting) -> list[str]:
    """Return the command of a run whose last rank gets a signal. It ends by itself before the step's limit."""
    given = [kind, f"--ranks={setting.ranks}", f"--limit={limit * slowness(setting.has_values) - 10}"]
    job = overrides(setting.job(name, options))
    return [sys.executable, "-m", "benchmarks.gpu.disturbance", *given, "--config", BASE, *job]


def large(name: str, how: Options, setting: Setting) -> Step:
    """Return the step of 50 training steps of the 8B model: predicted memory beside measured memory."""
    options = {
        "model.flavor": "8B",
        "model.args.n_layers": 32,
        "training.seq_len": setting.sized(8192, 64),
        "training.local_batch_size": 2,
        "training.steps": setting.sized(50, 6),
        "metrics.log_freq": 10,
        "activation_checkpoint.mode": "selective",
        "loss.chunks": 8,
        **how,
    }
    command = setting.training(name, {**communication(setting), **options}, setting.ranks)
    detail = memory_of(setting.run_folder(name))
    return Step(name, [command], 400, detail, skipped=obstacle(options, setting.is_smoke))
