"""Early stopping: the step at which a run ends, its result, and runs that go on after a kill or a rollback."""

from __future__ import annotations

import json
import math
import shutil
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.checkpoint.test_attacks import forge
from tests.distributed import run_command, run_ranks
from tests.sampling import rest_is_slow
from tests.tensors import assert_equal
from tests.train.health.test_skipped_steps import poison
from tests.train.jobs import TINY_JOB_FILE, read_metrics, run_job_until, this_rank, tiny_job
from tests.train.run_folder.test_resume import logged, start
from titan_launch.checkpoint.index import INDEX_FILE, read_weights
from titan_launch.checkpoint.manifest import DamagedCheckpointError, read_manifest
from titan_launch.checkpoint.state import Progress, Values
from titan_launch.config.job import JobConfig
from titan_launch.core.errors import ConfigError
from titan_launch.inference.export import ExportOptions, export
from titan_launch.inference.saved_model import open_saved_model
from titan_launch.train.build import build_run
from titan_launch.train.early_stopping import EarlyStopping
from titan_launch.train.loop import fit

HELD_OUT = {"kind": "synthetic", "vocab_size": 61, "num_samples": 7, "seed": 1}
SAVES: dict[str, Any] = {"enable": True, "interval": 5, "keep_best": 1, "keep_latest": 1}
PIPELINE = {"pipeline_parallel_degree": 2, "pipeline_parallel_split_points": ["output"]}
NUMBERS = ("train/loss", "validation/loss", "validation/best_loss", "validation/without_improvement")


def stopping_job(folder: Path, patience: int | None, **sections: dict[str, Any]) -> dict[str, Any]:
    """Return a job that overfits eight samples. Its validation losses are 2.0 at step 2, 2.2, 1.6 at step 6, 2.0, 2.4,
    and 2.5 at step 12. Without a better loss it saves after steps 5 and 10."""
    job = {
        "model": {"args": {"norm": "batchnorm", "n_layers": 1}},
        "data": {"num_samples": 8},
        "training": {"steps": 20},
        "optimizer": {"lr": 0.1},
        "lr_scheduler": {"kind": "constant"},
        "checkpoint": SAVES,
        **sections,
    }
    tiny = tiny_job(folder, **job)
    tiny["data"]["num_samples"] = 8
    tiny["validation"] = {"freq": 2, "local_batch_size": 3, "data": HELD_OUT, **sections.get("validation", {})}
    tiny["validation"] |= {} if patience is None else {"patience": patience}
    return tiny


def numbers(folder: Path) -> list[list[float | None]]:
    return [[report.get(tag) for tag in ("step", *NUMBERS)] for report in read_metrics(folder)]


def assert_ended(folder: Path, patience: int, best: int, end: int, tag: str = "validation/loss") -> None:
    """Assert that a run counted its validations as a plain loop does, ended with the last one, and kept the best."""
    lowest, number = math.inf, 0
    for report in read_metrics(folder):
        assert number < patience
        if tag in report:
            number = 0 if report[tag] < lowest else number + 1
            lowest = min(lowest, report[tag])
            assert report["validation/without_improvement"] == number
            assert report["validation/best_loss"] == lowest
    assert (number, report["step"]) == (patience, end)
    checkpoints = folder / "tiny/checkpoints"
    assert {path.name for path in checkpoints.iterdir()} == {"best", "latest", f"step-{end}", f"step-{best}"}
    assert (checkpoints / "best").resolve().name == f"step-{best}"
    assert read_manifest(checkpoints / f"step-{best}").validation_loss == lowest


def end_of(folder: Path, best: int, end: int, number: int) -> str:
    """Return the last line of a run."""
    loss = read_manifest(folder / f"tiny/checkpoints/step-{best}").validation_loss
    why = (
        f"validation loss has not improved for {number} validation{'s' * (number > 1)} (best {loss:.4f} at step {best})"
    )
    return f"ended after step {end} of 20: {why}; the result is {folder}/tiny/checkpoints/step-{best}"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run on two ranks that ended early."""
    folder = tmp_path_factory.mktemp("whole")
    job = stopping_job(folder, 3, checkpoint={**SAVES, "async_mode": "thread"})
    assert run_ranks(logged, 2, job, "ended")[0] == [end_of(folder, 6, 12, 3)]
    assert_ended(folder, 3, best=6, end=12)
    return folder


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run on two ranks that was killed after step 11. Its checkpoints are of steps 6 and 10."""
    folder = tmp_path_factory.mktemp("killed")
    run_ranks(run_job_until, 2, stopping_job(folder, 3), 11)
    return folder


