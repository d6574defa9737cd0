"""The command `init`: a commented job file, from a recipe or from a config of the package."""

from __future__ import annotations

import re
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from shlex import quote
from tempfile import TemporaryDirectory

from titan_launch.commands.parser import NoTorchError, Parser, at_least, recordings_of
from titan_launch.config.job import JobConfig
from titan_launch.config.loading.job_files import carried_configs
from titan_launch.config.loading.load import load_job
from titan_launch.core.errors import UserError, did_you_mean
from titan_launch.core.process import OK
from titan_launch.core.terminal import one_line, say
from titan_launch.launch.options import PROCESSES_WITHOUT_GPU, find_gpus
from titan_launch.plan.hardware import find_device, unknown_device
from titan_launch.recipes.facts import look_at_model
from titan_launch.recipes.recipes import RECIPES, Inputs, find_data, head_of, tables_of
from titan_launch.recipes.sizes import Machine, Sizes, planned_sizes
from titan_launch.recipes.writing import check_new, job_name, job_text, print_open_problems, write_new

_NO_GPU = (
    "Sizes: small ones, since this machine has no GPU. `titan-launch plan --device h100-80gb` shows what fits a GPU.",
    "`titan-launch init` with the options --device and --world-size writes the sizes for that GPU.",
)

_NO_MODEL = "Sizes: small ones, since no model is named. `titan-launch init` with --model chooses them for the GPU."


def add_arguments(parser: Parser) -> None:
    parser.usage = "titan-launch init NAME [--out FILE] [options]"
    parser.epilog = "example:\n  titan-launch init sft --out job.toml --model Llama-3.2-1B-Instruct --data chats.jsonl"
    parser.add_argument("name", metavar="NAME", nargs="?", help="recipe, or config of the package: see --list")
    text = "job file to write, which must not exist (default: NAME.toml)"
    parser.add_argument("--out", metavar="FILE", help=text)
    parser.add_argument("--list", action="store_true", help="list the recipes, and the configs of the package")
    parser.add_argument("--model", metavar="FOLDER", help="Hugging Face folder with weights and tokenizer")
    parser.add_argument("--data", metavar="PATH", help="file, folder or glob; its content decides data.kind")
    text = "GPU to choose sizes for, such as h100-80gb (default: the GPU of this machine)"
    parser.add_argument("--device", metavar="NAME", help=text)
    text = "ranks to choose sizes for (default: the number of GPUs of this machine, or 1 with --device)"
    parser.add_argument("--world-size", type=at_least(1), metavar="N", help=text)


def run(arguments: Namespace) -> int:
    """Write the job file, and print what to do next. With `--list`, only print the recipes and configs."""
    if arguments.list:
        say("\n".join(_listing()))
        return OK
    name = arguments.name
    if name is None:
        raise UserError(f"error: init needs the name of a recipe: {', '.join(RECIPES)} (titan-launch init --list)")
    if name not in RECIPES and name not in carried_configs():
        hint = did_you_mean(name, [*RECIPES, *carried_configs()])
        raise UserError(f'error: init has no recipe or config "{name}"{hint}; titan-launch init --list shows all')
    given = [option for option in ("model", "data", "device", "world_size") if getattr(arguments, option) is not None]
    if given and name not in RECIPES:
        reason = f'has no effect on the config "{name}", which init only copies; remove this option, or choose a recipe'
        raise UserError(f"error: --{given[0].replace('_', '-')} {reason}: {', '.join(RECIPES)}")
    file = arguments.out or f"{Path(name).name}.toml"
    check_new(file, "init")
    if name in RECIPES:
        write_new(file, _recipe(arguments, file))
        say(one_line(f"wrote {file}: {RECIPES[name].title}"))
        print_open_problems(file)
    else:
        write_new(file, _copy(name, file))
        say(one_line(f"wrote {file}: a copy of the config {name}"))
    say(one_line(f"next: titan-launch launch --config {quote(file)}"))
    return OK


