"""Runs with an object store, a real server of S3 on the loopback interface: data from it, and checkpoints in it."""

from __future__ import annotations

import json
import os
import shutil
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from benchmarks.object_server import Server, with_variables
from tests.distributed import run_ranks
from tests.models.parity import random_model
from tests.packages import needs
from tests.tensors import assert_equal, full_state
from tests.train.jobs import log_lines, read_metrics, run_job, this_rank, tiny_job
from titan_launch.checkpoint.manifest import read_manifest
from titan_launch.checkpoint.store import CheckpointStore
from titan_launch.config.job import JobConfig
from titan_launch.config.loading.load import load_job
from titan_launch.core import object_store
from titan_launch.core.errors import RunError, UserError
from titan_launch.core.files import CACHE_VARIABLE
from titan_launch.data.tokenizers import train_tokenizer
from titan_launch.inference.saved_model import open_saved_model
from titan_launch.models.huggingface.files import WeightsError
from titan_launch.train.build import build_run
from titan_launch.train.loop import fit

pytestmark = needs("moto", "s3fs")


def job(folder: Path, steps: int, **checkpoint: Any) -> dict[str, Any]:
    """Return a job whose learning rate has a plateau, so that more steps do not change earlier ones."""
    return tiny_job(
        folder,
        model={"args": {"n_layers": 1}},
        training={"steps": steps},
        checkpoint={"enable": True, "interval": 2, "store": "s3://bucket/runs", **checkpoint},
        lr_scheduler={"kind": "warmup_stable_decay", "decay_ratio": 0.0},
    )


