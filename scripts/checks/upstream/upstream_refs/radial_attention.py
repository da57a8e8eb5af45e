"""Source `radial` against Radial Attention's own mask generator (mit-han-lab/radial-attention)."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from pathlib import Path

import torch

from dbsp_core import BlockGrid
from dbsp_core.sources.frame_patterns import radial_bits
from scripts.checks.upstream.upstream_refs.finding import Finding, compared, make_importable

BLOCK = 128
"""Its code's, once only as a number."""
SIZES = ((12, 16, 16), (9, 16, 32), (7, 32, 32), (13, 24, 40), (7, 30, 52))
"""Frames of a power of two tokens, and others: 480p's 30 × 52."""


def findings(folder: Path) -> Iterator[Finding]:
    make_importable(folder, "flashinfer", "sparse_sageattn", "sageattention", "spas_sage_attn")
    from radial_attn.attn_mask import gen_log_mask_shrinked

    for thw in SIZES:
        frames, frame = thw[0], thw[1] * thw[2]
        blocks = frames * frame // BLOCK  # a last block that is not whole is padding's in theirs, and dense
        with contextlib.redirect_stdout(io.StringIO()):
            padded = (blocks + 2) * BLOCK
            theirs = gen_log_mask_shrinked(torch.empty(0), padded, frames * frame, frames, BLOCK, "radial", 1.0, "wan")
        theirs = theirs[:blocks, :blocks]
        even = frame & (frame - 1) == 0
        grid = BlockGrid.uniform(frames * frame, BLOCK)
        ours = radial_bits(grid, thw, width=1.0, decay=0.5, sink_frames=1)[:blocks, :blocks]
        note = "" if even else "the width is a frame's in the paper and here, in its code the power of two below"
        yield compared("radial-attention", folder, f"wan, thw {thw}, width 1", theirs, ours, note)
        if not even:
            width = (1 << (frame.bit_length() - 1)) / frame
            narrower = radial_bits(grid, thw, width, decay=0.5, sink_frames=1)[:blocks, :blocks]
            note = (
                "near frames whole in theirs; a block that the band touches is dense here, in its code where a third "
                "of the rows are in more than 0.6 of the columns that have any"
            )
            yield compared("radial-attention", folder, f"wan, thw {thw}, width {width:.3f}", theirs, narrower, note)
