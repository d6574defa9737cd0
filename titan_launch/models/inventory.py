"""A model's modules, parameters and buffers as a table."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from titan_launch.plan.types import Inventory, ModuleInfo, TensorInfo, full_name


def take_inventory(
    model: nn.Module,
    blocks: tuple[str, ...],
    head: tuple[str, ...] = (),
    embeddings: tuple[str, ...] = (),
    pipeline_order: tuple[str, ...] = (),
) -> Inventory:
    """Return the table of a model's modules, before it is wrapped. The model may be on the meta device."""
    first_path: dict[int, str] = {}
    first_owner: dict[int, str] = {}
    modules = tuple(
        ModuleInfo(
            path=path,
            same_as=first if (first := first_path.setdefault(id(module), path)) != path else None,
            classes=_class_names(module),
            has_forward=has_forward(module),
            parameters=_tensors(path, module._parameters.items(), first_owner),
            buffers=_tensors(path, module._buffers.items(), first_owner),
        )
        for path, module in model.named_modules(remove_duplicate=False)
    )
    return Inventory(modules, blocks, head, embeddings, pipeline_order)


def has_forward(module: nn.Module) -> bool:
    """Return True if a module has a forward; containers (`nn.ModuleList`, `nn.ModuleDict`) have none."""
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


def _class_names(module: nn.Module) -> tuple[str, ...]:
    mro = type(module).__mro__
    return tuple(f"{cls.__module__}.{cls.__qualname__}" for cls in mro[: max(1, mro.index(nn.Module))])


def _tensors(
    path: str, tensors: Iterable[tuple[str, Tensor | None]], first_owner: dict[int, str]
) -> tuple[TensorInfo, ...]:
    infos = []
    for name, tensor in tensors:
        if tensor is None:
            continue
        own = full_name(path, name)
        owner = first_owner.setdefault(id(tensor), own)
        infos.append(
            TensorInfo(
                name=name,
                shape=tuple(tensor.shape),
                dtype=str(tensor.dtype).removeprefix("torch."),
                is_floating=tensor.is_floating_point(),
                requires_grad=tensor.requires_grad,
                tied_to=owner if owner != own else None,
            )
        )
    return tuple(infos)
