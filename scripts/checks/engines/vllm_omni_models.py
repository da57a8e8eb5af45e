"""vLLM-Omni's own models, tiny: how each is made and called, and where its tokens are in one process."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn
from vllm_omni.diffusion.data import OmniDiffusionConfig, TransformerConfig

from dbsp_core.config import DbspConfig
from scripts.checks.engines.reference import TorchInFloat32, attend_under, inputs_of, random, tiny_h3
from scripts.checks.engines.runs import HEAD, LAYERS, Case

TEXT = 7  # tokens of the first text; the last two are padding, where a model has that
Grid = tuple[int, int, int]


@dataclass(frozen=True)
class Model:
    """Construction and call of one class.

    inputs: arguments of a forward pass: (thw, number of the size, step, CFG pass)
    tokens: int64, positions in the sequence of one process of text, then video; what is left out is padding; and
        how many are text
    attend: self-attention of one process under a mask, where it is the engine's own and not `attend_under`
    """

    make: Callable[[OmniDiffusionConfig, int], nn.Module]  # with so many heads
    inputs: Callable[[Grid, int, int, int], dict[str, Any]]
    attentions: Callable[[Any], list[Any]]  # self-attentions in the order of their layers
    tokens: Callable[[Grid], tuple[torch.Tensor, int]]
    says_step: bool = False  # true if its pipeline gives the step
    attend: Callable[..., torch.Tensor] | None = None

    def mask_attention(self, model: nn.Module, case: Case, thw: Grid, name: str = "transformer") -> Callable[[], int]:
        """Replaces self-attention by torch's own under the case's mask; returns what takes that back, and counts."""
        positions, text = self.tokens(thw)
        impls = [one.attention for one in self.attentions(model)]
        stock, calls = [impl.forward for impl in impls], []
        for layer, impl in enumerate(impls):

            def attend(q: Any, k: Any, v: Any, metadata: Any = None, layer: int = layer) -> torch.Tensor:
                calls.append(layer)
                if self.attend is not None:
                    return self.attend(case.mask, q, k, v, metadata)
                real = (one[:, positions] for one in (q, k, v))
                out = torch.zeros_like(q)
                mask = case.mask or ""
                out[:, positions] = attend_under(mask, layer, LAYERS, thw, *real, text=text, transformer=name)
                return out

            impl.forward = attend

        def undo() -> int:
            for impl, forward in zip(impls, stock, strict=True):
                impl.forward = forward
            return len(calls)

        return undo


def _wan(config: OmniDiffusionConfig, heads: int) -> nn.Module:
    from vllm_omni.diffusion.models.wan2_2.wan2_2_transformer import WanTransformer3DModel

    sizes = {"in_channels": 4, "out_channels": 4, "text_dim": 16, "freq_dim": 32, "ffn_dim": 48}
    return WanTransformer3DModel(num_attention_heads=heads, attention_head_dim=HEAD, num_layers=LAYERS, **sizes)


def _of_wan(thw: Grid, number: int, step: int, branch: int) -> dict[str, Any]:
    latents, text = inputs_of(thw, number, step, branch)
    return {"hidden_states": latents, "timestep": _timestep(step), "encoder_hidden_states": text, "return_dict": False}


def _timestep(step: int) -> torch.Tensor:
    return torch.tensor([900.0 - 300 * step])


def _tokens(thw: Grid, number: int, step: int, branch: int) -> dict[str, torch.Tensor]:
    latents = random(1000 * number + 10 * step, 1, math.prod(thw), 8)
    return {"hidden_states": latents, "encoder_hidden_states": random(branch, 1, TEXT, 16)}


def _flux2(config: OmniDiffusionConfig, heads: int) -> nn.Module:
    from vllm_omni.diffusion.models.flux2.flux2_transformer import Flux2Transformer2DModel

    sizes = {"in_channels": 8, "joint_attention_dim": 16, "timestep_guidance_channels": 32, "mlp_ratio": 2.0}
    depth = {"num_layers": 1, "num_single_layers": LAYERS - 1}
    attention = {"num_attention_heads": heads, "attention_head_dim": HEAD, "axes_dims_rope": (6, 6, 6, 6)}
    return Flux2Transformer2DModel(od_config=config, **sizes, **depth, **attention)


def _of_flux2(thw: Grid, number: int, step: int, branch: int) -> dict[str, Any]:
    return _tokens(thw, number, step, branch) | {
        "timestep": _timestep(step) / 1000,
        "img_ids": torch.cartesian_prod(*map(torch.arange, (*thw, 1))),
        "txt_ids": torch.cartesian_prod(*map(torch.arange, (1, 1, 1, TEXT))),
        "guidance": torch.tensor([3.5]),
        "return_dict": False,
    }


def _qwen(config: OmniDiffusionConfig, heads: int) -> nn.Module:
    from vllm_omni.diffusion.models.qwen_image.qwen_image_transformer import QwenImageTransformer2DModel

    sizes = {"in_channels": 8, "out_channels": 2, "joint_attention_dim": 16, "axes_dims_rope": (8, 8, 8)}
    return QwenImageTransformer2DModel(
        config, num_layers=LAYERS, num_attention_heads=heads, attention_head_dim=HEAD, **sizes
    )


def _of_qwen(thw: Grid, number: int, step: int, branch: int) -> dict[str, Any]:
    return _tokens(thw, number, step, branch) | {
        "encoder_hidden_states_mask": torch.arange(TEXT)[None] < TEXT - 2,
        "timestep": _timestep(step) / 1000,
        "img_shapes": [[thw]],
        "txt_seq_lens": [TEXT],
    }


def _hunyuan(config: OmniDiffusionConfig, heads: int) -> nn.Module:
    from vllm_omni.diffusion.models.hunyuan_video.hunyuan_video_15_transformer import HunyuanVideo15Transformer3DModel

    sizes = {"in_channels": 4, "out_channels": 4, "text_embed_dim": 16, "text_embed_2_dim": 12, "image_embed_dim": 10}
    depth = {"num_layers": LAYERS, "num_refiner_layers": 1, "mlp_ratio": 2.0}
    attention = {"num_attention_heads": heads, "attention_head_dim": HEAD, "rope_axes_dim": (8, 8, 8)}
    return HunyuanVideo15Transformer3DModel(config, **sizes, **depth, **attention)


def _of_hunyuan(thw: Grid, number: int, step: int, branch: int) -> dict[str, Any]:
    """Makes two texts with padding, and an image's embedding that says that there is none."""
    return {
        "hidden_states": random(1000 * number + 10 * step, 1, 4, *thw),
        "timestep": _timestep(step),
        "encoder_hidden_states": random(branch, 1, TEXT, 16),
        "encoder_attention_mask": torch.arange(TEXT)[None] < TEXT - 2,
        "encoder_hidden_states_2": random(100 + branch, 1, 5, 12),
        "encoder_attention_mask_2": torch.arange(5)[None] < 3,
        "image_embeds": torch.zeros(1, 3, 10),
        "return_dict": False,
    }


