"""Export of a run's weights. One process exports a checkpoint, even if many ranks wrote it."""

from __future__ import annotations

import shlex
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from operator import attrgetter
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from titan_launch import __version__
from titan_launch.checkpoint.index import read_index, read_tensor
from titan_launch.checkpoint.manifest import checkpoint_name
from titan_launch.config.loading.provenance import toml_value
from titan_launch.config.sections.data import ChatData, ClassificationData, CorpusData, ImageData, single_sources
from titan_launch.config.sections.model import HUGGINGFACE
from titan_launch.config.sections.tokenizer import (
    SETTINGS_FILE,
    TEMPLATE_FILE,
    TOKENIZER_FILE,
    read_tokenizer_json,
    special_token,
    token_id,
    tokenizer_file,
)
from titan_launch.core.errors import ConfigError, listed
from titan_launch.core.files import MIB
from titan_launch.core.terminal import counted
from titan_launch.data.tokenizers import build_tokenizer
from titan_launch.inference.chat_format import ChatOptions, ends_of_answers, find_template, template_section
from titan_launch.inference.language_model import tokenizer_of_model
from titan_launch.inference.saved_model import (
    SavedModel,
    adapters_of_saved,
    averaged,
    check_base,
    merged,
    open_saved_model,
)
from titan_launch.models.architectures import ARCHITECTURES, known_args, resolve_args, selection_bias_rate
from titan_launch.models.build import build_model
from titan_launch.models.decoder.args import DecoderArgs
from titan_launch.models.decoder.huggingface_tensors import is_selection_bias, tensor_shapes
from titan_launch.models.huggingface.args import image_format
from titan_launch.models.huggingface.config_json import config_of, read_json
from titan_launch.models.huggingface.files import (
    ADAPTER_CONFIG_FILE,
    CONFIG_FILE,
    GENERATION_FILE,
    WeightsError,
    as_text,
)
from titan_launch.models.huggingface.image_processor import FILE as IMAGE_PROCESSOR_FILE
from titan_launch.models.huggingface.image_processor import image_processor
from titan_launch.models.huggingface.module import in_published_format, without_code
from titan_launch.models.weights.adapters import BASE, Target, file_places, targets_of
from titan_launch.models.weights.adapters import FILE as ADAPTER_FILE
from titan_launch.models.weights.adapters import config_of as adapter_config
from titan_launch.models.weights.folder import FileTensor
from titan_launch.models.weights.writing import (
    COMPANIONS,
    DTYPE_CODES,
    MODEL_FILES,
    TOKENIZER_FILES,
    Entry,
    copy_companions,
    in_file_layout,
    new_folder,
    parse_size,
    write_json,
    write_tensors,
)
from titan_launch.plan.freezing import Freezing
from titan_launch.train.run_folder.folder import checkpoint_folder

DEFAULT_SHARD_SIZE = "5GB"


@dataclass(frozen=True)
class ExportOptions:
    """Options of the command `export`."""

    is_plain: bool = False
    """Write one weights file with this package's names of tensors, instead of a Hugging Face folder."""

    step: int | None = None
    """Step of the run's checkpoint. None: as in `open_saved_model`."""

    dtype: str | None = None
    """Name of a dtype for all floating-point tensors except selection biases. None: the saved dtypes."""

    max_shard_size: str = DEFAULT_SHARD_SIZE
    vocab_size: int | None = None
    """Number of rows of the exported embedding and output layer. None: see `_rows`."""

    ema: bool = False
    """Write the moving average (EMA) of each parameter that has one, instead of the parameter."""

    is_adapter: bool = False
    """Write only the LoRA adapters, as a folder for `peft`. False: add the adapters to the weights, and write the whole
    model."""

    base: Path | None = None
    """Folder with the parameters that the checkpoint omits. None: the default of `open_saved_model`."""

    average: Mapping[int, float] = field(default_factory=dict)
    """Weight of each checkpoint in the mean, by step. Empty: only the checkpoint of `step` is used."""

    soup: Mapping[Path, float] = field(default_factory=dict)
    """Weight of each further model in the mean, by folder. The run itself has the weight 1, or the weights in
    `average`."""


