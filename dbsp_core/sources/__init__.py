"""Where masks come from."""

from __future__ import annotations

from dbsp_core.sources.base import HomeTokens, MaskRequest, MaskSource
from dbsp_core.sources.dense import DenseSource
from dbsp_core.sources.file import FileSource
from dbsp_core.sources.radial import RadialSource
from dbsp_core.sources.sparge import SpargeSource
from dbsp_core.sources.svg import SvgSource
from dbsp_core.sources.synthetic import SyntheticSource
from dbsp_core.sources.user import CallableSource
from dbsp_core.sources.window import WindowSource

__all__ = [
    "SOURCES",
    "CallableSource",
    "DenseSource",
    "FileSource",
    "HomeTokens",
    "MaskRequest",
    "MaskSource",
    "RadialSource",
    "SpargeSource",
    "SvgSource",
    "SyntheticSource",
    "WindowSource",
]

SOURCES: dict[str, type[MaskSource]] = {
    "dense": DenseSource,
    "file": FileSource,
    "sparge": SpargeSource,
    "window": WindowSource,
    "radial": RadialSource,
    "svg": SvgSource,
    "callable": CallableSource,
    "synthetic": SyntheticSource,
}
"""By the name that stands after `source:` in a configuration."""
