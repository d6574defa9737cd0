"""Writing of folders of safetensors files. Tensors are read and written one by one, to need little memory."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from titan_launch.config.sections.tokenizer import ADDED_FILE, NAMES_FILE, SETTINGS_FILE, TEMPLATE_FILE, TOKENIZER_FILE
from titan_launch.core.errors import UserError
from titan_launch.core.files import MIB, file_inside, read_regular, refuse_weights_folder, sync
from titan_launch.models.decoder.huggingface_tensors import Piece, Shape
from titan_launch.models.huggingface.config_json import read_json
from titan_launch.models.huggingface.files import CONFIG_FILE, GENERATION_FILE, WeightsError
from titan_launch.models.weights.folder import FILE, FLOATS, INDEX, INTEGERS, in_halves

DTYPE_CODES = {getattr(torch, name): code for code, name in {**FLOATS, **INTEGERS}.items()}
"""Name of each dtype in the header of a safetensors file."""


@dataclass(frozen=True)
class Entry:
    """A tensor to write."""

    name: str
    shape: Shape
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor in the file."""
        return math.prod(self.shape) * self.dtype.itemsize


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yield an empty folder that gets the name `path` when the `with` block ends without an error.

    Until then, its name is `<path>.tmp`, so a folder with the name `path` is complete. Raises UserError if `path` is
    inside of a folder with weights, cannot be written, is the working directory, or exists and is not an empty folder.
    Also raises UserError if `<path>.tmp` exists.
    """
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise UserError(f"error: {path} exists already; choose another name, or remove it")
    if path.resolve() == Path.cwd():
        raise UserError(f"error: {path} is the working directory, which cannot be replaced; name another folder")
    refuse_weights_folder(path)
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        with ExitStack() as stack:
            temporary.mkdir(parents=True)
            stack.callback(shutil.rmtree, temporary, ignore_errors=True)
            yield temporary
            sync(temporary)
            temporary.rename(path)
            sync(path.parent)
    except OSError as error:
        if isinstance(error, FileExistsError) and str(error.filename) == str(temporary):
            reason = f"exists already, and {path} is written under this name first"
            remedy = f"choose another name for {path.name}, or remove {temporary.name}"
            raise UserError(f"error: {temporary} {reason}; {remedy}") from None
        raise UserError(f"error: {path} cannot be written: {error.strerror or error}") from error


def write_tensors(
    folder: Path,
    entries: Sequence[Entry],
    read: Callable[[Entry], Tensor],
    max_file_bytes: int | None = None,
    file: str = FILE,
    metadata: Mapping[str, str] | None = None,
) -> int:
    """Write tensors into one file, or into several files of at most `max_file_bytes` with an index. Return the number
    of bytes of all tensors.

    `read` returns a contiguous tensor with the shape and dtype of its entry. `max_file_bytes`: None for one file; a
    tensor above this size gets a file of its own. `file`: name of the file, if there is only one. `metadata`: added to
    the header of each file. Raises WeightsError if the disk has too little free space.
    """
    total, free = sum(entry.num_bytes for entry in entries), shutil.disk_usage(folder).free
    if total > free:
        reason = f"its tensors have {total / 1e9:,.1f} GB, but the disk of --out has {free / 1e9:,.1f} GB free"
        raise WeightsError(f"{reason}; choose a folder on another disk")
    # The tensors with the largest elements come first, so that every tensor is aligned to the size of its elements.
    files = _divide(sorted(entries, key=lambda entry: -entry.dtype.itemsize), max_file_bytes)
    names = [f"model-{index + 1:05}-of-{len(files):05}.safetensors" for index in range(len(files))]
    if len(files) == 1:
        names = [file]
    for name, group in zip(names, files, strict=True):
        _write_file(folder / name, group, read, metadata or {})
    if len(files) > 1:
        weight_map = {entry.name: name for name, group in zip(names, files, strict=True) for entry in group}
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    return total


def write_json(path: Path, table: Mapping[str, Any]) -> None:
    """Write a JSON object, indented."""
    path.write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")


def _divide(entries: Sequence[Entry], max_bytes: int | None) -> list[list[Entry]]:
    files: list[list[Entry]] = [[]]
    size = 0
    for entry in entries:
        if max_bytes is not None and files[-1] and size + entry.num_bytes > max_bytes:
            files.append([])
            size = 0
        files[-1].append(entry)
        size += entry.num_bytes
    return files


def _write_file(
    path: Path, entries: Sequence[Entry], read: Callable[[Entry], Tensor], metadata: Mapping[str, str]
) -> None:
    """Write a safetensors file: the length of the header in 8 bytes, the header in JSON, the bytes of all tensors."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}
    end = 0
    for entry in entries:
        start, end = end, end + entry.num_bytes
        header[entry.name] = {
            "dtype": DTYPE_CODES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # readers map the tensors into memory, so the tensors must be aligned
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for entry in entries:
            tensor = read(entry)
            assert (tuple(tensor.shape), tensor.dtype) == (entry.shape, entry.dtype) and tensor.is_contiguous()
            file.write(tensor.reshape(-1).view(torch.uint8).numpy().data)
            del tensor
        file.flush()
        os.fsync(file.fileno())


def in_file_layout(pieces: Mapping[str, Piece], read: Callable[[str], Tensor]) -> Callable[[Entry], Tensor]:
    """Return a function that assembles the tensor of an `Entry` from the model's parameters.

    `pieces`: the `Piece` of each parameter, by name. `read` returns a whole parameter by its name. Rows of a parameter
    that exceed the shape of the entry are dropped.
    """
    names: defaultdict[str, list[tuple[str, int]]] = defaultdict(list)
    for name, piece in pieces.items():
        for expert, tensor in enumerate(piece.tensors):
            names[tensor].append((name, expert))
    read_experts = lru_cache(maxsize=1)(read)  # the tensors of all experts come from one parameter, which is read once

    def tensor_of(entry: Entry) -> Tensor:
        whole = torch.empty(entry.shape, dtype=entry.dtype)
        for name, expert in names[entry.name]:
            piece = pieces[name]
            own = read_experts(name)[expert] if piece.has_tensor_per_expert else read(name)
            if not entry.shape:
                return own.to(entry.dtype)
            if piece.rotary_width:
                own = in_halves(own, piece.rotary_width)
            rows = (whole.mT if piece.is_transposed else whole).movedim(piece.axis, 0)
            place = rows[piece.start :: piece.step][: own.shape[piece.axis]]
            place.copy_(own.movedim(piece.axis, 0)[: len(place)])
            del own
        return whole

    return tensor_of


COMPANIONS = "huggingface"
"""Subfolder of a weights folder in this package's own format, with the Hugging Face files that came with the weights,
such as the tokenizer."""

MODEL_FILES = (CONFIG_FILE, GENERATION_FILE)
TOKENIZER_FILES = (
    *(TOKENIZER_FILE, SETTINGS_FILE, "tokenizer.model", NAMES_FILE, ADDED_FILE),
    *("vocab.json", "merges.txt", TEMPLATE_FILE, "chat_template.json"),
)
_FURTHER_TEMPLATES = "additional_chat_templates"
"""Subfolder of a Hugging Face folder with named chat templates."""


def companions_of(folder: Path) -> Path | None:
    """Return the folder with the Hugging Face files that belong to the weights in `folder`: its subfolder
    `huggingface`, or `folder` itself. Return None if neither has a `config.json` of Hugging Face. Raises WeightsError
    if the subfolder is a link that leads out of `folder`."""
    try:
        file_inside(folder, COMPANIONS)
    except OSError as error:
        raise WeightsError(f"{COMPANIONS} is {error.strerror}") from None
    for candidate in (folder / COMPANIONS, folder):
        with suppress(WeightsError):
            if "model_type" in read_json(candidate / CONFIG_FILE):
                return candidate
    return None


def copy_companions(source: Path, target: Path, names: Sequence[str] = (*MODEL_FILES, *TOKENIZER_FILES)) -> None:
    """Copy the files `names` from a Hugging Face folder to `target`, which is created. Files that the Hugging Face
    folder lacks are skipped. If `names` has `tokenizer.json`, named chat templates are copied too. Raises WeightsError
    for a file that is not regular or is above 256 MiB, and for a link that leads out of the folder."""
    templates = (source / _FURTHER_TEMPLATES).glob("*.jinja") if TOKENIZER_FILE in names else ()
    for name in (*names, *(f"{_FURTHER_TEMPLATES}/{path.name}" for path in templates)):
        (target / name).parent.mkdir(exist_ok=True)
        if os.path.lexists(source / name):
            try:
                content = read_regular(file_inside(source, name), 256 * MIB)  # the largest files have about 35 MiB
            except OSError as error:
                raise WeightsError(f"{name} cannot be copied: {error.strerror}") from None
            (target / name).write_bytes(content)


def parse_size(text: str) -> int:
    """Return the bytes of a size such as `5GB` or `500MB` (units: KB, MB, GB; powers of 1000). Raises WeightsError for
    any other text."""
    found = re.fullmatch("([0-9]{1,9})(KB|MB|GB)", text.upper())
    size = int(found[1]) * {"KB": 10**3, "MB": 10**6, "GB": 10**9}[found[2]] if found else 0
    if not size:
        raise WeightsError(f'"{text}" is not a size; write 5GB or 500MB')
    return size