def export(run: Path, out: Path, options: ExportOptions) -> str:
    """Write the weights of a run, or of another folder that `open_saved_model` can open, into the new folder `out`.
    Return a line about the result, and further lines with notes.

    Host memory stays near twice the size of the largest tensor. For a mean of models, it stays near four times this
    size. Raises WeightsError, DamagedCheckpointError and UserError.
    """
    saved, source = _source(run, options)
    if options.dtype is not None:
        dtype, entries = getattr(torch, options.dtype), dict(source.entries)
        for name, entry in source.entries.items():
            if entry.dtype.is_floating_point and not is_selection_bias(name):
                entries[name] = replace(entry, dtype=dtype)
        source = replace(source, entries=entries)
    write = _write_plain if options.is_plain else _write_huggingface
    if options.is_adapter:
        write = _write_adapter
    notes = []
    statistics = sum(name.endswith(".running_var") for name in source.entries)
    if statistics and (options.average or options.soup):  # see `torch.optim.swa_utils.update_bn`
        notes.append(
            f"the running statistics of {counted(statistics, 'BatchNorm layer')} are means of the models' statistics, "
            "which do not suit the averaged weights exactly; a short run from this folder with optimizer.lr = 1e-30 "
            "computes new statistics"
        )
    with new_folder(out) as folder:
        num_tensors, num_bytes = write(source, folder, options)
        if write is _write_huggingface:
            notes += [*_write_chat_format(source, folder), *_write_image_processor(source, folder)]
            notes += [*_tokenizer_notes(source, folder), *_write_settings(folder)]
        library = "peft" if options.is_adapter else "titan_launch" if options.is_plain else "transformers"
        _write_card(folder, saved, run, library)
    written = f"wrote {counted(num_tensors, 'tensor')} ({num_bytes / 1e6:,.1f} MB) of {source.description} to {out}"
    return written + "".join(f"\nnote: {note}" for note in notes)


def _source(run: Path, options: ExportOptions) -> tuple[SavedModel, SavedModel]:
    """Return the model for the model card, and the model whose tensors are written. Raises WeightsError,
    DamagedCheckpointError and UserError."""
    steps: list[int | None] = [*options.average] or [options.step]
    shares = [*(options.average.values() or [1.0]), *options.soup.values()]
    opened = [open_saved_model(run, step, options.ema, options.base) for step in steps]
    saved = opened[-1]
    for folder in options.soup:
        try:
            opened.append(open_saved_model(folder, None, options.ema, options.base))
        except WeightsError as error:
            raise WeightsError(f"--soup {folder}: {error}") from None
    check_base(options.base, opened)
    if len(opened) == 1:
        return saved, saved if options.is_adapter else merged(saved)
    if options.soup:
        folders = [*[run] * len(steps), *options.soup]
        named = zip(opened, folders, strict=True)
        opened = [replace(each, description=f"{folder} ({each.description})") for each, folder in named]
    mean = averaged([merged(each) for each in opened], shares)
    return replace(saved, description=mean.description), mean


def _write_plain(source: SavedModel, folder: Path, options: ExportOptions) -> tuple[int, int]:
    write_json(folder / CONFIG_FILE, source.record)
    if source.companions is not None:
        copy_companions(source.companions, folder / COMPANIONS)
    entries = list(_without_shared(source).values())
    return len(entries), write_tensors(folder, entries, lambda entry: source.read(entry.name).to(entry.dtype))


def _write_huggingface(source: SavedModel, folder: Path, options: ExportOptions) -> tuple[int, int]:
    files_of = _files_of_class if source.job.model.name == HUGGINGFACE else _files_of_family
    entries, read, config = files_of(source, options)
    num_bytes = write_tensors(folder, entries, read, parse_size(options.max_shard_size))
    _copy_companions(source, folder)
    if source.companions is None and config.get("eos_token_id") is None and _tokenizer_file(source) is not None:
        with suppress(ConfigError):  # `_tokenizer_notes` has the error
            config = {**config, "eos_token_id": token_id(source.job.tokenizer, special_token(source.job.tokenizer))}
    write_json(folder / CONFIG_FILE, without_code(config))
    if not (folder / GENERATION_FILE).exists():  # write the file that `transformers` would make from the config
        keys = ("bos_token_id", "eos_token_id", "pad_token_id")
        ids = {key: value for key in keys if (value := config.get(key)) is not None}
        write_json(folder / GENERATION_FILE, {"_from_model_config": True, **ids})
    return len(entries), num_bytes


