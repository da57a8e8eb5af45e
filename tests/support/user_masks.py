"""Functions that users may write for mask source "callable", and some that they should not."""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist

NOT_A_FUNCTION = 3


def band(grid, request, blocks=1):
    """Blocks near the diagonal, wider in later layers and steps."""
    q, k = (axis.starts for axis in (grid.q_axis, grid.k_axis))
    reach = (blocks + request.layer + request.step + request.cfg_branch) * max(grid.block_q, grid.block_k)
    return np.abs(q[:, None] - k) < reach


def heads_apart(grid, request):
    """Returns each head's own columns, as a tensor."""
    columns = torch.arange(grid.nk) % request.heads
    return (columns == torch.arange(request.heads)[:, None, None]).expand(request.heads, grid.nq, grid.nk)


def integers(grid, request):
    return np.ones((grid.nq, grid.nk), dtype=np.int64)


def a_list(grid, request):
    return [[True]]


def transposed(grid, request):
    return np.ones((grid.nq + 1, grid.nk), dtype=bool)


def raises(grid, request):
    raise KeyError("no such\nlayer")


def band_of_other_branch(grid, request):
    return band(grid, replace(request, cfg_branch=1 - request.cfg_branch))


FAILS_AT: set[tuple[int, int]] = set()
"""(rank, step) at which `band_that_may_fail` raises."""


def band_that_may_fail(grid, request):
    if (dist.get_rank() if dist.is_initialized() else 0, request.step) in FAILS_AT:
        raise RuntimeError("set to fail")
    return band(grid, request)


MOMENTS: list[tuple[int, int]] = []
"""(step, CFG pass) of each mask that `band_noting_moments` was asked for."""


def band_noting_moments(grid, request):
    MOMENTS.append((request.step, request.cfg_branch))
    return band(grid, request)


def dies_in_the_second_step(grid, request):
    if request.step == 1 and dist.get_rank() == 1:
        sys.stderr.write("the memory ran out\n")
        os.kill(os.getpid(), signal.SIGKILL)
    return np.ones((grid.nq, grid.nk), dtype=bool)
