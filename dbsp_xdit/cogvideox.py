"""db-SP in xfuser's CogVideoX transformer, whose pipeline shards the video itself, by strips of rows.

Gathered by rank, its sequence is [text 0, strip 0 of all frames, text 1, strip 1 of all frames, …] where the ranks
divide the text's tokens, and [text, strip 0, text, strip 1, …] where they don't: then every rank has all of the text.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from dbsp_core.comm.groups import SequenceGroup
from dbsp_core.layout.sequence_layout import SequenceLayout
from dbsp_core.masks.video import Video
from dbsp_core.runtime.session.session import AttentionSession
from dbsp_core.utils.errors import UserError
from dbsp_diffusers.models import architecture_of
from dbsp_diffusers.patching import PatchSet, signature_of
from dbsp_diffusers.sharding.intercept import intercept_attention
from dbsp_diffusers.sharding.step_caches import refuse_step_caches

__all__ = ["attach_strips", "gather_latents", "strips_layout"]


def attach_strips(transformer: Any, session: AttentionSession, patches: PatchSet) -> None:
    """Intercepts the self-attention of an xFuserCogVideoXTransformer3DWrapper.

    Raises UserError for a configuration that asks for another layout than the host's.
    """
    if session.config.layout not in (None, "contiguous"):
        raise UserError(
            f"layout: {session.config.layout} is not for xFuserCogVideoXPipeline, which shards by strips of rows "
            "itself; leave it out, or attach to diffusers' CogVideoXPipeline instead"
        )
    _explain_heights(session.group.size, patches)
    _StripSharding(transformer, session).attach(patches)


def _explain_heights(world: int, patches: PatchSet) -> None:
    """xfuser refuses heights that are not whole rows of tokens on each rank; this says what to do about it."""
    from xfuser.core.distributed import get_runtime_state

    state = get_runtime_state()
    check = state.set_video_input_parameters

    @functools.wraps(check)
    def check_height(height: int | None = None, *args: Any, **others: Any) -> None:
        strip = world * state.vae_scale_factor_spatial * state.backbone_patch_size
        if height is not None and height % strip:
            raise UserError(
                f"height {height} is not a multiple of {strip}, which xFuserCogVideoXPipeline needs on {world} ranks; "
                "change it, or attach db-SP to diffusers' CogVideoXPipeline, which takes any multiple of 16"
            )
        check(height, *args, **others)

    patches.set_attribute(state, "set_video_input_parameters", check_height)


def gather_latents(sequence: SequenceGroup) -> Callable[[torch.Tensor], torch.Tensor]:
    """Gathers the strips of latents [B, F, C, h, W] to [B, F, C, H, W]. Collective."""
    return lambda strip: torch.cat(sequence.all_gather(strip), dim=-2)


def strips_layout(thw: tuple[int, int, int], text_tokens: int, world: int) -> SequenceLayout:
    """Text in equal shards, the last one padded; video in strips of rows, each with all frames, one per rank."""
    t, h, w = thw
    video = np.arange(t * h * w).reshape(t, world, h // world, w).transpose(1, 0, 2, 3).reshape(-1)
    return SequenceLayout.from_streams([np.arange(text_tokens), text_tokens + video], world)


class _StripSharding:
    """The hooks on one transformer."""

    def __init__(self, transformer: Any, session: AttentionSession) -> None:
        self._transformer = transformer
        self._session = session
        self._text_tokens = 0  # in the whole sequence
        self._text_held = 0  # on this rank

    def attach(self, patches: PatchSet) -> None:
        patches.hook(self._transformer.register_forward_pre_hook, self._begin, with_kwargs=True)
        for layer, block in enumerate(self._transformer.transformer_blocks):
            patches.set_attribute(block.attn1, "processor", _StockProcessor())
            intercept_attention(block.attn1, functools.partial(self._attend, layer), patches)

    @torch.compiler.disable
    def _begin(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        from xfuser.core.distributed import get_runtime_state

        refuse_step_caches(module, module.transformer_blocks)
        world = self._session.group.size
        inputs = signature_of(module).bind(*args, **kwargs).arguments
        sample = inputs["hidden_states"]
        held = architecture_of(module.module).sequence(module, inputs)
        (t, h, w), self._text_held = held.video
        split = getattr(get_runtime_state(), "split_text_embed_in_sp", False)
        thw, self._text_tokens = (t, h * world, w), self._text_held * (world if split else 1)
        self._session.begin(
            Video(thw, self._text_tokens),
            timestep=inputs.get("timestep"),
            device=sample.device,
            streams=lambda: strips_layout(thw, self._text_tokens, world),
        )

    def _attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
        """Attends to q, k, v of [B, H, text held + strip, D]; ranks that hold all text get it equal."""
        if self._text_held == self._text_tokens and self._session.group.size > 1:
            out = self._session.attend(layer, *(self._with_text_share(x) for x in (q, k, v)), **options)
            return self._with_all_text(out)
        return self._session.attend(layer, q, k, v, **options)

    @property
    def _share(self) -> int:
        """Text tokens that each rank treats as its own, the last rank's padded."""
        return -(-self._text_tokens // self._session.group.size)

    def _with_text_share(self, x: torch.Tensor) -> torch.Tensor:
        """[B, H, text + strip, D] → [B, H, share + strip, D]."""
        first = self._session.group.rank * self._share
        text = x[:, :, : self._text_tokens][:, :, first : first + self._share]
        text = F.pad(text, (0, 0, 0, self._share - text.shape[2]))
        return torch.cat([text, x[:, :, self._text_tokens :]], dim=2)

    def _with_all_text(self, x: torch.Tensor) -> torch.Tensor:
        """Inverts `_with_text_share`. Collective."""
        text = torch.cat(self._session.group.all_gather(x[:, :, : self._share]), dim=2)
        return torch.cat([text[:, :, : self._text_tokens], x[:, :, self._share :]], dim=2)


class _StockProcessor:
    """diffusers' own processor, with the arguments that xfuser's attention wrapper passes."""

    def __init__(self) -> None:
        from diffusers.models.attention_processor import CogVideoXAttnProcessor2_0

        self._stock = CogVideoXAttnProcessor2_0()

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        image_rotary_emb: tuple[torch.Tensor, ...] | None = None,
        **_: Any,  # of other models' wrappers
    ) -> Any:
        return self._stock(attn, hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb)
