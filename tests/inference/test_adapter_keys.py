"""Each key of `adapter_config.json` is changed: an import then equals `peft`, or it is refused by name."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.distributed import run_ranks
from tests.inference.test_adapters import job_file
from tests.models.parity import random_model, samples
from tests.sampling import sampled
from tests.tensors import full_tensor
from tests.train.jobs import this_rank
from titan_launch.config.loading.load import load_job
from titan_launch.core.errors import UserError
from titan_launch.inference.saved_model import open_saved_model
from titan_launch.models.build import build_model
from titan_launch.models.huggingface.adapter_config import NEUTRAL, WITHOUT_EFFECT, AdapterConfig
from titan_launch.models.huggingface.config_json import read_folder_config
from titan_launch.models.huggingface.files import ADAPTER_CONFIG_FILE, WeightsError
from titan_launch.models.lora import adapters_of
from titan_launch.models.weights.adapters import FILE, AdapterFolder, Target, file_places, targets_of
from titan_launch.models.weights.folder import WeightsFolder
from titan_launch.recipes.facts import look_at_model
from titan_launch.train.build import build_run

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
load_file = pytest.importorskip("safetensors.torch").load_file
save_file = pytest.importorskip("safetensors.torch").save_file

pytestmark = pytest.mark.filterwarnings("ignore")

BASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Llama 2": ({"target_modules": ["q_proj", "v_proj"]}, {"targets": ("layers.*.attention.w[qv]",)}),
    "GPT-2": ({"target_modules": ["attn.c_proj"]}, {"targets": ("layers.*.attention.wo",)}),
    "Qwen 3, experts": (
        {"target_modules": [], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]},
        {"targets": ("layers.1.moe.experts",)},
    ),
}
"""Keys of `LoraConfig` and of `[lora]`, by a case of `tests.models.parity`."""

BASE = {"r": 4, "lora_alpha": 6, "task_type": "CAUSAL_LM"}


class Change(NamedTuple):
    """Keys that are changed in an adapter, and the result of an import."""

    keys: dict[str, Any]
    lora: dict[str, Any] | None = {}
    """Keys of `[lora]` with which the import equals `peft`; None: no job can import it."""

    base: str = "Llama 2"
    in_file: bool = False
    """Change the file that `peft` wrote, in place of the configuration with which it makes the adapter."""

    edit: Callable[[dict[str, Tensor]], None] = len
    """Change of the tensors in the file that `peft` wrote."""

    error: str = ""
    """Part of the error, if the name of a key is not."""


def refused(key: str, *values: Any, **others: Any) -> list[Change]:
    """Return a change of a key to each value. All are refused."""
    return [Change({key: value, **others}, None) for value in values]


def equal(key: str, *values: Any, **others: Any) -> list[Change]:
    """Return a change of a key to each value. None has an effect on the import."""
    return [Change({key: value, **others}) for value in values]


def in_file(changes: Sequence[Change]) -> list[Change]:
    """Return the changes, made in the file."""
    return [change._replace(in_file=True) for change in changes]


LLAMA_ALL = {"targets": ("layers.*.attention.w*",)}
CHANGES = (
    *in_file(refused("peft_type", "LOHA", "ADALORA", "IA3", None)),
    *equal("task_type", None, "FEATURE_EXTRACTION"),
    *refused("task_type", "SEQ_CLS", "SEQ_2_SEQ_LM", "TOKEN_CLS", "QUESTION_ANS"),
    *in_file(equal("auto_mapping", None, {"base_model_class": "Other", "parent_library": "other"})),
    *equal("peft_version", "0.5.0", "99.0"),
    *in_file(equal("base_model_name_or_path", None, "somewhere/else")),
    *equal("revision", "main", "refs/pr/1"),
    *in_file(equal("inference_mode", True, False)),
    *(Change({"r": rank}, {"rank": rank, "alpha": 6.0}) for rank in (2, 8)),
    *in_file(refused("r", 0, "4", None)),
    *(Change({"lora_alpha": alpha}, {"alpha": alpha}) for alpha in (3.0, 6.5, 16)),
    *in_file(refused("lora_alpha", "6", None)),
    Change({"lora_dropout": 0.1}, {"dropout": 0.1}),
    Change({"lora_dropout": 0.1}, {"dropout": 0.0}),
    Change({"lora_dropout": 0.25}, None),
    Change({"use_rslora": True}, {"rank_stabilized": True}),
    Change({"use_rslora": True}, {"alpha": 12.0}),
    Change({"use_rslora": True, "r": 9}, {"rank": 9, "alpha": 18.0}),
    Change({"target_modules": ["q_proj"]}, {"targets": ("layers.*.attention.wq",)}),
    Change({"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "nowhere"]}, LLAMA_ALL),
    Change({"target_modules": r".*\.(q|v)_proj"}),
    Change({"target_modules": r"model\.layers\.0\.mlp\.\w+_proj"}, {"targets": ("layers.0.feed_forward.w*",)}),
    Change({"target_modules": "all-linear"}, {"targets": ("layers.*.attention.w*", "layers.*.feed_forward.w*")}),
    Change({"target_modules": None}),
    # peft writes the weights of embeddings and heads beside their adapters
    Change(
        {"target_modules": ["model.layers.1.self_attn.q_proj", "lm_head"]},
        {"targets": ("layers.1.attention.wq", "output")},
    ),
    Change({"target_modules": ["embed_tokens", "lm_head"]}, {"targets": ("tok_embeddings", "output")}),
    *in_file(refused("target_modules", ["q_proj"], ["q_proj", "v_proj", "o_proj"], "q_proj", "(", "all-linear", None)),
    Change(
        {"exclude_modules": ["k_proj", "layers.0.self_attn.q_proj"]},
        {"targets": ("layers.*.attention.wv", "layers.1.attention.wq")},
    ),
    Change({"exclude_modules": r".*\.0\..*"}, {"targets": ("layers.1.attention.w[qv]",)}),
    *in_file(refused("exclude_modules", ["q_proj"], r".*\.0\..*")),
    Change({"layers_to_transform": 0}, {"targets": ("layers.0.attention.w[qv]",)}),
    Change({"layers_to_transform": [1]}, {"targets": ("layers.1.attention.w[qv]",)}),
    *equal("layers_to_transform", [], [0, 1]),
    *in_file(refused("layers_to_transform", 0, [1], [7])),
    Change({"layers_pattern": "layers", "layers_to_transform": [1]}, {"targets": ("layers.1.attention.w[qv]",)}),
    Change({"layers_pattern": ["h", "layers"], "layers_to_transform": 0}, {"targets": ("layers.0.attention.w[qv]",)}),
    *in_file(refused("layers_pattern", "layers")),
    *in_file(refused("layers_pattern", "h", layers_to_transform=[0])),
    *refused("rank_pattern", {"q_proj": 2}, {"layers.0.self_attn.q_proj": 8}, {"q_proj|k_proj": 8}),
    Change({"rank_pattern": {"q_proj": 2}}, {"rules": [{"match": ["**.wq"], "rank": 2}]}),
    Change({"rank_pattern": {"[qv]_proj": 8}}, {"rules": [{"match": ["layers.**"], "rank": 8}]}),
    Change({"rank_pattern": {"k_proj": 8}}, {"rules": [{"match": ["**.wv"], "alpha": 6}]}),
    *equal("rank_pattern", {}, {"proj": 3}, {"k_proj": 2}, {"q_proj": 4}, {"self_attn": 2}),
    Change({"rank_pattern": {"q_proj|v_proj": 8}}, {"rank": 8, "alpha": 6}),
    Change({"rank_pattern": {r"model\..*": 2, "q_proj": 8}}, {"rank": 2, "alpha": 6}),
    *in_file(refused("rank_pattern", {"q_proj": 2}, {"q_proj": 0}, {"(": 2}, None, {"q_proj": "4"})),
    *refused("alpha_pattern", {"q_proj": 3}, {"layers.1.self_attn.v_proj": 12}, {r"^model.*0.*v_proj": 1}),
    Change(
        {"alpha_pattern": {"1.self_attn.v_proj": 12, "v_proj": 2.5}, "use_rslora": True},
        {
            "rank_stabilized": True,
            "rules": [{"match": ["layers.1.attention.wv"], "alpha": 12}, {"match": ["**.wv"], "alpha": 2.5}],
        },
    ),
    *equal("alpha_pattern", {}, {"proj": 3}, {"q_proj": 6}, {"k_proj": 1}),
    Change({"alpha_pattern": {"[qv]_proj": 12}}, {"alpha": 12}),
    Change({"alpha_pattern": {".*0.*proj": 12, "q_proj": 12, "v_proj": 12}, "use_rslora": True}, {"alpha": 24.0}),
    Change({"rank_pattern": {"q_proj": 8}, "alpha_pattern": {"q_proj": 12}}, None),
    Change(
        {"rank_pattern": {"q_proj": 8}, "alpha_pattern": {"q_proj": 12}},
        {"rules": [{"match": ["**.wq"], "rank": 8, "alpha": 12}]},
    ),
    Change({"rank_pattern": {"q_proj": 8, "v_proj": 8}, "alpha_pattern": {"v_proj": 12}}, None),
    Change({"rank_pattern": {"_proj": 8, ".*_proj": 8}, "alpha_pattern": {".*": 12}}, {"rank": 8, "alpha": 12}),
    *in_file(refused("alpha_pattern", {"q_proj": 3}, {"[": 6}, None)),
    Change({"alpha_pattern": {"q_proj|v_proj": 3}}, {"alpha": 3.0}, in_file=True),
    *equal("init_lora_weights", True, False, "gaussian", "orthogonal", "eva"),
    *refused("init_lora_weights", "pissa", "pissa_niter_2", "olora", "mica"),
    *in_file(refused("init_lora_weights", "pissa", "olora", "corda", "loftq", "lora_ga", "another", None, 1)),
    Change({"init_lora_weights": "loftq", "loftq_config": {"loftq_bits": 4, "loftq_iter": 1}}, None),
    *in_file(refused("loftq_config", {"loftq_bits": 4})),
    *equal("eva_config", peft.EvaConfig() if hasattr(peft, "EvaConfig") else None),
    *in_file(refused("corda_config", {"corda_method": "kpm"}, {})),
    *in_file(refused("lora_ga_config", {"direction": "ArBr"})),
    *in_file(equal("fan_in_fan_out", True, False)),
    *(Change({"fan_in_fan_out": value}, base="GPT-2") for value in (True, False)),
    *refused("bias", "all", "lora_only"),
    *in_file(refused("bias", "all", None)),
    *refused("modules_to_save", ["lm_head"], ["norm"], ["embed_tokens", "lm_head"]),
    *equal("modules_to_save", None, []),
    *in_file(refused("modules_to_save", ["lm_head"])),
    *in_file(refused("megatron_config", {"hidden_size": 32})),
    *equal("megatron_core", "another.core", None),
    *refused("trainable_token_indices", [1, 2], {"embed_tokens": [3]}),
    *refused("use_dora", True),
    *in_file(refused("use_dora", True, None)),
    *refused("velora_config", {"num_groups": 4}),
    *refused("alora_invocation_tokens", [1, 2]),
    *in_file(refused("alora_invocation_tokens", [1, 2], [])),
    *in_file(refused("use_qalora", True)),
    *equal("qalora_group_size", 8, 32),
    *in_file(refused("monteclora_config", {"sample_scaler": 1.0})),
    *refused("layer_replication", [[0, 2], [1, 2]]),
    *in_file(equal("runtime_config", {"ephemeral_gpu_offload": True}, None)),
    *refused("lora_bias", True),
    *in_file(refused("lora_bias", True)),
    *refused("target_parameters", ["q_proj.weight"], target_modules=[]),
    *in_file(refused("target_parameters", ["q_proj.weight"], ["o_proj.weight"], "q_proj.weight")),
    *refused("use_bdlora", {"target_modules_bd_a": ["q_proj"], "nblocks": 2, "match_strict": False}),
    *in_file(refused("arrow_config", {"top_k": 1})),
    *in_file(refused("kasa_config", {"beta": 0.1})),
    *in_file(refused("ensure_weight_tying", True)),
    *in_file(equal("enable_lora", None)),
    *in_file(refused("enable_lora", [True, False, True])),
    *in_file(equal("merge_weights", True, False)),
    *in_file(equal("unknown", None)),
    *in_file(refused("unknown", True, False, 0, "", {}, "on")),
    Change({"lora_alpha": 12}, {"alpha": 12}, "GPT-2"),
    Change({"target_modules": ["attn.c_proj", "lm_head"]}, None, "GPT-2"),
    Change({"target_modules": ["c_attn"]}, {"targets": ("layers.*.attention.w[qkv]",)}, "GPT-2"),
    Change({"rank_pattern": {"c_proj": 2}}, {"rank": 2, "alpha": 6}, "GPT-2"),
    Change({"rank_pattern": {"h.0.attn.c_proj": 2}}, None, "GPT-2"),
    Change({"rank_pattern": {"h.0.attn.c_proj": 2}}, {"rules": [{"match": ["layers.0.**"], "rank": 2}]}, "GPT-2"),
    Change({"use_rslora": True}, {"rank_stabilized": True}, "Qwen 3, experts"),
    Change({"rank_pattern": {"(gate_up|down)_proj": 2}}, {"rank": 2, "alpha": 6}, "Qwen 3, experts"),
    Change({"rank_pattern": {"experts.gate_up_proj": 8}}, None, "Qwen 3, experts"),
    Change({"alpha_pattern": {"down_proj": 3}}, None, "Qwen 3, experts"),
    Change({"target_parameters": ["mlp.experts.down_proj"]}, None, "Qwen 3, experts"),
    Change({"target_parameters": ["experts.gate_up_proj"]}, None, "Qwen 3, experts", in_file=True),
)


def added(name: str) -> Callable[[dict[str, Tensor]], None]:
    """Return a function that adds a tensor."""
    return lambda tensors: tensors.update({f"base_model.model.{name}": torch.ones(32)})


def renamed(old: str, new: str) -> Callable[[dict[str, Tensor]], None]:
    """Return a function that changes the names of tensors."""

    def rename(tensors: dict[str, Tensor]) -> None:
        for name in list(tensors):
            tensors[name.replace(old, new)] = tensors.pop(name)

    return rename


def cast(dtype: torch.dtype) -> Callable[[dict[str, Tensor]], None]:
    """Return a function that casts the tensors."""
    return lambda tensors: tensors.update({name: tensor.to(dtype) for name, tensor in tensors.items()})


def transposed(tensors: dict[str, Tensor]) -> None:
    tensors.update({name: tensor.T.contiguous() for name, tensor in tensors.items() if "1.self_attn.v_proj" in name})


_EMBEDDING = "base_model.model.model.embed_tokens.base_layer.weight"
_Q = "model.layers.0.self_attn.q_proj"
FILES = (
    *(Change({}, edit=cast(dtype)) for dtype in (torch.float64, torch.bfloat16, torch.float16)),
    *(
        Change({}, None, edit=cast(dtype), error="8 tensors of a dtype other than F64")
        for dtype in (torch.int8, torch.float8_e4m3fn)
    ),
    *(
        Change(
            {},
            None,
            edit=added(name),
            error=f"neither a LoRA matrix nor a copy of a tensor of the base: base_model.model.{name}",
        )
        for name in (
            f"{_Q}.lora_magnitude_vector",
            f"{_Q}.lora_B.bias",
            f"{_Q}.base_layer.weight",
            "lm_head.weight",
            "model.embed_tokens.token_adapter.trainable_tokens_delta",
        )
    ),
    Change(
        {"target_modules": ["embed_tokens"]},
        None,
        edit=lambda tensors: tensors.update({_EMBEDDING: tensors[_EMBEDDING] + 0.5}),
        error=f"1 tensor neither a LoRA matrix nor a copy of a tensor of the base: {_EMBEDDING}",
    ),
    Change({}, None, edit=added("model.layers.0.mlp.up_proj.lora_A.weight"), error="not matched by lora.targets"),
    Change({}, None, edit=added("model.layers.7.self_attn.q_proj.lora_A.weight"), error="1 tensor unexpected"),
    Change({}, None, edit=renamed("lora_A", "lora_A.default"), error="4 tensors missing"),
    Change({}, None, edit=renamed("base_model.model.", ""), error="8 tensors missing"),
    Change({}, None, edit=lambda tensors: tensors.popitem(), error="1 tensor missing"),
    Change({}, None, edit=transposed, error="2 tensors of another shape"),
)
"""Changes of the tensors in the file of an adapter."""


def adapter_folder(change: Change, base: Path, folder: Path) -> None:
    """Write a folder of `peft` with random adapters. A configuration that `peft` refuses is written into the file."""

    def write(keys: dict[str, Any]) -> None:
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_pretrained(base)
        model = peft.get_peft_model(model, peft.LoraConfig(**{**BASE, **BASES[change.base][0], **keys}))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_" in name:
                    parameter.normal_(std=0.2)
        model.save_pretrained(folder)
        tensors = load_file(folder / FILE)
        change.edit(tensors)
        save_file(tensors, folder / FILE)

    if not change.in_file:
        try:
            return write(change.keys)
        except (ValueError, TypeError, ImportError, AttributeError, KeyError):
            assert change.lora is None
            shutil.rmtree(folder, ignore_errors=True)
    write({})
    table = json.loads((folder / ADAPTER_CONFIG_FILE).read_text())
    (folder / ADAPTER_CONFIG_FILE).write_text(json.dumps({**table, **change.keys}))


def of_peft(base: Path, folder: Path) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the logits of `peft`, and the gradients of its adapters by the names in their file."""
    model = transformers.AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager")
    model = peft.PeftModel.from_pretrained(model, folder, is_trainable=True).eval()
    tokens, targets = samples()
    logits = model(tokens).logits
    F.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
    named = ((name, parameter.grad) for name, parameter in model.named_parameters())
    return logits.detach(), {name.replace(".default", ""): grad for name, grad in named if grad is not None}


