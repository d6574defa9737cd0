"""Low-rank adapters (LoRA, arXiv:2106.09685) of linear layers, embeddings and experts.

A target is a layer that gets an adapter. The target keeps its path and the names of its parameters, and gets a child,
`lora`. The target computes W x + scale * B A x, and the child returns the second term. The child has its own forward,
so that it can be an FSDP2 unit with its own dtypes.

The sum is formed where `nn.Linear` or `nn.Embedding` computes W x. Some targets change this product: an output layer
with a soft cap, for example. The change then applies to the sum.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial

from titan_launch.config.sections.model import ALL_LINEAR, LoRAConfig
from titan_launch.core.errors import ConfigError, KeyPath, Problem, listed
from titan_launch.core.globs import alike, matches
from titan_launch.models.blocks import has_forward
from titan_launch.models.decoder.huggingface_tensors import ends_in
from titan_launch.models.decoder.mixture_of_experts import ExpertProduct, Experts, MixtureOfExperts
from titan_launch.models.weights.adapters import Adapter
from titan_launch.plan.freezing import ADAPTER
from titan_launch.plan.types import enclosing, full_name, parent
from titan_launch.plan.units.rule_assignment import nothing_matched, suggestion

_TARGETS: tuple[str, str] = ("lora", "targets")
_EXPERT_WEIGHTS = ("w1", "w2", "w3")


class LoRA(nn.Module):
    """The adapter of a linear layer."""

    def __init__(self, shape: Sequence[int], config: LoRAConfig):
        """`shape`: (out, in), the shape of the weight. The parameters are `a` (rank, in) and `b` (out, rank). For a
        stacked weight of experts, all three shapes begin with the number of experts."""
        super().__init__()
        self.scale, self.dropout = config.scale, config.dropout
        *stack, num_out, num_in = shape
        self.a = nn.Parameter(torch.empty(*stack, config.rank, num_in))
        self.b = nn.Parameter(torch.empty(*stack, num_out, config.rank))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw `a` from the same uniform distribution as `peft`, and set `b` to 0."""
        bound = self.a.shape[-1] ** -0.5
        nn.init.uniform_(self.a, -bound, bound)
        nn.init.zeros_(self.b)

    def forward(self, x: Tensor, product: ExpertProduct = F.linear) -> Tensor:
        """Map (..., in) to (..., out). `product`: the function that multiplies by `a` and by `b`."""
        low = product(F.dropout(x, self.dropout, self.training), self.a, None)
        return product(low * self.scale, self.b, None)


class EmbeddingLoRA(LoRA):
    """The adapter of an embedding, whose weight is (rows, dim): `a` is (rank, rows), and `b` is (dim, rank)."""

    def __init__(self, embedding: nn.Embedding, config: LoRAConfig):
        super().__init__(embedding.weight.shape[::-1], config)
        self.padding_idx = embedding.padding_idx

    def reset_parameters(self) -> None:
        """Set `a` to 0 and draw `b`, as `peft` does. The adapter then changes only rows that get a gradient."""
        nn.init.zeros_(self.a)
        nn.init.normal_(self.b)

    def forward(self, x: Tensor, product: ExpertProduct = F.linear) -> Tensor:
        """Map indices of rows, of any shape, to (..., dim). Dropout is not applied, as in `peft`."""
        return product(F.embedding(x, self.a.T, self.padding_idx) * self.scale, self.b, None)


class StackedLoRA(LoRA):
    """The adapter of one stacked weight of experts: `a` is (experts, rank, in), and `b` is (experts, out, rank). The
    rows of its input are sorted by expert. The argument `product` of its forward is a function that multiplies each row
    by the matrix of the row's expert."""


def delta(a: Tensor, b: Tensor, scale: float, is_embedding: bool = False) -> Tensor:
    """Return the product that an adapter adds to the weight of its target: fp32, in the shape of the weight. `a` and
    `b`: the parameters of the adapter, not sharded."""
    product = b.float() @ a.float() * scale
    return product.mT if is_embedding else product


