"""The command-line parser that all commands share, and the loading of a job without torch."""

from __future__ import annotations

import math
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from titan_launch.config.job import JobConfig
from titan_launch.config.loading.load import LoadedJob, load_job
from titan_launch.config.rules import RULES, Rule
from titan_launch.config.sections.checkpoint import LOAD_KEYWORDS
from titan_launch.core.errors import ConfigError, Problem, UserError, did_you_mean
from titan_launch.core.import_string import refuse_imports_from
from titan_launch.core.patches import without_garbage_collection
from titan_launch.core.terminal import say, shortened
from titan_launch.plan.hardware import Kernels, planned_device_exists
from titan_launch.plan.layout import Layout, plan_layout, with_global_batch_size

if TYPE_CHECKING:
    from titan_launch.plan.memory.recordings import Recorder, Recordings

OVERRIDES = """\
keys of the job:
  --section.key=value   set any key of the job file, such as --training.steps=20.
                        Values are TOML. Items of lists are counted from 0:
                        --precision.rules.0.param_dtype=float32
                        docs/reference/job_file.md lists all keys."""


class Parser(ArgumentParser):
    """An argument parser that also collects overrides of the job, and raises UserError for bad arguments."""

    def __init__(self, **options: Any):
        super().__init__(allow_abbrev=False, formatter_class=RawDescriptionHelpFormatter, **options)
        self.key_options: dict[str, str] = {}
        """For each option that sets a key of the job, the override of this key (`--device`: `--planner.device`)."""

    @property
    def options(self) -> set[str]:
        """The options of the command, without `--help`."""
        return {*self._option_string_actions} - {"-h", "--help"}

    def add_job(self, example: str) -> None:
        """Add `--config`, and describe the overrides below the options. `example` is a complete command."""
        self.usage = f"{self.prog} --config JOB.toml [options] [--section.key=value ...]"
        self.epilog = f"{OVERRIDES}\n\nexample:\n  {example}"
        text = "job file, config.json in the folder of an earlier run, or name of a config of the package (required)"
        self.add_argument("--config", required=True, metavar="JOB.toml", help=text)

    def parse(
        self, args: Sequence[str], commands_with: Callable[[str], Sequence[str]] = lambda option: ()
    ) -> Namespace:
        """Return a namespace with the value of each option. The namespace also has `overrides`, a list of the arguments
        `--section.key=value`, and `key_options` of this parser. `commands_with`: function that returns the commands
        that have a given option; the error for an unknown option names them. Raises UserError for bad arguments, and
        SystemExit for `--help`.

        Overrides are not given to argparse, because argparse cannot tell which value belongs to an override. Options
        may have underscores instead of hyphens, as in torchrun.
        """
        options: list[str] = []
        overrides: list[str] = []
        rest = list(args)
        while rest:
            words = [rest.pop(0)]
            name, equals, value = words[0].partition("=")
            option = name.replace("_", "-")
            action = self._option_string_actions.get(option)
            if not equals and name.startswith("--") and (action is None or action.nargs != 0):
                words += [value := rest.pop(0)] if rest and not rest[0].startswith("--") else []
            if not name.startswith("-") and self._get_positional_actions():
                options += words
            elif action is None:
                is_key = "." in name or name.removeprefix("--") in (*JobConfig.model_fields, "extends")
                if "--config" not in self._option_string_actions or (name.startswith("-") and not is_key):
                    self._refuse_unknown(name, commands_with)
                overrides += words
            elif action.nargs == 0:
                options.append(option + words[0].removeprefix(name))
            elif not value:
                self.error(f"{option} needs a value")
            elif option in self.key_options:
                overrides += [option + words[0].removeprefix(name), *words[1:]]
            else:
                options.append(f"{option}={value}")
        return self.parse_args(options, Namespace(overrides=overrides, key_options=self.key_options))

    def error(self, message: str) -> NoReturn:
        """Raise UserError. (Without this method, argparse would print its usage text and end the process.)"""
        if message.startswith("unrecognized arguments") and "--out" in self._option_string_actions:
            message += "; the option --out names the output"
        raise UserError(f"error: {message.removeprefix('argument ')} (see {self.prog} --help)")

    def _refuse_unknown(self, name: str, commands_with: Callable[[str], Sequence[str]]) -> NoReturn:
        from titan_launch.config.loading.validation_errors import key_without_its_section

        option = name.replace("_", "-")
        if remedy := key_without_its_section(name.removeprefix("--").replace("-", "_")):
            hint = f"; {remedy}"
        elif commands := commands_with(option):
            hint = f"; it is an option of {' and '.join(', '.join(commands).rsplit(', ', 1))}"
        else:
            hint = did_you_mean(option, [*self.options, *(f"--{section}" for section in JobConfig.model_fields)])
        self.error(f"unknown option {shortened(name, 200)}{hint}")


_MOST_DIGITS = 18


def at_least(minimum: int, most: int | None = None) -> Callable[[str], int]:
    """Return an argparse type for whole numbers of at least `minimum`, and at most `most`."""
    wanted = f"of at least {minimum}" if most is None else f"from {minimum} to {most}"

    def parse(text: str) -> int:
        is_number = text.isdecimal() and len(text) <= _MOST_DIGITS
        if not is_number or int(text) < minimum or (most is not None and int(text) > most):
            length = f", with at most {_MOST_DIGITS} digits" if most is None and len(text) > _MOST_DIGITS else ""
            raise ArgumentTypeError(f'must be a whole number {wanted}{length}, not "{shortened(text)}"')
        return int(text)

    return parse


