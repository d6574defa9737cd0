"""FSDP2: wrapping of the planned units, casts, gradient accumulation, unfreezing, and the reset of a wrapped model
after an abandoned step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.distributed.tensor import Shard

from titan_launch.config.sections.training import GradientAccumulationConfig
from titan_launch.distributed.dtensor import local_tensor
from titan_launch.distributed.mesh import Mesh
from titan_launch.distributed.torch_private import (
    apply_to_tensors,
    discard_all_reduces,
    drop_unsharded_gradients,
    end_forward,
    reset_iteration,
    roots,
    update_trained_parameters,
)
from titan_launch.models.decoder.mixture_of_experts import Experts
from titan_launch.models.lora import StackedLoRA
from titan_launch.optim.replica_shards import ReplicaShards
from titan_launch.plan.types import ModelPlan, Policy, sharded_dim
from titan_launch.plan.units.order import plan_backward_prefetch, plan_forward_prefetch
from titan_launch.precision.policy import mixed_precision_policy, torch_dtype


def apply_fsdp(model: nn.Module, plan: ModelPlan, mesh: Mesh, offloads: bool = False) -> None:
    """Wrap a model in place: one `fully_shard` call per unit, in the planned order (inner first, root last).

    `fully_shard` always gets a mesh: its default mesh would use the host's accelerator even with `job.device = "cpu"`.
    `offloads`: sharded parameters and gradients stay in host memory, which is pinned if the mesh is on GPUs. The
    parameters of some frozen units stay plain tensors (`Layout.is_ignored`). FSDP2 then only casts the inputs and
    outputs of these units.
    """
    offloading = CPUOffloadPolicy(pin_memory=mesh.ranks.device_type == "cuda") if offloads else OffloadPolicy()
    ignored = {
        parameter
        for module in plan.inventory.modules
        if mesh.layout.is_ignored(plan.unit_of[module.path], offloads)
        for parameter in model.get_submodule(module.path).parameters(recurse=False)
    }
    in_place = {  # the compute dtype of each parameter whose precision rule is applied in place
        parameter: torch_dtype(plan.unit_of[module.path].compute_dtype)
        for module in plan.inventory.modules
        if plan.unit_of[module.path] is not plan.sharded_by[module.path]
        for parameter in model.get_submodule(module.path).parameters(recurse=False)
    }
    for unit in plan.units:
        ranks = mesh.shards_of(unit)
        modules = [model.get_submodule(path) for path in unit.modules]
        is_shared = len(modules) > 1
        policy = replace(unit.policy, cast_forward_inputs=plan.casts_inputs(unit))
        if is_shared or plan.returns_loss(unit.modules[0]):
            policy = replace(policy, output_dtype=None)
        fully_shard(
            modules if is_shared else modules[0],
            mesh=ranks,
            mp_policy=mixed_precision_policy(policy, in_place),
            reshard_after_forward=unit.reshard_after_forward,
            offload_policy=offloading,
            shard_placement_fn=_placement_of_experts(modules, mesh.layout.shards_of(unit)),
            ignored_params=ignored or None,
        )
        if ranks.size() > 1:
            _sum_gradients(_fsdp_module(model, unit.modules[0]))
        if not unit.unshard_in_backward:
            _fsdp_module(model, unit.modules[0]).set_unshard_in_backward(False)
        # `left`: the casts that hooks of this package make in place of FSDP2. If one of several modules of a unit does
        # not run, FSDP2 casts the outputs of the wrong module: of the model, or of the unit whose forward activation
        # checkpointing repeats.
        left = replace(
            unit.policy,
            cast_forward_inputs=unit.policy.cast_forward_inputs and not policy.cast_forward_inputs,
            output_dtype=unit.policy.output_dtype if is_shared else None,
        )
        for path in unit.modules:
            if plan.unit_of[path] is unit:
                _cast_at_boundary(model, plan, path, left)
    for rule in plan.in_place:
        for path in rule.modules:
            _cast_at_boundary(model, plan, path, rule.policy)
    for path, ahead in plan_backward_prefetch(plan).items():
        _fsdp_module(model, path).set_modules_to_backward_prefetch([_fsdp_module(model, name) for name in ahead])
    for path, ahead in plan_forward_prefetch(plan).items():
        _fsdp_module(model, path).set_modules_to_forward_prefetch([_fsdp_module(model, name) for name in ahead])


def _cast_at_boundary(model: nn.Module, plan: ModelPlan, path: str, policy: Policy) -> None:
    if plan.returns_loss(path):
        policy = replace(policy, output_dtype=None)
    cast_at_boundaries(model.get_submodule(path), policy)


def cast_at_boundaries(module: nn.Module, policy: Policy) -> None:
    """Add hooks that cast the floating inputs and outputs of a module to the dtypes of `policy`. A dtype of None means
    no cast."""
    if policy.input_dtype is not None:
        taken = torch_dtype(policy.input_dtype)
        module.register_forward_pre_hook(
            lambda _, args, kwargs: (_cast_floating(args, taken), _cast_floating(kwargs, taken)), with_kwargs=True
        )
    if policy.output_dtype is not None:
        returned = torch_dtype(policy.output_dtype)
        module.register_forward_hook(lambda _, args, output: _cast_floating(output, returned))


def _cast_floating(value: Any, dtype: torch.dtype) -> Any:
    """Return a value with its floating tensors cast to `dtype`, in the collections that FSDP2 traverses."""

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return apply_to_tensors(cast, value)


def _fsdp_module(model: nn.Module, path: str) -> FSDPModule:
    module = model.get_submodule(path)
    assert isinstance(module, FSDPModule), f"{path} is not an FSDP2 unit"
    return module


def _placement_of_experts(modules: Sequence[nn.Module], shards: int) -> Callable[[nn.Parameter], Shard | None] | None:
    """Return a function that returns the `Shard` by which FSDP2 divides a parameter of experts, and None for other
    parameters (FSDP2 then shards along dim 0). For modules without experts, return None instead of a function."""
    inner = (module for outer in modules for module in outer.modules() if isinstance(module, (Experts, StackedLoRA)))
    stacked = {parameter for module in inner for parameter in module.parameters()}
    if not stacked:
        return None
    return lambda p: Shard(sharded_dim(local_tensor(p).shape, shards, is_stacked=True)) if p in stacked else None


def _sum_gradients(unit: FSDPModule) -> None:
    """Let FSDP2 sum a unit's gradients instead of averaging them: the loss is already divided by the number of
    the step's items on all ranks.

    Plain SUM is forced, because FSDP2 implements the divide factor 1 by PREMUL_SUM, which gloo does not have. The
    setters do not recurse, so call this function for every unit; FSDP2 would silently average the gradients of a missed
    unit. Do not call this function for a single rank: FSDP2 would copy and divide all gradients without need.
    """
    unit.set_gradient_divide_factor(1.0)
    unit.set_force_sum_reduction_for_comms(True)


class Accumulation:
    """The choice of FSDP2's collectives for each microbatch, by `[gradient_accumulation]`. The training step calls
    `begin_microbatch` before each microbatch (in a pipeline, before each backward). If the section keeps parameters
    unsharded until the step's last backward (as in ZeRO-2), the plan does not reshard FSDP2 units after forward."""

    def __init__(self, config: GradientAccumulationConfig, replicas: ReplicaShards | None = None):
        """`replicas`: the exchange of gradients between the replicas, if the optimizer is sharded over them; else None.
        The exchange begins during the step's last backward."""
        self._mode, self._keeps_parameters = config.row, bool(config.keep_params_unsharded)
        self._replicas = replicas

    def begin_microbatch(self, model: nn.Module, is_last: bool) -> None:
        """Set which collectives the next backward runs. `is_last`: True for the step's last microbatch."""
        assert isinstance(model, FSDPModule), "parallel.apply must wrap the model before training"
        if self._mode.defers:
            model.set_requires_gradient_sync(is_last or self._mode.reduce_scatters_each)
            model.set_requires_all_reduce(is_last or self._mode.all_reduces_each)
        if self._keeps_parameters:
            model.set_reshard_after_backward(is_last)
        if self._replicas is not None:
            self._replicas.begin_microbatch(is_last)


