"""Engines with and without db-SP: rows of docs/results/engines.csv, each run here or said not to be.

python -m scripts.checks.engines.table ENGINE [CASE …]      in that engine's environment: scripts/engines table
"""

from __future__ import annotations

import sys
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from scripts.checks.csv_table import update_table
from scripts.checks.engines.runs import Case, run

RESULT = Path(__file__).parents[3] / "docs/results/engines.csv"
MASK = "sparge:cdf=0.6,block_q=16,block_k=8"
EVEN, UNEQUAL = (3, 4, 8), (3, 5, 5)
CASES = {
    "block-sparse, Ulysses, 2 ranks": (2, 1, Case(4, (EVEN,), MASK)),
    "block-sparse, ring, 2 ranks": (1, 2, Case(4, (EVEN,), MASK)),
    "56 heads, Ulysses, 16 ranks": (16, 1, Case(56, (EVEN,), MASK)),
    "75 tokens, Ulysses, 2 ranks": (2, 1, Case(4, (UNEQUAL,), MASK)),
    "75 tokens, ring, 2 ranks": (1, 2, Case(4, (UNEQUAL,), MASK)),
}
OF_ENGINE = {
    "sglang": {
        "MiniMax-H3 with 3 heads, Ulysses, 2 ranks": (2, 1, Case(3, (UNEQUAL,), MASK, model="h3")),
        "MiniMax-H3 with 3 heads, ring, 2 ranks": (1, 2, Case(3, (UNEQUAL,), MASK, model="h3")),
    }
}
"""Cases that only one engine has."""
NOT_RUN = {
    ("vllm-omni", "block-sparse, Ulysses, 2 ranks"): "not run: its block-sparse kernels need a GPU",
    ("vllm-omni", "block-sparse, ring, 2 ranks"): "not run: the kernel of its ring needs a GPU, dense too",
    ("sglang", "block-sparse, Ulysses, 2 ranks"): "not run: on a CPU it is dense under every mask",
    ("lightx2v", "block-sparse, Ulysses, 2 ranks"): "not run: each operator of its own masks needs a GPU",
}
"""What stock engines do where a CPU cannot show it. The other rows of stock engines are dense."""


def main() -> None:
    engine, *wanted = sys.argv[1:]
    module = engine.replace("-", "_")
    rows = []
    cases = CASES | OF_ENGINE.get(engine, {})
    for name in wanted or cases:
        ulysses, ring, case = cases[name]
        stock = NOT_RUN.get((engine, name)) or in_words(run(module, ulysses, ring, replace(case, mask=None))[0])
        ours = in_words(run(module, ulysses, ring, case)[0])
        rows.append({"engine": engine, "version": version(engine), "case": name, "stock": stock, "with db-SP": ours})
        print(rows[-1], flush=True)
    update_table(RESULT, rows, ("engine", "case"))


def in_words(found: dict[str, Any]) -> str:
    if "rejected" in found:
        return " ".join(found["rejected"].split())
    if found["error"] <= 1e-5:
        return f"equals one process: {found['error']:.1e}"
    return f"differs from one process: {found['error']:.1e}"


main()
