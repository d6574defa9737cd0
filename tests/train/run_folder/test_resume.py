"""Runs that start from a checkpoint of another run, or from their own after the data has changed."""

from __future__ import annotations

import json
import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from tests.distributed import run_ranks
from tests.tensors import assert_equal, full_state
from tests.train.jobs import log_lines, read_metrics, run_job, this_rank, tiny_job
from titan_launch.config.job import JobConfig
from titan_launch.config.sections.data import TextData
from titan_launch.config.sections.tokenizer import TokenizerConfig
from titan_launch.core.errors import UserError
from titan_launch.data.order import SampleOrder
from titan_launch.data.sources import build_source
from titan_launch.data.tokenizers import ByteTokenizer, build_tokenizer, train_tokenizer
from titan_launch.train import build
from titan_launch.train.build import build_run
from titan_launch.train.run_folder.attempt import AgentProcess, Attempt


def job(folder: Path, name: str, steps: int, **checkpoint: Any) -> dict[str, Any]:
    """Return a job whose learning rate has a plateau, so that more steps do not change earlier ones."""
    return tiny_job(
        folder,
        job={"name": name},
        model={"args": {"n_layers": 1}},
        training={"steps": steps},
        checkpoint={"enable": True, "interval": 2, **checkpoint},
        lr_scheduler={"kind": "warmup_stable_decay", "decay_ratio": 0.0},
    )


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    """Return a folder with a run of four steps, and the state at its end."""
    folder = tmp_path_factory.mktemp("runs")
    return folder, run_ranks(run_job, 2, job(folder, "source", 4))[0]


def logged(config: dict[str, Any], beginning: str) -> list[str]:
    """Train a job on this rank. Return its log lines that start with `beginning`."""
    lines = log_lines()
    run_job(config)
    return [line for line in lines if line.startswith(beginning)]


def test_a_resume_with_more_steps_no_longer_clips_the_warm_up(tmp_path: Path) -> None:
    config = job(tmp_path, "tiny", 2) | {"lr_scheduler": {"kind": "constant", "warmup_steps": 5}}
    clipped = "learning rate: warm-up is clipped from 5 to 2 steps, because the run has 2 steps"
    assert run_ranks(logged, 1, config, "learning rate") == [[clipped]]
    assert json.loads((tmp_path / "tiny/config.json").read_text())["lr_scheduler"]["warmup_steps"] == 5
    config["training"]["steps"] = 5
    assert run_ranks(logged, 1, config, "learning rate") == [[]]
    rates = [report["train/lr"] for report in read_metrics(tmp_path)]
    assert rates == pytest.approx([0.005, 0.01, 0.006, 0.008, 0.01])


def start(config: dict[str, Any]) -> tuple[int, int, dict[str, Tensor], int]:
    """Return the start of a run: step, position in the data, parameters and buffers, and number of optimizer
    tensors."""
    with ExitStack() as stack:
        run = build_run(JobConfig.model_validate(config), this_rank(), stack)
        return run.progress.step, run.progress.data_position, full_state(run.model), len(run.optimizer.state)


def restart_all(configs: list[dict[str, Any]]) -> list[tuple[int, int, dict[str, Tensor], int]]:
    """Return the start of each of several runs, which all belong to one launch."""
    agent = AgentProcess("host", "/tmp/torchelastic_1/none_2", 1, None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "this_attempt", lambda: Attempt((agent,)))
        return start_all(configs)


def start_all(configs: list[dict[str, Any]]) -> list[tuple[int, int, dict[str, Tensor], int]]:
    """Return the start of each of several runs."""
    return [start(config) for config in configs]


