"""Attention that users exchange for a whole process or model: db-SP's stays db-SP's, or that is an error."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from diffusers.models.attention_dispatch import attention_backend
from torch.nn.attention import SDPBackend, sdpa_kernel

import dbsp_diffusers
from tests.support.models.tiny_transformers import make_tiny_transformer, tiny_inputs
from tests.support.outcomes import alone, assert_near, outputs, said

CONFIG = {"mask": {"source": "synthetic", "density": 0.3, "block_q": 16, "block_k": 8}}
REPLACED = "torch.nn.functional.scaled_dot_product_attention was replaced by "
TORCHS = F.scaled_dot_product_attention


def sageattn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """Stands for a kernel that users put in the place of torch's attention for all modules."""
    return torch.zeros_like(q)


def replaced(here: bool = True) -> AbstractContextManager[object]:
    return mock.patch.object(F, "scaled_dot_product_attention", sageattn if here else TORCHS)


@torch.no_grad()
def replaced_before(rank: int, world: int, ranks: list[int]) -> None:
    transformer, inputs = make_tiny_transformer("wan"), tiny_inputs("wan")
    dense, before = outputs(transformer, inputs), set(vars(transformer))
    with replaced(rank in ranks):
        answer = said(lambda: dbsp_diffusers.enable(transformer, CONFIG))
    who = "" if len(ranks) == world else f"rank(s) {ranks}: "
    assert answer.startswith(f"UserError: {who}{REPLACED}{__name__}.sageattn"), answer
    assert set(vars(transformer)) == before, "nothing is left attached"
    assert_near(outputs(transformer, inputs), dense)


@pytest.mark.parametrize("ranks", [[0, 1], [1]], ids=["all ranks", "one rank"])
def test_torch_attention_replaced_before_enable_raises_on_all_ranks(pool, ranks):
    pool(2).run(replaced_before, ranks)


@torch.no_grad()
def replaced_after(rank: int, world: int) -> None:
    transformer, inputs = make_tiny_transformer("wan"), tiny_inputs("wan")
    expected = alone(transformer, inputs, CONFIG)
    dbsp_diffusers.enable(transformer, CONFIG)
    with replaced():
        answer = said(lambda: transformer(**inputs))
    assert answer.startswith(f"UserError: {REPLACED}"), answer
    assert_near(outputs(transformer, inputs), expected)
    dbsp_diffusers.disable(transformer)


def test_torch_attention_replaced_after_enable_raises_at_the_pass(pool):
    pool(2).run(replaced_after)


SETTINGS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "DIFFUSERS_ATTN_BACKEND": lambda: attention_backend("_native_math"),  # as diffusers' import sets it
    "sdpa_kernel": lambda: sdpa_kernel(SDPBackend.MATH),
}


@torch.no_grad()
def under_settings(rank: int, world: int) -> None:
    """Enters a setting before `enable` or after it."""
    transformer, inputs = make_tiny_transformer("wan"), tiny_inputs("wan")
    dense, expected = outputs(transformer, inputs), alone(transformer, inputs, CONFIG)
    for setting, first in itertools.product(SETTINGS, (False, True)):
        if not first:
            dbsp_diffusers.enable(transformer, CONFIG)
        with SETTINGS[setting]():
            if first:
                dbsp_diffusers.enable(transformer, CONFIG)
            assert_near(outputs(transformer, inputs), expected, dense)
        dbsp_diffusers.disable(transformer)


def test_process_wide_setting_leaves_attention_with_db_sp(pool):
    pool(2).run(under_settings)


class UserProcessor:
    """An attention processor with dropout, which diffusers' own never ask for."""

    def __call__(self, attn: Any, hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        q, k, v = (
            layer(hidden_states).unflatten(2, (attn.heads, -1)).transpose(1, 2)
            for layer in (attn.to_q, attn.to_k, attn.to_v)
        )
        return F.scaled_dot_product_attention(q, k, v, dropout_p=0.5).transpose(1, 2).flatten(2)


@torch.no_grad()
def test_dropout_of_a_users_processor_raises():
    transformer = make_tiny_transformer("wan")
    dbsp_diffusers.enable(transformer, CONFIG)
    for block in transformer.blocks:
        block.attn1.processor = UserProcessor()
    answer = said(lambda: transformer(**tiny_inputs("wan")))
    assert answer.startswith("UserError: db-SP computes attention without dropout, got dropout_p=0.5"), answer
