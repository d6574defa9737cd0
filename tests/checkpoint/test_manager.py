"""Saving and loading on gloo ranks: a checkpoint is complete or absent, holds the state of one moment, and loads on any
mesh."""

from __future__ import annotations

import logging
import os
import resource
import shutil
import signal
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import checkpoint as dcp

from tests.checkpoint.states import Trained, manager_of, saved, trained
from tests.distributed import run_ranks
from tests.sampling import rest_is_slow
from tests.tensors import assert_equal
from titan_launch.checkpoint import background, snapshot, writer
from titan_launch.checkpoint.background import InProcess, InThread
from titan_launch.checkpoint.loading import EVERYTHING, load_state, newest_valid
from titan_launch.checkpoint.manifest import checkpoint_steps, complete_steps, read_manifest
from titan_launch.checkpoint.snapshot import lay_out
from titan_launch.checkpoint.writer_process import WriterProcess
from titan_launch.core.errors import RunError
from titan_launch.core.signals import RESTART_SIGNAL


def loaded(folder: Path, replicas: int = 1) -> tuple[dict[str, Tensor], int]:
    """Create a new state, load the newest checkpoint into it, and return its tensors and its step."""
    own = trained(0, replicas)
    checkpoint = newest_valid(folder, set_damaged_aside=True)
    assert checkpoint is not None
    load_state(checkpoint, own.state, EVERYTHING)
    return own.everything(), own.progress.step


def saved_with(folder: Path, config: dict[str, Any], replicas: int = 1) -> dict[str, Tensor]:
    """Call `saved` with its settings in one argument."""
    return saved(folder, 3, replicas, **config)


def test_a_state_is_restored_bitwise_and_older_checkpoints_are_deleted(tmp_path: Path) -> None:
    before = run_ranks(saved_with, 2, tmp_path, {"keep_latest": 2})[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-2", "step-3"]
    after, step = run_ranks(loaded, 2, tmp_path)[0]
    assert step == 3
    assert_equal(before, after)
    manifest = read_manifest(tmp_path / "step-3")
    assert manifest.versions["torch"] == torch.__version__
    assert set(manifest.files) == {path.name for path in (tmp_path / "step-3").iterdir()} - {"manifest.json"}


@pytest.mark.parametrize(("first", "second"), rest_is_slow([((2, 1), (4, 2)), ((1, 1), (4, 1)), ((4, 2), (1, 1))]))
def test_a_checkpoint_loads_on_any_mesh(tmp_path: Path, first: tuple[int, int], second: tuple[int, int]) -> None:
    before = run_ranks(saved_with, first[0], tmp_path, {"async_mode": "thread"}, first[1])[0]
    for after, _ in run_ranks(loaded, second[0], tmp_path, second[1]):
        assert_equal(before, after)


def changed_while_written(folder: Path, mode: str) -> tuple[str, dict[str, Tensor], dict[str, Tensor], bool]:
    """Save with a copy that needs more memory than one rank has. Save again, and continue training while writing is
    blocked. Return the failure of the first save, the state at the second save and the later one."""
    own = trained(1)
    manager = manager_of(own, folder, async_mode=mode)
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(snapshot, "_SHARED_MEMORY", folder / "none")  # another rank took the memory
            patch.setattr(background, "lay_out", lambda state: (lay_out(state)[0], 1 << 60))
        manager.save()
    failure = failure_of(manager)
    own.step()
    writing = manager._background
    with pytest.MonkeyPatch.context() as patch:
        if isinstance(writing, InProcess):
            assert writing._writer.process.pid is not None
            os.kill(writing._writer.process.pid, signal.SIGSTOP)
            let_go = lambda: os.kill(writing._writer.process.pid, signal.SIGCONT)  # noqa: E731
        else:
            let_go = stop_thread(patch, writing)
        before = own.everything()
        manager.save()
        for _ in range(3):
            own.step()
        was_waiting = not checkpoint_steps(folder)
        let_go()
        manager.finish()
    manager.close()
    return failure, before, own.everything(), was_waiting


def stop_thread(patch: pytest.MonkeyPatch, background: Any) -> Any:
    """Block the thread that writes."""
    import threading

    assert isinstance(background, InThread)
    gate, begin = threading.Event(), writer._make_room
    patch.setattr(writer, "_make_room", lambda *args: (gate.wait(), begin(*args)))
    return gate.set


@pytest.mark.parametrize("mode", ["thread", "process"])
def test_a_checkpoint_holds_the_state_of_the_moment_of_its_save(tmp_path: Path, mode: str) -> None:
    """Out of memory in a copy fails an earlier save on all ranks."""
    results = run_ranks(changed_while_written, 2, tmp_path, mode)
    for failure, *_ in results:
        assert failure.startswith(
            f"step 1 could not be saved to {tmp_path}: there is no host memory for a copy of 1073741824.000 GiB"
        )
    _, before, later, was_waiting = results[0]
    after, step = run_ranks(loaded, 2, tmp_path)[0]
    assert was_waiting and step == 2
    assert_equal(before, after)
    assert any(not torch.equal(tensor, later[name]) for name, tensor in before.items())


def save_in_vain(folder: Path) -> list[Any]:
    """Save three times: with no space left, with files that cannot grow on one rank, and then successfully."""
    own = trained(1)
    manager = manager_of(own, folder)
    seen: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1, 1, 10))
        manager.save()
    seen += [failure_of(manager), os.listdir(folder)]
    own.step()
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (500, hard))
    manager.save()
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    dist.barrier()  # rank 0 removes the incomplete checkpoint
    seen += [failure_of(manager), os.listdir(folder)]
    dist.barrier()
    own.step()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "dcp", FlippingDisk)
        manager.save()
    seen += [failure_of(manager)]
    own.step()
    manager.save()
    seen += [failure_of(manager), manager.take_measurements()["checkpoint/failed_saves"]]
    manager.close()
    return seen


