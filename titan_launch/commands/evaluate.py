"""The command `evaluate`: tasks of lm-evaluation-harness on a trained model."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from titan_launch.commands.language_model import add_chat, add_model, check_chat, load_model
from titan_launch.commands.parser import Parser, at_least
from titan_launch.core.errors import UserError
from titan_launch.core.files import check_output, write_output
from titan_launch.core.packages import is_installed, not_installed
from titan_launch.core.process import OK
from titan_launch.core.terminal import say


def add_arguments(parser: Parser) -> None:
    parser.usage = "titan-launch evaluate SOURCE --tasks NAME[,NAME ...] [options]"
    parser.epilog = "example:\n  titan-launch evaluate outputs/llama --tasks hellaswag,arc_easy --limit 100"
    add_model(parser)
    group = parser.add_argument_group("evaluation")
    group.add_argument("--tasks", required=True, metavar="NAMES", help="comma-separated tasks or groups (required)")
    group.add_argument("--limit", type=at_least(1), metavar="N", help="number of documents per task (default: all)")
    text = "examples in each prompt (default: as many as the task sets)"
    group.add_argument("--num-fewshot", type=at_least(0), metavar="N", help=text)
    text = "sequences per forward (default: 8)"
    group.add_argument("--batch-size", type=at_least(1), default=8, metavar="N", help=text)
    group.add_argument("--include-path", metavar="FOLDER", type=Path, help="folder with YAML files of your own tasks")
    group.add_argument("--out", metavar="FILE", type=Path, help="also write all results as JSON")
    add_chat(parser, "send each document as a user's message, in the chat template of the model")
    text = "with --chat: write the few-shot examples into the user's message, not as separate turns"
    parser.add_argument("--single-turn", action="store_true", help=text)


def run(arguments: Namespace) -> int:
    """Evaluate the model, write the file of `--out`, and print the results as tables. Raises UserError for wrong
    options, if lm-evaluation-harness is not installed, or if the model cannot be loaded."""
    tasks = [name.strip() for name in arguments.tasks.split(",") if name.strip()]
    if not tasks:
        raise UserError("error: --tasks names no task; write --tasks hellaswag,arc_easy")
    if not is_installed("lm_eval"):
        raise UserError(f"error: evaluate {not_installed('lm_eval')}")
    include, out = arguments.include_path, arguments.out
    if include is not None and not include.is_dir():
        raise UserError(f"error: --include-path {include}: there is no such folder; name the folder of your tasks")
    if out is not None:
        check_output(out)
    check_chat(arguments, "single_turn")
    model = load_model(arguments)

    from titan_launch.inference.evaluation import ChatForm, EvaluatedModel, as_json, evaluate, tables

    chat = ChatForm(arguments.system, not arguments.single_turn) if arguments.chat else None
    evaluated = EvaluatedModel(model, arguments.batch_size)
    results = evaluate(evaluated, tasks, arguments.limit, arguments.num_fewshot, include, chat)
    try:
        if out is not None:
            write_output(out, as_json(results))
    finally:  # the results are not lost if the file cannot be written
        for table in tables(results):
            say(table)
    return OK
