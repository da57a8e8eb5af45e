"""Where masks come from."""

from __future__ import annotations

from dbsp_core.sources.base import HomeTokens, MaskRequest, MaskSource
from dbsp_core.sources.dense import DenseSource
from dbsp_core.sources.file import FileSource
from dbsp_core.sources.sparge import SpargeSource
from dbsp_core.sources.synthetic import SyntheticSource
from dbsp_core.sources.window import WindowSource

__all__ = [
    "SOURCES",
    "DenseSource",
    "FileSource",
    "HomeTokens",
    "MaskRequest",
    "MaskSource",
    "SpargeSource",
    "SyntheticSource",
    "WindowSource",
]

SOURCES: dict[str, type[MaskSource]] = {
    "dense": DenseSource,
    "file": FileSource,
    "sparge": SpargeSource,
    "window": WindowSource,
    "synthetic": SyntheticSource,
}
"""By the name that stands after `source:` in a configuration."""
