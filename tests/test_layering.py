"""Order of packages and of their parts: which may import which."""

from __future__ import annotations

import ast
import graphlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dbsp_kernels.errors import install_command
from tests.support.programs import run
from tests.support.repository import ROOT, child_environment
from tests.support.texts import found_in, nodes_of, strings_of, tree_of

PACKAGES = {
    "dbsp_kernels": set(),
    "dbsp_core": {"dbsp_kernels"},
    "dbsp_diffusers": {"dbsp_core", "dbsp_kernels"},
    "dbsp_xdit": {"dbsp_diffusers", "dbsp_core", "dbsp_kernels"},
    "dbsp_para": {"dbsp_diffusers", "dbsp_core", "dbsp_kernels"},
    "dbsp_engines": {"dbsp_xdit", "dbsp_diffusers", "dbsp_core", "dbsp_kernels"},
    "dbsp_cli": {"dbsp_engines", "dbsp_xdit", "dbsp_para", "dbsp_diffusers", "dbsp_core", "dbsp_kernels"},
}
"""Our packages, and which of them each may name: in imports, and in strings that are modules."""
FRAMEWORKS = {
    *("xfuser", "para_attn", "diffusers", "transformers"),
    *("vllm_omni", "vllm", "sglang", "lightx2v", "lightx2v_platform"),
}
OPTIONAL = {*FRAMEWORKS, "matplotlib", "tokenizers", "accelerate", "imageio", "imageio_ffmpeg", "ftfy", "yunchang"}


def folder_of(package: str) -> Path:
    return ROOT / "kernels" / package if package == "dbsp_kernels" else ROOT / package


def nodes(tree: ast.AST, inside_functions: bool) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(tree):
        if inside_functions or not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield child
            yield from nodes(child, inside_functions)


def imports(path: Path, inside_functions: bool = True) -> set[str]:
    """Returns full names of the modules a file imports."""
    found = set()
    for node in nodes(tree_of(path), inside_functions):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add(node.module)
    return found


def tops(names: set[str]) -> set[str]:
    return {name.partition(".")[0] for name in names}


def files(*packages: str) -> list[Path]:
    return [path for package in packages for path in sorted(folder_of(package).rglob("*.py"))]


def package_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[1 if path.is_relative_to(ROOT / "kernels") else 0]


def test_arrows_between_packages():
    def forbidden(path: Path) -> set[str]:
        others = set(PACKAGES) - PACKAGES[package_of(path)] - {package_of(path)}
        named = {text for text in strings_of(path) for other in others if re.fullmatch(rf"{other}(\.\w+)*", text)}
        return tops(imports(path)) & others | named

    assert found_in(files(*PACKAGES), forbidden) == {}


def test_the_core_imports_no_host_and_plain_diffusers_none_of_the_others():
    core = files("dbsp_core", "dbsp_kernels")
    assert found_in(core, lambda path: tops(imports(path, inside_functions=False)) & OPTIONAL) == {}
    assert found_in(core, lambda path: tops(imports(path)) & FRAMEWORKS) == {}
    assert found_in(files("dbsp_diffusers"), lambda path: tops(imports(path)) & {"xfuser", "para_attn"}) == {}


def test_what_begins_a_process_needs_nothing_but_python():
    """Keeps an interrupt quiet before torch has been imported, and lets torch call what it loads."""
    first = [folder_of("dbsp_cli") / f"{name}.py" for name in ("__init__", "entry", "autoload")]
    first += [folder_of("dbsp_xdit") / f"{name}.py" for name in ("__init__", "import_hook")]
    own = {"dbsp_cli", "dbsp_xdit"} | sys.stdlib_module_names
    assert found_in(first, lambda path: tops(imports(path, inside_functions=False)) - own) == {}


def test_the_pure_planning_functions_need_numpy_alone():
    planning = folder_of("dbsp_core") / "planning"
    pure = [planning / f"{name}.py" for name in ("balance", "sequences", "bags")]

    def forbidden(path: Path) -> set[str]:
        names = imports(path) - {"dbsp_core.utils.errors"}
        allowed = {"numpy"} | sys.stdlib_module_names
        return {name for name in names if not name.startswith("dbsp_core.planning") and not tops({name}) & allowed}

    assert found_in(pure, forbidden) == {}


LOADED_BY = {
    "from dbsp_core import BlockGrid": {"jinja2", "typer", "diffusers", "torch._dynamo", *OPTIONAL},
    "import dbsp_core.runtime.session": {"torch._dynamo", "diffusers"},
    "import dbsp_cli.cli": {"diffusers", "torch._dynamo", "matplotlib", "transformers", "xfuser"},
}
"""Statements that follow each other in one process, and modules that none of them may have loaded by then."""


