"""The part of a proof that runs on every rank. It trains the steps of a twin with the functions of a real run, and
compares their results with those of one process."""

from __future__ import annotations

import math
from contextlib import ExitStack, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titan_launch.config.job import JobConfig
from titan_launch.core.errors import config_error
from titan_launch.core.import_string import user_files
from titan_launch.core.observer import Observer
from titan_launch.distributed.dtensor import local_tensor
from titan_launch.distributed.process_group import Ranks
from titan_launch.distributed.ring_attention_on_cpu import ring_attention_on_cpu
from titan_launch.optim.registry import replicas_of
from titan_launch.optim.replica_shards import ReplicaShards
from titan_launch.plan.hardware import GIB, free_memory_gib
from titan_launch.plan.proof.twin import STEPS
from titan_launch.plan.units.rule_assignment import is_batch_norm
from titan_launch.prove.results import Departure, Difference, Event, Reference, largest_by_kind
from titan_launch.prove.trace import Trace, departures, traced
from titan_launch.train.build import Surroundings, build_run
from titan_launch.train.loop import train_one_step
from titan_launch.train.model import build_job_model
from titan_launch.train.run import Run

Step = dict[str, Tensor]
"""The results of a step by name: `loss`, `gradient norm`, and the whole tensors `gradient NAME`, `update NAME`, `buffer
NAME` and `average NAME`."""


def measure_reference(
    job: dict[str, Any], variants: dict[str, dict[str, Any]] | None, file: str, exact_file: str | None
) -> Reference:
    """Train a twin on one process, and write the results of its steps to `file`. Return findings about this run. Raises
    ConfigError if the twin is too large for this host.

    `variants`: variants of the twin whose gradients must differ, by key (`prove.main.variants`). If None,
    no variant is trained, and the twin is not trained a second time, because an earlier call has done both.
    `exact_file`: file with the results of the same twin in fp32; None if `job` is in fp32.
    """
    _check_size(JobConfig.model_validate(job))
    steps, run, _ = train_twin(job)
    again = steps if variants is None else train_twin(job)[0]
    torch.save(steps, file)
    inventory = run.job.plan.inventory
    trained = [name for name, parameter in run.model.named_parameters() if parameter.requires_grad]
    scale = max(float(step["gradient norm"]) for step in steps)
    norms = {
        name: max(float(step[key].double().norm()) if (key := f"gradient {name}") in step else 0.0 for step in steps)
        for name in trained
    }
    others = {key: train_twin(variant, 1)[0][0] for key, variant in (variants or {}).items()}
    other_data = others.pop("data", {})
    first = {name: steps[0][f"gradient {name}"] for name in trained if f"gradient {name}" in other_data}
    constant = [
        name for name, value in first.items() if value.any() and torch.equal(value, other_data[f"gradient {name}"])
    ]
    gradients = [name for name in steps[0] if name.startswith("gradient ")]
    without_effect = [
        key for key, found in others.items() if all(torch.equal(found[name], steps[0][name]) for name in gradients)
    ]
    return Reference(
        has_batch_norm=any(map(is_batch_norm, inventory.modules)),
        num_parameters=inventory.num_parameters,
        names=frozenset(name for name in steps[-1] if name.startswith("gradient ")),
        changed=tuple(row for row in compare(again, steps) if row.error > 0),
        dead=tuple(name for name, norm in norms.items() if norm == 0),
        rounding=tuple(name for name, norm in norms.items() if 0 < norm < SMALLEST * scale),
        constant=tuple(constant),
        without_effect=tuple(without_effect),
        rounding_errors={} if exact_file is None else largest_by_kind(compare(steps, _loaded(exact_file))),
        files=tuple(user_files()),
    )


SMALLEST = 1e-6
"""A gradient counts as a rounding error if its norm is below this fraction of the norm of all gradients. An example is
the gradient of the bias of keys: its true value is 0, since adding one number to all scores does not change softmax."""

_BYTES = 100
"""Bytes for each parameter on one process: the parameter, its gradient and optimizer state, and the results of two
runs."""


