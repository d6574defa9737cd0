"""The tables that planner and trainer share: the modules of a model, and its FSDP2 units. This module does not import
torch. A precision rule is **in place** if its modules stay in the FSDP2 units around them (`ModelPlan.in_place`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
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
    """True if the parameter is trained in any step. Before `plan.freezing.freeze`, this is the model's own setting."""

    trained_from: int = 0
    """Number of steps after which training of the parameter begins. 0: it is trained from the start, or never."""

    tied_to: str | None = None
    """Full name of the first occurrence of a shared (tied) parameter. None for the first occurrence itself, and for a
    parameter that is not shared."""

    is_stacked: bool = False
    """True for a parameter of an `Experts` module or of its adapters: dim 0 has one entry for each expert of the
    layer."""

    is_saved: bool = True
    """False for a buffer that is not in the state dict (`persistent=False`)."""

    @property
    def numel(self) -> int:
        return prod(self.shape)


MIXTURE_OF_EXPERTS = "titan_launch.models.decoder.mixture_of_experts.MixtureOfExperts"
"""Full name of the class of layers with a router and experts."""

EXPERTS = "titan_launch.models.decoder.mixture_of_experts.Experts"
"""Full name of the class of modules whose parameters are stacked: dim 0 has one entry for each expert."""

LORA = "titan_launch.models.lora.LoRA"
"""Full name of the adapter class. The adapter classes for embeddings and for experts are derived from it."""

STACKED_LORA = "titan_launch.models.lora.StackedLoRA"
"""Full name of the adapter class for experts."""


@dataclass(frozen=True)
class ModuleInfo:
    """A module of a model, with the parameters and buffers that it owns directly."""

    path: str
    """Dotted path from the root module; empty for the root itself."""

    classes: tuple[str, ...]
    """Full names of the module's class and its base classes, nearest first, without `torch.nn.Module`."""

    has_forward: bool
    """False for containers (`nn.ModuleList`), which FSDP2 cannot wrap."""

    parameters: tuple[TensorInfo, ...] = ()
    buffers: tuple[TensorInfo, ...] = ()

    same_as: str | None = None
    """Path of the first occurrence of a module with several parents. None for the first occurrence itself, and for a
    module with one parent."""

    @property
    def class_name(self) -> str:
        """Name of the class without its package and Python module: `Linear`."""
        return self.classes[0].rpartition(".")[2]

    @property
    def is_frozen(self) -> bool:
        """True if the module owns parameters, and none of them is ever trained."""
        return bool(self.parameters) and not any(parameter.requires_grad for parameter in self.parameters)

    @property
    def has_experts(self) -> bool:
        """True if the module is of the class `Experts`: it holds all experts of a layer."""
        return EXPERTS in self.classes

    @property
    def is_adapter(self) -> bool:
        """True if the module is an adapter (`[lora]`)."""
        return LORA in self.classes


@dataclass(frozen=True)
class Inventory:
    """A model as a table: all modules, and the paths of its blocks and its head."""

    modules: tuple[ModuleInfo, ...]
    """Modules in the order of `named_modules`: the root first, parents before children. A module with several parents
    has an entry for each of its paths."""

    blocks: tuple[str, ...]
    """Paths of the repeated blocks. Each block is an FSDP2 unit."""

    head: tuple[str, ...] = ()
    """Paths of the modules that run last, in order. The last module returns the model's output."""

    embeddings: tuple[str, ...] = ()
    """Paths of the modules that run first. Only their own forward reads their weights; backward does not."""

    pipeline_order: tuple[str, ...] = ()
    """Paths of the modules that run in sequence, each on the output of the previous module. For pipeline parallelism,
    these modules must together contain all parameters. Empty: the order is unknown."""

    output_layer: str | None = None
    """Path of the `nn.Linear` whose unchanged output is the logits; None if it is unknown."""

    blocks_origin: str = ""
    """The reason for the choice of blocks, in words. Empty: the model declares its blocks."""

    @cached_property
    def distinct(self) -> tuple[ModuleInfo, ...]:
        """The modules without repetition: a module with several parents is listed at its first path only."""
        return tuple(module for module in self.modules if module.same_as is None)

    @cached_property
    def by_path(self) -> dict[str, ModuleInfo]:
        """The modules by path."""
        return {module.path: module for module in self.modules}

    @cached_property
    def parameters(self) -> dict[str, TensorInfo]:
        """The parameters by full name. A shared parameter has an entry for each of its names."""
        return {full_name(m.path, info.name): info for m in self.modules for info in m.parameters}

    @cached_property
    def num_parameters(self) -> int:
        """Elements of all parameters; tied parameters count once."""
        return sum(info.numel for info in self.parameters.values() if info.tied_to is None)


