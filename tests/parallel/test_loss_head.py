"""An output layer that computes the loss in chunks, in every division of a model, compared with logits on one rank."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.distributed import run_ranks
from tests.sampling import sampled
from tests.tensors import full_state
from tests.train.jobs import TINY_ARGS, step_and_report, this_rank, tiny_job
from titan_launch.config.job import JobConfig
from titan_launch.data.sources import Batch
from titan_launch.loss.build import build_loss
from titan_launch.models.build import build_model
from titan_launch.models.factory import HostBuild
from titan_launch.models.init import initialize
from titan_launch.train.build import build_run
from titan_launch.train.forward import find_output_layer
from titan_launch.train.model import plan_precision
from titan_launch.train.step import forward_backward

OWN = "tests.parallel.divided_model:Model"
VALIDATION = {"freq": 2, "max_samples": 5, "data": {"kind": "synthetic", "vocab_size": 64, "num_samples": 7, "seed": 9}}
BF16 = {"param_dtype": "bfloat16", "rules": [{"match": "output", "param_dtype": "float32"}]}
ROUNDED = {"rules": [{"match": ["norm", "output"], "param_dtype": "float32", "output_dtype": "bfloat16"}]}
TAGS = ("train/loss", "train/z_loss", "train/grad_norm", "validation/loss", "validation/accuracy")


def llama(args: dict[str, Any] | None = None, **sections: Any) -> dict[str, Any]:
    return {"model": {"args": {**TINY_ARGS, "n_layers": 4, "vocab_size": 64, **(args or {})}}, **sections}


def divided(**degrees: Any) -> dict[str, Any]:
    return {"parallelism": degrees}


TWO_STAGES = {"pipeline_parallel_degree": 2}
SPLIT = {**TWO_STAGES, "pipeline_parallel_schedule": "ZBVZeroBubble"}
# name: the job, and how two ranks divide it
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "FSDP, checkpointed, resharded": (
        "llama",
        {"activation_checkpoint": {"mode": "full"}, "parallelism": {"fsdp_reshard_after_forward": "always"}},
    ),
    "FSDP, deferred, offloaded": (
        "tied, capped",
        {"gradient_accumulation": {"mode": "deferred"}, "training": {"enable_cpu_offload": True}},
    ),
    "TP": ("tied, capped", divided(tensor_parallel_degree=2)),
    "TP without its options": (
        "llama",
        divided(tensor_parallel_degree=2, sequence_parallel=False, loss_parallel=False),
    ),
    "PP": ("llama", divided(**TWO_STAGES)),
    "PP, split backward": (
        "llama",
        {**divided(**SPLIT), "gradient_accumulation": {"mode": "deferred", "keep_params_unsharded": True}},
    ),
    "own model, TP": ("own", divided(tensor_parallel_degree=2)),
    "fp32 head": ("fp32 head", {}),
    "rounded logits, TP": ("rounded", divided(tensor_parallel_degree=2)),
}
SEQ_LEN = 6
JOBS: dict[str, dict[str, Any]] = {
    "llama": llama(),
    "tied, capped": llama({"tie_embeddings": True, "logits_soft_cap": 0.5}),
    "own": {"model": {"name": OWN, "args": {}}},
    "fp32 head": llama(precision=BF16),
    "rounded": llama(precision=ROUNDED),
}
TOLERANCE = {"fp32 head": 2e-2, "rounded": 2e-2}


def train(jobs: list[dict[str, Any]], folder: Path) -> list[dict[str, Tensor]]:
    """Train each job for 2 steps. Return the metrics of every step, and the parameters."""
    return [_train(job, folder / str(index)) for index, job in enumerate(jobs)]


def _train(job: dict[str, Any], folder: Path) -> dict[str, Tensor]:
    training = {"global_batch_size": 8, "local_batch_size": 1, "steps": 3, **job.get("training", {})}
    sections = {
        "data": {"vocab_size": 64},
        "optimizer": {"eps": 1e-3},
        "validation": VALIDATION,
        "debug": {"audit_precision": True},
        **job,
        "training": training,
    }
    with ExitStack() as stack:
        config = JobConfig.model_validate({**tiny_job(folder, **sections), "model": job["model"]})
        run = build_run(config, this_rank(), stack)
        assert (run.job.plan.loss_head is None) == (config.loss.chunks == 1)
        reports = [step_and_report(run) for _ in range(2)]
        seen = {tag: torch.tensor([scalars[tag] for scalars in reports if tag in scalars]) for tag in TAGS}
        return {**seen, **full_state(run.model)}


@sampled("names", list(CASES), 10)
def test_the_head_computes_the_loss_of_one_rank_with_logits(names: tuple[str, ...], tmp_path: Path) -> None:
    cases = {name: CASES[name] for name in names}
    own = list(dict.fromkeys(job for job, _ in cases.values()))
    plain = [{**JOBS[job], "loss": {"z_loss": 0.02, "label_smoothing": 0.1}} for job in own]
    alone = dict(zip(own, run_ranks(train, 1, plain, tmp_path / "1")[0], strict=True))
    chunked = {"chunks": 3, "z_loss": 0.02, "label_smoothing": 0.1}
    jobs = [{**JOBS[job], **sections, "loss": chunked} for job, sections in cases.values()]
    by_rank = run_ranks(train, 2, jobs, tmp_path / "2", timeout=120)
    for index, (name, (job, _)) in enumerate(cases.items()):
        found = {key: value for results in by_rank for key, value in results[index].items()}
        apart = {
            key: float((found[key] - value).abs().max() / value.abs().max().clamp(min=1e-2))
            for key, value in alone[job].items()
        }
        assert {key: value for key, value in apart.items() if not value <= TOLERANCE.get(job, 1e-5)} == {}, name


class Wrapped(nn.Module):
    """A model of token ids whose logits are the output of `head`, changed by `change`."""

    def __init__(self, head: nn.Module, change: Any = lambda logits: logits, repeats: int = 1):
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.head, self.change, self.repeats = head, change, repeats

    def forward(self, tokens: Tensor) -> Any:
        for _ in range(self.repeats):
            logits = self.head(self.embedding(tokens))
        return self.change(logits)


class Doubled(nn.Linear):
    """A Linear whose forward is not that of `nn.Linear`."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def test_the_output_layer_of_a_users_model_is_found_only_if_its_output_is_returned_unchanged() -> None:
    class Output:
        def __init__(self, logits: Tensor):
            self.logits = logits

    def item(logits: Tensor) -> Tensor:
        assert logits.sum().item() > 0  # fails on the meta device
        return logits

    with torch.device("meta"):
        models = {
            "head": Wrapped(nn.Linear(4, 7)),
            "head.1": Wrapped(nn.Sequential(nn.Tanh(), nn.Linear(4, 7)), Output),
            "head.0": Wrapped(nn.Sequential(nn.Linear(4, 7)), lambda logits: (logits.new_ones(()), logits)),
            None: Wrapped(nn.Linear(4, 7), lambda logits: logits * 2),
            "": Wrapped(Doubled(4, 7)),
            "twice": Wrapped(nn.Linear(4, 7), repeats=2),
            "fails": Wrapped(nn.Linear(4, 7), item),
        }
    for expected, model in models.items():
        found = find_output_layer(model, seq_len=5)
        assert found == (expected if (expected or "").startswith("head") else None), expected


