"""Changed `config.json` files: `import` refuses each by name, or computes what `transformers` computes.

    python -m tests.models.mutations [--write docs/verification/models.md]

Every case deletes or changes one key of a tiny model's `config.json`: every key of the family's config class, also in
tables, and the keys of other classes. The logits of a case that is accepted are compared with those of `transformers`.
The command takes the release that Python finds. For another release, install it into a folder of its own:

    pip install --target /tmp/transformers-5.0 transformers==5.0.0
    PYTHONPATH=/tmp/transformers-5.0 python -m tests.models.mutations
"""

from __future__ import annotations

import argparse
import copy
import json
import re
import tempfile
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.publishing import publish
from tests.models.parity import CASES, VOCABULARY, read_model, samples
from titan_launch.core.errors import ConfigError
from titan_launch.models.decoder.huggingface_classes import FAMILIES, WITHOUT_EFFECT
from titan_launch.models.huggingface.config_json import read_folder_config
from titan_launch.models.huggingface.files import WeightsError

DELETED = "deleted"
TOLERANCE = 1e-5

_ACTIVATIONS = ("silu", "swish", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu")
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
LINEAR = {"rope_type": "linear", "factor": 2.0}
_ROPES: tuple[Any, ...] = (
    {},
    {"rope_type": "default"},
    {"rope_theta": 100.0},
    {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5},
    LINEAR,
    {"type": "linear", "factor": 2.0},
    {**LINEAR, "type": "linear", "rope_theta": 100.0},
    {**LINEAR, "type": "default"},
    LLAMA3,
    {**LLAMA3, "rope_theta": 100.0, "original_max_position_embeddings": None},
    YARN,
    {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    {"rope_type": "yarn", "factor": 4.0},
    {**YARN, "rope_theta": 100.0, "truncate": False, "beta_fast": 8.0, "beta_slow": 2.0},
    {**YARN, "truncate": None, "beta_fast": None, "attention_factor": None},
    {**YARN, "attention_factor": 0.7},
    {**YARN, "mscale": 0.7, "mscale_all_dim": 0.3},
    {**YARN, "mscale": 0.7},
    {**YARN, "mscale_all_dim": 0.3},
    {**YARN, "mscale": 0, "mscale_all_dim": 0},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "factor": 2.0},
    {"full_attention": LINEAR, "sliding_attention": {"rope_type": "default", "rope_theta": 100.0}},
    {"full_attention": YARN, "sliding_attention": {"rope_type": "default"}},
    {"full_attention": {**YARN, "truncate": False}, "sliding_attention": {"rope_type": "default"}},
    {"full_attention": {"rope_type": "default"}, "sliding_attention": LINEAR},
    {"full_attention": LINEAR},
    {"full_attention": None, "sliding_attention": None},
)
FULL, SLIDING = "full_attention", "sliding_attention"

VALUES: dict[str, tuple[Any, ...]] = {
    "hidden_act": _ACTIVATIONS,
    "hidden_activation": _ACTIVATIONS,
    "activation_function": _ACTIVATIONS,
    "rope_parameters": _ROPES,
    "rope_scaling": _ROPES,
    "rope_theta": (100.0, 1000),
    "rope_local_base_freq": (100.0, 1000),
    "rope_type": ("default", "linear", "llama3", "yarn", "dynamic", "longrope", "proportional"),
    "partial_rotary_factor": (0.5, 1.0, 1),
    "original_max_position_embeddings": (8, 16, 32),
    "sliding_window": (1, 3, 8, 100),
    "sliding_window_pattern": (1, 2, 3, 6),
    "_sliding_window_pattern": (1, 2, 3),
    "max_window_layers": (0, 1, 2),
    "num_key_value_heads": (1, 2, 4),
    "num_attention_heads": (2, 4, 8),
    "head_dim": (8, 16),
    "num_local_experts": (4, 8),
    "num_experts": (4, 8),
    "num_experts_per_tok": (1, 2),
    "n_group": (1, 2),
    "topk_group": (1, 2),
    "pad_token_id": (0, 5, VOCABULARY - 1, VOCABULARY),
    "mlp_only_layers": ([0], [1], [0, 1], []),
    "hidden_size": (16, 32, 64),
    "n_embd": (16, 32, 64),
    "per_layer_config": ({"0": {"sliding_window": 3}}, {"0": {"intermediate_size": 24}}),
    "quantization_config": ({"quant_method": "fp8"},),
    "swiglu_limit": (7.0, 1.0),
}
"""Legal values of keys, and values that are legal for other classes, beside those that `_changed` makes."""

OLDER_RELEASES = {
    ("5.0", "gpt_oss", "swiglu_limit"): "5.0 computes with 7.0 whatever the key says",
}
"""Keys that a release does not read, and later ones do: (release, `model_type`, key). The import follows the later."""

OLDER_ERRORS = {
    ("5.0", "gemma3_text", "rope_parameters"): "KeyError: 'original_max_position_embeddings'",  # with YaRN
}
"""Errors of a release for values that later ones read: (release, `model_type`, key). The import follows the later."""


def _layer_types(number: int) -> list[list[str]]:
    """Return lists of kinds of attention for a model of `number` layers, also of wrong lengths and kinds."""
    full, sliding = [FULL] * number, [SLIDING] * number
    odd = [(FULL, SLIDING)[layer % 2] for layer in range(number)]
    even = [(SLIDING, FULL)[layer % 2] for layer in range(number)]
    ends = [FULL, *sliding[2:], FULL]
    return [full, sliding, odd, even, ends, full[1:], [*even, FULL], ["chunked_attention", *full[1:]], ["attention"]]


def _changed(value: Any) -> Iterator[Any]:
    """Yield other values of the same and of wrong types."""
    yield from (None, "x", {}, [], True, False)
    number = value if isinstance(value, (int, float)) and not isinstance(value, bool) else 2
    yield from (0, 1, number + 1, 2 * number, number + 0.5, -1, float(number), str(number))


@dataclass(frozen=True)
class Case:
    """One changed key of a `config.json`."""

    model_type: str
    base: str
    """Name of the unchanged configuration."""

    path: tuple[str, ...]
    """The key, or the keys of the tables around it and the key."""

    value: Any
    config: dict[str, Any] = field(repr=False)

    @property
    def key(self) -> str:
        return ".".join(self.path)


def release() -> str:
    """Return the release of `transformers`, such as `5.0`."""
    from transformers import __version__

    return ".".join(__version__.split(".")[:2])


def bases(model_type: str) -> dict[str, dict[str, Any]]:
    """Return tiny `config.json`s of a class: the short ones of `CASES`, as `transformers` saves the first one, and
    with the RoPE keys of releases before 5.0."""
    from transformers import CONFIG_MAPPING

    found = {}
    for case, (other, keys) in CASES.items():
        if other != model_type:
            continue
        short = {"model_type": model_type, **copy.deepcopy(keys)}
        for key in ("attn_implementation", *(old[2] for old in OLDER_RELEASES if old[:2] == (release(), model_type))):
            short.pop(key, None)
        found[case] = {**short, "vocab_size": VOCABULARY}
        rope = short.get("rope_parameters")
        if rope and FULL not in rope:
            older = {key: value for key, value in found[case].items() if key != "rope_parameters"}
            theta = {"rope_theta": rope["rope_theta"]}
            table = {key: value for key, value in rope.items() if key != "rope_theta"}
            found[f"{case}, as before 5.0"] = {**older, **theta, "rope_scaling": table}
    first = next(iter(found))
    saved = CONFIG_MAPPING[model_type](**copy.deepcopy(found[first])).to_dict()
    return {f"{first}, as saved": json.loads(json.dumps(saved, default=str)), **found}


@cache
def foreign_keys() -> tuple[str, ...]:
    """Return keys that `transformers` reads anywhere near our classes, from their config classes and its sources."""
    import transformers
    from transformers import CONFIG_MAPPING, GenerationConfig, PretrainedConfig

    root = Path(transformers.__file__).parent
    types = [*FAMILIES, "gpt_neox", "qwen2_moe", "olmo2", "cohere2", "llama4_text", "deepseek_v2", "falcon", "opt"]
    keys = {*PretrainedConfig().to_dict(), *GenerationConfig().to_dict(), *WITHOUT_EFFECT, *VALUES, "is_decoder"}
    files = [*root.glob("*.py"), *(root / "integrations").glob("*.py")]
    for model_type in types:
        config_class = CONFIG_MAPPING[model_type]
        keys |= {*config_class().to_dict(), *config_class.attribute_map}
        files.append(root / Path(config_class.__module__.replace(".", "/").removeprefix("transformers/") + ".py"))
    for family in FAMILIES.values():
        keys |= family.known_keys
    for file in files:
        text = file.read_text()
        keys |= {*re.findall(r"config\.([a-z_]\w*)\b(?!\()", text), *re.findall(r'attr\(\w*config, "(\w+)"', text)}
    return tuple(sorted(keys - {"model_type"}))


_FOREIGN_VALUES = (None, True, False, 3, "x", {})


def cases(model_type: str) -> Iterator[Case]:
    """Yield all cases of a class."""
    for index, (name, base) in enumerate(bases(model_type).items()):
        paths = [(key,) for key in base if key != "model_type"]
        paths += [(key, inner) for key, table in base.items() if isinstance(table, dict) for inner in table]
        for key, table in base.items():
            for inner, nested in table.items() if isinstance(table, dict) else ():
                paths += [(key, inner, last) for last in nested] if isinstance(nested, dict) else []
        for path in paths:
            values = [DELETED, *VALUES.get(path[-1], ()), *_changed(_at(base, path))]
            if path[-1] == "layer_types":
                values += _layer_types(base["num_hidden_layers"])
            yield from _of_values(model_type, name, base, path, values)
        for key in () if index else foreign_keys():
            if key not in base:
                types = _layer_types(base.get("num_hidden_layers", 2)) if key == "layer_types" else []
                values = [*VALUES.get(key, ()), *types, *_FOREIGN_VALUES]
                yield from _of_values(model_type, name, base, (key,), values)


def _at(table: Any, path: tuple[str, ...]) -> Any:
    for key in path:
        table = table[key]
    return table


def _of_values(
    model_type: str, name: str, base: dict[str, Any], path: tuple[str, ...], values: list[Any]
) -> Iterator[Case]:
    tried = [json.dumps(_at(base, path))] if path[0] in base else []
    for value in values:
        if json.dumps(value) in tried:
            continue
        tried.append(json.dumps(value))
        config = copy.deepcopy(base)
        table = _at(config, path[:-1])
        if value is DELETED:
            del table[path[-1]]
        else:
            table[path[-1]] = copy.deepcopy(value)
        yield Case(model_type, name, path, value, config)


class Judge:
    """Tells for each case whether the import refuses it, or computes what `transformers` computes."""

    def __init__(self, folder: Path):
        """`folder`: an empty folder for the files of models."""
        import transformers

        transformers.logging.set_verbosity(transformers.logging.CRITICAL)
        transformers.logging.disable_progress_bar()
        self._folder = folder
        self._ours: dict[tuple[str, str], Tensor] = {}
        self._tokens, _ = samples()

    def verdict(self, case: Case) -> tuple[str, str]:
        """Return a column of the table, and a reason for the column `wrong`."""
        folder = self._folder / "case"
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(case.config))
        try:
            found = read_folder_config(folder)
        except WeightsError as error:
            return ("refused", "") if self._is_named(case, str(error)) else ("wrong", f"unnamed: {error}")
        try:
            weights, tokens, theirs = self._theirs(case)
        except Exception as error:  # of any kind, for any value
            if case.path[0] in {**WITHOUT_EFFECT, **FAMILIES[case.model_type].unused}:
                return "only transformers refuses", ""
            reason = f"{type(error).__name__}: {str(error)[:200]}"
            if reason == OLDER_ERRORS.get((release(), case.model_type, case.path[0])):
                return "read by later releases only", ""
            return "wrong", f"accepted, but transformers refuses: {reason}"
        key = (json.dumps([found.name, dict(found.args)]), str(weights))
        if key not in self._ours:
            (weights / "config.json").write_text(json.dumps(case.config))
            try:
                model, _ = read_model(weights)
            except ConfigError:  # names the tensors that are not those of the model
                return "refused", ""
            with torch.no_grad():
                self._ours[key] = model(tokens)
        difference = float((self._ours[key] - theirs).abs().max())
        if difference <= TOLERANCE * max(1.0, float(theirs.abs().max())):
            return "equal", ""
        if (release(), case.model_type, case.path[0]) in OLDER_RELEASES:
            return "read by later releases only", ""
        return "wrong", f"logits differ by {difference:.1e}"

    def _is_named(self, case: Case, message: str) -> bool:
        names = {*case.path, FAMILIES[case.model_type].aliases.get(case.path[0], case.path[0])}
        return "config.json" in message and any(re.search(rf"\b{re.escape(name)}\b", message) for name in names)

    def _theirs(self, case: Case) -> tuple[Path, Tensor, Tensor]:
        """Return a folder with random weights for the configuration, tokens, and the logits of `transformers`.

        Later releases refuse 1 where they want 1.0. Such a case is compared with 1.0.
        """
        try:
            return self._computed(case.config)
        except Exception:
            if type(case.value) is not int:
                raise
            config = copy.deepcopy(case.config)
            _at(config, case.path[:-1])[case.path[-1]] = float(case.value)
            return self._computed(config)

    @torch.no_grad()
    def _computed(self, raw: dict[str, Any]) -> tuple[Path, Tensor, Tensor]:
        from transformers import CONFIG_MAPPING, AutoModelForCausalLM

        kernels = {"attn_implementation": "eager", "experts_implementation": "eager"}
        config = CONFIG_MAPPING[raw["model_type"]].from_dict(copy.deepcopy(raw), **kernels)
        model = AutoModelForCausalLM.from_config(config, **kernels).eval().float()
        has_unit_offset = "gemma" in raw["model_type"]
        state = model.state_dict()
        for name, tensor in state.items():
            tensor.copy_(_random(name, tuple(tensor.shape), -0.4 if has_unit_offset else 0.6))
        is_tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
        layout = [raw["model_type"], is_tied, [(name, list(tensor.shape)) for name, tensor in state.items()]]
        folder = self._folder / f"{zlib.crc32(json.dumps(layout).encode()):08x}"
        if not folder.exists():
            model.save_pretrained(folder)
        longest = raw.get("n_positions", raw.get("max_position_embeddings")) if raw["model_type"] == "gpt2" else None
        tokens = self._tokens[:, :longest] % config.vocab_size
        return folder, tokens, model(tokens, use_cache=False).logits


