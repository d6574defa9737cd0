"""Seeded bugs, which are planted one at a time in the ranks of a proof, and the mutation score.

python -m tests.prove.mutants --write docs/verification/prove.md      # takes half an hour

A mutant of the package replaces a function on every rank, also on the one process of the reference, as a bug in the
package's code would. A mutant of a user's model is a factory of `user_models`.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import Replicate

from benchmarks.publishing import markdown_table, publish
from tests.prove.user_models import Scale
from titan_launch.config.job import JobConfig
from titan_launch.core.patches import replaced
from titan_launch.plan.proof.certificate import Certificate
from titan_launch.prove import ranks
from titan_launch.prove.main import prove

Plant = Callable[[], None]


@dataclass(frozen=True)
class Mutant:
    """A bug, the job that shows it, and its place."""

    module: str
    """Regular expression of the module with the bug, which the certificate must name."""

    job: dict[str, dict[str, Any]]
    plant: Plant | None = None
    part: str = ""
    """A part of the layout that the certificate must name; empty if several show the bug."""

    near: str = ""
    """The module that the certificate names by mistake, near the right one. Empty if it names the right one."""

    about: str = ""
    """The bug of a user's model in a sentence."""

    @property
    def sentence(self) -> str:
        """The bug in a sentence: that of the function that plants it."""
        return self.about or (self.plant.__doc__ or "" if self.plant else "")


def _decoder(name: str = "llama3", **args: Any) -> dict[str, Any]:
    return {"model": {"name": name, "args": args}}


TP = {"parallelism": {"tensor_parallel_degree": 2}}
CP = {"parallelism": {"context_parallel_degree": 2}}
EP = {"parallelism": {"expert_parallel_degree": 2}}
PP = {"parallelism": {"pipeline_parallel_degree": 2}}
HSDP = {"parallelism": {"data_parallel_replicate_degree": 2}}
REPLICAS = {"parallelism": {"data_parallel_replicate_degree": 2, "shard_optimizer_over_replicas": True}}
FULL = {"activation_checkpoint": {"mode": "full"}}
SELECTIVE = {"activation_checkpoint": {"mode": "selective"}}
EXPERTS = _decoder("qwen3_moe", experts={"balance_loss": 0.1, "z_loss": 0.1, "expert_bias": True})
BATCHNORM = _decoder(norm="batchnorm")


def _user(name: str, **sections: Any) -> dict[str, Any]:
    return {"model": {"name": f"tests.prove.user_models:{name}"}, **sections}


def _wrap(owner: Any, name: str, change: Callable[[Any], Callable[..., Any]]) -> None:
    setattr(owner, name, change(getattr(owner, name)))


# Tensor parallelism


def norms_are_not_reduced() -> None:
    """Does not sum the gradients of the norms' weights over the tensor-parallel ranks."""
    from titan_launch.parallel import tensor_parallel

    _wrap(tensor_parallel, "_replicate", lambda old: lambda module, mesh, gradient: old(module, mesh, Replicate()))


def outputs_are_averaged() -> None:
    """Halves the outputs of row-wise layers, as a mean over two ranks would."""
    from titan_launch.parallel import tensor_parallel

    def change(old: Any) -> Any:
        def appliers(*args: Any) -> Any:
            found = old(*args)
            rowwise = found["rowwise"]

            def halved(module: Any) -> None:
                rowwise(module)
                module.register_forward_hook(lambda _, args, output: output * 0.5)

            return {**found, "rowwise": halved}

        return appliers

    _wrap(tensor_parallel, "_appliers", change)


def gathered_gradient_is_scaled() -> None:
    """Doubles the gradient of a layer's gathered input."""
    from titan_launch.parallel import tensor_parallel

    def change(old: Any) -> Any:
        def gather_input(module: Any, mesh: Any, stream: Any) -> None:
            module.register_forward_pre_hook(lambda _, args: (Scale.apply(args[0], 2.0), *args[1:]))
            old(module, mesh, stream)

        return gather_input

    _wrap(tensor_parallel, "_gather_input", change)


def softmax_over_local_classes() -> None:
    """Computes the softmax of the loss over the rank's own classes only."""
    from titan_launch.loss.chunked import Classes

    Classes.reduced = lambda self, values, op: values  # type: ignore[method-assign]