def _z_image(config: OmniDiffusionConfig, heads: int) -> nn.Module:
    from vllm_omni.diffusion.models.z_image.z_image_transformer import ZImageTransformer2DModel

    sizes = {"in_channels": 4, "cap_feat_dim": 16, "axes_dims": [8, 8, 8], "axes_lens": [256, 64, 64]}
    depth = {"n_layers": LAYERS, "n_refiner_layers": 1}
    return ZImageTransformer2DModel(dim=heads * HEAD, n_heads=heads, n_kv_heads=heads, **sizes, **depth)


def _of_z_image(thw: Grid, number: int, step: int, branch: int) -> dict[str, Any]:
    image = random(1000 * number + 10 * step, 4, thw[0], 2 * thw[1], 2 * thw[2])
    return {"x": [image], "t": 1 - _timestep(step) / 1000, "cap_feats": [random(branch, TEXT, 16)]}


def _longcat_image(config: OmniDiffusionConfig, heads: int) -> nn.Module:
    from vllm_omni.diffusion.models.longcat_image.longcat_image_transformer import LongCatImageTransformer2DModel

    sizes = {"patch_size": 1, "in_channels": 8, "joint_attention_dim": 16, "pooled_projection_dim": 16}
    depth = {"num_layers": 1, "num_single_layers": LAYERS - 1}
    attention = {"num_attention_heads": heads, "attention_head_dim": HEAD, "axes_dims_rope": [8, 8, 8]}
    config.tf_model_config = TransformerConfig.from_dict(sizes | depth | attention)
    return LongCatImageTransformer2DModel(config)


def _of_longcat_image(thw: Grid, number: int, step: int, branch: int) -> dict[str, Any]:
    _, h, w = thw
    return _tokens(thw, number, step, branch) | {
        "timestep": _timestep(step) / 1000,
        "img_ids": torch.cartesian_prod(torch.arange(1, 2), torch.arange(h), torch.arange(w)),
        "txt_ids": torch.stack([torch.zeros(TEXT), torch.arange(TEXT), torch.arange(TEXT)], dim=1),
        "return_dict": False,
    }


