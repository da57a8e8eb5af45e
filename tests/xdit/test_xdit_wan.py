"""Wan's whole family in xfuser's own wrappers and pipelines: two transformers, images, VACE; guidance; VSA's gates."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import diffusers
import pytest
import torch

import dbsp_xdit
from dbsp_cli.tiny_models import make_tiny
from dbsp_diffusers.api import sessions_of
from tests.diffusers.models.wan22_cases import SIZE, alone, latents, make_image
from tests.support import outcomes
from tests.support.models.gated_wan import VSA, put_gates, save_gated
from tests.support.models.tiny_pipelines import fingerprint
from tests.support.models.tiny_transformers import make_tiny_transformer, tiny_inputs
from tests.support.outcomes import apart, assert_near, outputs
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
    """One generation. kind: a tiny model;  folder: where it is;  image: whether it is made from one"""

    kind: str
    folder: str
    config: dict[str, Any] = field(default_factory=dict)
    image: bool = False

    @property
    def call(self) -> dict[str, Any]:
        options: dict[str, Any] = {"num_inference_steps": 2} | ({"image": make_image()} if self.image else {})
        if self.kind == "wan-vace":
            options |= {"video": [make_image(seed) for seed in range(SIZE["num_frames"])]}
        if self.kind != "wan-i2v":  # whose cross-attention finds the image behind 512 tokens of text
            options["max_sequence_length"] = 16
        return options


def load(case: WanCase) -> Any:
    """Returns xfuser's own pipeline, with its transformers."""
    from xfuser.model_executor.pipelines.pipeline_wan_i2v import xFuserWanImageToVideoPipeline

    vace = case.kind == "wan-vace"
    wrapper, options = (family_class("vace"), {}) if vace else (family_class("wan"), THW)
    names = ("transformer", "transformer_2") if case.kind == "wan2.2" else ("transformer",)
    parts = {name: wrapper.from_pretrained(case.folder, subfolder=name, **options) for name in names}
    stock = diffusers.WanVACEPipeline if vace else diffusers.WanPipeline
    return (xFuserWanImageToVideoPipeline if case.image else stock).from_pretrained(case.folder, **parts)


@by_first_rank
def made_alone(case: WanCase, mask: dict[str, Any] | None) -> torch.Tensor:
    """Returns one process's latents with a mask, or of dense attention."""
    cls = {"wan-vace": "WanVACEPipeline"}.get(case.kind, "WanImageToVideoPipeline" if case.image else "WanPipeline")
    stock = getattr(diffusers, cls).from_pretrained(case.folder, local_files_only=True)
    return latents(stock, case.call) if mask is None else alone(stock, {"mask": mask}, case.call)


def run_pipeline(rank: int, world: int, case: WanCase, other: dict[str, Any] | None = None) -> list[int]:
    """Compares a generation with one process, which must differ under another mask. Returns attentions by session."""
    pipe = load(case)
    dbsp_xdit.attach(pipe, case.config)
    out = latents(pipe, case.call)
    calls = [session.statistics()["calls"] for session in sessions_of(pipe).values()]
    dbsp_xdit.detach(pipe)
    assert_near(out, made_alone(case, case.config["mask"]))
    assert apart(out, made_alone(case, other)) > 1e-4, "the mask must matter"
    return calls


@pytest.mark.parametrize(
    ("kind", "mask", "image"),
    [
        ("wan2.2", SPARGE, False),
        pytest.param("wan-ti2v", SPARGE, True, marks=pytest.mark.long),
        pytest.param("wan-vace", MASK, False, marks=pytest.mark.long),
    ],
)
def test_pipeline_equals_one_process(xfuser, tmp_path, kind, mask, image):
    folder = str(make_tiny(kind, tmp_path / kind))
    layers, steps, passes = (6 if kind == "wan-vace" else 4), 2, 2
    for calls in xfuser(2).run(run_pipeline, WanCase(kind, folder, {"mask": mask, "strategy": "U1R2"}, image)):
        assert sum(calls) == layers * steps * passes
        assert len(calls) == (2 if kind == "wan2.2" else 1)


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.long)])
@pytest.mark.usefixtures("debug")
def test_cfg_passes_on_groups_of_their_own_keep_their_masks(xfuser, tmp_path, world):
    folder = str(make_tiny("wan-i2v", tmp_path / "wan-i2v"))
    case = WanCase("wan-i2v", folder, {"mask": BY_BRANCH, "strategy": f"U1R{world // 2}"}, image=True)
    xfuser(world, 2).run(run_pipeline, case, SWAPPED)


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


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.long)])
def test_ranks_of_both_cfg_passes_decode_a_video_together(xfuser, tmp_path, world):
    folder = str(make_tiny("wan-i2v", tmp_path / "wan-i2v"))
    case = WanCase("wan-i2v", folder, {"mask": MASK, "strategy": f"U1R{world // 2}"}, image=True)
    found = xfuser(world, 2).run(run_decoding, case)
    whole = found[0][0]
    assert sum(together for _, together in found) == whole
    assert max(together for _, together in found) < 0.7 * whole


def run_gated(rank: int, world: int, folder: str, config: dict[str, Any]) -> None:
    """Compares a wrapper whose gates are in its checkpoint with one process whose gates were put in by hand."""
    stock, wrapped = put_gates(make_tiny_transformer("wan")), family_class("wan").from_pretrained(folder, **THW)
    before, pipe = fingerprint(wrapped), SimpleNamespace(transformer=wrapped)
    dbsp_xdit.attach(pipe, {"mask": VSA} | config)
    for batch in (1, 2):
        inputs = tiny_inputs("wan", batch=batch)
        gated, plain = (outcomes.alone(stock, inputs, {"mask": VSA | {"coarse": coarse}}) for coarse in (True, False))
        with torch.no_grad():
            assert_near(outputs(wrapped, inputs), gated, plain)
    dbsp_xdit.detach(pipe)
    assert fingerprint(wrapped) == before, "detach left something behind"


@pytest.mark.usefixtures("debug")
def test_gates_of_a_coarse_branch_equal_one_process(xfuser, tmp_path):
    save_gated(make_tiny_transformer("wan"), tmp_path)
    xfuser(2).run(run_gated, str(tmp_path), {"strategy": "U1R2"})
