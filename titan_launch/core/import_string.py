"""Import strings: `package.module:attribute` in a job file names a Python object of the user."""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import site
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from titan_launch.core.errors import KeyPath, config_error, did_you_mean

FOLDERS_CHOOSE_NO_CODE = "for security, a folder cannot choose the code to run"
"""Reason in errors about a folder whose `config.json` names the import string of a factory."""

_OWN_FOLDER = str(Path(__file__).resolve().parents[1]) + os.sep
_IMPORT_MACHINERY = ("<frozen importlib", str(Path(importlib.__file__).resolve().parent) + os.sep)


def import_factory(name: str, key: KeyPath = ("model", "name")) -> Callable[..., Any]:
    """Return the callable that `package.module:attribute` names. The attribute may have dots (`my_models:Net.small`).

    The working directory is importable, as with `python -m`. Raises ConfigError on `key` if there is no such callable.
    If the user's module raises an error while it is imported, the ConfigError contains the user's part of the
    traceback.
    """
    module_name, colon, attribute = name.partition(":")
    if not (module_name and colon and attribute):
        raise config_error(key, 'must have the form "package.module:attribute"', name)
    found = _import_module(module_name, name, key)
    _NAMED_PACKAGES.add(module_name.partition(".")[0])
    path = module_name
    for part in attribute.split("."):
        if not hasattr(found, part):
            public = [candidate for candidate in dir(found) if not candidate.startswith("_")]
            raise config_error(key, f'{path} has no attribute "{part}"{did_you_mean(part, public)}', name)
        found, path = getattr(found, part), f"{path}.{part}"
    if not callable(found):
        raise config_error(
            key, f"{path} is of type {type(found).__name__}, which is not callable; name a function or a class", name
        )
    return found


_NAMED_PACKAGES: set[str] = set()
"""Top-level packages of the modules that `import_factory` has imported in this process."""

_realpath = functools.cache(os.path.realpath)


def user_files() -> list[str]:
    """Return the paths of the user's source files: the files of all imported modules that belong neither to Python, nor
    to an installed package, nor to this package. An installed package that an import string has named counts as the
    user's own code, except for PyTorch."""
    known = (_OWN_FOLDER, _realpath(_torch_folder()) + os.sep)
    installed = tuple(_realpath(folder) + os.sep for folder in _installed_folders())
    files = set[str]()
    for name, module in [*sys.modules.items()]:
        file = _realpath(getattr(module, "__file__", None) or "")
        is_named = name.partition(".")[0] in _NAMED_PACKAGES
        if not file.startswith(known) and (is_named or not file.startswith(installed)) and os.path.isfile(file):
            files.add(file)
    return sorted(files)


