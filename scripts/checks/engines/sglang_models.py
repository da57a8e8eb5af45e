"""SGLang Diffusion's own transformers, tiny, with what their forward passes are given and what a request says of them.

Imported once SGLang has its server's arguments and plug-ins.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from sglang.multimodal_gen.configs.models.dits import WanVideoConfig
from sglang.multimodal_gen.configs.models.dits.minimax_h3 import MiniMaxH3DiTConfig
from sglang.multimodal_gen.runtime.models.dits import minimax_h3
from sglang.multimodal_gen.runtime.models.dits.wanvideo import WanTransformer3DModel
from sglang.multimodal_gen.runtime.pipelines_core.stages.model_specific_stages.minimax_h3.denoise_loop import (
    MiniMaxH3DenoiseBranch,
)
from sglang.multimodal_gen.runtime.pipelines_core.stages.model_specific_stages.minimax_h3.packed_sequence import (
    minimax_h3_packed_sequence,
)

from scripts.checks.engines.reference import attend_under, inputs_of, random, tiny_h3
from scripts.checks.engines.runs import HEAD, LAYERS, STEPS

Grid = tuple[int, int, int]
H3_TEXT, H3_AUDIO = 7, 4


@dataclass(frozen=True)
class Model:
    """One of SGLang's models.

    Attributes:
        make: Of a number of heads, with weights of no meaning.
        outputs: Of the model, a size in tokens, its number, the step, the CFG pass and how to choose own frames.
        mask: Makes a model attend under a mask by torch's own attention, for a size and by its name in a pipeline.
        channels: Of its latents.
    """

    make: Callable[[int], torch.nn.Module]
    outputs: Callable[[Any, Grid, int, int, int, Callable[[torch.Tensor], torch.Tensor]], torch.Tensor]
    mask: Callable[[Any, str, Grid, str], None]
    channels: int


def _wan(heads: int) -> torch.nn.Module:
    config = WanVideoConfig()
    sizes = {"num_attention_heads": heads, "attention_head_dim": HEAD, "hidden_size": heads * HEAD}
    sizes |= {"num_layers": LAYERS, "in_channels": 4, "out_channels": 4, "num_channels_latents": 4}
    config.update_model_arch(sizes | {"text_dim": 16, "freq_dim": 32, "ffn_dim": 48})
    return WanTransformer3DModel(config, {})


def _of_wan(model: Any, thw: Grid, number: int, step: int, branch: int, own_frames: Any) -> torch.Tensor:
    latents, text = inputs_of(thw, number, step, branch)
    timestep = torch.tensor([900.0 - 300 * step])
    return model(own_frames(latents), encoder_hidden_states=text, timestep=timestep)


def _mask_wan(model: Any, mask: str, thw: Grid, name: str) -> None:
    for layer, block in enumerate(model.blocks):
        block.attn1.forward = functools.partial(attend_under, mask, layer, LAYERS, thw, transformer=name)


def _h3(heads: int) -> torch.nn.Module:
    def make(sizes: dict[str, int]) -> torch.nn.Module:
        config = MiniMaxH3DiTConfig()
        config.update_model_arch(sizes)
        return minimax_h3.MiniMaxH3DiTModel(config, {})

    return tiny_h3(minimax_h3, heads, make)


def _of_h3(keyframe: bool, model: Any, thw: Grid, number: int, step: int, branch: int, _: Any) -> torch.Tensor:
    """Arguments as H3's own denoising makes them: text, perhaps the first frame, audio, the video."""
    frames, height, width = thw
    packed = minimax_h3_packed_sequence(
        text_len=H3_TEXT,
        latent_t=frames,
        latent_h=2 * height,
        latent_w=2 * width,
        audio_t=H3_AUDIO // 2,
        include_keyframe_cond=keyframe,
        keyframe_frame_indices=[0] if keyframe else None,
        frame_count=9,
    )
    device = torch.device("cpu")
    text, tags = random(branch, H3_TEXT, 16), packed["token_tags"]
    run = MiniMaxH3DenoiseBranch(packed=packed, text_embeddings=text, token_tags=tags, device=device)
    plan = run.prepare_timestep_plan(
        video_timesteps=[0.9 - 0.3 * one for one in range(STEPS)],
        audio_timesteps=[0.8 - 0.3 * one for one in range(STEPS)],
        imgvid_cond_noise_aug=0.0,
        audio_ref_cond_noise_aug=0.0,
    )
    inputs = run.forward_kwargs(
        video_rows=random(1000 * number + 10 * step, len(run.img_pos), 96),
        audio_rows=random(1000 * number + 10 * step + 1, len(run.audio_pos), 32),
        step_timesteps=plan[step],
    )
    return torch.cat([one.flatten() for one in model(**inputs)])


def _mask_h3(model: Any, mask: str, thw: Grid, _: str) -> None:
    """Treats all tokens before the video as text of the mask."""
    model._resolve_attention_backend_once()

    def attend(layer: int, q: Any, k: Any, v: Any, max_seqlen: int, **_: Any) -> torch.Tensor:
        text = max_seqlen - thw[0] * thw[1] * thw[2]
        used = (one[None, :max_seqlen] for one in (q, k, v))
        padding = torch.zeros_like(q[max_seqlen:])
        return torch.cat([attend_under(mask, layer, LAYERS, thw, *used, text=text)[0], padding])

    for layer, block in enumerate(model.blocks):
        block.attn._attention_impl = SimpleNamespace(forward_varlen=functools.partial(attend, layer))


MODELS = {
    "wan": Model(_wan, _of_wan, _mask_wan, 4),
    "h3": Model(_h3, functools.partial(_of_h3, False), _mask_h3, 24),
    "h3_keyframe": Model(_h3, functools.partial(_of_h3, True), _mask_h3, 24),
}
