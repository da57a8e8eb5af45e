"""`dbsp plan`: plans an attention of a mask file, or predicts the time of a model's video."""

from __future__ import annotations

import itertools
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from dbsp_cli.modelled import memory_of, modelled_table, modelled_videos, sized, usual_masks
from dbsp_cli.output import MOST_GPUS, PATH, JsonFlag, TextTable, print_json, print_tables
from dbsp_core.config import default_config
from dbsp_core.cost.machine import Hardware, hardware_for, load_hardware
from dbsp_core.cost.prediction import candidates, traffic_of
from dbsp_core.layout.sequence_layout import SequenceLayout
from dbsp_core.layout.strategy import Strategy
from dbsp_core.masks.block_mask import BlockMask
from dbsp_core.masks.mask_file import MaskFile
from dbsp_core.models.table import ModelSpec, find_model_spec, unknown_model
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
    model: Annotated[str | None, typer.Option(help="Instead of FILE: predict the time of this model's video.")] = None,
    machine: Annotated[
        str | None,
        typer.Option(help="GPU: a800, h100, … or a file. Default: measured here, or h100."),
    ] = None,
    size: Annotated[str | None, typer.Option(help="With --model: HEIGHTxWIDTH or HEIGHTxWIDTHxFRAMES.")] = None,
    density: Annotated[
        float | None,
        typer.Option(min=0, max=1, help="With --model: fraction of active blocks. Default: of the shipped mask."),
    ] = None,
    dense_steps: Annotated[
        int | None, typer.Option(min=0, help="With --model: dense steps. Default: as shipped, or 0 with --density.")
    ] = None,
    strategy: Annotated[str, typer.Option(help="UxRy, or all.")] = "all",
    planner: Annotated[str, typer.Option(help=f"Comma-separated list of {', '.join(PLANNERS)}, or all.")] = "dbsp",
    keys: Annotated[str, typer.Option(help="Keys sent to ranks: all or needed.")] = ALL,
    layer: Annotated[int, typer.Option(help="Layer index.")] = 0,
    as_json: JsonFlag = False,
) -> None:
    """Plan an attention of a mask file: balance before and after, and moved rows; or predict a video's time."""
    if (model is None) is (file is None):
        raise UserError("dbsp plan needs either a mask file or --model; for example --model wan2.1-t2v-14b")
    measured = hardware_for(machine, "cuda", "auto") if machine or torch.cuda.is_available() else None
    hardware = measured or load_hardware("h100")
    others = ("planner", "keys", "layer") if file is None else ("size", "density", "dense_steps")
    for name in others:
        if str(context.get_parameter_source(name)).endswith("COMMANDLINE"):
            kinds = ("a mask file", "--model") if file is None else ("--model", "a mask file")
            raise UserError(f"--{name.replace('_', '-')} is for {kinds[0]}, not for {kinds[1]}; remove it")
    if file is None:
        spec = _model(str(model), size, dense_steps or 0)
        if dense_steps is None:
            dense_steps = default_config(None, spec).dense_schedule.first_steps if density is None else 0
        _show_model(spec, gpus, hardware, strategy, density, dense_steps, as_json, by_default=measured is None)
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


def _model(name: str, size: str | None, dense_steps: int) -> ModelSpec:
    """Returns the model with a video of this size. Raises UserError for unknown names and invalid sizes."""
    spec = find_model_spec(name)
    if spec is None:
        raise unknown_model(name)
    if dense_steps > (spec.video.steps or 0):
        raise UserError(
            f"--dense-steps must be at most the {spec.video.steps} steps of {spec.name}, got {dense_steps}"
        )
    return spec if size is None else sized(spec, size)


def _show_model(
    spec: ModelSpec,
    gpus: int,
    hardware: Hardware,
    strategy: str,
    density: float | None,
    dense_steps: int,
    as_json: bool,
    *,
    by_default: bool,
) -> None:
    """Prints predicted time and counted memory of a model's video by strategy."""
    strategies = None if strategy == "all" else [Strategy.parse(strategy)]
    for parsed in strategies or ():
        parsed.require_world(gpus)
    masks = usual_masks(spec, density)
    videos = modelled_videos(spec, gpus, hardware, masks, strategies=strategies, dense_steps=dense_steps)
    grid = masks[0].grid
    break_even = hardware.with_kernel("auto").break_even(grid.block_q, grid.block_k, spec.head_dim, spec.tokens)
    if as_json:
        memory = {str(way): asdict(memory_of(spec, way)) for way in strategies or candidates(gpus, grid)}
        names = {"model": spec.name, "gpus": gpus, "machine": hardware.name, "label": "modelled"}
        asked = {"density": masks[0].density, "dense_steps": dense_steps, "break_even": break_even}
        print_json(**names, **asked, memory=memory, videos=[asdict(video) for video in videos])
        return
    table = modelled_table(
        spec,
        gpus,
        hardware,
        videos,
        density=masks[0].density,
        dense_steps=dense_steps,
        break_even=break_even,
        by_default=by_default,
    )
    print_tables([table])


def _plans(
    mask: BlockMask, gpus: int, strategy: str, planner: str, keys: str, slots: int | None
) -> list[dict[str, Any]]:
    """Returns statistics of the mask's plan for every requested strategy and planner.

    `kv_received`: mean k and v received per rank, relative to one rank's q.
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
        "ρ_s: slowest rank over mean; bound: lower bound for whole rows;\n"
        f"row: longest row over a slot's share ({slots or 'unknown'} slots: rows that a GPU computes at a time);\n"
        "moved: rows moved to other ring ranks; +KV: extra keys and values; ms: planning time;\n"
        "KV in: mean K and V received per rank, relative to one rank's Q",
        left=("strategy", "planner"),
    )
