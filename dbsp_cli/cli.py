"""The `dbsp` command."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from dbsp_cli.commands.calibrate import calibrate_command
from dbsp_cli.commands.generate import generate_command
from dbsp_cli.commands.masks import masks_app
from dbsp_cli.commands.report import report_command
from dbsp_cli.commands.simulate import simulate_command
from dbsp_cli.doctor import run_checks
from dbsp_cli.tiny_models import make_tiny
from dbsp_core.config.models import TINY_MODELS
from dbsp_core.layout.sequence_layout import LAYOUT_ORDERS, MaskProfile, SequenceLayout
from dbsp_core.layout.strategy import Strategy
from dbsp_core.masks.block_mask import BlockMask
from dbsp_core.masks.mask_file import MaskFile
from dbsp_core.planning.plan import Plan, can_subdivide, make_plan
from dbsp_core.planning.planners import PLANNERS, require_planner
from dbsp_core.utils.errors import UserError

__all__ = ["app", "main"]

app = typer.Typer(
    help="Dual-balanced sequence parallelism for block-sparse attention in video diffusion transformers.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(masks_app, name="masks")
UsageError: Any = typer.BadParameter.__base__  # click's, or the copy that newer typer carries

JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]

_TRAINED = "-trained"


@app.command()
def tiny(
    model: Annotated[str, typer.Argument(help=f"Architecture: {', '.join(TINY_MODELS)}.")],
    folder: Annotated[Path, typer.Argument(help="Folder to write; an old checkpoint there is replaced.")],
    seed: Annotated[int, typer.Option(help="Seed of the random weights.")] = 0,
    trained: Annotated[bool, typer.Option("--trained", help="The same as MODEL-trained.")] = False,
) -> None:
    """Make a tiny checkpoint, with random weights or trained ones, for trying things out offline."""
    if trained and not model.endswith(_TRAINED):
        if model + _TRAINED not in TINY_MODELS:
            raise UserError(f"{model!r} has no trained weights, only wan has; leave out --trained")
        model += _TRAINED
    try:
        make_tiny(model, folder, seed)
    except ImportError as error:
        raise UserError(f"{error.name} is needed to make checkpoints; pip install 'dbsp-attention[xdit]'") from error
    print(f"wrote a tiny {model} checkpoint to {folder}", file=sys.stderr)


@app.command()
def plan(
    file: Annotated[Path, typer.Argument(help="Mask file (.safetensors).")],
    gpus: Annotated[int, typer.Option(help="Number of GPUs.")],
    strategy: Annotated[str, typer.Option(help="UxRy, or all.")] = "all",
    planner: Annotated[str, typer.Option(help=f"One of {', '.join(PLANNERS)}, or all.")] = "dbsp",
    reward: Annotated[float, typer.Option(help="R_b of planner paper: how strongly blocks stay.")] = 1.0,
    head_cap: Annotated[bool, typer.Option(help="Planner paper: equal head counts, up to one.")] = False,
    tolerance: Annotated[float | None, typer.Option(help="Planner dbsp: the ρ_s at which it is content.")] = None,
    home: Annotated[
        str | None, typer.Option(help=f"Home layout: {', '.join(LAYOUT_ORDERS)}; default: the planner's own.")
    ] = None,
    layer: Annotated[int, typer.Option(help="Which layer of a file with several.")] = 0,
    as_json: JsonFlag = False,
) -> None:
    """Plan one attention of a mask file: how even the work is before and after, and what moves."""
    source = MaskFile(file)
    mask = source.layer(layer)
    strategies = Strategy.all_for(gpus) if strategy == "all" else (Strategy.parse(strategy),)
    for wanted in strategies:
        wanted.require_world(gpus)
    possible = [s for s in strategies if strategy != "all" or s.ring <= mask.grid.nk]
    profile = MaskProfile.of(map(source.layer, range(source.layers))) if home == "learned" else None
    plans = [
        make_plan(
            mask,
            s,
            name,
            home=SequenceLayout.named(home or require_planner(name).home, mask.grid, s, profile=profile),
            reward=reward,
            head_cap=head_cap,
            tolerance=tolerance,
        )
        for s in possible
        for name in (PLANNERS if planner == "all" else (planner,))
        if planner != "all" or not PLANNERS[name].subdivides or can_subdivide(mask.grid, s.ring)
    ]
    if as_json:
        rows = [_plan_row(p) for p in plans]
        print(json.dumps({"file": str(file), "gpus": gpus, "density": mask.density, "plans": rows}))
    else:
        if source.per_layer:
            print(f"{file}: layer {layer} of {source.layers}", file=sys.stderr)
        Console().print(_plan_table(mask, gpus, plans))


def _plan_row(plan: Plan) -> dict[str, str | float | int]:
    return {
        "strategy": str(plan.strategy),
        "planner": plan.planner,
        "rho_before": plan.rho_before,
        "rho": plan.rho,
        "rho_bound": plan.rho_bound,
        "moved": plan.moved,
        "split_heads": plan.split_heads,
        "extra_kv": plan.extra_kv,
        "plan_ms": plan.plan_ms,
    }


def _plan_table(mask: BlockMask, gpus: int, plans: list[Plan]) -> Table:
    grid = mask.grid
    table = Table(
        title=f"{mask.heads} heads, {grid.nq}×{grid.nk} blocks, density {mask.density:.3f}, {gpus} GPUs",
        caption="ρ_s: slowest rank over mean; bound: least possible, gap above it;\n"
        "moved: of Q, K, V between ring ranks; +KV: sent again for split heads; ms: planning",
        box=SIMPLE_HEAD,
        padding=(0, 0, 0, 1),
        pad_edge=False,
    )
    for name in ("strategy", "planner", "before", "ρ_s", "bound", "gap", "moved", "+KV", "ms"):
        table.add_column(name, justify="left" if name in ("strategy", "planner") else "right", no_wrap=True)
    for p in plans:
        numbers = (f"{p.rho_before:.4f}", f"{p.rho:.4f}", f"{p.rho_bound:.4f}")
        shares = (f"{p.rho / p.rho_bound - 1:.1%}", f"{p.moved:.1%}", f"{p.extra_kv:.0%}")
        tile = f" /{p.strategy.ring}" if p.grid != grid else ""  # works on blocks cut into so many parts
        table.add_row(str(p.strategy), p.planner + tile, *numbers, *shares, f"{p.plan_ms:.2f}")
    return table


@app.command()
def doctor(as_json: JsonFlag = False) -> None:
    """Say what works on this machine, what is missing, and the fix."""
    findings = run_checks()
    if as_json:
        print(json.dumps({"findings": [asdict(finding) for finding in findings]}))
        return
    table = Table(title="db-SP on this machine")
    for name in ("what", "state", "", "fix"):
        table.add_column(name, overflow="fold")
    for finding in findings:
        table.add_row(finding.what, "ok" if finding.ok else "missing", finding.detail, finding.fix)
    Console().print(table)


app.command("calibrate")(calibrate_command)
app.command("report")(report_command)
app.command("simulate")(simulate_command)
app.command("generate")(generate_command)


def main() -> None:
    """Runs the command. A user's mistake is one line on standard error and exit code 2, an interrupt exit code 130."""
    try:
        code = app(sys.argv[1:] or ["--help"], standalone_mode=False)
    except (UserError, OSError, UsageError) as error:
        text = error.format_message() if isinstance(error, UsageError) else str(error)
        print(f"dbsp: error: {' '.join(text.split())}", file=sys.stderr)
        raise SystemExit(2) from error
    except (typer.Abort, KeyboardInterrupt):
        raise SystemExit(130) from None
    raise SystemExit(code if isinstance(code, int) else 0)
