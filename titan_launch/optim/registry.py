"""Construction of the optimizer: PyTorch's AdamW, or `MixedOptimizer` for other algorithms, for mixed dtypes, and for
an optimizer that is sharded over replicas."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import chain
from pkgutil import resolve_name
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from titan_launch.config.optimizers import ALGORITHMS, PyTorchUpdate, alike, names_in_8_bits, shape_of_scales
from titan_launch.config.sections.training import OptimizerConfig
from titan_launch.distributed.dtensor import Shard
from titan_launch.optim.eight_bit import initial_codes
from titan_launch.optim.groups import Group, group_parameters
from titan_launch.optim.replica_shards import ReplicaShards
from titan_launch.optim.shards import LocalShard, ShardGroup, applied_or_skipped, mask_gradients, shard_of
from titan_launch.plan.mup import UNSCALED, WidthScales
from titan_launch.plan.param_groups import is_mixed


class MixedOptimizer(Optimizer):
    """An optimizer in which each group has its own algorithm.

    If `is_mixed` is True (see `plan.param_groups.is_mixed`), functions of this package update all groups. Otherwise
    PyTorch's functions update the groups whose algorithm PyTorch has (`Algorithm.pytorch`), and functions of this
    package update the other groups.

    The state of a parameter is `step`, the tensors that the algorithm names (with 8 bits: their codes and scales), and
    optionally `master`. All except `step` are DTensors like the parameter. With `replicas` they are plain tensors: the
    state of this replica's chunk. As in PyTorch's fused optimizers, a step is skipped if `found_inf` is not 0.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        config: OptimizerConfig,
        *,
        is_mixed: bool,
        seed: int,
        replicas: ReplicaShards | None = None,
    ):
        """`seed`: seed of stochastic rounding. `replicas`: the replicas over which the optimizer is sharded, or None.
        With replicas, `step` updates this rank's chunks only: call `replicas.gather_parameters` after `step`."""
        self.replicas = replicas
        self._config = config
        self._is_mixed = is_mixed
        self._seed = seed if config.rounding == "stochastic" else None
        self._names = {p: name for group in groups for name, p in group.parameters.items()}
        self._histories: dict[Tensor, float] = {}
        """A number for each parameter: equal for parameters of a group that had gradients in the same steps."""

        super().__init__([as_param_group(group) for group in groups], {"lr": config.lr})

    @property
    def reads_found_inf(self) -> bool:
        """True if `step` reads `found_inf` on the device and skips the update itself, without the host."""
        is_own = all(self._pytorchs(group["algorithm"]) is None for group in self.param_groups)
        return is_own or self._config.implementation == "fused"

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient. Collective if an algorithm exchanges matrices."""
        assert closure is None, "closures are not supported"
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        by_algorithm: dict[str, list[ShardGroup]] = {}
        for group in self.param_groups:
            for shards in self._shards_by_step(group):
                shard_group = ShardGroup(shards, group["lr"], group["weight_decay"])
                by_algorithm.setdefault(group["algorithm"], []).append(shard_group)
        for name, groups in by_algorithm.items():
            pytorch = self._pytorchs(name)
            if pytorch is not None:
                update = resolve_name(pytorch.update)
                for shard_group in groups:
                    update(shard_group, self._config, found_inf)
            else:
                shards = [shard for shard_group in groups for shard in shard_group.shards]
                # With CPU offload the shards are on the host, so the host waits for the device.
                found_there = None if found_inf is None else found_inf.to(shards[0].parameter.device)
                mask_gradients(shards, found_there)
                applied = applied_or_skipped(found_there, shards[0].parameter.device)
                resolve_name(ALGORITHMS[name].update)(groups, self._config, applied)

    def state_dict(self) -> dict[str, Any]:
        """Return the state. If the optimizer is sharded over replicas, all state tensors except `step` are `Shard`s."""
        result = super().state_dict()
        if self.replicas is not None:
            parameters = list(chain.from_iterable(group["params"] for group in self.param_groups))
            result["state"] = {
                index: {key: self._placed(parameters[index], key, value) for key, value in state.items()}
                for index, state in result["state"].items()
            }
        return result

    def _placed(self, parameter: Tensor, key: str, value: Tensor) -> Tensor | Shard:
        if self.replicas is None or key == "step":
            return value
        is_scales = key.endswith(names_in_8_bits("")[1])
        size = shape_of_scales(parameter.shape) if is_scales else tuple(parameter.shape)
        return self.replicas.shard_of(parameter, value, size)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, and keep its dtypes. (PyTorch's method would cast the state to the dtypes of the
        parameters.)"""
        super().load_state_dict({**state_dict, "state": {}})
        given, own = (
            list(chain.from_iterable(group["params"] for group in groups))
            for groups in (state_dict["param_groups"], self.param_groups)
        )
        for key, parameter in zip(given, own, strict=True):
            if key in state_dict["state"]:
                loaded = state_dict["state"][key].items()
                state = {name: value.local if isinstance(value, Shard) else value for name, value in loaded}
                self.state[parameter] = state
                self._histories[parameter] = float(state["step"])

    def _shards_by_step(self, group: Mapping[str, Any]) -> list[list[LocalShard]]:
        """Return the shards of a group in lists with equal step counts.

        There is one list if all parameters have gradients in every step. The counts are on the device, because only the
        device knows which steps are skipped, and the host does not wait for them. A skipped step is skipped for all
        parameters. So the counts of two parameters are equal if both had gradients in the same steps (`_histories`).
        """
        numbers: dict[tuple[float | None, bool], int] = {}
        for parameter in group["params"]:
            before = self._histories[parameter] if self.state.get(parameter) else None
            number = numbers.setdefault((before, parameter.grad is not None), len(numbers))
            self._histories[parameter] = number
        return alike(self._shards(group), lambda shard: self._histories[shard.full])

    def _shards(self, group: Mapping[str, Any]) -> Iterator[LocalShard]:
        """Yield the shards of the parameters with a gradient. Create the state of a parameter that has none yet."""
        for parameter in group["params"]:
            if parameter.grad is not None:
                state = self.state[parameter]
                if not state:
                    state.update(self._initial_state(parameter, group["algorithm"]))
                yield shard_of(self._names[parameter], parameter, state, self._seed, self.replicas)

    def _initial_state(self, parameter: nn.Parameter, algorithm: str) -> dict[str, Tensor]:
        config, pytorch = self._config, self._pytorchs(algorithm)
        on_host = pytorch is not None and pytorch.counts_on_host and config.implementation != "fused"
        state = {"step": torch.zeros((), device="cpu" if on_host else parameter.device)}
        own = parameter.detach() if self.replicas is None else self.replicas.of(parameter, parameter)
        for name in ALGORITHMS[algorithm].state(config):
            if config.state_dtype == "int8" and own.dim() > 1:
                state |= initial_codes(own, name)
            else:
                dtype = "float32" if config.state_dtype == "int8" else config.state_dtype
                state[name] = torch.zeros_like(own, dtype=None if dtype is None else getattr(torch, dtype))
        if config.master_weights and own.dtype == torch.bfloat16:
            state["master"] = own.float()
        return state

    def _pytorchs(self, algorithm: str) -> PyTorchUpdate | None:
        """Return PyTorch's implementation of an algorithm, or None if this package updates the parameters."""
        return None if self._is_mixed else ALGORITHMS[algorithm].pytorch


