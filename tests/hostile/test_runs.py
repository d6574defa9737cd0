"""Run folders from strangers: one bad folder is one sentence, and a row in the list of runs."""

from __future__ import annotations

import json
import math
import os
import pickle
import random
import re
import shutil
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from tests.hostile.mutations import damaged_text
from tests.hostile.runner import Runner
from tests.report.recorded import add_log, audit, record, reports
from tests.sampling import rest_is_slow
from tests.train.jobs import tiny_job
from titan_launch.checkpoint.index import read_index
from titan_launch.checkpoint.manifest import DamagedCheckpointError, Manifest, read_manifest, write_manifest
from titan_launch.cli import main
from titan_launch.config.job import JobConfig
from titan_launch.core.errors import UserError
from titan_launch.report import recorded_run
from titan_launch.report.comparison import RunComparison
from titan_launch.report.figures import summary, to_json
from titan_launch.report.page import write_page
from titan_launch.report.recorded_run import MOST_REPORTS, RecordedRun, load_run
from titan_launch.report.run_page import describe_run, run_page
from titan_launch.train.health.flight_recorder import FOLDER, record_path, unfinished_collectives
from titan_launch.train.run_folder.attempt import Attempt
from titan_launch.train.run_folder.folder import check_earlier_run, effective_load, recorded_modes

CONFIG = "config.json: not the configuration of a run"
REPORT = "not a report of a run"


@pytest.fixture(scope="module")
def trained(runner: Runner, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a real run of four steps, with two checkpoints, its units and its audit."""
    folder = tmp_path_factory.mktemp("real")
    job = tiny_job(folder, checkpoint={"enable": True, "interval": 2})
    (folder / "job.json").write_text(json.dumps(job))
    ended = runner.run(["train", "--config", "job.json"], folder, memory=8 << 30)
    assert ended.status == 0, ended.text
    run = folder / "tiny"
    shutil.copy(run / "metrics.jsonl", run / "metrics.rolled_back.jsonl")
    return run


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Return a folder with the runs `bad` and `good`."""
    for name in ("bad", "good"):
        record(tmp_path / "runs" / name, reports())
        add_log(tmp_path / "runs" / name, 1, "INFO titan_launch.train.loop: done")
        audit(tmp_path / "runs" / name)
    return tmp_path / "runs"


def show(folder: Path, other: RecordedRun, is_first: bool = True) -> str:
    """Return everything that the commands show of a run, alone and beside another."""
    run = load_run(folder)
    comparison = RunComparison([run, other] if is_first else [other, run])
    texts = [*summary(run), run_page(run), to_json(describe_run(run))]
    texts += [comparison.as_text(), comparison.as_page(), to_json(comparison.as_data())]
    if comparison.step is not None:
        texts += comparison.loss_differs(0.1)
    return "\n".join(texts)


Making = Callable[[Path], object]


def written(name: str, content: bytes | str) -> Making:
    """Return the function that writes a file of a run."""

    def make(folder: Path) -> None:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())

    return make


def config(*keys: str, value: Any) -> Making:
    """Return the function that changes a value of `config.json`."""

    def make(folder: Path) -> None:
        path = folder / "config.json"
        table = json.loads(path.read_text())
        section = table
        for key in keys[:-1]:
            section = section.setdefault(key, {})
        section[keys[-1]] = value
        path.write_text(json.dumps(table))

    return make


def line(text: str | bytes) -> Making:
    """Return the function that writes one report."""
    return written("metrics.jsonl", (text.encode() if isinstance(text, str) else text) + b"\n")


def without(name: str) -> Making:
    """Return the function that deletes a key of `config.json`."""

    def make(folder: Path) -> None:
        table = json.loads((folder / "config.json").read_text())
        del table[name]
        (folder / "config.json").write_text(json.dumps(table))

    return make


def folder_at(name: str) -> Making:
    """Return the function that puts a folder in place of a file."""

    def make(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).mkdir(parents=True)

    return make


