"""The command `generate`: text from a trained model, as it is generated."""

from __future__ import annotations

import gc
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from titan_launch.commands.parser import Parser, add_source, at_least, number_from
from titan_launch.core.errors import ConfigError, UserError, format_key
from titan_launch.core.patches import without_garbage_collection
from titan_launch.core.process import FAILED, INTERRUPTED, OK
from titan_launch.core.terminal import as_message, one_line, say, say_data

if TYPE_CHECKING:
    from titan_launch.inference.language_model import LanguageModel

_NEW_TOKENS = 128
"""Default of `--max-new-tokens`, unless the longest sequence of the model leaves fewer."""

MOST_PROMPT = 1 << 24
"""Limit of the characters of a prompt, which may be in a file or a pipe. A million tokens of text have about 4 million
characters."""


def add_arguments(parser: Parser) -> None:
    """Add the arguments of `generate`."""
    parser.usage = "titan-launch generate SOURCE [--prompt TEXT] [options]"
    parser.epilog = (
        "A terminal shows control characters of the text as escapes, such as \\x1b. A pipe or a file gets them as they "
        'are.\n\nexample:\n  titan-launch generate outputs/llama_bn --prompt "import " --max-new-tokens 64'
    )
    add_model(parser)
    group = parser.add_argument_group("prompt", "without these options: each line of the standard input is a prompt")
    group.add_argument("--prompt", metavar="TEXT", help="text to continue")
    group.add_argument("--prompt-file", metavar="FILE", help="file with the text to continue")
    group = parser.add_argument_group("generation")
    text = f"most tokens to generate (default: {_NEW_TOKENS}, or fewer if the sequence would be too long for the model)"
    group.add_argument("--max-new-tokens", type=at_least(1), metavar="N", help=text)
    text = "divisor of the logits; 0: always take the token with the largest logit (default: 0)"
    group.add_argument("--temperature", type=number_from(0), default=0.0, metavar="T", help=text)
    text = "draw from the N most probable tokens (default: all)"
    group.add_argument("--top-k", type=at_least(1), metavar="N", help=text)
    text = "draw from the fewest tokens whose probabilities add up to P (default: 1)"
    group.add_argument("--top-p", type=number_from(0, 1), metavar="P", help=text)
    group.add_argument("--seed", type=at_least(0), metavar="N", help="seed of the drawn tokens (default: 0)")
    text = "text that ends the generation, and is not printed; may be given several times"
    group.add_argument("--stop", action="append", default=[], metavar="TEXT", help=text)


def add_model(parser: Parser) -> None:
    """Add the arguments that choose a trained language model."""
    add_source(parser)
    text = "the model of the run if it is code, package.module:factory: a folder alone may not choose code"
    parser.add_argument("--model", metavar="NAME", help=text)
    text = "dtype of the parameters and of the computation (default: that of the saved parameters)"
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help=text)
    parser.add_argument("--device", choices=("cpu", "cuda"), help="device (default: cuda if there is a GPU)")


def load_model(arguments: Namespace) -> LanguageModel:
    """Return the model that the command line names. Raises UserError."""
    with without_garbage_collection():
        import torch

        from titan_launch.checkpoint.manifest import DamagedCheckpointError
        from titan_launch.config.huggingface.features import WeightsError
        from titan_launch.inference.language_model import device_of, load_language_model
        from titan_launch.inference.saved_model import open_saved_model
    gc.enable()  # the start of the program disables garbage collection
    device, source = device_of(arguments.device), Path(arguments.source)
    try:
        saved = open_saved_model(source, arguments.step, arguments.ema, arguments.base)
        for note in saved.notes:
            say(f"note: {one_line(note)}", sys.stderr)
        dtype = None if arguments.dtype is None else getattr(torch, arguments.dtype)
        model = load_language_model(saved, source, device, dtype, arguments.model)
    except (WeightsError, DamagedCheckpointError) as error:
        raise UserError(f"error: {source}: {error}") from None
    except ConfigError as error:
        (problem, *_) = error.problems
        raise UserError(f"error: {source}: {format_key(problem.key)}: {problem.reason}") from None
    say(f"model: {one_line(model.description)}", sys.stderr)
    return model


