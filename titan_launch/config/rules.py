"""What pydantic cannot see: keys that are right alone and wrong together, names that must exist.

Every rule is a function that yields the problems it finds. A problem names in `also` the other keys it depends on.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from typing import Any

from pydantic import ValidationError

from titan_launch.config.architectures import ARCHITECTURES, images_taken, resolve_args
from titan_launch.config.base import Section
from titan_launch.config.checkpoint_rules import CHECKPOINT_RULES
from titan_launch.config.compile_rules import COMPILE_RULES
from titan_launch.config.data import SKLEARN_DIGITS, ImageData, SampleUnit, SyntheticData, TextData, names_a_file
from titan_launch.config.fault_rules import FAULT_RULES
from titan_launch.config.images import DIGITS, misfits
from titan_launch.config.job import JobConfig
from titan_launch.config.lr_scheduler import WarmupStableDecay
from titan_launch.config.model import ModelConfig
from titan_launch.config.optimizer_rules import OPTIMIZER_RULES
from titan_launch.config.parallelism_rules import PARALLELISM_RULES
from titan_launch.config.pipeline_rules import PIPELINE_RULES, SPLIT_BACKWARD_RULES
from titan_launch.config.precision import PrecisionRule
from titan_launch.config.tokenizer import VOCABULARY_SIZES
from titan_launch.errors import KeyPath, Problem, did_you_mean, format_key

Rule = Callable[[JobConfig], Iterator[Problem]]
"""Yields what is wrong with a job."""

_Split = TextData | ImageData
_NAME, _FLAVOR, _ARGS = ("model", "name"), ("model", "flavor"), ("model", "args")


def model_exists(config: JobConfig) -> Iterator[Problem]:
    """A model is one of this package, or has the form of an import string."""
    name = config.model.name
    if ":" in name:
        module, _, factory = name.partition(":")
        if not all(part.isidentifier() for part in [*module.split("."), *factory.split(".")]):
            yield Problem(_NAME, "a model of your own is named package.module:factory", name)
    elif name not in ARCHITECTURES:
        known = ", ".join(f'"{known}"' for known in ARCHITECTURES)
        hint = did_you_mean(name, ARCHITECTURES)
        yield Problem(_NAME, f"unknown model; there is {known}, or package.module:factory for your own{hint}", name)


def flavor_exists(config: JobConfig) -> Iterator[Problem]:
    """A flavor is a row of the model's size table."""
    name, flavor = config.model.name, config.model.flavor
    if name in ARCHITECTURES and flavor not in ARCHITECTURES[name].flavors:
        flavors = ARCHITECTURES[name].flavors
        reason = f"unknown flavor; {name} has {', '.join(flavors)}{did_you_mean(flavor, flavors)}"
        yield Problem(_FLAVOR, reason, flavor, also=(_NAME,))


def flavor_is_not_a_factorys(config: JobConfig) -> Iterator[Problem]:
    """A factory of the user's own has no size table. (The default is let pass: a recorded configuration has it.)"""
    if ":" in config.model.name and config.model.flavor != ModelConfig.model_fields["flavor"].default:
        reason = f"{config.model.name} has no flavors; give its arguments in [model.args]"
        yield Problem(_FLAVOR, reason, config.model.flavor, also=(_NAME,))


def model_args_are_valid(config: JobConfig) -> Iterator[Problem]:
    """`[model.args]` fits the model: each argument alone, then all together."""
    try:
        args = resolve_args(config.model.name, config.model.flavor, config.model.args)
    except ValidationError as error:
        from titan_launch.config.translate import translate

        yield from translate(error, ARCHITECTURES[config.model.name].args, _ARGS)
    except KeyError:  # a model or a flavor that does not exist, or a factory, whose arguments only Python can judge
        pass
    else:
        for fields, reason in ARCHITECTURES[config.model.name].check(args):
            yield _args_problem(config, fields, reason)


def factory_args_can_be_recorded(config: JobConfig) -> Iterator[Problem]:
    """A run records its configuration as JSON, which a factory's arguments must survive."""
    for key, value in _leaves(config.model.args, _ARGS):
        if isinstance(value, float) and not math.isfinite(value):
            yield Problem(key, "must be finite: a run records its configuration as JSON", value)
        elif not isinstance(value, (bool, int, float, str)):
            yield Problem(key, "must be a string, a number or a bool: a run records its configuration as JSON", value)


def data_suits_the_model(config: JobConfig) -> Iterator[Problem]:
    """A model of tokens is given tokens, and one of images images."""
    architecture = ARCHITECTURES.get(config.model.name)
    for source, data in _sources(config):
        if architecture is not None and data.unit != architecture.unit:
            reason = f"the model {config.model.name} takes {architecture.unit}, not {data.unit}"
            yield Problem((*source, "kind"), f"{reason}; set {_kinds_of(architecture.unit)}", data.kind, also=(_NAME,))


