"""Tiny diffusers transformers with weights large enough that attention matters, and inputs for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

HEADS = 6
WIDTH = 24


def make_transformer(model: str, seed: int = 0, **options: Any) -> Any:
    """`model` is "wan", "cogvideox" (1.5) or "cogvideox1.0". The same weights for the same seed, on every rank."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        if model == "wan":
            return _wan(**options).eval()
        return _cogvideox(patch_size_t=None if model == "cogvideox1.0" else 2, **options).eval()


def _wan(cls: type | None = None, num_layers: int = 2, **options: Any) -> Any:
    from diffusers import WanTransformer3DModel

    return (cls or WanTransformer3DModel)(
        num_attention_heads=HEADS,
        attention_head_dim=WIDTH,
        in_channels=4,
        out_channels=4,
        text_dim=16,
        freq_dim=32,
        ffn_dim=64,
        num_layers=num_layers,
        rope_max_seq_len=64,
        **options,
    )


def _cogvideox(patch_size_t: int | None, num_layers: int = 2, **options: Any) -> Any:
    from diffusers import CogVideoXTransformer3DModel

    return CogVideoXTransformer3DModel(
        num_attention_heads=HEADS,
        attention_head_dim=WIDTH,
        in_channels=4,
        out_channels=4,
        time_embed_dim=16,
        text_embed_dim=16,
        num_layers=num_layers,
        sample_width=16,
        sample_height=16,
        sample_frames=9,
        patch_size=2,
        patch_size_t=patch_size_t,
        patch_bias=patch_size_t is None,
        max_text_seq_length=32,
        use_rotary_positional_embeddings=True,
        **options,
    )


@dataclass(frozen=True)
class Inputs:
    """The arguments of one forward pass."""

    arguments: dict[str, Any]

    @classmethod
    def random(cls, model: str, thw: tuple[int, int, int], batch: int, text_tokens: int, seed: int = 1) -> Inputs:
        generator = torch.Generator().manual_seed(seed)
        frames, height, width = thw
        text = torch.randn(batch, text_tokens, 16, generator=generator)
        arguments: dict[str, Any] = {"encoder_hidden_states": text, "return_dict": False}
        if model == "wan":
            arguments["hidden_states"] = torch.randn(batch, 4, frames, height * 2, width * 2, generator=generator)
            arguments["timestep"] = torch.full((batch,), 500)
        else:
            frames_in = frames * (1 if model == "cogvideox1.0" else 2)
            arguments["hidden_states"] = torch.randn(batch, frames_in, 4, height * 2, width * 2, generator=generator)
            arguments["timestep"] = torch.full((batch,), 500)
            angles = torch.rand(frames * height * width, WIDTH // 2, generator=generator).repeat_interleave(2, dim=1)
            arguments["image_rotary_emb"] = (angles.cos(), angles.sin())
        return cls(arguments)


@dataclass
class GraphCounter:
    """A backend of torch.compile that runs graphs as they are, and counts them.

    compiled, runs: graphs compiled, and run
    """

    compiled: int = 0
    runs: int = 0

    def __call__(self, graph: torch.fx.GraphModule, example_inputs: list[torch.Tensor]) -> Any:
        self.compiled += 1

        def run(*args: torch.Tensor) -> Any:
            self.runs += 1
            return graph.forward(*args)

        return run
