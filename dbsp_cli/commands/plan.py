"""`dbsp plan`: plans of one attention of a mask file, or a model's modelled seconds on a number of GPUs."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer

from dbsp_cli.modelled import MODELLED_ONLY, modelled_table, modelled_videos
from dbsp_cli.output import MOST_GPUS, PATH, JsonFlag, TextTable, print_json, print_tables
from dbsp_core.cost.machine import hardware_for, load_hardware
from dbsp_core.cost.prediction import candidates, traffic_of
from dbsp_core.layout.sequence_layout import SequenceLayout
from dbsp_core.layout.strategy import Strategy
from dbsp_core.masks.block_mask import BlockMask
from dbsp_core.masks.mask_file import MaskFile
from dbsp_core.models.table import MODEL_SPECS, find_model_spec, unknown_model
from dbsp_core.planning.chunks import ALL, NEEDED, require_keys
from dbsp_core.planning.plan import Plan, make_plan
from dbsp_core.planning.planners import PLANNERS, require_planner
from dbsp_core.utils.errors import UserError
from dbsp_core.utils.process import printable

_VALUES = ("planner", "rho_before", "rho", "rho_bound", "moved")


def plan_command(
    context: typer.Context,
    gpus: Annotated[int, typer.Option(min=1, max=MOST_GPUS, help="Number of GPUs.")],
    file: Annotated[Path | None, typer.Argument(help="Mask file (.safetensors); or give --model.", **PATH)] = None,
    model: Annotated[str | None, typer.Option(help="Instead of FILE: model the seconds of this one's video.")] = None,
    machine: Annotated[
        str | None,
        typer.Option(help="With --model: a800, h100, … or a file; default: measured here, or h100."),
    ] = None,
    strategy: Annotated[str, typer.Option(help="UxRy, or all.")] = "all",
    planner: Annotated[
        str, typer.Option(help=f"One of {', '.join(PLANNERS)}; several with commas between, or all.")
    ] = "dbsp",
    keys: Annotated[str, typer.Option(help="all or needed: what ranks are sent.")] = ALL,
    layer: Annotated[int, typer.Option(help="Layer index.")] = 0,
    as_json: JsonFlag = False,
) -> None:
    """Plan one attention of a mask file: how balanced the work is before and after, and what migrates."""
    if (model is None) is (file is None):
        raise UserError("dbsp plan needs either a mask file or --model; for example --model wan2.1-t2v-14b")
    kinds = ("--model", "a mask file")
    this, other = kinds if file is None else kinds[::-1]
    for name in ("strategy", "planner", "keys", "layer") if file is None else ("machine",):
        if str(context.get_parameter_source(name)).endswith("COMMANDLINE"):
            raise UserError(f"--{name} is for {other}, not for {this}; leave it out")
    if file is None:
        _show_model(str(model), gpus, machine, as_json)
        return
    source = MaskFile(file)
    mask = source.layer(layer)
    plans = _plans(mask, gpus, strategy, planner, keys)
    if as_json:
        print_json(
            file=str(file), gpus=gpus, density=mask.density, plans=[_record(file_plan, keys) for file_plan in plans]
        )
        return
    if source.per_layer:
        print(printable(f"{file}: layer {layer} of {source.layers}"), file=sys.stderr)
    print_tables([_table(mask, gpus, plans)])


def _show_model(model: str, gpus: int, machine: str | None, as_json: bool) -> None:
    """Prints modelled seconds of a model's usual video, by strategy."""
    spec = find_model_spec(model, MODEL_SPECS | MODELLED_ONLY)
    if spec is None:
        raise unknown_model(model, MODEL_SPECS | MODELLED_ONLY)
    measured = hardware_for(machine, "cuda", "auto") if machine or torch.cuda.is_available() else None
    hardware = measured or load_hardware("h100")
    videos = modelled_videos(spec, gpus, hardware)
    if as_json:
        rows = [asdict(video) for video in videos]
        print_json(model=spec.name, gpus=gpus, machine=hardware.name, label="modelled", videos=rows)
        return
    print_tables([modelled_table(spec, gpus, hardware, videos, by_default=measured is None)])


class _FilePlan(NamedTuple):
    plan: Plan
    kv_received: float
    """K and V that a rank receives, mean, in shares of one rank's Q."""


def _plans(mask: BlockMask, gpus: int, strategy: str, planner: str, keys: str) -> list[_FilePlan]:
    """Plans the mask, a layer's of the file, for every strategy and planner asked for."""
    strategies = candidates(gpus, mask.grid) if strategy == "all" else (strategy,)
    strategies = tuple(map(Strategy.parse, strategies))
    for parsed in strategies:
        parsed.require_world(gpus)
    require_keys(keys)
    names = tuple(PLANNERS) if planner == "all" else tuple(planner.split(","))
    for name in names:
        require_planner(name)
    share = mask.heads * mask.grid.tokens / gpus
    plans = []
    for parsed in strategies:
        for name in names:
            usual = "contiguous" if keys == NEEDED else require_planner(name).layout
            layout = SequenceLayout.named(usual, mask.grid, parsed)
            plan = make_plan(mask, parsed, name, layout=layout, keys=keys)
            plans.append(_FilePlan(plan, traffic_of(plan, layout).kv_received / share))
    return plans


def _record(file_plan: _FilePlan, keys: str) -> dict[str, Any]:
    plan = file_plan.plan
    return (
        {"strategy": str(plan.strategy)}
        | {name: getattr(plan, name) for name in _VALUES}
        | {"split_heads": plan.split_heads, "extra_kv": plan.extra_kv, "plan_ms": plan.plan_ms}
        | {"keys": keys, "kv_received": file_plan.kv_received}
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
        f"{_conclusion([file_plan.plan for file_plan in plans])}"
        "ρ_s: slowest rank over mean; bound: least for any plan of whole rows; gap: above it;\n"
        "moved: rows, to other ring ranks; +KV: sent again to further ranks; ms: planning;\n"
        "KV in: K and V that a rank receives, mean, in shares of one rank's Q",
        left=("strategy", "planner"),
    )


def _conclusion(plans: list[Plan]) -> str:
    """Names the most even of several plans in a line."""
    if len(plans) == 1:
        return ""
    best = min(plans, key=lambda plan: (plan.rho, plan.moved))
    return f"most even: {best.strategy}, {best.planner}: ρ_s {best.rho_before:.4f} → {best.rho:.4f}\n"