def local(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the same job without a store, in another folder."""
    checkpoint = {name: value for name, value in config["checkpoint"].items() if name != "store"}
    return {**config, "job": {**config["job"], "dump_folder": str(folder)}, "checkpoint": checkpoint}


def logged_run(config: dict[str, Any]) -> tuple[dict[str, Tensor], str, list[str]]:
    """Train a job with short pauses before requests are repeated. Return its state, its error, and its log."""
    lines = log_lines()
    vars(object_store)["_WAITS_S"] = (0.01, 0.01)
    import s3fs

    s3fs.S3FileSystem.retries = 1
    try:
        return run_job(config), "", lines
    except (RunError, UserError) as error:
        return {}, str(error), lines


def run(server: Server, config: dict[str, Any], ranks: int = 1) -> tuple[dict[str, Tensor], str, list[str]]:
    """Train a job on ranks that use the server. Return what `logged_run` returns on rank 0."""
    state, error, lines = run_ranks(with_variables, ranks, server.environment, logged_run, config)[0]
    return state, error, lines


def stored_steps(server: Server) -> list[int]:
    """Return the steps that have a manifest."""
    names = [name for name in server.names("runs/tiny/") if name.endswith("/manifest.json")]
    return sorted(int(name.removeprefix("step-").partition("/")[0]) for name in names)


def test_a_run_whose_folder_is_lost_resumes_from_the_store(server: Server, tmp_path: Path) -> None:
    """Two ranks: the resumed run is the uninterrupted one, and the job that was recorded is compared."""
    whole = run_ranks(run_job, 2, local(job(tmp_path, 3), tmp_path / "whole"))[0]
    _, error, lines = run(server, job(tmp_path, 2), 2)
    assert not error and 2 in stored_steps(server)
    assert any(line.startswith("copied step-2 to s3://bucket/runs/tiny (") for line in lines)
    files = {path.name: path.read_bytes() for path in (tmp_path / "tiny/checkpoints/step-2").iterdir()}
    assert {name: server.get(f"runs/tiny/step-2/{name}") for name in files} == files
    shutil.rmtree(tmp_path / "tiny")
    changed = job(tmp_path, 3) | {"optimizer": {"lr": 0.5}}
    _, error, _ = run(server, changed, 2)
    assert "tiny holds a run of another experiment" in error and "optimizer.lr was 0.01, is 0.5" in error
    shutil.rmtree(tmp_path / "tiny")
    state, error, lines = run(server, job(tmp_path, 3), 2)
    assert not error, error
    checkpoint = tmp_path / "tiny/checkpoints/step-2"
    assert f"downloaded {checkpoint} from s3://bucket/runs/tiny" in lines and f"resumed from {checkpoint}" in lines
    assert [report["step"] for report in read_metrics(tmp_path)] == [3]
    assert_equal(whole, state)
    assert 3 in stored_steps(server)


def test_a_run_begins_anew_only_if_it_overwrites_nothing(server: Server, tmp_path: Path) -> None:
    run(server, job(tmp_path, 1))
    stored = server.names()
    shutil.rmtree(tmp_path / "tiny")
    for more in ({"load": "none"}, {"enable": False, "save_last": True}, {"enable": False, "load": 1}):
        _, error, _ = run(server, job(tmp_path, 1, **more))
        assert error == (
            "checkpoint.store: s3://bucket/runs/tiny has checkpoints up to step 1, which this run would overwrite; "
            "resume with --checkpoint.enable=true --checkpoint.load=latest, or choose another --job.name, or delete "
            "the copies"
        )
    assert server.names() == stored


def test_a_damaged_copy_is_named_and_an_older_one_is_taken(server: Server, tmp_path: Path) -> None:
    """The first copy lacks bytes, the second an object, and the third has another bit. The run then replaces them."""
    config = job(tmp_path, 5, interval=1, keep_latest=0)
    whole = run_ranks(run_job, 1, local(config, tmp_path / "whole"))[0]
    run(server, job(tmp_path, 4, interval=1, keep_latest=0))
    assert stored_steps(server) == [1, 2, 3, 4]
    shutil.rmtree(tmp_path / "tiny")
    data = "__0_0.distcp"
    server.put(f"runs/tiny/step-4/{data}", server.get(f"runs/tiny/step-4/{data}")[:-1])
    server.delete(f"runs/tiny/step-3/{data}")
    content = bytearray(server.get(f"runs/tiny/step-2/{data}"))
    content[len(content) // 2] ^= 1
    server.put(f"runs/tiny/step-2/{data}", bytes(content))
    state, error, lines = run(server, config)
    assert not error
    named = [line.partition(" is damaged, so it is not loaded: ")[::2] for line in lines if "is damaged" in line]
    assert [place for place, _ in named] == [f"s3://bucket/runs/tiny/step-{step}" for step in (4, 3, 2)]
    reasons = [reason for _, reason in named]
    assert reasons[0].startswith(f"{data} has ") and reasons[1] == "an object of the copy is missing"
    assert reasons[2] == f"{data} does not match its checksum"
    assert f"resumed from {tmp_path / 'tiny/checkpoints/step-1'}" in lines
    assert_equal(whole, state)
    assert stored_steps(server) == [1, 2, 3, 4, 5]
    for step in (2, 3, 4, 5):
        found = server.get(f"runs/tiny/step-{step}/{data}")
        assert found == (tmp_path / f"tiny/checkpoints/step-{step}" / data).read_bytes()


@pytest.mark.slow
def test_a_copy_replaces_a_damaged_checkpoint(server: Server, tmp_path: Path) -> None:
    run(server, job(tmp_path, 1))
    file = tmp_path / "tiny/checkpoints/step-1/__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-1])
    _, error, lines = run(server, job(tmp_path, 2), 2)
    assert not error and f"resumed from {tmp_path / 'tiny/checkpoints/step-1'}" in lines
    assert (tmp_path / "tiny/checkpoints/step-1.damaged-1").exists()


def test_a_checkpoint_that_cannot_be_copied_is_an_error_of_the_end(server: Server, tmp_path: Path) -> None:
    """The connections are cut as soon as the run has begun. The same command later copies the checkpoint."""
    size = server.proxy.bytes_up
    run(server, job(tmp_path / "other", 2))
    size = server.proxy.bytes_up - size
    server.delete("runs/tiny/step-2/manifest.json")
    server.proxy.at_upload(size // 2, server.proxy.cut_all)
    _, error, lines = run(server, job(tmp_path, 4))
    beginning = "step-4 could not be copied to s3://bucket/runs/tiny: the request failed ("
    assert error.startswith(beginning) and error.endswith(f"; the checkpoint is in {tmp_path / 'tiny/checkpoints'}")
    assert any(line.startswith(beginning) and line.endswith("; the next save tries again") for line in lines)
    server.proxy.calm()
    assert 4 not in stored_steps(server)
    _, error, lines = run(server, job(tmp_path, 4))
    assert not error and any(line.startswith("nothing to do: ") for line in lines) and 4 in stored_steps(server)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run without a store, with the checkpoints of three steps."""
    folder = tmp_path_factory.mktemp("saved")
    run_ranks(run_job, 1, local(job(folder, 3, interval=1, keep_latest=0), folder))
    return folder


def copies_again(config: dict[str, Any], forgotten_after: int | None) -> tuple[str, list[int]]:
    """Copy what has no copy, after forgetting later steps. Return the message and the steps that have a copy."""
    settings, folder = JobConfig.model_validate(config).checkpoint, Path(config["job"]["dump_folder"], "tiny")
    store = CheckpointStore(settings, "tiny", folder / "checkpoints", folder / "config.json")
    if forgotten_after is not None:
        store.forget_after(forgotten_after)
    message = store.finish()
    store.close(None)
    return message, sorted(store.steps())


@pytest.mark.slow
def test_later_copies_are_forgotten_and_made_again(server: Server, saved: Path, tmp_path: Path) -> None:
    """As when a run returns to a checkpoint. A later step that the disk no longer has stays without a copy."""
    shutil.copytree(saved, tmp_path, symlinks=True, dirs_exist_ok=True)
    config = job(tmp_path, 3, keep_latest=0)
    (found,) = run_ranks(with_variables, 1, server.environment, copies_again, config, None)
    assert found == ("", [1, 2, 3])
    manifest = "runs/tiny/step-2/manifest.json"
    server.put(manifest, b"of the abandoned steps")
    shutil.rmtree(tmp_path / "tiny/checkpoints/step-3")
    (found,) = run_ranks(with_variables, 1, server.environment, copies_again, config, 1)
    assert found == ("", [1, 2])
    assert server.get(manifest) == (tmp_path / "tiny/checkpoints/step-2/manifest.json").read_bytes()


def test_a_damaged_checkpoint_is_not_copied(server: Server, saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved, tmp_path, symlinks=True, dirs_exist_ok=True)
    config = job(tmp_path, 3, keep_latest=0)
    for step, stored in ((2, [1, 3]), (3, [1, 2])):
        file = tmp_path / f"tiny/checkpoints/step-{step}/__0_0.distcp"
        content = file.read_bytes()
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        (found,) = run_ranks(with_variables, 1, server.environment, copies_again, config, None)
        message, steps = found
        if step == 2:
            assert (message, steps) == ("", stored)
            file.write_bytes(content)
            server.delete("runs/tiny/step-3/manifest.json")
        else:
            assert message.startswith("step-3 could not be copied to s3://bucket/runs/tiny: __0_0.distcp ")
            assert 3 not in steps


def copies_of_a_later_save(config: dict[str, Any], step: int) -> list[list[int]]:
    """Copy the checkpoints while that of `step` is damaged, and again after the run has returned and saved the step
    again. Return the steps that have a copy, after each time."""
    settings, folder = JobConfig.model_validate(config).checkpoint, Path(config["job"]["dump_folder"], "tiny")
    store = CheckpointStore(settings, "tiny", folder / "checkpoints", folder / "config.json")
    file = folder / f"checkpoints/step-{step}/__0_0.distcp"
    content, found = file.read_bytes(), []
    for saved in (content[:-1], content):
        file.write_bytes(saved)
        assert store.finish() == ""
        found.append(sorted(store.steps()))
        store.forget_after(step - 1)
    store.close(None)
    return found


def test_a_damaged_checkpoint_that_is_saved_again_is_copied(server: Server, saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved, tmp_path, symlinks=True, dirs_exist_ok=True)
    (found,) = run_ranks(
        with_variables, 1, server.environment, copies_of_a_later_save, job(tmp_path, 3, keep_latest=0), 2
    )
    assert found == [[1, 3], [1, 2, 3]]


def test_lost_connections_do_not_fail_a_copy(server: Server, tmp_path: Path) -> None:
    server.proxy.cut(up=True, after=15_000, times=2)
    _, error, _ = run(server, job(tmp_path, 2))
    assert not error and 2 in stored_steps(server)


@pytest.mark.slow
def test_old_copies_are_deleted(server: Server, tmp_path: Path) -> None:
    """The copies are those that `keep_latest` and `keep_every` keep; objects of interrupted copies are deleted."""
    server.put("runs/tiny/step-1/__0_0.distcp", b"of an interrupted copy")
    server.put("runs/tiny/notes.txt", b"of the user")
    for steps in (2, 8):
        _, error, _ = run(server, job(tmp_path, steps, keep_latest=2, keep_every=4))
        assert not error
    assert stored_steps(server) == [4, 6, 8]
    folders = {name.partition("/")[0] for name in server.names("runs/tiny/")}
    assert folders == {"step-4", "step-6", "step-8", "config.json", "notes.txt"}


@pytest.mark.parametrize(
    ("store", "reason"),
    [
        ("s3://no-such-bucket/runs", "an object cannot be written: there is no such object or bucket; check the name"),
        ("s3://Bad_Bucket!/runs", "an object cannot be written: the request failed (ParamValidationError: "),
    ],
)
def test_a_store_that_cannot_be_written_is_an_error_before_training(
    server: Server, tmp_path: Path, store: str, reason: str
) -> None:
    _, error, _ = run(server, job(tmp_path, 2, store=store))
    assert error.startswith(f"checkpoint.store: {reason}") and not (tmp_path / "tiny").exists()


def save_during_a_copy(config: dict[str, Any]) -> bool:
    """Train while the first copy waits for the last checkpoint. Return True if its checkpoint is then still there."""
    copy, found = CheckpointStore._copy, list[bool]()
    folder = Path(config["job"]["dump_folder"], "tiny/checkpoints")

    def waiting(store: CheckpointStore, step: int) -> int:
        while not found and not (folder / "step-8").exists():
            time.sleep(0.01)
        found.append((folder / f"step-{step}/manifest.json").exists())
        return copy(store, step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CheckpointStore, "_copy", waiting)
        run_job(config)
    return found[0]


def test_a_checkpoint_that_is_being_copied_is_not_deleted(server: Server, tmp_path: Path) -> None:
    """With `keep_latest = 1`, each save deletes the checkpoint before."""
    config = job(tmp_path, 8, keep_latest=1)
    assert run_ranks(with_variables, 1, server.environment, save_during_a_copy, config) == [True]
    assert stored_steps(server) == [8]
    assert sorted(path.name for path in (tmp_path / "tiny/checkpoints").glob("step-*")) == ["step-2", "step-8"]


def run_file(path: str, cache: str) -> tuple[dict[str, Tensor], str]:
    """Train a job file on this rank. Return its state, and the recorded job."""
    os.environ[CACHE_VARIABLE] = cache
    with ExitStack() as stack:
        started = build_run(load_job(path).config, this_rank(), stack)
        fit(started)
        return full_state(started.model), (started.output.folder.path / "config.json").read_text()


def test_weights_tokens_and_tokenizer_from_a_store_train_the_same_model(server: Server, tmp_path: Path) -> None:
    for package in ("transformers", "tokenizers"):
        pytest.importorskip(package)
    files = tmp_path / "files"
    random_model("Llama 3.1, RoPE scaling", files / "weights", vocab_size=300)
    train_tokenizer(["some words of a text"], 260, files / "tokenizer")
    np.save(files / "tokens.npy", np.random.default_rng(0).integers(0, 256, 5000).astype(np.uint16))
    for path in files.rglob("*"):
        if path.is_file():
            server.put(f"files/{path.relative_to(files)}", path.read_bytes())
    states = []
    for place, name in ((str(files), "local"), ("s3://bucket/files", "remote")):
        config = tiny_job(tmp_path, job={"name": name}, training={"seq_len": 24, "steps": 2})
        config["model"] = {"weights": f"{place}/weights"}
        config["data"] = {"kind": "tokens", "path": f"{place}/tokens.npy"}
        config["tokenizer"] = {"kind": "huggingface", "path": f"{place}/tokenizer"}
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps(config))
        cache = str(tmp_path / "cache")
        state, recorded = run_ranks(with_variables, 2, server.environment, run_file, str(path), cache)[0]
        states.append(state)
        table = json.loads(recorded)
        found = (table["model"]["weights"], table["data"]["path"], table["tokenizer"]["path"])
        assert found == (f"{place}/weights", f"{place}/tokens.npy", f"{place}/tokenizer")
    assert_equal(*states)


