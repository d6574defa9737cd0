"""Job files of somebody else, and command lines: each ends in one sentence."""

from __future__ import annotations

import json
import os
import random
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.hostile.runner import Runner
from tests.sampling import rest_is_slow, sampled
from titan_launch.config import paths
from titan_launch.config.job import JobConfig
from titan_launch.config.loading.foreign_keys import TORCHTITAN_KEYS
from titan_launch.config.loading.job_files import carried_configs
from titan_launch.config.loading.load import load_job
from titan_launch.config.loading.merge import parse_overrides
from titan_launch.config.loading.schema_walk import tables
from titan_launch.config.migration import DEFAULTS, migrate
from titan_launch.config.paths import LinkError, expand_paths, tar_shards
from titan_launch.core.errors import ConfigError, UserError
from titan_launch.models.architectures import ARCHITECTURES

MANY = 5000

TEXTS: dict[str, tuple[str | bytes, str]] = {
    "large.toml": ("#" + "x" * 20_000_000, "larger than 1 MiB"),
    "nul.toml": (b"[training]\nsteps\0=1", "not valid TOML"),
    "not_utf8.toml": (b"[training]\n\xff=1", "not UTF-8 text"),
    "long_key.toml": (f"[training]\n{'k' * MANY}=1", "has a key of 5,000 characters"),
    "long_string.toml": (f'[training]\nsteps="{"k" * MANY}"', "kkkk ... kkkk"),
    "digits.toml": (f"[training]\nsteps={'9' * MANY}", "a number has thousands of digits; write a shorter number"),
    "int65.toml": (f"[training]\nsteps={2**63}", "must be a whole number from -2^63 to 2^63 - 1"),
    "brackets.toml": ("[[[[", "not valid TOML"),
    "open_arrays.toml": (f"a={'[' * 100_000}", "nested too deeply"),
    "deep_array.toml": (f"[training]\nsteps={'[' * 90}{']' * 90}", "nested too deeply"),
    "deep_table.toml": (f"[training]\nsteps={'{a=' * 90}1{'}' * 90}", "nested too deeply"),
    "deep_key.toml": (f"[training]\n{'.'.join('a' * 3000)}=1", "nested too deeply"),
    "dotted_key.toml": (f"[training]\n{'.'.join('a' * 500)}=1", "nested too deeply"),
    "deep_repeated.toml": (
        f"[{'.'.join('a' * 300)}]\n" + "".join(f"k{i}=1\n" for i in range(9999)) + "k1=1",
        "Cannot overwrite a value",
    ),
    "float.toml": ("[optimizer]\nlr=1e999", "must be a finite number"),
    "nan.toml": ("[optimizer]\nlr=nan", "must be a finite number"),
    "dates.toml": ("[training]\nsteps=1979-05-27T07:32:00Z\n[job]\nname=07:32:00", "must be a whole number"),
    "repeated.json": ('{"training":{"steps":1,"steps":2}}', 'the key "steps" occurs twice'),
    "nan.json": ('{"optimizer":{"lr":NaN}}', "NaN is not a JSON value"),
    "digits.json": (f'{{"training":{{"steps":{"9" * MANY}}}}}', "more than 300 digits"),
    "deep.json": (f'{{"training":{{"steps":{"[" * 900}{"]" * 900}}}}}', "nested"),
    "surrogate.json": ('{"job":{"name":"\\ud800"}}', "half of a surrogate pair"),
    "array.json": ("[]", "must contain a JSON object"),
    "empty.json": ("", "not valid JSON"),
    "nul_path.toml": ('[data]\nkind="text"\npath="a\\u0000b"', "has the character NUL"),
    "nul_in_array.toml": ('[data]\nkind="text"\npath=["a", "\\u0000"]', "data.path.1: has the character NUL"),
    "nul_key.toml": ('[training]\n"\\u0000"=1', "has a key with the character NUL"),
    "extends_nul.toml": ('extends="a\\u0000.toml"', "has the character NUL"),
    "extends_long.toml": (f'extends="{"a" * MANY}.toml"', "cannot be read: File name too long"),
    "extends_fifo.toml": ('extends="fifo.toml"', "not a regular file"),
    "extends_zero.toml": ('extends="zero.toml"', "not a regular file"),
    "extends_folder.toml": ('extends="folder.toml"', "is a folder"),
    "extends_loop.toml": ('extends="loop.toml"', "cannot be read: Too many levels of symbolic links"),
    "extends_types.toml": ("extends=[1]", "must be the path of a file"),
    "extends_many.toml": (f"extends={[f'x{i}.toml' for i in range(150)]}", "more than 100 files"),
    "chain0.toml": ('extends="chain1.toml"', "more than 100 files"),
    "keys.toml": ("[training]\n" + "".join(f"k{i}=1\n" for i in range(60_000)), "unknown key"),
    "rules.toml": ("[[precision.rules]]\nmatch='a'\n" * 20_000, "an array has at most 1,000"),
    "tables.toml": ("".join(f"[k{i}]\n" for i in range(110_000)), "has more than 100,000 values"),
    "paths.toml": ("[data]\nkind='text'\npath=[" + "'a'," * 90_000 + "]", "at most 10,000; use a glob"),
    "range.toml": ('[data]\nkind="images"\npath="{0..999999999}.tar"', "more than 100,000 files"),
    "ranges.toml": ('[data]\nkind="images"\npath="{0..999}{0..999}{0..999}.tar"', "more than 100,000 files"),
    "range_digits.toml": (f'[data]\nkind="images"\npath="{{0..{"9" * MANY}}}.tar"', "no file matches"),
    "words.toml": (f'[data]\nkind="images"\npath="{"{a,b}" * 40}.tar"', "more than 100,000 files"),
    "long_words.toml": (f'[data]\nkind="images"\npath="{"{a,b}" * 14}{"c" * 2000}.tar"', "more than 16,000,000 char"),
    "commas.toml": (f'[data]\nkind="images"\npath="{{{"," * 900_000}.tar"', "no file matches"),
    "long_path.toml": (f'[data]\nkind="text"\npath="{"a" * MANY}"', "no such file or folder"),
    "folder_long.toml": (f'[job]\ndump_folder="{"a" * MANY}"', "File name too long"),
    "weights_long.toml": (f'[model]\nweights="{"a" * MANY}"', "config.json"),
    "name.toml": ('[training]\n"a\\nerror: b\\u001b[2K"=1', '"a\\nerror: b\\u001b[2K" = 1: unknown key'),
    "controls.toml": ('[job]\nname="\\u0085\\u202e\\u007f"', 'job.name = "\\u0085\\u202e\\u007f"'),
}
"""Contents of job files, each with a part of the error."""

