"""`dbsp masks`: convert, fit and inspect masks."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from statistics import fmean
from typing import Annotated

import typer

from dbsp_cli.mask_tools.convert import (
    CONVERT_KEYS,
    ConvertOptions,
    RecordingOptions,
    convert_masks,
    convert_recording,
    read_options,
)
from dbsp_cli.mask_tools.fit import fit_recording
from dbsp_cli.mask_tools.info import MaskSeries, examine_masks, mask_picture
from dbsp_cli.output import MOST_GPUS, PATH, JsonFlag, TextTable, print_json, print_tables, require_apart
from dbsp_core.config import DbspConfig
from dbsp_core.masks.mask_file import MaskLayout
from dbsp_core.utils.errors import UserError
from dbsp_core.utils.files import require_file_path, write_atomically
from dbsp_core.utils.process import printable

masks_app = typer.Typer(help="Convert, fit and inspect masks.", rich_markup_mode=None)


@masks_app.callback(invoke_without_command=True)
def masks(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())


@masks_app.command()
def convert(
    source: Annotated[
        Path, typer.Argument(metavar="IN", help="Masks of another project, or a recording's folder.", **PATH)
    ],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="Mask file to write (.safetensors).", **PATH)],
    settings: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help=f"How to read IN: {', '.join(CONVERT_KEYS)}.")
    ] = None,
) -> None:
    """Convert masks from .safetensors, .pt, .pth, .npy or .npz (never unpickled), or a recording, to a mask file.

    For example: dbsp masks convert sparse_plan.pth masks.safetensors thw=21,45,80 steps=50
    """
    require_file_path(target, "OUT")
    require_apart({"OUT": target}, inputs={"IN": source})
    done = "replaced" if target.exists() else "wrote"
    if os.path.isdir(source):
        layout = convert_recording(source, target, read_options(settings or (), RecordingOptions))
    else:
        layout = convert_masks(source, target, read_options(settings or (), ConvertOptions))
    print(f"{done} {target}: {_in_words(layout)}", file=sys.stderr)


@masks_app.command()
def fit(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="File to write (.safetensors).", **PATH)],
    recordings: Annotated[
        list[Path], typer.Argument(metavar="RECORDING", help="Folders of mask source record_qk.", **PATH)
    ],
    rank: Annotated[int, typer.Option(help="Projected dimensions per head.")] = 8,
) -> None:
    """Fit low-rank projections of queries and keys for mask source lowrank."""
    require_file_path(out, "OUT")
    require_apart({"OUT": out}, inputs={str(recording): recording for recording in recordings})
    heads, head_dim, kept = fit_recording(recordings, out, rank)
    rows: list[tuple[str, ...]] = [(str(layer), f"{share:.3f}") for layer, share in kept.items()]
    title = f"{heads} heads of size {head_dim} at rank {rank}: fraction of E[(q·k)²] kept"
    print_tables([TextTable(title, ("layer", "kept, mean over heads"), rows)])
    print(f"wrote {out}", file=sys.stderr)


@masks_app.command()
def info(
    file: Annotated[Path, typer.Argument(help="Mask file, or a recording's folder.", **PATH)],
    gpus: Annotated[int, typer.Option(max=MOST_GPUS, help="Number of GPUs for ρ_s.")] = 8,
    branch: Annotated[int, typer.Option(help="CFG pass of a recording.")] = 0,
    picture: Annotated[Path | None, typer.Option(help="PNG to write.", **PATH)] = None,
    as_json: JsonFlag = False,
) -> None:
    """Show density, balance and changes by step of masks."""
    if picture is not None:
        require_file_path(picture, "--picture")
        require_apart({"--picture": picture}, inputs={"the mask file": file})
        if importlib.util.find_spec("matplotlib") is None:
            raise UserError("matplotlib is needed for pictures; pip install matplotlib")
    series = MaskSeries.read(file, branch)
    facts = examine_masks(series, gpus)
    if picture is not None:
        write_atomically(picture, mask_picture(file.name, series, facts))
    if as_json:
        print_json(file=str(file), gpus=gpus, **facts)
        return
    size = f" of a {'×'.join(map(str, facts['thw']))} video" if facts["thw"] else ""
    headline = (
        f"{file}: {len(facts['layers'])} layers, {facts['heads']} heads, {facts['nq']}×{facts['nk']} blocks of "
        f"{facts['block_q']}×{facts['block_k']} tokens, {facts['tokens']} tokens{size}, {facts['text_tokens']} of "
        f"text; density {facts['density']['mean']:.3f}"
    )
    print(printable(headline), end="\n\n")
    balance = f"balance on {gpus} GPUs, mean over sampled layers"
    tables = [
        TextTable.of("density", _DENSITY, facts["layers"]),
        TextTable.of(balance, _BALANCE, facts["balance"], _ABOUT_BALANCE, left=("strategy",)),
        TextTable.of(f"from step to step, {len(series.steps)} steps", _DRIFT, facts["drift"]),
    ]
    print_tables(table for table in tables if table.rows)
    for warning in facts["warnings"]:
        print(printable(f"warning: {warning}"), file=sys.stderr)


_DENSITY = (
    ("layer", "layer", str),
    ("least dense head", "density", lambda heads: f"{min(heads):.3f}"),
    ("mean", "density", lambda heads: f"{fmean(heads):.3f}"),
    ("densest head", "density", lambda heads: f"{max(heads):.3f}"),
)
_BALANCE = (
    ("strategy", "strategy", str),
    ("ρ_s before", "rho_before", "{:.4f}".format),
    ("ρ_s", "rho", "{:.4f}".format),
    ("max", "rho_max", "{:.4f}".format),
    ("bound", "rho_bound", "{:.4f}".format),
    ("moved", "moved", "{:.1%}".format),
    ("KV in", "kv_all", "{:.2f}".format),
    ("if needed", "kv_needed", "{:.2f}".format),
)
_ABOUT_BALANCE = """\
ρ_s: slowest rank over mean; bound: lower bound for whole rows; moved: rows moved to other ring ranks;
KV in: K and V received per rank, relative to one rank's Q, with all keys or only needed ones sent"""
_DRIFT = (
    ("layer", "layer", str),
    ("least IoU", "iou", lambda pairs: f"{min(pairs):.3f}"),
    ("mean IoU", "iou", lambda pairs: f"{fmean(pairs):.3f}"),
    ("bits changed", "changed", lambda pairs: f"{fmean(pairs):.2%}"),
    (f"plans at P_s {DbspConfig.reuse:g}", "replans", str),
)
"""Columns of the tables of `dbsp masks info`: heading, key of `examine_masks`, and format function."""


def _in_words(layout: MaskLayout) -> str:
    grid = layout.grid
    groups = f"step groups {layout.groups}, " if layout.groups else ""
    layers = f"{layout.layers} layers" if layout.layers is not None else "one mask for all layers"
    in_order = {order for each in layout.orders for order in each}
    orders = sorted({name for order in in_order for name in ((order,) if isinstance(order, str) else order)})
    return f"{groups}{layers}, {layout.heads} heads, {grid.nq}×{grid.nk} blocks, token orders {', '.join(orders)}"
