"""The limits in docs/explanation/security.md are those of the code."""

from __future__ import annotations

import re
from pathlib import Path

from titan_launch.commands import language_model
from titan_launch.config.loading import limits as job
from titan_launch.config.paths import MOST_SHARDS
from titan_launch.config.sections import tokenizer
from titan_launch.core import json_files, limited_process
from titan_launch.core.files import MIB
from titan_launch.data import token_files, tokenizers
from titan_launch.data.corpora import chat_template, jsonl, text_files
from titan_launch.data.images import arrays, encoded, pillow
from titan_launch.metrics.sinks import jsonl as metrics
from titan_launch.models import args as base
from titan_launch.models.huggingface import adapter_config as adapters
from titan_launch.models.huggingface import args as classes
from titan_launch.models.huggingface import config_json
from titan_launch.models.weights import folder
from titan_launch.report import recorded_run
from titan_launch.train.health import flight_recorder

PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "security.md"


def mib(number: int) -> str:
    """Return a number of bytes as text."""
    return f"{number // MIB} MiB"


assert arrays._MOST_EXPANDED == text_files.MOST_DOCUMENT
_COMPRESSED = (
    f"10 times its size and {mib(text_files.MOST_DOCUMENT)}; 100 times its size and {mib(text_files.MOST_RECORDS)}, "
    f"of which each counts as {text_files.LEAST_RECORD} bytes or more"
)

LIMITS = {
    "a TOML file; a JSON job; files of a job": (
        f"{mib(job.MOST_BYTES['.toml'])}; {mib(job.MOST_BYTES['.json'])}; {job.MOST_FILES}"
    ),
    "values, nested tables and items in an array of a job file": (
        f"{job.MOST_VALUES:,}; {job.MOST_DEPTH}; {job.MOST_ITEMS:,}"
    ),
    "files that a path with braces names": f"{MOST_SHARDS:,}",
    "layers, heads or experts, width, vocabulary of a model": (
        f"{base.MOST_LAYERS:,}; {base.MOST_PARTS:,}; {base.MOST_WIDTH:,}; {base.MOST_TOKENS:,}"
    ),
    "layers of a class of `transformers`": f"{classes._MOST_LAYERS}",
    "`config.json` and `adapter_config.json` of weights": mib(config_json._MOST_BYTES),
    "index, header and metadata of safetensors files": (
        f"{mib(folder._MOST_INDEX_BYTES)}; {mib(folder._MOST_HEADER_BYTES)}; {folder._MOST_METADATA:,} characters"
    ),
    "regular expressions of an adapter": f"{adapters._MOST_PATTERN:,} characters, {adapters._MATCHING_SECONDS:g} s",
    "another JSON file": f"{mib(json_files.MOST_BYTES)}, {json_files.MOST_VALUES:,} values",
    "`units.json`, `precision_audit.json`": mib(recorded_run._MOST_RECORD_BYTES),
    "`metrics.jsonl`": (
        f"{mib(metrics.MOST_LINE_BYTES)} in a line, {recorded_run.MOST_REPORTS:,} reports, "
        f"{recorded_run.MOST_METRICS:,} metrics"
    ),
    "flight records": mib(flight_recorder._MOST_BYTES),
    "`tokenizer.json`": (
        f"{mib(tokenizer.MOST_BYTES)}, {tokenizer._MOST_VALUES:,} values, {tokenizer._MOST_KEYS:,} keys"
    ),
    "a chat template": mib(chat_template._MOST_BYTES),
    "a call of the helper process": (
        f"{limited_process.SECONDS:g} s of CPU time and {limited_process.SECONDS_PER_BYTE * MIB:g} s for each MiB of "
        f"input; {mib(limited_process.MEMORY)} of memory and {tokenizers._LIMITS.memory_per_byte} bytes for each byte "
        "of input"
    ),
    "making an object in the helper process": (
        f"{limited_process.SECONDS:g} s of CPU time and {limited_process.MAKING.seconds_per_byte * MIB:g} s for each "
        f"MiB of its file; {mib(limited_process.MEMORY)} of memory and {limited_process.MAKING.memory_per_byte} bytes "
        "for each byte of its file"
    ),
    "an image": f"{mib(pillow.MOST_BYTES)}, {pillow.MOST_PIXELS:,} pixels",
    "a label in a tar file; classes": f"{mib(encoded._MOST_LABEL)}; {arrays.MOST_CLASSES:,}",
    "a compressed array or document; compressed lines or rows": _COMPRESSED,
    "a line of a data set": mib(jsonl.MOST_LINE),
    "a prompt of `generate`": f"{language_model.MOST_PROMPT:,} characters",
    "header of token files": mib(token_files.MOST_LISTED),
}
"""The rows of the table."""


def test_the_page_has_the_limits_of_the_code() -> None:
    section = PAGE.read_text(encoding="utf-8").partition("## Limits\n")[2].partition("\n## ")[0]
    rows = dict(re.findall(r"^\| (.*?) \| (.*?) \|$", section, re.MULTILINE))
    del rows["what"]
    assert rows == LIMITS
