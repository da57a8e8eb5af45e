"""An attention of each published model on 8 and 16 GPUs, of one node and of two: strategies of the rule and of `auto`.

    python -m scripts.reproduce.nodes

The rule needs no constants (`dbsp_core.cost.prediction.by_rule`); `auto` predicts every UxRy by a machine's. Masks are
synthetic, of density 0.41; MiniMax-H3's are VSA's at sparsity 0.8, whose rows are equal. Plans start from one layout,
as those of sessions with `strategy: auto` do.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby

import numpy as np

from dbsp_core.cost.machine import load_hardware
from dbsp_core.cost.prediction import AttentionShape, by_rule, candidates, predict
from dbsp_core.layout.sequence_layout import SequenceLayout
from dbsp_core.layout.strategy import Strategy
from dbsp_core.masks.grid import BlockGrid
from dbsp_core.models.table import MODEL_SPECS, ModelSpec
from dbsp_core.planning.comm_dtype import CommDtype
from dbsp_core.planning.plan import plan_from_counts
from dbsp_core.sources import MaskRequest, SyntheticSource
from dbsp_core.sources.synthetic.source import PRESETS
from scripts.results.result import Result, Row, arguments

MODELS = (
    "wan2.1-t2v-1.3b", "wan2.1-t2v-14b", "wan2.2-ti2v-5b", "cogvideox-5b", "cogvideox1.5-5b", "hunyuanvideo",
    "minimax-h3",
)  # fmt: skip
"""One of each size of attention."""
MACHINES = ("a800", "h800", "h100", "h200", "b200", "h20")
RANKS = {"8 on one node": [0] * 8, "4 on each of two": [0] * 4 + [1] * 4, "8 on each of two": [0] * 8 + [1] * 8}
INT8 = CommDtype("int8"), CommDtype("int8", "int8")
H3_TOKENS, H3_DENSITY = 209_664, 0.2


def rows_of(spec: ModelSpec) -> tuple[BlockGrid, np.ndarray]:
    """Returns the grid, and int64[H, nq], active blocks of each row."""
    if spec.name == "minimax-h3":
        grid = BlockGrid.uniform(H3_TOKENS, 64)
        return grid, np.full((spec.heads, grid.nq), round(H3_DENSITY * grid.nk))
    source = SyntheticSource(preset=spec.name) if spec.name in PRESETS else SyntheticSource()
    mask = source.mask(MaskRequest(0, spec.heads, spec.thw, spec.text_tokens))
    return mask.grid, mask.counts.rows


def rows(_: argparse.Namespace) -> Iterator[Row]:
    machines = [load_hardware(name) for name in MACHINES]
    for name in MODELS:
        spec = MODEL_SPECS[name]
        grid, counts = rows_of(spec)
        shape = AttentionShape(1, spec.heads, spec.head_dim)
        for where, nodes in RANKS.items():
            layout = SequenceLayout.named("striped", grid, Strategy(1, len(nodes)))
            strategies = candidates(len(nodes), grid)
            plans = {s: plan_from_counts(counts, grid, s, layout=layout, compare=False) for s in strategies}
            rule = by_rule(strategies, spec.heads, nodes)[0]
            for machine in machines:
                ms = {s: 1e3 * predict(plan, shape, machine, nodes, layout).total_s for s, plan in plans.items()}
                best = min(ms, key=ms.__getitem__)
                int8 = (replace(plans[rule], comm_dtype=comm_dtype) for comm_dtype in INT8)
                int8_ms = [round(1e3 * predict(plan, shape, machine, nodes, layout).total_s, 2) for plan in int8]
                yield Row(
                    model=name,
                    heads=spec.heads,
                    tokens=grid.tokens,
                    ranks=where,
                    machine=machine.name,
                    rule=str(rule),
                    rule_ms=round(ms[rule], 2),
                    fastest=str(best),
                    fastest_ms=round(ms[best], 2),
                    ulysses_ms=round(ms[Strategy(len(nodes), 1)], 2),  # over all ranks, UxR1
                    loss=round(ms[rule] / ms[best] - 1, 4),
                    int8_ms=int8_ms[0],  # the rule's with `precision: int8`
                    int8_out_ms=int8_ms[1],  # and with the output in 8 bits, too
                    label="modelled",
                )


def summary(found: list[Row]) -> Iterator[str]:
    for (model, where), group in groupby(found, lambda row: (row.model, row.ranks)):
        of_machines = list(group)
        fastest = sorted({row.fastest for row in of_machines})
        loss = max(row.loss for row in of_machines)
        yield f"{model}, {where}: rule {of_machines[0].rule}, fastest {', '.join(fastest)}, loss up to {loss:.1%}"


if __name__ == "__main__":
    Result("nodes", "Strategies on one node and on two").run(arguments(__doc__), rows, summary)
