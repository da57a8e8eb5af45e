"""The `dbsp` command: subcommands and exit codes."""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from dbsp_cli.commands.bench import bench_command
from dbsp_cli.commands.doctor import doctor_command, own_version
from dbsp_cli.commands.generate import generate_command
from dbsp_cli.commands.masks import masks_app
from dbsp_cli.commands.plan import plan_command
from dbsp_cli.commands.report import report_command
from dbsp_cli.tiny_models import tiny_command
from dbsp_core.utils.errors import UserError
from dbsp_core.utils.process import ERROR, NOTICE, printable

_INTERRUPTED = 130
UsageError: Any = typer.BadParameter.__base__  # click's, or the copy that newer typer carries

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


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


app.command("generate", short_help="Generate videos on all GPUs.")(generate_command)
app.command("doctor", short_help="Show what works on this machine, what is missing, and the fix.")(doctor_command)
app.command("tiny", short_help="Make a tiny checkpoint for trying things out.")(tiny_command)
app.command("report", short_help="Show the report of a run, or compare two.")(report_command)
app.command("plan", short_help="Predict the time of a model's video, without a GPU.")(plan_command)
app.command("bench", short_help="Measure this machine, for strategy: auto and kernel: auto.")(bench_command)
app.add_typer(masks_app, name="masks")


def main() -> None:
    """Runs the command. A user error prints one line and exits with 2, an interrupt exits with 130."""
    try:
        code = app(sys.argv[1:] or ["--help"], standalone_mode=False)
    except (UserError, OSError, UsageError) as error:
        text = error.format_message() if isinstance(error, UsageError) else str(error)
        line = f"{ERROR}{printable(' '.join(text.split()))}"
        print(line, file=sys.stderr)
        if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):  # so that torchrun's report ends with the error
            moment = {"py_callstack": line, "timestamp": str(int(time.time()))}
            with suppress(OSError):
                Path(file).write_text(json.dumps({"message": {"message": line, "extraInfo": moment}}), "utf-8")
        raise SystemExit(2) from error
    except (typer.Abort, KeyboardInterrupt):
        code = _INTERRUPTED
    if code == _INTERRUPTED:  # newer typer returns it
        print(f"{NOTICE}interrupted", file=sys.stderr)
    raise SystemExit(code if isinstance(code, int) else 0)
