"""The environment of all tests, which the workers of xdist and processes that tests start inherit."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING

import pytest

from titan_launch.core.files import CACHE_VARIABLE
from titan_launch.core.patches import without_garbage_collection

if TYPE_CHECKING:
    from benchmarks.object_server import Server

os.environ.setdefault("OMP_NUM_THREADS", "1")  # the tests of two workers share two cores; torch is not imported yet

LONGEST_FILES = (
    "tests/benchmarks/test_gpu.py",  # two slow tests of 150 s
    "tests/test_cli.py",
    "tests/commands/test_plan.py",
    "tests/plan/test_search.py",
    "tests/launch/test_torchrun.py",
    "tests/loss/test_losses.py",
    "tests/train/test_object_store.py",
    "tests/trace/test_recorder.py",
    "tests/test_docs.py",
    "tests/train/test_loop.py",
    "tests/train/health/test_watchdog.py",
    "tests/parallel/test_compile.py",
    "tests/hostile/test_weights.py",
    "tests/train/test_measure.py",
    "tests/checkpoint/test_manager.py",
    "tests/train/test_sharded_optimizer.py",
    "tests/prove/test_prove.py",
    "tests/hostile/test_templates.py",
    "tests/train/test_frozen.py",
    "tests/commands/test_init.py",
    "tests/parallel/test_pipeline.py",
    "tests/trace/test_trace_engine.py",
    "tests/train/run_folder/test_resume.py",
    "tests/train/test_resolve_job.py",
    "tests/train/test_weights.py",
    "tests/train/health/test_coordination.py",
    "tests/core/test_object_store.py",
    "tests/train/test_step.py",
    "tests/train/test_ema.py",
    "tests/train/test_lora.py",
    "tests/hostile/test_images.py",
    "tests/inference/test_evaluation.py",
    "tests/precision/test_audit.py",
    "tests/train/test_exchange_in_backward.py",
    "tests/inference/test_chat.py",
)
"""Files of about 10 s or more, longest first. They run first, so that no worker of xdist runs one alone at the end."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Move the longest files to the front. The order of the other files remains."""
    order = {name: index for index, name in enumerate(LONGEST_FILES)}
    items.sort(key=lambda item: order.get(item.nodeid.partition("::")[0], len(order)))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Import the tests without garbage collections, and exempt all imported objects from later ones.

    A collection of all of them takes 0.2 s, and each recording of a pipeline starts one.
    """
    with without_garbage_collection():
        return (yield)


def pytest_collection_finish() -> None:
    """Start the server of ranks, if a test uses it: before a test changes the environment or the working directory."""
    if (distributed := sys.modules.get("tests.distributed")) is not None:
        distributed.start_server()


def pytest_configure(config: pytest.Config) -> None:
    """Name a temporary cache folder of prepared data. Do not ignore Ctrl-C, as processes in the background of a shell
    do: tests send it to processes that they start."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if CACHE_VARIABLE not in os.environ:
        os.environ[CACHE_VARIABLE] = tempfile.mkdtemp(prefix="titan_launch_tests_")
        config.add_cleanup(lambda: shutil.rmtree(os.environ[CACHE_VARIABLE], ignore_errors=True))


@pytest.fixture(scope="module")
def running_server() -> Iterator[Server]:
    """An object store on the loopback interface."""
    from benchmarks.object_server import running

    with running() as server:
        yield server


@pytest.fixture
def server(running_server: Server) -> Server:
    """An object store without objects, whose connections are not cut."""
    for name in running_server.names():
        running_server.delete(name)
    running_server.proxy.calm()
    return running_server
