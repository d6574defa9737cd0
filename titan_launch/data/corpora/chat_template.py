"""Chat templates: Jinja templates that turn the messages of a chat into text."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from titan_launch.config.sections.data import ChatData
from titan_launch.config.sections.tokenizer import SETTINGS_FILE, TEMPLATE_FILE, TOKENIZER_FILE, read_settings
from titan_launch.core.errors import UNSET, KeyPath, config_error, format_key
from titan_launch.core.files import MIB, read_regular
from titan_launch.core.limited_process import CallError, LimitedObject, Limits
from titan_launch.core.packages import install, not_installed
from titan_launch.core.terminal import one_line
from titan_launch.data.chat_rendering import Message, Renderer, Span
from titan_launch.data.tokenizers import Tokenizer

TEMPLATES = {
    "chatml": (
        "{%- for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
        "{%- if message['role'] == 'assistant' %}"
        "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
        "{%- else %}{{ message['content'] + '<|im_end|>' }}{%- endif %}{{ '\\n' }}{%- endfor %}"
        "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}"
    )
}
"""Templates of this package, by the name that the key `template` gives."""

_KNOWN = " or ".join(f'"{name}"' for name in TEMPLATES)

_OLDEST_JINJA = (3, 1, 6)
"""Oldest release of jinja2 that may be used. Templates can leave the sandbox of earlier releases (CVE-2025-27516)."""

_MOST_BYTES = MIB
"""Largest size of a template file in bytes. Published templates have up to 50 kB."""

_SECONDS_PER_MESSAGE = 0.01
"""Additional seconds of CPU time for each message of a chat, because the chat is rendered several times for each
answer."""


@dataclass(frozen=True)
class ChatTemplate:
    """The template that a key of the job file names. Unless `is_trusted`, it runs in the helper process
    (`core/limited_process.py`), with limits on memory and CPU time."""

    renderer: Renderer
    key: KeyPath
    value: str | None
    """Value of the key; None if the template comes from a tokenizer's folder."""

    is_trusted: bool
    """True if the template and the special tokens are those of this package, which need no limits."""

    def render(
        self, messages: Sequence[Message], tools: Any, train_on: Literal["assistant", "last", "all"]
    ) -> tuple[str, list[Span]]:
        """Return the text of a chat, and its parts that are targets (see `Renderer.render`). Raises the errors of
        `call`."""
        text, spans = self.call("render", messages, tools, train_on, num_messages=len(messages))
        return text, spans

    def prompt(self, messages: Sequence[Message], allows_special: bool = False) -> str:
        """Return the text of a chat up to the answer that a model is to generate (see `Renderer.prompt`). Raises the
        errors of `call`."""
        return str(self.call("prompt", messages, allows_special, num_messages=len(messages)))

    def call(self, method: str, *arguments: Any, num_messages: int = 0) -> Any:
        """Return the result of a method of the renderer. Raises RecordError for a chat that the renderer refuses.
        Raises ConfigError on `key` if the call fails for another reason, or exceeds a limit. `num_messages`: number of
        messages of the chat. The more messages, the more CPU time the call may take."""
        if self.is_trusted:
            return getattr(self.renderer, method)(*arguments)
        try:
            return self._limited.call(method, *arguments, seconds=_SECONDS_PER_MESSAGE * num_messages)
        except CallError as error:
            reason = f"the template {error}" if error.is_stopped else f"cannot be used: {error}"
            value = UNSET if self.value is None else self.value
            raise config_error(self.key, f"{reason}; set {_KNOWN}, or another Jinja file", value) from None

    def __getstate__(self) -> dict[str, Any]:
        """Return the fields without `_limited`, which belongs to the helper process of this process."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    @cached_property
    def _limited(self) -> LimitedObject:
        renderer = self.renderer
        limits = Limits(memory_per_byte=600, answer=MIB + 16 * len(renderer.text), answer_per_byte=16)
        return LimitedObject(limits, Renderer, *renderer.__getstate__().values())


def load_template(
    config: ChatData, tokenizer: Tokenizer, key: KeyPath, further_folder: Path | None = None
) -> ChatTemplate:
    """Return the template of chats, with the variables and the date that `config` sets. Without the key `template`, the
    template is in the tokenizer's folder or, if that folder has none, in `further_folder`. `key`: path of the key
    `template`. Raises ConfigError on `key`."""
    today = date.fromisoformat(config.date)
    dated = {"date_string": today.strftime("%d %b %Y")} if dict(config.changed("date")) else {}
    folder, template = tokenizer.folder, config.template
    if template is None:
        text = _of_folders([found for found in (folder, further_folder) if found is not None], key)
    else:
        text = TEMPLATES.get(template) or _read(Path(template), key, template)
    settings = {} if folder is None else read_settings(folder, key, UNSET)
    tokens = {name: _content(value) for name, value in settings.items() if name.endswith("_token")}
    special = {name: token for name, token in tokens.items() if token}
    value = UNSET if template is None else template
    if folder is not None:
        _check_tokens(text, settings, {**special, **config.template_args}, tokenizer, key, value)
    renderer = Renderer(text, {**special, **dated, **config.template_args}, today, tokenizer.special_tokens)
    _check_jinja(key)
    loaded = ChatTemplate(renderer, key, template, is_trusted=folder is None and template in TEMPLATES)
    if error := loaded.call("syntax_error"):
        raise config_error(key, f"is not a Jinja template: {error}; correct it, or set {_KNOWN}", value)
    return loaded


def _of_folders(folders: Sequence[Path], key: KeyPath) -> str:
    """Return the first template in the folders of tokenizers: a file, or the setting `chat_template` of the tokenizer,
    which is a string or a list with the entry `default`. Raises ConfigError on `key` if no folder has a template."""
    for folder in folders:
        if os.path.lexists(folder / TEMPLATE_FILE):
            return _read(folder / TEMPLATE_FILE, key, None)
        found = read_settings(folder, key, UNSET).get("chat_template")
        if isinstance(found, list):
            named = (item for item in found if isinstance(item, dict) and item.get("name") == "default")
            found = next(named, {}).get("template")
        if isinstance(found, str):
            return found
    where = str(folders[0]) if folders else 'the tokenizer "bytes"'
    remedy = (
        "or set tokenizer.path (prepare: --tokenizer) to a folder with a template, such as the folder of a chat model"
    )
    raise config_error(key, f'must be "chatml" or a Jinja file, because {where} has no chat template; {remedy}')


def _read(path: Path, key: KeyPath, value: str | None) -> str:
    try:
        return read_regular(path, _MOST_BYTES).decode()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise config_error(key, f"cannot read {path}: {reason}; set {_KNOWN}, or a Jinja file", value) from None


def _check_tokens(
    text: str,
    settings: Mapping[str, Any],
    variables: Mapping[str, Any],
    tokenizer: Tokenizer,
    key: KeyPath,
    value: object,
) -> None:
    """Raise ConfigError if the template `text` writes a token that `tokenizer.json` lacks, but `transformers` would
    add: the default of a class, or a token of the settings. `settings`: the result of `read_settings`. `variables`:
    the named special tokens and the variables of the job. `value`: value of `key`."""
    has_defaults = settings.get("tokenizer_class") not in ("PreTrainedTokenizerFast", "TokenizersBackend")
    for name in ("bos_token", "eos_token") if has_defaults else ():
        if name not in {*settings, *variables} and _is_read(name, text):
            place = f"{tokenizer.folder}/{SETTINGS_FILE} does not set it, and only transformers knows its default"
            variable = f"--template-arg {name}" if len(key) == 1 else format_key((*key[:-1], "template_args", name))
            remedy = f'write the token into this file, or set {variable} ("" for no token)'
            raise config_error(key, f"reads {name}, but {place}; {remedy}", value)
    written = "\n".join([text, *(str(value) for name, value in variables.items() if _is_read(name, text))])
    for token in _tokens_of(settings):
        if token in written and len(tokenizer.encode_chat(token)[0]) != 1:
            reason = f'writes the token "{one_line(token)}", which is not among the "added_tokens" of {TOKENIZER_FILE}'
            remedy = f"load {tokenizer.folder} with AutoTokenizer of transformers, and write it with save_pretrained"
            raise config_error(key, f"{reason}; {remedy}", value)


def _is_read(name: str, text: str) -> bool:
    """Return True if the template `text` contains the variable `name`."""
    return re.search(rf"\b{re.escape(name)}\b", text) is not None


def _tokens_of(settings: Mapping[str, Any]) -> list[str]:
    """Return the tokens that `transformers` adds to a tokenizer with these settings."""
    found = [value for name, value in settings.items() if name.endswith("_token")]
    for name in ("added_tokens_decoder", "extra_special_tokens", "additional_special_tokens"):
        group = settings.get(name)
        found += group.values() if isinstance(group, dict) else group if isinstance(group, list) else []
    return [token for token in map(_content, found) if token]


def _content(value: Any) -> str:
    """Return the text of a special token, which is a string or an object with options; "" for any other value."""
    found = value.get("content") if isinstance(value, dict) else value
    return found if isinstance(found, str) else ""


def _check_jinja(key: KeyPath) -> None:
    """Raise ConfigError if jinja2 is missing, or if its sandbox is not safe."""
    try:
        import jinja2  # noqa: F401 - optional
    except ImportError:
        raise config_error(key, not_installed("jinja2")) from None
    release = version("jinja2")
    if tuple(map(int, re.findall(r"\d+", release)[:3])) < _OLDEST_JINJA:
        oldest = ".".join(map(str, _OLDEST_JINJA))
        reason = f"needs jinja2 {oldest} or later, because templates can leave the sandbox of {release}"
        raise config_error(key, f"{reason}: {install('jinja2')}")
