"""FlashAttention-4's CuTe kernels (`flash-attn-4` from PyPI) compiled without a GPU, to compare ours with.

Their class for Hopper follows FlashAttention-3's schedule, that for sm80 FlashAttention-2's. Run as a program, in a
process of its own, as the library reads the architecture from the environment when it is imported.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

__all__ = ["installed", "machine_code"]


def installed() -> bool:
    try:
        return find_spec("flash_attn.cute") is not None
    except ModuleNotFoundError:
        return False


def machine_code(arch: int, overlap: bool = True) -> bytes:
    """Compiles the dense forward for D 128 in bfloat16.

    Args:
        arch: 80 or 90.
        overlap: Whether a group's softmax runs beside its own products, as FlashAttention-3's does (section 3.2).

    Returns:
        The cubin.
    """
    with tempfile.TemporaryDirectory() as folder:
        suffix = "a" if arch == 90 else ""
        environment = os.environ | {
            "FLASH_ATTENTION_ARCH": f"sm_{arch}", "CUTE_DSL_ARCH": f"sm_{arch}{suffix}", "CUTE_DSL_KEEP_CUBIN": "1",
            "FLASH_ATTENTION_NUM_SMS": "132", "CUTE_DSL_DUMP_DIR": folder,
        }  # fmt: skip
        command = [sys.executable, "-m", __name__, *([] if overlap else ["--no-overlap"])]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        found = list(Path(folder).glob("*.cubin"))
        if done.returncode or not found:
            raise RuntimeError(f"flash-attn-4 made no machine code: {done.stderr.strip()[-500:]}")
        return max(found, key=lambda file: file.stat().st_size).read_bytes()


def _compile(overlap: bool) -> None:
    import torch
    from flash_attn.cute.interface import _flash_attn_fwd
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True):
        q, k, v = (torch.empty(1, 4096, 1, 128, dtype=torch.bfloat16, device="cuda") for _ in range(3))
        options = {} if overlap else {"intra_wg_overlap": False}
        _flash_attn_fwd(q, k, v, softmax_scale=128**-0.5, return_lse=True, **options)


if __name__ == "__main__":
    _compile("--no-overlap" not in sys.argv)
