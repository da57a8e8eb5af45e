"""`dbsp generate` with ranks that compute nothing: `python -m tests.cli.generate.cheap_ranks ARGUMENTS`.

Each rank runs this too. It says in $CHEAP_RANKS that it is there, and waits for the file "go"; then rank 0 leaves
something for a video.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from tests.cli.generate.tiny_mp4 import tiny_mp4
from tests.support.repository import child_environment

MODULE = "tests.cli.generate.cheap_ranks"
FOLDER = "CHEAP_RANKS"
LIMIT_S = 180.0  # a safety net: nothing is expected to take this long


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end, "it never came about"
        time.sleep(0.05)


def runs(process: int) -> bool:
    """Whether a process is there, other than to be buried."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@dataclass(frozen=True)
class Ranks:
    """Process numbers."""

    ranks: list[int]
    torchrun: int

    @classmethod
    def ready(cls, folder: Path, count: int, alive: Callable[[], bool]) -> Ranks:
        """Once all ranks are there. alive: whether what starts them is"""
        files = [folder / f"ready{rank}" for rank in range(count)]
        wait_until(lambda: all(file.exists() for file in files) or not alive())
        said = [[int(number) for number in file.read_text().split()] for file in files]
        return cls([rank for rank, _ in said], said[0][1])

    def left(self) -> list[int]:
        return [process for process in [*self.ranks, self.torchrun] if runs(process)]


@contextmanager
def generating(folder: Path, *arguments: object, **options: object) -> Iterator[tuple[subprocess.Popen[str], Ranks]]:
    """`dbsp generate` into a folder, on two ranks, once both are there. options: of Popen"""
    signs = folder.parent / "signs"
    signs.mkdir()
    asked = ["--config", "tiny-wan", "--prompt", "x", "--host", "para", "--nproc", 2, "--out", folder / "ball.mp4"]
    run = subprocess.Popen(
        [sys.executable, "-m", MODULE, *map(str, [*asked, *arguments])],
        env=child_environment() | {FOLDER: str(signs)},
        text=True,
        **options,
    )
    ranks = Ranks([], 0)
    try:
        ranks = Ranks.ready(signs, 2, lambda: run.poll() is None)
        yield run, ranks
    finally:
        for process in [run.pid, *ranks.left()]:
            if runs(process):
                os.kill(process, signal.SIGKILL)
        run.wait()


def check(config: object, model: object, identity: object) -> None:
    """As every host's module has it."""


def _be_a_rank(video: Path) -> None:
    folder = Path(os.environ[FOLDER])
    sign = folder / f"ready{os.environ['RANK']}"
    sign.with_suffix(".new").write_text(f"{os.getpid()} {os.getppid()}")
    sign.with_suffix(".new").replace(sign)
    wait_until((folder / "go").exists)
    if os.environ["RANK"] == "0":
        video.write_bytes(tiny_mp4())


def _generate() -> None:
    from dbsp_cli.cli import main
    from dbsp_cli.generate import running
    from dbsp_cli.generate.hosts import HOSTS

    HOSTS["diffusers"] = replace(HOSTS["diffusers"], module=MODULE)
    running.make_tiny = lambda *_: None  # type: ignore[assignment]  # there is no model
    running.silence_libraries = lambda: None
    sys.argv[1:1] = ["generate"]
    main()


if __name__ == "__main__":
    if "RANK" in os.environ:
        _be_a_rank(Path(sys.argv[2]))
    else:
        _generate()
