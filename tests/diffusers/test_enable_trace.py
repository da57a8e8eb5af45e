"""What a reader of `enable` passes: files and functions of this repository that one call of it enters."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import FrameType

import dbsp_diffusers
from tests.support.models.tiny_pipelines import load
from tests.support.repository import ROOT

CONFIG = {"mask": {"source": "sparge", "block_q": 16, "block_k": 16}, "strategy": "U1R2"}
FILES, CALLS = 47, 472


def functions_of_enable(rank: int, world: int, folder: str) -> Counter[tuple[str, str]]:
    """Counts calls by (file, function) of a second `enable` on a pipeline: modules and caches are loaded.

    Comprehensions, which are frames in some versions of Python, do not count.
    """
    pipe, calls = load("wan", folder), Counter[tuple[str, str]]()
    dbsp_diffusers.enable(pipe, CONFIG)
    dbsp_diffusers.disable(pipe)

    def note(frame: FrameType, event: str, _: object) -> None:
        path, name = Path(frame.f_code.co_filename), frame.f_code.co_name
        is_ours = path.is_relative_to(ROOT) and ".venv" not in path.parts
        if event == "call" and is_ours and (name == "<lambda>" or not name.startswith("<")):
            calls[str(path.relative_to(ROOT)), frame.f_code.co_qualname] += 1

    sys.setprofile(note)
    dbsp_diffusers.enable(pipe, CONFIG)
    sys.setprofile(None)
    dbsp_diffusers.disable(pipe)
    return calls


def test_enable_enters_few_files_and_functions(pool, folder):
    for calls in pool(2).run(functions_of_enable, folder):
        files = {path for path, _ in calls}
        assert len(files) <= FILES, sorted(files)
        assert calls.total() <= CALLS, calls.most_common(20)
