"""The command `export`: the weights of a run, or of an imported folder, for other programs."""

from __future__ import annotations

import math
from argparse import ArgumentTypeError, Namespace
from pathlib import Path

from titan_launch.commands.parser import Parser, add_source, at_least
from titan_launch.core.errors import UserError
from titan_launch.core.phantom import is_phantom
from titan_launch.core.process import OK
from titan_launch.core.terminal import as_message, say


def add_arguments(parser: Parser) -> None:
    parser.usage = "titan-launch export SOURCE --out OUT [options]"
    parser.epilog = "example:\n  titan-launch export outputs/llama_bn --out exported --format plain"
    add_source(parser)
    text = "write the mean of the checkpoints of these steps, such as 800,900,1000; or with weights: 800,1000=2"
    parser.add_argument("--average", type=_steps, metavar="STEPS", default={}, help=text)
    text = "write the weighted mean of SOURCE (weight 1) and of the model in FOLDER (weight W, default: 1); repeatable"
    parser.add_argument("--soup", type=_soup, action="append", metavar="FOLDER[=W]", default=[], help=text)
    parser.add_argument("--out", required=True, metavar="OUT", help="folder to write; must be new or empty (required)")
    text = "hf: config.json, *.safetensors and tokenizer of Hugging Face (the default); plain: one model.safetensors "
    parser.add_argument("--format", choices=("hf", "plain"), default="hf", help=f"{text}with this package's names")
    text = "write only the adapters ([lora]), as a folder that peft loads; default: the model with its adapters merged"
    parser.add_argument("--adapter", action="store_true", help=text)
    text = "dtype of the weights (default: that of the parameters in the checkpoint)"
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help=text)
    text = "largest size of a file with format hf (default: 5GB)"
    parser.add_argument("--max-shard-size", metavar="SIZE", help=text)
    text = "with format hf: write only the first N tokens of the vocabulary (default: as in model.weights, or all)"
    parser.add_argument("--vocab-size", type=at_least(1), metavar="N", help=text)


def _weighted(text: str) -> tuple[str, float]:
    """Return (name, weight) of `NAME=W`. Without `=`, the weight is 1. Raises ArgumentTypeError for a wrong weight, and
    for an empty name."""
    name, equals, weight = text.rpartition("=")
    if not equals:
        return text, 1.0
    try:
        value = float(weight)
    except ValueError:
        value = math.nan
    if not name:
        raise ArgumentTypeError(f"{text!r}: there is no name before =")
    if not 0 < value < math.inf:
        raise ArgumentTypeError(f"{text!r}: the weight after = must be a number above 0")
    return name, value


def _soup(text: str) -> tuple[str, float]:
    """Return (folder, weight) of `FOLDER=W`. The name of an existing folder may have a `=` itself."""
    return (text, 1.0) if Path(text).is_dir() else _weighted(text)


def _steps(text: str) -> dict[int, float]:
    """Return the weight of each step of a list such as `800,1000=2`. Raises ArgumentTypeError for a wrong step or
    weight, and for a list that has fewer than two steps or has a step twice."""
    items = [_weighted(item.strip()) for item in text.split(",")]
    steps = {at_least(0)(name): weight for name, weight in items}
    if len(steps) < 2 or len(steps) < len(items):
        raise ArgumentTypeError(f"{text!r}: name at least two steps, each once")
    return steps


def run(arguments: Namespace) -> int:
    from titan_launch.checkpoint.manifest import DamagedCheckpointError
    from titan_launch.inference.export import DEFAULT_SHARD_SIZE, ExportOptions, export
    from titan_launch.models.huggingface.files import WeightsError

    if is_phantom():
        raise UserError("error: a process with a phantom GPU has no values to export; run export without a phantom GPU")
    if arguments.format == "plain":
        for option in ("max_shard_size", "vocab_size"):
            if getattr(arguments, option) is not None:
                raise UserError(f"error: --{option.replace('_', '-')} has no effect with --format plain; remove it")
    if arguments.adapter and arguments.max_shard_size is not None:
        raise UserError("error: --max-shard-size has no effect with --adapter, which writes one file; remove it")
    soup = {Path(folder): weight for folder, weight in arguments.soup}
    if len({folder.resolve() for folder in soup}) < len(arguments.soup):
        raise UserError("error: --soup names a folder twice; name each folder once, with its weight")
    if arguments.average and arguments.step is not None:
        raise UserError("error: --step has no effect, because --average names the steps; remove --step")
    if (arguments.average or arguments.soup) and arguments.adapter:
        raise UserError("error: --adapter: a mean of adapters is not the mean of their models; remove --adapter")
    options = ExportOptions(
        is_plain=arguments.format == "plain",
        step=arguments.step,
        dtype=arguments.dtype,
        max_shard_size=arguments.max_shard_size or DEFAULT_SHARD_SIZE,
        vocab_size=arguments.vocab_size,
        ema=arguments.ema,
        is_adapter=arguments.adapter,
        base=arguments.base,
        average=arguments.average,
        soup=soup,
    )
    try:
        say(as_message(export(Path(arguments.source), Path(arguments.out), options)))
    except (WeightsError, DamagedCheckpointError) as error:
        raise UserError(f"error: {arguments.source}: {error}") from None
    return OK
