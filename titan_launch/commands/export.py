"""The command `export`: the weights of a run, or of an imported folder, for other programs."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from titan_launch.commands.parser import Parser, add_source, at_least
from titan_launch.core.errors import UserError
from titan_launch.core.phantom import is_phantom
from titan_launch.core.process import OK
from titan_launch.core.terminal import as_message, say


def add_arguments(parser: Parser) -> None:
    """Add the arguments of `export`."""
    parser.usage = "titan-launch export SOURCE --out OUT [options]"
    parser.epilog = "example:\n  titan-launch export outputs/llama_bn --out exported --format plain"
    add_source(parser)
    parser.add_argument("--out", required=True, metavar="OUT", help="folder to write, which must not exist (required)")
    text = "hf: config.json, *.safetensors and tokenizer of Hugging Face (the default); plain: one model.safetensors "
    parser.add_argument("--format", choices=("hf", "plain"), default="hf", help=f"{text}in the names of this package")
    text = "write only the adapters ([lora]), as a folder that peft loads; default: the model with its adapters merged"
    parser.add_argument("--adapter", action="store_true", help=text)
    text = "dtype of the weights (default: that of the parameters in the checkpoint)"
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help=text)
    text = "largest size of a file with format hf (default: 5GB)"
    parser.add_argument("--max-shard-size", metavar="SIZE", help=text)
    text = "rows of the vocabulary to write with format hf; the others are padding (default: those of model.weights)"
    parser.add_argument("--vocab-size", type=at_least(1), metavar="N", help=text)


def run(arguments: Namespace) -> int:
    """Write the folder, and print what it holds."""
    from titan_launch.checkpoint.manifest import DamagedCheckpointError
    from titan_launch.inference.export import DEFAULT_SHARD_SIZE, ExportOptions, export
    from titan_launch.models.huggingface.files import WeightsError

    if is_phantom():
        raise UserError("error: export: this process has a phantom GPU, so there are no values to export")
    if arguments.format == "plain":
        for option in ("max_shard_size", "vocab_size"):
            if getattr(arguments, option) is not None:
                raise UserError(f"error: --{option.replace('_', '-')} is for --format hf; remove it")
    options = ExportOptions(
        is_plain=arguments.format == "plain",
        step=arguments.step,
        dtype=arguments.dtype,
        max_shard_size=arguments.max_shard_size or DEFAULT_SHARD_SIZE,
        vocab_size=arguments.vocab_size,
        ema=arguments.ema,
        is_adapter=arguments.adapter,
        base=arguments.base,
    )
    try:
        say(as_message(export(Path(arguments.source), Path(arguments.out), options)))
    except (WeightsError, DamagedCheckpointError) as error:
        raise UserError(f"error: {arguments.source}: {error}") from None
    return OK
