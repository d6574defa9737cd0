"""The command `chat`: a conversation with a trained model, turn by turn."""

from __future__ import annotations

import signal
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from itertools import takewhile
from typing import TYPE_CHECKING

from titan_launch.commands import language_model
from titan_launch.commands.parser import Parser
from titan_launch.core.terminal import counted, say, say_data

if TYPE_CHECKING:
    from titan_launch.inference.conversation import Answer
    from titan_launch.inference.generation import TokenSequence

_NEW_TOKENS = 1024
"""Default of `--max-new-tokens`. If the model's longest sequence leaves fewer tokens, the default is their number."""

_RESET, _QUIT = "/reset", "/quit"
"""Lines that are not messages: the first begins a new conversation, the second ends the chat."""


def add_arguments(parser: Parser) -> None:
    parser.usage = "titan-launch chat SOURCE [--system TEXT] [options]"
    parser.epilog = (
        f"Each line of the standard input is a message. {_RESET} begins a new conversation. {_QUIT}, or the end of the "
        "input (Ctrl-D),\nends the chat. On a terminal, Ctrl-C stops an answer, and a second Ctrl-C ends the chat.\n\n"
        'example:\n  titan-launch chat outputs/assistant --system "Be brief."'
    )
    language_model.add_model(parser)
    language_model.add_chat(parser)
    most = f"largest number of tokens in an answer (default: {_NEW_TOKENS}, or fewer if the model has no room for more)"
    stop = "text that ends an answer, and is not printed; may be given several times"
    language_model.add_sampling(parser, most, stop)


def run(arguments: Namespace) -> int:
    """Answer each line of the standard input. Answers go to the standard output, and speeds, notes and errors to the
    standard error. Return 0, or 130 after Ctrl-C."""
    language_model.check_sampling(arguments)
    model = language_model.load_model(arguments)

    from titan_launch.inference.conversation import Conversation
    from titan_launch.inference.generation import token_sequence

    sampling, generator = language_model.sampling_of(arguments, model)
    most, is_terminal = arguments.max_new_tokens or _NEW_TOKENS, sys.stdin.isatty()
    if is_terminal:
        say(f"{_RESET} begins a new conversation; {_QUIT} or Ctrl-D ends the chat; Ctrl-C stops an answer", sys.stderr)
    with token_sequence(model.module) as sequence:
        conversation = Conversation(model, sequence, arguments.system)

        def answer_line(line: str) -> None:
            if line == _RESET:
                conversation.reset()
            elif line.strip():
                answer = conversation.answer(line, most, sampling, generator, arguments.stop)
                _say(answer, sequence, is_terminal)
                if answer.is_cut:
                    _say_limit(answer, most, model.max_tokens)

        lines = takewhile(lambda line: line != _QUIT, language_model.typed_lines())
        return language_model.answer_each(lines, answer_line, is_terminal)


def _say(answer: Answer, sequence: TokenSequence, is_terminal: bool) -> None:
    """Print an answer while it is generated, and then the speed."""
    start = time.perf_counter()
    with closing(answer.pieces), _first_interrupt_noted(is_terminal) as is_interrupted:
        for piece in answer.pieces:
            say_data(piece, end="", flush=True)
            if is_interrupted():
                break
    seconds = time.perf_counter() - start
    say(flush=True)
    language_model.say_speed(answer.num_tokens, sequence.num_kept, answer.stream.num_tokens, seconds)


def _say_limit(answer: Answer, most: int, longest: int) -> None:
    if answer.max_new_tokens < most:
        reason = f"the model takes at most {longest} tokens; type {_RESET} to begin a new conversation"
    else:
        reason = "increase --max-new-tokens to allow longer answers"
    say(f"note: the answer was cut after {counted(answer.max_new_tokens, 'token')}: {reason}", sys.stderr)


@contextmanager
def _first_interrupt_noted(is_terminal: bool) -> Iterator[Callable[[], bool]]:
    """Yield a function that returns True after the first Ctrl-C in the `with` block.

    On a terminal, the first Ctrl-C raises no error, so that it does not interrupt the model within a forward. The
    second Ctrl-C raises KeyboardInterrupt. Without a terminal, the first Ctrl-C raises KeyboardInterrupt.
    """
    noted: list[int] = []

    def note(number: int, frame: object) -> None:
        if noted or not is_terminal:
            raise KeyboardInterrupt
        noted.append(number)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: bool(noted)
    finally:
        signal.signal(signal.SIGINT, before)