def tensors_of(run: str, cache: str) -> dict[str, Tensor] | str:
    """Return the parameters of a run on a host with this cache, or the error."""
    os.environ[CACHE_VARIABLE] = cache
    try:
        saved = open_saved_model(Path(run))
    except WeightsError as error:
        return str(error)
    return {name: saved.read(name) for name in saved.entries}


def test_another_host_reads_omitted_parameters_from_the_store(server: Server, tmp_path: Path) -> None:
    for package in ("transformers", "safetensors"):
        pytest.importorskip(package)
    random_model("Llama 3.1, RoPE scaling", tmp_path / "weights", vocab_size=300)
    for path in (tmp_path / "weights").iterdir():
        server.put(f"weights/{path.name}", path.read_bytes())
    training = {"seq_len": 24, "steps": 1, "frozen": ["tok_embeddings.*"]}
    config = tiny_job(tmp_path, training=training, checkpoint={"enable": True})
    config["model"] = {"weights": "s3://bucket/weights/"}
    file, run, cache = tmp_path / "job.json", str(tmp_path / "tiny"), tmp_path / "cache"
    file.write_text(json.dumps(config))
    state, _ = run_ranks(with_variables, 1, server.environment, run_file, str(file), str(cache))[0]
    base = read_manifest(tmp_path / "tiny/checkpoints/step-1").base
    assert base is not None and base.omitted == 1 and base.folder == "s3://bucket/weights"
    shutil.rmtree(cache)
    found = run_ranks(with_variables, 1, server.environment, tensors_of, run, str(tmp_path / "other"))[0]
    assert_equal({name: state[name] for name in found}, found)
    for name in server.names():
        server.delete(name)
    lacking = run_ranks(with_variables, 1, server.environment, tensors_of, run, str(tmp_path / "other"))[0]
    assert lacking == (
        "s3://bucket/weights has 1 never-trained parameter that the checkpoint omits, but cannot be read (there is no "
        "such object, and no object below it; check the name); restore the folder, or name a local copy with --base"
    )