def adapters_of(model: nn.Module) -> Iterator[Adapter]:
    """Yield the adapters of a model, in the order of `named_modules`. The model may be on the meta device."""
    for path, module in model.named_modules():
        if isinstance(module, LoRA):
            owner, name = parent(path), "weight"
            if isinstance(module, StackedLoRA):
                owner, name = parent(owner), path.rpartition(".")[2]
            is_embedding = isinstance(module, EmbeddingLoRA)
            weight, rank = full_name(owner, name), module.a.shape[-2]
            yield Adapter(weight, f"{path}.a", f"{path}.b", rank, module.scale, is_embedding)


@contextmanager
def adapters_disabled(model: nn.Module) -> Iterator[None]:
    """Let a model, wrapped or not, compute the same as without adapters until the `with` block ends. The results of
    adapters are still computed, and multiplied by 0. So the same FSDP2 units run as in any forward."""
    adapters = [(module, module.scale) for module in model.modules() if isinstance(module, LoRA)]
    try:
        for adapter, _ in adapters:
            adapter.scale = 0.0
        yield
    finally:
        for adapter, scale in adapters:
            adapter.scale = scale


def add_adapters(
    model: nn.Module, config: LoRAConfig, blocks: Sequence[str] = (), device: torch.device | None = None
) -> None:
    """Add adapters to the modules that `lora.targets` names, in place. Without targets, nothing changes.

    `blocks`: paths of the model's blocks. `device`: device of the adapters, by default meta. `plan.freezing` freezes
    all other parameters.

    Raises ConfigError for an ambiguous entry, an entry that names no module that can have an adapter, and a rule of
    `lora.rules` that applies to no target. Also raises ConfigError for a linear layer or embedding whose forward calls
    neither `nn.Linear.forward` nor `nn.Embedding.forward`, for a target whose weight another module reads or shares,
    and for a rank above the smaller dimension of the target's weight.
    """
    if not config.targets:
        return
    targets, problems = _find_targets(model, config.targets, blocks)
    if not problems:
        owners: dict[int, list[str]] = {}
        for path, module in model.named_modules():
            for parameter in module._parameters.values():
                owners.setdefault(id(parameter), []).append(path)
        refusals = (_refusal(model, path, module, owners) for path, module in targets.items())
        problems += [Problem(_TARGETS, reason, config.targets) for reason in filter(None, refusals)][:1]
        problems += _rank_problem(targets, config)
        problems += _rules_without_effect(targets, config)
    if problems:
        raise ConfigError(problems)
    with device or torch.device("meta"):
        for path, module in targets.items():
            own = config.of(path)
            if isinstance(module, Experts):
                shapes = {name: module.get_parameter(name).shape for name in _EXPERT_WEIGHTS}
                module.lora = nn.ModuleDict({name: StackedLoRA(shape, own) for name, shape in shapes.items()})
            elif isinstance(module, nn.Linear):
                attach(module, LoRA(module.weight.shape, own), nn.Linear)
            else:
                assert isinstance(module, nn.Embedding)
                attach(module, EmbeddingLoRA(module, own), nn.Embedding)


def attach(module: nn.Module, adapter: LoRA, product: type[nn.Module]) -> None:
    """Make an adapter a child of its target, `module`, and let the target add the adapter's result to W x. `product`:
    the class whose forward computes W x: the target's class or one of its base classes."""
    cls: Any = type(module)
    of: Any = product
    module.__class__ = _adapted(cls, of)
    module.register_module(ADAPTER, adapter)


def class_without_adapter(module: nn.Module) -> type[nn.Module]:
    """Return the class of a module, or the class that it had before it got an adapter."""
    cls: type[nn.Module] = getattr(type(module), "__adapts__", type(module))
    return cls


