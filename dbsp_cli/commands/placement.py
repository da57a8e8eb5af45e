"""`dbsp plan --model`: the best placements of a model on so many GPUs, with the line to paste for each host."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from dbsp_cli.commands.simulate import masks_for
from dbsp_cli.output import TextTable, print_json, print_tables, working
from dbsp_cli.placement import PlacementTime, predict_placements
from dbsp_cli.placement_lines import HOST_LINES, lines_for
from dbsp_core.config.config import DbspConfig
from dbsp_core.cost.hardware import Hardware, load_hardware
from dbsp_core.models.lookup import require_model
from dbsp_core.models.spec import ModelSpec
from dbsp_core.sources import SOURCES
from dbsp_core.utils.byte_sizes import in_bytes, parse_size
from dbsp_core.utils.errors import UserError
from dbsp_kernels.advice import page

__all__ = ["PlacementRequest", "print_placements"]

COARSEN = 2
"""Masks are made with blocks so many times as large: quicker, ρ_s moves by about 0.01."""


@dataclass(frozen=True)
class PlacementRequest:
    """The options of `dbsp plan` for placements; see its help. None for `top` means all."""

    model: str
    gpus: int
    hardware: str = "h200"
    mask: str | None = None
    node_size: int | None = None
    memory: str | None = None
    videos: int = 1
    top: int = 5


def print_placements(request: PlacementRequest, as_json: bool) -> None:
    """Predicts every placement, and prints the best few with the lines of the first. Times are modelled."""
    model, hardware = require_model(request.model), load_hardware(request.hardware)
    if request.mask is not None and request.mask.partition(":")[0] in SOURCES:
        known, runs = _known_mask(request.mask), request.mask
    else:
        known, runs = request.mask, None
    limit = None if request.memory is None else parse_size(request.memory)
    masks = masks_for(model, known, 1, COARSEN)
    with working("predicting placements"):
        found = predict_placements(
            model,
            masks,
            hardware,
            request.gpus,
            videos=request.videos,
            node_size=request.node_size,
            memory_limit=limit,
        )
    fits = [one for one in found if one.reason is None]
    fitting = fits[: request.top]
    left_out = [one for one in found if one.reason is not None]
    if as_json:
        print_json(
            **{name: getattr(request, name) for name in ("gpus", "videos", "mask")},
            model=model.name,
            hardware=hardware.name,
            node_size=request.node_size or hardware.gpus_per_node,
            memory_limit=limit or hardware.memory_bytes,
            label="modelled",
            density=masks[0].density,
            sources=dict(hardware.sources),
            placements=[
                _record(one) | {"hosts": [asdict(line) for line in lines_for(one.placement, model, runs)]}
                for one in fitting
            ],
            left_out=[_record(one) for one in left_out],
        )
        return
    if not fitting:
        least = min(left_out, key=lambda one: one.memory)
        raise UserError(
            f"{model.name} fits no placement on {request.gpus} GPUs of {hardware.name}: the least, "
            f"{_name(least)}, {least.reason}; use GPUs with more memory, or offloading, which is not modelled"
        )
    print_tables([_table(fitting, left_out, request, model, hardware, masks[0].density)])
    print()
    print(_in_words(fits, model, runs))


def _known_mask(mask: str) -> str | None:
    """The mask to predict with: the given one, or the model's usual where it is predicted from queries and keys."""
    return None if DbspConfig.load(mask).mask.changes == "per_call" else mask


def _name(one: PlacementTime) -> str:
    placement = one.placement
    parts = [f"{placement.videos} videos"] if placement.videos > 1 else []
    parts += [f"guidance {placement.guidance}"] if placement.guidance > 1 else []
    return ", ".join([*parts, str(placement.strategy), *(["vae"] if placement.vae else [])])


def _record(one: PlacementTime) -> dict[str, Any]:
    placement = one.placement
    about = {"videos": placement.videos, "guidance": placement.guidance, "strategy": str(placement.strategy)}
    return about | {"vae": placement.vae} | {k: v for k, v in asdict(one).items() if k != "placement"}


def _table(
    fitting: list[PlacementTime],
    left_out: list[PlacementTime],
    request: PlacementRequest,
    model: ModelSpec,
    hardware: Hardware,
    density: float,
) -> TextTable:
    rows = []
    for number, one in enumerate(fitting, 1):
        placement = one.placement
        seconds = (one.seconds, one.attention_s, one.linear_s, one.decode_s, one.serial_s)
        about = (str(number), str(placement.videos), str(placement.guidance), str(placement.strategy))
        rows.append(
            (*about, "shared" if placement.vae else "each", *(f"{s:.1f}" for s in seconds), in_bytes(one.memory))
        )
    lines = [
        "Seconds until all videos are made, then of one video: attention, linear layers, decoding, and what one",
        "device does alone. guidance: groups that share out a step's two passes; memory: the most that a GPU holds,",
        f"without offloading. Everything is modelled: {page('latency-model')}",
        f"Constants {hardware.labels_in_words()}",
    ]
    if left_out:
        least = min(left_out, key=lambda one: one.memory)
        lines.insert(0, f"left out: {len(left_out)} that do not fit, such as {_name(least)}, which {least.reason}")
    many = f", {request.videos} videos" if request.videos > 1 else ""
    return TextTable(
        f"{model.name} on {request.gpus} × {hardware.name}{many}, density {density:.3f}: modelled",
        ("", "videos", "guidance", "strategy", "decoding", "seconds", "attn", "linear", "decode", "alone", "memory"),
        rows,
        "\n".join(lines),
        left=("strategy", "decoding"),
        spare=("alone", "linear", "attn"),
    )


def _in_words(fits: list[PlacementTime], model: ModelSpec, mask: str | None) -> str:
    """For each host, the line of the fastest placement that it can run, of all that fit."""
    texts = []
    for host, make in HOST_LINES.items():
        lines = [make(one.placement, model, mask) for one in fits]
        number = next((number for number, line in enumerate(lines) if line.line is not None), None)
        if number is None:
            texts.append(f"{host}: none of them ({lines[0].reason})")
            continue
        line, one = lines[number], fits[number]
        about = f"{host}, placement {number + 1} ({_name(one)}, {one.seconds:.1f} s)"
        why = f"; not the first: {lines[0].reason}" if number else ""
        note = f"; {line.note}" if line.note else ""
        texts.append(f"{about}{why}{note}:\n{line.line}")
    return "\n\n".join(texts)
