"""Adapters of runs beside `peft` and `transformers`: folders of adapters, merged models, and imports."""

from __future__ import annotations

import json
import warnings
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.distributed import run_ranks
from tests.models.parity import random_model, samples
from tests.packages import needs
from tests.sampling import sampled
from tests.tensors import assert_equal, full_state
from tests.train.jobs import this_rank, tiny_job
from titan_launch.checkpoint.index import read_weights
from titan_launch.cli import main
from titan_launch.config.job import JobConfig
from titan_launch.config.loading.load import load_job
from titan_launch.core.errors import UserError
from titan_launch.inference.export import ExportOptions, _write_adapter
from titan_launch.inference.saved_model import SavedModel
from titan_launch.models.build import build_model, recorded_model
from titan_launch.models.huggingface.files import WeightsError
from titan_launch.models.weights.folder import WeightsFolder
from titan_launch.models.weights.writing import Entry
from titan_launch.train.build import build_run
from titan_launch.train.loop import fit

pytestmark = needs("peft", "transformers")

CASES: dict[str, tuple[str, ...]] = {
    "Llama 3.1, RoPE scaling": ("tok_embeddings", "layers.*.attention.*", "layers.*.feed_forward.w1", "output"),
    "Qwen 3, tied": ("layers.*.attention.wq", "layers.0.feed_forward.*"),
    "GPT-2": ("layers.*.attention.*", "layers.1.feed_forward.*"),
    "Phi-3": ("layers.*.attention.wq", "layers.*.attention.wv", "layers.*.feed_forward.*"),
    "Mixtral": ("layers.*.attention.w[qk]", "layers.*.moe.experts"),
    "Qwen 3, experts": ("layers.1.moe.experts",),
    "GPT-OSS": ("layers.*.attention.w[qv]", "layers.*.moe.experts"),
    "Moonlight": ("layers.*.attention.*", "layers.*.moe.experts"),
}
"""Targets of the adapters, by a case of `tests.models.parity`."""


RULES = [
    {"match": ["layers.1.**"], "rank": 2, "alpha": 7.0},
    {
        "match": ["layers.0.attention.wq"],
        "rank": 6,
        "alpha": 10.0,
    },  # with the scale of wk and wv, which are one in Phi-3
]
RULES_OF = {case: {"rules": RULES[: 1 if case == "Qwen 3, experts" else 2]} for case in CASES}


def job_file(folder: Path, targets: tuple[str, ...], **sections: Any) -> str:
    """Write a job with adapters of the folder `hf`, and return its path."""
    lora = {"targets": list(targets), "rank": 3, "alpha": 5.0, **sections.pop("lora", {})}
    job = tiny_job(
        folder,
        training={"steps": 2, "seq_len": 24, "local_batch_size": 2},
        checkpoint={"enable": True},
        lr_scheduler={"kind": "constant", "warmup_steps": 0},
        optimizer={"lr": 0.05},
        lora=lora,
        **sections,
    )
    job["model"] = {"weights": str(folder / "hf")}
    path = folder / f"{job['job']['name']}.json"
    path.write_text(json.dumps(job))
    return str(path)


def logits_of_runs(paths: list[str], tokens: Tensor) -> list[tuple[Tensor, dict[str, Tensor]]]:
    """Train the jobs on this rank. Return the logits of each trained model, and its adapters."""
    results = []
    for path in paths:
        with ExitStack() as stack:
            run = build_run(load_job(path).config, this_rank(), stack)
            fit(run)
            run.model.eval()
            with torch.no_grad():
                logits = run.model(tokens)
            state = full_state(run.model)
            results.append((logits, {name: value for name, value in state.items() if ".lora." in name}))
    return results


def initial_states(paths: list[str]) -> list[dict[str, Tensor]]:
    """Build the runs on this rank. Return their adapters."""
    states = []
    for path in paths:
        with ExitStack() as stack:
            state = full_state(build_run(load_job(path).config, this_rank(), stack).model)
            states.append({name: value for name, value in state.items() if ".lora." in name})
    return states


