"""A folder of safetensors files: its tensors, their comparison with a model, and reads of parts of tensors.

Nothing is unpickled, and no name in the index leads out of the folder. The metadata is read without torch.
"""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from titan_launch.config.sections.model import HUGGINGFACE, ModelConfig
from titan_launch.core.errors import ConfigError, Problem, config_error, did_you_mean, listed
from titan_launch.core.files import MIB, file_inside, open_regular
from titan_launch.core.fingerprint import Fingerprint, fingerprint_of_files
from titan_launch.core.globs import matches
from titan_launch.core.packages import not_installed
from titan_launch.core.terminal import counted, short_name
from titan_launch.models.architectures import ALL_IN_ARGS, ARCHITECTURES, known_args, labels_taken, resolve_args
from titan_launch.models.decoder.huggingface_tensors import (
    LM_HEAD,
    Piece,
    Shape,
    is_unused,
    pieces_of,
    tensor_shapes,
)
from titan_launch.models.huggingface.config_json import FolderConfig, read_folder_config, read_json, refuse_adapter
from titan_launch.models.huggingface.files import WeightsError
from titan_launch.plan.types import Inventory, TensorInfo, full_name

if TYPE_CHECKING:
    from torch import Tensor

FILE, INDEX = "model.safetensors", "model.safetensors.index.json"


def shapes_in_files(shapes: Mapping[str, Shape], rows: int | None, has_labels: bool) -> dict[str, Shape]:
    """Return the shapes that parameters have in files whose vocabulary has `rows` tokens. `rows`: None for the
    vocabulary of the job. `has_labels`: True for a classifier or a reward model, whose output layer has labels."""
    of_vocabulary = ("tok_embeddings.weight",) if has_labels else ("tok_embeddings.weight", "output.weight")
    return {name: (rows, *shape[1:]) if rows and name in of_vocabulary else shape for name, shape in shapes.items()}


FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
INTEGERS = {"I64": "int64"}
"""Supported dtypes, by their names in the files: `FLOATS` for parameters, `INTEGERS` for the counters of BatchNorm."""

_SAMPLE_BYTES = 4096

_MOST_INDEX_BYTES = 64 * MIB
"""Largest size of an index in bytes. The index of a model with 200,000 tensors has 16 MiB."""

_MOST_HEADER_BYTES = 16 * MIB
"""Largest size of the header of a file in bytes. A header has about 100 bytes for each tensor."""

_MOST_METADATA = MIB
"""Largest number of characters of a file's metadata. Each read of a tensor parses the metadata again."""

