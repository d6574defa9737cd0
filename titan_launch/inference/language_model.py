"""A trained language model in one process: its module, its tokenizer, and its longest sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from titan_launch.config.job import JobConfig
from titan_launch.config.rules.model import flavor_exists, model_exists
from titan_launch.config.sections.model import HUGGINGFACE
from titan_launch.config.sections.tokenizer import TOKENIZER_FILE, TokenizerConfig
from titan_launch.core.errors import UserError, listed
from titan_launch.core.import_string import FOLDERS_CHOOSE_NO_CODE, refuse_imports_from
from titan_launch.core.terminal import counted
from titan_launch.data.chat_rendering import Message, RecordError
from titan_launch.data.corpora.chat_template import ChatTemplate
from titan_launch.data.corpora.records import utf8
from titan_launch.data.tokenizers import Tokenizer, build_tokenizer, tokenizer_beside
from titan_launch.inference.chat_format import ChatOptions, ends_of_answers, find_template
from titan_launch.inference.saved_model import SavedModel, merged
from titan_launch.models.architectures import known_args, labels_taken, unit_taken, vocabulary_taken
from titan_launch.models.build import BuiltModel, build_model
from titan_launch.models.decoder.layers import Attention, LatentAttention, RotaryEmbedding
from titan_launch.models.factory import HostBuild
from titan_launch.models.host_values import HostValues
from titan_launch.models.huggingface.config_json import longest_sequence, read_json
from titan_launch.models.huggingface.files import CONFIG_FILE, GENERATION_FILE, WeightsError
from titan_launch.models.init import initialize
from titan_launch.models.initializers import own_tensors
from titan_launch.plan.hardware import GIB, free_memory_gib
from titan_launch.plan.types import full_name


@dataclass(frozen=True)
class LanguageModel:
    """A language model on a device, with its weights, and the other values that generation and evaluation need."""

    module: nn.Module
    """The model in evaluation mode, without gradients."""

    tokenizer: Tokenizer
    begin: tuple[int, ...]
    """Tokens before the first token of a text: none, or the token that begins a document."""

    max_tokens: int
    """Number of tokens of the longest sequence that the model takes."""

    end_tokens: frozenset[int]
    """Tokens after which generation stops."""

    device: torch.device
    description: str
    template: ChatTemplate | None = None
    """The chat template; None if the model was loaded without one."""

    end_texts: tuple[str, ...] = ()
    """Texts that end an answer, if the chat template ends an answer with several tokens. If it ends an answer with one
    token, this token is in `end_tokens`."""

    def make_room(self, num_tokens: int) -> None:
        """Extend the tables of rotary embeddings, so that sequences can have `num_tokens` tokens."""
        for child in self.module.modules():
            if isinstance(child, RotaryEmbedding):
                child.extend(num_tokens)

    def encode(self, text: str, has_special_tokens: bool = False) -> list[int]:
        """Return the tokens of a text, after the tokens `begin`. `has_special_tokens`: True if names of special tokens
        in the text become these tokens. If the text then begins with the tokens `begin`, they are not repeated."""
        if not has_special_tokens:
            return [*self.begin, *self.tokenizer.encode(text)]
        tokens, _ = self.tokenizer.encode_chat(text)
        return tokens if tokens[: len(self.begin)] == [*self.begin] else [*self.begin, *tokens]

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Return the tokens of a chat up to the beginning of the next answer. Raises UserError if the template refuses
        the messages, or if a message contains the name of a special token."""
        assert self.template is not None
        try:
            text = self.template.prompt(messages)
            utf8(text)  # raises RecordError
        except RecordError as error:
            raise UserError(f"error: the conversation is {error}") from None
        tokens, _ = self.tokenizer.encode_chat(text)
        return tokens


