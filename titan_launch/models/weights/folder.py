"""A folder of safetensors files: its tensors, its comparison with a model, and reads of parts of tensors.

Nothing is unpickled. Names in the index cannot lead out of the folder. The metadata is read without torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, zip_longest
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from titan_launch.config.architectures import ALL_IN_ARGS, known_args, resolve_args
from titan_launch.config.huggingface.config_json import FolderConfig, read_folder_config, read_json
from titan_launch.config.huggingface.features import WeightsError
from titan_launch.config.sections.model import HUGGINGFACE, ModelConfig
from titan_launch.core.errors import ConfigError, Problem, config_error, did_you_mean, listed
from titan_launch.core.fingerprint import Fingerprint, fingerprint_of
from titan_launch.core.globs import matches
from titan_launch.models.weights.tensor_names import (
    Piece,
    Shape,
    is_selection_bias,
    is_unused,
    pieces_of,
    tensor_shapes,
)
from titan_launch.plan.types import Inventory, TensorInfo, full_name

if TYPE_CHECKING:
    from torch import Tensor

FILE, INDEX = "model.safetensors", "model.safetensors.index.json"

VOCABULARY = ("tok_embeddings.weight", "output.weight")
"""Parameters with a row for each token, which a job may pad with rows of zeros."""

FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Supported dtypes of parameters, by their names in the files."""

_INTEGERS = {"I64": "int64"}  # the counters of BatchNorm
_SAMPLE_BYTES, _CHUNK_BYTES = 4096, 1 << 22


@dataclass(frozen=True)
class FileTensor:
    """A tensor in one of the files."""

    file: str
    shape: Shape
    dtype: str
    """Name of the dtype in the file, such as `BF16`."""


class WeightsFolder:
    """The tensors in a folder, by the names that they have in its files."""

    def __init__(self, path: str | Path, of_any_class: bool = False):
        """Read the folder's `config.json` and the headers of its files. Raises WeightsError.

        `of_any_class`: do not read `config.json`, since the model is a class of `transformers` itself.
        """
        self.path = Path(path)
        self.config = FolderConfig(HUGGINGFACE, ALL_IN_ARGS, {}, None, {}) if of_any_class else read_folder_config(path)
        self.tensors: dict[str, FileTensor] = {}
        expected = self._names_by_file()
        missing = [name for name in expected if not (self.path / name).is_file()]
        if missing:
            raise WeightsError(f"of its {len(expected)} files {len(missing)} are missing: {listed(missing)}")
        for file, names in expected.items():
            found, _ = read_header(self.path / file)
            if lost := [name for name in names or () if name not in found]:
                raise WeightsError(f"{file} lacks tensors that {INDEX} lists: {listed(lost)}")
            self.tensors |= found

    def _names_by_file(self) -> dict[str, list[str] | None]:
        """Return the files to read, each with its tensors by the index; None without an index."""
        if (self.path / FILE).exists():
            return {FILE: None}
        if not (self.path / INDEX).exists():
            if pickles := sorted(file.name for file in self.path.glob("*.bin")):
                reason = (
                    f"it has no *.safetensors, but {listed(pickles)}: pickles, which can run code when they are read"
                )
                raise WeightsError(f"{reason}; convert them with save_pretrained of transformers")
            raise WeightsError(f"it has neither {FILE} nor {INDEX}")
        index = read_json(self.path / INDEX).get("weight_map")
        if not isinstance(index, dict) or not all(isinstance(file, str) for file in index.values()):
            raise WeightsError(f"{INDEX} has no table weight_map")
        if outside := [file for file in index.values() if Path(file).name != file or not file.endswith(".safetensors")]:
            raise WeightsError(f'{INDEX} names "{outside[0]}", which is not a *.safetensors file in the folder')
        return {file: [name for name in index if index[name] == file] for file in sorted(set(index.values()))}

    def fingerprint(self) -> Fingerprint:
        """Return the fingerprint of the files: their sizes, and bytes at places that a fixed seed draws."""
        files = sorted({tensor.file for tensor in self.tensors.values()})
        sizes = [(file, (self.path / file).stat().st_size) for file in files]
        samples = [(file, start) for file, size in sizes for start in range(0, size, _SAMPLE_BYTES)]

        def sample(index: int) -> bytes:
            file, start = samples[index]
            with (self.path / file).open("rb") as stream:
                stream.seek(start)
                return stream.read(_SAMPLE_BYTES)

        return fingerprint_of(sizes, len(samples), sample, seed=0)

    def are_equal(self, one: str, other: str) -> bool:
        """Return True if two tensors have the same shape, dtype and bytes. All bytes are read."""
        a, b = self.tensors[one], self.tensors[other]
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            return False
        return all(x == y for x, y in zip_longest(self._chunks(one), self._chunks(other)))

    def _chunks(self, name: str) -> Iterator[bytes]:
        """Yield the bytes of a tensor. The library has checked the header."""
        with (self.path / self.tensors[name].file).open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            start, stop = json.loads(stream.read(length))[name]["data_offsets"]
            stream.seek(8 + length + start)
            while chunk := stream.read(min(_CHUNK_BYTES, stop - start)):
                start += len(chunk)
                yield chunk

    def read(self, name: str, start: Sequence[int], stop: Sequence[int]) -> Tensor:
        """Return a part of a tensor, in the dtype of the file. Only this part is read."""
        (part,) = self.read_each([name], start, stop)
        return part

    def read_each(self, names: Sequence[str], start: Sequence[int], stop: Sequence[int]) -> Iterator[Tensor]:
        """Yield the same part of several tensors. A file is opened once for consecutive names, because reading a header
        takes milliseconds."""
        for file_name, group in groupby(names, key=lambda name: self.tensors[name].file):
            with _library().safe_open(self.path / file_name, framework="pt") as file:
                for name in group:
                    if stop:
                        part: Tensor = file.get_slice(name)[tuple(map(slice, start, stop))]
                    else:
                        part = file.get_tensor(name)
                    yield part.clone()  # not a view of the file, which is closed