def test_imports_load_nothing_that_few_need():
    lines = [f"{one}; seen.append([*sys.modules])" for one in LOADED_BY]
    code = "\n".join(["import json, sys", "seen = []", *lines, "print(json.dumps(seen))"])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    seen = json.loads(done.stdout)
    for unwanted, names in zip(LOADED_BY.values(), seen, strict=True):
        assert not unwanted & {*names, *tops(set(names))}
    core = [name for name in seen[0] if tops({name}) == {"dbsp_core"}]
    assert len(core) <= 72, sorted(core)


def modules(root: Path) -> dict[str, Path]:
    """Returns the modules of a package by full name."""
    names = {path: ".".join(path.relative_to(root.parent).with_suffix("").parts) for path in root.rglob("*.py")}
    return {name.removesuffix(".__init__"): path for path, name in names.items()}


def imported(path: Path, ours: dict[str, Path]) -> set[str]:
    """Returns our modules that a file imports, inside functions and for types alone too."""
    found = imports(path)
    for node in nodes_of(path):
        if isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
            if all(f"{node.module}.{alias.name}" in ours for alias in node.names):
                found.discard(node.module)  # modules of a package, and nothing of the package itself
    return found & set(ours)


ORDER = {
    "dbsp_core": (
        *("utils", "models", "masks", "layout", "planning", "comm", "sources", "cost", "config", "runtime", "reports"),
    ),
    "dbsp_diffusers": (
        *("patching", "rank_program", "devices", "checkpoint", "models", "attached", "packed", "resolve"),
        *("sharding", "report_hook", "attach", "api"),
    ),
}
"""The parts of a package, lowest first: each imports itself and those before it, inside functions too."""


def upward(root: Path, order: tuple[str, ...]) -> set[str]:
    """Returns imports of a part of a package by a lower one; the package itself, its `__init__`, is above all."""
    ours = modules(root)
    levels = {f"{root.name}.{part}": level for level, part in enumerate(order)} | {root.name: len(order)}

    def level_of(name: str) -> int:
        return levels[".".join(name.split(".")[:2])]

    return {
        f"{name} imports {other}"
        for name, path in ours.items()
        for other in imported(path, ours)
        if level_of(other) > level_of(name)
    }


@pytest.mark.parametrize("package", ORDER)
def test_parts_of_a_package_import_downwards(package):
    assert upward(folder_of(package), ORDER[package]) == set()
    assert {name.split(".")[1] for name in modules(folder_of(package)) if "." in name} == {*ORDER[package]}


@pytest.mark.parametrize("package", PACKAGES)
def test_no_package_imports_in_circles(package):
    ours = modules(folder_of(package))
    needed = {name: imported(path, ours) - {name} for name, path in ours.items()}
    graphlib.TopologicalSorter(needed).prepare()  # raises CycleError


def python(code: str) -> subprocess.CompletedProcess:
    """Runs code where everything optional is missing, with all that has been imported of it before the fork."""
    blocked = (
        f"import sys\nfor name in [*{sorted(OPTIONAL)}, *sys.modules]:\n"
        f"    if name.partition('.')[0] in {sorted(OPTIONAL)}: sys.modules[name] = None\n"
    )
    return run([sys.executable, "-c", blocked + code], env=child_environment())


def test_everything_imports_without_frameworks_and_doctor_names_them_and_the_fix():
    everything = f"import {', '.join(PACKAGES)}, dbsp_cli.cli, dbsp_core.reports.run_report"
    done = python(f"{everything}; from dbsp_cli.cli import main; sys.argv = ['dbsp', 'doctor', '--json']; main()")
    assert done.returncode == 0, done.stderr
    findings = {finding["what"]: finding for finding in json.loads(done.stdout)["findings"]}
    xdit = next(finding for what, finding in findings.items() if what.startswith("xDiT"))
    assert (xdit["state"], xdit["detail"]) == ("missing", "lacks xfuser, diffusers, transformers")
    assert xdit["fix"].endswith(install_command("xdit"))
    assert f"to generate, {install_command('diffusers')}" in json.loads(done.stdout)["verdict"]


def test_pyproject_lists_every_package_and_no_folder_lacks_its_init_file():
    """Guards against a wheel without a folder. `configs` has no code: it is one by its name in the list alone."""
    (text,) = re.findall(r"^packages = \[([^]]*)\]", (ROOT / "pyproject.toml").read_text(), re.M)
    listed = re.findall(r'"([\w.]+)"', text)
    found = {path: folder_of(package) for package in PACKAGES for path in files(package)}
    folders = {".".join(path.parent.relative_to(top.parent).parts): path.parent for path, top in found.items()}
    assert sorted(listed) == sorted([*folders, "dbsp_core.configs"])
    assert [name for name, folder in folders.items() if not (folder / "__init__.py").is_file()] == []
    assert {path.name for path in (ROOT / "configs").rglob("*") if path.is_dir()} == {"hardware", "masks"}
    assert {path.suffix for path in (ROOT / "configs" / "masks").iterdir()} == {".safetensors"}
