"""The command line as a user sees it: exit statuses, messages printed once, and runs under torchrun."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.config.loading.hints import options_of, parser_of
from tests.distributed import run_command
from tests.sampling import rest_is_slow
from tests.train.jobs import model_source
from titan_launch.cli import COMMANDS, main, parse_arguments
from titan_launch.commands.parser import load_to_train
from titan_launch.config.loading.load import dump_job, load_job
from titan_launch.core.errors import UserError
from titan_launch.core.files import CACHE_VARIABLE
from titan_launch.core.torch_release import CAN_SHARE_UNITS
from titan_launch.launch.options import LAUNCH_OPTIONS, check_rendezvous, plan_processes

REPO = Path(__file__).parent.parent

TINY = """
[job]
name = "tiny"
dump_folder = "{folder}"
device = "cpu"

[model.args]
dim = 32
n_layers = 2
n_heads = 4
n_kv_heads = 2
hidden_dim = 48
vocab_size = 61

[data]
kind = "synthetic"
vocab_size = 61

[training]
seq_len = 16
local_batch_size = 2
global_batch_size = 8
steps = 3

[precision]
param_dtype = "float32"

[metrics]
log_freq = 1

[checkpoint]
save_last = false
"""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "job.toml"
    path.write_text(TINY.format(folder=tmp_path.as_posix()))
    return path


def run(*args: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a module. Check that it leaves no temporary files except torchrun's and PyTorch's cache of kernels."""
    command = [sys.executable, "-m", *map(str, args)]
    of_torch = ("torchinductor_", "torchelastic_") if args[0] == "torch.distributed.run" else "torchinductor_"
    with tempfile.TemporaryDirectory() as temporary:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": temporary, **env}
        result = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=REPO, timeout=120)
        assert [name for name in os.listdir(temporary) if not name.startswith(of_torch)] == []
    return result


