"""`dbsp plan`: plans of one attention of a mask file, or of several sequences at once."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from dbsp_cli.commands.sequences import FLUX_NAME, SequenceRequest, print_sequence_plans
from dbsp_cli.output import LARGEST_SEED, MOST_GPUS, JsonFlag, options_for, print_json, print_tables
from dbsp_core.config.models import MODEL_SPECS
from dbsp_core.cost.comm_volume import traffic_of
from dbsp_core.cost.local_layout import least_keys_layout
from dbsp_core.cost.selection import candidates
from dbsp_core.layout.learned import MaskProfile
from dbsp_core.layout.sequence_layout import LAYOUT_ORDERS, SequenceLayout
from dbsp_core.layout.strategy import Strategy
from dbsp_core.masks.block_mask import BlockMask
from dbsp_core.masks.mask_file import MaskFile
from dbsp_core.planning.key_travel import require_keys
from dbsp_core.planning.plan import Plan, make_plan
from dbsp_core.planning.planners import PLANNERS, PaperConfig, PlannerConfig, require_planner
from dbsp_core.reports.tables import TextTable
from dbsp_core.utils.errors import UserError

__all__ = ["plan_command"]

_VALUES = ("planner", "rho_before", "rho", "rho_bound", "moved")


def plan_command(
    context: typer.Context,
    file: Annotated[Path | None, typer.Argument(help="Mask file (.safetensors).")] = None,
    gpus: Annotated[int | None, typer.Option(max=MOST_GPUS, help="Number of GPUs.")] = None,
    strategy: Annotated[str, typer.Option(help="UxRy, or all.")] = "all",
    planner: Annotated[
        str, typer.Option(help=f"One of {', '.join(PLANNERS)}; several with commas between, or all.")
    ] = "dbsp",
    reward: Annotated[float, typer.Option(help="R_b of planner paper: how strongly blocks stay.")] = 1.0,
    equal_heads: Annotated[bool, typer.Option(help="Planner paper: equal head counts, up to one.")] = False,
    target_rho: Annotated[float | None, typer.Option(help="Planner dbsp: stop balancing at this ρ_s.")] = None,
    layout: Annotated[
        str | None, typer.Option(help=f"Home layout: {', '.join(LAYOUT_ORDERS)}; default: the planner's own.")
    ] = None,
    keys: Annotated[str, typer.Option(help="ring, or needed: ranks are sent only what their rows need.")] = "ring",
    layer: Annotated[int, typer.Option(help="Which layer of a file with several.")] = 0,
    sequences: Annotated[
        str | None,
        typer.Option(
            help="Instead of a file, data streams as KnapFormer codes them: g{G}b{B}i{R}f{F}s{S}, with commas: G GPUs "
            "load B sequences each, of R pixels square and F frames, as a clip (S=1) or single frames (S=0)."
        ),
    ] = None,
    bags: Annotated[
        str,
        typer.Option(help="With --sequences: topologies such as g8n4 or g1n2+g2n1+g4n1, with commas, or all."),
    ] = "all",
    model: Annotated[
        str, typer.Option(help=f"With --sequences: one of {', '.join(MODEL_SPECS)}, {FLUX_NAME}.")
    ] = "wan2.1-t2v-14b",
    hardware: Annotated[
        str,
        typer.Option(help="With --sequences: a name or a file from dbsp calibrate."),
    ] = "h200",
    mask: Annotated[str, typer.Option(help="With --sequences: every one's, such as window:window=[5,9,9].")] = "dense",
    node_size: Annotated[int, typer.Option(max=MOST_GPUS, help="With --sequences: GPUs per node.")] = 8,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, max=1 << 40, help="With --sequences: most tokens that a GPU can hold.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, max=LARGEST_SEED, help="With --sequences: of drawing them.")] = 0,
    as_json: JsonFlag = False,
) -> None:
    """Plan one attention of a mask file: how even the work is before and after, and what moves.

    Or, with --sequences, share several sequences out over bags of GPUs; topologies are compared, the best proposed.
    """
    if (file is None) == (sequences is None):
        raise UserError("dbsp plan needs a mask file or --sequences CODES, one of the two")
    if sequences is not None:
        print_sequence_plans(SequenceRequest(**options_for(SequenceRequest, context.params)), as_json)
        return
    if file is None or gpus is None:
        raise UserError("a mask file is planned for a number of GPUs; give it, for example --gpus 8")
    source = MaskFile(file)
    of_layer = source.layer(layer)
    possible = candidates(gpus, of_layer.grid) if strategy == "all" else (Strategy.parse(strategy),)
    for wanted in possible:
        wanted.require_world(gpus)
    profile = MaskProfile.of(map(source.layer, range(source.layers))) if layout == "learned" else None
    require_keys(keys)
    names = tuple(PLANNERS) if planner == "all" else tuple(planner.split(","))
    for name in names:
        require_planner(name)
    plans, kv_received = [], []
    for s in possible:
        for name in names:
            local = keys == "needed" and name in ("dbsp", "local")
            chosen = layout or ("local" if local else require_planner(name).layout)
            if chosen == "local":
                sequence = least_keys_layout([of_layer], s)
            else:
                sequence = SequenceLayout.named(chosen, of_layer.grid, s, profile=profile)
            config = PlannerConfig(name, target_rho, paper=PaperConfig(reward, equal_heads))
            plans.append(make_plan(of_layer, s, config, layout=sequence, keys=keys))
            share = of_layer.heads * of_layer.grid.tokens / gpus
            kv_received.append(traffic_of(plans[-1].assignment, sequence).kv_received / share)
    if as_json:
        rows = [
            {"strategy": str(p.strategy)}
            | {name: getattr(p, name) for name in _VALUES}
            | {"split_heads": p.assignment.split_heads, "extra_kv": p.assignment.extra_kv, "plan_ms": p.plan_ms}
            | {"keys": keys, "kv_received": received}
            for p, received in zip(plans, kv_received, strict=True)
        ]
        print_json(file=str(file), gpus=gpus, density=of_layer.density, plans=rows)
        return
    if source.per_layer:
        print(f"{file}: layer {layer} of {source.layers}", file=sys.stderr)
    print_tables([_table(of_layer, gpus, plans, kv_received)])


def _table(mask: BlockMask, gpus: int, plans: list[Plan], kv_received: list[float]) -> TextTable:
    grid = mask.grid
    rows = []
    for p, received in zip(plans, kv_received, strict=True):
        numbers = (f"{p.rho_before:.4f}", f"{p.rho:.4f}", f"{p.rho_bound:.4f}")
        shares = (f"{p.rho / p.rho_bound - 1:.1%}", f"{p.moved:.1%}", f"{p.assignment.extra_kv:.0%}")
        rows.append((str(p.strategy), p.planner, *numbers, *shares, f"{received:.2f}", f"{p.plan_ms:.2f}"))
    return TextTable(
        f"{mask.heads} heads, {grid.nq}×{grid.nk} blocks, density {mask.density:.3f}, {gpus} GPUs",
        ("strategy", "planner", "before", "ρ_s", "own bound", "gap", "moved", "+KV", "KV in", "ms"),
        rows,
        f"{_conclusion(plans)}"
        "ρ_s: slowest rank over mean; own bound: least for a planner of this kind, which shares out\n"
        "single rows (dbsp, local) or whole heads and blocks (the others); gap: above it;\n"
        "moved: of Q, K, V between ring ranks; +KV: sent again to further ranks; ms: planning;\n"
        "KV in: K and V that a rank receives, mean, in shares of one rank's Q",
        left=("strategy", "planner"),
        spare=("ms", "+KV", "KV in", "gap", "own bound"),
    )


def _conclusion(plans: list[Plan]) -> str:
    """A line that names the most even of several plans."""
    if len(plans) == 1:
        return ""
    best = min(plans, key=lambda plan: (plan.rho, plan.moved))
    return f"most even: {best.strategy}, {best.planner}: ρ_s {best.rho_before:.4f} → {best.rho:.4f}\n"
