"""The file `adapter_config.json` of `peft`. This module does not import torch."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import threading
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from titan_launch.config.sections.model import LoRAConfig
from titan_launch.core.errors import format_key, listed
from titan_launch.core.terminal import short_name
from titan_launch.models.args import MOST_WIDTH
from titan_launch.models.huggingface.config_json import read_json
from titan_launch.models.huggingface.files import ADAPTER_CONFIG_FILE, WeightsError, as_text

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "task_type": ("CAUSAL_LM", "FEATURE_EXTRACTION", None),
    "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva"),
    "bias": ("none",),
    "modules_to_save": (None, []),
    "loftq_config": ({}, None),
    **dict.fromkeys(("lora_bias", "ensure_weight_tying", "use_dora", "use_qalora"), (False,)),
    **dict.fromkeys(("trainable_token_indices", "layer_replication", "alora_invocation_tokens"), (None,)),
    **dict.fromkeys(("enable_lora", "use_bdlora", "megatron_config", "corda_config", "lora_ga_config"), (None,)),
    **dict.fromkeys(("velora_config", "kasa_config", "monteclora_config", "arrow_config"), (None,)),
}
"""Keys, each with its supported values. With these values, an adapter is plain LoRA."""

_REMEDIES = {
    "init_lora_weights": "other initializations change the base or the training; for PiSSA, OLoRA and CorDA, "
    "save_pretrained(..., path_initial_model_for_weight_conversion=...) of peft writes adapters of the original base"
}

WITHOUT_EFFECT: Mapping[str, str] = {
    "base_model_name_or_path": "`model.weights` names the base",
    "revision": "it belongs to `base_model_name_or_path`",
    "auto_mapping": "it names the class of the base",
    "peft_version": "each key is checked by itself",
    "inference_mode": "`peft` freezes the adapters with it, and changes no value",
    "runtime_config": "`peft` removes it when it reads the file",
    "fan_in_fan_out": "`peft` sets it by the class of each layer: true for `Conv1D`, false for `nn.Linear`",
    "eva_config": "it decides initial values of A, and the file has the values",
    "megatron_core": "it has an effect only with `megatron_config`, which must be null",
    "qalora_group_size": "it has an effect only with `use_qalora`, which must be false",
    "merge_weights": "a key of `peft` 0.2: it decided when weights are merged",
}
"""Keys that may have any value, each with the reason."""


class Wanted(NamedTuple):
    """The adapters of a job for one target of `peft`."""

    names: list[str]
    """Names in this package of the modules that the target contains, or of the weights of experts."""

    ranks: set[int]
    """Ranks that the target may have in the file."""

    scales: set[float]
    """Factors by which the job multiplies the products B A."""


_Rank = Annotated[int, Field(ge=1, le=MOST_WIDTH)]
_Names = Annotated[list[str], AfterValidator(frozenset)]  # a set, because each path of a model is looked up

_MOST_PATTERN = 10_000
"""Largest number of characters of a regular expression."""

_MATCHING_SECONDS = 2.0
"""Limit of the CPU time in seconds for matching patterns with the names of modules. Matching usually takes
milliseconds. The time of some regular expressions grows exponentially with the length of a name."""


@contextmanager
def matching_limited() -> Iterator[None]:
    """Raise WeightsError if the `with` block takes more than `_MATCHING_SECONDS` of CPU time. Only the main thread has
    this limit, because other threads get no signals."""

    def stop(*_: object) -> None:
        raise WeightsError(f"the patterns in its {ADAPTER_CONFIG_FILE} take too long to match; simplify them")

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGVTALRM, stop)
    try:
        signal.setitimer(signal.ITIMER_VIRTUAL, _MATCHING_SECONDS)
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


class AdapterConfig(BaseModel):
    """The keys of `adapter_config.json` that this package understands, with the defaults of `peft`."""

    model_config = ConfigDict(frozen=True, strict=True, allow_inf_nan=False)

    r: _Rank
    lora_alpha: float
    use_rslora: bool = False
    rank_pattern: dict[str, _Rank] = {}
    alpha_pattern: dict[str, float] = {}
    lora_dropout: float = 0.0
    target_modules: _Names | str | None = None
    target_parameters: _Names | None = None
    exclude_modules: _Names | str | None = None
    layers_to_transform: list[int] | int | None = None
    layers_pattern: list[str] | str | None = None

    @field_validator("rank_pattern", "alpha_pattern", "target_modules", "exclude_modules", "layers_pattern")
    @classmethod
    def _compiles(cls, value: Any, info: ValidationInfo) -> Any:
        """Raise ValueError for an invalid or too long regular expression: a key of `rank_pattern` or `alpha_pattern`, a
        value of `layers_pattern`, or a string in place of a list of modules."""
        are_names = isinstance(value, frozenset)
        for pattern in [value] if isinstance(value, str) else [] if are_names else value or ():
            if len(pattern) > _MOST_PATTERN:
                raise ValueError(f"a regular expression has more than {_MOST_PATTERN} characters")
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # a warning of `re` would name a line of this file
                    re.compile(pattern)
            except (re.error, OverflowError, RecursionError) as error:
                raise ValueError(f"{as_text(pattern)} is not a valid regular expression: {error}") from None
        return value

    @model_validator(mode="after")
    def _layers_are_of_names(self) -> AdapterConfig:
        """Raise ValueError if the keys that select layers are combined in a way that `peft` refuses."""
        if self.layers_to_transform is not None and isinstance(self.target_modules, str):
            raise ValueError("layers_to_transform requires that target_modules is a list")
        if self.layers_pattern and self.layers_to_transform is None:
            raise ValueError("layers_pattern requires layers_to_transform")
        return self

    def rank_of(self, path: str) -> int:
        """Return the rank of an adapter. `path`: full name of the module or parameter in the base model."""
        return _by_pattern(self.rank_pattern, path, self.r)

    def scale_of(self, path: str) -> float:
        """Return the factor of the product B A of an adapter. `path`: as for `rank_of`."""
        rank = self.rank_of(path)
        return _by_pattern(self.alpha_pattern, path, self.lora_alpha) / (rank**0.5 if self.use_rslora else rank)

    def adapts_module(self, path: str) -> bool:
        """Return True if `peft` gives the module an adapter."""
        if self.exclude_modules and _matches(self.exclude_modules, path):
            return False
        if self.target_modules is None or not _matches(self.target_modules, path):
            return False
        if isinstance(self.target_modules, str) or path in self.target_modules or self._layers is None:
            return True
        numbers = (re.match(rf"{pattern}\.(?P<layer>\d+)\.", path) for pattern in self._layer_patterns)
        number = next(filter(None, numbers), None)
        return number is not None and int(number["layer"]) in self._layers

    def adapts_parameter(self, path: str) -> bool:
        """Return True if `peft` gives the parameter an adapter of its own."""
        return _matches(self.target_parameters or (), path)

    @cached_property
    def _layers(self) -> list[int] | None:
        """Numbers of the layers that get adapters; None if all layers do."""
        layers = self.layers_to_transform
        return [layers] if isinstance(layers, int) else layers or None

    @cached_property
    def _layer_patterns(self) -> list[str]:
        """Regular expressions for the part of a path before the number of the layer."""
        patterns = [self.layers_pattern] if isinstance(self.layers_pattern, str) else self.layers_pattern
        return [rf"(?:^|.*?\.){pattern}" for pattern in patterns] if patterns else [r".*?\.[^.]*"]

    def differences(self, config: LoRAConfig, targets: Mapping[str, Wanted] | None = None) -> list[str]:
        """Return a message for each difference between the adapters and `[lora]`. Ranks and scales are compared.
        Dropout is compared only if the job does not set `lora.dropout`.

        `targets`: the adapters of the job, by target of `peft`; None if the targets are not known yet. With None, ranks
        and scales are compared only if all targets have one rank and one scale. Raises WeightsError for patterns that
        take too long to match.
        """
        with matching_limited():
            return list(self._differences(config, targets))

    def _differences(self, config: LoRAConfig, targets: Mapping[str, Wanted] | None) -> Iterator[str]:
        if targets is None:
            has_several = self.rank_pattern or self.alpha_pattern or config.rules
            targets = {} if has_several else {"": Wanted([""], {config.rank}, {config.scale})}
        ranks = {path: self.rank_of(path) for path in targets}
        scales = {path: self.scale_of(path) for path in targets}
        parts = {path: len(wanted.names) for path, wanted in targets.items()}
        options = [{rank, rank if rank % parts[path] else rank // parts[path]} for path, rank in ranks.items()]
        common = set[int]().union(*options).intersection(*options)
        rank = next((rank for rank in (config.rank, self.r) if rank in common), max(common, default=None))
        rules = ", without other values in lora.rules" if config.rules else ""
        if any(ranks[path] not in wanted.ranks for path, wanted in targets.items()):
            if rank is not None:
                yield f"its rank (r) is {rank}; set lora.rank = {rank}{rules}"
            else:
                found = _by_value({name: ranks[path] for path in targets for name in targets[path].names})
                yield f"its ranks are {found} (by rank_pattern); set lora.rank and lora.rules to match"
        if any(not math.isclose(scales[path], own) for path, wanted in targets.items() for own in wanted.scales):
            shown = {name: f"{scales[path]:.9g}" for path in targets for name in targets[path].names}
            if rank is not None and len(set(shown.values())) == 1:
                scale, flag = scales.popitem()[1], str(self.use_rslora).lower()
                alpha = config.model_copy(update={"rank_stabilized": self.use_rslora}).alpha_of(scale, rank)
                own = listed(sorted({f"{each:.9g}" for wanted in targets.values() for each in wanted.scales}))
                reason = f"its scale is {scale:.9g}, but [lora] gives {own}"
                yield f"{reason}; set lora.alpha = {alpha} and lora.rank_stabilized = {flag}{rules}"
            else:
                formula = "a scale is alpha / rank, or alpha / sqrt(rank) with rank_stabilized"
                remedy = f"set lora.alpha and lora.rules to match ({formula})"
                yield f"its scales are {_by_value(shown)} (by rank_pattern and alpha_pattern); {remedy}"
        if self.lora_dropout != config.dropout and "dropout" not in config.model_fields_set:
            remedy = f"set lora.dropout = {self.lora_dropout} (the adapter's value) or another value"
            yield f"its lora_dropout is {self.lora_dropout}, but lora.dropout is unset; {remedy}"


_MOST_SHOWN = 30
"""Largest number of unsupported keys that an error names."""


def read_config(folder: Path) -> AdapterConfig:
    """Read a folder's `adapter_config.json`. Raises WeightsError if the file is missing or invalid, or if keys are not
    supported. The error names up to 30 unsupported keys."""
    if not os.path.lexists(folder / ADAPTER_CONFIG_FILE):
        reason = f"it has no {ADAPTER_CONFIG_FILE}" if os.path.isdir(folder) else "there is no such folder"
        raise WeightsError(f"{reason}; name a folder that peft or `titan-launch export --adapter` wrote")
    found = read_json(folder / ADAPTER_CONFIG_FILE)
    problems = list(islice(_unsupported(found), _MOST_SHOWN))
    try:
        with matching_limited():
            config = AdapterConfig.model_validate(found)
    except ValidationError as error:
        first = {
            problem["loc"][:1]: problem["msg"].removeprefix("Value error, ") for problem in reversed(error.errors())
        }
        problems += [
            f"{format_key(key)}: {short_name(message)}" if key else short_name(message)
            for key, message in first.items()
        ]
    if problems:
        raise WeightsError("\n    ".join([f"its {ADAPTER_CONFIG_FILE} cannot be read:", *problems]))
    return config


def _unsupported(found: Mapping[str, Any]) -> Iterator[str]:
    """Yield a clause for each key of `adapter_config.json` with a value that is not supported."""
    for key, value in {"peft_type": None, **found}.items():
        if key in NEUTRAL:
            if not any(type(value) is type(neutral) and value == neutral for neutral in NEUTRAL[key]):
                supported = ", ".join(map(json.dumps, NEUTRAL[key]))
                remedy = f"; {_REMEDIES[key]}" if key in _REMEDIES else ""
                yield f"{key} = {as_text(value)} is not supported (supported: {supported}){remedy}"
        elif key not in WITHOUT_EFFECT and key not in AdapterConfig.model_fields and value is not None:
            shown = f"{short_name(key)} = {as_text(value)}"
            yield f"{shown} is a key that this package does not know; it must be null or absent"


def _matches(names: Collection[str] | str, path: str) -> bool:
    """Return True if `names` select a path in `peft`. A string selects a path that it matches as a regular expression.
    A collection selects a path that ends with one of its names."""
    if isinstance(names, str):
        return re.fullmatch(names, path) is not None
    parts = path.split(".")
    return any(".".join(parts[start:]) in names for start in range(len(parts)))


def _by_pattern(patterns: Mapping[str, Any], path: str, default: Any) -> Any:
    """Return the value of the first pattern that matches the end of a path; else `default`."""
    return next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", path)), default)


def _by_value(values: Mapping[str, Any]) -> str:
    """Return each value with the paths that have it: "3 for a, b; 8 for c"."""
    paths: dict[Any, list[str]] = {}
    for path, value in values.items():
        paths.setdefault(value, []).append(path)
    return "; ".join(f"{value} for {listed(found, most=2)}" for value, found in paths.items())
