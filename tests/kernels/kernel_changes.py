"""The Triton forward kernel with a change taken back, to see in machine code what the change is worth.

Prints, as JSON, what is read in the machine code of both.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import dbsp_kernels.triton
from scripts.checks.machine_code import variants
from scripts.checks.machine_code.variants import examined

INDEX_CARRIED = (
    ("loop = padded(head_dim), tiles.loop", 'loop = padded(head_dim), "plain"'),
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
)
"""Products and softmax one after another, and a block's index that is carried from step to step: (now, before)."""


def with_index_carried(folder: Path) -> ModuleType:
    """Returns `dbsp_kernels.triton.forward` before the change, from a file in `folder`: Triton reads sources."""
    source = Path(dbsp_kernels.triton.__file__).with_name("forward.py").read_text()
    for now, before in INDEX_CARRIED:
        assert now in source, f"the kernel no longer has {now!r}"
        source = source.replace(now, before)
    file = folder / "forward_before.py"
    file.write_text(source)
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    variant = variants.Variant("triton", 90, 64, 64)
    found = [examined(variant)]
    variants.triton_attention = with_index_carried(Path(sys.argv[1])).triton_attention
    print(json.dumps([*found, examined(variant)]))
