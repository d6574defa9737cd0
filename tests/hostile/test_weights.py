"""Folders of weights and of adapters from strangers: each ends in one sentence."""

from __future__ import annotations

import copy
import json
import random
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.hostile.runner import Runner
from tests.hostile.weights_folders import (
    ADAPTER,
    ADAPTERS,
    CASES,
    CLASSES,
    CONFIG,
    FILE,
    INDEX,
    SHAPES,
    header_of,
    keys,
    write_adapter,
    write_file,
    write_folder,
)
from tests.models.parity import CASES as FAMILY_CASES
from tests.models.parity import VOCABULARY
from tests.models.published_configs import PUBLISHED_FILES
from tests.sampling import rest_is_slow, sampled
from tests.trace.traces import model_inventory
from titan_launch.config.job import JobConfig
from titan_launch.config.sections.model import LoRAConfig, ModelConfig
from titan_launch.core.errors import ConfigError
from titan_launch.core.files import file_inside
from titan_launch.models.architectures import resolve_args
from titan_launch.models.huggingface.adapter_config import matching_limited, read_config
from titan_launch.models.huggingface.config_json import read_folder_config
from titan_launch.models.huggingface.files import WeightsError
from titan_launch.models.weights.adapters import AdapterFolder
from titan_launch.models.weights.folder import find_weights

pytest.importorskip("safetensors")

JOB = """
[model]
weights = "hf"

[data]
kind = "synthetic"
vocab_size = 29

[training]
steps = 1
local_batch_size = 1
seq_len = 16

[metrics]
enable_tensorboard = false
"""
COMMANDS = {
    "check": ["check", "--config", "job.toml"],
    "plan": ["plan", "--config", "job.toml"],
    "train": ["train", "--config", "job.toml"],
    "import_": ["import", "hf", "--out", "imported"],
    "export": ["export", "hf", "--out", "exported"],
    "generate": ["generate", "hf", "--prompt", "a", "--device", "cpu", "--max-new-tokens", "2"],
}


@pytest.mark.parametrize("case", rest_is_slow(list(CASES), every=11))
def test_a_hostile_folder_ends_each_command_with_one_sentence(case: str, runner: Runner, tmp_path: Path) -> None:
    change = CASES[case]
    change.change(write_folder(tmp_path / "hf"))
    (tmp_path / "job.toml").write_text(JOB)
    for command, arguments in COMMANDS.items():
        sentence = change.others.get(command, change.sentence)
        if sentence is not None:
            runner.run(arguments, tmp_path).assert_one_sentence(sentence)
    assert not {"imported", "exported", "outputs"} & {path.name for path in tmp_path.iterdir()}


def test_the_folder_without_changes_is_accepted(runner: Runner, tmp_path: Path) -> None:
    """The other commands accept the folder of the next test, too."""
    write_folder(tmp_path / "hf")
    (tmp_path / "job.toml").write_text(JOB)
    for command in ("train", "export"):
        ended = runner.run(COMMANDS[command], tmp_path, memory=8 << 30)  # what the libraries of a run reserve
        assert ended.status == 0, (command, ended.text)


def test_millions_of_positions_take_no_memory(runner: Runner, tmp_path: Path) -> None:
    keys(max_position_embeddings=10**9)(write_folder(tmp_path / "hf"))
    (tmp_path / "job.toml").write_text(JOB)
    for command in ("check", "plan", "import_", "generate"):
        ended = runner.run(COMMANDS[command], tmp_path)
        ended.assert_harmless()
        assert ended.status == 0, (command, ended.text)


def test_the_tables_of_positions_grow_with_the_sequence(runner: Runner, tmp_path: Path) -> None:
    keys(max_position_embeddings=10**5)(write_folder(tmp_path / "hf"))
    prompt = "a " * 9000
    ended = runner.run(["generate", "hf", "--prompt", prompt, "--max-new-tokens", "1"], tmp_path, memory=4 << 30)
    assert ended.status == 0 and "prompt: 9,000 tokens" in ended.stderr, ended.text


