"""Figures of recorded runs, in text, in JSON, on pages and for scripts. A browser opens the pages."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from tests.report.recorded import add_log, audit, record, reports
from tests.train.jobs import TINY_ARGS
from titan_launch.cli import main
from titan_launch.config.job import JobConfig
from titan_launch.plan.report.unit_table import model_name
from titan_launch.report.charts import line_chart
from titan_launch.report.comparison import RunComparison
from titan_launch.report.figures import spread, step_columns, summary, time_parts
from titan_launch.report.recorded_run import load_run

FP32, BF16 = {"precision": {"param_dtype": "float32"}}, {"precision": {"param_dtype": "bfloat16"}}


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two runs that differ in precision. The second is twice as fast, and its loss is higher by 0.5."""
    monkeypatch.chdir(tmp_path)
    outputs = tmp_path / "outputs"
    record(outputs / "fp32", reports(), **FP32)
    record(outputs / "bf16", reports(loss=2.5, speed=2.0), **BF16)
    for name in ("fp32", "bf16"):
        add_log(outputs / name, 1, "INFO titan_launch.train.run: device: cpu", "INFO titan_launch.train.loop: done")
        audit(outputs / name)
    return outputs


def test_the_figures_are_those_that_the_docs_define(runs: Path) -> None:
    run = load_run(runs / "fp32")
    seconds = spread(run.steady("time/step_s"))
    assert seconds is not None  # of 0.5, 0.25, 0.5 and 0.75; the first step is slow and does not count
    assert (seconds.low, seconds.median, seconds.high) == (0.4375, 0.5, 0.5625)
    assert time_parts(run) == pytest.approx({"data": 0.05, "not measured": 0.45})
    assert run.num_ranks == 2
    assert summary(run) == [
        "The run of llama3 (debug) on 2 ranks is finished: step 8 of 8.",
        "The training loss fell from 1.9000 at step 1 to 1.2000 at step 8.",
        "The validation loss is 1.6000 at step 8, the lowest of the run.",
        "The median speed is 200 tokens per second, 0.5 s per step; half of the reported speeds are from 183 to 250.",
        "Training waits for data in 10.0 % of its time.",
        "The peak memory is 2.50 GiB, +25.0 % against the planned 2.00 GiB.",
        "There was no restart, no skipped step and no rollback.",
        "There is no checkpoint.",
    ]


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ({"name": "llama3", "flavor": "none", "args": TINY_ARGS}, "llama3"),
        ({"name": "tests.train.test_lora:Net"}, "tests.train.test_lora:Net"),
    ],
)
def test_a_model_without_a_flavor_is_named_without_one(model: dict[str, Any], name: str, tmp_path: Path) -> None:
    run = load_run(record(tmp_path / "run", reports(), model=model))
    assert summary(run)[0].startswith(f"The run of {name} on 2 ranks is")
    assert model_name(JobConfig.model_validate({"model": model})) == name


def test_all_parts_of_a_step_that_a_run_reports_are_shown(tmp_path: Path) -> None:
    parts = {"time/forward_s": 0.25, "time/backward_s": 0.5, "time/other_s": 0.25, "time/validation_s": 2.0}
    ignored = {"time/compile_s": 9.0, "time/checkpoint_stall_s": 9.0}
    run = load_run(record(tmp_path / "run", {1: {"time/step_s": 1.0, **parts, **ignored}}))
    assert time_parts(run) == {"forward": 0.25, "backward": 0.5, "other": 0.25, "validation": 2.0}


def test_pauses_are_means_over_all_steps(tmp_path: Path) -> None:
    """3 s of validation in the one step of the first report, and 4 s in the nine steps of the second."""
    reports = {1: {"time/validation_s": 3.0}, 10: {"time/validation_s": 4 / 9}}
    run = load_run(record(tmp_path / "run", {step: {"time/step_s": 1.0, **report} for step, report in reports.items()}))
    assert time_parts(run)["validation"] == pytest.approx(0.7)


def test_a_run_that_loaded_a_checkpoint_begins_at_its_step(tmp_path: Path) -> None:
    """3 s of validation in the one step of the first report, and 1 s in each of the two steps of the second."""
    reports = {501: {"time/validation_s": 3.0}, 503: {"time/validation_s": 1.0}}
    run = load_run(record(tmp_path / "run", {step: {"time/step_s": 1.0, **report} for step, report in reports.items()}))
    add_log(run.folder, 1, "ERROR titan_launch.train: no space left")  # an attempt that failed before it loaded
    add_log(run.folder, 2, "INFO titan_launch.train: resumed from /other/checkpoint/step-500")
    assert time_parts(run)["validation"] == pytest.approx(5 / 3)
    assert [(column.first, column.last) for column in step_columns(run)] == [(501, 501), (502, 503)]


def test_the_53rd_run_of_a_comparison_has_a_letter_and_a_number(tmp_path: Path) -> None:
    record(tmp_path / "run", reports())
    run = load_run(tmp_path / "run")
    text = RunComparison([replace(run, folder=tmp_path / str(index)) for index in range(53)]).as_text()
    assert " Z " in text and " a " in text and " z " in text and " A1 " in text and " B1 " not in text