def fifo_at(name: str) -> Making:
    """Return the function that puts a FIFO in place of a file."""

    def make(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        os.mkfifo(folder / name)

    return make


def link_at(name: str, target: str) -> Making:
    """Return the function that puts a link in place of a file."""

    def make(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).symlink_to(target)

    return make


def sparse(name: str, size: int, content: bytes = b"") -> Making:
    """Return the function that writes a large file of zeros, with bytes at its end."""

    def make(folder: Path) -> None:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        with (folder / name).open("wb") as file:
            file.seek(size)
            file.write(content or b"\0")

    return make


def all_of(*makings: Making) -> Making:
    """Return the function that makes several things."""
    return lambda folder: [make(folder) for make in makings]


DEEP = "[" * 100_000 + "]" * 100_000
AUDIT, UNITS, LAUNCH, ROLLED = "precision_audit.json", "units.json", "launch.json", "metrics.rolled_back.jsonl"
UNIT = {"name": "a", "parameters": 1, "reason": "", "storage_dtype": "", "compute_dtype": "", "reduce_dtype": ""}
LOG = "logs/attempt-1/rank_0.log"
MANIFEST = "checkpoints/step-1/manifest.json"

REFUSED: dict[str, tuple[Making, str]] = {
    "config: a boolean of steps": (config("training", "steps", value=True), CONFIG),
    "config: steps beyond float64": (written("config.json", '{"training": {"steps": 1e400}}'), CONFIG),
    "config: steps of many digits": (config("training", "steps", value=10**200), CONFIG),
    "config: steps as float": (config("training", "steps", value=1e300), CONFIG),
    "config: negative steps": (config("training", "steps", value=-1), CONFIG),
    "config: steps as text": (config("training", "steps", value="8"), CONFIG),
    "config: seq_len as text": (config("training", "seq_len", value="256"), CONFIG),
    "config: seq_len 0": (config("training", "seq_len", value=0), CONFIG),
    "config: seq_len of many digits": (config("training", "seq_len", value=10**200), CONFIG),
    "config: no training": (without("training"), CONFIG),
    "config: no job": (without("job"), CONFIG),
    "config: training is a list": (config("training", value=[]), CONFIG),
    "config: training is text": (config("training", value="steps"), CONFIG),
    "config: model is text": (config("model", value="steps"), CONFIG),
    "config: flavor is a list": (config("model", "flavor", value=[]), CONFIG),
    "config: name is a table": (config("job", "name", value={}), CONFIG),
    "config: a long name": (config("job", "name", value="a" * 1_000_000), CONFIG),
    "config: name of lines": (config("job", "name", value="good\nerror: gone"), CONFIG),
    "config: deep": (written("config.json", DEEP), CONFIG),
    "config: half of a surrogate pair": (config("model", "extra", value="\ud800"), CONFIG),
    "config: NaN": (config("model", "extra", value=float("nan")), CONFIG),
    "config: equal keys": (written("config.json", '{"job": {}, "job": {}}'), CONFIG),
    "config: empty": (written("config.json", ""), CONFIG),
    "config: a number": (written("config.json", "1"), CONFIG),
    "config: bytes": (written("config.json", bytes(range(256))), CONFIG),
    "config: many values": (written("config.json", "[" + "[]," * 3_000_000 + "[]]"), CONFIG),
    "config: large": (sparse("config.json", 1 << 33), CONFIG),
    "config: a folder": (folder_at("config.json"), CONFIG),
    "config: a FIFO": (fifo_at("config.json"), CONFIG),
    "config: /dev/zero": (link_at("config.json", "/dev/zero"), CONFIG),
    "config: a file of /proc": (link_at("config.json", "/proc/kmsg"), CONFIG),
    "config: a link to itself": (link_at("config.json", "config.json"), CONFIG),
    "metrics: NaN": (line('{"step": 1, "a": NaN}'), REPORT),
    "metrics: a list": (line("[]"), REPORT),
    "metrics: text": (line('{"step": 1, "a": "text"}'), REPORT),
    "metrics: a number of text": (line('{"step": 1, "a": "1_0"}'), REPORT),
    "metrics: true": (line('{"step": 1, "a": true}'), REPORT),
    "metrics: null": (line('{"step": 1, "a": null}'), REPORT),
    "metrics: beyond float64": (line('{"step": 1, "a": 1e400}'), REPORT),
    "metrics: digits": (line('{"step": 1, "a": ' + "9" * 100_000 + "}"), REPORT),
    "metrics: a negative step": (line('{"step": -1, "a": 1}'), REPORT),
    "metrics: a huge step": (line('{"step": 1' + "0" * 299 + ', "a": 1}'), REPORT),
    "metrics: a step beyond float64": (line('{"step": 1e400}'), REPORT),
    "metrics: half of a step": (line('{"step": 1.5, "a": 1}'), REPORT),
    "metrics: a step of text": (line('{"step": "1", "a": 1}'), REPORT),
    "metrics: a step that is true": (line('{"step": true, "a": 1}'), REPORT),
    "metrics: no step": (line('{"a": 1}'), REPORT),
    "metrics: two steps": (line('{"step": 1, "step": 2}'), REPORT),
    "metrics: an empty tag": (line('{"step": 1, "": 2}'), REPORT),
    "metrics: a long tag": (line(json.dumps({"step": 1, "a" * 1_000_000: 2})), REPORT),
    "metrics: a tag of lines": (line(json.dumps({"step": 1, "a\nerror: b": 2})), REPORT),
    "metrics: a tag that a terminal obeys": (line(json.dumps({"step": 1, "a\x1b[2J": 2})), REPORT),
    "metrics: half of a surrogate pair": (line('{"step": 1, "\\ud800": 2}'), REPORT),
    "metrics: deep": (line(f'{{"step": 1, "a": {DEEP}}}'), REPORT),
    "metrics: bytes": (line(bytes(set(range(256)) - {10})), REPORT),
    "metrics: one long line": (sparse("metrics.jsonl", 1 << 30), "metrics.jsonl:1: "),
    "metrics: many metrics": (line(json.dumps({"step": 1, **{f"m{n}": n for n in range(30_000)}})), "metrics.jsonl"),
    "metrics: many lines": (written("metrics.jsonl", b'{"step":1}\n' * (MOST_REPORTS + 1)), "metrics.jsonl"),
    "metrics: a FIFO": (fifo_at("metrics.jsonl"), "metrics.jsonl: not a regular file"),
    "metrics: a folder": (folder_at("metrics.jsonl"), "metrics.jsonl"),
    "metrics: /dev/zero": (link_at("metrics.jsonl", "/dev/zero"), "metrics.jsonl: not a regular file"),
}
"""Run folders that no command shows, and the sentence of `report` and `compare`. `runs` says it in a row."""

REFUSED_IN_PAGES: dict[str, tuple[Making, str]] = {
    "audit: a list": (written(AUDIT, "[]"), f"{AUDIT} is damaged"),
    "audit: units of numbers": (written(AUDIT, '{"differences": [], "units": [1]}'), f"{AUDIT} is damaged"),
    "audit: no differences": (written(AUDIT, '{"units": []}'), f"{AUDIT} is damaged"),
    "audit: numbers": (written(AUDIT, '{"differences": [1], "units": []}'), f"{AUDIT} is damaged"),
    "audit: a FIFO": (fifo_at(AUDIT), f"{AUDIT} is damaged"),
    "audit: deep": (written(AUDIT, DEEP), f"{AUDIT} is damaged"),
    "units: a table": (written(UNITS, '{"a": 1}'), f"{UNITS} is damaged"),
    "units: a number": (written(UNITS, "7"), f"{UNITS} is damaged"),
    "units: numbers": (written(UNITS, "[1]"), f"{UNITS} is damaged"),
    "units: without keys": (written(UNITS, '[{"name": "a"}]'), f"{UNITS} is damaged"),
    "units: parameters as text": (
        written(UNITS, json.dumps([{**UNIT, "output_dtype": None, "parameters": "1"}])),
        f"{UNITS} is damaged",
    ),
    "units: /dev/zero": (link_at(UNITS, "/dev/zero"), f"{UNITS} is damaged"),
    "units: large": (sparse(UNITS, 1 << 33), f"{UNITS} is damaged"),
    "undone reports: text": (written(ROLLED, "nonsense\n"), REPORT),
    "undone reports: a FIFO": (fifo_at(ROLLED), f"{ROLLED}: not a regular file"),
    "undone reports: one long line": (sparse(ROLLED, 1 << 30), f"{ROLLED}:1: "),
}
"""Run folders without a page."""


def many_attempts(folder: Path) -> None:
    for number in range(1, 5000):
        (folder / "logs" / f"attempt-{number}").mkdir(parents=True, exist_ok=True)


HARMLESS: dict[str, Making] = {
    "config: sources are a number": config("data", "sources", value=1),
    "config: sources are numbers": config("data", "sources", value=[1]),
    "config: sources are a table": config("data", "sources", value={"a": 1}),
    "metrics: differences beyond float64": written(
        "metrics.jsonl",
        "".join(
            json.dumps({"step": step, **dict.fromkeys(["train/loss", "time/step_s", "time/data_s", "memory/x_gib"], y)})
            + "\n"
            for step, y in enumerate((1e308, -1e308, 5e-324, 0, 1.7e308, -1e-310), start=1)
        ),
    ),
    "metrics: not finite": written(
        "metrics.jsonl",
        "".join(
            json.dumps({"step": step, **dict.fromkeys(["train/loss", "train/skipped_steps", "train/rollbacks"], y)})
            + "\n"
            for step, y in enumerate(("nan", "inf", "-inf"), start=1)
        ),
    ),
    "metrics: nearly equal": written(
        "metrics.jsonl",
        '{"step": 1, "a": 1.0, "b": 1e-300}\n{"step": 999999999999999, "a": 1.0000000000000002, "b": 2e-300}\n',
    ),
    "metrics: speeds": line(
        '{"step": 1, "throughput/tokens_per_second": 1e308, "throughput/tokens_per_second_per_device": 1e-308}'
    ),
    "metrics: places of samples": written(
        "metrics.jsonl",
        "".join(
            json.dumps({"step": step, "train/loss": 1.0, "validation/loss": "inf", "train/samples_seen": seen}) + "\n"
            for step, seen in enumerate((7, "nan", 5, "inf", -1e308, 1e308, 5e-324, 9), start=1)
        ),
    ),
    "metrics: memory without bounds": line(
        json.dumps({"step": 1, **dict.fromkeys(["memory/predicted_active_gib", "memory/max_rss_gib"], "nan")})[:-1]
        + ', "memory/max_active_gib": 1e308, "memory/limit_gib": "inf", "memory/max_reserved_gib": -1}'
    ),
    "metrics: parts without bounds": written(
        "metrics.jsonl",
        "".join(
            json.dumps({"step": step, **dict.fromkeys(["time/step_s", "time/validation_s"], y), "time/data_s": -y})
            + "\n"
            for step, y in enumerate((1e308, -1e308, 5e-324, 0, 1e149, -1e149), start=1)
        ),
    ),
    "metrics: step 0": line('{"step": 0, "time/validation_s": 1, "time/step_s": 0, "time/data_s": 0}'),
    "metrics: negative times": line('{"step": 1, "time/step_s": 1, "time/data_s": -1, "time/forward_s": 1}'),
    "metrics: no line end": written("metrics.jsonl", '{"step": 1}'),
    "launch: bytes": written(LAUNCH, bytes(range(256))),
    "launch: a huge process": written(
        LAUNCH,
        json.dumps(
            {
                "agents": [{"host": os.uname().nodename, "folder": "", "pid": 10**299, "started": 1}],
                "slurm_job": None,
                "has_ended": False,
            }
        ),
    ),
    "launch: a FIFO": fifo_at(LAUNCH),
    "lock: a FIFO": fifo_at("lock"),
    "lock: a folder": folder_at("lock"),
    "logs: no such dates": written(
        LOG,
        "9999-99-99 99:99:99,000 INFO titan_launch: a\n0000-00-00 00:00:00,000 ERROR titan_launch: b\n",
    ),
    "logs: a step of many digits": written(
        LOG, f"2026-11-23 00:00:00,000 INFO titan_launch: resumed from x/step-{'9' * 100_000}\n"
    ),
    "logs: a long message": written(LOG, f"2026-11-23 00:00:00,000 ERROR titan_launch: {'a' * 10_000_000}\n"),
    "logs: 5 GB": sparse(LOG, 5 << 30, b"\n2026-11-23 00:00:00,000 ERROR titan_launch: the end\n"),
    "logs: a FIFO": fifo_at("logs/attempt-1/rank_1.log"),
    "logs: a file": written("logs/attempt-3", ""),
    "logs: a huge attempt": lambda folder: (folder / "logs" / f"attempt-{10**18}").mkdir(),
    "logs: an attempt of many digits": lambda folder: (folder / "logs" / f"attempt-{'9' * 240}").mkdir(),
    "logs: other digits": lambda folder: (folder / "logs" / "attempt-\u0663").mkdir(),
    "logs: many attempts": many_attempts,
    "logs: many ranks": lambda folder: [sparse(f"logs/attempt-1/rank_{n}.log", 1 << 24)(folder) for n in range(3000)],
    "checkpoints: a huge step": lambda folder: (folder / "checkpoints" / f"step-{10**30}").mkdir(parents=True),
    "checkpoints: a huge step with a manifest": written(f"checkpoints/step-{10**30}/manifest.json", "{}"),
    "checkpoints: a file": written("checkpoints", ""),
    "checkpoints: a FIFO": fifo_at(MANIFEST),
    "checkpoints: a manifest of bytes": written(MANIFEST, bytes(range(256))),
    "checkpoints: a large manifest": sparse(MANIFEST, 1 << 33),
    "checkpoints: a manifest of many values": written(MANIFEST, "[" + "[]," * 10_000_000 + "[]]"),
    "checkpoints: links": link_at("checkpoints", "checkpoints"),
}
"""Run folders that are shown as far as they can be."""


HEAVY = {"metrics: many lines", "config: many values", "logs: many ranks", "logs: many attempts", "logs: 5 GB"}
"""Folders that take a second or more. Their tests are slow."""


def cases(table: Mapping[str, Any], every: int) -> list[Any]:
    """Return every `every`-th name of a table; the others are slow."""
    heavy = (pytest.param(name, marks=[pytest.mark.slow]) for name in table if name in HEAVY)
    return [*rest_is_slow(quick(table), every), *heavy]


def quick(table: Mapping[str, Any]) -> list[str]:
    """Return the names of a table without those of folders that take long."""
    return [name for name in table if name not in HEAVY]


@pytest.mark.parametrize("name", quick(REFUSED | REFUSED_IN_PAGES))
def test_a_bad_folder_is_one_error(runs: Path, name: str) -> None:
    make, sentence = (REFUSED | REFUSED_IN_PAGES)[name]
    make(runs / "bad")
    with pytest.raises(UserError, match=re.escape(sentence)) as caught:
        show(runs / "bad", load_run(runs / "good"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", quick(HARMLESS))
def test_a_strange_folder_has_a_page(runs: Path, name: str) -> None:
    HARMLESS[name](runs / "bad")
    for is_first in (True, False):
        assert show(runs / "bad", load_run(runs / "good"), is_first).isascii()


@pytest.mark.parametrize("name", cases(REFUSED, 16))
def test_a_bad_folder_is_one_sentence_and_one_row(runner: Runner, runs: Path, name: str) -> None:
    make, sentence = REFUSED[name]
    make(runs / "bad")
    for arguments in (["report", "bad"], ["compare", "good", "bad"], ["compare", "bad", "good", "--out", "x.html"]):
        ended = runner.run(arguments, runs)
        ended.assert_one_sentence(sentence)
        assert ended.text.count("\n") == 1, ended.text
    assert_listed(runner, runs, sentence)


def assert_listed(runner: Runner, runs: Path, sentence: str = "") -> None:
    """Assert that `runs` lists both runs. `sentence`: what the row of the first says."""
    ended = runner.run(["runs", "."], runs)
    ended.assert_harmless()
    assert ended.status == 0 and "good finished 8/8" in " ".join(ended.stdout.split()), ended.text
    assert sentence in ended.stdout and len(ended.stdout.splitlines()) == 3, ended.text
    listed = runner.run(["runs", ".", "--json"], runs)
    listed.assert_harmless()
    bad, good = json.loads(listed.stdout)
    assert (listed.status, good["state"], good["step"]) == (0, "finished", 8)
    assert sentence in bad.get("error", "")


@pytest.mark.parametrize("name", cases(REFUSED_IN_PAGES, 8))
def test_a_bad_record_is_one_sentence(runner: Runner, runs: Path, name: str) -> None:
    make, sentence = REFUSED_IN_PAGES[name]
    make(runs / "bad")
    runner.run(["report", "bad"], runs).assert_one_sentence(sentence)
    assert_listed(runner, runs)


@pytest.mark.parametrize("name", cases(HARMLESS, 16))
def test_a_strange_folder_is_shown(runner: Runner, runs: Path, name: str) -> None:
    HARMLESS[name](runs / "bad")
    for arguments in (["report", "bad"], ["compare", "good", "bad"], ["compare", "bad", "good", "--out", "x.html"]):
        ended = runner.run(arguments, runs)
        ended.assert_harmless()
        assert ended.status == 0, ended.text
    assert_listed(runner, runs)


def test_a_list_of_runs_passes_links_and_strange_names(runner: Runner, runs: Path) -> None:
    (runs / "loop").symlink_to(".")
    (runs / "a").mkdir()
    (runs / "a" / "up").symlink_to("..")
    strange = ("z\nerror: gone\x1b[2J", os.fsdecode(b"z\xff"), "z" * 250, "z<script>")
    for name in strange:
        shutil.copytree(runs / "good", runs / name)
    os.mkfifo(runs / "fifo")
    for index in range(3000):
        (runs / "a" / str(index)).touch()
    ended = runner.run(["runs", "."], runs)
    ended.assert_harmless()
    assert ended.status == 0 and ended.stdout.count("finished") == 2 + len(strange), ended.text
    assert len(ended.stdout.splitlines()) == 3 + len(strange)
    ended = runner.run(["runs", ".", "--json"], runs)
    assert len(json.loads(ended.stdout)) == 2 + len(strange)
    for name in strange:
        ended = runner.run(["compare", name, "good"], runs)
        ended.assert_harmless()
        assert ended.status == 0, ended.text
        write_page(runs / "x.html", run_page(load_run(runs / name)))


def test_a_folder_of_very_many_folders_is_one_sentence(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(recorded_run, "MOST_FOLDERS", 100)
    for index in range(200):
        (runs / f"empty-{index}").mkdir()
    assert main(["runs", str(runs)]) == 2
    assert capsys.readouterr().err == f"error: {runs}: more than 100 folders; name a folder with fewer\n"


def test_limits_of_reports_are_one_sentence(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded_run, "MOST_REPORTS", 4)
    with pytest.raises(UserError, match=r"metrics.jsonl: more than 4 reports"):
        load_run(runs / "good")


def test_reports_that_go_back_very_often_take_linear_time(runs: Path) -> None:
    lines = (f'{{"step": {step}, "m{index % 9000}": 1}}\n' for index in range(20_000) for step in (index % 2 + 1,))
    (runs / "bad" / "metrics.jsonl").write_text("".join(lines))
    start = time.process_time()
    assert load_run(runs / "bad").reports.steps.tolist() == [1, 2]
    assert time.process_time() - start < 5


class _Elements(HTMLParser):
    """The kinds of elements of a page: names, and names of attributes."""

    def __init__(self, page: str):
        super().__init__()
        self.kinds: set[tuple[str, tuple[str, ...]]] = set()
        self.styles: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.kinds.add((tag, tuple(name for name, _ in attrs)))
        self.styles += [value or "" for name, value in attrs if name == "style"]

    def handle_comment(self, data: str) -> None:
        raise AssertionError(data)

    handle_pi = unknown_decl = handle_comment


INJECTIONS = (
    "<script>alert(1)</script>",
    "</script><script>alert(1)</script>",
    "</title></style></pre></svg><img src=x onerror=alert(1)>",
    '"><img src=x onerror=alert(1)>',
    "' onload='alert(1)",
    '" style="background:url(javascript:alert(1))',
    "]]><b>",
    "<!-- ",
    "--><b>",
    "<![CDATA[",
    "javascript:alert(1)",
    "file:///etc/passwd",
    "&lt;b&gt;&#60;b&#62;",
    "<?php",
    "{{7*7}}${7*7}",
)


def test_no_name_of_a_run_becomes_an_element_of_a_page(runs: Path) -> None:
    unit = {**UNIT, "output_dtype": None}
    both = (runs / "good", runs / "bad")
    benign = {kind for page in pages(*both) for kind in _Elements(page).kinds}
    for text in INJECTIONS:
        for make in (
            config("job", "name", value=text),
            config("model", "name", value=text),
            config("model", "flavor", value=text),
            config("model", text, value=text),
            config(text, value={text: [text, {text: text}]}),
            written(UNITS, json.dumps([{**unit, **dict.fromkeys(UNIT.keys() - {"parameters"}, text)}])),
            written(AUDIT, json.dumps({"differences": [text], "units": [{"name": text, "as_planned": True}]})),
            written(LOG, f"2026-11-23 00:00:00,000 ERROR titan_launch: {text}\n"),
            line(
                "\n".join(
                    json.dumps(
                        {
                            "step": step,
                            "train/loss": step,
                            "time/step_s": 1,
                            **{
                                f"{group}{text}{unit}": step
                                for group in ("", "time/", "memory/", "throughput/")
                                for unit in ("", "_s", "_gib", "_per_second")
                            },
                        }
                    )
                    for step in (1, 2, 3)
                )
            ),
        ):
            make(runs / "bad")
        named = runs / ("n" + text.replace("/", ""))
        shutil.copytree(runs / "bad", named)
        for page in pages(runs / "good", named):
            found = _Elements(page)
            assert found.kinds <= benign, found.kinds - benign
            assert all(re.fullmatch(r"((width|background):[#\w.%-]+;?)+", style) for style in found.styles)
            assert page.count("<script") == page.count("<img") == 0
        shutil.rmtree(named)


def pages(one: Path, other: Path) -> list[str]:
    """Return the page of a run, and that of two."""
    first, second = load_run(one), load_run(other)
    return [run_page(first), run_page(second), RunComparison([first, second]).as_page()]


HOSTILE_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 1.5, -0.0, 10**15, 10**299, -(10**299), 1e308, -1e308, 5e-324),
    *("", "nan", "inf", "x" * 3000, "a\nerror: b", "\x1b[2J\x00", "<script>", "../..", "\u202e", "\U0010ffff", "1"),
    *([], {}, [1], [None], ["a", 1], {"a": 1}, {"": {"": []}}, {"name": []}, [{"name": 1}]),
    [[[[[]]]]],
    math.nan,
    math.inf,
)
RAW = ("1e400", "9" * 400, '"\\ud800"', "[" * 70 + "]" * 70, "{" + '"a":1,' * 2 + '"a":2}', "", "]", "NaN", '"\0"')
"""Texts in place of a value that `json.dumps` does not write."""

MARK = "@@mark@@"


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the paths of all values in nested lists and tables."""
    yield path
    inside = value.items() if isinstance(value, dict) else enumerate(value[:2]) if isinstance(value, list) else ()
    for key, item in inside:
        yield from places(item, (*path, key))


def replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """Return a copy of nested lists and tables with another value at a path."""
    if not path:
        return new
    changed = dict(value) if isinstance(value, dict) else list(value)
    changed[path[0]] = replaced(value[path[0]], path[1:], new)
    return changed


def mutated_json(text: str) -> Iterator[str]:
    """Yield a JSON text with each of its values replaced by each hostile one, or removed, and with each key changed."""
    whole = json.loads(text)
    for path in places(whole):
        marked = json.dumps(replaced(whole, path, MARK))
        for new in (*(json.dumps(value) for value in HOSTILE_VALUES), *RAW):
            yield marked.replace(f'"{MARK}"', new)
        for new in ("", "b\\nc", "<b>", "\\ud800", "k" * 3000) if path and isinstance(path[-1], str) else ():
            yield re.sub(rf'"{path[-1]}": "{MARK}"', lambda _, new=new: f'"{new}": 1', marked)  # type: ignore[misc]


def signed(text: str) -> str:
    """Return a manifest with the checksum that an attacker would give it."""
    with suppress(ValueError, TypeError, KeyError):
        whole = json.loads(text)
        content = json.dumps(whole["manifest"], indent=1, sort_keys=True).encode()
        return json.dumps({**whole, "crc32": f"{zlib.crc32(content):08x}"})
    return text


STEP = "checkpoints/step-4/manifest.json"


def mutations(run: Path) -> list[tuple[str, bytes]]:
    """Return files of a run with changes."""
    found: list[tuple[str, bytes]] = []
    for name in ("config.json", LAUNCH, UNITS, AUDIT):
        found += [(name, text.encode(errors="surrogatepass")) for text in mutated_json((run / name).read_text())]
    found += [(STEP, signed(text).encode()) for text in mutated_json((run / STEP).read_text())]
    for name in ("metrics.jsonl", ROLLED):
        lines = (run / name).read_text().splitlines()
        for text in mutated_json(lines[1]):
            found.append((name, "\n".join([lines[0], text, *lines[2:], ""]).encode(errors="surrogatepass")))
    chance = random.Random(0)
    for name in ("config.json", "launch.json", UNITS, AUDIT, "metrics.jsonl", ROLLED, STEP, LOG):
        found += [(name, damaged_text((run / name).read_bytes(), chance)) for _ in range(1000)]
    return found


@pytest.mark.parametrize("every", [400, pytest.param(16, marks=[pytest.mark.slow, pytest.mark.timeout(900)])])
def test_mutated_run_folders_are_shown_or_refused(trained: Path, tmp_path: Path, every: int) -> None:
    good = load_run(record(tmp_path / "good", reports()))
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    shown = 0
    everything = mutations(run)
    random.Random(1).shuffle(everything)
    for name, content in everything[::every]:
        original = (run / name).read_bytes()
        (run / name).write_bytes(content)
        try:
            show(run, good, len(content) % 2 == 0)
            shown += 1
        except UserError as error:
            assert "\n" not in str(error) and len(str(error)) < 2000, error
        except Exception as error:
            raise AssertionError(f"{name}: {content[:2000]!r}") from error
        (run / name).write_bytes(original)
    assert shown > len(everything) / every / 10  # enough of them get past the readers


@pytest.mark.parametrize("every", [100, pytest.param(2, marks=[pytest.mark.slow, pytest.mark.timeout(900)])])
def test_mutated_records_of_a_run_to_resume_are_read_or_refused(trained: Path, tmp_path: Path, every: int) -> None:
    run = tmp_path / "tiny"
    shutil.copytree(trained, run)
    table = json.loads((trained / "config.json").read_text())
    table["job"]["dump_folder"] = str(tmp_path)
    job = JobConfig.model_validate(table)
    chance = random.Random(2)
    everything = [
        (name, text.encode(errors="surrogatepass"))
        for name in ("config.json", LAUNCH)
        for text in mutated_json((run / name).read_text())
    ]
    everything += [
        (name, damaged_text((run / name).read_bytes(), chance)) for name in ("config.json", LAUNCH) for _ in range(1000)
    ]
    chance.shuffle(everything)
    for name, content in everything[::every]:
        original = (run / name).read_bytes()
        (run / name).write_bytes(content)
        try:
            check_earlier_run(job, effective_load(job, Attempt()))
            recorded_modes(job, Attempt())
        except UserError as error:
            assert len(str(error)) < 20_000
        except Exception as error:
            raise AssertionError(f"{name}: {content[:2000]!r}") from error
        (run / name).write_bytes(original)


def test_flight_records_that_would_take_forever_are_passed_over(tmp_path: Path) -> None:
    nested: Any = ("a", "a")
    for _ in range(60):
        nested = (nested, nested)  # the hash of it, and its text, take 2**60 operations
    good = {
        "process_group": ("5", "dp"),
        "collective_seq_id": 8,
        "p2p_seq_id": 0,
        "is_p2p": False,
        "profiling_name": "nccl:all_gather",
        "state": "started",
        "retired": False,
    }
    for rank, changes in enumerate(
        (
            {},
            {"process_group": ("5", nested)},
            {"process_group": (nested, "dp")},
            {"profiling_name": nested},
            {"profiling_name": "a" * 5000},
            {"collective_seq_id": 10**5000},
            {"collective_seq_id": nested},
            {"is_p2p": nested},
        )
    ):
        path = record_path(tmp_path, FOLDER, rank)
        path.parent.mkdir(exist_ok=True)
        groups = {"5": {"name": "5", "desc": "dp", "ranks": "[0, 1]"}}
        path.write_bytes(pickle.dumps({"entries": [{**good, **changes}], "pg_config": groups}))
    os.mkfifo(record_path(tmp_path, FOLDER, 100))
    found = list(unfinished_collectives(tmp_path, since=0))
    assert found[0].startswith("nccl:all_gather number 8 of group dp: started by rank 0")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"[" + b"[1]," * 200_000 + b"1]", "more bytes or values than an index of this checkpoint can have"),
        (b"[" + b"1," * 400_000 + b"1]", "more bytes or values than an index of this checkpoint can have"),
        (b'{"tensors": {' + b" " * (3 << 20) + b"}}", "more bytes or values than an index of this checkpoint can have"),
        (b"[" * 100_000, "more bytes or values than an index of this checkpoint can have"),
        (b"{", "index.json has more bytes or values|index.json is damaged"),
        (b"", "index.json is damaged"),
    ],
)
def test_an_index_is_compared_with_its_checkpoint_before_it_is_parsed(
    trained: Path, tmp_path: Path, content: bytes, reason: str
) -> None:
    folder = tmp_path / "step-4"
    shutil.copytree(trained / "checkpoints" / "step-4", folder)
    (folder / "index.json").write_bytes(content)
    with pytest.raises(DamagedCheckpointError, match=reason):
        read_index(folder)


def test_a_manifest_with_a_loss_that_is_not_a_number_is_read(tmp_path: Path) -> None:
    manifest = Manifest(
        step=1,
        world_size=1,
        config_digest="",
        base=None,
        command="",
        commit=None,
        validation_loss=math.nan,
        gradient_accumulation={},
        activation_checkpoint={},
        data={},
        versions={},
        files={},
    )
    (tmp_path / "step-1").mkdir()
    write_manifest(tmp_path / "step-1", manifest)
    loss = read_manifest(tmp_path / "step-1").validation_loss
    assert loss is not None and math.isnan(loss)


@pytest.mark.parametrize(
    ("make", "sentence"),
    rest_is_slow(
        [
            (sparse("metrics.jsonl", 1 << 30), "metrics.jsonl:1: not a report of a run: a line of more than 32 MiB"),
            (line('{"step": 1, "a": [' + "[1]," * 1_000_000 + "1]}"), "metrics.jsonl:1: the line has more than"),
            (line('{"step": 1e999}'), "metrics.jsonl:1: the line is not a report of a run"),
            (fifo_at("metrics.jsonl"), "metrics.jsonl is not a regular file"),
            (
                written("config.json", "[" + "[1]," * 2_000_000 + "1]"),
                "config.json is damaged (more than 2,000,000",
            ),
            (sparse("config.json", 1 << 33), "config.json cannot be read (larger than 16 MiB"),
            (written(LAUNCH, DEEP), "launch.json is damaged (more than 64 nested"),
            (config("data", "sources", value=[1]), "tiny holds a run of another experiment"),
        ],
        4,
    ),
)
def test_a_bad_folder_is_not_resumed(
    runner: Runner, trained: Path, tmp_path: Path, make: Making, sentence: str
) -> None:
    shutil.copytree(trained, tmp_path / "tiny")
    job = json.loads((trained / "config.json").read_text())
    job["job"]["dump_folder"] = str(tmp_path)
    (tmp_path / "job.json").write_text(json.dumps(job))
    make(tmp_path / "tiny")
    before = sorted(path.name for path in (tmp_path / "tiny" / "checkpoints").iterdir())
    ended = runner.run(["train", "--config", "job.json"], tmp_path)
    assert ended.status == 2 and sentence in ended.stderr and "Traceback" not in ended.text, ended.text
    assert sorted(path.name for path in (tmp_path / "tiny" / "checkpoints").iterdir()) == before
