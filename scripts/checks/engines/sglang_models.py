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
from sglang.multimodal_gen.configs.models.dits import HunyuanVideoConfig, WanVideoConfig
from sglang.multimodal_gen.configs.models.dits.flux import FluxConfig
from sglang.multimodal_gen.configs.models.dits.ltx_2 import LTX2Config
from sglang.multimodal_gen.configs.models.dits.minimax_h3 import MiniMaxH3DiTConfig
from sglang.multimodal_gen.configs.models.dits.qwenimage import QwenImageDitConfig
from sglang.multimodal_gen.configs.pipeline_configs.base import ImagePipelineConfig, shard_rotary_emb_for_sp
from sglang.multimodal_gen.configs.pipeline_configs.ltx_2 import LTX2PipelineConfig
from sglang.multimodal_gen.configs.pipeline_configs.qwen_image import QwenImagePipelineConfig
from sglang.multimodal_gen.runtime.managers.forward_context import get_forward_context, set_forward_context
from sglang.multimodal_gen.runtime.models.dits import minimax_h3
from sglang.multimodal_gen.runtime.models.dits.flux import FluxTransformer2DModel
from sglang.multimodal_gen.runtime.models.dits.hunyuanvideo import HunyuanVideoTransformer3DModel
from sglang.multimodal_gen.runtime.models.dits.ltx_2 import LTX2VideoTransformer3DModel
from sglang.multimodal_gen.runtime.models.dits.qwen_image import QwenImageTransformer2DModel
from sglang.multimodal_gen.runtime.models.dits.wanvideo import WanTransformer3DModel
from sglang.multimodal_gen.runtime.pipelines_core.stages.model_specific_stages.ltx_2.denoising import (
    LTX2DenoisingStage,
)
from sglang.multimodal_gen.runtime.pipelines_core.stages.model_specific_stages.minimax_h3.denoise_loop import (
    MiniMaxH3DenoiseBranch,
)
from sglang.multimodal_gen.runtime.pipelines_core.stages.model_specific_stages.minimax_h3.packed_sequence import (
    minimax_h3_packed_sequence,
)
from sglang.multimodal_gen.runtime.pipelines_core.stages.model_specific_stages.minimax_h3.stages import denoising
from sglang.multimodal_gen.runtime.platforms import AttentionBackendEnum
from sglang.multimodal_gen.runtime.server_args import get_global_server_args

from dbsp_engines.sglang import _denoise_ltx2
from scripts.checks.engines.reference import attend_under, inputs_of, random, tiny_h3
from scripts.checks.engines.runs import HEAD, LAYERS, STEPS

Grid = tuple[int, int, int]
TEXT, H3_TEXT, H3_AUDIO = 7, 7, 4
CALLS: list[int] = []  # layers whose attention was computed under a mask, by torch's own attention


@dataclass(frozen=True)
class Model:
    """One of SGLang's models.

    outputs: of the model, a size in tokens, its number, the step, the CFG pass and how to choose own frames
    mask: makes a model attend under a mask by torch's own attention, for a size and by its name in a pipeline
    """

    make: Callable[[int], torch.nn.Module]  # of a number of heads, with weights of no meaning
    outputs: Callable[[Any, Grid, int, int, int, Callable[[torch.Tensor], torch.Tensor]], torch.Tensor]
    mask: Callable[[Any, str, Grid, str], None]
    channels: int  # of its latents
    is_image: bool = False  # whether its latents are packed tokens [B, S, C]

    def latents(self, thw: Grid) -> dict[str, Any]:
        """Returns what a request says of the size of its latents, before ranks have their own."""
        t, h, w = thw
        shape = (1, h * w, self.channels) if self.is_image else (1, self.channels, t, 2 * h, 2 * w)
        return {"raw_latent_shape": shape, "height": 16 * h, "width": 16 * w}


def _wan(backend: str | None, heads: int) -> torch.nn.Module:
    get_global_server_args().attention_backend = backend
    config = WanVideoConfig()
    sizes = {"num_attention_heads": heads, "attention_head_dim": HEAD, "hidden_size": heads * HEAD}
    sizes |= {"num_layers": LAYERS, "in_channels": 4, "out_channels": 4, "num_channels_latents": 4}
    config.update_model_arch(sizes | {"text_dim": 16, "freq_dim": 32, "ffn_dim": 48})
    model = WanTransformer3DModel(config, {})
    get_global_server_args().attention_backend = None
    if backend is not None:  # whose kernel CPUs do not have; SGLang calls another one with its arguments
        for block in model.blocks:
            block.attn1.attn_impl.forward = lambda q, k, v, **_: _dense(q, k, v)
    return model


