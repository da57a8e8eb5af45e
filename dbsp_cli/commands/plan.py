"""`dbsp plan`: plans of one attention of a mask file."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from dbsp_cli.output import (
    MOST_GPUS,
    PATH,
    JsonFlag,
    TextTable,
    print_json,
    print_tables,
    require_apart,
    require_file_place,
    require_pictures,
)
from dbsp_cli.owners_picture import owners_picture
from dbsp_core.cost.prediction import candidates, traffic_of
from dbsp_core.layout.sequence_layout import LAYOUTS, SequenceLayout
from dbsp_core.layout.strategy import Strategy
from dbsp_core.masks.block_mask import BlockMask
from dbsp_core.masks.mask_file import MaskFile
from dbsp_core.planning.chunks import ALL, NEEDED, require_keys
from dbsp_core.planning.plan import Plan, make_plan
from dbsp_core.planning.planners import PLANNERS, require_planner
from dbsp_core.planning.wire_format import MODEL, require_wire_format
from dbsp_core.utils.files import write_atomically
from dbsp_core.utils.process import printable

__all__ = ["plan_command"]

TOKEN = 128, 2
"""Numbers of a token of one head, and bytes of each, as most models have them."""
_VALUES = ("planner", "rho_before", "rho", "rho_bound", "moved")


def plan_command(
    file: Annotated[Path, typer.Argument(help="Mask file (.safetensors).", **PATH)],
    gpus: Annotated[int, typer.Option(max=MOST_GPUS, help="Number of GPUs.")],
    strategy: Annotated[str, typer.Option(help="UxRy, or all.")] = "all",
    planner: Annotated[
        str, typer.Option(help=f"One of {', '.join(PLANNERS)}; several with commas between, or all.")
    ] = "dbsp",
    layout: Annotated[
        str | None, typer.Option(help=f"Sequence layout: {', '.join(LAYOUTS)}; default: the planner's own.")
    ] = None,
    keys: Annotated[str, typer.Option(help="all or needed: what ranks are sent.")] = ALL,
    precision: Annotated[str, typer.Option(help="model or int8: how q, k and v travel.")] = MODEL.name,
    layer: Annotated[int, typer.Option(help="Which layer of a file with several.")] = 0,
    picture: Annotated[
        Path | None,
        typer.Option(help="PNG to write: the owner of each row, split blindly and in the most even plan.", **PATH),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Plan one attention of a mask file: how even the work is before and after, and what moves."""
    if picture is not None:
        require_file_place(picture, "--picture")
        require_apart({"--picture": picture}, inputs={"the mask file": file})
        require_pictures()
    request = _FileRequest(gpus, strategy, planner, layout, keys, precision)
    source = MaskFile(file)
    of_layer = source.layer(layer)
    plans = _plans(of_layer, request)
    if picture is not None:
        write_atomically(picture, _picture(f"{file.name}, layer {layer}", of_layer, plans, request))
    if as_json:
        rows = [_record(one, keys, precision) for one in plans]
        print_json(file=str(file), gpus=gpus, density=of_layer.density, plans=rows)
        return
    if source.per_layer:
        print(printable(f"{file}: layer {layer} of {source.layers}"), file=sys.stderr)
    print_tables([_table(of_layer, gpus, plans)])


@dataclass(frozen=True)
class _FileRequest:
    """The options of `dbsp plan` for a mask file; see its help."""

    gpus: int
    strategy: str
    planner: str
    layout: str | None
    keys: str
    precision: str


class _FilePlan(NamedTuple):
    plan: Plan
    kv_received: float
    """K and V that a rank receives, mean, in shares of one rank's Q in the model's precision, of tokens of `TOKEN`."""


