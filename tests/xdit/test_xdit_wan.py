"""Wan in xfuser's own wrappers and pipelines: two transformers, images, guidance, decoding, VSA's gates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image

import dbsp_xdit
from dbsp_cli.tiny_models import make_tiny
from dbsp_diffusers.api import sessions_of
from tests.support.models.tiny_pipelines import SIZE, alone, latents
from tests.support.outcomes import apart, assert_near
from tests.support.references import by_first_rank
from tests.xdit.xdit_cases import family_class

SPARGE = {"source": "sparge", "cdf": 0.5, "similarity": 0.1, "block_q": 16, "block_k": 16}
MASK = {"source": "synthetic", "density": 0.4, "block_q": 16, "block_k": 16}
BY_BRANCH = {"source": "callable", "function": "tests.support.user_masks:band", "depends_on": "step"}
BY_BRANCH |= {"block_q": 8, "block_k": 8}
SWAPPED = BY_BRANCH | {"function": "tests.support.user_masks:band_of_other_branch"}
THW: dict[str, Any] = {"attention_kwargs": {"thw": None}}


@dataclass(frozen=True)
class WanCase:
    """One generation. kind: a tiny model, "wan-i2v" or "wan2.2";  folder: where it is"""

    kind: str
    folder: str
    config: dict[str, Any]

    @property
    def call(self) -> dict[str, Any]:
        # cross-attention finds an image behind 512 tokens of text
        return {"image": make_image(), "max_sequence_length": 512} if self.kind == "wan-i2v" else {}


def make_image() -> Image.Image:
    return Image.fromarray((np.random.RandomState(0).rand(64, 96, 3) * 255).astype("uint8"))


def load(case: WanCase) -> Any:
    """Returns xfuser's own pipeline, with its transformers."""
    from xfuser.model_executor.pipelines.pipeline_wan_i2v import xFuserWanImageToVideoPipeline

    names = ("transformer", "transformer_2") if case.kind == "wan2.2" else ("transformer",)
    parts = {name: family_class("wan").from_pretrained(case.folder, subfolder=name, **THW) for name in names}
    cls = xFuserWanImageToVideoPipeline if case.kind == "wan-i2v" else diffusers.WanPipeline
    return cls.from_pretrained(case.folder, **parts)


@by_first_rank
def made_alone(case: WanCase, mask: dict[str, Any] | None) -> torch.Tensor:
    """Returns one process's latents with a mask, or of dense attention."""
    cls = diffusers.WanImageToVideoPipeline if case.kind == "wan-i2v" else diffusers.WanPipeline
    stock = cls.from_pretrained(case.folder, local_files_only=True)
    return latents(stock, **case.call) if mask is None else alone(stock, {"mask": mask}, **case.call)


def run_pipeline(rank: int, world: int, case: WanCase, other: dict[str, Any] | None = None) -> list[int]:
    """Compares a generation with one process, which must differ under another mask. Returns attentions by session."""
    pipe = load(case)
    dbsp_xdit.attach(pipe, case.config)
    out = latents(pipe, **case.call)
    calls = [session.statistics()["calls"] for session in sessions_of(pipe).values()]
    dbsp_xdit.detach(pipe)
    assert_near(out, made_alone(case, case.config["mask"]))
    assert apart(out, made_alone(case, other)) > 1e-4, "the mask must matter"
    return calls


@pytest.mark.long
def test_two_transformers_equal_one_process(xfuser, tmp_path):
    folder = str(make_tiny("wan2.2", tmp_path / "wan2.2"))
    for calls in xfuser(2).run(run_pipeline, WanCase("wan2.2", folder, {"mask": SPARGE, "strategy": "U1R2"})):
        layers, steps, passes = 4, 2, 2
        assert (len(calls), sum(calls)) == (2, layers * steps * passes)


@pytest.fixture
def image_case(tmp_path):
    folder = str(make_tiny("wan-i2v", tmp_path / "wan-i2v"))
    return lambda mask: WanCase("wan-i2v", folder, {"mask": mask})


@pytest.mark.usefixtures("debug")
def test_cfg_passes_on_groups_of_their_own_keep_their_masks(xfuser, image_case):
    xfuser(2, 2).run(run_pipeline, image_case(BY_BRANCH), SWAPPED)


def run_decoding(rank: int, world: int, case: WanCase) -> tuple[int, int]:
    """Returns the calls of this rank's decoder when it decodes alone, and with other ranks, to the same frames."""
    pipe = load(case)
    pipe.set_progress_bar_config(disable=True)
    pipe.vae.enable_tiling(32, 32, 24, 24)
    tiles: list[None] = []
    hook = pipe.vae.decoder.conv_in.register_forward_hook(lambda *_: tiles.append(None))
    frames, counts = [], []
    for vae in (False, True):
        dbsp_xdit.attach(pipe, case.config | {"vae": vae})
        tiles.clear()
        call = {**SIZE, "num_frames": 5, "num_inference_steps": 1, "generator": torch.Generator().manual_seed(3)}
        frames.append(pipe(image=make_image(), prompt="the sea at dusk", output_type="pt", **call).frames)
        counts.append(len(tiles))
        dbsp_xdit.detach(pipe)
    hook.remove()
    assert torch.equal(*frames)
    return counts[0], counts[1]


def test_ranks_of_both_cfg_passes_decode_a_video_together(xfuser, image_case):
    found = xfuser(2, 2).run(run_decoding, image_case(MASK))
    whole = found[0][0]
    assert sum(together for _, together in found) == whole
    assert max(together for _, together in found) < 0.7 * whole