def _dense(*qkv: torch.Tensor) -> torch.Tensor:
    out = torch.nn.functional.scaled_dot_product_attention(*(one.transpose(1, 2) for one in qkv))
    return out.transpose(1, 2)


def _of_wan(model: Any, thw: Grid, number: int, step: int, branch: int, own_frames: Any) -> torch.Tensor:
    latents, text = inputs_of(thw, number, step, branch)
    timestep = torch.tensor([900.0 - 300 * step])
    return model(own_frames(latents), encoder_hidden_states=text, timestep=timestep)


def _attend(mask: str, layer: int, *args: Any, **options: Any) -> torch.Tensor:
    CALLS.append(layer)
    return attend_under(mask, layer, LAYERS, *args, **options)


def _mask_wan(model: Any, mask: str, thw: Grid, name: str) -> None:
    for layer, block in enumerate(model.blocks):
        block.attn1.forward = functools.partial(_attend, mask, layer, thw, transformer=name)


def _mask_wan_vsa(model: Any, mask: str, thw: Grid, _: str) -> None:
    for layer, block in enumerate(model.blocks):
        block.attn1.forward = lambda q, k, v, gate_compress, layer=layer: _attend(
            mask, layer, thw, q, k, v, gate=gate_compress
        )


def _hunyuan(heads: int) -> torch.nn.Module:
    config = HunyuanVideoConfig()
    sizes = {"num_attention_heads": heads, "attention_head_dim": HEAD, "hidden_size": heads * HEAD}
    sizes |= {"num_layers": LAYERS - 1, "num_single_layers": 1, "num_refiner_layers": 1, "in_channels": 4}
    sizes |= {"out_channels": 4, "num_channels_latents": 4, "text_embed_dim": 16, "pooled_projection_dim": 8}
    config.update_model_arch(sizes | {"rope_axes_dim": (HEAD // 3,) * 3, "dtype": torch.float32})
    return HunyuanVideoTransformer3DModel(config, {})


def _of_hunyuan(
    text: int, model: Any, thw: Grid, number: int, step: int, branch: int, own_frames: Any
) -> torch.Tensor:
    latents, _ = inputs_of(thw, number, step, branch)
    prompt = [random(branch, 1, text, 16), random(branch, 1, 8)]
    return model(own_frames(latents), encoder_hidden_states=prompt, timestep=torch.tensor([900.0 - 300 * step]))


def _flux(heads: int) -> torch.nn.Module:
    config = FluxConfig()
    sizes = {"num_attention_heads": heads, "attention_head_dim": HEAD, "num_layers": LAYERS - 1}
    sizes |= {"num_single_layers": 1, "in_channels": 16, "joint_attention_dim": 16, "pooled_projection_dim": 8}
    config.update_model_arch(sizes | {"guidance_embeds": False, "axes_dims_rope": (HEAD // 3,) * 3})
    return FluxTransformer2DModel(config, {})


def _of_flux(model: Any, thw: Grid, number: int, step: int, branch: int, _: Any) -> torch.Tensor:
    tokens = thw[1] * thw[2]
    grid = torch.cartesian_prod(*(torch.arange(float(size)) for size in thw))
    text, image = (model.rotary_emb.forward(ids) for ids in (torch.zeros(TEXT, 3), grid))
    freqs = [torch.cat([one, shard_rotary_emb_for_sp(other)]) for one, other in zip(text, image, strict=True)]
    latents = random(1000 * number + 10 * step, 1, tokens, 16)
    out = model(
        hidden_states=_own_tokens(latents),
        encoder_hidden_states=random(branch, 1, TEXT, 16),
        pooled_projections=random(branch, 1, 8),
        timestep=torch.tensor([900.0 - 300 * step]),
        freqs_cis=tuple(freqs),
    )
    return ImagePipelineConfig().gather_latents_for_sp(out)[:, :tokens]


def _qwen(heads: int) -> torch.nn.Module:
    config = QwenImageDitConfig()
    sizes = {"num_attention_heads": heads, "attention_head_dim": HEAD, "num_layers": LAYERS, "in_channels": 16}
    config.update_model_arch(
        sizes | {"out_channels": 4, "joint_attention_dim": 16, "axes_dims_rope": (HEAD // 3,) * 3}
    )
    return QwenImageTransformer2DModel(config, {})


def _of_qwen(padding: int, model: Any, thw: Grid, number: int, step: int, branch: int, _: Any) -> torch.Tensor:
    tokens, device = thw[1] * thw[2], torch.device("cpu")
    caches, _ = QwenImagePipelineConfig.get_freqs_cis([[thw]], [TEXT], model.rotary_emb, device, torch.float32)
    options: dict[str, Any] = {}
    if padding:
        options = {"encoder_hidden_states_mask": torch.arange(TEXT)[None] < TEXT - padding}
        options["txt_seq_lens"] = [TEXT - padding]
    out = model(
        hidden_states=_own_tokens(random(1000 * number + 10 * step, 1, tokens, 16)),
        encoder_hidden_states=random(branch, 1, TEXT, 16),
        timestep=torch.tensor([900.0 - 300 * step]),
        img_shapes=[[thw]],
        freqs_cis=(shard_rotary_emb_for_sp(caches[0]), caches[1]),
        **options,
    )
    return ImagePipelineConfig().gather_latents_for_sp(out)[:, :tokens]


def _own_tokens(latents: torch.Tensor) -> torch.Tensor:
    return ImagePipelineConfig().shard_latents_for_sp(get_forward_context().forward_batch, latents)[0]


def _mask_joint(model: Any, mask: str, thw: Grid, _: str) -> None:
    """Makes attention over text and video in one sequence attend under a mask, whose text is the tokens that count."""

    def attend(
        layer: int,
        *qkv: torch.Tensor,
        num_replicated_prefix: int = 0,
        num_replicated_suffix: int = 0,
        attn_mask: torch.Tensor | None = None,
        q_prefix: torch.Tensor | None = None,
        k_prefix: torch.Tensor | None = None,
        v_prefix: torch.Tensor | None = None,
        **_: Any,
    ) -> torch.Tensor:
        slots = num_replicated_prefix or num_replicated_suffix
        if q_prefix is not None:
            text, video = (q_prefix, k_prefix, v_prefix), qkv
        elif num_replicated_suffix:
            text, video = [one[:, -slots:] for one in qkv], [one[:, :-slots] for one in qkv]
        else:
            text, video = [one[:, :slots] for one in qkv], [one[:, slots:] for one in qkv]
        used = slots if attn_mask is None else int(attn_mask.sum()) - video[0].shape[1]
        joined = (torch.cat([one[:, :used], other], dim=1) for one, other in zip(text, video, strict=True))
        out = _attend(mask, layer, thw, *joined, text=used)
        parts = [torch.nn.functional.pad(out[:, :used], (0, 0, 0, 0, 0, slots - used)), out[:, used:]]
        return torch.cat(parts[:: -1 if num_replicated_suffix else 1], dim=1)

    blocks = [block for name in model.layer_names for block in model.get_submodule(name)]
    for layer, block in enumerate(blocks):
        block.get_submodule("attn" if hasattr(block.attn, "causal") else "attn.attn").forward = functools.partial(
            attend, layer
        )


def _ltx2(heads: int) -> torch.nn.Module:
    config, width = LTX2Config(), heads * HEAD
    sizes = {"num_attention_heads": heads, "attention_head_dim": HEAD, "hidden_size": width, "num_layers": LAYERS}
    sizes |= {"in_channels": 4, "out_channels": 4, "num_channels_latents": 4, "cross_attention_dim": width}
    sizes |= {"audio_num_attention_heads": heads, "audio_attention_head_dim": HEAD // 2, "audio_in_channels": 4}
    sizes |= {"audio_hidden_size": width // 2, "audio_cross_attention_dim": width // 2, "audio_out_channels": 4}
    config.update_model_arch(sizes | {"caption_channels": 16})
    return LTX2VideoTransformer3DModel(config, {})


@functools.lru_cache(maxsize=4)
def _ltx2_request(number: int, thw: Grid, _: int) -> SimpleNamespace:
    shape = (1, thw[0] * thw[1] * thw[2], 4)
    return SimpleNamespace(height=32 * thw[1], width=32 * thw[2], raw_latent_shape=shape, quality="exact")


def _of_ltx2(model: Any, thw: Grid, number: int, step: int, branch: int, _: Any) -> torch.Tensor:
    """Passes of a step: text, no text, text with the second layer's attention skipped, text without the audio."""
    t, h, w = thw
    request, pipeline = _ltx2_request(number, thw, id(model)), LTX2PipelineConfig()
    latents, sharded = pipeline.shard_latents_for_sp(request, random(1000 * number + 10 * step, 1, t * h * w, 4))
    frames = request.sp_video_latent_num_frames if sharded else t
    real = LTX2DenoisingStage._build_ltx2_sp_padding_mask(
        request,
        seq_len=latents.shape[1],
        batch_size=1,
        key="sp_video_valid_token_count",
        has_padding=sharded and request.sp_video_has_padding,
        device=torch.device("cpu"),
    )
    inputs = {"hidden_states": latents, "audio_hidden_states": random(1000 * number + 10 * step + 1, 1, 6, 4)}
    inputs |= {
        "encoder_hidden_states": random(int(branch == 1), 1, TEXT, 16),
        "timestep": torch.tensor([900.0 - 300 * step]),
    }
    inputs |= {"audio_encoder_hidden_states": random(2 + int(branch == 1), 1, TEXT, 16)}
    inputs |= {"num_frames": frames, "height": h, "width": w, "audio_num_frames": 6, "return_latents": False}
    inputs |= {"video_self_attention_mask": real, "v2a_cross_attention_mask": real}
    inputs |= {"skip_video_self_attn_blocks": (1,)} if branch == 2 else {}
    inputs |= {"disable_a2v_cross_attn": True, "disable_v2a_cross_attn": True} if branch == 3 else {}
    outputs: list[torch.Tensor] = []
    with set_forward_context(step, None):  # LTX-2's denoising gives no request
        ctx = SimpleNamespace(latent_height=h, latent_width=w)
        _denoise_ltx2(lambda *_: outputs.extend(model(**inputs)[:2]), None, ctx, None, request, None)
    video, audio = outputs
    return torch.cat([pipeline.gather_latents_for_sp(video)[:, : t * h * w].flatten(), audio.flatten()])


def _mask_ltx2(model: Any, mask: str, thw: Grid, _: str) -> None:
    for layer, block in enumerate(model.transformer_blocks):
        block.attn1.attn.forward = lambda q, k, v, layer=layer, **_: _attend(mask, layer, thw, q, k, v)


def _h3(has_gate: bool, heads: int) -> torch.nn.Module:
    def make(sizes: dict[str, int]) -> torch.nn.Module:
        config = MiniMaxH3DiTConfig()
        config.update_model_arch(sizes | {"has_gate_compress": has_gate, "qkv_checkpoint_grouped": False})
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
    denoising._maybe_prepare_vsa_h3_step_metadata(  # as for each request
        model=model,
        packed=packed,
        is_ref2va=False,
        latent_shape=(frames, 2 * height, 2 * width),
        server_args=None,
        device=device,
    )
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
        step_timesteps=plan[min(step, STEPS - 1)],
    )
    return torch.cat([one.flatten() for one in model(**inputs)])


def _mask_h3(model: Any, mask: str, thw: Grid, _: str) -> None:
    """Treats all tokens before the video as text of the mask."""
    model._resolve_attention_backend_once()

    def attend(layer: int, *qkv: Any, max_seqlen: int, gate_compress: Any = None, **_: Any) -> torch.Tensor:
        text = max_seqlen - thw[0] * thw[1] * thw[2]
        used = (one[None, :max_seqlen] for one in qkv)
        padding = torch.zeros_like(qkv[0][max_seqlen:])
        options: dict[str, Any] = {}
        if gate_compress is not None:
            runs = tuple(filter(None, (H3_TEXT, text - H3_TEXT - H3_AUDIO, H3_AUDIO)))
            options = {"gate": gate_compress[None, :max_seqlen], "runs": runs}
        return torch.cat([_attend(mask, layer, thw, *used, text=text, **options)[0], padding])

    for layer, block in enumerate(model.blocks):
        block.attn._attention_impl = SimpleNamespace(forward_varlen=functools.partial(attend, layer))
        if block.attn.to_gate_compress is not None:
            block.attn._attention_backend_enum = AttentionBackendEnum.VIDEO_SPARSE_ATTN_H3


MODELS = {
    "wan": Model(functools.partial(_wan, None), _of_wan, _mask_wan, 4),
    "wan_vsa": Model(functools.partial(_wan, "video_sparse_attn"), _of_wan, _mask_wan_vsa, 4),
    "h3": Model(functools.partial(_h3, False), functools.partial(_of_h3, False), _mask_h3, 24),
    "h3_keyframe": Model(functools.partial(_h3, False), functools.partial(_of_h3, True), _mask_h3, 24),
    "h3_vsa": Model(functools.partial(_h3, True), functools.partial(_of_h3, True), _mask_h3, 24),
    "hunyuan": Model(_hunyuan, functools.partial(_of_hunyuan, TEXT), _mask_joint, 4),
    "hunyuan_prompt_of_one": Model(_hunyuan, functools.partial(_of_hunyuan, 1), _mask_joint, 4),
    "flux": Model(_flux, _of_flux, _mask_joint, 16, is_image=True),
    "qwen": Model(_qwen, functools.partial(_of_qwen, 0), _mask_joint, 16, is_image=True),
    "qwen_padded_text": Model(_qwen, functools.partial(_of_qwen, 2), _mask_joint, 16, is_image=True),
    "ltx2": Model(_ltx2, _of_ltx2, _mask_ltx2, 4),
}
