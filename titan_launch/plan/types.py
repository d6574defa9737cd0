"""The tables that planner and trainer share: what a model is made of, and how FSDP2 will wrap it. No torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

from titan_launch.core.errors import KeyPath


@dataclass(frozen=True)
class TensorInfo:
    """A parameter or a buffer that a module owns directly."""

    name: str
    """Name within its module, such as `weight`."""

    shape: tuple[int, ...]
    dtype: str
    """`float32`, `bfloat16`, `int64`, ..."""

    is_floating: bool
    requires_grad: bool = False
    tied_to: str | None = None
    """Full path of the same tensor where it was met first, for a shared (tied) parameter."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)


@dataclass(frozen=True)
class ModuleInfo:
    """One module of the tree."""

    path: str
    """Dotted path from the root; the root's is empty."""

    classes: tuple[str, ...]
    """Full names of its class and of that class's bases, nearest first, up to `torch.nn.Module` exclusively."""

    has_forward: bool
    """False for containers (`nn.ModuleList`), which FSDP2 cannot wrap."""

    parameters: tuple[TensorInfo, ...] = ()
    buffers: tuple[TensorInfo, ...] = ()

    same_as: str | None = None
    """The path under which the same module was met first, for a module with several parents."""

    @property
    def class_name(self) -> str:
        """The class without its module."""
        return self.classes[0].rpartition(".")[2]


@dataclass(frozen=True)
class Inventory:
    """A model as a table: every module, and which of them the model calls its blocks and its head."""

    modules: tuple[ModuleInfo, ...]
    """In the order of `named_modules`: parents before children, the root first. A module with several parents is there
    under each of its paths."""

    blocks: tuple[str, ...]
    """Paths of the repeated blocks, each a unit of its own."""

    head: tuple[str, ...] = ()
    """Paths of the modules that run last, in order; the last one's output is the model's."""

    embeddings: tuple[str, ...] = ()
    """Paths of the modules that run first and whose weights only their own forward reads: not even backward does."""

    pipeline_order: tuple[str, ...] = ()
    """Paths of the modules that run one after another, in order, each on what the one before it returns; all parameters
    are in them. Empty where nothing is known about that."""

    @cached_property
    def by_path(self) -> dict[str, ModuleInfo]:
        """The modules by path."""
        return {module.path: module for module in self.modules}

    @cached_property
    def num_parameters(self) -> int:
        """Elements of all parameters, tied ones once."""
        return sum(p.numel for m in self.modules for p in m.parameters if p.tied_to is None)


def is_within(path: str, ancestor: str) -> bool:
    """Whether `path` is the module `ancestor` or lies in it."""
    return not ancestor or path == ancestor or path.startswith(ancestor + ".")


def parent(path: str) -> str:
    """The path of the module around a module; empty for the root."""
    return path.rpartition(".")[0]


def enclosing(path: str, modules: Collection[str]) -> str:
    """Which of `modules` a module is or lies in, the innermost; empty for none."""
    while path and path not in modules:
        path = parent(path)
    return path


def outermost(paths: Sequence[str]) -> tuple[str, ...]:
    """Those of the modules that do not lie in another one of them, in order."""
    among = set(paths)
    return tuple(path for path in paths if not enclosing(parent(path), among))


def full_name(path: str, name: str) -> str:
    """The path of what a module holds (a parameter, a buffer, a child), from the module's path and the name there."""
    return f"{path}.{name}" if path else name


@dataclass(frozen=True)
class Policy:
    """What one FSDP2 unit does with dtypes: the arguments of `MixedPrecisionPolicy`, by name. None is FSDP2's None."""

    param_dtype: str | None
    """All-gather and compute. None: as stored, inputs are not cast."""

    reduce_dtype: str | None
    output_dtype: str | None = None
    """None: outputs stay as they are."""

    cast_forward_inputs: bool = True

    @property
    def input_dtype(self) -> str | None:
        """What floating inputs are cast to. None: they are taken as they come."""
        return self.param_dtype if self.cast_forward_inputs else None


