"""Stage 3, the transformer: flow matching on latents, first on short clips, then on whole videos."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from rich.progress import Progress

from scripts.training.loop import generator_of, train
from scripts.training.muon import optimizers_of
from scripts.training.text import PADDED

SHIFT = 3.0  # of the noise levels, as in generation
NO_CAPTION = 0.1  # of the videos are trained without, for classifier-free guidance
_OFFSETS = ((0, 0, 0), (0, -1, 0), (0, 1, 0), (0, 0, -1), (0, 0, 1), (-1, 0, 0), (1, 0, 0), (0, -2, 0), (0, 2, 0))
WARM_UP, DECAY = 100, 0.3  # of the learning rate: steps at the start, share of all steps at the end
_TOGETHER = 1 << 22  # probabilities at a time: what fits in a cache
AVERAGE = 0.995  # decay of the weights' moving average, which is what ships


@dataclass(frozen=True)
class Phase:
    """So many steps on so many videos each, cut to `frames` latent frames: every second step's from the first on."""

    steps: int
    batch: int
    frames: int


@dataclass(frozen=True)
class Videos:
    """latents: [n, 16, f, h, w], standardised; text: float32[n, length, d]; no_text: float32[length, d]"""

    latents: torch.Tensor
    text: torch.Tensor
    no_text: torch.Tensor


def make_transformer(head_width: int = 24, layers: int = 5, text_width: int = 64) -> Any:
    """Wan2.1's transformer with 12 heads, so that 8 ranks don't divide them."""
    from diffusers import WanTransformer3DModel

    transformer = WanTransformer3DModel(
        num_attention_heads=12,
        attention_head_dim=head_width,
        in_channels=16,
        out_channels=16,
        text_dim=text_width,
        freq_dim=128,
        ffn_dim=576,
        num_layers=layers,
        rope_max_seq_len=128,
    )
    with torch.no_grad():
        for block in transformer.blocks:
            # 500 tokens of padding against ten words: let words' keys count more from the start.
            block.attn2.norm_k.weight.fill_(3.0)
        _look_around(transformer.blocks[0].attn1)
        transformer.proj_out.weight.zero_()
    return transformer


