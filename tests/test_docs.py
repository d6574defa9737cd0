"""Docs describe the present: TOML blocks pass the check, commands are run or parsed, links and messages exist."""

from __future__ import annotations

import importlib
import json
import os
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, get_args

import pytest
import tomli
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.config.loading.hints import OPTION, denied_keys, keys, options_of, strings, takes
from tests.distributed import run_command, run_ranks
from tests.models.huggingface_folders import write_config
from tests.models.parity import random_model, samples
from tests.packages import add_empty_packages
from tests.sampling import rest_is_slow
from tests.test_layering import RANKS
from tests.train.jobs import read_metrics, this_rank
from titan_launch.checkpoint.index import read_index
from titan_launch.cli import COMMANDS, main, parse_arguments
from titan_launch.commands.parser import check_weights, load
from titan_launch.config.loading.load import load_job
from titan_launch.config.sections.loss import FUNCTION_LOSS, LOSSES, MODEL_LOSS
from titan_launch.config.sections.parallelism import ActivationCheckpointConfig
from titan_launch.config.sections.tokenizer import TokenizerConfig
from titan_launch.config.sections.training import ACCUMULATION_MODES
from titan_launch.core.torch_release import CAN_SHARE_UNITS, FREES_EARLIER, KEEPS_WORKSPACES, MIXES_DTYPES_IN_UNIT
from titan_launch.data.sources import build_source
from titan_launch.data.tokenizers import build_tokenizer, train_tokenizer
from titan_launch.inference.language_model import load_language_model
from titan_launch.inference.saved_model import open_saved_model
from titan_launch.launch.options import LAUNCH_OPTIONS, plan_processes
from titan_launch.metrics.tags import markdown_table
from titan_launch.models.weights.folder import WeightsFolder
from titan_launch.phantom_gpu.__main__ import build_parser as build_phantom_parser
from titan_launch.plan.layout import plan_layout
from titan_launch.train.build import build_run
from titan_launch.train.loop import fit

REPO = Path(__file__).parent.parent
PAGES = [
    *(REPO / name for name in ("README.md", "CONTRIBUTING.md", "AGENTS.md")),
    *sorted((REPO / "docs").rglob("*.md")),
]
CONFIGS = sorted((REPO / "configs").rglob("*.toml"))
NO_EARLIER_RUN = "--job.dump_folder=no_such_folder"
"""Override of the run folder: `check` must not find runs in the user's `outputs/`."""


WHOLE_WAY, FINE_TUNING, YOUR_MODEL = "from_text_to_text.md", "fine_tuning.md", "your_model.md"
PROOF, SEARCH = "how_to/prove.md", "how_to/search_layouts.md"
"""The pages whose commands are run in order, by tests of their own."""
FIRST_RUN = "install_and_first_run.md"
"""The page whose job is `job.toml` in the commands that no test runs in order."""


def blocks(language: str) -> Iterator[tuple[str, str]]:
    for page in PAGES:
        found = re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), flags=re.DOTALL | re.MULTILINE)
        yield from ((f"{page.relative_to(REPO)}-{number}", block) for number, block in enumerate(found))


def commands() -> list[str]:
    run_in_order = (WHOLE_WAY, FINE_TUNING, YOUR_MODEL, PROOF, SEARCH)
    in_docs = [
        line
        for name, block in blocks("sh")
        if not any(page in name for page in run_in_order)
        for line in block.splitlines()
    ]
    starts = ("scripts/", "torchrun ", "python -m ", "titan-launch ", "CONFIG=")
    in_configs = [
        line.removeprefix("#").strip()
        for path in CONFIGS
        for line in path.read_text().splitlines()
        if line.removeprefix("#").strip().startswith(starts)
    ]
    return sorted({line.partition("  #")[0].strip() for line in [*in_docs, *in_configs] if line.strip()})


@pytest.fixture(autouse=True)
def in_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPO)


