"""Tiny checkpoints of HunyuanVideo, HunyuanVideo-1.5 and LTX-2 with random weights, as `dbsp generate` loads them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from diffusers.pipelines.ltx2 import LTX2TextConnectors, LTX2Vocoder
from tokenizers import Tokenizer, models, pre_tokenizers

from tests.support.models.tiny_transformers import make_tiny_transformer

_WIDTH = 16
"""Of text encoders: `text_embed_dim` of Hunyuan's tiny transformers."""
_LAYERS = {"num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 1}
_TEXT = _LAYERS | {"hidden_size": _WIDTH, "intermediate_size": 32, "max_position_embeddings": 2048, "head_dim": 8}


def make_checkpoint(model: str, folder: Path) -> str:
    """Writes a key of CHECKPOINTS to a folder, and returns its path."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        CHECKPOINTS[model]().save_pretrained(folder)
    return str(folder)


def _tokenizer(length: int, template: str | None = None) -> transformers.PreTrainedTokenizerFast:
    """Makes a tokenizer of whole words and punctuation, which knows those of one prompt."""
    words = ("<pad>", "</s>", "<unk>", "a", "red", "ball", "bounces", "over", "blue", "floor")
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=length, **special)
    made.chat_template = template
    return made


def _hunyuan() -> Any:
    llama, clip = _tokenizer(512), _tokenizer(77)
    pooled = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = transformers.LlamaModel(transformers.LlamaConfig(vocab_size=len(llama), **_TEXT))
    ends = {"eos_token_id": 1, "pad_token_id": 0, "bos_token_id": 1}
    text_2 = transformers.CLIPTextModel(transformers.CLIPTextConfig(vocab_size=len(clip), **pooled, **ends))
    vae = diffusers.AutoencoderKLHunyuanVideo(
        latent_channels=4, block_out_channels=(8, 8, 8, 8), layers_per_block=1, norm_num_groups=2
    )
    return diffusers.HunyuanVideoPipeline(
        text_encoder=text,
        tokenizer=llama,
        text_encoder_2=text_2,
        tokenizer_2=clip,
        transformer=make_tiny_transformer("hunyuan", patch_size=2),
        vae=vae,
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=7.0),
    )


def _hunyuan_15() -> Any:
    chat = "a " * 40 + "{% for message in messages %}{{ message['content'] }} {% endfor %}"  # 108 tokens are cut off
    qwen = _tokenizer(2048, chat)
    text = _TEXT | {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}}
    t5 = {"d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    config = transformers.Qwen2_5_VLTextConfig(vocab_size=len(qwen), **text)
    vae = diffusers.AutoencoderKLHunyuanVideo15(
        latent_channels=4, block_out_channels=(8, 8, 8, 8, 8), layers_per_block=1
    )
    return diffusers.HunyuanVideo15Pipeline(
        text_encoder=transformers.Qwen2_5_VLTextModel(config),
        tokenizer=qwen,
        text_encoder_2=transformers.T5EncoderModel(transformers.T5Config(vocab_size=384, **t5)),
        tokenizer_2=transformers.ByT5Tokenizer(),
        transformer=make_tiny_transformer("hunyuan1.5"),
        vae=vae,
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=9.0),
        guider=diffusers.guiders.ClassifierFreeGuidance(guidance_scale=6.0),
    )


def _ltx2() -> Any:
    """Makes LTX-2 with the VAE's usual 32 pixels and 8 frames of a latent, and stereo sound."""
    gemma = _tokenizer(1024)
    text = _TEXT | {"vocab_size": len(gemma), "rope_parameters": None}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.Gemma3Config(
        text_config=transformers.Gemma3TextConfig(**text),
        vision_config=transformers.SiglipVisionConfig(**vision, image_size=28, patch_size=14),
        mm_tokens_per_image=4,
    )
    vae = diffusers.AutoencoderKLLTX2Video(
        latent_channels=8,
        block_out_channels=(8, 16, 32, 64),
        decoder_block_out_channels=(8, 16, 32),
        layers_per_block=(1,) * 5,
        decoder_layers_per_block=(1,) * 4,
        spatial_compression_ratio=32,
        temporal_compression_ratio=8,
    )
    audio_vae = diffusers.AutoencoderKLLTX2Audio(
        base_channels=8, ch_mult=(1, 1, 1), num_res_blocks=1, latent_channels=2, mel_bins=16
    )
    connectors = LTX2TextConnectors(
        caption_channels=_WIDTH,
        text_proj_in_factor=_LAYERS["num_hidden_layers"] + 1,
        video_connector_num_attention_heads=2,
        video_connector_attention_head_dim=8,
        video_connector_num_layers=1,
        audio_connector_num_attention_heads=2,
        audio_connector_attention_head_dim=8,
        audio_connector_num_layers=1,
    )
    sizes = {"in_channels": 8, "out_channels": 8, "perturbed_attn": True}
    transformer = make_tiny_transformer("ltx2", **sizes)
    vocoder = LTX2Vocoder(in_channels=32, hidden_channels=32)
    return diffusers.LTX2Pipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        vae=vae,
        audio_vae=audio_vae,
        text_encoder=transformers.Gemma3ForConditionalGeneration(config),
        tokenizer=gemma,
        connectors=connectors,
        transformer=transformer,
        vocoder=vocoder,
    )


CHECKPOINTS: dict[str, Callable[[], Any]] = {
    "hunyuanvideo": _hunyuan,
    "hunyuanvideo-1.5": _hunyuan_15,
    "ltx-2": _ltx2,
}