def sharded_dim(shape: Sequence[int], shards: int, is_stacked: bool) -> int:
    """Return the dim along which FSDP2 shards a parameter: 0, or 1 for some parameters of experts.

    `shape`: shape of a rank's part of the parameter after expert and tensor parallelism, before FSDP2 shards this part.
    `is_stacked`: `TensorInfo.is_stacked`. FSDP2 pads dim 0 to a multiple of the number of shards. So 8 experts over 64
    shards would take the memory of 64 experts. In such a case, dim 1 is sharded if the number of shards divides its
    size. Then nothing is padded.
    """
    return int(is_stacked and shape[0] % shards != 0 and shape[1] % shards == 0)


def is_within(path: str, ancestor: str) -> bool:
    """Return True if the module `path` is `ancestor` or lies inside `ancestor`."""
    return not ancestor or path == ancestor or path.startswith(ancestor + ".")


def parent(path: str) -> str:
    """Return the path of the enclosing module; empty for the root."""
    return path.rpartition(".")[0]


def outward(path: str) -> Iterator[str]:
    """Yield the path of a module, then the paths of the modules around it, the root last."""
    yield path
    while path:
        path = parent(path)
        yield path


def enclosing(path: str, modules: Collection[str]) -> str:
    """Return the innermost of `modules` that is `path` or contains `path`; an empty string if there is none."""
    while path and path not in modules:
        path = parent(path)
    return path


def outermost(paths: Sequence[str]) -> tuple[str, ...]:
    """Return the entries of `paths` that do not lie inside another entry, in order."""
    among = set(paths)
    return tuple(path for path in paths if not enclosing(parent(path), among))


def full_name(path: str, name: str) -> str:
    """Return the full name of a parameter, buffer or child of the module `path`: `path.name`, or `name` for the
    root."""
    return f"{path}.{name}" if path else name


@dataclass(frozen=True)
class Policy:
    """The dtypes of one FSDP2 unit. Each field has the name and the meaning of an argument of
    `MixedPrecisionPolicy`."""

    param_dtype: str | None
    """Dtype of all-gathers and computation. None: the storage dtype, and inputs are not cast."""

    reduce_dtype: str | None
    """Dtype of the gradient reduction. None: the compute dtype."""

    output_dtype: str | None = None
    """Dtype of the outputs. None: unchanged."""

    cast_forward_inputs: bool = True

    @property
    def input_dtype(self) -> str | None:
        """Dtype that floating inputs are cast to. None: inputs are not cast."""
        return self.param_dtype if self.cast_forward_inputs else None


