"""scripts/release: what it rejects, what it makes of the front page, and a release of a clone."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile

import pytest

from dbsp_core import __version__
from dbsp_core.utils.errors import UserError
from dbsp_kernels.errors import REPOSITORY
from scripts.release_files import absolute_links, require_releasable
from tests.support.programs import run
from tests.support.repository import ROOT, child_environment, git


@pytest.fixture
def repository(tmp_path):
    """Makes a repository with a changelog of 0.1.0 and one commit."""
    git(tmp_path, "init", "--quiet")
    (tmp_path / "CHANGES.md").write_text("# Changes\n\n## 0.1.0\n\n- All.\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "--message", "All")
    return tmp_path


def test_what_is_committed_described_and_new_can_be_released(repository):
    require_releasable(repository, "0.1.0", "v0.1.0")
    with pytest.raises(UserError, match=r"no heading '## 0.1.1'"):
        require_releasable(repository, "0.1.1", "v0.1.1")
    git(repository, "tag", "v0.1.0")
    with pytest.raises(UserError, match=r"tag v0.1.0 is there; raise __version__"):
        require_releasable(repository, "0.1.0", "v0.1.0")
    (repository / "new").touch()
    with pytest.raises(UserError, match="changes that are not committed"):
        require_releasable(repository, "0.1.0", "v0.1.0")


def test_links_of_the_front_page_lead_to_the_repository():
    page = "[a](docs/x.md#y) ![p](./docs/p.png) [b](https://e.org) [c](#here) [![q](q.png)](LICENSE)"
    raw = REPOSITORY.replace("github.com", "raw.githubusercontent.com")
    assert absolute_links(page, "v1") == (
        f"[a]({REPOSITORY}/blob/v1/docs/x.md#y) ![p]({raw}/v1/docs/p.png) [b](https://e.org) [c](#here) "
        f"[![q](q.png)]({REPOSITORY}/blob/v1/LICENSE)"
    )


@pytest.mark.long
def test_a_clone_is_built_checked_and_tagged(tmp_path):
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "--quiet", "--no-hardlinks", ROOT, clone], check=True)
    for name, value in (("user.name", "db-SP"), ("user.email", "none@example.org")):
        git(clone, "config", name, value)
    for tag in git(clone, "tag", "--list").split():
        git(clone, "tag", "--delete", tag)
    environment = child_environment() | {"PYTHONPATH": f"{clone}:{clone / 'kernels'}"}

    def release(*arguments: str) -> subprocess.CompletedProcess[str]:
        return run([sys.executable, "-m", "scripts.release_files", *arguments], cwd=clone, env=environment)

    tried = release("--dry-run")
    assert tried.returncode == 0, tried.stderr
    wheel = f"dbsp_attention-{__version__}-py3-none-any.whl"
    assert re.search(rf"^{re.escape(wheel)}: \d+\.\d MB, checked$", tried.stdout, re.M)
    assert f"would tag {git(clone, 'rev-parse', '--short', 'HEAD')} as v{__version__}" in tried.stdout
    assert (git(clone, "tag", "--list"), git(clone, "status", "--porcelain")) == ("", "")
    assert not (clone / "dist").exists()
    done = release()
    assert done.returncode == 0, done.stderr
    assert git(clone, "tag", "--list") == f"v{__version__}"
    assert {path.name for path in (clone / "dist").iterdir()} == {wheel, f"dbsp_attention-{__version__}.tar.gz"}
    with zipfile.ZipFile(clone / "dist" / wheel) as content:
        metadata = content.read(next(name for name in content.namelist() if name.endswith("METADATA"))).decode()
    assert f"]({REPOSITORY}/blob/v{__version__}/docs/" in metadata
    again = release()
    assert (again.returncode, again.stderr.count("\n")) == (2, 1)
    assert f"tag v{__version__} is there" in again.stderr
