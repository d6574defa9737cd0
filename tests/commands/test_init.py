"""`init` writes job files that pass the check and train, with the facts of the folders that it is given."""

from __future__ import annotations

import json
import os
import resource
import shlex
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import tomli

from tests.distributed import run_command, run_ranks
from tests.models.huggingface_folders import write_config
from tests.models.parity import random_model
from tests.packages import skip_without
from tests.sampling import rest_is_slow
from tests.train.jobs import read_metrics, this_rank
from titan_launch.cli import main
from titan_launch.commands import init
from titan_launch.config.loading.job_files import carried_configs
from titan_launch.config.loading.load import load_job
from titan_launch.core.errors import UserError, config_error
from titan_launch.data.tokenizers import train_tokenizer
from titan_launch.launch import options
from titan_launch.plan.hardware import DEVICES
from titan_launch.recipes.recipes import RECIPES
from titan_launch.recipes.sizes import _Candidate
from titan_launch.recipes.writing import write_new
from titan_launch.train.build import build_run
from titan_launch.train.loop import fit

CHAT = {"conversations": [{"from": "human", "value": "Say a word."}, {"from": "gpt", "value": "word"}]}


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def written(name: str, file: str, *args: str) -> dict[str, Any]:
    """Run `init`, and return the job file as a table."""
    assert main(["init", name, "--out", file, *args]) == 0
    return tomli.loads(Path(file).read_text())


def write_lines(name: str, *records: dict[str, Any], times: int = 1) -> str:
    Path(name).write_text("".join(json.dumps({**record, "id": i}) + "\n" for i in range(times) for record in records))
    return name


def make_data(kind: str) -> str:
    """Write data of a kind, and return its path."""
    match kind:
        case "chat":
            chats = ({"prompt": f"Say the number {n}.", "response": f"It is {n}."} for n in range(400))
            return write_lines("chats.jsonl", *chats)
        case "preferences":
            pairs = ({"prompt": f"Say {n}.", "chosen": f"It is {n}.", "rejected": "No."} for n in range(400))
            return write_lines("pairs.jsonl", *pairs)
        case "images":
            generator = np.random.default_rng(0)
            images = generator.integers(0, 255, (60, 3, 8, 8), np.uint8)
            np.savez("images.npz", images=images, labels=np.arange(60) % 3)
            return "images.npz"
    Path("corpus").mkdir()
    for number in range(40):
        Path("corpus", f"{number}.txt").write_text(f"Text number {number}. " * 40)
    return "corpus"


def train_two_steps(job: str) -> None:
    small = ["--training.steps=2", "--job.device=cpu", "--lr_scheduler.warmup_steps=1", "--metrics.log_freq=1"]
    sizes = ["--training.seq_len=256", "--training.local_batch_size=2", "--training.global_batch_size=4"]
    tiny = [*sizes, "--validation.max_samples=4"]
    config = load_job(job, [*small, *tiny]).config
    with ExitStack() as stack:
        fit(build_run(config, this_rank(), stack))


