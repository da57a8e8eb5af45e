"""Random tiny checkpoints of Wan2.1 as its authors lay them out, which is how LightX2V reads them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from dbsp_cli.tiny_models import make_tiny
from scripts.checks.engines.reference import fill
from scripts.checks.engines.runs import HEAD

LATENTS, TEXT, VOCABULARY = 16, 32, 96


def weights(heads: int, layers: int, seed: int, latents: int = 4, text: int = 16) -> dict[str, torch.Tensor]:
    """Makes the weights of a transformer, by the names of its checkpoint. text: size of a token's embedding"""
    dim = heads * HEAD
    shapes: dict[str, tuple[int, ...]] = {"patch_embedding": (dim, latents, 1, 2, 2), "text_embedding.0": (dim, text)}
    shapes |= {"text_embedding.2": (dim, dim), "time_embedding.0": (dim, 32), "time_embedding.2": (dim, dim)}
    shapes |= {"time_projection.1": (6 * dim, dim), "head.head": (4 * latents, dim)}
    for layer in range(layers):
        for name in ("q", "k", "v", "o"):
            shapes |= {f"blocks.{layer}.{kind}_attn.{name}": (dim, dim) for kind in ("self", "cross")}
        shapes |= {f"blocks.{layer}.ffn.0": (48, dim), f"blocks.{layer}.ffn.2": (dim, 48)}
    tensors = {f"{name}.weight": shape for name, shape in shapes.items()}
    tensors |= {f"{name}.bias": (shape[0],) for name, shape in shapes.items()}
    tensors["head.modulation"] = (1, 2, dim)
    for layer in range(layers):
        block = f"blocks.{layer}"
        tensors |= {f"{block}.modulation": (1, 6, dim), f"{block}.norm3.weight": (dim,), f"{block}.norm3.bias": (dim,)}
        for kind in ("self", "cross"):
            tensors |= {f"{block}.{kind}_attn.norm_{one}.weight": (dim,) for one in ("q", "k")}
    generator = torch.Generator().manual_seed(seed)
    return {name: fill(name, shape, generator) for name, shape in sorted(tensors.items())}


def make_checkpoint(folder: Path, heads: int, layers: int) -> None:
    """Writes transformer, text encoder, tokenizer and VAE. In an environment with LightX2V."""
    from lightx2v.models.video_encoders.hf.wan.vae import _video_vae

    folder.mkdir(parents=True)
    sizes = {"dim": heads * HEAD, "num_heads": heads, "num_layers": layers, "ffn_dim": 48, "freq_dim": 32}
    sizes |= {"in_dim": LATENTS, "out_dim": LATENTS, "text_len": 16, "eps": 1e-6, "model_type": "t2v"}
    (folder / "config.json").write_text(json.dumps(sizes), encoding="utf-8")
    transformer = weights(heads, layers, 0, LATENTS, TEXT)
    save_file(transformer, folder / "diffusion_pytorch_model.safetensors")
    diffusers = make_tiny("wan", folder / "diffusers")
    (folder / "google").mkdir()
    (diffusers / "tokenizer").rename(folder / "google/umt5-xxl")
    torch.manual_seed(0)
    encoder = small_text_encoder()(encoder_only=True)
    torch.save(encoder.state_dict(), folder / "models_t5_umt5-xxl-enc-bf16.pth")
    vae = _video_vae(z_dim=LATENTS, pruning_rate=0.75, dummy_model=True)
    torch.save(vae.state_dict(), folder / "Wan2.1_VAE.pth")


def small_text_encoder() -> Callable[..., Any]:
    """Replaces LightX2V's function that builds its text encoder, which it fixes at 5.7e9 parameters in bf16."""
    from lightx2v.models.input_encoders.hf.wan.t5.model import umt5_xxl

    sizes = {"dim": TEXT, "dim_attn": TEXT, "dim_ffn": 64, "num_heads": 4, "encoder_layers": 2}

    def build(**options: Any) -> torch.nn.Module:
        return umt5_xxl(**options | sizes | {"vocab_size": VOCABULARY, "dtype": torch.float32})

    return build
