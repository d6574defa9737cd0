"""Operators of the phantom GPU. Operators on small tensors are computed on the host. All other operators return zeros
or ones. If such an operator should change a tensor in place, the tensor stays unchanged.

Memory of the phantom GPU is memory of this process, so a CPU tensor can have the storage of a CUDA tensor. The kernels
that PyTorch registers for CUDA are replaced by functions that do one of two things:

- Operators on few elements run on such CPU tensors. (More elements are allowed for integers and bools.) Control flow
  depends on the results of these operators: counts of targets and of rows per expert, norms, flags, learning rates.
- All other operators run PyTorch's own code for CUDA. It allocates the same memory as on a GPU, and launches kernels
  that do nothing. Then small floating-point results are set to one. Other results are set to zero, which takes no
  memory for whole pages.

`_UNIFORM`, `_BY_SHAPE` and `_ANSWERS` list exceptions. The functions are registered below autograd, so they also serve
backward and compiled graphs.
"""

from __future__ import annotations

import ctypes
import mmap
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

_MOST_NUMBERS = 1 << 16
"""An operator with floating-point arguments is computed only if none of its arguments has more elements than this."""

_MOST_INTEGERS = 1 << 24
"""The limit in place of `_MOST_NUMBERS` if all arguments are integers or bools."""

_MOST_IN_LISTS = 1 << 22
"""An operator with floating-point arguments is computed only if all its arguments together have at most this many
elements. This limit excludes operators on long lists of small tensors."""

_ALLOCATIONS = ("empty.memory_format", "empty_strided")

_COMPOSITE = ("copy_", "convolution", "convolution_overrideable")
"""Operators that PyTorch registers for all devices together, and that must be replaced too."""

_UNIFORM = frozenset(
    {"eq", "ne", "lt", "le", "gt", "ge", "isnan", "isinf", "logical_not", "logical_and", "logical_or"}
    | {"bitwise_and", "bitwise_or", "bitwise_not", "any", "all", "mul"}
)
"""Operators whose results can be bools. All elements of a large tensor are equal on a phantom GPU. So all elements of a
bool result follow from the first elements of the arguments."""

_BY_SHAPE = frozenset(
    {
        "cudnn_batch_norm",
        "cudnn_batch_norm_backward",
        "cudnn_convolution",
        "convolution",
        "convolution_backward",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_cudnn_attention_backward",
    }
)
"""Operators of cuDNN, which does not run without a GPU. Their results have the shapes that PyTorch computes on the meta
device. The memory of cuDNN's workspaces is not allocated."""


_PRODUCTS = frozenset({"mm", "bmm", "baddbmm", "mv", "dot"})
"""Products for which PyTorch calls cuBLAS, which needs a workspace."""


def replace_operators() -> list[torch.library.Library]:
    """Replace PyTorch's kernels for CUDA. The replacements last as long as the returned objects."""
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        # torch before 2.13 warns that an operator is replaced
        warnings.filterwarnings("ignore", "Warning only once for all operators", UserWarning)
        for name in _replaceable():
            operator = _operator(name)
            kernel = torch.library.get_kernel(operator, "CUDA")
            function = _allocate if name in _ALLOCATIONS else partial(_run, operator, _Kind(operator))
            library.impl(name, partial(function, kernel), "CUDA", with_keyset=True, allow_override=True)
    guards: Any = torch._C._dynamo.guards
    empty_strided = guards._empty_strided_cuda  # the function that compiled code calls
    guards._empty_strided_cuda = lambda *args: _zeroed(empty_strided(*args))
    return [library]


def _replaceable() -> Iterator[str]:
    """Yield the names of the operators to replace. Operators that return views, and those in `_KEPT`, keep their
    kernels."""
    registered = torch._C._dispatch_get_registrations_for_dispatch_key("CUDA")
    names = {name.removeprefix("aten::") for name in registered if name.startswith("aten::")} | {*_COMPOSITE}
    for name in sorted(names):
        if name.partition(".")[0] in _KEPT:
            continue
        schema = _operator(name)._schema
        if not any(result.alias_info is not None and not result.alias_info.is_write for result in schema.returns):
            yield name


_KEPT = frozenset(
    {"_local_scalar_dense", "_pin_memory", "is_pinned", "record_stream", "resize_", "set_", "_empty_affine_quantized"}
)


def _operator(name: str) -> Any:
    base, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, base), overload or "default")