def _plans(mask: BlockMask, request: _FileRequest) -> list[_FilePlan]:
    """Plans the mask, a layer's of the file, for every strategy and planner asked for."""
    strategies = candidates(request.gpus, mask.grid) if request.strategy == "all" else (request.strategy,)
    strategies = tuple(map(Strategy.parse, strategies))
    for strategy in strategies:
        strategy.require_world(request.gpus)
    require_keys(request.keys)
    wire = require_wire_format(request.precision)
    names = tuple(PLANNERS) if request.planner == "all" else tuple(request.planner.split(","))
    for name in names:
        require_planner(name)
    share = mask.heads * mask.grid.tokens / request.gpus / (wire.token_bytes(*TOKEN) / MODEL.token_bytes(*TOKEN))
    plans = []
    for strategy in strategies:
        for name in names:
            usual = "contiguous" if request.keys == NEEDED else require_planner(name).layout
            layout = SequenceLayout.named(request.layout or usual, mask.grid, strategy)
            plan = make_plan(mask, strategy, name, layout=layout, keys=request.keys, precision=request.precision)
            plans.append(_FilePlan(plan, traffic_of(plan, layout).kv_received / share))
    return plans


def _record(one: _FilePlan, keys: str, precision: str) -> dict[str, Any]:
    plan = one.plan
    return (
        {"strategy": str(plan.strategy)}
        | {name: getattr(plan, name) for name in _VALUES}
        | {"split_heads": plan.split_heads, "extra_kv": plan.extra_kv, "plan_ms": plan.plan_ms}
        | {"keys": keys, "precision": precision, "kv_received": one.kv_received}
    )


def _table(mask: BlockMask, gpus: int, plans: list[_FilePlan]) -> TextTable:
    grid = mask.grid
    rows = []
    for p, received in plans:
        numbers = (f"{p.rho_before:.4f}", f"{p.rho:.4f}", f"{p.rho_bound:.4f}")
        shares = (f"{p.rho / p.rho_bound - 1:.1%}", f"{p.moved:.1%}", f"{p.extra_kv:.0%}")
        rows.append((str(p.strategy), p.planner, *numbers, *shares, f"{received:.2f}", f"{p.plan_ms:.2f}"))
    return TextTable(
        f"{mask.heads} heads, {grid.nq}×{grid.nk} blocks, density {mask.density:.3f}, {gpus} GPUs",
        ("strategy", "planner", "before", "ρ_s", "bound", "gap", "moved", "+KV", "KV in", "ms"),
        rows,
        f"{_conclusion([one.plan for one in plans])}"
        "ρ_s: slowest rank over mean; bound: least for any plan of whole rows; gap: above it;\n"
        "moved: rows, to other ring ranks; +KV: sent again to further ranks; ms: planning;\n"
        "KV in: K and V that a rank receives, mean, in shares of one rank's Q",
        left=("strategy", "planner"),
        spare=("ms", "+KV", "KV in", "gap", "bound"),
    )


def _picture(title: str, mask: BlockMask, plans: list[_FilePlan], request: _FileRequest) -> bytes:
    """PNG of the most even plan, below the contiguous one of the same strategy."""
    best = _most_even([one.plan for one in plans])
    blind = replace(request, strategy=str(best.strategy), planner="contiguous", layout=None, keys=ALL)
    ((contiguous, _),) = _plans(mask, blind)
    rows = [("plain sequence parallelism", contiguous), (best.planner, best)]
    figure = owners_picture(f"{title}: {best.strategy}", rows if best.planner != "contiguous" else rows[:1])
    content = BytesIO()
    figure.savefig(content, format="png", dpi=110)
    return content.getvalue()


def _most_even(plans: list[Plan]) -> Plan:
    return min(plans, key=lambda plan: (plan.rho, plan.moved))


def _conclusion(plans: list[Plan]) -> str:
    """Names the most even of several plans in a line."""
    if len(plans) == 1:
        return ""
    best = _most_even(plans)
    return f"most even: {best.strategy}, {best.planner}: ρ_s {best.rho_before:.4f} → {best.rho:.4f}\n"
