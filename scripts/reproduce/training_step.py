"""Modelled time, bytes sent and bytes kept of a training step on one video, per strategy and planner.

Without activation checkpointing, keys going round the ring. Started from the repository's root:
python -m scripts.reproduce.training_step --gpus 8 --hardware h200 --mask 0.3
"""

from __future__ import annotations

import argparse
import csv
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from dbsp_cli.commands.simulate import masks_for
from dbsp_cli.output import TextTable, print_tables
from dbsp_cli.simulate import ELEMENT_BYTES, MODELLED, RunConfig, simulate_layer, strategies_for
from dbsp_core import BlockMask
from dbsp_core.cost.hardware import Hardware, load_hardware
from dbsp_core.cost.latency import AttentionShape, Topology
from dbsp_core.models.spec import ModelSpec
from dbsp_core.models.table import MODEL_SPECS
from dbsp_core.planning.planners import PLANNERS
from scripts.reproduce.training_cost import predict_backward, saved_bytes, sent_backward, sent_forward


@dataclass(frozen=True)
class TrainingResult:
    """What one strategy and planner make of a training step on one video. Times modelled, bytes counted on the plan.

    Attributes:
        rho: Mean over layers.
        forward_s: Of all self-attentions.
        backward_s: Of all self-attentions.
        other_s: Linear layers, forward and twice that backward, over the GPUs; no optimiser, no sum of parameters'
            gradients.
        forward_bytes: That the busiest rank sends in all self-attentions.
        backward_bytes: The same, backward.
        saved_bytes: That self-attentions keep for backward on the rank that keeps most.
        checkpointed_bytes: The same under activation checkpointing: of one layer at a time.
        speedup: Of the step, over the contiguous planner on the same strategy; 1 for itself.
    """

    gpus: int
    strategy: str
    planner: str
    rho: float
    forward_s: float
    backward_s: float
    other_s: float
    forward_bytes: float
    backward_bytes: float
    saved_bytes: float
    checkpointed_bytes: float
    speedup: float = 1.0
    label: str = MODELLED

    @property
    def step_s(self) -> float:
        return self.forward_s + self.backward_s + self.other_s


def simulate_training(
    model: ModelSpec,
    masks: Sequence[BlockMask],
    hardware: Hardware,
    gpus: Iterable[int],
    planners: Sequence[str],
    *,
    strategy: str = "all",
    node_size: int | None = None,
) -> list[TrainingResult]:
    """As `dbsp_cli.simulate.simulate`, of one training step without activation checkpointing."""
    results = []
    for one, topology in strategies_for(masks[0], hardware, gpus, strategy, node_size, merges=True):
        found = {
            planner: _training_step(RunConfig(one, planner), masks, model, hardware, topology)
            for planner in dict.fromkeys(["contiguous", *planners])
        }
        base = found["contiguous"].step_s
        results += [replace(found[planner], speedup=base / found[planner].step_s) for planner in planners]
    return results


def _training_step(
    run: RunConfig, masks: Sequence[BlockMask], model: ModelSpec, hardware: Hardware, topology: Topology
) -> TrainingResult:
    """Each of the given layers stands for an equal share of the model's."""
    share, world = model.layers / len(masks), run.strategy.world
    rho = forward_s = backward_s = 0.0
    sent, saved = np.zeros((2, world)), np.zeros((len(masks), world))
    for layer, mask in enumerate(masks):
        layout = run.layout(mask)
        shape = AttentionShape(1, mask.heads, mask.grid.tokens, model.head_dim, ELEMENT_BYTES[hardware.dtype])
        time = simulate_layer(run, mask, model, hardware, topology)
        rho += time.plan.rho / len(masks)
        forward_s += share * time.prediction.total_s
        backward_s += share * predict_backward(time.plan, shape, hardware, topology, layout).total_s
        sent += share * np.stack([s(time.plan, shape, layout).total for s in (sent_forward, sent_backward)])
        saved[layer] = saved_bytes(time.plan, shape, layout)
    return TrainingResult(
        gpus=world,
        strategy=str(run.strategy),
        planner=run.planner,
        rho=rho,
        forward_s=forward_s,
        backward_s=backward_s,
        other_s=3 * model.linear_flops / hardware.constants.linear_flops_per_s / world,
        forward_bytes=float(sent[0].max()),
        backward_bytes=float(sent[1].max()),
        saved_bytes=float(share * saved.sum(axis=0).max()),
        checkpointed_bytes=float(saved.max()),
    )


