"""The command `import`: a copy of a Hugging Face folder with the tensor names of this package."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from titan_launch.commands.parser import Parser
from titan_launch.config.loading.provenance import toml_value
from titan_launch.core.errors import UserError
from titan_launch.core.process import OK
from titan_launch.core.terminal import counted, one_line, say
from titan_launch.recipes.writing import job_name

if TYPE_CHECKING:
    from titan_launch.inference.saved_model import SavedModel


def add_arguments(parser: Parser) -> None:
    parser.usage = "titan-launch import FOLDER --out OUT"
    parser.epilog = "example:\n  titan-launch import Llama-3.2-1B --out imported/llama"
    parser.add_argument("folder", metavar="FOLDER", help="Hugging Face folder: config.json and *.safetensors")
    parser.add_argument("--out", required=True, metavar="OUT", help="folder to write; must be new or empty (required)")


def run(arguments: Namespace) -> int:
    """Verify the folder. Write its tensors, its other files, and a job that starts from the written tensors."""
    from titan_launch.inference.saved_model import open_saved_model
    from titan_launch.models.huggingface.files import WeightsError

    folder = Path(arguments.folder)
    try:
        saved = open_saved_model(folder)
        if saved.companions != folder:
            raise WeightsError(
                "not a Hugging Face folder, so no import is needed; to start a job from the folder, name it in "
                "model.weights, or, if it is a run folder, in checkpoint.initial_load_path"
            )
        summary = _write(folder, saved, Path(arguments.out))
    except WeightsError as error:
        raise UserError(f"error: {folder}: {error}") from None
    for line in (*(f"note: {note}" for note in saved.notes), summary):
        say(one_line(line))
    return OK


def _write(source: Path, saved: SavedModel, out: Path) -> str:
    from titan_launch.models.huggingface.files import CONFIG_FILE
    from titan_launch.models.weights.writing import COMPANIONS, copy_companions, new_folder, write_json, write_tensors

    entries, name = list(saved.entries.values()), saved.job.model.name
    with new_folder(out) as folder:
        num_bytes = write_tensors(folder, entries, lambda entry: saved.read(entry.name))
        write_json(folder / CONFIG_FILE, saved.record)
        copy_companions(source, folder / COMPANIONS)
        about = f"# {name} with {saved.num_parameters:,} parameters, from {source}."
        fields = {"name": toml_value(job_name(out.name)), "weights": toml_value(str(out))}
        job = _JOB.format(about=about, seq_len=saved.job.training.seq_len, **fields)
        (folder / "job.toml").write_text(job, encoding="utf-8")
    return f"wrote {counted(len(entries), 'tensor')} ({num_bytes / 1e6:,.1f} MB) and job.toml to {out}"


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