_HuggingFaceFiles = tuple[list[Entry], Callable[[Entry], Tensor], Mapping[str, Any]]
"""The entries of the tensors in the files, a function that reads the tensor of an entry, and the `config.json`."""


def _files_of_family(source: SavedModel, options: ExportOptions) -> _HuggingFaceFiles:
    """Return the files of a model of this package. Raises WeightsError as `_rows` does."""
    model, entries = source.job.model, _without_shared(source)
    original = None if source.companions is None else read_json(source.companions / CONFIG_FILE)
    rows = _rows(source, options)
    shapes, pieces = file_places(model, {name: entry.shape for name, entry in entries.items()}, rows)
    args = cast(DecoderArgs, resolve_args(model.name, model.flavor, model.args))
    args = args.model_copy(update={"vocab_size": rows})
    sections = single_sources(source.job.data).values()
    labels = next((data.labels for data in sections if isinstance(data, ClassificationData)), None)
    config = config_of(model.name, args, _dtype_name(source), source.job.training.seq_len, original, labels)
    dtype_of = {tensor: entries[name].dtype for name, piece in pieces.items() for tensor in piece.tensors}
    files = [Entry(name, shape, dtype_of[name]) for name, shape in tensor_shapes(pieces, shapes).items()]
    return files, in_file_layout(pieces, source.read), config


def _copy_companions(source: SavedModel, folder: Path) -> None:
    """Copy the Hugging Face configuration and tokenizer of the weights with which the run began. If the run's own
    tokenizer has files, copy these files in place of the tokenizer of the weights. If a run trained on the bytes of
    text, copy no tokenizer."""
    own = _tokenizer_file(source)
    sections = single_sources(source.job.data).values() if "data" in source.job.model_fields_set else ()
    has_bytes = source.job.tokenizer.kind == "bytes" and any(isinstance(data, CorpusData) for data in sections)
    names = MODEL_FILES if own is not None or has_bytes else (*MODEL_FILES, *TOKENIZER_FILES)
    if source.companions is not None:
        copy_companions(source.companions, folder, names)
    if own is not None:
        copy_companions(own.parent, folder, TOKENIZER_FILES)
        (folder / TOKENIZER_FILE).write_bytes(read_tokenizer_json(source.job.tokenizer))  # its name may be another


def _tokenizer_file(source: SavedModel) -> Path | None:
    """Return the `tokenizer.json` of the run; None if the tokenizer has no files, or if the file no longer exists."""
    tokenizer = source.job.tokenizer
    file = tokenizer_file(tokenizer)
    return file if tokenizer.kind == "huggingface" and file.is_file() else None


def _tokenizer_notes(source: SavedModel, folder: Path) -> Iterator[str]:
    """Yield a note if the files of the run's tokenizer no longer exist, or can no longer be used."""
    tokenizer = source.job.tokenizer
    if tokenizer.kind != "huggingface":
        return
    if _tokenizer_file(source) is None:
        reason = f"{tokenizer_file(tokenizer)} is not found"
        yield f"the folder lacks the run's tokenizer, because {reason}; copy the tokenizer into the folder"
        return
    try:
        special_token(tokenizer)
    except ConfigError as error:
        lacks_end = source.companions is None and "eos_token_id" not in read_json(folder / GENERATION_FILE)
        result = f", so {CONFIG_FILE} has no eos_token_id" if lacks_end else ""
        yield f"the run's tokenizer files, which were copied to the folder, have an error{result}: {error}"


def _write_settings(folder: Path) -> Iterator[str]:
    """Remove references to code from the copied `tokenizer_config.json`. Yield a note if the file cannot be read."""
    if (folder / SETTINGS_FILE).exists():
        try:
            settings = read_json(folder / SETTINGS_FILE, 16 * MIB)  # the file may list all added tokens
        except WeightsError as error:
            yield f"{error}; the folder has an unchanged copy of this file"
            return
        if "auto_map" in settings:
            write_json(folder / SETTINGS_FILE, without_code(settings))


