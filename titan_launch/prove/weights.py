"""Comparison of a job's model with the class of `transformers`, both with the weights in `model.weights`."""

from __future__ import annotations

import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan_launch.config.job import JobConfig
from titan_launch.config.sections.model import HUGGINGFACE, LoRAConfig, ModelConfig
from titan_launch.loss.outputs import find_logits
from titan_launch.models.architectures import vocabulary_taken
from titan_launch.models.build import build_model, find_weights_of
from titan_launch.models.huggingface.files import CONFIG_FILE
from titan_launch.models.init import allocate, initialize, load_weights
from titan_launch.models.weights.folder import open_weights
from titan_launch.models.weights.writing import Entry, write_json, write_tensors
from titan_launch.plan.hardware import GIB, free_memory_gib
from titan_launch.prove.measure import FLOOR, difference, disable_dropout
from titan_launch.prove.results import Difference
from titan_launch.train.model import build_job_model

_SEQUENCES, _TOKENS = 2, 24
_COPIES = 5 * 4
"""Bytes for each parameter in float32: two models with gradients, and a copy of the gradients of one."""


def compare_weights(job: dict[str, Any]) -> list[Difference] | str:
    """Compare logits and gradients of a job's model with those of the class of `transformers` that `config.json` names,
    in fp32, on a few sequences. If the models cannot be compared, return the reason as a sentence.

    The gradients of the model of `transformers` are written as a weights folder. This folder is then read in the same
    way as the job's folder. So if the reader puts a tensor into a wrong place, both logits and gradients differ.
    """
    config = JobConfig.model_validate(job)
    if find_spec("transformers") is None:
        return "model.weights: not compared with transformers, because transformers is not installed"
    if config.data.unit != "tokens":
        return "model.weights: not compared with transformers, because the model is not a language model"
    if config.model.exclude_from_weights:
        return "model.weights: not compared with transformers, because model.exclude_from_weights is set"
    folder = open_weights(config.model)
    if folder.config.model_type is None and config.model.name != HUGGINGFACE:
        return "model.weights: not compared with transformers, because the folder has this package's own format"
    needed = sum(torch.Size(tensor.shape).numel() for tensor in folder.tensors.values()) * _COPIES / GIB
    if needed > free_memory_gib():
        return f"model.weights: not compared with transformers, because this needs {needed:.1f} GiB of free memory"
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # the lock of a progress bar would outlive this process
    config = config.model_copy(update={"lora": LoRAConfig()})
    theirs: Any = AutoModelForCausalLM.from_pretrained(
        config.model.weights, attn_implementation="eager", local_files_only=True, use_safetensors=True
    )
    theirs = theirs.float().train()
    ours = _model_with_weights(config)
    generator = torch.Generator().manual_seed(0)
    most = min(theirs.config.get_text_config().vocab_size, vocabulary_taken(config.model) or 1 << 31)
    tokens = torch.randint(most, (_SEQUENCES, _TOKENS + 1), generator=generator)
    own, wanted_logits = _logits(ours, tokens), _logits(theirs, tokens)
    rows = [difference(1, "logits", own, wanted_logits, 0.0)]
    gradients = {name: p.grad for name, p in ours.named_parameters() if p.grad is not None}
    for parameter in theirs.parameters():
        parameter.data = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    with tempfile.TemporaryDirectory(prefix="titan-launch-gradients-") as written:
        theirs.save_pretrained(written)
        with torch.no_grad():
            load_weights(ours, find_weights_of(ours, config.model.model_copy(update={"weights": written})))
    wanted = dict(ours.named_parameters())
    floor = FLOOR * float(torch.stack([gradient.norm() for gradient in gradients.values()]).norm())
    rows += [difference(1, f"gradient {name}", value, wanted[name], floor) for name, value in gradients.items()]
    return rows


def _model_with_weights(config: JobConfig) -> nn.Module:
    built = build_job_model(config)
    disable_dropout(built.module)
    allocate(built.module, torch.device("cpu"))
    initialize(built.module, built.initializer, config.training.seed, torch.device("cpu"))
    load_weights(built.module, find_weights_of(built.module, config.model))
    return built.module.float().requires_grad_(True)


def _logits(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return the logits of sequences. Also run the backward of their cross-entropy, which leaves gradients in the
    parameters."""
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    logits = find_logits(model(inputs), targets)
    assert logits is not None
    F.cross_entropy(logits.float().flatten(0, 1), targets.flatten()).backward()
    return logits.detach()


def write_folder(model: dict[str, Any], seq_len: int, folder: str) -> None:
    """Write a weights folder with random values, in the format of `export --format plain`. `model`: the table `[model]`
    of a model of this package."""
    config = ModelConfig.model_validate(model)
    built = build_model(config, seq_len)
    allocate(built.module, torch.device("cpu"))
    initialize(built.module, built.initializer, 1, torch.device("cpu"))
    path = Path(folder)
    path.mkdir()
    tensors = dict(built.module.named_parameters())
    write_json(path / CONFIG_FILE, {"model": config.model_dump(mode="json", include={"name", "flavor", "args"})})
    entries = [Entry(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()]
    write_tensors(path, entries, lambda entry: tensors[entry.name].detach().contiguous())
