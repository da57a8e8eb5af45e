"""Scratch environments: what is installed here with one package of another version on top, or another Python. Each is
given as its interpreter."""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

REPO = Path(__file__).resolve().parents[3]
_WITH_DEPENDENCIES = {"torch", "diffusers", "transformers", "safetensors"}


def claimed_requirements() -> dict[str, Requirement]:
    """Returns what pyproject.toml admits, by package: dependencies and all extras."""
    import tomllib

    project = tomllib.loads((REPO / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = chain.from_iterable(project["optional-dependencies"].values())
    texts = [*extras, *project["dependencies"]]  # the last one of a package counts: what db-SP needs without extras
    requirements = [Requirement(text) for text in texts]
    return {one.name: one for one in requirements if one.name != project["name"] and one.specifier}


def offered(requirement: Requirement) -> list[Version]:
    """Returns releases that the registry offers this Python and that pyproject.toml admits, oldest first."""
    done = pip(sys.executable, "index", "versions", requirement.name)
    listed = re.search(r"Available versions: (.*)", done)
    found = {Version(Version(text).public) for text in listed[1].split(", ")} if listed else set()
    return sorted(one for one in found if one in requirement.specifier)


def layered(folder: Path, *pinned: str) -> Path:
    """Installs packages ("NAME==VERSION") on top of what is here; dependencies too, unless they bring a torch."""
    _run(sys.executable, "-m", "venv", "--without-pip", folder)
    (site,) = folder.glob("lib/python*/site-packages")
    alone = not {text.partition("==")[0] for text in pinned} <= _WITH_DEPENDENCIES
    pip(sys.executable, "install", "--quiet", "--no-compile", "--target", site, *["--no-deps"] * alone, *pinned)
    (site / "beneath.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    return folder / "bin" / "python"


def whole(folder: Path, python: str) -> Path:
    """Installs everything as constraints.txt has it, in another Python; triton as its torch wants it."""
    _run(python, "-m", "venv", folder)
    interpreter = folder / "bin" / "python"
    pinned = (REPO / "constraints.txt").read_text(encoding="utf-8").splitlines()
    lines = [line for line in pinned if not line.startswith("triton")]
    constraints = folder / "constraints.txt"
    constraints.write_text("\n".join(lines), encoding="utf-8")
    (torch,) = (line for line in lines if line.startswith("torch=="))
    for what in (torch, f"{REPO}[xdit,para,dev]"):
        pip(interpreter, "install", "--quiet", "--no-compile", "--constraint", constraints, what)
    return interpreter


def python_version(python: str) -> str:
    return _run(python, "-c", "import platform; print(platform.python_version())").strip()


def pip(python: str | Path, *arguments: str | Path) -> str:
    return _run(python, "-m", "pip", "--disable-pip-version-check", *arguments)


def _run(*command: str | Path) -> str:
    """Returns standard output. Raises RuntimeError with the last line of what it said."""
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
    if done.returncode:
        said: Sequence[str] = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise RuntimeError((said or done.stderr.strip().splitlines() or ["no reason was given"])[-1])
    return done.stdout
