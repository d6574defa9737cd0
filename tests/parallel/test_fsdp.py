"""Unsharded parameters of an FSDP2 model between forward and backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.distributed import run_ranks
from tests.tensors import cross_entropy_sum
from tests.train.jobs import TINY_ARGS, sharded_model
from titan_launch.config.job import JobConfig
from titan_launch.distributed.torch_private import parameter_group


class GatherSizes(TorchDispatchMode):
    """A dispatch mode that records the number of elements of each all-gather."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "allgather" in func.__name__:
            self.sizes.append(args[0].numel())
        return func(*args, **(kwargs or {}))


PADDED = (TINY_ARGS["vocab_size"] + 1) * TINY_ARGS["dim"]
"""Elements of the embedding, whose rows are padded for two ranks."""


def gathers_and_is_unsharded(parallelism: dict[str, Any], checkpointing: str) -> tuple[list[int], list[int], bool]:
    """Return the sizes of the embedding's all-gathers in forward and in backward.

    The third value is True if the embedding is unsharded between forward and backward.
    """
    config = JobConfig.model_validate(
        {
            "model": {"args": TINY_ARGS},
            "parallelism": parallelism,
            "activation_checkpoint": {"mode": checkpointing},
        }
    )
    model = sharded_model(config, 8)
    tokens = torch.randint(0, 61, (1, 8))
    with GatherSizes() as forward:
        loss = cross_entropy_sum(model(tokens), tokens)
    held = is_held(model.get_submodule("tok_embeddings"))
    with GatherSizes() as backward:
        loss.backward()
    assert all(p.grad is not None for p in model.parameters())
    return [s for s in forward.sizes if s == PADDED], [s for s in backward.sizes if s == PADDED], held


def is_held(module: torch.nn.Module) -> bool:
    """Return True if a unit's unsharded parameters are in memory."""
    group = parameter_group(module)
    assert group is not None
    unsharded: list[Tensor] = [tensor for p in group.fsdp_params for tensor in p.all_gather_outputs]
    return any(tensor.untyped_storage().size() > 0 for tensor in unsharded)


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_an_embedding_is_all_gathered_once_per_step_and_resharded(checkpointing: str) -> None:
    for choice in ("default", "always"):
        result = run_ranks(gathers_and_is_unsharded, 2, {"fsdp_reshard_after_forward": choice}, checkpointing)[0]
        assert result == ([PADDED], [], False), choice


def test_an_embedding_stays_unsharded_if_every_unit_does() -> None:
    result = run_ranks(gathers_and_is_unsharded, 2, {"fsdp_reshard_after_forward": "never"}, "none")[0]
    assert result == ([PADDED], [], True)


def managed_parameters(sections: dict[str, dict[str, Any]]) -> set[str]:
    """Return the names of the parameters that FSDP2 manages."""
    training = {"trainable": ["layers.1.**"], **sections.get("training", {})}
    job = {"model": {"args": TINY_ARGS}, **sections, "training": training}
    model = sharded_model(JobConfig.model_validate(job), 8)
    return {name for name, parameter in model.named_parameters() if isinstance(parameter, DTensor)}


@pytest.mark.parametrize(
    ("ranks", "sections", "is_ignored"),
    [
        (1, {"precision": {"frozen_storage_dtype": "bfloat16"}}, True),
        (1, {"precision": {"param_dtype": "float32"}}, True),
        (1, {"precision": {"param_dtype": "bfloat16"}}, False),
        (1, {"precision": {"param_dtype": "float32"}, "training": {"enable_cpu_offload": True}}, False),
        (2, {"precision": {"param_dtype": "float32"}, "parallelism": {"data_parallel_replicate_degree": 2}}, True),
        (2, {"precision": {"param_dtype": "float32"}}, False),
    ],
)
def test_frozen_parameters_of_one_shard_have_no_copy_if_they_are_stored_as_computed(
    ranks: int, sections: dict[str, dict[str, Any]], is_ignored: bool
) -> None:
    managed = run_ranks(managed_parameters, ranks, sections)[0]
    assert any(name.startswith("layers.1.") for name in managed)
    assert all(name.startswith("layers.1.") for name in managed) == is_ignored