def of_jobs(paths: list[str]) -> list[str | tuple[Tensor, dict[str, Tensor]]]:
    """Return, for each job on this rank, its error, or its logits and the gradients of its adapters."""
    results: list[str | tuple[Tensor, dict[str, Tensor]]] = []
    tokens, targets = samples()
    for path in paths:
        try:
            with ExitStack() as stack:
                model = build_run(load_job(path).config, this_rank(), stack).model.eval()
                logits = model(tokens)
                F.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
                grads = {name: full_tensor(p.grad) for name, p in model.named_parameters() if p.grad is not None}
                results.append((logits.detach(), grads))
        except UserError as error:
            results.append(str(error))
    return results


def targets_of_job(path: str) -> list[Target]:
    """Return the targets of `peft` for the adapters of a job."""
    job = load_job(path).config
    module = build_model(job.model, job.training.seq_len, lora=job.lora).module
    adapters = list(adapters_of(module))
    own = {name for adapter in adapters for name in (adapter.a, adapter.b)}
    shapes = {name: tuple(p.shape) for name, p in module.named_parameters() if name not in own}
    return targets_of(adapters, *file_places(job.model, shapes, None))


def outcomes(changes: Sequence[Change], folder: Path) -> dict[str, int]:
    """Import all changed adapters, and compare them with `peft`. Return how many were equal, and how many refused."""
    paths = []
    for base in BASES:
        random_model(base, folder / base / "hf")
    for index, change in enumerate(changes):
        adapter = folder / change.base / f"adapter-{index}"
        adapter_folder(change, folder / change.base / "hf", adapter)
        lora = {"rank": 4, "alpha": 6.0, "adapter": str(adapter), **BASES[change.base][1], **(change.lora or {})}
        targets = lora.pop("targets")
        paths.append(job_file(folder / change.base, targets, lora=lora, job={"name": f"job-{index}"}))
    count = {"equal": 0, "refused": 0}
    for index, (change, result) in enumerate(zip(changes, run_ranks(of_jobs, 1, paths)[0], strict=True)):
        if isinstance(result, str):
            assert change.lora is None, (change, result)
            named = any(re.search(rf"\b{key}\b", result) for key in change.keys)
            assert change.error in result and (named or change.error or "tensor" in result), (change, result)
            count["refused"] += 1
            continue
        assert change.lora is not None, change
        logits, grads = of_peft(folder / change.base / "hf", folder / change.base / f"adapter-{index}")
        assert (logits - result[0]).abs().max() < 1e-5, change
        for target in targets_of_job(paths[index]):
            if len(target.parts) == 1:
                own = target.to_file(result[1].__getitem__)
                for key, grad in zip(target.keys, own, strict=True):
                    torch.testing.assert_close(grad, grads.pop(key), rtol=1e-4, atol=1e-6)
        count["equal"] += 1
    return count


