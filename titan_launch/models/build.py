"""Construction of a job's model on the meta device, and the table of its modules (the inventory)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from titan_launch.config.loading.urls import local_sections
from titan_launch.config.sections.model import HUGGINGFACE, LoRAConfig, ModelConfig
from titan_launch.core.errors import ConfigError, Problem
from titan_launch.core.globs import matches
from titan_launch.core.import_string import import_factory
from titan_launch.models.architectures import resolve_args
from titan_launch.models.blocks import ModelBlocks, choose_blocks, find_blocks, find_pipeline_order, has_forward
from titan_launch.models.decoder.mixture_of_experts import Experts
from titan_launch.models.decoder.module import SPECS as DECODERS
from titan_launch.models.factory import (
    HostBuild,
    build_buffers_on_host,
    build_for_planning,
    build_on_host,
    build_on_meta,
    build_without_values,
    scalars_as_vectors,
)
from titan_launch.models.host_values import HostValues
from titan_launch.models.huggingface import module as huggingface
from titan_launch.models.huggingface.config_json import read_json
from titan_launch.models.init import load_weights
from titan_launch.models.initializers import Initializer, call_reset_parameters, scaled_values
from titan_launch.models.lora import StackedLoRA, add_adapters
from titan_launch.models.resnet.module import SPEC as RESNET
from titan_launch.models.spec import AttentionHeads, ModelSpec, TensorStyle
from titan_launch.models.vit.module import SPEC as VIT
from titan_launch.models.weights.folder import Weights, WeightsFolder, find_weights
from titan_launch.plan.mup import WidthScales
from titan_launch.plan.types import Inventory, ModuleInfo, TensorInfo, full_name


def take_inventory(
    model: nn.Module,
    blocks: tuple[str, ...],
    head: tuple[str, ...] = (),
    embeddings: tuple[str, ...] = (),
    pipeline_order: tuple[str, ...] = (),
) -> Inventory:
    """Return the table of the modules of a model that is not wrapped yet. The model may be on the meta device.
    `blocks`, `head`, `embeddings` and `pipeline_order`: paths of modules, as in `BuiltModel`."""
    first_path: dict[int, str] = {}
    first_owner: dict[int, str] = {}
    saved = model.state_dict().keys()
    stacked = (Experts, StackedLoRA)  # the first axis of their parameters is the expert
    modules = tuple(
        ModuleInfo(
            path=path,
            same_as=first if (first := first_path.setdefault(id(module), path)) != path else None,
            classes=_class_names(module),
            has_forward=has_forward(module),
            parameters=_tensors(path, module._parameters.items(), first_owner, saved, isinstance(module, stacked)),
            buffers=_tensors(path, module._buffers.items(), first_owner, saved),
        )
        for path, module in model.named_modules(remove_duplicate=False)
    )
    return Inventory(modules, blocks, head, embeddings, pipeline_order)


def _class_names(module: nn.Module) -> tuple[str, ...]:
    mro = type(module).__mro__
    names = (f"{cls.__module__}.{cls.__qualname__}" for cls in mro[: max(1, mro.index(nn.Module))])
    return tuple(dict.fromkeys(names))  # the subclasses for scalars and for adapters have the name of their base


def _tensors(
    path: str,
    tensors: Iterable[tuple[str, Tensor | None]],
    first_owner: dict[int, str],
    saved: Collection[str],
    are_stacked: bool = False,
) -> tuple[TensorInfo, ...]:
    infos = []
    for name, tensor in tensors:
        if tensor is None:
            continue
        own = full_name(path, name)
        owner = first_owner.setdefault(id(tensor), own)
        infos.append(
            TensorInfo(
                name=name,
                shape=tuple(tensor.shape),
                dtype=str(tensor.dtype).removeprefix("torch."),
                is_floating=tensor.is_floating_point(),
                requires_grad=tensor.requires_grad,
                tied_to=owner if owner != own else None,
                is_stacked=are_stacked,
                is_saved=own in saved,
            )
        )
    return tuple(infos)


T = TypeVar("T")

SPECS: dict[str, ModelSpec] = {
    **DECODERS,
    "resnet": RESNET,
    "vit": VIT,
}
"""The models of this package, by `model.name`."""


@dataclass(frozen=True)
class BuiltModel:
    """A model on the meta device, and the facts about it that the launcher needs."""

    module: nn.Module

    blocks: tuple[str, ...]
    """Paths of the modules that become one FSDP2 unit each."""

    head: tuple[str, ...]
    """Paths of the modules that run last, in order; empty if unknown."""

    initializer: Initializer | HostValues
    """Function that fills parameters and buffers after `models.init.allocate`, or the values from a user's factory."""

    flops_per_sample: int | None = None
    """FLOPs of forward and backward per sample that a user's own model declares; None if not declared. A sample of a
    language model is a sequence."""

    embeddings: tuple[str, ...] = ()
    """Paths of the embeddings, as in `ModelSpec`; empty if unknown."""

    tensor_parallel: Mapping[str, TensorStyle] | None = None
    """Styles of tensor parallelism by glob of modules; None if the model declares none."""

    pipeline_order: tuple[str, ...] = ()
    """Paths of the modules that run one after another, in order. These modules have all parameters. Empty if the model
    declares no such order."""

    context_parallel: Mapping[str, int] | None = None
    """Token axis of each buffer with one row per position, by glob of buffer names; None if the model declares none."""

    attention: AttentionHeads | None = None
    """Numbers of heads and features in the model's attention; None if unknown."""

    blocks_origin: str = ""
    """The rule that chose the blocks, in words; empty for the blocks that a model of this package declares."""


