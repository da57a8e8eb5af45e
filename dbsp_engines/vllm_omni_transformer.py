"""A transformer of vLLM-Omni whose self-attention is DBSP's: what a forward pass is over, and its session."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from vllm_omni.diffusion.attention.backends.abstract import AttentionMetadata, VideoTokenLayout
from vllm_omni.diffusion.forward_context import get_forward_context

from dbsp_core.runtime.engine_session import QKV, EngineLayout, EngineSession
from dbsp_core.utils.errors import UserError
from dbsp_diffusers.models import architecture_of
from dbsp_diffusers.patching import signature_of

__all__ = ["DbspTransformer"]

_JOINT = {"Flux2Transformer2DModel", "QwenImageTransformer2DModel", "HunyuanVideo15Transformer3DModel"}
"""Classes whose text every rank has whole. They take diffusers' arguments, and diffusers' entries read them."""


class DbspTransformer:
    """One transformer: told of each forward pass by a hook, of each layer's attention by `DbspImpl`."""

    def __init__(self, module: torch.nn.Module, session: EngineSession) -> None:
        self._session = session
        self._joint = not _JOINT.isdisjoint(cls.__name__ for cls in type(module).__mro__)
        self._begun = False
        module.register_forward_pre_hook(self._pass, with_kwargs=True)

    @torch.compiler.disable
    def _pass(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        self._begun = self._joint
        if self._joint:
            architecture, inputs = architecture_of(module), signature_of(module).bind(*args, **kwargs).arguments
            tokens = architecture.sequence(module, inputs)
            tokens.require_grid(self._session.session.config.mask)
            layout = EngineLayout(tokens.thw, text=tokens.text, text_last=architecture.text == "last")
            self._begin(layout, inputs["hidden_states"].device, tokens.timestep)
        cache = vars(module).get("_context_manager")  # cache-dit's
        if cache is not None and "can_cache" not in vars(cache):
            cache.can_cache = self._poll(cache.can_cache)

    def _poll(self, can_cache: Callable[..., bool]) -> Callable[..., bool]:
        """Around cache-dit's decision, which looks at one rank's tokens: layers are skipped where all ranks would."""

        @torch.compiler.disable
        def all_can(states: torch.Tensor, *args: Any, **options: Any) -> bool:
            return self._session.all_agree(can_cache(states, *args, **options))

        return all_can

    def attend(self, layer: int, qkv: QKV, metadata: AttentionMetadata | None, scale: float) -> torch.Tensor:
        """Attention of q, k and v [B, this rank's tokens, H, D]; see `DbspImpl.forward`."""
        if not self._begun:
            self._begin(_published(metadata, qkv[0].shape[1]), qkv[0].device)
            self._begun = True
        text: QKV | None = None
        if metadata is not None and metadata.joint_query is not None:
            text = metadata.joint_query, metadata.joint_key, metadata.joint_value
        elif self._joint:  # one rank, which has it in its sequence
            qkv, text = self._session.without_text(qkv)
        return self._session.attend(layer, *qkv, scale=scale, text=text)

    def _begin(self, layout: EngineLayout, device: torch.device, timestep: Any = None) -> None:
        self._session.begin(layout, device, get_forward_context().denoise_step_idx, timestep=timestep)


def _published(metadata: AttentionMetadata | None, shard: int) -> EngineLayout:
    """What a model says of its sequence: [prefix | video | padding]; of several, only the target is video here."""
    layout = (metadata and metadata.video_layout) or VideoTokenLayout()
    targets = [span for span in layout.video_spans if span.role == "target"]
    first = targets[-1].start if targets else layout.prefix_len or 0
    thw = targets[-1].latent_grid if targets else layout.latent_grid
    if thw is None:
        raise UserError(
            "this model publishes no grid of video tokens (video_layout), which masks need; DBSP serves vLLM-Omni's "
            "Wan, MiniMax-H3, HunyuanVideo-1.5, Qwen-Image and Flux.2; use another attention backend for others"
        )
    end = first + math.prod(thw)
    return EngineLayout(tuple(thw), first, (layout.used_len or end) - end, shard)
