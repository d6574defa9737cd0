"""Import strings and their errors."""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path

import pytest

from titan_launch.core import import_string
from titan_launch.core.errors import ConfigError
from titan_launch.core.import_string import import_factory, refuse_imports_from, user_files


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty working directory. The import path and the modules are restored afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    return tmp_path


def _error(name: str) -> str:
    with pytest.raises(ConfigError) as caught:
        import_factory(name)
    (problem,) = caught.value.problems
    assert problem.key == ("model", "name")
    assert problem.value == name
    return problem.reason


def test_a_factory_in_the_working_directory_is_imported(folder: Path) -> None:
    Path("reg_pkg").mkdir()
    Path("reg_pkg/nets.py").write_text("class Net:\n    @staticmethod\n    def small():\n        return 'small'\n")
    assert import_factory("reg_pkg.nets:Net.small")() == "small"


@pytest.mark.parametrize("name", ["json", "json:", ":loads", "json.loads"])
def test_a_name_that_is_not_an_import_string_is_an_error(name: str) -> None:
    assert _error(name) == 'must have the form "package.module:attribute"'


def test_a_missing_module_is_named_with_the_folder_that_was_searched(folder: Path) -> None:
    assert _error("reg_absent.nets:build") == (
        f'there is no module "reg_absent" in {folder} or the installed packages; correct the name, or install the '
        "module"
    )
    assert 'no module "json.absent"' in _error("json.absent:build")


def test_a_missing_attribute_is_named_with_the_nearest(folder: Path) -> None:
    Path("reg_attribute.py").write_text("def build():\n    pass\n")
    assert _error("reg_attribute:bild") == 'reg_attribute has no attribute "bild"; did you mean "build"?'
    assert _error("json:JSONDecoder.decod") == 'json.JSONDecoder has no attribute "decod"; did you mean "decode"?'


def test_an_attribute_that_is_not_callable_is_an_error(folder: Path) -> None:
    Path("reg_value.py").write_text("build = 3\n")
    assert (
        _error("reg_value:build") == "reg_value.build is of type int, which is not callable; name a function or a class"
    )


@pytest.mark.parametrize(
    ("source", "cause"),
    [
        ("import reg_not_installed\n", "ModuleNotFoundError: No module named 'reg_not_installed'"),
        ("import json\nraise RuntimeError('on purpose')\n", "RuntimeError: on purpose"),
        ("import sys\nsys.exit(3)\n", "SystemExit: 3"),
        ("def build(:\n    pass\n", "SyntaxError"),
    ],
)
def test_a_module_that_fails_shows_the_users_traceback_only(folder: Path, source: str, cause: str) -> None:
    Path("reg_broken.py").write_text(source)
    reason = _error("reg_broken:build")
    assert reason.startswith("importing reg_broken failed:\nTraceback") or "SyntaxError" in reason
    assert "reg_broken.py" in reason and cause in reason
    assert "registry.py" not in reason and "importlib" not in reason


def test_the_users_files_include_packages_that_an_import_string_names(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder below Python's prefix is not an installed package, but `site-packages` is."""
    packages = folder / "lib" / "site-packages"
    for place, names in ((packages, ("reg_named", "reg_other")), (folder / "src", ("reg_app",))):
        for name in names:
            (place / name).mkdir(parents=True)
            (place / name / "__init__.py").write_text(f"from {name} import parts\nbuild = dict\n")
            (place / name / "parts.py").write_text("")
        monkeypatch.syspath_prepend(place)
    paths = sysconfig.get_paths()
    monkeypatch.setattr(sys, "base_prefix", str(folder))
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {**paths, "purelib": str(packages)})
    monkeypatch.setattr(import_string, "_NAMED_PACKAGES", set())
    import_factory("reg_other:build")
    import_string._NAMED_PACKAGES.clear()
    for name in ("reg_named", "reg_app"):
        import_factory(f"{name}:build")
    found = [os.path.relpath(file, folder) for file in user_files() if file.startswith(str(folder))]
    wanted = [f"lib/site-packages/reg_named/{file}" for file in ("__init__.py", "parts.py")]
    assert found == [*wanted, "src/reg_app/__init__.py", "src/reg_app/parts.py"]


def test_nothing_is_imported_from_a_run_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a path below the working directory nor an import path that contains run folders may be imported from."""
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    for place in ("outputs/other/checkpoints", "shared/step-3", "reg_pkg"):
        Path(place).mkdir(parents=True)
        Path(place, "payload.py").write_text("import os\nos.mkdir('executed')\nbuild = dict\n")
    refuse_imports_from([Path("shared/step-3"), Path("..")], parent=Path("outputs"))
    advice = (
        "is in the folder of a run or a checkpoint, from which imports are refused; move the module to another folder"
    )
    assert _error("outputs.other.checkpoints.payload:build") == f"{folder}/outputs/other {advice}"
    assert _error("shared.step-3.payload:build") == f"{folder}/shared/step-3 {advice}"
    sys.path.insert(0, str(folder / "outputs/other/checkpoints"))
    assert _error("payload:build") == f"{folder}/outputs/other/checkpoints/payload {advice}"
    assert not Path("executed").exists()
    Path("reg_pkg/payload.py").write_text("build = dict\n")
    Path("outputs/beside.py").write_text("build = dict\n")
    assert import_factory("reg_pkg.payload:build") is import_factory("outputs.beside:build") is dict
    Path("outputs/package").mkdir()
    Path("outputs/package/nets.py").write_text("build = dict\n")
    assert import_factory("outputs.package.nets:build") is dict  # a folder beside runs that is not a run
