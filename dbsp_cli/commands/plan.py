"""`dbsp plan`: predicts the time of a model's video."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import torch
import typer

from dbsp_cli.modelled import memory_of, modelled_table, modelled_videos, sized, usual_masks
from dbsp_cli.output import MOST_GPUS, JsonFlag, print_json, print_tables
from dbsp_core.config import default_config
from dbsp_core.cost.machine import hardware_for, load_hardware
from dbsp_core.cost.prediction import candidates
from dbsp_core.layout.strategy import Strategy
from dbsp_core.models.table import find_model_spec, unknown_model
from dbsp_core.utils.errors import UserError


def plan_command(
    model: Annotated[str, typer.Option(help="Model whose video to predict.")],
    gpus: Annotated[int, typer.Option(min=1, max=MOST_GPUS, help="Number of GPUs.")],
    machine: Annotated[
        str | None,
        typer.Option(help="GPU: a800, h100, … or a file. Default: measured here, or h100."),
    ] = None,
    size: Annotated[str | None, typer.Option(help="HEIGHTxWIDTH[xFRAMES]. Default: the model's.")] = None,
    density: Annotated[
        float | None,
        typer.Option(min=0, max=1, help="Fraction of active blocks. Default: of the shipped mask."),
    ] = None,
    dense_steps: Annotated[
        int | None, typer.Option(min=0, help="Dense steps. Default: as shipped, or 0 with --density.")
    ] = None,
    strategy: Annotated[str, typer.Option(help="UxRy, or all.")] = "all",
    as_json: JsonFlag = False,
) -> None:
    """Predict the time and memory of a model's video by strategy, without a GPU."""
    # 1. The machine, the model with its video's size, and the strategies
    measured = hardware_for(machine, "cuda", "auto") if machine or torch.cuda.is_available() else None
    hardware = measured or load_hardware("h100")
    spec = find_model_spec(model)
    if spec is None:
        raise unknown_model(model)
    spec = spec if size is None else sized(spec, size)
    if dense_steps is None:
        dense_steps = default_config(None, spec).dense_schedule.first_steps if density is None else 0
    elif dense_steps > (spec.video.steps or 0):
        raise UserError(
            f"--dense-steps must be at most the {spec.video.steps} steps of {spec.name}, got {dense_steps}"
        )
    strategies = None if strategy == "all" else [Strategy.parse(strategy)]
    for parsed in strategies or ():
        parsed.require_world(gpus)
    # 2. Predict each strategy's time, with masks like those shipped or of the given density
    masks = usual_masks(spec, density)
    videos = modelled_videos(spec, gpus, hardware, masks, strategies=strategies, dense_steps=dense_steps)
    grid = masks[0].grid
    break_even = hardware.with_kernel("auto").break_even(grid.block_q, grid.block_k, spec.head_dim, spec.tokens)
    # 3. Print them
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
        by_default=measured is None,
    )
    print_tables([table])