def heads_norm_is_not_reduced() -> None:
    """Does not sum the gradients of the norm of each head over the ranks."""
    from titan_launch.parallel import tensor_parallel

    _wrap(
        tensor_parallel,
        "_normalize_heads",
        lambda old: lambda module, mesh: tensor_parallel._replicate(module, mesh, Replicate()),
    )


def norm_over_local_heads() -> None:
    """Replaces the sum over the ranks, in a norm over all heads, by twice the rank's own part."""
    from titan_launch.parallel import tensor_parallel

    def change(old: Any) -> Any:
        def normalize(module: Any, mesh: Any) -> None:
            old(module, mesh)
            module.add_ranks = lambda part: part * 2

        return normalize

    _wrap(tensor_parallel, "_normalize_heads", change)


def adapter_without_its_sum() -> None:
    """Does not sum the gradients of adapters over the ranks."""
    from titan_launch.parallel import tensor_parallel

    tensor_parallel._of_gradients = lambda placements: {  # type: ignore[assignment]
        name: list(where) for name, where in placements.items()
    }


def bias_of_each_rank() -> None:
    """Adds the bias of an expert on each rank, so that the sum has it several times."""
    from titan_launch.parallel import tensor_parallel

    def change(old: Any) -> Any:
        return lambda module, gradients, zeros=(): old(module, gradients, ())

    _wrap(tensor_parallel, "_compute_locally", change)


def tie_is_lost() -> None:
    """Does not tie the weights of the embedding and of the output layer."""
    from titan_launch.parallel import tensor_parallel

    tensor_parallel._ties = lambda model: []  # type: ignore[assignment]


def auxiliary_losses_of_each_rank() -> None:
    """Adds the auxiliary losses of the same tokens once for each tensor-parallel rank."""
    from titan_launch.parallel import expert_balance

    def change(old: Any) -> Any:
        def prepare(model: Any, plan: Any, mesh: Any, *others: Any) -> None:
            old(model, plan, mesh, *others)
            for layer in expert_balance._layers(model).values():
                layer.loss_scale = 1 / mesh.layout.global_batch_size

        return prepare

    from titan_launch.parallel import apply

    _wrap(apply, "prepare_experts", change)


# Expert parallelism


def expert_gradients_twice() -> None:
    """Doubles the gradients in the backward of the all-to-all."""
    from titan_launch.parallel.expert_parallel import _Exchanged

    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return old(ctx, gradients[0] * 2)

    old = _Exchanged.backward
    _Exchanged.backward = staticmethod(backward)  # type: ignore[assignment]


def rows_in_the_order_of_ranks() -> None:
    """Leaves received rows in the order of the ranks, not of the experts."""
    from titan_launch.parallel import expert_parallel

    expert_parallel.order_by_expert = lambda there, num_rows: torch.arange(num_rows)  # type: ignore[assignment]


def experts_reduced_by_mean() -> None:
    """Averages the gradients of the experts over the ranks, instead of summing them."""
    from titan_launch.models.decoder.mixture_of_experts import Experts
    from titan_launch.parallel import fsdp

    def change(old: Any) -> Any:
        def apply(model: Any, *args: Any) -> None:
            old(model, *args)
            for module in model.modules():
                if isinstance(module, Experts) and isinstance(module, fsdp.FSDPModule) and module.dispatch is not None:
                    module.set_gradient_divide_factor(2.0)

        return apply

    from titan_launch.parallel import apply

    _wrap(apply, "apply_fsdp", change)


def auxiliary_loss_is_detached() -> None:
    """Detaches the balance loss, so that it has no effect on gradients."""
    from titan_launch.models.decoder import mixture_of_experts

    _wrap(mixture_of_experts, "balance_losses", lambda old: lambda *args: old(*args).detach().requires_grad_())


# Context parallelism


def unbalanced_parts() -> None:
    """Takes consecutive instead of balanced parts of a sequence."""
    from titan_launch.parallel import context_parallel

    context_parallel.SequencePart.of = (  # type: ignore[method-assign]
        lambda self, full, axis=0: full.chunk(self.count, axis)[self.index]
    )