def load_language_model(
    saved: SavedModel,
    source: Path,
    device: torch.device,
    dtype: torch.dtype | None = None,
    model: str | None = None,
    chat: ChatOptions | None = None,
) -> LanguageModel:
    """Build a saved model on a device, and read its weights. `source`: the folder of the model.

    `dtype`: dtype of the parameters, by default the widest dtype of the saved tensors. `model`: value of `--model`. A
    user's own model is loaded only if this value names its factory, because a folder must not choose the code that
    runs. `chat`: options of the chat template; None: no template is loaded. Raises WeightsError, ConfigError and
    UserError.
    """
    saved = merged(saved)
    job = saved.job
    _check_model(job, model)
    refuse_imports_from([source], Path(job.job.dump_folder))
    tokenizer = build_tokenizer(tokenizer_of_model(saved))
    if (labels := labels_taken(job.model)) is not None:
        found = f"its model has {counted(labels, 'output')} (num_labels) in place of a vocabulary"
        raise WeightsError(f"{found}, so it writes no text")
    vocabulary = vocabulary_taken(job.model)
    if vocabulary is not None and vocabulary < tokenizer.vocab_size:
        tokens = f"the tokenizer has {tokenizer.vocab_size} tokens"
        raise WeightsError(f"the vocabulary of its model has {vocabulary} tokens, but {tokens}; give a model for text")
    template = None if chat is None else find_template(saved, tokenizer, chat)
    of_template, end_texts = ends_of_answers(template, tokenizer)
    end_tokens = _end_tokens(saved, tokenizer) | of_template
    max_tokens = _longest(saved)
    dtype = dtype or saved.widest_dtype
    module = _build(saved, source, device, dtype, max_tokens)
    begin = tuple(map(int, tokenizer.encode_documents([b""])[0][:-1]))
    computed = f"{str(dtype).removeprefix('torch.')} on {device}"
    description = f"{source}, {saved.description}: {job.model.name}, {computed}"
    return LanguageModel(module, tokenizer, begin, max_tokens, end_tokens, device, description, template, end_texts)


def _check_model(job: JobConfig, model: str | None) -> None:
    for problem in (*model_exists(job), *flavor_exists(job)):
        raise WeightsError(f'its model.{problem.key[-1]} is "{problem.value}": {problem.reason}')
    name = job.model.name
    if ":" in name and name != model:
        raise WeightsError(f"its model is the factory {name}, and {FOLDERS_CHOOSE_NO_CODE}; add --model {name}")
    if model not in (None, name):
        raise WeightsError(f"its model is {name}, not {model}; remove --model")
    if (unit_taken(job.model) or job.data.unit) == "images":
        raise WeightsError(f"its model, {name}, takes images; give the folder of a language model")
    if job.data.own_vocabulary() is not None:
        raise WeightsError(f'its model was trained on data.kind = "{job.data.kind}", which is not text')


def tokenizer_of_model(saved: SavedModel) -> TokenizerConfig:
    """Return the configuration of the job's tokenizer. For a folder without a job, return the configuration of the
    tokenizer among its Hugging Face files. Raises WeightsError if there is no tokenizer, and ConfigError for a file
    that cannot be used."""
    if "tokenizer" in saved.job.model_fields_set:
        return saved.job.tokenizer
    found = None if saved.companions is None else tokenizer_beside(saved.companions)
    if found is None:
        raise WeightsError(f"it has no {TOKENIZER_FILE}; copy the file of the model's tokenizer into the folder")
    return found


def _end_tokens(saved: SavedModel, tokenizer: Tokenizer) -> frozenset[int]:
    """Return the end-of-document token, and the tokens at which `transformers` stops: `eos_token_id` in the
    `generation_config.json` that came with the weights or, if that file has none, in the `config.json` beside it."""
    folder = saved.companions
    files = [] if folder is None else [folder / GENERATION_FILE, folder / CONFIG_FILE]
    for file in filter(Path.exists, files):
        found: Any = read_json(file).get("eos_token_id")
        tokens = [token for token in (found if isinstance(found, list) else [found]) if isinstance(token, int)]
        if tokens:
            return frozenset({tokenizer.end_of_document, *tokens})
    return frozenset({tokenizer.end_of_document})


def _longest(saved: SavedModel) -> int:
    """Return the number of tokens of the longest sequence: the rows of the model's table of positions, else the limit
    in Hugging Face's `config.json`, else `training.seq_len`."""
    model = saved.job.model
    args = known_args(model)
    limit = None if args is None else args.longest_sequence()
    config = model.args if model.name == HUGGINGFACE else {}
    if not config and saved.companions is not None:
        config = read_json(saved.companions / CONFIG_FILE)
    return limit[1] if limit is not None else longest_sequence(config) or saved.job.training.seq_len