_MOST_DIMENSIONS, _MOST_ELEMENTS = 8, 1 << 48
"""Limits of a shape: number of dims, and size of a dim. The library `safetensors` has no such limits for tensors
without elements."""


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
        """Read the folder's `config.json` and the headers of its files. Raises WeightsError if the folder cannot be
        used. `of_any_class`: True for `model.name = "huggingface"`. `config.json` is then not read."""
        self.path = Path(path)
        refuse_adapter(self.path)
        self.config = FolderConfig(HUGGINGFACE, ALL_IN_ARGS, {}, None, {}) if of_any_class else read_folder_config(path)
        self.tensors: dict[str, FileTensor] = {}
        expected = self._names_by_file()
        missing = [name for name in expected if not os.path.lexists(self.path / name)]
        if missing:
            reason = f"it lacks {len(missing):,} of its {counted(len(expected), 'file')}: {listed(missing)}"
            raise WeightsError(f"{reason}; copy or download the folder again")
        for file, names in expected.items():
            found, _ = read_header(self.path / file)
            if lost := [name for name in names or () if name not in found]:
                reason = f"{file} lacks tensors that {INDEX} lists: {listed(lost)}"
                raise WeightsError(f"{reason}; copy or download the folder again")
            earlier = {name: replace(self.tensors[name], file=file) for name in found if name in self.tensors}
            if twice := [name for name, tensor in earlier.items() if tensor != found[name]]:
                reason = f"{self.tensors[twice[0]].file} and {file} both have {listed(twice)}"
                raise WeightsError(f"{reason}, with different shapes or dtypes; copy or download the folder again")
            # Some converters write tied tensors into several files. The index names one file for each tensor.
            own = names or ()
            self.tensors |= {name: tensor for name, tensor in found.items() if name not in earlier or name in own}
        self._check_layers()

    def _check_layers(self) -> None:
        """Raise WeightsError if the files have fewer tensors than `config.json` has layers, before a model with so many
        layers is built."""
        if self.config.name in ARCHITECTURES:
            layers = resolve_args(self.config.name, self.config.flavor, self.config.args).num_layers()
            if layers is not None and layers > len(self.tensors):
                reason = f"its config.json has {layers} layers, but its files have {len(self.tensors)} tensors"
                raise WeightsError(f"{reason}; correct config.json, or copy or download the folder again")

    def _names_by_file(self) -> Mapping[str, list[str] | None]:
        """Return, for each file to read, the names of its tensors in the index; None for `model.safetensors`, which is
        read without an index."""
        if os.path.lexists(self.path / FILE):
            return {FILE: None}
        if not os.path.lexists(self.path / INDEX):
            if pickles := sorted(file.name for file in self.path.glob("*.bin")):
                found = f"neither {FILE} nor {INDEX}, but {listed(pickles)}"
                reason = f"it has {found}: pickles, which can run code when they are read"
                raise WeightsError(f"{reason}; convert them with save_pretrained of transformers")
            raise WeightsError(f"it has neither {FILE} nor {INDEX}; name a folder with weights")
        index = read_json(self.path / INDEX, _MOST_INDEX_BYTES).get("weight_map")
        if not isinstance(index, dict) or not all(isinstance(file, str) for file in index.values()):
            raise WeightsError(f"{INDEX} has no table weight_map with names of files; copy or download it again")
        if outside := [file for file in index.values() if Path(file).name != file or not file.endswith(".safetensors")]:
            reason = "which is not a *.safetensors file in the folder"
            raise WeightsError(f'{INDEX} names "{short_name(outside[0])}", {reason}; copy or download it again')
        by_file = defaultdict[str, list[str]](list)
        for name, file in index.items():
            by_file[file].append(name)
        return {file: by_file[file] for file in sorted(by_file)}

    def __len__(self) -> int:
        return len(self.tensors)

    def fingerprint(self, seed: int = 0) -> Fingerprint:
        """Return the fingerprint of the files: their names and sizes, and samples of their content. `seed` has no
        effect (see `train.run_folder.resume.FingerprintedSource`)."""
        files = sorted({tensor.file for tensor in self.tensors.values()})
        return fingerprint_of_files([(file, self.path / file) for file in files], _SAMPLE_BYTES)

    def read(self, name: str) -> Tensor:
        """Return a whole tensor, in the dtype of the file."""
        (tensor,) = self.read_each([name])
        return tensor

    def read_each(self, names: Sequence[str], start: Sequence[int] = (), stop: Sequence[int] = ()) -> Iterator[Tensor]:
        """Yield the same part of several tensors, in the dtype of the file, and read only this part. `start`, `stop`:
        bounds of the part by dim; empty for the whole tensors."""
        for file_name, group in groupby(names, key=lambda name: self.tensors[name].file):
            # The file is opened once for consecutive names, because opening it takes milliseconds.
            yield from read_tensors(self.path / file_name, group, start, stop)


def _library() -> ModuleType:
    """Return the library `safetensors`, which is an optional dependency. Raises WeightsError if it is not installed."""
    try:
        import safetensors
    except ImportError:
        raise WeightsError(f"reading it {not_installed('safetensors')}") from None
    return safetensors


