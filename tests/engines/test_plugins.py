"""What plug-ins for engines do that needs no engine: shards on ranks that are threads, refusals, versions."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import dbsp_engines.sglang_plugin
from dbsp_core import SequenceGroup
from dbsp_core.utils.errors import UserError
from dbsp_engines.lightx2v import DbspAttention
from scripts.checks.engines.reference import attend_under
from tests.support.thread_ranks import ThreadRanks

MASK, THW, LAYERS, HEADS, STEPS = "sparge:cdf=0.6,block_q=16,block_k=8", (3, 5, 5), 2, 3, 2


def scheduler(config: dict[str, Any] | None = None) -> SimpleNamespace:
    settings = {"num_layers": LAYERS, "parallel": {"dbsp": MASK}, "enable_cfg": True}
    return SimpleNamespace(config=settings | (config or {}), step_index=0, infer_condition=True)


def whole(step: int, layer: int, branch: bool) -> list[torch.Tensor]:
    """q, k and v of all tokens, [tokens, heads, D]."""
    seed = 100 * step + 10 * layer + branch
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(3 * 5 * 5, HEADS, 8, generator=generator) for _ in range(3)]


def of_lightx2v(rank: int, world: int) -> float:
    """LightX2V's calls of two transformers in turn: the largest difference from one process."""
    models = [[DbspAttention() for _ in range(LAYERS)] for _ in range(2)]
    now, worst = scheduler(), 0.0
    for step in range(STEPS):
        now.step_index = step
        for now.infer_condition in (True, False):
            for layer, attention in enumerate(models[step % 2]):
                tokens = whole(step, layer, now.infer_condition)
                padded = [F.pad(one, (0, 0, 0, 0, 0, -len(one) % world)).chunk(world)[rank] for one in tokens]
                context = {"block_idx": layer, "scheduler": now, "grid_sizes": THW}
                out, _ = attention.apply_new(*padded, attention_kwargs=context, tensor_fusion=False)
                expected = attend_under(MASK, layer, LAYERS, THW, *(one[None] for one in tokens))[0].flatten(1)
                gathered = torch.cat(SequenceGroup.of().all_gather(out))[: len(expected)]
                worst = max(worst, float((gathered - expected).abs().max()))
    return worst


@pytest.mark.parametrize("world", [2, 3, 4])
def test_lightx2v_equals_one_process(world):
    assert max(ThreadRanks(world).run(of_lightx2v)) <= 1e-5


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"aux_k": torch.zeros(1)}, "whose ranks all hold the text"),
        ({"quant_scheme": "fp8"}, "exchange: {precision: int8}"),
        ({"attention_kwargs": {"block_idx": 0, "scheduler": None, "grid_sizes": None}}, "a grid of video tokens"),
        ({"k": torch.zeros(100, HEADS, 8)}, "keys of earlier frames"),
    ],
)
def test_what_lightx2v_asks_for_and_is_not_served_is_refused_in_one_line(changed, said):
    q = torch.zeros(75, HEADS, 8)
    call = {"q": q, "k": q, "v": q, "attention_kwargs": {"block_idx": 0, "scheduler": scheduler(), "grid_sizes": THW}}
    with pytest.raises(UserError, match=said) as refused:
        DbspAttention().apply_new(**call | changed)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"feature_caching": "Ada"}, "feature_caching Ada decides by the tokens of one rank"),
        (
            {"feature_caching": "Tea", "model_cls": "wan2.2", "task": "i2v"},
            "feature_caching Tea decides",
        ),
        ({"tensor_parallel": True}, "leave out parallel.tensor_p_size"),
    ],
)
def test_settings_that_do_not_go_with_it_are_refused_on_every_rank(settings, said):
    def refusal(rank: int, world: int) -> str:
        q = torch.zeros(38, HEADS, 8)
        context = {"block_idx": 0, "scheduler": scheduler(settings), "grid_sizes": THW}
        with pytest.raises(UserError) as refused:
            DbspAttention().apply_new(q, q, q, attention_kwargs=context)
        return str(refused.value)

    assert all(said in one and "\n" not in one for one in ThreadRanks(2).run(refusal))


def test_sglang_is_left_alone_without_a_configuration(monkeypatch):
    monkeypatch.delenv("DBSP_CONFIG", raising=False)
    monkeypatch.setattr(dbsp_engines.sglang_plugin, "version", lambda package: pytest.fail("looked for SGLang"))
    dbsp_engines.sglang_plugin.register()


@pytest.mark.parametrize("found", ["0.5.22", "0.5.230", "0.6.0"])
def test_another_sglang_stops_its_workers(monkeypatch, found):
    monkeypatch.setitem(os.environ, "DBSP_CONFIG", MASK)
    monkeypatch.setattr(dbsp_engines.sglang_plugin, "version", lambda package: found)
    with pytest.raises(SystemExit, match=f"this is {found}"):
        dbsp_engines.sglang_plugin.register()
