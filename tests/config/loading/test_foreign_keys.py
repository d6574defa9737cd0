"""Hints for unknown keys: keys of other tools come from a table, misspelt keys from similarity."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.config.loading.hints import denied_keys, keys, options_of_commands, unquoted_keys, wrong_keys, wrong_options
from titan_launch.config.job import JobConfig
from titan_launch.config.loading.foreign_keys import FOREIGN_KEYS, foreign_key
from titan_launch.config.loading.load import load_job
from titan_launch.config.loading.provenance import MOST_PROBLEMS
from titan_launch.core.errors import UserError

SECTIONS = set(JobConfig.model_fields)

DENIALS = {
    "training.gc_debug": "[debug] has no key for the garbage collector",
    "optimizer.early_step_in_backward": "no key updates parameters within backward; others count steps",
    "optimizer_in_bwd": "as optimizer.early_step_in_backward",
    "parallelism.enable_async_tensor_parallel": "no key of tensor parallelism is asynchronous",
    "activation_checkpoint.early_stop": "no key ends the second forward of a block early",
    "activation_checkpoint.preserve_rng_state": "random states are always preserved",
    "debug.moe_force_load_balance": "no key decides which experts a router chooses",
    "compile.mode": "compile has no mode; other sections do",
    "torch_compile_mode": "as compile.mode",
    "fp16": "no key scales the loss",
}
"""Hints that deny a feature although a key shares a word with it, each with the reason why it is true."""


def complaint(text: str) -> str:
    """Return the error for a job file with this text."""
    Path("job.toml").write_text(text)
    with pytest.raises(UserError) as caught:
        load_job("job.toml")
    return str(caught.value)


@pytest.mark.parametrize("form", ["{key} = 1", "{key}.x = 1", "comm.{key} = 1"])
def test_keys_of_other_tools_are_explained(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each key where the other tool has it, as a section, and in a section to which it does not belong."""
    monkeypatch.chdir(tmp_path)
    unknown, values = dict[str, str](), dict[str, str]()
    for key, text in FOREIGN_KEYS.items():
        remedy = text if " " in text else f'use "{text}"'
        line, (section, _, _) = form.format(key=key), key.rpartition(".")
        assert not section or (section in SECTIONS and key not in keys())
        if key in SECTIONS:
            values |= {line: f"{line}: must be a table; {remedy}"} if form == "{key} = 1" else {}
        elif form == "{key}.x = 1":
            unknown |= {} if section else {line: f"{key}: unknown section; {remedy}"}
        elif not section or form == "{key} = 1":
            unknown[line] = f"{line}: unknown key; {remedy}"
    assert unknown
    for expected in (unknown, values):  # TOML refuses a value and a section of the same name in one file
        for start in range(0, len(expected), MOST_PROBLEMS):
            lines = list(expected)[start : start + MOST_PROBLEMS]
            assert len(lines) > 1, "a single problem has another form"
            (first, *problems) = complaint("\n".join(lines)).splitlines()
            assert first == f"error: {len(lines)} problems in job.toml"
            assert problems == [f"  job.toml:{number}: {expected[line]}" for number, line in enumerate(lines, 1)]


def test_every_hint_is_true() -> None:
    """The keys, values and options that hints name exist, and hints deny no feature that has a key."""
    hints = {key: found[0] for key in FOREIGN_KEYS if (found := foreign_key(tuple(key.split("."))))}
    assert {key: wrong for key, hint in hints.items() if (wrong := wrong_keys(hint) + wrong_options(hint))} == {}
    assert [hint for hint in hints.values() if unquoted_keys(hint)] == []
    assert all(command for hint in hints.values() for command, _ in options_of_commands(hint))
    denied = {key: words for key, hint in hints.items() if (words := denied_keys(hint, key))}
    assert {key: words for key, words in denied.items() if key not in DENIALS} == {}
    assert DENIALS.keys() - denied.keys() == set(), "these exceptions are not needed"


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("metrics.enable_wandb", 'wandb is not supported; reports are in "metrics.enable_tensorboard"'),
        ("report_to", "wandb is not supported; reports are written to metrics.jsonl"),
        ("profiling", 'profiler traces are not supported; "comm.profile_freq" profiles single steps'),
        ("lora_alpha", "not supported; remove this key"),
        ("x", "there is a kind of data, jsonl, which is not supported"),
    ],
)
def test_a_false_denial_is_found(key: str, hint: str) -> None:
    assert denied_keys(hint, key)