def _write_chat_format(source: SavedModel, folder: Path) -> Iterator[str]:
    """If the run trained on chats, write the chat template and the token that ends an answer into the files that
    `transformers` reads. Yield notes about parts of the chat format that the folder lacks."""
    if not any(isinstance(data, ChatData) for data in single_sources(source.job.data).values()):
        return
    try:
        tokenizer = build_tokenizer(tokenizer_of_model(source))
        template = find_template(source, tokenizer, ChatOptions())
        ends, _ = ends_of_answers(template, tokenizer)
    except (WeightsError, ConfigError) as error:
        yield f"the folder may lack the chat template of the run: {error}"
        return
    if tokenizer.folder is None:
        yield "the folder lacks the tokenizer and the chat template of the run, because this tokenizer has no files"
        return
    (folder / TEMPLATE_FILE).write_text(template.renderer.text, encoding="utf-8")
    if dict(template_section(source.job).changed("template_args", "date")):
        yield "the chat template in the folder stores no data.template_args and no data.date; pass them to the template"
    generation = read_json(folder / GENERATION_FILE)
    known: Any = generation.get("eos_token_id")
    known = [] if known is None else known if isinstance(known, list) else [known]
    if new := sorted(ends - {*known}):
        write_json(folder / GENERATION_FILE, {**generation, "eos_token_id": [*known, *new]})


def _write_image_processor(source: SavedModel, folder: Path) -> Iterator[str]:
    """If the run trained on images, write the file from which `transformers` prepares images like the validation data
    of the run. Yield a note if the job does not have all that this file needs."""
    job = source.job
    if job.data.unit != "images":
        return
    sources = [*single_sources(job.validation.data or job.data).values(), *single_sources(job.data).values()]
    data = next((data for data in sources if isinstance(data, ImageData)), None)
    if data is None or data.transform is not None or data.path.endswith(".npz"):
        reason = "the file cannot describe samples or a transform of your own, or the arrays of an .npz file"
        yield f"the folder has no {IMAGE_PROCESSOR_FILE}, because {reason}; write it yourself"
        return
    taken = image_format(job.model.args)
    write_json(folder / IMAGE_PROCESSOR_FILE, image_processor(data, 3 if taken is None else taken.channels))


def _rows(source: SavedModel, options: ExportOptions) -> int | None:
    """Return the number of rows of the exported embedding and output layer: `options.vocab_size` or, by default, the
    `vocab_size` of the original `config.json` or of the model, whichever is smaller. None if the model has no argument
    `vocab_size`, or is a class of `transformers`. Raises WeightsError for an invalid or too large number."""
    model = source.job.model
    rows: int | None = getattr(known_args(model), "vocab_size", None)
    if rows is None or model.name == HUGGINGFACE:
        return None
    if options.vocab_size is not None and options.vocab_size > rows:
        raise WeightsError(f"--vocab-size {options.vocab_size} is larger than {rows}, the model's vocab_size")
    original = {} if source.companions is None else read_json(source.companions / CONFIG_FILE)
    published = original.get("vocab_size", rows)
    if type(published) is not int or published < 1:
        reason = f"{source.companions}/{CONFIG_FILE} has vocab_size = {as_text(published)}"
        raise WeightsError(f"{reason}; write the number of rows of the embedding there")
    return min(rows, options.vocab_size or published)


