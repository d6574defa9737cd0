"""`migrate` converts TorchTitan's job files, and names every key that the new file does not have."""

from __future__ import annotations

import importlib.util
import inspect
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import tomli

from tests.config.loading.hints import denied_keys, keys, strings, unquoted_keys, wrong_keys, wrong_options
from tests.distributed import run_command
from tests.sampling import rest_is_slow
from titan_launch.cli import main
from titan_launch.config import migration
from titan_launch.config.loading.foreign_keys import TORCHTITAN_KEYS
from titan_launch.config.loading.load import load_job
from titan_launch.config.migration import DEFAULTS, migrate
from titan_launch.data.tokenizers import train_tokenizer
from titan_launch.models.build import build_model

OFF: dict[str, Any] = {
    "profiling": {"enable_profiling": False, "save_traces_folder": "profile_trace", "profile_freq": 10},
    "metrics": {"log_freq": 1, "enable_tensorboard": False, "save_tb_folder": "tb", "enable_wandb": False},
    "compile": {"enable": False, "components": ["model", "loss"]},
    "validation": {"enable": False, "dataset": "c4_validation", "freq": 5, "steps": 10},
    "quantize": {"linear": {"float8": {"enable_fsdp_float8_all_gather": False, "filter_fqns": ["output"]}}},
    "checkpoint": {
        "enable": False,
        "folder": "checkpoint",
        "interval": 10,
        "last_save_model_only": True,
        "export_dtype": "float32",
        "async_mode": "disabled",
    },
}
"""The sections that are the same in all shipped files of the Llama models: everything is switched off."""


def shipped(name: str, flavor: str, tokenizer: str, **sections: dict[str, Any]) -> dict[str, Any]:
    """Return a job with the keys of a shipped file. `sections` are merged over the common ones."""
    job: dict[str, Any] = {
        "job": {"dump_folder": "./outputs", "description": f"{name} {flavor} training", "print_config": False},
        "model": {"name": name, "flavor": flavor, "hf_assets_path": tokenizer},
        "optimizer": {"name": "AdamW", "lr": 3e-4, "eps": 1e-8},
        "lr_scheduler": {"warmup_steps": 200},
        "training": {"local_batch_size": 1, "seq_len": 8192, "max_norm": 1.0, "steps": 1000, "dataset": "c4"},
        "parallelism": {
            "data_parallel_replicate_degree": 1,
            "data_parallel_shard_degree": -1,
            "tensor_parallel_degree": 1,
            "enable_async_tensor_parallel": False,
            "pipeline_parallel_degree": 1,
            "context_parallel_degree": 1,
        },
        "activation_checkpoint": {"mode": "full"},
    }
    for section, values in {**OFF}.items():
        job[section] = {**values}
    for section, values in sections.items():
        job[section] = {**job.get(section, {}), **values}
    return job


DEBUG: dict[str, dict[str, Any]] = {
    "optimizer": {"lr": 8e-4},
    "lr_scheduler": {"warmup_steps": 2, "decay_ratio": 0.8, "decay_type": "linear", "min_lr_factor": 0.0},
    "training": {"local_batch_size": 8, "seq_len": 2048, "steps": 10, "dataset": "c4_test"},
    "activation_checkpoint": {"mode": "selective", "selective_ac_option": "2"},
}
TENSOR = {"parallelism": {"tensor_parallel_degree": 8}}
FLOAT8 = {"linear": {"float8": {"enable_fsdp_float8_all_gather": True, "filter_fqns": ["output"]}}}
JOBS: dict[str, dict[str, Any]] = {
    "llama3 debug": shipped("llama3", "debugmodel", "tokenizer", **DEBUG),
    "llama3 8B": shipped("llama3", "8B", "tokenizer", profiling={"enable_profiling": True}),
    "llama3 70B": shipped("llama3", "70B", "tokenizer", **TENSOR, training={"local_batch_size": 8}),
    "llama3 405B": shipped(
        "llama3",
        "405B",
        "tokenizer",
        model={"converters": ["float8"]},
        parallelism={"tensor_parallel_degree": 8, "enable_async_tensor_parallel": True},
        compile={"enable": True},
        quantize=FLOAT8,
    ),
    "llama3 fault-tolerant": shipped(
        "llama3",
        "debugmodel",
        "tokenizer",
        **DEBUG,
        fault_tolerance={"enable": True, "sync_steps": 10},
        comm={"train_timeout_seconds": 15},
    ),
    "llama4 debug": shipped("llama4", "debugmodel", "tokenizer", **DEBUG),
    "llama4 17bx16e": shipped(
        "llama4", "17bx16e", "tokenizer", parallelism={"tensor_parallel_degree": 8, "expert_tensor_parallel_degree": 8}
    ),
    "llama4 17bx128e": shipped(
        "llama4", "17bx128e", "tokenizer", parallelism={"tensor_parallel_degree": 8, "pipeline_parallel_degree": 4}
    ),
}
"""The job files of Llama models that TorchTitan v0.2 ships, with their keys and values."""

