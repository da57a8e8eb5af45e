"""FlexAttention past its limit of compiled variants: an error, and not dense attention."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch

from dbsp_kernels import KernelInputs
from dbsp_kernels.backends import flex
from tests.kernels.packed_inputs import packed

SCALE = 0.25


def main() -> None:
    torch.compile = functools.partial(torch.compile, backend="eager")  # type: ignore[assignment]
    flex.RECOMPILE_LIMIT = 1
    p = packed(rows=4, blocks=3, block_q=64, block_k=64, width=16)
    flex.flex_attention_packed(KernelInputs(*vars(p).values(), SCALE))
    wide = replace(p, q=p.q.double(), k=p.k.double(), v=p.v.double())
    with pytest.raises(ValueError, match=r"compiled for 1 variants.*use triton"):
        flex.flex_attention_packed(KernelInputs(*vars(wide).values(), SCALE))


if __name__ == "__main__":
    main()
