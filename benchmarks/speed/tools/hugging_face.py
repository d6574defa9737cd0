"""The model's shape as a configuration of Transformers, and Accelerate's FSDP2 on a CPU."""

from __future__ import annotations

from typing import Any

from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from transformers import LlamaConfig

from benchmarks.speed.jobs import Job


def llama_config(job: Job) -> LlamaConfig:
    """Return the configuration of the launcher's flavor: no tied embeddings, no biases."""
    return LlamaConfig(
        hidden_size=job.dim,
        num_hidden_layers=job.n_layers,
        num_attention_heads=job.n_heads,
        num_key_value_heads=job.n_kv_heads,
        intermediate_size=job.hidden_dim,
        vocab_size=job.vocab_size,
        max_position_embeddings=job.seq_len,
        rope_theta=500_000.0,
        tie_word_embeddings=False,
        use_cache=False,
        attn_implementation="sdpa",
    )


def let_cpus_shard() -> None:
    """Make Accelerate use its FSDP plugin on a CPU, in the same way as on GPUs. Call this before an Accelerator exists.

    Without a GPU, Accelerate ignores the plugin without a warning and uses DDP.
    """
    build = AcceleratorState.__init__

    def build_with_plugin(self: Any, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        is_built = self.initialized
        build(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None and not is_built:
            self.distributed_type = DistributedType.FSDP
            if self._mixed_precision != "no":
                fsdp_plugin.set_mixed_precision(self._mixed_precision)
            self.fsdp_plugin = fsdp_plugin

    AcceleratorState.__init__ = build_with_plugin
