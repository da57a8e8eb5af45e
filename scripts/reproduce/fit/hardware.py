#!/usr/bin/env python3
"""Fits serial_s and launch_s of configs/hardware/a800.yaml to §3.1's scaling of Wan2.1-14B from one GPU to eight.

Two equations, two unknowns: 6.09 times as fast with Ulysses, 5.81 times with Ring Attention, ρ_s as in Table 1. What
the period's launch comes to holds whatever a period costs beyond its blocks in the paper's system. Prints alone;
flops_per_s is not fixed by the paper, which only says that one GPU takes more than 15 minutes, and attention more than
half of them (§1, §3.1): what is printed must meet that.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from dbsp_core import BlockGrid, BlockMask, Strategy, make_plan
from dbsp_core.cost.hardware import Hardware, load_hardware
from dbsp_core.cost.latency import AttentionShape, predict
from dbsp_core.models.table import MODEL_SPECS

DENSITY = 0.414
SCALING = {"U8R1": (6.09, 1.355), "U1R8": (5.81, 1.255)}
"""By strategy: how many times as fast as one GPU (§3.1), and ρ_s (Table 1)."""


def dense_compute_s(hardware: Hardware) -> float:
    """Of one forward pass on one GPU."""
    return MODEL_SPECS["wan2.1-t2v-14b"].dense_attention_flops / hardware.constants.flops_per_s


def beside_blocks_s(strategy: str, hardware: Hardware) -> float:
    """One attention's exchange, packing, merging and call: everything but blocks and launches."""
    model = MODEL_SPECS["wan2.1-t2v-14b"]
    grid = BlockGrid.uniform(model.tokens, 64)
    empty = BlockMask(np.zeros((model.heads, grid.nq, grid.nk), dtype=bool), grid)
    bare = replace(hardware, constants=replace(hardware.constants, launch_s=0.0))
    shape = AttentionShape(1, model.heads, model.tokens, model.head_dim)
    prediction = predict(make_plan(empty, strategy, "contiguous"), shape, bare)
    return prediction.total_s - prediction.exposed_s


def fitted(hardware: Hardware) -> tuple[float, float]:
    """(serial_s, launch_s)"""
    model = MODEL_SPECS["wan2.1-t2v-14b"]
    attention = model.calls * dense_compute_s(hardware) * DENSITY
    linear = model.calls * model.linear_flops / hardware.constants.linear_flops_per_s
    attentions = model.calls * model.layers
    rows, values = [], []
    for strategy, (scaling, rho) in SCALING.items():
        periods = Strategy.parse(strategy).ring
        known = (attention * rho + linear) / 8 + attentions * beside_blocks_s(strategy, hardware)
        rows.append([1 - 1 / scaling, attentions * (periods - 1 / scaling)])
        values.append((attention + linear) / scaling - known)
    serial_s, launch_s = np.linalg.solve(np.array(rows), np.array(values))
    return float(serial_s), float(launch_s)


def main() -> None:
    hardware, model = load_hardware("a800"), MODEL_SPECS["wan2.1-t2v-14b"]
    serial_s, launch_s = fitted(hardware)
    attention = model.calls * (dense_compute_s(hardware) * DENSITY + model.layers * launch_s)
    total = attention + model.calls * model.linear_flops / hardware.constants.linear_flops_per_s + serial_s
    print(f"serial_s: {serial_s:.4g}\nlaunch_s: {launch_s:.4g}")
    print(f"one GPU: {total / 60:.1f} minutes, {attention / total:.1%} of them attention")


if __name__ == "__main__":
    main()