@sampled("changes", (*CHANGES, *FILES), every=9)
def test_an_import_equals_peft_or_is_refused_by_name(changes: tuple[Change, ...], tmp_path: Path) -> None:
    count = outcomes(changes, tmp_path)
    print(f"{len({key for change in changes for key in change.keys})} keys, {len(changes)} changes: {count}")
    assert all(count.values())


def test_files_of_another_format_are_refused(tmp_path: Path) -> None:
    """A pickle is not read, also beside a damaged file."""
    random_model("Llama 2", tmp_path / "hf")
    adapter_folder(Change({}), tmp_path / "hf", tmp_path / "adapter")
    file = tmp_path / "adapter" / FILE
    AdapterFolder(file.parent)
    torch.save(load_file(file), file.with_suffix(".bin"))
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(WeightsError, match="truncated or damaged"):
        AdapterFolder(file.parent)
    file.unlink()
    with pytest.raises(WeightsError, match=r"it has no adapter_model.safetensors; adapter_model.bin is a pickle"):
        AdapterFolder(file.parent)


def test_an_adapter_beside_weights_is_not_ignored(tmp_path: Path) -> None:
    """`transformers` adds such an adapter to the weights, so a folder with both is refused wherever it is read."""
    folder = tmp_path / "hf"
    base = random_model("Llama 2", folder)
    adapter_folder(Change({}), folder, tmp_path / "adapter")
    for file in (tmp_path / "adapter").iterdir():
        shutil.copy(file, folder)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokens, _ = samples()
    with torch.no_grad():
        assert (theirs(tokens).logits - base(tokens).logits).abs().max() > 0.1
    for read in (read_folder_config, WeightsFolder, partial(WeightsFolder, of_any_class=True), open_saved_model):
        with pytest.raises(WeightsError, match="an adapter of peft, which transformers adds"):
            read(folder)
    with pytest.raises(UserError, match=r"--model .*adapter: it has adapter_config.json"):
        look_at_model(str(tmp_path / "adapter"))


