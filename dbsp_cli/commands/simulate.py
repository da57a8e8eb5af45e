"""`dbsp simulate`: modelled time of attention and of a video, per number of GPUs, strategy and planner."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from dbsp_cli.output import LARGEST_SEED, MOST_GPUS, PATH, JsonFlag, TextTable, print_json, print_tables
from dbsp_cli.simulate import SimulationResult, simulate
from dbsp_core.config.config import DbspConfig
from dbsp_core.cost.hardware import Hardware, load_hardware
from dbsp_core.layout.strategy import Strategy
from dbsp_core.masks.block_mask import BlockMask
from dbsp_core.masks.mask_file import MaskFile
from dbsp_core.models.lookup import require_model
from dbsp_core.models.spec import ModelSpec
from dbsp_core.models.table import MODEL_SPECS
from dbsp_core.planning.keys import require_keys
from dbsp_core.planning.planners import require_planner
from dbsp_core.planning.wire_format import MODEL, require_wire_format
from dbsp_core.sources import SOURCES, MaskRequest, StaticMaskSource, SyntheticSource
from dbsp_core.sources.synthetic.presets import PRESETS
from dbsp_core.utils.atomic_io import write_atomically
from dbsp_core.utils.errors import UserError
from dbsp_core.utils.paths import require_file_place, user_path
from dbsp_kernels import KernelRequirements, require_supported
from dbsp_kernels.registry import returns_lse

__all__ = ["simulate_command"]

NETWORK_LATENCY_S = 3e-5
"""Assumed, with --bandwidth for hardware that names no network."""


def simulate_command(
    model: Annotated[str, typer.Option(help=f"One of {', '.join(MODEL_SPECS)}.")] = "wan2.1-t2v-14b",
    gpus: Annotated[str, typer.Option(help="Numbers of GPUs, for example 8,16,64.")] = "8",
    nodes: Annotated[
        str | None,
        typer.Option(help="Numbers of nodes, for example 2,4, in place of --gpus; with needed keys beside."),
    ] = None,
    bandwidth: Annotated[
        float | None, typer.Option(help="Of each GPU between nodes, GB/s in one direction; default: the hardware's.")
    ] = None,
    keys: Annotated[
        str | None,
        typer.Option(help="ring, all, needed, kept, with commas; default: ring, with --nodes ring,needed."),
    ] = None,
    precision: Annotated[
        str, typer.Option(help="In which q, k and v travel: model, int8, or both with a comma between.")
    ] = MODEL.name,
    hardware: Annotated[str, typer.Option(help="a800, h800, h200, cpu-demo, or a file from dbsp calibrate.")] = "a800",
    mask: Annotated[
        str | None,
        typer.Option(
            help="A preset, a density, a mask file or a source as window:window=[7,21,33]; default: the model's."
        ),
    ] = None,
    planner: Annotated[str, typer.Option(help="Planners to compare, with commas.")] = "contiguous,paper,dbsp",
    strategy: Annotated[str, typer.Option(help="UxRy, or all.")] = "all",
    kernel: Annotated[str, typer.Option(help="Whose strategies, and whose constants where known.")] = "auto",
    layers: Annotated[int, typer.Option(help="How many layers' masks represent all.")] = 1,
    node_size: Annotated[
        int | None, typer.Option(min=1, max=MOST_GPUS, help="GPUs per node; default: the hardware's.")
    ] = None,
    coarsen: Annotated[
        int, typer.Option(max=4096, help="Multiply block sizes: quicker, ρ_s moves by about 0.01.")
    ] = 1,
    seed: Annotated[int, typer.Option(min=0, max=LARGEST_SEED, help="Seed of synthetic masks.")] = 0,
    out: Annotated[Path | None, typer.Option(help="CSV file to write.", **PATH)] = None,
    as_json: JsonFlag = False,
) -> None:
    """Predict attention and end-to-end time per strategy and planner. All times are modelled."""
    if out is not None:
        require_file_place(out, "--out")
    spec, machine = require_model(model), _with_bandwidth(load_hardware(hardware).with_kernel(kernel), bandwidth)
    node_size = node_size or (machine.gpus_per_node or 8 if nodes is not None else None)
    worlds = _numbers(gpus) if nodes is None else [count * (node_size or 8) for count in _numbers(nodes, "nodes")]
    if max(worlds) > MOST_GPUS:
        raise UserError(f"{max(worlds):,} GPUs are more than the {MOST_GPUS:,} that are modelled")
    ways = (keys or ("ring" if nodes is None else "ring,needed")).split(",")
    for way in ways:
        require_keys(way)
    precisions = precision.split(",")
    for name in precisions:
        require_wire_format(name)
    planners = planner.split(",")
    for name in planners:
        require_planner(name)
    if strategy != "all":
        require_supported(kernel, KernelRequirements(lse=Strategy.parse(strategy).ring > 1))
    masks = masks_for(spec, mask, layers, coarsen, seed)
    rows = simulate(
        spec,
        masks,
        machine,
        worlds,
        planners,
        strategy=strategy,
        node_size=node_size,
        merges=returns_lse(kernel),
        keys=ways,
        precisions=precisions,
    )
    records = [asdict(row) | {"end_to_end_s": row.end_to_end_s} for row in rows]
    if out is not None:
        write_atomically(out, _csv(records))
    if as_json:
        about: dict[str, Any] = {"model": model, "hardware": machine.name, "sources": dict(machine.sources)}
        about["node_size"] = node_size or machine.gpus_per_node
        print_json(**about, density=masks[0].density, layers=len(masks), rows=records)
        return
    print_tables([_table(spec, machine, masks, rows)])


def _numbers(text: str, of: str = "gpus") -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        raise UserError(f"--{of} {text!r} must be numbers with commas, for example 8,16,64") from None
    if min(numbers) < 1:
        raise UserError(f"--{of} {text!r}: the number of {'GPUs' if of == 'gpus' else of} must be at least 1")
    return numbers


def _with_bandwidth(machine: Hardware, bandwidth: float | None) -> Hardware:
    """Returns the machine with another network, assumed to have this bandwidth: GB/s of each GPU."""
    if bandwidth is None:
        return machine
    if not bandwidth > 0:
        raise UserError(f"--bandwidth {bandwidth:g} must be positive: GB/s of each GPU between nodes")
    known = machine.constants
    latency = known.network_latency_s
    network = {
        "network_bytes_per_s": bandwidth * 1e9,
        "network_latency_s": NETWORK_LATENCY_S if latency is None else latency,
    }
    return replace(
        machine, constants=replace(known, **network), sources={**machine.sources, **dict.fromkeys(network, "assumed")}
    )


def masks_for(model: ModelSpec, mask: str | None, layers: int, coarsen: int = 1, seed: int = 0) -> list[BlockMask]:
    """Returns masks of the model's first layers: of a preset, of a density in the preset's style, or from a file.

    Raises:
        UserError: The mask has another size, the density is out of range, or there are not so many layers.
    """
    if not 1 <= layers <= model.layers:
        raise UserError(f"--layers {layers} must lie between 1 and {model.layers}, the layers of {model.name}")
    if coarsen < 1:
        raise UserError(f"--coarsen {coarsen} must be at least 1")
    chosen = mask or model.preset
    density = None
    with suppress(ValueError):
        density = float(chosen)
    if chosen.partition(":")[0] in SOURCES and not os.path.isfile(chosen):
        known = DbspConfig.load(chosen).mask
        if known.changes == "per_call":
            raise UserError(f"--mask {chosen!r} is predicted from queries and keys, which do not exist here")
        requests = (
            MaskRequest(n, model.heads, model.thw, model.text_tokens, layers=model.layers) for n in range(layers)
        )
        return [cast(StaticMaskSource, known).mask(request) for request in requests]
    if chosen not in PRESETS and density is None:
        return _from_file(user_path(chosen), model, layers)
    preset = chosen if chosen in PRESETS else model.preset
    sizes = {"block_q": PRESETS[preset].block_q * coarsen, "block_k": PRESETS[preset].block_k * coarsen}
    source = SyntheticSource(preset=preset, density=density, seed=seed, **sizes)
    return [source.mask(MaskRequest(layer, model.heads, model.thw, model.text_tokens)) for layer in range(layers)]


def _from_file(path: Path, model: ModelSpec, layers: int) -> list[BlockMask]:
    if not os.path.lexists(path):
        raise UserError(f"mask {str(path)!r} is neither a preset ({', '.join(PRESETS)}), nor a density, nor a file")
    file = MaskFile(path)
    if (file.heads, file.grid.tokens) != (model.heads, model.tokens):
        raise UserError(
            f"mask file {path} has {file.heads} heads and {file.grid.tokens} tokens, {model.name} has {model.heads} "
            f"and {model.tokens}; choose another --model or file"
        )
    return [file.layer(layer) for layer in range(min(layers, file.layers))]


def _csv(records: list[dict[str, object]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, records[0].keys(), lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return text.getvalue()


def _table(model: ModelSpec, machine: Hardware, masks: list[BlockMask], rows: Sequence[SimulationResult]) -> TextTable:
    names = (
        "GPUs",
        "strategy",
        "planner",
        "keys",
        "ρ_s",
        "attention",
        "exchange",
        "exposed",
        "end to end",
        "attn ×",
        "e2e ×",
    )
    cells = []
    for row in rows:
        seconds = (f"{t:.1f}" for t in (row.attention_s, row.exchange_s, row.exposed_p2p_s, row.end_to_end_s))
        speedups = (f"{row.attention_speedup:.2f}", f"{row.speedup:.2f}")
        keys = row.keys if row.precision == MODEL.name else f"{row.keys}, {row.precision}"
        cells.append((str(row.gpus), row.strategy, row.planner, keys, f"{row.rho:.3f}", *seconds, *speedups))
    return TextTable(
        f"{model.name} on {machine.name}, density {masks[0].density:.3f}, {model.steps} steps: modelled times",
        names,
        cells,
        f"{_conclusion(rows)}"
        "seconds per video; exposed: P2P that compute does not hide; ×: speed-up over the contiguous planner\n"
        f"on the same strategy. Constants {machine.labels_in_words()}",
        left=("strategy", "planner", "keys"),
        spare=("exposed", "exchange", "e2e ×", "attn ×"),
    )


def _conclusion(rows: Sequence[SimulationResult]) -> str:
    """A line that names the fastest of several."""
    if len(rows) < 2:
        return ""
    best = min(rows, key=lambda row: row.end_to_end_s)
    keys = "" if best.keys == "ring" else f", {best.keys} keys"
    keys += "" if best.precision == MODEL.name else f", {best.precision}"
    plan = f"{best.gpus} GPUs, {best.strategy}, {best.planner}{keys}"
    return f"fastest: {plan}: {best.end_to_end_s:.1f} s a video, {best.speedup:.2f}× contiguous\n"