@pytest.mark.slow
def test_a_killed_and_resumed_run_ends_as_the_uninterrupted_one(tmp_path: Path, whole: Path, killed: Path) -> None:
    shutil.copytree(killed, tmp_path, symlinks=True, dirs_exist_ok=True)
    assert run_ranks(logged, 2, stopping_job(tmp_path, 3), "ended")[0] == [end_of(tmp_path, 6, 12, 3)]
    assert_ended(tmp_path, 3, best=6, end=12)
    assert numbers(tmp_path) == numbers(whole)


@pytest.mark.parametrize(("ranks", "parallelism"), rest_is_slow([(1, {}), (2, PIPELINE)]))
def test_a_run_ends_at_the_same_step_on_other_ranks(
    tmp_path: Path, whole: Path, killed: Path, ranks: int, parallelism: dict[str, Any]
) -> None:
    shutil.copytree(killed, tmp_path, symlinks=True, dirs_exist_ok=True)
    job = stopping_job(tmp_path, 3, parallelism=parallelism)
    assert run_ranks(logged, ranks, job, "ended")[0] == [end_of(tmp_path, 6, 12, 3)]
    assert_ended(tmp_path, 3, best=6, end=12)


@pytest.mark.slow
def test_a_larger_patience_continues_a_run_that_has_ended_early(tmp_path: Path, whole: Path) -> None:
    """The same command does nothing, and neither does a smaller patience. A patience that is set at a resume counts
    from there, against the best checkpoint of the run."""
    nothing = "nothing to do: {}; increase validation.patience to go on"
    job = stopping_job(tmp_path, 1)
    assert run_ranks(logged, 2, job, "ended")[0] == [end_of(tmp_path, 2, 4, 1)]
    assert run_ranks(logged, 1, job, "nothing")[0] == [nothing.format(end_of(tmp_path, 2, 4, 1))]
    assert_ended(tmp_path, 1, best=2, end=4)
    copy = tmp_path / "copy"
    shutil.copytree(tmp_path / "tiny", copy / "tiny", symlinks=True)
    assert run_ranks(logged, 2, stopping_job(tmp_path, 3), "ended")[0] == [end_of(tmp_path, 6, 12, 3)]
    assert_ended(tmp_path, 3, best=6, end=12)
    assert numbers(tmp_path) == numbers(whole)
    nothing_more = nothing.format(end_of(tmp_path, 6, 12, 3))
    assert run_ranks(logged, 1, stopping_job(tmp_path, 2), "nothing") == [[nothing_more]]
    shutil.rmtree(tmp_path / "tiny/checkpoints/step-6")
    missing = nothing_more.replace("at step 6)", "at step 6, whose checkpoint is missing)").replace(
        "step-6;", "step-12;"
    )
    assert run_ranks(logged, 1, stopping_job(tmp_path, 2), "nothing") == [[missing]]

    run_ranks(run_job_until, 1, stopping_job(copy, None), 10)  # step 6, the best, is not saved
    assert run_ranks(logged, 1, stopping_job(copy, 2), "ended") == [[end_of(copy, 2, 14, 2)]]


def test_the_best_checkpoint_is_the_result(tmp_path: Path, whole: Path) -> None:
    """`export` takes it, and so does a run that begins with the parameters. A run that goes on takes the newest, and
    counts anew in its own folder."""
    pytest.importorskip("safetensors")
    from safetensors.torch import load_file

    run = whole / "tiny"
    best, newest = (dict(read_weights(run / f"checkpoints/step-{step}")) for step in (6, 12))
    plain = ExportOptions(is_plain=True)
    for options, name, source in (
        (plain, "best", "step-6 (the best; the run ended early after step 12)"),
        (replace(plain, step=12), "newest", "step-12"),
    ):
        assert export(run, tmp_path / name, options).endswith(f" of {source} to {tmp_path / name}")
    for name, expected in (("best", best), ("newest", newest)):
        assert_equal(load_file(tmp_path / name / "model.safetensors"), expected)

    begun = stopping_job(tmp_path, None, job={"name": "begun"}, checkpoint={"initial_load_path": str(run)})
    ((step, _, state, _),) = run_ranks(start, 1, begun)
    assert step == 0
    assert_equal({name: state[name] for name in best}, best)
    goes_on = stopping_job(tmp_path, 1, checkpoint={**SAVES, "load": str(run)})
    assert run_ranks(logged, 1, goes_on, "ended") == [[end_of(tmp_path, 14, 16, 1)]]