@pytest.mark.parametrize(("name", "block"), list(blocks("toml")))
def test_every_toml_block_of_the_docs_passes_the_check(
    name: str, block: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(REPO / "configs", tmp_path, dirs_exist_ok=True)  # what a block may extend
    if weights := re.search(r'^(?:weights|teacher) = "(.*)"', block, flags=re.MULTILINE):
        pytest.importorskip("transformers")
        random_model("Llama 3.1, RoPE scaling", tmp_path / weights[1], vocab_size=320)
        monkeypatch.chdir(tmp_path)
    if adapter := re.search(r'^adapter = "(.*?)"', block, flags=re.MULTILINE):
        (tmp_path / adapter[1]).mkdir(parents=True)
        table = {"peft_type": "LORA", "r": 16, "lora_alpha": 32}
        (tmp_path / adapter[1] / "adapter_config.json").write_text(json.dumps(table))
    if path := re.search(r'^name = "huggingface"\npath = "(.*?)"', block, flags=re.MULTILINE):
        write_config(tmp_path / path[1], "llama", vocab_size=320, max_position_embeddings=2048)
        monkeypatch.chdir(tmp_path)
    if 'kind = "tokens"' in block:
        pytest.importorskip("tokenizers")
        monkeypatch.chdir(tmp_path)
        train_tokenizer(["text"], 300, tmp_path / "tokens/tokenizer")
        for path in re.findall(r'^path = "(tokens/.*)"', block, flags=re.MULTILINE):
            (tmp_path / path).mkdir(exist_ok=True)
    if re.search(r'^path = "(photos|shards)/', block, flags=re.MULTILINE):
        for folder in ("photos/train/cat", "photos/val/cat", "shards"):
            (tmp_path / folder).mkdir(parents=True)
        for number in range(2):
            (tmp_path / f"shards/train-00{number}.tar").touch()
        monkeypatch.chdir(tmp_path)
    if re.search(r'^kind = "(chat|preferences|unpaired_preferences|classification)"', block, flags=re.MULTILINE):
        pytest.importorskip("tokenizers")
        train_tokenizer(["text"], 300, tmp_path / "tokenizer")
        shutil.copytree(tmp_path / "tokenizer", tmp_path / "Llama-3.2-1B-Instruct", dirs_exist_ok=True)
    if re.search(r'^path = "corpus', block, flags=re.MULTILINE):
        (tmp_path / "corpus").mkdir()
        for suffix in ("jsonl", "parquet"):
            (tmp_path / f"corpus/00.{suffix}").touch()
        monkeypatch.chdir(tmp_path)
    add_empty_packages(tmp_path / "packages", monkeypatch)
    job = tmp_path / "job.toml"
    job.write_text(block)
    command = ["check", "--config", str(job), "--world-size", "2", NO_EARLIER_RUN]
    assert main(command) == 0, capsys.readouterr().err


def test_the_data_source_of_the_docs_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    section = (REPO / "docs/how_to/streams.md").read_text().partition("## Your own source")[2]
    code, job = re.findall(r"^```(?:python\n# my_data.py|toml)\n(.*?)^```", section, re.DOTALL | re.MULTILINE)[:2]
    (tmp_path / "my_data.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "job.toml").write_text(job)
    source = build_source(load_job("job.toml").config.data, build_tokenizer(TokenizerConfig()), 8)
    assert len(source) == 1000
    assert [tensor.tolist() for tensor in source[2]] == [list(range(2, 10)), list(range(3, 11))]


@pytest.mark.slow
def test_the_way_from_text_to_text(tmp_path: Path) -> None:
    """Run the page's commands in order on the text that the page names. Ctrl-C stops the first run."""
    pytest.importorskip("tokenizers")
    (tmp_path / "corpus").mkdir()
    for package in ("asyncio", "json"):
        for file in Path(sysconfig.get_paths()["stdlib"], package).glob("*.py"):
            shutil.copy(file, tmp_path / "corpus" / file.name)
    (job,) = (block for name, block in blocks("toml") if WHOLE_WAY in name)
    (tmp_path / "job.toml").write_text(job)
    (prepare,), (data,), (train,), (resume,), (generate,) = (
        [shlex.split(line)[1:] for line in block.splitlines()] for name, block in blocks("sh") if WHOLE_WAY in name
    )
    assert run_command(prepare, tmp_path)[0] == 0
    status, printed, _ = run_command(data, tmp_path)
    assert status == 0 and "640 samples of 128 tokens" in printed

    def launched(arguments: list[str], stop_at: str = "") -> str:
        command = [sys.executable, "-m", "titan_launch", *arguments]
        environment = {**os.environ, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"}
        with subprocess.Popen(
            command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process:
            assert process.stdout is not None
            lines = []
            for line in process.stdout:
                lines.append(line)
                if stop_at and line.startswith(stop_at):
                    process.send_signal(signal.SIGINT)
        assert process.returncode == 0, "".join(lines)
        return "".join(lines)

    stopped = re.search(
        r"^stopped by SIGINT after step (\d+) of 40; a checkpoint of step \1 is saved",
        launched(train, "step  1"),
        re.MULTILINE,
    )
    assert stopped is not None
    resumed = launched(resume)
    assert f"resumed from outputs/writer/checkpoints/step-{stopped[1]}\n" in resumed
    last = re.findall(r"^step 40/40 .* validation loss +([\d.]+)", resumed, re.MULTILINE)
    assert len(last) == 1 and float(last[0]) < 5.5, "the loss begins at 6.9"
    status, printed, reported = run_command(generate, tmp_path)
    assert status == 0 and printed.strip() and "model: outputs/writer, step-40: qwen3" in reported


def test_the_model_of_the_docs_trains(tmp_path: Path) -> None:
    """Run the page's commands in order, with its model and its job. The run prints the lines of the page's header."""
    page = (REPO / "docs/getting_started" / YOUR_MODEL).read_text()
    found = re.findall(r"^```(\w*)\n(.*?)^```", page, flags=re.DOTALL | re.MULTILINE)
    (python, code), (toml, job), (shell, lines), (_, printed) = found[:4]
    assert (python, toml, shell) == ("python", "toml", "sh")
    (tmp_path / "my_model.py").write_text(code)
    (tmp_path / "job.toml").write_text(job)
    plan, train = (shlex.split(line)[1:] for line in lines.splitlines())
    assert run_command(plan, tmp_path)[0] == 0
    small = [f"--data.path={REPO}/titan_launch/config/*/*.py", "--training.steps=1", "--job.device=cpu"]
    status, trained, reported = run_command([*train, *small], tmp_path, environment={"PYTHONPATH": str(REPO)})
    assert status == 0, reported
    names = ("model:", "blocks:", "ranks:", "global batch:", "precision:", "gradient acc", "folder:")
    if MIXES_DTYPES_IN_UNIT:  # such a release needs fewer units
        printed = printed.replace("the 6 FSDP2 units", "the 5 FSDP2 units")
    header = [line for line in printed.splitlines() if line.startswith(names)]
    assert len(header) == len(names) and [line for line in header if line not in trained] == []
    assert train[:3] == ["launch", "--nproc-per-node", "2"]
    wrong = ["train", *train[3:], *small, "--model.args.vocab_size=100"]
    status, _, reported = run_command(wrong, tmp_path)
    (error,) = re.findall("^error: job.toml:5: .*$", page, flags=re.MULTILINE)
    assert status == 2 and error in reported


@pytest.mark.slow
def test_the_proof_of_the_docs_names_the_module_with_the_bug(tmp_path: Path) -> None:
    """Run the page's commands about the user's model. The first prints the page's lines, up to digits of numbers. The
    second proves the model without the bug."""
    page = (REPO / "docs" / PROOF).read_text()
    found = re.findall(r"^```(\w*)\n(.*?)^```", page, flags=re.DOTALL | re.MULTILINE)
    (_, code), (_, job), (_, lines), (_, printed) = found[2:6]
    (tmp_path / "my_model.py").write_text(code)
    (tmp_path / "job.toml").write_text(job)
    wrong, right = (shlex.split(line)[1:] for line in lines.splitlines())
    status, output, _ = run_command(wrong, tmp_path, timeout=300)
    assert status == 1
    finding = output.partition("\n\ntwin:")[0]
    assert re.sub(r"[\d.]+e-\d+|[\d.]+\d", "N", finding) == re.sub(r"[\d.]+e-\d+|[\d.]+\d", "N", printed.rstrip())
    status, output, _ = run_command(right, tmp_path, timeout=300)
    assert status == 0 and output.startswith("layout proven (")
    others = [line for name, block in blocks("sh") if PROOF in name for line in block.splitlines()]
    for line in others:
        assert parse_arguments(shlex.split(line)[1:]).run


HELD_BEST = [
    *("--hold=parallelism.tensor_parallel_degree=1", "--hold=parallelism.context_parallel_degree=1"),
    *("--hold=activation_checkpoint.mode=full", "--hold=loss.chunks=8", "--hold=training.local_batch_size=4"),
    *("--hold=parallelism.data_parallel_replicate_degree=1", "--hold=gradient_accumulation.mode=immediate"),
]
"""Options that hold values of the best job of the page, so that a search takes a tenth of the time."""


@pytest.mark.parametrize("held", rest_is_slow([HELD_BEST, []]), ids=["best", "all"])
def test_the_way_from_a_cluster_to_a_job_file(held: list[str], tmp_path: Path) -> None:
    """Run the commands in order. The printed table is that of the page, or has its first row if values are held. The
    written job fits."""
    page = (REPO / "docs" / SEARCH).read_text()
    (_, lines), (_, printed), *_ = re.findall(r"^```(\w*)\n(.*?)^```", page, flags=re.DOTALL | re.MULTILINE)
    outputs = []
    for line in lines.splitlines():
        arguments = shlex.split(line)[1:]
        more = held if "--search" in arguments else []
        status, output, said = run_command([*arguments, *more], tmp_path, timeout=300)
        assert status == 0, said
        outputs.append(output)
    expected = printed if KEEPS_WORKSPACES else "64 ranks\n\nBest: "  # later releases need less memory
    assert outputs[0].startswith(expected.partition(" The next-best")[0] if held else expected)
    if held and KEEPS_WORKSPACES:
        row, expected_row = (text.splitlines()[5].split() for text in (outputs[0], printed))
        assert row == expected_row
    assert outputs[2].startswith("Fits: ")


CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {% if m.role == 'assistant' %}{% generation %}{{ m.content + eos_token }}"
    "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def write_chat_model(folder: Path) -> None:
    """Write a tiny chat model, chats and a task, with the names of the page."""
    name = "Llama-3.2-1B-Instruct"
    random_model("Llama 3.1, RoPE scaling", folder / name, vocab_size=300, eos_token_id=0)
    train_tokenizer(["user: Say hello. assistant: Hello!"], 300, folder / "tokenizer")
    for file in (folder / "tokenizer").iterdir():
        shutil.copy(file, folder / name)
    (folder / name / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    for subfolder in ("corpus", "tasks"):
        (folder / subfolder).mkdir()
    turns = [("user", "Say hello."), ("assistant", "Hello!")]
    chat = json.dumps({"messages": [{"role": role, "content": content} for role, content in turns]})
    (folder / "corpus/chats.jsonl").write_text(f"{chat}\n" * 40)
    (folder / "tasks/capitals.jsonl").write_text('{"question": "user", "choices": ["Hello!", "x"], "answer": 0}\n')
    (task,) = (block for _, block in blocks("yaml"))
    (folder / "tasks/capitals.yaml").write_text(task.replace(".jsonl }", f".jsonl, cache_dir: {folder}/cache }}"))


def train_here(folder: Path, arguments: list[str]) -> None:
    """Train on this rank what `launch` with these arguments trains."""
    os.chdir(folder)
    started = parse_arguments(arguments)
    with ExitStack() as stack:
        fit(build_run(load_job(started.config, started.overrides).config, this_rank(), stack))


@pytest.mark.slow
def test_the_way_from_a_chat_model_to_a_served_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the commands of the first section in order, and those of the section about `peft`. The first of two runs of
    `launch` is run by ranks of the tests."""
    for library in ("transformers", "tokenizers", "jinja2", "lm_eval"):
        pytest.importorskip(library)
    write_chat_model(tmp_path)
    before = {file: file.read_bytes() for file in (tmp_path / "Llama-3.2-1B-Instruct").iterdir()}
    job, _ = (block for name, block in blocks("toml") if FINE_TUNING in name)
    (tmp_path / "job.toml").write_text(job)
    data, plan, train, resume, chat, evaluate, export, adapter = (
        shlex.split(line)[1:] for name, block in blocks("sh") if FINE_TUNING in name for line in block.splitlines()
    )

    def printed_by(arguments: list[str], expected: str = "") -> str:
        if arguments[0] != "launch":
            status, printed, reported = run_command(arguments, tmp_path, typed="Say hello.\n")
        else:
            environment = {**os.environ, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"}
            command = [sys.executable, "-m", "titan_launch", *arguments]
            done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
            status, printed, reported = done.returncode, done.stdout, done.stderr
        assert status == 0 and expected in printed, printed + reported
        return printed

    printed_by(data, "Hello!")
    assert printed_by(plan)
    assert train[:3] == resume[:3] == ["launch", "--nproc-per-node", "2"]
    run_ranks(train_here, 2, tmp_path, train)
    resumed = printed_by(resume)
    losses = [float(loss) for loss in re.findall(r"^step .* loss +([\d.]+)", resumed, re.MULTILINE)]
    assert "resumed from outputs/assistant/checkpoints/step-20\n" in resumed and losses[-1] < 3.5 < 5.7
    index = read_index(tmp_path / "outputs/assistant/checkpoints/step-40")
    held = [key for key in index if key.startswith("model.") and not key.endswith("rope.table")]
    assert held and all(".lora." in key for key in held)
    answer = printed_by(chat)
    printed_by(evaluate, "capitals")
    printed_by(export)
    printed_by(adapter)
    card = (tmp_path / "exported/assistant/README.md").read_text()
    digest = WeightsFolder(tmp_path / "Llama-3.2-1B-Instruct").fingerprint().digest
    expected = (digest, "| steps | 40 on 2 ranks |", "corpus/*.jsonl", "--config job.toml")
    assert [text for text in expected if text not in card] == []
    assert {file: file.read_bytes() for file in before} == before
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    (lines,) = (block for name, block in blocks("python") if FINE_TUNING in name)
    exec(lines, names)
    text = names["tokenizer"].decode(names["tokens"][0])
    saved = open_saved_model(tmp_path / "outputs/assistant")
    model = load_language_model(saved, tmp_path / "outputs/assistant", torch.device("cpu"), torch.float32)
    ours = names["inputs"]["input_ids"][0].tolist()
    begun = len(ours)
    with torch.no_grad():
        for _ in range(names["tokens"].shape[1] - begun):
            ours.append(int(model.module(torch.tensor([ours]))[0, -1].argmax()))
    assert ours == names["tokens"][0].tolist(), text
    begin = names["tokenizer"].decode(names["tokens"][0, begun:], skip_special_tokens=True)
    assert answer.startswith(begin.rstrip("\ufffd")), (answer, begin)


RESULT = [  # smaller than the main job, and in fp32, so that the numbers are equal
    *(f"--{section}.path={REPO}/titan_launch/config/*/*.py" for section in ("data", "validation.data")),
    *(f"--{section}.validation_percent=50" for section in ("data", "validation.data")),  # at any path of the checkout
    "--model.args.n_layers=2",
    "--model.args.dim=64",
    "--training.steps=2",
    "--lr_scheduler.warmup_steps=1",
    "--training.seq_len=32",
    "--precision.param_dtype=float32",
    "--validation.max_samples=8",
    "--job.device=cpu",
]


def train_main_job(folder: Path) -> tuple[Tensor, Tensor, Tensor]:
    """Train on this rank. Return held-out tokens, their targets, and the logits of the trained model."""
    os.chdir(folder)
    config = load_job(str(REPO / "configs/llama_bn.toml"), RESULT).config
    with ExitStack() as stack:
        run = build_run(config, this_rank(), stack)
        fit(run)
        assert config.validation.data is not None and config.validation.max_samples is not None
        source = build_source(config.validation.data, build_tokenizer(config.tokenizer), config.training.seq_len)
        samples = [source[index] for index in range(config.validation.max_samples)]
        tokens, targets = (torch.stack(column) for column in zip(*samples, strict=True))
        run.model.eval()
        with torch.no_grad():
            return tokens, targets, run.model(tokens)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_the_code_in_the_docs_loads_the_result_in_plain_pytorch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens, targets, trained = run_ranks(train_main_job, 2, tmp_path)[0]
    monkeypatch.chdir(tmp_path)
    ((_, lines),) = [block for block in blocks("python") if "checkpoints/latest" in block[1]]
    assert len(lines.split("\n")) == 5 + 2, "the docs promise five lines of code; there are also two empty lines"
    names: dict[str, Any] = {}
    exec(lines, names)
    with torch.no_grad():
        logits = names["model"](tokens)
    torch.testing.assert_close(logits, trained, rtol=1e-6, atol=1e-6)
    reported = read_metrics(tmp_path / "outputs", "llama_bn")[-1]["validation/loss"]
    assert float(F.cross_entropy(logits.flatten(0, 1), targets.flatten())) == pytest.approx(reported, rel=1e-6)


def test_the_docs_load_an_export_in_plain_pytorch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    theirs = random_model("Llama 3.1, RoPE scaling", Path("hf"))
    assert main(["import", "hf", "--out", "imported"]) == 0
    assert main(["export", "imported", "--out", "exported/plain", "--format=plain"]) == 0
    ((_, lines),) = [block for block in blocks("python") if "load_model" in block[1]]
    assert len(lines.split("\n")) == 5 + 2, "five lines, and empty ones after the imports and at the end"
    names: dict[str, Any] = {}
    exec(lines, names)
    tokens, _ = samples()
    with torch.no_grad():
        torch.testing.assert_close(names["model"](tokens), theirs(tokens).logits, rtol=0, atol=1e-5)


WITHOUT_JOB = {
    *("init", "migrate", "measure-device", "import", "export", "generate", "chat", "evaluate", "prepare", "runs"),
    *("report", "compare"),
}
"""Commands that take no job file."""


@pytest.mark.parametrize("command", commands())
def test_every_command_of_the_docs_is_valid(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = shlex.split(command)
    words = words[next(i for i, word in enumerate(words) if "=" not in word) :]  # commands may follow VARIABLE=value
    words = words[: next((i for i, word in enumerate(words) if word == "<"), None)]
    match words:
        case ["titan-launch" | "python", *rest] if words[0] == "titan-launch" or rest[:2] == ["-m", "titan_launch"]:
            arguments = rest if words[0] == "titan-launch" else rest[2:]
            if arguments[0] in WITHOUT_JOB:
                assert parse_arguments(arguments).run
            elif arguments[0] == "data":
                parsed = parse_arguments(arguments)
                check(["--config", parsed.config, *parsed.overrides], capsys)
            elif arguments[0] == "plan":
                parsed = parse_arguments(arguments)
                check_weights(load(parsed, parsed.world_size))
            else:
                check(arguments, capsys)
        case ["python", "-m", "titan_launch.phantom_gpu", *arguments]:
            inner = build_phantom_parser().parse_args(arguments).command
            if inner[0].startswith("scripts/"):
                check_script(inner[0], inner[1:])
            else:
                assert inner[0] == "titan-launch"
                check(inner[1:], capsys)
        case ["torchrun", "--nproc-per-node", _, "-m", "titan_launch", "measure-device", *arguments]:
            assert parse_arguments(["measure-device", *arguments]).run
        case ["torchrun", "--nproc-per-node", ranks, "-m", "titan_launch", *arguments]:
            check([*arguments, "--world-size", ranks], capsys)
        case ["torchrun", "--nproc-per-node", _, script, *arguments] if script.startswith("benchmarks/"):
            check_benchmark(script, arguments, capsys)
        case ["python", script, *arguments] if script.startswith("benchmarks/"):
            check_benchmark(script, arguments, capsys)
        case ["benchmarks/gpu.sh", *arguments]:
            check_benchmark("-m benchmarks.gpu", arguments, capsys)
        case ["python", "-m", module, *arguments] if module.startswith("benchmarks."):
            check_benchmark(f"-m {module}", arguments, capsys)
        case ["sbatch", option, script, *arguments] if option.startswith("--"):
            check_script(script, arguments)
        case [script, *arguments] if script.startswith("scripts/"):
            check_script(script, arguments)
        case ["tensorboard", "--logdir", "outputs"]:
            pass
        case [
            "python",
            "-m",
            "tests.parallel.matrix"
            | "tests.models.parity"
            | "tests.models.mutations"
            | "tests.prove.mutants" as module,
            *arguments,
        ]:
            check_benchmark(f"-m {module}", arguments, capsys)
        case ["uv", "lock", *_]:
            pass  # tests/test_package.py compares what it wrote
        case ["uv", "sync", *options]:
            check_install(f".[{','.join(option for option in options if option != '--extra')}]")
        case ["uv", "run", "titan-launch", *arguments]:
            check(arguments, capsys)
        case ["python3", "-m", "venv", ".venv"]:
            pass
        case [".venv/bin/pip", "install", requirement, "--index-url", _]:
            assert requirement in (REPO / "constraints.txt").read_text().splitlines()
        case ["source", ".venv/bin/activate"]:
            assert 'install_packages "$ROOT/.venv"' in (REPO / "scripts" / "setup.sh").read_text()
        case ["pip", "install", "-e", target]:
            check_install(target)
        case ["python", "-m", "build"] | ["docker", *_]:
            pass  # tests/test_package.py runs the steps of both
        case ["python", "-m", "titan_launch.config.reference"]:
            pass  # tests/config/test_reference.py runs the generator
        case _:
            pytest.fail(f"nothing checks this command: {command}")


PLANS = [
    found[1]
    for line in commands()
    if (found := re.match(r"(?:titan-launch|python -m titan_launch) (plan .*)", line))
    and "--speeds" not in line  # the file has the measurements of a machine with GPUs
]


@pytest.mark.slow
@pytest.mark.parametrize("command", PLANS)
def test_every_plan_of_the_docs_is_printed(command: str, tmp_path: Path) -> None:
    """The test above checks the job and the options of every plan."""
    arguments = [arg for arg in shlex.split(command) if torch.version.cuda is not None or arg != "--measure"]
    assert plan([str(tmp_path / "plan.png") if arg.endswith(".png") else arg for arg in arguments])


def check(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Check that `check` accepts the job file and overrides."""
    if arguments[0] == "launch" or "--fake-world-size" in arguments:
        started = parse_arguments(arguments)
        given = {name: value for name, value in vars(started).items() if name in LAUNCH_OPTIONS}
        ranks = started.fake_world_size or plan_processes(given).world_size
        world_size = [] if ranks is None else ["--world-size", str(ranks)]
        arguments = ["--config", started.config, *started.overrides, *world_size]
    if arguments[0] != "check":
        arguments = ["check", *arguments]
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        add_empty_packages(Path(folder), patch)
        if "job.toml" in arguments:
            (job,) = (block for name, block in blocks("toml") if FIRST_RUN in name)
            Path(folder, "job.toml").write_text(job)
            patch.chdir(folder)
        assert main([*arguments, NO_EARLIER_RUN]) == 0, capsys.readouterr().err


def plan(arguments: list[str]) -> str:
    """Return the output of `plan`, run in a process of its own, because the command ends its process."""
    status, printed, reported = run_command(arguments, REPO)
    assert status == 0, reported
    return printed


def check_benchmark(script: str, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Check that the script exists, imports its modules and knows its options."""
    usage = printed_by_script(script, [*arguments, "--help"], capsys)
    assert all(argument in usage for argument in arguments if argument.startswith("--"))


def printed_by_script(script: str, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Return what a script of the benchmarks prints. It runs in this process, which has imported torch."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "'.*' found in sys.modules", RuntimeWarning)  # tests import some modules, too
        patch.setattr(sys, "argv", [script, *arguments])
        patch.syspath_prepend(REPO / "benchmarks")
        with pytest.raises(SystemExit) as end:
            if script.startswith("-m "):
                runpy.run_module(script.removeprefix("-m "), run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(script, run_name="__main__")
    assert not end.value.code
    return capsys.readouterr().out


def check_install(target: str) -> None:
    """Check that the extras exist, and that the installed package has the command."""
    project = tomli.loads((REPO / "pyproject.toml").read_text())["project"]
    extras = target.removeprefix(".").strip("[]")
    assert target.startswith(".") and set(filter(None, extras.split(","))) <= project["optional-dependencies"].keys()
    module, _, function = project["scripts"]["titan-launch"].partition(":")
    assert getattr(importlib.import_module(module), function) is main


def check_script(script: str, arguments: list[str]) -> None:
    path = REPO / script
    assert path.exists() and path.stat().st_mode & 0o100, f"{script} cannot be executed"
    subprocess.run(["bash", "-n", str(path)], check=True)
    if script.endswith("run_tests.sh"):
        assert all(word.startswith("-") or word in ("rule", "slow") or (REPO / word).exists() for word in arguments)


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives to the headings of a page."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPO)))
def test_links_and_anchors_resolve(page: Path) -> None:
    for target, anchor in re.findall(r"\]\((?!\w+:)([^)#]*)#?([^)]*)\)", page.read_text()):
        linked = page.parent / target if target else page
        assert linked.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in anchors(linked), f"{page.name} links to {target}#{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPO)))
def test_paths_in_the_docs_exist(page: Path) -> None:
    """Paths in backticks are relative to the repository. On the page about the code they may be relative to the
    package."""
    roots = [REPO, REPO / "titan_launch"] if page.name == "architecture.md" else [REPO]
    package = "|".join(path.name for path in (REPO / "titan_launch").iterdir()) if len(roots) == 2 else "titan_launch"
    paths = re.findall(
        rf"`((?:titan_launch|tests|benchmarks|scripts|configs|examples|{package})/[\w./]*)`", page.read_text()
    )
    missing = [path for path in paths if not any((root / path).exists() for root in roots)]
    assert missing == []


def test_the_index_names_every_page() -> None:
    index = (REPO / "docs" / "README.md").read_text()
    pages = [str(page.relative_to(REPO / "docs")) for page in PAGES if page.is_relative_to(REPO / "docs")]
    assert [page for page in pages if page != "README.md" and f"({page})" not in index] == []


def title_of(page: Path) -> str:
    heading = re.search(r"^# (.*)$", page.read_text(), flags=re.MULTILINE)
    assert heading is not None
    return heading[1]


def test_llms_txt_lists_the_pages_of_the_site() -> None:
    """docs/llms.txt (https://llmstxt.org) has the sections of mkdocs.yml, and each page with its title and a line about
    it. Correct the file by hand if this fails."""
    nav = (REPO / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    index = "  - Start:\n" + nav  # the first page has no section
    expected = [
        f"## {line[1]}" if line[1] else f"- [{title_of(REPO / 'docs' / line[2])}]({line[2]}): "
        for line in re.finditer(r"^  - ([^\n]*):$|^ +- (\S+\.md)$", index, flags=re.MULTILINE)
    ]
    text = (REPO / "docs/llms.txt").read_text()
    assert re.match(r"# titan_launch\n\n> \S[^\n]*\n\n", text)
    lines = re.findall(r"^(?:## .*|- .*)$", text, flags=re.MULTILINE)
    assert [re.sub(r"(?<=\): ).+", "", line) for line in lines] == expected
    assert [line for line in lines if line.startswith("- ") and not line.partition("): ")[2].strip()] == []


def test_the_two_pages_for_contributors_are_one_story() -> None:
    pages = {name: (REPO / name).read_text() for name in ("AGENTS.md", "CONTRIBUTING.md")}
    assert "(CONTRIBUTING.md)" in pages["AGENTS.md"] and "(AGENTS.md)" in pages["CONTRIBUTING.md"]
    assert len(pages["AGENTS.md"].splitlines()) <= 200
    agents, contributing = (
        {*re.findall(r"`([^`\n]+)`", text), *re.findall(r"^(?:scripts/|python ).*$", text, flags=re.MULTILINE)}
        for text in pages.values()
    )
    assert agents & contributing == set(), "one of the two pages has the fact, and the other links to it"


def test_the_glossary_has_every_mode() -> None:
    page = (REPO / "docs/reference/glossary.md").read_text()
    sections = dict(re.findall(r"^## ([^\n]*)\n(.*?)(?=^## |\Z)", page, flags=re.DOTALL | re.MULTILINE))
    modes = {
        "Gradient accumulation": {*ACCUMULATION_MODES, "auto"},
        "Activation checkpointing": set(get_args(ActivationCheckpointConfig.model_fields["mode"].annotation)),
    }
    named = {title: set(re.findall(r"^- \*\*`(\w+)`", sections[title], flags=re.MULTILINE)) for title in modes}
    assert named == modes


def test_the_table_of_layers_in_the_docs_is_that_of_the_layering_test() -> None:
    page = (REPO / "docs" / "explanation" / "architecture.md").read_text()
    rows = re.findall(r"^\| (\d+) \| ([^|]*) \|", page, flags=re.MULTILINE)
    assert {package: int(rank) for rank, packages in rows for package in re.findall(r"`(\w+)`", packages)} == RANKS


def messages() -> list[str]:
    """Return the strings in the program's code, with `…` in place of inserted values."""
    texts = (text for path in (REPO / "titan_launch").rglob("*.py") for text in strings(path.read_text()))
    return [re.sub(r"%[.\d]*[dfs]", "…", text) for text in texts]


def test_the_table_of_refused_keys_is_that_of_the_losses() -> None:
    page = (REPO / "docs/how_to/losses.md").read_text()
    refused: dict[str, set[tuple[str, str]]] = {}
    for names, cell in re.findall(r"^\| (.+?) \| (`\w+\.\w+`.*?) \|", page, flags=re.MULTILINE):
        for name in re.findall(r"[\w.]+", names):
            refused.setdefault(name, set()).update(re.findall(r"`(\w+)\.(\w+)`", cell))
    losses = {"cross_entropy": set[tuple[str, str]](), **refused}
    kinds = {**LOSSES, "function": FUNCTION_LOSS, "model.loss": MODEL_LOSS}
    assert losses == {name: set(kind.unsupported) for name, kind in kinds.items()}


def test_troubleshooting_quotes_messages_of_the_program() -> None:
    page = (REPO / "docs" / "how_to" / "troubleshooting.md").read_text().partition("## Messages of PyTorch")[0]
    quoted = re.findall(r"^\| `([^`]+)` \|", page, flags=re.MULTILINE)
    printed = "\n".join(messages())
    patterns = {quote: ".*".join(map(re.escape, quote.split("…"))) for quote in quoted}
    assert quoted and [quote for quote, pattern in patterns.items() if not re.search(pattern, printed)] == []


OPTIONS_OF_OTHERS = {"--ipc", "--requeue", "--shm-size", "--signal", "--signals-to-handle", "--train", "--ulimit"}
"""Options of docker, Slurm, torchrun and scripts."""


def prose(page: Path) -> str:
    """Return the text of a page without its blocks of code."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPO)))
def test_options_in_the_docs_exist(page: Path) -> None:
    """An option in backticks is one of the command before it, as in `plan --verbose` and "a run with `--quiet`"."""
    text = re.sub(r"\brun with `--", "run with `train --", " ".join(prose(page).split()))
    of_any = {option for command in COMMANDS for option in options_of(command)} | OPTIONS_OF_OTHERS
    of_any |= {*re.findall(OPTION, build_phantom_parser().format_help())}
    wrong = []
    for code in re.findall(r"`([^`]+)`", text):
        command = code.removeprefix("titan-launch ").partition(" ")[0]
        if command in COMMANDS:
            wrong += [f"{command} {option}" for option in re.findall(OPTION, code) if option not in options_of(command)]
        elif code.startswith("--") and page.parent.name != "verification":  # those are of benchmarks
            wrong += [option for option in re.findall(OPTION, code) if option not in of_any]
    assert wrong == []


def test_the_page_of_commands_has_every_option() -> None:
    """The section of a command names no option of another command, and each option is on the page."""
    page = prose(REPO / "docs/reference/commands.md")
    sections = dict(re.findall(r"^## `([\w-]+)`\n(.*?)(?=^## )", page, flags=re.DOTALL | re.MULTILINE))
    assert sections.keys() == COMMANDS.keys()
    foreign = {name: set(re.findall(OPTION, text)) - options_of(name) for name, text in sections.items()}
    assert {name: options for name, options in foreign.items() if options} == {}
    on_page = set(re.findall(OPTION, page))
    assert {option for name in COMMANDS for option in options_of(name) if option.startswith("--")} <= on_page


DENIALS = {
    "There is no dropout.": "no model of this package has it; lora.dropout is of adapters",
    "**float8** with tensor parallelism": "they exclude each other",
    "so float16 needs loss scaling, which is not supported": "no key scales the loss",
    "There are no CUDA graphs": "job.device has the word",
    "One error lists all keys that are not supported": "keys of config.json",
    "quantized weights are not supported": "data.sources.weight has the word",
    "compressed weights are not supported": "data.sources.weight has the word",
    'its default ("not known", "not supported")': "quoted words",
}
"""Sentences that deny something and share a word with a key, each with the reason why it is true."""


def test_no_page_denies_what_a_key_does() -> None:
    pages = [page for page in PAGES if page.name != "foreign_keys.md"]  # tests/config/loading/test_foreign_keys.py
    parts = [part for page in pages for part in re.split(r"(?<=[.:;|])\s|\n\s*- ", prose(page))]
    sentences = [" ".join(part.split()).removeprefix("- ") for part in parts]
    claims = {text: re.sub(r"^There (?:is|are) no (.*)", r"\1 is not supported", text) for text in sentences}
    denied = [text for text, claim in claims.items() if "not supported" in claim and denied_keys(claim)]
    assert [text for text in denied if not any(part in text for part in DENIALS)] == []
    assert [part for part in DENIALS if not any(part in text for text in denied)] == [], "these are not needed"


def test_the_table_about_torchtitan_is_true() -> None:
    """The keys here exist and take the values, and those of TorchTitan that are the same here exist, too."""
    page = prose(REPO / "docs/how_to/from_torchtitan.md")
    rows = re.findall(r"^\| (.*) \| (.*) \|$", page, flags=re.MULTILINE)
    cells = [theirs if ours.startswith("the same") else ours for theirs, ours in rows]
    code = [code for cell in cells for code in re.findall(r"`([a-z_]+\.[a-z_.]+(?: = [^`]+)?)`", cell)]
    assert len(code) > 30
    given = [line.split(" = ") for line in code]
    assert [key for key, *_ in given if key not in keys()] == []
    assert [pair for pair in given if pair[1:] and not takes(pair[0], tomli.loads(f"x = {pair[1]}")["x"])] == []


@pytest.mark.skipif(not CAN_SHARE_UNITS, reason="before torch 2.13 every norm has a unit of its own")
def test_the_table_of_the_8b_model_is_printed_by_plan() -> None:
    printed = plan(["plan", "--config", "configs/llama3_8b.toml", "--world-size", "8", "--device", "h100-80gb"])
    page = (REPO / "docs" / "explanation" / "planner.md").read_text()
    older, newer = page.split("The table is that of torch 2.13.")
    rows = re.findall(r"^[> ]\*? +none +immediate .*$", older, flags=re.MULTILINE)
    memory = re.findall(r"(~?[\d.]+) GiB", newer.partition("\n")[0])  # of these rows, with torch 2.15
    assert len(rows) == 2 and len(memory) == 4
    if FREES_EARLIER:
        first, third = (" +".join(map(re.escape, cells)) for cells in (memory[:2], memory[2:]))
        assert re.search(rf"^> +none +immediate +{first} ", printed, flags=re.MULTILINE)
        assert re.search(rf"^ \* +none +immediate with unsharded parameters +{third} ", printed, flags=re.MULTILINE)
    else:
        assert all(line in printed for line in rows)


NEWEST_ONLY = pytest.mark.skipif(not FREES_EARLIER, reason="these tables are those of torch 2.15")


@NEWEST_ONLY
@pytest.mark.parametrize(
    ("trained", "models"),
    rest_is_slow(
        [("LoRA, rank 16", ["1B"]), ("LoRA, rank 16", ["8B"]), ("last quarter of the blocks", ["1B", "8B"])], 3
    ),
)
def test_the_table_of_fine_tuning_is_printed_by_plan(
    trained: str, models: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--models", *models, "--trained", trained]
    rows = printed_by_script("benchmarks/fine_tuning_memory.py", options, capsys).splitlines()[2:]
    page = (REPO / "docs" / "how_to" / "fit_into_memory.md").read_text().splitlines()
    assert len(rows) == len(models) and set(rows) <= set(page)


@pytest.mark.slow
def test_predictions_are_below_published_memory(capsys: pytest.CaptureFixture[str]) -> None:
    """The predictions are also within 25 % of the published memory; the benchmark's exit status tells."""
    table = printed_by_script("benchmarks/published_memory.py", [], capsys)
    page = (REPO / "docs" / "verification" / "planner.md").read_text()
    assert table.strip() in page or not KEEPS_WORKSPACES  # later releases need less: the page is of an earlier one


def test_published_runs_name_their_sources() -> None:
    """Every job of a published run is valid. The predictions of all runs take minutes, so the test replays none."""
    content = tomli.loads((REPO / "benchmarks" / "published_runs.toml").read_text())
    for source in content["source"]:
        assert {"name", "repository", "path", "date"} <= source.keys()
        assert source.get("rows") or source["left_out"]
        assert all(row["reason"] for row in source.get("left_out", ()))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(REPO / "benchmarks")
        benchmark = importlib.import_module("published_memory")
        for run in benchmark.read_runs():
            config = benchmark.config_of(run)
            assert plan_layout(config.parallelism, config.training, run.ranks).world_size == run.ranks
            assert run.reserved_gib or run.active_gib or run.tokens_per_s_per_gpu


@NEWEST_ONLY
def test_a_row_of_the_table_of_layouts_is_the_prediction(capsys: pytest.CaptureFixture[str]) -> None:
    """The test replays one row. Each of the others takes seconds."""
    options = ["--models", "8B", "--ranks", "512", "--layouts", "FSDP"]
    printed = printed_by_script("benchmarks/parallelism_tables.py", options, capsys).splitlines()[2]
    row = re.escape(printed.replace("**", "")).replace("FSDP", r"(?:\*\*)?FSDP(?:\*\*)?")
    assert re.search(row, (REPO / "docs" / "verification" / "planner.md").read_text())


def test_the_table_of_metrics_is_current() -> None:
    assert (REPO / "docs" / "reference" / "metrics.md").read_text().endswith(markdown_table())


def test_the_train_script_has_a_help_text() -> None:
    help_text = subprocess.run(["scripts/run_train.sh", "--help"], capture_output=True, text=True, check=True).stdout
    assert all(name in help_text for name in ("CONFIG", "NPROC", "NNODES", "RDZV_ENDPOINT", "--section.key=value"))


def test_the_train_script_requires_a_rendezvous_for_several_hosts() -> None:
    environment = {**os.environ, "NNODES": "2", "RDZV_ENDPOINT": ""}
    result = subprocess.run(["scripts/run_train.sh"], env=environment, capture_output=True, text=True)
    assert (result.returncode, len(result.stderr.splitlines())) == (2, 1) and "RDZV_ENDPOINT" in result.stderr
