"""The private names of PyTorch that the launcher uses exist in the installed release. Only one module uses private
state."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_common, _fsdp_param, _fsdp_param_group
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator

from tests.distributed import run_ranks
from tests.tensors import assert_equal
from tests.train.jobs import TINY_ARGS, read_metrics, record, run_job, sharded_model, tiny_job
from titan_launch.config.job import JobConfig
from titan_launch.core import torch_release
from titan_launch.core.patches import replaced
from titan_launch.distributed import torch_private

ROOT = Path(torch_private.__file__).parents[1]
RELEASE = torch_release.torch_release()

NAMES: dict[str, set[str]] = {
    "FSDPModule": {"_get_fsdp_state"},
    "FSDPState": {
        *("_fsdp_param_group", "_comm_ctx", "_state_ctx", "_modules", "_pre_forward", "_post_forward", "_pre_backward"),
        "_root_post_backward_final_callback",
    },
    "FSDPCommContext": {"post_forward_order", "all_gather_stream"},
    "FSDPParamGroup": {
        *("fsdp_params", "mesh_info", "gradient_divide_factor", "unshard", "wait_for_unshard", "post_backward"),
        *("_all_gather_comm", "_reduce_scatter_comm", "_all_reduce_hook", "_is_hsdp", "_post_forward_indices"),
        *("_init_mp_dtypes", "_all_gather_result", "pre_forward", "post_forward"),
    },
    "FSDPParam": {
        *("sharded_param", "all_gather_outputs", "to_sharded", "init_unsharded_param", "all_gather_inputs"),
        *("_unsharded_param", "_sharded_param_data", "param_dtype", "_orig_size", "_get_grad_inner_tensor"),
    },
    "HSDPMeshInfo": {"replicate_process_group"},
    "modules": {"foreach_reduce", "DefaultAllGather", "DefaultReduceScatter", "TrainingState"},
    "distributed": {"_world", "_get_default_store", "_dump_fr_trace", "_dump_fr_trace_json"},
    "DTensor": {"_op_dispatcher"},
    "torch._C": {"_clear_DTensor_sharding_propagator_cache", "_SetExcludeDispatchKeyGuard"},
    "torch.cuda.memory": {"_record_memory_history", "_dump_snapshot"},
    "torch.distributed": {"_apply_to_tensors"},
    "torch.library": {"_scoped_library"},
    "ProcessGroup": {"_get_backend"},
    "ShardingPropagator": {"_propagate_tensor_meta_non_cached"},
    "ring attention": {
        *("_templated_ring_attention", "_templated_ring_attention_backward", "_cp_options", "_RotateMethod"),
        "custom_ops",
    },
}
"""Private names that `torch_private`, and the callers of its `ring_attention_module`, use on every release, by
owner."""

if torch_release.FINALIZES_BACKWARD:
    NAMES["FSDPState"] |= {"finalize_backward"}
if not torch_release.ACCUMULATES_IN_GRAD:
    NAMES["FSDPParamGroup"] |= {"_partial_reduce_output"}
    NAMES["FSDPParam"] |= {"unsharded_accumulated_grad", "to_accumulated_grad_if_needed"}
    NAMES["FSDPParam"] |= {"accumulate_unsharded_grad_if_needed"}
if RELEASE < (2, 14):
    NAMES["distributed"] |= {"_set_pg_timeout"}
if RELEASE < (2, 13):  # `_reset_iteration_state`; the attributes that it only sets need not exist
    NAMES["FSDPState"] |= {"_modules_to_run_forward", "_training_state"}
    NAMES["FSDPStateContext"] = {"iter_forward_root", "post_backward_final_callback_queued"}
    NAMES["FSDPCommContext"] |= {"device_handle", "all_gather_copy_in_stream", "reduce_scatter_stream"}
    NAMES["FSDPCommContext"] |= {"all_reduce_stream", "all_gather_state"}
    NAMES["FSDPParamGroup"] |= {"_to_sharded", "_training_state", "_all_reduce_state"}
    NAMES["FSDPParamGroup"] |= {"_post_reduce_event", "_reshard_after_forward_event"}

if dist.is_nccl_available():
    NAMES["distributed"] |= {"_dump_nccl_trace", "_dump_nccl_trace_json"}

ONLY_OLDER = {
    *(
        "_partial_reduce_output",
        "_set_pg_timeout",
        "_reset_iteration_state",
        "_modules_to_run_forward",
        "_training_state",
    ),
    *("_dump_nccl_trace", "_dump_nccl_trace_json"),  # only builds with NCCL have this class
    *("_to_sharded", "_all_reduce_state", "_post_reduce_event", "_reshard_after_forward_event"),
}
"""Names in the source that only releases older than the installed one need."""


def missing_names() -> list[str]:
    """Return the private names that a model of two replicas lacks after a step."""
    config = {"model": {"args": TINY_ARGS}, "parallelism": {"data_parallel_replicate_degree": 2}}
    model: Any = sharded_model(JobConfig.model_validate(config), 8)
    model(torch.zeros(1, 8, dtype=torch.int64)).sum().backward()
    state = model._get_fsdp_state()
    group = model.layers[0]._get_fsdp_state()._fsdp_param_group
    owners = {
        "FSDPModule": (FSDPModule,),
        "FSDPState": (state,),
        "FSDPStateContext": (state._state_ctx,),
        "FSDPCommContext": (state._comm_ctx,),
        "FSDPParamGroup": (group,),
        "FSDPParam": (group.fsdp_params[0],),
        "HSDPMeshInfo": (group.mesh_info,),
        "modules": (_fsdp_param_group, _fsdp_collectives, _fsdp_param, _fsdp_common),
        "distributed": (distributed_c10d, torch._C._distributed_c10d),
        "DTensor": (DTensor,),
        "torch._C": (torch._C,),
        "torch.cuda.memory": (torch.cuda.memory,),
        "torch.library": (torch.library,),
        "ProcessGroup": (dist.ProcessGroup,),
        "torch.distributed": (torch.distributed.utils,),
        "ShardingPropagator": (ShardingPropagator,),
        "ring attention": (torch_private.ring_attention_module(),),
    }
    return [
        f"{owner}.{name}"
        for owner, names in NAMES.items()
        for name in sorted(names)
        if not any(hasattr(one, name) for one in owners[owner])
    ]


def test_the_installed_release_has_every_private_name() -> None:
    assert run_ranks(missing_names, 2) == [[], []]


def attributes(tree: ast.AST) -> Iterator[str]:
    """Return names after a dot, and names in strings, which `getattr` and `replaced` take."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
            yield node.value


