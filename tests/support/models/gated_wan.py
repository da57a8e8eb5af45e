"""A tiny Wan's gates of VSA's coarse branch: put in by hand, or in a checkpoint, of which diffusers drops them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

VSA = {"source": "vsa", "sparsity": 0.5, "tile": [2, 2, 4], "block_q": 16, "block_k": 16}
FASTWAN21 = "blocks.{}.to_gate_compress"
FASTWAN22 = "blocks.{}.attn1.to_gate_compress"
"""What the checkpoints of that name call the layer of a block."""


def gate_weights(transformer: Any, seed: int = 5) -> list[dict[str, torch.Tensor]]:
    """Returns weight and bias of each block's gate, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    width = transformer.blocks[0].attn1.to_q.in_features
    sizes = {"weight": (width, width), "bias": (width,)}
    return [
        {part: torch.randn(size, generator=generator) * width**-0.5 for part, size in sizes.items()}
        for _ in transformer.blocks
    ]


def put_gates(transformer: Any, seed: int = 5) -> Any:
    """Gives each block's self-attention its gate, as a user may."""
    for block, weights in zip(transformer.blocks, gate_weights(transformer, seed), strict=True):
        width = block.attn1.to_q.in_features
        gate = nn.utils.skip_init(nn.Linear, width, width)  # torch's generator is all threads'
        gate.load_state_dict(weights)
        block.attn1.to_gate_compress = gate
    return transformer


def add_to_checkpoint(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Adds tensors to a saved transformer, of one file or, spread over them, of several with an index."""
    index = folder / "diffusion_pytorch_model.safetensors.index.json"
    if not index.exists():
        file = folder / "diffusion_pytorch_model.safetensors"
        save_file(load_file(file) | tensors, file, {"format": "pt"})
        return
    table = json.loads(index.read_text())
    files = sorted(set(table["weight_map"].values()))
    for number, (name, tensor) in enumerate(tensors.items()):
        file = files[number % len(files)]
        save_file(load_file(folder / file) | {name: tensor}, folder / file, {"format": "pt"})
        table["weight_map"][name] = file
    index.write_text(json.dumps(table))


def named_gates(transformer: Any, stem: str = FASTWAN21, seed: int = 5) -> dict[str, torch.Tensor]:
    """Returns the weights of `gate_weights` by their names in a checkpoint."""
    return {
        f"{stem.format(number)}.{part}": value
        for number, weights in enumerate(gate_weights(transformer, seed))
        for part, value in weights.items()
    }


def save_gated(transformer: Any, folder: Path, stem: str = FASTWAN21, seed: int = 5, **options: Any) -> Path:
    """Saves a transformer without gates, and adds those of `gate_weights` to its checkpoint."""
    transformer.save_pretrained(folder, **options)
    add_to_checkpoint(folder, named_gates(transformer, stem, seed))
    return folder
