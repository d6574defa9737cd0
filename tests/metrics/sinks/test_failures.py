"""Sinks that fail: at the start with an error on the key, and while training with one warning."""

from __future__ import annotations

import builtins
import errno
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from titan_launch.config.sections.run import MetricsConfig
from titan_launch.core.errors import ConfigError
from titan_launch.core.files import RecordFile
from titan_launch.metrics.sinks import Sink, SinkContext, open_sinks
from titan_launch.metrics.sinks.interface import GuardedSink


class Recorder(Sink):
    """A sink that records its calls, and raises an error at some steps."""

    def __init__(self, errors: Mapping[int, Exception]):
        self.errors, self.calls = errors, list[Any]()

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        self.calls.append(step)
        if step in self.errors:
            raise self.errors[step]

    def close(self, failed: bool = False) -> None:
        self.calls.append(failed)


def context(folder: Path) -> SinkContext:
    return SinkContext("tiny", folder, "01234567", 0, {"job": {"name": "tiny"}})


def test_a_sink_that_fails_is_reported_once_closed_and_dropped(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    recorder = Recorder({2: ValueError("no such host")})
    sink = GuardedSink("mine:sink", recorder, set())
    for step in (1, 2, 3):
        sink.write(step, {})
    sink.text("config", "")
    sink.rewind(1)
    sink.close()
    assert recorder.calls == [1, 2, True]
    assert caplog.messages == [
        "metrics: the sink mine:sink failed at the report of step 2 and gets no more reports; "
        "training is not affected. ValueError: no such host"
    ]


def test_a_full_disk_is_said_once_for_all_sinks_and_they_go_on(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    logged = set[str]()
    recorders = [Recorder({2: OSError(errno.ENOSPC, "full"), 3: OSError(errno.ENOSPC, "full")}) for _ in range(2)]
    sinks = [GuardedSink("sink", recorder, logged) for recorder in recorders]
    for step in (1, 2, 3, 4):
        for sink in sinks:
            sink.write(step, {})
    assert [recorder.calls for recorder in recorders] == [[1, 2, 3, 4]] * 2
    (message,) = caplog.messages
    assert "No space left on device; training continues" in message


def test_only_the_console_ends_a_run_whose_output_nobody_reads() -> None:
    sink = GuardedSink("console", Recorder({1: BrokenPipeError()}), set(), fatal=(BrokenPipeError,))
    with pytest.raises(BrokenPipeError):
        sink.write(1, {})


def test_a_record_that_finds_no_room_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "records"
    file = RecordFile(path, "ab")
    file.append(b"first\n")

    class Full:
        def __getattr__(self, name: str) -> Any:
            return getattr(raw, name)

        def write(self, data: memoryview) -> int:
            if raw.tell() >= 8:
                raise OSError(errno.ENOSPC, "full")
            return raw.write(data[:2])  # a disk with little room takes a part

    raw = file._file
    monkeypatch.setattr(file, "_file", Full())
    with pytest.raises(OSError, match="full"):
        file.append(b"second\n")
    monkeypatch.setattr(file, "_file", raw)
    file.append(b"third\n")
    file.close()
    assert path.read_bytes() == b"first\nthird\n"


PAGE = (Path(__file__).parents[3] / "docs" / "how_to" / "read_and_compare_runs.md").read_text()
MODULE = (
    PAGE.partition("```python\n# my_sinks.py\n")[2].partition("```")[0]
    + """
def fails(run):
    raise RuntimeError("no password")

def returns_nothing(run):
    return None
"""
)
"""The sink of the docs, and two that cannot be opened."""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "my_sinks.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    return "my_sinks"


def test_the_sink_of_the_docs_gets_the_reports(tmp_path: Path, module: str) -> None:
    config = MetricsConfig(enable_tensorboard=False, sinks=(f"{module}:Lines",))
    for name, sink in open_sinks(config, context(tmp_path)):
        assert name in ("metrics.jsonl", f"{module}:Lines")
        sink.write(5, {"train/loss": 1.5})
        sink.close()
    assert (tmp_path / "tiny.txt").read_text() == "5 1.5\n"


@pytest.mark.parametrize(
    ("factory", "reason"),
    [
        ("fails", "RuntimeError: no password"),
        ("returns_nothing", "must return a titan_launch.metrics.sinks.Sink, but returns a NoneType"),
        ("nothing", 'my_sinks has no attribute "nothing"'),
    ],
)
def test_a_sink_that_cannot_be_opened_is_an_error_on_its_key(
    tmp_path: Path, module: str, factory: str, reason: str
) -> None:
    config = MetricsConfig(enable_tensorboard=False, sinks=(f"{module}:Lines", f"{module}:{factory}"))
    with pytest.raises(ConfigError, match=reason) as caught:
        list(open_sinks(config, context(tmp_path)))
    (problem,) = caught.value.problems
    assert problem.key == ("metrics", "sinks", 1)


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_missing_package_is_an_error_that_says_how_to_install_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import_module = builtins.__import__

    def without_package(wanted: str, *args: Any, **options: Any) -> Any:
        if wanted.partition(".")[0] == name:
            raise ModuleNotFoundError(f"No module named '{name}'", name=name)
        return import_module(wanted, *args, **options)

    monkeypatch.setattr(builtins, "__import__", without_package)
    monkeypatch.delitem(__import__("sys").modules, f"titan_launch.metrics.sinks.{name}", raising=False)
    config = MetricsConfig(enable_tensorboard=False, sinks=(name,))
    with pytest.raises(ConfigError, match=rf"pip install 'titan-launch\[{name}\]'"):
        list(open_sinks(config, context(tmp_path)))