class FlippingDisk:
    """DCP on a disk that corrupts the data of rank 1."""

    api = dcp.api

    @staticmethod
    def save(state: Any, *, storage_writer: Any, **options: Any) -> None:
        """Save, and change one bit."""
        dcp.save(state, storage_writer=storage_writer, **options)
        if dist.get_rank() == 1:
            path = Path(storage_writer.path) / "__1_0.distcp"
            data = bytearray(path.read_bytes())
            data[len(data) // 2] ^= 1
            path.write_bytes(data)


def failure_of(manager: Any) -> str:
    """Return the failure that the end of a run would report."""
    try:
        manager.finish()
    except RunError as error:
        return str(error)
    return ""


def test_a_failed_save_leaves_nothing_and_the_next_save_succeeds(tmp_path: Path) -> None:
    for no_space, nothing, too_large, still_nothing, flipped, success, failed in run_ranks(save_in_vain, 2, tmp_path):
        assert no_space.startswith(f"step 1 could not be saved to {tmp_path}: ") and "0.000 GiB free" in no_space
        assert no_space.endswith("there is no checkpoint yet")
        assert "File too large" in too_large and "__1_0.distcp does not have the bytes that were written" in flipped
        assert (nothing, still_nothing, success, failed) == ([], [], "", 3)
    assert complete_steps(tmp_path) == [4]


def save_without_a_runs_folder(folder: Path) -> str:
    """Return the failure of a save after the run folder was deleted."""
    own = trained(1)
    manager = manager_of(own, folder / "deleted" / "checkpoints")
    manager.save()
    failure = failure_of(manager)
    manager.close()
    return failure


def test_a_save_does_not_recreate_the_run_folder(tmp_path: Path) -> None:
    for failure in run_ranks(save_without_a_runs_folder, 2, tmp_path):
        assert failure.endswith("/checkpoints: No such file or directory; there is no checkpoint yet")
    assert not list(tmp_path.iterdir())


def lose_the_writer(folder: Path) -> tuple[str, str]:
    """Kill one rank's writer process before the first save and during the second. The second save fails, and each next
    save has new processes."""
    own = trained(1)
    manager = manager_of(own, folder, async_mode="process")
    writing = manager._background
    assert isinstance(writing, InProcess)
    if dist.get_rank() == 1:
        writing._writer.process.kill()
        writing._writer.process.join()
    manager.save()
    manager.finish()
    # torchrun sends its signal to the rank's process group. The writer must ignore the signal.
    os.kill(writing._writer.process.pid or 0, RESTART_SIGNAL)
    writing._writer.process.join(0.2)
    own.step()
    if dist.get_rank() == 1:
        os.kill(writing._writer.process.pid or 0, signal.SIGSTOP)  # the writer has the request and dies
    manager.save()
    if dist.get_rank() == 1:
        writing._writer.process.kill()
    first = failure_of(manager)
    own.step()
    manager.save()
    second = failure_of(manager)
    manager.close()
    return first, second


@pytest.mark.parametrize(
    ("has_answer", "code", "cause"),
    [
        (False, None, "was killed, because a save took longer than 2 h"),
        (True, -9, r"died \(exit code -9\)"),
        (True, None, "did not answer"),
    ],
)
def test_the_error_of_a_writer_without_an_answer_names_the_cause(
    has_answer: bool, code: int | None, cause: str
) -> None:
    writer, connection, process = object.__new__(WriterProcess), Mock(), Mock(exitcode=code)
    connection.poll.return_value, connection.recv.side_effect = has_answer, EOFError
    vars(writer).update(_connection=connection, process=process)
    with pytest.raises(RuntimeError, match=f"checkpoints {cause}"):
        writer.write(Mock())


@pytest.mark.slow
def test_the_death_of_a_writer_process_loses_one_checkpoint(tmp_path: Path) -> None:
    for first, second in run_ranks(lose_the_writer, 2, tmp_path):
        assert first.startswith("step 2 could not be saved") and not second
    assert complete_steps(tmp_path) == [3, 1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-1", "step-3"]


def is_killed_by_an_early_signal() -> bool:
    """Send a stop signal to a writer process that is still starting."""
    vars(resource_tracker._resource_tracker)["_fd"] = None  # as in a rank of torchrun, which has inherited no tracker
    writer = WriterProcess()
    os.kill(writer.process.pid or 0, signal.SIGTERM)
    writer.process.join(1)
    is_dead = not writer.process.is_alive()
    writer.kill()
    return is_dead


def test_a_stop_signal_does_not_kill_a_writer_that_starts() -> None:
    assert run_ranks(is_killed_by_an_early_signal, 1) == [False]


def reserve_and_save_as_with_a_gpu(folder: Path, mode: str) -> tuple[bool, bool, list[str], str, str, bytes]:
    """Save a state on the host while CUDA seems to be available. Return True if memory is reserved before the first
    save and used by it, the lines that are logged, the failure, and `CUDA_VISIBLE_DEVICES` here and in the environment
    of the writer process."""
    os.environ["CUDA_VISIBLE_DEVICES"] = "0,1"
    warnings: list[str] = []
    logger = logging.getLogger("titan_launch.checkpoint.manager")
    logger.setLevel(logging.INFO)
    logger.addFilter(lambda record: bool(warnings.append(record.getMessage())))
    own = trained(1)
    manager = manager_of(own, folder, async_mode=mode)
    writing = manager._background
    assert isinstance(writing, InThread | InProcess)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writing._arena, "reserve", lambda size: (_ for _ in ()).throw(OSError("no memory")))
        manager.get_ready()
    manager.get_ready()
    before = writing._arena.memory
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "current_stream", lambda *_: pytest.fail("opens a CUDA context"))
        manager.save()
        is_kept = writing._arena.memory is before
        failure = failure_of(manager)
    in_writer = b""
    if isinstance(writing, InProcess):
        variables = Path(f"/proc/{writing._writer.process.pid}/environ").read_bytes().split(b"\0")
        in_writer = next(text for text in variables if text.startswith(b"CUDA_VISIBLE_DEVICES"))
    manager.close()
    return before.numel() > 0, is_kept, warnings[:1], failure, os.environ["CUDA_VISIBLE_DEVICES"], in_writer


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs Linux")
@pytest.mark.parametrize(
    ("mode", "in_writer"), [("thread", b""), pytest.param("process", b"CUDA_VISIBLE_DEVICES=", marks=pytest.mark.slow)]
)
def test_a_copy_uses_memory_reserved_before_the_first_save_and_opens_no_cuda_context(
    tmp_path: Path, mode: str, in_writer: bytes
) -> None:
    expected = (
        "could not allocate host memory for checkpoints: no memory. Training continues. Each save tries again; if the "
        "memory still does not suffice, that checkpoint is not saved"
    )
    assert run_ranks(reserve_and_save_as_with_a_gpu, 1, tmp_path, mode) == [
        (True, True, [expected], "", "0,1", in_writer)
    ]


