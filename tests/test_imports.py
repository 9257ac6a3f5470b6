"""Imports go downward only, and the light modules stay light."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import dflashdist

PACKAGE = Path(dflashdist.__file__).parent
# What each part may import of the package beside itself.
ALLOWED = {
    "config": {"checks"},
    "checks": {"config"},
    "files": {"config"},
    "schedule": {"config"},
    "data": {"config", "files", "schedule"},
    "regenerate": {"config", "files", "data"},
    "model": {"config", "checks"},
    "cluster": {"config"},
    "train": {"config", "checks", "files", "schedule", "data", "model", "cluster"},
    "eval": {"config", "files", "schedule", "data", "model", "regenerate"},
    "cli": {"config", "commands"},
    "commands": {
        "config",
        "checks",
        "schedule",
        "data",
        "model",
        "cluster",
        "train",
        "eval",
        "export",
        "regenerate",
    },
    "export": {"config", "checks", "files", "data", "model"},
    "launch": {"cluster"},
    "__main__": {"cli"},
    "__init__": set(),
}
# What no module of a part may import, however deep in a function.
FORBIDDEN = {
    "config": {"torch", "transformers"},
    "checks": {"torch", "transformers"},
    "files": {"torch", "transformers", "numpy"},
    "schedule": {"torch", "transformers"},
    "data": {"torch.distributed"},
    "model": {"torch.distributed"},
    "cluster": {"transformers"},
    "eval": {"torch.distributed"},
}
ALONE = {"utils", "helpers", "common", "manager", "base"}


def modules() -> list[tuple[str, Path]]:
    """(part, file) of every module."""
    return [
        (path.relative_to(PACKAGE).parts[0].removesuffix(".py"), path)
        for path in sorted(PACKAGE.rglob("*.py"))
    ]


def imported(path: Path) -> set[str]:
    """Full names of what a file imports anywhere in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module or ""}
    return names


def test_imports_go_downward():
    seen = set()
    for part, path in modules():
        seen.add(part)
        for name in imported(path):
            if name.startswith("dflashdist."):
                other = name.split(".")[1]
                assert other in ALLOWED[part] | {part, "__version__"}, f"{path.name}: {name}"
            for root in FORBIDDEN.get(part, ()):
                assert not (name + ".").startswith(root + "."), f"{path.name}: {name}"
    assert {"schedule", "data", "model", "cluster", "train", "eval", "cli", "commands"} <= seen


def test_drafters_do_not_import_the_target():
    """The source of hidden states is handed to the loop."""
    names = imported(PACKAGE / "train/drafter_loop.py") | imported(PACKAGE / "train/sources.py")
    assert not any(name.startswith("dflashdist.model.target") for name in names)


def test_modules_are_small_and_named():
    for _, path in modules():
        assert len(path.read_text().splitlines()) <= 400, path
        assert path.stem not in ALONE, path
        assert path.read_text() == "" or ast.get_docstring(ast.parse(path.read_text())), path


def test_a_class_has_a_name_of_its_own():
    places: dict[str, list[str]] = {}
    for _, path in modules():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(str(path.relative_to(PACKAGE)))
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


def loaded_by(statement: str) -> set[str]:
    """Top-level modules that are loaded after a statement in a fresh interpreter."""
    code = f"{statement}; import sys; print(' '.join({{n.split('.')[0] for n in sys.modules}}))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(out.stdout.split())


def test_plan_loads_no_torch():
    loaded = loaded_by("import dflashdist.cli, dflashdist.train.job")
    assert "numpy" in loaded and not loaded & {"torch", "transformers"}


def test_drafter_ranks_load_no_transformers():
    loaded = loaded_by("import dflashdist.train.run, dflashdist.train.drafter_rank")
    assert "torch" in loaded and "transformers" not in loaded


@pytest.mark.parametrize("folder", ["tests/bench", "tests/gpu", "launch/demo"])
def test_scripts_that_no_test_runs_import_what_is_there(folder):
    names = set()
    for path in (PACKAGE.parent / folder).glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("dflashdist"):
                names |= {(path.name, str(node.module), alias.name) for alias in node.names}
    assert names
    for script, module, name in sorted(names):
        assert hasattr(importlib.import_module(module), name), f"{script}: {module}.{name}"


def test_top_level_of_the_repository():
    top = PACKAGE.parent
    listed = subprocess.run(["git", "-C", str(top), "ls-files"], capture_output=True, text=True)
    names = {line.split("/")[0] for line in listed.stdout.split()}
    if listed.returncode or "dflashdist" not in names:
        names = {path.name for path in top.iterdir() if path.name[0] != "."} - {"runs"}
        names = {name for name in names if not name.endswith(".egg-info")}
    visible = {name for name in names if not name.startswith(".")}
    assert visible == {"pyproject.toml", "dflashdist", "conf", "launch", "tests", "README.md"}