class _Adapted:
    """The base class of targets that adds the adapter's result. In the method resolution order, it comes just before
    the class that computes W x."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of W x and of the adapter's result. With PyTorch's tensor parallelism, `x` and W x are
        DTensors. The adapter then computes with this rank's part of `x`, and its result gets the placements of W x."""
        product: Tensor = super().forward(x)  # type: ignore[misc]
        adapter: Callable[[Tensor], Tensor] = self.lora  # type: ignore[attr-defined]
        if not (isinstance(x, DTensor) and isinstance(product, DTensor)):
            return product + adapter(x)
        gradients = [Partial() if placement.is_replicate() else placement for placement in x.placements]
        part = adapter(x.to_local(grad_placements=gradients))
        return product + DTensor.from_local(part, product.device_mesh, product.placements, run_check=False)


@cache
def _adapted(cls: Any, product: Any) -> type[nn.Module]:
    """Return a subclass of `cls`, with the same name, in which `_Adapted` comes just before `product`."""

    def subclass(of: type[nn.Module], *bases: type) -> type[nn.Module]:
        same: dict[str, Any] = {name: getattr(of, name) for name in ("__module__", "__qualname__", "__doc__")}
        return type(of.__name__, bases, {**same, "__adapts__": cls})

    adapted = subclass(product, _Adapted, product)
    return adapted if cls is product else subclass(cls, cls, adapted)


def _find_targets(
    model: nn.Module, entries: Sequence[str], blocks: Sequence[str]
) -> tuple[dict[str, nn.Module], list[Problem]]:
    """Return (modules that get an adapter, by their first path; problems). There is a problem for each entry of
    `lora.targets` that is ambiguous, or that names no module that can have an adapter."""
    everything = {path: module for path, module in model.named_modules(remove_duplicate=False) if path}
    first = {module: path for path, module in reversed(everything.items())}
    targets: dict[str, nn.Module] = {}
    problems = []
    for index, entry in enumerate(entries):
        matched = _named(entry, everything, blocks)
        modules = (everything[path] for path in matched)
        found = {first[module]: module for module in modules if isinstance(module, (nn.Linear, nn.Embedding, Experts))}
        reason = _why_ambiguous(entry, everything) or (None if found else _why_nothing(entry, matched, everything))
        targets |= found
        problems += [Problem((*_TARGETS, index), reason, entry)] if reason else []
    return targets, problems


def _named(entry: str, modules: Mapping[str, nn.Module], blocks: Sequence[str]) -> list[str]:
    """Return the paths that an entry of `lora.targets` matches as a glob or, if there are none, the paths that end with
    the entry. The entry `all-linear` names the linear layers and experts in the blocks, without routers."""
    if entry == ALL_LINEAR:
        routers = [module.router for module in modules.values() if isinstance(module, MixtureOfExperts)]
        inside = [path for path in modules if enclosing(path, blocks) and modules[path] not in routers]
        return [path for path in inside if isinstance(modules[path], (nn.Linear, Experts))]
    return [path for path in modules if matches(entry, path)] or ends_in(entry, modules)


def _why_ambiguous(entry: str, modules: Mapping[str, nn.Module]) -> str | None:
    """Return the reason why an entry of `lora.targets` is ambiguous; None if it is not. An entry that matches no whole
    path is ambiguous if it names a single weight of experts, because all weights of experts get adapters together."""
    if any(matches(entry, path) for path in modules):
        return None
    stacked = [path for path, module in modules.items() if isinstance(module, Experts)]
    weights = [full_name(path, name) for path in stacked for name in _EXPERT_WEIGHTS]
    if not ends_in(entry, weights) and not ends_in(f"{entry}.weight", weights):
        return None
    globs = [*alike(ends_in(entry, modules)), *alike(stacked)]
    what = "names one weight of the experts (here or in transformers), but all their weights get adapters together"
    return f"{what}; to select whole modules, write: {', '.join(globs)}"


