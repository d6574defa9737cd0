import os
from pathlib import Path

import pytest
import torch

from tests.distributed import run_command
from tests.train.jobs import TINY_JOB_FILE
from titan_launch.config.sections.data import TextData
from titan_launch.core.errors import ConfigError, UserError
from titan_launch.data.corpora.interface import is_held_out
from titan_launch.data.corpora.text_files import is_text
from titan_launch.data.sources import build_source
from titan_launch.data.sources.tokens import TokenSource
from titan_launch.data.tokenizers import ByteTokenizer
from titan_launch.parallel.context_parallel import SequencePart, part_of


def build(config: TextData, seq_len: int = 4, key: tuple[str, ...] = ("data",)) -> TokenSource:
    source = build_source(config, ByteTokenizer(), seq_len, key)
    assert isinstance(source, TokenSource)
    return source


def write_documents(folder: Path, number: int = 60) -> dict[str, str]:
    documents = {f"sub/{i}.txt": f"document {i} " * 3 for i in range(number)}
    (folder / "sub").mkdir()
    for name, text in documents.items():
        (folder / name).write_text(text)
    return documents


def all_text(source: TokenSource) -> str:
    return "".join(ByteTokenizer().decode(source[i][0].tolist()) for i in range(len(source)))


def test_samples_are_windows_whose_targets_are_the_next_tokens(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"abcdefg")
    (tmp_path / "b.txt").write_bytes(b"hij")
    source = build(TextData(path=str(tmp_path)))
    # "abcdefg" end "hij" end: 12 tokens
    assert len(source) == 2
    assert [(i.tolist(), t.tolist()) for i, t in (source[0], source[1])] == [
        ([97, 98, 99, 100], [98, 99, 100, 101]),
        ([101, 102, 103, 256], [102, 103, 256, 104]),
    ]
    assert source[0][0].dtype == source[0][1].dtype == torch.int64
    with pytest.raises(IndexError):
        source[2]


def test_the_smallest_data_set_is_one_token_longer_than_a_sample(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"abcd")
    assert len(build(TextData(path=str(tmp_path / "a.txt")))) == 1


def test_the_split_is_disjoint_and_complete(tmp_path: Path) -> None:
    documents = write_documents(tmp_path)
    sides = {
        split: all_text(build(TextData(path=str(tmp_path), split=split, validation_percent=30), seq_len=1))
        for split in ("train", "validation", "all")
    }
    held_out = [name for name in documents if is_held_out(name, 30)]
    assert 5 < len(held_out) < 35
    for name, text in documents.items():
        assert text in sides["all"]
        assert (text in sides["validation"]) == (name in held_out)
        assert (text in sides["train"]) == (name not in held_out)


def test_a_larger_validation_share_contains_a_smaller_one() -> None:
    names = [f"{i}.py" for i in range(200)]
    small = {name for name in names if is_held_out(name, 5)}
    assert small < {name for name in names if is_held_out(name, 20)}


def test_the_standard_library_is_tens_of_megabytes() -> None:
    source = build(TextData(), seq_len=256)
    assert len(source) * 256 > 10_000_000
    inputs, targets = source[len(source) - 1]
    assert inputs.shape == targets.shape == (256,)
    assert torch.equal(inputs[1:], targets[:-1])


