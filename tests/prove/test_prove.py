"""A job's small twin on CPU ranks trains what one process trains, and a certificate says so."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from itertools import product
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.distributed import run_command, run_ranks
from tests.models.huggingface_folders import write_config
from tests.models.parity import random_model
from tests.train.jobs import run_job, tiny_job
from titan_launch.cli import main
from titan_launch.config.job import JobConfig
from titan_launch.config.loading.load import load_job
from titan_launch.core.errors import ConfigError, UserError
from titan_launch.core.files import CACHE_VARIABLE
from titan_launch.core.json_files import parse_as
from titan_launch.core.patches import replaced
from titan_launch.models.decoder.table_args import ExpertArgs
from titan_launch.plan.proof.cases import MOST_RANKS, Case, cases, proven_layout
from titan_launch.plan.proof.certificate import (
    CERTIFICATE,
    Certificate,
    describe_certificate,
    digest_of,
    find_certificate,
    store_certificate,
)
from titan_launch.plan.proof.twin import twin_of
from titan_launch.prove import main as prove_main
from titan_launch.prove import ranks, weights
from titan_launch.prove.locate import _module
from titan_launch.prove.main import Proof, prove
from titan_launch.prove.results import Difference


def job(**sections: Any) -> JobConfig:
    return JobConfig.model_validate(sections)


EXACT = {"precision": {"param_dtype": "float32"}}
ALONE = {"parallelism": {"data_parallel_shard_degree": 1}}


def test_a_dense_decoder_is_proven_in_fp32_and_in_its_precision() -> None:
    proven = prove(job(parallelism={"tensor_parallel_degree": 4}, loss={"chunks": 4}, prove={"args": {"n_layers": 1}}))
    assert proven.verdict == "proven"
    assert [(row.ranks, row.precision) for row in proven.rows] == [(1, "float32"), (4, "float32"), (4, "bfloat16")]
    assert proven.rows[1].name == "shards 2, tensor 2, accumulation immediate, 4 chunks of the loss"
    assert parse_as(CERTIFICATE, proven.dumps().encode()) == proven


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "sections",
    [
        {"parallelism": {"context_parallel_degree": 2, "data_parallel_replicate_degree": 2}},
        {
            "model": {"name": "qwen3_moe", "args": {"experts": {"balance_loss": 0.1, "selection_bias_rate": 1e-3}}},
            "parallelism": {"expert_parallel_degree": 4, "tensor_parallel_degree": 2},
        },
        {
            "parallelism": {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "ZBVZeroBubble"},
            "gradient_accumulation": {"mode": "deferred", "keep_params_unsharded": True},
        },
        {
            "model": {"name": "deepseek_v3"},
            "parallelism": {"data_parallel_replicate_degree": 2, "shard_optimizer_over_replicas": True},
            "ema": {"decay": 0.9},
        },
        {"model": {"name": "gemma3"}, "data": {"kind": "text", "packing": "documents"}},
        {"model": {"name": "gpt2"}, "parallelism": {"tensor_parallel_degree": 2, "sequence_parallel": False}},
        {"model": {"name": "llama3", "args": {"norm": "batchnorm"}}, "batchnorm": {"statistics": "synchronized"}},
        {"lora": {"targets": ["all-linear"], "dropout": 0.1}, "parallelism": {"tensor_parallel_degree": 2}},
        {"training": {"unfreeze": [{"match": "layers.0.**", "after_step": 100}]}},
        {"model": {"name": "resnet"}, "data": {"kind": "images"}, "optimizer": {"name": "SGD", "lr": 0.1}},
        {
            "model": {"name": "vit"},
            "data": {"kind": "images"},
            "parallelism": {"tensor_parallel_degree": 2, "sequence_parallel": False},
        },
    ],
)
def test_layouts_are_proven(sections: dict[str, Any]) -> None:
    proven = prove(job(**sections, **EXACT))
    assert proven.verdict == "proven", proven.text()


def test_more_axes_than_processes_are_proven_in_pairs() -> None:
    degrees = ("tensor", "context", "pipeline")
    config = job(parallelism={f"{axis}_parallel_degree": 2 for axis in degrees})
    twin = twin_of(config).config
    runs = list(cases(twin))
    assert [case.ranks for case in runs] == [1, *[4] * 6]
    assert proven_layout(twin, runs) == "pipeline 2 (1F1B), shards 2, context 2, tensor 2, in pairs"
    grid = {"tensor_parallel_degree": 2, "pipeline_parallel_degree": 2, "data_parallel_replicate_degree": 2}
    sharded = list(cases(twin_of(job(parallelism={**grid, "shard_optimizer_over_replicas": True})).config))
    assert len(sharded) == 7
    assert ["sharded optimizer" in case.parts for case in sharded] == ["replicas" in case.parts for case in sharded]
    with_replicas = job(parallelism={"tensor_parallel_degree": 8, "data_parallel_replicate_degree": 4})
    assert [case.ranks for case in cases(twin_of(with_replicas).config)] == [1, MOST_RANKS]


def test_every_mode_that_auto_may_choose_is_run() -> None:
    config = job(
        gradient_accumulation={"mode": "auto"},
        activation_checkpoint={"mode": "auto"},
        parallelism={"data_parallel_replicate_degree": 2},
    )
    names = [case.name for case in cases(twin_of(config).config)][1:]
    modes = ("immediate", "deferred_all_reduce", "deferred with unsharded parameters")
    assert [mode in name for mode, name in zip(modes, names, strict=True)] == [True] * 3
    assert [name.rpartition(" ")[2] for name in names] == ["full", "selective", "full"]


TWINS = [("llama3", "70B"), ("gemma3", "27B"), ("deepseek_v3", "671B-A37B"), ("vit", "L/16")]


@pytest.mark.parametrize("name, flavor", TWINS)
def test_a_twin_has_the_structure_of_its_job_and_is_small(name: str, flavor: str) -> None:
    from titan_launch.models.architectures import resolve_args
    from titan_launch.models.build import build_model

    kind = "images" if name == "vit" else "text"
    config = job(model={"name": name, "flavor": flavor}, data={"kind": kind}, training={"seq_len": 8192})
    twin = twin_of(config).config
    built = build_model(twin.model, twin.training.seq_len).module
    whole = build_model(config.model, config.training.seq_len).module
    assert sum(parameter.numel() for parameter in built.parameters()) < 200_000

    def kinds(model: Any) -> set[str]:
        return {"|".join(name for name, _ in block.named_parameters()) for block in model.layers}

    assert kinds(built) == kinds(whole)
    own, small = (resolve_args(m.name, m.flavor, m.args) for m in (config.model, twin.model))
    if name != "vit":
        assert (own.n_heads > own.n_kv_heads) == (small.n_heads > small.n_kv_heads)  # type: ignore[attr-defined]


def test_the_experts_of_a_twin_are_valid_for_every_number_of_groups() -> None:
    for groups, each in product(range(1, 7), range(2, 6)):
        own = ExpertArgs(num_experts=groups * each, top_k=2, hidden_dim=64, num_groups=groups)
        small = ExpertArgs.model_validate(own.twin())
        assert not [*small.problems()] and small.num_groups == min(groups, 4) and small.num_experts <= 8


@pytest.mark.parametrize("model_type", ["vit", "resnet"])
def test_a_class_of_transformers_for_images_is_shrunk(model_type: str, tmp_path: Path) -> None:
    sizes = {"vit": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "image_size": 224}}
    sizes["resnet"] = {"hidden_sizes": [256, 512, 1024, 2048], "depths": [3, 4, 6, 3]}
    write_config(tmp_path, model_type, **sizes[model_type])
    options = ["--model.name=huggingface", f"--model.path={tmp_path}", "--data.kind=images"]
    np.savez(tmp_path / "i.npz", images=np.zeros((2, 1, 224, 224), np.uint8), labels=np.arange(2))
    options.append(f"--data.path={tmp_path}/i.npz")
    args = twin_of(load_job(None, options).config).config.model.args
    if model_type == "vit":
        assert (args["num_hidden_layers"], args["hidden_size"], args["image_size"]) == (2, 32, 2 * args["patch_size"])
    else:
        assert (args["depths"], args["hidden_sizes"]) == ([1] * 4, [16] * 4)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"num_key_value_heads": None}, {"num_hidden_layers": 2, "num_attention_heads": 4}),
        ({"no_rope_layers": []}, {"num_hidden_layers": 2, "num_attention_heads": 4}),
        ({"num_hidden_layers": None, "n_layers": 7}, {"n_layers": 2}),
    ],
)
def test_a_class_of_transformers_with_unset_values_is_shrunk(
    values: dict[str, Any], expected: dict[str, Any], tmp_path: Path
) -> None:
    sizes = {"num_hidden_layers": 12, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 320}
    write_config(tmp_path, "llama", **{**sizes, **values})
    args = twin_of(load_job(None, ["--model.name=huggingface", f"--model.path={tmp_path}"]).config).config.model.args
    assert {key: args[key] for key in expected} == expected


def test_a_model_that_rounding_changes_cannot_be_proven() -> None:
    certificate = prove(job(**EXACT, **ALONE, model={"name": "tests.prove.user_models:chaotic"}))
    assert certificate.verdict == "cannot be proven"
    assert list(certificate.problems) == [
        "not comparable: on one process, rounding alone changes the first step by more than a third of the tolerance; "
        "remove steep functions (such as sin(1e8 * x)) from the model"
    ]


def test_uneven_rows_stay_uneven() -> None:
    assert twin_of(job(model={"args": {"vocab_size": 50257}})).config.model.args["vocab_size"] == 63
    two = {"tensor_parallel_degree": 2}
    assert twin_of(job(model={"args": {"vocab_size": 50258}}, parallelism=two)).config.model.args["vocab_size"] == 62


def test_a_twin_that_is_not_valid_names_its_argument() -> None:
    with pytest.raises(
        ConfigError, match=r"prove\.args\.n_kv_heads: the small twin .* n_heads \(4\) must be a multiple"
    ):
        twin_of(job(prove={"args": {"n_kv_heads": 3}}))
    with pytest.raises(ConfigError, match=r"prove\.args\.no_such") as caught:
        twin_of(job(prove={"args": {"no_such": 3}}))
    assert caught.value.problems[0].value == 3


def test_too_little_memory_is_one_error() -> None:
    reason = r"2 processes need about 0\.8 GiB of memory, and 0\.5 GiB are free"
    with replaced(prove_main, "free_memory_gib", lambda: 0.5), pytest.raises(UserError, match=reason):
        prove(job())


TOO_FEW = """
import os, resource
from multiprocessing import forkserver
from titan_launch.core.errors import UserError
from titan_launch.prove.ranks import run_ranks

