"""Ranks with xfuser's groups, and a tiny CogVideoX for all files here."""

from __future__ import annotations

import pytest

from dbsp_cli.tiny_models import make_tiny
from tests.xdit.xdit_cases import start_xfuser


@pytest.fixture
def xfuser(pool):
    """Makes xfuser(world, guidance, data) give worker processes in which xfuser has groups of these degrees."""

    def start(world, guidance=1, data=1):
        workers = pool(world)
        workers.run(start_xfuser, guidance, data)
        return workers

    return start


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    return str(make_tiny("cogvideox", tmp_path_factory.mktemp("xdit") / "cogvideox"))