def number_from(minimum: float, maximum: float = math.inf) -> Callable[[str], float]:
    """Return an argparse type for finite numbers from `minimum` to `maximum`."""

    def parse(text: str) -> float:
        with suppress(ValueError):
            if minimum <= float(text) <= maximum and math.isfinite(float(text)):
                return float(text)
        wanted = f"from {minimum:g} to {maximum:g}" if math.isfinite(maximum) else f"of at least {minimum:g}"
        raise ArgumentTypeError(f'must be a number {wanted}, not "{shortened(text)}"')

    return parse


def add_source(parser: Parser) -> None:
    """Add the positional argument SOURCE, which names a trained model, and the options that choose its weights."""
    text = "run folder, Hugging Face folder, or folder that `import` or `export --format plain` wrote"
    parser.add_argument("source", metavar="SOURCE", help=text)
    text = "checkpoint of this step (default: the newest; if validation.patience has ended the run, the best)"
    parser.add_argument("--step", type=at_least(0), metavar="N", help=text)
    text = "use the moving average (`[ema]`) in place of each parameter that has one"
    parser.add_argument("--ema", action="store_true", help=text)
    text = "folder of the parameters that the checkpoint omits (default: model.weights of the run)"
    parser.add_argument("--base", type=Path, metavar="FOLDER", help=text)


def load(arguments: Namespace, world_size: int | None, more_rules: Sequence[Rule] = ()) -> LoadedJob:
    """Return the checked job. With a world size, also check that the parallelism degrees match this number of ranks,
    and that the global batch can be divided among them. After this call, Python refuses imports from the folders of
    runs, checkpoints and weights that the job names (see `refuse_imports_from`).

    `more_rules`: further rules to check. Raises UserError with all problems.
    """

    def layout_rule(config: JobConfig) -> Iterator[Problem]:
        try:
            if world_size is not None:
                plan_layout(config.parallelism, config.training, world_size)
        except ConfigError as error:
            yield from error.problems

    rules = (*RULES, planned_device_exists, layout_rule, *more_rules)
    loaded = load_job(arguments.config, arguments.overrides, rules, arguments.key_options)
    config = loaded.config
    paths = (config.checkpoint.load, config.checkpoint.initial_load_path, config.model.weights, config.model.path)
    named = [Path(path) for path in paths if isinstance(path, str) and path not in LOAD_KEYWORDS]
    refuse_imports_from([loaded.config.job.run_folder, *named], Path(loaded.config.job.dump_folder))
    return loaded


def check_weights(loaded: LoadedJob) -> None:
    """Raise UserError if `model.weights` does not hold the tensors of the model. Values are not read.

    Nothing is checked if `model.weights` is not set, or if the run will resume, because a resumed run loads a
    checkpoint. If the model is not one of this package, only the files are checked, not the names and shapes of
    tensors. The same holds for a model of this package that has no recording, if torch is not installed.
    """
    config = loaded.config
    if config.model.weights is None:
        return
    from titan_launch.train.run_folder.folder import resumes

    if resumes(config, config.checkpoint.load):
        return
    from titan_launch.models.weights.folder import find_weights, open_weights
    from titan_launch.plan.memory.recordings import recorded_inventory

    try:
        folder = open_weights(config.model)
        if config.model.is_of_package:
            with suppress(NoTorchError):
                find_weights(config.model, recorded_inventory(config, _recorder(config)), folder=folder)
    except ConfigError as error:
        raise UserError(loaded.provenance.describe(error.problems)) from None


class NoTorchError(UserError):
    """Error for a plan that needs torch, if torch is not installed."""


@contextmanager
def torch_needed(config: JobConfig) -> Iterator[None]:
    """Raise NoTorchError if the `with` block imports torch, and torch is not installed. If torch is not imported yet,
    disable garbage collection in the block (`without_garbage_collection`)."""
    try:
        with nullcontext() if "torch" in sys.modules else without_garbage_collection():
            yield
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise NoTorchError(f"this plan of the model {config.model.name} needs torch: pip install torch") from None


def _recorder(config: JobConfig) -> Callable[[], Recorder]:
    """Return a function that imports torch and returns a recorder. It raises NoTorchError if torch is not installed."""

    def recorder() -> Recorder:
        with torch_needed(config):
            from titan_launch.trace.recorder import TorchRecorder
        return TorchRecorder()

    return recorder


def recordings_of(config: JobConfig, layout: Layout, kernels: Kernels, is_silent: bool = False) -> Recordings:
    """Return the recordings of a job. A recording that is not in the cache is made with torch when it is first needed.
    Unless `is_silent` is True, a line on standard error is printed before microbatches are recorded."""
    from titan_launch.plan.memory.recordings import Recordings

    def tell(text: str) -> None:
        if not is_silent:
            say(text, file=sys.stderr, flush=True)

    return Recordings(config, layout, kernels, _recorder(config), tell)


def load_to_train(arguments: Namespace, world_size: int | None, more_rules: Sequence[Rule] = ()) -> LoadedJob:
    """Return the checked job. If its run folder exists, also check that the run may start in that folder. Raises
    UserError with all problems. The arguments are those of `load`.

    The check of the run folder compares global batch sizes. If neither the job sets the size nor `world_size` is given,
    the size is unknown, and the run folder is not checked.
    """
    loaded = load(arguments, world_size, more_rules)
    config = loaded.config
    if not config.job.run_folder.exists():
        return loaded
    from titan_launch.train.run_folder.folder import check_earlier_run

    if world_size is not None:
        config = with_global_batch_size(config, plan_layout(config.parallelism, config.training, world_size))
    elif config.training.global_batch_size is None:
        return loaded
    try:
        with suppress(OSError):  # a run itself reports a folder that cannot be read
            check_earlier_run(config, config.checkpoint.load)
    except ConfigError as error:
        raise UserError(loaded.provenance.describe(error.problems)) from None
    return loaded