forkserver.ensure_running()
highest = max(map(int, os.listdir("/proc/self/fd")))
resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 4, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
try:
    run_ranks("os:getpid", 8, timeout=60)
except UserError as error:
    print(error)
"""


def test_too_few_processes_are_one_error() -> None:
    ended = subprocess.run([sys.executable, "-c", TOO_FEW], capture_output=True, text=True, timeout=120, check=True)
    assert re.match(
        r"error: this host could start only \d of 8 processes: .*Too many open files; raise its", ended.stdout
    )


def test_late_ranks_and_the_time_limit_are_named() -> None:
    pipes = [Pipe(duplex=False) for _ in range(3)]
    for late, text in ((1, "rank 0 of 1 did"), (3, "ranks 0, 1, 2 of 3 did")):
        with pytest.raises(TimeoutError, match=rf"^{text} not finish within 0\.01 s$"):
            ranks._gather([ours for ours, _ in pipes[:late]], [None] * late, ranks._received, 0.01)


def test_the_place_of_a_difference_follows_from_its_kind(tmp_path: Path) -> None:
    """The twin is compiled, so its modules are not traced."""
    compiled = job(compile={"enable": True})
    proof, case = Proof(twin_of(compiled), tmp_path, lambda text: None), Case(compiled, ())
    for names, place in (
        (["gradient norm.weight"], "norm"),
        ([f"gradient layers.{number}.norm.weight" for number in range(9)], "all parameters"),
        (["loss"], "the loss"),
        (["gradient norm"], "gradient clipping"),
        (["buffer norm.running_var"], "norm"),
        (["average norm.weight"], "[ema]"),
        (["update norm.weight"], "the optimizer"),
    ):
        rows = [Difference(1, name, error=0.5, ratio=2.0, cosine=1.0) for name in names]
        assert _module(proof, case, rows, rows[0], num_gradients=9)[0] == place


def test_globs_that_number_layers_keep_the_depth() -> None:
    twin = twin_of(job(training={"frozen": ["layers.0.**"]}))
    assert twin.config.model.args["n_layers"] == 6
    assert twin.unshrunk == ("the number of layers: globs of the job name layers by number",)


# Certificates


def certificate(digest: str, verdict: Any = "proven") -> Certificate:
    texts: dict[str, Any] = {"layout": "shards 2", "twin": "", "created": "2026-11-28"}
    lists: dict[str, Any] = dict.fromkeys(("rows", "findings", "problems", "unshrunk", "unproven"), ())
    return Certificate(
        verdict, digest=digest, num_parameters=1, steps=3, versions={}, files={}, seconds=1.0, **texts, **lists
    )


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))


@pytest.mark.usefixtures("cache")
def test_a_certificate_is_found_by_the_structure_of_the_job(tmp_path: Path) -> None:
    config = job(parallelism={"tensor_parallel_degree": 2})
    assert find_certificate(config) is None
    store_certificate(certificate(digest_of(config)))
    assert find_certificate(config) is not None
    larger = {"parallelism": {"tensor_parallel_degree": 8}, "model": {"flavor": "8B"}, "job": {"name": "other"}}
    assert digest_of(job(**larger)) == digest_of(job(**{**larger, "training": {"steps": 7}})) != digest_of(config)
    assert find_certificate(job(parallelism={"tensor_parallel_degree": 4})) == find_certificate(config), (
        "sizes of axes do not matter"
    )
    assert find_certificate(job(parallelism={"context_parallel_degree": 2})) is None
    file = tmp_path / "proof.json"
    named = job(parallelism={"tensor_parallel_degree": 2}, prove={"certificate": str(file)})
    with pytest.raises(ConfigError, match=r"prove\.certificate: cannot be read"):
        find_certificate(named)
    file.write_text(certificate(digest_of(config)).dumps())
    assert find_certificate(named) == find_certificate(config)
    assert "proof.json" not in describe_certificate(find_certificate(named), str(file))
    file.write_text(certificate("another").dumps())
    assert find_certificate(named) is None and "proof.json" in describe_certificate(None, str(file))
    assert describe_certificate(None, None).startswith("layout not proven; titan-launch prove")


@pytest.mark.usefixtures("cache")
def test_the_command_shows_the_certificate_of_the_cache(tmp_path: Path) -> None:
    """The slow test of docs/how_to/prove.md makes a certificate with the command."""
    path = tmp_path / "job.toml"
    path.write_text('[data]\nkind = "synthetic"\n')
    known = certificate(digest_of(load_job(str(path)).config))
    store_certificate(known)
    command = ["prove", "--config=job.toml", "--out=proof.json", "--prove.certificate=proof.json"]
    variables = {CACHE_VARIABLE: str(tmp_path / "cache")}
    status, output, reported = run_command(command, tmp_path, environment=variables)
    assert status == 0 and output.startswith("layout proven (shards 2)"), output + reported
    assert parse_as(CERTIFICATE, (tmp_path / "proof.json").read_bytes()) == known


@pytest.mark.usefixtures("cache")
def test_launch_requires_a_proof(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "job.toml"
    path.write_text(f'[job]\ndump_folder = "{tmp_path}"\ndevice = "cpu"\n[data]\nkind = "synthetic"\n')
    launch = ["launch", "--require-proof", "--config", str(path)]
    assert main(launch) == 2
    assert "error: --require-proof: found no certificate for this job" in capsys.readouterr().err
    from titan_launch.config.loading.load import load_job

    store_certificate(certificate(digest_of(load_job(str(path)).config), "differs"))
    assert main(launch) == 2
    assert "layout differs (shards 2): the twin does not train as in one process" in capsys.readouterr().err
    old = tmp_path / "old proof.json"
    old.write_text(certificate("of another job").dumps())
    assert main([*launch, f"--prove.certificate={old}"]) == 2
    assert f"certificate {old} is for another job, " in (error := capsys.readouterr().err)
    assert f"run titan-launch prove --config {path} --out '{old}' with the same overrides" in error
    assert main(["prove", "--config", str(path), f"--out={tmp_path}"]) == 2
    assert f"{tmp_path} is a folder; name a file" in capsys.readouterr().err

    def closed(text: str) -> None:
        raise BrokenPipeError  # as with `| head -1`

    monkeypatch.setattr("titan_launch.commands.prove.run_and_exit", lambda action, describe: action())
    monkeypatch.setattr("titan_launch.commands.prove.say", closed)
    assert main(["prove", "--config", str(path), f"--out={tmp_path}/new.json"]) == 1
    assert (tmp_path / "new.json").exists()


def test_a_run_records_its_certificate_and_its_page_has_it(tmp_path: Path) -> None:
    file = tmp_path / "proof.json"
    table = tiny_job(tmp_path, prove={"certificate": str(file)}, training={"steps": 1})
    file.write_text(certificate(digest_of(JobConfig.model_validate(table))).dumps())
    run_ranks(run_job, 1, table)
    assert (tmp_path / "tiny" / "proof.json").read_text() == file.read_text()
    assert main(["report", str(tmp_path / "tiny"), "--out", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text()
    assert "Proof of the layout" in page and "layout proven (shards 2)" in page


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_values_of_a_folder_are_those_of_transformers(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    random_model("Qwen 2.5, tied, windows", tmp_path / "hf")
    sections = {"model": {"weights": str(tmp_path / "hf"), **model_of(tmp_path / "hf")}, **EXACT, **ALONE}
    proven = prove(job(**sections, data={"kind": "synthetic", "vocab_size": 8}))
    assert proven.verdict == "proven", proven.text()
    assert proven.rows[-1].errors.keys() == {"logits", "gradient"}
    tampered = json.loads((tmp_path / "hf" / "config.json").read_text())
    (tmp_path / "hf" / "config.json").write_text(json.dumps({**tampered, "rms_norm_eps": 0.5}))
    other = job(**sections, data={"kind": "synthetic", "vocab_size": 8})
    proof = Proof(twin_of(other), tmp_path, lambda text: None)
    proof.compare_weights(other)
    (finding,) = proof.findings
    assert finding.parts == ("model.weights",) and proof.rows[-1].exceeded


def test_a_folder_in_the_own_format_is_not_compared_with_transformers(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    model = job().model.model_dump(mode="json")
    weights.write_folder(model, 16, str(tmp_path / "plain"))
    result = weights.compare_weights(job(model={**model, "weights": str(tmp_path / "plain")}).model_dump(mode="json"))
    assert isinstance(result, str) and result.endswith("because the folder has this package's own format")


def model_of(folder: Path) -> dict[str, Any]:
    from titan_launch.models.huggingface.config_json import read_folder_config

    found = read_folder_config(folder)
    return {"name": found.name, "flavor": found.flavor, "args": dict(found.args)}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["dpo", "kto", "distillation"])
def test_a_second_model_has_a_twin_of_its_own(name: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    random_model("Llama 2", tmp_path / "hf", vocab_size=320)
    model = {"weights": str(tmp_path / "hf"), **model_of(tmp_path / "hf")}
    settings = {
        "dpo": {"reference": model["weights"]},
        "kto": {"reference": model["weights"]},
        "distillation": {"teacher": model["weights"]},
    }
    data = {
        "dpo": {"kind": "preferences", "path": "pairs.jsonl"},
        "kto": {"kind": "unpaired_preferences", "path": "rated.jsonl"},
        "distillation": {"kind": "text"},
    }
    parallelism = {"tensor_parallel_degree": 2, "loss_parallel": False}
    loss = {"name": name, name: settings[name]}
    proven = prove(job(model=model, loss=loss, data=data[name], parallelism=parallelism, **EXACT))
    assert proven.verdict == "proven", proven.text()
