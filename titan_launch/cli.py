"""The entry point of all commands. Errors in a job file are reported before torch is imported."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Sequence
from importlib import import_module
from keyword import iskeyword
from types import ModuleType

from titan_launch import __version__
from titan_launch.commands.parser import OVERRIDES, Parser
from titan_launch.core.errors import ConfigError, RunError, UserError, did_you_mean
from titan_launch.core.process import BAD_INPUT, FAILED, OK, announce_once, wrong_path
from titan_launch.core.terminal import escape_warnings

COMMANDS = {
    "train": "train as one of the ranks that torchrun started, or alone (the default command)",
    "init": "write a commented job file from a recipe: pre-training, fine-tuning, LoRA, DPO, images",
    "migrate": "convert a job file of TorchTitan, and list the keys that could not be converted",
    "check": "check the job file and, if it exists, its run folder, without torch or a GPU",
    "plan": "predict memory, communication, step time and the dtypes of modules, without a GPU",
    "measure-device": "measure the speeds of this machine, from which plan predicts step times",
    "prove": "compare training in the job's layout with training in one process, at a small size on the CPU",
    "prepare": "tokenize text into memory-mapped files, and train tokenizers",
    "data": "describe the data of the job, and show its first samples, without a GPU",
    "import": "copy a Hugging Face folder, with this package's tensor names, and write a job that starts from the copy",
    "export": "write the weights of a run in the format of Hugging Face, or as one file",
    "generate": "continue a text with a trained model, and print it as it is generated",
    "chat": "answer messages with a trained model, turn by turn, by its chat template",
    "evaluate": "measure a trained model on tasks of lm-evaluation-harness",
    "runs": "list the runs of a folder with their state, step, loss and speed",
    "report": "write an HTML page about a run: loss, speed, time, memory, precision, restarts and checkpoints",
    "compare": "compare runs: configuration, loss, speed and memory, as text, JSON or an HTML page",
    "launch": "check the job file, then train with torchrun: one rank per GPU, or 2 ranks without a GPU",
}
"""The commands, each with a description. `command_module` returns the module of a command."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. Return its exit status: 0 for success, 1 for a failure, 2 for bad input, or another status such as
    130 after Ctrl-C. Many commands end the process instead of returning."""
    args = list(sys.argv[1:] if argv is None else argv)
    escape_warnings()
    try:
        try:
            arguments = parse_arguments(args or ["--help"])
        except SystemExit:  # argparse has printed the help or the version
            return OK if args else BAD_INPUT
        return int(arguments.run(arguments))
    except ConfigError as error:  # such as the error of a tokenizer in a command without a job
        announce_once(f"error: {error}")
        return BAD_INPUT
    except UserError as error:
        announce_once(str(error))
        return BAD_INPUT
    except RunError as error:  # such as: an object store does not answer
        announce_once(f"error: {error}")
        return FAILED
    except BrokenPipeError:  # the reader of the output has ended, such as `| head`
        return FAILED
    except OSError as error:
        if (text := wrong_path(error)) is None:
            raise
        announce_once(text)
        return BAD_INPUT


def parse_arguments(args: Sequence[str]) -> Namespace:
    """Return a namespace with the options of a command. Its attribute `overrides` has the overrides of the job, and
    `run` is the function that runs the command.

    `args`: the name of the command (default: `train`) and its arguments; not empty. Raises SystemExit for `--help` and
    `--version`, and UserError for bad arguments.
    """
    if args[0] in ("-h", "--help", "--version"):
        _top_parser().parse_args(args[:1])
    name, *rest = ["train", *args] if args[0].startswith("-") else args
    if name not in COMMANDS:
        known = f"the commands are {', '.join(COMMANDS)}{did_you_mean(name, COMMANDS)}"
        raise UserError(f'error: unknown command "{name}"; {known} (see titan-launch --help)')
    arguments = _parser(name).parse(rest, _commands_with)  # builds one parser (1 ms), and the others only for an error
    arguments.run = command_module(name).run
    return arguments


def _parser(name: str) -> Parser:
    """Return the parser of a command."""
    parser = Parser(prog=f"titan-launch {name}", description=COMMANDS[name])
    command_module(name).add_arguments(parser)
    return parser


def _commands_with(option: str) -> list[str]:
    """Return the commands that have an option, such as `--world-size`."""
    return [name for name in COMMANDS if option in _parser(name).options]


def command_module(name: str) -> ModuleType:
    """Return the module of a command. It has the functions `add_arguments(parser)` and `run(arguments)`. `run` returns
    the exit status, or ends the process. The module of `measure-device` is `measure_device`. The module of `import` is
    `import_`, because `import` is a Python keyword."""
    return import_module(f"titan_launch.commands.{name.replace('-', '_')}{'_' * iskeyword(name)}")


def _top_parser() -> Parser:
    """Return the parser for `--help` and `--version` without a command. Its help lists the commands."""
    epilog = f"{OVERRIDES}\n\ntitan-launch COMMAND --help describes the options of a command."
    parser = Parser(prog="titan-launch", usage="titan-launch [COMMAND] --config JOB.toml [options]", epilog=epilog)
    parser.add_argument("--version", action="version", version=f"titan-launch {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", prog="titan-launch")
    for name, text in COMMANDS.items():
        commands.add_parser(name, help=text)
    return parser