def _write_adapter(source: SavedModel, folder: Path, options: ExportOptions) -> tuple[int, int]:
    """Write the adapters as a folder for `peft`. `peft` applies the adapters to the model with which the run began.
    Return the number of tensors and of bytes. Raises WeightsError if there are no adapters, or if the run also changed
    other parameters, selection biases of experts, or running statistics."""
    adapters, lora = adapters_of_saved(source), source.job.lora
    if not adapters:
        raise WeightsError("it has no adapters ([lora] was not set); remove --adapter")
    own = {name for adapter in adapters for name in (adapter.a, adapter.b)}
    weights = {name: entry.shape for name, entry in source.entries.items() if name not in own}
    freezing = Freezing(source.job.training, has_adapters=True)
    bias_rate = selection_bias_rate(source.job.model)

    def is_changed(name: str) -> bool:
        if freezing.trained_from([name], requires_grad=True) is not None:
            return True
        module, _, own_name = name.rpartition(".")
        if own_name in ("running_mean", "running_var"):  # a layer without parameters is never fixed
            return source.job.batchnorm.of_frozen == "update" or f"{module}.weight" not in weights
        return is_selection_bias(name) and bias_rate > 0

    if others := [name for name in weights if is_changed(name)]:
        reason = f"it changed {counted(len(others), 'tensor')} besides its adapters: {listed(others)}"
        raise WeightsError(f"{reason}; a folder of adapters would lack them: remove --adapter")
    shapes, pieces = file_places(source.job.model, weights, _rows(source, options), options.is_plain)
    targets = targets_of(adapters, shapes, pieces)
    entries, parts = [], dict[str, tuple[Target, int]]()
    for target in targets:
        of_target = target.shapes(target.rank)
        for index, (key, shape) in enumerate(zip(target.keys, of_target, strict=True)):
            entries.append(Entry(key, shape, source.entries[target.parts[0].adapter.a].dtype))
            parts[key] = target, index

    def read(entry: Entry) -> Tensor:
        target, index = parts[entry.name]
        return target.to_file(source.read)[index].to(entry.dtype).contiguous()

    recorded = None if source.manifest is None else source.manifest.base
    metadata = {} if recorded is None else {BASE: recorded.fingerprint.digest}
    num_bytes = write_tensors(folder, entries, read, file=ADAPTER_FILE, metadata=metadata)
    base = None if recorded is None else recorded.folder
    if source.base is not None:
        base = str(source.base.resolve())
    write_json(folder / ADAPTER_CONFIG_FILE, adapter_config(targets, lora, pieces, base))
    return len(entries), num_bytes


def _files_of_class(source: SavedModel, options: ExportOptions) -> _HuggingFaceFiles:
    """Return the files of a class of `transformers`: the tensors as its method `save_pretrained` writes them, and the
    `config.json` from which the class was built. Raises WeightsError."""
    model = source.job.model
    if options.vocab_size is not None:
        raise WeightsError("--vocab-size has no effect on a class of transformers; remove it")
    module: Any = build_model(model, source.job.training.seq_len).module
    entries, read = _published(module, source)
    return entries, read, {**model.args, "dtype": _dtype_name(source)}


def _published(module: Any, source: SavedModel) -> tuple[list[Entry], Callable[[Entry], Tensor]]:
    """Return the entries of the tensors that a class of `transformers` has in its files, and a function that reads the
    tensor of an entry.

    Several tensors may be converted together from the same parameters. The function keeps the converted tensors until
    they are requested, so that each parameter is read once. Raises WeightsError if the class would not read a tensor.
    """
    shapes = {name: attrgetter(name)(module).shape for name in source.entries}  # as in the class: () for scalars
    dtypes = {name: entry.dtype for name, entry in source.entries.items()}
    whole = {name: torch.empty(shape, dtype=dtypes[name], device="meta") for name, shape in shapes.items()}
    files = [Entry(name, tuple(t.shape), t.dtype) for name, t in in_published_format(module, whole).items()]
    in_files = {entry.name: FileTensor("", entry.shape, DTYPE_CODES[entry.dtype]) for entry in files}
    own_names: defaultdict[tuple[str, ...], list[str]] = defaultdict(list)
    for own_name, place in module.places_in_files(in_files, whole)[0].items():
        own_names[tuple(place.tensors)].append(own_name)
    group_of = {name: names for names in own_names for name in names}
    if lost := [name for name in in_files if name not in group_of]:
        reason = f"would not read {listed(lost)} from the exported files"
        raise WeightsError(f"{type(module).__name__} of the installed transformers {reason}")
    converted: dict[str, Tensor] = {}

    def read(entry: Entry) -> Tensor:
        if entry.name not in converted:
            converted.clear()
            names = own_names[group_of[entry.name]]
            own = {name: source.read(name).to(dtypes[name]).reshape(shapes[name]) for name in names}
            converted.update(in_published_format(module, own))
        return converted.pop(entry.name).contiguous()

    order = {name: index for index, name in enumerate(group_of)}
    return sorted(files, key=lambda entry: order[entry.name]), read