LOST = {
    "llama3 debug": [],
    "llama3 8B": ["profiling.profile_freq"],
    "llama3 70B": [],
    "llama3 405B": ["model.converters", "parallelism.enable_async_tensor_parallel"],
    "llama3 fault-tolerant": ["fault_tolerance.enable"],
    "llama4 debug": ["model.name"],
    "llama4 17bx16e": ["model.name", "parallelism.tensor_parallel_degree", "training.local_batch_size"],
    "llama4 17bx128e": [
        "model.name",
        "parallelism.pipeline_parallel_degree",
        "parallelism.tensor_parallel_degree",
        "training.local_batch_size",
    ],
}
"""The keys of each job that change the run, and cannot be carried."""


def toml(table: dict[str, Any], prefix: str = "") -> str:
    """Return a table of tables as TOML."""
    values = {key: value for key, value in table.items() if not isinstance(value, dict)}
    head = f"[{prefix}]\n" if values else ""
    lines = "".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items())
    inner = (toml(value, f"{prefix}.{key}".strip(".")) for key, value in table.items() if isinstance(value, dict))
    return head + lines + "\n" * bool(values) + "".join(inner)


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in a folder with the tokenizer and the small data set that TorchTitan's files name."""
    monkeypatch.chdir(tmp_path)
    pytest.importorskip("tokenizers")
    train_tokenizer(["text"], 300, Path("tokenizer"))
    Path("tests/assets/c4_test").mkdir(parents=True)
    Path("tests/assets/c4_test/data.json").write_text('{"text": "a"}\n')


def planned(path: str, ranks: int) -> dict[str, Any]:
    command = ["plan", "--config", path, "--world-size", str(ranks), "--json", "--rows", "own"]
    status, printed, reported = run_command(command, Path.cwd())
    assert status == 0, reported
    return dict(json.loads(printed))


