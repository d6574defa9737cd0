"""The command `generate`: text from a trained model, printed while it is generated."""

from __future__ import annotations

import sys
import time
from argparse import Namespace
from collections.abc import Callable
from typing import TYPE_CHECKING

from titan_launch.commands import language_model
from titan_launch.commands.parser import Parser
from titan_launch.core.errors import UserError
from titan_launch.core.terminal import say, say_data

if TYPE_CHECKING:
    from titan_launch.inference.language_model import LanguageModel

_NEW_TOKENS = 128
"""Default of `--max-new-tokens`. If the model's longest sequence leaves fewer tokens, the default is their number."""


def add_arguments(parser: Parser) -> None:
    parser.usage = "titan-launch generate SOURCE [--prompt TEXT] [options]"
    parser.epilog = (
        "A terminal shows control characters of the text as escapes, such as \\x1b. A pipe or a file gets the "
        'characters.\n\nexample:\n  titan-launch generate outputs/llama_bn --prompt "import " --max-new-tokens 64'
    )
    language_model.add_model(parser)
    group = parser.add_argument_group("prompt", "without these options: each line of the standard input is a prompt")
    group.add_argument("--prompt", metavar="TEXT", help="text to continue")
    group.add_argument("--prompt-file", metavar="FILE", help="file with the text to continue")
    text = "read names of special tokens in the prompt, such as <|im_start|>, as these tokens (default: as text)"
    group.add_argument("--special-tokens", action="store_true", help=text)
    language_model.add_chat(
        parser, "send each prompt as a user's message, in the chat template of the model, and generate the answer"
    )
    most = f"largest number of new tokens (default: {_NEW_TOKENS}, or fewer if the model has no room for more)"
    stop = "text that ends the generation, and is not printed; may be given several times"
    language_model.add_sampling(parser, most, stop)


def run(arguments: Namespace) -> int:
    """Generate text for each prompt. Text goes to the standard output, and speeds and errors to the standard error.
    Return 0, or 130 after Ctrl-C."""
    prompts = _prompts(arguments)
    language_model.check_sampling(arguments)
    language_model.check_chat(arguments)
    if arguments.chat and arguments.special_tokens:
        raise UserError("error: --special-tokens cannot be used with --chat, whose template writes the special tokens")
    generate = _generator(language_model.load_model(arguments), arguments)
    if prompts is None:
        return language_model.answer_each(language_model.typed_lines(), generate, sys.stdin.isatty())
    return language_model.answer_each(prompts, generate, is_interactive=False)


def _prompts(arguments: Namespace) -> list[str] | None:
    """Return a list with the prompt of `--prompt` or `--prompt-file`. Return None if neither is set: the prompts are
    then the lines of the standard input. Raises UserError if both are set, or for a file that cannot be read, is not
    UTF-8 text or is too long."""
    if arguments.prompt is not None and arguments.prompt_file is not None:
        raise UserError("error: --prompt and --prompt-file are both set; remove one")
    if arguments.prompt_file is not None:
        where = f"--prompt-file {arguments.prompt_file}"
        try:
            with open(arguments.prompt_file, encoding="utf-8-sig") as file:
                return [language_model.bounded(file.read(language_model.MOST_PROMPT + 1), where)]
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text; convert the file to UTF-8"
            raise UserError(f"error: {where}: {reason}") from None
    return None if arguments.prompt is None else [arguments.prompt]


def _generator(model: LanguageModel, arguments: Namespace) -> Callable[[str], None]:
    """Return a function that continues a prompt. The function prints the text during generation, then the speed."""
    from titan_launch.inference.generation import TextStream, generate_tokens

    sampling, generator = language_model.sampling_of(arguments, model)
    first = [] if arguments.system is None else [{"role": "system", "content": arguments.system}]

    def generate(prompt: str) -> None:
        try:
            if arguments.chat:
                tokens = model.encode_chat([*first, {"role": "user", "content": prompt}])
            else:
                tokens = model.encode(prompt, arguments.special_tokens)
        except UnicodeEncodeError:  # the command line has bytes that are not UTF-8
            raise UserError("error: the prompt is not UTF-8 text") from None
        start = time.perf_counter()
        most = arguments.max_new_tokens or min(_NEW_TOKENS, max(1, model.max_tokens - len(tokens)))
        before = () if arguments.chat else tokens
        stream = TextStream(model.tokenizer.decode, before, (*arguments.stop, *model.end_texts))
        for piece in stream.pieces(generate_tokens(model, tokens, most, sampling, generator)):
            say_data(piece, end="", flush=True)
        seconds = time.perf_counter() - start
        say(flush=True)
        language_model.say_speed(len(tokens), 0, stream.num_tokens, seconds)

    return generate