def as_param_group(group: Group) -> dict[str, Any]:
    """Return a group in the format of PyTorch's optimizers."""
    return {"name": group.name, "params": list(group.parameters.values()), **group.settings._asdict()}


def build_optimizer(
    model: nn.Module,
    config: OptimizerConfig,
    head: Collection[str] = (),
    seed: int = 0,
    replicas: ReplicaShards | None = None,
    scales: WidthScales = UNSCALED,
) -> Optimizer:
    """Build the optimizer of the trainable parameters of a model or of a pipeline stage. The parameters may be sharded,
    and must be on the device.

    `head`: paths of the modules that run last; by default, Muon does not update their matrices. `seed`: seed of
    stochastic rounding. `replicas`: the replicas over which the optimizer is sharded, or None. `scales`: as in
    `group_parameters`. Call `plan.job.check_plan` first, which finds settings that do not fit the model. Call
    `set_lr` before each step.
    """
    groups = group_parameters(model, config, head, scales)
    in_pytorch = [group for group in groups if ALGORITHMS[group.settings.algorithm].pytorch is not None]
    parameters = (parameter for group in in_pytorch for parameter in group.parameters.values())
    mixed = is_mixed(config, (str(parameter.dtype).removeprefix("torch.") for parameter in parameters))
    if mixed or replicas is not None or any(group.settings.algorithm != "AdamW" for group in groups):
        return MixedOptimizer(groups, config, is_mixed=mixed, seed=seed, replicas=replicas)
    arguments = {"fused": {"fused": True}, "foreach": {"foreach": True}, "for-loop": {"foreach": False}}
    return torch.optim.AdamW(
        [as_param_group(group) for group in groups],
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        **arguments[config.implementation],
    )


def replicas_of(optimizer: Optimizer) -> ReplicaShards | None:
    """Return the replicas over which an optimizer is sharded; None if it is not sharded over replicas."""
    return optimizer.replicas if isinstance(optimizer, MixedOptimizer) else None


def step_unless(optimizer: Optimizer, nonfinite: Tensor) -> None:
    """Call `optimizer.step()`, or skip the step if `nonfinite` (a scalar on the device, 0 or 1) is 1.

    A skipped step changes neither parameters nor optimizer state, not even step counts. `MixedOptimizer` and PyTorch's
    fused implementation read `nonfinite` on the device, from the attributes that `torch.amp.GradScaler` sets on an
    optimizer. The attributes exist for this step only. With other implementations the host waits for the device.
    """
    if isinstance(optimizer, MixedOptimizer):
        decides_on_device = optimizer.reads_found_inf
    else:
        decides_on_device = all(group.get("fused") for group in optimizer.param_groups)
    if not decides_on_device:
        if not nonfinite.item():
            optimizer.step()
        return
    flag = (nonfinite != 0).to(torch.float32)  # the kernels compare with exactly 1.0
    device = optimizer.param_groups[0]["params"][0].device  # the host, with CPU offload
    vars(optimizer).update(grad_scale=None, found_inf=flag.to(device))
    try:
        optimizer.step()
    finally:
        del vars(optimizer)["grad_scale"], vars(optimizer)["found_inf"]
