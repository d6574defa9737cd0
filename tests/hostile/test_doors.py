"""The places of the package that read files, start programs or run code: each is known, and has a reason.

A file of a stranger is opened by `open_regular` or `read_regular` (core/files.py), and JSON is parsed by
core/json_files.py. This test finds every other place in the source.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

import titan_launch

PACKAGE = Path(titan_launch.__file__).parent

FUNCTIONS = {
    "json": ("json.load", "json.loads", "json.JSONDecoder", "pydantic_core.from_json", "orjson.loads"),
    "toml": ("tomli.load", "tomli.loads", "tomllib.load", "tomllib.loads"),
    "image": ("PIL.Image.open", "torchvision.io.read_image", "torchvision.io.decode_image", "cv2.imread"),
    "array": ("numpy.load", "numpy.fromfile", "numpy.memmap", "numpy.loadtxt", "torch.from_file", "mmap.mmap"),
    "pickle": (
        *(
            "pickle.load",
            "pickle.loads",
            "pickle.Unpickler",
            "torch.load",
            "yaml.load",
            "yaml.safe_load",
            "joblib.load",
        ),
        *("marshal.load", "marshal.loads", "shelve.open", "dill.loads", "cloudpickle.loads"),
    ),
    "archive": ("tarfile.open", "zipfile.ZipFile", "gzip.open", "lzma.open", "bz2.open", "shutil.unpack_archive"),
    "program": (
        *("subprocess.Popen", "subprocess.run", "subprocess.call", "subprocess.check_call", "subprocess.check_output"),
        *("os.system", "os.popen", "os.execv", "os.execve", "os.execvp", "os.execvpe", "os.execl", "os.execlp"),
        *("os.posix_spawn", "os.spawnv", "os.spawnvp", "os.fork", "pty.spawn", "webbrowser.open"),
    ),
    "code": (
        *("eval", "exec", "compile", "__import__", "importlib.import_module", "importlib.reload", "runpy.run_path"),
        *(
            "runpy.run_module",
            "importlib.util.spec_from_file_location",
            "builtins.eval",
            "builtins.exec",
            "ctypes.CDLL",
        ),
    ),
    "read": ("os.open", "io.open", "codecs.open", "fileinput.input", "linecache.getlines"),
}
"""Functions by kind. `read`: opens a file, of any kind and size."""

METHODS = {
    **dict.fromkeys(("validate_json", "model_validate_json"), "json"),
    **dict.fromkeys(("read_text", "read_bytes"), "read"),
    **dict.fromkeys(("safe_open", "load_from_disk", "load_dataset", "ParquetFile", "read_metadata"), "library"),
    **dict.fromkeys(("from_pretrained", "extractall", "extract_all"), "library"),
}
"""Methods by name, and their kinds. `open` is found by its mode. `library`: a library opens a file itself."""

ALLOWED = {
    # The doors.
    ("json", "core/json_files.py"): "the reader of JSON",
    ("read", "core/files.py"): "`open_regular`, and files that are written",
    ("image", "data/images/pillow.py"): "the reader of images, with named formats",
    ("pickle", "core/limited_process.py"): "messages between this process and the helper process that it has started",
    # Formats that have one reader. It gets an open file, or bytes.
    ("archive", "checkpoint/index.py"): "a record of `torch.save`, whose header is read and whose pickle is not",
    ("archive", "data/corpora/text_files.py"): "gzip as a stream of an open file",
    ("archive", "data/images/arrays.py"): "the members of an .npz file that is open; their sizes are compared before",
    ("archive", "data/images/encoded.py"): "the members of a tar file that is open; nothing is extracted",
    ("json", "checkpoint/index.py"): "the index of a checkpoint is large; its values are counted before",
    ("json", "metrics/sinks/jsonl.py"): "the step of a line of a run's own reports, which has a limit",
    ("pickle", "train/health/flight_recorder.py"): "records of PyTorch; opcodes that call or import are refused",
    ("toml", "config/loading/job_files.py"): "the reader of job files",
    ("toml", "config/loading/merge.py"): "words of the command line",
    ("array", "data/foreign_tokens.py"): "maps of open files, with the sizes of their headers",
    ("array", "data/images/arrays.py"): "maps of members of an .npz file, with the sizes of their headers",
    ("read", "data/images/arrays.py"): "a member of an .npz file that is open",
    ("array", "data/packing.py"): "maps of files in the cache, which have known digests",
    ("array", "data/token_files.py"): "maps of shards; the header has their sizes",
    ("library", "data/corpora/huggingface.py"): "the package datasets, which runs no scripts",
    ("library", "models/weights/folder.py"): "safetensors; the header is compared with the file before",
    ("json", "plan/memory/recordings.py"): "entries of the user's own cache, which have digests",
    ("read", "plan/memory/recordings.py"): "the same",
    ("library", "prove/weights.py"): "transformers, which reads safetensors only, and runs no code of the folder",
    ("library", "recipes/facts.py"): "pyarrow, for the columns of a Parquet file",
    ("toml", "config/loading/toml_positions.py"): "a quoted key of a job file that was read",
    # Files that this process or its parent has just written.
    ("json", "train/run_folder/records.py"): "the job of this process as a table",
    ("json", "train/trace_subprocess.py"): "output of a process that this process has started",
    ("read", "checkpoint/writer.py"): "the index that DCP has just written",
    ("pickle", "core/process.py"): "results of forks of this process, through pipes",
    ("pickle", "prove/measure.py"): "results of another process of this proof, in its temporary folder",
    ("pickle", "prove/ranks.py"): "results of ranks that this process has forked, through pipes",
    ("program", "core/process.py"): "forks of this process, which run its own functions",
    ("read", "core/process.py"): "marks in a temporary folder of this start, and pipes of forks",
    ("read", "metrics/sinks/jsonl.py"): "the run's own open file of reports",
    ("read", "train/output.py"): "a log that is written",
    ("read", "train/run_folder/folder.py"): "the lock and the run folder itself; their kinds are checked before",
    ("read", "commands/generate.py"): "the prompt that the command line names, which may be a pipe",
    ("read", "core/limited_process.py"): "pipes to the helper process, and /proc",
    ("read", "core/cache.py"): "a lock of the cache, which is never a link",
    ("read", "data/prepare.py"): "a lock of token files, which is never a link",
    # Messages of this start's processes.
    ("json", "distributed/torch_private.py"): "PyTorch's records in memory",
    ("json", "train/health/watchdog.py"): "the store of this run's process group",
    # Files of the package and of the system.
    ("read", "commands/init.py"): "job files of the package",
    ("read", "models/huggingface/args.py"): "the source of the installed transformers",
    ("read", "config/reference.py"): "documentation of the package, by its developers",
    ("read", "core/signals.py"): "/proc",
    ("read", "plan/hardware.py"): "/proc and /sys",
    ("read", "phantom_gpu/build.py"): "C files of the package, and the version of the installed torch",
    # Programs, modules and libraries that no file names.
    ("code", "cli.py"): "modules of the commands",
    ("code", "core/import_string.py"): "an import string of a job file: code of the user, which `check` can refuse",
    ("code", "core/signals.py"): "the C library",
    ("code", "cpu/allocator.py"): "the C library",
    ("code", "launch/torchrun.py"): "torch",
    ("code", "metrics/sinks/__init__.py"): "modules of the sinks",
    ("code", "prove/ranks.py"): "functions of this package, by name",
    ("pickle", "models/factory.py"): "replaced by a function without values while a factory runs",
    ("program", "core/limited_process.py"): "this program",
    ("program", "core/fingerprint.py"): "git, in the working directory",
    ("program", "launch/options.py"): "nvidia-smi",
    ("code", "phantom_gpu/operators.py"): "the C library",
    ("code", "phantom_gpu/startup/sitecustomize.py"): "a module of the package",
    ("program", "phantom_gpu/__main__.py"): "the command that the command line names",
    ("program", "phantom_gpu/build.py"): "gcc and nm, on files of the package and of torch",
    ("program", "train/trace_subprocess.py"): "this program",
}
"""Places by kind and file, with the reason why the place is none of the doors or is a door itself."""

_KINDS = {function: kind for kind, functions in FUNCTIONS.items() for function in functions}


def modules() -> dict[str, Path]:
    """Return the files of the package by name."""
    return {str(path.relative_to(PACKAGE)): path for path in sorted(PACKAGE.rglob("*.py"))}


def doors(source: str) -> Iterator[tuple[str, int]]:
    """Yield the kind and the line of every call that FUNCTIONS and METHODS name."""
    nodes = list(ast.walk(ast.parse(source)))
    names = dict(_imported(nodes))
    called = {id(node.func) for node in nodes if isinstance(node, ast.Call)}
    types = {id(node.value) for node in nodes if isinstance(node, ast.Subscript)}  # `Popen[bytes]`
    for node in nodes:
        if isinstance(node, ast.Call):
            if _reads(node, names):
                yield "read", node.lineno
            elif isinstance(node.func, ast.Attribute) and node.func.attr in METHODS:
                yield METHODS[node.func.attr], node.lineno
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load) and id(node) not in types:
            name = _full_name(node, names)
            if name in _KINDS and (id(node) in called or "." in name):  # also a function that is handed on
                yield _KINDS[name], node.lineno


def _imported(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, str]]:
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                package = alias.name.partition(".")[0]
                yield (alias.asname, alias.name) if alias.asname else (package, package)
        elif isinstance(node, ast.ImportFrom) and node.module is not None and not node.level:
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module}.{alias.name}"


def _full_name(node: ast.expr, names: dict[str, str]) -> str:
    """Return the dotted name of a function, with the module from which it was imported; "" for others."""
    if isinstance(node, ast.Name):
        return names.get(node.id, node.id)
    if isinstance(node, ast.Attribute):
        root = _full_name(node.value, names)
        return f"{root}.{node.attr}" if root else ""
    return ""


def _reads(call: ast.Call, names: dict[str, str]) -> bool:
    """Return True if a call of `open` or `PATH.open` may read."""
    if isinstance(call.func, ast.Name) and call.func.id == "open" and "open" not in names:
        mode = call.args[1:2]
    elif isinstance(call.func, ast.Attribute) and call.func.attr == "open":
        root = call.func.value
        while isinstance(root, ast.Attribute):
            root = root.value
        if isinstance(root, ast.Name) and root.id in names:  # a function of a module
            return False
        mode = call.args[:1]
    else:
        return False
    mode = mode or [keyword.value for keyword in call.keywords if keyword.arg == "mode"]
    text = mode[0].value if mode and isinstance(mode[0], ast.Constant) else "r"
    return not (isinstance(text, str) and set(text) & set("wxa"))


@cache
def found() -> dict[tuple[str, str], list[int]]:
    """Return the lines of all calls, by kind and file."""
    lines: dict[tuple[str, str], list[int]] = {}
    for name, path in modules().items():
        for kind, line in doors(path.read_text(encoding="utf-8")):
            lines.setdefault((kind, name), []).append(line)
    return lines


def test_every_door_is_known() -> None:
    """If this test fails, use core/files.py and core/json_files.py, or add the place with its reason."""
    lines = ((kind, name, line) for (kind, name), lines in found().items() for line in lines)
    assert not [place for place in lines if place[:2] not in ALLOWED]


def test_no_place_is_listed_that_is_gone() -> None:
    assert not ALLOWED.keys() - found().keys()


@pytest.mark.parametrize(
    ("source", "kinds"),
    [
        ("import json\njson.loads(text)", ["json"]),
        ("from json import loads as read\nread(text)", ["json"]),
        ("import json as j\nmap(j.loads, lines)", ["json"]),
        ("adapter.validate_json(text)", ["json"]),
        ("json.loads(text)\nimport json", ["json"]),
        ("open(path)", ["read"]),
        ("open(path, 'rb')", ["read"]),
        ("open(path, mode)", ["read"]),
        ("open(path, 'r+b')", ["read"]),
        ("open(path, mode='w')", []),
        ("path.open()", ["read"]),
        ("path.open('ab')", []),
        ("open_regular(path)", []),
        ("Path(name).read_text()", ["read"]),
        ("from PIL import Image\nImage.open(path)", ["image"]),
        ("import PIL.Image\nPIL.Image.open(path)", ["image"]),
        ("def f():\n    import numpy as np\n    return np.load(path)", ["array"]),
        ("import torch\ntorch.load(path)", ["pickle"]),
        ("from subprocess import Popen\nPopen(x)", ["program"]),
        ("import subprocess\nx: subprocess.Popen[bytes]", []),
        ("eval(text)", ["code"]),
        ("model.eval()", []),
        ("re.compile(text)", []),
        ("from importlib import import_module\nimport_module(name)", ["code"]),
        ("import os\nos.system(name)", ["program"]),
        ("datasets.load_dataset(name)", ["library"]),
    ],
)
def test_doors_are_found(source: str, kinds: list[str]) -> None:
    assert [kind for kind, _ in doors(source)] == kinds
