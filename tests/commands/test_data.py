"""The command `data`, as its users see it."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.distributed import run_command
from titan_launch.commands.data import _lines, _marks
from titan_launch.data.token_files import Encoded, Header, write_header, write_shard

JOB = """
[job]
name = "tiny"
device = "cpu"

[data]
kind = "text"
path = "text"
packing = "documents"
shuffle = false

[validation]
freq = 2
max_samples = 1

[validation.data]
kind = "tokens"
path = "answers"

[training]
seq_len = 8
local_batch_size = 1
global_batch_size = 2
steps = 3
"""

EXPECTED = """\
job                     tiny
training                3 steps of 2 samples (1 rank): 6 samples of 8 tokens
tokenizer               bytes, 257 tokens

data
  kind                  text
  path                  text
  split                 all
  packing               documents
  samples               3
  files                 4
  skipped               1: not UTF-8 text
  documents             4
  tokens                22
  padding               25.00%
  documents cut         1
  bytes per token       0.82
  tokens per document   min 1, mean 5.50, p50 4, p90 12, p99 12, max 12
          1  1  ####################
     2 to 3  0
     4 to 7  2  ########################################
    8 to 15  1  ####################
  ignored targets       0.00%
  epochs                2.00

validation.data
  kind                  tokens
  path                  answers
  packing               concat
  samples               2
  documents             2
  tokens                18
  bytes per token       0.89
  tokens per document   min 9, mean 9.00, p50 9, p90 9, p99 9, max 9
    8 to 15  2  ########################################
  ignored targets       43.75%
  validated samples     1

sample 0 of the run: sample 0
--- document of 8 tokens
abcdefghi

sample 1 of the run: sample 1
--- document of 3 tokens
ijk<end of document>
--- document of 4 tokens
p\\x1brs<end of document>
--- padding of 1 token
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with a job, its text, and token files in which each document has an answer of four targets."""
    (tmp_path / "job.toml").write_text(JOB)
    (tmp_path / "text").mkdir()
    files = {"a": b"abcdefghijk", "b": b"mno", "c": b"", "d": b"p\x1brs", "e": b"\xff"}
    for name, content in files.items():
        (tmp_path / "text" / name).write_bytes(content)
    (tmp_path / "answers").mkdir()
    encoded = [Encoded(np.array([*text, 256], np.uint16), np.arange(9) >= 4) for text in (b"2 + 2=4.", b"3 + 4=7.")]
    shard = write_shard(tmp_path / "answers", "00000", encoded, "uint16", has_targets=True)
    write_header(tmp_path / "answers", Header("uint16", 257, "bytes", True, (shard,)))
    return tmp_path


def test_the_report_of_a_job(folder: Path) -> None:
    args = ["data", "--config", "job.toml", "--samples=2"]
    assert run_command(args, folder) == (0, EXPECTED, "")
    status, printed, _ = run_command([*args, "--json"], folder)
    report = json.loads(printed)
    assert status == 0
    assert "\n".join(_lines(report, ("[-", "-]"))) + "\n" == EXPECTED
    assert report["sources"][0]["document_lengths"]["histogram"] == {"1": 1, "2 to 3": 0, "4 to 7": 2, "8 to 15": 1}


def test_tokens_that_are_no_targets_are_marked(folder: Path) -> None:
    """The mixture has the documents of the text, and the question and answer of the token files."""
    (folder / "job.toml").write_text(
        """
        [[data.sources]]
        kind = "tokens"
        path = "answers"
        packing = "documents"
        shuffle = false
        [[data.sources]]
        kind = "synthetic"
        weight = 0
        [training]
        seq_len = 8
        """
    )
    status, printed, reported = run_command(["data", "--config", "job.toml", "--world-size=2"], folder)
    assert (status, reported) == (0, "")
    text = "--- document of 8 tokens\n[-2 + -]2=4.<end of document>\n"
    assert printed.endswith(f"sample 0 of the run: sample 0 of answers\n{text}")
    assert "(2 ranks)" in printed and "\ndata answers\n" in printed and "\ndata synthetic\n" in printed
    assert "share of the samples  100.00%" in printed

    status, printed, reported = run_command(["data", "--config", "job.toml", "--data.sources.0.path=text"], folder)
    assert (status, printed) == (2, "")
    assert reported.startswith('error: command line: --data.sources.0.path=text: data.sources.0.path = "text": has no')


def test_marks_are_dim_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _marks() == ("[-", "-]")
    _, terminal = os.openpty()
    with open(terminal, "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        assert _marks() == ("\x1b[2m", "\x1b[0m")
        monkeypatch.setenv("NO_COLOR", "1")
        assert _marks() == ("[-", "-]")


def test_images(folder: Path) -> None:
    np.savez(folder / "images.npz", images=np.zeros((6, 8, 8), np.uint8), labels=[0, 1, 1, 2, 2, 2])
    (folder / "job.toml").write_text('[model]\nname = "resnet"\n[data]\nkind = "images"\npath = "images.npz"')
    status, printed, reported = run_command(["data", "--config", "job.toml"], folder)
    assert (status, reported) == (0, "")
    bars = "".join(f"    {label}  {label + 1}  {'#' * length}\n" for label, length in enumerate((13, 27, 40)))
    shape = "  shape                 1 x 8 x 8\n  bytes                 432\n"
    assert f"\n  samples               6\n{shape}  classes               3\n{bars}" in printed
    assert "\n  class " in printed and printed.endswith("shape 1 x 8 x 8\n")


def test_a_stream_has_no_length(folder: Path) -> None:
    kind = "tests.data.sources.test_factory:Stream"
    (folder / "job.toml").write_text(f'[data]\nkind = "{kind}"\nshuffle = false\n[training]\nseq_len = 4\n')
    status, printed, reported = run_command(["data", "--config=job.toml", "--world-size=2", "--samples=2"], folder)
    assert (status, reported) == (0, "")
    contents = f"stream of {kind}; its order depends on the number of data-parallel ranks"
    texts = (r"\x00\x01\x02\x03\x04", r"\x02\x03\x04\x05\x06")
    samples = (
        f"\nsample {number} of data-parallel rank 0\n--- document of 4 tokens\n{text}\n"
        for number, text in enumerate(texts)
    )
    assert printed.endswith(
        f"\ndata\n  kind                  {kind}\n  contents              {contents}\n{''.join(samples)}"
    )