@pytest.mark.parametrize("name", rest_is_slow(list(JOBS), 6))
def test_a_shipped_llama_file_passes_check_and_plan(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    if name.startswith("llama4"):
        pytest.importorskip("transformers")
    Path("old.toml").write_text(toml(JOBS[name]))
    assert main(["migrate", "old.toml", "--out", "new.toml"]) == 0
    out = capsys.readouterr().out
    lost = re.search(r"^keys not converted \(the run may differ\):\n((?:  .*\n)*)", out, flags=re.MULTILINE)
    keys = re.findall(r"^  old.toml:\d+: ([\w.]+) = ", lost[1] if lost else "", flags=re.MULTILINE)
    assert sorted(keys) == LOST[name] and "to do before" not in out
    assert main(["check", "--config", "new.toml", "--world-size", "64"]) == 0, capsys.readouterr().err
    if not name.startswith("llama4 17b"):  # their traces take a while, and differ from `debug` in sizes only
        assert planned("new.toml", 64)["parameters"] > 5e6


def test_fsdp_shards_over_the_ranks_of_other_axes_of_a_class_of_transformers() -> None:
    degrees = {"data_parallel_shard_degree": 2, "data_parallel_replicate_degree": 4, "tensor_parallel_degree": 8}
    validation = {"enable": True, "steps": 3, "local_batch_size": 5}
    job = {"model": {"name": "llama4"}, "parallelism": degrees, "validation": validation}
    migration = migrate(job)
    assert migration.new["parallelism", "data_parallel_shard_degree"][0] == 2 * 8
    assert migration.new["training", "local_batch_size"][0] == 8 / 8, "a step has as many samples as before"
    assert migration.new["validation", "max_samples"][0] == 3 * 5 * 8
    notes = list(map(str, migrate({**job, "training": {"local_batch_size": 12}}).lost))
    assert any("12 samples cannot be divided among the 8 ranks" in note for note in notes), notes


@pytest.mark.parametrize("name", JOBS)
def test_every_key_is_carried_or_named(name: str) -> None:
    """A value of the old file is in the new one, or has a note; the line of a note is that of its key."""
    text = toml(JOBS[name])
    migration = migrate(tomli.loads(text))
    notes = [*migration.lost, *migration.needless]
    noted = {".".join(map(str, note.key)) for note in notes}
    assert all(note.reason for note in notes)
    given = {f"{section}.{key}" for section, values in JOBS[name].items() for key in values if section != "quantize"}
    converted = migration.done | {
        key for key in given if tuple((TORCHTITAN_KEYS.get(key) or key).split(".")) in migration.new
    }
    assert given <= converted | noted


def test_the_training_is_the_same() -> None:
    """Keys that the old file does not set have TorchTitan's defaults, and the schedule is TorchTitan's."""
    Path("old.toml").write_text('[model]\nhf_assets_path = "tokenizer"\n')
    Path("tokenizer/special_tokens_map.json").write_text('{"bos_token": "<|endoftext|>"}')
    assert main(["migrate", "old.toml"]) == 0
    config = load_job("old.migrated.toml").config
    assert config.tokenizer.begin_of_document == "<|endoftext|>"
    training, schedule = config.training, config.lr_scheduler
    assert (training.seq_len, training.local_batch_size, training.steps) == (2048, 8, 10_000)
    assert (config.optimizer.lr, schedule.kind, schedule.warmup_steps) == (8e-4, "linear", 200)
    assert config.activation_checkpoint.mode == "selective" and config.activation_checkpoint.selective_ac_option == 2
    assert not config.metrics.enable_tensorboard and not config.checkpoint.save_last
    (group,) = config.optimizer.param_groups
    assert (group.match, group.weight_decay) == ("**", 0.1), "TorchTitan decays norms, too"
    model = build_model(config.model, 16).module
    assert sum(parameter.numel() for parameter in model.parameters()) == 6_163_712


@pytest.mark.parametrize(
    ("section", "keys", "expected"),
    [
        ("lr_scheduler", {"decay_type": "cosine"}, {"lr_scheduler.kind": "cosine"}),
        ("lr_scheduler", {"decay_type": "sqrt"}, {"lr_scheduler.decay_ratio": 0.98, "lr_scheduler.decay_type": "sqrt"}),
        ("lr_scheduler", {"decay_ratio": 0.5}, {"lr_scheduler.kind": "warmup_stable_decay"}),
        ("checkpoint", {"async_mode": "async"}, {"checkpoint.async_mode": "thread"}),
        ("checkpoint", {"load_step": 30}, {"checkpoint.load": 30}),
        ("checkpoint", {"keep_latest_k": 3}, {"checkpoint.keep_latest": 3}),
        ("checkpoint", {"initial_load_path": "hf", "initial_load_in_hf": True}, {"model.weights": "hf"}),
        ("debug", {"seed": 7, "deterministic": True}, {"training.seed": 7, "debug.deterministic": True}),
        ("training", {"mixed_precision_param": "float32"}, {"precision.param_dtype": "float32"}),
        ("training", {"dtype": "bfloat16"}, {"precision.storage_dtype": "bfloat16"}),
        ("training", {"dataset": "c4_test", "dataset_path": "x"}, {"data.path": "x", "data.kind": "jsonl"}),
        ("parallelism", {"disable_loss_parallel": True}, {"parallelism.loss_parallel": False}),
        ("parallelism", {"context_parallel_load_balancer": "headtail"}, {
            "parallelism.context_parallel_load_balance": True
        }),
        ("parallelism", {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "interleaved1f1b"}, {
            "parallelism.pipeline_parallel_degree": 2,
            "parallelism.pipeline_parallel_schedule": "Interleaved1F1B",
            "training.local_batch_size": 1,
            "training.global_batch_size": 32,
        }),
        ("model", {"converters": ["float8"]}, {"float8.enable": True, "float8.recipe": "tensorwise"}),
        ("metrics", {"enable_wandb": True}, {"metrics.sinks": ["wandb"]}),
        ("profiling", {"enable_profiling": True, "profiler_active": 3}, {
            "profiling.start_step": 8,
            "profiling.num_steps": 3,
        }),
        ("profiling", {"enable_memory_snapshot": True}, {"profiling.memory": True, "profiling.start_step": 10}),
        ("validation", {"enable": True, "steps": 10}, {"validation.max_samples": 640, "validation.freq": 10}),
    ],
)  # fmt: skip
def test_a_key_with_another_meaning_is_converted(section: str, keys: dict[str, Any], expected: dict[str, Any]) -> None:
    migration = migrate({section: keys}, ranks=8)
    assert {".".join(map(str, key)): value for key, (value, _) in migration.new.items()}.items() >= expected.items()
    assert migration.lost == []


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"model": {"name": "flux", "flavor": "dev"}}, "no model of this package"),
        ({"model": {"flavor": "8B_flex"}}, "documents of a sample attend to each other"),
        ({"model": {"converters": ["mx"]}}, "only float8 of linear layers is supported, not mx"),
        ({"training": {"dataset": "mine"}}, "not a data set of TorchTitan itself"),
        ({"optimizer": {"name": "Adam"}}, "the new job uses AdamW"),
        ({"parallelism": {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "DualPipeV"}}, "must be 1F1B"),
        ({"parallelism": {"pipeline_parallel_degree": 2}}, "set training.global_batch_size to 8 x"),
        ({"checkpoint": {"initial_load_path": "x"}}, "checkpoints of TorchTitan cannot be loaded"),
        ({"validation": {"enable": True, "steps": 10}}, "set validation.max_samples to 80 x"),
        ({"profiling": {"enable_profiling": True, "profile_freq": 5}}, "makes one profile, which ends with step 5"),
        ({"training": {"no_such_key": 1}}, "unknown key of TorchTitan"),
    ],
)
def test_a_key_that_cannot_be_carried_has_a_reason(table: dict[str, Any], words: str) -> None:
    reasons = [note.reason for note in migrate(table).lost]
    assert any(words in reason for reason in reasons), reasons


