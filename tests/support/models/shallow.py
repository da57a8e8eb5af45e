"""Tiny pipelines of two layers: what is computed identically in each layer needs no more of them."""

from __future__ import annotations

from pathlib import Path

from dbsp_cli.tiny_models import make_tiny


def make_shallow(model: str, folder: Path) -> str:
    """Writes a tiny pipeline with the first two layers of its transformer, and returns the folder."""
    made = make_tiny(model, folder)
    if model == "wan":
        from diffusers import WanTransformer3DModel

        transformer = WanTransformer3DModel.from_pretrained(made, subfolder="transformer", num_layers=2)
        transformer.save_pretrained(made / "transformer")
    return str(made)