@pytest.mark.parametrize("name", rest_is_slow(list(RECIPES), 6))
def test_a_recipe_passes_the_check_and_trains(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Every recipe, with a tiny model and tiny data, on two ranks."""
    pytest.importorskip("transformers")
    pytest.importorskip("tokenizers")
    data, arguments = make_data(RECIPES[name].kinds[0]), []
    if RECIPES[name].needs_model:
        random_model("Llama 3.1, RoPE scaling", Path("model"), vocab_size=320, max_position_embeddings=256)
        train_tokenizer(["text"], 300, Path("tokenizer"))
        shutil.copy("tokenizer/tokenizer.json", "model")
        arguments = ["--model", "model"]
    job = written(name, "job.toml", "--data", data, *arguments)
    assert "to do" not in capsys.readouterr().out
    assert main(["check", "--config", "job.toml", "--world-size", "2"]) == 0
    assert job["data"]["kind"] == RECIPES[name].kinds[0] and job["job"]["name"] == "job"
    assert arguments == [] or job["training"]["seq_len"] == 256, "the model takes no longer sequences"
    run_ranks(train_two_steps, 2, "job.toml")
    assert [report["step"] for report in read_metrics(Path("outputs"), "job")] == [1, 2]


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_without_folders_names_what_is_missing(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The job runs as it is, or the placeholders are its only problems."""
    if name == "image_classification":
        skip_without("sklearn")
    assert main(["init", name]) == 0
    out = capsys.readouterr().out
    status = main(["check", "--config", f"{name}.toml", "--world-size", "2"])
    assert status == (2 if RECIPES[name].needs_model else 0)
    keys = [line.split(": ")[1].split(" = ")[0] for line in out.splitlines() if line.startswith("  ")]
    expected = ["model.weights", "tokenizer.path", *["data.path"] * (RECIPES[name].default_data != "python-stdlib")]
    assert keys == (expected if RECIPES[name].needs_model else [])
    assert all(
        "REPLACE" in line for line in Path(f"{name}.toml").read_text().splitlines() if line.startswith("weights")
    )


def test_every_comment_of_a_command_is_a_valid_command(capsys: pytest.CaptureFixture[str]) -> None:
    main(["init", "pretrain", "--out", "my job.toml"])
    assert "next: titan-launch launch --config 'my job.toml'" in capsys.readouterr().out
    lines = Path("my job.toml").read_text().splitlines()
    commands = [shlex.split(line)[2:] for line in lines if line.startswith("#   titan-launch")]
    assert [command[0] for command in commands] == ["check", "data", "plan", "launch"]
    assert main(commands[0]) == 0


def test_a_file_is_never_overwritten(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.toml").write_text("mine")
    Path("model.safetensors").touch()  # a job file may be in a folder with weights
    assert main(["init", "pretrain", "--out", "new.toml"]) == 0
    for name in ("pretrain", "llama_bn"):
        assert main(["init", name, "--out", "mine.toml"]) == 2
        assert "mine.toml exists, and init never overwrites a file" in capsys.readouterr().err
    assert Path("mine.toml").read_text() == "mine"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (9, limits[1]))  # like a full disk
        with pytest.raises(UserError, match=r"part\.toml cannot be written: File too large"):
            write_new("part.toml", "[job]\n" * 9)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not Path("part.toml").exists()
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert main(["init", "pretrain"]) == 2
    assert "error: pretrain.toml: this user may not write to .; name another file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([], "needs the name of a recipe: pretrain, "),
        (["stf"], 'no recipe or config "stf"; did you mean "sft"?'),
        (["sft", "--out", "job.yaml"], "the name of a job file must end in .toml"),
        (
            ["sft", "job.toml"],
            "unrecognized arguments: job.toml; the option --out names the output (see titan-launch init",
        ),
        (["sft", "--out", "no/such/folder.toml"], "no/such/folder.toml: there is no folder no/such"),
        (["sft", "--model", "nowhere"], "--model nowhere: there is no such folder"),
        (["sft", "--data", "nowhere"], "--data nowhere: no such file or folder"),
        (["sft", "--data", "text.txt"], 'has 1 text file (data.kind = "text"), but the recipe sft needs "chat"'),
        (["pretrain", "--data", "chats.jsonl"], "recipes for this data: sft, lora"),
        (["pretrain", "--data", "numbers.jsonl"], "no key has text; the keys are: number"),
        (["pretrain", "--data", "bad.jsonl"], "line 2 of bad.jsonl is not valid JSON"),
        (["pretrain", "--data", "empty.jsonl"], "its files have no lines"),
        (["pretrain", "--data", "array.jsonl"], "line 1 of array.jsonl is not a JSON object"),
        (["image_classification", "--data", "bad.npz"], "is not a valid .npz file of plain arrays"),
        (["pretrain", "--device", "h100"], f'{DEVICES[-1].name}; did you mean "h100-80gb"'),
        (["llama_bn", "--world-size", "2"], '--world-size has no effect on the config "llama_bn", which init only cop'),
    ],
)
def test_bad_input_is_one_error_and_writes_nothing(
    args: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("text.txt").write_text("text")
    write_lines("chats.jsonl", CHAT)
    write_lines("numbers.jsonl", {"number": 1})
    Path("bad.jsonl").write_text('{"text": "a"}\n{"text": \n')
    Path("empty.jsonl").write_text("\n")
    Path("array.jsonl").write_text("[1]\n")
    Path("bad.npz").write_text("no archive")
    assert main(["init", *args]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("error:") == 1 and words in error
    assert list(Path().glob("*.toml")) == []


def test_the_kind_of_data_follows_from_its_content(capsys: pytest.CaptureFixture[str]) -> None:
    make_data("text")
    many = write_lines("many.jsonl", {"title": "t", "body": "a longer text"}, times=300)
    prepare = ["prepare", "corpus", "--out", "tokens", "--validation-percent", "10"]
    assert run_command(prepare, Path.cwd())[0] == 0
    Path("flat").mkdir()
    np.arange(100, dtype=np.uint16).tofile("flat/a.bin")
    found = {
        path: written("pretrain", f"{n}.toml", "--data", path)["data"]
        for n, path in enumerate(["corpus", many, "tokens", "tokens/train", "flat"])
    }
    assert found == {
        "corpus": {"kind": "text", "path": "corpus", "split": "train"},
        many: {"kind": "jsonl", "path": many, "split": "train", "field": "body"},
        "tokens": {"kind": "tokens", "path": "tokens/train"},
        "tokens/train": {"kind": "tokens", "path": "tokens/train"},
        "flat": {"kind": "tokens", "path": "flat/*.bin"},
    }
    assert tomli.loads(Path("2.toml").read_text())["validation"]["data"]["path"] == "tokens/validation"
    assert "validation" not in tomli.loads(Path("3.toml").read_text())


def test_columns_of_tables_are_found(capsys: pytest.CaptureFixture[str]) -> None:
    pyarrow, datasets = pytest.importorskip("pyarrow"), pytest.importorskip("datasets")
    from pyarrow import parquet

    Path("tables").mkdir()
    parquet.write_table(pyarrow.table({"id": [1], "content": ["text"]}), "tables/a.parquet")
    data = written("pretrain", "a.toml", "--data", "tables")["data"]
    assert data == {"kind": "parquet", "path": "tables", "column": "content"}
    split = datasets.Dataset.from_dict({"id": [1], "text": ["a"]})
    datasets.DatasetDict({"train": split}).save_to_disk("set")
    data = written("pretrain", "b.toml", "--data", "set")["data"]
    assert data == {"kind": "huggingface", "path": "set", "split": "train", "column": "text", "hf_split": "train"}
    assert main(["check", "--config", "a.toml"]) == 0 == main(["check", "--config", "b.toml"])
    shutil.copy("set/train/dataset_info.json", ".")
    Path("set/dataset_dict.json").write_text('{"splits": [".."]}')
    assert "hf_split" not in written("pretrain", "c.toml", "--data", "set")["data"]


def length_of(name: str, *args: str) -> tuple[dict[str, Any], str]:
    """Run `init`. Return the job, and the line with its length."""
    job = written(name, "length.toml", *args)
    (line,) = (line for line in Path("length.toml").read_text().splitlines() if line.startswith(("epochs", "steps")))
    Path("length.toml").unlink()
    return job, line.partition("# ")[2]


def test_the_length_follows_from_the_data(capsys: pytest.CaptureFixture[str]) -> None:
    """Epochs for fine-tuning and for small data, with the number of steps; `check` does not warn of them."""
    make_data("text")
    assert run_command(["prepare", "corpus", "--out", "tokens"], Path.cwd())[0] == 0
    job, comment = length_of("pretrain", "--data", "tokens")
    assert job["training"]["epochs"] == 3 and comment == "10 steps; an epoch has 98 samples"
    assert (job["lr_scheduler"]["warmup_steps"], job["checkpoint"]["interval"]) == (1, 2)
    job, comment = length_of("pretrain", "--data", "corpus")
    assert job["training"]["epochs"] == 3 and comment.startswith("about 9 steps; an epoch has about 94 samples; `ti")
    job, comment = length_of("pretrain")
    assert job["training"]["steps"] == 1000 and comment.startswith("about 0.") and " epochs of " in comment
    job, comment = length_of("sft", "--data", make_data("chat"))
    assert job["training"]["epochs"] == 3 and "; an epoch has about " in comment
    assert job["training"]["global_batch_size"] < length_of("sft")[0]["training"]["global_batch_size"]
    assert length_of("dpo")[1] == "`titan-launch data` shows how many steps these are"
    job, comment = length_of("image_classification", "--data", make_data("images"))
    assert (job["training"]["epochs"], comment) == (90, "21 steps; an epoch has 58 samples")
    write_config(Path("vit"), "vit", architectures=["ViTForImageClassification"])
    assert length_of("image_classification", "--data", "images.npz", "--model", "vit")[0]["training"]["epochs"] == 3


def test_images_decide_sizes_and_classes(capsys: pytest.CaptureFixture[str]) -> None:
    image = pytest.importorskip("PIL.Image")
    for name, side in (("cat", 300), ("dog", 300)):
        Path("photos", name).mkdir(parents=True)
        image.new("RGB", (side, side + 20)).save(f"photos/{name}/1.png")
    job = written("image_classification", "a.toml", "--data", "photos")
    assert job["model"]["args"] == {"image_size": 224, "in_channels": 3, "num_classes": 2}
    assert (job["data"]["resize"], job["data"]["crop"], job["data"]["augment"]) == (256, 224, ["resized_crop", "flip"])
    assert "augment" not in job["validation"]["data"]
    write_config(Path("vit"), "vit", architectures=["ViTForImageClassification"])
    job = written("image_classification", "b.toml", "--data", "photos", "--model", "vit")
    assert job["model"]["args"] == {"num_labels": 2} and job["model"]["exclude_from_weights"] == ["classifier.*"]
    assert job["data"]["mean"] == [0.485, 0.456, 0.406]
    keys = {"image_mean": [0.5] * 3, "image_std": [0.4] * 3, "size": {"height": 192, "width": 192}}
    Path("vit/preprocessor_config.json").write_text(json.dumps(keys))
    job = written("image_classification", "d.toml", "--data", "photos", "--model", "vit")
    for data in (job["data"], job["validation"]["data"]):
        assert (data["mean"], data["std"], data["resize"], data["crop"]) == ([0.5] * 3, [0.4] * 3, 192, 192)
    assert "# size as in preprocessor_config.json; the aspect ratio is kept" in Path("d.toml").read_text()
    make_data("images")
    job = written("image_classification", "c.toml", "--data", "images.npz")
    assert job["model"]["args"] == {"image_size": 8, "in_channels": 3, "stem": "small", "num_classes": 3}


LLAMA_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128_256,
    "max_position_embeddings": 131_072,
}


GPUS = {
    "h100-80gb": "NVIDIA H100 80GB HBM3, 81559",
    "a100-40gb": "NVIDIA A100-SXM4-40GB, 40960",
    "l4": "NVIDIA L4, 23034",
}
"""Names of `--device`, each with the driver's name and MiB of the same GPU."""


@pytest.mark.slow
@pytest.mark.parametrize("named", [False, True], ids=["of the machine", "named"])
def test_sizes_are_those_that_fit_the_gpus(
    named: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A larger GPU gets a larger microbatch or less activation checkpointing, for the same batch. Each device that is
    named needs recordings of its own."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    write_config(Path("8b"), "llama", **LLAMA_8B)
    sizes = {}
    for device, answer in GPUS.items():
        monkeypatch.setattr(options, "_ask_driver", lambda *args, answer=answer: [] if named else [answer] * 8)
        chosen = ["--device", device, "--world-size", "8"] if named else []
        job = written("pretrain", f"{device}.toml", "--model", "8b", *chosen)
        training = job["training"]
        sizes[device] = (training["local_batch_size"], job["activation_checkpoint"]["mode"])
        assert (training["seq_len"], training["global_batch_size"], job["loss"]["chunks"]) == (4096, 128, 8)
        assert job.get("planner") == ({"device": device} if named else None)
    assert sizes["h100-80gb"][0] >= sizes["a100-40gb"][0] and sizes["h100-80gb"][1] == "none"
    assert sizes["a100-40gb"][1] != "none" and sizes["l4"] == (1, "full")
    l4 = "l4" if named else "NVIDIA L4"
    too_large = f"Even with these, the planner predicts that the job does not fit into 8 {l4}."
    assert too_large in Path("l4.toml").read_text()


def test_a_job_that_cannot_be_planned_gets_the_smallest_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> NoReturn:
        raise config_error(("model", "name"), "cannot be traced", "llama3")

    monkeypatch.setattr(init, "recordings_of", refuse)
    job, text = written("pretrain", "job.toml", "--device", "l4"), Path("job.toml").read_text()
    assert (job["training"]["local_batch_size"], job["activation_checkpoint"]["mode"]) == (1, "full")
    assert "because the planner cannot predict the job: cannot be traced" in text and "does not fit" not in text


def test_an_error_for_a_larger_microbatch_leaves_the_smaller_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    def candidates(*args: Any) -> Iterator[Any]:
        yield _Candidate(2, "selective", None, 3.0, 8.0)
        raise config_error(("model", "name"), "cannot be traced", "llama3")

    monkeypatch.setattr("titan_launch.recipes.sizes._candidates", candidates)
    job, text = written("pretrain", "job.toml", "--device", "l4"), Path("job.toml").read_text()
    assert (job["training"]["local_batch_size"], job["activation_checkpoint"]["mode"]) == (2, "selective")
    assert "the planner predicts 3.0 of 8.0 GiB per rank" in text


@pytest.mark.slow
def test_the_gpus_of_the_machine_are_planned_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    write_config(Path("8b"), "llama", **{**LLAMA_8B, "num_hidden_layers": 8})
    monkeypatch.setattr(options, "_ask_driver", lambda *args: [GPUS["h100-80gb"]] * 8)
    job, text = written("pretrain", "here.toml", "--model", "8b"), Path("here.toml").read_text()
    assert (job["training"]["seq_len"], job["training"]["global_batch_size"], job["loss"]["chunks"]) == (4096, 128, 8)
    assert job["activation_checkpoint"]["mode"] == "none" and "of 79.1 GiB per rank" in text
    assert "planner" not in job and "8 NVIDIA H100 80GB HBM3" in text


def test_the_gpus_of_the_machine_are_found_if_no_device_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(options, "_ask_driver", lambda *args: [GPUS["h100-80gb"]] * 8)
    assert written("sft", "named.toml", "--device", "l4")["planner"] == {"device": "l4"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert options.find_gpus() == [("NVIDIA H100 80GB HBM3", 81559 / 1024)] * 2 and options.count_gpus() == 2


def test_the_visible_gpus_are_those_that_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: name)
    monkeypatch.setattr(options, "_ask_driver", lambda *args: ["A, 1024", "B, 2048", "C, [N/A]"])
    numbers = {"1": ["B"], "1, 0": ["B", "A"], "1,-1,0": ["B"], "1,NoDevFiles,0": ["B"], "2": [], "7": []}
    for visible, names in {**numbers, "GPU-a1b2,GPU-c3d4": ["A", "B"]}.items():
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert [name for name, _ in options.find_gpus()] == names, visible
        assert options.count_gpus() == len(names) + (visible == "2"), visible
    monkeypatch.setattr(options, "_ask_driver", lambda *args: [])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    assert options.plan_processes({}).per_node == options.PROCESSES_WITHOUT_GPU
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert options.plan_processes({}).per_node == 4


def test_a_machine_without_a_gpu_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    written("pretrain", "job.toml")
    assert "since this machine has no GPU" in Path("job.toml").read_text()


def test_the_list_names_every_recipe_and_config(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", "--list"]) == 0
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
    assert names == [*RECIPES, *carried_configs()] and "llama_bn" in names and "precision/fp32" in names


@pytest.mark.parametrize("name", carried_configs())
def test_a_copied_config_is_the_same_job(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", name, "--out", "copy.toml"]) == 0
    assert load_job("copy.toml").config == load_job(name).config == load_job(str(carried_configs()[name])).config
    text = Path("copy.toml").read_text()
    assert "configs/" not in text and "scripts/" not in text and "#:schema" not in text


def test_a_plain_name_is_a_config_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--config", "llama_bn"]) == 0
    assert main(["check", "--config", "precision/fp32"]) == 0
    capsys.readouterr()
    assert main(["check", "--config", "llama_b"]) == 2
    error = capsys.readouterr().err
    assert "no job file of this package, which has llama3_70b, " in error and 'did you mean "llama_bn"?' in error
    Path("job.toml").write_text('extends = "llama_bm"\n')
    assert main(["check", "--config", "job.toml"]) == 2
    assert 'job.toml:1: extends = "llama_bm": llama_bm: no such file, and no job file' in capsys.readouterr().err
    Path("job.toml").write_text('extends = "llama_bn"\n[training]\nsteps = 7\n')
    config = load_job("job.toml").config
    assert (config.job.name, config.training.steps) == ("llama_bn", 7)
    Path("llama_bn").write_text("[training]\nsteps = 9\n")
    assert load_job("llama_bn").config.training.steps == 9, "a file of this name comes first"