def positions_from_zero() -> None:
    """Counts the positions of each rank's part of a sequence from 0."""
    from titan_launch.parallel import context_parallel
    from titan_launch.train import model

    def divide(module: Any, axes: Any, part: Any, seq_len: int) -> None:
        first = part and context_parallel.SequencePart(0, part.count, False)
        context_parallel_divide(module, axes, first, seq_len)

    context_parallel_divide = context_parallel.divide_buffers
    model.divide_buffers = divide  # type: ignore[attr-defined]


def balance_of_local_tokens() -> None:
    """Computes the balance loss from the rank's own tokens only."""
    from titan_launch.models.decoder import mixture_of_experts

    _wrap(mixture_of_experts, "balance_losses", lambda old: lambda choice, group=None: old(choice))


def z_loss_of_each_rank() -> None:
    """Computes the z-loss of the router from the rank's own tokens only."""
    from titan_launch.models.decoder import mixture_of_experts

    _wrap(mixture_of_experts, "z_losses", lambda old: lambda logits, group=None: old(logits))


def keys_without_gradient_of_others() -> None:
    """Halves the gradients of the keys in ring attention."""
    from titan_launch.distributed import ring_attention_on_cpu as ring

    def change(old: Any) -> Any:
        def backward(*args: Any, **kwargs: Any) -> Any:
            query, key, value = old(*args, **kwargs)
            return query, ring._like(key, key.to_local() * 0.5), value

        return backward

    _wrap(ring, "_backward", change)


# Pipelines


def stages_scale_by_microbatches() -> None:
    """Divides the loss by the number of microbatches."""
    from titan_launch.train import pipeline_step

    def change(old: Any) -> Any:
        def find(name: str) -> Any:
            kind = old(name)

            class Scaling(kind):  # type: ignore[misc, valid-type]
                def __init__(self, *args: Any, scale_grads: bool = True, loss_fn: Any = None, **options: Any):
                    number = args[1]
                    mean = lambda *a: loss_fn(*a) / number  # noqa: E731
                    super().__init__(*args, scale_grads=False, loss_fn=mean, **options)

            return Scaling

        return find

    _wrap(pipeline_step, "get_schedule_class", change)


