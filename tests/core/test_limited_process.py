"""Objects in the helper process: limits, crashes, and its end."""

from __future__ import annotations

import gc
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.core.limited_calls import Calls
from titan_launch.core import limited_process
from titan_launch.core.files import MIB
from titan_launch.core.limited_process import CallError, LimitedObject, Limits
from titan_launch.data.chat_rendering import RecordError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="macOS does not limit the memory of a process")

LIMITS = Limits(memory_per_byte=100, answer=MIB)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> LimitedObject:
    monkeypatch.setattr(limited_process, "SECONDS", 0.5)
    return LimitedObject(LIMITS, Calls)


@pytest.fixture(scope="module", autouse=True)
def _tests_are_importable() -> Any:
    """Start the helper anew, so that it finds this module."""
    root = str(Path(__file__).parents[2])
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [root, before]))
    limited_process._helper.close()
    yield
    limited_process._helper.close()
    os.environ.pop("PYTHONPATH") if before is None else os.environ.update(PYTHONPATH=before)


def is_alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False


def wait_for(condition: Callable[[], object]) -> bool:
    end = time.monotonic() + 60
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return bool(condition())


def test_an_object_keeps_its_state_in_a_process_of_its_own(calls: LimitedObject) -> None:
    assert [calls.call("add"), calls.call("add", 5)] == [1, 6]
    other = LimitedObject(LIMITS, Calls, 10)
    assert other.call("add") == 11 and calls.call("add") == 7
    assert calls.call("pid") == other.call("pid") != os.getpid(), "one helper serves all objects"


def test_errors_come_back(calls: LimitedObject) -> None:
    with pytest.raises(RecordError) as refused:
        calls.call("refuse")
    assert (refused.value.reason, refused.value.detail, refused.value.key) == ("no chat", "a detail", "template")
    with pytest.raises(CallError) as caught:
        calls.call("fail")
    assert str(caught.value).startswith("RuntimeError: first\\nsecondx") and len(str(caught.value)) < 400
    with pytest.raises(CallError, match=r"^ValueError: first is negative$"):
        LimitedObject(LIMITS, Calls, -1).call("add")
    with pytest.raises(CallError, match=r"^AttributeError: "):
        calls.call("unknown")
    assert calls.call("add") == 1


@pytest.mark.parametrize(
    ("method", "arguments", "reason"),
    [
        ("loop", (), r"needs more than 0\.5 s of CPU time \(input: \d+ bytes\)"),
        ("threads", (), r"needs more than 0\.5 s of CPU time \(input: \d+ bytes\)"),
        ("allocate", (10**10,), r"needs more than 512 MiB of memory \(input: \d+ bytes\)"),
        (
            "end",
            (signal.SIGSEGV,),
            r"crashed its process \(SIGSEGV\), possibly because it needs more than 512 MiB of memory",
        ),
        (
            "end",
            (signal.SIGABRT,),
            r"crashed its process \(SIGABRT\), possibly because it needs more than 512 MiB of memory",
        ),
        ("end", (signal.SIGKILL,), r"was killed \(SIGKILL\), probably because the host had no memory left"),
        ("end", (-3,), r"crashed its process \(exit status 3\)"),
        ("large", (2 * MIB,), "has a result of more than 1 MiB"),
    ],
)
def test_a_call_that_is_stopped_costs_one_error(
    method: str, arguments: tuple[Any, ...], reason: str, calls: LimitedObject
) -> None:
    with pytest.raises(CallError, match=f"^{reason}") as caught:
        calls.call(method, *arguments)
    assert caught.value.is_stopped
    assert calls.call("add") == 1, "the next call makes the object again"


def test_limits_grow_with_the_input(calls: LimitedObject) -> None:
    text = "x" * (4 * MIB)
    assert calls.call("allocate", 700 * MIB, text) == 700 * MIB
    with pytest.raises(CallError, match=r"needs more than 912 MiB of memory \(input: 4,194,"):
        calls.call("allocate", 1000 * MIB, text)
    assert calls.call("allocate", 400 * MIB) == 400 * MIB
    calls.call("spend", 0.7, seconds=0.7)