def _table(model: ModelSpec, machine: Hardware, masks: list[BlockMask], rows: Sequence[TrainingResult]) -> TextTable:
    names = ("GPUs", "strategy", "planner", "ρ_s", "forward", "backward", "step", "×", "sent, GB", "saved, GB")
    cells = []
    for row in rows:
        seconds = (f"{t:.2f}" for t in (row.forward_s, row.backward_s, row.step_s, row.speedup))
        sent = f"{row.forward_bytes / 1e9:.1f} + {row.backward_bytes / 1e9:.1f}"
        saved = f"{row.saved_bytes / 1e9:.1f} ({row.checkpointed_bytes / 1e9:.2f})"
        cells.append((str(row.gpus), row.strategy, row.planner, f"{row.rho:.3f}", *seconds, sent, saved))
    best = min(rows, key=lambda row: row.step_s)
    return TextTable(
        f"training {model.name} on {machine.name}, one video, density {masks[0].density:.3f}: modelled times",
        names,
        cells,
        f"fastest: {best.gpus} GPUs, {best.strategy}, {best.planner}: {best.step_s:.2f} s a step, "
        f"{best.speedup:.2f}× contiguous\n"
        "seconds of a step's self-attentions, and of the step with linear layers; ×: over the\n"
        "contiguous planner's step. Sent: by the busiest rank, forward + backward. Saved: by\n"
        "self-attentions on the rank that saves most (with activation checkpointing)\n"
        f"Constants {machine.labels_in_words()}",
        left=("strategy", "planner"),
        spare=("sent, GB", "forward", "backward"),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODEL_SPECS, default="wan2.1-t2v-14b")
    parser.add_argument("--gpus", type=int, nargs="+", default=[8])
    parser.add_argument("--hardware", default="a800", help="a name or a file, see dbsp simulate")
    parser.add_argument("--mask", help="as of dbsp simulate; default: the model's")
    parser.add_argument("--planners", nargs="+", choices=PLANNERS, default=["contiguous", "paper", "dbsp"])
    parser.add_argument("--strategy", default="all", help="UxRy, or all")
    parser.add_argument("--layers", type=int, default=1, help="how many layers' masks represent all")
    parser.add_argument("--node-size", type=int, help="GPUs per node; default: the hardware's")
    parser.add_argument("--coarsen", type=int, default=1, help="multiply block sizes: quicker")
    parser.add_argument("--seed", type=int, default=0, help="seed of synthetic masks")
    parser.add_argument("--out", type=Path, help="CSV file to write")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    options = parser.parse_args()
    model, hardware = MODEL_SPECS[options.model], load_hardware(options.hardware)
    masks = masks_for(model, options.mask, options.layers, options.coarsen, options.seed)
    rows = simulate_training(
        model,
        masks,
        hardware,
        options.gpus,
        options.planners,
        strategy=options.strategy,
        node_size=options.node_size,
    )
    records = [asdict(row) | {"step_s": row.step_s} for row in rows]
    if options.out is not None:
        with options.out.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, records[0].keys(), lineterminator="\n")
            writer.writeheader()
            writer.writerows(records)
    if options.json:
        print(json.dumps({"model": model.name, "hardware": hardware.name, "rows": records}))
    else:
        print_tables([_table(model, hardware, masks, rows)])


if __name__ == "__main__":
    main()
