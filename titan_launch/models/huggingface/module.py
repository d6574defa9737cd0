"""Classes of the library `transformers` as models: `[model] name = "huggingface"`.

Only the library's own classes are built. Code that a folder contains is never run (`trust_remote_code`).
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_module_registration_hook,
)

from titan_launch.core.errors import ConfigError, Problem, config_error, listed
from titan_launch.core.globs import matches
from titan_launch.core.packages import install
from titan_launch.core.patches import replaced, torchao_import_silenced
from titan_launch.core.terminal import short_name
from titan_launch.models.decoder.huggingface_tensors import Piece
from titan_launch.models.documents import separate_by_positions
from titan_launch.models.factory import TooLargeError
from titan_launch.models.huggingface.args import class_name, refused, unknown_model_type
from titan_launch.models.spec import TensorStyle
from titan_launch.models.weights.folder import FLOATS, Converted, FileTensor, Place, Places, PlacesInFiles

_STYLES: Mapping[str, TensorStyle] = {
    "embedding_rowwise": "embedding",
    "colwise": "colwise",
    "rowwise": "rowwise",
    "replicated_with_grad_allreduce": "heads",
}
"""The style of this package for each style of `transformers` that divides a module in the same way."""


def build(seq_len: int, /, **args: Any) -> nn.Module:
    """Build a model of `transformers` on the default device, with the initial values that its class sets.

    `args`: the keys of its `config.json`. The module declares its styles of tensor parallelism. Raises ConfigError if
    `transformers` cannot be imported, if the class is neither a language model nor an image classifier of
    `transformers`, if an argument is not supported, or if `seq_len` is larger than the model allows.
    """
    cls, config = _class_and_config(args)
    _check_length(config, seq_len)
    config.use_cache = False
    config._attn_implementation = "sdpa" if cls._supports_sdpa else "eager"
    import huggingface_hub

    with replaced(huggingface_hub.constants, "HF_HUB_OFFLINE", True):
        if torch.get_default_device().type != "meta":
            _check_size(cls, config)
        with _size_limited():
            module = _built(cls, config)
    separate_by_positions(module)
    _declare_tensor_parallel(module)
    module.places_in_files = _places_in_files(module)
    return module


def _class_and_config(args: Mapping[str, Any]) -> tuple[Any, Any]:
    try:
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING
        from transformers.models.auto.modeling_auto import (
            MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
            MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
        )
    except ImportError as error:
        reason = f"needs transformers, which cannot be imported ({error}): {install('transformers')}"
        raise config_error(("model", "name"), reason, "huggingface") from None
    import transformers

    for path, reason, value in refused(args):
        raise config_error(("model", "args", *path), reason, value)
    kind, name = args.get("model_type"), class_name(args)
    if kind not in CONFIG_MAPPING:
        raise config_error(("model", "args", "model_type"), unknown_model_type(args, CONFIG_MAPPING), kind)
    known: list[str] = []
    for table in (MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES):
        names = table.get(kind, ())
        known += [names] if isinstance(names, str) else names
    if name not in known:
        also = f"; the model_type {kind} has: {', '.join(known)}" if known else ""
        reason = f"must name a language model (ForCausalLM) or an image classifier of transformers{also}"
        raise config_error(("model", "args", "architectures"), reason, args.get("architectures", ()))
    try:
        cls = CONFIG_MAPPING[kind]
        config = cls.from_dict(cls._decode_special_floats(without_code(args)))
    except Exception as error:  # each class checks its own keys, with errors of many types
        reason = f"{CONFIG_MAPPING[kind].__name__} refuses these arguments: "
        raise config_error(("model", "args"), f"{reason}{short_name(' '.join(str(error).split()))}") from None
    with torchao_import_silenced():
        return getattr(transformers, name), config


def without_code(value: Any) -> Any:
    """Return a table without the key `auto_map`, also in nested tables. The key names code in the folder. Some classes
    ask the user whether to run that code, and an export does not have that code."""
    if isinstance(value, Mapping):
        return {key: without_code(inner) for key, inner in value.items() if key != "auto_map"}
    return [without_code(inner) for inner in value] if isinstance(value, list) else value


_MOST_MODULES, _MOST_BUFFER_BYTES = 30_000, 1 << 30
"""Limits of a model of `transformers`: number of modules, and bytes of buffers. A decoder has about 13 modules in a
layer, since its experts are stacked. Buffers are tables of positions and masks."""


@contextmanager
def _size_limited() -> Iterator[None]:
    """Raise TooLargeError as soon as the modules that are built in the `with` block exceed `_MOST_MODULES` or
    `_MOST_BUFFER_BYTES`. Otherwise, a `config.json` with huge numbers would fill the memory."""
    most = {"modules": _MOST_MODULES, "bytes of buffers": _MOST_BUFFER_BYTES}
    counted = Counter[str]()

    def count(what: str, number: int) -> None:
        counted[what] += number
        if counted[what] > most[what]:
            reason = f"the model would have more than {most[what]:,} {what}, which no real model has; correct the sizes"
            raise TooLargeError([Problem(("model", "args"), reason)])

    def count_buffer(module: nn.Module, name: str, buffer: Tensor | None) -> None:
        count("bytes of buffers", 0 if buffer is None else buffer.nbytes)

    with (
        register_module_module_registration_hook(lambda module, name, child: count("modules", 1)),
        register_module_buffer_registration_hook(count_buffer),
    ):
        yield


def _built(cls: Any, config: Any) -> Any:
    """Return a module of a class. Raises ConfigError if the class refuses the values of `config.json`."""
    try:
        return cls(config)
    except (ConfigError, MemoryError):
        raise
    except Exception as error:  # each class checks its own keys, with errors of many types
        if "can't allocate memory" in str(error):
            raise
        reason = f"{type(error).__name__}: {short_name(' '.join(str(error).split()))}"
        text = f"{cls.__name__} cannot be built from these arguments: {reason}"
        raise config_error(("model", "args"), text) from None


def _check_size(cls: Any, config: Any) -> None:
    """Raise TooLargeError for sizes that no model has, before memory is allocated for them."""
    with torch.device("meta"), _size_limited():
        try:
            cls(deepcopy(config))
        except TooLargeError:
            raise
        except Exception:  # some classes cannot be built on the meta device
            return


def _check_length(config: Any, seq_len: int) -> None:
    """Raise ConfigError if `seq_len` is larger than the longest sequence that the model supports."""
    key = config.attribute_map.get("max_position_embeddings", "max_position_embeddings")
    longest = getattr(config, key, None)
    if isinstance(longest, int) and seq_len > longest:
        reason = f"the model takes sequences of up to {longest} tokens (model.args.{key}); set {longest} or less"
        raise config_error(("training", "seq_len"), reason, seq_len, also=(("model", "args"),))


def _declare_tensor_parallel(module: Any) -> None:
    """Set the attribute `tensor_parallel` of a module: its tensor-parallel plan of `transformers`, translated into
    styles of this package. Also set `sequence_parallel` to False.

    If there is no plan, or the plan cannot be translated, set only the attribute `no_tensor_parallel`, to the reason.
    The plan of `transformers` omits the modules that every rank computes in the same way. These modules get the style
    `sequence`.
    """
    name, plan = type(module).__name__, getattr(module, "tp_plan", None)
    if not plan:
        reason = f"{name} of transformers has no plan for tensor parallelism"
        module.no_tensor_parallel = f"{reason}; set tensor_parallel_degree = 1"
        return
    output = module.get_output_embeddings()
    head = next((path for path, child in module.named_modules() if child is output), None)
    styles = {glob: _STYLES.get(style) for glob, style in plan.items()}
    if head is not None and plan.get(head) in ("colwise_gather_output", "colwise_rep"):
        styles[head] = "head"
    unknown = [f"{glob} ({plan[glob]})" for glob, style in styles.items() if style is None]
    if unknown:
        reason = f"{name} divides modules in a way that is not supported: {listed(unknown, most=1)}"
        module.no_tensor_parallel = f"{reason}; set tensor_parallel_degree = 1"
        return
    module.sequence_parallel = False  # the code between the layers needs all tokens of a sequence
    others = [path for path, child in module.named_modules() if next(child.parameters(recurse=False), None) is not None]
    others = [path for path in others if not any(matches(glob, path) for glob in styles)]
    module.tensor_parallel = {**styles, **dict.fromkeys(others, "sequence")}


def _places_in_files(module: Any) -> PlacesInFiles:
    """Return a function that finds the module's tensors in files that this or an older release of `transformers` wrote.
    The function uses the conversions of `transformers` for the module's class, and raises ConfigError if a conversion
    fails."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming, dot_natural_key, rename_source_key

    conversions, prefix = get_model_conversion_mapping(module), module.base_model_prefix
    unused = [*(module._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq"]

    def places(files: Mapping[str, FileTensor], own_names: Collection[str]) -> tuple[Places, Collection[str]]:
        renamings: list[Any] = []
        converters: list[Any] = []
        for conversion in deepcopy(conversions):  # some conversions change their own attributes
            (renamings if isinstance(conversion, WeightRenaming) else converters).append(conversion)
        by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
        known, found, ignored = dict.fromkeys(own_names, True), dict[str, Place](), set[str]()
        converted: dict[str, _Conversion] = {}
        for name in sorted(files, key=dot_natural_key):
            own_name, pattern = rename_source_key(name, renamings, converters, prefix, known)
            if own_name not in known and name in known:
                own_name, pattern = name, None
            if own_name in known and pattern is None:
                found[own_name] = Piece(name)
            elif own_name in known:
                conversion = _Conversion(module, own_name, by_pattern[pattern], [])
                converted.setdefault(own_name, conversion).sources.append((name, pattern))
            elif any(re.search(unused_name, name) for unused_name in unused):
                ignored.add(name)
        for conversion in converted.values():
            results = conversion.places(files)
            if results.keys() <= known.keys():  # otherwise, the source tensors are unexpected
                found |= results
        return found, ignored

    return places


@dataclass(frozen=True)
class _Conversion:
    """A conversion that computes parameters of a `transformers` model from tensors of a folder with other names."""

    module: Any
    first: str
    """Name of the first parameter that the conversion computes."""

    converter: Any
    """A `WeightConverter`."""

    sources: list[tuple[str, str]]
    """(name, pattern) of each tensor in the folder. The pattern is the converter's pattern that the name matches."""

    def places(self, files: Mapping[str, FileTensor]) -> dict[str, Converted]:
        """Return the place of each parameter that this conversion computes, by the parameter's name. Raises ConfigError
        if the tensors of the folder cannot be converted."""
        names = tuple(name for name, _ in self.sources)
        tensors = [
            torch.empty(files[name].shape, dtype=getattr(torch, FLOATS.get(files[name].dtype, "int64")), device="meta")
            for name in names
        ]
        try:
            if _has_gap(self.sources):
                raise ValueError("the numbers in their names have a gap")
            results = self(tensors)
        except Exception as error:  # each operation checks its tensors, with errors of many types
            reason = f"{self.first} cannot be computed from {listed(names)}: {' '.join(str(error).split())}"
            raise config_error(("model", "weights"), reason) from None
        return {
            own_name: Converted(names, tuple(result.shape), partial(self._one, own_name))
            for own_name, result in results.items()
        }

    def _one(self, own_name: str, tensors: Sequence[Tensor]) -> Tensor:
        return self(tensors)[own_name]

    def __call__(self, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return the computed parameters by name. `tensors`: the values of `sources`, in order."""
        converter = deepcopy(self.converter)
        for (name, pattern), tensor in zip(self.sources, tensors, strict=True):
            converter.add_tensor(self.first, name, pattern, tensor)
        results = converter.convert(self.first, model=self.module, config=self.module.config)
        results = results[0] if isinstance(results, tuple) else results  # transformers 5.0 also returns errors
        return {name: value[0] if isinstance(value, list) else value for name, value in results.items()}


def _has_gap(sources: Sequence[tuple[str, str]]) -> bool:
    """Return True if a tensor is missing. The numbers in the names that match one pattern are then not 0, 1, 2, and so
    on."""
    by_pattern: defaultdict[str, list[list[int]]] = defaultdict(list)
    for name, pattern in sources:
        by_pattern[pattern].append([int(number) for number in re.findall(r"\d+", name)])
    columns = [column for numbers in by_pattern.values() for column in zip(*numbers, strict=True)]
    return any(len(set(column)) > 1 and column != tuple(range(len(column))) for column in columns)


def in_published_format(module: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors of a module with the names and layouts that `save_pretrained` writes to files. Copies of tied
    tensors, and tensors that the class does not save, are omitted.

    `tensors`: tensors by name in the module. If some tensors are converted together, `tensors` must contain all of
    them.
    """
    from transformers.core_model_loading import revert_weight_conversion

    omitted = {*module.all_tied_weights_keys, *(module._keys_to_ignore_on_save or ())}
    kept = {name: tensor for name, tensor in tensors.items() if name not in omitted}
    converted: dict[str, Tensor] = revert_weight_conversion(module, kept)
    return converted
