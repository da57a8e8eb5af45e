"""`dbsp tiny`: makes a tiny checkpoint for trying things out."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from dbsp_cli.output import PATH
from dbsp_cli.tiny_models import MAKERS, make_tiny, silence_libraries
from dbsp_core.utils.errors import UserError
from dbsp_core.utils.files import require_path
from dbsp_kernels.errors import install_command


def tiny_command(
    model: Annotated[str, typer.Argument(help=f"Architecture: {', '.join(MAKERS)}.")],
    folder: Annotated[Path, typer.Argument(help="Folder to write; replaces a tiny checkpoint there.", **PATH)],
) -> None:
    """Make a tiny checkpoint with random or trained weights, for trying things out offline."""
    require_path(folder, "FOLDER")
    try:
        silence_libraries()
        make_tiny(model, folder)
    except ImportError as error:
        raise UserError(f"{error.name} is needed to make checkpoints; {install_command('diffusers')}") from error
    print(f"wrote a tiny {model} checkpoint to {folder}", file=sys.stderr)
