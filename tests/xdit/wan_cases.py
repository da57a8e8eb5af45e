"""What the workers run: xfuser's own pipelines of Wan's family with db-SP attached, against one process."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from tests.diffusers.models.wan22_cases import SIZE, _image, alone, latents
from tests.support.models.gated_wan import VSA, put_gates
from tests.support.models.tiny_pipelines import difference, fingerprint
from tests.support.models.tiny_transformers import make_tiny_transformer, tiny_inputs
from tests.support.references import kept_from_rank_0
from tests.support.single_process import attach_single_process

SHORT = {"num_frames": 5, "num_inference_steps": 1}
THW: dict[str, Any] = {"attention_kwargs": {"thw": None}}


@dataclass(frozen=True)
class WanCase:
    """One generation. kind: a tiny model;  folder: where it is;  image: whether it is made from one"""

    kind: str
    folder: str
    config: dict[str, Any] = field(default_factory=dict)
    image: bool = False


def _load(case: WanCase) -> Any:
    """xfuser's own pipeline, with its transformers."""
    import diffusers
    from xfuser.model_executor.models.transformers.transformer_wan import xFuserWanTransformer3DWrapper
    from xfuser.model_executor.models.transformers.transformer_wan_vace import xFuserWanVACETransformer3DWrapper
    from xfuser.model_executor.pipelines.pipeline_wan_i2v import xFuserWanImageToVideoPipeline

    vace = case.kind == "wan-vace"
    wrapper, options = (xFuserWanVACETransformer3DWrapper, {}) if vace else (xFuserWanTransformer3DWrapper, THW)
    names = ("transformer", "transformer_2") if case.kind == "wan2.2" else ("transformer",)
    parts = {name: wrapper.from_pretrained(case.folder, subfolder=name, **options) for name in names}
    stock = diffusers.WanVACEPipeline if vace else diffusers.WanPipeline
    return (xFuserWanImageToVideoPipeline if case.image else stock).from_pretrained(case.folder, **parts)


def run_wan_pipeline(rank: int, world: int, case: WanCase) -> tuple[float, float, list[int]]:
    """(difference of the latents from one process, from dense attention, attentions of each session)."""
    import diffusers

    import dbsp_xdit
    from dbsp_diffusers.api import sessions_of

    pipe = _load(case)
    stock_class = getattr(diffusers, type(pipe).__name__.removeprefix("xFuser"))
    options: dict[str, Any] = {"num_inference_steps": 2} | ({"image": _image()} if case.image else {})
    if case.kind == "wan-vace":
        options |= {"video": [_image(seed) for seed in range(SIZE["num_frames"])]}
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

    pipe = _load(case)
    pipe.set_progress_bar_config(disable=True)
    pipe.vae.enable_tiling(32, 32, 24, 24)
    tiles = []
    hook = pipe.vae.decoder.conv_in.register_forward_hook(lambda *_: tiles.append(None))
    frames, counts = [], []
    for vae in (False, True):
        dbsp_xdit.attach(pipe, case.config | {"vae": vae})
        tiles.clear()
        call = {**SIZE, **SHORT, "generator": torch.Generator().manual_seed(3), "output_type": "pt"}
        frames.append(pipe(image=_image(), prompt="the sea at dusk", **call).frames)
        counts.append(len(tiles))
        dbsp_xdit.detach(pipe)
    hook.remove()
    return torch.equal(*frames), counts[0], counts[1]


def run_gated(rank: int, world: int, folder: str, by_hand: bool, config: dict[str, Any]) -> list[tuple[float, float]]:
    """By batch: how far from one process with gates put in by hand, and how far that is from the mask alone.

    folder: of a checkpoint;  by_hand: whether its transformer is given its gates, which it else has in its checkpoint
    """
    from xfuser.model_executor.models.transformers.transformer_wan import xFuserWanTransformer3DWrapper

    import dbsp_xdit

    stock = make_tiny_transformer("wan")
    wrapped = xFuserWanTransformer3DWrapper.from_pretrained(folder, attention_kwargs={"thw": None})
    stock, wrapped = put_gates(stock), put_gates(wrapped) if by_hand else wrapped
    before, found = fingerprint(wrapped), []
    dbsp_xdit.attach(SimpleNamespace(transformer=wrapped), {"mask": VSA} | config)
    for batch in (1, 2):
        inputs = tiny_inputs("wan", batch=batch)
        alone = {coarse: _pass_alone(stock, inputs, VSA | {"coarse": coarse}) for coarse in (True, False)}
        with torch.no_grad():
            out = wrapped(**inputs)[0]
        found.append((difference(out, alone[True]), difference(alone[True], alone[False])))
    dbsp_xdit.detach(SimpleNamespace(transformer=wrapped))
    assert fingerprint(wrapped) == before, "detach left something behind"
    return found


def _pass_alone(transformer: Any, inputs: dict[str, Any], mask: dict[str, Any]) -> torch.Tensor:
    single = attach_single_process(transformer, {"mask": mask})
    with torch.no_grad():
        out: torch.Tensor = transformer(**inputs)[0]
    single.detach()
    return out
