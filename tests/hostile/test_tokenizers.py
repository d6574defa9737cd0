"""Files of a tokenizer that somebody else wrote: one sentence each, by every command that reads them."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from tests.hostile.mutations import damaged_text
from tests.hostile.runner import Runner
from tests.sampling import rest_is_slow
from titan_launch.config.sections import tokenizer as section
from titan_launch.config.sections.tokenizer import TokenizerConfig, special_token, vocabulary_size
from titan_launch.core import limited_process
from titan_launch.core.errors import ConfigError
from titan_launch.data.tokenizers import HuggingFaceTokenizer, build_tokenizer, tokenizer_beside

tokenizers = pytest.importorskip("tokenizers")

END = "<|endoftext|>"
TEXTS = ["the number one is one of the numbers, naïve 世界\n" * 3, "Another text: 12 + 34 = 46!"]
"""Texts on which the small tokenizers are trained."""


def bpe() -> Any:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.NFC(), tokenizers.normalizers.Replace("a", "b"), tokenizers.normalizers.Prepend("x")]
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"\d+"), "isolated"),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.post_processor = tokenizers.processors.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=[END], initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


def unigram() -> Any:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.Unigram())
    tokenizer.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.NFKC(), tokenizers.normalizers.Lowercase()]
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    tokenizer.decoder = tokenizers.decoders.Metaspace()
    trainer = tokenizers.trainers.UnigramTrainer(vocab_size=60, special_tokens=[END, "<unk>"], unk_token="<unk>")
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(single=f"{END} $A", special_tokens=[(END, 0)])
    return tokenizer


def wordpiece() -> Any:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = tokenizers.normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = tokenizers.decoders.WordPiece()
    trainer = tokenizers.trainers.WordPieceTrainer(vocab_size=90, special_tokens=["[UNK]", END])
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.post_processor = tokenizers.processors.BertProcessing((END, 1), ("[UNK]", 0))
    return tokenizer


def wordlevel() -> Any:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.decoder = tokenizers.decoders.Fuse()
    trainer = tokenizers.trainers.WordLevelTrainer(vocab_size=40, special_tokens=["[UNK]", END])
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


KINDS: dict[str, Callable[[], Any]] = {"BPE": bpe, "Unigram": unigram, "WordPiece": wordpiece, "WordLevel": wordlevel}


@pytest.fixture(scope="module")
def contents() -> dict[str, str]:
    """Return a small `tokenizer.json` of each kind of model."""
    return {name: make().to_str() for name, make in KINDS.items()}


def changed(*keys: str | int, value: Any) -> Callable[[Path, Any], None]:
    """Return a function that writes a `tokenizer.json` with another value at `keys`."""

    def write(file: Path, content: Any) -> None:
        target = content
        for key in keys[:-1]:
            target = target[key]
        target[keys[-1]] = value
        file.write_text(json.dumps(content))

    return write


def written(content: bytes | str) -> Callable[[Path, Any], None]:
    """Return a function that writes a file with this content."""

    def write(file: Path, tokenizer: Any) -> None:
        file.write_bytes(content if isinstance(content, bytes) else content.encode())

    return write


def written_beside(content: str) -> Callable[[Path, Any], None]:
    """Return a function that writes a `tokenizer_config.json`."""

    def write(file: Path, tokenizer: Any) -> None:
        file.write_text(json.dumps(tokenizer))
        file.with_name("tokenizer_config.json").write_text(content)

    return write


def replaced_by(make: Callable[[Path], object]) -> Callable[[Path, Any], None]:
    """Return a function that makes another kind of file."""

    def write(file: Path, tokenizer: Any) -> None:
        make(file)

    return write


def large(file: Path) -> None:
    file.touch()
    os.truncate(file, 1 << 34)


DOUBLING = {
    "type": "Sequence",
    "normalizers": [{"type": "Replace", "pattern": {"String": "e"}, "content": "ee"}] * 60,
}
BACKTRACKING = {"type": "Split", "pattern": {"Regex": r"(?:(?:e|e)*?)*?!"}, "behavior": "Isolated", "invert": False}
SLOW = {"type": "Split", "pattern": {"Regex": r"(e+)+(e+)+(e+)+!"}, "behavior": "Isolated", "invert": False}
NOT_ONE = "is not a tokenizer.json of Hugging Face: "

READ_BY_CHECK: dict[str, tuple[Callable[[Path, Any], None], str]] = {
    "empty": (written(""), NOT_ONE + "it is not valid JSON"),
    "not UTF-8": (written(b'{"\xff'), NOT_ONE + "it is not valid JSON"),
    "truncated": (written('{"model": {"vocab": {"a": 0'), NOT_ONE + "it is not valid JSON"),
    "nested": (written("[" * 10**6), NOT_ONE + "it is not valid JSON"),
    "a key twice": (
        written('{"model": 1, "model": 2}'),
        NOT_ONE + 'it is not valid JSON: the key "model" occurs twice',
    ),
    "a number": (written("1"), NOT_ONE + 'it has no object "model"'),
    "null": (written("null"), NOT_ONE + 'it has no object "model"'),
    "model null": (changed("model", value=None), 'it has no object "model"'),
    "vocab null": (changed("model", "vocab", value=None), '"model.vocab" is neither an object nor an array'),
    "vocab text": (changed("model", "vocab", value="ab"), '"model.vocab" is neither an object nor an array'),
    "vocab pairs": (changed("model", "vocab", value=[["a"], 1]), '"model.vocab.0" is not a pair'),
    "vocab names": (changed("model", "vocab", value=[[["a"], 1]]), '"model.vocab.0" is not a pair'),
    "id text": (changed("model", "vocab", "e", value="1"), 'the id of "e" in "model.vocab" is \'1\''),
    "id float": (changed("model", "vocab", "e", value=1.5), 'the id of "e" in "model.vocab" is 1.5'),
    "id boolean": (changed("model", "vocab", "e", value=True), 'the id of "e" in "model.vocab" is True'),
    "id negative": (changed("model", "vocab", "e", value=-1), 'the id of "e" in "model.vocab" is -1'),
    "id huge": (changed("model", "vocab", "e", value=10**9), "an id must be a whole number from 0 to 100,"),
    "id endless": (changed("model", "vocab", "e", value=10**290), "an id must be a whole number from 0 to 100,"),
    "name of a terminal": (changed("model", "vocab", "\x1b[2J\nerror: x", value=-1), r"\x1b[2J\nerror: x"),
    "added object": (changed("added_tokens", value={"a": 1}), '"added_tokens" is not an array'),
    "added texts": (changed("added_tokens", value=["a"]), '"added_tokens.0" is not an object with'),
    "added name": (changed("added_tokens", 0, "content", value=1), '"added_tokens.0" is not an object with'),
    "added id": (changed("added_tokens", 0, "id", value=-1), '"added_tokens.0" is not an object with'),
    "added id boolean": (changed("added_tokens", 0, "id", value=False), '"added_tokens.0" is not an object with'),
    "a FIFO": (replaced_by(os.mkfifo), "cannot be read: not a regular file"),
    "a device": (replaced_by(lambda file: file.symlink_to("/dev/zero")), "cannot be read: not a regular file"),
    "a folder": (replaced_by(lambda file: file.mkdir()), "cannot be read: "),
    "a loop of links": (replaced_by(lambda file: file.symlink_to(file)), "cannot be read: "),
    "a large file": (
        replaced_by(large),
        "larger than 64 MiB, the limit for this kind of file",
    ),
    "many keys": (written("{" + '"" :1,' * 1_500_000 + '"":1}'), "more than 1,500,000 keys"),
    "many values": (written("[" + "[]," * 4_000_000 + "1]"), "more than 4,000,000 values"),
    "settings nested": (written_beside("[" * 10**6), "tokenizer_config.json: not valid JSON"),
    "settings array": (written_beside("[]"), "tokenizer_config.json: not an object"),
    "settings NaN": (written_beside('{"a": NaN}'), "tokenizer_config.json: not valid JSON: NaN"),
    "eos number": (written_beside('{"eos_token": 7}'), '"eos_token" of '),
    "eos object": (written_beside('{"eos_token": {"content": []}}'), '"eos_token" of '),
}
"""Files that a check of the job refuses."""

READ_BY_THE_LIBRARY: dict[str, tuple[Callable[[Path, Any], None], str]] = {
    "unknown model": (changed("model", "type", value="None"), "cannot be used: "),
    "merges": (changed("model", "merges", value=["x y"]), "cannot be used: "),
    "normalizer": (changed("normalizer", value={"type": "Python"}), "cannot be used: "),
    "regex": (changed("pre_tokenizer", value=BACKTRACKING | {"pattern": {"Regex": "("}}), "cannot be used: "),
    "truncation": (changed("truncation", value=[]), "cannot be used: "),
    "doubling": (changed("normalizer", value=DOUBLING), "needs more than "),
    "slow regex": (changed("pre_tokenizer", value=SLOW), "cannot be used: "),
}
"""Files that a check of the job takes."""


JOB = """
[job]
name = "tiny"
dump_folder = "out"
device = "cpu"
[model]
args = {dim = 32, n_layers = 1, n_heads = 4, n_kv_heads = 2, hidden_dim = 48, vocab_size = 500}
[tokenizer]
kind = "huggingface"
path = "tok"
[data]
kind = "jsonl"
path = "a.jsonl"
[training]
seq_len = 8
local_batch_size = 1
global_batch_size = 1
steps = 1
[precision]
param_dtype = "float32"
[metrics]
enable_tensorboard = false
[checkpoint]
enable = true
save_last = true
"""


@pytest.fixture(scope="module")
def trained(runner: Runner, contents: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a job that was trained with a good tokenizer."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "tok").mkdir()
    (folder / "tok/tokenizer.json").write_text(contents["BPE"])
    (folder / "a.jsonl").write_text(json.dumps({"text": "the number one " + "e" * 40}) + "\n")
    (folder / "job.toml").write_text(JOB)
    ended = runner.run(["train", "--config", "job.toml"], folder, {"TITAN_LAUNCH_CACHE": str(folder / "cache")})
    assert ended.status == 0, ended.text
    return folder


COMMANDS = {
    "check": ["check", "--config", "job.toml"],
    "data": ["data", "--config", "job.toml"],
    "prepare": ["prepare", "--config", "job.toml", "--out", "tokens"],
    "train": ["train", "--config", "job.toml"],
    "generate": ["generate", "out/tiny", "--prompt", "the " + "e" * 40, "--max-new-tokens", "2"],
    "chat": ["chat", "out/tiny", "--template", "chatml", "--max-new-tokens", "2"],
}

TYPED = "the " + "e" * 40 + "\n"


@pytest.fixture
def folder(trained: Path, tmp_path: Path) -> Path:
    shutil.copytree(trained, tmp_path / "job", ignore=shutil.ignore_patterns("tok", "cache", "tokens"))
    (tmp_path / "job/tok").mkdir()
    return tmp_path / "job"


def refused(runner: Runner, folder: Path, command: str, sentence: str) -> None:
    ended = runner.run(COMMANDS[command], folder, {"TITAN_LAUNCH_CACHE": str(folder / "cache")}, typed=TYPED)
    ended.assert_one_sentence(sentence)
    assert "tok" in ended.stderr


@pytest.mark.parametrize("case", rest_is_slow(list(READ_BY_CHECK)))
def test_the_check_refuses_a_file_of_another_form(
    case: str, runner: Runner, folder: Path, contents: dict[str, str]
) -> None:
    damage, sentence = READ_BY_CHECK[case]
    damage(folder / "tok/tokenizer.json", json.loads(contents["BPE"]))
    for command in COMMANDS if case in ("truncated", "a FIFO", "id huge") else ["check"]:
        refused(runner, folder, command, sentence)


@pytest.mark.parametrize("case", rest_is_slow(list(READ_BY_THE_LIBRARY), 3))
def test_commands_refuse_what_the_library_cannot_do(
    case: str, runner: Runner, folder: Path, contents: dict[str, str]
) -> None:
    damage, sentence = READ_BY_THE_LIBRARY[case]
    damage(folder / "tok/tokenizer.json", json.loads(contents["BPE"]))
    assert runner.run(COMMANDS["check"], folder).status == 0
    for command in ["prepare", "generate", "chat"][: {"slow regex": 1, "doubling": 2}.get(case)]:
        refused(runner, folder, command, sentence)


def config_of(folder: Path) -> TokenizerConfig:
    return TokenizerConfig(kind="huggingface", path=str(folder))


@pytest.mark.parametrize("name", KINDS)
def test_the_check_and_the_library_agree_on_the_vocabulary(name: str, contents: dict[str, str], tmp_path: Path) -> None:
    """The library gives an added token the next id. Another "id" in the file is refused."""
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    for added in [[], [5], [10**6, 7, 2**30], [2**31 - 1] * 2]:
        for gap in (0, 17):
            content = json.loads(contents[name])
            vocabulary = content["model"]["vocab"]
            if gap and isinstance(vocabulary, dict):
                vocabulary["gap"] = len(vocabulary) + gap
            content["added_tokens"] += [
                {"id": number, "content": f"<{index}>", "special": bool(index % 2), **flags}
                for index, number in enumerate(added)
            ]
            content["added_tokens"] += [{"id": 0, "content": "", "special": True, **flags}]
            (tmp_path / "tokenizer.json").write_text(json.dumps(content))
            section._parse.cache_clear()
            if added:
                with pytest.raises(ConfigError, match=r'"<0>"\) has the id \d+, but the package tokenizers'):
                    build_tokenizer(config_of(tmp_path))
            library = tokenizers.Tokenizer.from_str(json.dumps(content))
            for token in content["added_tokens"][:-1]:
                token["id"] = library.token_to_id(token["content"])
            (tmp_path / "tokenizer.json").write_text(json.dumps(content))
            section._parse.cache_clear()
            loaded = build_tokenizer(config_of(tmp_path))
            assert loaded.vocab_size == vocabulary_size(config_of(tmp_path)), (added, gap)
            for token in (END, "<0>", "<1>")[: len(added) + 1]:
                assert isinstance(loaded, HuggingFaceTokenizer)
                assert loaded.token(token) == section._tokens(config_of(tmp_path))[token]


VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2**31, 2**32, 2**64, 10**200, 0.5, 1e300, "", "a", "\0", "(", "(a*)*", "e" * 1000),
    *(
        [],
        {},
        [[]],
        [{}],
        {"a": 1},
        [["a", 1]],
        [["a", "b", "c"]],
        {"type": "Sequence"},
        {"String": ""},
        {"Regex": "*"},
    ),
    *(
        "Removed",
        "MergedWithNext",
        "Split",
        "ByteLevel",
        "NFKD",
        "Precompiled",
        {"type": "BPE"},
        {"type": "Precompiled"},
    ),
    {"type": "Replace", "pattern": {"String": ""}, "content": "aa"},
    {"type": "Sequence", "normalizers": [], "pretokenizers": [], "processors": [], "decoders": []},
    {"type": "Precompiled", "precompiled_charsmap": "AAAA////"},
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths of all values, of which those in arrays and vocabularies are the first three."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    found = [path] if path else []
    for key, item in list(items)[: 3 if isinstance(value, list) or "vocab" in path else None]:
        found += places(item, (*path, key))
    return found


def mutated(content: str, draw: random.Random) -> str:
    """Return a `tokenizer.json` in which one to three values are others, missing, or of another place."""
    value = json.loads(content)
    for _ in range(draw.choice((1, 1, 2, 3))):
        path = draw.choice(places(value) or [()])
        if not path:
            break
        target = value
        for key in path[:-1]:
            target = target[key]
        action = draw.randrange(4)
        if action == 0:
            del target[path[-1]]
        elif action == 1:
            target[path[-1]] = [deepcopy(target[path[-1]]) for _ in range(draw.choice((1, 2, 50)))]
        else:
            target[path[-1]] = deepcopy(draw.choice(VALUES))
    return json.dumps(value)


FUZZED = [
    pytest.param(50, id="some"),
    pytest.param(3000, id="many", marks=[pytest.mark.slow, pytest.mark.timeout(900)]),
]


@pytest.mark.parametrize("count", FUZZED)
@pytest.mark.parametrize("name", KINDS)
def test_no_file_gives_anything_but_a_sentence(
    name: str, count: int, contents: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limited_process, "SECONDS", 0.5)
    draw, content, loaded = random.Random(f"{name} 1"), contents[name], 0
    file = tmp_path / "tokenizer.json"
    for index in range(count):
        mutant = mutated(content, draw).encode() if index % 3 else damaged_text(content.encode(), draw)
        file.write_bytes(mutant)
        section._parse.cache_clear()
        config = config_of(tmp_path)
        try:
            size = vocabulary_size(config)
            special_token(config)
            assert isinstance(tokenizer_beside(tmp_path), TokenizerConfig)
            tokenizer = build_tokenizer(config)
            assert tokenizer.vocab_size <= size, mutant
            (tokens,) = tokenizer.encode_documents([TEXTS[1].encode()])
            assert all(0 <= token < size for token in tokens.tolist()), mutant
            ids, offsets = tokenizer.encode_chat(TEXTS[1] + END)
            assert len(ids) == len(offsets)
            tokenizer.decode(tokens)
            loaded += 1
        except ConfigError as error:
            assert all(problem.key[0] == "tokenizer" for problem in error.problems)
            assert len(str(error)) < 2000, mutant
    assert 0 < loaded < count, "some mutants can be used"
