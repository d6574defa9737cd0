"""A checkpoint from an untrusted source cannot execute code. The tests use named attacks and randomly mutated files."""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import random
import resource
import shutil
import struct
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint.metadata
from torch import Tensor

from tests.checkpoint.states import saved, trained
from tests.distributed import run_ranks
from tests.sampling import sampled
from tests.tensors import assert_equal
from titan_launch.checkpoint.index import DCP_INDEX_FILE, INDEX_FILE, read_chunk, read_index
from titan_launch.checkpoint.loading import EVERYTHING, find_checkpoint, load_state
from titan_launch.checkpoint.manifest import DamagedCheckpointError, check, read_manifest, record_of, write_manifest
from titan_launch.checkpoint.state import Progress
from titan_launch.core.errors import UserError
from titan_launch.distributed.random_state import RandomState

MARK = "titan_launch_attack_mark"
"""The module that payloads import, and the folder that they create in the working directory."""


SLOTS = "__slotnames__"
"""Attribute that `copyreg` sets on a class when an object of the class is pickled, as ranks do to send objects."""


OF_AN_ERROR = ("pickle.find_class ('traceback'", "pickle.find_class ('titan_launch.checkpoint.manifest'")
"""Names in the pickles with which DCP sends an error to the other ranks."""


class _Calls:
    """An object whose pickle calls a function with the opcodes GLOBAL (or STACK_GLOBAL) and REDUCE."""

    def __init__(self, function: Callable[..., Any], *args: Any):
        self._call = (function, args)

    def __reduce__(self) -> Any:
        return self._call


def _set_attribute(index: bytes) -> bytes:
    """Return a pickle of DCP's index followed by BUILD with a slot state, which sets an attribute of a class."""
    name = f"outputs.other.checkpoints.step-3.{MARK}".encode()
    head = b"ctorch.distributed.checkpoint.metadata\nMetadata\nN}X\x0a\x00\x00\x00__module__X"
    return head + struct.pack("<I", len(name)) + name + b"s\x86b0" + index.removeprefix(b"\x80\x02")


_NAMED = (
    "os.system",
    "subprocess.Popen",
    "builtins.compile",
    "builtins.open",
    "importlib.import_module",
    "runpy.run_path",
    "socket.create_connection",
    "shutil.rmtree",
    "ctypes.CDLL",
    "code.interact",
    "timeit.timeit",
    "webbrowser.open",
    "operator.attrgetter",
    "numpy.load",
    "torch.hub.load",
)
"""Functions that an attack may call. Scanners of pickles refuse their modules."""


def _calling(name: str) -> Callable[[bytes], bytes]:
    module, _, function = name.rpartition(".")
    return lambda index: f"c{module}\n{function}\n(S'{MARK}'\ntR.".encode()


