"""Classes of the library `transformers` as models: `[model] name = "huggingface"`.

Only the library's own classes are built. Code that a folder contains is never run (`trust_remote_code`).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from titan_launch.config.architectures.huggingface import class_name, image_format, unit_of
from titan_launch.core.errors import config_error, did_you_mean, listed
from titan_launch.core.globs import matches
from titan_launch.core.patches import torchao_import_silenced
from titan_launch.models.documents import separate_by_positions
from titan_launch.models.spec import TensorStyle
from titan_launch.models.weights.folder import NamesInFiles

_STYLES: Mapping[str, TensorStyle] = {
    "embedding_rowwise": "embedding",
    "colwise": "colwise",
    "rowwise": "rowwise",
    "replicated_with_grad_allreduce": "heads",
}
"""Styles of this package by those of `transformers` that divide in the same way."""

_GATHERED = ("colwise_gather_output", "colwise_rep")
"""Styles of `transformers` that become `head` for the module that makes the logits."""


def build(seq_len: int, /, **args: Any) -> nn.Module:
    """Build a class of `transformers` on the default device, with the values that the class initialises.

    `args`: the keys of its `config.json`. The module declares what the launcher asks of a user's own model: its FLOPs,
    and its styles of tensor parallelism. Raises ConfigError for a class that cannot be trained.
    """
    cls, config = _class_and_config(args)
    _check_length(config, seq_len)
    config.use_cache = False
    config._attn_implementation = "sdpa" if cls._supports_sdpa else "eager"
    module: Any = cls(config)
    separate_by_positions(module)
    _declare_tensor_parallel(module)
    module.flops_per_sample = partial(_count_flops, module, args)
    module.names_in_files = _names_in_files(module)
    return module


def _class_and_config(args: Mapping[str, Any]) -> tuple[Any, Any]:
    try:
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING
        from transformers.models.auto.modeling_auto import (
            MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
            MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
        )
    except ImportError as error:
        reason = f"needs the library transformers: pip install 'titan-launch[hf]' ({error})"
        raise config_error(("model", "name"), reason, "huggingface") from None
    import transformers

    kind, name = args.get("model_type"), class_name(args)
    if kind not in CONFIG_MAPPING:
        release = f"transformers {transformers.__version__} has no model_type {kind!r}"
        if "auto_map" in args:
            reason = f"{release}: its class is code in the folder (auto_map), which is never run"
            raise config_error(("model", "args", "model_type"), f"{reason}; use a class of transformers", kind)
        raise config_error(("model", "args", "model_type"), f"{release}{did_you_mean(str(kind), CONFIG_MAPPING)}", kind)
    if args.get("quantization_config"):
        reason = "quantized weights cannot be trained; use the folder of the original weights"
        raise config_error(("model", "args", "quantization_config"), reason)
    known: list[str] = []
    for table in (MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES):
        names = table.get(kind, ())
        known += [names] if isinstance(names, str) else names
    if name not in known:
        also = f"; of the model_type {kind}: {', '.join(known)}" if known else ""
        reason = f"must name a language model (ForCausalLM) or an image classifier of transformers{also}"
        raise config_error(("model", "args", "architectures"), reason, args.get("architectures", ()))
    try:
        config = CONFIG_MAPPING[kind].from_dict(dict(args))
    except Exception as error:  # each class checks its own keys, with errors of many types
        reason = f"{CONFIG_MAPPING[kind].__name__} refuses them: {' '.join(str(error).split())}"
        raise config_error(("model", "args"), reason) from None
    with torchao_import_silenced():
        return getattr(transformers, name), config


def _check_length(config: Any, seq_len: int) -> None:
    """Raise ConfigError for sequences that are longer than those that the model is made for."""
    key = config.attribute_map.get("max_position_embeddings", "max_position_embeddings")
    longest = getattr(config, key, None)
    if isinstance(longest, int) and seq_len > longest:
        reason = f"the model takes sequences of up to {longest} tokens (model.args.{key}); set {longest} or less"
        raise config_error(("training", "seq_len"), reason, seq_len, also=(("model", "args"),))


def _declare_tensor_parallel(module: Any) -> None:
    """Give a module the styles of this package for its own plan, or the reason why it cannot be divided.

    The plan of `transformers` omits the modules that every rank computes alike.
    """
    name, plan = type(module).__name__, getattr(module, "tp_plan", None)
    if not plan:
        module.no_tensor_parallel = f"{name} of transformers has no plan for tensor parallelism; set 1"
        return
    output = module.get_output_embeddings()
    head = next((path for path, child in module.named_modules() if child is output), None)
    styles = {
        glob: "head" if style in _GATHERED and glob == head else _STYLES.get(style) for glob, style in plan.items()
    }
    unknown = [f"{glob} ({plan[glob]})" for glob, style in styles.items() if style is None]
    if unknown:
        reason = f"{name} divides modules in a way that is not supported: {listed(unknown, most=1)}; set 1"
        module.no_tensor_parallel = reason
        return
    module.sequence_parallel = False  # its forward counts the tokens of the stream
    module.tensor_parallel = {**styles, **dict.fromkeys(_others_with_parameters(module, styles), "sequence")}


def _others_with_parameters(module: nn.Module, styles: Mapping[str, Any]) -> list[str]:
    return [
        path
        for path, child in module.named_modules()
        if next(child.parameters(recurse=False), None) is not None and not any(matches(glob, path) for glob in styles)
    ]


def _names_in_files(module: Any) -> NamesInFiles:
    """Return a function that names the module's tensors in files of any release of `transformers`."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming, dot_natural_key, rename_source_key

    conversions, prefix = get_model_conversion_mapping(module), module.base_model_prefix
    unused = [*(module._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq"]
    name_of_class = type(module).__name__  # FSDP2 gives the module another class

    def names(names_in_files: Collection[str], own_names: Collection[str]) -> dict[str, str]:
        renamings: list[Any] = []
        converters: list[Any] = []
        for conversion in deepcopy(conversions):  # some of them have a state
            (renamings if isinstance(conversion, WeightRenaming) else converters).append(conversion)
        known, found, fused = dict.fromkeys(own_names, True), {}, []
        for name in sorted(names_in_files, key=dot_natural_key):
            own_name, fuses = rename_source_key(name, renamings, converters, prefix, known)
            if own_name not in known and name in known:
                own_name, fuses = name, None
            if own_name in known and fuses is not None:
                fused.append(name)
            is_unused = own_name not in known and any(re.search(pattern, name) for pattern in unused)
            found[name] = "" if is_unused else own_name
        if fused:
            reason = f"{name_of_class} computes with its tensors joined or divided, which is not supported"
            advice = "use a factory of your own that calls from_pretrained"
            raise config_error(("model", "weights"), f"{reason}: {listed(fused)}; {advice}")
        return found

    return names


def _count_flops(module: nn.Module, args: Mapping[str, Any], seq_len: int) -> int | None:
    """Return three times the FLOPs of a forward on the meta device: forward and backward for one sample.

    Return None for images of any size, and if the forward needs values.
    """
    images = image_format(args)
    if unit_of(args) == "tokens":
        inputs = torch.zeros(1, seq_len, dtype=torch.int64, device="meta")
    elif images is not None and images.height is not None and images.width is not None:
        inputs = torch.zeros(1, images.channels, images.height, images.width, device="meta")
    else:
        return None
    try:
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            module(inputs)
    except Exception:  # some forwards read values; a run and a trace report their errors
        return None
    return 3 * counter.get_total_flops()