class Unfreezing:
    """The parameters of a wrapped model that are trained only after a number of steps (`training.unfreeze`).

    Until the first call of `apply`, these parameters require gradients. So the optimizer and checkpoints have all
    parameters that the run will ever train.
    """

    def __init__(self, model: nn.Module, plan: ModelPlan):
        steps = {
            name: info.trained_from
            for name, info in plan.inventory.parameters.items()
            if info.requires_grad and info.trained_from
        }
        self._model = model
        self._parameters = [(p, steps[name]) for name, p in model.named_parameters() if name in steps]

    @property
    def is_finished(self) -> bool:
        """True if all parameters that the run will ever train are trained now."""
        return all(parameter.requires_grad for parameter, _ in self._parameters)

    def apply(self, num_steps: int) -> int:
        """Freeze or unfreeze parameters between two steps. Return the number of parameters that were unfrozen.

        `num_steps`: number of steps that the model has trained. If the run has returned to an earlier checkpoint,
        parameters may be frozen again. They keep the optimizer state that the checkpoint has.
        """
        changed = [(p, num_steps >= step) for p, step in self._parameters if p.requires_grad != (num_steps >= step)]
        for parameter, is_trained in changed:
            parameter.requires_grad_(is_trained)
        if changed:
            update_trained_parameters(self._model)
        return sum(is_trained for _, is_trained in changed)