def _blocks_of(config: ModelConfig, module: nn.Module) -> ModelBlocks:
    """Return the blocks that `model.blocks` names. If that key is unset, a model of this package declares its blocks,
    and `choose_blocks` finds the blocks of a user's own model."""
    if config.blocks is not None:
        return ModelBlocks(find_blocks(module, config.blocks), "by model.blocks")
    if config.is_of_package:
        return ModelBlocks(find_blocks(module, SPECS[config.name].blocks), "")
    return choose_blocks(module)


def build_model(
    config: ModelConfig, seq_len: int, host: HostBuild | None = None, lora: LoRAConfig | None = None
) -> BuiltModel:
    """Build the model that `model.name` selects: a model of this package, or a user's factory by its import string.
    With `lora`, add adapters.

    `host`: the settings of the call that gets initial values from a user's factory. If `host` is None, the tensors of
    such a factory get no values, and the model serves only for planning. `host` has no effect for models of this
    package and for factories with `meta_device = True`, whose initializers fill the tensors later. If the model is a
    class of `transformers` and `model.weights` has all of its parameters, only the buffers get values.

    A user's module may have the method `flops_per_sample(seq_len)`, and the attributes `pipeline_order`,
    `tensor_parallel` and `context_parallel`, which `ModelSpec` explains. Raise ConfigError for errors of a user's
    model, for globs of `model.blocks` that match nothing, and for errors of `lora` (see `add_adapters`).
    `titan_launch.config` has already checked the arguments of this package's models.
    """
    built = _build_of_package(config, seq_len) if config.is_of_package else _build_users_own(config, seq_len, host)
    if lora is not None:
        add_adapters(built.module, lora, built.blocks)
    return built


def values_of_width(config: ModelConfig, base_width: int, scales: WidthScales) -> Initializer:
    """Return the initializer of a decoder with muP. It draws the values of the same model with the width `base_width`,
    and multiplies each parameter by its scale in `scales`."""
    base = resolve_args(config.name, config.flavor, config.args).model_copy(update={"dim": base_width})
    return scaled_values(SPECS[config.name].initializer(base), scales)


def _build_of_package(config: ModelConfig, seq_len: int) -> BuiltModel:
    spec = SPECS[config.name]
    args = resolve_args(config.name, config.flavor, config.args)
    with torch.device("meta"):
        module = spec.build(args, seq_len)
    names = [name for name, _ in (*module.named_modules(), *module.named_buffers())]

    def exists(pattern: str) -> bool:
        return any(matches(pattern, name) for name in names)

    blocks = _blocks_of(config, module)
    return BuiltModel(
        module=module,
        blocks=blocks.paths,
        blocks_origin=blocks.origin,
        head=spec.head,
        initializer=spec.initializer(args),
        embeddings=tuple(filter(exists, spec.embeddings)),
        pipeline_order=find_pipeline_order(module, tuple(filter(exists, spec.pipeline_order))),
        tensor_parallel=_rows_that(exists, spec.tensor_parallel),
        context_parallel=_rows_that(exists, spec.context_parallel),
        attention=None if spec.attention is None else spec.attention(args, seq_len),
    )


def _rows_that(exists: Callable[[str], bool], table: Mapping[str, T] | None) -> dict[str, T] | None:
    return None if table is None else {pattern: value for pattern, value in table.items() if exists(pattern)}