LTX2_AUDIO = 9
LTX2_AUDIO_HEADS = 4  # their number divides by the ranks: vLLM-Omni cuts them where audio attends to the video


def _ltx2(config: OmniDiffusionConfig, heads: int) -> nn.Module:
    from vllm_omni.diffusion.models.ltx2.ltx2_transformer import LTX2VideoTransformer3DModel

    sizes = {"in_channels": 8, "out_channels": 8, "audio_in_channels": 6, "audio_out_channels": 6}
    sizes |= {"caption_channels": 16, "cross_attention_dim": heads * HEAD, "num_layers": LAYERS}
    sizes |= {"num_attention_heads": heads, "attention_head_dim": HEAD}
    sizes |= {"audio_num_attention_heads": LTX2_AUDIO_HEADS, "audio_attention_head_dim": 12}
    return LTX2VideoTransformer3DModel(**sizes, audio_cross_attention_dim=12 * LTX2_AUDIO_HEADS)


def _of_ltx2(thw: Grid, number: int, step: int, branch: int) -> dict[str, Any]:
    tokens, seed = math.prod(thw), 1000 * number + 10 * step
    return {
        "hidden_states": random(seed, 1, tokens, 8),
        "audio_hidden_states": random(seed + 1, 1, LTX2_AUDIO, 6),
        "encoder_hidden_states": random(branch, 1, TEXT, 16),
        "audio_encoder_hidden_states": random(100 + branch, 1, TEXT, 16),
        "timestep": _timestep(step).expand(1, tokens),
        "audio_timestep": _timestep(step)[None],
        "audio_num_frames": LTX2_AUDIO,
        "return_dict": False,
    } | dict(zip(("num_frames", "height", "width"), thw, strict=True))


H3_TEXT, H3_AUDIO = 7, 8
H3_REFERENCES = (
    {"kind": "image", "latent_h": 4, "latent_w": 6},
    {"kind": "video", "ref_audio_t": 2, "latent_t": 2, "latent_h": 4, "latent_w": 4},
)
H3_REFERENCE_TOKENS = 2 * 3 + 2 * 2 + 2 * 2 * 2


def _h3(config: OmniDiffusionConfig, heads: int) -> nn.Module:
    from vllm_omni.diffusion.models.minimax_h3 import minimax_h3_transformer as module

    def make(sizes: dict[str, int]) -> nn.Module:
        config.tf_model_config = TransformerConfig.from_dict(sizes)
        return module.MiniMaxH3DiTModel(config)

    return tiny_h3(module, heads, make)


def _of_h3(references: bool) -> Callable[[Grid, int, int, int], dict[str, Any]]:
    """Arguments as H3's own denoising makes them; text, audio and perhaps references before the video."""

    def inputs(thw: Grid, number: int, step: int, branch: int) -> dict[str, Any]:
        from vllm_omni.diffusion.models.minimax_h3.denoise_loop import MiniMaxH3DenoiseBranch
        from vllm_omni.diffusion.models.minimax_h3.packed_sequence import (
            minimax_h3_packed_sequence,
            minimax_h3_packed_sequence_ref2va_blocks,
        )

        sizes = {"text_len": H3_TEXT, "latent_t": thw[0], "latent_h": 2 * thw[1], "latent_w": 2 * thw[2]}
        sizes["audio_t"] = H3_AUDIO // 2
        if references:
            packed = minimax_h3_packed_sequence_ref2va_blocks(ref_blocks=H3_REFERENCES, **sizes)
        else:
            packed = minimax_h3_packed_sequence(include_keyframe_cond=False, **sizes)
        text, tags, device = random(branch, H3_TEXT, 16), packed["token_tags"], torch.device("cpu")
        run = MiniMaxH3DenoiseBranch(packed=packed, text_embeddings=text, token_tags=tags, device=device)
        return run.forward_kwargs(
            video_rows=random(1000 * number + 10 * step, len(run.img_pos), 96),
            audio_rows=random(1000 * number + 10 * step + 1, len(run.audio_pos), 32),
            t_video=0.9 - 0.3 * step,
            t_audio=0.8 - 0.3 * step,
            imgvid_cond_timestep=0.0,
            audio_ref_cond_timestep=0.0,
        )

    return inputs


def _h3_vsa(config: OmniDiffusionConfig, heads: int) -> nn.Module:
    """Makes H3 with the gates that FastH3's sparse students have."""
    model = _h3(config, heads)
    model.enable_vsa_gates()
    return model


