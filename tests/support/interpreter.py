"""Triton's interpreter for the tests' own processes, and only while they ask for it: it is slow."""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Iterator

import torch

KERNELS = ("backward", "block_selection", "forward", "merge", "pooling", "row_bits", "segment_copy")


@contextlib.contextmanager
def interpreted() -> Iterator[None]:
    """While this lasts, kernels run in Triton's interpreter; nothing happens where there is a GPU, or no triton.

    Whether a kernel is interpreted is decided when triton and the kernel are imported, so both are imported here.
    """
    if torch.cuda.is_available():
        yield
        return
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        with contextlib.suppress(ModuleNotFoundError):
            for name in KERNELS:
                importlib.import_module(f"dbsp_kernels.triton.{name}")
        yield
    finally:
        del os.environ["TRITON_INTERPRET"]
        if before is not None:
            os.environ["TRITON_INTERPRET"] = before


with interpreted():
    pass  # the imports, before anything else imports triton otherwise
