"""Folders of adapters in the format of the library `peft`. Reads of metadata do not need torch.

An adapter adds the product of its matrices B and A to a weight. A module of `transformers` may correspond to several
modules of this package, such as `qkv_proj` to `wq`, `wk` and `wv`. In `peft`, one adapter replaces the adapters of all
these modules. Its A has their A matrices, one below another. Its B is block-diagonal. Its rank is the sum of the ranks.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from titan_launch.config.sections.model import HUGGINGFACE, LoRAConfig, ModelConfig
from titan_launch.core.errors import listed
from titan_launch.core.terminal import counted, short_name
from titan_launch.models.architectures import resolve_args
from titan_launch.models.decoder.args import DecoderArgs
from titan_launch.models.decoder.huggingface_tensors import Piece, Shape, pieces_of, tensor_shapes
from titan_launch.models.huggingface.adapter_config import Wanted, matching_limited, read_config
from titan_launch.models.huggingface.config_json import model_type_of
from titan_launch.models.huggingface.files import ADAPTER_CONFIG_FILE, WeightsError
from titan_launch.models.weights.folder import (
    FLOATS,
    WeightsFolder,
    in_halves,
    interleaved,
    read_header,
    read_tensors,
    shapes_in_files,
)
from titan_launch.plan.types import parent

if TYPE_CHECKING:
    from torch import Tensor

FILE = "adapter_model.safetensors"
_PICKLE = "adapter_model.bin"

BASE = "base_fingerprint"
"""Key in the metadata of an exported file. Its value is the digest of the folder `model.weights`."""

_WRAPPING_ORDER = ("gate_up_proj", "down_proj", "w1", "w2", "w3")
"""Stacked parameters of a module, in the order in which `peft` wraps them."""

_PREFIX = "base_model.model."
_MATRICES = (".lora_A.weight", ".lora_B.weight", ".lora_embedding_A", ".lora_embedding_B")

_EXPERTS = {"w1": ("gate_up_proj", 0), "w3": ("gate_up_proj", 1), "w2": ("down_proj", 0)}
"""For each weight of the experts: the stacked parameter of `transformers` that contains it, and its position there. The
table is for classes whose files have a tensor for each expert."""


class Adapter(NamedTuple):
    """The names of an adapter's parameters, and of the weight that the adapter changes, in a model of this package."""

    weight: str
    a: str
    b: str
    rank: int
    scale: float
    is_embedding: bool


@dataclass(frozen=True)
class AdapterPart:
    """An adapter of this package, and the position of its output features in a `Target`."""

    adapter: Adapter
    shape: Shape
    """Shape of the weight, as `file_places` returns it."""

    piece: Piece
    """The place of the weight in the files. `start` is the first output feature of the adapter in the target."""