def validation_is_on_what_is_trained_on(config: JobConfig) -> Iterator[Problem]:
    """A factory's model, of which nobody knows what it takes, is validated on the like of what it is trained on."""
    held_out, unit = config.validation.data, config.data.unit
    if ":" in config.model.name and held_out is not None and held_out.unit != unit:
        reason = f"gives {held_out.unit}, and the model is trained on {unit}; set {_kinds_of(unit)}"
        yield Problem(("validation", "data", "kind"), reason, held_out.kind, also=(_NAME, ("data", "kind")))


def vocabulary_is_large_enough(config: JobConfig) -> Iterator[Problem]:
    """The model has an embedding for every token of its data."""
    vocab_size = getattr(_resolved_args(config), "vocab_size", None)
    for source, data in _sources(config):
        if isinstance(data, ImageData):
            continue
        size, owner, key = _vocabulary(config, source, data)
        if vocab_size is not None and vocab_size < size:
            reason = f"the model's vocab_size ({vocab_size}) must be at least {size}, the vocabulary of {owner}"
            yield _args_problem(config, ("vocab_size",), reason, also=(key, (*source, "kind")))


def text_files_exist(config: JobConfig) -> Iterator[Problem]:
    """Every entry of a `path` names at least one file."""
    for source, data in _sources(config):
        if isinstance(data, TextData):
            entries = [data.path] if isinstance(data.path, str) else data.path
            for index, entry in enumerate(entries):
                key = (*source, "path") if isinstance(data.path, str) else (*source, "path", index)
                if not names_a_file(entry):
                    yield Problem(key, _why_no_file(entry), entry, also=((*source, "kind"),))


def image_files_exist(config: JobConfig) -> Iterator[Problem]:
    """A `path` to images that does not name the digits names a file."""
    for source, data in _sources(config):
        if isinstance(data, ImageData) and data.path != SKLEARN_DIGITS and not os.path.isfile(data.path):
            reason = f'no such file (paths are relative to the working directory), nor "{SKLEARN_DIGITS}"'
            yield Problem((*source, "path"), reason, data.path, also=((*source, "kind"),))


def digits_suit_the_model(config: JobConfig) -> Iterator[Problem]:
    """The model takes the digits as they are. (Of other images only reading them can tell.)"""
    taken = images_taken(config.model) if _resolved_args(config) else None
    for source, data in _sources(config):
        if taken is not None and isinstance(data, ImageData) and data.path == SKLEARN_DIGITS:
            for reason in misfits(DIGITS, taken):
                yield Problem((*source, "path"), reason, data.path, also=(("model",), (*source, "kind")))


def validation_has_data(config: JobConfig) -> Iterator[Problem]:
    """What is validated on must be said."""
    if config.validation.freq and config.validation.data is None:
        reason = 'needs data to validate on: add [validation.data], for example with path and split = "validation"'
        yield Problem(("validation", "freq"), reason, config.validation.freq, also=(("validation", "data"),))


def validation_samples_are_held_out(config: JobConfig) -> Iterator[Problem]:
    """Documents and images set aside for validation are not trained on."""
    train, held_out = config.data, config.validation.data
    if not (isinstance(train, _Split) and isinstance(held_out, _Split) and config.validation.freq):
        return
    if train.kind != held_out.kind or train.path != held_out.path or held_out.split != "validation":
        return
    also = (("data",), ("validation", "freq"), ("validation", "data", "path"))
    if train.split != "train":
        what = "documents" if isinstance(held_out, TextData) else "images"
        reason = f'these {what} are trained on too; set data.split = "train"'
        yield Problem(("validation", "data", "split"), reason, held_out.split, also=also)
    elif train.validation_percent != held_out.validation_percent:
        reason = f"differs from data.validation_percent ({train.validation_percent}), so the two splits overlap"
        yield Problem(("validation", "data", "validation_percent"), reason, held_out.validation_percent, also=also)


def validation_sequences_are_new(config: JobConfig) -> Iterator[Problem]:
    """Synthetic validation data is not the training data over again."""
    train, held_out = config.data, config.validation.data
    if not (isinstance(train, SyntheticData) and isinstance(held_out, SyntheticData) and config.validation.freq):
        return
    if (train.seed, train.vocab_size, train.noise) == (held_out.seed, held_out.vocab_size, held_out.noise):
        reason = "these are the sequences trained on; give one of the two sources another seed"
        also = (("data",), ("validation", "data"), ("validation", "freq"))
        yield Problem(("validation", "data", "seed"), reason, held_out.seed, also=also)