class _Kind:
    """Properties of an operator, from its schema and from the tables above."""

    def __init__(self, operator: Any):
        schema = operator._schema
        self.base: str = operator._opname
        self.is_by_shape = self.base in _BY_SHAPE
        self.is_uniform = self.base in _UNIFORM
        self.out_names = [argument.name for argument in schema.arguments if argument.is_out]
        """Names of the arguments that only receive results, such as `out`."""

        self.tensor_positions = [
            position
            for position, argument in enumerate(schema.arguments)
            if str(argument.type) in ("Tensor", "Optional[Tensor]") and not argument.kwarg_only
        ]
        self.returned = _returned_arguments(schema)
        """For each result, the position and name of the argument that is returned; None for a new tensor."""

        has = partial(torch._C._dispatch_has_kernel_for_dispatch_key, operator.name())
        self.runs_on_host = not self.is_by_shape and any(map(has, ("CPU", "CompositeExplicitAutograd")))


def _returned_arguments(schema: Any) -> list[tuple[int, str] | None]:
    written = {
        alias: (position, argument.name)
        for position, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
        for alias in argument.alias_info.before_set
    }
    return [
        None if result.alias_info is None else written.get(next(iter(result.alias_info.before_set), ""))
        for result in schema.returns
    ]


def _allocate(kernel: Any, keys: Any, *args: Any, **kwargs: Any) -> Tensor:
    return _zeroed(kernel.call_boxed(keys, *args, **kwargs))


def _run(operator: Any, kind: _Kind, kernel: Any, keys: Any, *args: Any, **kwargs: Any) -> Any:
    if kind.runs_on_host and _is_small(args, kwargs):
        if kind.base in _PRODUCTS:
            kernel.call_boxed(keys, *_numbers_as_tensors(kind, args), **kwargs)  # allocates cuBLAS's workspace
        try:
            return _on_host(operator, kind, args, kwargs)
        except (NotImplementedError, RuntimeError):  # no CPU kernel for this dtype, or wrong arguments: run CUDA's code
            pass
    if kind.is_by_shape:
        return _by_shape(operator, args, kwargs)
    results = kernel.call_boxed(keys, *_numbers_as_tensors(kind, args), **kwargs)
    if kind.is_uniform and results.dtype == torch.bool:
        return _uniform(operator, args, results)
    if (answer := _ANSWERS.get(kind.base)) is not None:
        answer(args, kwargs, results)
        return results
    outputs = results if isinstance(results, tuple) else (results,)
    for output, argument in zip(outputs, kind.returned, strict=False):
        if argument is None or argument[1] in kind.out_names:
            for tensor in output if isinstance(output, list) else (output,):
                if isinstance(tensor, Tensor):
                    _answered(tensor)
    return results


def _answered(tensor: Tensor) -> None:
    """Write the result of an operator that is not computed. Small floating-point results, such as sums and norms, are
    ones, because their logarithm or reciprocal may follow. Other results are zeros."""
    if tensor.is_floating_point() and 0 < tensor.numel() <= _MOST_NUMBERS and tensor.device.type == "cuda":
        _host_view(tensor).fill_(1)
    else:
        _zeroed(tensor)


