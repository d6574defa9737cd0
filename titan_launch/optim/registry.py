"""One optimizer over the shards, for several algorithms (AdamW, Muon, SGD) and dtypes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from titan_launch.config.sections.training import Algorithm, OptimizerConfig
from titan_launch.optim.adamw import update_adamw
from titan_launch.optim.groups import Group, group_parameters
from titan_launch.optim.muon import Matrix, update_muon
from titan_launch.optim.sgd import update_sgd
from titan_launch.optim.shards import LocalShard, count_step, mask_gradients, shard_of, share_kept
from titan_launch.plan.param_groups import is_mixed, moments_of


class MixedOptimizer(Optimizer):
    """Each group has its algorithm. AdamW and SGD are PyTorch's, unless `is_mixed`: then moments, parameters and
    masters have dtypes of their own.

    The state of a parameter: `step`; `exp_avg` and `exp_avg_sq` (AdamW) or `momentum_buffer` (Muon, and SGD with
    momentum); `master` where it has one. All but the step are DTensors like the parameter. (`torch.optim.SGD` makes its
    buffers in the first step, and leaves them uninitialized when that step is skipped. So only its function is used.)
    As in PyTorch's fused optimizers, a step is skipped if `found_inf` is not 0.
    """

    def __init__(self, groups: Sequence[Group], config: OptimizerConfig, *, is_mixed: bool, seed: int):
        """`seed`: of stochastic rounding."""
        self._config = config
        self._is_mixed = is_mixed
        self._seed = seed if config.rounding == "stochastic" else None
        self._names = {p: name for group in groups for name, p in group.parameters.items()}
        self._histories: dict[Tensor, float] = {}
        """A number for each parameter; parameters of a group with equal numbers have equal step counts."""

        super().__init__([as_param_group(group) for group in groups], {"lr": config.lr})

    @property
    def reads_found_inf(self) -> bool:
        """Whether the device decides that a step is skipped."""
        only_muon = all(group["algorithm"] == "Muon" for group in self.param_groups)
        return self._is_mixed or only_muon or self._config.implementation == "fused"

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One step of every parameter that has a gradient. Collective where there are matrices for Muon."""
        assert closure is None, "nothing here evaluates the model"
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        left_out = None if found_inf is None else found_inf != 0
        matrices = []
        for group in self.param_groups:
            if group["algorithm"] == "Muon":
                matrices += [Matrix(shard, group["lr"], group["weight_decay"]) for shard in self._shards(group)]
            elif self._is_mixed:
                self._step_mixed(group, left_out)
            else:
                self._step_plain(group, found_inf)
        if matrices:
            left_out = _on_device(left_out, matrices[0].shard)
            mask_gradients([matrix.shard for matrix in matrices], left_out)
            update_muon(matrices, self._config.muon, share_kept(left_out, matrices[0].shard.parameter.device))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state as it is. (PyTorch's casts all of it to the dtypes of the parameters.)"""
        super().load_state_dict({**state_dict, "state": {}})
        given, own = (
            list(chain.from_iterable(group["params"] for group in groups))
            for groups in (state_dict["param_groups"], self.param_groups)
        )
        for key, parameter in zip(given, own, strict=True):
            if key in state_dict["state"]:
                state = dict(state_dict["state"][key])
                self.state[parameter] = state
                self._histories[parameter] = float(state["step"])

    def _step_mixed(self, group: dict[str, Any], left_out: Tensor | None) -> None:
        for shards in self._shards_by_step(group):
            left_out = _on_device(left_out, shards[0])
            mask_gradients(shards, left_out)
            kept = share_kept(left_out, shards[0].parameter.device)
            if group["algorithm"] == "SGD":
                update_sgd(shards, group["lr"], group["weight_decay"], self._config.sgd, kept)
            else:
                betas = (self._config.beta1, self._config.beta2)
                update_adamw(shards, group["lr"], group["weight_decay"], betas, self._config.eps, kept)

    def _shards_by_step(self, group: Mapping[str, Any]) -> list[list[LocalShard]]:
        """Return the shards of a group in lists with equal step counts: one list, as long as all parameters have
        gradients in every step.

        The counts are on the device, since a skipped step does not count. A skipped step is skipped for all parameters.
        So counts stay equal where parameters have gradients in the same steps. The host knows these steps, so it can
        group parameters without reading the counts.
        """
        numbers: dict[tuple[float | None, bool], int] = {}
        for parameter in group["params"]:
            before = self._histories[parameter] if self.state.get(parameter) else None
            number = numbers.setdefault((before, parameter.grad is not None), len(numbers))
            self._histories[parameter] = number
        lists: dict[float, list[LocalShard]] = {}
        for shard in self._shards(group):
            lists.setdefault(self._histories[shard.whole], []).append(shard)
        return list(lists.values())

    def _step_plain(self, group: dict[str, Any], found_inf: Tensor | None) -> None:
        if not (shards := list(self._shards(group))):
            return
        parameters, gradients = [shard.parameter for shard in shards], [shard.gradient for shard in shards]
        settings: dict[str, Any] = {
            "foreach": self._config.implementation == "foreach",
            "fused": self._config.implementation == "fused",
            "found_inf": found_inf,
            "lr": group["lr"],
            "weight_decay": group["weight_decay"],
            "maximize": False,
        }
        if group["algorithm"] == "SGD":
            left_out = None if found_inf is None else _on_device(found_inf != 0, shards[0])
            count_step(shards, share_kept(left_out, shards[0].parameter.device))
            momenta = [shard.state.get("momentum_buffer") for shard in shards]
            sgd(parameters, gradients, momenta, **self._config.sgd.model_dump(), dampening=0.0, **settings)
        else:
            adamw(
                parameters,
                gradients,
                [shard.state["exp_avg"] for shard in shards],
                [shard.state["exp_avg_sq"] for shard in shards],
                [],
                [shard.state["step"] for shard in shards],
                amsgrad=False,
                beta1=self._config.beta1,
                beta2=self._config.beta2,
                eps=self._config.eps,
                **settings,
            )

    def _shards(self, group: Mapping[str, Any]) -> Iterator[LocalShard]:
        """Of the parameters with a gradient; their state is made where it is not there yet."""
        for parameter in group["params"]:
            if parameter.grad is not None:
                state = self.state[parameter]
                if not state:
                    state.update(self._initial_state(parameter, group["algorithm"]))
                yield shard_of(self._names[parameter], parameter, state, self._seed)

    def _initial_state(self, parameter: nn.Parameter, algorithm: Algorithm) -> dict[str, Tensor]:
        config = self._config
        on_host = algorithm == "AdamW" and not self._is_mixed and config.implementation != "fused"
        state = {"step": torch.zeros((), device="cpu" if on_host else parameter.device)}
        dtype = parameter.dtype if config.state_dtype is None else getattr(torch, config.state_dtype)
        state |= {name: torch.zeros_like(parameter, dtype=dtype) for name in moments_of(config, algorithm)}
        if config.master_weights and parameter.dtype == torch.bfloat16:
            state["master"] = parameter.detach().float()
        return state


def as_param_group(group: Group) -> dict[str, Any]:
    """A group as PyTorch's optimizers take it."""
    return {"name": group.name, "params": list(group.parameters.values()), **group.settings._asdict()}


def _on_device(left_out: Tensor | None, shard: LocalShard) -> Tensor | None:
    """Where the shards are: with offloaded parameters, the host, which then waits."""
    return None if left_out is None else left_out.to(shard.parameter.device)


_IMPLEMENTATIONS = {
    "fused": {"fused": True},
    "foreach": {"foreach": True},
    "for-loop": {"foreach": False},
}


def build_optimizer(model: nn.Module, config: OptimizerConfig, head: Collection[str] = (), seed: int = 0) -> Optimizer:
    """The optimizer of the trainable parameters of a model, or of a part of one, sharded or not, that is on its device.

    `head`: paths of the modules that run last, the matrices of which are not for Muon. `seed`: of stochastic rounding.
    `set_lr` sets the learning rates, before each step. `check_param_groups` says before what cannot be.
    """
    groups = group_parameters(model, config, head)
    plain = [p for group in groups if group.settings.algorithm != "Muon" for p in group.parameters.values()]
    mixed = is_mixed(config, (str(p.dtype).removeprefix("torch.") for p in plain))
    if mixed or any(group.settings.algorithm != "AdamW" for group in groups):
        return MixedOptimizer(groups, config, is_mixed=mixed, seed=seed)
    return torch.optim.AdamW(
        [as_param_group(group) for group in groups],
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        **_IMPLEMENTATIONS[config.implementation],
    )


def step_unless(optimizer: Optimizer, nonfinite: Tensor) -> None:
    """`optimizer.step()`, unless `nonfinite` (a scalar on the device, 0 or 1) is 1: then neither parameters nor
    optimizer state change, the state's step counts included.

    `MixedOptimizer` and PyTorch's fused implementation decide on the device. They read the attributes that
    `torch.amp.GradScaler` sets on an optimizer for the same purpose, and which exist for this step only. Others make
    the host wait for the flag.
    """
    if _decides_on_device(optimizer):
        flag = (nonfinite != 0).to(torch.float32)  # the kernels compare with exactly 1.0
        _step_with_flag(optimizer, flag.to(optimizer.param_groups[0]["params"][0].device))  # the host, if offloaded
    elif not nonfinite.item():
        optimizer.step()


def _decides_on_device(optimizer: Optimizer) -> bool:
    if isinstance(optimizer, MixedOptimizer):
        return optimizer.reads_found_inf
    return all(group.get("fused") for group in optimizer.param_groups)


def _step_with_flag(optimizer: Optimizer, found_inf: Tensor) -> None:
    vars(optimizer).update(grad_scale=None, found_inf=found_inf)
    try:
        optimizer.step()
    finally:
        del vars(optimizer)["grad_scale"], vars(optimizer)["found_inf"]