SPECIAL = {
    "fifo.toml": "not a regular file",
    "zero.toml": "not a regular file",
    "loop.toml": "Too many levels of symbolic links",
    "folder.toml": "is a folder",
    "b\nerror: c.toml": "no such file",
    "no\x1b[31m.toml": "no\\x1b[31m.toml: no such file",
    "a" * 300 + ".toml": "File name too long",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with all job files."""
    found = tmp_path_factory.mktemp("jobs")
    for name, (content, _) in TEXTS.items():
        (found / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    for number in range(1, 2000):
        (found / f"chain{number}.toml").write_text(f'extends="chain{number + 1}.toml"')
    os.mkfifo(found / "fifo.toml")
    (found / "zero.toml").symlink_to("/dev/zero")
    (found / "loop.toml").symlink_to("loop.toml")
    (found / "folder.toml").mkdir()
    (found / "ok.toml").write_text('extends = "llama_debug"\n')
    return found


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name in ("keys.toml", "extends_many.toml"))) for name in TEXTS],
)
def test_a_hostile_job_file_ends_in_one_sentence(name: str, folder: Path, runner: Runner) -> None:
    ended = runner.run(["check", "--config", name], folder)
    ended.assert_one_sentence(TEXTS[name][1] if name != "long_string.toml" else "must be a whole number")
    assert len(ended.text) < 30_000


@pytest.mark.parametrize("name", SPECIAL)
def test_a_path_that_is_no_job_file_ends_in_one_sentence(name: str, folder: Path, runner: Runner) -> None:
    ended = runner.run(["check", "--config", name], folder)
    ended.assert_one_sentence(SPECIAL[name])
    assert len(ended.text) < 1000


@pytest.mark.parametrize("command", ["plan", "data", "launch", "train", "migrate", "prepare"])
@pytest.mark.parametrize("name", rest_is_slow(["digits.toml", "fifo.toml"]))
def test_every_command_reads_jobs_in_this_way(command: str, name: str, folder: Path, runner: Runner) -> None:
    arguments = [name, "--out=new.toml"] if command == "migrate" else ["--config", name]
    out = ["--out=out"] if command == "prepare" else []
    runner.run([command, *arguments, *out], folder).assert_one_sentence(TEXTS.get(name, ("", SPECIAL.get(name, "")))[1])


OVERRIDES = {
    f"--training.steps={'9' * MANY}": "a number has thousands of digits; write a shorter number",
    f"--training.steps={2**63}": "must be a whole number from -2^63 to 2^63 - 1",
    f"--training.steps={'[' * MANY}": "nested too deeply",
    f"--training.steps={'[' * 90}{']' * 90}": "nested too deeply",
    f"--training{'.a' * 3000}=1": "at most 32 parts",
    '--data.path="\\u0000"': "has the character NUL",
    '--training."a\\u001b"=1': "unknown key",
    "--training.steps.99999999999999999999=1": "not a table or an array",
    f"--precision.rules.{'9' * 99}.match=a": "is empty; use index 0",
    f"--training.{'k' * MANY}=1": "each of at most 200 characters",
    f"--model.args.n_layers={10**9}": "must be at most 1000",
    "--job.name=\x1b[31m": "must consist of letters",
    "--\x1b=1": "unknown option",
    f"--{'k' * MANY}=1": "unknown option",
    f"--world-size={'9' * MANY}": "must be a whole number of at least 1",
    f"--model.weights={'a' * MANY}": "File name too long",
    f"--job.dump_folder={'a' * MANY}": "File name too long",
    f"--compile.cache_folder={'a/' * MANY}": "has no effect",
    f"--checkpoint.load={'a' * MANY}": "",
}


@pytest.mark.parametrize("override", OVERRIDES)
def test_a_hostile_override_ends_in_one_sentence(override: str, folder: Path, runner: Runner) -> None:
    ended = runner.run(["check", "--config", "ok.toml", override], folder)
    assert len(ended.text) < 2000
    if ended.status:  # a path of a checkpoint is read by the run
        ended.assert_one_sentence(OVERRIDES[override])
    ended.assert_harmless()


LONG = "a" * MANY
PATH_ARGUMENTS = (
    ["runs", LONG],
    ["report", LONG],
    ["compare", LONG, LONG],
    ["export", LONG, "--out", "out"],
    ["import", LONG, "--out", "out"],
    ["generate", LONG, "--prompt", "a"],
    ["generate", "a", "--prompt-file", LONG],
    ["generate", "a", "--prompt-file", "zero.toml"],
    ["migrate", LONG + ".toml", "--out", "out.toml"],
    ["migrate", "ok.toml", "--out", LONG + ".toml"],
    ["init", "sft", "--out", LONG + ".toml"],
    ["init", "sft", "--out", "a.toml", "--model", LONG],
    ["init", "sft", "--out", "a.toml", "--data", LONG],
    ["prepare", LONG, "--out", "out"],
)


@pytest.mark.parametrize("arguments", PATH_ARGUMENTS, ids=lambda words: "-".join(word[:9] for word in words))
def test_a_path_on_the_command_line_ends_in_one_sentence(arguments: list[str], folder: Path, runner: Runner) -> None:
    runner.run(arguments, folder).assert_one_sentence("error:")


WRONG_OPTIONS = {
    "--master-port=99999": "from 1 to 65535",
    "--master-port=0": "from 1 to 65535",
    "--master-port=x": "from 1 to 65535",
    "--rdzv-endpoint=a::1:x": "HOST:PORT",
    "--rdzv-endpoint=a:99999": "HOST:PORT",
    "--rdzv-endpoint=:1": "HOST:PORT",
    "--node-rank=5": "since --nnodes is 1",
    "--nnodes=3:2": "or min:max",
    "--nnodes=²": "or min:max",
    f"--nnodes={'9' * MANY}": "or min:max",
    f"--max-restarts={'9' * MANY}": "from 0 to",
    "--nproc-per-node=99999999999": "at most 1,024",
    "--rdzv-backend=nonsense": "is not registered",
    "--rdzv-conf=garbage": "must have a value",
    "--local-ranks-filter=a": "comma-separated list",
    "--log-dir=ok.toml": "is a file",
}


@pytest.mark.parametrize("option", WRONG_OPTIONS)
def test_a_wrong_option_of_launch_ends_in_one_sentence(option: str, folder: Path, runner: Runner) -> None:
    ended = runner.run(["launch", "--config", "ok.toml", option], folder)
    ended.assert_one_sentence(WRONG_OPTIONS[option])


def test_a_port_in_use_ends_in_one_sentence(folder: Path, runner: Runner) -> None:
    with socket.socket() as used:
        used.bind(("", 0))
        used.listen()
        port = f"--master-port={used.getsockname()[1]}"
        ended = runner.run(["launch", "--config", "ok.toml", port], folder, memory=8 << 30)
    ended.assert_one_sentence("choose another port with --master-port")


RANKS = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("RANK", "x"),
        ("RANK", "2"),
        ("WORLD_SIZE", "-1"),
        ("WORLD_SIZE", "0"),
        ("WORLD_SIZE", "\x1b[2K"),
        ("LOCAL_RANK", "1" * 99),
        ("MASTER_PORT", "x"),
        ("MASTER_PORT", "65536"),
        ("MASTER_PORT", "0"),
        ("MASTER_ADDR", ""),
        ("LOCAL_WORLD_SIZE", "0"),
    ],
)
def test_a_wrong_variable_of_torchrun_ends_in_one_sentence(name: str, value: str, folder: Path, runner: Runner) -> None:
    ended = runner.run(["train", "--config", "ok.toml"], folder, {**RANKS, name: value})
    ended.assert_one_sentence(f"environment variable {name}: ")


def test_the_world_size_without_a_rank_is_refused(folder: Path, runner: Runner) -> None:
    runner.run(["train", "--config", "ok.toml"], folder, {"WORLD_SIZE": "2"}).assert_one_sentence("RANK: is missing")


VALUES: tuple[Any, ...] = (
    *(None, True, 0, -1, 1, 2**63 - 1, -(2**63), 2**63, 10**18, 0.0, -1.5, 1e308, 1e-308, float("inf")),
    *("", "a", "\n", "\x1b[31m", "a\nerror: x", "\0", "a" * 300, "a" * MANY, "a/" * MANY, "loop.toml", "loop.toml/a"),
    *("zero.toml", "fifo.toml", "ok.toml", "ok.toml/x", "folder.toml", "/", "~nobody/x", "~", "/dev/zero", ".", ".."),
    *("a:b", "**", "[", "{", "*/" * 100, "{0..999}.tar", "a{,,}.tar", "x.npz", "1e999", "nan", "²"),
    *([], [[]], [1], ["a"], ["a"] * MANY, [{}], [["a"] * 3] * 3, {}, {"a": 1}, {"kind": "text"}, {"kind": 3}),
    *({"kind": []}, {"": 1}, {"\x1b": 1}, [None], [{"match": "**"}], [{"kind": "text", "path": "a"}] * 3),
)


def _keys() -> Iterator[tuple[tuple[Any, ...], bool]]:
    """Yield all keys of a job, each with True if it is in an array of tables."""
    for table in tables(JobConfig):
        yield from (((*table.key, name), table.header.startswith("[[")) for name in table.section.model_fields)
    yield from (((name,), False) for name in JobConfig.model_fields)
    for architecture in ARCHITECTURES.values():
        yield from ((("model", "args", name), False) for name in architecture.args.model_fields)


CASES = [(key, in_array, value) for key, in_array in sorted(set(_keys())) for value in VALUES]
random.Random(0).shuffle(CASES)


def _only_user_errors(action: Callable[[], object], case: object) -> None:
    start = time.process_time()
    try:
        action()
    except UserError as error:
        assert len(str(error)) < 40_000, case
    except Exception as error:
        raise AssertionError(case) from error
    assert time.process_time() - start < 10, case


@sampled("cases", CASES[::2], every=60)  # the whole suite takes half of the cases
def test_any_value_of_any_key_is_loaded_or_refused(
    cases: tuple[Any, ...], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    chosen, names = random.Random(1), list(carried_configs())
    for key, in_array, value in cases:
        table = {key[-1]: value}
        inner: Any = [table] if in_array else table
        for part in reversed(key[:-1]):
            inner = {part: inner}
        text = json.dumps({"extends": chosen.choice(names), **inner}).replace("Infinity", "1e999")
        Path("case.json").write_text(text)
        _only_user_errors(lambda: load_job("case.json"), (key, repr(value)[:100], text[:60]))


@sampled("seeds", range(6000), every=20)
def test_damaged_bytes_are_loaded_or_refused(
    seeds: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    contents = [path.read_bytes() for path in carried_configs().values() if b"extends" not in path.read_bytes()]
    pieces = (
        b"[",
        b"]",
        b"{",
        b"}",
        b'"',
        b"'",
        b"=",
        b".",
        b"\n",
        b"\0",
        b"\xff",
        b"#",
        b",",
        b"9" * 99,
        b"[[",
        b"\\u",
    )
    for seed in seeds:
        made = random.Random(seed)
        content = bytearray(made.choice(contents))
        for _ in range(made.randint(1, 4)):
            at = made.randrange(len(content))
            content[at : at + made.choice((0, 1, 5))] = made.choice((made.choice(pieces), made.randbytes(3), b""))
        Path("case.toml").write_bytes(content)
        _only_user_errors(lambda: load_job("case.toml"), (seed, bytes(content)))


@sampled("seeds", range(6000), every=20)
def test_damaged_overrides_are_parsed_or_refused(seeds: tuple[int, ...]) -> None:
    pieces = (
        "--",
        "training",
        ".",
        "steps",
        "=",
        "[",
        "]",
        "{",
        "}",
        '"',
        "'",
        "\\u0000",
        "9" * 99,
        "\n",
        "\x1b",
        "0",
        "kind",
    )
    for seed in seeds:
        made = random.Random(seed)
        arguments = ["--" + "".join(made.choices(pieces, k=made.randint(1, 9))) for _ in range(2)]
        _only_user_errors(lambda: parse_overrides(arguments), arguments)  # noqa: B023


TITAN_KEYS = sorted(
    {*DEFAULTS, *TORCHTITAN_KEYS, "lr_scheduler.decay_ratio", "debug.seed", "checkpoint.exclude_from_loading"}
    | {f"parallelism.{name}_parallel_degree" for name in ("tensor", "context", "pipeline", "expert", "data")}
    | {"parallelism.data_parallel_shard_degree", "parallelism.expert_tensor_parallel_degree"}
    | {"quantize.linear.float8.filter_fqns", "quantize.linear.float8.recipe_name", "training.dataloader.num_workers"}
)
SWITCHED_ON: tuple[dict[str, Any], ...] = (
    {},
    {"parallelism": {"pipeline_parallel_degree": 2}, "validation": {"enable": True, "steps": 3}},
    {"model": {"converters": ["float8"], "name": "llama4"}, "checkpoint": {"enable": True, "initial_load_path": "a"}},
)


@sampled("keys", TITAN_KEYS, every=4)
def test_any_value_of_a_key_of_torchtitan_is_migrated_or_refused(keys: tuple[str, ...]) -> None:
    for key in keys:
        *sections, name = key.split(".")
        for value in VALUES:
            for others in SWITCHED_ON:
                table = json.loads(json.dumps(others))
                inside = table
                for section in sections:
                    inside = inside.setdefault(section, {})
                inside[name] = value
                try:
                    migrate(table, ranks=4)
                except ConfigError as error:
                    assert "must be" in str(error)
                except Exception as error:
                    raise AssertionError((key, value, others)) from error


def test_a_description_of_torchtitan_cannot_add_keys(tmp_path: Path, runner: Runner) -> None:
    (tmp_path / "old.toml").write_text('[job]\ndescription = "a\\n[model]\\nname = \\"os:system\\"\\u001b"\n')
    ended = runner.run(["migrate", "old.toml", "--out", "new.toml"], tmp_path)
    assert ended.status == 0
    ended.assert_harmless()
    assert '# a\\n[model]\\nname = "os:system"\\x1b\n' in (tmp_path / "new.toml").read_text()


def test_globs_follow_each_link_once_and_none_out_of_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a/b", "elsewhere/c", ".hidden"):
        Path("data", name).mkdir(parents=True)
        Path("data", name, "x.txt").write_text("x")
    for number in range(9):
        Path("data/a", f"up{number}").symlink_to("..")
        Path("data", f"self{number}").symlink_to(".")
    Path("data/a-link").symlink_to("a/b")
    names = [name for name, _ in expand_paths("data/**/*.txt")]
    assert names == ["a/b/x.txt", "elsewhere/c/x.txt"]
    assert len(expand_paths(f"data/{'*/' * 30}*.txt")) == 2
    assert [name for name, _ in expand_paths("data/*/x.txt")] == ["a-link/x.txt"]
    assert [name for name, _ in expand_paths("data/a-link/*")] == ["x.txt"]
    monkeypatch.chdir("data")
    assert [name for name, _ in expand_paths("**/**/*.txt")] == names
    assert [name for name, _ in expand_paths(f"{tmp_path}/d*/**")] == [f"data/{name}" for name in names]
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/y.txt").write_text("y")
    Path("linked").symlink_to("../outside")
    Path("z.txt").symlink_to("../outside/y.txt")
    assert [name for name, _ in expand_paths("z.txt")] == ["z.txt"]
    for pattern in ("**/*.txt", "*/*.txt", "*.txt", "./z*", f"{tmp_path}/data/z*"):
        with pytest.raises(LinkError, match="leads out of the folder"):
            expand_paths(pattern)


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("{a,b}-{00..02}.tar", ["a-00", "a-01", "a-02", "b-00", "b-01", "b-02"]),
        ("{b,a}{,-x}.tar", ["b", "b-x", "a", "a-x"]),
        ("{a,b{1,2}}.tar", ["a", "b1", "a", "b2"]),
        ("{a}-{9..11}.tar", ["{a}-9", "{a}-10", "{a}-11"]),
        ("{00..100}.tar", [f"{number:03}" for number in range(101)]),
        ("{9..011}.tar", ["009", "010", "011"]),
        ("{0..2}.tar", ["0", "1", "2"]),
        ("{5..3}.tar", ["5", "4", "3"]),
        ("{03..1}.tar", ["03", "02", "01"]),
    ],
)
def test_braces_are_expanded_as_in_bash(
    pattern: str, found: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in found:
        Path(f"{name}.tar").touch()
    assert [path.stem for path in tar_shards(pattern)] == found


def test_no_shard_or_too_many_shards_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError):
        tar_shards("{1..0}.tar")
    Path("a.tar").touch()
    monkeypatch.setattr(paths, "MOST_SHARDS", 10)
    with pytest.raises(ValueError, match="more than"):
        tar_shards("a{,,,,,,,,,,}.tar")