def stage_scales_its_gradient() -> None:
    """Halves the gradient that a stage gets from the next one."""
    from titan_launch.train.pipeline_step import HiddenModule

    def forward(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        return Scale.apply(self.module(*args, **kwargs).contiguous(), 0.5)

    HiddenModule.forward = forward  # type: ignore[method-assign]


def stage_skips_its_residual() -> None:
    """Omits the residual connection of the first block of a stage."""
    from titan_launch.models.decoder.module import TransformerBlock
    from titan_launch.train.pipeline_step import HiddenModule

    made, forward = HiddenModule.__init__, TransformerBlock.forward

    def make(self: Any, module: Any) -> None:
        made(self, module)
        first = next(m for m in module.modules() if isinstance(m, TransformerBlock))
        vars(first)["skips"] = True

    def skipping(self: Any, x: Tensor, *others: Any) -> Tensor:
        y = forward(self, x, *others)
        return y - x if vars(self).get("skips") else y

    HiddenModule.__init__ = make  # type: ignore[method-assign]
    TransformerBlock.forward = skipping  # type: ignore[method-assign]


def targets_of_other_microbatches() -> None:
    """Shifts the targets by one sample and one token."""
    from titan_launch.train.pipeline_step import _Losses

    def change(old: Any) -> Any:
        return lambda self, outputs, targets: old(self, outputs, targets.roll(1, 0).roll(1, -1))

    _wrap(_Losses, "compute", change)


# FSDP2, replicas, accumulation


def gradients_are_averaged() -> None:
    """Averages the gradients over the ranks, instead of summing them."""
    from titan_launch.parallel import fsdp

    def average(unit: Any) -> None:
        unit.set_gradient_divide_factor(float(dist.get_world_size()))
        unit.set_force_sum_reduction_for_comms(True)

    fsdp._sum_gradients = average


def replicas_do_not_all_reduce() -> None:
    """Does not all-reduce the gradients between the replicas."""
    from titan_launch.parallel.fsdp import Accumulation

    old = Accumulation.begin_microbatch

    def begin(self: Any, model: Any, is_last: bool) -> None:
        old(self, model, is_last)
        model.set_requires_all_reduce(False)

    Accumulation.begin_microbatch = begin  # type: ignore[method-assign]


def only_the_last_microbatch() -> None:
    """Drops the gradients of all microbatches but the last."""
    from titan_launch.distributed.torch_private import drop_unsharded_gradients
    from titan_launch.parallel.fsdp import Accumulation

    old = Accumulation.begin_microbatch

    def begin(self: Any, model: Any, is_last: bool) -> None:
        if self._mode.defers:
            drop_unsharded_gradients(model)
        old(self, model, is_last)

    Accumulation.begin_microbatch = begin  # type: ignore[method-assign]


def replicas_average() -> None:
    """Halves the gradients that a replica receives."""
    from titan_launch.optim.replica_shards import ReplicaShards

    _wrap(ReplicaShards, "stored", lambda old: lambda self, received, unit: old(self, received / 2, unit))


def replicas_do_not_gather() -> None:
    """Does not gather the parameters that other replicas have updated."""
    from titan_launch.optim.replica_shards import ReplicaShards

    ReplicaShards.gather_parameters = lambda self: None  # type: ignore[method-assign]


# The step


def divided_by_local_targets() -> None:
    """Divides the loss by the rank's own number of targets."""
    from titan_launch.train import step

    def total(self: Any) -> Tensor:
        self._sum.wait() if self._sum is not None else None
        self._sum = None
        return torch.stack([self.items_local * dist.get_world_size(), self._total[1]])

    step._Counts.total = total  # type: ignore[method-assign]


def mean_of_means() -> None:
    """Averages the mean losses of microbatches with different numbers of targets."""
    from titan_launch.train import step

    old = step.forward_backward

    def change(model: Any, microbatch: Any, device: Any, num_items: Any, loss: Any, *others: Any) -> Any:
        own = loss.counts(microbatch.targets, microbatch.documents)[0]
        # As if the microbatches of the twin were two, and all had as many targets.
        return old(model, microbatch, device, lambda: own * 2 * dist.get_world_size(), loss, *others)

    step.forward_backward = change


def norm_of_local_shards() -> None:
    """Computes the gradient norm from the rank's own shards only."""
    from titan_launch.optim import clip

    def local(mesh: Any, gradients: Any) -> Tensor:
        return torch.stack([clip.local_tensor(g).double().square().sum() for g in gradients]).sum()

    clip._square_on_mesh = local


def norm_of_own_stages() -> None:
    """Computes the gradient norm from the rank's own pipeline stages only."""
    from titan_launch.train import step

    _wrap(step, "clip_grad_norm", lambda old: lambda parameters, max_norm, *others: old(parameters, max_norm))


# Activation checkpointing


def statistics_twice() -> None:
    """Updates BatchNorm's running statistics again in the second forward."""
    from titan_launch.parallel import activation_checkpoint

    activation_checkpoint._Forward.__init__ = functools.partialmethod(  # type: ignore[method-assign]
        lambda self, old, call, inner, counting=(): old(self, call, inner), activation_checkpoint._Forward.__init__
    )


def router_differs_in_second_forward() -> None:
    """Chooses other experts in the second forward."""
    from titan_launch.metrics.memory import is_in_backward
    from titan_launch.models.decoder import mixture_of_experts

    def change(old: Any) -> Any:
        def choose(logits: Tensor, *args: Any) -> Any:
            return old(logits.roll(1, -1) if is_in_backward() else logits, *args)

        return choose

    _wrap(mixture_of_experts, "choose", change)


def saved_results_in_wrong_order() -> None:
    """Returns saved matrix products with an error of 1 %."""
    from titan_launch.parallel import activation_checkpoint

    def change(old: Any) -> Any:
        def saved(func: Any, inputs: Any, result: Any) -> Any:
            recall = old(func, inputs, result)
            return lambda args, kwargs: (
                recall(args, kwargs) * 1.01 if func is torch.ops.aten.mm.default else recall(args, kwargs)
            )

        return saved

    _wrap(activation_checkpoint, "_saved_result", change)


# The loss in chunks


def later_chunks_have_no_gradient() -> None:
    """Omits the gradients of tokens whose target is in an earlier chunk of classes."""
    from titan_launch.loss import chunked

    old = chunked._gradient

    def gradient(logits: Tensor, index: Tensor, *others: Any) -> Tensor:
        return old(logits, index, *others) * (index >= 0)

    chunked.Kernels.compiled = staticmethod(  # type: ignore[method-assign]
        lambda compile_function: chunked.Kernels(chunked._add_classes, gradient)
    )


def z_loss_without_its_factor() -> None:
    """Halves the gradient of the z-loss."""
    from titan_launch.loss import chunked

    old = chunked._gradient

    def gradient(logits: Tensor, index: Tensor, largest: Any, log_sum: Any, scale: Any, z: Any, *others: Any) -> Tensor:
        return old(logits, index, largest, log_sum, scale, None if z is None else (z + 1) / 2, *others)

    chunked.Kernels.compiled = staticmethod(  # type: ignore[method-assign]
        lambda compile_function: chunked.Kernels(chunked._add_classes, gradient)
    )


# BatchNorm, optimizer, average


def batchnorm_backward_is_local() -> None:
    """Does not sum over the ranks in the backward of synchronized BatchNorm."""
    from titan_launch.parallel import synchronized_batchnorm

    synchronized_batchnorm.all_reduced = lambda values, group: values  # type: ignore[assignment]


def running_variance_of_one_rank() -> None:
    """Corrects the running variance by the number of values of one rank."""
    from titan_launch.parallel.synchronized_batchnorm import _Synchronized

    old = _Synchronized._track

    def track(self: Any, mean: Tensor, variance: Tensor, count: Tensor) -> None:
        old(self, mean, variance, count / self.ranks)

    _Synchronized._track = track  # type: ignore[method-assign]


def matrices_of_own_shards() -> None:
    """Orthogonalizes each rank's part of a matrix by itself (Muon)."""
    from titan_launch.optim import muon

    def orthogonalized(matrices: Tensor, steps: int) -> Tensor:
        halves = [old(half, steps) for half in matrices.chunk(dist.get_world_size(), -2)]
        return torch.cat(halves, -2)

    old = muon.orthogonalized
    muon.orthogonalized = orthogonalized


def decay_of_replicas() -> None:
    """Divides the averaged parameters by the number of ranks."""
    from titan_launch.optim.ema import WeightEMA

    def source(self: Any, parameter: Any) -> Tensor:
        return old(self, parameter) / dist.get_world_size()

    old = WeightEMA._source
    WeightEMA._source = source  # type: ignore[method-assign]


_NORMS = r"(layers\.\d\.\w+_norm|norm)"
_EXPERT = r"layers\.\d\.moe(\..*)?"

MUTANTS: dict[str, Mutant] = {
    # tensor parallelism
    "norms_are_not_reduced": Mutant(_NORMS, TP, norms_are_not_reduced, "tensor"),
    "outputs_are_averaged": Mutant(r"layers\.0\.attention\.wo", TP, outputs_are_averaged, "tensor"),
    "gathered_gradient_is_scaled": Mutant(r"layers\.1\.feed_forward", TP, gathered_gradient_is_scaled, "tensor"),
    "softmax_over_local_classes": Mutant("the loss", TP, softmax_over_local_classes, "tensor"),
    "heads_norm_is_not_reduced": Mutant(
        r"layers\.\d\.attention\.[qk]_norm", {**_decoder("qwen3"), **TP}, heads_norm_is_not_reduced, "tensor"
    ),
    "norm_over_local_heads": Mutant(
        r"layers\.0\.attention\.[qk]_norm", {**_decoder("olmo2"), **TP}, norm_over_local_heads, "tensor"
    ),
    "adapter_without_its_sum": Mutant(
        r".*\.lora", {**TP, "lora": {"targets": ["all-linear"], "rank": 4}}, adapter_without_its_sum, "tensor"
    ),
    "bias_of_each_rank": Mutant(_EXPERT, {**EXPERTS, **TP}, bias_of_each_rank, "tensor"),
    "tie_is_lost": Mutant("tok_embeddings|output", {**_decoder(tie_embeddings=True), **TP}, tie_is_lost, "tensor"),
    "auxiliary_losses_of_each_rank": Mutant(_EXPERT, {**EXPERTS, **TP}, auxiliary_losses_of_each_rank, "tensor"),
    # expert parallelism
    "expert_gradients_twice": Mutant(_EXPERT, {**EXPERTS, **EP}, expert_gradients_twice, "expert"),
    "rows_in_the_order_of_ranks": Mutant(r"layers\.0\.moe.*", {**EXPERTS, **EP}, rows_in_the_order_of_ranks, "expert"),
    "experts_reduced_by_mean": Mutant(_EXPERT, {**EXPERTS, **EP}, experts_reduced_by_mean, "expert"),
    "auxiliary_loss_is_detached": Mutant("", EXPERTS, auxiliary_loss_is_detached),
    # context parallelism
    "unbalanced_parts": Mutant(r"layers\.0\.attention.*", CP, unbalanced_parts, "context"),
    "positions_from_zero": Mutant(r"rope|layers\.0\.attention.*", CP, positions_from_zero, "context"),
    "balance_of_local_tokens": Mutant(_EXPERT, {**EXPERTS, **CP}, balance_of_local_tokens, "context"),
    "z_loss_of_each_rank": Mutant(_EXPERT, {**EXPERTS, **CP}, z_loss_of_each_rank, "context"),
    "keys_without_gradient_of_others": Mutant(
        r"layers\.\d\.attention.*", CP, keys_without_gradient_of_others, "context", near="rope"
    ),
    # pipelines
    "stages_scale_by_microbatches": Mutant("the loss", PP, stages_scale_by_microbatches, "pipeline"),
    "stage_scales_its_gradient": Mutant(
        r"layers\.\d|output", PP, stage_scales_its_gradient, "pipeline", near="the loss"
    ),
    "stage_skips_its_residual": Mutant(r"layers\.0", PP, stage_skips_its_residual, "pipeline"),
    "targets_of_other_microbatches": Mutant("the loss", PP, targets_of_other_microbatches, "pipeline"),
    # FSDP2, replicas and accumulation
    "gradients_are_averaged": Mutant("all parameters", {}, gradients_are_averaged, "shards"),
    "replicas_do_not_all_reduce": Mutant("all parameters", HSDP, replicas_do_not_all_reduce, "replicas"),
    "only_the_last_microbatch": Mutant(
        "all parameters", {"gradient_accumulation": {"mode": "deferred"}}, only_the_last_microbatch, "accumulation"
    ),
    "replicas_average": Mutant("all parameters", REPLICAS, replicas_average, "sharded optimizer"),
    "replicas_do_not_gather": Mutant("the optimizer", REPLICAS, replicas_do_not_gather, "sharded optimizer"),
    # the step
    "divided_by_local_targets": Mutant("the loss", {}, divided_by_local_targets, "shards"),
    "mean_of_means": Mutant("the loss", {}, mean_of_means),
    "norm_of_local_shards": Mutant("gradient clipping", {}, norm_of_local_shards, "shards"),
    "norm_of_own_stages": Mutant("gradient clipping", PP, norm_of_own_stages, "pipeline"),
    # activation checkpointing
    "statistics_twice": Mutant(_NORMS, {**BATCHNORM, **FULL}, statistics_twice, "checkpointing"),
    "router_differs_in_second_forward": Mutant(
        _EXPERT, {**EXPERTS, **FULL}, router_differs_in_second_forward, "checkpointing"
    ),
    "saved_results_in_wrong_order": Mutant(r"layers\.1\..*", SELECTIVE, saved_results_in_wrong_order, "checkpointing"),
    # the loss in chunks
    "later_chunks_have_no_gradient": Mutant(
        "output", {"loss": {"chunks": 4}}, later_chunks_have_no_gradient, "4 chunks"
    ),
    "z_loss_without_its_factor": Mutant(
        "output", {"loss": {"chunks": 4, "z_loss": 0.1}}, z_loss_without_its_factor, "4 chunks"
    ),
    # BatchNorm, optimizer, average
    "batchnorm_backward_is_local": Mutant(
        "norm", {**BATCHNORM, "batchnorm": {"statistics": "synchronized"}}, batchnorm_backward_is_local, "shards"
    ),
    "running_variance_of_one_rank": Mutant(
        _NORMS, {**BATCHNORM, "batchnorm": {"statistics": "synchronized"}}, running_variance_of_one_rank, "shards"
    ),
    "matrices_of_own_shards": Mutant(
        "the optimizer", {"optimizer": {"name": "Muon"}}, matrices_of_own_shards, "shards"
    ),
    "decay_of_replicas": Mutant(r"\[ema\]", {"ema": {"decay": 0.9}}, decay_of_replicas, "shards"),
    # models of users
    "user_over_the_batch": Mutant(
        r"blocks\.0.*", _user("over_the_batch"), None, about="Subtracts the mean over the samples of the microbatch."
    ),
    "user_scaled_by_ranks": Mutant(
        r"blocks\.3.*", _user("scaled_by_ranks"), None, "shards", about="Divides gradients by the number of ranks."
    ),
    "user_counts_calls": Mutant(
        r"blocks\.\d.*",
        _user("counts_calls", **FULL),
        None,
        "checkpointing",
        about="Scales by a number of calls, which the second forward changes.",
    ),
    "user_mixes_tokens": Mutant(
        r"blocks\.0.*",
        _user("mixes_tokens", **TP),
        None,
        "tensor",
        about="Mixes tokens, although its `tensor_parallel` styles say that it does not.",
    ),
    "user_remembers": Mutant(
        r"blocks\.0.*", _user("remembers"), None, "accumulation", about="Adds the mean of the microbatch before."
    ),
    "user_random": Mutant("", _user("random"), None, about="Adds random numbers in its forward."),
    "user_unused": Mutant("", _user("unused"), None, about="Has a bias without effect."),
    "user_decayed": Mutant(
        r"blocks\.\d",
        _user("decayed"),
        None,
        "accumulation",
        about="Has a weight whose only gradient is that of a penalty.",
    ),
}
"""All bugs by name. An empty `module` means that the certificate has a problem in place of a difference."""


def planted(name: str, function: str, *args: Any) -> Any:
    """Plant a bug on this rank, and call a function, `module:name`."""
    plant = MUTANTS[name].plant
    if plant is not None:
        plant()
    module, _, attribute = function.partition(":")
    return getattr(importlib.import_module(module), attribute)(*args)


def certificate_with(name: str) -> Certificate:
    """Return the certificate of a mutant's job, in fp32, with the bug planted on every rank."""
    run_ranks = ranks.run_ranks

    def run(function: str, world_size: int, *args: Any, timeout: float) -> list[Any]:
        return run_ranks("tests.prove.mutants:planted", world_size, name, function, *args, timeout=timeout)

    job = {"precision": {"param_dtype": "float32"}, **MUTANTS[name].job}
    with replaced(ranks, "run_ranks", run):
        return prove(JobConfig.model_validate(job))


def main() -> None:
    """Plant all bugs, and write the table of what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path, help="the Markdown file with the table's markers")
    parser.add_argument("--only", nargs="*", default=list(MUTANTS), metavar="NAME", help="bugs to plant")
    arguments = parser.parse_args()
    rows, found, named = [("bug", "what it does", "module", "shown by")], 0, 0
    for name in arguments.only:
        certificate = certificate_with(name)
        if certificate.findings:
            finding = certificate.findings[0]
            module, parts = finding.module, ", ".join(finding.parts)
        else:
            module, parts = "; ".join(certificate.problems), ""
        is_named = re.fullmatch(MUTANTS[name].module or ".+", module) is not None
        found, named = found + (certificate.verdict != "proven"), named + (is_named and bool(parts))
        about = MUTANTS[name].sentence.removesuffix(".")
        rows.append((f"`{name}`", about, module if is_named else f"**{module}**", parts))
        print(" | ".join(rows[-1]), flush=True)
    incomparable = sum(not parts for *_, parts in rows)
    score = (
        f"{found} of {len(rows) - 1} bugs were found. The right module was named for {named}. For {incomparable}, the "
        "certificate says why the model cannot be compared."
    )
    publish(f"{score}\n\n{markdown_table(rows)}", "mutants", arguments.write)


if __name__ == "__main__":
    main()
