"""Mask sources."""

from __future__ import annotations

from dbsp_core.sources.base import LocalQK, MaskRequest, MaskSource, packed_mask
from dbsp_core.sources.callable import CallableSource
from dbsp_core.sources.cube import CubeSource
from dbsp_core.sources.frame_patterns import RadialSource, SvgSource
from dbsp_core.sources.lowrank import LowRankSource, RecordQKSource
from dbsp_core.sources.sla import SlaSource
from dbsp_core.sources.sol import SolSource
from dbsp_core.sources.sparge import SpargeSource
from dbsp_core.sources.ssta import SstaSource
from dbsp_core.sources.static import DenseSource, FileSource, ParoSource
from dbsp_core.sources.subblock import SubBlockSource
from dbsp_core.sources.synthetic.source import SyntheticSource
from dbsp_core.sources.union import NablaSource, UnionSource, parts_of
from dbsp_core.sources.vsa import VsaSource
from dbsp_core.sources.window import WindowSource

__all__ = [
    "SOURCES",
    "CallableSource",
    "CubeSource",
    "DenseSource",
    "FileSource",
    "LocalQK",
    "LowRankSource",
    "MaskRequest",
    "MaskSource",
    "NablaSource",
    "ParoSource",
    "RadialSource",
    "RecordQKSource",
    "SlaSource",
    "SolSource",
    "SpargeSource",
    "SstaSource",
    "SubBlockSource",
    "SvgSource",
    "SyntheticSource",
    "UnionSource",
    "VsaSource",
    "WindowSource",
    "packed_mask",
    "parts_of",
]

SOURCES: dict[str, type[MaskSource]] = {
    "dense": DenseSource,
    "file": FileSource,
    "paro": ParoSource,
    "sparge": SpargeSource,
    "sol": SolSource,
    "subblock": SubBlockSource,
    "cube": CubeSource,
    "ssta": SstaSource,
    "vsa": VsaSource,
    "sla": SlaSource,
    "lowrank": LowRankSource,
    "record_qk": RecordQKSource,
    "window": WindowSource,
    "radial": RadialSource,
    "svg": SvgSource,
    "union": UnionSource,
    "nabla": NablaSource,
    "callable": CallableSource,
    "synthetic": SyntheticSource,
}
"""Mask sources by their name in `source:`."""
