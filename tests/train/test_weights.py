"""Runs that begin with the weights of a Hugging Face folder, and exports of their checkpoints."""

from __future__ import annotations

import json
import re
import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.distributed import run_ranks
from tests.models.parity import VOCABULARY, random_model, read_model, samples, tensors_of
from tests.packages import needs
from tests.tensors import assert_equal, full_state
from tests.train.jobs import read_metrics, run_job, this_rank, tiny_job
from titan_launch.cli import main
from titan_launch.config.loading.load import load_job
from titan_launch.core.import_string import FOLDERS_CHOOSE_NO_CODE
from titan_launch.core.patches import replaced
from titan_launch.models.init import load_weights
from titan_launch.models.weights import folder as weights_folder
from titan_launch.models.weights.folder import find_weights
from titan_launch.train.build import build_run

pytestmark = needs("transformers")

STEPS = 3


def job_file(folder: Path, weights: Path, **sections: Any) -> str:
    """Write a tiny job that begins with the weights of a folder, and return its path."""
    training = {"seq_len": 24, "steps": STEPS, "max_norm": 0.0, **sections.pop("training", {})}
    optimizer = {"lr": 1e-2, "weight_decay": 0.0, **sections.pop("optimizer", {})}
    schedule = {"kind": "constant"}
    job = tiny_job(folder, training=training, optimizer=optimizer, lr_scheduler=schedule, **sections)
    job["model"] = {"weights": str(weights), **sections.get("model", {})}
    path = folder / "job.json"
    path.write_text(json.dumps(job))
    return str(path)