def read_header(path: Path) -> tuple[dict[str, FileTensor], dict[str, str]]:
    """Return the tensors of a file by name, and its metadata. The library `safetensors` checks that the bytes of the
    tensors lie within the file and do not overlap. Raises WeightsError if the file cannot be read, is damaged, or
    exceeds a limit of this module."""
    library, shown = _library(), short_name(path.name)
    try:
        with open_regular(file_inside(path.parent, path.name)) as start:
            header_bytes = int.from_bytes(start.read(8), "little")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise WeightsError(f"{shown} cannot be read: {reason}") from None
    if header_bytes > _MOST_HEADER_BYTES:
        reason = f"its first 8 bytes name a header of {header_bytes:,} bytes; the limit is {_MOST_HEADER_BYTES:,}"
        raise WeightsError(f"{shown} is no safetensors file, or is damaged: {reason}; copy or download it again")
    try:
        with library.safe_open(path, framework="np") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - no dict
            tensors = {name: FileTensor(path.name, tuple(s.get_shape()), s.get_dtype()) for name, s in slices.items()}
            metadata: dict[str, str] = file.metadata() or {}
    except MemoryError:
        reason = f"its {path.stat().st_size:,} bytes are more than this process may map; increase ulimit -v"
        raise WeightsError(f"{shown} cannot be mapped into memory: {reason}") from None
    except (library.SafetensorError, OSError, ValueError) as error:
        reason = short_name(str(error))
        raise WeightsError(f"{shown} is truncated or damaged ({reason}); copy or download it again") from None
    if sum(map(len, chain.from_iterable(metadata.items()))) > _MOST_METADATA:
        reason = f"has more than {_MOST_METADATA:,} characters of metadata"
        raise WeightsError(f"{shown} {reason}; save the file again without metadata")
    for name, tensor in tensors.items():
        if len(tensor.shape) > _MOST_DIMENSIONS or max(tensor.shape, default=0) > _MOST_ELEMENTS:
            cut = ", ..." if len(tensor.shape) > _MOST_DIMENSIONS else ""
            shape = ", ".join(map(str, tensor.shape[:_MOST_DIMENSIONS])) + cut
            possible = f"at most {_MOST_DIMENSIONS} dims of at most {_MOST_ELEMENTS:,} are possible"
            reason = f"{short_name(name)} has the shape [{shape}], but {possible}"
            raise WeightsError(f"{shown} is damaged: {reason}; copy or download it again")
    return tensors, metadata


def read_tensors(
    path: Path, names: Iterable[str], start: Sequence[int] = (), stop: Sequence[int] = ()
) -> Iterator[Tensor]:
    """Yield tensors of a file. The arguments are those of `WeightsFolder.read_each`."""
    with _library().safe_open(path, framework="pt") as file:
        for name in names:
            part: Tensor = file.get_slice(name)[tuple(map(slice, start, stop))] if stop else file.get_tensor(name)
            yield part.clone()  # not a view of the file, which is closed


@dataclass(frozen=True)
class Converted:
    """The `Place` of a parameter that is computed from whole tensors of a folder."""

    tensors: tuple[str, ...]
    """Names of the tensors in the folder."""

    shape: Shape
    convert: Callable[[Sequence[Tensor]], Tensor]
    """Function of the tensors that returns the parameter."""


Place = Piece | Converted
Places = Mapping[str, Place]
"""Places of parameters in the files of a folder, by full name of the parameter."""