def transformers_class(name: str) -> nn.Module:
    import transformers

    shape = {"vocab_size": 61, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8}
    model: nn.Module = getattr(transformers, f"{name}ForCausalLM")(
        getattr(transformers, f"{name}Config")(**shape, **heads)
    )
    return model


class ReturnsTuple(Wrapped):
    """A model that returns another tensor before its logits."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 61), lambda logits: (logits.new_ones(()), logits))
        self.embedding = nn.Embedding(61, 4)


TOKENS = {"kind": "synthetic", "vocab_size": 61}
FACTORY = f"{__name__}:transformers_class"
# name: the model, its data, and the path of the output layer that computes the loss
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any], str | None]] = {
    "vit": ({"name": "vit", "flavor": "debug"}, {"kind": "images"}, "output"),
    "resnet": ({"name": "resnet", "flavor": "debug"}, {"kind": "images"}, "fc"),
    "Llama": ({"name": FACTORY, "args": {"name": "Llama"}}, TOKENS, "lm_head"),
    "Gemma 2 of transformers": ({"name": FACTORY, "args": {"name": "Gemma2"}}, TOKENS, None),
    "tuple": ({"name": f"{__name__}:ReturnsTuple"}, TOKENS, "head"),
}


@pytest.mark.parametrize("name", MODELS)
def test_models_of_every_kind_compute_the_loss_in_chunks(name: str) -> None:
    """Gemma 2 of `transformers` caps its logits after the layer, so its logits are divided into chunks."""
    model_section, data, head = MODELS[name]
    if "transformers_class" in model_section["name"]:
        pytest.importorskip("transformers")
    seen = []
    for chunks in (1, 3):
        config = JobConfig.model_validate({"model": model_section, "data": data, "loss": {"chunks": chunks}})
        built = build_model(config.model, SEQ_LEN, HostBuild(seed=0, free_bytes=2**40))
        plan = plan_precision(config, built)
        assert plan.loss_head == (None if chunks == 1 else head)
        model = built.module.to_empty(device="cpu")
        initialize(model, built.initializer, 0, torch.device("cpu"))
        loss = build_loss(model, plan, config, 10)
        is_images = data["kind"] == "images"
        targets = torch.randint(10, (3,) if is_images else (3, SEQ_LEN), generator=torch.Generator().manual_seed(2))
        inputs = torch.linspace(-1, 1, 3 * 64).view(3, 1, 8, 8) if is_images else targets
        trained = forward_backward(model, Batch(inputs, targets), torch.device("cpu"), lambda: torch.tensor(5), loss)
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        seen.append((trained, *gradients))
    for whole, chunked in zip(*seen, strict=True):
        torch.testing.assert_close(chunked, whole, rtol=1e-4, atol=1e-6)