def test_every_private_name_in_the_source_is_listed() -> None:
    tree = ast.parse((ROOT / "distributed" / "torch_private.py").read_text())
    used = {
        name
        for name in attributes(tree)
        if name.startswith("_") and name not in ("__call__", "_grouped_mm")  # the latter is an operator
    }
    own = {"_kind", "_on_collective", "_inner", "_stream", "_titan_launch_roots"}
    modules = {"_fsdp_param", "_fsdp_collectives", "_C", "_distributed_c10d"}
    assert used - own - modules - ONLY_OLDER <= set.union(*NAMES.values())


def test_no_other_module_uses_private_modules_of_torch_distributed() -> None:
    marks = {"_get_fsdp_state", "_fsdp_param_group", "fsdp_params", "_comm_ctx", "_state_ctx", "_unsharded_param"}
    allowed = {"plan/memory/fsdp.py", "metrics/memory.py"}  # get the state as an argument, or mention it
    for path in ROOT.rglob("*.py"):
        if path.name == "torch_private.py":
            continue
        tree = ast.parse(path.read_text())
        nodes = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        private = re.compile(r"torch\.(distributed\b.*\._|_C\._distributed)")
        assert not [node.module for node in nodes if private.match(node.module or "")], path
        assert str(path.relative_to(ROOT)) in allowed or not marks & set(attributes(tree)), path


def test_private_modules_are_imported_only_where_they_are_used() -> None:
    """A release that lacks a private module then fails only the jobs that need it."""
    for path in (path for path in ROOT.rglob("*.py") if path.relative_to(ROOT).parts[0] != "trace"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch.distributed"):
                names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
                assert not [name for name in names if name.startswith("_")], (path, names)


def test_ci_runs_the_newest_tested_release() -> None:
    major, minor = torch_release.NEWEST_TESTED
    assert f"torch=={major}.{minor}." in (ROOT.parent / "requirements-newest.txt").read_text()
    assert "requirements-newest.txt" in (ROOT.parent / ".ci" / "run").read_text()


def refuse(*_: Any) -> Any:
    raise RuntimeError("the private state of a unit was touched")


SECTIONS: dict[str, Any] = {
    "precision": {"param_dtype": "bfloat16"},
    "gradient_accumulation": {"mode": "deferred"},
    "parallelism": {"data_parallel_replicate_degree": 2},
    "comm": {"count_traffic": True},
    "validation": {"freq": 2, "data": {"kind": "synthetic", "vocab_size": 61, "num_samples": 8}},
}


def train_on(folder: Path, newest_tested: tuple[int, int]) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Train, and return the log lines. An untested release trains without private state of units."""
    lines: list[str] = []
    log = SimpleNamespace(warning=lambda text, *values: lines.append(text % values))
    with replaced(torch_release, "NEWEST_TESTED", newest_tested), replaced(torch_private, "_log", log):
        torch_private.warn_of_untested_release()
        if torch_release.is_tested_release():
            return run_job(tiny_job(folder, **SECTIONS)), lines
        with replaced(FSDPState, "_fsdp_param_group", property(refuse)):  # PyTorch itself uses another name
            torch_private.reset_iteration(sharded_model(JobConfig.model_validate(tiny_job(folder)), 16))  # not started
            return run_job(tiny_job(folder, **SECTIONS)), lines


def train_on_both(folder: Path) -> tuple[list[str], list[str]]:
    tested, quiet = train_on(folder / "tested", torch_release.NEWEST_TESTED)
    untested, lines = train_on(folder / "untested", (2, 10))
    assert_equal(tested, untested)
    return quiet, lines


@pytest.mark.skipif(RELEASE < (2, 13), reason="a release newer than those tested has FSDPModule.reset_iter_state")
def test_an_untested_release_trains_without_private_state(tmp_path: Path) -> None:
    record(tiny_job(tmp_path, **SECTIONS), 2)
    quiet, (line,) = run_ranks(train_on_both, 2, tmp_path)[0]
    assert quiet == []
    assert line.startswith(f"torch {RELEASE[0]}.{RELEASE[1]} is newer than the newest tested release, 2.")
    tested, untested = (read_metrics(tmp_path / name)[-1] for name in ("tested", "untested"))
    assert untested["train/loss"] == tested["train/loss"]
    assert {"memory/predicted_active_gib", "comm/collectives"} <= tested.keys() - untested.keys()
