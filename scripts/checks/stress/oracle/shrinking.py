"""Smaller variants of a case."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from scripts.checks.stress.oracle.attention_case import Draw, Sequence


def variants(case: Draw) -> Iterator[Draw]:
    """Each simpler in one field, the greatest steps first."""
    plain: dict[str, tuple[Any, ...]] = {
        "sequences": tuple(_fewer(case.sequences)),
        "strategy": (f"U{case.world}R1", f"U1R{case.world}"),
        "heads": (1, case.heads // 2, case.heads - 1),
        "batch": (1, case.batch - 1),
        "width": (4, 8),
        "block_q": (16,),
        "block_k": (16,),
        "density": (1.0,),
        "orders": (("thw",),),
        "planner": ("contiguous",),
        "layout": ("contiguous",),
        "kernel": ("auto", "reference"),
        "keys": ("all",),
        "precision": ("model",),
        "dtype": ("float64", "float32"),
        "backward": (False,),
        "debug": (False,),
        "padded": (False,),
        "streams": (None,),
    }
    for name, values in plain.items():
        now = getattr(case, name)
        if now in values and name not in ("heads", "batch"):
            values = values[: values.index(now)]
        for value in values:
            smaller = replace(case, **{name: value})
            if name == "heads" and len(case.orders) > 1:
                smaller = replace(smaller, orders=case.orders[:value])
            if value != now and min(smaller.heads, smaller.batch) >= 1 and smaller.possible:
                yield smaller


def _fewer(sequences: tuple[Sequence, ...]) -> Iterator[tuple[Sequence, ...]]:
    """One sequence less, or one of them smaller."""
    for place, one in enumerate(sequences):
        before, after = sequences[:place], sequences[place + 1 :]
        if len(sequences) > 1:
            yield before + after
        smaller = [replace(one, text=0)] if one.text else []
        smaller += [
            replace(one, thw=(*one.thw[:axis], one.thw[axis] // 2, *one.thw[axis + 1 :]))  # type: ignore[arg-type]
            for axis in range(3)
            if one.thw[axis] > 1
        ]
        smaller += [replace(one, source="random")] if one.source != "random" else []
        for changed in smaller:
            yield (*before, changed, *after)