def _check_size(config: JobConfig) -> None:
    """Raise ConfigError for a twin that needs more memory in one process than is free."""
    built = build_job_model(config)
    number = sum(parameter.numel() for parameter in built.module.parameters())
    needed, free = number * _BYTES / GIB, free_memory_gib()
    if needed > free:
        reason = (
            f"the copy of the model has {number:,} parameters, so a proof needs about {needed:.0f} GiB of memory, and "
            f"{free:.1f} GiB are free"
        )
        advice = "set smaller arguments of the model in [prove.args]"
        raise config_error(("model", "name"), f"{reason}; {advice}", config.model.name)


def measure_case(job: dict[str, Any], file: str, begins_apart: bool = False) -> list[Difference]:
    """Train a twin on this rank, and compare its steps with those in `file`. Collective.

    `begins_apart`: as in `train_twin`. True measures how much one rounding changes the results. For models with kinks
    (ReLU, the choice of experts), this can be a lot.
    """
    return compare(train_twin(job, begins_apart=begins_apart)[0], _loaded(file))


def _loaded(file: str) -> list[Step]:
    steps: list[Step] = torch.load(file, weights_only=True)
    return steps


def compare(steps: list[Step], reference: list[Step]) -> list[Difference]:
    """Return the difference between each result of this rank and the reference. A result that the reference lacks is
    compared with zeros.

    Results that depend on a rounding error (`_follows_rounding`), and results whose shape differs from the reference,
    are skipped. With pipeline parallelism, a rank has only the results of its own stages.
    """
    rows = []
    for number, (step, other) in enumerate(zip(steps, reference, strict=True), start=1):
        floors = _floors(other)
        for name, value in step.items():
            wanted = other.get(name)
            if (wanted is None or wanted.shape == value.shape) and not _follows_rounding(name, other):
                rows.append(difference(number, name, value, wanted, floors.get(name.split(" ")[0], 0.0)))
    return rows


def _follows_rounding(name: str, step: Step) -> bool:
    """Return True if a result is the update or the average of a parameter whose gradient is a rounding error
    (`SMALLEST`). Such an update can be large: AdamW makes the updates of small and of large gradients equally large."""
    kind, _, parameter = name.partition(" ")
    gradient = step.get(f"gradient {parameter}")
    if kind not in ("update", "average") or gradient is None:
        return False
    return float(gradient.double().norm()) < SMALLEST * float(step["gradient norm"])


def _floors(step: Step) -> dict[str, float]:
    """Return the smallest norm by which a difference is divided, for gradients and for updates. Without this limit, a
    gradient that is 0 up to rounding errors would have a large relative difference."""
    floors = {}
    for kind in ("gradient", "update"):
        squares = [float(value.double().square().sum()) for name, value in step.items() if name.startswith(f"{kind} ")]
        floors[kind] = FLOOR * math.sqrt(sum(squares))
    return floors


FLOOR = 1e-4
"""Smallest norm to divide a difference by, as a fraction of the norm of all results of its kind."""


def difference(step: int, name: str, value: Tensor, wanted: Tensor | None, floor: float) -> Difference:
    """Return the difference between a result and the same result of one process.

    `wanted`: the result of one process; None if one process has no such result, which counts as zeros. `floor`: the
    smallest norm to divide the difference by. If one of the two results is not finite, the error is 1e30.
    """
    own = value.double().flatten()
    other = torch.zeros_like(own) if wanted is None else wanted.double().flatten()
    own_norm, norm, apart = (float(tensor.norm()) for tensor in (own, other, own - other))
    if not math.isfinite(own_norm) or not math.isfinite(norm):
        return Difference(step, name, _NOT_FINITE, 0.0, 0.0)
    cosine = float(own @ other) / (own_norm * norm) if own_norm and norm else float(own_norm == norm)
    return Difference(step, name, apart / max(norm, floor, 1e-30), cosine, own_norm / norm if norm else 0.0)


_NOT_FINITE = 1e30
"""Value of `Difference.error` for a result that is not finite."""


def trace_reference(job: dict[str, Any], step: int, file: str) -> None:
    """Trace a step of a twin on one process, and write the trace to `file`."""
    *_, trace = train_twin(job, step, step)
    assert trace is not None
    torch.save((trace.num_microbatches, {tuple(event): calls for event, calls in trace.tensors.items()}), file)


def trace_case(job: dict[str, Any], step: int, file: str, tolerance: float) -> list[Departure]:
    """Trace a step of a twin on this rank. Return the events whose tensors differ by more than `tolerance` from those
    in `file`. Each result has a position in the order of one process (`Departure.order`). Collective."""
    _, run, trace = train_twin(job, step, step)
    assert trace is not None
    num_microbatches, tensors = torch.load(file, weights_only=True)
    reference = Trace(num_microbatches, {Event(*event): calls for event, calls in tensors.items()})
    return departures(run, trace, reference, tolerance)