@sampled("cases", list(CASES), 6)
def test_adapters_of_all_kinds_are_those_of_peft(cases: tuple[str, ...], tmp_path: Path) -> None:
    """Adapters of two ranks: `peft` computes the same logits, also from the merged model, and an import is bitwise."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    folders = {case: tmp_path / str(number) for number, case in enumerate(cases)}
    for case, folder in folders.items():
        random_model(case, folder / "hf")
    tokens, _ = samples()
    paths = [job_file(folders[case], CASES[case], lora=RULES_OF[case]) for case in cases]
    trained = run_ranks(logits_of_runs, 2, paths, tokens)[0]
    imports = []
    for (case, folder), (logits, adapters) in zip(folders.items(), trained, strict=True):
        assert main(["export", str(folder / "tiny"), "--out", str(folder / "adapter"), "--adapter"]) == 0
        assert main(["export", str(folder / "tiny"), "--out", str(folder / "merged")]) == 0
        base = AutoModelForCausalLM.from_pretrained(folder / "hf", attn_implementation="eager").eval()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            theirs = PeftModel.from_pretrained(base, folder / "adapter").eval()
        assert not [str(w.message) for w in caught if "missing" in str(w.message) or "unexpected" in str(w.message)]
        merged = AutoModelForCausalLM.from_pretrained(folder / "merged", attn_implementation="eager").eval()
        with torch.no_grad():
            for model in (theirs, merged):
                assert (model(tokens).logits - logits).abs().max() < 1e-5, case
        assert any(values.abs().max() > 0.01 for name, values in adapters.items() if name.endswith(".b"))
        lora = {**RULES_OF[case], "adapter": str(folder / "adapter")}
        imports.append(job_file(folder, CASES[case], lora=lora, job={"name": "again"}))
    for (_, adapters), imported in zip(trained, run_ranks(initial_states, 1, imports)[0], strict=True):
        assert_equal(imported, adapters)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "rank": ({"lora": {"rank": 2}}, "its rank (r) is 3; set lora.rank = 3"),
    "scale": (
        {"lora": {"alpha": 7.0}},
        "its scale is 1.66666667, but [lora] gives 2.33333333; set lora.alpha = 5.0 and lora.rank_stabilized = false",
    ),
    "targets": (
        {"lora": {"targets": ["layers.*.attention.wk"]}},
        "4 tensors unexpected (not matched by lora.targets): base_model.model.model.layers.0.self_attn.q_proj",
    ),
    "base": ({"model": {"weights": "other"}}, "its base has the fingerprint "),
}
"""Changes of a job, and a part of the error, by what differs in the folder of adapters."""


def refusals(path: str, folder: Path) -> list[str]:
    """Return the errors of the jobs with the changes of `WRONG` on this rank."""
    found = []
    for name, (changes, _) in WRONG.items():
        job = json.loads(Path(path).read_text())
        for section, values in changes.items():
            job[section] = {**job[section], **values}
        if name == "base":
            job["model"]["weights"] = str(folder / "other")
        job["job"]["name"] = name
        with pytest.raises(UserError) as error, ExitStack() as stack:
            changed = folder / f"{name}.json"
            changed.write_text(json.dumps(job))
            build_run(load_job(str(changed)).config, this_rank(), stack)
        found.append(str(error.value))
    return found


def test_adapters_of_another_job_are_refused(tmp_path: Path) -> None:
    random_model("Llama 2", tmp_path / "hf")
    random_model("Llama 2", tmp_path / "other", rms_norm_eps=1e-3)
    weights = tmp_path / "other/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8] + bytes(8))
    targets = ("layers.*.attention.wq",)
    run_ranks(logits_of_runs, 1, [job_file(tmp_path, targets)], samples()[0])
    assert main(["export", str(tmp_path / "tiny"), "--out", str(tmp_path / "adapter"), "--adapter"]) == 0
    path = job_file(tmp_path, targets, lora={"adapter": str(tmp_path / "adapter")}, job={"name": "again"})
    for (_, expected), error in zip(WRONG.values(), run_ranks(refusals, 1, path, tmp_path)[0], strict=True):
        assert "lora.adapter" in error and expected in error


_RESNET: dict[str, Any] = {"model": {"name": "resnet"}, "lora": {"targets": ["fc"], "rank": 2}}


@pytest.mark.parametrize(
    ("sections", "changed"),
    [
        ({"model": {"name": "deepseek_v3"}, "lora": {"targets": ["**.attention.*"]}}, "layers.1.moe.selection_bias"),
        (_RESNET, "bn1.running_mean"),
        ({**_RESNET, "batchnorm": {"of_frozen": "fixed"}}, ""),
    ],
)
def test_adapters_of_a_run_that_changed_buffers_are_not_exported(
    sections: dict[str, Any], changed: str, tmp_path: Path
) -> None:
    job = JobConfig.model_validate(sections)
    module = build_model(job.model, 8, lora=job.lora).module
    entries = {name: Entry(name, tuple(tensor.shape), tensor.dtype) for name, tensor in module.state_dict().items()}
    saved = SavedModel({}, job, entries, lambda name: torch.zeros(entries[name].shape), "", None)
    options = ExportOptions(is_plain=True, is_adapter=True)
    with pytest.raises(WeightsError, match=changed) if changed else nullcontext():
        _write_adapter(saved, tmp_path, options)
    if not changed:
        del entries["bn1.weight"]
        with pytest.raises(WeightsError, match=r"bn1.running_mean"):  # a layer without parameters is never fixed
            _write_adapter(saved, tmp_path, options)


def test_scales_of_one_module_of_transformers_are_not_exported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    random_model("Phi-3", tmp_path / "hf")
    rules = [{"match": ["layers.1.attention.wv"], "alpha": 7.0}]
    run_ranks(
        logits_of_runs, 1, [job_file(tmp_path, ("layers.*.attention.w[qkv]",), lora={"rules": rules})], samples()[0]
    )
    assert main(["export", str(tmp_path / "tiny"), "--out", str(tmp_path / "adapter"), "--adapter"]) == 2
    assert (
        "share one adapter in peft (model.layers.1.self_attn.qkv_proj), but have different scales"
        in capsys.readouterr().err
    )
    assert (
        main(["export", str(tmp_path / "tiny"), "--out", str(tmp_path / "plain"), "--adapter", "--format=plain"]) == 0
    )


@torch.no_grad()
def test_the_base_may_move_and_is_never_written_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exports and plain PyTorch find the base where the user says. A card in the merged export names it."""
    load_file = pytest.importorskip("safetensors.torch").load_file
    base, run, moved = tmp_path / "hf", tmp_path / "tiny", tmp_path / "moved"
    random_model("Llama 2", base)
    random_model("Llama 2", tmp_path / "other", initializer_range=0.5)
    tokens, _ = samples()
    job = job_file(tmp_path, ("layers.*.attention.w*",))
    ((logits, _),) = run_ranks(logits_of_runs, 1, [job], tokens)[0]
    plain = recorded_model(run / "config.json").eval()
    plain.load_state_dict(dict(read_weights(run / "checkpoints" / "latest")), strict=False)
    torch.testing.assert_close(plain(tokens), logits, rtol=0, atol=1e-5)

    def failure(*command: str | Path) -> str:
        assert main([str(word) for word in command]) == 2
        return capsys.readouterr().err

    nothing = "nothing is written into such a folder"
    inside = f"is in {base}, a folder with weights (*.safetensors); {nothing}; choose another path"
    assert inside in failure("export", run, "--out", base / "merged") and inside in failure(
        "import", tmp_path / "other", "--out", base / "own"
    )
    written = f"{base / 'tiny'} is in {base}, a folder with weights (*.safetensors); {nothing}; choose another folder"
    assert written in failure("check", "--config", job, f"--job.dump_folder={base}")
    assert "hf: it has no checkpoint, so --base has no effect" in failure("export", base, "--out", job, "--base", base)
    base.rename(moved)
    digest = WeightsFolder(moved).fingerprint().digest
    needed = f"omits 21 never-trained parameters; their values are in {base}, with the fingerprint {digest}"
    assert needed in failure("export", run, "--out", tmp_path / "out")
    assert needed in failure("export", run, "--out", tmp_path / "out", "--base", tmp_path / "other")
    assert main(["export", str(run), "--out", str(tmp_path / "out"), "--format=plain", "--base", str(moved)]) == 0
    merged = recorded_model(tmp_path / "out/config.json").eval()
    merged.load_state_dict(load_file(tmp_path / "out/model.safetensors"), strict=False)
    torch.testing.assert_close(merged(tokens), logits, rtol=0, atol=1e-5)
    assert f"fingerprint `{digest}`" in (tmp_path / "out/README.md").read_text()
    soup = ["--base", str(moved), "--soup", str(tmp_path / "other")]
    assert main(["export", str(run), "--out", str(tmp_path / "soup"), *soup]) == 0
