"""The wheel is all that one needs: built from what git has, and used where the checkout is on no path.

Each extra alone, in an environment that borrows the packages installed here but for those of other extras;
`.ci/try_extras` does the same with everything downloaded.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import venv
import zipfile
from email import message_from_string
from pathlib import Path

import pytest

from tests.support.repository import ROOT
from tests.test_layering import PACKAGES

pytestmark = pytest.mark.long
FRAMEWORKS = {
    "diffusers": (
        *("diffusers", "transformers", "accelerate", "imageio", "imageio_ffmpeg", "matplotlib", "ftfy", "peft"),
    ),
    "xdit": ("xfuser", "yunchang"),
    "para": ("para_attn",),
    "server": ("fastapi", "starlette", "uvicorn"),
}
"""Packages of each extra, by the names of their folders."""
OF_NONE = ("cache_dit", "peft")
NEEDS = {
    "none": (),
    "diffusers": ("diffusers",),
    "xdit": ("diffusers", "xdit"),
    "para": ("diffusers", "para"),
    "server": ("diffusers", "server"),
}
MOST_BYTES = 1.2e6


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Builds it from a copy of the files that git knows, or would add."""
    folder = tmp_path_factory.mktemp("wheel")
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        source, target = ROOT / name, folder / "source" / name
        if source.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(source.read_bytes())
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, folder / "source"]
    subprocess.run(build, check=True, capture_output=True)
    (built,) = folder.glob("*.whl")
    return built


def test_it_has_types_models_and_configurations_and_no_laboratory(wheel):
    assert wheel.stat().st_size < MOST_BYTES
    (stated,) = re.findall(r"wheel[^.]*?([\d.]+) MB", (ROOT / "CONTRIBUTING.md").read_text())
    assert abs(wheel.stat().st_size / 1e6 - float(stated)) < 0.2
    with zipfile.ZipFile(wheel) as content:
        names = set(content.namelist())
        metadata = content.read(next(name for name in names if name.endswith("/METADATA"))).decode()
    tops = {name.partition("/")[0] for name in names}
    assert tops == {*PACKAGES, next(top for top in tops if top.endswith(".dist-info"))}
    assert {f"{package}/py.typed" for package in PACKAGES} <= names
    for folder, pattern, target in (
        ("configs", "**/*.yaml", "dbsp_core/configs"),
        ("dbsp_core/reports/pages", "*", "dbsp_core/reports/pages"),
    ):
        found = [path.relative_to(ROOT / folder) for path in (ROOT / folder).glob(pattern) if path.is_file()]
        files = {f"{target}/{path.as_posix()}" for path in found}
        assert files <= names
        assert files
    said = message_from_string(metadata)
    (version,) = re.findall(r'__version__ = "(.+)"', (ROOT / "dbsp_core" / "__init__.py").read_text())
    assert said["Version"] == version
    assert {one.split(", ")[0] for one in said.get_all("Project-URL")} >= {"Homepage", "Documentation", "Changelog"}


def borrow(target: Path, hidden: tuple[str, ...]) -> None:
    """Links what is installed here, but for db-SP and the hidden packages, into a folder of another environment."""
    for package in Path(sysconfig.get_path("purelib")).iterdir():
        name = re.split(r"-\d|\.dist-info", package.name)[0].replace("-", "_").casefold()
        if (
            name in hidden
            or re.match(r"_*(editable__*)?dbsp|__editable__|_virtualenv|pip", name)
            or name == "__pycache__"
        ):
            continue
        if not (target / package.name).exists():
            (target / package.name).symlink_to(package)


@pytest.mark.parametrize("extra", NEEDS)
def test_an_extra_alone_is_enough_away_from_the_checkout(tmp_path, wheel, extra):
    pytest.importorskip("para_attn")
    hidden = tuple(name for framework, names in FRAMEWORKS.items() if framework not in NEEDS[extra] for name in names)
    venv.create(tmp_path / "venv", with_pip=False)
    python = tmp_path / "venv" / "bin" / "python"
    found = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], capture_output=True, text=True
    )
    borrow(Path(found.stdout.strip()), (*hidden, *OF_NONE))
    install = [sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel]
    outside = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    subprocess.run(install, check=True, capture_output=True, env=outside)
    for command in ("torchrun", "xdit"):
        theirs = Path(sysconfig.get_path("scripts")) / command
        text = theirs.read_text() if theirs.exists() and not (command == "xdit" and extra != "xdit") else ""
        if text:
            (python.parent / command).write_text(re.sub(r"^#!.*", f"#!{python}", text))
            (python.parent / command).chmod(0o755)
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    done = subprocess.run(
        [ROOT / ".ci" / "use_extra", python.parent, extra],
        cwd=folder,
        env=outside | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, (done.stdout[-3000:], done.stderr[-3000:])
    assert str(ROOT) not in done.stdout, "something of the checkout was used"
    for framework, names in (("xDiT", "xdit"), ("ParaAttention", "para"), ("diffusers", "diffusers")):
        (state,) = re.findall(rf"^(ok|missing) +{framework}\b", done.stdout, re.M)
        assert (state == "ok") == (names in NEEDS[extra]), framework
