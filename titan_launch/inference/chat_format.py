"""The chat template of a trained model, and the tokens or texts that end its answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from titan_launch.config.job import JobConfig
from titan_launch.config.sections.data import ChatData, single_sources
from titan_launch.core.errors import ConfigError, KeyPath
from titan_launch.data.corpora.chat_template import ChatTemplate, load_template
from titan_launch.data.tokenizers import Tokenizer
from titan_launch.inference.saved_model import SavedModel
from titan_launch.models.huggingface.files import WeightsError

OPTION: KeyPath = ("--template",)
"""The option that names a template. Errors about the template name this option as their key."""


@dataclass(frozen=True)
class ChatOptions:
    """The chat format that the command line sets. For options that are None or empty, the values of the run apply."""

    template: str | None = None
    """A Jinja file, or a name as in `data.template`."""

    template_args: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the template, added to those of the run."""

    date: str | None = None
    """The date that `strftime_now` returns in the template, as `YYYY-MM-DD`."""


def find_template(saved: SavedModel, tokenizer: Tokenizer, options: ChatOptions) -> ChatTemplate:
    """Return the chat template of a model, from the first of these places that has a template: the command line, the
    run's chat data, the tokenizer's folder, and the Hugging Face folder of the weights. Raises WeightsError if the run
    has several chat formats and `options.template` is None. Raises WeightsError or ConfigError if there is no template,
    or if the template cannot be used."""
    data = template_section(saved.job, options.template is not None)
    given = {"template": options.template, "date": options.date}
    changes = {name: value for name, value in given.items() if value is not None}
    data = data.model_copy(update={**changes, "template_args": {**data.template_args, **options.template_args}})
    is_of_run = options.template is None and data.template is not None
    try:
        return load_template(data, tokenizer, ("data", "template") if is_of_run else OPTION, saved.companions)
    except ConfigError as error:
        if not is_of_run:
            raise
        raise WeightsError(f"{error}; --template replaces the template of the run") from None


def template_section(job: JobConfig, has_template: bool = False) -> ChatData:
    """Return the section of the chat data on which a run was trained; for a mixture, the first such section. Without
    chat data, return the defaults. `has_template`: True if the user named a template. If False, raises WeightsError for
    a run with several chat formats."""
    sections = [source for source in single_sources(job.data).values() if isinstance(source, ChatData)]
    formats = [(section.template, section.template_args, section.date) for section in sections]
    if any(each != formats[0] for each in formats) and not has_template:
        raise WeightsError("its data has chats in several formats; choose the chat template with --template")
    return sections[0] if sections else ChatData(kind="chat", path="")


def ends_of_answers(template: ChatTemplate | None, tokenizer: Tokenizer) -> tuple[frozenset[int], tuple[str, ...]]:
    """Return (tokens, texts) that end an answer. The template decides how the last answer of a chat ends: with one
    token, which is returned as a token, or with several, which are returned as a text. Both are empty if the template
    writes no end, or if there is no template. Raises ConfigError if the template cannot be used."""
    end = "" if template is None else str(template.call("end_of_answer"))
    tokens, _ = tokenizer.encode_chat(end)
    if len(tokens) == 1:
        return frozenset(tokens), ()
    return frozenset(), (end,) if end else ()