def test_the_loss_of_the_average_is_compared_if_only_the_average_is_validated(tmp_path: Path) -> None:
    ema = {"decay": 0.7, "validate_with": "ema"}
    job = stopping_job(tmp_path, 2, ema=ema)
    assert run_ranks(logged, 1, job, "ended") == [[end_of(tmp_path, 8, 12, 2)]]
    assert_ended(tmp_path, 2, best=8, end=12, tag="validation/ema_loss")


def train_poisoned(job: dict[str, Any]) -> tuple[int, int]:
    with ExitStack() as stack:
        run = build_run(JobConfig.model_validate(job), this_rank(), stack)
        poison(run, range(36, 37), {})  # step 10
        fit(run)
        return run.progress.step, run.progress.rollbacks


def test_a_rollback_undoes_validations(tmp_path: Path) -> None:
    """The run goes back from step 10 to step 6, and the validation of step 8 no longer counts."""
    debug = {"on_nonfinite": "skip", "max_skips": 1, "on_repeated_skips": "rollback"}
    assert run_ranks(train_poisoned, 1, stopping_job(tmp_path, 3, debug=debug)) == [(12, 1)]
    undone = [json.loads(line) for line in (tmp_path / "tiny/metrics.rolled_back.jsonl").read_text().splitlines()]
    assert [report["step"] for report in undone] == [7, 8, 9]
    assert_ended(tmp_path, 3, best=6, end=12)


