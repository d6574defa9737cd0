"""Export of a run's weights, in one process, from a checkpoint that any number of ranks may have written."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import torch

from titan_launch.config.architectures import ARCHITECTURES, resolve_args
from titan_launch.config.architectures.decoder import DecoderArgs
from titan_launch.config.huggingface.config_json import config_of, model_type_of, read_json
from titan_launch.config.huggingface.features import CONFIG_FILE, WeightsError
from titan_launch.config.sections.model import HUGGINGFACE
from titan_launch.inference.saved_model import SavedModel, open_saved_model
from titan_launch.models.weights.folder import VOCABULARY
from titan_launch.models.weights.tensor_names import Shape, is_selection_bias, pieces_of, tensor_shapes
from titan_launch.models.weights.writing import (
    COMPANIONS,
    Entry,
    copy_companions,
    in_file_layout,
    new_folder,
    parse_size,
    write_json,
    write_tensors,
)

DEFAULT_SHARD_SIZE = "5GB"


@dataclass(frozen=True)
class ExportOptions:
    """Options of the command `export`."""

    is_plain: bool = False
    """Write one file in the names of this package, instead of a Hugging Face folder."""

    step: int | None = None
    dtype: str | None = None
    max_shard_size: str = DEFAULT_SHARD_SIZE
    vocab_size: int | None = None
    ema: bool = False
    """Write the moving average of the weights in place of each parameter that has one."""


def export(run: Path, out: Path, options: ExportOptions) -> str:
    """Write the weights of a run, or of a folder that `open_saved_model` takes. Return a line about the result.

    Host memory stays near twice the largest tensor. Raises WeightsError, DamagedCheckpointError and UserError.
    """
    source = open_saved_model(run, options.step, options.ema)
    if options.dtype is not None:
        dtype = getattr(torch, options.dtype)
        entries = {
            name: replace(entry, dtype=dtype)
            if entry.dtype.is_floating_point and not is_selection_bias(name)
            else entry
            for name, entry in source.entries.items()
        }
        source = replace(source, entries=entries)
    write = _write_plain if options.is_plain else _write_huggingface
    with new_folder(out) as folder:
        num_tensors, num_bytes = write(source, folder, options)
    return f"wrote {num_tensors} tensors ({num_bytes / 1e6:,.1f} MB) of {source.description} to {out}"


def _write_plain(source: SavedModel, folder: Path, options: ExportOptions) -> tuple[int, int]:
    write_json(folder / CONFIG_FILE, source.record)
    if source.companions is not None:
        copy_companions(source.companions, folder / COMPANIONS)
    entries = list(_without_shared(source).values())
    return len(entries), write_tensors(folder, entries, lambda entry: source.read(entry.name).to(entry.dtype))


def _write_huggingface(source: SavedModel, folder: Path, options: ExportOptions) -> tuple[int, int]:
    model, entries = source.job.model, _without_shared(source)
    if model.name == HUGGINGFACE:
        return _write_class(source, folder, options)
    model_type = model_type_of(model.name)  # raises for models that are not decoders
    original = None if source.companions is None else read_json(source.companions / CONFIG_FILE)
    args = cast(DecoderArgs, resolve_args(model.name, model.flavor, model.args))
    rows = args.vocab_size
    kept = min(rows, options.vocab_size or (original or {}).get("vocab_size", rows))
    if options.vocab_size is not None and options.vocab_size > rows:
        raise WeightsError(f"--vocab-size {options.vocab_size} is larger than the model's vocab_size, {rows}")
    args = args.model_copy(update={"vocab_size": kept})
    config = config_of(model.name, args, _dtype_name(source), source.job.training.seq_len, original)
    shapes: dict[str, Shape] = {name: entry.shape for name, entry in entries.items()}
    shapes |= {name: (kept, *shapes[name][1:]) for name in VOCABULARY if name in shapes}
    pieces = pieces_of(model_type, shapes, args.head_width)
    dtype_of = {tensor: entries[name].dtype for name, piece in pieces.items() for tensor in piece.tensors}
    files = [Entry(name, shape, dtype_of[name]) for name, shape in tensor_shapes(pieces, shapes).items()]
    num_bytes = write_tensors(
        folder,
        files,
        in_file_layout(pieces, source.read),
        parse_size(options.max_shard_size),
    )
    if source.companions is not None:
        copy_companions(source.companions, folder)
    write_json(folder / CONFIG_FILE, config)
    generation = folder / "generation_config.json"
    if not generation.exists():
        ids = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if config.get(key)}
        write_json(generation, {"_from_model_config": True, **ids})
    return len(files), num_bytes


def _write_class(source: SavedModel, folder: Path, options: ExportOptions) -> tuple[int, int]:
    """Write the tensors of a class of `transformers` in its own names, and the `config.json` that it was built from."""
    if options.vocab_size is not None:
        raise WeightsError("--vocab-size is for the models of this package; this run trains a class of transformers")
    entries = list(source.entries.values())
    shard = parse_size(options.max_shard_size)
    num_bytes = write_tensors(folder, entries, lambda entry: source.read(entry.name).to(entry.dtype), shard)
    if source.companions is not None:
        copy_companions(source.companions, folder)
    write_json(folder / CONFIG_FILE, {**source.job.model.args, "dtype": _dtype_name(source)})
    return len(entries), num_bytes


def _dtype_name(source: SavedModel) -> str:
    return str(source.widest_dtype).removeprefix("torch.")


def _without_shared(source: SavedModel) -> dict[str, Entry]:
    """Return the tensors without the output layer's if it is the embedding's."""
    model = source.job.model
    if model.name in ARCHITECTURES and resolve_args(model.name, model.flavor, model.args).tied_by() is not None:
        return {name: entry for name, entry in source.entries.items() if name != "output.weight"}
    return dict(source.entries)