def test_compare_names_what_differs_and_the_figures_in_its_first_lines(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", "outputs/fp32", "outputs/bf16"]) == 0
    lines = [re.sub(" +", " ", line) for line in capsys.readouterr().out.splitlines()]
    assert lines[:9] == [
        "configuration: 1 different key",
        " A: fp32 B: bf16",
        ' precision.param_dtype "float32" "bfloat16"',
        "A = outputs/fp32: finished, step 8 of 8",
        "B = outputs/bf16: finished, step 8 of 8",
        " A B B against A",
        "loss at step 8 1.2 1.7 +0.5",
        "tokens per second 200 (183 to 250) 400 (367 to 500) +100.0 %",
        "seconds per step 0.5 (0.4375 to 0.5625) 0.25 (0.2188 to 0.2812) -50.0 %",
    ]


def test_compare_as_json_has_the_same_figures(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "outputs/fp32", "outputs/bf16", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["configuration"] == {"precision.param_dtype": ["float32", "bfloat16"]}
    assert data["figures"]["loss at step 8"] == pytest.approx([1.2, 1.7])
    assert data["figures"]["tokens per second"] == [200, 400]
    assert data["last_common_step"] == 8 and data["only_in_some_runs"] == {}


@pytest.mark.parametrize(
    ("options", "status", "message"),
    [
        (["bf16", "fp32", "--fail-if-slower", "3%"], 1, "fp32 is slower than bf16 by more than 3 %: -50.0 %"),
        (["fp32", "bf16", "--fail-if-slower=3%"], 0, ""),
        (["bf16", "fp32", "--fail-if-slower", "50 %"], 0, ""),
        (
            ["fp32", "bf16", "--fail-if-loss-differs", "1e-3"],
            1,
            "differs from that of fp32 by more than 0.001: 1.7 and",
        ),
        (["fp32", "bf16", "--fail-if-loss-differs", "0.51"], 0, ""),
        (["fp32", "bf16", "--fail-if-slower", "3"], 2, 'must be a percentage such as 3%, not "3"'),
        (["fp32"], 2, "compare needs at least two runs"),
        (["fp32", "../outputs/fp32"], 2, "the same run is named twice"),
        (["fp32", "images", "--fail-if-slower", "3%"], 2, "throughput/tokens_per_second, images: throughput/images"),
        (["fp32", "empty", "--fail-if-loss-differs", "1"], 2, "the runs have no loss at a common step"),
        (["fp32", "nan", "--fail-if-loss-differs", "1"], 1, "nan and 1.2"),
    ],
)
def test_limits_for_scripts(
    runs: Path,
    options: list[str],
    status: int,
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(runs)
    images = {step: {"train/loss": 1.0, "throughput/images_per_second": 3.0} for step in (1, 8)}
    for name, metrics in (("images", images), ("empty", {}), ("nan", {8: {"train/loss": math.nan}})):
        if name in options:
            record(runs / name, metrics)
    assert main(["compare", *options]) == status
    reported = capsys.readouterr().err
    assert message in reported and reported.count("\n") == bool(message)


def test_runs_with_different_metrics_and_without_reports_are_compared(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record(runs / "images", {8: {"train/loss": math.inf, "throughput/images_per_second": 3.0, "my/metric": 1.0}})
    record(runs / "empty", {})
    folders = ["outputs/fp32", "outputs/images", "outputs/empty"]
    assert main(["compare", *folders, "--out", "page.html"]) == 0
    printed = capsys.readouterr().out
    assert "only in B: my/metric" in printed and re.search(r"images per second +- +3 +-", printed)
    assert re.search(r"last loss +1.2 +inf +-", printed)
    assert "my/metric" in Path("page.html").read_text()
    assert main(["compare", *folders, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["figures"]["last loss"] == [pytest.approx(1.2), "inf", None]
    assert main(["report", "outputs/empty"]) == 0 and "There is no report yet." in capsys.readouterr().out


def test_runs_lists_all_runs_and_says_what_is_wrong_with_one(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(runs / "sweep" / "killed", {4: {"train/loss": math.nan}}, has_ended=False)
    record(runs / "sweep" / "stopped", {4: {"train/loss": 1.0}})
    (runs / "broken").mkdir()
    (runs / "broken" / "lock").touch()
    assert main(["runs"]) == 0
    lines = [re.sub(" +", " ", line) for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == "run state step loss speed s/step"
    assert lines[1] == "outputs/bf16 finished 8/8 1.7000 400 tokens per second 0.25"
    assert lines[2].startswith("outputs/broken the run has not begun its first step")
    assert lines[4:] == ["outputs/sweep/killed failed 4/8 nan", "outputs/sweep/stopped stopped 4/8 1.0000"]
    assert main(["runs", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[3]["loss"] == "nan"
    (runs / "none").mkdir()
    assert main(["runs", "outputs/none"]) == 0 and capsys.readouterr().out == "outputs/none: no runs found\n"
    assert main(["runs", "nowhere"]) == 2
    assert "nowhere: there is no such folder; name the folder" in capsys.readouterr().err


def test_an_unwritable_folder_is_one_error_that_names_the_option(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (runs / "fp32" / "report.html").mkdir()
    (runs / "fp32" / "report.html" / "file").touch()
    assert main(["report", "outputs/fp32", "--out", "/proc/report.html"]) == 2
    assert re.fullmatch(
        r"error: /proc/report.html cannot be written: .*; name a file in another folder with --out\n",
        capsys.readouterr().err,
    )
    assert main(["report", "outputs/fp32"]) == 2
    assert "report.html cannot be written: Is a directory" in capsys.readouterr().err


class Outline(HTMLParser):
    """Checks that all elements are closed, and collects the text and every address of another file."""

    def __init__(self, page: str):
        super().__init__()
        self.open, self.words, self.addresses = list[str](), list[str](), list[str]()
        self.feed(page)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.addresses += [str(value) for name, value in attrs if name in ("src", "href", "srcset", "action")]
        if tag not in ("meta",):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data.strip())


def test_the_page_of_a_run_has_every_part_and_no_script_or_address(runs: Path) -> None:
    assert main(["report", "outputs/fp32"]) == 0
    text = (runs / "fp32" / "report.html").read_text()
    page = Outline(text)
    assert not page.addresses and "<script" not in text and "http:" not in text and "https:" not in text
    for heading in ("Summary", "Loss and speed", "Where the time of a step goes", "Memory", "Precision", "Starts"):
        assert heading in page.words
    rows = "units|number of units|parameters per unit", "layers.0 .. layers.1|2|10|float32|bfloat16"
    assert all(row in "|".join(page.words) for row in rows) and "differs" in page.words
    assert "precision.param_dtype = &quot;float32&quot;" in text


def test_names_of_the_users_are_text_on_a_page(tmp_path: Path) -> None:
    folder = record(tmp_path / "run", {1: {"my/<b>metric</b>": 1.0}, 2: {"my/<b>metric</b>": 2.0}})
    assert main(["report", str(folder)]) == 0
    text = (folder / "report.html").read_text()
    Outline(text)
    assert "<b>metric" not in text and "&lt;b&gt;metric" in text


@pytest.mark.parametrize(
    ("points", "paths"),
    [
        ([(1.0, 2.0), (2.0, 3.0), (3.0, math.nan), (4.0, 5.0), (5.0, 6.0)], 2),
        ([(1.0, 7.0)], 0),
        ([(1.0, 0.0), (2.0, 0.0)], 1),
        ([(float(step), math.sin(step)) for step in range(5000)], 1),
        ([(1.0, 1e-12), (2.0, 1e12)], 1),
        ([(1.0, math.inf)], 0),
    ],
)
def test_a_chart_stays_inside_of_its_frame(points: list[tuple[float, float]], paths: int) -> None:
    chart = line_chart("loss", {"a": points})
    Outline(chart)
    lines = re.findall(r'class="line line0 solid" d="M([^"]+)"', chart)
    assert len(lines) == paths and len(chart) < 30_000
    for line in lines:
        for x, y in (map(float, point.split()) for point in line.split("L")):
            assert 60 <= x <= 550 and 28 <= y <= 232


def test_the_commands_do_not_import_torch(runs: Path) -> None:
    code = (
        "import sys; from titan_launch.cli import main\n"
        "for command in ('runs', 'report outputs/fp32', 'compare outputs/fp32 outputs/bf16'):\n"
        "    assert main(command.split()) == 0\n"
        "assert not {'torch', 'numpy', 'tensorboard'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, env=os.environ)


CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def open_in_browser(path: Path, *options: str) -> str:
    """Open a page in Chromium without a network. Return its log, which has the messages of the console."""
    command: list[Any] = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--v=0"]
    command += ["--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={path.parent / 'profile'}", *options]
    result = subprocess.run([*command, path.resolve().as_uri()], capture_output=True, text=True, timeout=200)
    assert result.returncode == 0, result.stderr
    return result.stdout + result.stderr


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
def test_a_browser_opens_both_pages_without_errors(runs: Path) -> None:
    assert main(["report", "outputs/fp32", "--out", "run.html"]) == 0
    assert main(["compare", "outputs/fp32", "outputs/bf16", "--out", "comparison.html"]) == 0
    bad = Path("bad.html")
    bad.write_text("<script>console.error('seen')</script>")
    assert ":CONSOLE" in open_in_browser(bad, "--dump-dom")  # so the log does have what pages report
    for page, number_of_charts in (("run.html", 4), ("comparison.html", 6)):
        shown = open_in_browser(Path(page), "--dump-dom")
        assert ":CONSOLE" not in shown
        assert shown.partition("<details>")[0].count("</figure>") == number_of_charts
        open_in_browser(Path(page), f"--screenshot={page}.png", "--window-size=1200,1600")
        assert Path(f"{page}.png").stat().st_size > 20_000
