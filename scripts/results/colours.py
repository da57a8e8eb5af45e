"""Colours of the figures of results, one for each planner, strategy and mask source everywhere.

Colours of planners are those of a report's page (`dbsp_core/reports/pages/style.css`).
"""

from __future__ import annotations

PLANNERS = {
    "dbsp": "#2a6db0",
    "contiguous": "#a39a8c",
    "paper": "#e07b35",
    "snake": "#d9b64a",
    "burst": "#a5486e",
}
STRATEGIES = {"U8R1": "#482677", "U4R2": "#277f8e", "U2R4": "#45b36b", "U1R8": "#b5a516"}
"""From Ulysses alone to a ring alone."""
MASKS = {
    "dense": "#5d6678",
    "sparge": "#b3335c",
    "sparge topk": "#e58a9f",
    "window": "#8a9a2b",
    "large window": "#c3cc70",
    "radial": "#1b7f5c",
    "sol": "#6a4fb5",
    "vsa, no gate": "#2f9e9e",
    "subblock": "#c46a1f",
    "cube": "#1f5f6b",
    "ssta": "#7a4a2b",
    "window + sparge": "#5f7d3a",
    "lowrank": "#3f8fc4",
    "lowrank, mean query": "#a3cbe6",
}
"""By mask source, where methods are compared by what they keep."""
ROLES = {"measured": "#3d4454", "fitted": "#9fc5c3", "held out": "#17807e"}
"""Of what others measured, and of what is modelled: with constants that were fitted to it, and without."""
