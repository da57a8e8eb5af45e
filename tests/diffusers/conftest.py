"""A pipeline for all files here."""

from __future__ import annotations

import pytest

from tests.support.models.tiny_pipelines import small_wan


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return small_wan(tmp_path_factory.mktemp("tiny") / "wan")