class Weights:
    """The initial values of a model's parameters and saved buffers, in a folder."""

    def __init__(self, folder: WeightsFolder, pieces: Places, copies: Mapping[str, Sequence[Place]] | None = None):
        """`pieces`: for each parameter or buffer to read, its place in the files. `copies`: further places of a
        parameter that several modules of the model share, if the folder has the parameter more than once."""
        self.folder = folder
        self.pieces = pieces
        self.copies = copies or {}

    def bytes_of(self, names: Collection[str]) -> int:
        """Return the bytes of the tensors from which the parameters `names` are read."""
        tensors = (self.folder.tensors[name] for name in {t for name in names for t in self.pieces[name].tensors})
        return sum(math.prod(tensor.shape) * int(tensor.dtype.strip("BIF")) // 8 for tensor in tensors)

    def read(self, name: str, offsets: Sequence[int], lengths: Sequence[int]) -> Tensor:
        """Return a part of a parameter, in the dtype of the file. Rows that the file does not have are zeros.

        Only the part is read from the file, with three exceptions. If the file has the rows of heads in another order,
        whole heads are read. If output features of several parameters alternate in the file, the output features of all
        these parameters are read. If the parameter is a `Converted`, its tensors are read whole. Raises ConfigError if
        the folder has the parameter twice, with different values.
        """
        piece = self.pieces[name]
        part = self._read(piece, offsets, lengths)
        for copy in self.copies.get(name, ()):
            if not part.equal(self._read(copy, offsets, lengths)):
                other = copy.tensors[0]
                reason = f"{other} and {piece.tensors[0]} have different values, but the model ties them to one tensor"
                advice = f'set tie_word_embeddings to false in config.json, or exclude_from_weights = ["{other}"]'
                raise config_error(("model", "weights"), f"{reason}; {advice}", str(self.folder.path))
        return part

    def _read(self, piece: Place, offsets: Sequence[int], lengths: Sequence[int]) -> Tensor:
        if isinstance(piece, Converted):
            whole = piece.convert(list(self.folder.read_each(piece.tensors)))
            return whole[tuple(slice(a, a + b) for a, b in zip(offsets, lengths, strict=True))].clone()
        if len(piece.tensors) == 1 and not self.folder.tensors[piece.tensors[0]].shape:
            # The file may have a scalar where the model has a vector with one element.
            return self.folder.read(piece.tensor).reshape(tuple(lengths))
        if not piece.has_tensor_per_expert:
            (part,) = self._read_each(piece, piece.tensors, offsets, lengths)
            return part
        stacked: Tensor | None = None
        experts = piece.tensors[offsets[0] : offsets[0] + lengths[0]]
        for index, part in enumerate(self._read_each(piece, experts, offsets[1:], lengths[1:])):
            stacked = part.new_empty(tuple(lengths)) if stacked is None else stacked
            stacked[index] = part
        assert stacked is not None
        return stacked

    def _read_each(
        self, piece: Piece, tensors: Sequence[str], offsets: Sequence[int], lengths: Sequence[int]
    ) -> Iterator[Tensor]:
        """Yield the same part of several tensors of one shape, in the layout of this package."""
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
    """Reorder the rows of whole heads from the order of Hugging Face to the order of this package: rows 0 and width / 2
    of a head become rows 0 and 1, and so on. `width`: rows of a head."""
    return rows.unflatten(0, (-1, 2, width // 2)).transpose(1, 2).flatten(0, 2)


def in_halves(rows: Tensor, width: int) -> Tensor:
    """Reorder the rows of whole heads from the order of this package to the order of Hugging Face: rows 0 and 1 of a
    head become rows 0 and width / 2, and so on. `width`: rows of a head."""
    return rows.unflatten(0, (-1, width // 2, 2)).transpose(1, 2).flatten(0, 2)


def open_weights(config: ModelConfig) -> WeightsFolder:
    """Return the folder that `model.weights` names. Raises ConfigError if it cannot be read."""
    assert config.weights is not None
    try:
        return WeightsFolder(config.weights, of_any_class=config.name == HUGGINGFACE)
    except WeightsError as error:
        raise config_error(("model", "weights"), str(error), config.weights) from None


PlacesInFiles = Callable[[Mapping[str, FileTensor], Collection[str]], tuple[Places, Collection[str]]]
"""A function of a folder's tensors and of the names of a model's tensors. The function returns the places of the
model's tensors, and the names of the folder's tensors that the model ignores."""


def find_weights(
    config: ModelConfig,
    inventory: Inventory,
    places_in_files: PlacesInFiles | None = None,
    folder: WeightsFolder | None = None,
) -> Weights:
    """Return the weights that `model.weights` names, compared with the tensors of the model.

    `places_in_files`: the model's attribute of this name, for a class of `transformers`. `folder`: the result of
    `open_weights`, if the files have already been read.

    Only headers are read, and only `places_in_files` needs torch. Raises ConfigError if the folder cannot be read, if
    tensors are missing, unexpected, or of another shape or dtype, or if a glob of `model.exclude_from_weights` matches
    nothing.
    """
    folder = open_weights(config) if folder is None else folder
    excluded, own = config.exclude_from_weights, dict(_own_tensors(inventory))
    _check_globs(excluded, [*own, *folder.tensors])
    shapes = {name: tensor.shape for name, tensor in own.items()}
    args, has_labels, width = known_args(config), labels_taken(config) is not None, None
    if args is not None:
        width = getattr(args, "head_width", None)
        theirs = resolve_args(folder.config.name, folder.config.flavor, folder.config.args)
        shapes = shapes_in_files(shapes, getattr(theirs, "vocab_size", None), has_labels)
    found: dict[str, Place] = dict(pieces_of(folder.config.model_type, shapes, width, folder.tensors, has_labels))
    ignored: Collection[str] = (f"{LM_HEAD}.weight",) if has_labels else ()
    if places_in_files is not None:
        places, ignored = places_in_files(folder.tensors, shapes)
        found |= places
    _check_number(found.values(), folder)
    pieces = dict[str, Place]()
    copies = defaultdict[str, list[Place]](list)
    for name, piece in found.items():
        first = own[name].tied_to
        if first is None:
            pieces[name] = piece
        elif all(tensor in folder.tensors for tensor in piece.tensors):
            copies[first].append(piece)
    for first, others in copies.items():
        if not any(tensor in folder.tensors for tensor in pieces[first].tensors):
            pieces[first] = others.pop()
    for name in [name for name in pieces if not own[name].is_floating]:
        if pieces[name].tensors[0] not in folder.tensors:
            del pieces[name]  # files may lack the counters of BatchNorm
    expected = tensor_shapes({name: piece for name, piece in pieces.items() if isinstance(piece, Piece)}, shapes)
    taken = {tensor for piece in chain(pieces.values(), *copies.values()) for tensor in piece.tensors}

    def is_excluded(name: str) -> bool:
        return any(matches(glob, name) for glob in excluded)

    pieces = {name: piece for name, piece in pieces.items() if not is_excluded(name)}
    for others in copies.values():
        others[:] = [piece for piece in others if not is_excluded(piece.tensors[0])]
    used = {tensor: own[name] for name, piece in pieces.items() for tensor in piece.tensors}
    unexpected = [name for name in folder.tensors if name not in taken and name not in ignored]
    unexpected = [name for name in unexpected if not (is_unused(folder.config.model_type, name) or is_excluded(name))]
    problems = {
        "missing": [name for name in used if name not in folder.tensors],
        "unexpected": unexpected,
        "of another shape": [
            *(
                f"{name} {list(folder.tensors[name].shape)}, not {list(expected[name])}"
                for name in used
                if name in expected
                and name in folder.tensors
                and (folder.tensors[name].shape or (1,)) != (expected[name] or (1,))
            ),
            *(
                f"{name} {list(piece.shape)}, not {list(shapes[name])}, from {listed(piece.tensors)}"
                for name, piece in pieces.items()
                if isinstance(piece, Converted) and piece.shape != shapes[name]
            ),
        ],
        "of a dtype that is not supported": [
            f"{name} {folder.tensors[name].dtype}"
            for name, tensor in used.items()
            if name in folder.tensors and folder.tensors[name].dtype not in (FLOATS if tensor.is_floating else INTEGERS)
        ],
    }
    if errors := [f"{len(names)} {what}: {listed(names, most=8)}" for what, names in problems.items() if names]:
        text = "\n    ".join(["its tensors do not match the model:", *errors])
        advice = "to skip tensors, name them in model.exclude_from_weights"
        raise config_error(("model", "weights"), f"{text}\n  {advice}", config.weights)
    return Weights(folder, pieces, copies)


def _check_number(places: Collection[Place], folder: WeightsFolder) -> None:
    """Raise ConfigError if the model has over 200,000 tensors more than the folder. For a smaller difference,
    `find_weights` names the missing tensors."""
    stacked = (place for place in places if isinstance(place, Piece) and place.has_tensor_per_expert)
    expected = len(places) + sum(place.num_experts or 0 for place in stacked)
    if expected > len(folder.tensors) + 200_000:
        reason = f"its files have {len(folder.tensors):,} tensors, but a model with these layers and experts has"
        raise config_error(
            ("model", "weights"), f"{reason} {expected:,}; correct the sizes of the model", str(folder.path)
        )


def _own_tensors(inventory: Inventory) -> Iterator[tuple[str, TensorInfo]]:
    """Yield (full name, tensor) of the model's tensors that a weights folder should have: all saved parameters and
    buffers, except the parameters of adapters."""
    for module in inventory.distinct:
        if not module.is_adapter:
            tensors = (*module.parameters, *module.buffers)
            yield from ((full_name(module.path, tensor.name), tensor) for tensor in tensors if tensor.is_saved)


def _check_globs(globs: Sequence[str], names: Sequence[str]) -> None:
    problems = [
        Problem(("model", "exclude_from_weights", index), f"matches no tensor{did_you_mean(glob, names)}", glob)
        for index, glob in enumerate(globs)
        if not any(matches(glob, name) for name in names)
    ]
    if problems:
        raise ConfigError(problems)
