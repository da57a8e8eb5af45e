"""Settings that earlier versions had, and what to write instead."""

from __future__ import annotations

__all__ = ["REMOVED_KEYS", "REMOVED_VALUES", "why_removed"]

REMOVED_KEYS: dict[str, str] = {
    "budget": "plans are kept by reuse.threshold alone; a lower one asks for more plans",
    "exchange_cost": "leave it out: planner dbsp puts balance first; planner contiguous moves nothing",
    "memory_limit": "leave it out: use more GPUs, or a smaller video or batch, where memory is short",
    "balancer": "KnapFormer's greedy always chooses the bags; leave it out",
    "pooled_keys": "rows attend to the blocks that they keep, and skipped blocks have no mean keys; leave it out",
}
"""Keys that no longer exist, and what to do instead."""
REMOVED_VALUES: dict[tuple[str, str], str] = {
    ("source", "vllm_selector"): "sparge and sol choose blocks by means; for your own function write callable",
    ("layout", "learned"): "write layout: striped, which is nearly as even, or leave it out",
    ("layout", "local"): "leave layout out, or write contiguous; keys: needed cuts rows into runs of tokens on both",
    ("planner", "local"): "write planner: dbsp, which cuts rows into runs of tokens with keys: needed",
    ("planner", "knapsack"): "write planner: paper, whose heads are assigned by the same greedy rule",
    ("keys", "kept"): "for masks predicted at every call write keys: all, for others needed",
    ("keys", "auto"): "leave it out, or write keys: needed for masks that are known beforehand",
    ("keys", "ring"): "write keys: all, or leave it out: keys come in chunks from where they live",
}
"""Values that a key no longer takes, and what to write instead."""


def why_removed(key: object, value: object = None) -> str | None:
    """Returns what to say of a removed key, or of a key's removed value; None for one that was never there."""
    advice = REMOVED_KEYS.get(str(key)) if value is None else REMOVED_VALUES.get((str(key), str(value)))
    shown = key if value is None else f"{key}: {value}"
    return f"{shown} was removed; {advice}" if advice else None