def validation_images_look_like_those_trained_on(config: JobConfig) -> Iterator[Problem]:
    """Pixels mean the same to the model in validation and in training."""
    train, held_out = config.data, config.validation.data
    if not (isinstance(train, ImageData) and isinstance(held_out, ImageData) and config.validation.freq):
        return
    for name, ours, theirs in (("mean", held_out.mean, train.mean), ("std", held_out.std, train.std)):
        if ours != theirs:
            value = list(theirs) if isinstance(theirs, tuple) else theirs
            reason = f"must be data.{name} ({value}), or the same image looks different in training"
            yield Problem(("validation", "data", name), reason, ours, also=(("data", name), ("data", "kind")))


def precision_rules_say_what_they_match(config: JobConfig) -> Iterator[Problem]:
    """A precision rule has `type`, `match` or both."""
    for index, rule in enumerate(config.precision.rules):
        if not rule.type and not rule.match:
            key: KeyPath = ("precision", "rules", index)
            reason = 'matches nothing: give it type = "ClassName", match = "module.path", or both'
            yield Problem(key, reason, also=((*key, "type"), (*key, "match")))


def precision_rules_can_be_reached(config: JobConfig) -> Iterator[Problem]:
    """The first rule that matches wins, so a second one for the same modules does nothing."""
    first: dict[tuple[str | None, str | tuple[str, ...] | None], int] = {}
    for index, rule in enumerate(config.precision.rules):
        earlier = first.setdefault(_target(rule), index)
        if earlier != index and any(_target(rule)):
            reason = f"matches what precision.rules.{earlier} matches, which comes first and wins; merge the two"
            yield Problem(("precision", "rules", index), reason, also=(("precision", "rules", earlier),))


def deferred_gradients_accumulate_in_float32(config: JobConfig) -> Iterator[Problem]:
    """Deferred modes accumulate in the reduce dtype, where bfloat16 is too coarse. (`auto` then leaves them out.)"""
    mode = config.gradient_accumulation.mode
    if mode in ("immediate", "auto"):
        return
    reason = (
        f'gradient_accumulation.mode = "{mode}" adds gradients up in this dtype, with a relative error of 4e-3 over 4 '
        "microbatches and 8e-3 over 64, against 1e-9 and 2e-8 in float32 (measured); "
        'set "float32", or gradient_accumulation.mode = "immediate"'
    )
    for key, dtype in _reduce_dtypes(config):
        if dtype == "bfloat16":
            yield Problem(key, reason, dtype, also=(("gradient_accumulation", "mode"),))


def deferred_all_reduce_has_replicas(config: JobConfig) -> Iterator[Problem]:
    """Without replicas there is no all-reduce to defer."""
    degree = ("parallelism", "data_parallel_replicate_degree")
    mode = config.gradient_accumulation.mode
    if mode == "deferred_all_reduce" and config.parallelism.data_parallel_replicate_degree == 1:
        reason = f'needs {format_key(degree)} > 1 (HSDP); without replicas use "immediate" or "deferred"'
        yield Problem(("gradient_accumulation", "mode"), reason, mode, also=(degree,))


def parameters_can_stay_unsharded(config: JobConfig) -> Iterator[Problem]:
    """Parameters cannot both be kept whole and be freed after forward."""
    key = ("gradient_accumulation", "keep_params_unsharded")
    if not config.gradient_accumulation.keep_params_unsharded:
        return
    for other, reshard in _reshard_after_forward(config):
        if reshard in ("always", True):
            reason = "frees after forward what gradient_accumulation.keep_params_unsharded = true keeps; drop one"
            yield Problem(other, reason, reshard, also=(key,))


ACCUMULATION_RULES: tuple[Rule, ...] = (
    deferred_gradients_accumulate_in_float32,
    deferred_all_reduce_has_replicas,
    parameters_can_stay_unsharded,
    *SPLIT_BACKWARD_RULES,
)
"""What a mode of accumulation must go with; the planner leaves out the modes that break one."""


def kernels_are_profiled_on_cuda(config: JobConfig) -> Iterator[Problem]:
    """On a CPU there are no kernels to profile."""
    if config.job.device == "cpu" and config.comm.profile_freq:
        reason = 'profiles CUDA kernels, and job.device = "cpu" has none; leave it out, or set another device'
        yield Problem(("comm", "profile_freq"), reason, config.comm.profile_freq, also=(("job", "device"),))


