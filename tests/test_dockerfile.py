"""The Dockerfile without docker: what it names exists, and its steps run in folders in place of the image's root.

Replaced: base images by this machine; apt-get, useradd and chown by nothing; torch's index by pip's own.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.support.repository import ROOT, git

DOCKERFILE = (ROOT / "Dockerfile").read_text()
PROJECT = (ROOT / "pyproject.toml").read_text()
CONSTRAINTS = (ROOT / "constraints.txt").read_text()
STUBS = {
    "apt-get": "exit 0",
    "useradd": "exit 0",
    "chown": "exit 0",
    "python3": f'exec {sys.executable} "$@"',
    "pip": f'exec {sys.executable} -m pip "$@"',
}
"""Commands of the base images: what runs in their place. `pip` and `python3` of a virtual environment come first."""


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


def copy_context(source: str, target: Path) -> None:
    """Copies a file or folder of the context, "." for all."""
    names = [name for name in context() if source in (".", name) or name.startswith(f"{source}/")]
    assert names, source
    for name in names:
        path = target if name == source else target / os.path.relpath(name, source)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes((ROOT / name).read_bytes())


def borrow(target: Path) -> None:
    """Links what is installed here, but for db-SP, into a folder of another environment."""
    for package in Path(sysconfig.get_path("purelib")).iterdir():
        name = re.split(r"-\d|\.dist-info", package.name)[0].replace("-", "_").casefold()
        if not re.match(r"_*(editable__*)?dbsp|__editable__|__pycache__|_virtualenv|pip", name):
            (target / package.name).symlink_to(package)


class Build:
    """Steps of a build, in a folder for each stage in place of its root."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.folder, self.environment, self.output = folder, environment, ""
        self.stages = [text.split(" AS ")[-1] for text in arguments_of("FROM")]
        self.root = folder

    def here(self, text: str) -> str:
        """Puts this stage's folder before all absolute paths."""
        return re.sub(r"(?<![\w:/.$*)-])/(?=\w)", f"{self.root}/", text)

    def run(self, command: str) -> str:
        """Runs a command in the stage's working directory, and returns what it printed."""
        command = self.here(command.replace("--index-url $TORCH_INDEX", ""))
        absolute = re.findall(r"(?<![\w:/.$*)-])/[^\s\"')]+", command)
        assert all(path.startswith(str(self.root)) for path in absolute), command
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", command],
            cwd=self.work,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=900,
        )
        assert done.returncode == 0, (command, done.stdout[-3000:], done.stderr[-3000:])
        return done.stdout

    def step(self, name: str, text: str) -> None:
        """Carries out one instruction."""
        if name == "FROM":
            self.root = self.work = self.folder / text.split(" AS ")[-1].replace("/", "_").replace(":", "_")
            self.root.mkdir()
        elif name == "RUN":
            self.output += self.run(text)
        elif name == "COPY":
            *options, source, target = shlex.split(text)
            if options:
                (stage,) = re.findall(r"--from=(\w+)", *options)
                self.run(f"mkdir -p $(dirname {target}) && cp -r ../{stage}{source} {target}")
            else:
                copy_context(source, Path(self.here(target)))
        elif name in ("ENV", "ARG"):
            for setting in shlex.split(text):
                variable, value = setting.split("=", 1)
                self.environment[variable] = self.here(value).replace("$PATH", self.environment["PATH"])
        elif name == "WORKDIR":
            self.work = Path(self.here(text))
            self.work.mkdir(parents=True, exist_ok=True)
        else:
            assert name in ("CMD", "EXPOSE", "LABEL", "USER", "VOLUME"), f"{name} is not carried out; add it"


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


def test_pages_name_files_that_the_image_has():
    page = (ROOT / "docs" / "serving.md").read_text()
    paths = re.findall(r"/opt/(examples/[\w.]+)", page)
    assert paths
    assert set(paths) <= context()


@pytest.mark.long
def test_its_steps_run_and_what_it_starts(tmp_path):
    stubs, borrowed = tmp_path / "stubs", tmp_path / "borrowed"
    for folder in (stubs, borrowed):
        folder.mkdir()
    for name, text in STUBS.items():
        (stubs / name).write_text(f"#!/bin/sh\n{text}\n")
        (stubs / name).chmod(0o755)
    outside = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment = outside | {"PATH": f"{stubs}:/usr/bin:/bin", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    borrow(borrowed)  # pip finds all that it is asked for, or fails
    environment |= {"PYTHONPATH": str(borrowed), "PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0"}
    build = Build(tmp_path, environment)
    for instruction in instructions():
        build.step(*instruction)
    for name in ("xfuser", "triton", "fastapi"):  # of each extra
        assert re.search(rf"^ *(Requirement already satisfied:|Collecting) {name}\b", build.output, re.M), build.output
    for what in ("xDiT", "diffusers", "triton", "imageio-ffmpeg"):
        assert re.search(rf"^ok +{what}\b", build.output, re.M), build.output
    (start,) = arguments_of("CMD")
    assert "generate" in build.run(" ".join(re.findall(r'"(.+?)"', start)))
    assert "--timeout" in build.run("python /opt/examples/server.py --help")