def _dtype_name(source: SavedModel) -> str:
    return str(source.widest_dtype).removeprefix("torch.")


def _without_shared(source: SavedModel) -> dict[str, Entry]:
    """Return the entries to write, by name. If the output layer shares the weight of the embedding, `output.weight` is
    omitted."""
    model = source.job.model
    if model.name in ARCHITECTURES and resolve_args(model.name, model.flavor, model.args).tied_by() is not None:
        return {name: entry for name, entry in source.entries.items() if name != "output.weight"}
    return dict(source.entries)


def _write_card(folder: Path, source: SavedModel, origin: Path, library: str) -> None:
    """Write the model card of an export: a README.md that records where the weights come from. `source`: the exported
    model. `origin`: the folder that was exported, for example a run folder. `library`: Hugging Face's name of the
    library that loads the export.

    Raises FileExistsError if the folder already has a README.md.
    """
    with (folder / "README.md").open("x", encoding="utf-8") as file:
        file.write("\n".join(_card_lines(source, origin, library)) + "\n")


def _card_lines(source: SavedModel, origin: Path, library: str) -> Iterator[str]:
    manifest = source.manifest
    base = None if manifest is None else manifest.base
    yield from ("---", f"library_name: {library}")
    if base is not None:
        yield f"base_model: {toml_value(base.folder)}"
    yield from ("---", "", f"# {source.job.job.name if manifest else origin.name}", "")
    yield from ("| | |", "|---|---|")
    yield _card_row("exported from", f"`{origin}`, {source.description}")
    if base is not None:
        yield _card_row("base", f"`{base.folder}`, fingerprint `{base.fingerprint.digest}`")
    elif source.base is not None:
        yield _card_row("base", f"`{source.base}`")
    yield _card_row("model", f"`{source.job.model.name}`, {source.num_parameters:,} elements in all tensors")
    if manifest is not None:
        yield _card_row("steps", f"{manifest.step:,} on {counted(manifest.world_size, 'rank')}")
        checkpoint = checkpoint_folder(origin) / checkpoint_name(manifest.step)
        samples = int(read_tensor(checkpoint, read_index(checkpoint)["progress.samples_seen"]))
        if source.job.data.unit != "images":
            length = source.job.training.seq_len
            yield _card_row("tokens", f"{samples * length:,} ({samples:,} samples of {length})")
        else:
            yield _card_row("samples", f"{samples:,}")
        if manifest.validation_loss is not None:
            yield _card_row("validation loss", f"{manifest.validation_loss:.4f}")
        for section, fingerprint in manifest.data.items():
            yield _card_row(section, f"{_named(source, section)}fingerprint `{fingerprint.digest}`")
        yield _card_row("trained with", ", ".join(f"{name} {version}" for name, version in manifest.versions.items()))
        yield _card_row("command", f"`{manifest.command}`")
        if manifest.commit is not None:
            yield _card_row("commit", f"`{manifest.commit}`")
        yield _card_row("config", f"SHA-256 `{manifest.config_digest}`")
    yield _card_row("exported with", f"titan_launch {__version__}: `{shlex.join(['titan-launch', *sys.argv[1:]])}`")
    if manifest is not None:
        yield from ("", "## Job", "", "```toml")
        for section, table in source.record.items():
            yield from (f"[{section}]", *(f"{key} = {toml_value(value)}" for key, value in table.items()))
        yield "```"


def _card_row(name: str, text: str) -> str:
    return f"| {name} | {text.replace('|', '&#124;')} |"


def _named(source: SavedModel, section: str) -> str:
    """Return the path, or else the kind, of the data source in `section` of the job, followed by a comma; "" if the job
    has no such source. `section`: for example `data.sources.0`."""
    table: Any = source.record
    for part in section.split("."):
        table = table[int(part)] if part.isdecimal() else table.get(part, {})
    named = isinstance(table, dict) and (table.get("path") or table.get("kind"))
    return f"`{named}`, " if named else ""
