"""The recordings of a job: the table of its model's modules, the FLOPs of a sample, and the tapes of its microbatches.
The recordings come from the user's cache, or from a `Recorder` that runs PyTorch. This module does not import torch.

`recorded_job` returns the job that is recorded. In this job, all keys that do not affect a recording have fixed values:
usually the number of shards, gradient accumulation, the optimizer, the length of the run, and the files that the run
writes. The recorded job is also part of the key in the cache.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from pydantic import TypeAdapter

from titan_launch.config.job import JobConfig
from titan_launch.config.sections.data import SyntheticData, separates_documents
from titan_launch.config.sections.parallelism import ActivationCheckpointConfig, ParallelismConfig
from titan_launch.config.sections.training import GradientAccumulationConfig
from titan_launch.core.errors import scalars
from titan_launch.core.files import cache_folder, file_state, replace_text
from titan_launch.core.patches import replaced
from titan_launch.core.process import in_forks
from titan_launch.plan.hardware import Kernels, representative
from titan_launch.plan.job import with_values
from titan_launch.plan.layout import Layout, plan_layout, smallest_shard_degree, smallest_world_size
from titan_launch.plan.memory.tape import Tape, from_json, to_json
from titan_launch.plan.step_time import Flops
from titan_launch.plan.types import Inventory


@dataclass(frozen=True)
class Subject:
    """The recorded facts about the model of a job."""

    inventory: Inventory
    flops_per_sample: int | None
    """The FLOPs of forward and backward that a user's own model declares; None if the model declares none."""

    second: Inventory | None = None
    """The second model of the loss: a reference or a teacher. None: the loss has no second model."""


class Recorder(Protocol):
    """The interface of `trace.recorder`, which runs PyTorch."""

    def subject(self, job: JobConfig) -> Subject:
        """Build the model of a job, and return its `Subject`. Raises ConfigError for the same jobs as a run."""

    def flops(self, job: JobConfig) -> Flops | None:
        """Count the FLOPs of a sample. Return None if the model does not run on the meta device."""

    def tapes(
        self, job: JobConfig, kernels: Kernels, subject: Subject, pipeline_rank: int, counts: tuple[int, ...]
    ) -> Sequence[Tape]:
        """Record the tapes that `Recordings.tapes` returns. Raises ConfigError for the same jobs as a run, and for a
        model that cannot be traced."""

    def files(self) -> list[str]:
        """Return the files of the user's own modules that this process has imported."""

    def works_in_fork(self) -> bool:
        """Return False in a forked process whose parent has used autograd, because autograd does not work there."""


_PROCESS = os.getpid()
"""ID of the process that imported this module. A process with a different ID is a fork of this process."""


class NotRecordedError(LookupError):
    """Raised if a recording is not in the cache and cannot be made in this process."""


class _Packed(SyntheticData):
    """Synthetic data that stands for data whose samples have document numbers."""

    packing: Literal["documents"] = "documents"


_KEPT = ("model", "lora", "loss", "precision", "batchnorm", "kernels", "float8")
"""Sections that `recorded_job` keeps. (It drops the weights of a model of this package.)"""