ATTACKS: dict[str, Callable[[bytes], bytes]] = {
    **{name: _calling(name) for name in _NAMED},
    "reduce": lambda index: pickle.dumps(_Calls(os.mkdir, MARK), protocol=2),
    "stack_global": lambda index: pickle.dumps(_Calls(os.mkdir, MARK), protocol=4),
    "eval": lambda index: pickle.dumps(_Calls(eval, f"__import__('os').mkdir('{MARK}')")),
    "exec": lambda index: pickle.dumps(_Calls(exec, f"import os; os.mkdir('{MARK}')")),
    "import": lambda index: f"c{MARK}\nanything\n.".encode(),
    "inst": lambda index: f"(S'{MARK}'\niposix\nmkdir\n.".encode(),
    "obj": lambda index: f"(cposix\nmkdir\nS'{MARK}'\no.".encode(),
    "newobj": lambda index: f"\x80\x02cposix\nmkdir\nS'{MARK}'\n\x85\x81.".encode("latin-1"),
    "nested": lambda index: pickle.dumps(_Calls(pickle.loads, pickle.dumps(_Calls(os.mkdir, MARK)))),
    "getattr": lambda index: pickle.dumps(_Calls(getattr, torch.Tensor, "backward")),
    "torch.load": lambda index: pickle.dumps(_Calls(torch.load, MARK)),
    "attribute of a class": _set_attribute,
    "attribute of a module": lambda index: b"ctorch\n__dict__\nX\x04\x00\x00\x00loadNs0" + index,
    "extension": lambda index: b"\x80\x02\x82\x01.",
    "persistent id": lambda index: b"Panything\n.",
    "huge": lambda index: b"\x80\x04\x8e" + struct.pack("<Q", 2**60) + b".",
}
"""Contents of DCP's index by the name of the attack. They cover the opcodes of pickletools that call, import or set,
and the functions on the lists of pickle scanners such as fickling."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    """Return the folder of a checkpoint, and its state."""
    folder = tmp_path_factory.mktemp("run") / "checkpoints"
    return folder / "step-1", run_ranks(saved, 2, folder, 1)[0]


def forge(checkpoint: Path, name: str, content: bytes) -> None:
    """Replace a file and correct its checksum in the manifest, as an attacker would."""
    (checkpoint / name).write_bytes(content)
    manifest = read_manifest(checkpoint)
    files = {**manifest.files, name: record_of(checkpoint / name)}
    write_manifest(checkpoint, type(manifest)(**{**vars(manifest), "files": files}))


@contextmanager
def watched() -> Iterator[set[str]]:
    """Collect the names that pickles load, and what is imported, run or started in the block. Fail if a class has
    changed."""
    events = ("import", "pickle.find_class", "exec", "os.system", "os.exec", "os.mkdir", "subprocess.Popen")
    seen: set[str] = set()
    is_watching = True

    def watch(event: str, args: Any) -> None:
        if is_watching and event in events:
            seen.add(f"{event} {args[:2]}")

    sys.addaudithook(watch)  # an audit hook cannot be removed
    before = _classes()
    try:
        yield seen
    finally:
        is_watching = False
    now = _classes()  # includes classes of modules imported meanwhile
    changed = [(name, key) for name in before for key in before[name].items() ^ now[name].items()]
    assert not changed, changed
    assert not any(MARK in name for name in sys.modules)


def _classes() -> dict[str, dict[str, int]]:
    """Return the attributes of the classes that DCP and the launcher define, by identity."""
    packages = ("torch.distributed.checkpoint", "titan_launch")
    return {
        f"{name}.{key}": {attribute: id(value) for attribute, value in vars(cls).items() if attribute != SLOTS}
        for name, module in list(sys.modules.items())
        if name.startswith(packages)
        for key, cls in vars(module).items()
        if isinstance(cls, type) and cls.__module__.startswith(packages)
    }


def load_all(paths: list[Path], folder: Path) -> list[tuple[str, dict[str, Tensor]]]:
    """Load each checkpoint, and return its refusal or an empty string, and the state at the end. The first checkpoint
    is intact."""
    os.chdir(folder)
    results = []
    usual: set[str] = set()  # ranks exchange pickles
    for path in [paths[0], *paths]:
        own = trained(0)
        problem = ""
        with watched() as seen:
            try:
                load_state(find_checkpoint(path, ("checkpoint", "load")), own.state, EVERYTHING)
            except UserError as error:
                problem = str(error)
        usual = usual or seen
        unusual = {event for event in seen - usual if not event.startswith(OF_AN_ERROR)}
        assert not unusual, (path, unusual)
        results.append((problem, own.everything()))
    assert not Path(MARK).exists()
    return results[1:]


@sampled("names", list(ATTACKS), 12)
def test_named_attacks_are_refused(
    names: tuple[str, ...], tmp_path: Path, checkpoint: tuple[Path, dict[str, Tensor]]
) -> None:
    """An attacker may also correct the digest of DCP's index in the launcher's index. The launcher never reads DCP's
    index."""
    path, state = checkpoint
    (tmp_path / f"{MARK}.py").write_text("raise SystemExit('executed')")
    paths, expected = [path], [""]
    for number, name in enumerate(names):
        attack = ATTACKS[name]
        for knows_index in (False,) if name in _NAMED else (False, True):
            copy = Path(shutil.copytree(path, tmp_path / f"{number}-{knows_index}"))
            content = attack((path / DCP_INDEX_FILE).read_bytes())
            forge(copy, DCP_INDEX_FILE, content)
            if knows_index:
                index = json.loads((copy / INDEX_FILE).read_text())
                index["dcp_index_sha256"] = hashlib.sha256(content).hexdigest()
                forge(copy, INDEX_FILE, json.dumps(index).encode())
            paths.append(copy)
            refusal = f"{DCP_INDEX_FILE} and {INDEX_FILE} are not from the same save"
            refusal = f"checkpoint.load: cannot be loaded as a checkpoint: {refusal}; name another checkpoint"
            expected.append("" if knows_index else refusal)
    for results in run_ranks(load_all, 2, paths, tmp_path):
        assert [problem for problem, _ in results] == expected
        for problem, tensors in results:
            if not problem:
                assert_equal(tensors, state)


def _forged_record(path: Path, content: Callable[[bytes], bytes]) -> None:
    """Append a changed record of the first tensor to its file, and point the index at the record."""
    index = json.loads((path / INDEX_FILE).read_text())
    chunk = next(iter(index["tensors"].values()))["chunks"][0]
    data = (path / chunk["file"]).read_bytes()
    record = content(data[chunk["start"] : chunk["start"] + chunk["length"]])
    chunk["start"], chunk["length"] = len(data), len(record)
    forge(path, chunk["file"], data + record)
    forge(path, INDEX_FILE, json.dumps(index).encode())


def _saved(value: Any) -> bytes:
    content = io.BytesIO()
    torch.save(value, content)
    return content.getvalue()


def test_records_of_tensors_are_not_unpickled(tmp_path: Path, checkpoint: tuple[Path, dict[str, Tensor]]) -> None:
    path, state = checkpoint
    with_payload = Path(shutil.copytree(path, tmp_path / "payload"))
    _forged_record(with_payload, lambda _: _saved(_Calls(os.mkdir, MARK)))
    with_both = Path(shutil.copytree(path, tmp_path / "both"))
    genuine = b"torch._utils"  # an offset inside the pickle of the record
    _forged_record(with_both, lambda record: record.replace(genuine, b"os" + b"x" * (len(genuine) - 2)))
    (results,) = run_ranks(load_all, 1, [path, with_payload, with_both], tmp_path)
    assert results[0][0] == results[2][0] == "" and "has no torch." in results[1][0]
    assert_equal(results[2][1], state)


def test_an_index_may_only_name_files_of_its_folder(tmp_path: Path, checkpoint: tuple[Path, dict[str, Tensor]]) -> None:
    """An index that names a FIFO is refused, even for a read of 0 bytes, because opening a FIFO blocks."""
    os.mkfifo(tmp_path / "fifo")
    for file in (str(tmp_path / "fifo"), "link", "fifo", "a\0b", ""):
        copy = Path(shutil.copytree(checkpoint[0], tmp_path / "step-1"))
        (copy / "link").symlink_to(tmp_path / "fifo")
        os.mkfifo(copy / "fifo")
        index = json.loads((copy / INDEX_FILE).read_text())
        index["tensors"]["progress.step"]["chunks"][0] |= {"file": file, "start": 0, "length": 0}
        (copy / INDEX_FILE).write_text(json.dumps(index))
        with pytest.raises(DamagedCheckpointError, match=r"has an invalid entry for the tensor progress\.step"):
            read_index(copy)
        shutil.rmtree(copy)


@pytest.mark.parametrize("name", ["numpy", "python", "torch"])
def test_an_impossible_random_state_is_refused(name: str) -> None:
    state = RandomState(torch.device("cpu"), 0, 0)
    saved = state.state_dict()
    wrong = {**saved, name: torch.zeros_like(saved[name])}
    wrong["numpy"][-2] = saved["numpy"][-2] if name != "numpy" else 10**6
    wrong["python"][-1] = saved["python"][-1] if name != "python" else 10**12
    with pytest.raises(ValueError):
        state.load_state_dict(wrong)
    state.load_state_dict(state.state_dict())


def test_a_checkpoint_with_an_impossible_number_of_samples_is_refused() -> None:
    for number in (-5, 2**62):
        with pytest.raises(ValueError, match=f"the run's progress is invalid: samples_seen = {number}"):
            Progress().load_state_dict({"samples_seen": torch.tensor(number)})


def _mutated(content: bytes, rng: random.Random) -> bytes:
    """Return the data with a few bytes changed, inserted, removed, repeated, or truncated."""
    data = bytearray(content)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(data) + 1)
        kind = rng.randrange(5)
        if kind == 0 and at < len(data):
            data[at] = rng.randrange(256)
        elif kind == 1:
            data[at:at] = rng.randbytes(rng.randint(1, 9))
        elif kind == 2:
            del data[at : at + rng.randint(1, 30)]
        elif kind == 3:
            data[at:at] = data[at : at + rng.randint(1, 200)]
        elif at > 1:
            del data[at:]
    return bytes(data)


def _mutated_json(content: bytes, rng: random.Random) -> bytes:
    """Return valid JSON in which one value has another type or is nested deeply."""
    table = json.loads(content)
    spots: list[tuple[Any, Any]] = []
    todo = [table]
    while todo:
        value = todo.pop()
        for key, inner in list(value.items()) if isinstance(value, dict) else list(enumerate(value)):
            spots.append((value, key))
            if isinstance(inner, (dict, list)):
                todo.append(inner)
    holder, key = rng.choice(spots)
    holder[key] = rng.choice([None, True, -1, 2**70, 1.5, "..", "../../etc/passwd", [], {}, [[]], "float64", 10**18, 0])
    text = json.dumps(table)
    return (text.replace("{", "[" * 100_000 + "{", 1) if rng.random() < 0.02 else text).encode()


def _read(folder: Path) -> None:
    """Read everything that a load reads, without a model."""
    check(folder)
    for tensor in read_index(folder).values():
        for chunk in tensor.chunks:
            assert read_chunk(folder, chunk, getattr(torch, tensor.dtype)).shape == chunk.sizes


@pytest.fixture
def memory() -> Iterator[Path]:
    """Return a folder in host memory if the host has one: the test syncs thousands of files in it."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as folder:
        yield Path(folder)


@pytest.mark.parametrize("cases", [300, pytest.param(2000, marks=pytest.mark.slow)])
def test_mutated_files_are_damaged_or_load(
    cases: int, memory: Path, checkpoint: tuple[Path, dict[str, Tensor]]
) -> None:
    """Mutate every file of a checkpoint many times, and correct the checksums."""
    rng = random.Random(0)
    path = Path(shutil.copytree(checkpoint[0], memory / "step-1"))
    originals = {file.name: file.read_bytes() for file in path.iterdir()}
    _read(path)
    damaged = 0
    with watched() as seen:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for _ in range(cases):
            name = rng.choice(sorted(originals))
            is_json = name.endswith(".json") and rng.random() < 0.7
            changed = (_mutated_json if is_json else _mutated)(originals[name], rng)
            if name == "manifest.json":
                (path / name).write_bytes(changed)
            else:
                forge(path, name, changed)
            try:
                _read(path)
            except DamagedCheckpointError:
                damaged += 1
            (path / name).write_bytes(originals[name])
            (path / "manifest.json").write_bytes(originals["manifest.json"])
    assert not seen
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # KiB
    assert cases / 2 < damaged < cases
