"""Compilation of the phantom GPU for the installed build of PyTorch. The result is in the user's cache."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from titan_launch.core.cache import built_once
from titan_launch.core.errors import UserError

_SOURCES = Path(__file__).parent / "sources"

_HEADERS = "nvidia/cu13/include"
"""Folder of CUDA's headers beside torch, from the package nvidia-cuda-runtime, which torch requires."""

_UNANSWERED = {"cuda": 801, "cu": 801, "cupti": 27, "nccl": 3, "cusolver": 9, "cusparse": 10, "cufft": 16}
"""Status that an unimplemented function returns, by the first letters of its name. The status is "not supported" of its
library, or for NCCL "internal error". (Unimplemented functions of cuBLAS return 0.)"""

_NAME = rf"(?:__cuda|cublas|{'|'.join(_UNANSWERED)})[A-Z]\w*"
"""Pattern of the names of functions of CUDA's libraries."""

_LIBRARIES = ("libtorch", "libc10", "libcaffe2")
"""Beginnings of the names of PyTorch's own libraries."""


def build() -> Path:
    """Return the folder with `libcuda.so.1`, the library to preload. Compile the library if it is not in the cache.

    Raises UserError if torch for CUDA 13, CUDA's headers, gcc or nm is missing. Also raises UserError if the
    compilation fails, or if the cache cannot be written.
    """
    torch = _torch_folder()
    files = (*sorted(_SOURCES.rglob("*.*")), Path(__file__), torch / "version.py")
    identity = [str(torch), hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()]
    return built_once("phantom_gpu", identity, lambda folder: _compile(folder, torch), "compiling the phantom GPU")


def _torch_folder() -> Path:
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        raise UserError("error: the phantom GPU needs torch: pip install torch")
    folder = Path(spec.origin).parent
    text = (folder / "version.py").read_text()
    version, cuda = (
        (found.group(1) if (found := re.search(rf"^{name}\b[^=]*= '([^']*)'", text, re.MULTILINE)) else None)
        for name in ("__version__", "cuda")
    )
    if cuda is None:
        reason = "which has no code for CUDA; install torch from PyPI (pip install torch) in an environment of its own"
        raise UserError(f"error: the phantom GPU cannot run torch {version}, {reason}")
    if not cuda.startswith("13."):
        reason = f"but torch {version} is for CUDA {cuda}; install torch from PyPI (pip install torch)"
        raise UserError(f"error: the phantom GPU needs torch for CUDA 13, {reason}")
    if not (folder.parent / _HEADERS / "cuda.h").exists():
        raise UserError("error: the phantom GPU needs CUDA's headers: pip install nvidia-cuda-runtime")
    return folder


def _compile(folder: Path, torch: Path) -> None:
    tools = {name: shutil.which(name) for name in ("gcc", "nm")}
    if missing := [name for name, path in tools.items() if path is None]:
        remedy = "install a C compiler (Debian: apt install gcc)"
        reason = f"{missing[0]} is not installed, but the phantom GPU is compiled at its first use"
        raise UserError(f"error: {reason}; {remedy}")
    sources = sorted(_SOURCES.glob("*.c"))
    generated = folder / "unanswered.c"
    texts = "".join(path.read_text() for path in sources)
    generated.write_text("\n".join(_generated(_imported_names(torch / "lib"), texts)))
    library, exports = folder / "libcuda.so.1", _SOURCES / "exports.map"
    includes = [f"-I{_SOURCES}", f"-I{torch.parent / _HEADERS}"]
    options = ["-O1", "-w", "-shared", "-fPIC", f"-Wl,--version-script={exports}", *includes, "-o", str(library)]
    command = ["gcc", *options, *map(str, sources), str(generated), "-lm", "-lpthread", "-ldl"]
    ended = subprocess.run(command, capture_output=True, text=True)
    if ended.returncode:
        raise UserError(f"error: the phantom GPU cannot be compiled:\n{ended.stderr.strip()[-2000:]}")
    (folder / "libnvidia-ml.so.1").symlink_to(library.name)
    Path(shutil.copy(_SOURCES / "nvidia-smi", folder)).chmod(0o755)
    generated.unlink()


def _imported_names(libraries: Path) -> set[str]:
    """Return the names of the functions of CUDA's libraries that PyTorch's libraries import."""
    files = [str(path) for name in _LIBRARIES for path in sorted(libraries.glob(f"{name}*.so"))]
    output = subprocess.run(["nm", "-D", "--undefined-only", *files], capture_output=True, text=True, check=True).stdout
    return set(re.findall(rf" U ({_NAME})", output))


def _generated(imported: set[str], sources: str) -> Iterator[str]:
    """Yield the lines of a C file. It defines each function of `imported` that the C code `sources` does not define."""
    answered = set(re.findall(rf"\b({_NAME})\s*[()]", sources))
    yield "int phantom_unanswered(const char *name, int status);"
    for name in sorted(imported - answered):
        if name.startswith("cublas"):
            yield f"int {name}() {{ return 0; }}"
        else:
            library = max((known for known in _UNANSWERED if name.startswith(known)), key=len, default="cuda")
            yield f'int {name}() {{ return phantom_unanswered("{name}", {_UNANSWERED[library]}); }}'
