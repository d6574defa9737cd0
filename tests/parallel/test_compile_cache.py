"""The cache folder of compiled kernels outlasts a run and belongs to one run at a time."""

from __future__ import annotations

import logging
import os
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.distributed import run_ranks
from tests.train.jobs import this_rank, tiny_job
from titan_launch.config.job import JobConfig
from titan_launch.config.sections.parallelism import CompileConfig
from titan_launch.core.errors import ConfigError
from titan_launch.parallel.compile import cache_folder, compile_loss, compile_time
from titan_launch.train.build import build_run

VARIABLES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


def product(logits: Tensor, targets: Tensor) -> Tensor:
    """Return a graph, in place of a loss, for which inductor needs no C++ compiler (which would take seconds)."""
    return logits @ targets


def run_once(folder: Path) -> tuple[int, int]:
    """Run with the cache folder. Return the graphs that the run compiled, and those that it found there."""
    config = CompileConfig(enable=True, cache_folder=str(folder), components=("loss",))
    with ExitStack() as stack:
        stack.enter_context(cache_folder(config))
        stack.enter_context(compile_time())
        before = graphs()
        compile_loss(product, config)(torch.ones(3, 3, requires_grad=True), torch.ones(3, 3)).sum().backward()
        os.environ.setdefault("TRITON_CACHE_DIR", str(folder / "triton"))  # inductor does so on GPUs
        made, found = (now - then for now, then in zip(graphs(), before, strict=True))
        return made, found


def graphs() -> tuple[int, int]:
    counters = torch._dynamo.utils.counters["aot_autograd"]
    return counters["autograd_cache_miss"], counters["autograd_cache_hit"]


def runs_of_one_process(folder: Path) -> None:
    """Check that a run leaves only its folder to the next run."""
    for name in VARIABLES:
        os.environ.pop(name, None)
    first, second = folder / "first", folder / "second"
    built_runs_have_it(folder)
    assert run_once(first) == (1, 0)
    assert not [name for name in VARIABLES if name in os.environ]
    assert kept(first)
    from torch._inductor.codecache import CppCodeCache

    CppCodeCache.cache["a kernel"] = lambda: torch  # the cache of a module
    os.environ["TORCHINDUCTOR_CACHE_DIR"], os.environ["TRITON_CACHE_DIR"] = "of", "the user"
    assert run_once(second) == (1, 0)
    assert [os.environ[name] for name in VARIABLES] == ["of", "the user"]
    assert kept(second) == kept(first)
    assert not CppCodeCache.cache
    assert run_once(first) == (0, 1)
    damaged_entries_are_made_anew(first)


def built_runs_have_it(folder: Path) -> None:
    for name in ("one", "two"):
        job = tiny_job(folder, job={"name": name}, compile={"enable": True, "cache_folder": str(folder / name)})
        with ExitStack() as stack:
            build_run(JobConfig.model_validate(job), this_rank(), stack)
            assert os.environ[VARIABLES[0]] == str(folder / name)
        assert VARIABLES[0] not in os.environ


def damaged_entries_are_made_anew(folder: Path) -> None:
    """Check that damaged entries are compiled anew with one warning. Damaged code, which inductor never rewrites, is an
    error that names the folder."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    loggers = [logging.getLogger(name) for name in ("titan_launch.parallel.compile", "torch._inductor.codecache")]
    for logger in loggers:
        logger.addHandler(handler)
    entries = [path for kind in ("fxgraph", "aotautograd") for path in (folder / kind).glob("**/*") if path.is_file()]
    assert len(entries) == 3
    for entry in entries:
        entry.write_bytes(entry.read_bytes()[:100])
    assert run_once(folder) == (1, 0)
    reason = "damaged entries (UnpicklingError: pickle data was truncated), which are compiled again"
    assert messages == [f'compile.cache_folder = "{folder}" has {reason}']
    assert not loggers[1].filters
    for code in folder.glob("*/*.py"):
        code.write_text("damaged")
    with pytest.raises(ConfigError, match=r"^compile.backend: .*NameError.*; delete the folder compile.cache_folder "):
        run_once(folder)


def kept(folder: Path) -> list[str]:
    """Return the graphs in a cache folder, by their hashes."""
    return sorted(path.parent.name for path in (folder / "fxgraph").glob("*/*/*"))


def impossible(folder: Path) -> str:
    (folder / "file").touch()
    wanted = folder / "file" if torch.distributed.get_rank() else folder / "possible"
    try:
        with cache_folder(CompileConfig(enable=True, cache_folder=str(wanted))):
            return "no error"
    except ConfigError as error:
        return str(error)


def test_the_cache_folder_belongs_to_one_run(tmp_path: Path) -> None:
    run_ranks(runs_of_one_process, 1, tmp_path)


def test_a_folder_that_one_rank_cannot_create_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    first, second = run_ranks(impossible, 2, tmp_path)
    assert first == second
    assert first.startswith("compile.cache_folder: cannot be created (")
