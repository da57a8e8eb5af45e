"""Attention of an SGLang transformer with db-SP: its kernel, and the layout of tokens."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch

from dbsp_core.runtime.engine_session import QKV, EngineLayout, EngineSession, generation_of
from dbsp_core.utils.errors import UserError
from dbsp_core.utils.process import not_compiled

INSTEAD = "unset DBSP_CONFIG to run this model without db-SP"
_TEXT_IN_PARTS = {
    "FluxTransformer2DModel",
    "Flux2Transformer2DModel",
    "HunyuanVideoTransformer3DModel",
    "QwenImageTransformer2DModel",
}
"""Transformers that may split the text over ranks without saying how."""


ltx2_step: ContextVar[tuple[Any, tuple[int, int, int]] | None] = ContextVar("ltx2_step", default=None)
"""A request of LTX-2 (missing in the context of its forward passes) and its token grid."""


class DbspTransformer:
    """A transformer's session and current forward pass.

    A pass begins at its first attention, which is never part of a captured graph, so this also works when SGLang
    replays graphs.
    """

    def __init__(self, module: Any, session: EngineSession) -> None:
        self.module, self.session = module, session
        self.runs: tuple[int, ...] = ()
        self._moment: tuple[Any, ...] | None = None
        self._layer = -1

    def attend(
        self,
        layer: int,
        qkv: QKV,
        scale: float,
        layout_of: Callable[[Any, tuple[int, int, int], int], EngineLayout],
        text: QKV | None = None,
        gate: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Computes attention of [B, this rank's tokens, H, D].

        `layout_of` returns the layout from the request, its grid of video tokens and the number of ranks.
        """
        from sglang.multimodal_gen.runtime.managers.forward_context import get_forward_context

        context, now = get_forward_context(), ltx2_step.get()
        request = context.forward_batch if now is None else now[0]
        # 1. CFG pass; LTX-2 does not name its passes, so the session counts them
        negative = None if now is not None else getattr(request, "is_cfg_negative", None)
        branch, generation = None if negative is None else int(negative), generation_of(request)
        moment = generation, int(context.current_timestep), branch
        # 2. Layers ascend within a pass; layers skipped by a step cache do not call attention
        if layer <= self._layer or moment != self._moment:
            thw = grid_of(self.module, request) if now is None else now[1]
            timesteps = getattr(request, "timesteps", None)
            self.session.begin(
                layout_of(request, thw, self.session.session.group.size),
                qkv[0].device,
                step=moment[1],
                cfg_branch=branch,
                steps=None if timesteps is None else len(timesteps),
                generation=generation,
            )
        self._moment, self._layer = moment, layer
        return self.session.attend(layer, *qkv, scale=scale, text=text, gate=gate)


@dataclass
class DbspImpl:
    """Kernel of one layer, set by `attach`."""

    scale: float
    transformer: DbspTransformer
    layer: int

    @not_compiled
    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
        """Computes attention of [B, text and this rank's tokens, H, D], eagerly within a breakable CUDA graph."""
        from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph import is_in_breakable_cuda_graph

        if not is_in_breakable_cuda_graph():
            return self._attend(q, k, v, **options)
        text = options.get("q_prefix")
        out = torch.empty_like(q if text is None else torch.cat([text, q], dim=1))
        _eager()(self, q, k, v, out=out, **options)
        return out

    def _attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        attn_mask: torch.Tensor | None = None,
        attn_mask_meta: Any = None,
        num_replicated_prefix: int = 0,
        num_replicated_suffix: int = 0,
        seq_lens: Sequence[int] | None = None,
        q_prefix: torch.Tensor | None = None,
        k_prefix: torch.Tensor | None = None,
        v_prefix: torch.Tensor | None = None,
        gate_compress: torch.Tensor | None = None,
        **others: Any,
    ) -> torch.Tensor:
        # 1. Separate replicated text from this rank's tokens
        sequence: QKV = q, k, v
        text: QKV | None = None
        if q_prefix is not None and k_prefix is not None and v_prefix is not None:
            text = q_prefix, k_prefix, v_prefix
        slots = num_replicated_prefix or num_replicated_suffix
        if slots and text is None:
            sizes = (slots, q.shape[1] - slots)
            parts = [tensor.split(sizes[:: -1 if num_replicated_suffix else 1], dim=1) for tensor in sequence]
            first, last = zip(*parts, strict=True)
            text, sequence = (last, first) if num_replicated_suffix else (first, last)
        # 2. Reject unknown arguments
        unknown = sorted(name for name, value in others.items() if value)
        unknown += ["keys of other tokens than its queries"] if k.shape[1] != q.shape[1] else []
        unknown += ["attn_mask"] if attn_mask is not None and text is None else []
        if unknown:
            raise UserError(
                f"{name_of(self.transformer.module)} calls attention with unsupported {', '.join(unknown)}; {INSTEAD}"
            )
        # 3. Layout, used by a pass's first attention
        meta = attn_mask_meta.resolve(attn_mask) if hasattr(attn_mask_meta, "resolve") else attn_mask_meta or {}
        layout_of = functools.partial(
            layout_of_pass,
            local=sequence[0].shape[1],
            whole=None if text is None else functools.partial(_text_length, text[0], attn_mask, meta),
            last=num_replicated_suffix > 0 or seq_lens is not None,
            lengths=tuple(seq_lens or ()),
            padding=meta.get("pad_end", 0) - meta.get("pad_start", 0) if attn_mask is None else 0,
            in_parts=any(parent.__name__ in _TEXT_IN_PARTS for parent in type(self.transformer.module).__mro__),
        )
        return self.transformer.attend(self.layer, sequence, self.scale, layout_of, text=text, gate=gate_compress)

    @not_compiled
    def forward_varlen(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        max_seqlen: int,
        gate_compress: torch.Tensor | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """Computes attention of MiniMax-H3's packed sequence of `max_seqlen` tokens, [this rank's tokens, H, D]."""

        def layout_of(request: Any, thw: tuple[int, int, int], world: int) -> EngineLayout:
            before = max_seqlen - math.prod(thw)
            return EngineLayout(thw, before=before, shard=q.shape[0], runs=self.transformer.runs)

        gate = None if gate_compress is None else gate_compress.unsqueeze(0)
        qkv = q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0)
        return self.transformer.attend(self.layer, qkv, self.scale, layout_of, gate=gate).squeeze(0)