def train_twin(
    job: dict[str, Any], num_steps: int = STEPS, traced_step: int | None = None, begins_apart: bool = False
) -> tuple[list[Step], Run, Trace | None]:
    """Train a twin on this rank as a run does, but without dropout. Return the results of its steps, the finished run,
    and the trace of step `traced_step`. The trace is None if no step is traced. `begins_apart`: change every parameter
    by one rounding first. Collective."""
    config, trace = JobConfig.model_validate(job), None
    steps: list[Step] = []
    with ExitStack() as stack:
        if config.parallelism.context_parallel_degree > 1:
            stack.enter_context(ring_attention_on_cpu())
        ranks = Ranks(dist.get_rank(), dist.get_world_size(), torch.device("cpu"))
        run = build_run(config, ranks, stack, Surroundings(quiet=True))
        disable_dropout(run.model)
        if begins_apart:
            with torch.no_grad():
                for parameter in filter(torch.is_floating_point, map(local_tensor, run.model.parameters())):
                    limits = torch.full_like(parameter, math.inf)
                    limits.view(-1)[::2] = -math.inf
                    parameter.copy_(torch.nextafter(parameter, limits))
        for number in range(1, num_steps + 1):
            with traced(run) if number == traced_step else nullcontext() as found:
                steps.append(_step(run))
            trace = found or trace
    return steps, run, trace


def disable_dropout(model: nn.Module) -> None:
    """Set the probability of all dropout layers to 0."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0


class _Gradients(Observer):
    """Observer that writes the whole gradients of a step into `step`, before they are clipped. A missing gradient is
    written as zeros. Collective."""

    def __init__(self, run: Run, step: Step):
        self._step = step
        self._replicas = replicas_of(run.optimizer)
        self._parameters = dict(run.model.named_parameters())

    def before_update(self) -> None:
        for name, parameter in self._parameters.items():
            if parameter.requires_grad:
                has_gradient = parameter.grad is not None
                gradient = whole_gradient(parameter, self._replicas) if has_gradient else torch.zeros(parameter.shape)
                self._step[f"gradient {name}"] = gradient


def _step(run: Run) -> Step:
    """Train a step. Return its results, gathered from all ranks that share a tensor. Collective."""
    found: Step = {}
    parameters = dict(run.model.named_parameters())
    before = {name: whole(parameter) for name, parameter in parameters.items()}
    result = train_one_step(run, _Gradients(run, found))
    loss = result.loss_sum.detach().double().clone()
    dist.all_reduce(loss)
    found |= {"loss": loss, "gradient norm": result.grad_norm.detach().double()}
    trained = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
    found |= {
        f"update {name}": whole(parameter).double() - before[name].double() for name, parameter in trained.items()
    }
    run.step.statistics.pool(run.mesh.data_group, temporarily=True)
    buffers = run.model.named_buffers()
    found |= {f"buffer {name}": whole(buffer) for name, buffer in buffers if buffer.is_floating_point()}
    run.step.statistics.unpool()
    if (ema := run.observers.ema) is not None:
        with ema.in_model(lambda: None):
            found |= {f"average {name}": whole(parameter) for name, parameter in trained.items()}
    return found


def whole(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor, gathered from its shards. Collective."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def whole_gradient(parameter: Tensor, replicas: ReplicaShards | None) -> Tensor:
    """Return a parameter's whole gradient, gathered from its shards. If the optimizer is sharded over the replicas, the
    gradient is also gathered from the chunks of the replicas. Collective."""
    gradient = parameter.grad
    assert gradient is not None
    if replicas is None or not isinstance(parameter, DTensor):
        return whole(gradient)
    shard = torch.zeros_like(local_tensor(parameter))
    if shard.numel():
        replicas.chunk(parameter).of(shard).copy_(local_tensor(gradient))
    dist.all_reduce(shard, group=replicas.group)
    shape, stride = parameter.shape, parameter.stride()
    mesh, placements = parameter.device_mesh, parameter.placements
    return whole(DTensor.from_local(shard, mesh, placements, run_check=False, shape=shape, stride=stride))