def test_a_fingerprint_changes_with_the_data_alone(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        write_documents(tmp_path / name)
    source = build(TextData(path=str(tmp_path / "a")))
    before = source.fingerprint(0)
    assert part_of(source, SequencePart(1, 2, is_balanced=False)).fingerprint(0) == before
    moved = tmp_path / "b"
    (moved / "picture.png").write_bytes(b"\x89PNG\0")  # skipped

    def change(seed: int = 0, **keys: str) -> str:
        return before.changed_to(build(TextData(path=str(moved), **keys)).fingerprint(seed))

    assert (before.samples, before.files) == (547, 60)
    assert change() == ""
    assert change(seed=1) != ""  # other samples are hashed
    assert change(split="train") == (
        "it now has 520 samples (before: 547) and 57 files (before: 60); missing: sub/18.txt, sub/3.txt, sub/36.txt"
    )
    (moved / "sub" / "9.txt").rename(moved / "sub" / "8.txt~")
    assert change() == "missing: sub/9.txt; new: sub/8.txt~"
    (moved / "sub" / "8.txt~").rename(moved / "sub" / "9.txt")
    for document in (moved / "sub").iterdir():
        document.write_bytes(document.read_bytes().swapcase())
    assert change() == "changed: sub/0.txt, sub/1.txt, sub/10.txt and 57 more"
    (moved / "sub" / "10.txt").write_text("longer" * 100)
    assert change() == "it now has 688 samples (before: 547); changed: sub/0.txt, sub/1.txt, sub/10.txt and 57 more"


def test_a_file_name_need_not_be_utf8(tmp_path: Path) -> None:
    for name in (b"caf\xe9.py", b"\xe8.py", b"plain.py"):
        (tmp_path / os.fsdecode(name)).write_text("x = 1\n")
    splits = [
        build(TextData(path=str(tmp_path), split=split, validation_percent=50)) for split in ("train", "validation")
    ]
    assert sum(source.fingerprint(0).files for source in splits) == 3
    assert all(source.fingerprint(0).files for source in splits)


def problem(config: TextData, seq_len: int = 256, key: tuple[str, ...] = ("data",)) -> str:
    with pytest.raises(ConfigError) as caught:
        build(config, seq_len, key)
    return str(caught.value)


def test_errors_name_the_key_and_the_remedy(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("short")
    too_few = "path: has too few tokens for a sample of seq_len + 1 = 257 tokens"
    remedy = "name more text, or set a smaller training.seq_len"
    assert problem(TextData(path=str(file))) == f"data.{too_few}: 1 file, 6 tokens; {remedy}"
    (tmp_path / "b.txt").write_text("")
    assert problem(TextData(path=str(tmp_path)), key=("validation", "data")) == (
        f"validation.data.{too_few}: 2 files, 7 tokens; {remedy}"
    )
    missing = 'data.path: no file is found at "nowhere/*.txt" (paths are relative to the working directory)'
    assert problem(TextData(path=(str(file), "nowhere/*.txt"))) == missing
    full_side, empty_side = ("validation", "train") if is_held_out("a.txt", 50) else ("train", "validation")
    assert problem(TextData(path=str(file), split=full_side, validation_percent=50)) == (
        f"data.path: has too few tokens in its {full_side} split for a sample of seq_len + 1 = 257 tokens: 1 file, "
        f"6 tokens; {remedy}"
    )
    assert problem(TextData(path=str(file), split=empty_side, validation_percent=50)) == (
        "data.split: is empty: with validation_percent = 50, no document belongs to it; provide more documents (each "
        'file is one document), or other data with split = "all"'
    )


def test_a_tokenizer_with_ids_outside_of_its_vocabulary_is_one_error(tmp_path: Path) -> None:
    class Wrong(ByteTokenizer):
        vocab_size = 256  # the id of the token that ends a document is 256
        digest = "wrong"

    write_documents(tmp_path)
    with pytest.raises(
        UserError, match=r"tokens/\w+: has the token id 256 in 00000\.tokens, but the vocabulary has 256"
    ):
        build_source(TextData(path=str(tmp_path)), Wrong(), 4)


def test_an_unreadable_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    file = tmp_path / "a.txt"
    file.write_text("text")
    monkeypatch.setattr("titan_launch.data.corpora.text_files.open_regular", refuse)  # chmod does not stop root
    remedy = "correct the permissions, or name other files"
    assert problem(TextData(path=str(file))) == f"data.path: cannot read {file}: Permission denied; {remedy}"


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", True),
        ("Grüße, \N{SNOWMAN} \N{GRINNING FACE}".encode(), True),
        (b"a" * ((1 << 20) - 1) + "é".encode(), True),  # a character spans two parts
        ("Grüße".encode("latin-1"), False),
        (b"a" * (1 << 20) + b"\xc3", False),  # a character that ends too early
        (b"text\0", False),
        ("text".encode("utf-16"), False),
    ],
)
def test_text_is_utf8_without_nul_bytes(data: bytes, expected: bool) -> None:
    assert is_text(data) is expected