def go_back(folder: Path) -> None:
    """Return to a checkpoint while the optimizer has a state for all parameters but one, which is never updated."""
    own = trained(1)
    before = {name: tensor.clone() for name, tensor in own.everything().items()}
    manager = manager_of(own, folder)
    manager.save()
    own.step()
    manager.return_to_last()
    manager.close()
    assert_equal(before, own.everything())
    manager = manager_of(own, folder, load=1, exclude_from_loading=["data"])
    assert manager.return_to_last() is None  # the run did not begin with all parts of this checkpoint
    manager.close()


def test_a_run_with_a_never_updated_parameter_returns_to_a_checkpoint(tmp_path: Path) -> None:
    run_ranks(go_back, 2, tmp_path)


def save_before_any_update(folder: Path) -> tuple[int, int]:
    """Save before the optimizer has a state. Return the entries of the state after the save, and after a return to
    it."""
    own = trained(0)
    manager = manager_of(own, folder)
    manager.save()
    manager.close()
    updated = trained(1)
    load_state(folder / "step-0", updated.state, EVERYTHING)
    return len(own.optimizer.state), len(updated.optimizer.state)


def test_a_save_does_not_create_optimizer_state(tmp_path: Path) -> None:
    assert run_ranks(save_before_any_update, 2, tmp_path) == [(0, 0), (0, 0)]


def drawn(own: Trained) -> list[float]:
    """Return the next numbers of the random generators."""
    import random

    import numpy as np

    return [
        torch.rand(()).item(),
        random.random(),
        random.gauss(0, 1),
        float(np.random.rand()),
        float(np.random.randn()),
    ]


def save_random(folder: Path) -> list[float]:
    """Save with generators in the middle of their streams. Return the numbers that follow."""
    torch.manual_seed(dist.get_rank())
    own = trained(1)
    torch.manual_seed(dist.get_rank())
    drawn(own)
    manager = manager_of(own, folder)
    manager.save()
    manager.close()
    return drawn(own)


def load_random(folder: Path) -> list[float]:
    """Return the numbers that the generators draw after a resume."""
    own = trained(0)
    load_state(folder / "step-1", own.state, EVERYTHING)
    return drawn(own)


def test_resumed_ranks_continue_their_random_streams_and_new_ranks_get_their_own(tmp_path: Path) -> None:
    before = run_ranks(save_random, 2, tmp_path)
    after = run_ranks(load_random, 3, tmp_path)
    assert after[:2] == before
    assert len({tuple(values) for values in after}) == 3
    assert run_ranks(load_random, 1, tmp_path) == before[:1]