def _look_around(attn: Any) -> None:
    """Draws the first layer's heads each to one direction: themselves, the frame before and after, and so on.

    Rotary positions alone don't give a token its position; only what lies beyond an edge does, so heads that look
    next to themselves are what learns it. A key bias b and the query bias R(−offset)·b peak at that offset.
    """
    from diffusers.models.embeddings import get_1d_rotary_pos_embed

    width = attn.inner_dim // attn.heads
    side = 2 * (width // 6)
    widths = (width - 2 * side, side, side)  # of t, h and w, as WanRotaryPosEmbed shares a head's channels
    key = torch.randn(attn.heads, width)
    query = torch.empty_like(key)
    for head in range(attn.heads):
        offset, at = _OFFSETS[head % len(_OFFSETS)], 0
        for axis, size in enumerate(widths):
            position = torch.tensor([float(offset[axis])])
            cos, sin = (part[0] for part in get_1d_rotary_pos_embed(size, position, use_real=True))
            pair = key[head, at : at + size]
            turned = torch.stack([-pair[1::2], pair[0::2]], -1).flatten()
            query[head, at : at + size] = pair * cos + turned * sin
            at += size
    attn.to_k.bias.copy_(key.flatten())
    attn.to_q.bias.copy_(query.flatten())


@contextmanager
def written_out() -> Iterator[None]:
    """Within it, torch's attention is `plain_attention`, whose backward pass takes CPUs at most half the time."""
    with patch.object(F, "scaled_dot_product_attention", plain_attention):
        yield


def plain_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None = None, **_: Any
) -> torch.Tensor:
    """softmax(q·k / √D + mask)·v. query, key, value: [B, H, tokens, D]"""
    batch, heads, tokens = query.shape[:3]
    with torch.autocast("cpu", enabled=False):
        parts = (part.bfloat16().flatten(0, 1) for part in (query * query.shape[-1] ** -0.5, key, value))
        mask = None if attn_mask is None else attn_mask.bfloat16().expand(batch, heads, -1, -1).flatten(0, 1)
        q, k, v = parts
        step = max(1, _TOGETHER // (tokens * k.shape[1]))
        outputs = []
        for at in range(0, batch * heads, step):
            here = slice(at, at + step)
            scores = q[here] @ k[here].transpose(1, 2)
            scores = scores if mask is None else scores + mask[here]
            outputs.append(scores.softmax(-1) @ v[here])
        return torch.cat(outputs).unflatten(0, (batch, heads))


class FewPads:
    """Cross-attention on a caption with a few zeros as it would be with WanPipeline's 512.

    All zeros give one key and one value: the last represents those left out, its logit raised by the log of their
    number. Exactly the same sum, for a twentieth of the work.
    """

    def __init__(self, inner: Any):
        self.inner = inner

    def __call__(self, attn: Any, hidden_states: torch.Tensor, encoder_hidden_states: torch.Tensor, *rest: Any) -> Any:
        length = encoder_hidden_states.shape[1]
        bias = torch.zeros(length, dtype=hidden_states.dtype)
        bias[-1] = math.log(PADDED - length + 1)
        shape = (hidden_states.shape[0], attn.heads, hidden_states.shape[1], length)
        return self.inner(attn, hidden_states, encoder_hidden_states, bias.expand(shape))


def train_transformer(
    transformer: Any,
    videos: Videos,
    phases: list[Phase],
    rate: float,
    seed: int,
    folder: Path,
    progress: Progress,
) -> tuple[Any, list[float]]:
    """Trains `transformer` in place. Returns the moving average of its weights, a model of its own; the losses."""
    for block in transformer.blocks:
        block.attn2.set_processor(FewPads(block.attn2.processor))
    average = torch.optim.swa_utils.AveragedModel(
        transformer, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(AVERAGE)
    )
    hidden = [p for p in transformer.blocks.parameters() if p.ndim == 2]
    optimizers = optimizers_of(transformer, hidden, rate)
    total = sum(phase.steps for phase in phases)

    def step(index: int) -> float:
        generator = generator_of(seed, index)
        share = min(1.0, (index + 1) / WARM_UP, (total - index) / (DECAY * total))
        for optimizer in optimizers.values():
            for group in optimizer.param_groups:
                group["lr"] = rate * share
        with torch.autocast("cpu", torch.bfloat16), written_out():
            loss = _loss(transformer, videos, _phase_at(phases, index), generator)
        for optimizer in optimizers.values():
            optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(transformer.parameters(), 1.0)
        for optimizer in optimizers.values():
            optimizer.step()
        average.update_parameters(transformer)
        return loss.item()

    parts = {**optimizers, "transformer": transformer, "average": average}
    return average.module, train("transformer", total, parts, step, folder, progress)


def _phase_at(phases: list[Phase], index: int) -> Phase:
    for phase in phases:
        if index < phase.steps:
            return phase
        index -= phase.steps
    return phases[-1]


def _loss(transformer: Callable[..., Any], videos: Videos, phase: Phase, generator: torch.Generator) -> torch.Tensor:
    """Mean squared error of the velocity, noise − video, at noise levels drawn equally and then shifted."""
    count = phase.batch
    chosen = torch.randint(len(videos.latents), (count,), generator=generator)
    start = int(torch.randint(videos.latents.shape[2] - phase.frames + 1, (1,), generator=generator))
    if torch.rand(1, generator=generator) < 0.5:
        start = 0  # the first latent frame represents one picture, all others for four: it must be learned as often
    clean = videos.latents[chosen, :, start : start + phase.frames].float()
    silent = torch.rand(count, generator=generator) < NO_CAPTION
    text = torch.where(silent[:, None, None], videos.no_text, videos.text[chosen])
    # Spread over the batch: one level from each of `count` equal parts.
    even = (torch.arange(count) + torch.rand(count, generator=generator)) / count
    level = SHIFT * even / (1 + (SHIFT - 1) * even)
    noise = torch.randn(clean.shape, generator=generator)
    mixed = torch.lerp(clean, noise, level[:, None, None, None, None])
    velocity = transformer(mixed, level * 1000, text, return_dict=False)[0]
    return F.mse_loss(velocity.float(), noise - clean)