@dataclass(frozen=True)
class Unit:
    """An FSDP2 unit: the modules of one `fully_shard` call. Their parameters are all-gathered, resharded and reduced
    together."""

    name: str
    """Name in the unit table, such as `layers.0`, `norm + output`, `precision.rules.0` or `(root)`."""

    modules: tuple[str, ...]
    policy: Policy
    reshard_after_forward: bool | None
    """None leaves the choice to FSDP2, which does not reshard the root, because backward needs the root's parameters
    first."""

    storage_dtype: str
    reason: str
    """Reason for the unit: `precision.rules.0`, `block`, `experts`, `head`, `embedding`, `root`, or `BatchNorm
    default`. Modules that were taken out of a frozen unit have the reason `trained` or `trained after step 100`. If a
    rule covers these modules, the reason names the rule: `trained, precision.rules.0`."""

    key: KeyPath | None = None
    """Key of the precision rule that made the unit; None if no rule of the job made it."""

    num_parameters: int = 0
    """Number of elements of the unit's parameters before sharding, including parameters of modules that stay in place
    in the unit (`ModelPlan.in_place`)."""

    is_trained: bool = True
    """True if any parameter to which the unit's policy applies is trained. (Parameters of modules that stay in place in
    the unit follow the policy of their entry of `ModelPlan.in_place`.)"""

    gradient_dtype: str | None = None
    """Dtype of the unit's sharded gradients: the storage dtype of its trained parameters, including those of modules
    that stay in place in the unit. FSDP2 requires one dtype for all of them. None: the unit reduces no gradients."""

    unshard_in_backward: bool = True
    """True if backward all-gathers the parameters again after a reshard. False: backward does not read them."""

    expert_parallel: int = 1
    """Number of ranks over which expert parallelism has divided the parameters, before FSDP2 shards each part over
    `Layout.shards_of` ranks. If this number is above 1, the unit has only `Experts` modules or their adapters."""

    own_because: str = ""
    """Reason, in words, why the unit's modules do not stay in the units around them (`precision.placement`). Empty for
    units that need no reason, such as blocks."""

    @property
    def is_divided(self) -> bool:
        """True if expert parallelism has divided the unit's parameters."""
        return self.expert_parallel > 1

    def part(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of this rank's part of a parameter after expert parallelism, before FSDP2 shards the part.
        `shape`: shape of the whole parameter."""
        return (shape[0] // self.expert_parallel, *shape[1:]) if shape else ()

    def whole(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of a whole parameter. `shape`: shape of this rank's part, a result of `part`."""
        return (shape[0] * self.expert_parallel, *shape[1:]) if shape else ()

    @property
    def num_gathers(self) -> int:
        """Number of all-gathers of the unit's parameters in one forward and backward, if they are sharded."""
        return 2 if self.reshard_after_forward and self.unshard_in_backward else 1

    @property
    def compute_dtype(self) -> str:
        """Dtype of the unit's unsharded parameters."""
        return self.policy.param_dtype or self.storage_dtype

    @property
    def reduce_dtype(self) -> str:
        """Dtype in which the unit's gradients are reduced."""
        return self.policy.reduce_dtype or self.compute_dtype


@dataclass(frozen=True)
class Stage:
    """A pipeline stage."""

    index: int
    """Index in the order in which stages run."""

    rank: int
    """Pipeline rank that runs the stage."""

    modules: tuple[str, ...]
    """Paths of its modules: consecutive entries of the pipeline order."""

    num_parameters: int
    """Number of elements of the parameters of its modules."""

    @property
    def extent(self) -> str:
        """Paths of the first and the last module, as text: `layers.3 .. output`. One path if they are the same
        module."""
        return " .. ".join(dict.fromkeys((self.modules[0], self.modules[-1])))


@dataclass(frozen=True)
class ModelPlan:
    """The FSDP2 units, dtypes and pipeline stages of a model. The trainer, the audit and the planner use them."""

    inventory: Inventory
    units: tuple[Unit, ...]
    """Units in wrapping order: inner units before outer ones, the root last."""

    buffer_dtypes: Mapping[str, str]
    """Dtype of each floating-point buffer, by full name of the buffer: as in the model, or as `[precision]` sets it."""

    in_place: tuple[Unit, ...] = ()
    """An entry for each precision rule whose modules stay in the units around them, and for trained modules that stay
    in frozen units (`precision.placement`). The entries are not FSDP2 units: the units around the modules all-gather
    these parameters, each in its own compute dtype, and reduce their gradients."""

    checkpointed: tuple[str, ...] = ()
    """Paths of the modules with activation checkpointing."""

    compiled: tuple[str, ...] = ()
    """Paths of the compiled modules. Each becomes one graph."""

    float8: tuple[str, ...] = ()
    """Paths of the linear layers that compute in 8-bit floating point."""

    stages: tuple[Stage, ...] = ()
    """Pipeline stages in order; empty without pipeline parallelism."""

    loss_head: str | None = None
    """Path of the output layer that computes the loss in chunks (`loss.chunks`); None if the model returns logits."""

    def returns_loss(self, path: str) -> bool:
        """Return True if a module is the loss head or contains it. Such a module returns sums of the loss in fp32
        instead of logits. No policy casts these sums."""
        return self.loss_head is not None and is_within(self.loss_head, path)

    def gathered_dtypes(self) -> list[str]:
        """Return the dtype of each unit's all-gather, in the order of the units. The dtype is `uint8` for a unit with
        several compute dtypes: FSDP2 then gathers the parameters as bytes."""
        found = []
        for unit, modules in zip(self.units, modules_by_unit(self.inventory, self.units), strict=True):
            computed = {self.unit_of[module.path].compute_dtype for module in modules if module.parameters}
            found.append("uint8" if len(computed) > 1 else next(iter(computed), unit.compute_dtype))
        return found

    @property
    def logits_dtypes(self) -> tuple[str, ...]:
        """The dtypes to which the policies of the loss head and of the modules around it would cast the logits,
        innermost first. The loss head makes these casts itself, because its output is the loss. Empty without a loss
        head."""
        casts = {path: policy.output_dtype for path, policy in self.policies.items()}
        around = sorted(filter(self.returns_loss, casts), key=len, reverse=True)
        return tuple(dtype for path in around if (dtype := casts[path]) is not None)

    @property
    def boundaries(self) -> tuple[Unit, ...]:
        """The units, and the entries of `in_place`. Each has a policy and a storage dtype."""
        return (*self.units, *self.in_place)

    @cached_property
    def unit_of(self) -> dict[str, Unit]:
        """By path of a module: the unit, or the entry of `in_place`, whose policy applies to the module's own
        parameters."""
        return _by_module(self.inventory, self.boundaries)

    @cached_property
    def sharded_by(self) -> dict[str, Unit]:
        """By path of a module: the unit that shards the module's own parameters."""
        return _by_module(self.inventory, self.units)

    @cached_property
    def policies(self) -> dict[str, Policy]:
        """The policy of each module that a unit or an entry of `in_place` lists, by path. The policy decides the casts
        of the module's inputs and outputs."""
        return {path: boundary.policy for boundary in self.boundaries for path in boundary.modules}

    def casts_inputs(self, unit: Unit) -> bool:
        """Return `cast_forward_inputs` of the policy that FSDP2 gets for a unit. The result is False if a rule in place
        covers one of the unit's modules. Then hooks cast the inputs of each module."""
        return unit.policy.cast_forward_inputs and all(self.unit_of[path] is unit for path in unit.modules)


def without_modules(plan: ModelPlan, removed: Collection[str]) -> ModelPlan:
    """Return the plan without the `removed` modules, the modules inside of them, and units that become empty. Units and
    stages keep their `num_parameters`, and modules keep `same_as`."""

    gone = frozenset(removed)

    def remaining(path: str | None) -> str | None:
        return None if path is None or enclosing(path, gone) else path

    def left(paths: Sequence[str]) -> tuple[str, ...]:
        return tuple(path for path in paths if not enclosing(path, gone))

    def of_units(units: Sequence[Unit]) -> tuple[Unit, ...]:
        smaller = (replace(unit, modules=left(unit.modules)) for unit in units)
        return tuple(unit for unit in smaller if unit.modules)

    inventory = plan.inventory
    return replace(
        plan,
        inventory=replace(
            inventory,
            modules=tuple(module for module in inventory.modules if not enclosing(module.path, gone)),
            blocks=left(inventory.blocks),
            head=left(inventory.head),
            embeddings=left(inventory.embeddings),
            pipeline_order=left(inventory.pipeline_order),
            output_layer=remaining(inventory.output_layer),
        ),
        units=of_units(plan.units),
        buffer_dtypes={name: dtype for name, dtype in plan.buffer_dtypes.items() if not enclosing(name, gone)},
        in_place=of_units(plan.in_place),
        checkpointed=left(plan.checkpointed),
        compiled=left(plan.compiled),
        float8=left(plan.float8),
        stages=tuple(replace(stage, modules=left(stage.modules)) for stage in plan.stages),
        loss_head=remaining(plan.loss_head),
    )


def _by_module(inventory: Inventory, units: Sequence[Unit]) -> dict[str, Unit]:
    return {path: units[index] for path, index in unit_by_module(inventory, units).items()}


def unit_by_module(inventory: Inventory, units: Sequence[Unit]) -> dict[str, int]:
    """Return, by path of a module, the index of the unit of the module's own parameters: the unit that lists the
    module, or else the unit of its parent. One of `units` must list the root."""
    members = {path: index for index, unit in enumerate(units) for path in unit.modules}
    owners: dict[str, int] = {}
    for module in inventory.modules:  # parents come first
        inherited = owners.get(parent(module.path), members[""])
        owners[module.path] = members.get(module.same_as or module.path, members.get(module.path, inherited))
    return owners


def with_parameters(
    inventory: Inventory, units: Sequence[Unit], in_place: Sequence[Unit]
) -> tuple[tuple[Unit, ...], tuple[Unit, ...]]:
    """Return `units` and `in_place` with the fields that follow from their parameters: `num_parameters`, `is_trained`
    and `gradient_dtype`. Tied parameters count once."""
    of_all = (*units, *in_place)
    policies, shards = unit_by_module(inventory, of_all), unit_by_module(inventory, units)
    numel: Counter[int] = Counter()
    gradients: dict[int, str] = {}
    trained = set()
    for module in inventory.modules:
        parameters = [parameter for parameter in module.parameters if parameter.tied_to is None]
        own = policies[module.path]
        for index in {own, shards[module.path]}:
            numel[index] += sum(parameter.numel for parameter in parameters)
            if any(parameter.requires_grad for parameter in parameters):
                gradients[index] = of_all[own].storage_dtype
                trained.add(own)
    counted = [
        replace(unit, num_parameters=numel[i], is_trained=i in trained, gradient_dtype=gradients.get(i))
        for i, unit in enumerate(of_all)
    ]
    return tuple(counted[: len(units)]), tuple(counted[len(units) :])


def modules_by_unit(inventory: Inventory, units: Sequence[Unit]) -> list[list[ModuleInfo]]:
    """Return a list for each unit, in the order of the units: the modules whose own parameters belong to the unit."""
    owners = unit_by_module(inventory, units)
    modules: list[list[ModuleInfo]] = [[] for _ in units]
    for module in inventory.modules:
        modules[owners[module.path]].append(module)
    return modules


def parameters_by_unit(inventory: Inventory, units: Sequence[Unit]) -> list[list[TensorInfo]]:
    """Return a list for each unit, in the order of the units: the parameters of the unit. Tied parameters count
    once."""
    return [
        [parameter for module in modules for parameter in module.parameters if parameter.tied_to is None]
        for modules in modules_by_unit(inventory, units)
    ]
