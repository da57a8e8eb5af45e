"""FlashAttention-4 with the arguments of our adapter, compiled without a GPU; run by `scripts/optional_kernels`."""

from __future__ import annotations

from collections import Counter

import pytest

pytest.importorskip("flash_attn.cute", reason="scripts/optional_kernels installs flash-attn-4", exc_type=ImportError)

from scripts.checks.machine_code.cycles import tensor_share
from scripts.checks.machine_code.machines import MACHINES
from scripts.checks.machine_code.optional_kernels import OptionalCode, compile_fa4
from scripts.checks.machine_code.reading import full_loop, is_serialised, program_from
from scripts.checks.machine_code.sass import instructions

(H100,) = (machine for machine in MACHINES if machine.arch == 90)


def products_and_waits(code: OptionalCode) -> tuple[int, int]:
    """Of one step of the loop over full blocks, a warp."""
    step = Counter(one.name for one in full_loop(instructions(code.sass)) or ())
    return step["HGMMA"], step["WARPGROUP.DEPBAR"]


def test_fa4_has_flash_attention_3_s_schedule_on_hopper():
    code = compile_fa4(90, 128, 128)
    assert products_and_waits(code) == (16, 2)
    assert not is_serialised(code.log)
    assert "0 bytes spill stores, 0 bytes spill loads" in code.log
    assert tensor_share(program_from(code.sass, 384, 1), H100).tensor >= 0.95


@pytest.mark.parametrize(
    ("arch", "complaint"), [(100, "block size 128, which must be a multiple of 256"), (120, "to match tile_n=64")]
)
def test_what_it_refuses_is_what_our_adapter_refuses(arch, complaint):
    with pytest.raises(RuntimeError, match=complaint):
        compile_fa4(arch, 128, 128)