def _library() -> ModuleType:
    """Return the library of safetensors files, which is an optional dependency."""
    try:
        import safetensors
    except ImportError:
        raise WeightsError("reading it needs safetensors: pip install 'titan-launch[hf]'") from None
    return safetensors


def read_header(path: Path) -> tuple[dict[str, FileTensor], dict[str, str]]:
    """Return the tensors of a file, and its metadata. The library checks that the bytes of the tensors lie within the
    file and do not overlap. Raises WeightsError."""
    library = _library()
    try:
        with library.safe_open(path, framework="np") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - no dict
            tensors = {name: FileTensor(path.name, tuple(s.get_shape()), s.get_dtype()) for name, s in slices.items()}
            return tensors, file.metadata() or {}
    except (library.SafetensorError, OSError, ValueError) as error:
        raise WeightsError(f"{path.name} is truncated or damaged ({error}); copy or download it again") from None


def read_file(path: Path, names: Sequence[str]) -> list[Tensor]:
    """Return whole tensors of a file."""
    with _library().safe_open(path, framework="pt") as file:
        return [file.get_tensor(name).clone() for name in names]


class Weights:
    """The initial values of a model's parameters, in a folder."""

    def __init__(self, folder: WeightsFolder, pieces: Mapping[str, Piece]):
        """`pieces`: places of the parameters that the folder gives values to."""
        self.folder = folder
        self.pieces = pieces

    @cached_property
    def num_bytes(self) -> int:
        """Bytes of all tensors that the pieces are in."""
        return self.bytes_of(self.pieces)

    def bytes_of(self, names: Collection[str]) -> int:
        """Return the bytes of the tensors of the file that some parameters are in."""
        tensors = (self.folder.tensors[name] for name in {t for name in names for t in self.pieces[name].tensors})
        return sum(math.prod(tensor.shape) * int(tensor.dtype.strip("BIF")) // 8 for tensor in tensors)

    def read(self, name: str, offsets: Sequence[int], lengths: Sequence[int]) -> Tensor:
        """Return a part of a parameter, in the dtype of the file. Rows beyond those of the file are zeros.

        Not much more than the part is read: whole heads, if the file has their rows in another order, and all
        parameters whose output features alternate in the file.
        """
        piece = self.pieces[name]
        if not lengths:
            return self.folder.read(piece.tensor, (), ())
        if not piece.has_tensor_per_expert:
            (part,) = self._read_each(piece, piece.tensors, offsets, lengths)
            return part
        whole: Tensor | None = None
        experts = piece.tensors[offsets[0] : offsets[0] + lengths[0]]
        for index, part in enumerate(self._read_each(piece, experts, offsets[1:], lengths[1:])):
            whole = part.new_empty(tuple(lengths)) if whole is None else whole
            whole[index] = part
        assert whole is not None
        return whole

    def _read_each(
        self, piece: Piece, tensors: Sequence[str], offsets: Sequence[int], lengths: Sequence[int]
    ) -> Iterator[Tensor]:
        """Yield the same part of tensors of the file, which have one shape, in the layout of this package."""
        on_file, axis = self.folder.tensors[tensors[0]].shape, piece.axis
        rows = on_file[-1 if piece.is_transposed else axis] // piece.step
        first, last = min(offsets[axis], rows), min(offsets[axis] + lengths[axis], rows)
        unit = piece.rotary_width or 1
        whole_first, whole_last = first // unit * unit, -(-last // unit) * unit
        start, stop = list(offsets), [a + b for a, b in zip(offsets, lengths, strict=True)]
        start[axis] = piece.start + piece.step * whole_first
        stop[axis] = max(start[axis], piece.start + piece.step * (whole_last - 1) + 1)
        if piece.is_transposed:
            start[-2:], stop[-2:] = start[:-3:-1], stop[:-3:-1]
        for read in self.folder.read_each(tensors, start, stop):
            part = (read.mT if piece.is_transposed else read)[(slice(None),) * axis + (slice(None, None, piece.step),)]
            if piece.rotary_width:
                part = interleaved(part, piece.rotary_width)
            part = part.narrow(axis, first - whole_first, last - first)
            if last - first < lengths[axis]:
                padded = part.new_zeros(tuple(lengths))
                padded.narrow(axis, 0, last - first).copy_(part)
                part = padded
            yield part


def interleaved(rows: Tensor, width: int) -> Tensor:
    """Return the rows of whole heads in the order of this package, from the order of Hugging Face."""
    return rows.unflatten(0, (-1, 2, width // 2)).transpose(1, 2).flatten(0, 2)


def in_halves(rows: Tensor, width: int) -> Tensor:
    """Return the rows of whole heads in the order of Hugging Face, from the order of this package."""
    return rows.unflatten(0, (-1, width // 2, 2)).transpose(1, 2).flatten(0, 2)


def open_weights(config: ModelConfig) -> WeightsFolder:
    """Return the folder that `model.weights` names. Raises ConfigError if it cannot be read."""
    assert config.weights is not None
    try:
        return WeightsFolder(config.weights, of_any_class=config.name == HUGGINGFACE)
    except WeightsError as error:
        raise config_error(("model", "weights"), str(error), config.weights) from None


NamesInFiles = Callable[[Collection[str], Collection[str]], Mapping[str, str]]
"""A function of the names of a folder's tensors and of a model's tensors. It returns the model's name for each name of
the folder; empty for a tensor without effect."""


def find_weights(
    config: ModelConfig,
    inventory: Inventory,
    names_in_files: NamesInFiles | None = None,
    folder: WeightsFolder | None = None,
) -> Weights:
    """Return the weights that `model.weights` names, compared with the tensors of the model.

    `names_in_files`: the model's own names for the tensors in its files, for a class of `transformers`. `folder`: the
    result of `open_weights`, if the files have already been read.

    Raises ConfigError, with all missing, unexpected and misshapen tensors at once. Needs no torch, and reads no values
    but those of an output layer beside the embedding that it is tied to.
    """
    folder = open_weights(config) if folder is None else folder
    excluded, own = config.exclude_from_weights, dict(_own_tensors(inventory))
    _check_globs(excluded, [*own, *folder.tensors])
    shapes = {name: tensor.shape for name, tensor in own.items()}
    args, width = known_args(config), None
    if args is not None:
        width = getattr(args, "head_width", None)
        rows = getattr(resolve_args(folder.config.name, folder.config.flavor, folder.config.args), "vocab_size", None)
        shapes |= {name: (rows, *shapes[name][1:]) for name in VOCABULARY if rows and name in shapes}
    own_names = names_in_files(folder.tensors, shapes) if names_in_files is not None else {}
    pieces = pieces_of(folder.config.model_type, shapes, width, folder.tensors)
    pieces |= {own_name: Piece(name) for name, own_name in own_names.items() if own_name in shapes}
    shared = {tensor for name, piece in pieces.items() if own[name].tied_to is not None for tensor in piece.tensors}
    untied = [
        f"{tensor} (tied to {source})"
        for name, piece in pieces.items()
        if (first := own[name].tied_to) in pieces
        for tensor, source in zip(piece.tensors, pieces[first].tensors, strict=True)
        if {tensor, source} <= folder.tensors.keys()
        and not any(matches(glob, each) for glob in excluded for each in (name, tensor))
        and not folder.are_equal(tensor, source)
    ]
    buffers = {full_name(module.path, buffer.name) for module in inventory.modules for buffer in module.buffers}
    optional = {name for name in buffers if not is_selection_bias(name)}
    pieces = {
        name: piece
        for name, piece in pieces.items()
        if own[name].tied_to is None and not (name in optional and piece.tensors[0] not in folder.tensors)
    }
    expected = tensor_shapes(pieces, shapes)
    pieces = {name: piece for name, piece in pieces.items() if not any(matches(glob, name) for glob in excluded)}
    used = {tensor: own[name] for name, piece in pieces.items() for tensor in piece.tensors}
    unexpected = [
        name
        for name in folder.tensors
        if name not in expected
        and name not in shared
        and own_names.get(name) != ""
        and not is_unused(folder.config.model_type, name)
    ]
    problems = {
        "missing": [name for name in used if name not in folder.tensors],
        "unexpected": [name for name in unexpected if not any(matches(glob, name) for glob in excluded)],
        "with other values than the tensor it is tied to; set tie_word_embeddings = false in config.json": untied,
        "of another shape": [
            f"{name} {list(folder.tensors[name].shape)}, not {list(expected[name])}"
            for name in used
            if name in folder.tensors and folder.tensors[name].shape != expected[name]
        ],
        "of a dtype that is not supported": [
            f"{name} {folder.tensors[name].dtype}"
            for name, tensor in used.items()
            if name in folder.tensors
            and folder.tensors[name].dtype not in (FLOATS if tensor.is_floating else _INTEGERS)
        ],
    }
    if found := [f"{len(names)} {what}: {listed(names, most=8)}" for what, names in problems.items() if names]:
        text = "\n    ".join(["its tensors are not those of the model:", *found])
        advice = "model.exclude_from_weights names tensors that are not loaded"
        raise config_error(("model", "weights"), f"{text}\n  {advice}", config.weights)
    return Weights(folder, pieces)


def _own_tensors(inventory: Inventory) -> Iterator[tuple[str, TensorInfo]]:
    """Yield the tensors of a model by full name, without those of adapters, which the folder does not have."""
    for module in inventory.modules:
        if module.same_as is None and not module.is_adapter:
            yield from ((full_name(module.path, t.name), t) for t in (*module.parameters, *module.buffers))


def _check_globs(globs: Sequence[str], names: Sequence[str]) -> None:
    problems = [
        Problem(("model", "exclude_from_weights", index), f"matches no tensor{did_you_mean(glob, names)}", glob)
        for index, glob in enumerate(globs)
        if not any(matches(glob, name) for name in names)
    ]
    if problems:
        raise ConfigError(problems)
