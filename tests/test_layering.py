"""The layers of docs/explanation/architecture.md: a module imports from lower ranks, or from its own package."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from titan_launch.models.architectures import ARCHITECTURES

ROOT = Path(__file__).parent.parent / "titan_launch"

RANKS = {
    "core": 0,
    "config": 1,
    "plan": 2,
    "distributed": 3,
    "models": 4,
    "precision": 4,
    "data": 4,
    "optim": 4,
    "checkpoint": 4,
    "metrics": 4,
    "cpu": 4,
    "parallel": 5,
    "loss": 6,
    "train": 7,
    "trace": 8,
    "prove": 8,
    "launch": 8,
    "recipes": 8,
    "inference": 8,
    "report": 8,
    "phantom_gpu": 8,
    "commands": 9,
    "cli": 10,
    "__main__": 11,
}
TORCH_FREE = {"core", "config", "plan", "launch", "recipes", "report", "phantom_gpu", "commands", "cli", "__main__"}
IMPORT_TORCH = {ROOT / "launch" / "agent.py", ROOT / "phantom_gpu" / "operators.py"}
"""The only files of these packages that import torch at their top. `launch` imports the first when ranks are started.
The second is loaded when a process with a phantom GPU has imported torch."""

DESCRIPTIONS = {
    path
    for glob in ("args.py", "architectures.py", "*/args.py", "*/*_args.py", "*/families.py", "*/huggingface_*.py")
    for path in (ROOT / "models").glob(glob)
} | {
    ROOT / "models" / "huggingface" / name
    for name in ("files.py", "config_json.py", "adapter_config.py", "image_processor.py")
}
"""The files of `models` that describe models without torch: arguments, sizes, names in the files of Hugging Face. They
have the layer of the job file, whose table `[model.args]` they define."""

MODULES = sorted(path for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py")


def package_of(path: Path) -> str:
    return "config" if path in DESCRIPTIONS else path.relative_to(ROOT).parts[0].removesuffix(".py")


def file_of(module: str) -> Path:
    """Return the file of a module of this package, or the folder of a package."""
    path = ROOT.joinpath(*module.split(".")[1:])
    return path if path.is_dir() else path.with_suffix(".py")


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imports(tree: ast.AST, top_level_only: bool = False) -> Iterator[str]:
    """Yield full names of imported modules, without those of `if TYPE_CHECKING`."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            module, names = node.module or "", [alias.name for alias in node.names]
            is_own = module.startswith("titan_launch")
            modules = [f"{module}.{name}" for name in names if is_own and file_of(f"{module}.{name}").exists()]
            yield from modules
            if len(modules) < len(names):
                yield module
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        elif not (top_level_only and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)):
            yield from imports(node, top_level_only)


def test_imports_point_down() -> None:
    assert [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in MODULES
        for name in imports(tree_of(path))
        if name.startswith("titan_launch.")
        if (package := package_of(file_of(name))) != package_of(path) and RANKS[package] >= RANKS[package_of(path)]
    ] == []


def test_packages_that_report_config_errors_do_not_import_torch() -> None:
    assert [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in MODULES
        if package_of(path) in TORCH_FREE and path not in IMPORT_TORCH
        for name in imports(tree_of(path), top_level_only=True)
        if name.partition(".")[0] in {"torch", "numpy", "torchdata", "tensorboard"}
    ] == []


def test_only_the_switch_in_train_imports_the_cpu_package() -> None:
    """The program is complete without the folder `cpu/` and that one call; tests/cpu/test_switch.py trains without
    them."""
    importers = [
        str(path.relative_to(ROOT))
        for path in MODULES
        if package_of(path) != "cpu" and any(name.startswith("titan_launch.cpu") for name in imports(tree_of(path)))
    ]
    assert importers == ["train/build.py"]


def test_no_code_asks_for_the_arguments_of_one_model() -> None:
    """The launcher asks `ModelArgs`. A type test would have to be found and extended for every new model."""
    args = {architecture.args.__name__ for architecture in ARCHITECTURES.values()}
    tests = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in MODULES
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("isinstance", "issubclass")
        if any(isinstance(name, ast.Name) and name.id in args for name in ast.walk(node))
    ]
    assert not tests


def test_only_the_door_of_the_terminal_prints() -> None:
    """Names from files may have control characters; core/terminal.py escapes them."""
    streams = {f"sys.{name}.{method}" for name in ("stdout", "stderr") for method in ("write", "writelines")}
    calls = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in MODULES
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in {"print", "traceback.print_exc", *streams}
        if path != ROOT / "core" / "terminal.py"
    ]
    assert not calls