def run(arguments: Namespace) -> int:
    """Generate text for each prompt. Text goes to the standard output, and speed to the standard error."""
    prompts = _prompts(arguments)
    if arguments.temperature == 0:
        for option in ("top_k", "top_p", "seed"):
            if getattr(arguments, option) is not None:
                reason = "has no effect without --temperature, which chooses at random"
                raise UserError(f"error: --{option.replace('_', '-')} {reason}; set --temperature above 0")
    model = load_model(arguments)
    generate = _generator(model, arguments)
    is_interactive = prompts is None and sys.stdin.isatty()
    try:
        for prompt in _typed() if prompts is None else prompts:
            try:
                generate(prompt)
            except UserError as error:
                if not is_interactive:
                    raise
                say(as_message(str(error)), sys.stderr)
    except KeyboardInterrupt:
        say()
        return INTERRUPTED
    except BrokenPipeError:
        return FAILED
    return OK


def _prompts(arguments: Namespace) -> list[str] | None:
    """Return the prompts of the command line; None for those of the standard input."""
    if arguments.prompt is not None and arguments.prompt_file is not None:
        raise UserError("error: --prompt and --prompt-file are both set; remove one")
    if arguments.prompt_file is not None:
        where = f"--prompt-file {arguments.prompt_file}"
        try:
            with open(arguments.prompt_file, encoding="utf-8") as file:
                return [_bounded(file.read(MOST_PROMPT + 1), where)]
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
            raise UserError(f"error: {where}: {reason}") from None
    return None if arguments.prompt is None else [arguments.prompt]


def _bounded(prompt: str, where: str) -> str:
    """Return a prompt. Raises UserError if it is too long."""
    if len(prompt) > MOST_PROMPT:
        raise UserError(f"error: {where}: the prompt has more than {MOST_PROMPT:,} characters; write a shorter one")
    return prompt


def _typed() -> Iterator[str]:
    """Yield the lines of the standard input. A terminal shows where to type."""
    while True:
        if sys.stdin.isatty():
            say("> ", sys.stderr, end="", flush=True)
        try:
            line = _bounded(sys.stdin.readline(MOST_PROMPT + 1), "the standard input")
        except UnicodeDecodeError:
            raise UserError("error: the standard input is not UTF-8 text") from None
        if not line:
            return
        yield line.rstrip("\n")


def _generator(model: LanguageModel, arguments: Namespace) -> Callable[[str], None]:
    """Return a function that prints the text after a prompt, and then the speed."""
    import torch

    from titan_launch.inference.generation import Sampling, generate_text, has_cache

    sampling = Sampling(arguments.temperature, arguments.top_k, 1.0 if arguments.top_p is None else arguments.top_p)
    generator = torch.Generator().manual_seed(arguments.seed or 0)
    if not has_cache(model.module):
        name = type(model.module).__name__
        say(f"note: {name} has no cache: each token computes the whole sequence again", file=sys.stderr)

    def generate(prompt: str) -> None:
        try:
            tokens = model.encode(prompt)
        except UnicodeEncodeError:  # bytes of the command line that are not UTF-8
            raise UserError("error: the prompt is not UTF-8 text") from None
        new, start = list[None](), time.perf_counter()
        room = max(1, model.max_tokens - len(tokens))
        most = arguments.max_new_tokens or min(_NEW_TOKENS, room)
        for piece in generate_text(
            model, tokens, most, sampling, generator, arguments.stop, on_token=lambda: new.append(None)
        ):
            say_data(piece, end="", flush=True)
        seconds = time.perf_counter() - start
        say(flush=True)
        speed = f"{len(new) / seconds:,.1f} tokens/s"
        say(f"prompt: {len(tokens)} tokens; new: {len(new)} tokens in {seconds:.2f} s, {speed}", file=sys.stderr)

    return generate