def schedule_fits_the_run(config: JobConfig) -> Iterator[Problem]:
    """Warm-up, and the decay at the end, take no more steps than there are."""
    schedule, steps = config.lr_scheduler, config.training.steps
    decay_ratio = schedule.decay_ratio if isinstance(schedule, WarmupStableDecay) else 0.0
    decay = round(decay_ratio * steps)
    if schedule.warmup_steps + decay <= steps:
        return
    phases = f" and the {decay} steps of decay (decay_ratio = {decay_ratio})" if decay else ""
    reason = f"warm-up{phases} must fit into training.steps ({steps}); set at most {steps - decay}"
    also = (("training", "steps"), ("lr_scheduler", "kind"), ("lr_scheduler", "decay_ratio"))
    yield Problem(("lr_scheduler", "warmup_steps"), reason, schedule.warmup_steps, also=also)


RULES: tuple[Rule, ...] = (
    model_exists,
    flavor_exists,
    flavor_is_not_a_factorys,
    model_args_are_valid,
    factory_args_can_be_recorded,
    data_suits_the_model,
    validation_is_on_what_is_trained_on,
    vocabulary_is_large_enough,
    text_files_exist,
    image_files_exist,
    digits_suit_the_model,
    validation_has_data,
    validation_samples_are_held_out,
    validation_sequences_are_new,
    validation_images_look_like_those_trained_on,
    precision_rules_say_what_they_match,
    precision_rules_can_be_reached,
    *ACCUMULATION_RULES,
    kernels_are_profiled_on_cuda,
    schedule_fits_the_run,
    *FAULT_RULES,
    *CHECKPOINT_RULES,
    *COMPILE_RULES,
    *OPTIMIZER_RULES,
    *PIPELINE_RULES,
    *PARALLELISM_RULES,
)
"""All of them."""


def _resolved_args(config: JobConfig) -> Section | None:
    """The arguments of the model, if they are this package's to know, and right."""
    try:
        return resolve_args(config.model.name, config.model.flavor, config.model.args)
    except (KeyError, ValidationError):
        return None


def _args_problem(config: JobConfig, fields: tuple[str, ...], reason: str, also: tuple[KeyPath, ...] = ()) -> Problem:
    """A problem of a model's arguments, at the first of them that the job gives; else at the flavor they come from."""
    given = config.model.args
    name = next((field for field in fields if field in given), None)
    key, value = (_FLAVOR, config.model.flavor) if name is None else ((*_ARGS, name), given[name])
    return Problem(key, reason, value, also=(_NAME, _FLAVOR, *((*_ARGS, field) for field in fields), *also))


def _leaves(value: Any, key: KeyPath) -> Iterator[tuple[KeyPath, Any]]:
    """The values in a free table, and in the tables and arrays in it, that are neither."""
    if isinstance(value, (dict, list)):
        for name, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _leaves(inner, (*key, name))
    else:
        yield key, value


def _sources(config: JobConfig) -> Iterator[tuple[KeyPath, TextData | SyntheticData | ImageData]]:
    """The tables that describe data, with their paths."""
    yield ("data",), config.data
    if config.validation.data is not None:
        yield ("validation", "data"), config.validation.data


def _kinds_of(unit: SampleUnit) -> str:
    """The kinds of data that give tokens or images, to choose from."""
    return 'kind = "images"' if unit == "images" else 'kind = "text" or "synthetic"'


def _why_no_file(entry: str) -> str:
    if os.path.isdir(entry):
        return "this folder holds no files"
    what = "no file matches this pattern" if any(char in entry for char in "*?[") else "no such file or folder"
    return f"{what} (paths are relative to the working directory)"


def _vocabulary(config: JobConfig, source: KeyPath, data: TextData | SyntheticData) -> tuple[int, str, KeyPath]:
    """How many tokens a source has, who decides that, and by which key."""
    if isinstance(data, SyntheticData):
        return data.vocab_size, f"[{format_key(source)}]", (*source, "vocab_size")
    kind = config.tokenizer.kind
    return VOCABULARY_SIZES[kind], f'the "{kind}" tokenizer', ("tokenizer", "kind")


def _target(rule: PrecisionRule) -> tuple[str | None, str | tuple[str, ...] | None]:
    return rule.type, rule.match


def _reduce_dtypes(config: JobConfig) -> Iterator[tuple[KeyPath, str | None]]:
    yield ("precision", "reduce_dtype"), config.precision.reduce_dtype
    for index, rule in enumerate(config.precision.rules):
        yield ("precision", "rules", index, "reduce_dtype"), rule.reduce_dtype


def _reshard_after_forward(config: JobConfig) -> Iterator[tuple[KeyPath, str | bool | None]]:
    yield ("parallelism", "fsdp_reshard_after_forward"), config.parallelism.fsdp_reshard_after_forward
    for index, rule in enumerate(config.precision.rules):
        yield ("precision", "rules", index, "reshard_after_forward"), rule.reshard_after_forward
