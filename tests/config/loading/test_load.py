"""Loading job files: merging, kinds, the round trip through JSON, and the modules that a check must not import."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tomli

from titan_launch.config.job import JobConfig
from titan_launch.config.loading.job_files import _similar_file
from titan_launch.config.loading.load import LoadedJob, dump_job, load_job
from titan_launch.config.rules import RULES
from titan_launch.config.sections.data import SyntheticData, TextData
from titan_launch.config.sections.training import Constant, Cosine
from titan_launch.core.errors import Problem, UserError

CONFIGS = Path(__file__).parents[3] / "configs"


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def load(text: str, *overrides: str, **bases: str) -> LoadedJob:
    """Load a job with this text, beside files of the given names and texts."""
    for name, base in bases.items():
        Path(f"{name}.toml").write_text(base, encoding="utf-8")
    Path("job.toml").write_text(text, encoding="utf-8")
    return load_job("job.toml", overrides)


def complaint(text: str, *overrides: str, **bases: str) -> str:
    """Return the error for a job file with this text."""
    with pytest.raises(UserError) as caught:
        load(text, *overrides, **bases)
    return str(caught.value)


def test_an_empty_file_is_a_job_of_defaults() -> None:
    assert load("").config == JobConfig()


def test_tables_merge_arrays_replace_and_the_extending_file_wins() -> None:
    config = load(
        "extends = ['one.toml', 'two.toml']\n[training]\nsteps = 3\n",
        one="[training]\nsteps = 1\nseq_len = 1\nseed = 1\n[precision]\nrules = [{type = 'A'}, {type = 'B'}]",
        two="[training]\nsteps = 2\nseq_len = 2\n[[precision.rules]]\nmatch = 'c'",
    ).config
    assert (config.training.steps, config.training.seq_len, config.training.seed) == (3, 2, 1)
    assert [(rule.type, rule.match) for rule in config.precision.rules] == [(None, "c")]


def test_extends_is_relative_to_the_file_it_stands_in() -> None:
    Path("base/deeper").mkdir(parents=True)
    Path("base/one.toml").write_text("extends = 'deeper/two.toml'\n[training]\nseed = 1\n")
    Path("base/deeper/two.toml").write_text("extends = '../three.toml'\n[training]\nsteps = 2\n")
    Path("base/three.toml").write_text("[training]\nseed = 3\nseq_len = 3\n")
    training = load("extends = 'base/one.toml'").config.training
    assert (training.seed, training.steps, training.seq_len) == (1, 2, 3)


def test_a_file_that_is_extended_twice_is_merged_once() -> None:
    training = load(
        "extends = ['one.toml', 'two.toml']",
        one="extends = 'common.toml'\n[training]\nsteps = 1\n",
        two="extends = 'common.toml'\n[training]\nseed = 2\n",
        common="[training]\nsteps = 9\nseed = 9\n",
    ).config.training
    assert (training.steps, training.seed) == (1, 2)


def test_problems_name_the_file_that_won() -> None:
    base = "[training]\nsteps = 'x'\nseed = 'y'\n[[precision.rules]]\nx = 1\n"
    text = "extends = 'base.toml'\n[precision]\nrules = []\n\n[training]\nsteps = 'z'\n"
    lines = complaint(text, base=base).splitlines()[1:]
    places = [line.partition(" = ")[0].strip() for line in lines]
    assert places == ["base.toml:3: training.seed", "job.toml:6: training.steps"]


def test_a_changed_kind_drops_only_the_keys_of_the_earlier_kind() -> None:
    base = "[data]\npath = 'nowhere'\nshuffle = false\n[lr_scheduler]\nwarmup_steps = 5\ndecay_ratio = 0.1\n"
    base += "min_lr_factor = 0.3\n"
    text = "extends = 'base.toml'\n[data]\nkind = 'synthetic'\nvocab_size = 9\n"
    config = load(text, "--lr_scheduler.kind=cosine", base=base).config
    assert config.data == SyntheticData(kind="synthetic", shuffle=False, vocab_size=9)
    assert config.lr_scheduler == Cosine(kind="cosine", warmup_steps=5, min_lr_factor=0.3)
    config = load(text, "--lr_scheduler.kind=constant", base=base).config
    assert config.lr_scheduler == Constant(kind="constant", warmup_steps=5)


def test_a_changed_kind_does_not_hide_a_misspelt_key() -> None:
    assert "data.shufle" in complaint("[data]\nshufle = false", "--data.kind=synthetic")


def test_sections_of_the_same_kind_are_merged() -> None:
    base = "[validation.data]\nkind = 'synthetic'\nseed = 1\n"
    text = "extends = 'base.toml'\n[validation.data]\nkind = 'synthetic'\nnoise = 0.5\n"
    assert load(text, base=base).config.validation.data == SyntheticData(kind="synthetic", seed=1, noise=0.5)


def test_a_section_without_kind_has_the_default_kind() -> None:
    text = "[data]\nshuffle = false\n[lr_scheduler]\nwarmup_steps = 1\n[validation.data]\nsplit = 'train'\n"
    config = load(text).config
    assert config.data == TextData(shuffle=False)
    assert config.lr_scheduler.kind == "warmup_stable_decay"
    assert config.validation.data == TextData(split="train")


def test_validation_may_read_training_data_if_the_job_asks_for_it_or_never_validates() -> None:
    text = "[data]\nsplit = 'train'\n[validation]\nfreq = 1\n[validation.data]\nsplit = 'train'\n"
    assert load(text).config.validation.freq == 1
    Path("a.jsonl").touch()
    text = "[data]\nkind = 'jsonl'\npath = 'a.jsonl'\n[validation]\nfreq = 1\n[validation.data]\nkind = 'jsonl'\n"
    text += "path = './a.jsonl'\n"
    assert "also in the training data" in complaint(text)
    assert load(f"{text}field = 'summary'\n").config.validation.freq == 1
    Path("tokens").mkdir()
    text = "[data]\nkind = 'tokens'\npath = 'tokens'\n[validation.data]\nkind = 'tokens'\npath = 'tokens'\n"
    assert load(text).config.validation.freq == 0
    assert "the training data has the same tokens" in complaint(text, "--validation.freq=1")


@pytest.mark.parametrize("path", sorted(CONFIGS.rglob("*.toml")), ids=lambda path: path.stem)
def test_round_trip_through_json_of_the_shipped_configs(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(CONFIGS.parent)
    config = load_job(str(path)).config
    assert reload(config, tmp_path) == config


def test_round_trip_through_json_of_a_job_with_every_type_of_value(tmp_path: Path) -> None:
    (tmp_path / "a.txt").touch()
    config = load(
        "[model.args]\nn_layers = 2\nrope_scaling = {factor = 2}\n[model]\nblocks = ['layers.*']\n"
        "[data]\npath = ['a.txt', 'python-stdlib']\nsplit = 'train'\n[training]\nmax_norm = 1\nglobal_batch_size = 8\n"
        "[[precision.rules]]\ntype = 'BatchNorm'\nparam_dtype = 'float32'\n[optimizer]\neps = 1e-12\n"
        "[[optimizer.param_groups]]\nmatch = '**'\nweight_decay = 0.0\n[validation]\nfreq = 5\nmax_samples = 7\n"
        "[validation.data]\nkind = 'synthetic'\nvocab_size = 32\n[job]\ndump_folder = 'é \"x\"'\n"
    ).config
    assert reload(config) == config


def test_round_trip_through_json_of_the_arguments_of_a_factory() -> None:
    args = "args = {a = 1, b = [1.5, 'x', {c = true}], d = {e = []}}"
    config = load(f"[model]\nname = 'pkg.mod:build'\n{args}\n").config
    assert reload(config) == config


def reload(config: JobConfig, folder: Path = Path()) -> JobConfig:
    """Return the config, read from the file that a run writes."""
    path = folder / "config.json"
    path.write_text(dump_job(config), encoding="utf-8")
    return load_job(str(path)).config


def test_a_problem_in_a_json_file_has_no_line_number() -> None:
    Path("config.json").write_text('{"training": {"steps": "1"}}')
    with pytest.raises(UserError) as caught:
        load_job("config.json")
    place, _, _ = str(caught.value).partition(" = ")
    assert place == "error: config.json: training.steps"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", b'{"a": 1,\n}', "error: config.json:2: not valid JSON: "),
        ("config.json", b"[" * 100_000, "error: config.json: not valid JSON: more than 64 nested"),
        ("job.toml", b"x = " + b"[" * 100_000, "error: job.toml: nested too deeply; "),
        ("config.json", b"[1]", "error: config.json: must contain a JSON object with the sections of a job"),
        ("job.toml", b"[job]\nname = '\xe9'", "error: job.toml:2: not UTF-8 text (byte 0xe9); save it as UTF-8"),
        ("jobb.toml", b"", 'error: job.toml: no such file; the folder has "jobb.toml"'),
        ("else.toml", b"", "error: job.toml: no such file"),
    ],
)
def test_files_that_cannot_be_read(name: str, content: bytes, message: str) -> None:
    Path(name).write_bytes(content)
    with pytest.raises(UserError) as caught:
        load_job("config.json" if name == "config.json" else "job.toml")
    assert str(caught.value).startswith(message)


def test_a_folder_that_cannot_be_listed_is_not_called_missing(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    closed, user = Path("closed"), os.geteuid()
    closed.mkdir()
    closed.chmod(0o111)
    try:
        os.seteuid(user or 65534)  # root could list the folder
        assert _similar_file("closed/job.toml") == ""
        assert _similar_file("no/job.toml") == ' (the folder "no" does not exist)'
    finally:
        os.seteuid(user)
        closed.chmod(0o755)


def test_a_folder_is_no_job_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is a folder; name a job file in it"):
        load_job(str(tmp_path))


def test_a_byte_order_mark_is_accepted() -> None:
    assert load("\ufeff[training]\nsteps = 7\n").config.training.steps == 7


def test_problems_of_all_files_are_reported_together() -> None:
    text = complaint("extends = ['one.toml', 'two.toml', 'three.toml']", one="x =", three="[x")
    assert text.splitlines()[0] == "error: 3 problems in job.toml"
    assert 'extends = "two.toml": two.toml: no such file' in text


def test_a_rule_does_not_report_a_section_that_already_has_an_error() -> None:
    """The default of `storage_dtype` conflicts with master weights, but the job has set a key with a typing error
    instead."""
    text = "[precision]\nstorage_dtype = 'bf16'\n[optimizer]\nmaster_weights = true\n"
    assert "master_weights" not in complaint(text)
    assert "master_weights" not in complaint(text.replace("storage_dtype = 'bf16'", "storage_dtyp = 'bfloat16'"))
    assert "master_weights" in complaint(text.replace("bf16", "float32"))


def test_given_rules_are_reported_together_with_the_others() -> None:
    def refuse(config: JobConfig) -> Iterator[Problem]:
        yield Problem(("training", "steps"), "not today", config.training.steps)

    Path("job.toml").write_text("[training]\nsteps = 2\nx = 1\n")
    with pytest.raises(UserError) as caught:
        load_job("job.toml", rules=(*RULES, refuse))
    assert "  job.toml:2: training.steps = 2: not today" in str(caught.value).splitlines()


@pytest.mark.parametrize("junk", ["3", "'x'", "[]", "[{}]", "{}", "{kind = []}", "{kind = {}}", "true"])
def test_invalid_values_of_a_section_are_reported_as_errors(junk: str) -> None:
    for name in JobConfig.model_fields:
        table: dict[str, Any] = tomli.loads(f"x = {junk}")
        if table["x"] != {}:
            assert name in complaint(f"{name} = {junk}")


def test_loading_a_job_file_imports_no_slow_module() -> None:
    Path("job.toml").write_text("[data]\nkind = 'synthetic'\n")
    script = (
        "import sys; from titan_launch.config.loading.load import load_job; load_job('job.toml');"
        "errors = 'titan_launch.config.loading.validation_errors';"
        "print(*{'torch', 'numpy', 'difflib', 'glob', 'json', errors} & sys.modules.keys())"
    )
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout == "\n"
