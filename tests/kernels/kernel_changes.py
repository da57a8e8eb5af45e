"""The Triton kernel with one of its changes taken back: to see in machine code and on a GPU what each is worth."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import dbsp_kernels.triton

_IN_TURN = ("loop = padded(width), tiles.loop", 'loop = padded(width), "plain"')
CHANGES: dict[str, tuple[tuple[str, str], ...]] = {
    "products and softmax one after another": (_IN_TURN,),
    "the same, index carried from step to step": (
        _IN_TURN,
        (
            "        block = tl.load(indices + step // STEPS).to(tl.int64)\n        inside",
            "        coming = (step + 1) // STEPS\n"
            "        following = tl.load(indices + coming, mask=coming < last, other=0).to(tl.int64)\n        inside",
        ),
        (
            "    for step in tl.range(first",
            "    block = tl.load(indices + first, mask=first < last, other=0).to(tl.int64)\n"
            "    for step in tl.range(first",
        ),
        ("    return top, total, acc, second\n", "        block = following\n    return top, total, acc, second\n"),
    ),
    "no fused multiply-add": (("enable_fp_fusion=True", "enable_fp_fusion=False"),),
    "every step masked": (("FULL_FIRST=not short_only and ", "FULL_FIRST=False and "),),
}


def without(change: str, folder: Path) -> ModuleType:
    """`dbsp_kernels.triton.forward` with a change taken back, from a file in `folder`: Triton reads sources."""
    source = Path(dbsp_kernels.triton.__file__).with_name("forward.py").read_text()
    for now, before in CHANGES[change]:
        assert now in source, f"the kernel no longer has {now!r}"
        source = source.replace(now, before)
    file = folder / f"forward_{list(CHANGES).index(change)}.py"
    file.write_text(source)
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