@functools.cache
def _eager() -> Callable[..., None]:
    """Returns a kernel's attention as an eager part of a breakable CUDA graph that writes into `out`."""
    from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph import eager_on_graph

    def attend(kernel: DbspImpl, *qkv: torch.Tensor, out: torch.Tensor, **options: Any) -> None:
        out.copy_(kernel._attend(*qkv, **options))

    return eager_on_graph(attend)


def grid_of(model: Any, request: Any) -> tuple[int, int, int]:
    """Returns the token grid of a request, from latents [B, C, T, H, W] or an image's packed tokens [B, S, C]."""
    shape: Sequence[int] = getattr(request, "raw_latent_shape", None) or ()
    if len(shape) == 5:
        patch = getattr(model, "arch", model).patch_size
        t, h, w = (n // p for n, p in zip(shape[2:], (patch,) * 3 if isinstance(patch, int) else patch, strict=True))
        return t, h, w
    for pixels in (8, 16, 32) if len(shape) == 3 else ():  # pixels per token side
        h, w = int(request.height) // pixels, int(request.width) // pixels
        if h * w == shape[1]:
            return 1, h, w
    raise UserError(
        f"masks need the grid of video tokens, which this request of {name_of(model)} does not provide; {INSTEAD}"
    )


def _text_length(text: torch.Tensor, mask: torch.Tensor | None, meta: dict[str, Any]) -> int:
    """Returns the number of text tokens [B, slots, H, D] that a mask of text and image keeps."""
    slots = text.shape[1]
    if mask is None:
        return slots
    batch, kept = len(mask), meta["indices"].shape[0] if "indices" in meta else int(mask.sum())
    if batch > 1 and not (mask == mask[:1]).all():
        raise UserError(
            "a batch has prompts of several lengths, which db-SP does not support; send one prompt at once"
        )
    return kept // batch - (mask.shape[1] - slots)


def layout_of_pass(
    request: Any,
    thw: tuple[int, int, int],
    world: int,
    *,
    local: int,
    whole: Callable[[], int] | None,
    last: bool,
    lengths: tuple[int, ...],
    padding: int,
    in_parts: bool,
) -> EngineLayout:
    """Returns the layout of a pass in which each rank has a run of tokens or frames, and text.

    Args:
        local: Slots of this rank, without replicated text.
        whole: Returns the tokens of replicated text; None: there is none.
        last: True if text follows the video.
        lengths: Slots of all ranks, if they differ; text is then split over ranks.
        padding: Padding slots of split text on the last rank.
        in_parts: True if the transformer may split text over ranks.
    """
    # 1. Ranks have equal numbers of tokens, or of frames
    tokens = math.prod(thw)
    even, frames = -(-tokens // world), -(-thw[0] // world) * (tokens // thw[0])
    shard = even if thw[0] == 1 or local == even else frames
    if world > 1 and local == tokens:
        raise UserError("SGLang gave every rank the whole video; remove --enable-sequence-shard false")
    # 2. The other tokens are shares of the text
    shares = tuple(slots - shard for slots in lengths or ((local,) * world if local != shard else ()))
    if padding and shares:
        shares = (*shares[:-1], shares[-1] - padding)
    is_cut = getattr(request, "did_sp_shard_latents", False)
    is_edit = not lengths and getattr(request, "image_latent", None) is not None
    has_parts = in_parts and whole is None and world > 1 and is_cut and not is_edit
    is_cut_in_space = thw[0] == 1 and is_cut and len(request.raw_latent_shape) == 5
    if (shares and not has_parts) or is_cut_in_space or min(shares, default=0) < 0:
        raise UserError(
            f"SGLang gave one of {world} ranks {local} tokens, of {tokens} video tokens {thw} and text; db-SP doesn't "
            f"know how it shards this request; {INSTEAD}"
        )
    text = sum(shares) if whole is None else whole()
    return EngineLayout(thw, shard=shard, text=text, text_last=last, text_shares=shares)


def name_of(thing: Any) -> str:
    return f"{type(thing).__module__.partition('.')[0]}'s {type(thing).__name__}"
