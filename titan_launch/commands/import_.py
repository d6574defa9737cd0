"""The command `import`: a Hugging Face folder, written in the names of this package."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from titan_launch.commands.parser import Parser
from titan_launch.config.loading.provenance import toml_value
from titan_launch.core.errors import ConfigError, UserError
from titan_launch.core.process import OK

if TYPE_CHECKING:
    from titan_launch.config.huggingface.config_json import FolderConfig

_LONGEST = 2048
"""Largest `training.seq_len` of the job that `import` writes."""


def add_arguments(parser: Parser) -> None:
    """Add the arguments of `import`."""
    parser.usage = "titan-launch import FOLDER OUT"
    parser.add_argument("folder", metavar="FOLDER", help="Hugging Face folder: config.json and *.safetensors")
    parser.add_argument("out", metavar="OUT", help="folder to write, which must not exist")


def run(arguments: Namespace) -> int:
    """Verify the folder, and write its tensors, its other files, and a job that starts from them."""
    from titan_launch.config.huggingface.config_json import read_folder_config
    from titan_launch.config.huggingface.features import WeightsError

    try:
        folder = read_folder_config(arguments.folder)
        if folder.model_type is None:
            raise WeightsError("it is not a Hugging Face folder; a job can start from it: set model.weights")
        summary = _write(Path(arguments.folder), folder, Path(arguments.out))
    except WeightsError as error:
        raise UserError(f"error: {arguments.folder}: {error}") from None
    except ConfigError as error:
        raise UserError(f"error: {arguments.folder}: {error.problems[0].reason}") from None
    for line in (*(f"note: {note}" for note in folder.notes), summary):
        print(line)
    return OK


def _write(source: Path, folder: FolderConfig, out: Path) -> str:
    import torch

    from titan_launch.config.huggingface.features import CONFIG_FILE
    from titan_launch.config.sections.model import ModelConfig
    from titan_launch.models.build import build_model, take_inventory
    from titan_launch.models.weights.folder import FLOATS, find_weights
    from titan_launch.models.weights.writing import (
        COMPANIONS,
        Entry,
        copy_companions,
        new_folder,
        write_json,
        write_tensors,
    )

    model = ModelConfig(name=folder.name, flavor=folder.flavor, args=dict(folder.args), weights=str(source))
    longest = folder.config.get("max_position_embeddings", folder.config.get("n_positions", _LONGEST))
    seq_len = min(int(longest), _LONGEST)
    module = build_model(model, seq_len).module
    weights = find_weights(model, take_inventory(module, ()))
    shapes = {name: tuple(tensor.shape) for name, tensor in module.named_parameters()}
    entries = [
        Entry(name, shapes[name], getattr(torch, FLOATS[weights.folder.tensors[piece.tensor].dtype]))
        for name, piece in weights.pieces.items()
    ]

    def read(entry: Entry) -> torch.Tensor:
        return weights.read(entry.name, (0,) * len(entry.shape), entry.shape).contiguous()

    with new_folder(out) as folder_out:
        num_bytes = write_tensors(folder_out, entries, read)
        record = {"model": model.model_dump(mode="json", exclude={"weights"}, exclude_none=True)}
        write_json(folder_out / CONFIG_FILE, {**record, "training": {"seq_len": seq_len}})
        copy_companions(source, folder_out / COMPANIONS)
        number = sum(parameter.numel() for parameter in module.parameters())
        about = f"# {folder.name} with {number:,} parameters, from {source}."
        name, path = toml_value(out.name), toml_value(str(out))
        job = _JOB.format(about=about, name=name, weights=path, seq_len=seq_len)
        (folder_out / "job.toml").write_text(job, encoding="utf-8")
    return f"wrote {len(entries)} tensors ({num_bytes / 1e6:,.1f} MB) and job.toml to {out}"


_JOB = """\
{about}
[job]
name = {name}

[model]
weights = {weights}

[training]
seq_len = {seq_len}

[optimizer]
lr = 1e-5
"""
