"""What the workers run: xfuser's own pipelines of Wan's family with db-SP attached, against one process."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from tests.diffusers.models.wan22_cases import SIZE, _image, alone, latents
from tests.support.models.tiny_pipelines import difference
from tests.support.references import kept_from_rank_0


@dataclass(frozen=True)
class WanCase:
    """One generation. kind: a tiny model;  folder: where it is;  image: whether it is made from one"""

    kind: str
    folder: str
    config: dict[str, Any] = field(default_factory=dict)
    image: bool = False


def run_wan_pipeline(rank: int, world: int, case: WanCase) -> tuple[float, float, list[int]]:
    """(difference of the latents from one process, from dense attention, attentions of each session)."""
    import diffusers

    import dbsp_xdit
    from dbsp_diffusers.api import sessions_of
    from dbsp_xdit.models import find_model
    from dbsp_xdit.runner_models import _pipeline, _transformers

    model = find_model(case.folder)
    task = "i2v" if case.image else "t2v"
    pipe = _pipeline(model, task).from_pretrained(case.folder, **_transformers(model, torch.float32))
    stock_class = getattr(diffusers, type(pipe).__name__.removeprefix("xFuser"))
    options: dict[str, Any] = {"image": _image()} if case.image else {}
    if case.kind == "wan-vace":
        options = {"video": [_image(seed) for seed in range(SIZE["num_frames"])]}
    if case.kind != "wan-i2v":  # whose cross-attention finds the image behind 512 tokens of text
        options["max_sequence_length"] = 16

    def reference() -> tuple[torch.Tensor, torch.Tensor]:
        stock = stock_class.from_pretrained(case.folder, local_files_only=True)
        return latents(stock, options), alone(stock, case.config, options)

    dense, expected = kept_from_rank_0((case.kind, case.image, case.config), reference)
    dbsp_xdit.attach(pipe, case.config)
    out = latents(pipe, options)
    calls = [session.statistics()["calls"] for session in sessions_of(pipe).values()]
    dbsp_xdit.detach(pipe)
    return difference(out, expected), difference(out, dense), calls


def run_wan_decoding(rank: int, world: int, case: WanCase) -> tuple[bool, int, int]:
    """(whether frames equal those of its own tiled decode, calls of its decoder alone, and with other ranks)."""
    import dbsp_xdit
    from dbsp_xdit.models import find_model
    from dbsp_xdit.runner_models import _pipeline, _transformers

    model = find_model(case.folder)
    pipe = _pipeline(model, "i2v").from_pretrained(case.folder, **_transformers(model, torch.float32))
    pipe.set_progress_bar_config(disable=True)
    pipe.vae.enable_tiling(32, 32, 24, 24)
    tiles = []
    hook = pipe.vae.decoder.conv_in.register_forward_hook(lambda *_: tiles.append(None))
    frames, counts = [], []
    for vae in (False, True):
        dbsp_xdit.attach(pipe, case.config | {"vae": vae})
        tiles.clear()
        call = {**SIZE, "num_inference_steps": 1, "generator": torch.Generator().manual_seed(3), "output_type": "pt"}
        frames.append(pipe(image=_image(), prompt="the sea at dusk", **call).frames)
        counts.append(len(tiles))
        dbsp_xdit.detach(pipe)
    hook.remove()
    return torch.equal(*frames), counts[0], counts[1]
