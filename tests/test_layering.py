"""Who may import whom."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import dbsp_core
import dbsp_kernels
import dbsp_start

REPOSITORY = Path(dbsp_core.__file__).parent.parent

CORE, KERNELS = (Path(package.__file__).parent for package in (dbsp_core, dbsp_kernels))
HOSTS = {"xfuser", "para_attn", "diffusers", "transformers"}
ADAPTERS = {"dbsp_xdit", "dbsp_para"}
OPTIONAL = {*HOSTS, "matplotlib", "tokenizers", "accelerate", "imageio", "imageio_ffmpeg", "ftfy", "yunchang"}


def nodes(tree: ast.AST, inside_functions: bool) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(tree):
        if inside_functions or not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield child
            yield from nodes(child, inside_functions)


def imports(path: Path, inside_functions: bool = True) -> set[str]:
    """Full names of the modules a file imports."""
    found = set()
    for node in nodes(ast.parse(path.read_text()), inside_functions):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add(node.module)
    return found


def tops(names: set[str]) -> set[str]:
    return {name.partition(".")[0] for name in names}


def files(folder: Path) -> list:
    paths = sorted(folder.rglob("*.py"))
    return [pytest.param(path, id=str(path.relative_to(folder.parent))) for path in paths]


@pytest.mark.parametrize("path", [*files(CORE / "partition"), CORE / "imbalance.py"])
def test_the_pure_planning_functions_need_numpy_alone(path):
    names = imports(path)
    assert tops(names) <= {"numpy", "dbsp_core"} | sys.stdlib_module_names
    ours = {name for name in names if name.startswith("dbsp_core")}
    assert all(name.startswith(("dbsp_core.planning.balanced", "dbsp_core.planning.imbalance")) for name in ours)


@pytest.mark.parametrize("path", files(KERNELS))
def test_kernels_know_nothing_of_the_core(path):
    assert not tops(imports(path)) & ({"dbsp_core"} | ADAPTERS | HOSTS)


@pytest.mark.parametrize("path", files(CORE))
def test_the_core_knows_nothing_of_adapters_and_imports_no_host_with_itself(path):
    assert not tops(imports(path)) & ADAPTERS
    assert not tops(imports(path, inside_functions=False)) & OPTIONAL


@pytest.mark.parametrize("path", files(Path(dbsp_start.__file__).parent))
def test_what_starts_processes_needs_nothing_but_python(path):
    """So that a rank is tied to its torchrun, and an interrupt is quiet, before torch has been imported."""
    assert tops(imports(path, inside_functions=False)) <= {"dbsp_start"} | sys.stdlib_module_names


def modules(root: Path) -> dict[str, Path]:
    """The modules of a package by full name."""
    names = {path: ".".join(path.relative_to(root.parent).with_suffix("").parts) for path in root.rglob("*.py")}
    return {name.removesuffix(".__init__"): path for path, name in names.items()}


def imported(path: Path, ours: dict[str, Path]) -> set[str]:
    """Which of our modules a file imports, inside functions and for types alone too."""
    found = imports(path)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
            if all(f"{node.module}.{alias.name}" in ours for alias in node.names):
                found.discard(node.module)  # modules of a package, and nothing of the package itself
    return found & set(ours)


def circles(ours: dict[str, Path]) -> set[str]:
    """The modules in import circles, and those that need one: what is left without all that need nothing left."""
    left = {name: imported(path, ours) - {name} for name, path in ours.items()}
    while free := [name for name, needed in left.items() if not needed & set(left)]:
        for name in free:
            del left[name]
    return set(left)


@pytest.mark.parametrize("package", ["dbsp_kernels", "dbsp_core", "dbsp_xdit", "dbsp_para"])
def test_no_package_imports_in_circles(package):
    root = KERNELS if package == "dbsp_kernels" else REPOSITORY / package
    assert circles(modules(root)) == set()


def test_a_circle_would_be_found(tmp_path):
    root = tmp_path / "round"
    root.mkdir()
    (root / "__init__.py").write_text("")
    (root / "a.py").write_text("def late():\n    from round import b\n")
    (root / "b.py").write_text("import round.c\n")
    (root / "c.py").write_text("from round.a import late\n")
    (root / "d.py").write_text("import json\n")
    assert circles(modules(root)) == {"round.a", "round.b", "round.c"}


def python(code: str) -> subprocess.CompletedProcess:
    """Runs code where everything optional is missing."""
    blocked = f"import sys\nfor name in {sorted(OPTIONAL)}: sys.modules[name] = None\n"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    return subprocess.run(
        [sys.executable, "-c", blocked + code], env=environment, capture_output=True, text=True, timeout=120
    )


def test_everything_imports_without_hosts():
    done = python("import dbsp_core, dbsp_cli.cli, dbsp_core.reports.run_report, dbsp_kernels, dbsp_xdit, dbsp_para")
    assert done.returncode == 0, done.stderr


def test_the_blocked_imports_are_blocked():
    for name in ("xfuser", "diffusers.models"):
        assert "ModuleNotFoundError" in python(f"import {name}").stderr


def test_doctor_names_the_missing_hosts_and_the_fix():
    done = python("from dbsp_cli.cli import main; sys.argv = ['dbsp', 'doctor', '--json']; main()")
    assert done.returncode == 0, done.stderr
    findings = {finding["what"]: finding for finding in json.loads(done.stdout)["findings"]}
    xdit = next(finding for what, finding in findings.items() if what.startswith("xDiT"))
    assert (xdit["ok"], xdit["detail"]) == (False, "lacks xfuser, diffusers, transformers")
    assert xdit["fix"] == "pip install 'dbsp-attention[xdit]'"


def test_an_installation_has_every_package_and_configuration():
    tomllib = pytest.importorskip("tomllib", reason="from Python 3.11 on")
    packaged = set(tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    roots = ("dbsp_core", "dbsp_start", "dbsp_xdit", "dbsp_para", "kernels/dbsp_kernels")
    folders = {file.parent for root in roots for file in (REPOSITORY / root).rglob("*.py")}
    found = {str(folder.relative_to(REPOSITORY)).removeprefix("kernels/").replace("/", ".") for folder in folders}
    configs = {file.parent for file in (REPOSITORY / "configs").rglob("*.yaml")}
    found |= {"dbsp_" + str(folder.relative_to(REPOSITORY)).replace("/", ".") for folder in configs}
    assert packaged == found