def test_a_copied_checkpoint_does_not_change_the_resumed_step(
    tmp_path: Path, source: tuple[Path, dict[str, Tensor]]
) -> None:
    """After a copy of step-2 to step-50, this start and every later one resume from step 4."""
    checkpoints = Path(shutil.copytree(source[0] / "source", tmp_path / "source", symlinks=True)) / "checkpoints"
    shutil.copytree(checkpoints / "step-2", checkpoints / "step-50")
    for steps in (5, 6):
        run_ranks(run_job, 1, job(tmp_path, "source", steps))
    assert [report["step"] for report in read_metrics(tmp_path, "source")] == [1, 2, 3, 4, 5, 6]
    assert sorted(path.name for path in checkpoints.iterdir()) == [
        "latest",
        "step-2",
        "step-4",
        "step-5",
        "step-50.damaged-1",
        "step-6",
    ]


def test_a_run_goes_on_from_another_runs_checkpoint(tmp_path: Path, source: tuple[Path, dict[str, Tensor]]) -> None:
    folder, uninterrupted = source
    path = str(folder / "source/checkpoints/step-2")
    resumed = run_ranks(run_job, 1, job(tmp_path, "copy", 4, load=path))[0]
    reports = read_metrics(tmp_path, "copy")
    assert [report["step"] for report in reports] == [3, 4]
    losses = [report["train/loss"] for report in read_metrics(folder, "source")[-2:]]
    assert [report["train/loss"] for report in reports] == pytest.approx(losses, rel=1e-6)
    assert resumed.keys() == uninterrupted.keys()
    assert len(list((folder / "source/checkpoints").glob("step-*"))) == 2  # nothing is written there


def test_a_run_starts_from_another_runs_parameters(tmp_path: Path, source: tuple[Path, dict[str, Tensor]]) -> None:
    folder, end = source
    begun = job(tmp_path, "begun", 4, initial_load_path=str(folder / "source"))
    fresh_head = job(tmp_path, "head", 1, initial_load_path=str(folder / "source"), exclude_from_loading=["output.*"])
    step, position, state, num_states = run_ranks(start, 2, begun)[0]
    assert (step, position, num_states) == (0, 0, 0)
    assert_equal(state, end)
    trained = run_ranks(run_job, 1, fresh_head)[0]
    step, position, state, _ = run_ranks(start, 1, {**fresh_head, "training": {**begun["training"], "steps": 9}})[0]
    assert (step, position) == (1, 4)
    assert_equal(state, trained)  # its own checkpoint, with nothing excluded


def test_a_run_without_checkpoints_can_start_from_those_of_another_run(
    tmp_path: Path, source: tuple[Path, dict[str, Tensor]]
) -> None:
    config = job(tmp_path, "only", 1, initial_load_path=str(source[0] / "source"), exclude_from_loading=["output.*"])
    config["checkpoint"]["enable"] = False
    ((step, _, state, _),) = run_ranks(start, 1, config)
    assert step == 0 and not (state["output.weight"] == source[1]["output.weight"]).all()
    assert (state["tok_embeddings.weight"] == source[1]["tok_embeddings.weight"]).all()


def test_schedule_or_data_can_be_excluded_from_a_resume(tmp_path: Path, source: tuple[Path, dict[str, Tensor]]) -> None:
    path = str(source[0] / "source")
    excluded = [
        job(tmp_path, "excluded", 9, load=path, exclude_from_loading=parts)
        for parts in (["step"], ["data", "optimizer"])
    ]
    without_step, (step, position, _, num_states) = run_ranks(start_all, 1, excluded)[0]
    assert without_step[:2] == (0, 16)
    assert (step, position, num_states) == (4, 0, 0)


def refused(config: dict[str, Any]) -> str:
    """Return the error with which a run cannot start."""
    with pytest.raises(UserError) as caught:
        start(config)
    return str(caught.value)


