"""Checkpoints without parameters that are never trained: their values are in the folder of `model.weights`."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.distributed import run_ranks
from tests.tensors import assert_equal
from tests.train.jobs import TINY_ARGS, run_job, run_job_until, this_rank, tiny_job
from titan_launch.checkpoint.index import read_index
from titan_launch.checkpoint.manifest import read_manifest
from titan_launch.config.job import JobConfig
from titan_launch.core.errors import UNSET, ConfigError
from titan_launch.models.architectures import resolve_args
from titan_launch.models.build import SPECS
from titan_launch.models.weights.folder import WeightsFolder
from titan_launch.models.weights.writing import Entry, write_json, write_tensors
from titan_launch.train.build import build_run

pytest.importorskip("safetensors")

FROZEN = ["tok_embeddings.*", "layers.*.attention.**"]


def write_base(folder: Path, seed: int = 0, **args: Any) -> Path:
    """Write random weights in the names of this package."""
    torch.manual_seed(seed)
    args = {**TINY_ARGS, **args}
    model = SPECS["llama3"].build(resolve_args("llama3", "debug", args), 16)
    state = {name: torch.randn(tensor.shape) * 0.05 for name, tensor in model.named_parameters()}
    folder.mkdir()
    write_json(folder / "config.json", {"model": {"name": "llama3", "flavor": "debug", "args": args}})
    entries = [Entry(name, tuple(tensor.shape), tensor.dtype) for name, tensor in state.items()]
    write_tensors(folder, entries, lambda entry: state[entry.name])
    return folder


def job(folder: Path, base: Path | None, steps: int = 4, **sections: Any) -> dict[str, Any]:
    """Return a job that trains a few parameters of a base, and saves every second step."""
    training = {"steps": steps, "frozen": FROZEN, **sections.pop("training", {})}
    checkpoint = {"enable": True, "interval": 2, **sections.pop("checkpoint", {})}
    config = tiny_job(
        folder,
        training=training,
        checkpoint=checkpoint,
        lr_scheduler={"kind": "constant", "warmup_steps": 0},
        **sections,
    )
    config["model"] = {"args": TINY_ARGS} if base is None else {"args": TINY_ARGS, "weights": str(base)}
    return config


def saved(folder: Path, step: int, superseded: str = "") -> set[str]:
    index = read_index(folder / f"tiny/checkpoints/{superseded}step-{step}")
    return {key.removeprefix("model.") for key in index if key.startswith("model.")}


def is_frozen(name: str) -> bool:
    return name.startswith("tok_embeddings.") or ".attention." in name


def refusal(config: dict[str, Any]) -> str:
    """Return the error of a job that does not start."""
    try:
        with ExitStack() as stack:
            build_run(JobConfig.model_validate(config), this_rank(), stack)
    except ConfigError as error:
        (problem,) = error.problems
        return f"{None if problem.value is UNSET else problem.value}: {problem.reason}"
    return ""


def runs_of_two_ranks(folder: Path, base: Path, other: Path) -> tuple[dict[str, dict[str, Tensor]], list[str]]:
    """Train with several resumes on this rank. Return the final states, and the refusals of other folders."""
    ema = {"ema": {"decay": 0.5}, "precision": {"param_dtype": "float32", "frozen_storage_dtype": "bfloat16"}}
    states = {"whole": run_job(job(folder / "whole", base, **ema))}
    run_job_until(job(folder / "parts", base, checkpoint={"async_mode": "thread"}, **ema), 3)
    of_rank = (folder / "nothing", other)[dist.get_rank()]
    refusals = [refusal(job(folder / "parts", path, **ema)) for path in (other, folder / "nothing", None, of_rank)]
    states["parts"] = run_job(job(folder / "parts", base, **ema))
    run_job(job(folder / "switched", base, 2, **ema))
    run_job(job(folder / "switched", base, 3, checkpoint={"save_frozen": True}, **ema))
    of_rank = (base, folder / "nothing")[dist.get_rank()]  # the folder is on one host only
    run_job(job(folder / "switched", of_rank, **ema))
    of_rank = (base, folder / "shallow")[dist.get_rank()]  # lacks tensors
    refusals.append(refusal(job(folder / "switched", of_rank, 6, checkpoint={"accept_changes": True}, **ema)))
    states["switched"] = run_job(job(folder / "switched", base, checkpoint={"load": 3}, **ema))
    return states, refusals


def test_a_resume_reads_the_omitted_parameters(tmp_path: Path) -> None:
    base, other = write_base(tmp_path / "base"), write_base(tmp_path / "other", seed=1)
    write_base(tmp_path / "shallow", n_layers=1)
    (states, refusals), (_, of_rank_1) = run_ranks(runs_of_two_ranks, 2, tmp_path, base, other)
    assert "tensor" in refusals.pop() and "tensor" in of_rank_1.pop()
    names = states["whole"].keys() - {"rope.table"}
    for how in ("parts", "switched"):
        assert_equal(states[how], states["whole"])
        assert saved(tmp_path / how, 2) == saved(tmp_path / how, 4) == {name for name in names if not is_frozen(name)}
    assert saved(tmp_path / "switched", 3) == saved(tmp_path / "switched", 4, "superseded-1/") == names
    recorded = read_manifest(tmp_path / "parts/tiny/checkpoints/step-2").base
    assert recorded is not None and recorded.folder == str(base)
    assert recorded.omitted == len(list(filter(is_frozen, names))) == 9
    fingerprints = [WeightsFolder(folder).fingerprint().digest for folder in (base, other)]
    checkpoint = tmp_path / "parts/tiny/checkpoints/step-2"
    needed = (
        f"{checkpoint} omits 9 never-trained parameters; their values are in {base}, with the fingerprint "
        f"{fingerprints[0]}; set model.weights to the present path of this folder"
    )
    assert refusals[0].startswith(f"{other}: has the fingerprint {fingerprints[1]} (")
    assert refusals[1].startswith(f"{tmp_path}/nothing: there is no such folder")
    assert refusals[2].startswith("None: is required: ")
    # The fingerprint and the change are those of rank 1, on both ranks: rank 0 has no folder.
    change = refusals[0].removeprefix(f"{other}: ")
    assert refusals[3] == f"{tmp_path}/nothing: {change}" and of_rank_1[3] == f"{other}: {change}"
    assert all(text.endswith(needed) for text in refusals)


def continued(folder: Path, base: Path, parallelism: dict[str, int]) -> dict[str, Tensor]:
    """Train in three phases on this rank, with other parameters in each phase."""
    phases: list[dict[str, Any]] = [
        {"training": {"frozen": FROZEN, "steps": 1}},
        {"training": {"frozen": ["layers.1.**"], "unfreeze": [{"match": "output.*", "after_step": 2}], "steps": 3}},
        {"training": {"frozen": FROZEN, "steps": 4}},
    ]
    for phase in phases:
        result = run_job(job(folder, base, checkpoint={"accept_changes": True}, parallelism=parallelism, **phase))
    return result


@pytest.mark.slow
def test_phases_with_other_frozen_parameters_on_other_ranks(tmp_path: Path) -> None:
    """Parameters that an earlier phase trained are saved, although a later phase freezes them."""
    base = write_base(tmp_path / "base")
    state = run_ranks(continued, 1, tmp_path / "one", base, {})[0]
    stages = run_ranks(continued, 2, tmp_path / "two", base, {"pipeline_parallel_degree": 2})
    assert saved(tmp_path / "one", 1) == {name for name in state if not is_frozen(name)} - {"rope.table"}
    attention = {name for name in state if name.startswith("layers.1.attention.")}
    assert saved(tmp_path / "one", 4) == saved(tmp_path / "two", 4) == state.keys() - attention - {"rope.table"}
    divided = {name: tensor for stage in stages for name, tensor in stage.items()}
    torch.testing.assert_close({name: divided[name] for name in state}, state, rtol=0, atol=1e-6)