@dataclass(frozen=True)
class Target:
    """A module or a stacked parameter of `transformers` with an adapter of `peft`."""

    module: str
    parameter: str | None
    """Name of the stacked parameter of experts in the module; None for a linear layer or an embedding."""

    parts: tuple[AdapterPart, ...]
    num_out: int
    """Number of output features of the module or stacked parameter."""

    num_experts: int | None
    depth: int = 0
    """Number of stacked parameters of the module that `peft` wraps after this one. For each of them, the names in the
    file contain `.base_layer` once."""

    @property
    def path(self) -> str:
        """Full name of the module or parameter."""
        return self.module if self.parameter is None else f"{self.module}.{self.parameter}"

    @property
    def is_embedding(self) -> bool:
        return self.parts[0].adapter.is_embedding

    @property
    def keys(self) -> tuple[str, str]:
        """Names of A and B in the file."""
        if self.is_embedding:
            return f"{_PREFIX}{self.module}.lora_embedding_A", f"{_PREFIX}{self.module}.lora_embedding_B"
        module = f"{_PREFIX}{self.module}{'.base_layer' * self.depth}"
        return f"{module}.lora_A.weight", f"{module}.lora_B.weight"

    @property
    def rank(self) -> int:
        """Rank of a single adapter for all parts: the sum of their ranks."""
        return sum(part.adapter.rank for part in self.parts)

    @property
    def ranks(self) -> set[int]:
        """Ranks that the adapter in the file may have: the sum of the ranks of all parts or, if all parts share one A,
        the rank of a part."""
        own = {part.adapter.rank for part in self.parts}
        return {self.rank, *(own if len(own) == 1 else ())}

    @property
    def scale(self) -> float:
        """Factor of the product B A. Raises WeightsError if the parts have different factors."""
        scales = {part.adapter.scale for part in self.parts}
        if len(scales) > 1:
            parts = listed([parent(part.adapter.weight) for part in self.parts])
            reason = f"share one adapter in peft ({self.path}), but have different scales"
            raise WeightsError(f"{parts} {reason}; export the merged model")
        return scales.pop()

    def shapes(self, rank: int) -> tuple[Shape, Shape]:
        """Return the shapes of A and B in the file. `rank`: rank of the adapter in the file, a member of `ranks`."""
        num_in = self.parts[0].shape[0 if self.is_embedding else -1]
        rows = rank * (self.num_experts or 1)
        return (rows, num_in), (self.num_out, rows)

    def to_file(self, read: Callable[[str], Tensor]) -> tuple[Tensor, Tensor]:
        """Return A and B of the file. `read` returns a whole parameter by its name."""
        whole, experts = self.rank, self.num_experts or 1
        (_, num_in), _ = self.shapes(whole)
        first = read(self.parts[0].adapter.a)
        a, b = first.new_zeros(experts, whole, num_in), first.new_zeros(experts, self.num_out, whole)
        for part, columns in self._columns(whole):
            rank = part.adapter.rank
            a[:, columns] = read(part.adapter.a).reshape(experts, rank, -1)[:, :, :num_in]
            own = read(part.adapter.b).reshape(experts, -1, rank)
            if part.piece.rotary_width:
                own = in_halves(own[0], part.piece.rotary_width)[None]
            rows = b[:, part.piece.start :: part.piece.step, columns]
            count = min(rows.shape[1], own.shape[1])
            rows[:, :count] = own[:, :count]
        return a.reshape(experts * whole, num_in), b.permute(1, 2, 0).reshape(self.num_out, whole * experts)

    def _columns(self, whole: int) -> Iterator[tuple[AdapterPart, slice]]:
        """Yield (part, slice), where the slice selects the part's rows of A in the file. `whole`: number of rows of A,
        for one expert. If `whole` is below `self.rank`, all parts share the rows."""
        start = 0
        for part in self.parts:
            yield part, slice(start, start + part.adapter.rank)
            start += part.adapter.rank if whole == self.rank else 0

    def from_file(self, a: Tensor, b: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, value) of each parameter of this package, from A and B of the file. The inverse of `to_file`.

        If all parts share one A, as after training with `peft`, each part gets a copy of A. Raises WeightsError if B
        has values that belong to no part.
        """
        experts, whole = self.num_experts or 1, a.shape[0] // (self.num_experts or 1)
        a, rest = a.reshape(experts, whole, -1), b.reshape(self.num_out, whole, experts).permute(2, 0, 1).clone()
        for part, columns in self._columns(whole):
            num_rows = part.shape[-1 if self.is_embedding else -2]
            rows = rest[:, part.piece.start :: part.piece.step, columns][:, :num_rows]
            own = rows.clone()
            rows.zero_()
            if part.piece.rotary_width:
                own = interleaved(own[0], part.piece.rotary_width)[None]
            is_stacked = self.num_experts is not None
            own_a = a[:, columns].clone()
            yield part.adapter.a, own_a if is_stacked else own_a[0]
            yield part.adapter.b, own if is_stacked else own[0]
        if rest.any():
            parts = listed([parent(part.adapter.weight) for part in self.parts])
            reason = f"cannot be split into adapters of {parts}: its lora_B has values outside of these modules,"
            reason += " or is not block-diagonal (a module has values in the columns of another)"
            remedy = "train the adapter with this model, or export it from a run of this model"
            raise WeightsError(f"the adapter of {self.path} in this folder {reason}; {remedy}")


def file_places(
    model: ModelConfig, shapes: Mapping[str, Shape], rows: int | None, is_plain: bool = False
) -> tuple[dict[str, Shape], dict[str, Piece]]:
    """Return the shape and the `Piece` of each weight of a model in files of `transformers`. Each shape has the axes of
    this package, but the number of rows in the files.

    `shapes`: shape of each weight in this package. `rows`: number of vocabulary rows in the files; None for the number
    in `shapes`. `is_plain`: True if the files have the names of this package. Raises WeightsError for a model that no
    class of `transformers` implements.
    """
    if is_plain or model.name == HUGGINGFACE:
        return dict(shapes), pieces_of(None, shapes, None)
    model_type = model_type_of(model.name)  # raises WeightsError for other models than decoders
    args = cast(DecoderArgs, resolve_args(model.name, model.flavor, model.args))
    has_labels = args.num_labels is not None
    in_files = shapes_in_files(shapes, rows, has_labels)
    return in_files, pieces_of(model_type, in_files, args.head_width, has_labels=has_labels)


def targets_of(adapters: Sequence[Adapter], shapes: Mapping[str, Shape], pieces: Mapping[str, Piece]) -> list[Target]:
    """Return the targets of `peft` for the adapters of a model. `shapes` and `pieces`: the results of `file_places`.
    Raises WeightsError for an adapter whose weight `peft` cannot adapt."""
    whole = tensor_shapes(pieces, shapes)
    found: defaultdict[tuple[str, str | None], list[AdapterPart]] = defaultdict(list)
    sizes: dict[tuple[str, str | None], int] = {}
    has_experts = any(piece.num_experts is not None for piece in pieces.values())
    for adapter in adapters:
        name = adapter.weight
        if name not in pieces:
            reason = "transformers has no such weight; export the merged model"
            raise WeightsError(f"peft has no target for the adapter of {name}: {reason}")
        piece, shape = pieces[name], shapes[name]
        key: tuple[str, str | None] = parent(piece.tensor), piece.tensor.rpartition(".")[2]
        if len(shape) == 2:
            key = key[0], None
            num_out = whole[piece.tensor][-1 if piece.is_transposed or adapter.is_embedding else 0]
            if has_experts and ".mlp." in key[0]:
                reason = "and peft would treat this tensor as an expert"
                raise WeightsError(f"{name} is {piece.tensor} in transformers, {reason}; export the merged model")
        elif piece.has_tensor_per_expert:
            key = _stacked(name, piece)
            parameter, position = _EXPERTS[name.rpartition(".")[2]]
            piece = replace(piece, start=position * shape[1])
            num_out = sum(shapes[f"{parent(name)}.{own}"][1] for own, (of, _) in _EXPERTS.items() if of == parameter)
        else:
            num_out = whole[piece.tensor][-1 if piece.is_transposed else 1]
        sizes[key] = num_out
        found[key].append(AdapterPart(adapter, shape, piece))
    targets = []
    for (module, stacked), parts in found.items():
        siblings = [other for path, other in found if path == module]
        depth = 0 if stacked is None else len(siblings) - 1 - sorted(siblings, key=_WRAPPING_ORDER.index).index(stacked)
        experts = None if stacked is None else parts[0].shape[0]
        ordered = tuple(sorted(parts, key=lambda part: part.piece.start))
        targets.append(Target(module, stacked, ordered, sizes[module, stacked], experts, depth))
    return targets


def _stacked(name: str, piece: Piece) -> tuple[str, str]:
    """Return two names of `transformers`: the module of the experts, and its stacked parameter that contains the weight
    `name` of this package. Only for classes whose files have one tensor for each expert."""
    layer = parent(parent(parent(name)))
    return f"{piece.tensor.partition(layer)[0]}{layer}.mlp.experts", _EXPERTS[name.rpartition(".")[2]][0]


def names_of_base(pieces: Mapping[str, Piece]) -> tuple[set[str], set[str]]:
    """Return the full names of the modules and of the parameters among which `peft` looks for targets. The modules
    include containers, which only hold other modules."""
    parameters = {
        ".".join(_stacked(name, piece)) if piece.has_tensor_per_expert else piece.tensor
        for name, piece in pieces.items()
    }
    segments = [tensor.split(".") for piece in pieces.values() for tensor in piece.tensors]
    return {".".join(path[:end]) for path in segments for end in range(1, len(path))}, parameters


def config_of(
    targets: Sequence[Target], config: LoRAConfig, pieces: Mapping[str, Piece], base: str | None
) -> dict[str, Any]:
    """Return the content of `adapter_config.json`. `pieces`: the `Piece` of each weight of the model in the files.
    `base`: folder of the model without adapters. Raises WeightsError as `Target.scale` does."""
    modules, parameters = names_of_base(pieces)
    plain = {target.path for target in targets if target.parameter is None}
    stacked = {target.path for target in targets if target.parameter is not None}
    alphas = {target.path: config.alpha_of(target.scale, target.rank) for target in targets}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": config.rank,
        "lora_alpha": config.alpha,
        "lora_dropout": 0.0 if stacked else config.dropout,  # peft has no dropout for stacked parameters
        "use_rslora": config.rank_stabilized,
        "use_dora": False,
        "bias": "none",
        "fan_in_fan_out": any(piece.is_transposed and piece.num_experts is None for piece in pieces.values()),
        "inference_mode": True,
        "target_modules": _shortest(plain, modules),
        "target_parameters": _shortest(stacked, parameters, least=3) if stacked else None,
        "rank_pattern": {target.path: target.rank for target in targets if target.rank != config.rank},
        "alpha_pattern": {path: alpha for path, alpha in alphas.items() if alpha != config.alpha},
        "modules_to_save": None,
    }


def _shortest(paths: Collection[str], everything: Collection[str], least: int = 1) -> list[str]:
    """Return the shortest end of each path, such as `attention.wq`, that selects only `paths`: no other path in
    `everything` has this end. `least`: smallest number of segments of an end. A path with fewer segments is returned
    whole."""
    chosen = set[str]()
    for path in paths:
        segments = path.split(".")
        ends = [".".join(segments[-count:]) for count in range(min(least, len(segments)), len(segments) + 1)]
        chosen.add(
            next(end for end in ends if all(o in paths for o in everything if o == end or o.endswith(f".{end}")))
        )
    return sorted(chosen)


class AdapterFolder:
    """A folder of `peft` with adapters."""

    def __init__(self, path: str | Path):
        """Read `adapter_config.json` and the header of `adapter_model.safetensors`. Raises WeightsError if one of them
        cannot be read or is not supported."""
        self.path = Path(path)
        self.config = read_config(self.path)
        if not os.path.lexists(self.path / FILE):
            advice = f"; {_PICKLE} is a pickle, which is not read: load it in peft, and save it again"
            raise WeightsError(f"it has no {FILE}{advice if (self.path / _PICKLE).is_file() else ''}")
        self.tensors, metadata = read_header(self.path / FILE)
        self.base = metadata.get(BASE)
        """Digest of the folder of the model without adapters; None if the file does not have it."""

    def ignore_copies(self, base: WeightsFolder) -> None:
        """Remove from `tensors` each tensor that equals a tensor of the folder `base`. (If an embedding or output layer
        has an adapter, `peft` also writes the weight of this layer.)"""
        for name in [name for name in self.tensors if not name.endswith(_MATRICES)]:
            original = name.removeprefix(_PREFIX).replace(".base_layer.", ".")
            like = base.tensors.get(original)
            if like is not None and like.shape == self.tensors[name].shape and self.tensors[name].dtype in FLOATS:
                (own,), theirs = read_tensors(self.path / FILE, [name]), base.read(original)
                if bool((own == theirs).all()):
                    del self.tensors[name]

    def check(
        self, targets: Sequence[Target], pieces: Mapping[str, Piece], config: LoRAConfig, base: str | None
    ) -> None:
        """Raise WeightsError, with a list of problems, if the adapters do not match `[lora]` of a job.

        `pieces`: the `Piece` of each weight of the model in the files. `base`: digest of the job's folder
        `model.weights`; None if it is not compared.
        """
        wanted = {
            target.path: Wanted(
                [part.adapter.weight.removesuffix(".weight") for part in target.parts],
                target.ranks,
                {part.adapter.scale for part in target.parts},
            )
            for target in targets
        }
        problems = list(self.config.differences(config, wanted))
        expected: dict[str, list[Shape]] = {}
        for target in targets:
            for rank in target.ranks:
                for key, shape in zip(target.keys, target.shapes(rank), strict=True):
                    expected.setdefault(key, []).append(shape)
        missing = [name for name in expected if name not in self.tensors]
        unexpected = [name for name in self.tensors if name not in expected]
        misshaped = [
            f"{name} {list(self.tensors[name].shape)}, not {' or '.join(str(list(shape)) for shape in shapes)}"
            for name, shapes in expected.items()
            if name in self.tensors and self.tensors[name].shape not in shapes
        ]
        for what, names in (
            ("missing", missing),
            ("unexpected (not matched by lora.targets)", [n for n in unexpected if n.endswith(_MATRICES)]),
            (
                "neither a LoRA matrix nor a copy of a tensor of the base",
                [n for n in unexpected if not n.endswith(_MATRICES)],
            ),
            ("of another shape", misshaped if not problems else []),
            (
                f"of a dtype other than {', '.join(FLOATS)}",
                [n for n, tensor in self.tensors.items() if tensor.dtype not in FLOATS],
            ),
        ):
            if names:
                problems.append(f"{counted(len(names), 'tensor')} {what}: {listed(names, most=4)}")
        if not missing and not unexpected:
            with matching_limited():
                problems += self._targets_problems(targets, pieces)
        if base is not None and self.base is not None and base != self.base:
            reason = f"its base has the fingerprint {short_name(self.base)}"
            remedy = f"set model.weights to the folder with the fingerprint {short_name(self.base)}"
            problems.append(f"{reason}, but model.weights has the fingerprint {base}; {remedy}")
        if problems:
            raise WeightsError("\n    ".join(["its adapters do not match [lora] of this job:", *problems]))

    def _targets_problems(self, targets: Sequence[Target], pieces: Mapping[str, Piece]) -> Iterator[str]:
        """Yield a problem if `peft` would ignore adapters in the file, and a problem if `peft` would look for adapters
        that the file lacks."""
        modules, parameters = names_of_base(pieces)
        adapted = {*filter(self.config.adapts_module, modules), *filter(self.config.adapts_parameter, parameters)}
        in_file = {target.path for target in targets}
        if ignored := sorted(in_file - adapted):
            keys = "target_modules, exclude_modules, layers_to_transform and target_parameters"
            reason = f"{keys} in {ADAPTER_CONFIG_FILE} do not select them; correct these keys"
            yield f"peft ignores the tensors of {listed(ignored)}, because {reason}"
        if absent := sorted(adapted - in_file):
            keys = f"target_modules or target_parameters in {ADAPTER_CONFIG_FILE}"
            yield f"{keys} select {listed(absent)}, but {FILE} lacks their tensors; save both files again"

    def shares_a(self, target: Target) -> bool:
        """Return True if all parts of a target share one A in the file. In this package, each part has its own A."""
        return self.tensors[target.keys[0]].shape[0] != target.rank * (target.num_experts or 1)

    def read(self, target: Target) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, value) for each parameter of the adapters of a target, with its name in this package. Raises
        WeightsError as `Target.from_file` does."""
        yield from target.from_file(*read_tensors(self.path / FILE, target.keys))