def test_files_that_are_not_text_are_skipped_and_counted(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_bytes(b"abcdefg")
    alone = build(TextData(path=str(tmp_path)))
    assert alone.describe() == "1 file, 8 tokens, 1 sample of 4"
    (tmp_path / "a.bin").write_bytes(b"\x80\x81")
    assert build(TextData(path=str(tmp_path))).describe() == (
        "1 file, 8 tokens, 1 sample of 4; skipped 1 file: 1 not UTF-8 text; first: a.bin"
    )
    (tmp_path / "c.bin").write_bytes(b"c\0")
    source = build(TextData(path=str(tmp_path)))
    assert source.describe().endswith("; skipped 2 files: 2 not UTF-8 text; first: a.bin")
    assert torch.equal(source[0][0], alone[0][0])


def test_data_without_text_is_refused(tmp_path: Path) -> None:
    for name in ("a.bin", "b.bin"):
        (tmp_path / name).write_bytes(b"\xff\xfe\0")
    rest = "not UTF-8 text; first: a.bin); convert files to UTF-8 without NUL bytes, or name text files"
    assert problem(TextData(path=str(tmp_path / "a.bin"))) == f"data.path: has no documents (skipped 1 file: 1 {rest}"
    assert problem(TextData(path=str(tmp_path))) == f"data.path: has no documents (skipped 2 files: 2 {rest}"


JOB = f"""{TINY_JOB_FILE}
[data]
path = "text"
split = "train"
validation_percent = 30

[training]
seq_len = 16
steps = 1

[validation]
freq = 1
max_samples = 2

[validation.data]
path = "text"
split = "validation"
validation_percent = 30
"""


def test_a_run_logs_how_much_data_it_has_and_goes_on_with_no_other_data(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    documents = write_documents(tmp_path / "text")
    picture = os.fsdecode(b"\xe9.png")
    (tmp_path / "text" / picture).write_bytes(b"\x89PNG\0")
    (tmp_path / "job.toml").write_text(JOB)
    status, printed, reported = run_command(["train", "--config", "job.toml"], tmp_path)
    assert (status, reported) == (0, "")
    held_out = {name for name in documents if is_held_out(name, 30)}
    expected = {}
    for what, names in (("data", documents.keys() - held_out), ("validation data", held_out)):
        tokens = sum(len(documents[name]) + 1 for name in names)
        expected[what] = f"{len(names)} files, {tokens:,} tokens, {(tokens - 1) // 16} samples of 16"
    skipping = "validation data" if is_held_out(picture, 30) else "data"
    expected[skipping] += r"; skipped 1 file: 1 not UTF-8 text; first: \udce9.png"
    expected["validation data"] += "; the first 2 samples are used"
    logged = [line.split(":", 1) for line in printed.splitlines() if "data: " in line]
    assert [(what, text.strip()) for what, text in logged] == list(expected.items())
    for document in (tmp_path / "text" / "sub").iterdir():
        document.write_bytes(document.read_bytes().upper())
    again = ["train", "--config", "job.toml", "--training.steps=2", "--checkpoint.enable=true"]
    status, printed, reported = run_command(again, tmp_path)
    assert status == 2 and "step 2/2" not in printed
    assert reported == (
        'error: job.toml:14: data.path = "text": the data has changed since tiny/checkpoints/step-1 was saved: '
        "changed: sub/10.txt, sub/11.txt, sub/12.txt and 40 more; restore it, or use the new data with "
        "--checkpoint.accept_changes=true, or start anew with --checkpoint.load=none\n"
    )


def test_a_run_refuses_a_file_that_is_not_text(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(b"\xff\xfe\0")
    (tmp_path / "job.toml").write_text(JOB.replace('split = "train"\n', "").partition("[validation]")[0])
    status, _, reported = run_command(["train", "--config", "job.toml"], tmp_path)
    assert (status, reported) == (
        2,
        'error: job.toml:14: data.path = "text": has no documents (skipped 1 file: 1 not UTF-8 text; first: text); '
        "convert files to UTF-8 without NUL bytes, or name text files\n",
    )
