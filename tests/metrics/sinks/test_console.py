from __future__ import annotations

import io
import math
import re

import pytest

from titan_launch.metrics.sinks.console import ConsoleSink

REPORT = {
    "train/loss": 5.4321,
    "train/loss_max": 6.0,
    "train/grad_norm": 1.5,
    "train/lr": 3e-4,
    "throughput/tokens_per_second": 12345.6,
    "throughput/mfu_percent": 41.25,
    "time/step_s": 0.1234,
    "memory/max_reserved_gib": 60.5,
    "memory/max_rss_gib": 3.0,
}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True

    def screen(self) -> list[str]:
        """Return the lines that a terminal shows, without colours."""
        text = re.sub(r"\x1b\[\d+m", "", self.getvalue())
        return [line.split("\r\x1b[K")[-1] for line in text.split("\n")]


@pytest.fixture(autouse=True)
def terminal_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")


def printed(*reports: dict[str, float], total_steps: int = 1000) -> list[str]:
    stream = io.StringIO()
    sink = ConsoleSink(total_steps, stream=stream)
    for number, scalars in enumerate(reports):
        sink.progress(10**number)
        sink.write(10**number, scalars)
    sink.close()
    return stream.getvalue().splitlines()


def test_a_line_shows_the_fields_of_a_report() -> None:
    assert printed(REPORT) == [
        "step    1/1000  loss   5.4321  grad norm    1.500  lr 3.000e-04       12,346 tok/s  MFU  41.2 %     0.123"
        " s/step  reserved memory  60.50 GiB"
    ]


def test_the_line_of_an_image_model_counts_images() -> None:
    images = {"throughput/images_per_second": 12345.6, "validation/loss": 0.25, "validation/accuracy": 0.98765}
    assert printed(images) == ["step    1/1000       12,346 img/s  validation loss   0.2500  accuracy  98.77%"]


def test_lines_are_aligned() -> None:
    later = {**REPORT, "train/loss": 11.0, "train/grad_norm": math.nan, "throughput/tokens_per_second": 9_876_543.0}
    lines = printed(REPORT, later, REPORT)
    assert len({len(line) for line in lines}) == 1
    assert len({line.index("tok/s") for line in lines}) == 1


def test_missing_fields_are_not_shown() -> None:
    cpu = {tag: REPORT[tag] for tag in ("train/loss", "memory/max_rss_gib")}
    assert printed(cpu, {"validation/loss": 2.0}, {"train/epoch": 1.0}) == [
        "step    1/1000  loss   5.4321  host memory   3.00 GiB",
        "step   10/1000  validation loss   2.0000",
    ]


def test_a_file_gets_no_escape_sequences_nor_bars() -> None:
    assert not any("\x1b" in line or "\r" in line or "[" in line for line in printed(REPORT, REPORT))


def test_a_terminal_gets_lines_above_a_bar() -> None:
    terminal = Terminal()
    now = 0.0
    sink = ConsoleSink(100, stream=terminal, clock=lambda: now)
    for step in range(1, 26):
        now += 10.0
        sink.progress(step)
        if step % 10 == 0:
            sink.write(step, {"train/loss": 1.0})
    assert terminal.screen() == [
        "step  10/100  loss   1.0000",
        "step  20/100  loss   1.0000",
        "[######..................] 25/100  25 %  ETA 0:12:30",
    ]
    assert "\x1b[36mloss   1.0000\x1b[0m" in terminal.getvalue()
    sink.close()
    assert terminal.screen()[-1] == ""


def test_the_bar_is_redrawn_ten_times_a_second_at_most() -> None:
    terminal = Terminal()
    now = 0.0
    sink = ConsoleSink(1000, stream=terminal, clock=lambda: now)
    for step in range(1, 1001):
        now += 0.01
        sink.progress(step)
    assert 80 <= terminal.getvalue().count("\r") <= 101
    assert "1000/1000  100 %  ETA 0:00:00" in terminal.screen()[-1]


def test_a_narrow_terminal_does_not_wrap_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    terminal = Terminal()
    ConsoleSink(100, stream=terminal).progress(1)
    assert len(terminal.screen()[-1]) == 19


def test_colour_can_be_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    terminal = Terminal()
    ConsoleSink(100, stream=terminal).write(1, REPORT)
    assert "\x1b" not in terminal.getvalue()


def test_a_dumb_terminal_is_treated_like_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    terminal = Terminal()
    sink = ConsoleSink(100, stream=terminal)
    sink.progress(1)
    sink.write(1, REPORT)
    assert "\x1b" not in terminal.getvalue()


def test_non_finite_values_are_red() -> None:
    terminal = Terminal()
    ConsoleSink(100, stream=terminal).write(1, {"train/loss": math.nan})
    assert "\x1b[31mloss      nan\x1b[0m" in terminal.getvalue()
