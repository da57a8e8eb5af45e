"""Eq. 4 exactly as the paper prints it (§4.3), and the form that db-SP predicts by: seconds of one attention.

Started from the repository's root: python -m scripts.reproduce.eq4
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from dbsp_core import Plan, Strategy
from dbsp_core.cost.machine import Hardware, load_hardware
from dbsp_core.cost.prediction import AttentionShape, block_s, require_network
from dbsp_core.models.table import MODEL_SPECS
from scripts.reproduce.common import mask_of
from scripts.reproduce.lockstep import RingPlan, nodes_of
from scripts.reproduce.simulate import ELEMENT_BYTES, RunConfig, simulate_layer
from scripts.results.result import print_table


def as_printed(
    strategy: Strategy, rho: float, density: float, *, all2all_s: float, p2p_s: float, dense_s: float, launch_s: float
) -> float:
    """Eq. 4, seconds. It charges each of the y ring steps the whole per-GPU compute, and multiplies P2P by ρ_s.

    Args:
        strategy: UxRy.
        rho: ρ_s of the plan.
        density: Share of active blocks.
        all2all_s: Seconds of the all-to-all over x ranks.
        p2p_s: Seconds of sending one ring step's K and V.
        dense_s: Seconds of dense attention on one GPU.
        launch_s: Seconds of launching a ring step's kernel.
    """
    compute_s = dense_s / strategy.world * density + launch_s
    attention_s = (max(compute_s, p2p_s) * (strategy.ring - 1) + compute_s) * rho
    return all2all_s + attention_s


def predict_as_printed(
    plan: Plan | RingPlan,
    density: float,
    shape: AttentionShape,
    hardware: Hardware,
    nodes: Sequence[int] | None = None,
) -> float:
    """Eq. 4 of a plan: its ρ_s, and communication of equal shards as the paper's text describes it.

    The all-to-all moves q, k, v and the output over x ranks, P2P one ring step's K and V of equal shards.
    """
    strategy, known, grid = plan.strategy, hardware.constants, plan.grid
    nodes = [0] * strategy.world if nodes is None else nodes
    require_network(hardware, nodes)
    exchange_rate, p2p_rate = known.exchange_bytes_per_s, known.p2p_bytes_per_s
    if len(set(nodes)) > 1 and known.network_bytes_per_s is not None:
        p2p_rate = min(p2p_rate, known.network_bytes_per_s)
        if strategy.ulysses > nodes.count(nodes[0]):
            exchange_rate = min(exchange_rate, known.network_bytes_per_s)
    share = shape.heads * grid.tokens * shape.token_bytes / strategy.world
    x = strategy.ulysses
    blocks = plan.heads * grid.pairs * shape.batch
    return as_printed(
        strategy,
        plan.rho,
        density,
        all2all_s=2 * known.exchange_latency_s + 4 * share * (x - 1) / x / exchange_rate if x > 1 else 0.0,
        p2p_s=known.p2p_latency_s + 2 * share / p2p_rate if strategy.ring > 1 else 0.0,
        dense_s=blocks * block_s(grid.block_q, grid.block_k, shape.head_dim, known),
        launch_s=known.launch_s,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODEL_SPECS, default="wan2.1-t2v-14b")
    parser.add_argument("--hardware", default="a800", help="name of a shipped machine, or a hardware file")
    parser.add_argument("--density", type=float, help="density of the mask; default: the model's")
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--planners", nargs="+", default=["contiguous", "paper", "dbsp"])
    parser.add_argument("--coarsen", type=int, default=2, help="multiply block sizes: quicker")
    options = parser.parse_args()
    model, hardware = MODEL_SPECS[options.model], load_hardware(options.hardware)
    mask = mask_of(model, options.density, options.coarsen)
    nodes = nodes_of(hardware, options.gpus)
    shape = AttentionShape(1, mask.heads, model.head_dim, ELEMENT_BYTES[hardware.dtype])
    rows = []
    for strategy in Strategy.all_for(options.gpus):
        for planner in options.planners:
            time = simulate_layer(RunConfig(strategy, planner), mask, model, hardware, nodes)
            printed_s = predict_as_printed(time.plan, mask.density, shape, hardware, nodes)
            ms = {"as printed, ms": 1e3 * printed_s, "as corrected, ms": 1e3 * time.prediction.total_s}
            rows.append({"strategy": str(strategy), "planner": planner, "ρ_s": time.plan.rho, **ms})
    print_table("Eq. 4, modelled", rows)


if __name__ == "__main__":
    main()
