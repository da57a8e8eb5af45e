"""A pipeline for all files here."""

from __future__ import annotations

import pytest

from dbsp_cli.tiny_models import make_tiny
from tests.support.models.tiny_transformers import LATENTS, make_tiny_transformer


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """Of Wan2.1, with the transformer of tests, which has half as many layers and heads as the command's tiny one."""
    folder = make_tiny("wan", tmp_path_factory.mktemp("tiny") / "wan")
    make_tiny_transformer("wan", **LATENTS).save_pretrained(folder / "transformer")
    return str(folder)
