"""Shared parts of the commands that run a trained language model: options, the model, typed input, and speeds."""

from __future__ import annotations

import gc
import sys
from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titan_launch.commands.parser import Parser, add_source, at_least, number_from
from titan_launch.config.loading.merge import parse_value
from titan_launch.config.sections.data import date_text
from titan_launch.core.errors import ConfigError, UserError, format_key
from titan_launch.core.import_string import FOLDERS_CHOOSE_NO_CODE
from titan_launch.core.patches import without_garbage_collection
from titan_launch.core.process import INTERRUPTED, OK
from titan_launch.core.terminal import as_message, counted, one_line, say

if TYPE_CHECKING:
    import torch

    from titan_launch.inference.generation import Sampling
    from titan_launch.inference.language_model import LanguageModel

MOST_PROMPT = 1 << 22
"""Maximum number of characters of a prompt from a file or from the standard input: about a million tokens of text. If
each character is a token, the prompt takes 0.7 GB of memory."""


def add_model(parser: Parser) -> None:
    """Add the arguments that choose a trained language model, its dtype and its device."""
    add_source(parser)
    text = f"package.module:factory of the run's model, if it is your own code ({FOLDERS_CHOOSE_NO_CODE})"
    parser.add_argument("--model", metavar="NAME", help=text)
    text = "dtype of the parameters and of the computation (default: that of the saved parameters)"
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help=text)
    parser.add_argument("--device", choices=("cpu", "cuda"), help="device (default: cuda if there is a GPU)")


def add_chat(parser: Parser, switch: str | None = None) -> None:
    """Add the options of the chat template. `switch`: help text of the option `--chat`. None: there is no option
    `--chat`, and the command always uses the template."""
    group = parser.add_argument_group("chat")
    if switch is None:
        parser.set_defaults(chat=True)
    else:
        group.add_argument("--chat", action="store_true", help=switch)
    group.add_argument("--system", metavar="TEXT", help="text of the system message (default: none)")
    text = "chat template: a Jinja file, or chatml (default: that of the run, of its tokenizer, or of the folder)"
    group.add_argument("--template", metavar="FILE", help=text)
    text = "variable of the template, such as enable_thinking=false; values are TOML; may be given several times"
    group.add_argument("--template-arg", action="append", type=_variable, default=[], metavar="NAME=VALUE", help=text)
    text = "date that the template writes as today's date (default: data.date of the run, or 2024-07-26)"
    group.add_argument("--date", type=_date, metavar="YYYY-MM-DD", help=text)


