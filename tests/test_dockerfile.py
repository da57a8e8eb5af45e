"""The Dockerfile without docker: what it names exists and goes together."""

from __future__ import annotations

import re

import pytest

from tests.support.repository import ROOT, git

DOCKERFILE = (ROOT / "Dockerfile").read_text()
PROJECT = (ROOT / "pyproject.toml").read_text()
CONSTRAINTS = (ROOT / "constraints.txt").read_text()


def instructions() -> list[tuple[str, str]]:
    """Returns name and arguments of each instruction, its lines joined."""
    lines = [line for line in DOCKERFILE.splitlines() if not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [(name, text.strip()) for name, text in re.findall(r"^([A-Z]+) +(.+)$", joined, re.M)]


def arguments_of(name: str) -> list[str]:
    return [text for instruction, text in instructions() if instruction == name]


def context() -> set[str]:
    """Returns the files that docker is given: those of git that .dockerignore lets through."""
    patterns = (ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in patterns
    kept = tuple(pattern[1:] for pattern in patterns if pattern.startswith("!"))
    files = git(ROOT, "ls-files", "--cached", "--others", "--exclude-standard").splitlines()
    return {name for name in files if name.startswith(tuple(f"{top}/" for top in kept)) or name in kept}


@pytest.mark.parametrize("source", [text.split()[0] for text in arguments_of("COPY") if "--from" not in text])
def test_what_it_copies_is_in_the_context(source):
    assert [name for name in context() if source in (".", name) or name.startswith(f"{source}/")]


def test_the_context_has_all_that_the_wheel_is_built_from():
    (listed,) = re.findall(r"^packages = \[([^]]*)\]", PROJECT, re.M)
    folders = {name.split(".")[0] for name in re.findall(r'"([\w.]+)"', listed)} - {"dbsp_kernels"}
    tops = {name.split("/")[0] for name in context()}
    others = {"kernels", "configs", "examples", "pyproject.toml", "constraints.txt", "README.md", "LICENSE"}
    assert tops == folders | others


def test_its_versions_and_extras_are_those_of_the_project():
    (extras,) = re.findall(r"\.whl\)\[([\w,]+)\]", DOCKERFILE)
    declared = re.findall(r"^([\w-]+) = \[", PROJECT.split("[project.optional-dependencies]")[1], re.M)
    assert set(extras.split(",")) <= set(declared)
    (least,) = re.findall(r'requires-python = ">=3\.(\d+)"', PROJECT)
    assert all(int(minor) >= int(least) for minor in re.findall(r"python:3\.(\d+)", DOCKERFILE))
    (least,) = re.findall(r'^gpu = \["torch>=2\.(\d+)"', PROJECT, re.M)
    (pinned,) = re.findall(r"^torch==2\.(\d+)", CONSTRAINTS, re.M)
    assert int(pinned) >= int(least)


def test_it_runs_as_a_user_who_may_write_where_it_works_and_keeps_files():
    (user,), (work,), (volume,) = (arguments_of(name) for name in ("USER", "WORKDIR", "VOLUME"))
    assert user != "root"
    (owned,) = re.findall(rf"chown {user} ([/\w ]+)", DOCKERFILE)
    assert {work, volume} <= set(owned.split())
    kept = [value for text in arguments_of("ENV") for value in re.findall(r"(?:HF_HOME|CACHE_DIR)=(\S+)", text)]
    assert len(kept) == 2
    assert all(path.startswith(f"{volume}/") for path in kept)
