"""The Triton kernel without a GPU: right under Triton's interpreter, and compilable for the GPUs it is meant for."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dbsp_kernels import block_attention, choose_kernel
from triton_cases import DTYPES

pytest.importorskip("triton")
CASES = Path(__file__).with_name("triton_cases.py")


def run(mode: str, **environment: str) -> list[dict]:
    variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | environment
    done = subprocess.run([sys.executable, str(CASES), mode], capture_output=True, text=True, env=variables)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_interpreted_kernel_equals_the_reference():
    for result in run("interpret", TRITON_INTERPRET="1"):
        assert result["out"] <= DTYPES[result["case"][0]], result
        assert result["lse"] <= 2e-3, result
        assert result["empty"] == [0.0, -math.inf], result


def test_compiles_for_ampere_and_hopper():
    for result in run("compile"):
        assert result["cubin"] > 1000
        assert result["shared"] <= 99 * 1024, "must fit the shared memory of every GPU since sm80"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_kernel_says_what_to_use():
    with pytest.raises(ValueError, match=r"kernel 'triton' cannot be used here: .*; use cpu or reference"):
        choose_kernel("triton", "cpu", torch.float32)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("block_q", "block_k", "width"), [(64, 64, 64), (128, 64, 128), (64, 128, 128), (48, 33, 24)])
def test_on_a_gpu_it_equals_the_reference(dtype, block_q, block_k, width):
    generator = torch.Generator("cuda").manual_seed(0)
    q = torch.randn(40, block_q, width, generator=generator, device="cuda", dtype=dtype)
    k, v = torch.randn(2, 30, block_k, width, generator=generator, device="cuda", dtype=dtype)
    index = torch.randint(0, 30, (40, 12), generator=generator, device="cuda", dtype=torch.int32)
    count = torch.randint(0, 13, (40,), generator=generator, device="cuda", dtype=torch.int32)
    length = torch.randint(1, block_k + 1, (30,), generator=generator, device="cuda", dtype=torch.int32)
    out, lse = block_attention(q, k, v, index, count, length, kernel="triton")
    wide = (t.double() for t in (q, k, v))
    expected, expected_lse = block_attention(*wide, index, count, length, kernel="reference")
    assert float((out.double() - expected).norm() / expected.norm()) <= DTYPES[str(dtype).removeprefix("torch.")]
    some = count > 0
    assert float((lse[some] - expected_lse[some]).abs().max()) <= 2e-3