@dataclass(frozen=True)
class Unit:
    """The modules of one `fully_shard` call: their parameters are gathered, freed and reduced together."""

    name: str
    """What the table calls it: the path of a block, or why it exists."""

    modules: tuple[str, ...]
    policy: Policy
    reshard_after_forward: bool | None
    """None leaves the choice to FSDP2, which keeps the root's parameters (they are needed first in backward)."""

    storage_dtype: str
    reason: str
    """`precision.rules.0`, `block`, `head`, `embedding`, `root`, or the default that made it."""

    key: KeyPath | None = None
    """The rule that made it, as a path into the job file."""

    num_parameters: int = 0
    """Elements of the parameters it holds, over all ranks."""

    is_trained: bool = True
    """Whether any of them takes a gradient."""

    unshard_in_backward: bool = True
    """Whether backward gathers the parameters again if they were freed; not where it does not read them."""

    @property
    def num_gathers(self) -> int:
        """How often its parameters are gathered in one forward and backward, among several ranks."""
        return 2 if self.reshard_after_forward and self.unshard_in_backward else 1

    @property
    def compute_dtype(self) -> str:
        """What its parameters are gathered in, and their gradients are made in."""
        return self.policy.param_dtype or self.storage_dtype

    @property
    def reduce_dtype(self) -> str:
        """What its gradients are reduced in."""
        return self.policy.reduce_dtype or self.compute_dtype


@dataclass(frozen=True)
class Stage:
    """A part of the model that pipeline parallelism runs as a whole."""

    index: int
    """Its place among the stages, in the order in which they run."""

    rank: int
    """Which of the ranks along the pipeline holds it."""

    modules: tuple[str, ...]
    """Paths of the modules of the model's chain that it has, in order."""

    num_parameters: int
    """Elements of their parameters."""

    @property
    def extent(self) -> str:
        """Its first and last module, in words."""
        return " .. ".join(dict.fromkeys((self.modules[0], self.modules[-1])))


@dataclass(frozen=True)
class ModelPlan:
    """What becomes of a model's modules, parameters and buffers: what wrapping, audit and planner all read."""

    inventory: Inventory
    units: tuple[Unit, ...]
    """In the order in which they are wrapped: inner before outer, the root last."""

    buffer_dtypes: Mapping[str, str]
    """Dtypes of all floating buffers, by full name: those the model gave them, or those that `[precision]` asks for."""

    recomputed: tuple[str, ...] = ()
    """Paths of the modules whose activations are computed again in backward."""

    compiled: tuple[str, ...] = ()
    """Paths of the modules that are compiled, each into a graph of its own."""

    float8: tuple[str, ...] = ()
    """Paths of the linear layers whose products are in 8-bit floating point."""

    stages: tuple[Stage, ...] = ()
    """The parts that pipeline parallelism divides the model into, in order; empty without it."""

    @cached_property
    def unit_of(self) -> dict[str, Unit]:
        """By module path: the unit that holds the parameters which the module owns."""
        return {path: self.units[index] for path, index in unit_by_module(self.inventory, self.units).items()}


def unit_by_module(inventory: Inventory, units: Sequence[Unit]) -> dict[str, int]:
    """The index of the unit that holds the parameters each module owns: that of the nearest module around it."""
    members = {path: index for index, unit in enumerate(units) for path in unit.modules}
    owners: dict[str, int] = {}
    for module in inventory.modules:  # parents come first
        inherited = owners.get(parent(module.path), members[""])
        owners[module.path] = members.get(module.same_as or module.path, members.get(module.path, inherited))
    return owners


def parameters_by_unit(inventory: Inventory, units: Sequence[Unit]) -> list[list[TensorInfo]]:
    """The parameters that each unit holds, tied ones once, in the order of the units."""
    owners = unit_by_module(inventory, units)
    parameters: list[list[TensorInfo]] = [[] for _ in units]
    for module in inventory.modules:
        parameters[owners[module.path]] += [p for p in module.parameters if p.tied_to is None]
    return parameters
