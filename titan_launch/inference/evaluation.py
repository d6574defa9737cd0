"""Tasks of lm-evaluation-harness on a trained model, in this process. Only this module imports `lm_eval`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lm_eval import evaluator
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, handle_non_serializable, make_disjoint_window, make_table
from torch import Tensor
from tqdm import tqdm

from titan_launch.core.errors import UserError, did_you_mean
from titan_launch.core.fingerprint import commit_of
from titan_launch.core.patches import replaced
from titan_launch.core.terminal import say
from titan_launch.data.chat_rendering import RecordError
from titan_launch.inference.generation import Sampling, TextStream, generate_tokens, logits_of
from titan_launch.inference.language_model import LanguageModel

Scored = tuple[tuple[str, str] | None, list[int], list[int]]
"""A request to score a continuation: (context, continuation) as texts or None, tokens of the context, and tokens of the
continuation."""


class ChatForm(NamedTuple):
    """The way in which a document of a task becomes a chat."""

    system: str | None
    """Text before the description of the task in the system message."""

    is_multiturn: bool
    """True: each few-shot example in a prompt is a separate turn. False: all examples are in the user's message."""


class EvaluatedModel(TemplateLM):
    """A trained model behind the interface that lm-evaluation-harness calls.

    Texts that are too long lose tokens at their beginning, as in `hf`, the harness's own model class.
    """

    def __init__(self, model: LanguageModel, batch_size: int):
        """`batch_size`: sequences that are scored at a time. If `model` has a chat template, all texts to encode must
        come from `apply_chat_template`."""
        super().__init__()
        self.model = model
        self.batch_size = batch_size
        self._has_refused_system = False

    @property
    def eot_token_id(self) -> int:
        return self.model.tokenizer.end_of_document

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without context: the token that begins a document or, without such a token, the
        end-of-document token."""
        return self.model.begin[0] if self.model.begin else self.eot_token_id

    @property
    def tokenizer_name(self) -> str:
        """A key that identifies the tokenizer and the chat template, for the harness's cache of requests."""
        return f"{self.model.tokenizer.digest} {self.chat_template()}"

    def chat_template(self, chat_template: bool | str = False) -> str:
        return "" if self.model.template is None else self.model.template.renderer.text

    def apply_chat_template(self, chat_history: Sequence[Mapping[str, str]], add_generation_prompt: bool = True) -> str:
        """Return the text of a chat up to the answer (see `Renderer.prompt`). Raises UserError if the template refuses
        the chat. `add_generation_prompt` has no effect: the role of the last message decides how the text ends.

        As in the harness's model class `hf`, names of special tokens in documents become these tokens, and system
        messages are removed if the template refuses them.
        """
        assert self.model.template is not None
        messages = list(chat_history)
        try:
            return self.model.template.prompt(messages, allows_special=True)
        except RecordError as error:
            others = [message for message in messages if message["role"] != "system"]
            if len(others) == len(messages):
                raise UserError(f"error: --chat: a document of a task is {error}") from None
        text = self.apply_chat_template(others)
        if not self._has_refused_system:
            self._has_refused_system = True
            say("note: the chat template refuses system messages, so the documents have none", sys.stderr)
        return text

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Return the tokens of a text. Without a chat template, the first token is the token that begins a document, if
        there is one.

        With a chat template, `string` is a rendered text, which contains its own first token, and names of special
        tokens become these tokens. With `add_special_tokens=False`, the text is plain text, and no token is added
        before it.
        """
        model = self.model
        if add_special_tokens is False:
            return model.tokenizer.encode(string)
        return model.encode(string) if model.template is None else model.tokenizer.encode_chat(string)[0]

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of each text. A long text is divided into windows that fit into the model's longest
        sequence, and each token is scored once."""
        windows: list[Scored] = []
        owners: list[int] = []
        for index, request in enumerate(requests):
            tokens = self.model.encode(request.args[0])  # the harness passes this text without the chat template
            for pair in get_rolling_token_windows(tokens, self.prefix_token_id, self.model.max_tokens, context_len=1):
                windows.append((None, *make_disjoint_window(pair)))
                owners.append(index)
        sums = [0.0] * len(requests)
        for index, (score, _) in zip(owners, self._loglikelihood_tokens(windows, disable_tqdm), strict=True):
            sums[index] += score
        return sums

    @torch.inference_mode()
    def _loglikelihood_tokens(
        self, requests: Sequence[Scored], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """Return the log-likelihood of each continuation, and True if greedy generation would return it."""
        results: list[tuple[float, bool]] = [(0.0, True)] * len(requests)
        longest_first = sorted(range(len(requests)), key=lambda index: -len(requests[index][1] + requests[index][2]))
        bar = tqdm(total=len(requests), desc="log-likelihoods", disable=disable_tqdm)
        for start in range(0, len(requests), self.batch_size):
            batch = longest_first[start : start + self.batch_size]
            tokens = [(requests[index][1] + requests[index][2])[-(self.model.max_tokens + 1) :] for index in batch]
            # Sequences end with padding, to which no earlier token attends.
            inputs = torch.zeros(len(batch), len(tokens[0]) - 1, dtype=torch.int64)
            for row, sequence in zip(inputs, tokens, strict=True):
                row[: len(sequence) - 1] = torch.tensor(sequence[:-1])
            self.model.make_room(inputs.shape[1])
            logits = logits_of(self.model.module, inputs.to(self.model.device))
            for index, sequence, of_sequence in zip(batch, tokens, logits, strict=True):
                wanted = torch.tensor(requests[index][2][-(len(sequence) - 1) :], device=logits.device)
                results[index] = _score(of_sequence[len(sequence) - 1 - len(wanted) : len(sequence) - 1], wanted)
            bar.update(len(batch))
        bar.close()
        return results

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return the text that the model generates after the context of each request, up to the first stop text. Raises
        UserError if the tokens that a task generates leave no room for a context."""
        return [self._generate(*request.args) for request in tqdm(requests, desc="generation", disable=disable_tqdm)]

    def _generate(self, context: str, options: Mapping[str, Any]) -> str:
        given = normalize_gen_kwargs(dict(options))
        most, longest = given["max_gen_toks"], self.model.max_tokens
        if most >= longest:
            room = f"the model takes {longest} at most, including the context"
            reason = f"a task generates up to {most} tokens, but {room}"
            raise UserError(f"error: {reason}; set max_gen_toks in generation_kwargs of the task")
        tokens = self.tok_encode(context)[most - longest :] or [self.prefix_token_id]
        temperature = given.get("temperature", 1.0 if given["do_sample"] else 0.0)
        sampling = Sampling(temperature, given.get("top_k") or None, given.get("top_p", 1.0))
        stop = [text for text in (*given["until"], *self.model.end_texts) if text]
        generator = torch.Generator().manual_seed(0)
        stream = TextStream(self.model.tokenizer.decode, tokens if self.model.template is None else (), stop)
        return "".join(stream.pieces(generate_tokens(self.model, tokens, most, sampling, generator)))


def _score(logits: Tensor, wanted: Tensor) -> tuple[float, bool]:
    """Return the log-likelihood of the tokens `wanted`, and True if each of them has the largest logit."""
    logits = logits.float()
    scores = logits.log_softmax(-1).gather(-1, wanted[:, None])
    return float(scores.sum()), bool((logits.argmax(-1) == wanted).all())


def evaluate(
    evaluated: EvaluatedModel,
    tasks: Sequence[str],
    limit: int | None = None,
    num_fewshot: int | None = None,
    include_path: Path | None = None,
    chat: ChatForm | None = None,
) -> dict[str, Any]:
    """Return the results of the harness on some tasks. `limit`: number of documents per task; None: all. `num_fewshot`:
    number of few-shot examples; None: the task's own number. `include_path`: a folder with YAML files of the user's own
    tasks. `chat`: only for a model with a chat template; None: documents are not chats.

    Raises UserError for unknown tasks, for tasks whose generated tokens leave no room for a context, and for documents
    that the chat template refuses.
    """
    form = {} if chat is None else {"system_instruction": chat.system, "fewshot_as_multiturn": chat.is_multiturn}
    manager = _find_tasks(tasks, include_path)
    with replaced(evaluator, "get_git_commit_hash", partial(commit_of, Path.cwd())):  # lm_eval prints git's error
        results: dict[str, Any] = evaluator.simple_evaluate(
            evaluated,
            tasks=list(tasks),
            limit=limit,
            num_fewshot=num_fewshot,
            task_manager=manager,
            log_samples=False,
            apply_chat_template=chat is not None,
            **form,
        )
    results["config"].update(model=evaluated.model.description, apply_chat_template=chat is not None, **form)
    return results


def _find_tasks(tasks: Sequence[str], include_path: Path | None) -> TaskManager:
    """Return a task manager that knows all `tasks`. If the user's folder `include_path` lacks a task, the harness's own
    14,000 tasks are read too, which takes seconds. Raises UserError for an unknown task."""
    for has_defaults in (False, True):
        manager = TaskManager(include_path=include_path, include_defaults=has_defaults)
        unknown = [name for name in tasks if not manager.match_tasks([name])]
        if not unknown:
            return manager
    hint = did_you_mean(unknown[0], manager.all_tasks)
    reason = f'lm_eval has no task "{unknown[0]}"{hint}'
    raise UserError(f"error: --tasks: {reason}; --include-path names a folder with tasks of your own")


def tables(results: Mapping[str, Any]) -> Iterator[str]:
    """Yield the table of tasks, and the table of groups if there are groups, in Markdown."""
    yield make_table(results)
    if results.get("groups"):
        yield make_table(results, "groups")


def as_json(results: Mapping[str, Any]) -> str:
    return json.dumps(results, indent=2, default=handle_non_serializable, ensure_ascii=False) + "\n"