def _why_nothing(entry: str, matched: Sequence[str], modules: Mapping[str, nn.Module]) -> str:
    """Return the reason why an entry names no module that can have an adapter. `matched`: paths of the modules that the
    entry names."""
    runnable = [path for path, module in modules.items() if has_forward(module)]
    if entry == ALL_LINEAR:
        return "finds no linear layers in the model's blocks; name other blocks in model.blocks, or write globs"
    if others := [f"{path} ({type(modules[path]).__name__})" for path in matched if path in runnable]:
        return (
            f"matches only {listed(others)}; adapters are for linear layers (nn.Linear), embeddings (nn.Embedding) and "
            "stacked experts (Experts); name such modules, which may be inside of the matched modules"
        )
    return nothing_matched(entry, runnable, [path for path in modules if path not in runnable])


def _refusal(model: nn.Module, path: str, module: nn.Module, owners: Mapping[int, Sequence[str]]) -> str | None:
    """Return the reason why a target cannot have an adapter; None if it can. `owners`: for the `id` of each parameter,
    the paths of the modules that own the parameter."""
    what = f"matches {path} ({type(module).__name__}),"
    if isinstance(model.get_submodule(parent(path)), nn.MultiheadAttention):
        return f"{what} whose weight nn.MultiheadAttention reads without a call of the layer; name other modules"
    forward = None if isinstance(module, Experts) else _own_forward(module)
    if forward is not None:
        return f"{what} whose forward ({forward}) does not call super().forward, as adapters need; name other modules"
    own = [other for weight in _weights(module) for other in owners[id(weight)]]
    sharers = [other for other in dict.fromkeys(own) if model.get_submodule(other) is not module]
    if sharers:
        return f"{what} which shares its weight with {listed(sharers)}, so no adapter can be merged; name other modules"
    return None


def _rank_problem(targets: Mapping[str, nn.Module], config: LoRAConfig) -> Iterator[Problem]:
    sides = {path: min(min(weight.shape[-2:]) for weight in _weights(module)) for path, module in targets.items()}
    ranks = {path: config.of(path).rank for path in targets}
    path = min(sides, key=lambda path: sides[path] - ranks[path])
    if ranks[path] > sides[path]:
        index, key = config.rule_of(path), KeyPath(("lora", "rank"))
        if index is not None and config.rules[index].rank is not None:
            key = ("lora", "rules", index, "rank")
        reason = f"is above {sides[path]}, the smaller dimension of the weight of {path}; set {sides[path]} or less, "
        yield Problem(key, f"{reason}or name only larger layers in lora.targets", ranks[path], also=(_TARGETS,))


def _rules_without_effect(targets: Mapping[str, nn.Module], config: LoRAConfig) -> Iterator[Problem]:
    used = {config.rule_of(path) for path in targets}
    for index, rule in enumerate(config.rules):
        if index not in used:
            reason = "each adapter that this rule matches follows an earlier rule; put the narrower rule first"
            if not any(matches(glob, path) for glob in rule.match for path in targets):
                hint = "".join(suggestion(glob, targets) for glob in rule.match[:1])
                reason = f"matches no module with an adapter (lora.targets){hint}"
            yield Problem(("lora", "rules", index, "match"), reason, rule.match, also=(_TARGETS,))


def _weights(module: nn.Module) -> list[nn.Parameter]:
    """Return the weights of a target that get adapters."""
    names = _EXPERT_WEIGHTS if isinstance(module, Experts) else ("weight",)
    return [module.get_parameter(name) for name in names]


def _own_forward(module: nn.Module) -> str | None:
    """Return the name of the forward that computes W x in a target. Return None if this is `nn.Linear.forward` or
    `nn.Embedding.forward`."""
    if "forward" in vars(module):
        return "an attribute of the module"
    for cls in type(module).__mro__:
        if cls in (nn.Linear, nn.Embedding):
            return None
        forward = inspect.unwrap(vars(cls).get("forward", _own_forward))
        if forward is not _own_forward and "super" not in forward.__code__.co_names:
            return f"{cls.__qualname__}.forward"
    return None
