"""`dbsp masks`: convert, record and look at masks."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Annotated

import typer

from dbsp_cli.mask_tools.convert import ConvertOptions, convert_masks, convert_recording
from dbsp_cli.mask_tools.fit import fit_recording
from dbsp_cli.mask_tools.info import InfoOptions, MaskInfo, MaskSeries, examine_masks
from dbsp_cli.mask_tools.quality import DEFAULT_LIMIT
from dbsp_cli.mask_tools.recording import Recording
from dbsp_cli.output import (
    MOST_GPUS,
    PATH,
    JsonFlag,
    TextTable,
    options_for,
    print_json,
    print_tables,
    require_apart,
    require_file_place,
    require_pictures,
)
from dbsp_core.config import DbspConfig
from dbsp_core.masks.mask_writer import MaskLayout
from dbsp_core.planning.planners import PLANNERS
from dbsp_core.reports.mask_recorder import parse_layers
from dbsp_core.utils.errors import UserError
from dbsp_core.utils.files import parse_size, require_folder_place, write_atomically
from dbsp_core.utils.process import RECORD, RECORD_EVERY, RECORD_LAYERS, RECORD_LIMIT, printable

__all__ = ["masks_app"]

masks_app = typer.Typer(help="Convert, record and look at masks.", rich_markup_mode=None)

Thw = Annotated[str | None, typer.Option("--thw", help="Frames, rows and columns of the video's tokens: T,H,W.")]
Branch = Annotated[int, typer.Option(help="Of a recording: which pass of each step (guidance).")]


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
    key: Annotated[str | None, typer.Option(help="Name of the tensor of masks in IN.")] = None,
    thw: Thw = None,
    tokens: Annotated[int | None, typer.Option(help="Text and video tokens together; or give --thw.")] = None,
    text_tokens: Annotated[int, typer.Option(help="Text tokens among them, which come first.")] = 0,
    block_q: Annotated[int, typer.Option(help="Tokens per query block.")] = 64,
    block_k: Annotated[int, typer.Option(help="Tokens per key block.")] = 64,
    orders: Annotated[
        str | None,
        typer.Option(help="Token order, one per head with commas between, or PAROAttention's permute plan (a file)."),
    ] = None,
    head_permutation: Annotated[
        str | None, typer.Option(help="File that says which head is at each place, where they were reordered.")
    ] = None,
    groups: Annotated[str | None, typer.Option(help="Steps of each group, 5-9,10-24,25-49; before: dense.")] = None,
    steps: Annotated[int | None, typer.Option(help="Denoising steps, divided evenly over the groups.")] = None,
    dense_steps: Annotated[int, typer.Option(help="With --steps: leading steps that are dense.")] = 0,
    packed: Annotated[bool, typer.Option(help="Eight blocks in a byte.")] = True,
    lut: Annotated[str | None, typer.Option(help="IN lists blocks by row: absolute, or delta (SpargeAttn).")] = None,
    counts: Annotated[str | None, typer.Option(help="With --lut: name of the tensor with lengths of lists.")] = None,
    joined_text: Annotated[
        bool | None,
        typer.Option("--joined-text/--own-text", help="Whether blocks of IN run on from text into video."),
    ] = None,
    skip_empty: Annotated[bool, typer.Option(help="Heads that the permute plan calls empty skip the video.")] = False,
    crop: Annotated[bool, typer.Option(help="Drop rows and columns beyond the last block.")] = False,
    tail_dense: Annotated[
        bool | None, typer.Option(help="Make a short last block dense; default: for PAROAttention's sparse plans.")
    ] = None,
    step: Annotated[int | None, typer.Option(help="Of a recording: which step.")] = None,
    branch: Branch = 0,
) -> None:
    """Write a mask file from .safetensors, .pt, .pth, .npy or .npz (never unpickled), or from a recording."""
    given = locals()
    require_file_place(target, "OUT")
    require_apart({"OUT": target}, inputs={"IN": source})
    if os.path.isdir(source):
        layout = convert_recording(source, target, step, branch, packed)
    else:
        options = ConvertOptions(**options_for(ConvertOptions, given | {"thw": parse_thw(thw)}))
        layout = convert_masks(source, target, options)
    print(f"wrote {target}: {_in_words(layout)}", file=sys.stderr)


@masks_app.command()
def record(
    folder: Annotated[
        Path, typer.Argument(metavar="OUT", help="Folder for the recording; must be new or empty.", **PATH)
    ],
    command: Annotated[list[str], typer.Argument(help="What to run, after --: xdit …, torchrun ….")],
    every: Annotated[int, typer.Option(min=1, help="Keep each n-th denoising step.")] = 1,
    layers: Annotated[str | None, typer.Option(help="Which layers: 0,5,10-12. Default: all.")] = None,
    limit: Annotated[str, typer.Option(help="Most to write, for example 500MiB.")] = "2GiB",
) -> None:
    """Run a command and keep the masks of its attentions, on rank 0. The run itself is not changed."""
    parse_size(limit)
    settings = {RECORD: str(folder.absolute()), RECORD_EVERY: str(every), RECORD_LIMIT: limit}
    if layers is not None:
        parse_layers(layers)
        settings[RECORD_LAYERS] = layers
    if os.path.exists(folder) and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} exists and is not an empty folder; give another, or remove it")
    require_folder_place(folder.absolute(), "OUT")
    try:
        code = subprocess.call(command, env=os.environ | settings)
    except OSError as error:
        raise UserError(f"cannot run {command[0]!r}: {error.strerror}") from error
    print(_summary(folder), file=sys.stderr)
    raise typer.Exit(code)


@masks_app.command()
def fit(
    recordings: Annotated[
        list[Path], typer.Argument(metavar="RECORDING...", help="Folders of mask source record_qk.", **PATH)
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="File to write (.safetensors).", **PATH)],
    rank: Annotated[int, typer.Option(help="Dimensions that each head's queries and keys are projected to.")] = 8,
    as_json: JsonFlag = False,
) -> None:
    """Fit low-rank projections of each layer's and head's queries and keys, for mask source lowrank."""
    require_file_place(out, "--out")
    require_apart({"--out": out}, inputs={str(recording): recording for recording in recordings})
    found = fit_recording(recordings, out, rank)
    if as_json:
        print_json(**asdict(found))
        return
    rows: list[tuple[str, ...]] = [(str(layer), f"{share:.3f}") for layer, share in found.kept.items()]
    title = f"{found.heads} heads of size {found.width} at rank {found.rank}: share of E[(q·k)²] kept"
    print_tables([TextTable(title, ("layer", "kept, mean over heads"), rows)])
    print(f"wrote {out}", file=sys.stderr)


@masks_app.command()
def info(
    file: Annotated[Path, typer.Argument(help="Mask file, or a recording's folder.", **PATH)],
    gpus: Annotated[int, typer.Option(max=MOST_GPUS, help="Number of GPUs for ρ_s.")] = 8,
    planner: Annotated[str, typer.Option(help=f"One of {', '.join(PLANNERS)}; several with commas between.")] = "dbsp",
    threshold: Annotated[float, typer.Option(help="P_s, above which a plan is made again.")] = DbspConfig.reuse,
    sample: Annotated[int, typer.Option(min=0, help="How many layers to plan and compare; 0: all.")] = 4,
    quality: Annotated[bool, typer.Option("--quality", help="Measure the error on made, smooth tokens.")] = False,
    limit: Annotated[float, typer.Option(help="Relative L1 error above which to warn.")] = DEFAULT_LIMIT,
    thw: Thw = None,
    branch: Branch = 0,
    picture: Annotated[Path | None, typer.Option(help="PNG to write.", **PATH)] = None,
    as_json: JsonFlag = False,
) -> None:
    """Say how dense masks are, how even their work is, how they change over steps, and what they cost in accuracy."""
    if picture is not None:
        require_file_place(picture, "--picture")
        require_apart({"--picture": picture}, inputs={"the mask file": file})
        require_pictures()
    series = MaskSeries.read(file, branch)
    planners = tuple(planner.split(","))
    options = InfoOptions(gpus, planners, threshold, sample, quality, limit, parse_thw(thw))
    found = examine_masks(series, options)
    if picture is not None:
        write_atomically(picture, found.picture(file.name, series))
    if as_json:
        print_json(file=str(file), gpus=gpus, **found.as_json())
        return
    print(printable(_headline(file, found)), end="\n\n")
    print_tables(_tables(found, options))
    for warning in found.warnings:
        print(printable(f"warning: {warning}"), file=sys.stderr)


def parse_thw(text: str | None) -> tuple[int, int, int] | None:
    """Parses "21,45,80" or "21x45x80". Raises UserError for anything else."""
    if text is None:
        return None
    parts = text.replace("x", ",").split(",")
    if len(parts) != 3 or not all(re.fullmatch(r"\s*\d{1,9}\s*", part, re.ASCII) and int(part) > 0 for part in parts):
        raise UserError(f"--thw {text!r} is not of the form T,H,W, such as 21,45,80")
    frames, rows, columns = map(int, parts)
    return frames, rows, columns


def _in_words(layout: MaskLayout) -> str:
    grid = layout.grid
    groups = f"step groups {layout.groups}, " if layout.groups else ""
    layers = f"{layout.layers} layers" if layout.layers is not None else "one mask for all layers"
    in_order = {order for each in layout.orders for order in each}
    orders = sorted({name for order in in_order for name in ((order,) if isinstance(order, str) else order)})
    return f"{groups}{layers}, {layout.heads} heads, {grid.nq}×{grid.nk} blocks, token orders {', '.join(orders)}"


def _summary(folder: Path) -> str:
    try:
        recording = Recording.read(folder)
    except UserError:
        return (
            f"nothing was recorded to {folder}: no attention of db-SP ran on rank 0 (is it on, with --sp_backend dbsp "
            "or dbsp_para.parallelize_pipe?)"
        )
    size = sum(path.stat().st_size for path in folder.iterdir())
    stopped = f"; stopped early: {recording.stopped}" if recording.stopped else ""
    return (
        f"recorded {len(recording.passes)} passes of {len(recording.recorded_layers)} layers to {folder}, "
        f"{size / 2**20:.1f} MiB{stopped}; see it with: dbsp masks info {folder}"
    )


def _headline(file: Path, found: MaskInfo) -> str:
    grid = found.first.grid
    size = "" if grid.thw is None else f" of a {'×'.join(map(str, grid.thw))} video"
    if grid.packed_from:
        size = f" of {len(grid.sequences)} packed sequences"
    return (
        f"{file}: {len(found.layers)} layers, {found.first.heads} heads, {grid.nq}×{grid.nk} blocks of "
        f"{grid.block_q}×{grid.block_k} tokens, {grid.tokens} tokens{size}, {grid.text_tokens} of text; "
        f"density {found.densities.mean():.3f}"
    )


def _tables(found: MaskInfo, options: InfoOptions) -> Iterator[TextTable]:
    rows: list[tuple[str, ...]] = [
        (str(layer), f"{heads.min():.3f}", f"{heads.mean():.3f}", f"{heads.max():.3f}")
        for layer, heads in zip(found.layers, found.densities, strict=True)
    ]
    yield TextTable("density", ("layer", "least dense head", "mean", "densest head"), rows)
    rows = [
        (b.strategy, b.planner, f"{b.rho_before:.4f}", f"{b.rho:.4f}", f"{b.rho_max:.4f}", f"{b.moved:.1%}")
        for b in found.balance
    ]
    names: tuple[str, ...] = ("strategy", "planner", "ρ_s before", "ρ_s", "max", "moved")
    title = f"balance on {options.gpus} GPUs, mean over sampled layers"
    yield TextTable(title, names, rows, left=("strategy", "planner"))
    if found.drift:
        rows = [
            (str(d.layer), f"{min(d.iou):.3f}", f"{fmean(d.iou):.3f}", f"{fmean(d.changed):.2%}", str(d.replans))
            for d in found.drift
        ]
        names = ("layer", "least IoU", "mean IoU", "bits changed", f"plans at P_s {options.threshold:g}")
        yield TextTable(f"from step to step, {len(found.steps)} steps", names, rows)
    if found.errors is not None:
        rows = [(str(e.layer), str(e.head), f"{e.density:.3f}", f"{e.error:.4f}") for e in found.errors]
        names = ("layer", "head", "density", "relative L1 error")
        yield TextTable("against dense attention, on synthetic tokens", names, rows)
