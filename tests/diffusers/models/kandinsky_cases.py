"""What the workers run: Kandinsky 5 with NABLA, the model's own next to db-SP's."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch

import dbsp_diffusers
from tests.support.models.tiny_transformers import make_tiny_transformer, tiny_inputs
from tests.support.settings import with_debug
from tests.support.shared import shared
from tests.support.single_process import attach_single_process

MODEL, THW = "kandinsky5-nabla", (3, 16, 24)
"""18 blocks of 64 tokens; 3 ranks share 1152 of them equally, and the heads of 2 ranks."""


def compute(transformer: Any, batch: int, **changes: Any) -> torch.Tensor:
    with torch.no_grad():
        return transformer(**tiny_inputs(MODEL, THW, batch) | changes)[0]  # type: ignore[no-any-return]


@shared
def by_itself(batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What the model makes of it with its own `nablaT_v2`, and without a mask.

    Replaces flex attention, which on a CPU ignores block masks unless it is compiled: torch's own attention under
    the mask that the model made.
    """
    from torch.nn.attention.flex_attention import BlockMask

    def attend(query: Any, key: Any, value: Any, attn_mask: Any = None, **options: Any) -> Any:
        if isinstance(attn_mask, BlockMask):
            blocks = attn_mask.to_dense().bool()
            attn_mask = blocks.repeat_interleave(64, dim=-2).repeat_interleave(64, dim=-1)
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask).transpose(1, 2)

    transformer = make_tiny_transformer(MODEL)
    with patch("diffusers.models.transformers.transformer_kandinsky.dispatch_attention_fn", attend):
        return compute(transformer, batch), compute(transformer, batch, sparse_params=None)


@shared
def sparge_in_one_process(batch: int) -> torch.Tensor:
    transformer = make_tiny_transformer(MODEL)
    single = attach_single_process(transformer, {"mask": SPARGE})
    out = compute(transformer, batch)
    single.detach()
    return out


def run_pipeline(rank: int, world: int, strategy: str) -> tuple[float, float, int]:
    """Whole generations with guidance: (difference from one process, from dense attention, layers reached)"""
    pipe, config = make_pipe(), {"strategy": strategy}
    single = attach_single_process(pipe.transformer, None)
    expected = latents(pipe)
    single.detach()
    single = attach_single_process(pipe.transformer, {"mask": {"source": "dense"}})
    dense = latents(pipe)
    single.detach()
    session = dbsp_diffusers.enable(pipe, config)
    out = latents(pipe)
    reached = len(session.end())
    dbsp_diffusers.disable(pipe)
    return float((out - expected).abs().max()), float((out - dense).abs().max()), reached


def make_pipe() -> Any:
    """Without the VAE and the text encoders, which db-SP leaves alone."""
    from diffusers import FlowMatchEulerDiscreteScheduler, Kandinsky5T2VPipeline

    scheduler = FlowMatchEulerDiscreteScheduler(shift=5.0)
    pipe = Kandinsky5T2VPipeline(make_tiny_transformer(MODEL), None, None, None, None, None, scheduler)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def latents(pipe: Any) -> torch.Tensor:
    draws = torch.Generator().manual_seed(1)
    text = {"prompt_embeds_qwen": torch.randn(1, 9, 16, generator=draws)}
    text |= {"prompt_embeds_clip": torch.randn(1, 12, generator=draws)}
    text |= {"prompt_cu_seqlens": torch.tensor([0, 9], dtype=torch.int32)}
    video = {"height": 128, "width": 256, "num_frames": 9, "num_inference_steps": 2, "guidance_scale": 2.0}
    other = {f"negative_{name}": one.flip(-1) if "embeds" in name else one for name, one in text.items()}
    return pipe(**text, **other, **video, generator=draws, output_type="latent").frames  # type: ignore[no-any-return]


SPARGE = {"source": "sparge", "cdf": 0.5, "similarity": -1}
CONFIGS: dict[str, Any] = {
    "no mask named": {},
    "its own, named": {"mask": {"source": "nabla"}},
    "in a union": {"mask": {"source": "union", "of": [{"source": "nabla"}, {"source": "nabla", "window": [1, 1, 1]}]}},
    "dense, named": {"mask": {"source": "dense"}},
    "sparge": {"mask": SPARGE},
    "others of NABLA's numbers": {"mask": {"source": "nabla", "cdf": 0.9}},
}


def run_nabla(rank: int, world: int, strategy: str, name: str, batch: int) -> dict[str, float]:
    """Largest differences from what the model makes by itself, from dense attention, and from sparge's."""
    transformer = make_tiny_transformer(MODEL)
    own, dense = by_itself(batch)
    sparge = sparge_in_one_process(batch)
    dbsp_diffusers.enable(transformer, with_debug(CONFIGS[name] | {"strategy": strategy}))
    out = compute(transformer, batch)
    dbsp_diffusers.disable(transformer)
    others = {"own": own, "dense": dense, "sparge": sparge}
    return {what: float((out - other).abs().max()) for what, other in others.items()}
