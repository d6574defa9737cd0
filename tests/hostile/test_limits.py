"""The limits in docs/explanation/security.md are those of the code."""

from __future__ import annotations

import re
from pathlib import Path

from titan_launch.checkpoint import index
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
from titan_launch.plan.proof import certificate
from titan_launch.report import recorded_run
from titan_launch.train.health import flight_recorder

PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "security.md"


def mib(number: int) -> str:
    """Return a number of bytes as text."""
    return f"{number // MIB} MiB"


assert arrays._MOST_EXPANDED == text_files.MOST_DOCUMENT

LIMITS = {
    "a TOML file": mib(job.MOST_BYTES[".toml"]),
    "a JSON job": mib(job.MOST_BYTES[".json"]),
    "files that a job extends, with the job file": f"{job.MOST_FILES}",
    "values in a job file": f"{job.MOST_VALUES:,}",
    "levels of nested tables and arrays in a job file": f"{job.MOST_DEPTH}",
    "items in an array of a job file": f"{job.MOST_ITEMS:,} (`path` of data: {job.MOST_PATHS:,})",
    "files that a path with braces names": f"{MOST_SHARDS:,}",
    "layers of a model": f"{base.MOST_LAYERS:,} (a class of `transformers`: {classes._MOST_LAYERS})",
    "heads or experts": f"{base.MOST_PARTS:,}",
    "width": f"{base.MOST_WIDTH:,}",
    "vocabulary": f"{base.MOST_TOKENS:,}",
    "`config.json` and `adapter_config.json` of weights": mib(config_json._MOST_BYTES),
    "index of safetensors files": mib(folder._MOST_INDEX_BYTES),
    "header of a safetensors file": (
        f"{mib(folder._MOST_HEADER_BYTES)}, with {folder._MOST_METADATA:,} characters of metadata"
    ),
    "regular expressions of an adapter": (
        f"{adapters._MOST_PATTERN:,} characters in each, {adapters._MATCHING_SECONDS:g} s of CPU time for matching all"
    ),
    "another JSON file": f"{mib(json_files.MOST_BYTES)}, {json_files.MOST_VALUES:,} values",
    "`units.json`, `precision_audit.json`, `proof.json`": mib(recorded_run._MOST_RECORD_BYTES),
    "`metrics.jsonl`": (
        f"{mib(metrics.MOST_LINE_BYTES)} in a line, {recorded_run.MOST_REPORTS:,} reports, "
        f"{recorded_run.MOST_METRICS:,} metrics, {recorded_run._LONGEST_NAME} characters in the name of a metric"
    ),
    "`index.json` and `.metadata` of a checkpoint": (
        f"{index._MOST_BYTES // MIB:,} MiB each; `index.json` also a quarter of all files of the checkpoint plus 1 "
        f"MiB, and one value for {index._BYTES_PER_VALUE} bytes"
    ),
    "a certificate (`prove.certificate`)": mib(certificate._MOST_BYTES),
    "a flight record": f"{mib(flight_recorder._MOST_BYTES)}, {flight_recorder._MOST_OPCODES:,} opcodes",
    "`tokenizer.json`": (
        f"{mib(tokenizer.MOST_BYTES)}, {tokenizer._MOST_VALUES:,} values, {tokenizer._MOST_KEYS:,} keys"
    ),
    "a chat template": mib(chat_template._MOST_BYTES),
    "a call of the helper process: CPU time": (
        f"{limited_process.SECONDS:g} s, plus {limited_process.SECONDS_PER_BYTE * MIB:g} s for each MiB of input"
    ),
    "a call: memory": (
        f"{mib(limited_process.MEMORY)}, plus {tokenizers._LIMITS.memory_per_byte} bytes for each byte of input"
    ),
    "loading a file in the helper process: CPU time": (
        f"{limited_process.SECONDS:g} s, plus {limited_process.MAKING.seconds_per_byte * MIB:g} s for each MiB of the "
        "file"
    ),
    "loading a file: memory": (
        f"{mib(limited_process.MEMORY)}, plus {limited_process.MAKING.memory_per_byte} bytes for each byte of the file"
    ),
    "an image": (
        f"{mib(pillow.MOST_BYTES)}, {pillow.MOST_PIXELS:,} pixels ({pillow._MOST_STORED:,} for a JPEG that is made "
        "smaller while it is decoded)"
    ),
    "a label in a tar file": mib(encoded._MOST_LABEL),
    "classes of images": f"{arrays.MOST_CLASSES:,}",
    "a compressed array or document, after decompression": (
        f"10 times the size of its file, plus {mib(text_files.MOST_DOCUMENT)}"
    ),
    "all lines or rows of a compressed or Parquet file, after decompression": (
        f"100 times the size of the file, plus {mib(text_files.MOST_RECORDS)}. A line or row below "
        f"{text_files.LEAST_RECORD} bytes counts as {text_files.LEAST_RECORD} bytes"
    ),
    "a line of a data set": mib(jsonl.MOST_LINE),
    "a prompt of `generate`, a message of `chat`": f"{language_model.MOST_PROMPT:,} characters",
    "header of token files": f"{mib(token_files.MOST_LISTED)}, {token_files._MOST_ENTRIES:,} arrays and objects",
}
"""The rows of the table."""


def test_the_page_has_the_limits_of_the_code() -> None:
    section = PAGE.read_text(encoding="utf-8").partition("## Limits\n")[2].partition("\n## ")[0]
    rows = dict(re.findall(r"^\| (.*?) \| (.*?) \|$", section, re.MULTILINE))
    del rows["what"]
    assert rows == LIMITS