def _numbers_as_tensors(kind: _Kind, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments with tensors in place of Python numbers, where the schema has a tensor. PyTorch passes such
    numbers to a replaced operator as they are, but its own kernels take tensors only."""
    wrong = [i for i in kind.tensor_positions if i < len(args) and isinstance(args[i], bool | int | float | complex)]
    if not wrong:
        return args
    dtypes = [value.dtype for value in args if isinstance(value, Tensor)]
    made = list(args)
    for i in wrong:
        is_whole = isinstance(args[i], int) or (dtypes and dtypes[0].is_floating_point)
        made[i] = torch.tensor(args[i], dtype=dtypes[0] if dtypes and is_whole else None)
    return tuple(made)


def _is_small(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return True if an operator on these arguments is computed, by the limits above. Return False if a CUDA device is
    among the arguments, because the operator then makes a new tensor."""
    largest, count, are_integers = 0, 0, True
    for value in (*args, *kwargs.values()):
        for tensor in value if isinstance(value, list | tuple) else (value,):
            if isinstance(tensor, Tensor):
                largest = max(largest, tensor.numel())
                count += tensor.numel()
                are_integers = are_integers and not (tensor.is_floating_point() or tensor.is_complex())
                if not are_integers and (largest > _MOST_NUMBERS or count > _MOST_IN_LISTS):
                    return False
            elif isinstance(tensor, torch.device) and tensor.type == "cuda":
                return False
    return largest <= _MOST_INTEGERS


def _on_host(operator: Any, kind: _Kind, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    on_host = {
        name: _result_on_host(value) if name in kind.out_names else tree_map(_host_view, value)
        for name, value in kwargs.items()
    }
    results = operator(*tree_map(_host_view, args), **on_host)
    if not isinstance(results, tuple):
        return _on_device(kind, 0, results, args, kwargs)
    return tuple(_on_device(kind, index, result, args, kwargs) for index, result in enumerate(results))


def _on_device(kind: _Kind, index: int, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    argument = kind.returned[index] if index < len(kind.returned) else None
    if argument is not None:  # the operator has written this argument, in the memory of the device
        position, name = argument
        given = kwargs[name] if name in kwargs else args[position]
        if isinstance(given, Tensor) and isinstance(result, Tensor) and not given.numel() and result.numel():
            given.resize_(result.shape)
            _host_view(given).copy_(result)
        return given
    return tree_map(_device_copy, result)


def _result_on_host(value: Any) -> Any:
    """Return the CPU tensor to which an operator writes the result for the GPU tensor `value`: a view of its memory. If
    `value` is empty, the operator resizes its result. So a new tensor is returned, which the caller copies back."""
    if isinstance(value, Tensor) and not value.numel():
        return torch.empty(0, dtype=value.dtype)
    return tree_map(_host_view, value)


def _host_view(value: Any) -> Any:
    """Return a CPU tensor with the memory of a CUDA tensor. For a generator, return None, which stands for the default
    generator. Return any other value unchanged."""
    if isinstance(value, torch.Generator):
        return None
    if not isinstance(value, Tensor) or value.device.type != "cuda":
        return value
    storage = value.untyped_storage()
    host = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), torch.device("cpu"), storage.nbytes())
    view = torch.empty(0, dtype=value.dtype).set_(host, value.storage_offset(), value.shape, value.stride())
    return view.conj() if value.is_conj() else view


def _device_copy(value: Any) -> Any:
    copy = _empty_on_device(value)
    if isinstance(copy, Tensor):
        _host_view(copy).copy_(value)
    return copy


def _empty_on_device(value: Any) -> Any:
    """Return a CUDA tensor with the shape, strides and dtype of a tensor. Return any other value unchanged."""
    if not isinstance(value, Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cuda")


def _by_shape(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    def shape_of(value: Any) -> Any:
        return value.to("meta") if isinstance(value, Tensor) else value

    return tree_map(_empty_on_device, operator(*tree_map(shape_of, args), **tree_map(shape_of, kwargs)))


def _uniform(operator: Any, args: tuple[Any, ...], result: Tensor) -> Tensor:
    firsts = [_host_view(value).as_strided((1,), (1,)) if isinstance(value, Tensor) else value for value in args]
    count = 1 if len(operator._schema.arguments) == 1 or operator._opname in ("any", "all") else 2
    value = bool(getattr(torch.ops.aten, operator._opname)(*firsts[:count]))
    if value:
        _host_view(result).fill_(True)
        return result
    return _zeroed(result)


def _rotate(args: tuple[Any, ...], kwargs: dict[str, Any], results: tuple[Tensor, Tensor]) -> None:
    """Write the results of `topk`. The values are zeros. The indices count 0, 1, 2, ... in the order of memory, modulo
    the size of the input along `dim` (the number of experts). So the numbers of tokens of two experts differ by at most
    1."""
    values, indices = results
    _zeroed(values)
    dim = args[2] if len(args) > 2 else kwargs.get("dim", -1)
    numbers = torch.arange(indices.numel()) % args[0].shape[dim]
    _host_view(indices).copy_(numbers.view(indices.shape))


def _count(args: tuple[Any, ...], kwargs: dict[str, Any], results: Tensor) -> None:
    """Write the result of `histc`, which counts the rows of each expert. (PyTorch has `histc` of integers for CUDA
    only.) Do nothing for more than `_MOST_INTEGERS` numbers."""
    numbers, *bins = args
    if numbers.numel() <= _MOST_INTEGERS:
        _host_view(results).copy_(torch.histc(_host_view(numbers).double(), *bins, **kwargs))


_ANSWERS: dict[str, Callable[[tuple[Any, ...], dict[str, Any], Any], None]] = {"topk": _rotate, "histc": _count}
"""For each operator whose results must not be all zeros or ones: the function that writes its results."""


def _zeroed(tensor: Tensor) -> Tensor:
    """Set the memory of a CUDA tensor to zero, from its first to its last element. Leave any other tensor unchanged.
    Return the tensor. If the tensor is large, whole pages are given back to the host."""
    count = tensor.untyped_storage().nbytes() - tensor.storage_offset() * tensor.element_size()
    if tensor.numel() == 0 or count <= 0 or tensor.device.type != "cuda":
        return tensor
    start = tensor.data_ptr()
    end = start + int(min(count, _extent(tensor)))
    first, last = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
    if end - start <= _MEMSET or last <= first:
        ctypes.memset(start, 0, int(end - start))
        return tensor
    ctypes.memset(start, 0, first - start)
    ctypes.memset(last, 0, end - last)
    _libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), mmap.MADV_DONTNEED)
    return tensor


def _extent(tensor: Tensor) -> int:
    """Return the number of bytes from the first element of a tensor to the end of its last."""
    last: int = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


_MEMSET = 1 << 16
_libc = ctypes.CDLL(None)