def whole_states(jobs: list[tuple[str, str]]) -> list[tuple[dict[str, Tensor], int, int]]:
    """Build a run of each job and override on this rank. Return its gathered parameters, and the bytes that this rank
    reads, out of how many."""
    states, headers_read, original = [], list[Path](), weights_folder.read_header

    def read_header(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
        headers_read.append(path)
        return original(path)

    for path, override in jobs:
        with ExitStack() as stack:
            with replaced(weights_folder, "read_header", read_header):
                run = build_run(load_job(path, [override]).config, this_rank(), stack)
            assert len(headers_read) == 1
            headers_read.clear()
            weights = find_weights(run.config.model, run.job.plan.inventory)
            states.append((full_state(run.model), load_weights(run.model, weights), weights.bytes_of(weights.pieces)))
    return states


DIVISIONS = [
    ("Llama 3.1, RoPE scaling", "data_parallel_replicate_degree=2"),
    ("Llama 3.1, RoPE scaling", "pipeline_parallel_degree=2"),
    ("Llama, biases, wide heads, tied", "tensor_parallel_degree=2"),
    ("GPT-2", "data_parallel_shard_degree=-1"),
]


def test_every_division_reads_the_values_and_each_rank_its_part(tmp_path: Path) -> None:
    expected, jobs = [], []
    for number, (case, key) in enumerate(DIVISIONS):
        folder = tmp_path / str(number)
        random_model(case, folder / "hf", vocab_size=62)
        expected.append(dict(read_model(folder / "hf")[0].state_dict()))
        jobs.append((job_file(folder, folder / "hf"), f"--parallelism.{key}"))
    for values, *results in zip(expected, *run_ranks(whole_states, 4, jobs), strict=True):
        for state, num_bytes, of_bytes in results:
            found = {name: tensor for name, tensor in state.items() if name in values}
            assert found and all(torch.equal(tensor, values[name]) for name, tensor in found.items())
            assert num_bytes < 0.6 * of_bytes
        assert {name for state, _, _ in results for name in state} >= values.keys() - {"output.weight"}


def test_a_larger_vocabulary_is_padded_and_cut_again(tmp_path: Path) -> None:
    random_model("Qwen 3, tied", tmp_path / "hf", torch_dtype="bfloat16")
    path = job_file(
        tmp_path,
        tmp_path / "hf",
        model={"args": {"vocab_size": 64}},
        checkpoint={"enable": True, "async_mode": "disabled"},
        training={"steps": 1},
        optimizer={"lr": 1e-30},
    )
    ((state, _, _),) = run_ranks(whole_states, 2, [(path, "--job.name=begin")])[0]
    embedding = state["tok_embeddings.weight"]
    assert embedding.shape == (64, 32) and not embedding[VOCABULARY:].any() and embedding.dtype == torch.float32
    run_ranks(run_job, 2, load_job(path).config.model_dump(mode="json", exclude_none=True))
    for options in ([], ["--vocab-size=61"]):
        if options:
            shutil.rmtree(tmp_path / "hf")
        assert main(["export", str(tmp_path / "tiny"), "--out", str(tmp_path / f"out{len(options)}"), *options]) == 0
        exported = tensors_of(tmp_path / f"out{len(options)}")
        assert exported["model.embed_tokens.weight"].equal(embedding[:VOCABULARY])
        assert "lm_head.weight" not in exported
        assert json.loads((tmp_path / f"out{len(options)}" / "config.json").read_text())["vocab_size"] == VOCABULARY


def plain_losses(path: str, folder: str) -> list[float]:
    """Train the model of `transformers` in plain PyTorch, on the batches of a job."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    losses = []
    with ExitStack() as stack:
        run = build_run(
            load_job(path, ["--training.local_batch_size=4", "--job.name=alone"]).config, this_rank(), stack
        )
        for _ in range(STEPS):
            inputs, targets, _ = next(run.batches.train)
            loss = F.cross_entropy(model(inputs).logits.flatten(0, 1), targets.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


def test_import_train_export_equals_plain_pytorch(tmp_path: Path) -> None:
    """A run on two ranks, from an imported folder to the model that transformers loads."""
    from transformers import AutoModelForCausalLM

    random_model("Llama 3.1, RoPE scaling", tmp_path / "hf")
    (tmp_path / "hf" / "tokenizer.json").write_text("{}")
    assert main(["import", str(tmp_path / "hf"), "--out", str(tmp_path / "imported")]) == 0
    assert main(["export", str(tmp_path / "imported"), "--out", str(tmp_path / "exported")]) == 0
    assert (tmp_path / "exported" / "tokenizer.json").exists()
    path = job_file(tmp_path, tmp_path / "imported", checkpoint={"enable": True, "async_mode": "disabled"})
    run_ranks(run_job, 2, load_job(path).config.model_dump(mode="json", exclude_none=True))
    losses = [row["train/loss"] for row in read_metrics(tmp_path)]
    assert losses == pytest.approx(run_ranks(plain_losses, 1, path, str(tmp_path / "hf"))[0], abs=1e-4)
    assert losses[-1] < losses[0] - 0.1
    for name, options in (("hf32", []), ("hf16", ["--dtype=bfloat16"]), ("plain", ["--format=plain"])):
        assert main(["export", str(tmp_path / "tiny"), "--out", str(tmp_path / name), *options]) == 0
    assert main(["export", str(tmp_path / "plain"), "--out", str(tmp_path / "again")]) == 0
    assert (tmp_path / "hf32" / "tokenizer.json").exists() and (tmp_path / "hf32" / "generation_config.json").exists()
    ours, _ = read_model(tmp_path / "plain")
    tokens, _ = samples()
    precise, coarse = (torch.float32, 1e-5), (torch.bfloat16, 0.5)
    for name, (dtype, distance) in (("hf32", precise), ("again", precise), ("hf16", coarse)):
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path / name)
        assert theirs.dtype == dtype
        with torch.no_grad():
            assert float((ours(tokens) - theirs(tokens).logits.float()).abs().max()) < distance


def test_a_run_that_resumes_does_not_read_the_weights_but_notices_other_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    random_model("Llama 2", tmp_path / "hf")
    path = job_file(tmp_path, tmp_path / "hf", checkpoint={"enable": True, "async_mode": "disabled"})
    job = load_job(path).config.model_dump(mode="json", exclude_none=True)
    run_ranks(run_job, 1, job)
    job["training"]["steps"] += 1
    random_model("Llama 2", tmp_path / "hf", initializer_range=0.5)
    with pytest.raises(AssertionError, match=r"has changed since .*step-3 was saved: .* a resumed run ignores the new"):
        run_ranks(run_job, 1, job)
    shutil.rmtree(tmp_path / "hf")
    run_ranks(run_job, 1, job)
    assert [row["step"] for row in read_metrics(tmp_path)] == list(range(1, STEPS + 2))
    recorded = str(tmp_path / "tiny" / "config.json")
    assert main(["check", "--config", recorded]) == 0
    assert main(["check", "--config", recorded, "--job.name=other"]) == 2
    assert "there is no such folder" in capsys.readouterr().err


class Normalized(nn.Module):
    """A model with BatchNorm over the channels of all tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 8)
        self.norm = nn.BatchNorm1d(8)
        self.output = nn.Linear(8, 64)

    def forward(self, tokens: Tensor) -> Tensor:
        normalized: Tensor = self.norm(self.embedding(tokens).mT)
        logits: Tensor = self.output(normalized.mT)
        return logits


