"""Documents within samples: the positions of their tokens, and the arguments that tell a model's forward where
documents begin.

A forward gets the documents of a batch in one of two ways:

    model                          argument
    of this package, or your own   documents     the document number of each token
    of transformers                position_ids  the position of each token in its document
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan_launch.core.errors import KeyPath, config_error
from titan_launch.core.patches import replaced

_DTYPE = torch.int32
"""Dtype of the results of `positions_in`. The positions that `transformers` makes are int64."""


def positions_in(documents: Tensor) -> Tensor:
    """Return the position of each token in its document, counted from 0: int32 (batch, tokens). `documents`: the
    document number of each token (batch, tokens). A document begins where the number changes."""
    index = torch.arange(documents.shape[1], dtype=_DTYPE, device=documents.device)
    starts = index[1:].where(documents[:, 1:] != documents[:, :-1], 0).cummax(-1).values
    return index - F.pad(starts, (1, 0))


def document_arguments(model: nn.Module, documents: Tensor | None) -> dict[str, Tensor]:
    """Return a dict with the keyword argument that tells the model's forward which document each token belongs to. The
    dict is empty if `documents` is None."""
    if documents is None:
        return {}
    if _takes_positions(model):
        return {"position_ids": positions_in(documents)}
    return {"documents": documents}


def _takes_positions(model: nn.Module) -> bool:
    return getattr(model, "separates_by_positions", False)


def separate_by_positions(model: Any) -> None:
    """Let a model of `transformers` separate documents by the `position_ids` that `positions_in` returns.

    This function replaces `find_packed_sequence_indices` of `transformers` in this process. Attention masks of all
    models of `transformers` then separate documents if the positions are int32, as from `positions_in`. With int64
    positions, which `transformers` makes, masks do not separate documents.
    """
    from transformers import masking_utils

    model.separates_by_positions = True
    # The original function compares the values of the positions, so every forward would wait for the device. In a
    # trace, on fake tensors, the original function would assume several documents. Attention would then use another
    # kernel than in a run.
    masking_utils.find_packed_sequence_indices = _documents_at


def _documents_at(position_ids: Tensor) -> Tensor | None:
    """Return the document number of each token; None for positions that `transformers` has made."""
    return (position_ids == 0).cumsum(-1) if position_ids.dtype == _DTYPE else None


def check_documents(model: nn.Module, seq_len: int, key: KeyPath, value: str) -> None:
    """Raise ConfigError for a model on the meta device whose forward does not separate documents.

    A model of `transformers` is checked by a forward. Any other model must have a forward with the argument
    `documents`. `key`: the key of the job that asks for separate documents. `value`: the value of this key.
    """
    name = type(model).__name__
    if _takes_positions(model):
        reason = _obstacle_in_transformers(model, seq_len)
        problem = reason and f"is not supported by {name} of transformers, which {reason}"
    else:
        is_taken = "documents" in inspect.signature(model.forward).parameters
        reason = f"needs forward(inputs, documents=None), but {name}.forward has no argument documents"
        problem = None if is_taken else reason
    if problem is not None:
        remedy = 'set packing = "concat"' if key[-1] == "packing" else "use a different model or other data"
        raise config_error(key, f"{problem}; {remedy}", value, also=(("model", "name"),))


def _obstacle_in_transformers(model: Any, seq_len: int) -> str | None:
    """Return the reason why a model cannot separate documents by `position_ids`; None if it can. A forward on the meta
    device shows whether all masks and learned positions are made from `position_ids`."""
    from transformers import masking_utils

    others = {*(getattr(model.config, "layer_types", None) or ())} - {"full_attention", "sliding_attention"}
    if any(isinstance(module, nn.Conv1d) for module in model.modules()):
        others.add("convolution")
    if others:
        return f"has layers that mix documents ({', '.join(sorted(others))})"
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return "takes no position_ids"
    is_separated: list[bool] = []
    own_positions: list[str] = []

    def find(position_ids: Tensor) -> Tensor | None:
        documents = _documents_at(position_ids)
        is_separated.append(documents is not None)
        return documents

    def look_up(path: str, _: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if not any(isinstance(value, Tensor) and value.dtype == _DTYPE for value in (*args, *kwargs.values())):
            own_positions.append(path)

    tokens = torch.zeros(1, seq_len, dtype=torch.int64, device="meta")
    with ExitStack() as stack:
        for path, module in model.named_modules():
            if isinstance(module, nn.Embedding) and module is not model.get_input_embeddings():
                stack.enter_context(module.register_forward_pre_hook(partial(look_up, path), with_kwargs=True))
        stack.enter_context(replaced(masking_utils, "find_packed_sequence_indices", find))
        stack.enter_context(torch.no_grad())
        stack.enter_context(suppress(Exception))  # some layers fail on meta tensors, but after the masks are made
        model(tokens, position_ids=positions_in(tokens))
    if own_positions:
        return f"looks up {own_positions[0]} at positions that are not made from position_ids"
    return None if is_separated and all(is_separated) else "makes attention masks without position_ids"
