"""Builds the wheel and the source archive of the committed state, checks them, and tags the commit.

The version is `dbsp_core.__version__`, and CHANGES.md must have a heading for it. Nothing is uploaded or pushed: the
commands for that are printed at the end.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from dbsp_core import __version__
from dbsp_core.utils.errors import UserError
from dbsp_core.utils.process import exit_on_user_error
from dbsp_kernels.errors import REPOSITORY

_LINK = re.compile(r"(!?)(\[(?:[^\[\]]|\[[^\[\]]*\])*\])\((?![a-z][a-z0-9+.-]*:|#)([^)\s]+)\)")


def absolute_links(page: str, tag: str) -> str:
    """A page of the repository's root with links and pictures that also work elsewhere, as on a package index."""
    pictures = REPOSITORY.replace("github.com", "raw.githubusercontent.com")

    def absolute(link: re.Match[str]) -> str:
        base = f"{pictures}/{tag}" if link[1] else f"{REPOSITORY}/blob/{tag}"
        return f"{link[1]}{link[2]}({base}/{link[3].removeprefix('./')})"

    return _LINK.sub(absolute, page)


def require_releasable(repository: Path, version: str, tag: str) -> None:
    """Raises UserError for changes that are not committed, a version that nobody describes, or a tag that is there."""
    if _git(repository, "status", "--porcelain"):
        raise UserError("there are changes that are not committed; a release is a commit")
    if not re.search(rf"^## {re.escape(version)}\b", (repository / "CHANGES.md").read_text(encoding="utf-8"), re.M):
        raise UserError(f"CHANGES.md has no heading '## {version}'; say there what is new")
    if _git(repository, "tag", "--list", tag):
        raise UserError(f"tag {tag} is there; raise __version__ in dbsp_core/__init__.py")


def build(repository: Path, tag: str, target: Path) -> list[Path]:
    """Builds both files from the last commit alone, and has twine check them."""
    with tempfile.TemporaryDirectory() as folder:
        _git(repository, "clone", "--quiet", str(repository), folder)
        readme = Path(folder) / "README.md"
        readme.write_text(absolute_links(readme.read_text(encoding="utf-8"), tag), encoding="utf-8")
        _run("build", "--no-isolation", "--outdir", target, folder)
    files = sorted(target.glob(f"dbsp_attention-{tag.removeprefix('v')}*"))
    _run("twine", "check", "--strict", *files)
    return files


def _run(module: str, *arguments: object) -> None:
    done = subprocess.run([sys.executable, "-m", module, *map(str, arguments)], capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"{module} failed: {(done.stdout + done.stderr)[-2000:]}")


def _git(repository: Path, *arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=repository, capture_output=True, text=True, check=True
    ).stdout.strip()


@exit_on_user_error()
def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/release", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dry-run", action="store_true", help="build and check, but keep and tag nothing")
    dry_run, repository = parser.parse_args().dry_run, Path(__file__).resolve().parents[1]
    tag = f"v{__version__}"
    require_releasable(repository, __version__, tag)
    with tempfile.TemporaryDirectory() as elsewhere:
        files = build(repository, tag, Path(elsewhere) if dry_run else repository / "dist")
        for file in files:
            print(f"{file.name}: {file.stat().st_size / 1e6:.1f} MB, checked")
    if dry_run:
        print(f"would tag {_git(repository, 'rev-parse', '--short', 'HEAD')} as {tag}, and keep both in dist/")
        return
    _git(repository, "tag", "--annotate", tag, "--message", f"db-SP {__version__}")
    print(f"tagged {tag}; now: git push origin {tag} && twine upload {' '.join(f'dist/{one.name}' for one in files)}")


if __name__ == "__main__":
    main()