def test_calls_share_the_time_beyond_that_for_their_input(calls: LimitedObject) -> None:
    """A file cannot make each of many calls take as long as one may."""
    with pytest.raises(CallError, match="CPU time"):
        for _ in range(20):
            calls.call("spend", 0.3)
    for _ in range(5):
        LimitedObject(LIMITS, Calls).call("spend", 0.2)


def test_a_cheap_call_that_raises_an_error_leaves_the_time_to_the_next_call(calls: LimitedObject) -> None:
    for method, error in (("refuse", RecordError), ("fail", CallError)):
        with pytest.raises(error):
            calls.call(method)
        calls.call("spend", 0.3)
        calls.spare_seconds = 0.5


def test_output_is_not_shown(calls: LimitedObject, capfd: pytest.CaptureFixture[str]) -> None:
    calls.call("write")
    assert capfd.readouterr() == ("", "")


def test_a_helper_that_was_killed_between_calls_is_started_again(calls: LimitedObject) -> None:
    pid = calls.call("pid")
    os.kill(pid, signal.SIGKILL)
    assert wait_for(lambda: not is_alive(pid))
    assert calls.call("pid") != pid


def test_signals_that_end_the_parent_do_not_end_the_helper(calls: LimitedObject) -> None:
    pid = calls.call("pid")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        os.kill(pid, number)
    assert calls.call("pid") == pid


def test_an_interrupted_call_leaves_no_answer(calls: LimitedObject, monkeypatch: pytest.MonkeyPatch) -> None:
    pid = calls.call("pid")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(limited_process, "_read", lambda *arguments: (_ for _ in ()).throw(KeyboardInterrupt))
        calls.call("add", 100)
    assert calls.call("add") == 1 and not is_alive(pid)


def test_objects_are_dropped_with_their_handles(calls: LimitedObject) -> None:
    helper = limited_process._helper
    other = LimitedObject(LIMITS, Calls)
    assert other.call("pid") == calls.call("pid")
    number = other.number
    assert number in helper._made
    del other
    gc.collect()
    with pytest.raises(TypeError, match="cannot pickle"):
        calls.call("add", threading.Lock())
    assert number in helper.forgotten
    calls.call("add")
    assert number not in helper._made and number not in helper.forgotten


def test_a_handle_cannot_be_pickled(calls: LimitedObject) -> None:
    with pytest.raises(TypeError, match="create it again in the other process"):
        pickle.dumps(calls)


def test_threads_take_turns(calls: LimitedObject) -> None:
    threads = [threading.Thread(target=lambda: [calls.call("add") for _ in range(50)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert calls.call("add") == 201


def test_a_forked_process_has_a_helper_of_its_own(calls: LimitedObject) -> None:
    pid = calls.call("pid")
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.write(writing, f"{calls.call('pid')} {calls.call('add')}".encode())
        os._exit(0)
    os.waitpid(child, 0)
    other, count = map(int, os.read(reading, 100).split())
    assert other != pid and count == 1
    assert calls.call("pid") == pid
    assert wait_for(lambda: not is_alive(other)), "it ends with its parent"


PARENT = """
import os, signal, sys, time
from tests.core.limited_calls import Calls
from titan_launch.core.limited_process import LimitedObject, Limits
calls = LimitedObject(Limits(100), Calls)
print(calls.call("pid"), flush=True)
"""


@pytest.mark.parametrize(
    "end",
    ["pass", "os._exit(0)", "os.kill(os.getpid(), signal.SIGKILL)", "sys.exit(3)", "os.fork() or time.sleep(1)"],
)
def test_the_helper_ends_with_its_parent(end: str) -> None:
    parent = subprocess.run([sys.executable, "-c", PARENT + end], capture_output=True, text=True)
    assert wait_for(lambda: not is_alive(int(parent.stdout)))
    assert parent.stderr == ""


def test_files_in_the_working_folder_are_not_imported(tmp_path: Path) -> None:
    for name in ("pickle", "struct", "titan_launch", "tokenizers", "jinja2"):
        (tmp_path / f"{name}.py").write_text("import os; os._exit(99)")
    code = (
        "import sys; sys.path.pop(0); from titan_launch.core.limited_process import *\n"
        "from titan_launch.data.chat_rendering import Renderer; from datetime import date\n"
        "print(LimitedObject(Limits(1), Renderer, 'a', {}, date.today()).call('syntax_error') == '')"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert (found.stdout, found.stderr) == ("True\n", "")
