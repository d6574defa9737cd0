"""The file `adapter_config.json` of `peft`. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from titan_launch.config.huggingface.config_json import read_json
from titan_launch.config.huggingface.features import WeightsError
from titan_launch.config.sections.lora import LoRAConfig

CONFIG = "adapter_config.json"


def read_config(folder: Path) -> dict[str, Any]:
    """Return the content of a folder's `adapter_config.json`. Raises WeightsError."""
    if not (folder / CONFIG).is_file():
        reason = f"it has no {CONFIG}" if folder.is_dir() else "there is no such folder"
        raise WeightsError(f"{reason}; name a folder that peft or `titan-launch export --adapter` wrote")
    return read_json(folder / CONFIG)


_UNSUPPORTED = {
    "use_dora": False,
    "bias": "none",
    "modules_to_save": None,
    "lora_bias": False,
    "layer_replication": None,
}
"""Keys of `adapter_config.json` with the value that is supported."""


def config_problems(found: Mapping[str, Any], config: LoRAConfig) -> Iterator[str]:
    """Yield a clause for each key of `adapter_config.json` that is not supported, or not that of `[lora]`."""
    if found.get("peft_type") != "LORA":
        yield f"peft_type = {found.get('peft_type')!r}; only LORA is supported"
        return
    for key, value in _UNSUPPORTED.items():
        if found.get(key, value) not in (value, []):
            yield f"{key} = {found[key]!r} is not supported"
    rank, alpha = found.get("r"), found.get("lora_alpha")
    if rank != config.rank:
        yield f"its rank (r) is {rank}; set lora.rank = {rank}"
    theirs = bool(found.get("use_rslora", False))
    if (alpha, theirs) != (config.alpha, config.rank_stabilized):
        flag = str(theirs).lower()
        yield f"its scale differs: set lora.alpha = {alpha} and lora.rank_stabilized = {flag}"