def run_loaded(*args: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a process that has loaded torch. Check that it leaves no temporary files."""
    command = [*map(str, args)]
    with tempfile.TemporaryDirectory() as temporary:
        result = run_command(command, REPO, environment={"TMPDIR": temporary, **env})
        assert [name for name in os.listdir(temporary) if not name.startswith("torchinductor_")] == []
    return subprocess.CompletedProcess(command, *result)


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["train/loss"] for line in (folder / "tiny" / "metrics.jsonl").read_text().splitlines()]


def test_check_accepts_a_good_job(job: Path) -> None:
    result = run("titan_launch", "check", "--config", job, "--world-size", "4")
    assert (result.returncode, result.stdout) == (
        0,
        f"{job}: no problems found (`plan` also checks the model; a run also checks the data)\n",
    )


def test_check_lists_every_mistake_with_file_line_and_remedy(job: Path) -> None:
    job.write_text(job.read_text().replace("steps = 3", "stepz = 3") + '\n[optimizer]\nlr = "fast"\n')
    result = run_loaded("check", "--config", job, "--world-size", "3")
    assert result.returncode == 2
    lines = result.stderr.splitlines()
    text = job.read_text().splitlines()
    assert len(lines) == 4
    for line, key in zip(lines[1:], ("global_batch_size", "stepz", "lr"), strict=True):
        (number,) = [i for i, content in enumerate(text, start=1) if content.startswith(f"{key} =")]
        assert f"{job}:{number}: " in line, line
    assert 'did you mean "training.steps"' in result.stderr


def test_plan_shows_every_module_with_its_unit_and_the_line_of_its_rule(job: Path, tmp_path: Path) -> None:
    job.write_text(job.read_text() + '\n[[precision.rules]]\ntype = "RMSNorm"\nparam_dtype = "float32"\n')
    overrides = "--precision.param_dtype=bfloat16", "--precision.placement=own_unit", "--rows=own"
    text = run_loaded("plan", "--config", job, "--world-size", "4", "--verbose", *overrides)
    assert text.returncode == 0, text.stderr
    (line,) = [number for number, text in enumerate(job.read_text().splitlines(), 1) if "precision.rules" in text]
    assert f"precision.rules.0 ({job}:{line})" in text.stdout
    assert re.search(r"^ranks: +4 = 4 shards$", text.stdout, flags=re.MULTILINE) and "all-gathers + " in text.stdout
    plan = json.loads(run_loaded("plan", "--config", job, "--world-size", "4", "--json", *overrides).stdout)
    unit, *others = [unit for unit in plan["units"] if unit["reason"] == "precision.rules.0"]
    assert bool(others) is not CAN_SHARE_UNITS
    assert (unit["compute_dtype"], unit["output_dtype"], unit["location"]) == ("float32", "bfloat16", f"{job}:{line}")
    assert sum(unit["parameters"] for unit in plan["units"]) == plan["parameters"]
    assert not (tmp_path / "tiny").exists()


def test_plan_reports_problems_that_only_the_model_shows(job: Path) -> None:
    job.write_text(job.read_text() + '\n[[precision.rules]]\ntype = "LayerNorm"\n')
    result = run_loaded("plan", "--config", job)
    assert result.returncode == 2 and result.stderr.count("\n") == 1
    assert "no module of the model is of this class" in result.stderr


def test_check_and_help_never_import_torch_or_other_commands(job: Path) -> None:
    code = (
        "import sys; from titan_launch.cli import main; status = main(sys.argv[1:]); "
        "assert not {'torch', 'numpy'} & set(sys.modules); "
        "assert not {'json', 'difflib', 'titan_launch.commands.plan', 'titan_launch.launch'} & set(sys.modules); "
        "sys.exit(status)"
    )
    for args in (["check", "--config", str(job)], ["check", "--help"], ["--help"]):
        assert subprocess.run([sys.executable, "-c", code, *args], cwd=REPO, timeout=120).returncode == 0


def run_without_torch(*args: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a command in a process in which `import torch` fails."""
    code = "import sys; sys.modules['torch'] = None; from titan_launch.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, cwd=REPO, timeout=120)


def run_recorded(*args: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a command that plans a job twice: the second time from the cache, in a process without torch."""
    first, second = run_loaded(*args), run_without_torch(*args)
    assert first.returncode == second.returncode, first.stderr + second.stderr
    return second


def plan_json(job: Path, *args: str) -> dict[str, Any]:
    result = run_loaded("plan", "--config", job, "--world-size", "2", "--json", *args)
    assert result.returncode == 0, result.stderr
    plan: dict[str, Any] = json.loads(result.stdout)
    return plan


@pytest.mark.parametrize(("config", "ranks"), rest_is_slow([("llama3_8b", "8"), ("llama3_70b", "512")]))
def test_plan_of_a_llama_never_imports_torch(config: str, ranks: str) -> None:
    sizes = ("--training.global_batch_size=2048", "--model.args.n_layers=2")
    overrides = ("--parallelism.data_parallel_shard_degree=-1", *sizes)
    command = ("plan", "--config", f"configs/{config}.toml", "--world-size", ranks, "--device", "h100-80gb")
    result = run_recorded(*command, *overrides)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert re.match(
        r"(Fits|Tight|Does not fit): about [\d.]+ of 79\.1 GiB per rank \(\d+ %; margin 3\.96 GiB\)", lines[0]
    )
    assert lines[1].startswith("Recommended: gradient accumulation ") and ", because it has " in lines[1]
    assert any(line.split() == ["device:", "h100-80gb"] for line in lines)
    verdicts = sum(any(f"  {verdict}  " in line for verdict in ("fits", "tight", "does not fit")) for line in lines)
    assert verdicts == (12 if ranks == "8" else 18)


def test_plan_options_are_the_keys_of_the_planner(job: Path) -> None:
    given = ("--device", "a100-40gb", "--memory-gib=30", "--intra-bandwidth", "200", "--inter-bandwidth", "10")
    keys = ("device=a100-40gb", "memory_gib=30", "intra_node_gb_per_s=200", "inter_node_gb_per_s=10")
    more = ("gpus_per_node=4", "mfu=0.5")
    plans = (
        plan_json(job, *given, "--gpus-per-node", "4", "--mfu", "0.5", "--rows", "own"),
        plan_json(job, *(f"--planner.{key}" for key in (*keys, *more)), "--rows", "own"),
    )
    assert plans[0] == plans[1]
    assumed = plans[0]["assumptions"]
    assert (assumed["memory_gib"], assumed["mfu"], assumed["gpus_per_node"]) == (30, 0.5, 4)


def test_plan_resolves_auto_and_says_why(job: Path) -> None:
    auto = "--gradient_accumulation.mode=auto"
    plan = plan_json(job, auto, "--memory-gib", "1")
    assert plan["resolved"]["gradient_accumulation"] == {"mode": "deferred", "keep_params_unsharded": True}
    assert "the least link traffic among the 4 of 4 choices of modes that fit into 1 GiB" in plan["resolved"]["reason"]
    (chosen,) = [row for row in plan["rows"] if row["is_chosen"]]
    assert chosen["verdict"] == "fits" and chosen["traffic_per_step"]["collectives"] == plan["collectives_per_step"]
    fixed = plan_json(job, "--rows", "own")
    assert (len(fixed["rows"]), fixed["recommended"]) == (1, None)
    assert fixed["resolved"]["reason"] == "set by the job"


def test_plan_fails_with_the_table_if_nothing_fits(job: Path) -> None:
    command = (
        "plan",
        "--config",
        job,
        "--world-size",
        "2",
        "--memory-gib",
        "1e-6",
        "--gradient_accumulation.mode=auto",
    )
    result = run_recorded(*command)
    assert result.returncode == 2 and result.stderr.count("does not fit") == 12
    assert "none of 4 choices of modes fits into 1e-06 GiB" in result.stderr and "; try a smaller " in result.stderr


def test_plan_writes_a_picture_beside_text_or_json(job: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plan_json(job, "--plot", str(tmp_path / "plan.png"))
    assert (tmp_path / "plan.png").stat().st_size > 10_000


def test_plan_records_a_users_model(job: Path) -> None:
    with_model(job, model_source())
    command = ["plan", "--config", str(job), "--world-size", "2", "--verbose"]
    status, printed, reported = run_command(command, job.parent, environment={"RANK": "0"})
    assert status == 0, reported
    assert "recording a microbatch with activation checkpointing none" in reported
    assert re.search(r"memory engine: +replay,", printed)
    assert "activation checkpointing is not compared: the model's blocks are unknown" in printed


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--device", "h100"), 'command line: --device h100: planner.device = "h100": unknown device; known devices: '),
        (("--memory-gib", "0"), "command line: --memory-gib 0: planner.memory_gib = 0: must be more than 0"),
        (("--mfu=2",), "command line: --mfu=2: planner.mfu = 2: must be at most 1"),
        (("--gpus-per-node", "two"), 'planner.gpus_per_node = "two": must be a whole number'),
        (("--plot",), "--plot needs a value"),
        (("--plot", "--json"), "--plot needs a value"),
        (("--plot", "missing/plan.png"), "there is no folder missing"),
        (("--plot", "plan.jpg"), "must end in .png, .pdf or .svg"),
        (("--device",), "--device needs a value"),
        (("--engine", "trce"), "--engine: invalid choice: 'trce'"),
        (("--rows", "mine"), "--rows: invalid choice: 'mine'"),
        (("--json=1",), "--json: ignored explicit argument '1'"),
        (("--world-size", "3"), "training.global_batch_size = 8: not a multiple of 6"),
    ],
)
def test_a_bad_option_of_plan_is_one_line_and_status_2(
    job: Path, args: tuple[str, ...], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(REPO)
    monkeypatch.setitem(sys.modules, "torch", None)  # its import fails
    assert main(["plan", "--config", str(job), *args]) == 2
    error = capsys.readouterr().err
    assert words in error and len(error.splitlines()) == 1


def test_auto_needs_a_limit_of_memory(job: Path) -> None:
    auto = ("--gradient_accumulation.mode=auto", "--job.device=cuda")
    result = run_without_torch("plan", "--config", job, "--world-size", "2", *auto)
    assert result.returncode == 2
    assert "none is known; set planner" in result.stderr and len(result.stderr.splitlines()) == 1


def test_check_refuses_an_unknown_planner_device(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--config", str(job), "--planner.device=h300"]) == 2
    assert "planner.device" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (
            "chekc --config x.toml",
            f'unknown command "chekc"; the commands are {", ".join(COMMANDS)}; did you mean "ch',
        ),
        ("check", "the following arguments are required: --config (see titan-launch check --help)"),
        ("check --config", "--config needs a value"),
        ("check --config=", "--config needs a value"),
        ("--config --training.steps=3", "--config needs a value (see titan-launch train --help)"),
        ("check --confg x.toml", 'unknown option --confg; did you mean "--config"?'),
        ("check --config x.toml --trainin={}", 'unknown option --trainin; did you mean "--training"?'),
        ("check --config x.toml -v", "unknown option -v (see titan-launch check --help)"),
        ("check --config x.toml --nproc-per-node 2", "unknown option --nproc-per-node; it is an option of launch"),
        (
            "compare a b --world_size 2",
            "unknown option --world_size; it is an option of init, migrate, check, plan and data",
        ),
        ("check --config x.toml --batch-size 2", 'unknown option --batch-size; use "training.local_batch_size"'),
        ("check --config x.toml --config=--x", "--x: no such file"),
        ("check --config x.toml --steps=5", 'unknown option --steps; did you mean "--training.steps"?'),
        ("check --config x.toml --lr 5", 'unknown option --lr; did you mean "--optimizer.lr"?'),
        ("check --config x.toml --max_steps=5", 'unknown option --max_steps; use "training.steps"'),
        ("check --config x.toml --extends=y.toml", "extends cannot be set on the command line"),
        ("check --config x.toml steps=3", "command line: steps=3: is not an override"),
        ("check --config x.toml --world-size two", '--world-size: must be a whole number of at least 1, not "two"'),
        ("plan --world-size 2", "the following arguments are required: --config"),
        ("plan --config x.toml --verbos", 'unknown option --verbos; did you mean "--verbose"?'),
        ("launch --config x.toml --nproc_per_node 0", "--nproc-per-node 0: must be a whole number"),
        ("launch --config x.toml --max-restarts -1", "--max-restarts -1: must be a whole number"),
        ("train --config missing.toml", "missing.toml"),
    ],
)
def test_a_bad_command_line_is_one_line_and_status_2(args: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(args.split()) == 2
    error = capsys.readouterr().err
    assert words in error and len(error.splitlines()) == 1


def test_a_bad_environment_is_one_line_and_status_2(job: Path) -> None:
    result = run_loaded("--config", job, WORLD_SIZE="two")
    assert result.returncode == 2
    assert result.stderr.startswith(
        'error: environment variable WORLD_SIZE: must be a whole number of at least 1, not "'
    )


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    page = capsys.readouterr().out
    listed = {line.split()[0] for line in page.splitlines() if re.match(" {4}\\S", line)}
    assert {*COMMANDS} <= listed and all(text.split()[0] in page for text in COMMANDS.values())
    assert "--section.key=value" in page
    assert main([]) == 2 and capsys.readouterr().out == page


OPTIONS = {
    "train": ("config", "quiet", "log-level", "fake-world-size", "fake-rank"),
    "check": ("config", "world-size"),
    "plan": (
        *(
            "config",
            "world-size",
            "engine",
            "rows",
            "max-batch",
            "verbose",
            "trial",
            "measure",
            "advise",
            "search",
            "hold",
            "max-gpus",
            "global-batch",
            "out",
            "json",
            "plot",
        ),
        *(
            "device",
            "memory-gib",
            "intra-bandwidth",
            "inter-bandwidth",
            "gpus-per-node",
            "expert-load",
            "speeds",
            "mfu",
        ),
    ),
    "prove": ("config", "json", "out", "again"),
    "launch": ("config", *LAUNCH_OPTIONS, "require-proof", "quiet", "log-level", "fake-world-size", "fake-rank"),
}


@pytest.mark.parametrize("command", OPTIONS)
def test_help_of_a_command_names_its_options_and_a_working_example(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "--help"]) == 0
    page = capsys.readouterr().out
    assert tuple(re.findall(r"^  --([a-z-]+)[ \n]", page, flags=re.MULTILINE)) == OPTIONS[command]
    assert COMMANDS[command] in page and "--section.key=value" in page
    example = page.rpartition("example:\n")[2].split()
    arguments = parse_arguments(example[3:] if example[0] == "python" else example[1:])
    assert arguments.run.__module__ == f"titan_launch.commands.{command}"
    load_job(arguments.config, arguments.overrides, aliases=arguments.key_options)


def test_command_line_options_and_overrides_of_keys_are_told_apart() -> None:
    words = (
        "--config a.toml --training.steps 20 --debug.x --world_size 2 --lr_scheduler={} --memory_gib=3 --job.name -n"
    )
    arguments = parse_arguments(
        ["plan", *words.split(), "--data.path=a b", "--mfu", "0.5", "--max_batch", "--planner.mfu=1"]
    )
    assert (arguments.config, arguments.world_size, arguments.max_batch) == ("a.toml", 2, True)
    in_order = "--training.steps 20 --debug.x --lr_scheduler={} --memory-gib=3 --job.name -n --data.path=a_b --mfu 0.5"
    assert arguments.overrides == [*(word.replace("a_b", "a b") for word in in_order.split()), "--planner.mfu=1"]


def test_launch_answers_a_bad_job_with_one_line(job: Path) -> None:
    result = run_loaded("launch", "--nproc-per-node", "3", "--config", job)
    assert (result.returncode, len(result.stderr.splitlines())) == (2, 1)
    assert "training.global_batch_size = 8" in result.stderr and "3 data-parallel ranks" in result.stderr


def test_a_run_folder_of_another_experiment_is_refused_before_torch_is_imported(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def check(*options: str | Path) -> tuple[int, str]:
        return main(["check", *map(str, options)]), capsys.readouterr().err

    job.write_text(job.read_text().replace("save_last = false", "enable = true"))
    checkpoint = job.parent / "tiny/checkpoints/step-3"
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").write_text("{}")
    (job.parent / "tiny/config.json").write_text(dump_job(load_job(str(job)).config))
    other = ("--config", job, "--optimizer.lr=0.5")
    for command in (("check", "--world-size", "2"), ("launch", "--nproc-per-node", "2"), ("train",)):
        result = run_without_torch(*command, *other)
        assert (result.returncode, result.stdout) == (2, "") and len(result.stderr.splitlines()) == 5, result.stderr
        assert f'{job}:3: job.name = "tiny": {job.parent}/tiny holds a run of another experiment' in result.stderr
        assert ", is 0.5\n" in result.stderr and "--checkpoint.load=none" in result.stderr
    assert check(*other, "--checkpoint.load=none")[0] == 0
    job.write_text(job.read_text().replace("global_batch_size = 8\n", ""))
    assert "training.global_batch_size was 8, is 4" in check("--config", job, "--world-size", "2")[1]
    assert check("--config", job, "--world-size", "4")[0] == 0
    # Without a number of ranks there is no batch to compare.
    assert check("--config", job)[0] == 0


def test_launch_requires_a_global_batch_size_if_the_number_of_ranks_may_change(job: Path) -> None:
    job.write_text(job.read_text().replace("global_batch_size = 8\n", ""))
    result = run_loaded("launch", "--nnodes", "1:2", "--config", job)
    assert (result.returncode, len(result.stderr.splitlines())) == (2, 1)
    assert "training.global_batch_size: is required with --nnodes" in result.stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--nnodes=1:2", "--nnodes 1:2: hosts can join and leave only with --rdzv-backend c10d --rdzv-endpoint HOST:P"),
        ("--nnodes=2", "--nnodes 2: the hosts need an address: add --rdzv-backend c10d --rdzv-endpoint HOST:PORT, or"),
        ("--nnodes=2 --rdzv-backend=c10d", "--rdzv-backend c10d: needs --rdzv-endpoint HOST:PORT, with the same value"),
        ("--nnodes=2 --profiling.start_step=1 --profiling.ranks=[1,4]", "ranks.1 = 4: the run has at most 4 ranks; se"),
        ("--nnodes=1:3 --profiling.start_step=1 --profiling.ranks=[6]", "ranks.0 = 6: the run has at most 6 ranks; se"),
    ],
)
def test_options_that_no_run_can_start_with_are_one_error(
    options: str, words: str, job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["launch", "--config", str(job), "--nproc-per-node=2", *options.split()]) == 2
    error = capsys.readouterr().err
    assert words in error and len(error.splitlines()) == 1


def test_a_rendezvous_of_another_package_may_need_no_endpoint() -> None:
    check_rendezvous({"nnodes": "2", "rdzv-backend": "own"})


def test_the_number_of_hosts_may_be_set_by_the_variable_of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_NNODES", "2")
    assert plan_processes({"nproc-per-node": "3"}).world_size == 6
    with pytest.raises(UserError, match="error: PET_NNODES 2: the hosts need an address"):
        check_rendezvous({})
    with pytest.raises(UserError, match=r"--node-rank 2: .* since PET_NNODES is 2"):
        plan_processes({"node-rank": "2"})
    monkeypatch.setenv("PET_NNODES", "0")
    with pytest.raises(UserError, match="error: PET_NNODES 0: must be"):
        plan_processes({})


def test_a_run_that_restarts_with_fewer_ranks_goes_on(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overrides = ["--profiling.start_step=1", "--profiling.ranks=[2]"]
    load_to_train(Namespace(config=str(job), overrides=overrides, key_options={}), 2)
    assert main(["check", "--config", str(job), "--world-size=2", *overrides]) == 2
    assert "ranks.0 = 2: the run has at most 2 ranks" in capsys.readouterr().err


@pytest.mark.slow
def test_torchrun_prints_a_bad_jobs_message_once(job: Path) -> None:
    result = run("torch.distributed.run", "--nproc-per-node", "3", "-m", "titan_launch", "--config", job)
    assert result.returncode == 1  # torchrun has this status for every status of its workers
    assert result.stderr.count("training.global_batch_size = 8") == 1


@pytest.mark.slow
def test_an_error_that_only_the_trainer_finds_is_one_message_and_status_2(job: Path) -> None:
    rule = '[[precision.rules]]\nmatch = "layers.*.attention_nrom"\n'
    job.write_text(job.read_text() + rule)
    line = len(job.read_text().splitlines())
    result = run_loaded(*LAUNCH, "--max-restarts", "2", "--config", job)
    assert result.returncode == 2  # a restart would fail in the same way
    message = f'{job}:{line}: precision.rules.0.match = "layers.*.attention_nrom": matches no module'
    assert result.stderr.count(message) == 1
    assert "attention_norm" in result.stderr and "Traceback" not in result.stderr
    assert not (job.parent / "tiny").exists()


def test_a_folder_that_cannot_be_written_is_one_message(job: Path) -> None:
    status, _, reported = run_command(["--config", str(job), f"--job.dump_folder={job}"], REPO)
    assert status == 2
    assert reported.count("cannot be written") == 1 and "job.dump_folder" in reported
    assert "Traceback" not in reported


LAUNCH = ("launch", "--nproc-per-node", "2")
TORCHRUN = ("torch.distributed.run", "--nproc-per-node", "2", "-m", "titan_launch")
BUSY = "\n        else: time.sleep(1)"


def with_model(job: Path, source: str) -> None:
    """Let a job train the user's model of this source, which is written beside the job file."""
    job.with_name("my_model.py").write_text(source)
    text = job.read_text()
    start, end = text.index("[model.args]"), text.index("[data]")
    job.write_text(f'{text[:start]}[model]\nname = "my_model:build"\n\n{text[end:]}')


def run_with_model(job: Path, action: str, command: Sequence[str] = LAUNCH) -> subprocess.CompletedProcess[str]:
    """Train a model on two ranks whose forward runs `action` on rank 1."""
    with_model(job, model_source(f'if os.environ["RANK"] == "1": {action}'))
    start = run_loaded if command == LAUNCH else run
    return start(*command, "--config", job, PYTHONPATH=str(job.parent))


def test_a_model_that_cannot_be_built_shows_its_own_traceback_once(job: Path) -> None:
    with_model(job, model_source(in_build="raise RuntimeError('no model today')"))
    status, _, reported = run_command(["--config", str(job)], job.parent)
    assert status == 2
    assert reported.count("RuntimeError: no model today") == 1
    assert "my_model.py" in reported and "titan_launch/models" not in reported


@pytest.mark.parametrize(
    "command", [LAUNCH, pytest.param(TORCHRUN, marks=pytest.mark.slow)], ids=["launch", "torchrun"]
)
def test_a_run_that_fails_ends_with_the_failing_ranks_traceback(job: Path, command: Sequence[str]) -> None:
    """Rank 0 is busy when it is stopped, so it would have time to log the SIGTERM. torchrun prints the banner."""
    result = run_with_model(job, "raise RuntimeError('no forward today')" + BUSY, command=command)
    assert result.returncode == 1
    assert result.stderr.count("RuntimeError: no forward today") == 1
    assert "error: the run failed on rank 1; see the traceback above" in result.stderr
    assert "SIGTERM" not in result.stdout
    has_banner = any(text in result.stderr for text in ("ChildFailedError", "=====", "SIGTERM"))
    assert has_banner == (command == TORCHRUN)


@pytest.mark.parametrize(
    ("action", "status", "message"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", 128 + 9, "was killed by SIGKILL"),
        ("os._exit(7)", 7, "ended with status 7: Python code called os._exit"),
        ("os._exit(0)", 1, "ended with status 0: Python code called"),
    ],
    ids=["killed", "status 7", "status 0"],
)
@pytest.mark.slow
def test_a_rank_that_exits_without_a_message_is_named(job: Path, action: str, status: int, message: str) -> None:
    """tests/launch/test_torchrun.py kills ranks, too."""
    result = run_with_model(job, action + BUSY)
    assert result.returncode == status
    assert result.stderr.splitlines()[-1].startswith(f"error: rank 1 {message}")
    assert "SIGTERM" not in result.stdout + result.stderr


def assert_header(printed: str, ranks: int) -> None:
    """Check that a run starts with about ten aligned lines `name: value`."""
    lines = dict(re.findall(r"^(\S[^:\n]*): +(\S.*)$", printed.partition("\nstep ")[0], flags=re.MULTILINE))
    names = ["model", "ranks", "global batch", "precision", "gradient accumulation", "activation checkpointing"]
    names += ["optimizer", "steps", "device", "data", "folder"]
    assert [name for name in lines if name in names] == names
    assert lines["ranks"] == ("1" if ranks == 1 else "2 = 2 shards")
    division = "1 rank x 2 samples x 4 microbatches" if ranks == 1 else "2 ranks x 2 samples x 2 microbatches"
    assert lines["global batch"] == f"8 samples = {division}"
    assert re.fullmatch(r"cpu, [\d.]+ GiB per rank(, predicted peak memory [\d.e-]+ GiB)?", lines["device"])
    assert lines["precision"] == "compute float32, storage float32, gradient reduction float32"


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [LAUNCH, TORCHRUN], ids=["launch", "torchrun"])
def test_a_launcher_and_python_train_the_same(job: Path, launcher: Sequence[str]) -> None:
    seen = []
    options = ("--log-level", "debug") if launcher == LAUNCH else ()
    for command in (("--config", job, "--log-level=debug"), (*launcher, "--config", job, *options)):
        result = run(*command) if launcher == TORCHRUN and command[0] == TORCHRUN[0] else run_loaded(*command)
        # torchrun itself may warn.
        assert result.returncode == 0 and (not result.stderr or command[0] == "torch.distributed.run"), result.stderr
        assert result.stdout.count("checkpoints: none will be saved") == 1
        assert result.stdout.splitlines()[-1].startswith("done: 3 steps; nothing was saved (")
        seen.append(losses(job.parent))
        assert_header(result.stdout, ranks=1 if "--nproc-per-node" not in command else 2)
        assert ("\nFSDP2 units\nunit " in result.stdout) is ("torch.distributed.run" not in command)
        assert "run: FSDP2 units\n" in (job.parent / "tiny" / "logs" / "attempt-1" / "rank_0.log").read_text()
    assert seen[1] == pytest.approx(seen[0], rel=1e-6)


def test_the_resolved_config_runs_the_same_again(job: Path) -> None:
    assert run_command(["--config", str(job), "--training.steps=2"], REPO)[0] == 0
    first = losses(job.parent)
    assert run_command(["--config", str(job.parent / "tiny" / "config.json")], REPO)[0] == 0
    assert losses(job.parent) == first
    assert len(first) == 2


@pytest.mark.slow
def test_launched_runs_end_with_status_0_and_print_no_error(job: Path) -> None:
    """If the exit were not handled, one in four of these runs would die of SIGABRT after its work. The many other runs
    of the tests check the same."""
    for _ in range(3):
        result = run("titan_launch", *LAUNCH, "--config", job, "--training.steps=1")
        assert (result.returncode, result.stderr) == (0, "")


def test_a_first_plan_without_torch_says_that_it_needs_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    result = run_without_torch("plan", "--config", "configs/resnet_bn.toml", "--world-size", "2")
    assert result.returncode == 2 and "this plan of the model resnet needs torch: pip install torch" in result.stderr
    assert "Traceback" not in result.stderr


def test_outputs_are_options_and_inputs_are_positions() -> None:
    """`--out` names what a command writes, whether it has one input or several."""
    assert {name for name in COMMANDS if "--out" in options_of(name)} == {
        *("init", "migrate", "plan", "measure-device", "prove", "prepare", "import", "export", "evaluate", "report"),
        "compare",
    }
    positions = {action.metavar for name in COMMANDS for action in parser_of(name)._get_positional_actions()}
    assert positions == {"NAME", "OLD.toml", "PATH", "FOLDER", "SOURCE", "RUN"}