@cache
def _random(name: str, shape: tuple[int, ...], mean: float) -> Tensor:
    """Return random values that depend on the name and the shape. `mean`: of norms and biases."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {shape}".encode()))
    values = torch.randn(shape, generator=generator)
    return mean + 0.3 * values if len(shape) == 1 else values * shape[-1] ** -0.5


COLUMNS = ("keys", "cases", "equal", "refused", "only transformers refuses", "read by later releases only", "wrong")


def count(model_type: str, every: int = 1) -> tuple[Counter[str], list[str]]:
    """Return the numbers of `COLUMNS` for every `every`-th case of a class, and a line for each wrong case."""
    numbers, wrong, keys = Counter[str](), [], set()
    with tempfile.TemporaryDirectory() as folder:
        judge = Judge(Path(folder))
        for case in list(cases(model_type))[::every]:
            column, reason = judge.verdict(case)
            numbers[column] += 1
            keys.add(case.key)
            if column == "wrong":
                wrong.append(f"{case.base}: {case.key} = {json.dumps(case.value)}: {reason}")
    numbers |= {"keys": len(keys), "cases": sum(numbers.values())}
    return numbers, wrong


def table(results: Mapping[str, Counter[str]]) -> str:
    """Return the table of all classes, in Markdown."""
    import transformers

    rows = [f"| `transformers` {transformers.__version__} | {' | '.join(COLUMNS)} |", "|---|" + "---:|" * len(COLUMNS)]
    for model_type, numbers in results.items():
        rows.append(f"| `{model_type}` | {' | '.join(f'{numbers[column]:,}' for column in COLUMNS)} |")
    return "\n".join(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, metavar="PAGE", help="replace the table of this release in the page")
    parser.add_argument("--family", action="append", choices=tuple(FAMILIES), help="only this model_type")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="only every N-th case")
    options = parser.parse_args()
    results, failures = {}, []
    for model_type in options.family or FAMILIES:
        results[model_type], wrong = count(model_type, options.every)
        print(f"{model_type}: {dict(results[model_type])}", *wrong, sep="\n  ", flush=True)
        failures += wrong
    publish(table(results), f"mutations {release()}", options.write)
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