def test_a_damaged_step_is_not_replaced_by_another(tmp_path: Path, source: tuple[Path, dict[str, Tensor]]) -> None:
    shutil.copytree(source[0] / "source", tmp_path / "source", symlinks=True)
    (tmp_path / "source/checkpoints/step-2/__1_0.distcp").write_bytes(b"")
    jobs = [job(tmp_path, "source", 9, load=2), job(tmp_path, "new", 9, load=str(tmp_path / "gone"))]
    for damaged, gone in run_ranks(all_refused, 2, jobs):
        assert "checkpoint.load: " in damaged and "step-2 cannot be loaded: " in damaged
        assert "checkpoint.load: there is no such folder" in gone


def write_text(folder: Path, num_files: int, mark: str = "a") -> None:
    """Write a data set with 5 samples of 16 tokens in each file, over existing files."""
    folder.mkdir(exist_ok=True)
    for file in folder.iterdir():
        file.unlink()
    for i in range(num_files):
        (folder / str(i)).write_text(f"{mark}{i:02}" + mark * 77)


def text_job(folder: Path, data: str, steps: int, **checkpoint: Any) -> dict[str, Any]:
    """Return a job on text that also validates."""
    config = job(folder, "tiny", steps, **checkpoint)
    config["model"]["args"]["vocab_size"] = 257
    config["data"] = {"kind": "text", "path": str(folder / data)}
    config["validation"] = {"freq": 2, "data": {"kind": "text", "path": str(folder / "held-out"), "split": "all"}}
    return config


def all_refused(configs: list[dict[str, Any]]) -> list[str]:
    """Return the error of each of several runs that cannot start."""
    return [refused(config) for config in configs]


def next_inputs(config: dict[str, Any]) -> list[list[int]]:
    """Return the inputs of the next microbatch of a run that resumes on this rank."""
    with ExitStack() as stack:
        inputs: Tensor = next(build_run(JobConfig.model_validate(config), this_rank(), stack).batches.train)[0]
        return inputs.tolist()