@pytest.mark.parametrize(
    "hint",
    [
        'use "metrics.enable_wandb"',
        'use "activation_checkpoint.mode" = "off"',
        'use "activation_checkpoint.mode"; "off" disables it',
        'use "training.steps" = "5"',
        'use "metrics.sinks" = ["wand"]',
        "use a table [[data.source]]",
        "use the option --nprocs of `launch`",
        "use the option --nnodes of `train`",
        'use "titan-launch export --nnodes"',
        'use "titan-launch exports"',
    ],
)
def test_a_wrong_key_value_or_option_is_found(hint: str) -> None:
    assert wrong_keys(hint) + wrong_options(hint)


@pytest.mark.parametrize(
    ("key", "remedy"),
    [
        ("job.seed", 'use "training.seed"'),
        ("optimizer.betas", 'use "optimizer.beta1" and "optimizer.beta2"'),
        ("optimizer.beta", 'use "optimizer.beta1" and "optimizer.beta2"'),
        ("loss.beta", 'use "loss.dpo.beta", "loss.ipo.beta", "loss.kto.beta" or "loss.simpo.beta"'),
        ("lora.r", 'use "lora.rank"'),
        ("parallelism.tp", 'use "parallelism.tensor_parallel_degree"'),
        ("training.max_seq_len", 'use "training.seq_len"'),
        ("metrics.log_interval", 'use "metrics.log_freq"'),
        ("checkpoint.save_freq", 'use "checkpoint.interval"'),
        (
            "profiling.profile_freq",
            'use "profiling.start_step", the first step of a profile, and "profiling.num_steps"',
        ),
        ("training.lr", "it belongs in [optimizer]"),
        ("training.warmup_steps", "it belongs in [lr_scheduler]"),
        ("optimizer.nesterov", "it belongs in [optimizer.muon] or [optimizer.sgd]"),
        ("training.stepz", 'did you mean "training.steps"?'),
        ("training.local_batchsize", 'did you mean "training.local_batch_size"?'),
        ("data.storage_dtypes", 'did you mean "precision.storage_dtype"?'),
    ],
)
def test_a_hint_names_a_key_with_a_similar_meaning(
    key: str, remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    section, name = key.split(".")
    assert complaint(f"[{section}]\n{name} = 1\n") == f"error: job.toml:2: {key} = 1: unknown key; {remedy}"


GUESSES = {
    "activation_checkpoint": ["enabled"],
    "tokenizer": ["split", "vocabulary"],
    "metrics": ["mode", "path", "name"],
    "comm": ["modules", "components"],
    "training": ["alpha", "enable", "mode", "momentum"],
    "optimizer": ["gamma", "path", "kind"],
    "lr_scheduler": ["gamma"],
    "data": ["cache", "device", "format"],
    "debug": ["verbose", "enable", "freq"],
    "job": ["interval", "path", "rules"],
    "checkpoint": ["mode", "path", "device"],
    "compile": ["modules", "level"],
    "precision": ["mode", "type"],
    "parallelism": ["mode", "backend"],
    "validation": ["path", "interval"],
    "model": ["type", "dir", "norm"],
    "planner": ["mode", "name"],
    "float8": ["mode"],
    "batchnorm": ["mode", "eps2"],
}


@pytest.mark.parametrize("section", GUESSES)
def test_a_key_that_resembles_none_gets_no_hint(section: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error lists only the keys of the section."""
    monkeypatch.chdir(tmp_path)
    for name in GUESSES[section]:
        has = f"error: job.toml:2: {section}.{name} = 1: unknown key; {section} has "
        assert complaint(f"[{section}]\n{name} = 1\n").startswith(has)


@pytest.mark.parametrize("name", ["rope", "moe", "zero", "foo", "io", "callbacks", "hydra"])
def test_a_section_that_resembles_none_gets_no_hint(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert complaint(f"[{name}]\nx = 1\n").startswith(f"error: job.toml:1: {name}: unknown section; the sections are ")
