"""Wan, and what is built like it: VACE, Animate, SkyReels V2, ChronoEdit, AnyFlow."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from dbsp_core.utils.errors import UserError
from dbsp_diffusers.models.architecture import Architecture
from dbsp_diffusers.models.cuts import OUTPUT, Cut, Cuts
from dbsp_diffusers.models.token_sequence import Inputs, TokenSequence, refuse_arguments, sample_grid, timestep_of

__all__ = ["ARCHITECTURES"]


def _wan(transformer: Any, inputs: Inputs) -> TokenSequence:
    refuse_arguments(inputs, "enable_diffusion_forcing")
    return TokenSequence(sample_grid(transformer, inputs), timestep=timestep_of(inputs))


def _vace(transformer: Any, inputs: Inputs) -> TokenSequence:
    control, sample = inputs["control_hidden_states"].shape[2:], inputs["hidden_states"].shape[2:]
    if control != sample:
        raise UserError(
            f"the control video has latents of {tuple(control)} (frames, height, width), the generated one of "
            f"{tuple(sample)}; give both the same size, with a frame for each reference image"
        )
    return _wan(transformer, inputs)


def _anyflow(transformer: Any, inputs: Inputs) -> TokenSequence:
    return TokenSequence(sample_grid(transformer, inputs, frames_dim=1), timestep=timestep_of(inputs))


def _causal(transformer: Any) -> str | None:
    causal = getattr(transformer.config, "num_frame_per_block", 1) > 1
    return "its attention has a causal mask of its own (num_frame_per_block)" if causal else None


_ROPE = {"rope": {0: Cut("video", 1), 1: Cut("video", 1)}}
# Video is cut where it is embedded, not at the first block: what wraps the blocks as a whole, as some step caches do,
# then sees only shares.
_EMBEDDED = {0: Cut("video", 2, grid=True)}
_WAN = Architecture(
    attention=("blocks.*.attn1",),
    sequence=_wan,
    cuts=Cuts({"": {"timestep": Cut("video", 1, ndim=2)}}, {"patch_embedding": _EMBEDDED, **_ROPE}, OUTPUT),
    gate_names=("attn1.to_gate_compress", "to_gate_compress"),  # of FastWan2.2; of FastWan2.1, as FastVideo's block
    guidance="calls",
)

ARCHITECTURES = {
    "WanTransformer3DModel": replace(_WAN, pipeline="WanPipeline"),
    "WanVACETransformer3DModel": replace(
        _WAN,
        attention=("vace_blocks.*.attn1", "blocks.*.attn1"),
        sequence=_vace,
        cuts=Cuts(outputs={"patch_embedding": _EMBEDDED, "vace_patch_embedding": _EMBEDDED, **_ROPE}, gathered=OUTPUT),
        pipeline="WanVACEPipeline",
    ),
    "WanAnimateTransformer3DModel": replace(
        _WAN,
        cuts=Cuts(
            # The pose is added to what is embedded, by frame; the face adapter attends by frame, too.
            inputs={"blocks.0": {"hidden_states": Cut("video", 1)}},
            outputs={**_ROPE, "face_adapter.*": {0: Cut("video", 1)}},
            gathered=OUTPUT,
            gathered_inputs={"face_adapter.*": {"hidden_states": Cut("video", 1)}},
        ),
        pipeline="WanAnimatePipeline",
    ),
    "SkyReelsV2Transformer3DModel": replace(_WAN, refused=_causal),
    "ChronoEditTransformer3DModel": replace(_WAN, guidance=None),
    "AnyFlowTransformer3DModel": replace(
        _WAN,
        sequence=_anyflow,
        guidance=None,
        cuts=Cuts(
            outputs={
                "patch_embedding": _EMBEDDED,
                "rope": {0: Cut("video", 2)},
                "condition_embedder": {0: Cut("video", 1), 1: Cut("video", 1)},
            },
            gathered=OUTPUT,
        ),
    ),
}
