"""The weights of a trained model, in a run's checkpoint, a folder that `import` wrote, or a Hugging Face folder."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from titan_launch.checkpoint.index import check_step, model_tensors, read_tensor
from titan_launch.checkpoint.manifest import check, checkpoint_name, complete_steps
from titan_launch.config.huggingface.config_json import longest_sequence, read_folder_config, read_json
from titan_launch.config.huggingface.features import CONFIG_FILE, WeightsError
from titan_launch.config.job import JobConfig
from titan_launch.config.sections.model import ModelConfig
from titan_launch.core.errors import ConfigError
from titan_launch.models.build import build_model, take_inventory
from titan_launch.models.weights.folder import FLOATS, WeightsFolder, find_weights
from titan_launch.models.weights.tensor_names import is_selection_bias
from titan_launch.models.weights.writing import Entry, companions_of
from titan_launch.train.run_folder.folder import checkpoint_folder

_LONGEST = 2048
"""Largest `training.seq_len` in the record of a Hugging Face folder."""


@dataclass(frozen=True)
class SavedModel:
    """The tensors of a trained model, in the names of this package."""

    record: Mapping[str, Any]
    """The `config.json` in the format of this package: at least the sections `model` and `training`."""

    job: JobConfig
    """The same, with defaults for the other sections."""

    entries: Mapping[str, Entry]
    read: Callable[[str], Tensor]
    """Function that returns a whole tensor."""

    description: str
    companions: Path | None
    """Folder with the Hugging Face `config.json` and tokenizer that the weights came with; None without it."""

    notes: tuple[str, ...] = ()
    """Sentences about keys of a Hugging Face `config.json` that have no effect here."""

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


def open_saved_model(folder: Path, step: int | None = None, ema: bool = False) -> SavedModel:
    """Open a run folder, a folder that `import` or `export` wrote, or a Hugging Face folder. No values are read.

    `step`: step of the run's checkpoint, by default the newest. `ema`: use the moving average of the weights in place
    of each parameter that has one. Raises WeightsError, DamagedCheckpointError and UserError.
    """
    record = read_json(folder / CONFIG_FILE)
    steps = complete_steps(checkpoint_folder(folder))
    has_checkpoint = bool(steps) and (step is None or step in steps)
    if not has_checkpoint and (steps or step is not None or ema):
        wanted = "" if step is None else f" of step {step}"
        raise WeightsError(f"it has no checkpoint{wanted}; steps: {', '.join(map(str, sorted(steps))) or 'none'}")
    if "model_type" in record and "model" not in record:
        return _open_huggingface(folder)
    try:
        job = JobConfig.model_validate(record)
    except ValidationError:
        reason = f"its {CONFIG_FILE} is not that of a run, of a folder that import wrote, or of Hugging Face"
        raise WeightsError(reason) from None
    if not has_checkpoint:
        return _open_imported(folder, record, job)
    checkpoint = checkpoint_folder(folder) / checkpoint_name(max(steps) if step is None else step)
    check_step(checkpoint, check(checkpoint).step)
    tensors = model_tensors(checkpoint, ema)
    entries = {name: Entry(name, t.shape, getattr(torch, t.dtype)) for name, t in tensors.items()}
    began_with = job.model.weights or job.model.path
    companions = None if began_with is None else companions_of(Path(began_with))
    return SavedModel(
        record, job, entries, lambda name: read_tensor(checkpoint, tensors[name]), checkpoint.name, companions
    )


def _open_imported(folder: Path, record: Mapping[str, Any], job: JobConfig) -> SavedModel:
    if not any(folder.glob("*.safetensors")):
        raise WeightsError("it has neither checkpoints nor *.safetensors")
    files = WeightsFolder(folder)
    entries = {
        name: Entry(name, tensor.shape, getattr(torch, FLOATS.get(tensor.dtype, "int64")))
        for name, tensor in files.tensors.items()
    }

    def read(name: str) -> Tensor:
        shape = entries[name].shape
        return files.read(name, (0,) * len(shape), shape)

    return SavedModel(record, job, entries, read, "the imported weights", companions_of(folder))


def _open_huggingface(folder: Path) -> SavedModel:
    found = read_folder_config(folder)
    model = ModelConfig(name=found.name, flavor=found.flavor, args=dict(found.args), weights=str(folder))
    seq_len = min(longest_sequence(found.config) or _LONGEST, _LONGEST)
    module = build_model(model, seq_len).module
    try:
        weights = find_weights(model, take_inventory(module, ()))
    except ConfigError as error:
        raise WeightsError(error.problems[0].reason) from None
    shapes = {name: tuple(tensor.shape) for name, tensor in (*module.named_parameters(), *module.named_buffers())}
    dtypes = {name: FLOATS[weights.folder.tensors[piece.tensors[0]].dtype] for name, piece in weights.pieces.items()}
    entries = {name: Entry(name, shapes[name], getattr(torch, dtype)) for name, dtype in dtypes.items()}

    def read(name: str) -> Tensor:
        shape = entries[name].shape
        return weights.read(name, (0,) * len(shape), shape).contiguous()

    record = {
        "model": model.model_dump(mode="json", exclude={"weights"}, exclude_none=True),
        "training": {"seq_len": seq_len},
    }
    job = JobConfig.model_validate(record)
    return SavedModel(record, job, entries, read, "the Hugging Face weights", folder, found.notes)
