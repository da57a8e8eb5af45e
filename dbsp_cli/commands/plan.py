"""`dbsp plan`: plans of one attention of a mask file, or a model's modelled seconds on a number of GPUs."""

from __future__ import annotations

import itertools
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from dbsp_cli.modelled import MODELLED_ONLY, modelled_table, modelled_videos
from dbsp_cli.output import MOST_GPUS, PATH, JsonFlag, TextTable, print_json, print_tables
from dbsp_core.cost.machine import Hardware, hardware_for, load_hardware
from dbsp_core.cost.prediction import candidates, traffic_of
from dbsp_core.layout.sequence_layout import SequenceLayout
from dbsp_core.layout.strategy import Strategy
from dbsp_core.masks.block_mask import BlockMask
from dbsp_core.masks.mask_file import MaskFile
from dbsp_core.models.table import MODEL_SPECS, find_model_spec, unknown_model
from dbsp_core.planning.chunks import ALL, NEEDED, require_keys
from dbsp_core.planning.plan import make_plan
from dbsp_core.planning.planners import PLANNERS, require_planner
from dbsp_core.utils.errors import UserError
from dbsp_core.utils.process import printable

_VALUES = ("planner", "rho_before", "rho", "rho_bound", "moved", "split_heads", "extra_kv", "plan_ms")


def plan_command(
    context: typer.Context,
    gpus: Annotated[int, typer.Option(min=1, max=MOST_GPUS, help="Number of GPUs.")],
    file: Annotated[Path | None, typer.Argument(help="Mask file (.safetensors); or give --model.", **PATH)] = None,
    model: Annotated[str | None, typer.Option(help="Instead of FILE: model the seconds of this one's video.")] = None,
    machine: Annotated[
        str | None,
        typer.Option(help="GPU: a800, h100, … or a file; default: measured here, or h100."),
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
    measured = hardware_for(machine, "cuda", "auto") if machine or torch.cuda.is_available() else None
    hardware = measured or load_hardware("h100")
    if file is None:
        for name in ("strategy", "planner", "keys", "layer"):
            if str(context.get_parameter_source(name)).endswith("COMMANDLINE"):
                raise UserError(f"--{name} is for a mask file, not for --model; leave it out")
        _show_model(str(model), gpus, hardware, as_json, by_default=measured is None)
        return
    source = MaskFile(file)
    mask = source.layer(layer)
    slots = hardware.row_slots(mask.grid.block_q, mask.grid.block_k, head_dim=128)
    plans = _plans(mask, gpus, strategy, planner, keys, slots)
    if as_json:
        print_json(file=str(file), gpus=gpus, density=mask.density, machine=hardware.name, slots=slots, plans=plans)
        return
    if source.per_layer:
        print(printable(f"{file}: layer {layer} of {source.layers}"), file=sys.stderr)
    print_tables([_table(mask, gpus, plans, slots)])


def _show_model(model: str, gpus: int, hardware: Hardware, as_json: bool, *, by_default: bool) -> None:
    """Prints modelled seconds of a model's usual video, by strategy."""
    spec = find_model_spec(model, MODEL_SPECS | MODELLED_ONLY)
    if spec is None:
        raise unknown_model(model, MODEL_SPECS | MODELLED_ONLY)
    videos = modelled_videos(spec, gpus, hardware)
    if as_json:
        rows = [asdict(video) for video in videos]
        print_json(model=spec.name, gpus=gpus, machine=hardware.name, label="modelled", videos=rows)
        return
    print_tables([modelled_table(spec, gpus, hardware, videos, by_default=by_default)])


def _plans(
    mask: BlockMask, gpus: int, strategy: str, planner: str, keys: str, slots: int | None
) -> list[dict[str, Any]]:
    """Returns numbers of the mask's plan for every strategy and planner asked for.

    `kv_received` is K and V that a rank receives, mean, in shares of one rank's Q.
    """
    strategies = [*map(Strategy.parse, candidates(gpus, mask.grid) if strategy == "all" else (strategy,))]
    for parsed in strategies:
        parsed.require_world(gpus)
    require_keys(keys)
    names = tuple(PLANNERS) if planner == "all" else tuple(planner.split(","))
    layouts = {name: "contiguous" if keys == NEEDED else require_planner(name).layout for name in names}
    share = mask.heads * mask.grid.tokens / gpus
    plans = []
    for parsed, (name, usual) in itertools.product(strategies, layouts.items()):
        layout = SequenceLayout.named(usual, mask.grid, parsed)
        plan = make_plan(mask, parsed, name, layout=layout, keys=keys)
        received = traffic_of(plan, layout).kv_received / share
        values = {value: getattr(plan, value) for value in _VALUES}
        values["row_share"] = None if slots is None else plan.row_share(slots)
        plans.append({"strategy": str(parsed), **values, "keys": keys, "kv_received": received})
    return plans


_COLUMNS = (
    ("strategy", "strategy", str),
    ("planner", "planner", str),
    ("before", "rho_before", "{:.4f}".format),
    ("ρ_s", "rho", "{:.4f}".format),
    ("bound", "rho_bound", "{:.4f}".format),
    ("row", "row_share", lambda share: "–" if share is None else f"{share:.2f}"),
    ("moved", "moved", "{:.1%}".format),
    ("+KV", "extra_kv", "{:.0%}".format),
    ("KV in", "kv_received", "{:.2f}".format),
    ("ms", "plan_ms", "{:.2f}".format),
)


def _table(mask: BlockMask, gpus: int, plans: list[dict[str, Any]], slots: int | None) -> TextTable:
    best = min(plans, key=lambda plan: (plan["rho"], plan["moved"]))
    conclusion = (
        f"most even: {best['strategy']}, {best['planner']}: ρ_s {best['rho_before']:.4f} → {best['rho']:.4f}\n"
    )
    return TextTable.of(
        f"{mask.heads} heads, {mask.grid.nq}×{mask.grid.nk} blocks, density {mask.density:.3f}, {gpus} GPUs",
        _COLUMNS,
        plans,
        f"{conclusion if len(plans) > 1 else ''}"
        "ρ_s: slowest rank over mean; bound: least for any plan of whole rows;\n"
        f"row: longest over a slot's share ({slots or 'unknown'} slots: rows that a GPU computes at a time);\n"
        "moved: rows, to other ring ranks; +KV: sent again to further ranks; ms: planning;\n"
        "KV in: K and V that a rank receives, mean, in shares of one rank's Q",
        left=("strategy", "planner"),
    )
