"""The weights of a trained model, from a run's checkpoint, from a folder that `import` or `export` wrote, or from a
Hugging Face folder."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from titan_launch.checkpoint.index import check_step, model_tensors, read_tensor
from titan_launch.checkpoint.loading import result_step
from titan_launch.checkpoint.manifest import (
    BaseRecord,
    DamagedCheckpointError,
    Manifest,
    check,
    checkpoint_name,
    complete_steps,
)
from titan_launch.config.job import JobConfig
from titan_launch.config.loading.provenance import toml_value
from titan_launch.config.loading.urls import local_sections
from titan_launch.config.sections.model import ModelConfig
from titan_launch.core.errors import ConfigError, listed
from titan_launch.core.object_store import StoreError, has_credentials, is_url, local_copy
from titan_launch.core.terminal import counted
from titan_launch.models.architectures import known_args
from titan_launch.models.build import build_model, find_weights_of
from titan_launch.models.decoder.huggingface_tensors import Piece, is_selection_bias
from titan_launch.models.huggingface.config_json import (
    longest_sequence,
    own_config,
    read_folder_config,
    read_json,
    refuse_adapter,
)
from titan_launch.models.huggingface.files import CONFIG_FILE, WeightsError
from titan_launch.models.lora import adapters_of, delta
from titan_launch.models.weights.adapters import Adapter
from titan_launch.models.weights.folder import FLOATS, Weights, open_weights
from titan_launch.models.weights.writing import Entry, companions_of
from titan_launch.plan.freezing import ADAPTER
from titan_launch.plan.job import with_values
from titan_launch.train.run_folder.folder import checkpoint_folder

_LONGEST = 2048
"""Largest `training.seq_len` in the `record` of a Hugging Face folder, even if the model takes longer sequences."""


@dataclass(frozen=True)
class SavedModel:
    """The tensors of a trained model, under the names of this package."""

    record: Mapping[str, Any]
    """The `config.json` in the format of this package: at least the sections `model` and `training`."""

    job: JobConfig
    """The job of `record`, with defaults for missing sections."""

    entries: Mapping[str, Entry]
    read: Callable[[str], Tensor]
    """Function that reads the whole tensor with a name of `entries`."""

    description: str
    companions: Path | None
    """Folder with the Hugging Face `config.json` and tokenizer that came with the weights; None if there is none."""

    notes: tuple[str, ...] = ()
    """Sentences about keys of a Hugging Face `config.json` that have no effect here."""

    base: Path | None = None
    """Folder of the weights with which the run began; None without such a folder, or if it no longer exists. For a
    Hugging Face folder: this folder itself."""

    manifest: Manifest | None = None
    """Manifest of the checkpoint; None if the folder is not a run folder."""

    @property
    def num_parameters(self) -> int:
        """Number of elements of all tensors."""
        return sum(math.prod(entry.shape) for entry in self.entries.values())

    @property
    def widest_dtype(self) -> torch.dtype:
        """The floating-point dtype with the most bytes, apart from selection biases, which are always fp32."""
        entries = (entry for entry in self.entries.values() if not is_selection_bias(entry.name))
        floating = {entry.dtype for entry in entries if entry.dtype.is_floating_point}
        return max(floating, key=lambda dtype: dtype.itemsize)


def open_saved_model(folder: Path, step: int | None = None, ema: bool = False, base: Path | None = None) -> SavedModel:
    """Open a run folder, a folder that `import` or `export` wrote, or a Hugging Face folder. No values are read.

    `step`: step of the run's checkpoint, by default the result of `result_step`. `ema`: use the moving average of each
    parameter that has one, instead of the parameter. `base`: folder of the parameters that the checkpoint omits, by
    default the result of `_base_folder`. Adapters stay separate tensors; `merged` adds them to the weights. Raises
    WeightsError, DamagedCheckpointError and UserError.
    """
    refuse_adapter(folder)
    record = read_json(folder / CONFIG_FILE)
    steps = complete_steps(checkpoint_folder(folder))
    has_checkpoint = bool(steps) and (step is None or step in steps)
    if not has_checkpoint and (steps or step is not None or ema):
        wanted = " with a moving average" if step is None else f" of step {step}"
        raise WeightsError(f"it has no checkpoint{wanted}; steps: {', '.join(map(str, sorted(steps))) or 'none'}")
    if "model_type" in record and "model" not in record:
        return _open_huggingface(folder)
    try:
        job = _job_of(record)
    except ValidationError:
        reason = f"its {CONFIG_FILE} does not come from a run, from titan-launch import or from transformers"
        raise WeightsError(reason) from None
    own_config(record)
    if not has_checkpoint:
        return _open_imported(folder, record, job)
    checkpoint, manifest = _checked(folder, max(steps) if step is None else step)
    description = checkpoint.name
    if step is None and (best := result_step(checkpoint.parent, manifest.step)) != manifest.step:
        checkpoint, manifest = _checked(folder, best)
        description = f"{checkpoint.name} (the best; the run ended early after step {max(steps)})"
    tensors = model_tensors(checkpoint, ema)
    entries = {name: Entry(name, t.shape, getattr(torch, t.dtype)) for name, t in tensors.items()}

    def read(name: str) -> Tensor:
        return read_tensor(checkpoint, tensors[name])

    started_from = _base_folder(job, manifest.base, base)
    companions = None if started_from is None else companions_of(started_from)
    saved = SavedModel(record, job, entries, read, description, companions, (), started_from, manifest)
    return _with_base(saved)


def check_base(base: Path | None, models: Sequence[SavedModel]) -> None:
    """Raise WeightsError if `--base` is given, but no model has a checkpoint."""
    if base is not None and not any(model.manifest for model in models):
        raise WeightsError("it has no checkpoint, so --base has no effect; remove --base")


def _job_of(record: Mapping[str, Any]) -> JobConfig:
    """Return the job of a `config.json`, with a local copy of its tokenizer in place of a URL. Raises
    ValidationError, and ConfigError for a URL that cannot be copied."""
    return JobConfig.model_validate(local_sections(record, ("tokenizer",)))


def _checked(folder: Path, step: int) -> tuple[Path, Manifest]:
    """Return a checkpoint of a run folder and its manifest. Raises DamagedCheckpointError, with the step."""
    checkpoint = checkpoint_folder(folder) / checkpoint_name(step)
    try:
        manifest = check(checkpoint)
        check_step(checkpoint, manifest.step)
    except DamagedCheckpointError as error:
        reason = f"{checkpoint.name}: {error}; choose another checkpoint, for example with --step"
        raise DamagedCheckpointError(reason) from None
    return checkpoint, manifest


def _base_folder(job: JobConfig, recorded: BaseRecord | None, given: Path | None) -> Path | None:
    """Return the folder of the weights with which a run began: `given` or, by default, the first existing folder among
    `model.weights`, the path in the manifest, and `model.path`. If no folder exists and the checkpoint omits
    parameters, return a local copy of the first URL among these values. Otherwise return None. Raises WeightsError if
    the URL cannot be copied, or if `given` is no folder of a model."""
    if given is not None:
        if not ((given / CONFIG_FILE).is_file() or any(given.glob("*.safetensors"))):
            raise WeightsError(f"--base {given} has neither {CONFIG_FILE} nor *.safetensors; name another folder")
        return given
    named = [path for path in (job.model.weights, recorded and recorded.folder, job.model.path) if path]
    if found := next((path for path in named if Path(path).is_dir()), None):
        return Path(found)
    url = next(filter(is_url, named), None)
    if url is None or recorded is None or not recorded.omitted:
        return None
    try:
        return local_copy(url)
    except StoreError as error:
        shown = "the URL of the weights" if has_credentials(url) else url
        omitted = f"has {counted(recorded.omitted, 'never-trained parameter')} that the checkpoint omits"
        remedy = "restore the folder, or name a local copy with --base"
        raise WeightsError(f"{shown} {omitted}, but cannot be read ({error}); {remedy}") from None


def _with_base(saved: SavedModel) -> SavedModel:
    """Return the model with the parameters that the checkpoint omits, which are read from the folder `saved.base`.
    Raises WeightsError if this folder is missing, lacks a parameter, or has another fingerprint than the manifest
    records."""
    base = None if saved.manifest is None else saved.manifest.base
    if base is None or not base.omitted:
        return saved
    needed = (
        f"{saved.description} omits {counted(base.omitted, 'never-trained parameter')}; their values are in "
        f"{base.folder}, with the fingerprint {base.fingerprint.digest}; name this folder with --base"
    )
    if saved.base is None:
        raise WeightsError(needed)
    folder = _FolderWeights.of(saved.job, saved.base)
    if change := base.fingerprint.changed_to(now := folder.weights.folder.fingerprint()):
        raise WeightsError(f"{saved.base} has another fingerprint, {now.digest} ({change}); {needed}")
    added = {name: entry for name, entry in folder.entries.items() if name not in saved.entries}
    if len(added) != base.omitted:
        raise WeightsError(f"{saved.base} has {len(added)} parameters that the checkpoint lacks; {needed}")

    def read(name: str) -> Tensor:
        return folder.read(name) if name in added else saved.read(name)

    return replace(saved, entries={**saved.entries, **added}, read=read)


def _open_imported(folder: Path, record: Mapping[str, Any], job: JobConfig) -> SavedModel:
    if not any(folder.glob("*.safetensors")):
        raise WeightsError(
            "it has neither checkpoints nor *.safetensors; name a run with a checkpoint, or a folder of weights"
        )
    whole = with_values(job, {("model", "exclude_from_weights"): ()})
    files = _FolderWeights.of(whole, folder).weights.folder
    entries = {name: Entry(name, tensor.shape, _dtype(tensor.dtype)) for name, tensor in files.tensors.items()}
    return SavedModel(record, job, entries, files.read, "the imported weights", companions_of(folder))


def _open_huggingface(folder: Path) -> SavedModel:
    found = read_folder_config(folder)
    model = ModelConfig(name=found.name, flavor=found.flavor, args=dict(found.args))
    seq_len = min(longest_sequence(found.config) or _LONGEST, _LONGEST)
    record = {"model": model.model_dump(mode="json", exclude_none=True), "training": {"seq_len": seq_len}}
    job = JobConfig.model_validate(record)
    weights = _FolderWeights.of(job, folder)
    return SavedModel(
        record, job, weights.entries, weights.read, "the Hugging Face weights", folder, found.notes, base=folder
    )


def adapters_of_saved(saved: SavedModel) -> list[Adapter]:
    """Return the adapters among the tensors of a model. Raises WeightsError if it is unknown whether an adapter is of a
    linear layer or of an embedding."""
    if not saved.job.lora.targets:
        return []
    if ":" not in saved.job.model.name:
        return list(adapters_of(build_model(saved.job.model, saved.job.training.seq_len, lora=saved.job.lora).module))
    return [_adapter_by_shape(saved, a) for a in saved.entries if a.endswith(f".{ADAPTER}.a")]


def _adapter_by_shape(saved: SavedModel, a: str) -> Adapter:
    """Return an adapter of a user's own model. `a`: name of the adapter's tensor A. The model's code is not run: the
    shapes of the tensors show whether the adapter is of a linear layer or of an embedding. Raises WeightsError for a
    square weight, whose shape does not show this."""
    path = a.removesuffix(".a")
    module = path.removesuffix(f".{ADAPTER}")
    weight, b = f"{module}.weight", f"{path}.b"
    rows, columns = saved.entries[weight].shape
    if rows == columns:
        reason = "which may be of a linear layer or an embedding; only the model's code, which is not run, shows this"
        raise WeightsError(f"cannot merge the adapter of the square matrix {weight}, {reason}")
    rank, num_in = saved.entries[a].shape
    return Adapter(weight, a, b, rank, saved.job.lora.of(module).scale, is_embedding=num_in == rows)


def merged(saved: SavedModel) -> SavedModel:
    """Return the model with its adapters added to its weights. Without adapters, return `saved` itself. For a weight
    with an adapter, `read` returns the sum in fp32, so that the sum is rounded only once, when it is cast."""
    adapters = {adapter.weight: adapter for adapter in adapters_of_saved(saved)}
    if not adapters:
        return saved
    parts = {name for adapter in adapters.values() for name in (adapter.a, adapter.b)}

    def read(name: str) -> Tensor:
        if name not in adapters:
            return saved.read(name)
        adapter = adapters[name]
        return saved.read(name).float() + delta(
            saved.read(adapter.a), saved.read(adapter.b), adapter.scale, adapter.is_embedding
        )

    of_freezing = ("trainable", "frozen", "unfreeze")  # the merged model has no adapters, which these keys may name
    training = {key: value for key, value in saved.record["training"].items() if key not in of_freezing}
    record = {**{key: value for key, value in saved.record.items() if key != "lora"}, "training": training}
    return replace(
        saved,
        record=record,
        job=_job_of(record),
        entries={name: entry for name, entry in saved.entries.items() if name not in parts},
        read=read,
        description=f"{saved.description} with its adapters",
    )


def averaged(models: Sequence[SavedModel], shares: Sequence[float]) -> SavedModel:
    """Return the weighted mean of models: of checkpoints of a run (Izmailov et al., arXiv:1803.05407), or of several
    runs, a model soup (Wortsman et al., arXiv:2203.05482). `shares`: weights of the models in the mean, relative to
    each other.

    `read` returns a mean in fp32 (or fp64 for tensors in fp64), so that the mean is rounded only once, when it is cast.
    If a tensor is the same in all models, the mean is exactly this tensor. Tensors of integers are taken from the first
    model. Raises WeightsError if the models have different structures.
    """
    first, *others = models
    for other in others:
        _check_structure(first, other)

    def read(name: str) -> Tensor:
        mean, total = first.read(name), shares[0]
        if not mean.is_floating_point():
            return mean
        mean = mean.to(torch.promote_types(mean.dtype, torch.float32))
        for model, share in zip(others, shares[1:], strict=True):
            total += share
            mean = mean.lerp(model.read(name).to(mean.dtype), share / total)
        return mean

    parts = (
        model.description if share == 1 else f"{share:g} x {model.description}"
        for model, share in zip(models, shares, strict=True)
    )
    return replace(first, read=read, description=f"the mean of {', '.join(parts)}")


def _check_structure(first: SavedModel, other: SavedModel) -> None:
    """Raise WeightsError if two models have different `model.name`, different arguments, or tensors of different names
    or shapes."""
    own, theirs = known_args(first.job.model), known_args(other.job.model)
    shapes = [{name: tuple(entry.shape) for name, entry in model.entries.items()} for model in (first, other)]
    if first.job.model.name != other.job.model.name:
        problem = f"is {other.job.model.name}, not {first.job.model.name}"
    elif own != theirs:
        assert own is not None and theirs is not None, "the same model has arguments in both"
        names = [name for name in type(own).model_fields if getattr(own, name) != getattr(theirs, name)]
        problem = "has other arguments: " + ", ".join(f"{n} = {toml_value(getattr(theirs, n))}" for n in names)
    elif different := shapes[0].items() ^ shapes[1].items():
        problem = f"has other names or shapes of tensors: {listed(sorted({name for name, _ in different}))}"
    else:
        return
    raise WeightsError(f"{other.description} {problem}; a mean needs models with the same structure")


@dataclass(frozen=True)
class _FolderWeights:
    """The parameters of a model that are read from a folder of weights."""

    weights: Weights
    entries: Mapping[str, Entry]

    @classmethod
    def of(cls, job: JobConfig, folder: Path) -> _FolderWeights:
        """Find the parameters of the job's model in a folder. The code of a user's own model is not run: all tensors in
        the folder count as its parameters. Raises WeightsError if the folder does not fit the model."""
        model = job.model.model_copy(update={"weights": str(folder)})
        try:
            files = open_weights(model)
            if ":" in model.name:
                weights = Weights(files, {name: Piece(name) for name in files.tensors})
                shapes = {name: tensor.shape for name, tensor in files.tensors.items()}
            else:
                module = build_model(model, job.training.seq_len, lora=job.lora).module
                weights = find_weights_of(module, model, files)
                shapes = {name: tuple(t.shape) for name, t in (*module.named_parameters(), *module.named_buffers())}
        except ConfigError as error:
            raise WeightsError(error.problems[0].reason) from None
        dtypes = {name: weights.folder.tensors[piece.tensors[0]].dtype for name, piece in weights.pieces.items()}
        entries = {name: Entry(name, shapes[name], _dtype(dtype)) for name, dtype in dtypes.items()}
        return cls(weights, entries)

    def read(self, name: str) -> Tensor:
        shape = self.entries[name].shape
        return self.weights.read(name, (0,) * len(shape), shape).contiguous()


def _dtype(name: str) -> torch.dtype:
    """Return the floating-point dtype whose name in a safetensors file is `name`. All other names count as int64."""
    dtype: torch.dtype = getattr(torch, FLOATS.get(name, "int64"))
    return dtype
