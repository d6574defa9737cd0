"""Loading: the checkpoint that is chosen, the parts of it that are loaded, and checkpoints that are refused."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard as Sharded
from torch.distributed.tensor import distribute_tensor

from tests.checkpoint.states import ORIGIN, manager_of, saved, trained
from tests.distributed import run_ranks
from tests.tensors import assert_equal
from titan_launch.checkpoint.index import read_index, read_weights
from titan_launch.checkpoint.loading import EVERYTHING, Selection, _read, find_checkpoint, load_state, newest_valid
from titan_launch.checkpoint.manifest import DamagedCheckpointError, Manifest, read_manifest, write_manifest
from titan_launch.checkpoint.retention import Retention, WriteRequest
from titan_launch.checkpoint.snapshot import shards_of
from titan_launch.checkpoint.writer import write_checkpoint
from titan_launch.core.errors import UserError
from titan_launch.distributed.dtensor import Shard, local_tensor
from titan_launch.distributed.random_state import RandomState
from titan_launch.parallel.batchnorm import RunningStatistics


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    """Return a folder with checkpoints of three steps, and the state of the last one."""
    folder = tmp_path_factory.mktemp("run") / "checkpoints"
    return folder, run_ranks(saved, 2, folder, 3)[0]


@pytest.fixture
def copied(tmp_path: Path, checkpoints: tuple[Path, dict[str, Tensor]]) -> Path:
    """Return a copy of the checkpoints, to be damaged."""
    return Path(shutil.copytree(checkpoints[0], tmp_path / "checkpoints", symlinks=True))


def choose(folder: Path) -> tuple[str, list[str]]:
    """Return the checkpoint that a run would resume from, or the reason for none, and the entries of the folder
    afterwards."""
    try:
        found = newest_valid(folder, set_damaged_aside=True)
    except UserError as error:
        return str(error), sorted(os.listdir(folder))
    return "" if found is None else found.name, sorted(os.listdir(folder)) if folder.exists() else []


def choose_all(folders: list[tuple[Path, Path]]) -> list[tuple[str, list[str]]]:
    """Call `choose` for each pair of folders, of which each of two ranks uses its own."""
    return [choose(of_ranks[dist.get_rank()]) for of_ranks in folders]


def test_the_newest_intact_checkpoint_is_chosen(copied: Path, tmp_path: Path) -> None:
    shard = max((copied / "step-3").glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:-1])
    (copied / "step-4.tmp").mkdir()
    (copied / "best").symlink_to("step-3")
    downloaded = Path(shutil.copytree(copied / "step-2", tmp_path / "downloaded/step-2")).parent
    (tmp_path / "host 1").mkdir()
    of_ranks = [(copied, copied), (downloaded, downloaded), (downloaded, tmp_path / "host 1")]
    (chosen, there), (found, of_store), (unseen, unchanged) = run_ranks(choose_all, 2, of_ranks)[0]
    assert chosen == "step-2" and os.readlink(copied / "latest") == "step-2"
    assert there == ["latest", "step-1", "step-2", "step-3.damaged-1", "step-4.tmp"]
    assert found == "step-2" and of_store == unchanged == ["latest", "step-2"]
    assert f"rank 1 does not see {downloaded}/step-2, but rank 0 does" in unseen
    assert run_ranks(choose, 1, tmp_path / "nowhere") == [("", [])]


def test_only_copies_with_the_name_of_another_step_are_damaged(copied: Path) -> None:
    """The second copy has a manifest with the step of its name and a correct checksum."""
    for step in (50, 60):
        shutil.copytree(copied / "step-1", copied / f"step-{step}")
    (copied / "step-60").rename(copied / "copy")
    write_manifest(copied / "copy", replace(read_manifest(copied / "copy"), step=60))
    (copied / "copy").rename(copied / "step-60")
    refusal = "checkpoint.load: cannot be loaded as a checkpoint: manifest.json is of step "
    assert (
        run_ranks(attempt, 1, copied / "step-50", EVERYTHING)[0][0]
        == f"{refusal}1, but the folder has the name of another step; name another checkpoint"
    )
    assert (
        run_ranks(attempt, 2, copied / "step-60", EVERYTHING)[1][0]
        == f"{refusal}60, but the tensors are of step 1; name another checkpoint"
    )
    there = ["latest", "step-1", "step-2", "step-3", "step-50.damaged-1", "step-60.damaged-1"]
    assert run_ranks(choose, 2, copied) == [("step-3", there)] * 2


def test_a_run_does_not_start_anew_if_all_checkpoints_are_damaged(copied: Path) -> None:
    for step in (1, 2, 3):
        (copied / f"step-{step}" / ".metadata").unlink()
    for message, there in run_ranks(choose, 2, copied):
        assert "are damaged (step-3, step-2, step-1)" in message and 'checkpoint.load = "none"' in message
        assert there == ["latest", "step-1", "step-2", "step-3"]


def attempt(path: Path, selection: Selection, width: int = 7) -> tuple[str, dict[str, Tensor], int]:
    """Load into a state of step 0. Return the refusal or an empty string, the tensors, and the step."""
    own = trained(0, width=width)
    try:
        load_state(find_checkpoint(path, ("checkpoint", "load")), own.state, selection)
    except UserError as error:
        return str(error), own.everything(), own.progress.step
    return "", own.everything(), own.progress.step


def test_another_model_is_refused_parameter_by_parameter(checkpoints: tuple[Path, dict[str, Tensor]]) -> None:
    (result,) = run_ranks(attempt, 1, checkpoints[0] / "step-3", EVERYTHING, 6)
    assert "is of another model:" in result[0]
    assert "3 tensors of another shape: 0.0.weight is (6, 5), and (7, 5) in the checkpoint" in result[0]
    (result,) = run_ranks(attempt_with_other_names, 1, checkpoints[0])
    assert "2 tensors missing in the checkpoint: 1.new.weight, 1.new.bias" in result
    assert "2 tensors only in the checkpoint: 1.weight, 1.bias" in result


def own_statistics_after_a_load(folder: Path) -> list[float]:
    """Save the statistics of a BatchNorm that only rank 0 has, and load them after a change. Return the means."""
    own = trained(1)
    norms = nn.ModuleList([nn.BatchNorm1d(2)] if dist.get_rank() == 0 else [])
    statistics = own.state.local_statistics = RunningStatistics(norms)
    means = [norm.running_mean for norm in norms]
    for mean in means:
        mean.fill_(3.0)
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    statistics.pool(alone, temporarily=True)
    manager = manager_of(own, folder)
    manager.save()
    manager.finish()
    manager.close()
    for mean in means:
        mean.zero_()
    load_state(folder / "step-1", own.state, EVERYTHING)
    return [value for mean in means for value in mean.tolist()]


def test_a_rank_without_batchnorm_does_not_keep_others_from_their_statistics(tmp_path: Path) -> None:
    assert run_ranks(own_statistics_after_a_load, 2, tmp_path / "checkpoints") == [[3.0, 3.0], []]


def read_parts(folder: Path, size: tuple[int, ...]) -> tuple[str, Tensor]:
    """Read the rows 2 to 5 and the columns 1 to 4 of a tensor that two ranks have written."""
    part = Shard(torch.zeros(4, 4), (2, 1), size)
    try:
        _read(folder, read_index(folder), {"model": {"0.0.weight": part}})
    except DamagedCheckpointError as error:
        return str(error), part.local
    return "", part.local


def test_any_part_of_a_tensor_is_read(checkpoints: tuple[Path, dict[str, Tensor]]) -> None:
    folder = checkpoints[0] / "step-3"
    assert [chunk.sizes for chunk in read_index(folder)["model.0.0.weight"].chunks] == [(4, 5), (3, 5)]
    for problem, part in run_ranks(read_parts, 2, folder, (7, 5)):
        assert not problem
        assert torch.equal(part, dict(read_weights(folder))["0.0.weight"][2:6, 1:])


def test_a_part_of_a_tensor_of_another_shape_is_refused(checkpoints: tuple[Path, dict[str, Tensor]]) -> None:
    for problem, _ in run_ranks(read_parts, 2, checkpoints[0] / "step-3", (6, 5)):
        assert problem == "ValueError: model.0.0.weight has the shape (6, 5) here, but (7, 5) in the checkpoint"


def reload_uneven_shards(folder: Path) -> bool:
    """Write and read a matrix of 7 rows, which tensor parallelism and FSDP2 divide unevenly. Return True if this rank
    gets its rows again."""
    mesh = init_device_mesh("cpu", (3, 2), mesh_dim_names=("fsdp", "tensor"))
    layer = nn.Linear(4, 7, bias=False)
    layer.weight = nn.Parameter(distribute_tensor(torch.arange(1.0, 29).view(7, 4), mesh["tensor"], [Sharded(0)]))
    fully_shard(layer, mesh=mesh["fsdp"])
    state = {"model": {"weight": layer.weight.detach()}}
    local = local_tensor(state["model"]["weight"])
    before = local.clone()
    manifest = Manifest(step=1, base=None, versions={}, validation_loss=None, files={}, **vars(ORIGIN))
    write_checkpoint(WriteRequest(folder, manifest, Retention(0, 0, 0)), shards_of(state), None)
    local.zero_()
    _read(folder / "step-1", read_index(folder / "step-1"), state)
    return torch.equal(local, before)


def test_uneven_shards_of_two_axes_are_read(tmp_path: Path) -> None:
    assert all(run_ranks(reload_uneven_shards, 6, tmp_path))


def attempt_with_other_names(folder: Path) -> str:
    """Load into a model in which a module has another name."""
    own = trained(0)
    model = own.model
    model[1] = torch.nn.ModuleDict({"new": torch.nn.Linear(3, 3)})  # type: ignore[operator]
    with pytest.raises(UserError) as caught:
        load_state(folder / "step-3", own.state, EVERYTHING)
    return str(caught.value)


def test_excluded_parts_keep_their_initial_state(checkpoints: tuple[Path, dict[str, Tensor]]) -> None:
    folder, state = checkpoints
    ((_, fresh, _),) = run_ranks(attempt, 1, folder, Selection(("**", "step")))
    assert not any("/" in name for name in fresh)
    ((problem, tensors, step),) = run_ranks(attempt, 2, folder.parent, Selection(("0.0.*", "step")))[:1]
    assert not problem and step == 0
    excluded = {name for name in state if name.startswith("0.0.")}
    assert_equal({name: tensors[name] for name in state if name not in excluded}, without(state, excluded))
    assert not torch.equal(tensors["0.0.weight"], state["0.0.weight"]) and "0.0.weight/exp_avg" not in tensors
    ((_, weights, step),) = run_ranks(attempt, 1, folder, Selection((), only_weights=True))
    assert step == 0
    assert_equal(weights, {name: tensor for name, tensor in state.items() if "/" not in name})
    ((problem, _, _),) = run_ranks(attempt, 1, folder, Selection(("optimiser",)))
    assert 'exclude_from_loading: "optimiser" matches no parameter' in problem


def without(state: dict[str, Tensor], names: set[str]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in state.items() if name not in names}


def test_a_path_must_hold_a_checkpoint(tmp_path: Path, copied: Path) -> None:
    assert "there is no such folder" in run_ranks(attempt, 2, tmp_path / "nowhere", EVERYTHING)[1][0]
    (tmp_path / "empty").mkdir()
    assert "cannot be loaded as a checkpoint" in run_ranks(attempt, 1, tmp_path / "empty", EVERYTHING)[0][0]
    # The link may change while the ranks load, so they load the folder to which it led. Hosts may have other mounts.
    (tmp_path / "mount").symlink_to(copied)
    path = tmp_path / "mount"
    (tmp_path / "link").symlink_to(path / "latest")
    assert run_ranks(find_checkpoint, 2, tmp_path / "link", ("checkpoint", "load")) == [path / "step-3"] * 2


def test_random_states_are_plain_tensors() -> None:
    state = run_ranks(random_state, 1)[0]
    assert all(isinstance(value, Tensor) for value in state.values())


def random_state() -> dict[str, Any]:
    """Return the random state of this rank."""
    return RandomState(torch.device("cpu"), 0, 0).state_dict()