_FIRST_ROWS = 8192
"""Largest initial number of rows in the tables of rotary embeddings. `make_room` extends the tables for longer
sequences. A `config.json` may allow sequences of millions of tokens."""


def _build(saved: SavedModel, source: Path, device: torch.device, dtype: torch.dtype, max_tokens: int) -> nn.Module:
    model = saved.job.model
    if model.name == HUGGINGFACE:  # with `weights`, the class does not initialize its parameters
        model = model.model_copy(update={"weights": str(source)})
    host = HostBuild(seed=0, free_bytes=int(free_memory_gib() * GIB))
    built = build_model(model, min(max_tokens, _FIRST_ROWS), host)
    needed = sum(tensor.numel() for tensor in built.module.parameters()) * dtype.itemsize
    if device.type == "cpu" and needed > host.free_bytes:
        free = f"{host.free_bytes / GIB:,.1f} GiB are free"
        remedy = "free memory, or set a smaller --dtype"
        raise WeightsError(f"its parameters need {needed / GIB:,.1f} GiB of memory, but {free}; {remedy}")
    if device.type == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)  # cuDNN takes up to 0.5 s for each new sequence length
    _allocate(built.module, device, dtype)
    _fill(built, saved, device)
    for child in built.module.modules():
        if isinstance(child, (Attention, LatentAttention)):
            child.options = replace(child.options, has_many_lengths=True)
    return built.module.eval()


def _allocate(model: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Replace a model's meta tensors by uninitialized tensors on `device`. Floating-point parameters get `dtype`,
    except those of BatchNorm. All other tensors keep their dtypes. Shared tensors stay shared."""
    allocated: dict[Tensor, Tensor] = {}
    for module in model.modules():
        is_batchnorm = isinstance(module, nn.modules.batchnorm._BatchNorm)
        for name, tensor in own_tensors(module).items():
            is_parameter = name in module._parameters
            if tensor not in allocated:
                is_cast = is_parameter and tensor.is_floating_point() and not is_batchnorm
                new = torch.empty(tensor.shape, dtype=dtype if is_cast else tensor.dtype, device=device)
                allocated[tensor] = nn.Parameter(new, requires_grad=False) if is_parameter else new
            table: dict[str, Any] = module._parameters if is_parameter else module._buffers
            table[name] = allocated[tensor]


@torch.no_grad()
def _fill(built: BuiltModel, saved: SavedModel, device: torch.device) -> None:
    """Copy the saved tensors into a model after `_allocate`. Tensors that are not saved, such as tables of positions,
    get their initial values. Raises WeightsError if a parameter is not saved, or if a saved tensor has no counterpart
    of the same name and shape in the model."""
    tensors = {
        full_name(path, name): tensor
        for path, module in built.module.named_modules(remove_duplicate=False)
        for name, tensor in own_tensors(module).items()
    }
    if isinstance(built.initializer, HostValues):
        initialize(built.module, built.initializer, 0, device)
    else:
        for path, module in built.module.named_modules():
            if any(full_name(path, name) not in saved.entries for name in own_tensors(module)):
                built.initializer(module, path)
    filled: set[int] = set()
    for name, entry in saved.entries.items():
        if name not in tensors or tuple(tensors[name].shape) != entry.shape:
            found = f"it has the tensor {name} with the shape {list(entry.shape)}"
            raise WeightsError(f"{found}, but the model has no tensor with this name and shape")
        tensors[name].copy_(saved.read(name))
        filled.add(id(tensors[name]))
    parameters = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, nn.Parameter)}
    if missing := [name for name, parameter in parameters.items() if id(parameter) not in filled]:
        raise WeightsError(f"it lacks these parameters of the model: {listed(missing)}")


def device_of(name: str | None) -> torch.device:
    """Return the device with the name `name`. None: the GPU if there is one, else the CPU. Raises UserError if `name`
    is `cuda` and there is no GPU."""
    has_gpu = torch.cuda.is_available()
    if name == "cuda" and not has_gpu:
        raise UserError("error: --device cuda: PyTorch finds no GPU; use --device cpu")
    return torch.device(name or ("cuda" if has_gpu else "cpu"))