def recorded_job(config: JobConfig, layout: Layout) -> JobConfig:
    """Return the job that is recorded for `config`, with only those settings on which a recording depends.

    The recorded job has one microbatch per step, and two shards, or more if expert parallelism needs more. With
    synchronized BatchNorm statistics, the recorded job has the replicas and shards of `layout`.
    """
    blank = JobConfig()
    training, parallelism, planner = config.training, config.parallelism, config.planner
    replicas, shards = 1, max(2, smallest_shard_degree(parallelism))
    if config.batchnorm.statistics == "synchronized":  # the statistics are gathered from all ranks
        replicas, shards = layout.replicate, layout.shard
    named = ["seq_len", "trainable", "frozen", "unfreeze", *(["epochs", "steps"] if training.unfreeze else [])]
    of_training = {name: getattr(training, name) for name in named} | {
        "local_batch_size": layout.local_batch_size,
        "global_batch_size": layout.local_batch_size * replicas * shards,
    }
    of_ranks = {
        "data_parallel_replicate_degree": replicas,
        "data_parallel_shard_degree": shards,
        "shard_optimizer_over_replicas": False,
        "fsdp_reshard_after_forward": "default",
    }
    of_plan = {"device": representative(planner.device), "expert_load": planner.expert_load}
    sections: dict[str, Any] = {name: getattr(config, name) for name in _KEPT}
    if config.model.is_of_package:
        sections["model"] = config.model.model_copy(update={"weights": None, "exclude_from_weights": ()})
    if config.data.unit == "tokens" and config.model.is_of_package:
        synthetic = _Packed if separates_documents(config.data) else SyntheticData
        sections["data"] = synthetic(kind="synthetic", vocab_size=2)
    else:  # a recording depends on the shape of images; a user's own model is checked against the vocabulary
        sections |= {"data": config.data, "tokenizer": config.tokenizer}
    if parallelism.splits_backward:
        sections["gradient_accumulation"] = GradientAccumulationConfig(mode="deferred", keep_params_unsharded=True)
    return blank.model_copy(
        update={
            **sections,
            "training": blank.training.model_copy(update=of_training),
            "parallelism": parallelism.model_copy(update=of_ranks),
            "planner": blank.planner.model_copy(update=of_plan),
        }
    )


class TapesOf(NamedTuple):
    """Arguments of `Recordings.tapes`."""

    checkpointing: ActivationCheckpointConfig
    pipeline_rank: int = 0
    counts: tuple[int, ...] = (1,)
    """Number of microbatches of each step to record; `(1,)` without pipeline parallelism."""

    is_deferred: bool = False
    """True for the first of several microbatches, whose gradients are not reduced."""