PATHS = ("lm_head", "model.embed_tokens", "h.0.attn.c_attn", "h.10.attn.c_attn", "model.layers.1.mlp.experts.0.w1")
NAMES = ("w1", "attn.c_attn", "h.1.attn.c_attn", "lm_head", "head", "model", "experts.0.w1")
EXPRESSIONS = (r".*\.w1", r"h\.\d+\..*", "attn|lm_head", r"layers\.1.*", "c_attn$", "^h.*", ".*", r"0\.attn.c_attn|w1")
LAYERS = [
    {"layers_to_transform": numbers, "layers_pattern": pattern}
    for numbers in (0, [1], [])
    for pattern in (None, [], "h", "(h|layers)", ["x", "layers"])
]


def test_names_and_patterns_match_as_in_peft() -> None:
    from peft.tuners.tuners_utils import check_target_module_exists
    from peft.utils.other import get_pattern_key

    matched = 0
    for path, first, other in product(PATHS, (*EXPRESSIONS, *NAMES), EXPRESSIONS):
        own = AdapterConfig(r=4, lora_alpha=1.0, rank_pattern={first: 2, other: 3})
        assert own.rank_of(path) == own.rank_pattern.get(get_pattern_key(own.rank_pattern.keys(), path), 4)
        targets = [{"target_modules": first}, *({"target_modules": [first], **layers} for layers in LAYERS)]
        for keys, exclude in product(targets, ([], None, other, [other])):
            own = AdapterConfig(r=4, lora_alpha=1.0, **keys, exclude_modules=exclude)
            theirs = check_target_module_exists(peft.LoraConfig(**keys, exclude_modules=exclude), path)
            assert own.adapts_module(path) == bool(theirs), (path, keys, exclude)
            matched += bool(theirs)
    assert matched > 1000


def test_every_key_of_peft_is_in_one_table_and_is_changed() -> None:
    """A key of a new release of `peft` fails this test until a table says what an import does with it."""
    theirs = {field.name: field for field in dataclasses.fields(peft.LoraConfig)}
    tables = [*NEUTRAL, *WITHOUT_EFFECT, *AdapterConfig.model_fields]
    assert len(tables) == len(set(tables))
    assert set(theirs) <= set(tables)
    assert {key for change in CHANGES for key in change.keys} == {*tables, "unknown"}
    default = peft.LoraConfig().to_dict()
    assert all(default[key] in values for key, values in NEUTRAL.items() if key in default)
    assert all(
        default[key] == field.default
        for key, field in AdapterConfig.model_fields.items()
        if key not in ("r", "lora_alpha")
    )