def recorded_model(config_file: str | Path) -> nn.Module:
    """Build the model of a finished run in plain PyTorch, from the `config.json` in the run's folder.

    The module is not sharded, and is on the default device. It does not have the trained values: load a checkpoint into
    the module. If the run had a `model.weights` folder and its checkpoints omit frozen parameters, the module gets the
    values of that folder. Raises ConfigError if the folder does not fit the model or cannot be copied from its URL, and
    WeightsError if `config_file` cannot be read.
    """
    recorded = read_json(Path(config_file))
    config = ModelConfig.model_validate(recorded["model"])
    if config.is_of_package:
        args = resolve_args(config.name, config.flavor, config.args)
        module = SPECS[config.name].build(args, recorded["training"]["seq_len"])
    else:
        module = _factory(config, recorded["training"]["seq_len"])(**config.args)
        scalars_as_vectors(module)
    lora = LoRAConfig.model_validate(recorded.get("lora", {}))
    add_adapters(module, lora, _blocks_of(config, module).paths, torch.get_default_device())
    if config.weights is not None and _omits_frozen(recorded):
        config = ModelConfig.model_validate(local_sections(recorded, ("model",))["model"])
        load_weights(module, find_weights_of(module, config))
    return module


def find_weights_of(module: nn.Module, config: ModelConfig, folder: WeightsFolder | None = None) -> Weights:
    """Return the weights that `model.weights` names, compared with the tensors of a module that is not wrapped.
    `folder` and errors: as in `find_weights`."""
    return find_weights(config, take_inventory(module, ()), getattr(module, "places_in_files", None), folder)


def _omits_frozen(recorded: Mapping[str, Any]) -> bool:
    """Return True if the checkpoints of a run may lack parameters. `recorded`: its `config.json`."""
    training, lora = recorded["training"], recorded.get("lora", {})
    has_frozen = bool(lora.get("targets") or training.get("frozen") or training.get("trainable"))
    return has_frozen and not recorded.get("checkpoint", {}).get("save_frozen", False)


def _factory(config: ModelConfig, seq_len: int) -> Callable[..., Any]:
    if config.name == HUGGINGFACE:
        return partial(huggingface.build, seq_len)
    return import_factory(config.name)


def _build_users_own(config: ModelConfig, seq_len: int, host: HostBuild | None) -> BuiltModel:
    factory = _factory(config, seq_len)
    initializer: Initializer | HostValues = call_reset_parameters
    if getattr(factory, "meta_device", False) is True:
        module = build_on_meta(config, factory)
    elif host is None:
        module = build_for_planning(config, factory)
    elif config.name == HUGGINGFACE and config.weights is not None and not config.exclude_from_weights:
        module, initializer = build_buffers_on_host(config, factory)
    else:
        build = build_without_values if host.on_meta else build_on_host
        module, initializer = build(config, factory, host)
    _check_declarations(module)
    blocks = _blocks_of(config, module)
    count_flops = getattr(module, "flops_per_sample", None)
    return BuiltModel(
        module=module,
        blocks=blocks.paths,
        blocks_origin=blocks.origin,
        head=(),
        flops_per_sample=None if count_flops is None else count_flops(seq_len),
        initializer=initializer,
        pipeline_order=find_pipeline_order(module, getattr(module, "pipeline_order", ())),
        tensor_parallel=getattr(module, "tensor_parallel", None),
        context_parallel=getattr(module, "context_parallel", None),
    )


def _check_declarations(module: nn.Module) -> None:
    """Raise ConfigError if an attribute that a model declares has the wrong type."""
    pipeline_order = getattr(module, "pipeline_order", ())
    problems = []
    if not isinstance(pipeline_order, (tuple, list)) or not all(isinstance(pattern, str) for pattern in pipeline_order):
        problems.append(f"pipeline_order must be a tuple of globs, but is {pipeline_order!r}")
    for name, kind in (("tensor_parallel", str), ("context_parallel", int)):
        declared = getattr(module, name, None)
        is_table = isinstance(declared, Mapping) and all(
            isinstance(key, str) and isinstance(value, kind) for key, value in declared.items()
        )
        if declared is not None and not is_table:
            problems.append(f"{name} must be a dict from globs to {kind.__name__}, but is {declared!r}")
    if problems:
        raise ConfigError(Problem(("model", "name"), f"the model's attribute {reason}") for reason in problems)