def test_profiles_after_the_last_step_are_left_out() -> None:
    migration = migrate({"profiling": {"enable_profiling": True, "profile_freq": 200}, "training": {"steps": 100}})
    assert not any(key[0] == "profiling" for key in migration.new)
    assert migration.lost == []


def test_every_sentence_of_migrate_is_true() -> None:
    """The keys, values and options that its texts name exist here, or in TorchTitan; no text denies what a key does."""
    theirs = {*TORCHTITAN_KEYS, *migration._TYPES}
    denials = ["float8 is not supported with parallelism.tensor_parallel_degree = …; the job computes in bf16"]
    texts = [text for text in strings(inspect.getsource(migration)) if " " in text]
    assert len(texts) > 30
    wrong = {text: wrong_keys(text) + wrong_options(text) for text in texts}
    wrong |= {text: [key for key in unquoted_keys(text) if key not in {*keys(), *theirs}] for text in texts}
    assert {text: names for text, names in wrong.items() if names} == {}
    assert [text for text in texts if denied_keys(text)] == denials


def test_bad_input_is_one_error(capsys: pytest.CaptureFixture[str]) -> None:
    Path("old.toml").write_text("steps = 10\n")
    Path("mine.toml").write_text("")
    for args, words in (
        (["old.toml"], "error: old.toml:1: steps: not a section"),
        (["old.toml", "--out", "mine.toml"], "mine.toml exists, and migrate never overwrites a file"),
        (["none.toml"], "none.toml: no such file"),
        (["."], "error: .: is a folder"),
        (["old.toml", "--out", "new.yaml"], "the name of a job file must end in .toml"),
    ):
        assert main(["migrate", *args]) == 2
        assert words in capsys.readouterr().err
    assert not Path("old.migrated.toml").exists()


@pytest.mark.skipif(importlib.util.find_spec("torchtitan") is None, reason="torchtitan is not installed")
def test_the_files_of_the_installed_package_convert(capsys: pytest.CaptureFixture[str]) -> None:
    """Also, the defaults of this package's table are those of TorchTitan."""
    spec = importlib.util.find_spec("torchtitan")
    assert spec is not None and spec.origin is not None
    files = sorted(Path(spec.origin).parent.glob("models/llama*/train_configs/*.toml"))
    for number, file in enumerate(files):
        text = re.sub(r'hf_assets_path = ".*"', 'hf_assets_path = "tokenizer"', file.read_text())
        Path(f"{number}.toml").write_text(text)
        assert main(["migrate", f"{number}.toml"]) == 0
        assert main(["check", "--config", f"{number}.migrated.toml", "--world-size", "256"]) == 0, file
    from torchtitan.config import JobConfig

    defaults = JobConfig().to_dict()
    for key, value in DEFAULTS.items():
        section, name = key.split(".")
        assert defaults[section][name] == value, key
    assert shutil.which("python") and files