class Recordings:
    """The recordings of a job on a number of ranks. The methods raise NotRecordedError if a recording is not in the
    cache and cannot be made, and pass on the errors of the recorder."""

    def __init__(
        self,
        config: JobConfig,
        layout: Layout,
        kernels: Kernels,
        recorder: Callable[[], Recorder] | None,
        say: Callable[[str], None] = lambda text: None,
    ):
        """`recorder`: function that returns the recorder, called when a recording is not in the cache. None: only the
        cache is used. `say`: function that shows a line of text, called before tapes are recorded."""
        self.job = recorded_job(config, layout)
        self._kernels = kernels
        self._recorder = None if recorder is None else cache(recorder)
        self._say = say
        self._subject: Subject | None = None
        self._flops: dict[ActivationCheckpointConfig, Flops | None] = {}
        self._tapes: dict[TapesOf, tuple[Tape, ...]] = {}

    def subject(self) -> Subject:
        if self._subject is None:
            value = self._known("model", self.job, None, lambda recorder: asdict(recorder.subject(self.job)))
            self._subject = TypeAdapter(Subject).validate_python(value)
        return self._subject

    def flops(self, checkpointing: ActivationCheckpointConfig) -> Flops | None:
        """Return the FLOPs of a sample; None if they are unknown, such as for the mode `memory_budget`. If the model
        declares its FLOPs, only the FLOPs that activation checkpointing adds are counted."""
        if checkpointing.mode == "memory_budget":
            return None
        declared, plain = self.subject().flops_per_sample, ActivationCheckpointConfig()
        if declared is None:
            return self._counted(checkpointing)
        if checkpointing.mode == "none":
            return Flops(declared)
        counted, without = self._counted(checkpointing), self._counted(plain)
        if counted is None or without is None:
            return None
        return Flops(declared + counted.per_sample - without.per_sample, counted.of_experts)

    def _counted(self, checkpointing: ActivationCheckpointConfig) -> Flops | None:
        checkpointing = checkpointing.model_copy(update={"offload": False})
        if checkpointing not in self._flops:
            one = with_values(self.job, {("training", "local_batch_size"): 1, ("training", "global_batch_size"): None})
            job = one.model_copy(update={"activation_checkpoint": checkpointing, "parallelism": ParallelismConfig()})

            def count(recorder: Recorder) -> dict[str, Any]:
                counted = recorder.flops(job)
                return {"flops": None if counted is None else asdict(counted)}

            value = self._known("FLOPs", job, None, count)["flops"]
            self._flops[checkpointing] = None if value is None else Flops(**value)
        return self._flops[checkpointing]

    def tapes(self, wanted: TapesOf) -> tuple[Tape, ...]:
        """Return the tape of a microbatch, in a tuple with one entry. With pipeline parallelism, return the tape of a
        step for each number in `TapesOf.counts`."""
        if wanted not in self._tapes:
            self._tapes[wanted] = self._recorded(*wanted)
        return self._tapes[wanted]

    def record_ahead(self, wanted: Collection[TapesOf]) -> None:
        """Record the `wanted` tapes and the FLOPs of their modes in forked processes (`in_forks`), and store the
        recordings in the cache for later calls. Do nothing without a recorder. If this process has used autograd, its
        forks record nothing."""
        tasks: list[Callable[[], object]] = [partial(self.tapes, one) for one in wanted]
        tasks += [partial(self.flops, mode) for mode in dict.fromkeys(one.checkpointing for one in wanted)]
        with replaced(self, "_recorder", None):
            tasks = [task for task in tasks if _is_missing(task)]
        if self._recorder is None or not tasks:
            return
        self._recorder()  # imports torch once, before the forks
        parent = os.getpid()

        def run(task: Callable[[], object]) -> None:
            if os.getpid() != parent:
                self._say = lambda text: None
            task()

        in_forks(run, tasks)  # this process runs the first task, which shows errors of the model

    def _recorded(
        self, checkpointing: ActivationCheckpointConfig, pipeline_rank: int, counts: tuple[int, ...], is_deferred: bool
    ) -> tuple[Tape, ...]:
        subject, size = self.subject(), self.job.training.global_batch_size
        assert size is not None
        # The batch has enough microbatches for the schedule.
        job = with_values(self.job, {("training", "global_batch_size"): size * counts[0]})
        job = job.model_copy(update={"activation_checkpoint": checkpointing})
        if is_deferred:
            job = job.model_copy(update={"gradient_accumulation": GradientAccumulationConfig(mode="deferred")})

        def record(recorder: Recorder) -> dict[str, Any]:
            part = f"pipeline rank {pipeline_rank}" if job.parallelism.pipeline_parallel_degree > 1 else "a microbatch"
            self._say(f"recording {part} with activation checkpointing {checkpointing.label}")
            recorded = recorder.tapes(job, self._kernels, subject, pipeline_rank, counts)
            return {"tapes": [to_json(tape) for tape in recorded]}

        value = self._known(f"tapes {pipeline_rank} {counts}", job, self._kernels, record)
        return tuple(map(from_json, value["tapes"]))

    def _known(
        self, what: str, job: JobConfig, kernels: Kernels | None, record: Callable[[Recorder], dict[str, Any]]
    ) -> dict[str, Any]:
        key = _key(what, job, kernels)
        value = _load(key)
        if value is not None:
            return value
        if self._recorder is None:
            raise NotRecordedError(what)
        recorder = self._recorder()
        if os.getpid() != _PROCESS and not recorder.works_in_fork():
            raise NotRecordedError(what)  # the parent process records it
        value = json.loads(json.dumps(record(recorder)))
        _store(key, value, recorder.files())
        return value


def _is_missing(task: Callable[[], object]) -> bool:
    try:
        task()
    except NotRecordedError:
        return True
    return False