class NotFinite(nn.Module):
    """A model whose validation loss is NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(61, 8)
        self.output = nn.Linear(8, 61, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.output(self.embedding(tokens))
        return logits if self.training else logits * math.nan


def test_a_loss_that_is_not_finite_is_no_improvement(tmp_path: Path) -> None:
    job = {**stopping_job(tmp_path, 2), "model": {"name": f"{__name__}:NotFinite"}}
    why = "validation loss has not improved for 2 validations (it was never finite)"
    end = f"ended after step 4 of 20: {why}; the result is {tmp_path}/tiny/checkpoints/step-4"
    assert run_ranks(logged, 1, job, "ended") == [[end]]
    assert run_ranks(logged, 1, job, "nothing") == [[f"nothing to do: {end}; increase validation.patience to go on"]]
    line = export(tmp_path / "tiny", tmp_path / "out", ExportOptions(is_plain=True))
    assert line.endswith(f" of step-4 to {tmp_path}/out")


def observed(losses: list[float], patience: int, min_improvement: float) -> tuple[list[tuple[float, bool, bool]], str]:
    """Return, for each validation, the number without an improvement, and whether it is saved and ends the run. Also
    return the reason for the end."""
    progress = Progress()
    stopping = EarlyStopping(patience, min_improvement, Path("unused"), progress)
    found = []
    for progress.step, loss in enumerate(losses, start=1):
        number = stopping.observe(loss)["validation/without_improvement"]
        found.append((number, stopping.needs_checkpoint, stopping.has_ended))
    return found, stopping.describe(progress.step)


def test_small_improvements_count_once_they_add_up() -> None:
    """Every lower loss is saved. A loss that is not finite neither counts nor becomes the lowest."""
    losses = [math.nan, 2.0, 1.75, 1.5, 1.25, math.inf, 1.0, -math.inf]
    found, why = observed(losses, patience=3, min_improvement=0.5)
    assert [number for number, *_ in found] == [1, 0, 1, 2, 0, 1, 2, 3]
    assert [is_saved for _, is_saved, _ in found] == [False, True, True, True, True, False, True, True]
    assert [has_ended for *_, has_ended in found] == [False] * 7 + [True]
    assert why == (
        "validation loss has not improved by more than 0.5 for 3 validations (best 1.0000 at step 7, whose checkpoint "
        "is missing)"
    )


VALID: Values = {
    "best_loss": torch.tensor(2.0),
    "best_step": torch.tensor(4),
    "improved_loss": torch.tensor(2.5),
    "without_improvement": torch.tensor(3),
    "has_ended": torch.tensor(1),
}


def refused(folder: Path, changes: list[Values]) -> list[bool]:
    """Return, for each change of a valid state, whether it is refused."""
    stopping = EarlyStopping(3, 0.0, folder, Progress(step=6))
    found = []
    for change in changes:
        try:
            stopping.load_state_dict({**VALID, **change})
        except ValueError:
            found.append(True)
        else:
            found.append(False)
    return found


def test_a_state_with_impossible_numbers_is_refused(whole: Path) -> None:
    changes = {
        "best_loss": [math.nan, math.inf, -math.inf, 3.0],
        "best_step": [-1, 0, 7],
        "improved_loss": [math.nan, math.inf, 1.0],
        "without_improvement": [-1, 2**60],
    }
    states: list[Values] = [{key: torch.tensor(value)} for key, values in changes.items() for value in values]
    unknown = {
        "best_loss": torch.tensor(math.inf),
        "best_step": torch.tensor(0),
        "improved_loss": torch.tensor(math.inf),
    }
    (found,) = run_ranks(refused, 1, whole / "tiny/checkpoints", [{}, unknown, *states])
    assert found == [False, False, *[True] * len(states)]


def refused_start(job: dict[str, Any]) -> str:
    with ExitStack() as stack, pytest.raises(ConfigError) as error:
        build_run(JobConfig.model_validate(job), this_rank(), stack)
    return str(error.value)


def test_a_forged_end_is_an_error(tmp_path: Path, whole: Path) -> None:
    run = tmp_path / "forged"
    shutil.copytree(whole / "tiny", run, symlinks=True)
    newest = run / "checkpoints/step-12"
    index = json.loads((newest / INDEX_FILE).read_text())
    index["tensors"]["early_stopping.has_ended"]["dtype"] = "float64"
    forge(newest, INDEX_FILE, json.dumps(index).encode())
    reason = f"{INDEX_FILE} has no valid entry for the tensor early_stopping.has_ended"
    with pytest.raises(DamagedCheckpointError, match=reason):
        open_saved_model(run)
    job = stopping_job(tmp_path, None, checkpoint={"initial_load_path": str(run)})
    expected = f"checkpoint.initial_load_path: {newest} cannot be loaded: {reason}; name another checkpoint"
    assert run_ranks(refused_start, 2, job) == [expected] * 2
    (newest / INDEX_FILE).write_bytes(b"")
    with pytest.raises(DamagedCheckpointError, match=f"^step-12: {INDEX_FILE} has 0 bytes .*another checkpoint"):
        open_saved_model(run)


def test_the_command_line_shows_the_end_and_the_result(tmp_path: Path) -> None:
    """The loss of the held-out text is lowest at the first validation."""
    (tmp_path / "train.txt").write_text("All work and no play makes Jack a dull boy.\n" * 40)
    (tmp_path / "held_out.txt").write_text("The quick brown fox jumps over the lazy dog.\n" * 10)
    data = 'kind = "text"\npath = "{}.txt"\n'
    (tmp_path / "job.toml").write_text(
        f"{TINY_JOB_FILE}[data]\n{data.format('train')}\n[validation]\nfreq = 2\npatience = 2\n"
        f"[validation.data]\n{data.format('held_out')}\n[training]\nsteps = 20\nseq_len = 32\n"
        "[optimizer]\nlr = 0.05\n[checkpoint]\nenable = true\nkeep_best = 1\n"
    )
    status, log, _ = run_command(["--config", "job.toml"], tmp_path)
    loss = read_manifest(tmp_path / "tiny/checkpoints/step-2").validation_loss
    why = f"validation loss has not improved for 2 validations (best {loss:.4f} at step 2)"
    end = f"ended after step 6 of 20: {why}; the result is tiny/checkpoints/step-2"
    assert (status, log.splitlines()[-1]) == (0, end)
    status, log, _ = run_command(["--config", "job.toml"], tmp_path)
    assert (status, log.splitlines()[-1]) == (0, f"nothing to do: {end}; increase validation.patience to go on")

    _, _, log = run_command(["generate", "tiny", "--prompt", "All", "--max-new-tokens", "1"], tmp_path)
    chosen = "step-2 (the best; the run ended early after step 6)"
    assert log.startswith(f"model: tiny, {chosen}: llama3, float32 on cpu\n")
    _, listed, _ = run_command(["runs", "."], tmp_path)
    assert "tiny  ended early  6/20, best 2" in listed
    _, report, _ = run_command(["report", "tiny"], tmp_path)
    assert report.startswith("The run of llama3 (debug) on 1 rank ended early: step 6 of 20.\n")
    assert "Checkpoints: 2. The newest is of step 6. The best is of step 2, and is the result of the run.\n" in report
    shutil.copytree(tmp_path / "tiny", tmp_path / "copy")
    _, comparison, _ = run_command(["compare", "tiny", "copy"], tmp_path)
    assert "\nA = tiny: ended early, step 6 of 20, best step 2\n" in comparison