def test_a_model_of_the_users_own_goes_out_and_comes_in(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its BatchNorm has buffers, which are exported too."""
    name = "tests.train.test_weights:Normalized"
    data = {"kind": "synthetic", "vocab_size": 64, "num_samples": 40}
    job = tiny_job(tmp_path, data=data, checkpoint={"enable": True, "async_mode": "disabled"}, training={"steps": 1})
    job["model"] = {"name": name}
    trained = run_ranks(run_job, 2, job)[0]
    assert main(["export", str(tmp_path / "tiny"), "--out", str(tmp_path / "plain"), "--format=plain"]) == 0
    path = job_file(tmp_path, tmp_path / "plain", data=data, model={"name": name})
    ((state, _, _),) = run_ranks(whole_states, 2, [(path, "--job.name=begin")])[0]
    assert state["norm.running_mean"].any() and state["norm.num_batches_tracked"] > 0
    assert_equal(state, trained)
    path = job_file(tmp_path, tmp_path / "plain", data=data)
    assert main(["check", "--config", path]) == 2
    assert f"{FOLDERS_CHOOSE_NO_CODE}; set model.name" in capsys.readouterr().err


def test_bad_exports_are_one_error_and_leave_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = tiny_job(
        tmp_path,
        checkpoint={"enable": True, "async_mode": "disabled"},
        model={"args": {"norm": "batchnorm"}},
        training={"steps": 1},
    )
    run_ranks(run_job, 1, job)
    run, full = str(tmp_path / "tiny"), tmp_path / "full"
    full.mkdir()
    (full / "file").touch()
    (tmp_path / "used.tmp").mkdir()
    for arguments, message in (
        ([run, "--out", str(tmp_path / "out")], 'has no counterpart of model.args.norm = "batchnorm"'),
        ([run, "--out", str(tmp_path / "out"), "--step=3"], "it has no checkpoint of step 3; steps: 1"),
        ([run, "--out", str(full)], "full exists already; choose another name"),
        ([run, "--out", str(tmp_path / "used")], "used.tmp exists already, and "),
        ([run, "exported"], "the following arguments are required: --out"),
        ([str(tmp_path / "no"), "--out", str(tmp_path / "out")], "there is no such folder"),
        ([str(full), "--out", str(tmp_path / "out")], "it has no config.json"),
        ([run, "--out", str(tmp_path / "out"), "--format=torch"], "--format: invalid choice: 'torch'"),
        ([run, "--out", str(tmp_path / "out"), "--training.steps=3"], "unknown option --training.steps"),
        (
            [run, "--out", str(tmp_path / "out"), "--format=plain", "--vocab-size=9"],
            "--vocab-size has no effect with --format plain; remove it",
        ),
    ):
        assert main(["export", *arguments]) == 2
        error = capsys.readouterr().err
        assert message in error and error.startswith("error: ") and error.count("error:") == 1
    (shard,) = (tmp_path / "tiny" / "checkpoints" / "step-1").glob("__0*.distcp")
    shard.write_bytes(shard.read_bytes()[:-1])
    assert main(["export", run, "--out", str(tmp_path / "out"), "--format=plain"]) == 2
    assert f"{shard.name} has" in capsys.readouterr().err
    assert not list(tmp_path.glob("out*")) and (tmp_path / "used.tmp").exists()


def peak() -> int:
    """Return the most memory of this process so far. getrusage would count that of its parent, too."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return 1024 * int(found[1])


def peaks_of_import_and_export(parent: Path) -> tuple[int, int]:
    """Import and export a small and a large model. Return by how much the large one raised the peak."""
    for folder in (parent / "small", parent / "large"):
        before = peak()
        assert main(["import", str(folder), "--out", f"{folder}-imported"]) == 0
        imported = peak()
        assert main(["export", f"{folder}-imported", "--out", f"{folder}-exported"]) == 0
    return imported - before, peak() - before


@pytest.mark.slow
def test_import_and_export_hold_about_two_of_the_largest_tensors(tmp_path: Path) -> None:
    shape = {"vocab_size": 32_768, "hidden_size": 256, "num_hidden_layers": 1, "intermediate_size": 32_768}
    random_model("Llama 2", tmp_path / "large", **shape)
    random_model("Llama 2", tmp_path / "small")
    largest = 4 * 32_768 * 256  # of five such tensors
    (peaks,) = run_ranks(peaks_of_import_and_export, 1, tmp_path)
    assert all(0.9 * largest < peak < 2.5 * largest for peak in peaks), [peak / largest for peak in peaks]