def discard_pending(model: nn.Module) -> None:
    """Reset a wrapped model to its state between two steps, after an exception at any point of a step.

    Unsharded parameters are freed. All gradients are dropped: sharded gradients, unsharded gradients that wait for the
    last microbatch, and reduced gradients that wait for the all-reduce between replicas. Gradient communication, and
    resharding after backward, are enabled again. Neither `zero_grad` nor, before torch 2.15, FSDP2's `reset_iter_state`
    drops unsharded gradients, so the next step would add them to its own.

    The function is not collective and does not wait for other ranks, but every rank must abandon the same step.
    """
    reset_iterations(model)
    discard_all_reduces(model)
    drop_unsharded_gradients(model)
    for sharded in model.parameters():
        sharded.grad = None
    for root in roots(model):
        assert isinstance(root, FSDPModule), "parallel.apply must wrap the model before training"
        root.set_requires_gradient_sync(True)
        root.set_reshard_after_backward(True)


def reset_iterations(model: nn.Module) -> None:
    """Free the unsharded parameters of a wrapped model, and reset FSDP2's record of forward and backward.

    Call this function only after an exception: it discards gradients, in part or (from torch 2.15 on) all of them.
    """
    for root in roots(model):
        reset_iteration(root)


@contextmanager
def without_backward(model: nn.Module) -> Iterator[None]:
    """Allow forwards of a wrapped model without a backward in the `with` block, also between microbatches of a step.

    At the end of the block, unsharded parameters are freed, and FSDP2's record of these forwards is deleted. Otherwise
    parameters would stay unsharded, and the next backward would prefetch units in the order of these forwards.
    Gradients do not change, unless the block raises an exception. In that case, `reset_iterations` is called.
    """
    try:
        yield
    except BaseException:
        reset_iterations(model)
        raise
    for root in roots(model):
        end_forward(root)


@contextmanager
def in_evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put a wrapped model into evaluation mode in the `with` block, for forwards without a backward
    (`without_backward`). At the end, each module gets its former mode back."""
    # Modes are restored module by module, because a frozen BatchNorm is always in evaluation mode.
    was_training = {module: module.training for root in roots(model) for module in root.modules()}
    for root in roots(model):
        root.eval()
    try:
        with without_backward(model):
            yield
    finally:
        for module, flag in was_training.items():
            module.training = flag
