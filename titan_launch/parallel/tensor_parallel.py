"""Tensor parallelism (arXiv:1909.08053): sharding of a model's matrices over ranks, by styles that the model declares.

The activations that pass from layer to layer are called the residual stream: (batch, tokens, features). Every rank
holds the whole residual stream or, with sequence parallelism (arXiv:2205.05198), a part of its tokens. All parameters
become DTensors on the mesh, even replicated ones, because PyTorch cannot clip or update plain tensors and DTensors
together.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from titan_launch.config.axes import TENSOR
from titan_launch.config.sections.parallelism import ParallelismConfig
from titan_launch.models.decoder.layers import AllHeadsRMSNorm
from titan_launch.models.lora import LoRA
from titan_launch.models.parallel_plans import DIVISIONS, style_by_module
from titan_launch.models.spec import TensorStyle
from titan_launch.plan.freezing import ADAPTER

TOKENS, FEATURES = 1, -1
"""Dimensions of tensors. The residual stream is divided along TOKENS, and logits are divided along FEATURES."""


def apply_tensor_parallel(
    model: nn.Module,
    styles: Mapping[str, TensorStyle] | None,
    mesh: DeviceMesh | None,
    parallelism: ParallelismConfig,
    has_loss_head: bool = False,
) -> None:
    """Shard a model on the meta device over the ranks of `mesh`, in place. Do nothing if `mesh` is None. Nothing is
    allocated or communicated. Experts stay unchanged, because `divide_experts` shards them.

    `styles`: the model's declaration (`ModelSpec.tensor_parallel`), checked by `check_divisions`; None is allowed if
    `mesh` is None. Tied parameters stay tied. `has_loss_head`: True if the output layer returns the sums of the loss in
    place of logits. These sums are the same on all ranks. Without a loss head, but with `parallelism.loss_parallel`,
    the model returns the logits as a DTensor, which `titan_launch.loss.cross_entropy` accepts.
    """
    if mesh is None:
        return
    assert styles is not None, "check_divisions comes first"
    ties = _ties(model)
    appliers = _appliers(mesh, parallelism, parallelism.loss_parallel and not has_loss_head)
    for path, style in style_by_module(model, styles).items():
        module = model.get_submodule(path)
        adapter = module._modules.get(ADAPTER)
        if isinstance(adapter, LoRA):
            delattr(module, ADAPTER)  # PyTorch's styles would divide the parameters of children, too
            _divide_adapter(adapter, style, mesh, parallelism.sequence_parallel)
        appliers[style](module)
        if isinstance(adapter, LoRA):
            module.register_module(ADAPTER, adapter)
    for (owner, name), others in ties:
        for module, other in others:
            module.register_parameter(other, owner._parameters[name])


def token_shards(parallelism: ParallelismConfig) -> int:
    """Return the number of ranks over which the tokens of the residual stream are divided; 1 without sequence
    parallelism."""
    return parallelism.degree(TENSOR) if parallelism.sequence_parallel else 1


def _appliers(
    mesh: DeviceMesh, parallelism: ParallelismConfig, divides_logits: bool
) -> dict[TensorStyle, Callable[[nn.Module], object]]:
    """Return, for each style, a function that shards a module in place. `divides_logits`: True if the logits stay
    divided over the ranks."""
    stream: Placement = Shard(TOKENS) if parallelism.sequence_parallel else Replicate()
    replicated, part = Replicate(), Shard(FEATURES)

    def apply(style: ParallelStyle) -> Callable[[nn.Module], object]:
        return lambda module: parallelize_module(module, mesh, style, src_data_rank=None)

    return {
        "embedding": apply(RowwiseParallel(input_layouts=replicated, output_layouts=stream)),
        "positions": lambda module: _divide_positions(module, mesh, parallelism.sequence_parallel),
        "sequence": lambda module: _replicate(module, mesh, Partial() if parallelism.sequence_parallel else replicated),
        "input": lambda module: _gather_input(module, mesh, stream),
        "colwise": apply(ColwiseParallel()),
        "latent": lambda module: _compute_latent(module, mesh),
        "heads": lambda module: _normalize_heads(module, mesh),
        "by_head": lambda module: divide_locally(module, mesh, {name: [Shard(0)] for name in module._parameters}),
        "rowwise": apply(RowwiseParallel(output_layouts=stream)),
        "head": apply(
            ColwiseParallel(
                input_layouts=stream,
                output_layouts=part if divides_logits else replicated,
                use_local_output=not divides_logits,
            )
        ),
        "mixture": lambda module: _sum_outputs(module, mesh, stream),
        "router": lambda module: _replicate(module, mesh, Partial()),
        "experts": lambda module: None,  # `divide_experts` divides experts along the expert and tensor axes
        "shared_colwise": lambda module: divide_locally(module, mesh, {"weight": [Shard(0)], "bias": [Shard(0)]}),
        "shared_rowwise": lambda module: divide_locally(module, mesh, {"weight": [Shard(1)], "bias": [replicated]}),
    }


def _divide_positions(module: nn.Module, mesh: DeviceMesh, sequence_parallel: bool) -> None:
    """Replicate a module's own parameters. With sequence parallelism, let its forward get only this rank's tokens.
    Buffers are narrowed along dim 0, and inputs along dim 1, except for the first input, which is already divided."""
    _replicate(module, mesh, Partial() if sequence_parallel else Replicate())
    if not sequence_parallel:
        return
    whole, rank = module.forward, mesh.get_local_rank()

    def forward(x: Tensor, *others: Tensor | None) -> Any:
        buffers, length = dict(module._buffers), x.shape[TOKENS]
        first = rank * length
        try:
            parts = {name: None if b is None else b.narrow(0, first, length) for name, b in buffers.items()}
            module._buffers.update(parts)
            return whole(x, *(None if other is None else other.narrow(TOKENS, first, length) for other in others))
        finally:
            module._buffers.update(buffers)

    module.forward = forward


def _gather_input(module: nn.Module, mesh: DeviceMesh, stream: Placement) -> None:
    """Let a module get its first input, the residual stream, as a replicated DTensor. If the residual stream is divided
    over the ranks (sequence parallelism), it is all-gathered.

    Several matrices may read this input. The gradients of the input from all these matrices are added before a
    single reduction. `stream`: placement of the residual stream.
    """

    def gather(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        x, *rest = args
        return DTensor.from_local(x, mesh, [stream], run_check=False).redistribute(placements=[Replicate()]), *rest

    module.register_forward_pre_hook(gather)


def _sum_outputs(module: nn.Module, mesh: DeviceMesh, stream: Placement) -> None:
    """Let a module get the whole residual stream as its first input. Sum the module's output over the ranks, because
    the output of each rank is a partial sum. With sequence parallelism, each rank gets the sum for its own tokens.

    Within the module, all activations are plain tensors. Like the output, their gradients are partial sums on each
    rank. `stream`: placement of the residual stream.
    """

    def add(_: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        return (
            DTensor.from_local(output, mesh, [Partial()], run_check=False).redistribute(placements=[stream]).to_local()
        )

    _gather_input(module, mesh, stream)
    _take_locally(module)
    module.register_forward_hook(add)


def _normalize_heads(module: nn.Module, mesh: DeviceMesh) -> None:
    """Replicate a norm that works per head. If a norm works over all heads, divide its weight like the heads, and let
    its forward sum the squares over all ranks."""
    if not isinstance(module, AllHeadsRMSNorm):
        _replicate(module, mesh, Partial())
        return

    def add(part: Tensor) -> Tensor:
        parts = DTensor.from_local(part, mesh, [Partial()], run_check=False)
        return parts.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])

    divide_locally(module, mesh, {"weight": [Shard(0)]})
    module.add_ranks = add


def _compute_latent(module: nn.Module, mesh: DeviceMesh) -> None:
    """Replicate a module's own parameters, and let it take its first input, a DTensor from `_gather_input`, as a plain
    tensor. On each rank, the gradients of the parameters and of the input are partial sums."""
    _replicate(module, mesh, Partial())
    _take_locally(module)


def _take_locally(module: nn.Module) -> None:
    """Let a module take its first input, a DTensor from `_gather_input`, as a plain tensor. This rank's gradient of the
    input is a partial sum."""
    module.register_forward_pre_hook(lambda _, args: (_local(args[0], [Partial()]), *args[1:]))


def _replicate(module: nn.Module, mesh: DeviceMesh, gradient: Placement) -> None:
    """Replicate a module's own parameters on every rank, and let its forward use plain tensors.

    `gradient`: `Partial` if ranks have different activations, so gradients are summed; `Replicate` if all ranks have
    the same activations.
    """
    _distribute(module, mesh, {name: [Replicate()] for name in module._parameters})
    _compute_locally(module, {name: [gradient] for name in module._parameters})


def divide_locally(module: nn.Module, mesh: DeviceMesh, placements: Mapping[str, Sequence[Placement]]) -> None:
    """Divide a module's own parameters over ranks, and let its forward use plain tensors: this rank's parts.

    `placements`: for each parameter, its placements on the axes of `mesh`. A parameter that is replicated along the
    tensor axis must be a bias that is added to partial sums. So only the first rank of the tensor axis adds the bias,
    and the other ranks compute with zeros in its place. The gradients of the bias on all ranks are added.
    """
    _distribute(module, mesh, placements)
    names = (name for name, _ in module.named_parameters(recurse=False))
    biases = [name for name in names if any(placement.is_replicate() for placement in placements[name])]
    is_first = TENSOR.short not in (mesh.mesh_dim_names or ()) or mesh[TENSOR.short].get_local_rank() == 0
    _compute_locally(module, _of_gradients(placements), () if is_first else biases)


def divide_adapter(adapter: LoRA, mesh: DeviceMesh, placements: Mapping[str, Sequence[Placement]]) -> None:
    """Divide the parameters of an adapter over ranks, and let its forward use plain tensors: this rank's parts.

    `placements`: the placements of `a` and `b` on the axes of `mesh`. If a matrix is not divided, its gradients on all
    ranks are added.
    """
    _distribute(adapter, mesh, placements)
    _compute_locally(adapter, _of_gradients(placements))


def _of_gradients(placements: Mapping[str, Sequence[Placement]]) -> dict[str, list[Placement]]:
    return {name: [Partial() if p.is_replicate() else p for p in where] for name, where in placements.items()}


def _divide_adapter(adapter: LoRA, style: TensorStyle, mesh: DeviceMesh, sequence_parallel: bool) -> None:
    """Divide an adapter as `style` divides its target: `b` along the output features, or `a` along the input features.
    A matrix that is not divided is replicated. The forward of the adapter needs no communication.

    If `a` is divided, `a x` is a partial sum on each rank. So is `b a x`, which the target adds to its own output.
    """
    if style in ("sequence", "positions"):
        _replicate(adapter, mesh, Partial() if sequence_parallel else Replicate())
        return
    axis = DIVISIONS[style].axis
    a: Placement = Shard(1) if axis == 1 else Replicate()
    b: Placement = Shard(0) if axis == 0 else Replicate()
    divide_adapter(adapter, mesh, {"a": [a], "b": [b]})


def _distribute(module: nn.Module, mesh: DeviceMesh, placements: Mapping[str, Sequence[Placement]]) -> None:
    for name, parameter in module._parameters.items():
        if parameter is not None:
            distributed = distribute_tensor(parameter.data, mesh, placements[name], src_data_rank=None)
            module.register_parameter(name, nn.Parameter(distributed, parameter.requires_grad))


def _compute_locally(
    module: nn.Module, gradients: Mapping[str, Sequence[Placement]], zeros: Collection[str] = ()
) -> None:
    """Let a module's forward use plain tensors in place of its own parameters. `gradients`: placements of the gradients
    of these tensors. `zeros`: names of parameters that are multiplied by 0."""

    def forward(*args: Any, **kwargs: Any) -> Any:  # not a `partial`: torch.compile would make a graph per module
        with _local_parameters(module, gradients, zeros):
            # Look up the class at each call, because `synchronize` replaces the class of a BatchNorm later.
            return type(module).forward(module, *args, **kwargs)

    module.forward = forward


@contextmanager
def _local_parameters(
    module: nn.Module, gradients: Mapping[str, Sequence[Placement]], zeros: Collection[str]
) -> Iterator[None]:
    parameters = dict(module._parameters)
    try:
        local = {name: _local(parameter, gradients[name]) for name, parameter in parameters.items()}
        module._parameters.update({name: part * 0 if name in zeros else part for name, part in local.items()})
        yield
    finally:
        module._parameters.update(parameters)


def _local(tensor: Tensor | None, gradient: Sequence[Placement]) -> Any:
    return tensor.to_local(grad_placements=gradient) if isinstance(tensor, DTensor) else tensor


_Owner = tuple[nn.Module, str]
"""A module, and the name of one of its parameters."""


def _ties(model: nn.Module) -> list[tuple[_Owner, list[_Owner]]]:
    """Return (first owner, other owners) of every tied parameter."""
    owners: dict[int, list[_Owner]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                owners.setdefault(id(parameter), []).append((module, name))
    return [(first, others) for first, *others in owners.values() if others]