def _installed_folders() -> set[str]:
    """Return the folders of the standard library, of installed packages and of scripts. Packages of the base
    installation of Python (`sys.base_prefix`) are included."""
    paths = sysconfig.get_paths()
    own = {paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib", "scripts")}
    return own | {*site.getsitepackages([sys.prefix, sys.base_prefix]), site.getusersitepackages()}


class RefusedImportError(ImportError):
    """The error for a module in a folder from which imports are refused."""


def refuse_imports_from(folders: Iterable[Path], parent: Path) -> None:
    """Refuse imports from `folders`, from the run folders in `parent`, and from their subfolders, in this process.

    The working directory is importable and usually contains the run folders. Files in a run folder may come from
    somebody else, and importing them would run their code. A folder that contains the working directory is not refused.
    A later call replaces an earlier one.
    """
    finder = _RefusingFinder(map(os.path.realpath, folders), os.path.realpath(parent))
    sys.meta_path[:] = [finder, *(other for other in sys.meta_path if not isinstance(other, _RefusingFinder))]


class _RefusingFinder(importlib.abc.MetaPathFinder):
    """A meta path finder that raises RefusedImportError for modules in refused folders. The finders after it find all
    other modules."""

    def __init__(self, folders: Iterable[str], parent: str):
        self._working_directory = os.path.join(os.path.realpath(os.getcwd()), "")
        self._folders = tuple(folder for folder in folders if not self._contains_working_directory(folder))
        self._parent = parent

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> None:
        for entry in sys.path if path is None else path:
            location = os.path.join(_realpath(os.path.abspath(entry)), name.rpartition(".")[2])
            if self._is_inside(location) and any(os.path.exists(location + end) for end in _MODULE_SUFFIXES):
                reason = f"{location} is in the folder of a run or a checkpoint, from which imports are refused"
                raise RefusedImportError(f"{reason}; move the module to another folder")

    def _is_inside(self, location: str) -> bool:
        if f"{location}{os.sep}".startswith(tuple(os.path.join(folder, "") for folder in self._folders)):
            return True
        while location.startswith(os.path.join(self._parent, "")):
            if not self._contains_working_directory(location) and any(
                os.path.exists(os.path.join(location, mark)) for mark in _RUN_FOLDER_ENTRIES
            ):
                return True
            location = os.path.dirname(location)
        return False

    def _contains_working_directory(self, folder: str) -> bool:
        return self._working_directory.startswith(os.path.join(folder, ""))


_RUN_FOLDER_ENTRIES = ("checkpoints", "launch.json")
_MODULE_SUFFIXES = ("", *importlib.machinery.all_suffixes())


def user_traceback(error: BaseException) -> str:
    """Return the traceback of an error without the frames of this package, of PyTorch and of `importlib`."""
    trace = traceback.TracebackException.from_exception(error)
    link: traceback.TracebackException | None = trace
    while link is not None:
        link.stack = traceback.StackSummary.from_list([frame for frame in link.stack if is_user_file(frame.filename)])
        link = link.__cause__ or link.__context__
    return "".join(trace.format()).rstrip()


def raised_in_user_forward(error: BaseException) -> bool:
    """Return True if an error was raised inside a `forward` of the user's code."""
    frames = traceback.extract_tb(error.__traceback__)
    return any(frame.name == "forward" and is_user_file(frame.filename) for frame in frames)


def user_location(error: BaseException, or_own: bool = False) -> str | None:
    """Return `file:line` of the innermost frame in the user's code. If there is no such frame, return None or, with
    `or_own`, the location of the innermost frame in this package."""
    frames = traceback.extract_tb(error.__traceback__)
    user_frames = [frame for frame in frames if is_user_file(frame.filename)]
    own_frames = [frame for frame in frames if or_own and frame.filename.startswith(_OWN_FOLDER)]
    candidates = user_frames or own_frames
    return f"{candidates[-1].filename}:{candidates[-1].lineno}" if candidates else None


def is_user_file(name: str) -> bool:
    """Return True if a source file belongs neither to this package, nor to PyTorch, nor to `importlib`."""
    return not name.startswith((_OWN_FOLDER, _torch_folder(), *_IMPORT_MACHINERY))


@functools.cache
def _torch_folder() -> str:
    torch = importlib.util.find_spec("torch")
    assert torch is not None and torch.origin is not None
    return os.path.dirname(torch.origin) + os.sep


def _import_module(module_name: str, name: str, key: KeyPath) -> Any:
    folder = os.getcwd()
    if folder not in sys.path and "" not in sys.path:  # as in an installed console script, unlike `python -m`
        sys.path.insert(0, folder)
        importlib.invalidate_caches()
    try:
        return importlib.import_module(module_name)
    except RefusedImportError as error:
        raise config_error(key, str(error), name) from None
    except ModuleNotFoundError as error:
        if error.name is not None and f"{module_name}.".startswith(f"{error.name}."):
            missing = f'there is no module "{error.name}" in {os.getcwd()} or the installed packages'
            raise config_error(key, f"{missing}; correct the name, or install the module", name) from None
        raise config_error(key, f"importing {module_name} failed:\n{user_traceback(error)}", name) from error
    except (Exception, SystemExit) as error:  # a script without `if __name__ == "__main__"` may call sys.exit
        raise config_error(key, f"importing {module_name} failed:\n{user_traceback(error)}", name) from error