def _attend_as_fasth3(mask: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, metadata: Any) -> torch.Tensor:
    """Computes vLLM-Omni's own attention of FastH3, with its tiles, choice of blocks, coarse branch and gate, in
    float32, and with the one kernel that needs a GPU written out."""
    from vllm_omni.diffusion.models.minimax_h3.attention import fastvideo_h3

    kept = 1 - DbspConfig.load(mask).mask.sparsity
    tiles = math.prod(-(-side // 4) for side in metadata.video_layout.video_spans[-1].latent_grid)
    own = fastvideo_h3.MiniMaxH3VSAImpl(
        q.shape[2], HEAD, HEAD**-0.5, backend_kwargs={"topk": math.ceil(kept * tiles), "fallback_on_error": False}
    )
    used, out = metadata.extra["valid_kv_length"], torch.zeros_like(q)
    with (
        mock.patch.object(fastvideo_h3, "fastvideo_block_sparse_attn_bshd", _attend_to_tiles),
        mock.patch.object(fastvideo_h3, "torch", TorchInFloat32()),
    ):
        out[:, :used] = own._forward_h3(q[:, :used], k[:, :used], v[:, :used], metadata)
    return out


def _attend_to_tiles(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, chosen: torch.Tensor, lengths: torch.Tensor, tiles: int
) -> torch.Tensor:
    """Computes attention [B, 64 · n, H, D] to the chosen tiles, bool[B, H, n, n], without what fills them up."""
    real = (torch.arange(64) < lengths[:, None]).flatten()
    allowed = chosen.repeat_interleave(64, dim=2).repeat_interleave(64, dim=3) & real
    q, k, v = (one.transpose(1, 2) for one in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=allowed).nan_to_num().transpose(1, 2)


def _of_h3_blocks(model: Any) -> list[Any]:
    return [block.attn.attention for block in model.blocks]


def _text_first(text: int, positions: int) -> Callable[[Grid], tuple[torch.Tensor, int]]:
    return lambda thw: (torch.cat([torch.arange(text), positions + torch.arange(math.prod(thw))]), text)


def _text_last(text: int) -> Callable[[Grid], tuple[torch.Tensor, int]]:
    return lambda thw: (torch.cat([math.prod(thw) + torch.arange(text), torch.arange(math.prod(thw))]), text)


def _in_order(others: int) -> Callable[[Grid], tuple[torch.Tensor, int]]:
    return _text_first(others, others)


def _of_blocks(model: Any) -> list[Any]:
    return [block.attn.attn for block in model.transformer_blocks]


def _of_flux2_blocks(model: Any) -> list[Any]:
    return [block.attn.attn for block in (*model.transformer_blocks, *model.single_transformer_blocks)]


MODELS = {
    "wan": Model(_wan, _of_wan, lambda model: [block.attn1.attn for block in model.blocks], _text_last(0), True),
    "flux2": Model(_flux2, _of_flux2, _of_flux2_blocks, _text_first(TEXT, TEXT)),
    "longcat_image": Model(_longcat_image, _of_longcat_image, _of_flux2_blocks, _text_first(TEXT, TEXT)),
    "z_image": Model(
        _z_image,
        _of_z_image,
        lambda model: [layer.attention.attn for layer in model.layers],
        # image and caption are each filled up to a multiple of 32, which is attended to
        lambda thw: _text_last(-math.prod(thw) % 32 + 32)(thw),
    ),
    "qwen_image": Model(_qwen, _of_qwen, _of_blocks, _text_first(TEXT - 2, TEXT)),
    "h3": Model(_h3, _of_h3(False), _of_h3_blocks, _in_order(H3_TEXT + H3_AUDIO), True),
    "h3_references": Model(
        _h3, _of_h3(True), _of_h3_blocks, _in_order(H3_TEXT + H3_AUDIO + H3_REFERENCE_TOKENS), True
    ),
    "h3_vsa": Model(_h3_vsa, _of_h3(False), _of_h3_blocks, _in_order(0), True, _attend_as_fasth3),
    "h3_vsa_references": Model(_h3_vsa, _of_h3(True), _of_h3_blocks, _in_order(0), True, _attend_as_fasth3),
    "ltx2": Model(
        _ltx2, _of_ltx2, lambda model: [block.attn1.attn for block in model.transformer_blocks], _text_last(0)
    ),
    "hunyuan_video_15": Model(_hunyuan, _of_hunyuan, _of_blocks, _text_last(TEXT - 2 + 3)),
}
