"""The `dbsp` command: its subcommands, and how it ends."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from dbsp_cli.commands.doctor import doctor_command, own_version
from dbsp_cli.commands.generate import generate_command
from dbsp_cli.commands.masks import masks_app
from dbsp_cli.commands.plan import plan_command
from dbsp_cli.commands.report import report_command
from dbsp_cli.commands.tiny import tiny_command
from dbsp_core.utils.errors import UserError
from dbsp_core.utils.process import ERROR, NOTICE, printable

__all__ = ["app", "main"]

_INTERRUPTED = 130
UsageError: Any = typer.BadParameter.__base__  # click's, or the copy that newer typer carries

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _say_version(asked: bool) -> None:
    if asked:
        print(f"db-SP {own_version()}")
        raise typer.Exit


@app.callback()
def dbsp(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_say_version, help="Show db-SP's version.")
    ] = False,
) -> None:
    """Dual-balanced sequence parallelism for block-sparse attention in video diffusion transformers."""


app.command("generate", short_help="Generate a video: from YAML to mp4, on all GPUs.")(generate_command)
app.command("doctor", short_help="Say what works here, what is missing, and the fix.")(doctor_command)
app.command("tiny", short_help="Make a tiny checkpoint, for trying things out.")(tiny_command)
app.command("report", short_help="Show the report of a run, or compare two.")(report_command)
app.command("plan", short_help="Plan an attention: how even the work is, what moves.")(plan_command)
app.add_typer(masks_app, name="masks")


_REMOVED = {
    "simulate": "compare the plans of a mask file with dbsp plan; figures of the paper are modelled by "
    "python -m scripts.reproduce.clusters in a checkout",
    "generate --host": "leave it out: it runs diffusers' pipelines, and xdit … --sp-backend dbsp runs xDiT's",
    "generate --last-image": "give --image a second time",
    "generate --timeout": "leave it out: ranks wait for one another as long as torch has it",
    "generate --json": "read report.json in the folder of --report",
    **dict.fromkeys(
        (f"generate --{name}" for name in ("nnodes", "node-rank", "master-addr", "rdzv-backend", "rdzv-endpoint")),
        "start it on each node: torchrun --nnodes … -m dbsp_cli generate …",
    ),
    "calibrate": "run python -m scripts.calibrate in a checkout, which writes the file that runs look for",
    "plan --model": "write strategy: auto in the configuration, which takes the fastest UxRy for the model's masks",
    "plan --target-rho": "leave it out: planner dbsp balances to 1.002, or as far as is worth its keys",
    "plan --reward": "leave it out: R_b is an argument of dbsp_core.planning.planners.paper",
    "plan --equal-heads": "leave it out: equal_heads is an argument of dbsp_core.planning.planners.paper",
    "plan --sequences": "write bags: auto in the configuration, which takes the fastest topology for the sequences",
}
"""Commands and options that earlier versions had, and what to use instead."""


def _require_present(words: Sequence[str]) -> None:
    """Raises UserError for a command or an option of one that no longer exists."""
    given = [word.partition("=")[0] for word in words]
    for removed, advice in _REMOVED.items():
        command, *option = removed.split()
        if given[:1] == [command] and set(option) <= set(given):
            raise UserError(f"dbsp {removed} was removed; {advice}")


def main() -> None:
    """Runs the command. A user error is one line on standard error and exit code 2, an interrupt exit code 130."""
    try:
        _require_present(sys.argv[1:])
        code = app(sys.argv[1:] or ["--help"], standalone_mode=False)
    except (UserError, OSError, UsageError) as error:
        text = error.format_message() if isinstance(error, UsageError) else str(error)
        print(f"{ERROR}{printable(' '.join(text.split()))}", file=sys.stderr)
        raise SystemExit(2) from error
    except (typer.Abort, KeyboardInterrupt):
        code = _INTERRUPTED
    if code == _INTERRUPTED:  # which newer typer returns as well
        print(f"{NOTICE}interrupted", file=sys.stderr)
    raise SystemExit(code if isinstance(code, int) else 0)