@pytest.fixture(scope="module")
def on_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a run of two steps on text, saved by two ranks."""
    folder = tmp_path_factory.mktemp("runs")
    write_text(folder / "text", 20)
    write_text(folder / "held-out", 2)
    run_ranks(run_job, 2, text_job(folder, "text", 2))
    return folder


def test_data_that_changed_is_refused(on_text: Path) -> None:
    step_2, changes = on_text / "tiny/checkpoints/step-2", []
    more = "it now has 202 samples (before: 101) and 40 files (before: 20); new: 20, 21, 22 and 17 more"
    for data, num_files, mark, change in (
        ("more", 40, "a", more),
        ("fewer", 1, "a", "it now has 5 samples (before: 101) and 1 file (before: 20); missing: 1, 10, 11 and 16 more"),
        ("others", 20, "b", "changed: 0, 1, 10 and 17 more"),
    ):
        write_text(on_text / data, num_files, mark)
        changes.append(change)
    jobs = [text_job(on_text, data, 4) for data in ("more", "fewer", "others")]
    for messages in run_ranks(all_refused, 2, jobs):
        assert messages == [
            f"data.path: the data has changed since {step_2} was saved: {change}; restore it, or use the new "
            "data with --checkpoint.accept_changes=true, or start anew with --checkpoint.load=none"
            for change in changes
        ]
    # If the data position is excluded or the checkpoint is another run's, the data may differ.
    again = text_job(on_text, "fewer", 4, load=2, exclude_from_loading=["data"])
    copy = text_job(on_text, "fewer", 4, load=str(step_2)) | {"job": {**again["job"], "name": "copy"}}
    # A restart (the second job) finds no newer checkpoint, so it excludes the position again.
    found = run_ranks(restart_all, 1, [again, again, copy])[0]
    assert [one[:2] for one in found] == [(2, 0), (2, 0), (2, 8)]


def test_changed_files_of_packed_sources_of_a_mixture_are_named(tmp_path: Path) -> None:
    job = text_job(tmp_path, "text", 1)
    for name in ("text", "more", "held-out"):
        write_text(tmp_path / name, 3)
    packed = {"kind": "text", "packing": "documents"}
    sources = [{**packed, "path": str(tmp_path / name)} for name in ("text", "more")]
    job |= {"data": {"kind": "mixture", "sources": sources}}
    run_ranks(run_job, 1, job)
    (tmp_path / "more" / "1").write_text("another text")
    (tmp_path / "more" / "2").rename(tmp_path / "more" / "3")
    job["training"]["steps"] = 2
    assert run_ranks(refused, 1, job)[0] == (
        f"data.sources.1.path: the data has changed since {tmp_path / 'tiny/checkpoints/step-1'} was saved: it now has "
        "11 samples (before: 15); missing: 2; changed: 1; new: 3; restore it, or use the new data with "
        "--checkpoint.accept_changes=true, or start anew with --checkpoint.load=none"
    )


def test_a_run_resumes_with_moved_data_and_with_accepted_changes_of_data(tmp_path: Path, on_text: Path) -> None:
    for part in ("tiny", "text"):
        shutil.copytree(on_text / part, tmp_path / part, symlinks=True)
    write_text(tmp_path / "held-out", 3)
    checkpoints = tmp_path / "tiny/checkpoints"
    assert run_ranks(logged, 1, text_job(tmp_path, "text", 4), "validation.")[0] == [
        f"validation.data: the data has changed since {checkpoints / 'step-2'} was saved: it now has 15 samples "
        "(before: 10) and 3 files (before: 2); new: 2; validation/loss before and after are not comparable"
    ]
    write_text(tmp_path / "text", 2)
    accepted = text_job(tmp_path, "text", 6, accept_changes=True)
    new = build_source(TextData(path=str(tmp_path / "text")), ByteTokenizer(), 16)
    order = SampleOrder(len(new), seed=0, shuffle=True)
    assert run_ranks(next_inputs, 1, accepted)[0] == [new[order(16)][0].tolist()]
    assert run_ranks(logged, 2, accepted, "data: the")[1] == [
        f"data: the data has changed since {checkpoints / 'step-4'} was saved: it now has 10 samples (before: 101) and "
        "2 files (before: 20); missing: 10, 11, 12 and 15 more; training continues at epoch 1.60 of the new data"
    ]
    # The changed data is accepted from now on.
    assert run_ranks(start, 1, text_job(tmp_path, "text", 8))[0][:2] == (6, 24)


def test_another_tokenizer_is_refused_and_a_moved_one_is_not(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    write_text(tmp_path / "text", 20)
    write_text(tmp_path / "held-out", 2)
    for name, begin in (("one", "x"), ("two", "y")):
        train_tokenizer([f"{begin * 4} aaaa"], 260, tmp_path / name)
    shutil.copytree(tmp_path / "one", tmp_path / "moved")

    def config(tokenizer: str, steps: int, **checkpoint: Any) -> dict[str, Any]:
        keys = text_job(tmp_path, "text", steps, **checkpoint)
        keys["model"]["args"]["vocab_size"] = 260
        return keys | {"tokenizer": {"kind": "huggingface", "path": str(tmp_path / tokenizer)}}

    run_ranks(run_job, 1, config("one", 1))
    run_ranks(run_job, 1, config("moved", 2))
    before, now = (build_tokenizer(TokenizerConfig(**config(name, 2)["tokenizer"])) for name in ("one", "two"))
    digests = f"digest {now.digest} (before: {before.digest})"
    change = f"changed since {tmp_path / 'tiny/checkpoints/step-2'} was saved: {digests}"
    assert run_ranks(refused, 1, config("two", 3)) == [
        f"tokenizer.path: the tokenizer has {change}; the model learned the ids of the other tokenizer: restore "
        "[tokenizer], or accept the change with --checkpoint.accept_changes=true, or start anew with "
        "--checkpoint.load=none"
    ]
    logged_lines = run_ranks(logged, 1, config("two", 3, accept_changes=True), "the tok")[0]
    assert logged_lines == [f"the tokenizer has {change}"]
