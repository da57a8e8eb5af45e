"""xfuser's subclasses of diffusers' transformers, which attach turns back: each equals one process."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dbsp_xdit import attach, detach
from tests.support.models.tiny_pipelines import fingerprint
from tests.support.models.tiny_transformers import make_tiny_transformer, tiny_inputs
from tests.support.outcomes import alone, assert_near, outputs, said
from tests.support.references import by_first_rank
from tests.xdit.xdit_cases import FAMILIES, in_xfusers_class

MASK = {"source": "synthetic", "density": 0.3, "block_q": 16, "block_k": 8}
SPARGE = {"source": "sparge", "cdf": 0.6, "similarity": 0.0, "block_q": 16, "block_k": 8}


@by_first_rank
def one_process(model: str, mask: dict[str, Any], seed: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Returns outputs of dense attention, and with a mask."""
    stock, inputs = make_tiny_transformer(model), tiny_inputs(model, seed=seed)
    with torch.no_grad():
        return outputs(stock, inputs), alone(stock, inputs, {"mask": mask})


def run_family(rank: int, world: int, model: str, config: dict[str, Any], seed: int = 1) -> None:
    dense, expected = one_process(model, config["mask"], seed)
    wrapped = in_xfusers_class(model)
    pipe, before = SimpleNamespace(transformer=wrapped), fingerprint(wrapped)
    session = attach(pipe, config)
    with torch.no_grad():
        assert_near(outputs(wrapped, tiny_inputs(model, seed=seed)), expected, dense)
    assert session.statistics()["calls"] > 0
    assert "already parallelized" in said(lambda: attach(pipe, config))
    for _ in range(2):  # the second time there is nothing to do
        detach(pipe)
    assert fingerprint(wrapped) == before, "detach left something behind"


USUAL = ("wan", "hunyuan", "ltx2", "qwen", "z-image", "minimax-h3")
"""xfuser changes each of these in another way; all others run in the long part."""


@pytest.mark.parametrize(
    "model", [pytest.param(model, marks=() if model in USUAL else pytest.mark.long) for model in FAMILIES]
)
def test_family_equals_one_process(xfuser, model):
    xfuser(2).run(run_family, model, {"mask": MASK, "strategy": "U1R2"})


def run_data_parallel(rank: int, world: int) -> None:
    """Runs something else in each of two groups of ranks, and another number of times."""
    config, group = {"mask": SPARGE}, rank
    for seed in (1, 2):
        one_process("wan", SPARGE, seed)  # all ranks together
    for _ in range(1 + group):
        run_family(rank, world, "wan", config, seed=1 + group)


@pytest.mark.usefixtures("debug")
def test_data_parallel_groups_do_not_wait_for_each_other(xfuser):
    xfuser(2, 1, 2).run(run_data_parallel)