def _listing() -> list[str]:
    width = max(map(len, [*RECIPES, *carried_configs()]))
    lines = ["recipes (titan-launch init NAME [--out FILE] [--model FOLDER] [--data PATH]):"]
    lines += [f"  {name:{width}}  {recipe.title}" for name, recipe in RECIPES.items()]
    lines += ["", "configs of the package (init copies them; --config also takes their names):"]
    return lines + [f"  {name:{width}}  {_first_sentence(path)}" for name, path in carried_configs().items()]


def _first_sentence(path: Path) -> str:
    comments = re.findall(r"^# (.*)", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    sentence = re.match(r".*?\.(?= |$)", " ".join(comments))
    return sentence[0].rstrip(".") if sentence else ""


def _copy(name: str, file: str) -> str:
    """Return the text of the config `name` of the package, changed so that it works as the job file `file`.

    In the text, `extends` names configs of the package instead of files, and the commands in comments name `file`. The
    line `#:schema`, and comment lines that name files of `scripts/`, are dropped.
    """
    path = carried_configs()[name]
    by_path = {carried.resolve(): other for other, carried in carried_configs().items()}

    def named(match: re.Match[str]) -> str:
        target = (path.parent / match[1]).resolve()
        return f'"{by_path[target]}"'

    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("#:schema") or (line.startswith("#") and "scripts/" in line):
            continue
        if line.startswith("extends"):
            line = re.sub(r'"([^"]+)"', named, line)
        lines.append(line.replace(f"configs/{name}.toml", quote(file)) if line.startswith("#") else line)
    return "\n".join(lines) + "\n"


def _recipe(arguments: Namespace, file: str) -> str:
    """Return the text of a job file from a recipe. If sizes can be planned for a GPU, a first text with small sizes is
    made, and its job is planned. The result is a second text with the planned sizes."""
    name = arguments.name
    model = None if arguments.model is None else look_at_model(arguments.model)
    data, machine = find_data(name, arguments.data), _machine(arguments)
    inputs = Inputs(
        name=job_name(Path(file).stem),
        model=model,
        data=data,
        ranks=machine.ranks if machine else arguments.world_size or PROCESSES_WITHOUT_GPU,
        device=arguments.device,
        sizes=Sizes(RECIPES[name].small_batch, "none", _NO_GPU),
    )
    if machine is not None and (model is not None or not RECIPES[name].needs_model):
        with TemporaryDirectory() as folder:
            draft = Path(folder, "draft.toml")
            draft.write_text(job_text((), tables_of(name, inputs)), encoding="utf-8")
            config = load_job(str(draft), rules=()).config
        inputs = replace(inputs, sizes=_sizes(config, machine))
    elif machine is not None:
        inputs = replace(inputs, sizes=replace(inputs.sizes, comments=(_NO_MODEL,)))
    return job_text(head_of(name, inputs, file), tables_of(name, inputs))


def _sizes(config: JobConfig, machine: Machine) -> Sizes:
    """Return the planned sizes for the machine. If the plan needs torch, and torch is not installed, return the small
    sizes of the recipe."""
    try:
        return planned_sizes(config, machine, recordings_of)
    except NoTorchError:
        local_batch_size = config.training.local_batch_size
        assert local_batch_size != "auto", "recipes begin with a number"
        how = f"`titan-launch plan --world-size {machine.ranks}` shows what fits."
        return Sizes(local_batch_size, "none", ("Sizes: small ones, since torch is not installed.", how))


def _machine(arguments: Namespace) -> Machine | None:
    """Return the GPUs to choose sizes for. Return None if `--device` is not set and this machine has no GPU. Raises
    UserError for an unknown `--device`."""
    if arguments.device is not None:
        if reason := unknown_device(arguments.device):
            raise UserError(f"error: --device {arguments.device}: {reason}")
        return Machine(arguments.world_size or 1, arguments.device, None)
    gpus = find_gpus()
    if not gpus:
        return None
    name, memory_gib = gpus[0]
    known = find_device(name)
    return Machine(arguments.world_size or len(gpus), name, known.memory_gib if known else memory_gib)