@pytest.mark.parametrize("case", CLASSES)
def test_a_class_of_transformers_is_refused_before_it_is_imported(case: str, runner: Runner, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    changes, sentence = CLASSES[case]
    write_folder(tmp_path / "hf", {**CONFIG, **changes})
    (tmp_path / "job.toml").write_text(JOB.replace("weights =", 'name = "huggingface"\npath ='))
    ended = runner.run(COMMANDS["check"], tmp_path)
    ended.assert_one_sentence(sentence)
    assert ended.seconds < 2


_BUILT = {
    "buffers": ({"head_dim": 2**31 - 2}, "bytes of buffers"),
    "masks": (
        {"model_type": "gpt_neo", "architectures": ["GPTNeoForCausalLM"], "max_position_embeddings": 2**20}
        | {"num_layers": 2, "attention_types": [[["global"], 2]]},
        "bytes of buffers",
    ),
    "activation": ({"hidden_act": "\x1b[2J\nerror: x"}, "cannot be built from these arguments: KeyError"),
    "rope": ({"rope_scaling": {"rope_type": "x"}}, "cannot be built from these arguments: KeyError"),
}


@pytest.mark.slow
def test_no_class_of_transformers_loads_what_a_key_names(tmp_path: Path) -> None:
    file = tmp_path / "named_by_a_stranger.safetensors"
    file.write_text("")
    command = [sys.executable, "-m", "tests.hostile.class_keys", str(file)]
    *touched, count = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert not touched
    assert int(count) > 400


@pytest.mark.parametrize("case", rest_is_slow(list(_BUILT), 4))
def test_a_class_of_transformers_with_hostile_sizes_is_not_built(case: str, runner: Runner, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    changes, sentence = _BUILT[case]
    write_folder(tmp_path / "hf", {**CONFIG, **changes})
    (tmp_path / "job.toml").write_text(JOB.replace("weights =", 'name = "huggingface"\npath ='))
    ended = runner.run(COMMANDS["plan"], tmp_path)
    ended.assert_one_sentence(sentence)


@pytest.mark.parametrize("size", ["n_layers = 1_000_000_000", "dim = 1_000_000_000_000", "vocab_size = 10_000_000_000"])
def test_sizes_in_a_job_have_limits(size: str, runner: Runner, tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(f"[model]\nname = 'llama3'\n[model.args]\n{size}\n[data]\nkind = 'synthetic'\n")
    for command in ("check", "plan"):
        runner.run(COMMANDS[command], tmp_path).assert_one_sentence("must be at most")


def test_a_cache_of_hugging_face_is_followed_and_nothing_else(runner: Runner, tmp_path: Path) -> None:
    repository = tmp_path / "hub" / "models--a--b"
    blobs, snapshot = repository / "blobs", repository / "snapshots" / "0123"
    snapshot.parent.mkdir(parents=True)
    write_folder(snapshot)
    blobs.mkdir()
    for index, file in enumerate(sorted(snapshot.iterdir())):
        file.rename(blobs / str(index))
        file.symlink_to(f"../../blobs/{index}")
    ended = runner.run(["import", str(snapshot), "--out", "imported"], tmp_path)
    assert ended.status == 0, ended.text
    copied = tmp_path / "imported" / "huggingface" / "tokenizer.json"
    assert copied.is_file() and not copied.is_symlink()

    for target in (repository / "refs", tmp_path / "outside"):
        target.write_text("secret")
        (snapshot / "vocab.json").unlink(missing_ok=True)
        (snapshot / "vocab.json").symlink_to(target)
        with pytest.raises(OSError, match="outside of the folder"):
            file_inside(snapshot, "vocab.json")
        runner.run(["import", str(snapshot), "--out", "again"], tmp_path).assert_one_sentence(
            "vocab.json cannot be copied"
        )


def test_files_of_an_imported_folder_are_not_taken_from_elsewhere(runner: Runner, tmp_path: Path) -> None:
    write_folder(tmp_path / "hf")
    assert runner.run(COMMANDS["import_"], tmp_path).status == 0
    companions = tmp_path / "imported" / "huggingface"
    companions.rename(tmp_path / "elsewhere")
    companions.symlink_to(tmp_path / "elsewhere")
    runner.run(["export", "imported", "--out", "out"], tmp_path).assert_one_sentence(
        "huggingface is a link to a file outside"
    )


@pytest.mark.parametrize("case", rest_is_slow(list(ADAPTERS), every=6))
def test_a_hostile_adapter_ends_each_command_with_one_sentence(case: str, runner: Runner, tmp_path: Path) -> None:
    change, sentence = ADAPTERS[case]
    write_folder(tmp_path / "hf")
    change(write_adapter(tmp_path / "adapter"))
    lora = '[lora]\ntargets = ["layers.*.attention.wq"]\nrank = 2\nalpha = 4.0\nadapter = "adapter"\n'
    (tmp_path / "job.toml").write_text(f"{JOB}\n{lora}")
    runner.run(COMMANDS["train"], tmp_path).assert_one_sentence(sentence)


# Fuzzing of the readers, in this process.

HOSTILE: tuple[Any, ...] = (
    *(None, True, False, "", "x", "\x1b[2J\n", [], {}, [[]], [None], {"a": {}}, ["x"] * 2000, {"x": list(range(2000))}),
    *(0, -1, 1, 2, 1.5, -0.0, 1e-320, 1e300, 10**6, 10**9, 2**31, 2**63, 10**299, -(10**299), [10**9], "9" * 1000),
)


def _paths(table: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    for key, value in table.items() if isinstance(table, dict) else enumerate(table):
        yield (*path, key)
        if isinstance(value, dict | list):
            yield from _paths(value, (*path, key))


def _mutated(table: dict[str, Any], path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    changed: Any = copy.deepcopy(table)
    inner = changed
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return dict(changed)


def _read(folder: Path, most_layers: int = 100) -> None:
    """Read a folder's `config.json`, and describe the model if it is accepted. All errors but WeightsError pass.

    `most_layers`: a model of more layers is not described, which takes the most time.
    """
    start = time.process_time()
    try:
        found = read_folder_config(folder)
        args = resolve_args(found.name, found.flavor, found.args)
        args.effective()
        model = ModelConfig(name=found.name, flavor=found.flavor, args=dict(found.args))
        if (args.num_layers() or 0) < most_layers:
            model_inventory(JobConfig(model=model))
    except WeightsError as error:
        assert all(character.isprintable() for character in str(error)) and len(str(error)) < 20_000
    assert time.process_time() - start < 10


@sampled("seeds", range(0, 64, 8), every=8)  # the whole suite takes an eighth of the cases
def test_each_key_of_config_json_with_hostile_values(seeds: tuple[int, ...], tmp_path: Path) -> None:
    tables = [{"model_type": kind, **sizes, "vocab_size": VOCABULARY} for kind, sizes in FAMILY_CASES.values()]
    tables += [dict(table) for _, table in sorted(PUBLISHED_FILES.items())]
    cases = [(table, path, *case) for table in tables for path in _paths(table) for case in enumerate(HOSTILE)]
    count = 0
    for table, path, index, value in cases:
        if zlib.crc32(f"{table['model_type']} {path} {index}".encode()) % 64 in seeds:
            (tmp_path / "config.json").write_text(json.dumps(_mutated(table, path, value)))
            every = 2 if len(seeds) > 1 else 8  # the default suite describes one of eight large models
            _read(tmp_path, 100 if count % every == 0 else 8)
            count += 1
    assert count > 250


@sampled("seeds", range(2000), every=10)
def test_two_keys_and_bytes_of_config_json(seeds: tuple[int, ...], tmp_path: Path) -> None:
    tables = [{"model_type": kind, **sizes, "vocab_size": VOCABULARY} for kind, sizes in FAMILY_CASES.values()]
    for seed in seeds:
        draw = random.Random(seed)
        table = draw.choice(tables)
        for _ in range(2):
            table = {**table, draw.choice(list(table)): draw.choice(HOSTILE)}
        (tmp_path / "config.json").write_bytes(_flipped(json.dumps(table).encode(), draw, seed % 2))
        _read(tmp_path)


def _flipped(content: bytes, draw: random.Random, number: int) -> bytes:
    """Return bytes with some changes: other bytes, cuts, and repetitions."""
    for _ in range(number):
        start, stop = sorted(draw.choices(range(len(content) + 1), k=2))
        stop = min(stop, start + draw.choice((1, 4, 100)))
        middle = draw.choice((b"", bytes([draw.randrange(256)]), content[start:stop] * 2, b'"', b"9" * 20, b"[{"))
        content = content[:start] + middle + content[stop:]
    return content


@sampled("seeds", range(2000), every=10)
def test_bytes_and_json_of_headers_and_indices(seeds: tuple[int, ...], tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "hf")
    found = read_folder_config(folder)
    model = ModelConfig(name=found.name, flavor=found.flavor, args=dict(found.args), weights=str(folder))
    inventory = model_inventory(JobConfig(model=model))
    whole = (folder / FILE).read_bytes()
    for seed in seeds:
        draw, header = random.Random(seed), header_of(SHAPES)
        (folder / INDEX).unlink(missing_ok=True)
        if seed % 4 == 0:
            (folder / FILE).write_bytes(_flipped(whole[:3000], draw, 2) + whole[3000:])
        elif seed % 4 == 1:
            table = _mutated(header, draw.choice(list(_paths(header))), draw.choice(HOSTILE))
            write_file(folder / FILE, json.dumps(table).encode(), 4096)
        elif seed % 4 == 2:
            text = _flipped(json.dumps(header).encode(), draw, 2)
            write_file(folder / FILE, text, 13_000)
        else:
            (folder / FILE).unlink(missing_ok=True)
            index: Any = {"metadata": {}, "weight_map": dict.fromkeys(SHAPES, "a.safetensors")}
            index = _mutated(index, draw.choice(list(_paths(index))), draw.choice(HOSTILE))
            write_file(folder / "a.safetensors", header)
            (folder / INDEX).write_bytes(_flipped(json.dumps(index).encode(), draw, seed % 8 // 4))
        start = time.process_time()
        try:
            find_weights(model, inventory)
        except ConfigError as error:
            text_of_error = str(error.problems[0].reason)
            assert all(character.isprintable() or character == "\n" for character in text_of_error), text_of_error
        assert time.process_time() - start < 10


@sampled("seeds", range(2000), every=15)
def test_keys_and_bytes_of_adapters(seeds: tuple[int, ...], tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "adapter")
    whole = (folder / "adapter_model.safetensors").read_bytes()
    config = LoRAConfig(targets=("layers.*.attention.wq",), rank=2, alpha=4.0)
    names = ["model.layers.0.self_attn.q_proj", "model.layers.1.mlp"]
    for seed in seeds:
        draw, table = random.Random(seed), dict(ADAPTER)
        for _ in range(draw.choice((1, 2))):
            patterns = ["(", "a{9}{9}", "(?i)x", ".*", "\\", "[[a]", "*", {"(": 1}, {".*": 10**9}, [["x"]], {"x": 0}]
            table[draw.choice(list(table))] = draw.choice([*HOSTILE, *patterns])
        (folder / "adapter_config.json").write_bytes(_flipped(json.dumps(table).encode(), draw, seed % 3 // 2))
        (folder / "adapter_model.safetensors").write_bytes(_flipped(whole, draw, seed % 5 // 4))
        start = time.process_time()
        try:
            adapters = AdapterFolder(folder).config
            adapters.differences(config)
            with matching_limited():
                for name in names:
                    adapters.adapts_module(name)
                    adapters.scale_of(name)
        except WeightsError as error:
            assert all(character.isprintable() or character == "\n" for character in str(error)), str(error)
        assert time.process_time() - start < 10


def test_a_pattern_that_never_ends_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("titan_launch.models.huggingface.adapter_config._MATCHING_SECONDS", 0.2)
    config = read_config(write_adapter(tmp_path / "adapter", target_modules="(.+)+\\.x"))
    with pytest.raises(WeightsError, match="take too long to match"), matching_limited():  # limits do not nest
        config.adapts_module("model.layers.0.self_attn.q_proj." + "q" * 30)