def recorded_inventory(config: JobConfig, recorder: Callable[[], Recorder] | None) -> Inventory:
    """Return the inventory of the model in section `[model]` of a job, without adapters and parallelism. Raises
    NotRecordedError if the inventory is not in the cache and `recorder` is None, and ConfigError for the same jobs as a
    run."""
    named = {name: getattr(config, name) for name in ("model", "data", "tokenizer")}
    job = with_values(JobConfig().model_copy(update=named), {("training", "seq_len"): config.training.seq_len})
    return Recordings(job, plan_layout(job.parallelism, job.training, 1), "cpu", recorder).subject().inventory


def layout_of_recording(job: JobConfig) -> Layout:
    """Return the layout of a job that `recorded_job` has returned."""
    return plan_layout(job.parallelism, job.training, smallest_world_size(job.parallelism))


# The cache


def _key(what: str, job: JobConfig, kernels: Kernels | None) -> str:
    """Return the key of an entry: a digest of everything that a recording depends on, except the files of the user's
    own modules. `_load` compares these files."""
    known = job.model_dump(mode="json")
    versions = [_version(name) for name in ("torch", "transformers", "peft", "torchao")]
    is_of_package = job.model.is_of_package and job.model.loss is None and job.loss.is_of_package
    folder = None if is_of_package else os.getcwd()  # the user's own modules are imported from the working directory
    of_job = [folder, separates_documents(job.data), known, _files_named_in(known)]
    return _digest(json.dumps([what, *of_job, kernels, versions, _package_digest()], sort_keys=True).encode())


@cache
def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


@cache
def _package_digest() -> str:
    """Return a digest of the states of this package's files, because changed code may record different tapes."""
    root = Path(__file__).parent.parent.parent
    states = sorted((str(path.relative_to(root)), file_state(path)) for path in root.rglob("*.py"))
    return _digest(json.dumps(states).encode())


def _files_named_in(job: Mapping[str, Any]) -> list[Any]:
    """Return [path, `file_state`] of each file that a job names, and of `config.json` and `adapter_config.json` in the
    folders that the job names."""
    found = []
    for text in (value for _, value in scalars(job) if isinstance(value, str)):
        for path in (Path(text), Path(text) / "config.json", Path(text) / "adapter_config.json"):
            with suppress(OSError, ValueError):
                if path.is_file():
                    found.append([str(path), file_state(path)])
    return found


def _entry(key: str) -> Path:
    """Return the file of an entry. Its first line has the digest of the value and the states of the user's files. Its
    second line is the value. Both are JSON."""
    return cache_folder() / "plans" / f"{key}.json"


def _load(key: str) -> dict[str, Any] | None:
    """Return an entry of the cache; None if it is missing or damaged, or if a file of the user's model has changed."""
    try:
        head, text = _entry(key).read_bytes().split(b"\n", 1)
        digest, files = json.loads(head)
        if digest == _digest(text) and all(file_state(Path(path)) == state for path, state in files):
            value: dict[str, Any] = json.loads(text)
            return value
    except (OSError, ValueError, TypeError):
        pass
    return None


def _store(key: str, value: dict[str, Any], files: list[str]) -> None:
    """Write an entry of the cache, and delete the oldest entries beyond `_MOST_ENTRIES`. If the cache cannot be
    written, do nothing. `files`: the files of the user's own modules."""
    with suppress(OSError):
        path = _entry(key)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        states, text = [[file, file_state(Path(file))] for file in files], json.dumps(value)
        replace_text(path, f"{json.dumps([_digest(text.encode()), states])}\n{text}")
        entries = list(path.parent.glob("*.json"))
        if len(entries) > _MOST_ENTRIES:
            entries.sort(key=lambda entry: entry.stat().st_mtime_ns)
            for old in entries[:-_MOST_ENTRIES]:
                old.unlink()


_MOST_ENTRIES = 500
"""Largest number of entries in the cache. An entry has 10 to 100 KB."""


def _digest(text: bytes) -> str:
    return hashlib.blake2b(text, digest_size=16).hexdigest()
