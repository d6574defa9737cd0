"""Rules across sections for torch.compile and attention kernels."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from titan_launch.config.job import JobConfig
from titan_launch.config.rules.data import keys_of_packed_documents
from titan_launch.core.errors import KeyPath, Problem, format_key
from titan_launch.models.architectures import known_args


def attention_backend_is_used(config: JobConfig) -> Iterator[Problem]:
    """Report a problem if `kernels.attention` names a kernel of `scaled_dot_product_attention`, but the job's attention
    runs as FlexAttention."""
    backend = config.kernels.attention
    if backend == "auto" or known_args(config.model) is None:
        return
    for what, also in islice(beyond_causal_attention(config), 1):
        reason = f'is a kernel for plain causal attention, which {what} is not; set "auto"'
        yield Problem(("kernels", "attention"), reason, backend, also)


def beyond_causal_attention(config: JobConfig) -> Iterator[tuple[str, tuple[KeyPath, ...]]]:
    """Yield (setting, keys on which it depends) for settings that plain causal attention does not support: at most one
    model argument, and each data source whose documents are separated."""
    args, seq_len = known_args(config.model), config.training.seq_len
    option = args.beyond_causal_attention(seq_len) if args is not None else None
    if option is not None:
        yield (
            f"model.args.{option}",
            (("model", "name"), ("model", "flavor"), ("model", "args"), ("training", "seq_len")),
        )
    for key, value in keys_of_packed_documents(config):
        yield f'{format_key(key)} = "{value}"', (key,)