def _variable(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise ArgumentTypeError(f'must be NAME=VALUE, such as enable_thinking=false, not "{text}"')
    try:
        return name, parse_value(value)
    except ValueError as error:
        raise ArgumentTypeError(f"{name}: {error}") from None


def _date(text: str) -> str:
    try:
        return date_text(text)
    except ValueError as error:
        raise ArgumentTypeError(f'{error}, not "{text}"') from None


def check_chat(arguments: Namespace, *further: str) -> None:
    """Raise UserError for an option that needs `--chat`, if `--chat` is not given. `further`: names of options that
    need `--chat` and that only this command has."""
    given = [name for name in ("system", "template", "template_arg", "date", *further) if getattr(arguments, name)]
    if given and not arguments.chat:
        raise UserError(f"error: --{given[0].replace('_', '-')} has no effect without --chat; add --chat")


def load_model(arguments: Namespace) -> LanguageModel:
    """Load the model that the command line names, and describe the model on the standard error. Raises UserError if the
    model cannot be loaded."""
    with without_garbage_collection():
        import torch

        from titan_launch.checkpoint.manifest import DamagedCheckpointError
        from titan_launch.inference.chat_format import ChatOptions
        from titan_launch.inference.language_model import device_of, load_language_model
        from titan_launch.inference.saved_model import check_base, open_saved_model
        from titan_launch.models.huggingface.files import WeightsError
    gc.enable()  # the start of the program disables garbage collection
    device, source = device_of(arguments.device), Path(arguments.source)
    chat = ChatOptions(arguments.template, dict(arguments.template_arg), arguments.date) if arguments.chat else None
    try:
        saved = open_saved_model(source, arguments.step, arguments.ema, arguments.base)
        check_base(arguments.base, [saved])
        for note in saved.notes:
            say(f"note: {one_line(note)}", sys.stderr)
        dtype = None if arguments.dtype is None else getattr(torch, arguments.dtype)
        model = load_language_model(saved, source, device, dtype, arguments.model, chat)
    except (WeightsError, DamagedCheckpointError) as error:
        raise UserError(f"error: {source}: {error}") from None
    except ConfigError as error:
        (problem, *_) = error.problems
        raise UserError(f"error: {source}: {format_key(problem.key)}: {problem.reason}") from None
    say(f"model: {one_line(model.description)}", sys.stderr)
    return model


def add_sampling(parser: Parser, most: str, stop: str) -> None:
    """Add the options of generation. `most`, `stop`: help texts of `--max-new-tokens` and `--stop`."""
    group = parser.add_argument_group("generation")
    group.add_argument("--max-new-tokens", type=at_least(1), metavar="N", help=most)
    text = "divisor of the logits; 0: always take the token with the largest logit (default: 0)"
    group.add_argument("--temperature", type=number_from(0), default=0.0, metavar="T", help=text)
    text = "draw from the N most probable tokens (default: all)"
    group.add_argument("--top-k", type=at_least(1), metavar="N", help=text)
    text = "draw only from the most probable tokens whose probabilities add up to P (default: 1)"
    group.add_argument("--top-p", type=number_from(0, 1), metavar="P", help=text)
    group.add_argument("--seed", type=at_least(0), metavar="N", help="seed of the drawn tokens (default: 0)")
    group.add_argument("--stop", action="append", default=[], metavar="TEXT", help=stop)


def check_sampling(arguments: Namespace) -> None:
    """Raise UserError for `--top-k`, `--top-p` and `--seed` at temperature 0, where they have no effect."""
    if arguments.temperature == 0:
        for option in ("top_k", "top_p", "seed"):
            if getattr(arguments, option) is not None:
                reason = "has no effect at temperature 0 (the default), which always takes the most probable token"
                raise UserError(f"error: --{option.replace('_', '-')} {reason}; set --temperature above 0")


def sampling_of(arguments: Namespace, model: LanguageModel) -> tuple[Sampling, torch.Generator]:
    """Return the sampling settings of the options, and a random generator with the seed of `--seed`. If the model has
    no key-value cache, print a note to the standard error."""
    import torch

    from titan_launch.inference.generation import Sampling, has_cache

    if not has_cache(model.module):
        name = type(model.module).__name__
        consequence = "the whole sequence is computed again for each token"
        say(f"note: {name} has no key-value cache, so {consequence}", file=sys.stderr)
    top_p = 1.0 if arguments.top_p is None else arguments.top_p
    return Sampling(arguments.temperature, arguments.top_k, top_p), torch.Generator().manual_seed(arguments.seed or 0)


def bounded(prompt: str, where: str) -> str:
    """Return a prompt unchanged. Raises UserError if it has more than MOST_PROMPT characters. `where`: source of the
    prompt, for the error."""
    if len(prompt) > MOST_PROMPT:
        raise UserError(f"error: {where}: the prompt has more than {MOST_PROMPT:,} characters; write a shorter one")
    return prompt


def typed_lines() -> Iterator[str]:
    """Yield the lines of the standard input. On a terminal, print `> ` before each line. If the standard output is a
    terminal too, the user can edit the line. Raises UserError for a line that is too long or not UTF-8 text."""
    is_terminal = sys.stdin.isatty()
    has_editor = is_terminal and sys.stdout.isatty()
    if has_editor:
        with suppress(ImportError):
            import readline  # noqa: F401 - `input` then has a history, and returns several pasted lines as one text
    while True:
        if is_terminal and not has_editor:
            say("> ", sys.stderr, end="", flush=True)
        try:
            line = f"{input('> ')}\n" if has_editor else sys.stdin.readline(MOST_PROMPT + 1)
        except EOFError:
            say()
            return
        except UnicodeDecodeError:
            raise UserError("error: the standard input is not UTF-8 text; convert it to UTF-8") from None
        if not line:
            return
        yield bounded(line.removesuffix("\n"), "the standard input")


def answer_each(prompts: Iterable[str], answer: Callable[[str], None], is_interactive: bool) -> int:
    """Call `answer` with each prompt. Return 0, or 130 after Ctrl-C. `is_interactive`: print a UserError of `answer` to
    the standard error and go on with the next prompt, instead of raising the error."""
    try:
        for prompt in prompts:
            try:
                answer(prompt)
            except UserError as error:
                if not is_interactive:
                    raise
                text = f"error: {error}" if isinstance(error, ConfigError) else str(error)
                say(as_message(text), sys.stderr, flush=True)
    except KeyboardInterrupt:
        say()
        return INTERRUPTED
    return OK


def say_speed(num_tokens: int, num_kept: int, num_new: int, seconds: float) -> None:
    """Print the numbers of tokens and the speed to the standard error. `num_tokens`: number of tokens of the prompt.
    `num_kept`: number of these tokens whose keys and values were already in the cache. `num_new`: number of generated
    tokens."""
    kept = f" ({num_kept} cached)" if num_kept else ""
    speed = f"{num_new / seconds:,.1f} tokens/s"
    prompt, new = counted(num_tokens, "token"), counted(num_new, "token")
    say(f"prompt: {prompt}{kept}; new: {new} in {seconds:.2f} s, {speed}", file=sys.stderr)
